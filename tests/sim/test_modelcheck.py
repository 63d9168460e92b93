# SPDX-License-Identifier: Apache-2.0
"""A bounded model check, the mutants that it must find, and the faults of public programs by name.

`make modelcheck` explores the larger systems.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p4reduce import pipeline, wire
from p4reduce.core.bucket import Reduction
from p4reduce.core.states import Phase
from p4reduce.errors import ConfigError
from p4reduce.sim.adapter import EngineSwitch
from p4reduce.sim.byhand import ByHand, field
from p4reduce.sim.modelcheck import Bounds, Checker, EngineState, Quotient, ReferenceState, Report, check
from p4reduce.sim.modelcheck.bounds import PROFILE, SHORT_LANES
from p4reduce.sim.modelcheck.mutants import MUTANTS, Mutant, Relation, Variant
from p4reduce.sim.modelcheck.published import (
    AcknowledgedSlot,
    EvictingSlot,
    ResettingSlot,
    SeenBitSlot,
    WideSlot,
)
from p4reduce.sim.modelcheck.search import Action, Node
from p4reduce.sim.modelcheck.switches import SwitchState
from p4reduce.sim.modelcheck.violation import ACCEPTED, SENT, STUCK, UNSOUND, Violation
from p4reduce.sim.runner import Scenario
from p4reduce.sim.switch import Count, ReferenceSwitch, SwitchModel, _Cell

SMALL = (
    Bounds(2, workload=(1, 1, 1)),
    Bounds(2, workload=(0, 0, 0), change=True),
    Bounds(2, workload=(3,), change=True),
    Bounds(2, add_slots=2, workload=(6,)),
    Bounds(3, workload=(0, 0, 0)),
    Bounds(3, workload=(3,)),
    Bounds(2, workload=(0, 0, 0), amnesia=True),
    Bounds(2, workload=(1, 1), disagree=True),
)
FOUND = {
    "seen bits without rounds": (SENT, 6),
    "no epoch in the state": (SENT, 5),
    "reply without completion": (SENT, 2),
    "wide add without headroom": (SENT, 6),
    "rounds compared as plain numbers": (STUCK, 0),
    "another tag accepted": (SENT, 6),
    "one version per slot": (STUCK, 2),
    "an older round starts afresh": (STUCK, 12),
}
"""What each mutant does, and after how many steps at the earliest nothing can save the run."""
FOUND_BY_CLASSES = {
    **FOUND,
    # A frame uses two cells of such a switch.
    "seen bits without rounds": (UNSOUND, 1),
    # Seen where the cells that the first epoch leaves are compared with empty ones, which classes do not tell apart.
    "no epoch in the state": (SENT, 0),
}


@functools.cache
def program() -> Any:
    return json.loads(pipeline.find(PROFILE).json.read_text())


def engine() -> EngineSwitch:
    module = pytest.importorskip("p4reduce_bmv2.embedded.engine", reason="the embedded engine is not installed")
    return EngineSwitch(module.Engine(program()))


def reference(kind: type[ReferenceSwitch] = ReferenceSwitch) -> SwitchState:
    return ReferenceState(kind(wire.PROFILES[PROFILE]))


def reports(bounds: Bounds, make: Callable[[], SwitchState], batches: bool = False) -> Report:
    return Checker(bounds, make, batches=batches).run()


@functools.cache
def plainly(bounds: Bounds) -> Report:
    """State by state, on the reference switch."""
    return reports(bounds, reference, batches=not bounds.change)


@pytest.mark.parametrize("bounds", SMALL, ids=Bounds.describe)
def test_nothing_is_wrong_on_the_compiled_program(bounds: Bounds) -> None:
    """The real core against the P4 program: all orders of all deliveries, any number of copies."""
    compiled = reports(bounds, lambda: EngineState(engine(), bounds), batches=not bounds.change)
    assert compiled.trace == []
    assert compiled.complete
    assert compiled.drained == (0 if bounds.amnesia else compiled.states)
    assert compiled.states > 20
    assert (compiled.forgotten > 0) == bounds.change
    plain = plainly(bounds)
    assert plain.trace == []
    assert (plain.batches > 0) == (not bounds.change)
    same = ("states", "transitions", "depth", "worker_states", "forgotten", "batches")
    found, expected = ([getattr(report, name) for name in same] for report in (compiled, plain))
    # With short and full frames in one cell the registers remember what the cell held in the other size before: more
    # states, that nothing depends on.
    assert all(a >= b for a, b in zip(found, expected, strict=True)) if bounds.change else found == expected


def test_frames_of_a_dying_epoch_may_come_in_one_batch() -> None:
    """A chunk's late result, and the nack of its resend after the epoch was revoked."""
    report = reports(Bounds(2, workload=(0, 1), change=True), reference, batches=True)
    assert report.trace == []
    assert report.batches > 0


