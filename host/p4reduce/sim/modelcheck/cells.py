# SPDX-License-Identifier: Apache-2.0
"""A switch as cells that have nothing to do with each other, and every cell as what it says that it holds.

*Apart.* A frame uses one cell of the registers: its own. Every run is made with something in all other cells that
cannot be calculated with, and looked through afterwards. The program is deterministic, so what such a run did it does
whatever the other cells hold.

*Classes.* Of a cell's content only its class is told apart: what it says that it holds (epoch, round, op, words, tag)
and which workers it has counted. What an epoch left behind that is over is one class, that of the empty cell, when
`collapse` asks for that. So sums and checks are not told apart, nor what frames of another size left in registers that
the content does not use. prove() shows that nothing depends on these: it runs all contributions of an epoch, in every
order, on every content that any order of them can make, and begins the second epoch with every content of the first;
contents of one class must give the same answers, and contents of one class again.

*Ranks.* Renaming the ranks renames what the program does: a worker is to it a bit in a mask, an address and a port, and
a payload that is added or ORed, which no order of the ranks enters. equivariant() shows it for every step that
prove() has run: with two ranks exchanged, the step of the exchanged frame on the exchanged class is the exchanged step.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

from p4reduce.sim.modelcheck.bounds import Bounds
from p4reduce.sim.modelcheck.frames import Frames
from p4reduce.sim.modelcheck.labels import Labels
from p4reduce.sim.modelcheck.switches import Phases, SwitchState
from p4reduce.sim.modelcheck.violation import UNSOUND, Violation

_PHASE_OF = (0, 2)
"""The phase in which an epoch, by its place in EPOCHS, is admitted."""
_STRAY_EVERY = 256

Class = tuple[int, int]
"""Number of what a cell says that it holds, 0 for nothing that counts any more; bit mask of the workers counted."""
EMPTY: Class = (0, 0)


class CellStep(NamedTuple):
    """What a frame does to its cell, and the answers as numbers of frames downwards."""

    after: Class
    answers: tuple[int, ...]
    refused: bool


class Cells:
    """What every frame does to every class of its cell. Cells are numbered in the order in which they are used."""

    def __init__(
        self, bounds: Bounds, make: Callable[[], SwitchState], frames: Frames, labels: Labels, collapse: bool
    ) -> None:
        self._bounds = bounds
        self._frames = frames
        self._labels = labels
        self._collapse = collapse
        self._phases = Phases(bounds, make, frames, True)
        self.executed = 0
        """Frames that the switch has run."""
        self._cells: list[int] = []
        self._place: dict[int, int] = {}
        # Contents of cells; the first is that of a cell at the start.
        self.contents: list[Hashable] = [None]
        self._numbers: dict[Hashable, int] = {None: 0}
        self._runs: dict[tuple[int, int, int, int], tuple[int, tuple[int, ...]]] = {}
        self._identities: dict[Hashable, int] = {}
        # For everything that a cell can hold the label of the contributions that start it.
        self._origin: list[int] = [-1]
        self._known: dict[tuple[int, Class], int] = {}
        self.steps: dict[tuple[int, int, Class, int], CellStep] = {}

    def cell(self, frame: int) -> int:
        """The cell that a contribution uses, found by letting it arrive at a switch that has seen no other."""
        found = self._place.get(frame)
        if found is None:
            found = self._place[frame] = self._find(frame)
        return found

    def step(self, phase: int, before: Class, frame: int) -> CellStep:
        """Let a contribution arrive at its cell."""
        key = (phase, self.cell(frame), before, frame)
        step = self.steps.get(key)
        if step is None:
            content = self._content(key[1], before)
            step = self.steps[key] = self._classify(phase, key[1], content, frame)
        return step

    def prove(self) -> int:
        """Show that steps depend on classes alone, for every content that there can be; returns how many.

        And that a frame of the first epoch is refused once the epoch is over, whatever its cell holds.
        """
        self._label_all()
        total = 0
        for cell in range(len(self._cells)):
            mine: list[list[int]] = [[], []]
            for frame in range(len(self._frames.up)):
                if self.cell(frame) == cell:
                    mine[self._frames.epoch_of(self._frames.up[frame])].append(frame)
            contents = self._close(_PHASE_OF[0], cell, [0], mine[0])
            if self._bounds.change:
                self._refused(1, cell, contents, mine[0])
                contents = self._close(_PHASE_OF[1], cell, contents, mine[1])
                self._refused(2, cell, contents, mine[0])
            total += len(contents)
        self._phases.check_stray()
        return total

    def equivariant(self, orbits: Iterable[tuple[int, ...]]) -> int:
        """Show that exchanging neighbours of an orbit exchanges what steps do; returns how many were compared.

        Exchanges of neighbours make all permutations.
        """
        self._label_all()
        compared = 0
        for orbit in orbits:
            for one, other in itertools.pairwise(orbit):
                for key, step in list(self.steps.items()):
                    compared += 1
                    found = self.steps.get(self._exchange_key(key, one, other))
                    if found is None or self._told(found) != self._exchange(step, one, other):
                        raise Violation(UNSOUND, "the switch does not treat ranks alike")
        return compared

    # Running ---------------------------------------------------------------------------------------------------

    def _find(self, frame: int) -> int:
        phase = _PHASE_OF[self._frames.epoch_of(self._frames.up[frame])]
        state = self._phases.states[phase]
        state.isolate(None, None)
        self._phases.run(phase, frame)
        used = list(state.contents())
        if len(used) != 1:
            raise Violation(UNSOUND, f"a frame has used {len(used)} cells")
        if used[0] not in self._cells:
            self._cells.append(used[0])
        return self._cells.index(used[0])

    def _run(self, phase: int, cell: int, content: int, frame: int) -> tuple[int, tuple[int, ...]]:
        """Content afterwards and answers. The same is run once."""
        key = (phase, cell, content, frame)
        found = self._runs.get(key)
        if found is None:
            state = self._phases.states[phase]
            state.isolate(self._cells[cell], self.contents[content])
            try:
                answers = self._phases.run(phase, frame)
            except (TypeError, AttributeError, struct.error) as error:
                raise Violation(UNSOUND, f"a frame has used a cell that is not its own: {error}") from error
            after = state.contents().get(self._cells[cell])
            number = self._numbers.setdefault(after, len(self.contents))
            if number == len(self.contents):
                self.contents.append(after)
            found = self._runs[key] = (number, answers)
            self.executed += 1
            if self.executed % _STRAY_EVERY == 0:
                self._phases.check_stray()
        return found

    def _classify(self, phase: int, cell: int, content: int, frame: int) -> CellStep:
        after, answers = self._run(phase, cell, content, frame)
        refused = after == content and self._phases.is_refusal(answers)
        if after != content:
            self._name(phase, after, frame)
        found = self._class(phase, after)
        if found != EMPTY:
            self._known.setdefault((cell, found), after)
        return CellStep(found, answers, refused)

    def _name(self, phase: int, content: int, frame: int) -> None:
        """Number what the content says that it holds."""
        if self.contents[content] is None:
            return
        identity, _ = self._phases.states[phase].identity(self.contents[content])
        number = self._identities.setdefault(identity, len(self._origin))
        if number == len(self._origin):
            self._origin.append(self._labels.sent(frame))

    def _class(self, phase: int, content: int) -> Class:
        held = self.contents[content]
        if held is None:
            return EMPTY
        identity, seen = self._phases.states[phase].identity(held)
        number = self._identities[identity]
        if self._collapse and phase > _PHASE_OF[self._labels.epoch_up(self._origin[number])]:
            return EMPTY
        return number, seen

    def _content(self, cell: int, wanted: Class) -> int:
        """A content of a class: one that was met, or made of the contributions of the workers counted."""
        if wanted == EMPTY:
            return 0
        found = self._known.get((cell, wanted))
        if found is not None:
            return found
        label = self._origin[wanted[0]]
        phase = _PHASE_OF[self._labels.epoch_up(label)]
        content = 0
        for rank in range(self._bounds.workers):
            if wanted[1] >> rank & 1:
                frame = self._labels.up[label][rank]
                self._classify(phase, cell, content, frame)
                content, _ = self._run(phase, cell, content, frame)
        if self._class(phase, content) != wanted:
            raise Violation(UNSOUND, "the switch does not count ranks alike")
        return self._known.setdefault((cell, wanted), content)

    # Showing ---------------------------------------------------------------------------------------------------

    def _label_all(self) -> None:
        for frame in range(len(self._frames.up)):
            self._labels.sent(frame)
            self.cell(frame)

    def _close(self, phase: int, cell: int, begin: list[int], frames: list[int]) -> list[int]:
        """All contents that contributions make of others, in any order; steps must agree within classes."""
        contents, place = list(begin), 0
        known = set(contents)
        while place < len(contents):
            content = contents[place]
            before = self._class(phase, content)
            place += 1
            for frame in frames:
                step = self._classify(phase, cell, content, frame)
                if self.steps.setdefault((phase, cell, before, frame), step) != step:
                    name = self._frames.name(self._frames.up[frame])
                    raise Violation(UNSOUND, f"{name} does different things to cells of one class")
                after, _ = self._run(phase, cell, content, frame)
                if after not in known:
                    known.add(after)
                    contents.append(after)
        return contents

    def _refused(self, phase: int, cell: int, contents: list[int], frames: list[int]) -> None:
        for content in contents:
            for frame in frames:
                step = self._classify(phase, cell, content, frame)
                known = self.steps.setdefault((phase, cell, self._class(phase, content), frame), step)
                if not step.refused or known != step:
                    raise Violation(UNSOUND, f"{self._frames.name(self._frames.up[frame])} is not refused")

    def _exchange_key(self, key: tuple[int, int, Class, int], one: int, other: int) -> tuple[int, int, Class, int]:
        phase, cell, (number, seen), frame = key
        rank = _exchanged(self._frames.up[frame].rank, one, other)
        moved = self._labels.up[self._labels.sent(frame)].get(rank, -1)
        return phase, cell, (number, _swap(seen, one, other)), moved

    def _told(self, step: CellStep) -> tuple[Class, set[tuple[int, int]], bool]:
        answers = {(self._labels.answered(frame), self._frames.down[frame].rank) for frame in step.answers}
        return step.after, answers, step.refused

    def _exchange(self, step: CellStep, one: int, other: int) -> tuple[Class, set[tuple[int, int]], bool]:
        (number, seen), answers, refused = self._told(step)
        moved = {(label, _exchanged(rank, one, other)) for label, rank in answers}
        return (number, _swap(seen, one, other)), moved, refused


def _exchanged(rank: int, one: int, other: int) -> int:
    return other if rank == one else one if rank == other else rank


def _swap(mask: int, one: int, other: int) -> int:
    if (mask >> one & 1) == (mask >> other & 1):
        return mask
    return mask ^ (1 << one | 1 << other)
