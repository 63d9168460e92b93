# SPDX-License-Identifier: Apache-2.0
"""Operators' calls over real gRPC, what is kept of them, and what happens when the state cannot be."""

from __future__ import annotations

import itertools
import logging
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from helpers.controller import DEADLINE, HOSTS, Clock, Rig, Stream, refused, until

from p4reduce.core.config import RetransmissionPolicy
from p4reduce.errors import ConfigError
from p4reduce.proto import controller_pb2 as pb
from p4reduce_controller import auth, service
from p4reduce_controller.entries import ADMIT
from p4reduce_controller.fake import FakeSwitch
from p4reduce_controller.server import ControllerServer
from p4reduce_controller.store import SqliteStore, StoreError


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def call(rig: Rig, name: str, request: Any) -> Any:
    return getattr(rig.stub, name)(request, timeout=DEADLINE)


def order(stream: Stream) -> pb.Order:
    """The next order on a stream."""
    while True:
        directive = stream.next()
        if directive.HasField("order"):
            return directive.order


def to_ring(rig: Rig, streams: list[Stream]) -> None:
    """Answer the cut, and be on the ring path."""
    for stream in streams:
        stop = order(stream)
        assert stop.HasField("stop")
        stream.report(answer=pb.Answer(order=stop.number, bucket=0))
    for stream in streams:
        assert order(stream).HasField("run_ring")
    assert rig.job().path == pb.PATH_RING


