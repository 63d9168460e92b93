# SPDX-License-Identifier: Apache-2.0
"""What happens between a hook's return and the completion of its future: one ordered thread.

It does not refer to the state, so that a state which is dropped without close() can be collected and stops its thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from p4reduce.ddp.ledger import Item, Ledger, Outcome

Future = torch.futures.Future[torch.Tensor]
WaitForMean = Callable[[], Outcome]
"""Blocks until the bucket's buffer holds the mean; raises why it never will."""


@dataclass(frozen=True, slots=True)
class Started:
    """The reduction of one bucket, under way."""

    wait: WaitForMean
    context: Callable[[], AbstractContextManager[Any]] | None = None
    """Around waiting and completion; see `p4reduce.ddp.staging.Device.context`."""


def poison(buffer: torch.Tensor) -> None:
    """Fill a gradient buffer with NaN; with zero where there is none. A sparse one keeps its pattern."""
    values = buffer._values() if buffer.is_sparse else buffer
    if values.is_floating_point() or values.is_complex():
        values.fill_(float("nan"))
    else:
        values.zero_()


class Endings:
    """Notes how buckets end, from whatever thread, and sees to it that nobody trains on what was not reduced."""

    def __init__(self, ledger: Ledger, on_step: Callable[[int], None] | None = None) -> None:
        """`on_step` gets the number of each backward pass once its last bucket is complete."""
        self._ledger = ledger
        self._on_step = on_step

    def note(self, item: Item, outcome: Outcome | None, error: Exception | None) -> None:
        """Before the bucket's future is completed."""
        if error is not None:
            self._ledger.fail(error, item.step)
            poison(item.buffer)
        self._ledger.completed(item, outcome)

    def give_up(self, item: Item, error: Exception) -> None:
        """Of a bucket that cannot even be filled with NaN."""
        self._ledger.fail(error, item.step)

    def tell(self, item: Item) -> None:
        """When nothing waits for this thread any more."""
        if item.last and self._on_step is not None:
            self._on_step(item.step)


class OrderedCompleter:
    """Completes the futures of buckets in the order in which they were submitted, from one thread.

    backward() waits for the buckets in that order anyway, so nothing is lost. Callbacks on the reductions themselves
    would run in several threads in no fixed order.
    """

    def __init__(self, endings: Endings) -> None:
        self._queue: SimpleQueue[tuple[Item, Started, Future] | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_complete_all, args=(self._queue, endings), name="p4reduce-ddp", daemon=True
        )
        self._thread.start()

    def put(self, item: Item, reduction: Started, future: Future) -> None:
        """Complete `future` after everything put before it."""
        self._queue.put((item, reduction, future))

    def stop(self, timeout: float = 10.0) -> None:
        """Finish what is queued and end the thread. Waits `timeout` seconds at most. May be called again."""
        self._queue.put(None)
        self._thread.join(timeout)


def _complete_all(queue: SimpleQueue[tuple[Item, Started, Future] | None], endings: Endings) -> None:
    while (entry := queue.get()) is not None:
        item, reduction, future = entry
        try:
            with contextlib.nullcontext() if reduction.context is None else reduction.context():
                _complete(item, reduction, future, endings)
        except Exception as error:  # a device that takes no orders any more; backward() must not hang on the future
            endings.give_up(item, error)
            if not future.done():
                future.set_exception(error)  # type: ignore[arg-type]  # torch annotates it with the type of results
        endings.tell(item)
        # A reference kept until the next bucket comes would hold this one's memory.
        del entry, item, reduction, future


def _complete(item: Item, reduction: Started, future: Future, endings: Endings) -> None:
    outcome, trouble = None, None
    try:
        outcome = reduction.wait()
    except Exception as error:  # whatever it is, backward() must not hang on this future
        trouble = error
    endings.note(item, outcome, trouble)
    future.set_result(item.buffer)
