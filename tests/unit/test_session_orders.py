# SPDX-License-Identifier: Apache-2.0
"""Both paths as a caller sees them: a controller that orders, workers that tell it what it must know, and the end."""

from __future__ import annotations

import concurrent.futures
import logging
import socket
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from helpers import control
from helpers.control import World, arrays, reduce, the_job

import p4reduce
from p4reduce import constants, controller_client, wire
from p4reduce.controller_client import ControllerClient
from p4reduce.errors import (
    ConfigError,
    ControllerError,
    IntegrityError,
    JobError,
    MismatchError,
    RingError,
    StalledError,
    TransportError,
    UsageError,
    WorkerLostError,
)
from p4reduce.progress import ProgressStream
from p4reduce.proto import controller_pb2 as pb
from p4reduce.ring import local_rings
from p4reduce.sim.network import Datagram
from p4reduce.transport.udp import UdpTransport

WAIT = 20
world = control.calm_world


def start(comms: list[p4reduce.Communicator], given: list[Any]) -> list[Future[Any]]:
    return [comm.allreduce_async(given[comm.rank], "mean") for comm in comms]


def assert_same(found: list[Any], wanted: Any) -> None:
    for one in found:
        np.testing.assert_array_equal(one.view(np.uint32), wanted.view(np.uint32))


def deaf(world: World, comm: p4reduce.Communicator) -> threading.Event:
    """Lose every sum that the switch sends to this rank."""
    address = (int.from_bytes(bytes([127, 0, 1, comm.rank + 1]), "big"), comm._session.transport.local[1])
    lost = threading.Event()

    def alter(datagram: Datagram) -> list[Datagram]:
        if (datagram.dst, datagram.dst_port) == address and datagram.data[1:3] == bytes([2, constants.OP_ADD]):
            lost.set()
            return []
        return [datagram]

    world.switch.alter = alter
    return lost


# The two paths -------------------------------------------------------------------------------------------------------


def test_to_the_ring_and_back_with_the_same_bits(world: World, caplog: pytest.LogCaptureFixture) -> None:
    given = arrays(1, 3)
    comms = world.connect(3, ring=True)
    job = the_job(world)
    (wanted, *_) = reduce(world, comms, given)
    assert [comm.path for comm in comms] == ["switch"] * 3
    with caplog.at_level(logging.WARNING, logger="p4reduce"):
        world.controller.cut(job, "drained: maintenance")
        assert_same(reduce(world, comms, given), wanted)
        assert [comm.path for comm in comms] == ["ring"] * 3
        world.controller.promote(job)
        assert_same(reduce(world, comms, given), wanted)
    assert [comm.path for comm in comms] == ["switch"] * 3
    lines = [record.getMessage() for record in caplog.records]
    for rank in range(3):
        assert [line for line in lines if f"rank {rank}: " in line] == [
            f"job 'job', epoch 42, rank {rank}: ring path from bucket 1 on: drained: maintenance",
            f"job 'job', epoch 43, rank {rank}: switch path from bucket 2 on: the switch is well",
        ]
    assert len(lines) == 6
    stats = comms[0].stats()
    assert (stats["path"], stats["mode"], stats["epoch"], stats["present"]) == ("switch", "auto", 41, 43)
    assert (stats["fallbacks"], stats["promotions"]) == ({"drained": 1}, 1)
    assert (stats["ring"]["buckets"], stats["ring"]["elements"]) == (1, 3000)
    assert stats["core"]["results"] > 2 * 10
    assert (stats["or_slots"], stats["add_slots"]) == (4, 28)


def test_a_stall_of_the_switch_is_mended(world: World) -> None:
    """Of three ranks one never gets its sums; the others have them, and compare."""
    world.controller.policy.deadline_seconds = 0.3
    given = arrays(2, 3)
    comms = world.connect(3, ring=True)
    wanted = reduce(world, comms, given)[0]
    lost = deaf(world, comms[1])
    futures = start(comms, given)
    assert_same([futures[rank].result(WAIT) for rank in (0, 2)], wanted)
    world.controller.wait_for(lambda: bool(world.controller.trouble))
    assert lost.is_set()
    rank, trouble = world.controller.trouble[0]
    assert (rank, trouble.code, trouble.bucket) == (1, pb.Trouble.STALLED, 1)
    more = start(comms, given)
    job = the_job(world)
    world.controller.cut(job, "stalled: rank 1")
    assert_same([futures[1].result(WAIT), *(one.result(WAIT) for one in more)], wanted)
    world.controller.wait_for(lambda: not job.reports[1].HasField("trouble"))
    assert comms[1].stats()["fallbacks"] == {"stalled": 1}
    # The last of the three is summed after what the others compare.
    assert {comm.stats()["ring"]["compared"] for comm in (comms[0], comms[2])} == {1}


