# SPDX-License-Identifier: Apache-2.0
"""The table of states: complete, and every cell leads where this file says it must."""

from __future__ import annotations

from pathlib import Path

import pytest

from p4reduce_controller.admission import Applicant
from p4reduce_controller.hosts import Host, synthetic_mac
from p4reduce_controller.jobs import Jobs
from p4reduce_controller.model import (
    Action,
    Answer,
    Departure,
    Doubt,
    Fence,
    Install,
    Job,
    Reason,
    Refuse,
    Remove,
    Report,
    Revoke,
    Run,
    Signal,
)
from p4reduce_controller.pools import Pools
from p4reduce_controller.states import LIVE, MEANINGS, OVER, TABLE, Event, State, markdown

HOSTS = [Host(f"h{n}", f"10.0.0.{n}", synthetic_mac(f"10.0.0.{n}"), n) for n in (1, 2)]
EVENTS = list(Event)
STATES_PAGE = Path(__file__).parents[2] / "docs" / "states.md"

# One line for every state, one letter for every event in the order of `Event`. A two-rank job with a ring path; who
# sends what is said by `signal` and `prepare` below.
EXPECTED = """
ABSENT      J J J A A A A A A A A A A A A A A A A A A A A
JOINING     I J J A A J J J J J J J J J J J J J J J J J A
INSTALLING  I J I A I I S R I I I I I I I I I I I I I I A
SWITCH      S J S S S S S S S S C C S F F F S L S C C C F
CUTTING     C J C C C C C C C C C C R F F F C F C C C C F
RING        R J R R R R R R R R F R R F F R R L P R R R F
PREPARING   P J P P P P T R P P F P P F F P R P P P R R F
TRYING      T J T T T T T T T T F T H F F R R T T R R R F
HOLDING     H J H H H H H H H H F H S F F F R H H R R R F
LEAVING     L J L L L L L L L L J L L J J J L J L J L L F
FAILED      J J J F F F F F F F F F F F F F F F F F F F F
ENDED       J J J E E E E E E E E E E E E E E E E E E E E
"""
LETTERS = {state.name[0]: state for state in State}
CELLS = {
    (State[line.split()[0]], event): LETTERS[letter]
    for line in EXPECTED.split("\n")
    if line
    for event, letter in zip(EVENTS, line.split()[1:], strict=True)
}


def applicant(rank: int, incarnation: int = 5) -> Applicant:
    return Applicant("train", 2, rank, incarnation, HOSTS[rank], 4000 + rank, 1000, 30.0, ring=True)


class Bench:
    """Jobs of which one, "train", is brought into a state. Rank r's Join is RPC 10 + r, its stream 20 + r."""

    def __init__(self) -> None:
        self.jobs = Jobs(Pools(), iter(range(100, 1000)).__next__, lease_seconds=10.0)
        self.ticket = 100

    @property
    def job(self) -> Job:
        return next((job for job in self.jobs.jobs()), Job("train", 2, 5))

    @property
    def run(self) -> Run:
        assert self.job.run is not None
        return self.job.run

    def report(self, rank: int, now: float, answer: int | None = None, trouble: Fence | None = None) -> None:
        said = None if answer is None else Answer(self.run.order.number, answer)
        self.jobs.report(20 + rank, Report("train", 100, rank, 7, 6, trouble, said), now)

    def joining(self) -> None:
        self.jobs.join(applicant(0), 10, 0.0)

    def installing(self) -> None:
        self.joining()
        assert isinstance(self.jobs.join(applicant(1), 11, 0.0)[0], Install)

    def switch(self) -> None:
        self.installing()
        self.jobs.installed(100, None, 0.0)
        for rank in (0, 1):
            self.report(rank, 0.0)

    def cutting(self) -> None:
        self.switch()
        self.report(1, 0.0, trouble=Fence(Reason.REFUSED, "not admitted", (), 6))

    def ring(self) -> None:
        self.cutting()
        for rank in (0, 1):
            self.report(rank, 0.0, answer=6)

    def preparing(self) -> None:
        self.ring()
        self.jobs.tick(1.0)

    def trying(self) -> None:
        self.preparing()
        assert self.run.plan is not None
        self.jobs.installed(self.run.plan.number, None, 1.0)

    def holding(self) -> None:
        self.trying()
        for rank in (0, 1):
            self.report(rank, 1.0, answer=0)

    def leaving(self) -> None:
        """Rank 0 has left and waits for the next epoch already."""
        self.switch()
        self.jobs.leave("train", 100, 0, 30, 0.0)
        self.jobs.join(applicant(0), 12, 0.0)

    def failed(self) -> None:
        self.switch()
        self.jobs.broken(21, 0.0)

    def ended(self) -> None:
        """The ranks left while the controller was stopped."""
        self.switch()
        for rank in (0, 1):
            self.jobs.report(20 + rank, Report("train", 100, rank, 7, 7), 0.0)
        self.jobs.woken(100.0)
        for rank in (0, 1):
            self.jobs.broken(20 + rank, 100.0)
        self.jobs.tick(200.0)

    def bring_to(self, state: State) -> None:
        if state is not State.ABSENT:
            getattr(self, state.name.lower())()
        assert self.job.state is state

    def prepare(self, state: State, event: Event) -> None:
        """What is the case when the event comes, beside what its signal says."""
        if state not in LIVE:
            return
        if event is Event.ANSWER:
            self.run.answers = {rank: Answer(self.run.order.number, 6) for rank in (0, 1)}
        elif event is Event.SILENT:
            self.run.workers[1].silent = 2.0
        elif event is Event.LATE and state in (State.SWITCH, State.LEAVING):
            self.run.doubt = Doubt(Fence(Reason.STALLED, "stalled", (0,), 7), 1, 1.0)
        elif event is Event.DEPART:
            self.run.workers[1 if state is State.LEAVING else 0].leaving = Departure([70], 6, 1.0)
        elif event is Event.MODE:
            self.job.mode = "off"

    def fire(self, state: State, event: Event) -> list[Action]:
        """Send the event of EXPECTED to the job."""
        job = self.job
        self.prepare(state, event)
        self.jobs._dispatch(job, event, signal(state, event))
        self.after = job.state
        return self.jobs._taken()


