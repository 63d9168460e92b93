# SPDX-License-Identifier: Apache-2.0
"""What happens between a hook's return and the completion of its future: one ordered thread, and one ledger.

Neither refers to the state, so that a state which is dropped without close() can be collected and stops its thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import torch

WaitForMean = Callable[[], None]
"""Blocks until the bucket's buffer holds the mean; raises why it never will."""


@dataclass(frozen=True, slots=True)
class Pending:
    """One bucket on its way."""

    buffer: torch.Tensor
    future: torch.futures.Future[torch.Tensor]
    wait: WaitForMean
    step: int
    last: bool
    """It is the last bucket of its backward pass."""
    submitted: float
    """When the hook returned, in seconds of time.perf_counter()."""


class Ledger:
    """What one state counts, and the first error it met. Written by the hook and by the completing thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.error: Exception | None = None
        self.error_step = -1
        """Backward pass (0, 1, ...) in which the error's bucket was submitted."""
        self.step = 0
        self._step_ended = False
        self.buckets = {"switch": 0, "ring": 0}
        self.bytes = {"switch": 0, "ring": 0}
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

    def submitted(self, path: str, size: int, seconds: float) -> None:
        """Count a bucket of `size` bytes handed to `path`."""
        self.buckets[path] += 1
        self.bytes[path] += size
        self.submit_seconds += seconds

    def fail(self, error: Exception, step: int) -> None:
        """Keep the first error. Later ones are its consequences."""
        with self._lock:
            if self.error is None:
                self.error, self.error_step = error, step

    def completed(self, item: Pending) -> None:
        """Count the time a bucket took. With the last one of a pass nothing is left to overlap, so it is waiting."""
        seconds = time.perf_counter() - item.submitted
        with self._lock:
            self.reduce_seconds += seconds
            if item.last:
                self.wait_seconds += seconds

    def check(self) -> None:
        """Raise the first error, if there is one: same type, same object."""
        if self.error is not None:
            raise self.error


def poison(buffer: torch.Tensor) -> None:
    """Fill a gradient buffer with NaN. A sparse one keeps its pattern."""
    values = buffer._values() if buffer.is_sparse else buffer
    values.fill_(float("nan"))


class OrderedCompleter:
    """Completes the futures of buckets in the order in which they were submitted, from one thread.

    backward() waits for the buckets in that order anyway, so nothing is lost. Callbacks on the reductions themselves
    would run in several threads in no fixed order.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._queue: SimpleQueue[Pending | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_complete_all, args=(self._queue, ledger), name="p4reduce-ddp", daemon=True
        )
        self._thread.start()

    def put(self, item: Pending) -> None:
        """Complete `item` after everything put before it."""
        self._queue.put(item)

    def stop(self, timeout: float = 10.0) -> None:
        """Finish what is queued and end the thread. Waits `timeout` seconds at most. May be called again."""
        self._queue.put(None)
        self._thread.join(timeout)


def _complete_all(queue: SimpleQueue[Pending | None], ledger: Ledger) -> None:
    while (item := queue.get()) is not None:
        try:
            item.wait()
        except Exception as error:  # whatever it is, backward() must not hang on this future
            ledger.fail(error, item.step)
            poison(item.buffer)
        ledger.completed(item)
        item.future.set_result(item.buffer)
        # A reference kept until the next bucket comes would hold this one's memory.
        del item
