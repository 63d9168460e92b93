# SPDX-License-Identifier: Apache-2.0
"""Seeded inputs whose sum is known exactly, without any of the code that is measured.

They are whole numbers so small that every partial sum is exact in float32, in any order, and that quantizing loses
nothing: then the switch path and a float32 ring must both give the integer sum, bit for bit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from p4reduce.errors import UsageError

FLOAT_BITS = 24
"""float32 holds every whole number up to 2 to this power."""
_PIECE = 1 << 20
Integers = npt.NDArray[np.int32]


def largest(lane_bits: int, workers: int) -> int:
    """Largest magnitude of an input. UsageError when the lanes have no room for so many workers.

    A lane takes 0 .. 2^b - 1, a worker's share of that is L = (2^b - 1) // n, and numbers of both signs have half of
    it; docs/design.md, section 5, scales by powers of two, so the bound is the power of two within.
    """
    half = ((1 << lane_bits) - 1) // workers // 2
    lanes = (1 << half.bit_length() - 1) - 1 if half > 0 else 0
    bound = min(lanes, (1 << FLOAT_BITS) // workers - 1)
    if bound < 1:
        raise UsageError(f"lanes of {lane_bits} bits have no room for the sum of {workers} workers")
    return bound


def integers(seed: int, rank: int, workers: int, count: int, lane_bits: int) -> Integers:
    """A rank's input: `count` whole numbers of both signs."""
    bound = largest(lane_bits, workers)
    source = np.random.default_rng([seed, rank, workers, lane_bits])
    return source.integers(-bound, bound, size=count, endpoint=True, dtype=np.int32)


def exact_sum(seed: int, workers: int, count: int, lane_bits: int) -> npt.NDArray[np.int64]:
    """The sum of all ranks' inputs, in 64-bit integers."""
    total = np.zeros(count, dtype=np.int64)
    for rank in range(workers):
        total += integers(seed, rank, workers, count, lane_bits)
    return total


def count_wrong(result: npt.NDArray[np.generic], expected: npt.NDArray[np.generic]) -> int:
    """Elements that differ; a NaN differs from everything."""
    wrong = 0
    for at in range(0, len(expected), _PIECE):
        part = slice(at, at + _PIECE)
        wrong += int(np.count_nonzero(result[part] != expected[part]))
    return wrong
