# SPDX-License-Identifier: Apache-2.0
"""A job's life as one table: what each event does in each state, and where it may lead.

    ABSENT ──join──► JOINING ──all ranks there──► INSTALLING ──switch ready──► SWITCH
                        │                                                    ▲      │ trouble, drain, mode off
                        └──no room, no switch, mode off──► RING ◄────────┐   │      ▼
                                                            │  ▲         └───┼── CUTTING (every rank stops)
                            switch healthy, room: install   ▼  │ failed      │
                                                         PREPARING ─► TRYING ─► HOLDING (agree on a bucket)

    SWITCH … HOLDING ──a rank has left──► LEAVING ──the last leaves──► ABSENT
    SWITCH … LEAVING ──fence──► FAILED ──join──► JOINING
    SWITCH … LEAVING ──all ranks are gone without a word──► ENDED ──join──► JOINING

Every rank's Join waits while its job is JOINING or INSTALLING. A fence is the loud end of a membership: its entries are
revoked on the switch, then the workers are told. A job that ends takes its record with it (ABSENT) unless it failed:
then the record stays, to be shown, until the name is joined again.

A controller that was stopped or restarted may have missed that the ranks left. When none of them is there any more
then, the job has ENDED: nobody heard whether it had finished, and nobody is left who could be told of a failure.

A rank that leaves stays a full member until the others have completed what it took part in; the job's state does not
change before it has left for good. Then nothing moves any more: the path stays what it is, a cut needs every rank.

What is said about a membership that is not the record's present one meets the row ABSENT, whatever the record's state.
A rank that has left may join the next round while others are still LEAVING; its Join waits for them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """Where a job stands. The value is what status shows."""

    ABSENT = "absent"
    JOINING = "joining"
    INSTALLING = "installing"
    SWITCH = "switch"
    CUTTING = "cutting"
    RING = "ring"
    PREPARING = "preparing"
    TRYING = "trying"
    HOLDING = "holding"
    LEAVING = "leaving"
    FAILED = "failed"
    ENDED = "ended"


MEANINGS: dict[State, str] = {
    State.ABSENT: "There is no record.",
    State.JOINING: "Some ranks wait for the others, or for a pool.",
    State.INSTALLING: "All ranks are there; the switch takes the epoch's entries.",
    State.SWITCH: "Every bucket takes the switch path.",
    State.CUTTING: "The ranks are ordered to stop the switch path; some have not answered yet.",
    State.RING: "Every bucket takes the ring path.",
    State.PREPARING: "Ring path; the switch takes the entries of a new epoch.",
    State.TRYING: "Ring path; the ranks try the new epoch with a frame of zeros.",
    State.HOLDING: "Ring path; the trial was good, the ranks hold new buckets back and say how many they have.",
    State.LEAVING: "At least one rank has left; the others finish, on the path they are on.",
    State.FAILED: "Fenced; the record stays to be shown.",
    State.ENDED: "All ranks were gone when the controller was back from a stop or restart; shown likewise.",
}

LIVE = frozenset({State.SWITCH, State.CUTTING, State.RING, State.PREPARING, State.TRYING, State.HOLDING, State.LEAVING})
"""States in which workers may be reducing."""
OVER = frozenset({State.FAILED, State.ENDED})
"""States of a membership that is over, but still shown."""
ON_SWITCH = frozenset({State.SWITCH, State.TRYING, State.HOLDING, State.LEAVING})
"""States in which the switch must hold the entries of what the job leases."""


class Event(Enum):
    """What can happen to a job."""

    JOIN = "a rank joins in the record's incarnation"
    JOIN_NEWER = "a rank joins in a higher incarnation"
    JOIN_OLDER = "a rank joins in a lower incarnation"
    WITHDRAW = "a waiting rank's Join was cancelled, or its client died"
    EXPIRE = "a waiting rank's wait_seconds have passed"
    POOL_FREE = "a pool of the switch came free"
    INSTALLED = "the switch holds the epoch's entries"
    INSTALL_FAILED = "the switch refused the epoch's entries, or is gone"
    OPEN = "a rank opens its progress stream"
    REPORT = "a rank reports"
    TROUBLE = "a rank reports that it cannot go on"
    SILENT = "a rank reports that it gets no results, or a rank in doubt has reported"
    ANSWER = "a rank answers the current order"
    BREAK = "a rank's progress stream ended"
    LAPSE = "a rank did not report for the length of its lease"
    LATE = "an answer is overdue"
    LEAVE = "a rank wants to leave"
    DEPART = "a leaving rank is needed no more, or has waited long enough"
    HEALTHY = "the switch has been healthy long enough"
    SWITCH_LOST = "the switch lost the epoch or entries of it, or stays away while the ranks wait for it"
    DRAIN = "an operator drains the switch"
    MODE = "an operator has changed the job's mode"
    EVICT = "an operator ends the job"


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell: the method of `Jobs` that handles it (without its underscore), and the states it may lead to."""

    step: str
    leads_to: frozenset[State]