def test_the_search_sees_rounds_wrap() -> None:
    checker = Checker(Bounds(2, workload=(1, 1, 1)), reference)
    assert checker.run().complete
    rounds = {frame.header["round"] for frame in checker.frames.up}
    assert rounds == {(1 << 32) - 2, (1 << 32) - 1, 0}
    assert {frame.header["tag"] >> 40 for frame in checker.frames.up} == {(1 << 24) - 1, 0, 1}


def test_every_contribution_can_be_told_in_a_sum() -> None:
    bounds = Bounds(3, workload=(1, 3, 0, 2), change=True)
    lanes = []
    for epoch in range(2):
        for rank in range(3):
            for bucket in (0, 1, 3):
                vector = bounds.data(epoch, bucket, rank)
                for start in range(0, len(vector), 320):
                    (lane,) = np.flatnonzero(vector[start : start + SHORT_LANES - 1])
                    lanes.append(int(lane))
                    assert vector[start + SHORT_LANES - 1] < 0
    assert len(set(lanes)) == len(lanes) == 2 * bounds.contributions


@pytest.mark.parametrize(
    "wrong", [{"workers": 0}, {"workload": ()}, {"workload": (40,)}, {"disagree": True, "workload": (1,)}]
)
def test_bounds_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Bounds(**wrong)


def test_a_limit_is_no_completion() -> None:
    report = Checker(Bounds(2), reference, limit=50).run()
    assert (report.complete, report.kind) == (False, "")
    assert report.states >= 50


def test_the_tool_ends_with_a_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).resolve().parents[2] / "tools" / "modelcheck.py"
    spec = importlib.util.spec_from_file_location("modelcheck_tool", path)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.main(["--switch", "reference", "--workers", "3", "--workload", "0,0"]) == 0
    out = capsys.readouterr().out
    summary = json.loads(out.splitlines()[-1])
    assert (summary["violations"], summary["mutants"], summary["mutants_caught"]) == (0, len(MUTANTS), len(MUTANTS))
    (row,) = summary["bounds"]
    assert (row["workers"], row["rounds"], row["states"], row["complete"]) == (3, 2, summary["states"], True)
    assert "=> wrong result sent: result OR0.1 to A holds 2 x A:OR0.1, not A:OR0.1 + B:OR0.1" in out
    assert tool.main(["--workers", "9", "--json"]) == 2
    assert capsys.readouterr().out == ""


# Classes of states --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", SMALL, ids=Bounds.describe)
def test_classes_of_states_lose_nothing(bounds: Bounds) -> None:
    plain = plainly(bounds)
    for ranks in (False, True):
        told = Quotient(bounds, reference, ranks=ranks, collapse=False, batches=False).run()
        assert (told.violation, told.complete) == ("", True)
        assert (told.unfolded, told.depth, told.worker_states) == (plain.states, plain.depth, plain.worker_states)
        exchanged = ranks and not bounds.disagree
        assert (told.states < plain.states) == exchanged
        assert exchanged or told.transitions == plain.transitions
    found = []
    for make in (reference, lambda: EngineState(engine(), bounds)):
        small = Quotient(bounds, make, batches=make is reference).run()
        assert (small.violation, small.complete) == ("", True)
        assert small.drained == (0 if bounds.amnesia else small.states)
        assert small.worker_states == plain.worker_states
        assert (small.unfolded < plain.states) == bounds.change
        assert (small.batches > 0) == (make is reference)
        found.append((small.states, small.unfolded, small.transitions, small.depth))
    assert found[0] == found[1]


def test_three_workers_two_slots_four_rounds_a_change_and_a_restart() -> None:
    """On the compiled program; the other stream's two slots, and more, in tools/modelcheck.py."""
    bounds = Bounds(3, add_slots=2, workload=(8,), change=True)
    report = Quotient(bounds, lambda: EngineState(engine(), bounds), batches=False).run()
    assert (report.violation, report.complete, report.drained) == ("", True, report.states)
    assert report.unfolded > 17_000


