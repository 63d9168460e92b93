# SPDX-License-Identifier: Apache-2.0
"""A job's life as one table: what each event does in each state, and where it may lead.

    ABSENT ──join──► JOINING ──all ranks there──► INSTALLING ──switch ready──► RUNNING ──a rank leaves──► LEAVING
                        ▲                                                         │                          │
                        └──────join, any incarnation────── FAILED ◄───fence───────┴──────────fence───────────┤
                                                                                                 last leaves ▼ ABSENT

Every rank's Join waits while its job is JOINING or INSTALLING. A fence is the loud end of an epoch: its entries are
revoked on the switch, then the workers are told. A job that ends takes its record with it (ABSENT) unless it failed:
then the record stays, to be shown, until the name is joined again.

What is said about an epoch that is not the record's present one meets the row ABSENT, whatever the record's state.
A rank that has left may join the next round while others are still LEAVING; its Join waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """Where a job stands. The value is what status shows."""

    ABSENT = "absent"
    JOINING = "joining"
    INSTALLING = "installing"
    RUNNING = "running"
    LEAVING = "leaving"
    FAILED = "failed"


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
    BREAK = "a rank's progress stream ended"
    LAPSE = "a rank did not report for the length of its lease"
    LEAVE = "a rank leaves"
    SWITCH_LOST = "the switch came back without the epoch, or stays away while the ranks wait for it"


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell: the method of `Jobs` that handles it (without its underscore), and the states it may lead to."""

    step: str
    leads_to: frozenset[State]


def _cell(step: str, *leads_to: State) -> Cell:
    return Cell(step, frozenset(leads_to))


_A, _J, _I, _R, _L, _F = State.ABSENT, State.JOINING, State.INSTALLING, State.RUNNING, State.LEAVING, State.FAILED
_E = Event
_ROUND = (_A, _J, _I)
"""Where a rank that takes a seat may lead: refused, waiting, or the last one."""

