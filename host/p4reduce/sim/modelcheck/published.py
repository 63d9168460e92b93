# SPDX-License-Identifier: Apache-2.0
"""Slots as public programs keep them, each with the fault it was shown to have. For tests: the schedules have teeth.

Written from descriptions of what the programs do; two workers, numbered 0 and 1, and plain integers.
"""

from __future__ import annotations

WORKERS = 2
LANES = 64
_LANE = 1 << 32
_WORD = 1 << 2048


class SeenBitSlot:
    """Versions by chunk parity, marks of who was seen, a counter (NSDI 2021, algorithm 3)."""

    def __init__(self) -> None:
        self._sums = [0, 0]
        self._count = [0, 0]
        self._seen = [[False] * WORKERS, [False] * WORKERS]

    def take(self, worker: int, chunk: int, value: int) -> int | None:
        """The sum when the contribution completes a version or finds it complete."""
        version = chunk % 2
        if not self._seen[version][worker]:
            self._seen[version][worker] = True
            self._seen[1 - version][worker] = False
            self._count[version] = (self._count[version] + 1) % WORKERS
            self._sums[version] = value + (self._sums[version] if self._count[version] != 1 else 0)
        return self._sums[version] if self._count[version] == 0 else None


class AcknowledgedSlot:
    """A complete sum is repeated until every worker has acknowledged it; an acknowledgement is sent once."""

    def __init__(self) -> None:
        self._sum = 0
        self._seen = [False] * WORKERS
        self._acknowledged = [True] * WORKERS

    def take(self, worker: int, value: int) -> int | None:
        """The sum when it is complete, the old one included."""
        if all(self._seen):
            return None if self._acknowledged[worker] else self._sum
        if not self._seen[worker]:
            self._seen[worker] = True
            self._sum += value
        if not all(self._seen):
            return None
        self._acknowledged = [False] * WORKERS
        return self._sum

    def acknowledge(self, worker: int) -> None:
        """The last one frees the slot."""
        self._acknowledged[worker] = True
        if all(self._acknowledged):
            self._sum, self._seen = 0, [False] * WORKERS


class EvictingSlot:
    """A newer segment evicts an incomplete one; the worker that brought it is added but not marked."""

    def __init__(self) -> None:
        self._segment = -1
        self._sum = 0
        self._seen = [False] * WORKERS

    def take(self, worker: int, segment: int, value: int) -> int | None:
        """The sum when all workers are marked."""
        if segment > self._segment:
            evicts = self._segment >= 0
            self._segment, self._sum = segment, value
            self._seen = [not evicts and one == worker for one in range(WORKERS)]
        elif segment == self._segment and not self._seen[worker]:
            self._seen[worker] = True
            self._sum += value
        return self._sum if all(self._seen) else None


class WideSlot:
    """One wide word of two's complement lanes, added as one number."""

    def __init__(self) -> None:
        self._word = 0

    def add(self, lanes: list[int]) -> list[int]:
        """Add lanes; returns all lanes of the sum so far."""
        self._word = (self._word + sum((lane % _LANE) << 32 * i for i, lane in enumerate(lanes))) % _WORD
        read = [self._word >> 32 * i & _LANE - 1 for i in range(LANES)]
        return [lane - _LANE if lane >= _LANE // 2 else lane for lane in read[: len(lanes)]]


class ResettingSlot:
    """Whatever chunk is not the slot's present one starts it afresh, a late copy of an older one as well."""

    def __init__(self) -> None:
        self._chunk = -1
        self._sum = 0
        self._seen = [False] * WORKERS

    def take(self, worker: int, chunk: int, value: int) -> int | None:
        """The sum when all workers have contributed."""
        if chunk != self._chunk:
            self._chunk, self._sum, self._seen = chunk, 0, [False] * WORKERS
        if not self._seen[worker]:
            self._seen[worker] = True
            self._sum += value
        return self._sum if all(self._seen) else None
