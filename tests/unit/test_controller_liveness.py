# SPDX-License-Identifier: Apache-2.0
"""The service over real gRPC: lost workers, fences, departures, and a switch that comes and goes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from helpers.controller import DEADLINE, HOSTS, LEASE, Rig, Stream, refused, until

from p4reduce.proto import controller_pb2 as pb
from p4reduce.proto import controller_pb2_grpc
from p4reduce_controller import coordinator, entries
from p4reduce_controller.entries import Verb
from p4reduce_controller.marks import is_mark
from p4reduce_controller.messages import report
from p4reduce_controller.model import Reason
from p4reduce_controller.server import ControllerServer
from p4reduce_controller.service import ControllerService


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def epochs(rig: Rig) -> list[entries.TableEntry]:
    """What the switch holds of epochs, beside its mark."""
    return [entry for entry in rig.switch.holds(entries.EPOCHS) if not is_mark(entry)]


def test_fence_order_revoke_then_tell(rig: Rig) -> None:
    first, second, third = rig.start(3)
    before = len(rig.switch.written)
    rig.switch.gate.clear()
    second.call.cancel()
    until(lambda: rig.job().state == "failed")
    assert len(rig.switch.holds(entries.ADMIT)) == 3, "the gate is closed"
    told: queue.SimpleQueue[int] = queue.SimpleQueue()
    first.call.add_done_callback(lambda _: told.put(len(rig.switch.holds(entries.ADMIT))))
    rig.switch.gate.set()
    for stream in (first, third):
        fence = stream.next().fence
        assert (fence.reason, list(fence.ranks)) == (pb.Fence.WORKER_LOST, [1])
        assert "rank 1 on host local2 (127.0.1.2)" in fence.message
        assert stream.rest() == [], "the stream ends with the fence"
    assert told.get(timeout=DEADLINE) == 0
    until(lambda: not any(rig.pools()))
    deleted = [u.entity for u in rig.switch.written[before:]]
    assert [getattr(e, "table", "group") for e in deleted[:3]] == [entries.ADMIT] * 3
    assert {u.verb for u in rig.switch.written[before:]} == {Verb.DELETE}
    assert rig.switch.groups() == []
    assert not rig.switch.holds(entries.REPLICA)
    assert not epochs(rig)
    job = rig.job()
    assert [worker.state for worker in job.workers] == ["fenced", "lost", "fenced"]
    assert "rank 1" in job.reason


def test_a_half_closed_stream_without_leave_is_a_lost_worker(rig: Rig) -> None:
    first, second = rig.start()
    second.half_close()
    assert first.next().fence.reason == pb.Fence.WORKER_LOST


def test_a_silent_worker_is_lost_after_its_lease(rig: Rig) -> None:
    first, second = rig.start()
    rig.clock.now += 6.0
    first.report(submitted=3, completed=2)
    until(lambda: rig.job().workers[0].submitted == 3)
    rig.advance(3.9)
    assert rig.job().state == "switch"
    assert rig.job().workers[1].silent_seconds == pytest.approx(9.9)
    rig.advance(0.2)
    for stream in (first, second):
        fence = stream.next().fence
        assert (fence.reason, list(fence.ranks)) == (pb.Fence.WORKER_LOST, [1])
        assert "no report for 10 s" in fence.message


def test_a_worker_that_never_opens_its_stream_is_lost(rig: Rig) -> None:
    reply = rig.join_all()[0]
    stream = Stream(rig.stub, reply.epoch, 0, credential=reply.credential)
    assert stream.next().HasField("registered")
    assert stream.next().order == reply.order
    rig.clock.now += 9.0
    stream.report()
    until(lambda: rig.job().workers[0].silent_seconds == 0.0)
    rig.advance(1.0)
    assert list(stream.next().fence.ranks) == [1]


TROUBLES = {
    pb.Trouble.MISMATCH: pb.Fence.MISMATCH,
    pb.Trouble.STALLED: pb.Fence.STALLED,
    pb.Trouble.INTEGRITY: pb.Fence.INTEGRITY,
    pb.Trouble.REFUSED: pb.Fence.REFUSED,
    pb.Trouble.ABORTED: pb.Fence.ABORTED,
    pb.Trouble.UNSPECIFIED: pb.Fence.ABORTED,
}


@pytest.mark.parametrize("code", TROUBLES)
def test_trouble_fences_everybody(rig: Rig, code: int) -> None:
    first, second = rig.start()
    second.report(submitted=9, completed=8, trouble=pb.Trouble(code=code, message="what went wrong", bucket=8))
    for stream in (first, second):
        fence = stream.next().fence
        assert (fence.reason, fence.bucket) == (TROUBLES[code], 8)
        assert "rank 1 on host local2 (127.0.1.2): what went wrong" in fence.message


def test_reasons_are_the_protocols() -> None:
    assert {reason.name: int(reason) for reason in Reason} == {
        name: number for name, number in pb.Fence.Reason.items() if number
    }
    assert set(TROUBLES) == set(pb.Trouble.Code.values())
    unknown = report(pb.ProgressReport(trouble=pb.Trouble(code=99, message="m" * 5000)))  # type: ignore[arg-type]
    assert unknown.trouble is not None
    assert unknown.trouble.reason is Reason.ABORTED
    assert len(unknown.trouble.message) == 1000


def test_leaving(rig: Rig) -> None:
    first, second = rig.start()
    second.report(submitted=5, completed=5)
    until(lambda: rig.job().workers[1].completed == 5)
    rig.leave(second)
    assert rig.job().state == "leaving"
    assert rig.job().workers[1].state == "left"
    second.call.cancel()
    left = first.next().peer_left
    assert (left.rank, left.submitted) == (1, 5)
    rig.leave(first)
    assert rig.names() == []
    assert not any(rig.pools())
    assert rig.switch.holds(entries.ADMIT) == []
    assert rig.switch.groups() == []
    assert first.rest() == []


def test_the_name_can_be_joined_again_after_leaving_and_after_failing(rig: Rig) -> None:
    epochs = []
    for stream in rig.start():
        epochs.append(stream.identity["epoch"])
        rig.leave(stream)
    streams = rig.start()
    epochs.append(streams[0].identity["epoch"])
    streams[0].call.cancel()
    streams[1].next()
    epochs.append(rig.start()[0].identity["epoch"])
    assert len(set(epochs)) == 3
    assert epochs == sorted(epochs)


def test_a_higher_incarnation_supersedes(rig: Rig) -> None:
    old = rig.start()
    new = rig.join(0, incarnation=1)
    for stream in old:
        fence = stream.next().fence
        assert fence.reason == pb.Fence.SUPERSEDED
        assert "incarnation 1 replaces incarnation 0" in fence.message
    assert rig.switch.holds(entries.ADMIT) == []
    other = rig.join(1, incarnation=1)
    assert new.result().epoch == other.result().epoch > old[0].identity["epoch"]
    code, text = refused(rig.join(0))
    assert (code, "belongs to a run that was replaced" in text) == ("FAILED_PRECONDITION", True)


def test_a_stream_of_an_epoch_that_is_over_or_unknown(rig: Rig) -> None:
    streams = rig.start()
    epoch = streams[0].identity["epoch"]
    streams[0].call.cancel()
    assert streams[1].next().HasField("fence")
    late = Stream(rig.stub, epoch, 1)
    assert late.next().fence.reason == pb.Fence.WORKER_LOST
    early = Stream(rig.stub, 7, 1)
    fence = early.next().fence
    assert fence.reason == pb.Fence.ABORTED
    assert "job 'train': this controller knows nothing of epoch 7: it was over before" in fence.message
    assert early.rest() == []
    code, text = refused(Stream(rig.stub, epoch, 1, "other").next)
    assert (code, f"job 'other' has no epoch {epoch}" in text) == ("NOT_FOUND", True)


def test_a_second_stream_of_a_rank_is_refused(rig: Rig) -> None:
    first, _ = rig.start()
    epoch = first.identity["epoch"]
    code, text = refused(Stream(rig.stub, epoch, 0, credential=first.metadata[0][1]).next)
    assert (code, "has a stream open already" in text) == ("ALREADY_EXISTS", True)
    code, text = refused(Stream(rig.stub, epoch, 0, credential=b"x" * 16).next)
    assert (code, "the credential is not that of rank 0" in text) == ("PERMISSION_DENIED", True)
    assert rig.job().state == "switch"


def test_status_shows_counters_by_name_and_keeps_the_last_of_a_failed_job(rig: Rig) -> None:
    streams = rig.start()
    job = rig.job()
    assert dict(job.counters) == dict.fromkeys(entries.COUNTER_NAMES, 0)
    assert (job.pool_base, job.pool_size, job.world_size, job.incarnation) == (0, 64, 2, 0)
    (epoch_entry,) = epochs(rig)
    row = dict(epoch_entry.params)["stats"]
    for event in entries.COUNTER_NAMES.values():
        rig.switch.counters[entries.COUNTER, row * 8 + event] = 100 + event
    expected = {name: 100 + event for name, event in entries.COUNTER_NAMES.items()}
    assert dict(rig.job().counters) == expected
    streams[0].call.cancel()
    streams[1].next()
    until(lambda: not any(rig.pools()))
    job = rig.job()
    assert dict(job.counters) == expected
    assert job.pool_size == 0
    again = rig.start()
    assert len(again) == 2
    assert set(rig.job().counters.values()) == {0}, "the row is zeroed for its next epoch"


def test_a_lost_switch_session(rig: Rig) -> None:
    first, second = rig.start()
    rig.switch.unreachable = "nobody answers"
    rig.switch.sessions[-1].lose("connection reset")
    until(lambda: not rig.status().switch.connected)
    code, text = refused(rig.join(0, job="other"))
    assert (code, "connection reset" in text) == ("UNAVAILABLE", True)
    first.report(submitted=8)
    until(lambda: rig.job().workers[0].submitted == 8)
    assert rig.job().state == "switch"
    rig.switch.unreachable = None
    until(lambda: rig.status().switch.connected)
    assert len(rig.switch.sessions) == 2
    assert rig.job().state == "switch"
    assert len(rig.switch.holds(entries.ADMIT)) == 2
    assert len(rig.switch.holds(entries.REPLICA)) == 2
    assert len(rig.join_all(2, "other")) == 2
    rig.leave(second)
    rig.leave(first)
    assert rig.pools().count("train") == 0


def test_a_switch_that_stays_away_ends_the_jobs_that_wait_for_it(rig: Rig) -> None:
    waiting, going = rig.start(1, "waiting")[0], rig.start(1, "going")[0]
    waiting.report(submitted=5, completed=4)
    going.report(submitted=5, completed=4)
    until(lambda: all(job.workers[0].submitted == 5 for job in rig.status().jobs))
    rig.switch.unreachable = "nobody answers"
    rig.switch.sessions[-1].lose("connection reset")
    until(lambda: not rig.status().switch.connected)
    rig.advance(LEASE - 1)
    for stream, completed in ((waiting, 4), (going, 5)):
        stream.report(submitted=6, completed=completed)
    until(lambda: all(job.workers[0].submitted == 6 for job in rig.status().jobs))
    rig.advance(1)
    fence = waiting.next().fence
    assert fence.reason == pb.Fence.SWITCH_LOST
    assert "switch s1 at 127.0.0.1:9559 has been unreachable for 10 s (connection reset)" in fence.message
    assert rig.job("going").state == "switch"
    assert not rig.status().switch.connected
    rig.switch.unreachable = None
    until(lambda: rig.status().switch.connected)
    until(lambda: "waiting" not in rig.pools())
    rig.advance(LEASE - 2)
    assert rig.job("going").state == "switch"


def orders(stream: Stream, kind: str) -> pb.Order:
    """The next order, which must be of this kind."""
    while not (directive := stream.next()).HasField("order"):
        assert not directive.HasField("fence"), directive
    assert directive.order.WhichOneof("kind") == kind, directive
    return directive.order


def test_a_cut_and_the_way_back(rig: Rig) -> None:
    streams = rig.start(2, ring=True)
    epoch = streams[0].identity["epoch"]
    trouble = pb.Trouble(code=pb.Trouble.INTEGRITY, message="a sum is wrong", bucket=6)
    streams[1].report(submitted=8, completed=6, present=epoch, trouble=trouble)
    for rank, stream in enumerate(streams):
        stop = orders(stream, "stop")
        assert (stop.stop.epoch, stop.why) == (epoch, "integrity: rank 1 on host local2 (127.0.1.2): a sum is wrong")
        stream.report(submitted=8, completed=6, answer=pb.Answer(order=stop.number, bucket=6 + rank))
    for stream in streams:
        ring = orders(stream, "run_ring").run_ring
        assert (ring.epoch, ring.first_bucket) == (epoch + 1, 6)
    job = rig.job()
    assert (job.state, job.path, job.epoch, dict(job.fallbacks)) == ("ring", pb.PATH_RING, epoch, {"integrity": 1})
    until(lambda: rig.switch.holds(entries.ADMIT) == [])
    rig.advance(1.0)
    for stream in streams:
        trial = orders(stream, "trial")
        assert len(rig.switch.holds(entries.ADMIT)) == 2
        stream.report(submitted=9, completed=9, answer=pb.Answer(order=trial.number))
    for rank, stream in enumerate(streams):
        stream.report(submitted=9, completed=9, answer=pb.Answer(order=orders(stream, "hold").number, bucket=9 + rank))
    for stream in streams:
        back = orders(stream, "run_switch").run_switch
        assert (back.epoch, back.first_bucket) == (trial.trial.epoch, 10)
    job = rig.job()
    assert (job.state, job.path, job.present, job.promotions) == ("switch", pb.PATH_SWITCH, back.epoch, 1)
    assert job.epoch == epoch, "the membership keeps its name"


def test_a_switch_that_hangs_is_not_shown_as_connected(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = rig.start(1)
    assert rig.status().switch.connected
    release = threading.Event()
    monkeypatch.setattr(coordinator, "COUNTERS_SECONDS", 0.05)
    monkeypatch.setattr(rig.switch.sessions[-1], "read_counters", lambda *_: release.wait(DEADLINE) and [0] * 8)
    assert not rig.status().switch.connected
    release.set()
    monkeypatch.undo()
    until(lambda: rig.status().switch.connected)
    assert len(streams) == 1


def test_a_restarted_switch_gets_its_base_back_and_ends_the_jobs(rig: Rig) -> None:
    first, second = rig.start()
    base = rig.switch.holds(entries.WORKER_PORTS)
    rig.switch.restart()
    for stream in (first, second):
        assert stream.next().fence.reason == pb.Fence.SWITCH_LOST
    assert rig.switch.holds(entries.WORKER_PORTS) == base
    assert len(base) == 4
    assert rig.start()[0].identity["epoch"] > first.identity["epoch"]


def test_a_fence_without_a_switch_is_told_and_made_up_for_later(rig: Rig) -> None:
    first, second = rig.start()
    rig.switch.unreachable = "nobody answers"
    rig.switch.sessions[-1].lose("connection reset")
    until(lambda: not rig.status().switch.connected)
    second.call.cancel()
    assert first.next().fence.reason == pb.Fence.WORKER_LOST
    assert rig.pools()[0] == "train", "its entries still stand"
    rig.switch.unreachable = None
    until(lambda: not any(rig.pools()))
    assert rig.switch.holds(entries.ADMIT) == []


def test_entries_of_an_earlier_controller_are_taken_away_and_its_epochs_never_used() -> None:
    old = Rig()
    epoch = old.join_all()[0].epoch
    switch = old.switch
    old.close()
    assert len(switch.holds(entries.ADMIT)) == 2, "running jobs go on without a controller"
    server = ControllerServer(HOSTS, connect=switch.connect)
    with server, grpc.insecure_channel(server.address) as channel:
        assert switch.holds(entries.ADMIT) == []
        assert switch.groups() == []
        stub = controller_pb2_grpc.ControllerStub(channel)
        request = old.request(0, world_size=1)
        assert stub.Join(request, timeout=DEADLINE).epoch > epoch


def test_leases_end_by_themselves_with_the_real_clock() -> None:
    rig = Rig(lease_seconds=0.2, timer=True, clock=time.monotonic)
    try:
        reply = rig.join_all()[0]
        stream = Stream(rig.stub, reply.epoch, 0, credential=reply.credential)
        fences = [directive.fence for directive in stream.rest() if directive.HasField("fence")]
        assert [fence.reason for fence in fences] == [pb.Fence.WORKER_LOST]
    finally:
        rig.close()


def test_stopping_ends_all_calls(rig: Rig) -> None:
    (stream,) = rig.start(1, "running")
    waiting = rig.join(0)
    rig.waiting(1)
    rig.server.stop()
    assert refused(waiting)[0] == "UNAVAILABLE"
    assert refused(stream.next)[0] in ("UNAVAILABLE", "CANCELLED")
    assert len(rig.switch.holds(entries.ADMIT)) == 1, "what runs goes on"
    rig.server.stop()
    with pytest.raises(grpc.RpcError):
        rig.status()


def test_streams_that_break_because_the_controller_stops_lose_nobody(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    (stream,) = rig.start(1)
    coordinator = rig.server._coordinator
    stop_link = coordinator._link.stop

    def stop_late() -> None:
        until(lambda: not coordinator._mailboxes)
        stop_link()

    monkeypatch.setattr(coordinator._link, "stop", stop_late)
    written = len(rig.switch.written)
    rig.server.stop()
    assert refused(stream.next)[0] == "UNAVAILABLE"
    assert len(rig.switch.written) == written


def test_a_client_that_is_gone_before_its_seat_is_taken(rig: Rig) -> None:
    class Gone:
        """The context of an RPC that ended before its handler began."""

        aborted = False

        def peer(self) -> str:
            return "ipv4:127.0.0.1:1"

        def invocation_metadata(self) -> tuple[()]:
            return ()

        def auth_context(self) -> dict[str, Any]:
            return {}

        def add_callback(self, _: Callable[[], None]) -> bool:
            return False

        def is_active(self) -> bool:
            return False

        def set_trailing_metadata(self, _: object) -> None:
            pass

        def abort(self, *_: object) -> None:
            self.aborted = True
            raise RuntimeError("aborted")

    service = ControllerService(rig.server._coordinator)
    context = Gone()
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="aborted"):
        service.Join(rig.request(0), context)
    assert time.monotonic() - begin < DEADLINE, "nobody waits for who is gone"
    assert context.aborted
    assert rig.names() == []
    assert list(service.Progress(iter([pb.ProgressReport()]), context)) == []


def test_counters_read_too_late_do_not_replace_those_of_the_end(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = rig.start()
    link = rig.server._coordinator._link
    ask = link.ask

    def slow_ask(run: Any, timeout: float) -> Any:
        monkeypatch.setattr(link, "ask", ask)
        for cell in rig.switch.counters:
            rig.switch.counters[cell] = 5
        streams[0].call.cancel()
        until(lambda: not any(rig.pools()))
        for cell in rig.switch.counters:
            rig.switch.counters[cell] = 9
        return ask(run, timeout)

    monkeypatch.setattr(link, "ask", slow_ask)
    job = rig.job()
    assert job.state == "failed"
    assert set(job.counters.values()) == {5}