def test_the_compiled_program_and_the_cores_treat_ranks_alike() -> None:
    """Random ways through the states, and the same ways with other ranks: whatever is possible here is possible there.

    With all registers, on the engine: nothing that Quotient builds on is used.
    """
    bounds = Bounds(3, workload=(1, 0, 3), change=True)
    cells = EngineState(engine(), bounds)
    checker = Checker(bounds, lambda: EngineState(engine(), bounds))
    start = tuple(checker._workers.start(rank, 0) for rank in range(3))
    draw = random.Random(11)
    taken = set()
    for _ in range(8):
        order = draw.sample(range(3), 3)
        here: Node = (0, 0, start, 0)
        there = here
        for _ in range(45):
            ways = {said(checker, action, order): node for action, node in checker._successors(here)}
            others = {said(checker, action, [0, 1, 2]): node for action, node in checker._successors(there)}
            assert ways.keys() == others.keys()
            assert looks(checker, cells, here, order) == looks(checker, cells, there, [0, 1, 2])
            rare = [way for way in ways if way[0] == "revoke" and draw.random() > 0.05]
            open_ = sorted(ways.keys() - set(rare))
            if not open_:
                break
            way = draw.choice(open_)
            taken.add(way[0])
            here, there = ways[way], others[way]
    assert {"up", "down", "refused", "revoke", "renew", "enter"} <= taken


def said(checker: Checker, action: Action, order: list[int]) -> tuple[Any, ...]:
    """An action with its rank renamed, and its frame without a rank."""
    what, rank, number = action
    if what not in ("up", "down", "refused"):
        return what, order[rank] if what == "enter" else 0
    header = (checker.frames.down if what == "down" else checker.frames.up)[number].header
    kept = ("kind", "epoch", "slot", "round", "op", "words", "tag", "count_or_reason")
    return what, order[rank], *(header[name] for name in kept)


def looks(checker: Checker, cells: EngineState, node: Node, order: list[int]) -> Any:
    """A state with its ranks renamed: what the cells hold and whom they have counted, and every rank's core."""
    phase, registers, workers, _ = node
    saved: Any = checker._switches.saved[registers]
    held = []
    for content in zip(*saved, strict=True):
        identity, seen = cells.identity(content)
        held.append((identity, {order[rank] for rank in range(3) if seen >> rank & 1}))
    cores: list[Any] = [None] * 3
    for rank, number in enumerate(workers):
        state = checker._workers.states[rank][number]
        sent = {said(checker, ("up", 0, frame), [0]) for frame in state.sent}
        cores[order[rank]] = (state.epoch, sent, state.done, state.error)
    return phase, held, cores


class Courtly(Variant):
    """Right, but the first rank is never counted second: it has to send again."""

    def _aggregate(self, job: Any, member: Any, header: Any, datagram: Any) -> Any:
        cell = self._cells.get(self.key(job, header), _Cell())
        second = self.relation(cell, job, header) is Relation.SAME and cell.seen.bit_count() == 1
        return [] if member.rank == 0 and second else super()._aggregate(job, member, header, datagram)


class Tidy(Variant):
    """Right, but the first frame of an epoch only empties what another one has left in its cell."""

    def _aggregate(self, job: Any, member: Any, header: Any, datagram: Any) -> Any:
        cell = self._cells.get(self.key(job, header))
        if cell is not None and cell.epoch != job.epoch:
            del self._cells[self.key(job, header)]
            return []
        return super()._aggregate(job, member, header, datagram)


class Clears(Variant):
    """Clears a worker's mark in the slot's other version, if there is one."""

    def _aggregate(self, job: Any, member: Any, header: Any, datagram: Any) -> Any:
        other = self._cells.get(self.key(job, header) ^ 1)
        if other is not None:
            other.seen &= ~(1 << member.rank)
        return super()._aggregate(job, member, header, datagram)


class Looks(Variant):
    """Empties its cell when the other version is a round ahead; asks for it only where it is sure to be."""

    def _aggregate(self, job: Any, member: Any, header: Any, datagram: Any) -> Any:
        key = self.key(job, header)
        if key ^ 1 in self._cells and self._cells[key ^ 1].round == header["round"] + 1 and key in self._cells:
            self._cells[key].seen = 0
        return super()._aggregate(job, member, header, datagram)