TABLE: dict[State, dict[Event, Cell]] = {
    _A: {
        _E.JOIN: _cell("start", *_ROUND),
        _E.JOIN_NEWER: _cell("start", *_ROUND),
        _E.JOIN_OLDER: _cell("start", *_ROUND),
        _E.WITHDRAW: _cell("ignore", _A),
        _E.EXPIRE: _cell("ignore", _A),
        _E.POOL_FREE: _cell("ignore", _A),
        _E.INSTALLED: _cell("ignore", _A),
        _E.INSTALL_FAILED: _cell("ignore", _A),
        _E.OPEN: _cell("open_past", _A),
        _E.REPORT: _cell("ignore", _A),
        _E.TROUBLE: _cell("ignore", _A),
        _E.BREAK: _cell("ignore", _A),
        _E.LAPSE: _cell("ignore", _A),
        _E.LEAVE: _cell("leave_past", _A),
        _E.SWITCH_LOST: _cell("ignore", _A),
    },
    _J: {
        _E.JOIN: _cell("seat", *_ROUND),
        _E.JOIN_NEWER: _cell("outdate", *_ROUND),
        _E.JOIN_OLDER: _cell("refuse_older", _J),
        _E.WITHDRAW: _cell("unseat", _A, _J),
        _E.EXPIRE: _cell("expire", _A),
        _E.POOL_FREE: _cell("complete", *_ROUND),
        _E.INSTALLED: _cell("ignore", _J),
        _E.INSTALL_FAILED: _cell("ignore", _J),
        _E.OPEN: _cell("open_past", _J),
        _E.REPORT: _cell("ignore", _J),
        _E.TROUBLE: _cell("ignore", _J),
        _E.BREAK: _cell("ignore", _J),
        _E.LAPSE: _cell("ignore", _J),
        _E.LEAVE: _cell("leave_past", _J),
        _E.SWITCH_LOST: _cell("ignore", _J),
    },
    _I: {
        _E.JOIN: _cell("refuse_again", _I),
        _E.JOIN_NEWER: _cell("outdate", *_ROUND),
        _E.JOIN_OLDER: _cell("refuse_older", _I),
        _E.WITHDRAW: _cell("abandon", _A),
        # All ranks are there and the switch has a deadline of its own: the answer is near.
        _E.EXPIRE: _cell("ignore", _I),
        _E.POOL_FREE: _cell("ignore", _I),
        _E.INSTALLED: _cell("grant", _R),
        _E.INSTALL_FAILED: _cell("install_failed", _A),
        _E.OPEN: _cell("open_past", _I),
        _E.REPORT: _cell("ignore", _I),
        _E.TROUBLE: _cell("ignore", _I),
        _E.BREAK: _cell("ignore", _I),
        _E.LAPSE: _cell("ignore", _I),
        _E.LEAVE: _cell("leave_past", _I),
        _E.SWITCH_LOST: _cell("ignore", _I),
    },
    _R: {
        _E.JOIN: _cell("refuse_again", _R),
        _E.JOIN_NEWER: _cell("supersede", *_ROUND),
        _E.JOIN_OLDER: _cell("refuse_older", _R),
        _E.WITHDRAW: _cell("ignore", _R),
        _E.EXPIRE: _cell("ignore", _R),
        _E.POOL_FREE: _cell("ignore", _R),
        _E.INSTALLED: _cell("ignore", _R),
        _E.INSTALL_FAILED: _cell("ignore", _R),
        _E.OPEN: _cell("open", _R),
        _E.REPORT: _cell("report", _R),
        _E.TROUBLE: _cell("trouble", _F),
        _E.BREAK: _cell("lose_broken", _F),
        _E.LAPSE: _cell("lose_silent", _F),
        _E.LEAVE: _cell("leave", _R, _L, _A),
        _E.SWITCH_LOST: _cell("lose_switch", _F),
    },
    _L: {
        _E.JOIN: _cell("seat_early", _L),
        _E.JOIN_NEWER: _cell("supersede", *_ROUND),
        _E.JOIN_OLDER: _cell("refuse_older", _L),
        _E.WITHDRAW: _cell("unseat_early", _L),
        _E.EXPIRE: _cell("expire_early", _L),
        _E.POOL_FREE: _cell("ignore", _L),
        _E.INSTALLED: _cell("ignore", _L),
        _E.INSTALL_FAILED: _cell("ignore", _L),
        _E.OPEN: _cell("open", _L),
        _E.REPORT: _cell("report", _L),
        _E.TROUBLE: _cell("trouble", _L, _F, *_ROUND),
        # The stream of a rank that has left may end as it likes.
        _E.BREAK: _cell("lose_broken", _L, _F, *_ROUND),
        _E.LAPSE: _cell("lose_silent", _F, *_ROUND),
        _E.LEAVE: _cell("leave", _L, *_ROUND),
        _E.SWITCH_LOST: _cell("lose_switch", _F, *_ROUND),
    },
    _F: {
        _E.JOIN: _cell("start", *_ROUND),
        # Whatever the incarnation: a fresh launch of the job starts again at 0.
        _E.JOIN_NEWER: _cell("start", *_ROUND),
        _E.JOIN_OLDER: _cell("start", *_ROUND),
        _E.WITHDRAW: _cell("ignore", _F),
        _E.EXPIRE: _cell("ignore", _F),
        _E.POOL_FREE: _cell("ignore", _F),
        _E.INSTALLED: _cell("ignore", _F),
        _E.INSTALL_FAILED: _cell("ignore", _F),
        _E.OPEN: _cell("open_past", _F),
        _E.REPORT: _cell("ignore", _F),
        _E.TROUBLE: _cell("ignore", _F),
        _E.BREAK: _cell("ignore", _F),
        _E.LAPSE: _cell("ignore", _F),
        _E.LEAVE: _cell("leave_past", _F),
        _E.SWITCH_LOST: _cell("ignore", _F),
    },
}