def _cell(step: str, *leads_to: State) -> Cell:
    return Cell(step, frozenset(leads_to))


_A, _J, _I, _S, _C, _R = State.ABSENT, State.JOINING, State.INSTALLING, State.SWITCH, State.CUTTING, State.RING
_P, _T, _H, _L, _F = State.PREPARING, State.TRYING, State.HOLDING, State.LEAVING, State.FAILED
_N = State.ENDED
_E = Event
_ROUND = (_A, _J, _I, _R)
"""Where a rank that takes a seat may lead: refused, waiting, or the last one."""


def _row(state: State, cells: dict[Event, Cell]) -> dict[Event, Cell]:
    """A whole row: what `cells` does not name is ignored."""
    return {event: cells.get(event, _cell("ignore", state)) for event in Event}


def _idle(state: State, cells: dict[Event, Cell]) -> dict[Event, Cell]:
    """A row without a membership: streams and leaves are about one that is over."""
    return _row(state, {_E.OPEN: _cell("open_past", state), _E.LEAVE: _cell("leave_past", state)} | cells)


def _live(state: State, cells: dict[Event, Cell]) -> dict[Event, Cell]:
    """A row with a membership of which nobody has left."""
    return _row(
        state,
        {
            _E.JOIN: _cell("join_again", state),
            _E.JOIN_NEWER: _cell("supersede", *_ROUND),
            _E.JOIN_OLDER: _cell("refuse_older", state),
            _E.OPEN: _cell("open", state),
            _E.REPORT: _cell("report", state),
            _E.BREAK: _cell("lose_broken", state, _F),
            _E.LAPSE: _cell("lose_silent", _F, _N),
            _E.LEAVE: _cell("leave", state),
            _E.DEPART: _cell("depart", _L, _A),
            _E.EVICT: _cell("evict", _F),
        }
        | cells,
    )


def _promoting(state: State, cells: dict[Event, Cell]) -> dict[Event, Cell]:
    """A row of the ring path with a new epoch under way; nobody is leaving."""
    return _live(
        state,
        {
            _E.TROUBLE: _cell("trouble", state, _R, _F),
            _E.LEAVE: _cell("leave_trial", state, _R),
            _E.DEPART: _cell("ignore", state),
            _E.DRAIN: _cell("give_up", _R),
            _E.MODE: _cell("mode_trial", state, _R),
        }
        | cells,
    )


_START = dict.fromkeys((_E.JOIN, _E.JOIN_NEWER, _E.JOIN_OLDER), _cell("start", *_ROUND))
"""Whatever the incarnation: a fresh launch of the job starts again at 0."""

