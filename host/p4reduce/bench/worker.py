# SPDX-License-Identifier: Apache-2.0
"""What every worker of a bench runs: `python -m p4reduce.bench.worker PLAN`, RANK and WORLD_SIZE in the environment.

It carries out the plan's measurements in order and writes an event, one line of JSON, for the start and the result of
each. The processes start each iteration together through shared memory; the network carries what is measured alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from p4reduce import wire
from p4reduce.bench import forwarding, inputs, links
from p4reduce.bench.figures import Measurement, RankResult
from p4reduce.bench.scalar import FRAME, LANES, ScalarWorker
from p4reduce.bench.shared import Shared
from p4reduce.errors import P4ReduceError, UsageError
from p4reduce.transport.udp import UdpTransport

HEADERS_BYTES = 14 + wire.IP_UDP_BYTES
"""Ethernet, IPv4 and UDP around a frame."""
READY_CELL = 0
PORT_CELLS = 8
"""Cells of the shared page: that the switch knows the workers, and the ports of the pair of `forward`."""
JOIN_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Content of the plan file."""

    measurements: list[Measurement]
    seed: int
    profile: str
    shared: str
    """Path of the shared page."""
    interface: str
    """The worker's link to the switch; empty where all share one host's loopback."""
    endpoints: list[list[Any]]
    """By rank, address and UDP port that frames for p4/scalar.p4 go to."""
    addresses: list[str]
    """By rank, the address a worker's socket binds to."""

    @property
    def paths(self) -> set[str]:
        """All that is measured."""
        return {one.path for one in self.measurements}

    @property
    def scalar(self) -> bool:
        """Whether p4/scalar.p4 is on the switch."""
        return "scalar" in self.paths or ("forward" in self.paths and not self.interface)

    def as_json(self) -> str:
        """For the file."""
        content = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return json.dumps({**content, "measurements": [one.as_dict() for one in self.measurements]})

    @staticmethod
    def from_json(text: str) -> Plan:
        """From the file."""
        content = json.loads(text)
        return Plan(**{**content, "measurements": [Measurement(**one) for one in content["measurements"]]})


