# SPDX-License-Identifier: Apache-2.0
"""The host path against a reflector: quantize, packetize, send, receive, check, dequantize; no switch in between.

The reflector is a process of its own that sends every contribution back as the result of a job of one worker: payload
and check are right as they are. So the worker's own cost is what is measured, from float32 array to float32 array.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from p4reduce import constants, wire
from p4reduce.core.batch import PayloadRows, ReceiveBatch, SendBatch
from p4reduce.core.bucket import Reduction
from p4reduce.core.config import CoreConfig
from p4reduce.core.worker import WorkerCore
from p4reduce.driver import Driver
from p4reduce.errors import P4ReduceError, UsageError
from p4reduce.reports import Trouble, Verdict
from p4reduce.transport.base import BATCH_FRAMES
from p4reduce.transport.udp import UdpTransport
from p4reduce.wire import Kind

LOOPBACK = "127.0.0.1"
OR_SLOTS, ADD_SLOTS = 7, 53
"""What the controller hands out by default: 60 frames in flight behind a switch port."""
TARGET_GBITS = 2.5


def _reflect(pipe: Connection, profile_name: str) -> None:
    """The reflector's process. Ends when the other end of `pipe` closes."""
    import select

    profile = wire.profile(profile_name)
    transport = UdpTransport(LOOPBACK, None, profile)
    pipe.send(transport.local)
    transport.set_endpoint(pipe.recv())
    received, sent = ReceiveBatch(profile, BATCH_FRAMES), SendBatch(BATCH_FRAMES)
    rows = np.arange(BATCH_FRAMES)
    poll = select.poll()
    poll.register(transport.fileno(), select.POLLIN)
    poll.register(pipe.fileno(), select.POLLIN | select.POLLHUP)
    while pipe.fileno() not in dict(poll.poll()):
        while transport.receive(received):
            count = received.count
            sent.clear()
            sent.headers[:count] = received.headers[:count]
            sent.headers["kind"][:count] = Kind.RESULT
            sent.headers["count_or_reason"][:count] = 1
            sizes = received.sizes[:count] - constants.HEADER_BYTES
            sent.groups.append(PayloadRows(0, count, received.payload, rows[:count], sizes))
            sent.count = count
            transport.send(sent)
    transport.close()


def _no_trouble(report: Trouble) -> Verdict:
    return Verdict(report if isinstance(report, P4ReduceError) else UsageError(f"stalled: {report}"))


class Rig:
    """A reflector and a driver that reduces against it. A context manager."""

    def __init__(self, profile_name: str) -> None:
        self._profile = wire.profile(profile_name)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_reflect, args=(theirs, profile_name), daemon=True)
        self._process.start()
        theirs.close()
        endpoint = self._pipe.recv()
        self.transport = UdpTransport(LOOPBACK, endpoint, self._profile)
        self._pipe.send(self.transport.local)
        config = CoreConfig("bench", 1, 0, 1, self._profile, OR_SLOTS, ADD_SLOTS)
        self.core = WorkerCore(config, time.monotonic())
        self.driver = Driver(self.core, self.transport, _no_trouble)
        self.driver.start()

    def reduce(self, data: np.ndarray, out: np.ndarray) -> None:
        """Reduce once and wait."""
        self.driver.submit(Reduction(data, out, mean=True), lambda: None).future.result(120)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.stop(UsageError("the bench is over"))
        self.transport.close()
        self._pipe.close()
        self._process.join(5)


def run(profile_name: str = "w34", mebibytes: int = 64, runs: int = 5) -> dict[str, Any]:
    """Median of several reductions. Gb/s are payload: 32 bits for every element handed in."""
    count = mebibytes * (1 << 20) // 4
    rng = np.random.default_rng(1)
    data = (rng.standard_normal(count) * 0.01).astype(np.float32)
    out = np.empty_like(data)
    gigabits = count * 32 / 1e9
    walls, processors = [], []
    with Rig(profile_name) as rig:
        rig.reduce(data, out)  # touches memory, learns the round-trip time
        if not np.allclose(out, data, rtol=1e-6, atol=1e-9):
            raise P4ReduceError("the reflected sum is wrong")
        before = dict(vars_of(rig.driver.timings))
        for _ in range(runs):
            started, cpu = time.perf_counter(), rig.driver.cpu_seconds()
            rig.reduce(data, out)
            walls.append(time.perf_counter() - started)
            processors.append(rig.driver.cpu_seconds() - cpu)
        spent = {name: value - before[name] for name, value in vars_of(rig.driver.timings).items()}
        counters = rig.core.counters
        resent, frames = counters.retransmissions, counters.frames_sent
    wall, processor = statistics.median(walls), statistics.median(processors)
    return {
        "profile": profile_name,
        "mebibytes": mebibytes,
        "runs": runs,
        "gbits_per_second": gigabits / wall,
        "gbits_per_cpu_second": gigabits / processor,
        "cpu_seconds_per_gbit": processor / gigabits,
        "nanoseconds_per_element": processor / count * 1e9,
        "share": {name: value / sum(walls) for name, value in spent.items()},
        "frames_sent": frames,
        "retransmissions": resent,
        "target_gbits_per_second": TARGET_GBITS,
    }


def vars_of(timings: Any) -> dict[str, float]:
    """The four times of a driver."""
    return {name: float(getattr(timings, name)) for name in ("encode", "wire", "wait", "decode")}
