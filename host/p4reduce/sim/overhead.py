# SPDX-License-Identifier: Apache-2.0
"""Measures what the core itself costs per frame: headers, slots, timers; not the passes over the elements.

A job of one worker needs no switch: its results are its contributions, with another kind and a count. They are made
outside the measured time.

    python -c "from p4reduce.sim.overhead import measure; print(measure())"
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np

from p4reduce.core.batch import ReceiveBatch, SendBatch
from p4reduce.core.bucket import Reduction
from p4reduce.core.config import CoreConfig
from p4reduce.core.worker import WorkerCore
from p4reduce.packetize import BucketCodec
from p4reduce.quantize import block_exponents
from p4reduce.wire import Kind
from p4reduce.wire import profile as lookup_profile


class Overhead(NamedTuple):
    """Microseconds of CPU time per frame, each frame sent and received once."""

    frames: int
    transmit: float
    """In transmit(), without finding exponents and encoding."""
    receive: float
    """In receive(), without verifying and decoding."""
    exponents: float
    encode: float
    verify: float
    decode: float

    @property
    def core(self) -> float:
        """The core's own share, microseconds per frame."""
        return self.transmit + self.receive


class _TimedCodec(BucketCodec):
    """Adds up the seconds spent in every method."""

    seconds: dict[str, float]

    def encode(self, *args: Any, **kwargs: Any) -> None:
        start = time.thread_time()
        super().encode(*args, **kwargs)
        self.seconds["encode"] += time.thread_time() - start

    def verify_and_store(self, *args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        sound = super().verify_and_store(*args, **kwargs)
        self.seconds["verify"] += time.thread_time() - start
        return sound

    def decode(self, *args: Any, **kwargs: Any) -> None:
        start = time.thread_time()
        super().decode(*args, **kwargs)
        self.seconds["decode"] += time.thread_time() - start


def measure(
    profile: str = "w34", *, batch: int = 32, window: int = 64, elements: int = 1 << 22, buckets: int = 3
) -> Overhead:
    """Reduce `buckets` buckets of `elements` float32 in batches of `batch` frames; the first one is not counted."""
    shape = lookup_profile(profile)
    core = WorkerCore(CoreConfig("overhead", 1, 0, 1, shape, or_slots=8, add_slots=window), 0.0)
    seconds = dict.fromkeys(("transmit", "receive", "encode", "verify", "decode"), 0.0)
    codec = _TimedCodec(shape, core._format, elements)
    codec.seconds = seconds
    core._codecs[elements, core._format] = codec
    data = np.random.default_rng(0).standard_normal(elements, dtype=np.float32)
    out = np.empty_like(data)
    frames = 0
    for number in range(buckets):
        if number == 1:
            frames = core.counters.frames_sent
            seconds.update(dict.fromkeys(seconds, 0.0))
        core.submit(Reduction(data, out), 0.0)
        _run(core, ReceiveBatch(shape, window + 8), SendBatch(batch), seconds)
    frames = core.counters.frames_sent - frames
    start = time.thread_time()
    for _ in range(buckets - 1):
        block_exponents(data)
    seconds["exponents"] = time.thread_time() - start
    micro = {name: 1e6 * value / frames for name, value in seconds.items()}
    return Overhead(
        frames,
        micro["transmit"] - micro["exponents"] - micro["encode"],
        micro["receive"] - micro["verify"] - micro["decode"],
        micro["exponents"],
        micro["encode"],
        micro["verify"],
        micro["decode"],
    )


def _run(core: WorkerCore, results: ReceiveBatch, sending: SendBatch, seconds: dict[str, float]) -> None:
    """Reflect frames until the bucket is done, in steps of one batch each way."""
    while core.completed < core.submitted:
        start = time.thread_time()
        core.transmit(sending, 0.0)
        seconds["transmit"] += time.thread_time() - start
        results.clear()
        results.count = sending.count
        results.headers[: sending.count] = sending.headers[: sending.count]
        results.headers["kind"] = Kind.RESULT
        results.headers["count_or_reason"] = 1
        for group in sending.groups:
            results.payload[group.start : group.stop] = group.rows[group.index]
            results.sizes[group.start : group.stop] = group.sizes + 32
        start = time.thread_time()
        core.receive(results, 0.0)
        seconds["receive"] += time.thread_time() - start
