# SPDX-License-Identifier: Apache-2.0
"""No epoch twice on one switch, whatever becomes of the controller, its file and its clock."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from helpers.controller import DEADLINE, HOSTS, until

from p4reduce.errors import SwitchError
from p4reduce.proto import controller_pb2 as pb
from p4reduce.proto import controller_pb2_grpc
from p4reduce_controller import entries, marks
from p4reduce_controller.auth import CREDENTIAL
from p4reduce_controller.entries import TableEntry, Update, Verb
from p4reduce_controller.fake import FakeSwitch
from p4reduce_controller.link import SwitchGoneError
from p4reduce_controller.marks import Mark, epoch_of, is_mark, mark
from p4reduce_controller.server import ControllerServer
from p4reduce_controller.store import MAX_EPOCH, StoreError, open_store

NOW = 1_900_000_000
NAMES = itertools.count()


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "RESERVE", 4)


@pytest.fixture
def switch() -> FakeSwitch:
    return FakeSwitch()


class Controller:
    """One life of a controller, with a clock that stands still."""

    def __init__(self, switch: FakeSwitch, now: float = NOW, **options: Any) -> None:
        self.server = ControllerServer(HOSTS, connect=switch.connect, timer=False, wall=lambda: now, **options)
        self.server.start()
        self.channel = grpc.insecure_channel(self.server.address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.stub = controller_pb2_grpc.ControllerStub(self.channel)  # type: ignore[no-untyped-call]

    def grant(self, jobs: int, leave: bool = True) -> list[int]:
        """Epochs of so many jobs, one after the other."""
        epochs = []
        for _ in range(jobs):
            job = f"job{next(NAMES)}"
            request = pb.JoinRequest(job=job, world_size=1, ip="127.0.1.1", udp_port=4000, mtu=65535, receive_frames=99)
            reply = self.stub.Join(request, timeout=DEADLINE)
            epochs.append(reply.epoch)
            if leave:
                goodbye = pb.LeaveRequest(job=job, epoch=reply.epoch, rank=0)
                self.stub.Leave(goodbye, timeout=DEADLINE, metadata=((CREDENTIAL, reply.credential),))
        return epochs

    def refused(self) -> str:
        with pytest.raises(grpc.RpcError) as caught:
            self.grant(1)
        return str(caught.value.details())  # type: ignore[attr-defined]

    def end(self) -> None:
        self.channel.close()
        self.server.stop()


@contextlib.contextmanager
def life(switch: FakeSwitch, **options: Any) -> Iterator[Controller]:
    controller = Controller(switch, **options)
    try:
        yield controller
    finally:
        controller.end()


def standing(switch: FakeSwitch) -> list[int]:
    return [epoch_of(entry) for entry in switch.holds(entries.EPOCHS) if is_mark(entry)]


def check_history(switch: FakeSwitch) -> None:
    """Replay what was written: no epoch came twice, and none was admitted that the mark did not cover."""
    present: set[int] = set()
    granted: set[int] = set()
    highest = 0
    for update in switch.written:
        entity = update.entity
        if not isinstance(entity, TableEntry) or entity.table not in (entries.ADMIT, entries.EPOCHS):
            continue
        epoch = epoch_of(entity)
        if is_mark(entity):
            (present.add if update.verb is Verb.INSERT else present.remove)(epoch)
            assert max(present) >= highest, "the mark must never fall"
            highest = max(present)
        elif update.verb is Verb.INSERT:
            assert epoch < max(present, default=0)
            if entity.table == entries.EPOCHS:
                assert epoch not in granted
                granted.add(epoch)
    assert granted


def test_controllers_one_after_the_other(switch: FakeSwitch) -> None:
    used: list[int] = []
    for jobs in (9, 1, 4, 8):
        with life(switch) as controller:
            used += controller.grant(jobs)
            assert len(standing(switch)) == 1
            assert standing(switch)[0] > used[-1]
    assert len(set(used)) == len(used) == 22
    check_history(switch)
    assert used[:9] == list(range(NOW, NOW + 9)), "one write of the mark is good for several"
    inserted = [u for u in switch.written if is_mark(u.entity) and u.verb is Verb.INSERT]
    assert len(inserted) == 3 + 1 + 1 + 2


@pytest.mark.parametrize("mishap", ["none", "lost", "restored"])
def test_whatever_becomes_of_file_and_clock(switch: FakeSwitch, mishap: str, tmp_path: Path) -> None:
    path, backup = tmp_path / "state.db", b""
    used: list[int] = []
    for turn in range(3):
        with life(switch, now=NOW - 1000 * turn, state=path) as controller:
            used += controller.grant(6, leave=turn == 1)
        backup = backup or path.read_bytes()
        if mishap == "lost":
            path.unlink()
        elif mishap == "restored":
            path.write_bytes(backup)
    assert len(set(used)) == 18
    check_history(switch)


def crash_at(switch: FakeSwitch, moment: Any) -> None:
    """From the first update on that is `moment`, the controller reaches nothing any more: it was killed."""
    dead = False

    def refuse(update: Update) -> str | None:
        nonlocal dead
        dead = dead or moment(update)
        return "killed" if dead else None

    switch.refuse = refuse


MOMENTS = {
    "before the mark": lambda u: is_mark(u.entity) and u.verb is Verb.INSERT,
    "between insert and delete": lambda u: is_mark(u.entity) and u.verb is Verb.DELETE,
    "between mark and epoch": lambda u: getattr(u.entity, "table", "") == entries.EPOCHS and not is_mark(u.entity),
    "between epoch and grant": lambda u: getattr(u.entity, "table", "") == entries.ADMIT,
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_controller_that_is_killed(switch: FakeSwitch, moment: str) -> None:
    with life(switch) as controller:
        used = controller.grant(4)
        crash_at(switch, MOMENTS[moment])
        assert "killed" in controller.refused()
    assert switch.refused >= 1
    assert len(standing(switch)) == (2 if moment == "between insert and delete" else 1)
    switch.refuse = lambda _: None
    with life(switch) as controller:
        assert len(standing(switch)) == 1
        used += controller.grant(9)
    assert len(set(used)) == 13
    check_history(switch)


@pytest.mark.parametrize("verb", [Verb.INSERT, Verb.DELETE])
def test_a_mark_that_cannot_be_moved_grants_nothing(switch: FakeSwitch, verb: Verb) -> None:
    with life(switch) as controller:
        used = controller.grant(4)
        switch.refuse = lambda u: "the table is full" if is_mark(u.entity) and u.verb is verb else None
        assert "the table is full" in controller.refused()
        assert switch.refused == 1
        switch.refuse = lambda _: None
        used += controller.grant(9)
        assert len(standing(switch)) == 1
    assert len(set(used)) == 13
    check_history(switch)


def test_what_a_controller_without_marks_left_is_covered_before_it_is_taken_away(switch: FakeSwitch) -> None:
    left = TableEntry(entries.EPOCHS, (("epoch", NOW + 500),), "known_epoch", (("stats", 3),))
    switch.entities[left.identity] = left
    with life(switch) as controller:
        assert switch.written[0] == Update(Verb.INSERT, mark(NOW + 504))
        assert Update(Verb.DELETE, left) in switch.written
        assert controller.grant(1)[0] > NOW + 504


def test_a_restarted_switch_gets_a_mark_above_every_epoch_at_once(switch: FakeSwitch) -> None:
    with life(switch) as controller:
        used = controller.grant(6)
        before = len(switch.written)
        switch.restart()
        until(lambda: len(switch.sessions) == 2 and bool(switch.holds(entries.WORKER_PORTS)))
        until(lambda: controller.stub.Status(pb.StatusRequest(), timeout=DEADLINE).switch.connected)
        assert switch.written[before] == Update(Verb.INSERT, mark(used[-1] + 4)), "before anything else"
        assert standing(switch) == [used[-1] + 4]
        used += controller.grant(3)
        assert used == [*range(NOW, NOW + 6), *range(NOW + 10, NOW + 13)]
        assert standing(switch)[0] > used[-1]


def test_a_file_remembers_for_a_switch_that_forgot(switch: FakeSwitch, tmp_path: Path) -> None:
    with life(switch, state=tmp_path / "state.db") as controller:
        used = controller.grant(6)
    fresh = FakeSwitch()
    with life(fresh, now=0, state=tmp_path / "state.db") as controller:
        assert standing(fresh) == [used[-1] + 4]
        assert controller.grant(1)[0] > used[-1] + 4


def test_a_mark_that_somebody_took_away_is_put_back(switch: FakeSwitch) -> None:
    with life(switch, probe_seconds=0.01, audit_seconds=0.01) as controller:
        used = controller.grant(2)
        (gone,) = (entry for entry in switch.holds(entries.EPOCHS) if is_mark(entry))
        del switch.entities[gone.identity]
        until(lambda: bool(standing(switch)))
        assert standing(switch) == [used[-1] + 4]
        assert controller.grant(9)[0] > used[-1]
    check_history(switch)


def test_a_mark_that_never_stood_there_has_not_gone(switch: FakeSwitch) -> None:
    """A job of the ring path alone has an epoch that the switch never heard of."""
    with life(switch):
        (session,) = switch.sessions
        found = Mark()
        assert not found.renew(session, [], NOW)
        assert standing(switch) == [NOW + 4]
        assert not found.renew(session, session.read_tables([entries.EPOCHS]), NOW)
        del switch.entities[mark(NOW + 4).identity]
        assert found.renew(session, [], NOW), "and now it has"
        assert standing(switch) == [NOW + 4]


def test_epochs_from_before_a_session_are_void_below_the_mark(switch: FakeSwitch) -> None:
    """Another controller may have had the switch meanwhile."""
    session = switch.connect(lambda _: None)
    ours = Mark()
    assert ours.adopt(session, []) == 0
    ours.reserve(session, 100)
    assert standing(switch) == [104]
    other = Mark()
    assert other.adopt(session, session.read_tables([entries.EPOCHS])) == 104
    other.reserve(session, 105)
    assert ours.adopt(session, session.read_tables([entries.EPOCHS])) == 109
    for late in (101, 105, 109):
        with pytest.raises(SwitchError, match=f"epoch {late} was handed out before the session"):
            ours.reserve(session, late)
    ours.reserve(session, 110)
    assert standing(switch) == [114]


def test_the_last_epoch_has_a_mark_above_it_and_none_comes_after(switch: FakeSwitch) -> None:
    session = switch.connect(lambda _: None)
    last = Mark()
    last.adopt(session, [])
    last.reserve(session, MAX_EPOCH - 1)
    last.reserve(session, MAX_EPOCH)
    assert standing(switch) == [MAX_EPOCH + 1] == [2**32 - 1]
    with pytest.raises(SwitchError, match="no epoch is left"):
        last.reserve(session, MAX_EPOCH + 1)
    store = open_store(None, lambda: 5.0)
    store.raise_to(last.highest)
    with pytest.raises(StoreError, match="no epoch is left"):
        store.next()


def test_a_session_that_ends_while_the_mark_moves(switch: FakeSwitch, monkeypatch: pytest.MonkeyPatch) -> None:
    with life(switch) as controller:
        used = controller.grant(4)
        session = switch.sessions[-1]
        write = session.write

        def once(updates: Any, *, missing_ok: bool = False) -> None:
            write(updates, missing_ok=missing_ok)
            raise SwitchGoneError("the answer was lost")

        monkeypatch.setattr(session, "write", once)
        assert "the answer was lost" in controller.refused()
        until(lambda: controller.stub.Status(pb.StatusRequest(), timeout=DEADLINE).switch.connected)
        assert len(switch.sessions) == 2
        assert len(standing(switch)) == 1
        used += controller.grant(4)
    assert len(set(used)) == 8
    check_history(switch)
