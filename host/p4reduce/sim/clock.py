# SPDX-License-Identifier: Apache-2.0
"""Virtual time: calls happen in the order of their times, equal times in the order of their booking."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class VirtualClock:
    """A queue of future calls. `now` moves only when one of them is made. Times in seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._booked = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Book a call; a time that has passed counts as now."""
        heapq.heappush(self._queue, (max(time, self.now), self._booked, call))
        self._booked += 1

    def step(self) -> bool:
        """Make the next call. False when none is booked."""
        if not self._queue:
            return False
        self.now, _, call = heapq.heappop(self._queue)
        call()
        return True

    @property
    def next_time(self) -> float | None:
        """Time of the next call, None when none is booked."""
        return self._queue[0][0] if self._queue else None