def signal(state: State, event: Event) -> Signal:
    """Rank 0 is who waits or leaves first, rank 1 who is still there."""
    if event is Event.JOIN:
        joiner = 0 if state is State.LEAVING else 1
        return Signal(2.0, ticket=50, rank=joiner, applicant=applicant(joiner))
    if event in (Event.JOIN_NEWER, Event.JOIN_OLDER):
        newer = applicant(1, 6 if event is Event.JOIN_NEWER else 4)
        return Signal(2.0, ticket=50, rank=1, applicant=newer)
    if event in (Event.WITHDRAW, Event.EXPIRE):
        return Signal(31.0, ticket=10, rank=0)
    trouble = Fence(Reason.INTEGRITY, "sums differ", (), 6) if event is Event.TROUBLE else None
    rank = 0 if state is not State.LEAVING and event in (Event.LEAVE, Event.DEPART) else 1
    report = Report("train", 100, 1, 7, 6, trouble)
    return Signal(2.0, ticket=21 if event is not Event.OPEN else 60, rank=rank, epoch=100, ranks=(1,), report=report)


def test_the_table_is_complete_and_names_real_steps() -> None:
    assert set(TABLE) == set(State)
    for state, row in TABLE.items():
        assert set(row) == set(Event), state
        for event, cell in row.items():
            assert callable(getattr(Jobs, f"_{cell.step}", None)), (state, event, cell.step)
            assert cell.leads_to, (state, event)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_every_cell(state: State, event: Event) -> None:
    bench = Bench()
    bench.bring_to(state)
    cell = TABLE[state][event]
    actions = bench.fire(state, event)
    assert bench.after is CELLS[state, event]
    assert bench.after in cell.leads_to
    if cell.step == "ignore":
        assert actions == []
        assert bench.after is state
    if event is Event.JOIN_OLDER and state not in {State.ABSENT} | OVER:
        assert [type(action) for action in actions] == [Refuse]


def test_every_state_is_reached_and_every_step_is_used() -> None:
    assert set(CELLS.values()) == set(State)
    assert set(State) - LIVE - OVER == {State.ABSENT, State.JOINING, State.INSTALLING}
    steps = {cell.step for row in TABLE.values() for cell in row.values()}
    assert "ignore" in steps
    assert len(steps) > 40


def test_the_page_shows_the_table() -> None:
    assert STATES_PAGE.read_text(encoding="utf-8") == markdown()
    assert set(MEANINGS) == set(State)
    for state in State:
        for event, cell in TABLE[state].items():
            shown = f"| {event.name}: {event.value} | {cell.step} |"
            section = markdown().split(f"\n## {state.value}\n")[1].split("\n## ")[0]
            assert (shown in section) == (cell.step != "ignore")


LONE: dict[Event, State] = {
    Event.TROUBLE: State.FAILED,
    Event.BREAK: State.FAILED,
    Event.LAPSE: State.FAILED,
    Event.LATE: State.FAILED,
    Event.DEPART: State.ABSENT,
    Event.SWITCH_LOST: State.FAILED,
}


@pytest.mark.parametrize("event", LONE)
def test_leaving_when_nobody_waits_for_the_next_epoch(event: Event) -> None:
    bench = Bench()
    bench.switch()
    bench.jobs.leave("train", 100, 0, 30, 0.0)
    assert bench.job.state is State.LEAVING
    actions = bench.fire(State.LEAVING, event)
    assert bench.after is LONE[event]
    assert sum(isinstance(action, Revoke) for action in actions) == 1


def test_a_step_that_leads_elsewhere_is_a_defect_and_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.joining()
    monkeypatch.setattr(Jobs, "_unseat", lambda *_: State.FAILED)
    with pytest.raises(RuntimeError, match="WITHDRAW in JOINING must not lead to FAILED"):
        bench.jobs.withdraw(10, 0.0)


def test_removal_frees_what_the_table_let_go() -> None:
    bench = Bench()
    bench.failed()
    held = [pool for pool in bench.jobs.pools() if pool.job]
    assert [pool.epoch for pool in held] == [100]
    assert isinstance(bench.jobs.revoked(100, None, 1.0)[-1], Remove)
    bench.jobs.removed(100, None, {"results": 3}, 1.0)
    assert not [pool for pool in bench.jobs.pools() if pool.job]
    assert bench.job.run is not None
    assert bench.job.run.counters == {"results": 3}