TABLE: dict[State, dict[Event, Cell]] = {
    _A: _idle(_A, _START),
    _J: _idle(
        _J,
        {
            _E.JOIN: _cell("seat", *_ROUND),
            _E.JOIN_NEWER: _cell("outdate", *_ROUND),
            _E.JOIN_OLDER: _cell("refuse_older", _J),
            _E.WITHDRAW: _cell("unseat", _A, _J),
            _E.EXPIRE: _cell("expire", _A),
            _E.POOL_FREE: _cell("complete", *_ROUND),
            _E.DRAIN: _cell("complete", *_ROUND),
            _E.EVICT: _cell("evict_seats", _A),
        },
    ),
    _I: _idle(
        _I,
        {
            _E.JOIN: _cell("join_again", _I),
            _E.JOIN_NEWER: _cell("outdate", *_ROUND),
            _E.JOIN_OLDER: _cell("refuse_older", _I),
            _E.WITHDRAW: _cell("abandon", _A),
            # EXPIRE is ignored: all ranks are there and the switch has a deadline of its own, the answer is near.
            _E.INSTALLED: _cell("grant", _S, _R, _A),
            _E.INSTALL_FAILED: _cell("install_failed", _A, _R),
            _E.EVICT: _cell("evict_seats", _A),
        },
    ),
    _S: _live(
        _S,
        {
            _E.TROUBLE: _cell("trouble", _S, _C, _F),
            _E.SILENT: _cell("silence", _S, _C),
            _E.LATE: _cell("settle", _F),
            _E.SWITCH_LOST: _cell("lose_switch", _C, _F),
            _E.DRAIN: _cell("drain", _S, _C),
            _E.MODE: _cell("mode", _S, _C),
        },
    ),
    _C: _live(
        _C,
        {
            _E.TROUBLE: _cell("trouble", _C, _F),
            _E.ANSWER: _cell("stopped", _C, _R, _F),
            _E.MODE: _cell("mode_cut", _C),
            _E.LATE: _cell("lose_mute", _F),
            _E.DEPART: _cell("depart", _L, _A, _F),
        },
    ),
    _R: _live(
        _R,
        {
            _E.POOL_FREE: _cell("room", _R),
            _E.TROUBLE: _cell("trouble", _R, _F),
            _E.HEALTHY: _cell("promote", _R, _P),
            _E.MODE: _cell("mode_ring", _R),
        },
    ),
    _P: _promoting(
        _P,
        {
            _E.INSTALLED: _cell("prepared", _T, _R),
            _E.INSTALL_FAILED: _cell("unprepared", _R),
        },
    ),
    _T: _promoting(
        _T,
        {
            _E.ANSWER: _cell("tried", _T, _H, _R),
            _E.LATE: _cell("trial_late", _R),
            _E.SWITCH_LOST: _cell("trial_lost", _R),
        },
    ),
    _H: _promoting(
        _H,
        {
            _E.ANSWER: _cell("held", _H, _S, _R),
            _E.LATE: _cell("lose_mute", _F),
            _E.SWITCH_LOST: _cell("trial_lost", _R),
        },
    ),
    _L: _live(
        _L,
        {
            _E.JOIN: _cell("seat_early", _L),
            _E.WITHDRAW: _cell("unseat_early", _L),
            _E.EXPIRE: _cell("expire_early", _L),
            _E.TROUBLE: _cell("trouble", _L, _F, *_ROUND),
            # The stream of a rank that has left may end as it likes.
            _E.BREAK: _cell("lose_broken", _L, _F, *_ROUND),
            _E.LAPSE: _cell("lose_silent", _F, _N, *_ROUND),
            _E.LATE: _cell("settle", _F, *_ROUND),
            _E.DEPART: _cell("depart", _L, *_ROUND),
            _E.SWITCH_LOST: _cell("lose_switch", _L, _F, *_ROUND),
        },
    ),
    _F: _idle(_F, _START),
    _N: _idle(_N, _START),
}


def markdown() -> str:
    """The table for docs/states.md, which a test compares with this."""
    lines = [
        "# The states of a job",
        "",
        "Generated from `controller/p4reduce_controller/states.py`, the table that the controller runs on:",
        "`python -m p4reduce_controller.states > docs/states.md`. A test holds that both agree.",
        "",
        "| State | Meaning |",
        "|---|---|",
        *(f"| {state.value} | {MEANINGS[state]} |" for state in State),
        "",
        "Every event in every state: the step that handles it, and the states it may lead to. Events that a state does",
        "not list are ignored in it.",
    ]
    for state in State:
        lines += ["", f"## {state.value}", "", "| Event | Step | Leads to |", "|---|---|---|"]
        for event, cell in TABLE[state].items():
            if cell.step != "ignore":
                targets = ", ".join(target.value for target in State if target in cell.leads_to)
                lines.append(f"| {event.name}: {event.value} | {cell.step} | {targets} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
