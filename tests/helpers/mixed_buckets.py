# SPDX-License-Identifier: Apache-2.0
"""Buckets of every format, and what their sums must be, without any protocol."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from p4reduce.core.bucket import Barrier, Bucket, IntegerReduction, Reduction
from p4reduce.quantize import LaneFormat, block_exponents, dequantize, quantize

KINDS = ("8", "16", "32", "64", "int32", "overflow", "barrier", "default")
SIZES = (0, 1, 64, 65, 160, 161, 1000, 1280, 3000, 9000)


def make(draw: random.Random, ranks: int, kind: str | None = None, size: int | None = None) -> list[Bucket]:
    """One bucket for every rank."""
    kind = kind or draw.choice(KINDS)
    size = draw.choice(SIZES) if size is None else size
    rng = np.random.default_rng(draw.getrandbits(32))
    inplace = draw.random() < 0.4
    buckets: list[Bucket] = []
    if kind == "barrier":
        return [Barrier() for _ in range(ranks)]
    if kind in ("int32", "overflow"):
        limit = 2**31 // ranks
        for rank in range(ranks):
            x = rng.integers(-limit + 1, limit, size).astype(np.int32)
            if kind == "overflow" and size and ranks > 1:
                x[size // 2] = 2**31 - 1 if rank < 2 else 0
            buckets.append(IntegerReduction(x, x if inplace else np.full_like(x, 7)))
        return buckets
    scale = np.float32(2.0 ** draw.randrange(-20, 20))
    choice: dict[str, Any] = {
        "mean": draw.random() < 0.5,
        "block": draw.choice((None, None, 64, 100)),
        "rounding": draw.choice(("nearest", "stochastic", "stochastic")),
        "seed": draw.getrandbits(64),
    }
    with_residual = draw.random() < 0.6
    poison = size > 70 and draw.random() < 0.2
    for rank in range(ranks):
        data = rng.standard_normal(size, dtype=np.float32) * scale
        if poison and rank == 0:
            data[66] = np.nan
        residual = np.full_like(data, 9.0) if with_residual else None
        bits = None if kind == "default" else int(kind)
        out = data if inplace else np.full_like(data, 7.0)
        buckets.append(Reduction(data, out, lane_bits=bits, residual=residual, **choice))
    return buckets


class Expected:
    """What all ranks must find; made before the buckets are reduced, some of which are in place."""

    def __init__(self, buckets: Sequence[Bucket], default: LaneFormat) -> None:
        self.ranks = list(buckets)
        self.out: npt.NDArray[Any] | None = None
        self.error = False
        self.residuals: list[npt.NDArray[np.float32] | None] = [None] * len(buckets)
        first = buckets[0]
        if isinstance(first, IntegerReduction):
            total = np.zeros(first.size, dtype=np.int64)
            for bucket in buckets:
                assert isinstance(bucket, IntegerReduction)
                total += bucket.data
            self.error = bool(((total > 2**31 - 1) | (total < -(2**31))).any())
            self.out = total.astype(np.int32)
        elif isinstance(first, Reduction):
            self._floats([bucket for bucket in buckets if isinstance(bucket, Reduction)], default)
        self._before = [bucket.out.copy() if isinstance(bucket, IntegerReduction) else None for bucket in buckets]

    def _floats(self, buckets: list[Reduction], default: LaneFormat) -> None:
        first = buckets[0]
        fmt = first.lane_format(default)
        agreed = np.max([block_exponents(one.data, fmt.block) for one in buckets], axis=0)
        total = np.zeros(first.size, dtype=fmt.lane_type)
        for rank, one in enumerate(buckets):
            lanes, left = np.empty_like(total), np.empty_like(one.data)
            quantize(one.data, agreed, fmt, lanes, stream=one.stream(rank), residual=left)
            total += lanes
            self.residuals[rank] = left if one.residual is not None else None
        self.out = np.empty(first.size, dtype=np.float32)
        dequantize(total, agreed, fmt, self.out, first.mean)

    def check(self, rank: int) -> None:
        """See to it that a rank's bucket holds the right bits, residual included."""
        bucket = self.ranks[rank]
        if isinstance(bucket, IntegerReduction):
            before = self._before[rank]
            assert before is not None
            assert (bucket.error is not None) == self.error
            assert np.array_equal(bucket.out, before if self.error else self.out)
        elif isinstance(bucket, Reduction):
            assert self.out is not None
            assert bucket.out.tobytes() == self.out.tobytes(), bucket.describe()
            self.check_residual(rank)

    def check_residual(self, rank: int) -> None:
        """The residual alone, which a rank has as soon as it has sent everything."""
        bucket, left = self.ranks[rank], self.residuals[rank]
        if isinstance(bucket, Reduction) and bucket.residual is not None:
            assert left is not None
            assert bucket.residual.tobytes() == left.tobytes(), f"{bucket.describe()}, rank {rank}: residual"
