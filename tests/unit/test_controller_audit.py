# SPDX-License-Identifier: Apache-2.0
"""What an audit finds and mends, and what it leaves to the jobs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.controller import DEADLINE, HOSTS, Rig, until

from p4reduce import constants
from p4reduce.errors import SwitchError
from p4reduce.proto import controller_pb2 as pb
from p4reduce_controller import entries
from p4reduce_controller.audit import Keeper, Ledger, Standing, fresh_groups
from p4reduce_controller.entries import Epoch, Group, Place, TableEntry, Update, Verb, base, deletes, inserts
from p4reduce_controller.fake import FakeSwitch
from p4reduce_controller.marks import is_mark
from p4reduce_controller.pools import Lease

BASE = base(HOSTS)
PLACES = tuple(Place(rank, 0x7F000101 + rank, 7 + rank, rank + 1, 4000) for rank in range(2))


def epoch(number: int, group: int = 2) -> Epoch:
    return Epoch(number, Lease(64 * group, 64, group, (2 * group, 2 * group + 1), group), PLACES)


FIRST, SECOND = epoch(100), epoch(200, 3)


def whole(*plans: Epoch) -> list[Any]:
    return [*BASE, *(entity for plan in plans for entity in plan.rest() + plan.admit())]


def test_a_switch_that_holds_what_it_should_is_left_alone() -> None:
    ledger = Ledger(BASE)
    ledger.reset([FIRST, SECOND])
    finding = ledger.compare(reversed(whole(FIRST, SECOND)))
    assert (finding.updates, finding.lost, finding.text) == ((), (), "")


def test_the_base_is_mended_and_what_is_not_ours_goes() -> None:
    ledger = Ledger(BASE)
    ledger.reset([FIRST])
    foreign = TableEntry(entries.ADMIT, (("ingress_port", 9),), "admit_worker", (("worker", 1),))
    changed = TableEntry(BASE[1].table, BASE[1].key, "other")  # type: ignore[union-attr]
    present = [e for e in whole(FIRST) if e not in (BASE[0], BASE[1])] + [foreign, changed]
    finding = ledger.compare(present)
    assert finding.updates == (
        Update(Verb.DELETE, foreign),
        Update(Verb.MODIFY, BASE[1]),
        Update(Verb.INSERT, BASE[0]),
    )
    assert finding.lost == ()
    assert finding.text == f"missing: {BASE[0]}; changed: {BASE[1]}; not ours: {foreign}"


@pytest.mark.parametrize("position", range(6))
def test_an_epoch_that_lost_an_entry_is_reported_once_and_not_mended(position: int) -> None:
    ledger = Ledger(BASE)
    ledger.reset([FIRST, SECOND])
    present = whole(FIRST, SECOND)
    del present[len(BASE) + position]
    finding = ledger.compare(present)
    assert (finding.updates, finding.lost) == ((), (100,))
    assert finding.text == "entries gone of epoch 100"
    assert ledger.standing(100) is Standing.UNSURE
    again = ledger.compare(present)
    assert (again.updates, again.lost, again.text) == ((), (), "")
    ledger.gone(FIRST)
    assert [update.verb for update in ledger.compare(present).updates] == [Verb.DELETE] * 5


def test_an_epoch_with_a_changed_entry_is_lost_too() -> None:
    ledger = Ledger(BASE)
    ledger.reset([FIRST])
    present = whole(FIRST)
    present[-1] = TableEntry(present[-1].table, present[-1].key, "admit_worker", (("worker", 9),))
    assert ledger.compare(present).lost == (100,)


def test_a_revoked_epoch_owes_no_admission_and_must_have_none() -> None:
    ledger = Ledger(BASE)
    ledger.note(FIRST, Standing.REVOKED)
    assert ledger.compare([*BASE, *FIRST.rest()]).text == ""
    assert ledger.compare(whole(FIRST)).updates == tuple(deletes(FIRST.admit()))
    assert ledger.compare(BASE).lost == (), "it was on its way out"


def test_new_groups_are_made_twice() -> None:
    group, other = Group(7, frozenset({(1, 2)})), TableEntry("forward", (), "flood")
    empty = Group(7, frozenset())
    updates = [*deletes([group]), *inserts([other, group]), Update(Verb.MODIFY, group)]
    assert fresh_groups(updates) == [
        *deletes([group]),
        *inserts([other, empty]),
        *deletes([empty]),
        *inserts([group]),
        Update(Verb.MODIFY, group),
    ]


class TestKeeper:
    """The keeper's ledger is never ahead of the switch."""

    def test_an_epoch_comes_and_goes(self) -> None:
        switch, keeper = FakeSwitch(), Keeper(BASE)
        session = switch.connect(lambda _: None)
        assert keeper.take_over(session, [], 0) == (set(), 0, len(BASE))
        for step, standing in (
            (keeper.install, Standing.WHOLE),
            (keeper.revoke, Standing.REVOKED),
            (keeper.remove, None),
        ):
            step(FIRST, session)  # type: ignore[operator]
            assert keeper.ledger.standing(100) is standing
            assert keeper.audit(session, 100).text == ""
        assert {e.identity for e in BASE} == {k for k, e in switch.entities.items() if not is_mark(e)}

    @pytest.mark.parametrize("name", ["install", "revoke", "remove"])
    def test_after_a_failed_write_anything_may_stand_there(self, name: str) -> None:
        switch, keeper = FakeSwitch(), Keeper(BASE)
        session = switch.connect(lambda _: None)
        keeper.take_over(session, [], 0)
        if name != "install":
            keeper.install(FIRST, session)
        last = (FIRST.admit() if name != "remove" else FIRST.rest())[0 if name == "remove" else -1]
        switch.refuse = lambda update: "no" if update.entity == last else None
        with pytest.raises(SwitchError, match=": no"):
            getattr(keeper, name)(FIRST, session)
        assert switch.refused == 1
        switch.refuse = lambda _: None
        assert keeper.ledger.standing(100) is Standing.UNSURE
        written = len(switch.written)
        finding = keeper.audit(session, 100)
        assert (finding.lost, finding.text, len(switch.written)) == ((), "", written)

    def test_what_stands_there_already_is_not_touched(self) -> None:
        switch = FakeSwitch()
        session = switch.connect(lambda _: None)
        one = Keeper(BASE)
        one.take_over(session, [], 0)
        one.install(FIRST, session)
        one.install(SECOND, session)
        written = len(switch.written)
        two = Keeper(BASE)
        epochs, mark, changed = two.take_over(session, [FIRST, SECOND, epoch(300, 4)], 0)
        assert (epochs, changed, len(switch.written)) == ({100, 200}, 0, written)
        assert mark > 200
        assert two.ledger.standing(100) is two.ledger.standing(200) is Standing.WHOLE
        assert two.ledger.standing(300) is None, "what the switch lost is not written again"
        three = Keeper(BASE)
        three.take_over(session, [SECOND], 0)
        assert all(update.verb is Verb.DELETE for update in switch.written[written:])
        assert {e.identity for e in whole(SECOND)} == {k for k, e in switch.entities.items() if not is_mark(e)}


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(probe_seconds=0.01, audit_seconds=0.01)
    yield made
    made.close()


