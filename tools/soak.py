#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run jobs on the embedded switch for a long time, over faulty links, and look for wrong sums and for leaks.

Usage: soak.py [--seconds N] [--members N] [--loss P] [--duplicate P] [--reorder P] [--seed N]

Everything is in this process: switch, controller, members. The time is cut into cycles. In each, a long job of all
members and short ones of some reduce arrays of random sizes side by side; jobs join and leave, and now and then a
member goes without a word. Every sum is compared with the exact one, bit by bit. After each cycle, when nothing runs,
no pool, slot or table entry may be left, and memory, threads and descriptors are counted: after a warm-up they must
not grow. Progress goes to stderr; the last line on stdout is JSON; the exit status is 1 when anything was wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from p4reduce import Communicator
from p4reduce.config import Settings
from p4reduce.errors import JobError
from p4reduce.session import join
from p4reduce.sim.byhand import direct
from p4reduce.transport.faults import FaultRates, FaultyTransport
from p4reduce.wire import PROFILES
from p4reduce_bmv2.embedded.switch import EmbeddedSwitch
from p4reduce_controller.hosts import Hosts
from p4reduce_controller.server import ControllerServer

WAIT_SECONDS = 60.0
WARM_UP = 0.3
"""Part of the cycles after which memory must be flat."""
MORE_THREADS = 8
"""gRPC and thread pools keep threads for later: as many as were ever busy at once."""
_MIB = 1 << 20
# malloc.h
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