class Counts(Variant):
    """Forgets its cell when enough marks are set in all cells together."""

    def _aggregate(self, job: Any, member: Any, header: Any, datagram: Any) -> Any:
        if sum(cell.seen.bit_count() for cell in self._cells.values()) >= 3:
            self._cells.pop(self.key(job, header), None)
        return super()._aggregate(job, member, header, datagram)


@pytest.mark.parametrize("switch", [Clears, Looks, Counts])
def test_a_switch_that_looks_at_other_cells_is_seen(switch: Any) -> None:
    """Where a frame is run with its own cell alone there is nothing else to see, so asking is what shows it."""
    bounds = Bounds(2, workload=(1, 1, 1), first_round=0)
    report = Quotient(bounds, lambda: reference(switch)).run()
    assert (report.kind, report.complete) == (UNSOUND, False)
    assert "a cell that is not its own" in report.violation
    plain = Checker(bounds, lambda: reference(switch)).run()
    assert plain.kind not in ("", UNSOUND)
    told = check(bounds, lambda: reference(switch))
    assert (told.kind, told.trace) == (plain.kind, plain.trace)


@pytest.mark.parametrize(
    ("switch", "text", "ranks", "collapse"),
    [
        (Courtly, "the switch does not treat ranks alike", False, True),
        (Tidy, "does different things to cells of one class", True, False),
    ],
)
def test_a_class_that_does_not_hold_is_seen(switch: Any, text: str, ranks: bool, collapse: bool) -> None:
    """Such a switch is right, so nothing but the class shows it; without that class all is well."""
    bounds = Bounds(3, workload=(0,), change=True)
    report = Quotient(bounds, lambda: reference(switch)).run()
    assert (report.kind, report.complete) == (UNSOUND, False)
    assert text in report.violation
    assert check(bounds, lambda: reference(switch)).kind == UNSOUND
    plain = reports(bounds, lambda: reference(switch))
    assert (plain.trace, plain.complete) == ([], True)
    told = Quotient(bounds, lambda: reference(switch), ranks=ranks, collapse=collapse).run()
    assert (told.violation, told.complete) == ("", True)


@pytest.mark.parametrize("offset", [0, 1])
def test_a_frame_that_uses_another_cell_of_the_registers_is_seen(offset: int) -> None:
    bounds = Bounds(2, workload=(0,))
    checker = Quotient(bounds, lambda: EngineState(engine(), bounds))
    first = checker._workers.start(0, 0)
    (frame,) = checker._workers.states[0][first].sent
    checker._labels.sent(frame)
    cells = checker._cells
    assert cells.cell(frame) == 0
    cells._cells[0] += offset
    if offset == 0:
        assert cells.step(0, (0, 0), frame).after == (1, 1)
    else:
        with pytest.raises(Violation, match="cell that is not its own"):
            cells.step(0, (0, 0), frame)


# Mutants -----------------------------------------------------------------------------------------------------------


def test_a_variant_without_a_fault_is_the_reference() -> None:
    for bounds in SMALL[:3]:
        plain, variant = plainly(bounds), reports(bounds, lambda: reference(Variant))
        assert variant.trace == []
        assert (variant.states, variant.transitions) == (plain.states, plain.transitions)


@functools.cache
def mutated(mutant: Mutant) -> Report:
    """State by state, with the fault."""
    return reports(mutant.bounds, lambda: reference(mutant.switch))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_is_found_by_the_shortest_way(mutant: Mutant) -> None:
    report = mutated(mutant)
    print("\n".join(report.trace))
    assert (report.kind, report.steps) == FOUND[mutant.name]
    assert report.trace[-1].startswith(f"=> {report.kind}: ")
    healthy = plainly(mutant.bounds)
    assert healthy.trace == [], "the bounds, not the mutant"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_is_found_through_classes_of_states(mutant: Mutant) -> None:
    """And told state by state, by the same way as without classes."""
    report = Quotient(mutant.bounds, lambda: reference(mutant.switch)).run()
    assert (report.kind, report.steps) == FOUND_BY_CLASSES[mutant.name]
    assert not report.complete
    told = check(mutant.bounds, lambda: reference(mutant.switch))
    assert told.trace == mutated(mutant).trace
    assert (told.kind, told.steps) == FOUND[mutant.name]
    healthy = check(mutant.bounds, reference)
    assert (healthy.violation, healthy.complete) == ("", True)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_no_core_takes_a_wrong_sum_even_from_a_mutant(mutant: Mutant) -> None:
    """The check in every frame, with its signatures, is a second line of defence: within these bounds it holds."""
    report = Checker(mutant.bounds, lambda: reference(mutant.switch), judge=False).run()
    assert report.trace == []
    assert report.complete