def test_a_refusal_by_the_switch_is_mended(world: World) -> None:
    given = arrays(3, 2)
    comms = world.connect(2, ring=True)
    wanted = reduce(world, comms, given)[0]
    job = the_job(world)
    epoch = job.installed
    world.controller.revoke(job)
    futures = start(comms, given)
    world.controller.wait_for(lambda: len(world.controller.trouble) == 2)
    assert {trouble.code for _, trouble in world.controller.trouble} == {pb.Trouble.REFUSED}
    job.installed = epoch
    world.controller.cut(job, "refused: entries are gone")
    assert_same([one.result(WAIT) for one in futures], wanted)


def test_damaged_sums_are_mended(world: World) -> None:
    given = arrays(4, 2)
    comms = world.connect(2, ring=True)
    wanted = reduce(world, comms, given)[0]

    def alter(datagram: Datagram) -> list[Datagram]:
        data = bytearray(datagram.data)
        if data[1] == wire.Kind.RESULT and data[2] == constants.OP_ADD:
            data[-1] ^= 1
        return [datagram._replace(data=bytes(data))]

    world.switch.alter = alter
    futures = start(comms, given)
    world.controller.wait_for(lambda: len(world.controller.trouble) == 2)
    assert {trouble.code for _, trouble in world.controller.trouble} == {pb.Trouble.INTEGRITY}
    world.controller.cut(the_job(world), "integrity: a test")
    assert_same([one.result(WAIT) for one in futures], wanted)


def test_a_socket_that_fails_is_mended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arrays(5, 2)
    comms = world.connect(2, ring=True)
    wanted = reduce(world, comms, given)[0]

    def broken(*_: Any) -> int:
        raise TransportError("the path's MTU has become 1300")

    monkeypatch.setattr(UdpTransport, "send", broken)
    futures = start(comms, given)
    world.controller.wait_for(lambda: len(world.controller.trouble) == 2)
    assert {trouble.code for _, trouble in world.controller.trouble} == {pb.Trouble.REFUSED}
    assert "1300" in world.controller.trouble[0][1].message
    world.controller.cut(the_job(world), "refused: MTU")
    assert_same([one.result(WAIT) for one in futures], wanted)


def test_trouble_without_an_order_is_an_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p4reduce.membership._ORDER_SECONDS", 0.2)
    world.controller.policy.deadline_seconds = 0.3
    comms = world.connect(2, ring=True)
    error = comms[0].allreduce_async(np.ones(5, np.float32)).exception(WAIT)
    assert isinstance(error, StalledError)
    assert error.ranks == (1,)
    assert "rank 1 of 2 did not submit it" in str(error)


def test_a_controller_that_hears_us_has_a_few_seconds_for_its_order(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p4reduce.membership._ORDER_SECONDS", 0.2)
    comms = world.connect(1, ring=True)
    world.controller.revoke(the_job(world))
    assert type(comms[0].allreduce_async(np.ones(5, np.float32)).exception(10)) is JobError


@pytest.mark.parametrize(
    ("registered", "seconds", "left"),
    [(100.0, 1.0, 4.0), (2.0, 20.0, 3.0), (7.0, 20.0, -2.0), (None, 20.0, 10.0), (None, 31.0, -1.0)],
)
def test_how_long_an_order_is_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch, registered: float | None, seconds: float, left: float
) -> None:
    """5 s since the trouble began or the stream came back, whichever is later; the policy's 30 s while it is away."""
    (comm,) = world.connect(1, ring=True)
    monkeypatch.setattr(ProgressStream, "registered_seconds", property(lambda _: registered))
    assert comm._session.membership._patience(seconds) == left
    if registered is None:
        assert comm._session.membership._patience(seconds, 30.0) == left - 30.0, "a stall has used the deadline up"


