# SPDX-License-Identifier: Apache-2.0
"""Rings between threads of one process, for `p4reduce.local` and for tests."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from p4reduce.errors import RingError, UsageError
from p4reduce.ring.base import Ring, RingIntegers, RingLevels

_Values = npt.NDArray[Any]


def local_rings(size: int, deadline: float = 60.0) -> list[Ring]:
    """Rings of `size` ranks in this process, rank 0 first. `deadline`: seconds that a call waits for the others."""
    if size < 1:
        raise UsageError(f"a ring has at least one rank, not {size}")
    if not deadline > 0.0:
        raise UsageError(f"the deadline must be positive, not {deadline}")
    meeting = _Meeting(size, deadline)
    return [LocalRing(rank, size, meeting) for rank in range(size)]


class LocalRing:
    """One rank's end. It is a Ring."""

    device = "cpu"

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.size = size
        self._meeting = meeting

    def max(self, values: RingLevels) -> None:
        """See Ring."""
        self._meeting.combine(self.rank, np.maximum, values)

    def sum(self, values: RingIntegers) -> None:
        """See Ring."""
        self._meeting.combine(self.rank, np.add, values)

    def close(self) -> None:
        """See Ring. Ranks that wait for this one, and those that call later, get a RingError that names it."""
        self._meeting.leave(self.rank)


class _Meeting:
    """Where the ranks' arrays come together. The last to come combines them; the others wait for it."""

    def __init__(self, size: int, deadline: float) -> None:
        self._size = size
        self._deadline = deadline
        self._changed = threading.Condition()
        self._brought: dict[int, tuple[np.ufunc, _Values]] = {}
        self._meetings = 0
        # Of the last meeting. All have fetched it before the next is complete, because each must come to that first.
        self._result: _Values = np.zeros(0)
        self._error: str | None = None
        self._left: set[int] = set()

    def combine(self, rank: int, operation: np.ufunc, values: _Values) -> None:
        with self._changed:
            if rank in self._brought:
                raise UsageError(f"rank {rank} is in a call already: a ring is for one thread at a time")
            self._require(rank)
            number = self._meetings
            self._brought[rank] = (operation, values)
            if len(self._brought) == self._size:
                self._complete()
            elif self._left:
                self._break(f"rank {_names(self._left)} has closed its ring")
            else:
                self._wait(number)
            if self._meetings == number:
                self._brought.pop(rank, None)
                raise RingError(str(self._error))
            np.copyto(values, self._result)

    def leave(self, rank: int) -> None:
        with self._changed:
            self._left.add(rank)
            if self._brought:
                self._break(f"rank {_names(self._left)} has closed its ring")

    def _require(self, rank: int) -> None:
        if rank in self._left:
            raise RingError(f"rank {rank} has closed this ring")
        if self._error is not None:
            raise RingError(self._error)

    def _wait(self, number: int) -> None:
        end = time.monotonic() + self._deadline
        while self._meetings == number and self._error is None:
            left = end - time.monotonic()
            if left <= 0.0:
                missing = set(range(self._size)) - set(self._brought)
                self._break(f"rank {_names(missing)} did not come within {self._deadline:g} s")
            self._changed.wait(max(left, 0.0))

    def _complete(self) -> None:
        (operation, first), *rest = (self._brought[rank] for rank in range(self._size))
        if any((one, values.dtype, values.shape) != (operation, first.dtype, first.shape) for one, values in rest):
            calls = [f"{one.__name__} of {values.dtype}{values.shape}" for one, values in self._brought.values()]
            self._break(f"the ranks make different calls: {', '.join(sorted(set(calls)))}")
            return
        total = first.copy()
        for _, values in rest:
            operation(total, values, out=total)
        self._result = total
        self._brought.clear()
        self._meetings += 1
        self._changed.notify_all()

    def _break(self, error: str) -> None:
        self._error = self._error or error
        self._changed.notify_all()


def _names(ranks: set[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks))
