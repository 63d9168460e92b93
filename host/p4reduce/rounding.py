# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding: up with a probability that is the distance from below, so that the expected value is exact.

A number y becomes floor(y) or floor(y) + 1, the latter where u < y - floor(y) for a random u in [0, 1). So whole
numbers stay what they are, nothing is off by a whole quantum, and on average nothing is off at all, whatever the
sign: errors of many workers, elements and steps cancel, where rounding to nearest turns every small number into zero.

u has 24 bits and is a function of seed, rank and element index alone (a counter-based generator): the same on both
paths, in whatever pieces, in every run. Element i of rank r takes bits 8..31 (i even) or 40..63 (i odd) of

    mix(key + (i div 2 + 1) * GAMMA),    key = mix(mix(seed) + r + 1),    modulo 2^64,

SplitMix64's stream with that key as its seed. Since u is a multiple of 2^-24, the chance of going up is the distance
rounded up to such a multiple; for numbers in (-1, 0) the distance itself is rounded to float32. So the expected value
is off by at most 2^-24 + 2^-25 quanta.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from p4reduce import constants
from p4reduce.errors import UsageError
from p4reduce.splitmix import GAMMA, Words, mix_into, mix_number

Float32Array = npt.NDArray[np.float32]

SEEDS = 1 << 64
_MASK = SEEDS - 1
_UNIT = np.float32(2.0**-24)
_DROPPED = np.uint32(8)


@dataclass(frozen=True, slots=True)
class Stochastic:
    """One rank's stream of random numbers for one bucket.

    `seed`: 64 bits, the same on all ranks of a bucket and another one for every bucket: with the same seed an element
    is rounded the same way again and again, and the errors do not cancel. UsageError outside 0 .. 2^64 - 1.
    """

    seed: int
    rank: int
    key: int = field(init=False, repr=False)
    """Seed of the generator."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < SEEDS:
            raise UsageError(f"a seed is a number of 64 bits, 0 or more, not {self.seed}")
        if not 0 <= self.rank < constants.MAX_WORKERS:
            raise UsageError(f"rank {self.rank} is not one of 0..{constants.MAX_WORKERS - 1}")
        object.__setattr__(self, "key", mix_number((mix_number(self.seed) + self.rank + 1) & _MASK))


class Dice:
    """Draws from streams with kept scratch memory. One thread."""

    def __init__(self, largest: int) -> None:
        """`largest`: most numbers to come in one call."""
        words = largest // 2 + 1
        self._steps: Words = np.arange(words, dtype=np.uint64) * np.uint64(GAMMA)
        self._words: Words = np.empty(words, dtype=np.uint64)
        self._scratch: Words = np.empty(words, dtype=np.uint64)

    def draw(self, stream: Stochastic, start: int, out: Float32Array) -> None:
        """Write u of the elements `start` .. `start` + len(out) - 1 into `out`."""
        first = start // 2
        count = (start + len(out) + 1) // 2 - first
        words = self._words[:count]
        np.add(self._steps[:count], np.uint64((stream.key + (first + 1) * GAMMA) & _MASK), out=words)
        mix_into(words, self._scratch[:count])
        halves = words.view(np.uint32)[start - 2 * first :][: len(out)]
        np.right_shift(halves, _DROPPED, out=halves)
        # As signed integers: their conversion is one instruction, and 24 bits have no sign.
        np.copyto(out, halves.view(np.int32), casting="unsafe")
        np.multiply(out, _UNIT, out=out)
