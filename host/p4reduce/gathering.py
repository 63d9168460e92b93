# SPDX-License-Identifier: Apache-2.0
"""How long the I/O thread lets results gather before it takes them off the socket: interrupt moderation in user space.

What a batch costs hardly depends on its size: waking up, and some hundred array operations on a few numbers each. A
thread that wakes for every result spends most of its time on that, and takes it from the switch where both share a
machine, from the training everywhere. So while a window is under way the thread pauses for a part of the time that
a window takes: short enough that the slots freed meanwhile do not run dry, and never when no further chunk waits for a
slot: for the last window of a bucket, its exponents, or a barrier. docs/performance.md has what that is worth.
"""

from __future__ import annotations

SHARE = 1 / 8
"""Of the time that a window of results takes. Longer pauses gather more and keep slots waiting."""
LONGEST_SECONDS = 0.002
MOST_SHARE_FREE = 2
"""Pause only while at least one slot in so many is outstanding: with fewer the window is not what limits."""
_FORGET_SECONDS = 0.02
"""After so long without a look at the socket nothing is known of the rate."""
_SLOWER, _FASTER = 0.25, 0.5
"""Weight of the latest interval in the estimate. A pause too long costs more than one too short."""


class Gathering:
    """The pause before the next batch, from the rate at which results have come. Does no waiting itself."""

    def __init__(self) -> None:
        self._results = 0
        self._since: float | None = None
        self._per_result = 0.0
        """Seconds from one result to the next, smoothed; 0 while not known."""

    def pause(self, outstanding: int, unsent: int, window: int, results: int, now: float) -> float:
        """Seconds to pause now; 0 for not at all.

        Of a stream of `window` slots `outstanding` chunks have been sent and have no result yet, `unsent` wait for a
        slot; `results` have come since the epoch began. To be called whenever the thread has waited for the socket.
        """
        since, came = self._since, results - self._results
        self._since, self._results = now if outstanding else None, results
        if since is None:  # nothing was on its way: the time until now is the training's
            return 0.0
        if now - since > _FORGET_SECONDS or came < 0:
            self._per_result = 0.0
            return 0.0
        if came:
            sample, known = (now - since) / came, self._per_result
            weight = _FASTER if sample < known else _SLOWER
            self._per_result = sample if known == 0.0 else known + weight * (sample - known)
        if unsent == 0 or outstanding * MOST_SHARE_FREE < window:
            return 0.0
        return min(SHARE * window * self._per_result, LONGEST_SECONDS)
