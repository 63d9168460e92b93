# SPDX-License-Identifier: Apache-2.0
"""The same search as in search.py, through classes of states in place of states.

Three things make one state of what are many there. Each rests on something that is checked with the switch and the
cores themselves, after the search, and for all that was met; when a check fails the search has shown nothing (UNSOUND).

1. *Cells.* The registers are taken as cells that a frame uses one of, and a cell as what it says that it holds and whom
   it has counted (cells.py). So a distinct step of the switch is run once, not once for all contents of other cells.

2. *Ranks.* The workers run the same program and the switch treats them alike, so a state in which two ranks have
   changed places has the same future with these ranks exchanged. A state is the phase, what every cell holds, and for
   every rank: its core's state, the answers sent to it, and the cells that have counted it. Exchanging ranks exchanges
   just these three, together with the ranks' own contributions, numbers and signatures in frames and registers, which
   are functions of them. Among all states that differ by exchanges only, the one is kept whose ranks are in ascending
   order. That cores are alike is checked in shapes.py, that the switch is in cells.py; the network treats every frame
   alike. `unfolded` counts the states that the kept ones stand for: as many as without this.

3. *The end of an epoch* (`collapse`). When the epoch is revoked the switch refuses all that is under way (checked for
   every content of every cell) and changes nothing. So from then on a rank's life depends on what it is and what has
   been sent to it, and on no other rank, until it enters the second epoch; and there it is the same whatever it was,
   for a fresh core begins there and frames of the first epoch are forgotten. Every rank is therefore followed by itself
   to whatever it can come to, and is one class in the joint states: "of the first epoch". To the second epoch every
   cell of the first one is as good as an empty one (cells.py), so a restart, which empties them, is nothing new there,
   and all contents in which the first epoch may have ended are one state. That a frame of the second epoch does to a
   cell of the first one what it does to an empty one is run for every content that such a cell can have.

Liveness is shown from every class, and here for every order in which ranks send again and are answered (search.py takes
one order). A class and the states that it stands for go on alike: what comes next is a rank's resend with the answers
to it, or the new epoch's admission, or a rank's entry, and none of these depends on what a class leaves out.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator

from p4reduce.sim.modelcheck.batches import check_batches, check_forgotten
from p4reduce.sim.modelcheck.bounds import Bounds
from p4reduce.sim.modelcheck.cells import EMPTY, Cells
from p4reduce.sim.modelcheck.frames import Frames
from p4reduce.sim.modelcheck.labels import Labels
from p4reduce.sim.modelcheck.search import RENEWED, REVOKED, RUNNING, Checker, Report
from p4reduce.sim.modelcheck.shapes import Shapes
from p4reduce.sim.modelcheck.switches import SwitchState
from p4reduce.sim.modelcheck.violation import STUCK, UNSOUND, Violation
from p4reduce.sim.modelcheck.workers import TIMERS, Workers

Piece = tuple[int, int, int, int]
"""What belongs to a rank: orbit, shape (OLD: of the first epoch, which is over), labels of the answers sent to it and
cells that have counted it, both as bit masks."""
Effect = tuple[int, int, tuple[tuple[int, int], ...], int]
"""What a contribution does: what its cell holds then, whom it has counted, answers (label, rank), refusal's label."""

OLD = -1
_BITS = 24
_MASK = (1 << _BITS) - 1
_REPORT_EVERY = 100_000
_NEW, _GOOD, _UNDER_WAY = range(3)
"""Whether a state is known to lead to completion."""
_NO_EFFECT: Effect = (-1, 0, (), -1)