class TestController:
    def test_base_entries_come_back(self, rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
        streams = rig.start()
        caplog.set_level(logging.WARNING)
        with rig.switch.lock:
            gone = next(e for e in rig.switch.entities.values() if getattr(e, "table", "") == entries.WORKER_PORTS)
            del rig.switch.entities[gone.identity]
        until(lambda: gone.identity in rig.switch.entities)
        until(lambda: "an audit found" in caplog.text)
        assert f"missing: {gone}" in caplog.text
        assert rig.job().state == "switch"
        until(lambda: rig.status().switch.trouble == "")
        for stream in streams:
            rig.leave(stream)

    def test_a_job_without_a_ring_that_lost_entries_is_fenced(self, rig: Rig) -> None:
        streams = rig.start()
        with rig.switch.lock:
            gone = next(e for e in rig.switch.entities.values() if getattr(e, "table", "") == entries.ADMIT)
            del rig.switch.entities[gone.identity]
        for stream in streams:
            assert stream.next().fence.reason == pb.Fence.SWITCH_LOST
        assert "the switch has lost entries" in rig.job().reason
        until(lambda: not any(rig.pools()))
        assert rig.switch.holds(entries.ADMIT) == []

    def test_what_cannot_be_mended_is_shown_and_tried_again(self, rig: Rig) -> None:
        rig.switch.refuse = lambda update: "table full" if update.verb is Verb.INSERT else None
        with rig.switch.lock:
            gone = next(e for e in rig.switch.entities.values() if getattr(e, "table", "") == entries.WORKER_PORTS)
            del rig.switch.entities[gone.identity]
        until(lambda: rig.switch.refused >= 2)
        assert "table full" in rig.status().switch.trouble
        assert rig.status().switch.connected
        assert len(rig.switch.sessions) == 1
        rig.switch.refuse = lambda _: None
        until(lambda: gone.identity in rig.switch.entities)
        until(lambda: rig.status().switch.trouble == "")


def test_a_stopped_controller_does_not_finish_what_waits() -> None:
    rig = Rig()
    rig.switch.gate.clear()
    calls = [rig.join(rank, job=job, world_size=1) for rank, job in ((0, "a"), (0, "b"))]
    until(lambda: len(rig.status().jobs) == 2)
    stopper = threading.Thread(target=rig.server.stop)
    stopper.start()
    until(lambda: rig.switch.sessions[0].lost is not None)
    written = len(rig.switch.written)
    rig.switch.gate.set()
    stopper.join(DEADLINE)
    assert not stopper.is_alive()
    assert len(rig.switch.written) == written
    assert rig.switch.holds(entries.EPOCHS) == []
    for call in calls:
        assert call.exception().code().name == "UNAVAILABLE"
    rig.close()


def test_frames_of_no_epoch_are_read_at_every_probe() -> None:
    rig = Rig(probe_seconds=0.01)
    try:
        assert (rig.status().switch.guarded, rig.status().switch.refused) == (0, 0)
        rig.switch.counters[entries.COUNTER, constants.COUNT_GUARDED] = 5
        rig.switch.counters[entries.COUNTER, constants.COUNT_REFUSED] = 7
        rig.switch.counters[entries.COUNTER, entries.COUNTS_PER_ROW + constants.COUNT_REFUSED] = 9
        until(lambda: rig.status().switch.guarded == 5)
        assert rig.status().switch.refused == 7, "of the row that belongs to no epoch"
        assert rig.status().switch.connected
    finally:
        rig.close()
