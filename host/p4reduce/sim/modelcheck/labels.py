# SPDX-License-Identifier: Apache-2.0
"""Frames without their ranks: what one rank sends or is sent, and every other rank as well.

A contribution is labelled by its epoch, slot, round and operation, an answer by its kind and reason besides. A rank
has one frame of a label: two different contributions to one place are a violation (frames.py), a result is judged
before it is labelled, so that it is the only right one, and a nack repeats the header of its contribution.
"""

from __future__ import annotations

from p4reduce.sim.modelcheck.frames import Frame, Frames
from p4reduce.sim.modelcheck.violation import UNSOUND, Violation
from p4reduce.wire import Kind

Key = tuple[int, ...]


class Labels:
    """Numbers labels in the order in which they are first seen; upwards and downwards count by themselves."""

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self._up: dict[Key, int] = {}
        self._down: dict[Key, int] = {}
        self.up: list[dict[int, int]] = []
        """For every label upwards the ranks' frames."""
        self.down: list[dict[int, int]] = []
        """For every label downwards the ranks' frames."""
        self.cause: list[int] = []
        """For every label downwards that of the contributions that such an answer answers."""

    def sent(self, frame: int) -> int:
        """Label of a contribution."""
        known = self._frames.up[frame]
        return self._number(self._up, self.up, _place(known), known.rank, frame)

    def answered(self, frame: int) -> int:
        """Label of an answer."""
        known = self._frames.down[frame]
        reason = known.header["count_or_reason"] if known.header["kind"] == Kind.NACK else 0
        label = self._number(self._down, self.down, (known.header["kind"], reason, *_place(known)), known.rank, frame)
        if label == len(self.cause):
            self.cause.append(self._up[_place(known)])
        return label

    def epoch_up(self, label: int) -> int:
        """Place in EPOCHS of a contribution's epoch."""
        return self._frames.epoch_of(self._frames.up[next(iter(self.up[label].values()))])

    def epoch_down(self, label: int) -> int:
        """Place in EPOCHS of an answer's epoch."""
        return self.epoch_up(self.cause[label])

    def _number(self, numbers: dict[Key, int], by_rank: list[dict[int, int]], key: Key, rank: int, frame: int) -> int:
        label = numbers.setdefault(key, len(by_rank))
        if label == len(by_rank):
            by_rank.append({})
        if by_rank[label].setdefault(rank, frame) != frame:
            raise Violation(UNSOUND, "a rank has two frames of one label")
        return label


def _place(frame: Frame) -> Key:
    return (*frame.place, frame.header["op"])
