# SPDX-License-Identifier: Apache-2.0
"""States of cores without their ranks.

The cores of ranks that do the same run side by side: what one is given the others are given as well, each its own frame
of the same label. A shape is what they stand in then, one state of each. Renaming ranks may be used only when that is
one to one: no rank comes into a state in two different shapes. And the cores must agree in all that a search looks at:
what was sent and is sent again, whether all buckets have completed, the error. That is checked for every shape, with
the real core of every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from p4reduce.sim.modelcheck.labels import Labels
from p4reduce.sim.modelcheck.violation import UNSOUND, Violation
from p4reduce.sim.modelcheck.workers import TIMERS, State, Workers


@dataclass(frozen=True, slots=True)
class Shape:
    """What is the same in the states of all ranks."""

    epoch: int
    sent: tuple[int, ...]
    """Labels of the contributions sent."""
    resent: tuple[int, ...]
    """Labels of those that are sent again when the timers run out."""
    done: bool
    error: str
    waits: bool


class Shapes:
    """The shapes of some ranks, which do the same."""

    def __init__(
        self, ranks: tuple[int, ...], workers: Workers, labels: Labels, fetch: Callable[[int, int], None]
    ) -> None:
        """`fetch` (label downwards, rank) makes a frame known that the rank has not been sent so far, if it can be."""
        self.ranks = ranks
        self._workers = workers
        self._labels = labels
        self._fetch = fetch
        self.known: list[Shape] = []
        self._states: list[tuple[int, ...]] = []
        self._numbers: dict[tuple[int, ...], int] = {}
        self._owners: dict[tuple[int, int], int] = {}
        self._steps: dict[tuple[int, int], int] = {}

    def start(self, epoch: int) -> int:
        """The shape in which an epoch begins."""
        return self._enter(tuple(self._workers.start(rank, epoch) for rank in self.ranks))

    def step(self, shape: int, label: int) -> int:
        """Let a frame of a label arrive at every rank, or the timers run out."""
        key = (shape, label)
        after = self._steps.get(key)
        if after is None:
            states = zip(self.ranks, self._states[shape], strict=True)
            moved = tuple(self._workers.step(rank, state, self._frame(label, rank)) for rank, state in states)
            after = self._steps[key] = self._enter(moved)
        return after

    def _frame(self, label: int, rank: int) -> int:
        if label == TIMERS:
            return TIMERS
        if rank not in self._labels.down[label]:
            self._fetch(label, rank)
        if rank not in self._labels.down[label]:
            raise Violation(UNSOUND, "an answer has gone to one rank that no other can get")
        return self._labels.down[label][rank]

    def _enter(self, states: tuple[int, ...]) -> int:
        number = self._numbers.setdefault(states, len(self.known))
        if number == len(self.known):
            seen = {self._look(self._workers.states[r][s]) for r, s in zip(self.ranks, states, strict=True)}
            for one in zip(self.ranks, states, strict=True):
                if self._owners.setdefault(one, number) != number:
                    raise Violation(UNSOUND, "cores that were told the same have come to states that differ")
            if len(seen) > 1:
                raise Violation(UNSOUND, "cores that were told the same do not do the same")
            self.known.append(seen.pop())
            self._states.append(states)
        return number

    def _look(self, state: State) -> Shape:
        sent = tuple(sorted(self._labels.sent(frame) for frame in state.sent))
        resent = tuple(self._labels.sent(frame) for frame in state.resent)
        return Shape(state.epoch, sent, resent, state.done, state.error, state.waits)
