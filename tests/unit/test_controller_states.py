# SPDX-License-Identifier: Apache-2.0
"""The table of states: complete, and every cell leads where this file says it must."""

from __future__ import annotations

import pytest

from p4reduce_controller.admission import Applicant
from p4reduce_controller.hosts import Host, synthetic_mac
from p4reduce_controller.jobs import Jobs
from p4reduce_controller.model import Action, Fence, Install, Job, Reason, Refuse, Remove, Report, Revoke, Signal
from p4reduce_controller.pools import Pools
from p4reduce_controller.states import TABLE, Event, State

HOSTS = [Host(f"h{n}", f"10.0.0.{n}", synthetic_mac(f"10.0.0.{n}"), n) for n in (1, 2)]
EVENTS = list(Event)

# One line for every state, one letter for every event in the order of `Event`. A two-rank job; who sends what is
# said by `signal` below.
EXPECTED = """
ABSENT      J J J A A A A A A A A A A A A
JOINING     I J J A A J J J J J J J J J J
INSTALLING  I J I A I I R A I I I I I I I
RUNNING     R J R R R R R R R R F F F L F
LEAVING     L J L L L L L L L L J J J J J
FAILED      J J J F F F F F F F F F F F F
"""
LETTERS = {
    "A": State.ABSENT,
    "J": State.JOINING,
    "I": State.INSTALLING,
    "R": State.RUNNING,
    "L": State.LEAVING,
    "F": State.FAILED,
}
CELLS = {
    (State[line.split()[0]], event): LETTERS[letter]
    for line in EXPECTED.split("\n")
    if line
    for event, letter in zip(EVENTS, line.split()[1:], strict=True)
}


def applicant(rank: int, incarnation: int = 5) -> Applicant:
    return Applicant("train", 2, rank, incarnation, HOSTS[rank], 4000 + rank, 1000, 30.0)


class Bench:
    """Jobs of which one, "train", is brought into a state. Rank r's Join is RPC 10 + r, its stream 20 + r."""

    def __init__(self) -> None:
        self.jobs = Jobs(Pools(), iter(range(100, 1000)).__next__, lease_seconds=10.0)
        self.ticket = 100

    @property
    def job(self) -> Job:
        return next((job for job in self.jobs.jobs()), Job("train", 2, 5))

    def joining(self) -> None:
        self.jobs.join(applicant(0), 10, 0.0)

    def installing(self) -> None:
        self.joining()
        assert isinstance(self.jobs.join(applicant(1), 11, 0.0)[0], Install)

    def running(self) -> None:
        self.installing()
        self.jobs.installed(100, None, 0.0)
        for rank in (0, 1):
            self.jobs.report(20 + rank, Report("train", 100, rank), 0.0)

    def leaving(self) -> None:
        """Rank 0 has left and waits for the next epoch already."""
        self.running()
        self.jobs.leave("train", 100, 0, 30, 0.0)
        self.jobs.join(applicant(0), 12, 0.0)

    def failed(self) -> None:
        self.running()
        self.jobs.broken(21, 0.0)

    def bring_to(self, state: State) -> None:
        if state is not State.ABSENT:
            getattr(self, state.name.lower())()
        assert self.job.state is state

    def fire(self, state: State, event: Event) -> list[Action]:
        """Send the event of EXPECTED to the job."""
        job = self.job
        self.jobs._dispatch(job, event, signal(state, event))
        self.after = job.state
        return self.jobs._drain()


def signal(state: State, event: Event) -> Signal:
    """Rank 0 is who waits, rank 1 who is still there."""
    if event is Event.JOIN:
        joiner = 0 if state is State.LEAVING else 1
        return Signal(1.0, ticket=50, rank=joiner, applicant=applicant(joiner))
    if event in (Event.JOIN_NEWER, Event.JOIN_OLDER):
        newer = applicant(1, 6 if event is Event.JOIN_NEWER else 4)
        return Signal(1.0, ticket=50, rank=1, applicant=newer)
    if event in (Event.WITHDRAW, Event.EXPIRE):
        return Signal(31.0, ticket=10, rank=0)
    trouble = Fence(Reason.INTEGRITY, "sums differ", (), 3) if event is Event.TROUBLE else None
    rank = 0 if state is State.RUNNING and event is Event.LEAVE else 1
    report = Report("train", 100, 1, 7, 6, trouble)
    return Signal(1.0, ticket=21 if event is not Event.OPEN else 60, rank=rank, epoch=100, ranks=(1,), report=report)


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
    if event is Event.JOIN_OLDER and state not in (State.ABSENT, State.FAILED):
        assert [type(action) for action in actions] == [Refuse]


def test_every_state_is_reached_and_every_step_is_used() -> None:
    assert set(CELLS.values()) == set(State)
    steps = {cell.step for row in TABLE.values() for cell in row.values()}
    assert "ignore" in steps
    assert len(steps) > 20


LONE: dict[Event, State] = {
    Event.TROUBLE: State.FAILED,
    Event.BREAK: State.FAILED,
    Event.LAPSE: State.FAILED,
    Event.LEAVE: State.ABSENT,
    Event.SWITCH_LOST: State.FAILED,
}


@pytest.mark.parametrize("event", LONE)
def test_leaving_when_nobody_waits_for_the_next_epoch(event: Event) -> None:
    bench = Bench()
    bench.running()
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
