# SPDX-License-Identifier: Apache-2.0
"""What a caller asks the core to do: reduce a vector, or wait for everybody."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from p4reduce.core.states import Phase, Step, after
from p4reduce.errors import UsageError
from p4reduce.integers import integer_format
from p4reduce.quantize import BLOCKS, LaneFormat
from p4reduce.rounding import SEEDS, Stochastic

Rounding = Literal["nearest", "stochastic"]
ROUNDINGS: Final = ("nearest", "stochastic")


@dataclass(eq=False, slots=True)
class Bucket:
    """What is reduced at once. All ranks submit the same buckets in the same order.

    `number` is the place in that order; the core sets it on submission. It does not wrap; only the tag's copy does.
    """

    number: int = field(default=-1, init=False)
    phase: Phase = field(default=Phase.NEW, init=False)

    def step(self, step: Step) -> None:
        """Move on; for the core alone. KeyError when the table of states knows no such transition."""
        self.phase = after(self.phase, step)

    @property
    def size(self) -> int:
        """Elements."""
        return 0

    def lane_format(self, default: LaneFormat) -> LaneFormat:
        """How its numbers stand in their lanes, in a job with this default."""
        return default

    def blocks(self, fmt: LaneFormat) -> int:  # noqa: ARG002
        """Exponents that the ranks agree upon before the sum; `fmt` is its format."""
        return 0

    def stream(self, rank: int) -> Stochastic | None:  # noqa: ARG002
        """This rank's random numbers, when it rounds with such."""
        return None

    def describe(self) -> str:
        """A few words for messages."""
        return f"bucket {self.number}"


@dataclass(eq=False, slots=True)
class Barrier(Bucket):
    """Completes when every rank has submitted it. It does not wait for the data of earlier buckets."""

    def describe(self) -> str:
        """A few words for messages."""
        return f"bucket {self.number} (barrier)"


@dataclass(eq=False, slots=True)
class Reduction(Bucket):
    """The sum or mean of `data` over all ranks, written to `out`.

    Both are float32 vectors, contiguous, of one length; `out` may be `data` itself. From submission to completion
    they belong to the core, which writes `out` piece by piece: after a failure its contents are undefined.

    `lane_bits`: 8, 16, 32 or 64; None for what the job has. `block`: elements that share an exponent; None for what
    goes with the lanes. `rounding`: "nearest", or "stochastic" with a `seed` of 64 bits that should be another one for
    every bucket (p4reduce.rounding). `residual`: a float32 vector that gets what this rank did not send of its data,
    data - sent, 0 where that is not finite; it belongs to the core as `out` does. `dtype`: what the caller's numbers
    were, for all ranks to compare. All but `residual` must be the same on all ranks.

    Raises UsageError for other dtypes, shapes and layouts, and when arrays overlap that must not.
    """

    data: npt.NDArray[np.float32]
    out: npt.NDArray[np.float32]
    mean: bool = False
    lane_bits: int | None = None
    block: int | None = None
    rounding: Rounding = "nearest"
    seed: int = 0
    residual: npt.NDArray[np.float32] | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        _check_pair(self.data, self.out, np.dtype(np.float32))
        if self.lane_bits is not None and self.lane_bits not in BLOCKS:
            raise UsageError(f"lanes have 8, 16, 32 or 64 bits, not {self.lane_bits}")
        if self.block is not None and self.block < 1:
            raise UsageError(f"a block has at least one element, not {self.block}")
        if self.rounding not in ROUNDINGS:
            raise UsageError(f"rounding is one of {', '.join(ROUNDINGS)}, not {self.rounding!r}")
        if not 0 <= self.seed < SEEDS:
            raise UsageError(f"a seed is a number of 64 bits, 0 or more, not {self.seed}")
        if self.residual is not None:
            _check_vector(self.residual, "residual", np.dtype(np.float32))
            if self.residual.shape != self.data.shape:
                raise UsageError(f"data has {self.data.size} elements, residual has {self.residual.size}")
            if not self.residual.flags.writeable:
                raise UsageError("residual is read-only")
            if any(np.may_share_memory(self.residual, array) for array in (self.data, self.out)):
                raise UsageError("residual overlaps with data or out: it needs memory of its own")

    @property
    def size(self) -> int:
        """Elements."""
        return self.data.size

    def lane_format(self, default: LaneFormat) -> LaneFormat:
        """How its numbers stand in their lanes, in a job with this default."""
        bits = self.lane_bits or default.lane_bits
        block = self.block or (default.block if bits == default.lane_bits else BLOCKS[bits])
        if (bits, block) == (default.lane_bits, default.block):
            return default
        return LaneFormat(bits, default.workers, block)

    def blocks(self, fmt: LaneFormat) -> int:
        """Exponents that the ranks agree upon before the sum; `fmt` is its format."""
        return fmt.blocks(self.data.size)

    def stream(self, rank: int) -> Stochastic | None:
        """This rank's random numbers, when it rounds with such."""
        return Stochastic(self.seed, rank) if self.rounding == "stochastic" else None

    def describe(self) -> str:
        """A few words for messages."""
        return f"bucket {self.number} ({'mean' if self.mean else 'sum'} of {self.data.size} {self.dtype})"


@dataclass(eq=False, slots=True)
class IntegerReduction(Bucket):
    """The exact sum of int32 `data` over all ranks, written to `out`, which may be `data` itself.

    Contiguous vectors of one length; they belong to the core from submission to completion. A sum that int32 cannot
    hold completes the bucket with an `error` on all ranks alike, and `out` is not touched. Raises UsageError for
    other dtypes, shapes and layouts, and when the two overlap in part.
    """

    data: npt.NDArray[np.int32]
    out: npt.NDArray[np.int32]
    error: UsageError | None = field(default=None, init=False)
    """Why there is no result though the bucket is complete."""

    def __post_init__(self) -> None:
        _check_pair(self.data, self.out, np.dtype(np.int32))

    @property
    def size(self) -> int:
        """Elements."""
        return self.data.size

    def lane_format(self, default: LaneFormat) -> LaneFormat:
        """How its numbers stand in their lanes, in a job with this default."""
        return integer_format(default.workers)

    def describe(self) -> str:
        """A few words for messages."""
        return f"bucket {self.number} (sum of {self.data.size} int32)"


def _check_pair(data: npt.NDArray[Any], out: npt.NDArray[Any], dtype: np.dtype[Any]) -> None:
    _check_vector(data, "data", dtype)
    _check_vector(out, "out", dtype)
    if data.shape != out.shape:
        raise UsageError(f"data has {data.size} elements, out has {out.size}")
    if not out.flags.writeable:
        raise UsageError("out is read-only")
    if data.ctypes.data != out.ctypes.data and np.may_share_memory(data, out):
        raise UsageError("data and out overlap in part; they may be the same memory or none in common")


def _check_vector(array: npt.NDArray[Any], name: str, dtype: np.dtype[Any]) -> None:
    if array.dtype != dtype or array.ndim != 1 or not array.flags.c_contiguous:
        raise UsageError(f"{name} must be a contiguous {dtype} vector, not {array.dtype} of shape {array.shape}")
