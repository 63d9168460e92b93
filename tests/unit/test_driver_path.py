# SPDX-License-Identifier: Apache-2.0
"""The table of `p4reduce.path`: every order in every state, and where buckets go."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.driver_job import ADD_SLOTS, OR_SLOTS, W5

from p4reduce.core.bucket import Barrier
from p4reduce.core.config import CoreConfig
from p4reduce.core.events import Completed
from p4reduce.errors import P4ReduceError
from p4reduce.orders import Answer, Hold, Order, RunRing, RunSwitch, Stop, Trial, reason
from p4reduce.path import Path, State


class Runner:
    """Takes what the ring would sum."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def put(self, kept: Any) -> None:
        self.numbers.append(kept.number)


CONFIG = CoreConfig("job", 9, 0, 2, W5, OR_SLOTS, ADD_SLOTS)
OLD, RING, NEW, OTHER = 9, 10, 11, 99


def a_path(state: State) -> Path:
    """In `state`, with buckets 0 to 3 handed in; where the switch is tried it has stood the test."""
    start: RunSwitch | RunRing = RunSwitch(number=1, epoch=OLD, or_slots=OR_SLOTS, add_slots=ADD_SLOTS)
    if state not in (State.SWITCH, State.STOPPED):
        start = RunRing(number=1, epoch=RING)
    path = Path(CONFIG, start, 0.0)
    path.runner = Runner()  # type: ignore[assignment]
    for number in range(4):
        path.route(number, Barrier(), 0.0)
    if state is State.STOPPED:
        path.carry_out(Stop(number=2, epoch=OLD), 0.0)
    if state in (State.TRYING, State.HOLDING):
        path.carry_out(Trial(number=2, epoch=NEW, or_slots=OR_SLOTS, add_slots=ADD_SLOTS), 0.0)
        path._passed, path._trial_until = True, None
        path.core.handover()  # type: ignore[union-attr]
        path._core = path._new_core(Trial(number=2, epoch=NEW, or_slots=OR_SLOTS, add_slots=ADD_SLOTS), 0.0)
    if state is State.HOLDING:
        path.carry_out(Hold(number=3), 0.0)
    assert path.state is state
    for number in range(4, 6):
        path.route(number, Barrier(), 0.0)
    return path


def switch(epoch: int, first: int) -> RunSwitch:
    return RunSwitch(number=10, epoch=epoch, or_slots=OR_SLOTS, add_slots=ADD_SLOTS, first_bucket=first)


def trial(epoch: int) -> Trial:
    return Trial(number=10, epoch=epoch, or_slots=OR_SLOTS, add_slots=ADD_SLOTS)


def ring(epoch: int, first: int = 0) -> RunRing:
    return RunRing(number=10, epoch=epoch, first_bucket=first)


def stop(epoch: int) -> Stop:
    return Stop(number=10, epoch=epoch)


HELD_BACK = Hold(number=10)
S, P, R, T, H = State.SWITCH, State.STOPPED, State.RING, State.TRYING, State.HOLDING
# State, order, state after (None: out of place), bucket answered or "failed" (None: no answer).
TABLE: list[tuple[State, Order, State | None, int | str | None]] = [
    (S, stop(OLD), P, 0),
    (S, stop(OTHER), None, None),
    (S, ring(RING), None, None),
    (S, trial(NEW), None, None),
    (S, trial(OLD), None, None),
    (S, HELD_BACK, None, None),
    (S, switch(OLD, 0), S, None),
    (S, switch(OLD, 6), None, None),
    (S, switch(NEW, 6), None, None),
    (P, stop(OLD), P, 0),
    (P, stop(OTHER), None, None),
    (P, ring(RING), R, None),
    (P, ring(RING, 3), None, None),
    (P, ring(RING, 9), None, None),
    (P, trial(NEW), P, "failed"),
    (P, HELD_BACK, None, None),
    (P, switch(OLD, 0), None, None),
    (P, switch(NEW, 6), None, None),
    (R, stop(RING), None, None),
    (R, stop(OLD), None, None),
    (R, ring(RING), R, None),
    (R, ring(RING, 2), None, None),
    (R, ring(OTHER), None, None),
    (R, trial(NEW), T, None),
    (R, HELD_BACK, None, None),
    (R, switch(NEW, 6), None, None),
    (T, stop(NEW), P, 6),
    (T, stop(OLD), None, None),
    (T, ring(RING), R, None),
    (T, ring(OTHER), None, None),
    (T, trial(NEW), T, 0),
    (T, trial(OTHER), T, None),
    (T, HELD_BACK, H, 6),
    (T, switch(NEW, 6), None, None),
    (H, stop(NEW), P, 4),
    (H, stop(OLD), None, None),
    (H, ring(RING), R, None),
    (H, ring(OTHER), None, None),
    (H, trial(NEW), H, 0),
    (H, trial(OTHER), T, None),
    (H, HELD_BACK, H, 4),
    (H, switch(NEW, 4), S, None),
    (H, switch(NEW, 5), S, None),
    (H, switch(NEW, 9), S, None),
    (H, switch(NEW, 3), None, None),
    (H, switch(OTHER, 4), None, None),
]


