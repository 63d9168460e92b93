# SPDX-License-Identifier: Apache-2.0
"""Ways to get the mean gradient of n workers, all in one process.

The lanes are those of p4reduce itself: the same functions make the same integers, which are added as the switch and
the ring add them, lane by lane. So the results are, bit for bit, those of a real job; tests/unit/test_accuracy.py
compares them with cores on the compiled switch program.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from p4reduce.core.bucket import Rounding
from p4reduce.quantize import BLOCKS, LaneFormat, block_exponents, dequantize, quantize
from p4reduce.rounding import Stochastic

Vector = npt.NDArray[np.float32]


class Reducer(Protocol):
    """Keeps what a run needs from step to step."""

    def mean(self, gradients: list[Vector], step: int) -> Vector:
        """What every worker gets."""


class Float32:
    """float32 sums in the order of a ring: part c of the vector starts at worker c and goes round. What gloo gives."""

    def mean(self, gradients: list[Vector], step: int) -> Vector:  # noqa: ARG002
        n = len(gradients)
        out = np.empty_like(gradients[0])
        for part, where in enumerate(np.array_split(np.arange(len(out)), n)):
            total = gradients[part][where].copy()
            for other in range(1, n):
                total += gradients[(part + other) % n][where]
            out[where] = total
        return out / np.float32(n)


class Lanes:
    """Lanes of `bits` bits, with or without error feedback (what a worker did not send it adds to its next gradient).

    `fixed`: one scale for everything, that of the largest exponent in the first step; what does not fit later is
    clipped. The protocol does not need it, it is here to show what agreeing on exponents is good for.
    """

    def __init__(
        self,
        bits: int,
        workers: int,
        *,
        rounding: Rounding = "nearest",
        feedback: bool = False,
        fixed: bool = False,
        seed: int = 0,
    ) -> None:
        self.fmt = LaneFormat(bits, workers, BLOCKS[bits])
        self.fmt.require_usable()
        self.rounding = rounding
        self.feedback = feedback
        self.fixed = fixed
        self.seed = seed
        self._residuals: list[Vector] = []
        self._level: int | None = None

    def bucket_seed(self, step: int) -> int:
        """Seed of a step's one bucket."""
        return (self.seed << 32) + step

    def mean(self, gradients: list[Vector], step: int) -> Vector:
        sent = gradients
        if self.feedback:
            if self._residuals:
                sent = [g + r for g, r in zip(gradients, self._residuals, strict=True)]
            self._residuals = [np.empty_like(g) for g in gradients]
        agreed = np.max([block_exponents(g, self.fmt.block) for g in sent], axis=0)
        if self.fixed:
            self._level = int(agreed.max()) if self._level is None else self._level
            agreed[:] = self._level
            reach = np.float32(self.fmt.bias * 2.0 ** (self._level - 126 - self.fmt.precision))
            sent = [np.clip(g, -reach, reach) for g in sent]
        total = np.zeros(len(sent[0]), dtype=self.fmt.lane_type)
        lanes = np.empty_like(total)
        for rank, g in enumerate(sent):
            stream = Stochastic(self.bucket_seed(step), rank) if self.rounding == "stochastic" else None
            left = self._residuals[rank] if self.feedback else None
            quantize(g, agreed, self.fmt, lanes, stream=stream, residual=left)
            total += lanes
        out = np.empty_like(sent[0])
        dequantize(total, agreed, self.fmt, out, mean=True)
        return out


class FixedFactor:
    """The scheme with one constant for a whole training: q = rint(factor * x) in 32 bits, sums that wrap.

    Below the band that works everything is rounded to zero, above it the sums overflow.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def mean(self, gradients: list[Vector], step: int) -> Vector:  # noqa: ARG002
        total = np.zeros(len(gradients[0]), dtype=np.int32)
        with np.errstate(over="ignore"):
            for g in gradients:
                total += np.clip(np.rint(g * np.float64(self.factor)), -(2**31), 2**31 - 1).astype(np.int32)
        return (total / (self.factor * len(gradients))).astype(np.float32)