def test_the_second_line_is_judged_too() -> None:
    """A core that did not check would be found out."""
    from p4reduce.core.part import BarrierPart

    mutant = MUTANTS[0]
    assert mutant.bounds.workload == (0, 0)
    with pytest.MonkeyPatch.context() as patch:

        def trusting(part: BarrierPart, payload: Any, checks: Any, index: Any) -> Any:
            part.missing -= len(index)
            return np.ones(len(index), dtype=np.bool_)

        patch.setattr(BarrierPart, "store", trusting)
        report = Checker(mutant.bounds, lambda: reference(mutant.switch), judge=False).run()
    assert report.kind == ACCEPTED


# Faults of public programs, by name -----------------------------------------------------------------------------------


Hand = Callable[..., ByHand]


@pytest.fixture(params=["reference", "compiled"])
def hand(request: pytest.FixtureRequest) -> Hand:
    """Makes a job of two ranks, one slot a stream, on the reference switch or on the compiled program."""

    def make(epoch: int = 7, switch: SwitchModel | None = None) -> ByHand:
        if switch is None and request.param == "compiled":
            switch = engine()
        return ByHand(Scenario(2, or_slots=1, add_slots=1, epoch=epoch), switch)

    return make


def vectors(*rows: list[float]) -> list[Reduction]:
    """A bucket per rank. 320 elements fill an ADD frame."""
    arrays = [np.array(row, dtype=np.float32) for row in rows]
    return [Reduction(array, np.full_like(array, np.nan)) for array in arrays]


def agree(job: ByHand, buckets: list[Reduction]) -> None:
    """Submit, and exchange OR frames until the ADD frames are next."""
    job.submit(*buckets)
    while buckets[0].phase is not Phase.AGREED:
        sent = [(rank, frame) for rank in range(2) for frame in job.sent(rank)]
        for rank, frame in sent:
            for to, answer in job.to_switch(rank, frame):
                job.to_worker(to, answer)


def test_a_reordered_stale_retransmission_is_not_counted_twice(hand: Hand) -> None:
    """Two workers, one slot, three chunks; 128 came back in place of 256."""
    schedule = ("A0", "B0", "A1", "A0", "B1", "A2", "B2")
    values = (0, 5, 128)
    slot = SeenBitSlot()
    sums = [slot.take("AB".index(step[0]), int(step[1]), values[int(step[1])]) for step in schedule]
    assert sums[-1] == 128

    job = hand()
    data = [float(values[0])] * 320 + [float(values[1])] * 320 + [float(values[2])] * 320
    buckets = vectors(data, data)
    agree(job, buckets)
    kept: dict[str, bytes] = {}
    for step in schedule:
        rank = "AB".index(step[0])
        for frame in job.sent(rank):
            kept[step[0] + str(field(frame, "round"))] = frame
        for to, answer in job.to_switch(rank, kept[step]):
            job.to_worker(to, answer)
    for bucket in buckets:
        assert bucket.phase is Phase.COMPLETED
        assert (bucket.out[0], bucket.out[320], bucket.out[640]) == (0.0, 10.0, 256.0)


