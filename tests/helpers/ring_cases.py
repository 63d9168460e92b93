# SPDX-License-Identifier: Apache-2.0
"""Data for the ring path, what the switch makes of them, and ranks in threads. Without torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

import p4reduce
from p4reduce.core.bucket import Reduction
from p4reduce.core.kept import Kept
from p4reduce.errors import P4ReduceError
from p4reduce.quantize import LaneFormat
from p4reduce.ring import Ring, RingRunner

Vector = npt.NDArray[np.float32]
Case = tuple[int, bool, bool]
"""Elements, whether the blocks are wild, whether the mean is wanted."""

SIZES = (0, 1, 255, 256, 257, 100_000)
CASES: list[Case] = [(size, wild, mean) for size in SIZES for wild in (False, True) for mean in (False, True)]
LIMIT = 30.0
"""Seconds that a test waits for what takes a moment."""


def data(rank: int, size: int, wild: bool) -> Vector:
    """One rank's vector. Wild: every block has a scale of its own, from the smallest to the largest numbers.

    Some of its blocks hold a NaN or an infinity on one rank alone, opposite infinities, sums that overflow, zeros of
    both signs.
    """
    x = np.random.default_rng([size, rank]).standard_normal(size, dtype=np.float32)
    if not wild:
        return x
    scales = np.random.default_rng(size).integers(-149, 125, -(-size // 256)).astype(np.int32)
    x = np.ldexp(x, np.repeat(scales, 256)[:size])
    blocks = [x[start : start + 256] for start in range(0, size, 256)]
    if rank == 1 and size > 1:
        blocks[-1][0] = np.nan
    if len(blocks) > 10:
        blocks[1][:] = np.float32(3e38)
        blocks[2][3] = np.inf if rank == 0 else -np.inf
        blocks[3][:] = 0.0 if rank else -0.0
        blocks[4][:] = np.float32(1e-45) * (rank + 1)
        blocks[5][7] = np.inf if rank == 1 else 1.0
        blocks[6][:] = np.float32(3e38) if rank else np.float32(-1e-45)
    return x


def by_switch(world: int) -> list[Vector]:
    """What the switch path makes of all cases; every rank must get the same bits."""
    with p4reduce.local(world_size=world) as members:
        futures = [
            [one.allreduce_async(data(rank, size, wild), op="mean" if mean else "sum") for size, wild, mean in CASES]
            for rank, one in enumerate(members)
        ]
        results = [[future.result(LIMIT) for future in row] for row in futures]
    for row in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(row, results[0], strict=True))
    return results[0]


def same_bits(a: Vector, b: Vector) -> bool:
    """Equal, NaN for NaN and sign for sign."""
    return bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))


def reductions(rank: int) -> list[Reduction]:
    """Buckets of all cases; every other one in place."""
    buckets = []
    for number, (size, wild, mean) in enumerate(CASES):
        x = data(rank, size, wild)
        buckets.append(Reduction(x, x if number % 2 else np.empty_like(x), mean))
    return buckets


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """Results of calls in threads of their own; an exception is the result of one that raised."""

    def attempt(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        futures: list[Future[Any]] = [pool.submit(attempt, call) for call in calls]
        return [future.result(LIMIT) for future in futures]


class Rank:
    """A runner and what it has said."""

    def __init__(self, ring: Ring, fmt: LaneFormat | None = None) -> None:
        self.ring = ring
        self.fmt = fmt or LaneFormat(32, ring.size)
        self.done: list[Kept] = []
        self.errors: list[P4ReduceError] = []
        self.threads: set[str] = set()
        self._said = threading.Condition()
        self.runner = RingRunner(ring, "test", ring.rank, self.fmt, self._on_done, self._on_error)

    def put(self, buckets: Iterable[Any], first: int = 0) -> Rank:
        """Give the runner buckets nobody has seen, numbered from `first`."""
        for number, bucket in enumerate(buckets, first):
            self.runner.put(Kept.fresh(bucket, number, self.fmt, self.ring.rank))
        return self

    def start(self) -> Rank:
        self.runner.start()
        return self

    def wait(self, count: int) -> list[Kept]:
        """Until `count` buckets are done; fails on an error."""
        self._wait(lambda: len(self.done) >= count or bool(self.errors))
        assert self.errors == []
        return self.done

    def wait_for_error(self) -> P4ReduceError:
        """The first error; fails when none comes."""
        self._wait(lambda: bool(self.errors))
        return self.errors[0]

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._said:
            assert self._said.wait_for(condition, LIMIT), f"rank {self.ring.rank} says nothing"

    def _on_done(self, kept: Kept) -> None:
        with self._said:
            self.threads.add(threading.current_thread().name)
            self.done.append(kept)
            self._said.notify_all()

    def _on_error(self, error: P4ReduceError) -> None:
        with self._said:
            self.errors.append(error)
            self._said.notify_all()