@dataclass(frozen=True, slots=True)
class Options:
    """What a soak is told. `growth_mib`: how much more memory may be in use in the last cycles than after warm-up."""

    seconds: float = 60.0
    members: int = 4
    profile: str = "w34"
    rates: FaultRates = field(default_factory=lambda: FaultRates(0.005, 0.005, 0.02))
    seed: int = 0
    largest: int = 200_000
    growth_mib: float = 24.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What is in use when nothing runs."""

    resident: int
    """Bytes."""
    threads: int
    descriptors: int


class Soak:
    """One run. The lanes are threads that share nothing but the counts."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.samples: list[Sample] = []
        """One after each cycle."""
        self._lock = threading.Lock()
        self._started = time.monotonic()

    def run(self) -> dict[str, Any]:
        """Run to the end and report."""
        options = self.options
        cycle = min(20.0, max(1.5, options.seconds / 12))
        ports = dict.fromkeys(range(1, options.members + 1), "127.0.0.1")
        with EmbeddedSwitch(udp_ports=ports, seed=options.seed) as switch:
            hosts = Hosts.embedded(switch.grpc_address, switch.endpoints, profile=options.profile)
            with ControllerServer(hosts) as controller:
                before = _entries(switch)
                while not self.samples or time.monotonic() - self._started < options.seconds:
                    self._cycle(controller.address, cycle)
                    self._look_for_leaks(switch, controller, before)
                report = self._report(switch)
        self._judge(report)
        return report

    def _cycle(self, address: str, seconds: float) -> None:
        number = len(self.samples)
        lanes = [
            threading.Thread(target=self._lane, args=(address, lane, number, seconds), name=f"lane-{lane}")
            for lane in range(2)
        ]
        for thread in lanes:
            thread.start()
        for thread in lanes:
            thread.join()

    def _look_for_leaks(self, switch: EmbeddedSwitch, controller: ControllerServer, before: dict[str, int]) -> None:
        pools = _until_equal(lambda: sum(bool(view.job) for view in controller._coordinator.pools()), 0)
        if pools:
            self._problem(f"{pools} pools are leased to nobody")
        entries = _until_equal(lambda: _entries(switch), before)
        if entries != before:
            self._problem(f"entries are left: {_difference(entries, before)}")
        gc.collect()
        _give_back_memory()
        self.samples.append(Sample(_resident(), threading.active_count(), len(os.listdir("/proc/self/fd"))))
        seconds, resident = time.monotonic() - self._started, self.samples[-1].resident / _MIB
        done = f"{self.counts['buckets']:,} buckets, {self.counts['jobs']} jobs"
        print(f"{seconds:.0f} s: {done}, {resident:.0f} MiB, {len(self.problems)} problems", file=sys.stderr)

    def _lane(self, address: str, lane: int, cycle: int, seconds: float) -> None:
        """Jobs one after another until the time is over. Lane 0: a single one, of all members."""
        draw = random.Random(f"{self.options.seed}/{lane}/{cycle}")
        end, number = time.monotonic() + seconds, 0
        try:
            while number == 0 or time.monotonic() < end:
                size = self.options.members if lane == 0 else draw.randrange(1, self.options.members + 1)
                lasts = seconds if lane == 0 else draw.uniform(0.1, 3.0)
                self._job(address, f"{cycle}-{lane}-{number}", size, min(end, time.monotonic() + lasts), draw)
                number += 1
        except Exception as error:  # a lane must not end in silence
            self._problem(f"lane {lane}: {type(error).__name__}: {error}")

    def _job(self, address: str, name: str, size: int, end: float, draw: random.Random) -> None:
        seeds = [draw.getrandbits(32) for _ in range(size)]

        def member(rank: int) -> Communicator:
            settings = Settings(controller=address, job=name, rank=rank, world_size=size)
            return join(settings, lambda transport: FaultyTransport(transport, self.options.rates, seeds[rank]))

        with ThreadPoolExecutor(size) as pool:
            members = list(pool.map(member, range(size)))
            try:
                rng = np.random.default_rng(draw.getrandbits(32))
                while True:
                    self._reduce(members, draw, rng)
                    if time.monotonic() >= end:
                        break
                if size > 1 and draw.random() < 0.3:
                    self._desert(members)
                self._count(members)
            finally:
                list(pool.map(lambda one: one.close(), members))

    def _reduce(self, members: list[Communicator], draw: random.Random, rng: np.random.Generator) -> None:
        """A few buckets in flight together, then compared."""
        pending = []
        for _ in range(draw.randrange(1, 5)):
            count = int(2 ** draw.uniform(0.0, np.log2(self.options.largest)))
            data = [rng.standard_normal(count, dtype=np.float32) * np.float32(10.0 ** draw.randrange(-20, 20))]
            data += [rng.standard_normal(count, dtype=np.float32) for _ in members[1:]]
            mean = draw.random() < 0.5
            op: Any = "mean" if mean else "sum"
            pending.append((data, mean, [m.allreduce_async(x, op) for m, x in zip(members, data, strict=True)]))
        for data, mean, futures in pending:
            expected = direct(data, mean=mean).tobytes()
            wrong = [rank for rank, f in enumerate(futures) if f.result(WAIT_SECONDS).tobytes() != expected]
            if wrong:
                self._problem(f"wrong sum of {len(data[0])} elements at ranks {wrong}")
            with self._lock:
                self.counts["buckets"] += 1
                self.counts["elements"] += len(data[0])
                self.counts["wrong"] += len(wrong)

    def _desert(self, members: list[Communicator]) -> None:
        """The last member goes; the others' buckets must end with an error that says so."""
        futures = [member.allreduce_async(np.ones(100, np.float32)) for member in members[:-1]]
        members[-1].close(0.0)
        for future in futures:
            error = future.exception(WAIT_SECONDS)
            if not isinstance(error, JobError):
                self._problem(f"a member left and the others got {error!r}")
        with self._lock:
            self.counts["deserted"] += 1

    def _count(self, members: list[Communicator]) -> None:
        stats = [member.stats() for member in members]
        with self._lock:
            self.counts["jobs"] += 1
            for one in stats:
                self.counts["frames"] += one["core"]["frames_sent"]
                self.counts["retransmissions"] += one["core"]["retransmissions"]
                for fault, times in one["faults"].items():
                    self.counts[fault] += times

    def _problem(self, text: str) -> None:
        with self._lock:
            self.problems.append(text)
        print(text, file=sys.stderr)

    def _report(self, switch: EmbeddedSwitch) -> dict[str, Any]:
        names = (
            "buckets",
            "elements",
            "jobs",
            "deserted",
            "frames",
            "retransmissions",
            "lost",
            "duplicated",
            "reordered",
        )
        warm = self.samples[int(WARM_UP * len(self.samples)) :]
        third = max(1, len(warm) // 3)
        early = statistics.median(sample.resident for sample in warm[:third])
        late = statistics.median(sample.resident for sample in warm[-third:])
        return {
            "seconds": round(time.monotonic() - self._started, 1),
            "cycles": len(self.samples),
            **{name: self.counts[name] for name in (*names, "wrong")},
            "engine_errors": switch.stats()["drops"].get("engine_error", 0),
            "resident_mib": [round(early / _MIB, 1), round(late / _MIB, 1)],
            "growth_mib": round((late - early) / _MIB, 1),
            "threads": [warm[0].threads, warm[-1].threads],
            "descriptors": [warm[0].descriptors, warm[-1].descriptors],
        }

    def _judge(self, report: dict[str, Any]) -> None:
        if report["engine_errors"]:
            self.problems.append(f"the engine failed on {report['engine_errors']} frames")
        if report["growth_mib"] > self.options.growth_mib:
            self.problems.append(f"memory grew by {report['growth_mib']} MiB")
        for name, more in (("threads", MORE_THREADS), ("descriptors", 4)):
            if report[name][1] > report[name][0] + more:
                self.problems.append(f"{name} grew from {report[name][0]} to {report[name][1]}")
        rates = self.options.rates
        for rate, name in ((rates.loss, "lost"), (rates.duplicate, "duplicated"), (rates.reorder, "reordered")):
            if rate and not report[name]:
                self.problems.append(f"no frame was {name}: nothing has been tested")
        report["problems"] = self.problems[:20]


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _steady_memory() -> None:
    """Have the C library allocate from one arena and map large blocks by themselves (mallopt(3)).

    With an arena for every thread, and blocks of random sizes, what lies between the blocks in use grows for a long
    time and hides what leaks.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, 128 << 10)


def _give_back_memory() -> None:
    """Ask the C library to return what it keeps for later, so that only what is in use is counted."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _entries(switch: EmbeddedSwitch) -> dict[str, int]:
    """Entries by table, and multicast groups. Read where they are, not by P4Runtime: the controller is primary."""
    plane = switch._data_plane
    engine = plane._engine if plane is not None else None
    if plane is None or engine is None:
        return {}
    with plane.lock:
        # Row 0 is the controller's mark above all epochs granted, which stays.
        found = {
            name: sum(1 for entry in table.entries() if not (name.endswith(".epochs") and entry.params == (0,)))
            for name, table in engine.tables.items()
        }
        return found | {"multicast groups": len(engine.multicast_groups)}


def _until_equal(look: Callable[[], Any], wanted: Any, seconds: float = 10.0) -> Any:
    """What is seen once it is as wanted, or at the end of the time: leaving goes on in the background."""
    end, pause = time.monotonic() + seconds, threading.Event()
    while (found := look()) != wanted and time.monotonic() < end:
        pause.wait(0.05)
    return found


def _difference(found: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in found.items() if count != before.get(name, 0)}


def _parser() -> argparse.ArgumentParser:
    defaults = Options()
    parser = argparse.ArgumentParser(description="Jobs on the embedded switch for a long time; every sum checked.")
    parser.add_argument("--seconds", type=float, default=defaults.seconds, help="default: %(default)s")
    parser.add_argument("--members", type=int, default=defaults.members, metavar="N", help="default: %(default)s")
    parser.add_argument("--profile", choices=sorted(PROFILES), default=defaults.profile, help="default: %(default)s")
    for name in ("loss", "duplicate", "reorder"):
        default = getattr(defaults.rates, name)
        parser.add_argument(
            f"--{name}", type=float, default=default, help="per frame, both ways (default: %(default)s)"
        )
    parser.add_argument("--seed", type=int, default=defaults.seed, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--growth-mib", type=float, default=defaults.growth_mib, metavar="N", help="allowed (default: %(default)s)"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run a soak. Returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.seconds <= 0 or not 1 <= options.members <= 16:
        parser.error("--seconds must be above 0, --members from 1 to 16")
    _steady_memory()
    rates = FaultRates(options.loss, options.duplicate, options.reorder)
    chosen = Options(
        options.seconds, options.members, options.profile, rates, options.seed, growth_mib=options.growth_mib
    )
    report = Soak(chosen).run()
    print(json.dumps(report))
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