def test_a_lost_acknowledgement_does_not_bring_back_the_previous_sum(hand: Hand) -> None:
    slot = AcknowledgedSlot()
    assert (slot.take(0, 1), slot.take(1, 2)) == (None, 3)
    slot.acknowledge(0)  # the other one is lost
    assert slot.take(1, 20) == 3, "a new call, and the sum of the previous one"

    job = hand()
    first, second = vectors([1.0], [2.0]), vectors([10.0], [20.0])
    late: list[tuple[int, bytes]] = []
    answers: list[tuple[int, bytes]] = []
    for buckets in (first, second):
        job.submit(*buckets)
        steps = 0
        while any(bucket.phase is not Phase.COMPLETED for bucket in buckets):
            steps += 1
            assert steps < 20
            sent = [(rank, frame) for rank in range(2) for frame in job.sent(rank)]
            for rank, frame in sent:
                # Everything from before comes once more, both ways, ahead of every new frame.
                for who, copy in late:
                    answers += job.to_switch(who, copy)
                for who, copy in list(answers):
                    job.to_worker(who, copy)
                answers += job.to_switch(rank, frame)
            if not sent:
                job.to_worker(0, *[answer for who, answer in answers if who == 0])
                job.to_worker(1, *[answer for who, answer in answers if who == 1])
            late += sent
    assert [bucket.out[0] for bucket in (*first, *second)] == [3.0, 3.0, 30.0, 30.0]


def test_nothing_is_counted_twice_after_a_round_pushed_another_out(hand: Hand) -> None:
    """The slot's old content is gone, and whoever brought the new one sends again: 5000 in place of 3000."""
    slot = EvictingSlot()
    assert slot.take(0, 0, 7) is None
    assert slot.take(0, 1, 2000) is None, "pushes segment 0 out"
    assert slot.take(1, 1, 1000) is None, "not complete: the first worker is not marked"
    assert slot.take(0, 1, 2000) == 5000

    # Here an incomplete round is pushed out by a new epoch, whose first frame comes twice.
    old = hand()
    buckets = vectors([7.0], [7.0])
    agree(old, buckets)
    (half,) = old.sent(0)
    assert old.to_switch(0, half) == []
    old.switch.revoke(7)
    job = hand(8, old.switch)
    buckets = vectors([2000.0], [1000.0])
    agree(job, buckets)
    (ours,), (theirs,) = job.sent(0), job.sent(1)
    assert job.to_switch(0, ours) == []
    assert job.to_switch(0, ours) == []
    assert job.switch.count(1, Count.DUPLICATES) == 1
    for to, answer in job.to_switch(1, theirs):
        job.to_worker(to, answer)
    assert [bucket.out[0] for bucket in buckets] == [3000.0, 3000.0]


def test_negative_lanes_leave_their_neighbours_alone(hand: Hand) -> None:
    """+3000 and -3000 in turn; the neighbours of negative lanes came back as 3001."""
    slot = WideSlot()
    lanes = [-1500, 1500] * 8
    slot.add(lanes)
    assert slot.add(lanes)[1] == 3001

    job = hand()
    buckets = vectors([-1500.0, 1500.0] * 32, [-1500.0, 1500.0] * 32)
    job.submit(*buckets)
    job.exchange()
    for bucket in buckets:
        assert bucket.out.tolist() == [-3000.0, 3000.0] * 32


def test_nobody_waits_for_ever_after_a_stale_duplicate(hand: Hand) -> None:
    """A late copy of an older chunk reset the slot; who had lost the result asked for ever."""
    slot = ResettingSlot()
    for chunk in range(2):
        slot.take(0, chunk, 1)
        assert slot.take(1, chunk, 2) == 3
    slot.take(0, 0, 1)  # late
    assert [slot.take(1, 1, 2) for _ in range(100)] == [None] * 100

    job = hand()
    buckets = vectors([1.0] * 960, [2.0] * 960)
    agree(job, buckets)
    rounds: list[list[bytes]] = []
    for round_ in range(3):
        frames = [job.sent(0)[0], job.sent(1)[0]]
        rounds.append(frames)
        answers = [answer for rank, frame in enumerate(frames) for answer in job.to_switch(rank, frame)]
        for to, answer in answers:
            if round_ < 2 or to == 0:
                job.to_worker(to, answer)
        # The second rank loses the last result.
    assert (buckets[0].phase, buckets[1].phase) == (Phase.COMPLETED, Phase.SUMMING)
    for frames in rounds[:2]:
        for rank, frame in enumerate(frames):
            for to, answer in job.to_switch(rank, frame):
                job.to_worker(to, answer)
    assert job.switch.count(1, Count.STALE) == 2, "round 0, whose cell round 2 has taken"
    for to, answer in job.to_switch(1, rounds[2][1]):
        job.to_worker(to, answer)
    for bucket in buckets:
        assert bucket.out.tolist() == [3.0] * 960
