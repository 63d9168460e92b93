# SPDX-License-Identifier: Apache-2.0
"""Memory for contributions and sums, used again from bucket to bucket.

Fresh memory costs a page fault every 4 KiB, which is more than the core's own work on the frame that fills it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

LIMIT = 256 << 20
"""Bytes kept for later at most."""


class Buffers:
    """Flat uint8 arrays. take() gives the smallest kept one that fits without wasting more than half of it."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._kept: list[Bytes] = []
        self.kept_bytes = 0

    def take(self, size: int) -> Bytes:
        """An array of at least `size` bytes, contents undefined."""
        best = -1
        for position, buffer in enumerate(self._kept):
            if size <= buffer.size <= 2 * size and (best < 0 or buffer.size < self._kept[best].size):
                best = position
        if best < 0:
            return np.empty(size, dtype=np.uint8)
        self.kept_bytes -= self._kept[best].size
        return self._kept.pop(best)

    def give(self, buffer: Bytes) -> None:
        """Keep an array that take() returned and nobody uses any more; the oldest ones go when they are too many."""
        self._kept.append(buffer)
        self.kept_bytes += buffer.size
        while self.kept_bytes > self._limit:
            self.kept_bytes -= self._kept.pop(0).size