def label(row: Any) -> str:
    state, order = row[:2]
    rest = [str(getattr(order, name)) for name in ("epoch", "first_bucket") if hasattr(order, name)]
    return "-".join([state.value, type(order).__name__, *rest])


def test_the_table_has_every_order_in_every_state() -> None:
    kinds = (RunSwitch, RunRing, Stop, Trial, Hold)
    assert {(row[0], type(row[1])) for row in TABLE} == {(state, kind) for state in State for kind in kinds}
    assert len({label(row) for row in TABLE}) == len(TABLE)


@pytest.mark.parametrize(("state", "order", "after", "answer"), TABLE, ids=[label(row) for row in TABLE])
def test_an_order_in_a_state(state: State, order: Order, after: State | None, answer: Any) -> None:
    path = a_path(state)
    fed = list(path.runner.numbers)  # type: ignore[union-attr]
    if after is None:
        with pytest.raises(P4ReduceError, match=f"out of place in state {state.value}"):
            path.carry_out(order, 1.0)
        assert path.state is state
        assert path.runner.numbers == fed  # type: ignore[union-attr]
        return
    assert path.carry_out(order, 1.0)
    assert path.state is after
    if answer is None:
        assert path.answer is None
    elif answer == "failed":
        assert path.answer is not None
        assert path.answer.failed
        assert path.answer.order == 10
    else:
        assert path.answer == Answer(10, answer)
    assert not path.carry_out(order, 1.0), "the same number again is nothing new"
    fed = path.runner.numbers  # type: ignore[union-attr]
    assert fed == list(range(len(fed)))
    assert (path.core is not None) == (after in (S, T, H))


@pytest.mark.parametrize("state", list(State))
def test_buckets_go_where_the_state_says(state: State) -> None:
    path = a_path(state)
    expected = {S: [], P: [], R: range(6), T: range(6), H: range(4)}[state]
    assert path.runner.numbers == list(expected)  # type: ignore[union-attr]
    with pytest.raises(P4ReduceError, match="bucket 7 comes where 6 is due"):
        path.route(7, Barrier(), 0.0)


def test_zeros_must_come_back_as_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(CONFIG, RunRing(number=1, epoch=RING), 0.0)
    path.carry_out(trial(NEW), 0.0)
    assert path.core is not None
    assert path._trial is not None
    path._trial.out[:] = 0
    path._trial.out[-1] = 1
    monkeypatch.setattr(path.core, "events", lambda: [Completed(path._trial)])
    assert path.events(0.1) == []
    assert path.answer == Answer(10, failed=True, message="zeros did not come back as zeros")
    assert path.core is None


def test_a_path_without_a_ring_says_so() -> None:
    path = Path(CONFIG, RunRing(number=1, epoch=RING), 0.0)
    with pytest.raises(P4ReduceError, match="needs a ring path"):
        path.route(0, Barrier(), 0.0)


def test_reasons_are_one_word() -> None:
    for why, word in (
        ("silent: bucket 5", "silent"),
        ("drained", "drained"),
        ("", "unknown"),
        (" no_room : x", "no_room"),
    ):
        assert reason(RunRing(number=1, epoch=1, why=why)) == word