def test_the_mode_of_a_job(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    streams = rig.start(ring=True)
    caplog.set_level(logging.INFO)
    reply = call(rig, "SetMode", pb.SetModeRequest(job="train", mode="ring"))
    assert (reply.mode, reply.before) == ("off", "auto")
    to_ring(rig, streams)
    job = rig.job()
    assert (job.mode, job.state, dict(job.fallbacks)) == ("off", "ring", {"operator": 1})
    loud = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    (line,) = [text for text in loud if "path" in text]
    assert line.startswith("job 'train': ring path from bucket 0 on")
    assert line.endswith(job.path_reason)


def test_a_job_that_begins_on_the_ring_path_is_told_so_loudly(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    reply = rig.join_all(1, "off", ring=True, mode="off")[0]
    assert reply.order.HasField("run_ring")
    job = rig.job("off")
    assert (job.path, job.ring, job.pool_size) == (pb.PATH_RING, True, 0)
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert line == f"job 'off': ring path from bucket 0 on, epoch {reply.epoch}: {job.path_reason}"


@pytest.mark.parametrize(
    ("name", "request_", "code", "text"),
    [
        ("SetMode", pb.SetModeRequest(job="nobody", mode="off"), "NOT_FOUND", "nobody"),
        ("SetMode", pb.SetModeRequest(job="train", mode="loud"), "INVALID_ARGUMENT", "'loud' is none of"),
        ("SetMode", pb.SetModeRequest(job="train", mode="off"), "FAILED_PRECONDITION", "no ring path"),
        ("SetPolicy", pb.SetPolicyRequest(job="nobody"), "NOT_FOUND", "nobody"),
        ("SetPolicy", pb.SetPolicyRequest(zero=["everything"]), "INVALID_ARGUMENT", "no field 'everything'"),
        ("SetPolicy", pb.SetPolicyRequest(zero=["deadline_seconds"]), "INVALID_ARGUMENT", "deadline (0 s)"),
        (
            "SetPolicy",
            pb.SetPolicyRequest(job="train", policy=pb.RetransmissionPolicy(window=1)),
            "INVALID_ARGUMENT",
            "window must be",
        ),
        ("Drain", pb.DrainRequest(switch="s9"), "NOT_FOUND", "no switch 's9': this controller has s1"),
        ("Evict", pb.EvictRequest(job="nobody"), "NOT_FOUND", "nobody"),
        ("Watch", pb.WatchRequest(interval_seconds=0.01), "INVALID_ARGUMENT", "0.1 to 3600"),
        ("Watch", pb.WatchRequest(interval_seconds=float("nan")), "INVALID_ARGUMENT", "makes no sense"),
        ("Watch", pb.WatchRequest(job="nobody"), "NOT_FOUND", "no job 'nobody'"),
        ("Leave", pb.LeaveRequest(job="train", wait_seconds=-1.0), "INVALID_ARGUMENT", "wait_seconds -1.0"),
    ],
)
def test_calls_that_are_refused(rig: Rig, name: str, request_: Any, code: str, text: str) -> None:
    rig.start()
    before = rig.status()

    def attempt() -> None:
        answer = call(rig, name, request_)
        if name == "Watch":
            next(answer)

    got = refused(attempt)
    assert (got[0], text in got[1]) == (code, True), got
    after = rig.status()
    assert (after.jobs[0].mode, after.jobs[0].policy) == (before.jobs[0].mode, before.jobs[0].policy)
    assert not after.switch.drained


def test_the_policy_of_a_job_changes_while_it_runs(rig: Rig) -> None:
    streams = rig.start()
    change = pb.SetPolicyRequest(
        job="train", policy=pb.RetransmissionPolicy(deadline_seconds=9.0), zero=["early_resend"]
    )
    reply = call(rig, "SetPolicy", change)
    default = RetransmissionPolicy()
    assert (reply.policy.deadline_seconds, reply.policy.early_resend) == (9.0, 0)
    assert (reply.policy.initial_seconds, reply.policy.max_seconds) == (default.initial, default.maximum)
    for stream in streams:
        assert stream.next().policy == reply.policy
    assert rig.job().policy == reply.policy
    other = rig.join_all(1, "other")[0]
    assert other.policy.deadline_seconds == default.deadline


def test_the_default_policy_and_a_drain_outlive_the_controller(tmp_path: Path) -> None:
    state = tmp_path / "state.db"
    rig = Rig(state=state)
    call(rig, "SetPolicy", pb.SetPolicyRequest(policy=pb.RetransmissionPolicy(deadline_seconds=7.0)))
    call(rig, "SetPolicy", pb.SetPolicyRequest(policy=pb.RetransmissionPolicy(window=8)))
    assert list(call(rig, "Drain", pb.DrainRequest(switch="s1")).moving) == []
    rig.close()
    rig = Rig(state=state, policy=RetransmissionPolicy(silent=0.25))
    try:
        assert rig.status().switch.drained
        assert "drained" in refused(rig.join(0, world_size=1))[1]
        call(rig, "Drain", pb.DrainRequest(switch="s1", undrain=True))
        got = rig.join_all(1)[0].policy
        assert (got.deadline_seconds, got.window, got.silent_seconds) == (7.0, 8, 0.25)
    finally:
        rig.close()
    rig = Rig(state=state)
    assert not rig.status().switch.drained
    rig.close()


def test_a_drain_says_who_moves_and_who_stays(rig: Rig) -> None:
    moving, _ = rig.start(ring=True, job="moves"), rig.start(job="stays")
    reply = call(rig, "Drain", pb.DrainRequest(switch="s1"))
    assert (list(reply.moving), list(reply.staying)) == (["moves"], ["stays"])
    assert order(moving[0]).HasField("stop")
    assert rig.status().switch.drained
    assert (rig.job("moves").state, rig.job("stays").state) == ("cutting", "switch")


def test_evict(rig: Rig) -> None:
    streams = rig.start()
    reply = call(rig, "Evict", pb.EvictRequest(job="train"))
    assert reply.epoch == streams[0].identity["epoch"]
    for stream in streams:
        assert stream.next().fence.reason == pb.Fence.EVICTED
    until(lambda: rig.switch.holds(ADMIT) == [])


def test_watch(rig: Rig) -> None:
    rig.start()
    watch = rig.stub.Watch(pb.WatchRequest(job="train", interval_seconds=0.1), timeout=DEADLINE)
    assert [next(watch).jobs[0].state for _ in range(2)] == ["switch", "switch"]
    call(rig, "Evict", pb.EvictRequest(job="train"))
    until(lambda: next(watch).jobs[0].state == "failed")
    rig.server.stop()
    with pytest.raises(grpc.RpcError) as caught:
        list(watch)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]


def test_watchers_are_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "ANONYMOUS_WATCHES", 2)
    request = pb.WatchRequest(interval_seconds=60.0)
    watches = [rig.stub.Watch(request, timeout=DEADLINE) for _ in range(2)]
    for watch in watches:
        next(watch)
    code, text = refused(lambda: next(rig.stub.Watch(request, timeout=DEADLINE)))
    assert (code, text) == ("RESOURCE_EXHAUSTED", "2 watches are open, which is the limit: try again later")
    watches[0].cancel()

    def room() -> bool:
        again = rig.stub.Watch(request, timeout=DEADLINE)
        try:
            next(again)
        except grpc.RpcError:
            return False
        again.cancel()
        return True

    until(room)