class Quotient:
    """One search. `ranks`: take states that differ by an exchange of ranks as one. `collapse`: as above.

    `batches`: also give cores two frames at once. Raises nothing for what it finds: run() reports it, without the way
    that leads there.
    """

    def __init__(
        self,
        bounds: Bounds,
        make: Callable[[], SwitchState],
        *,
        ranks: bool = True,
        collapse: bool = True,
        batches: bool = True,
        limit: int = 100_000_000,
        progress: Callable[[Report], None] | None = None,
    ) -> None:
        self.bounds = bounds
        self.report = Report(bounds)
        self.frames = Frames(bounds)
        self._batches = batches
        self._limit = limit
        self._progress = progress
        self._collapse = collapse and bounds.change
        self._labels = Labels(self.frames)
        self._cells = Cells(bounds, make, self.frames, self._labels, self._collapse)
        self._workers = Workers(bounds, self.frames, True)
        everybody = tuple(range(bounds.workers))
        alike = ranks and not bounds.disagree
        self.orbits = (everybody,) if alike else tuple((rank,) for rank in everybody)
        self._shapes = [Shapes(orbit, self._workers, self._labels, self._fetch) for orbit in self.orbits]
        self._pieces: list[Piece] = []
        self._piece_numbers: dict[Piece, int] = {}
        # What the cells hold, for all of them.
        self._held: list[tuple[int, ...]] = []
        self._held_numbers: dict[tuple[int, ...], int] = {}
        # Every state found, in the order of the search.
        self._found: dict[int, int] = {}
        self._levels: list[int] = []
        self._effects: dict[tuple[int, int, int, int, int], Effect] = {}
        self._contributions: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._moves: dict[int, list[int]] = {}
        self._marked: dict[tuple[int, int, int], int] = {}
        self._given: dict[tuple[int, int], int] = {}
        self._put: dict[tuple[int, int, int], int] = {}
        self._counted: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._dying: set[tuple[int, int, int]] = set()
        self._width = 2 * (bounds.or_slots + bounds.add_slots)

    def run(self) -> Report:
        """Search until everything has been seen, a fault is found, or the limit of states is reached."""
        begin = time.process_time()
        report = self.report
        try:
            self._search(begin)
            if report.complete:
                report.registers = self._cells.prove()
                if any(len(orbit) > 1 for orbit in self.orbits):
                    self._cells.equivariant(self.orbits)
                if self.bounds.change:  # that contributions change nothing either: cells.py
                    report.forgotten = check_forgotten(self._workers, self.frames)
                self._drain_all()
                if self._batches:
                    report.batches = check_batches(self._workers, self.frames)
        except Violation as violation:
            report.violation, report.kind = str(violation), violation.kind
            report.complete = False
        self._count(begin)
        return report

    # States ----------------------------------------------------------------------------------------------------

    def _piece(self, orbit: int, shape: int, answers: int, marks: int) -> int:
        piece = (orbit, shape, answers, marks)
        number = self._piece_numbers.setdefault(piece, len(self._pieces))
        if number == len(self._pieces):
            self._pieces.append(piece)
        return number

    def _hold(self, held: tuple[int, ...]) -> int:
        number = self._held_numbers.setdefault(held, len(self._held))
        if number == len(self._held):
            self._held.append(held)
        return number

    def _pack(self, phase: int, held: int, pieces: list[int]) -> int:
        """The state with its ranks in order, as one number."""
        if len(self.orbits) == 1:
            pieces.sort()
        node = held << 2 | phase
        for piece in pieces:
            node = node << _BITS | piece
        return node

    def _unpack(self, node: int) -> tuple[int, int, list[int]]:
        pieces = [0] * self.bounds.workers
        for place in range(self.bounds.workers - 1, -1, -1):
            pieces[place] = node & _MASK
            node >>= _BITS
        return node & 3, node >> 2, pieces

    def _stands_for(self, pieces: list[int]) -> int:
        """How many states differ from one by exchanges of ranks."""
        if len(self.orbits) > 1:
            return 1
        return math.factorial(len(pieces)) // math.prod(map(math.factorial, Counter(pieces).values()))

    def _orbit_of(self, place: int) -> int:
        return 0 if len(self.orbits) == 1 else place

    # Exploration -----------------------------------------------------------------------------------------------

    def _search(self, begin: float) -> None:
        empty = self._hold((0,) * self._width)
        starts = [self._shapes[self._orbit_of(place)].start(0) for place in range(self.bounds.workers)]
        pieces = [self._piece(self._orbit_of(place), shape, 0, 0) for place, shape in enumerate(starts)]
        level = [self._pack(RUNNING, empty, pieces)]
        found, report, visited = self._found, self.report, 0
        found[level[0]] = _NEW
        while level and len(found) < self._limit:
            self._levels.append(len(level))
            report.steps = len(self._levels)
            following = []
            for node in level:
                for after in self._successors(node):
                    report.transitions += 1
                    if after not in found:
                        found[after] = _NEW
                        following.append(after)
                visited += 1
                if visited % _REPORT_EVERY == 0 and self._progress is not None:
                    self._count(begin)
                    self._progress(report)
            if max(len(self._pieces), len(self._held)) > _MASK:
                raise Violation(UNSOUND, "too many pieces to number")
            level = following
        report.complete = not level
        report.depth, report.steps = len(self._levels) - 1, 0

    def _successors(self, node: int) -> Iterator[int]:
        phase, held, pieces = self._unpack(node)
        self.report.unfolded += self._stands_for(pieces)
        holding = self._held[held]
        counted = self._counts([self._pieces[piece][3] for piece in pieces])
        last = -1
        for place, piece in enumerate(pieces):
            if piece == last:
                continue  # with ranks in order: what the rank before it has done
            last = piece
            orbit, shape, answers, marks = self._pieces[piece]
            if shape != OLD:
                for label, cell in self._sent(orbit, shape):
                    effect = self._effect(phase, holding[cell], counted[cell], place, label)
                    if effect is not _NO_EFFECT:
                        if effect[3] >= 0:
                            moved = self._shapes[orbit].step(shape, effect[3])
                            after = self._with(phase, held, pieces, place, self._piece(orbit, moved, answers, marks))
                        else:
                            after = self._arrive(phase, held, holding, pieces, cell, effect)
                        if after != node:
                            yield after
                for moved in self._downwards(piece):
                    yield self._with(phase, held, pieces, place, moved)
        if self.bounds.amnesia and held:
            yield self._pack(phase, 0, [self._unmarked(piece) for piece in pieces])
        if self.bounds.change:
            yield from self._changes(phase, held, pieces)

    def _with(self, phase: int, held: int, pieces: list[int], place: int, piece: int) -> int:
        return self._pack(phase, held, [*pieces[:place], piece, *pieces[place + 1 :]])

    def _unmarked(self, piece: int) -> int:
        orbit, shape, answers, _ = self._pieces[piece]
        return self._piece(orbit, shape, answers, 0)

    def _counts(self, marks: list[int]) -> tuple[int, ...]:
        """For every cell the bit mask of the ranks that it has counted."""
        key = tuple(marks)
        found = self._counted.get(key)
        if found is None:
            found = self._counted[key] = tuple(
                sum((mark >> cell & 1) << rank for rank, mark in enumerate(marks)) for cell in range(self._width)
            )
        return found

    def _sent(self, orbit: int, shape: int) -> list[tuple[int, int]]:
        """Contributions of a shape and their cells."""
        found = self._contributions.get((orbit, shape))
        if found is None:
            shapes = self._shapes[orbit]
            found = []
            for label in shapes.known[shape].sent:
                cells = {self._cells.cell(self._labels.up[label][rank]) for rank in shapes.ranks}
                if len(cells) > 1:
                    raise Violation(UNSOUND, "contributions of one label have used several cells")
                found.append((label, cells.pop()))
            self._contributions[orbit, shape] = found
        return found

    def _effect(self, phase: int, holds: int, counted: int, place: int, label: int) -> Effect:
        key = (phase, holds, counted, place, label)
        found = self._effects.get(key)
        if found is None:
            step = self._cells.step(phase, (holds, counted), self._labels.up[label][place])
            answers = tuple((self._labels.answered(frame), self.frames.down[frame].rank) for frame in step.answers)
            found = (*step.after, answers, -1)
            if step.refused:
                found = (holds, counted, (), answers[0][0])
            elif step.after == (holds, counted) and not answers:
                found = _NO_EFFECT
            self._effects[key] = found
        return found

    def _arrive(
        self, phase: int, held: int, holding: tuple[int, ...], pieces: list[int], cell: int, effect: Effect
    ) -> int:
        holds, counted, answers, _ = effect
        out = [self._mark(piece, cell, counted >> rank & 1) for rank, piece in enumerate(pieces)]
        if holds != holding[cell]:
            key = (held, cell, holds)
            put = self._put.get(key)
            if put is None:
                put = self._put[key] = self._hold((*holding[:cell], holds, *holding[cell + 1 :]))
            held = put
        for label, rank in answers:
            out[rank] = self._give(out[rank], label)
        return self._pack(phase, held, out)

    def _mark(self, piece: int, cell: int, bit: int) -> int:
        """The piece with a cell having counted its rank, or not."""
        key = (piece, cell, bit)
        found = self._marked.get(key)
        if found is None:
            orbit, shape, answers, marks = self._pieces[piece]
            found = self._marked[key] = self._piece(orbit, shape, answers, marks & ~(1 << cell) | bit << cell)
        return found

    def _give(self, piece: int, label: int) -> int:
        """The piece with an answer sent to its rank."""
        key = (piece, label)
        found = self._given.get(key)
        if found is None:
            orbit, shape, answers, marks = self._pieces[piece]
            found = self._given[key] = self._piece(orbit, shape, answers | 1 << label, marks)
        return found

    def _downwards(self, piece: int) -> list[int]:
        """What the answers ever sent to a rank make of its piece, and its timers when it waits for them."""
        found = self._moves.get(piece)
        if found is None:
            orbit, shape, answers, marks = self._pieces[piece]
            found = [self._piece(orbit, moved, answers, marks) for moved in self._moved(orbit, shape, answers)]
            self._moves[piece] = found
        return found

    def _moved(self, orbit: int, shape: int, answers: int) -> list[int]:
        shapes = self._shapes[orbit]
        labels = [label for label in range(answers.bit_length()) if answers >> label & 1]
        if shapes.known[shape].waits:
            labels.append(TIMERS)
        return [moved for label in labels if (moved := shapes.step(shape, label)) != shape]

    # The end of an epoch ---------------------------------------------------------------------------------------

    def _changes(self, phase: int, held: int, pieces: list[int]) -> Iterator[int]:
        if phase == RUNNING:
            yield self._revoke(held, pieces)
        elif phase == REVOKED:
            if held:
                yield self._pack(REVOKED, 0, [self._unmarked(piece) for piece in pieces])
            yield self._pack(RENEWED, held, list(pieces))
        else:
            for place in range(len(pieces)):
                if self._is_old(pieces[place]):
                    yield self._enter(held, pieces, place)

    def _is_old(self, piece: int) -> bool:
        orbit, shape, _, _ = self._pieces[piece]
        return shape == OLD or self._shapes[orbit].known[shape].epoch == 0

    def _revoke(self, held: int, pieces: list[int]) -> int:
        if not self._collapse:
            return self._pack(REVOKED, held, list(pieces))
        for piece in pieces:
            orbit, shape, answers, _ = self._pieces[piece]
            self._let_die(orbit, shape, answers)
        return self._pack(REVOKED, 0, [self._piece(self._pieces[piece][0], OLD, 0, 0) for piece in pieces])

    def _let_die(self, orbit: int, shape: int, answers: int) -> None:
        """Follow a rank of an epoch that is over: late answers, and refusals of whatever it sends."""
        shapes, ahead = self._shapes[orbit], [(orbit, shape, answers)]
        while ahead:
            dying = ahead.pop()
            if dying in self._dying:
                continue
            self._dying.add(dying)
            moved = self._moved(*dying)
            for label, _ in self._sent(orbit, dying[1]):
                moved.append(shapes.step(dying[1], self._refusal(label, shapes.ranks[0])))
            ahead += [(orbit, after, answers) for after in moved]

    def _refusal(self, label: int, rank: int) -> int:
        step = self._cells.step(REVOKED, EMPTY, self._labels.up[label][rank])
        if not step.refused:
            raise Violation(UNSOUND, f"{self.frames.name(self.frames.up[self._labels.up[label][rank]])} is not refused")
        return self._labels.answered(step.answers[0])

    def _fetch(self, label: int, rank: int) -> None:
        """Have a rank's own contribution refused as another rank's was."""
        if self.bounds.change:
            self._refusal(self._labels.cause[label], rank)

    def _enter(self, held: int, pieces: list[int], place: int) -> int:
        orbit, _, answers, marks = self._pieces[pieces[place]]
        old = sum(1 << label for label in range(answers.bit_length()) if self._labels.epoch_down(label) == 0)
        entered = self._piece(orbit, self._shapes[orbit].start(1), answers & ~old, marks)
        return self._with(RENEWED, held, pieces, place, entered)

    # Liveness --------------------------------------------------------------------------------------------------

    def _drain_all(self) -> None:
        if self.bounds.amnesia:
            return
        ends = list(self._levels)
        depth = 0
        for number, node in enumerate(self._found):
            while number >= ends[0]:
                depth += 1
                ends[1] += ends[0]
                del ends[0]
            self.report.steps = depth
            self._drain(node)
            self.report.drained += 1
        self.report.steps = 0

    def _drain(self, begin: int) -> None:
        """Follow every order in which ranks send again, frames being lost no more, to states that lead to the end."""
        path = [(begin, self._onward(begin))] if self._found[begin] != _GOOD else []
        while path:
            node, ahead = path[-1]
            self._found[node] = _UNDER_WAY
            if not ahead:
                self._found[node] = _GOOD
                path.pop()
                continue
            following = ahead.pop()
            known = self._found.get(following)
            if known is None:
                raise Violation(UNSOUND, "the way to completion leaves the states that were found")
            if known == _UNDER_WAY:
                raise Violation(STUCK, "nothing is lost any more, and what ranks send again leads back")
            if known == _NEW:
                path.append((following, self._onward(following)))

    def _onward(self, node: int) -> list[int]:
        """The states that may follow when nothing is lost: none when the run is over. Violation when it is stuck."""
        phase, held, pieces = self._unpack(node)
        if phase == REVOKED:
            return [self._pack(RENEWED, held, list(pieces))]
        if phase == RENEWED:
            for place, piece in enumerate(pieces):
                if self._is_old(piece):
                    return [self._enter(held, pieces, place)]
        known = [self._pieces[piece] for piece in pieces]
        shapes = [self._shapes[orbit].known[shape] for orbit, shape, _, _ in known]
        if all(shape.done for shape in shapes) or (self.bounds.disagree and any(shape.error for shape in shapes)):
            return []
        counted = self._counts([marks for _, _, _, marks in known])
        found = []
        for place, shape in enumerate(shapes):
            for label in shape.resent:
                cell = self._cells.cell(self._labels.up[label][place])
                effect = self._effect(phase, self._held[held][cell], counted[cell], place, label)
                if effect is not _NO_EFFECT:
                    after = self._answer(phase, held, pieces, cell, effect)
                    if after != node and self._told_apart(after) != self._told_apart(node):
                        found.append(after)
        if not found:
            raise Violation(STUCK, "nothing is lost any more, and some rank never completes")
        return found

    def _answer(self, phase: int, held: int, pieces: list[int], cell: int, effect: Effect) -> int:
        """A resend arrives, and the answers to it."""
        holds, counted, answers, _ = effect
        out = [self._mark(piece, cell, counted >> rank & 1) for rank, piece in enumerate(pieces)]
        holding = self._held[held]
        held = self._hold((*holding[:cell], holds, *holding[cell + 1 :]))
        for label, rank in answers:
            orbit, shape, sent, marks = self._pieces[self._give(out[rank], label)]
            out[rank] = self._piece(orbit, self._shapes[orbit].step(shape, label), sent, marks)
        return self._pack(phase, held, out)

    def _told_apart(self, node: int) -> tuple[int, tuple[tuple[int, int], ...]]:
        """A state but for the answers sent."""
        _, held, pieces = self._unpack(node)
        known = (self._pieces[piece] for piece in pieces)
        rest = ((shape, marks) for _, shape, _, marks in known)
        return held, tuple(sorted(rest) if len(self.orbits) == 1 else rest)

    def _count(self, begin: float) -> None:
        report = self.report
        report.states = len(self._found)
        report.switch_steps = self._cells.executed
        report.worker_states = sum(map(len, self._workers.states))
        report.worker_steps = self._workers.executed
        report.seconds = time.process_time() - begin


def check(
    bounds: Bounds,
    make: Callable[[], SwitchState],
    *,
    progress: Callable[[Report], None] | None = None,
    limit: int = 2_000_000,
) -> Report:
    """Search through classes of states; when that finds anything, through states, so that there is a way to tell.

    A fault of the switch may be that classes do not hold, so what counts then is what the plain search finds within
    its limit. When that finds nothing, what the first one has found stands.
    """
    report = Quotient(bounds, make, progress=progress).run()
    if not report.kind:
        return report
    plain = Checker(bounds, make, progress=progress, limit=limit).run()
    return plain if plain.kind else report