@pytest.mark.parametrize("returns", [True, False], ids=["comes back", "stays away"])
def test_trouble_while_the_controller_is_away(world: World, returns: bool) -> None:
    world.controller.policy.deadline_seconds = 10.0 if returns else 0.6
    world.controller.policy.silent_seconds = world.controller.policy.fallback_seconds = 0.2
    given = arrays(6, 2)
    comms = world.connect(2, ring=True)
    wanted = reduce(world, comms, given)[0]
    job = the_job(world)
    port = int(world.controller.address.rpartition(":")[2])
    world.controller.stop()
    with world.switch.lock:
        world.switch.model.revoke(job.epoch)
    futures = start(comms, given)
    waiting = threading.Event()
    while not all(comm._session.driver._verdict is not None for comm in comms):
        assert not waiting.wait(0.01)
    assert not any(one.done() for one in futures)
    job.streams.clear()
    if not returns:
        for one in futures:
            assert type(one.exception(WAIT)) is JobError
        world.controller.start(port)
        return
    world.controller.start(port)
    world.controller.wait_for(lambda: len(job.streams) == 2 and len(world.controller.trouble) == 2)
    world.controller.cut(job, "refused: entries are gone")
    assert_same([one.result(WAIT) for one in futures], wanted)


def test_a_controller_that_restarts_in_the_middle_of_a_cut(world: World) -> None:
    given = arrays(7, 2)
    comms = world.connect(2, ring=True)
    wanted = reduce(world, comms, given)[0]
    job = the_job(world)
    first = world.controller.stop_switch(job)
    futures = start(comms, given)
    port = int(world.controller.address.rpartition(":")[2])
    world.controller.stop()
    job.streams.clear()
    job.reports.clear()
    world.controller.start(port)
    # The same Stop comes again, and the same answer.
    assert [answer.bucket for answer in world.controller.answers(job)] == [first, first]
    world.controller.run_ring(job, first)
    assert_same([one.result(WAIT) for one in futures], wanted)


# Beginning on the ring -----------------------------------------------------------------------------------------------


def test_a_job_without_room_is_told_so_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    given = arrays(8, 2)
    world.controller.start_on_ring = "no_room: all slots are leased"
    with caplog.at_level(logging.WARNING, logger="p4reduce"):
        comms = world.connect(2, ring=True)
    lines = sorted(record.getMessage() for record in caplog.records)
    assert lines == [
        f"job 'job', epoch 41, rank {rank}: ring path from bucket 0 on: no_room: all slots are leased"
        for rank in range(2)
    ]
    assert [comm.path for comm in comms] == ["ring", "ring"]
    wanted = reduce(world, comms, given)[0]
    stats = comms[0].stats()
    assert (stats["fallbacks"], stats["or_slots"], stats["add_slots"]) == ({"no_room": 1}, 0, 0)
    assert stats["core"]["frames_sent"] == 0
    assert world.controller.promote(the_job(world)) == 1
    assert_same(reduce(world, comms, given), wanted)
    assert comms[0].stats()["core"]["frames_sent"] > 0