def test_calls_that_may_ask_the_switch_are_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who asks for the status all the time must not fill the line to the switch, where installs wait too."""
    monkeypatch.setattr(service, "LOOKS_EACH", 3)
    rig.start()
    under_way, most = [0], [0]
    opened = threading.Event()

    def refresh(_: str) -> bool:
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        opened.wait(DEADLINE)
        return True

    monkeypatch.setattr(rig.server.coordinator, "_refresh_counters", refresh)
    calls = [rig.stub.Status.future(pb.StatusRequest(), timeout=DEADLINE) for _ in range(10)]
    until(lambda: sum(call.done() for call in calls) == 7)
    opened.set()
    codes = sorted(call.code().name for call in calls)
    assert codes == ["OK"] * 3 + ["RESOURCE_EXHAUSTED"] * 7
    assert most == [3]
    assert rig.names() == ["train"]


def test_joins_are_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_JOINS", 2)
    waiting = [rig.join(0, job=job) for job in "ab"]
    until(lambda: len(rig.names()) == 2)
    assert refused(rig.join(0, job="c"))[0] == "RESOURCE_EXHAUSTED"
    for join in waiting:
        join.cancel()
    until(lambda: rig.names() == [])
    assert rig.join_all(1, "d")


def test_calls_of_one_address_are_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth.Rates, "wait", lambda *_: 1.0)
    for name, request in (("Drain", pb.DrainRequest()), ("Join", rig.request(0))):
        code, text = refused(lambda name=name, request=request: call(rig, name, request))  # type: ignore[misc]
        assert (code, "too many calls from 127.0.0.1" in text) == ("RESOURCE_EXHAUSTED", True)


def test_requests_are_bounded_in_size(rig: Rig) -> None:
    code, text = refused(rig.join(0, job="x" * (1 << 17)))
    assert (code, "larger than max" in text) == ("RESOURCE_EXHAUSTED", True)


class TestRestart:
    """Another controller with the same file, on the same switch."""

    def test_jobs_are_taken_up_and_the_switch_is_not_touched(self, tmp_path: Path) -> None:
        rig = Rig(state=tmp_path / "state.db")
        streams = rig.start()
        before, written = rig.job(), len(rig.switch.written)
        rig.crash()
        again = Rig(state=tmp_path / "state.db", switch=rig.switch)
        try:
            assert len(again.switch.written) == written
            job = again.job()
            assert (job.state, job.epoch, job.pool_base) == ("switch", before.epoch, before.pool_base)
            assert [worker.state for worker in job.workers] == ["joined", "joined"]
            for rank, old in enumerate(streams):
                stream = Stream(again.stub, job.epoch, rank, credential=old.metadata[0][1])
                again.kept.append(stream)
                assert stream.next().HasField("registered")
                assert stream.next().order.run_switch.epoch == before.present
            assert [worker.state for worker in again.job().workers] == ["reporting", "reporting"]
        finally:
            again.close()

    def test_why_a_job_ended_is_told_by_the_next_controller(self, tmp_path: Path) -> None:
        """The first one dies before anybody has heard of it."""
        rig = Rig(state=tmp_path / "state.db")
        streams = rig.start()
        rig.switch.gate.clear()
        call(rig, "Evict", pb.EvictRequest(job="train"))
        assert rig.job().state == "failed"
        rig.server.coordinator._end("killed", demoted=False)
        rig.switch.gate.set()
        rig.crash()
        again = Rig(state=tmp_path / "state.db", switch=rig.switch)
        try:
            job = again.job()
            assert (job.state, job.reason) == ("failed", "job 'train': an operator has ended it")
            assert 0.0 <= job.over_seconds < DEADLINE
            again.advance(60.0)
            assert 60.0 <= again.job().over_seconds < 60.0 + DEADLINE
            for rank, old in enumerate(streams):
                stream = Stream(again.stub, int(old.identity["epoch"]), rank, credential=old.metadata[0][1])
                fence = stream.next().fence
                assert (fence.reason, fence.message) == (pb.Fence.EVICTED, job.reason)
            assert not again.switch.holds(ADMIT)
            again.start()
            assert again.job().state == "switch"
            again.crash()
            again = Rig(state=tmp_path / "state.db", switch=rig.switch)
            assert again.job().state == "switch", "the name was used again"
        finally:
            again.close()

    def test_a_stranger_is_not_let_in(self, tmp_path: Path) -> None:
        rig = Rig(state=tmp_path / "state.db")
        epoch = int(rig.start()[0].identity["epoch"])
        rig.crash()
        again = Rig(state=tmp_path / "state.db", switch=rig.switch)
        try:
            for credential in (b"", b"0" * 16):
                stream = Stream(again.stub, epoch, 0, credential=credential)
                assert refused(stream.next)[0] == "PERMISSION_DENIED"
                metadata = ((auth.CREDENTIAL, credential),)
                request = pb.LeaveRequest(job="train", epoch=epoch)
                left = again.stub.Leave.future(request, timeout=DEADLINE, metadata=metadata)
                assert refused(left)[0] == "PERMISSION_DENIED"
        finally:
            again.close()

    def test_a_switch_that_was_restarted_meanwhile(self, tmp_path: Path) -> None:
        rig = Rig(state=tmp_path / "state.db")
        streams = rig.start()
        epoch = rig.job().epoch
        rig.crash()
        fresh = FakeSwitch()
        again = Rig(state=tmp_path / "state.db", switch=fresh)
        try:
            until(lambda: again.job().state == "failed")
            assert fresh.holds(ADMIT) == []
            stream = Stream(again.stub, epoch, 0, credential=streams[0].metadata[0][1])
            assert stream.next().fence.reason == pb.Fence.SWITCH_LOST
            assert again.join_all(2, "next")[0].epoch > epoch
        finally:
            again.close()

    def test_an_old_copy_of_the_file(self, tmp_path: Path) -> None:
        """A backup knows jobs that have ended since, and epochs that others got after it was made."""
        state = tmp_path / "state.db"
        rig = Rig(state=state, wall=lambda: 5.0)
        old = rig.start(1, "old")
        rig.crash()
        backup = state.read_bytes()
        again = Rig(state=state, switch=rig.switch, wall=lambda: 5.0)
        stream = Stream(again.stub, int(old[0].identity["epoch"]), 0, "old", old[0].metadata[0][1])
        assert stream.next().HasField("registered")
        again.leave(stream)
        used = [int(old[0].identity["epoch"])] + [again.join_all(1, f"job{n}")[0].epoch for n in range(3)]
        again.crash()
        state.write_bytes(backup)
        with SqliteStoreAt(state) as store:
            assert store.last < max(used)
        last = Rig(state=state, switch=rig.switch, wall=lambda: 5.0)
        try:
            until(lambda: last.job("old").state == "failed")
            assert last.switch.holds(ADMIT) == [], "neither the old job's entries nor those that the file does not know"
            used += [last.join_all(1, f"new{n}")[0].epoch for n in range(3)]
            assert len(set(used)) == 7
        finally:
            last.close()

    def test_a_file_in_use_says_by_whom(self, tmp_path: Path) -> None:
        rig = Rig(state=tmp_path / "state.db")
        other = FakeSwitch()
        with pytest.raises(ConfigError, match=r"state\.db: the state file is in use by process \d+ on"):
            ControllerServer(HOSTS, connect=other.connect, state=tmp_path / "state.db").start()
        assert other.sessions == [], "the switch was not touched"
        rig.close()


class SqliteStoreAt:
    def __init__(self, path: Path) -> None:
        self._store = SqliteStore(path)

    def __enter__(self) -> SqliteStore:
        return self._store

    def __exit__(self, *_: object) -> None:
        self._store.close()


class TestBrokenDisk:
    """What cannot be kept is not said."""

    @pytest.mark.parametrize("writes", range(4))
    def test_nothing_is_granted_and_the_controller_ends(
        self, tmp_path: Path, writes: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        saves = itertools.count()
        save = SqliteStore.save

        def failing(self: SqliteStore, name: str, record: dict[str, Any]) -> None:
            if next(saves) >= writes:
                self._connection.execute("PRAGMA query_only = ON")
            save(self, name, record)

        monkeypatch.setattr(SqliteStore, "save", failing)
        rig = Rig(state=tmp_path / "state.db")
        granted, text = 0, ""
        for number in range(5):
            join = rig.join(0, world_size=1, job=f"job{number}")
            if join.exception() is not None:
                text = join.exception().details()
                break
            granted += 1
        assert "this controller has ended: the state cannot be kept" in text
        assert rig.server.ended.wait(DEADLINE)
        assert not rig.server.demoted
        assert "attempt to write a readonly database" in rig.server.why
        rig.close()
        with sqlite3.connect(tmp_path / "state.db") as connection:
            kept = {name for (name,) in connection.execute("SELECT name FROM jobs")}
        connection.close()
        assert granted <= len(kept), "every job that was granted is on disk"

    def test_an_operator_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        rig = Rig(state=tmp_path / "state.db")

        def full(*_: object) -> None:
            raise StoreError("state.db: disk full")

        monkeypatch.setattr(SqliteStore, "set_flag", full)
        assert refused(lambda: call(rig, "Drain", pb.DrainRequest())) == ("INTERNAL", "state.db: disk full")
        monkeypatch.undo()
        assert not rig.status().switch.drained
        rig.close()

    @pytest.mark.parametrize(
        ("name", "request_"),
        [("SetMode", pb.SetModeRequest(job="train", mode="require")), ("Evict", pb.EvictRequest(job="train"))],
    )
    def test_what_was_not_kept_is_not_reported_as_done(
        self, tmp_path: Path, name: str, request_: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig = Rig(state=tmp_path / "state.db")
        rig.start()

        def full(*_: object) -> None:
            raise StoreError("state.db: disk full")

        monkeypatch.setattr(SqliteStore, "save", full)
        monkeypatch.setattr(SqliteStore, "forget", full)
        code, text = refused(lambda: call(rig, name, request_))
        assert (code, "whether this was done shows when it is started again" in text) == ("UNAVAILABLE", True)
        monkeypatch.undo()
        rig.crash()
        again = Rig(state=tmp_path / "state.db", switch=rig.switch)
        assert (again.job().state, again.job().mode) == ("switch", "auto")
        again.close()


def test_a_controller_that_was_asleep_does_not_take_its_workers_for_dead(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    rig = Rig(timer=True, clock=clock, lease_seconds=10.0)
    try:
        streams = rig.start()
        clock.now += 1000.0
        for _ in range(8):
            until(lambda: "was stopped for 1000.0 s" in caplog.text)
            assert rig.job().state == "switch"
            clock.now += 1.0
            rig.status()
        for stream in streams:
            stream.report(submitted=1)
        until(lambda: {worker.submitted for worker in rig.job().workers} == {1})
        for _ in range(11):
            assert rig.job().state == "switch"
            clock.now += 1.0
            rig.status()
        assert [stream.next().fence.reason for stream in streams] == [pb.Fence.WORKER_LOST] * 2
    finally:
        rig.close()


def test_streams_that_ended_while_the_controller_was_asleep(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    rig = Rig(timer=True, clock=clock, lease_seconds=10.0)
    try:
        streams = rig.start()
        clock.now += 1000.0
        until(lambda: "was stopped for 1000.0 s" in caplog.text)
        for stream in streams:
            stream.call.cancel()
        until(lambda: {worker.state for worker in rig.job().workers} == {"joined"})
        assert rig.job().state == "switch"
        for _ in range(4):
            clock.now += 1.5
            rig.status()
        until(lambda: rig.job().state == "ended")
        assert "went away without leaving, while the controller was stopped" in rig.job().reason
    finally:
        rig.close()
