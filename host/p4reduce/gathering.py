# SPDX-License-Identifier: Apache-2.0
"""How long the I/O thread lets results gather before it takes them off the socket: interrupt moderation in user space.

What a batch costs hardly depends on its size: waking up, and some hundred array operations on a few numbers each. A
thread that wakes for every result spends most of its time on that, and takes it from the switch where both share a
machine, from the training everywhere. So while a window is under way the thread pauses for a part of the time that
a window takes: short enough that the slots freed meanwhile do not run dry, and never when a bucket's last chunks, its
exponents or a barrier are all that is outstanding. docs/performance.md has what that is worth.
"""

from __future__ import annotations

SHARE = 1 / 8
"""Of the time that a window of results takes. Longer pauses gather more and keep slots waiting."""
LONGEST_SECONDS = 0.002
MOST_SHARE_FREE = 2
"""Pause only while at least one slot in so many is outstanding: with fewer the window is not what limits."""
_FORGET_SECONDS = 0.1
"""A rate that was measured longer ago says nothing."""
_WEIGHT = 0.25
"""Of the latest interval in the estimate."""


class Gathering:
    """The pause before the next batch, from the rate at which results have come. Does no waiting itself."""

    def __init__(self) -> None:
        self._results = 0
        self._since: float | None = None
        self._per_result = 0.0
        """Seconds from one result to the next, smoothed; 0 while not known."""

    def pause(self, outstanding: int, window: int, results: int, now: float) -> float:
        """Seconds to pause now; 0 for not at all.

        `outstanding` chunks of a stream of `window` slots have no result yet, `results` have come since the epoch
        began. To be called whenever the thread has waited for the socket.
        """
        since, self._since = self._since, now
        came, self._results = results - self._results, results
        if since is None or now - since > _FORGET_SECONDS or came < 0:
            self._per_result = 0.0
            return 0.0
        if came:
            sample = (now - since) / came
            known = self._per_result
            self._per_result = sample if known == 0.0 else known + _WEIGHT * (sample - known)
        if outstanding * MOST_SHARE_FREE < window:
            return 0.0
        return min(SHARE * window * self._per_result, LONGEST_SECONDS)
