# SPDX-License-Identifier: Apache-2.0
"""The ring path of a job in virtual time: the steps of RingRunner, in its order, without its threads.

For each bucket every rank comes with its header and exponents, then with its integers, then takes the sum: each at a
time of its own, and none goes on before all have come. A rank that has stopped is missed by those that come later.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from p4reduce.core.digest import bucket_digest
from p4reduce.core.kept import Kept
from p4reduce.errors import P4ReduceError, RingError
from p4reduce.quantize import LaneFormat
from p4reduce.ring.runner import RingCounters
from p4reduce.sim.clock import VirtualClock

DELAYS = (0.0, 1e-4, 1e-3, 2e-2)


@dataclass
class Meeting:
    """One place of the ring's sequence."""

    headers: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    levels: dict[int, Any] = field(default_factory=dict)
    lanes: dict[int, Any] = field(default_factory=dict)
    agreed: Any = None
    sums: Any = None


class RingModel:
    """All ranks' ends of one ring."""

    def __init__(self, clock: VirtualClock, size: int, draw: random.Random, blame: Callable[[str], None]) -> None:
        """`blame` is told what must not be."""
        self.clock = clock
        self.draw = draw
        self.blame = blame
        self.size = size
        self.ports: list[Port] = []
        self.meetings: list[Meeting] = []
        self.finished: set[tuple[int, int]] = set()
        """(rank, bucket) of every result that a rank has from here."""
        self.compared = 0
        self.slow = 1.0

    def meeting(self, place: int) -> Meeting:
        while len(self.meetings) <= place:
            self.meetings.append(Meeting())
        return self.meetings[place]

    def later(self, call: Callable[[], None]) -> None:
        self.clock.at(self.clock.now + self.slow * self.draw.choice(DELAYS) * self.draw.random(), call)

    def look(self) -> None:
        """Let ranks go on that need not wait any more."""
        gone = [port.rank for port in self.ports if port.ended]
        for port in self.ports:
            port.go_on(gone)


class Port:
    """One rank's end; the driver and the path take it for a RingRunner."""

    def __init__(
        self,
        ring: RingModel,
        rank: int,
        fmt: LaneFormat,
        on_done: Callable[[Kept], None],
        on_error: Callable[[P4ReduceError], None],
    ) -> None:
        self.counters = RingCounters()
        self.rank = rank
        self.ended = False
        self.kept: Kept | None = None
        self.place = 0
        self._ring = ring
        self._fmt = fmt
        self._on_done = on_done
        self._on_error = on_error
        self._queue: deque[Kept] = deque()
        self._step = ""
        ring.ports.append(self)

    def put(self, kept: Kept) -> None:
        if not self.ended:
            self._queue.append(kept)
            self._ring.later(self._ring.look)

    @property
    def pending(self) -> int:
        return len(self._queue) + (self.kept is not None)

    def stop(self, timeout: float = 0.0) -> bool:
        del timeout
        if not self.ended:
            self.ended = True
            self._queue.clear()
            self.kept = None
            self._ring.clock.at(self._ring.clock.now + 0.05, self._ring.look)
        return True

    def go_on(self, gone: list[int]) -> None:
        """One step, if all have come so far."""
        if self.ended or self._step == "busy":
            return
        if self.kept is None:
            if self._queue:
                self.kept = self._queue.popleft()
                self._begin(self._come)
            return
        meeting = self._ring.meeting(self.place)
        arrived = {"come": meeting.levels, "added": meeting.lanes}[self._step]
        if len(arrived) == self._ring.size:
            self._begin(self._add if self._step == "come" else self._finish)
        elif any(rank not in arrived for rank in gone):
            self._fail(RingError(f"ranks {gone} have closed the ring"))

    def _begin(self, step: Callable[[Kept, Meeting], None]) -> None:
        self._step = "busy"

        def call() -> None:
            if self.ended or self.kept is None:
                return
            try:
                step(self.kept, self._ring.meeting(self.place))
            except P4ReduceError as error:
                self._ring.blame(f"rank {self.rank}, ring: {type(error).__name__}: {error}")
                self._fail(error)
            self._ring.look()

        self._ring.later(call)

    def _come(self, kept: Kept, meeting: Meeting) -> None:
        digest = bucket_digest(kept.bucket, self._fmt)
        header = (kept.number, digest, kept.count, kept.format.lane_bits, kept.format.block)
        meeting.headers[self.rank] = header
        if len(set(meeting.headers.values())) > 1:
            self._ring.blame(f"place {self.place} of the ring: {meeting.headers}")
        meeting.levels[self.rank] = kept.exponents()
        self._step = "come"

    def _add(self, kept: Kept, meeting: Meeting) -> None:
        if meeting.agreed is None:
            meeting.agreed = np.max(list(meeting.levels.values()), axis=0)
        meeting.lanes[self.rank] = kept.integers(meeting.agreed)
        self._step = "added"

    def _finish(self, kept: Kept, meeting: Meeting) -> None:
        if meeting.sums is None:
            kind = kept.format.lane_type
            meeting.sums = np.zeros(kept.count, dtype=kind)
            for lanes in meeting.lanes.values():
                meeting.sums += lanes
        kept.finish(meeting.sums.copy(), meeting.agreed)
        if kept.delivered:
            self._ring.compared += 1
        elif (self.rank, kept.number) in self._ring.finished:
            self._ring.blame(f"rank {self.rank} gets bucket {kept.number} from the ring twice")
        self._ring.finished.add((self.rank, kept.number))
        kept.release()
        self.counters.buckets += 1
        self.counters.compared += kept.delivered
        self.kept, self._step = None, ""
        self.place += 1
        self._on_done(kept)

    def _fail(self, error: P4ReduceError) -> None:
        self.stop()
        self._on_error(error)
