# SPDX-License-Identifier: Apache-2.0
"""What one state counts, and the first error it met."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from p4reduce.ddp.trace import Trace

PathName = Literal["switch", "ring", "plain"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the reduction of a bucket ended."""

    path: PathName
    """Integers added by the switch, integers added over torch.distributed, or torch.distributed as it is."""
    blocks_not_finite: int = 0
    """Blocks that came back as NaN because some rank had a NaN or an infinity in them."""
    overflows: int = 0
    """Elements whose mean is beyond the range of the bucket's dtype, and became infinite in it."""


@dataclass(slots=True)
class Item:
    """One bucket on its way."""

    buffer: torch.Tensor
    step: int
    index: int
    last: bool
    """It is the last bucket of its backward pass."""
    size: int
    """Bytes of gradients."""
    started: float
    """When the hook was called, in seconds of time.perf_counter()."""
    submitted: float
    """When it returned."""
    lane_bits: int = 0
    """0 where there are no lanes."""


class Ledger:
    """Written by the hook and by the completing thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.error: Exception | None = None
        self.error_step = -1
        """Backward pass (0, 1, ...) in which the error's bucket was submitted."""
        self.trace: Trace | None = None
        self.step = 0
        self._step_ended = False
        self.buckets: dict[PathName, int] = {"switch": 0, "ring": 0, "plain": 0}
        self.bytes: dict[PathName, int] = {"switch": 0, "ring": 0, "plain": 0}
        self.elements = 0
        """Of buckets whose integers were summed, on either path."""
        self.failed = 0
        self.blocks_not_finite = 0
        self.overflows = 0
        self.submit_seconds = 0.0
        self.reduce_seconds = 0.0
        self.wait_seconds = 0.0

    def begin(self, last: bool) -> int:
        """Count one hook call. Returns the number of the backward pass it belongs to."""
        if self._step_ended:
            self.step += 1
        self._step_ended = last
        return self.step

    @property
    def steps(self) -> int:
        """Backward passes whose last bucket was submitted."""
        return self.step + self._step_ended

    @steps.setter
    def steps(self, value: int) -> None:
        self.step, self._step_ended = value, False

    def fail(self, error: Exception, step: int) -> None:
        """Keep the first error. Later ones are its consequences."""
        with self._lock:
            if self.error is None:
                self.error, self.error_step = error, step

    def completed(self, item: Item, outcome: Outcome | None) -> None:
        """Count a bucket, and the time it took; without an outcome it has failed.

        With the last one of a pass nothing is left to overlap, so it is waiting.
        """
        now = time.perf_counter()
        with self._lock:
            self.reduce_seconds += now - item.submitted
            if item.last:
                self.wait_seconds += now - item.submitted
            if outcome is None:
                self.failed += 1
            else:
                self.buckets[outcome.path] += 1
                self.bytes[outcome.path] += item.size
                self.elements += item.buffer.numel() if outcome.path != "plain" else 0
                self.blocks_not_finite += outcome.blocks_not_finite
                self.overflows += outcome.overflows
        if self.trace is not None:
            self.trace.bucket(
                *(item.started, item.submitted, now),
                step=item.step,
                index=item.index,
                elements=item.buffer.numel(),
                bytes=item.size,
                lane_bits=item.lane_bits,
                path="failed" if outcome is None else outcome.path,
            )

    def check(self) -> None:
        """Raise the first error, if there is one: same type, same object."""
        if self.error is not None:
            raise self.error