def test_mode_off_is_the_ring_from_the_start_and_no_warning(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.controller.start_on_ring = "operator: mode off"
    with caplog.at_level(logging.WARNING, logger="p4reduce"):
        comms = world.connect(2, ring=True, mode="off")
    assert caplog.records == []
    assert world.controller.jobs["job"].requests[0].mode == "off"
    assert comms[0].stats()["mode"] == "off"
    assert comms[0].stats()["fallbacks"] == {}
    for result in world.each(lambda comm: comm.allreduce(np.ones(10, np.float32)), comms):
        assert (result == 2).all()


def test_a_ring_must_be_there_and_fit(world: World) -> None:
    with pytest.raises(ConfigError, match="mode off is the ring path, and this rank has none"):
        p4reduce.connect(world.controller.address, "job", 0, 1, mode="off")
    with pytest.raises(UsageError, match="the ring has this process as rank 1 of 2, the job as rank 0 of 2"):
        p4reduce.connect(world.controller.address, "job", 0, 2, ring=local_rings(2)[1])
    assert world.controller.jobs == {}


def test_mode_require_is_fenced_as_ever(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p4reduce.membership._VERDICT_SECONDS", 0.2)
    comms = world.connect(1, ring=True, mode="require")
    world.controller.revoke(the_job(world))
    assert type(comms[0].allreduce_async(np.ones(3, np.float32)).exception(WAIT)) is JobError


# How the ring fails --------------------------------------------------------------------------------------------------


def on_the_ring(world: World, size: int) -> list[p4reduce.Communicator]:
    world.controller.start_on_ring = "no_room: test"
    return world.connect(size, ring=True)


def test_a_ring_that_breaks_waits_for_the_controllers_reason(world: World) -> None:
    comms = on_the_ring(world, 2)
    pending = comms[0].allreduce_async(np.ones(3, np.float32))
    assert comms[1]._session.ring is not None
    comms[1]._session.ring.close()
    gone = threading.Event()
    while comms[0]._session.driver._verdict is None:
        assert not gone.wait(0.01)
    assert not pending.done()
    world.controller.send_fence(
        the_job(world), pb.Fence(reason=pb.Fence.WORKER_LOST, message="rank 1 is gone", ranks=[1])
    )
    error = pending.exception(WAIT)
    assert type(error) is WorkerLostError
    assert world.controller.trouble == [], "what the controller would have made of it would have come first"


def test_a_ring_that_breaks_without_a_reason(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p4reduce.membership._VERDICT_SECONDS", 0.2)
    comms = on_the_ring(world, 2)
    pending = comms[0].allreduce_async(np.ones(3, np.float32))
    assert comms[1]._session.ring is not None
    comms[1]._session.ring.close()
    error = pending.exception(WAIT)
    assert type(error) is RingError
    assert "rank 1 has closed its ring" in str(error)
    world.controller.wait_for(lambda: bool(world.controller.trouble))
    assert world.controller.trouble[0][1].code == pb.Trouble.ABORTED


def test_ranks_that_disagree_on_the_ring_are_all_told(world: World) -> None:
    world.controller.fence_on_trouble = True
    comms = on_the_ring(world, 2)
    futures = [comm.allreduce_async(np.ones(3 + comm.rank, np.float32)) for comm in comms]
    for one in futures:
        error = one.exception(WAIT)
        assert type(error) is MismatchError
        assert error.bucket == 0
    assert {trouble.code for _, trouble in world.controller.trouble} == {pb.Trouble.MISMATCH}


def test_sums_that_differ_between_the_paths_are_an_integrity_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.controller.fence_on_trouble = True
    given = arrays(11, 2)
    comms = world.connect(2, ring=True)
    lost = deaf(world, comms[1])
    futures = start(comms, given)
    futures[0].result(WAIT)
    assert lost.wait(WAIT)
    monkeypatch.setattr("p4reduce.core.part.SumPart.agrees", lambda *_: False)
    world.controller.cut(the_job(world))
    assert type(futures[1].exception(WAIT)) is IntegrityError
    world.controller.wait_for(lambda: bool(world.controller.trouble))
    assert pb.Trouble.INTEGRITY in {trouble.code for _, trouble in world.controller.trouble}
    with pytest.raises(IntegrityError):
        comms[0].barrier()


# The end -------------------------------------------------------------------------------------------------------------


def test_who_leaves_is_there_for_the_others_until_they_have_all(world: World) -> None:
    """Rank 0 has everything and closes; rank 1 can only be saved by the integers that rank 0 keeps."""
    given = arrays(12, 2)
    comms = world.connect(2, ring=True)
    wanted = reduce(world, comms, given)[0]
    lost = deaf(world, comms[1])
    futures = start(comms, given)
    assert_same([futures[0].result(WAIT)], wanted)
    assert lost.wait(WAIT)
    closing = world.pool.submit(comms[0].close, 15.0)
    world.controller.wait_for(lambda: len(world.controller.leaves) == 1)
    leave = world.controller.leaves[0]
    assert (leave.rank, leave.submitted) == (0, 2)
    assert 0 < leave.wait_seconds <= 15
    with pytest.raises(UsageError, match="closed"):
        comms[0].barrier()
    world.controller.cut(the_job(world), "stalled: rank 1")
    assert_same([futures[1].result(WAIT)], wanted)
    closing.result(WAIT)
    assert the_job(world).left == {0}


def test_closing_has_an_end_though_others_never_finish(world: World) -> None:
    comms = world.connect(2, ring=True)
    deaf(world, comms[1])
    futures = start(comms, arrays(13, 2))
    futures[0].result(WAIT)
    comms[0].close(0.3)
    assert the_job(world).left == {0}
    assert isinstance(futures[1].exception(WAIT) if futures[1].done() else None, JobError | type(None))


@pytest.mark.parametrize("ring", [True, False])
def test_a_close_while_the_controller_restarts_still_leaves(
    world: World, ring: bool, caplog: pytest.LogCaptureFixture
) -> None:
    comms = world.connect(2, ring=ring)
    reduce(world, comms, arrays(14, 2))
    job = the_job(world)
    port = int(world.controller.address.rpartition(":")[2])
    world.controller.stop()
    closing = [world.pool.submit(comm.close, 10.0) for comm in comms]
    end = time.monotonic() + WAIT
    while "is away, waiting for it" not in caplog.text:
        assert time.monotonic() < end, "nobody has tried to leave"
        threading.Event().wait(0.01)
    job.streams.clear()
    world.controller.start(port)
    for one in closing:
        one.result(WAIT)
    assert job.left == {0, 1}


def test_who_gives_up_goes_when_the_controller_knows(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports and Leave travel separately: a leave that overtook the report would let the others wait in vain."""
    world.controller.fence_on_trouble = True
    comms = world.connect(2)
    pending = [comm.allreduce_async(np.ones(3 + comm.rank, np.float32)) for comm in comms[:1]]
    progress = comms[0]._session.membership._progress
    make_report, never = progress._make_report, threading.Event()

    def slow() -> pb.ProgressReport:
        never.wait(0.3)
        return make_report()

    monkeypatch.setattr(progress, "_make_report", slow)
    comms[0].close(0.0)
    assert [(rank, trouble.code) for rank, trouble in world.controller.trouble] == [(0, pb.Trouble.ABORTED)]
    assert pending[0].done()
    with pytest.raises(JobError, match="rank 0 was closed while 1 of its buckets were pending"):
        world.pool.submit(comms[1].barrier).result(WAIT)


def test_a_failed_job_closes_fast(world: World) -> None:
    comms = world.connect(2, ring=True)
    pending = comms[0].allreduce_async(np.ones(3, np.float32))
    world.controller.send_fence(the_job(world), pb.Fence(reason=pb.Fence.EVICTED, message="by an operator"))
    assert type(pending.exception(WAIT)) is JobError
    world.controller.stop()
    done = world.pool.submit(comms[0].close, 30.0)
    done.result(3)
    world.controller.start()


def test_the_ring_is_closed_with_the_communicator(world: World) -> None:
    comms = on_the_ring(world, 2)
    reduce(world, comms, arrays(15, 2))
    world.each(lambda comm: comm.close(), comms)
    for comm in comms:
        with pytest.raises(RingError, match="closed this ring"):
            comm._session.ring.max(np.zeros(1, np.int64))  # type: ignore[union-attr]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("p4reduce-")]


# Controllers that come and go ----------------------------------------------------------------------------------------


def test_a_join_is_repeated_while_the_controller_is_away(world: World) -> None:
    port = int(world.controller.address.rpartition(":")[2])
    first = world.pool.submit(p4reduce.connect, world.controller.address, "job", 0, 2)
    world.controller.wait_for(lambda: 0 in world.controller._waiting.get("job", {}))
    nonce = world.controller._waiting["job"][0].nonce
    world.controller.stop()
    world.controller._waiting.clear()
    world.controller.start(port)
    world.controller.wait_for(lambda: 0 in world.controller._waiting.get("job", {}))
    assert world.controller._waiting["job"][0].nonce == nonce
    second = p4reduce.connect(world.controller.address, "job", 1, 2)
    world.opened += [first.result(WAIT), second]
    for result in world.each(lambda comm: comm.allreduce(np.ones(3, np.float32)), world.opened):
        assert (result == 2).all()


def test_a_controller_that_restarts_is_waited_for_as_long_as_the_other_ranks(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """It was there, so its address is right: join_timeout counts, not connect_timeout."""
    port = int(world.controller.address.rpartition(":")[2])
    first = world.pool.submit(p4reduce.connect, world.controller.address, "job", 0, 2, connect_timeout=0.2)
    world.controller.wait_for(lambda: 0 in world.controller._waiting.get("job", {}))
    nonce = world.controller._waiting["job"][0].nonce
    world.controller.stop()
    world.controller._waiting.clear()
    assert not first.cancel()
    assert not concurrent.futures.wait([first], timeout=1.5).done, "longer than connect_timeout, and pauses"
    world.controller.start(port)
    world.controller.wait_for(lambda: 0 in world.controller._waiting.get("job", {}))
    assert world.controller._waiting["job"][0].nonce == nonce
    assert 50 < world.controller._waiting["job"][0].wait_seconds < 60, "what is left of join_timeout"
    second = p4reduce.connect(world.controller.address, "job", 1, 2)
    world.opened += [first.result(WAIT), second]
    assert f"controller {world.controller.address} is away, waiting for it, " in caplog.text


def test_a_controller_that_stays_away_while_a_rank_joins(world: World) -> None:
    first = world.pool.submit(
        p4reduce.connect, world.controller.address, "job", 0, 2, connect_timeout=0.2, join_timeout=1.5
    )
    world.controller.wait_for(lambda: 0 in world.controller._waiting.get("job", {}))
    world.controller.stop()
    with pytest.raises(ControllerError, match=r"went away while .* within the 1.5 s of join_timeout") as found:
        first.result(WAIT)
    assert found.value.code == "UNAVAILABLE"
    world.controller._waiting.clear()
    world.controller.start()


def test_an_address_where_nobody_ever_answered_is_named_soon() -> None:
    """Not after join_timeout, which is a minute."""
    with socket.socket() as closed, socket.socket() as silent:
        for place in (closed, silent):
            place.bind(("127.0.0.1", 0))
        silent.listen()
        for place, why in ((closed, "Connection refused"), (silent, "timed out")):
            address = f"127.0.0.1:{place.getsockname()[1]}"
            begin = time.monotonic()
            with pytest.raises(
                ControllerError, match=f"describe: controller {address} not reachable within 1 s"
            ) as found:
                p4reduce.connect(address, "job", 0, 2, connect_timeout=1.0)
            assert why in str(found.value)
            assert 0.9 < time.monotonic() - begin < 5.0


class Unanswered(grpc.RpcError):
    """What gRPC says where nobody listens."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self.code = lambda: code
        self.details = lambda: "connection refused"
        self.trailing_metadata = tuple


@pytest.mark.parametrize("seconds", [0.2, 5.0, 30.0])
def test_connect_timeout_is_the_whole_time(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only calls and pauses move."""
    now = [100.0]

    def advance(by: float) -> None:
        now[0] += by

    def describe(request: object, timeout: float, wait_for_ready: bool, metadata: object) -> None:
        advance(timeout if wait_for_ready else 0.001)
        raise Unanswered(grpc.StatusCode.DEADLINE_EXCEEDED if wait_for_ready else grpc.StatusCode.UNAVAILABLE)

    monkeypatch.setattr(controller_client, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=advance))
    client = ControllerClient("127.0.0.1:1", timeout=seconds)
    try:
        monkeypatch.setattr(client, "_stub", SimpleNamespace(Describe=describe))
        with pytest.raises(ControllerError, match=f"not reachable within {seconds:g} s"):
            client.describe()
    finally:
        client.close()
    assert 0.7 * seconds < now[0] - 100.0 < seconds + 0.1


def test_of_several_controllers_the_one_that_acts_is_found() -> None:
    """The other stands by, which it says with UNAVAILABLE."""
    acting, idle = World(), World()
    try:
        idle.controller.stand_by = True
        addresses = f"ipv4:{idle.controller.address},{acting.controller.address}"
        for number in range(3):
            with p4reduce.connect(addresses, f"job{number}", 0, 1) as comm:
                assert (comm.allreduce(np.ones(3, np.float32)) == 1).all()
                acting.controller.wait_for(lambda: len(acting.controller.jobs[f"job{number}"].streams) == 1)  # noqa: B023
            assert acting.controller.jobs[f"job{number}"].left == {0}
        assert idle.controller.jobs == {}
    finally:
        acting.close()
        idle.close()