def emit(event: str, **content: Any) -> None:
    """Tell the supervisor."""
    sys.stdout.write(json.dumps({"event": event, **content}) + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def limited(name: str, seconds: float) -> Iterator[None]:
    """End this process, and say in which measurement, when the block takes longer. A library in C may hang, too."""

    def over() -> None:
        emit("late", name=name, seconds=seconds)
        os._exit(3)

    timer = threading.Timer(seconds, over)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


Reduce = Callable[[npt.NDArray[Any], npt.NDArray[Any]], None]


class Worker:
    """One rank with what it has open."""

    def __init__(self, plan: Plan, rank: int, workers: int) -> None:
        self._plan, self._rank, self._workers = plan, rank, workers
        self._shared = Shared(Path(plan.shared), rank, workers)
        self._undo = contextlib.ExitStack()
        self._comm: Any = None
        self._gloo: Any = None
        self._scalar: ScalarWorker | None = None
        self._transport: UdpTransport | None = None

    def __enter__(self) -> Worker:
        with limited("joining", 2 * JOIN_SECONDS), contextlib.ExitStack() as undo:
            self._open(undo)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *details: Any) -> None:
        self._undo.__exit__(*details)

    def _open(self, undo: contextlib.ExitStack) -> None:
        paths = self._plan.paths
        if "switch" in paths:
            import p4reduce

            self._comm = undo.enter_context(p4reduce.connect())
        if "gloo" in paths:
            import torch.distributed as dist

            dist.init_process_group("gloo")
            undo.callback(dist.destroy_process_group)
            self._gloo = dist
        if self._plan.scalar:
            self._transport = self._socket(FRAME)
            undo.callback(self._transport.close)
            host, port = self._plan.endpoints[self._rank]
            self._transport.set_endpoint((host, port))
            self._scalar = ScalarWorker(self._transport, self._rank)
            emit("port", port=self._transport.local[1])
            self._shared.wait(READY_CELL, JOIN_SECONDS, "the entries for the baseline scalar")

    def _socket(self, profile: wire.Profile) -> UdpTransport:
        return UdpTransport(self._plan.addresses[self._rank], None, profile)

    def measure(self, wanted: Measurement) -> RankResult:
        """One measurement."""
        if wanted.path == "switch":
            return self._floats(wanted, self._reduce_switch(wanted))
        if wanted.path == "gloo":
            return self._floats(wanted, self._reduce_gloo())
        if wanted.path == "scalar":
            return self._measure_scalar(wanted)
        return self._measure_forward(wanted)

    def _reduce_switch(self, wanted: Measurement) -> Reduce:
        # Rounding is named as well: the environment's settings are not what is measured.
        how = {"lane_bits": wanted.lane_bits, "rounding": "nearest"}

        def reduce(values: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
            self._comm.allreduce(values, out=out, **how)

        return reduce

    def _reduce_gloo(self) -> Reduce:
        import torch

        def reduce(values: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:  # noqa: ARG001 (`out` holds them already)
            self._gloo.all_reduce(torch.from_numpy(out))

        return reduce

    def _floats(self, wanted: Measurement, reduce: Reduce) -> RankResult:
        seed, workers, count, bits = self._plan.seed, self._workers, wanted.count, wanted.lane_bits
        mine = inputs.integers(seed, self._rank, workers, count, bits).astype(np.float32)
        total = inputs.exact_sum(seed, workers, count, bits).astype(np.float32)
        return self._iterate(wanted, reduce, mine, total, np.empty(count, np.float32))

    def _iterate(
        self,
        wanted: Measurement,
        reduce: Reduce,
        mine: npt.NDArray[Any],
        total: npt.NDArray[Any],
        out: npt.NDArray[Any],
    ) -> RankResult:
        """Every other iteration has the signs turned, so that a result of the one before is wrong."""
        signed = ((mine, total), (-mine, -total))
        found = RankResult([], [])
        before = self._counters(wanted.path)
        for number in range(-wanted.warmup, wanted.iterations):
            values, expected = signed[number % 2]
            if wanted.path == "gloo":
                out[...] = values
            else:
                out.fill(-1 if out.dtype.kind == "i" else np.nan)
            start = self._shared.start(wanted.deadline)
            if number == 0:
                before = self._counters(wanted.path)
            reduce(values, out)
            end = time.monotonic_ns()
            if number >= 0:
                found.starts.append(start)
                found.ends.append(end)
            found.wrong += inputs.count_wrong(out, expected)
        # Until all are done: a gloo ring's last segments may still be on their way to others.
        self._shared.start(wanted.deadline)
        self._take(found, before, self._counters(wanted.path))
        return found

    def _counters(self, path: str) -> dict[str, int | None]:
        """Frames, what was sent again, and bytes both ways, as far as they can be known for this path."""
        link = links.read(self._plan.interface) if self._plan.interface else None
        known: dict[str, int | None] = dict.fromkeys(("frames", "again", "sent", "received"))
        if path == "switch":
            core = self._comm.stats()["core"]
            known["frames"], known["again"] = core["frames_sent"], core["retransmissions"]
            known["sent"] = core["bytes_sent"] + HEADERS_BYTES * core["frames_sent"]
        elif path == "scalar" and self._scalar is not None:
            known["frames"], known["again"] = self._scalar.frames, self._scalar.retransmissions
            known["sent"] = self._scalar.frames * (HEADERS_BYTES + FRAME.datagram_bytes)
        if link is not None:
            known["sent"], known["received"] = link.sent_bytes, link.received_bytes
            if path == "gloo":
                known["frames"], known["again"] = link.sent_frames, link.tcp_again
        return known

    @staticmethod
    def _take(found: RankResult, before: dict[str, int | None], after: dict[str, int | None]) -> None:
        def grown(name: str) -> int | None:
            first, last = before[name], after[name]
            return None if first is None or last is None else last - first

        found.frames = grown("frames")
        found.retransmissions = grown("again")
        found.sent_bytes, found.received_bytes = grown("sent"), grown("received")

    def _measure_scalar(self, wanted: Measurement) -> RankResult:
        if wanted.count % LANES:
            raise UsageError(f"the baseline scalar reduces multiples of {LANES} elements, not {wanted.count}")
        scalar = self._scalar
        if scalar is None:
            raise UsageError("the plan has no scalar program")
        seed, workers, count = self._plan.seed, self._workers, wanted.count
        mine = inputs.integers(seed, self._rank, workers, count, 32)
        total = inputs.exact_sum(seed, workers, count, 32).astype(np.int32)

        def reduce(values: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
            scalar.allreduce(values, out, wanted.deadline)

        return self._iterate(wanted, reduce, mine, total, np.empty(count, np.int32))

    def _measure_forward(self, wanted: Measurement) -> RankResult:
        profile = wire.profile(self._plan.profile)
        found = RankResult([], [])
        sent = 0
        best: forwarding.Arrivals | None = None
        with self._forward_socket(profile, wanted.deadline) as transport:
            for number, window in enumerate(forwarding.WINDOWS, 1):
                self._shared.start(wanted.deadline)
                if self._rank == forwarding.SENDER:
                    sent = forwarding.send(transport, profile, self._shared, number, window, sent, wanted.deadline)
                elif self._rank == forwarding.RECEIVER:
                    seen = forwarding.receive(transport, profile, self._shared, number, window)
                    found.wrong += seen.wrong
                    if best is None or np.median(seen.rates) > np.median(best.rates):
                        best = seen
                else:
                    forwarding.stand_by(self._shared, number, wanted.deadline)
            self._shared.start(wanted.deadline)
        if best is not None:
            found.rates = best.rates
        return found

    @contextlib.contextmanager
    def _forward_socket(self, profile: wire.Profile, deadline: float) -> Iterator[UdpTransport]:
        """A socket whose frames reach the other of the pair: straight, or by the switch's UDP ports."""
        if not self._plan.interface:
            if self._transport is None:
                raise UsageError("forwarding between UDP ports needs the scalar program")
            # The switch knows this socket's port; what it carries may be of any size.
            yield self._transport
            return
        with contextlib.closing(self._socket(profile)) as transport:
            if self._rank in (forwarding.SENDER, forwarding.RECEIVER):
                peer = 1 - self._rank
                self._shared.put(PORT_CELLS + self._rank, transport.local[1])
                port = self._shared.wait(PORT_CELLS + peer, deadline, f"the port of rank {peer}")
                transport.set_endpoint((self._plan.addresses[peer], port))
            yield transport


def carry_out(plan: Plan, rank: int, workers: int) -> None:
    """All measurements of the plan."""
    with Worker(plan, rank, workers) as worker:
        emit("joined")
        for number, wanted in enumerate(plan.measurements):
            name = wanted.name(workers)
            emit("begin", number=number)
            with limited(name, wanted.deadline):
                found = worker.measure(wanted)
            emit("result", number=number, found=found.as_dict())


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0; 1 after an error, which is an event as well."""
    words = sys.argv[1:] if arguments is None else arguments
    plan = Plan.from_json(Path(words[0]).read_text())
    try:
        carry_out(plan, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    except P4ReduceError as error:
        emit("failed", error=f"{type(error).__name__}: {error}")
        return 1
    emit("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
