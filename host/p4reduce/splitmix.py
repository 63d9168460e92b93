# SPDX-License-Identifier: Apache-2.0
"""SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators), as a function of a counter.

Its n-th output is a function of seed and n alone, so any part of a stream is found without the rest.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

GAMMA: Final = 0x9E3779B97F4A7C15
"""What the state grows by from one output to the next."""
STEPS: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Shift and factor of the output function's first two steps."""
LAST_SHIFT: Final = 31


def splitmix64(seed: int, count: int) -> Words:
    """First `count` outputs."""
    with np.errstate(over="ignore"):
        z: Words = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GAMMA)
    return mix(z)


def mix(z: Words) -> Words:
    """SplitMix64's output function: a bijection of 64-bit integers that spreads every bit."""
    with np.errstate(over="ignore"):
        for shift, factor in STEPS:
            z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
        z ^= z >> np.uint64(LAST_SHIFT)
    return z


def mix_into(z: Words, scratch: Words) -> None:
    """mix() in place, without new memory; `scratch` is of the same shape."""
    for shift, factor in STEPS:
        np.right_shift(z, np.uint64(shift), out=scratch)
        np.bitwise_xor(z, scratch, out=z)
        np.multiply(z, np.uint64(factor), out=z)
    np.right_shift(z, np.uint64(LAST_SHIFT), out=scratch)
    np.bitwise_xor(z, scratch, out=z)


def mix_number(z: int) -> int:
    """mix() of one number."""
    mask = (1 << 64) - 1
    for shift, factor in STEPS:
        z = ((z ^ (z >> shift)) * factor) & mask
    return z ^ (z >> LAST_SHIFT)
