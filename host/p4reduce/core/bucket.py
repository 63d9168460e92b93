# SPDX-License-Identifier: Apache-2.0
"""What a caller asks the core to do: reduce a vector, or wait for everybody."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from p4reduce.core.states import Phase, Step, after
from p4reduce.errors import UsageError


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
    they belong to the core, which writes `out` piece by piece: after a failure its contents are undefined. Raises
    UsageError for other dtypes, shapes and layouts, and when the two overlap in part.
    """

    data: npt.NDArray[np.float32]
    out: npt.NDArray[np.float32]
    mean: bool = False

    def __post_init__(self) -> None:
        for name, array in (("data", self.data), ("out", self.out)):
            if array.dtype != np.float32 or array.ndim != 1 or not array.flags.c_contiguous:
                raise UsageError(
                    f"{name} must be a contiguous float32 vector, not {array.dtype} of shape {array.shape}"
                )
        if self.data.shape != self.out.shape:
            raise UsageError(f"data has {self.data.size} elements, out has {self.out.size}")
        if not self.out.flags.writeable:
            raise UsageError("out is read-only")
        same = self.data.ctypes.data == self.out.ctypes.data
        if not same and np.may_share_memory(self.data, self.out):
            raise UsageError("data and out overlap in part; they may be the same memory or none in common")

    def describe(self) -> str:
        """A few words for messages."""
        return f"bucket {self.number} ({'mean' if self.mean else 'sum'} of {self.data.size} float32)"
