# SPDX-License-Identifier: Apache-2.0
"""How a job ends when something goes wrong: who is told what, and that nobody hangs."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from helpers import control
from helpers.control import World

import p4reduce
from p4reduce import constants, wire
from p4reduce.errors import (
    IntegrityError,
    JobError,
    MismatchError,
    P4ReduceError,
    StalledError,
    TransportError,
    WorkerLostError,
)
from p4reduce.proto import controller_pb2 as pb
from p4reduce.sim.network import Datagram
from p4reduce.transport.udp import UdpTransport

WAIT = 20
world = control.new_world


def ones(count: int = 10) -> Any:
    return np.ones(count, np.float32)


def kind_of(header: bytes | bytearray) -> wire.Kind:
    return wire.Kind(header[1])


def error_of(future: Future[Any]) -> BaseException:
    error = future.exception(WAIT)
    assert error is not None
    return error


# Fences ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "kind", "bucket"),
    [
        (pb.Fence.WORKER_LOST, WorkerLostError, None),
        (pb.Fence.MISMATCH, MismatchError, 7),
        (pb.Fence.STALLED, StalledError, 7),
        (pb.Fence.INTEGRITY, IntegrityError, 7),
        (pb.Fence.REFUSED, JobError, None),
        (pb.Fence.SUPERSEDED, JobError, None),
        (pb.Fence.SWITCH_LOST, JobError, None),
        (pb.Fence.ABORTED, JobError, None),
        (pb.Fence.EVICTED, JobError, None),
        (pb.Fence.UNSPECIFIED, JobError, None),
        (99, JobError, None),
    ],
)
def test_a_fence_fails_everything_pending_and_later(
    world: World, reason: Any, kind: type[JobError], bucket: int | None
) -> None:
    comms = world.connect(2, job="train")
    pending = [comms[0].allreduce_async(ones()) for _ in range(3)]
    world.controller.send_fence(
        world.controller.jobs["train"], pb.Fence(reason=reason, message="the reason", ranks=[1], bucket=7)
    )
    name = pb.Fence.Reason.Name(reason) if reason in pb.Fence.Reason.values() else str(reason)
    errors = [error_of(future) for future in pending]
    for call in (comms[0].barrier, lambda: comms[0].allreduce(ones()), lambda: comms[0].allreduce_async(ones())):
        with pytest.raises(kind) as found:
            call()
        errors.append(found.value)
    for error in errors:
        assert type(error) is kind
        assert isinstance(error, JobError)
        assert (error.job, error.bucket, error.ranks) == ("train", bucket, (1,))
        for part in ("'train'", f"epoch {comms[0].epoch}", "rank 1", name, "the reason"):
            assert part in str(error)
        if bucket is not None:
            assert "bucket 7" in str(error)
    assert len({id(error) for error in errors}) == len(errors), "one object raised again piles up its traceback"
    assert "failed: job 'train'" in repr(comms[0])
    comms[0].close()
    assert world.controller.jobs["train"].left == set()


def test_a_worker_that_vanishes_ends_the_job(world: World) -> None:
    """A stream that breaks without a leave is what a dead process looks like to the controller."""
    comms = world.connect(2)
    pending = comms[0].allreduce_async(ones())
    stream = world.controller.jobs["job"].streams[1]
    comms[1]._session.membership._progress.stop()
    world.controller.wait_for(lambda: stream not in world.controller.jobs["job"].streams.values())
    world.controller.send_fence(
        world.controller.jobs["job"], pb.Fence(reason=pb.Fence.WORKER_LOST, message="silent", ranks=[1])
    )
    assert isinstance(error_of(pending), WorkerLostError)


# What workers find by themselves ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "calls",
    [
        (lambda c: c.allreduce(ones(10)), lambda c: c.allreduce(ones(11))),
        (lambda c: c.allreduce(ones(10)), lambda c: c.allreduce(ones(10), "mean")),
        (lambda c: c.allreduce(ones(10)), lambda c: c.barrier()),
        (lambda c: c.allreduce(ones(3000)), lambda c: c.allreduce(ones(90000))),
    ],
    ids=["shape", "operation", "barrier", "large"],
)
def test_ranks_that_disagree_are_all_told(world: World, calls: tuple[Any, Any]) -> None:
    comms = world.connect(2)
    futures = [world.pool.submit(calls[rank], comms[rank]) for rank in range(2)]
    for future in futures:
        error = error_of(future)
        assert type(error) is MismatchError
        assert error.job == "job"
        assert error.bucket == 0
    assert {trouble.code for _, trouble in world.controller.trouble} == {pb.Trouble.MISMATCH}
    for comm in comms:
        with pytest.raises(MismatchError):
            comm.barrier()


def test_a_stall_names_the_ranks_that_did_not_submit(world: World) -> None:
    world.controller.policy.deadline_seconds = 0.4
    comms = world.connect(3)
    world.each(lambda comm: comm.allreduce(ones()), comms)
    pending = [world.pool.submit(comm.allreduce, ones()) for comm in comms[:2]]
    errors = [error_of(future) for future in pending]
    for error in errors:
        assert type(error) is StalledError
        assert error.bucket == 1
    # Whoever reported first asked for the status; the other may have been fenced with what that one reported.
    (rank, trouble), *_ = world.controller.trouble
    assert trouble.code == pb.Trouble.STALLED
    assert trouble.bucket == 1
    assert "rank 2 of 3 did not submit it" in trouble.message
    first = errors[rank]
    assert isinstance(first, StalledError)
    assert first.ranks == (2,)
    assert "job 'job': bucket 1 has had no result for" in str(first)
    with pytest.raises(StalledError):
        comms[2].allreduce(ones())


@pytest.mark.parametrize(
    ("connected", "blamed"),
    [(True, "though all ranks submitted it: frames do not get through"), (False, "has lost the switch (fake switch)")],
)
def test_a_stall_though_all_ranks_take_part_blames_switch_or_network(
    world: World, connected: bool, blamed: str
) -> None:
    world.controller.switch_connected = connected
    world.controller.policy.deadline_seconds = 0.4
    world.switch.swallow = lambda _: True
    comms = world.connect(2)
    futures = [world.pool.submit(comm.allreduce, ones()) for comm in comms]
    assert {type(error_of(future)) for future in futures} == {StalledError}
    assert blamed in world.controller.trouble[0][1].message
    assert world.switch.received > 2


def test_a_stall_without_a_controller_is_still_an_error(world: World) -> None:
    world.controller.policy.deadline_seconds = 0.4
    comms = world.connect(2)
    world.controller.stop()
    error = error_of(world.pool.submit(comms[0].allreduce, ones()))
    assert type(error) is StalledError
    assert "who is missing is not known" in str(error)
    world.controller.start()


def test_sums_that_fail_their_check_again_and_again_end_the_job(world: World) -> None:
    damaged = threading.Event()

    def alter(datagram: Datagram) -> list[Datagram]:
        data = bytearray(datagram.data)
        if kind_of(data) is wire.Kind.RESULT and data[2] == constants.OP_ADD:
            damaged.set()
            data[-1] ^= 1
        return [datagram._replace(data=bytes(data))]

    world.switch.alter = alter
    comms = world.connect(2)
    futures = [world.pool.submit(comm.allreduce, ones()) for comm in comms]
    for future in futures:
        assert type(error_of(future)) is IntegrityError
    assert damaged.is_set()
    assert world.controller.trouble[0][1].code == pb.Trouble.INTEGRITY


def test_one_damaged_sum_is_mended(world: World) -> None:
    left = [3]

    def alter(datagram: Datagram) -> list[Datagram]:
        data = bytearray(datagram.data)
        if left[0] and kind_of(data) is wire.Kind.RESULT and data[2] == constants.OP_ADD:
            left[0] -= 1
            data[40] ^= 255
        return [datagram._replace(data=bytes(data))]

    world.switch.alter = alter
    comms = world.connect(2)
    for result in world.each(lambda comm: comm.allreduce(ones(5000)), comms):
        assert (result == 2).all()
    assert left[0] == 0
    assert sum(comm.stats()["core"]["integrity"] for comm in comms) == 3


def test_a_refusal_by_the_switch_waits_for_the_reason(world: World) -> None:
    """The switch knows of a fence before the worker: the nack must not hide why."""
    comms = world.connect(2)
    job = world.controller.jobs["job"]
    nacked = threading.Event()

    def alter(datagram: Datagram) -> list[Datagram]:
        if kind_of(datagram.data) is wire.Kind.NACK:
            nacked.set()
        return [datagram]

    world.switch.alter = alter
    world.controller.fence_on_trouble = False
    with world.switch.lock:
        world.switch.model.revoke(job.epoch)
    pending = world.pool.submit(comms[0].allreduce, ones())
    assert nacked.wait(WAIT)
    world.controller.wait_for(lambda: bool(world.controller.trouble))
    world.controller.send_fence(job, pb.Fence(reason=pb.Fence.WORKER_LOST, message="rank 1 is gone", ranks=[1]))
    error = error_of(pending)
    assert type(error) is WorkerLostError
    assert "rank 1 is gone" in str(error)
    assert world.controller.trouble[0][1].code == pb.Trouble.REFUSED


def test_a_refusal_without_a_reason_is_an_error_after_a_while(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p4reduce.membership._VERDICT_SECONDS", 0.2)
    comms = world.connect(1)
    world.controller.fence_on_trouble = False
    with world.switch.lock:
        world.switch.model.revoke(comms[0].epoch)
    error = error_of(world.pool.submit(comms[0].allreduce, ones()))
    assert type(error) is JobError
    assert "epoch" in str(error)


def test_a_fault_of_the_library_does_not_leave_callers_waiting(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    comms = world.connect(2)

    def broken(*_: Any) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(comms[0]._session.driver.path.core, "transmit", broken)
    error = error_of(comms[0].allreduce_async(ones()))
    assert isinstance(error, P4ReduceError)
    assert "internal error" in str(error)
    assert "a fault" in str(error)
    world.controller.wait_for(lambda: bool(world.controller.trouble))
    assert world.controller.trouble[0][1].code == pb.Trouble.ABORTED
    assert "ABORTED" in str(error_of(world.pool.submit(comms[1].allreduce, ones())))


def test_a_socket_that_fails_is_a_transport_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    comms = world.connect(1)

    def broken(*_: Any) -> int:
        raise TransportError("the path's MTU has become 1300")

    monkeypatch.setattr(UdpTransport, "send", broken)
    for _ in range(2):
        with pytest.raises(TransportError, match="1300"):
            comms[0].allreduce(ones())


def test_what_a_callback_raises_does_not_stop_the_io_thread(world: World, caplog: pytest.LogCaptureFixture) -> None:
    (comm,) = world.connect(1)

    def broken(_: Any) -> None:
        raise RuntimeError("not mine")

    with caplog.at_level(logging.ERROR):
        future = comm.allreduce_async(ones())
        future.add_done_callback(broken)
        future.result(WAIT)
        assert (comm.allreduce(ones()) == 1).all()


# A peer that leaves -------------------------------------------------------------------------------------------------


def test_a_peer_that_leaves_early_fails_the_buckets_after_its_last(world: World) -> None:
    comms = world.connect(3)
    for _ in range(4):
        world.each(lambda comm: comm.allreduce(ones()), comms)
    pending = comms[0].allreduce_async(ones())
    comms[2].close()
    error = error_of(pending)
    assert type(error) is WorkerLostError
    assert error.ranks == (2,)
    assert error.bucket == 4
    assert "rank 2 left after 4 buckets" in str(error)
    world.controller.wait_for(lambda: 2 in world.controller.jobs["job"].left)
    # First what rank 0 has handed in as well: rank 1 may not have heard of it yet.
    for call in (lambda: comms[1].allreduce(ones()), comms[1].barrier):
        with pytest.raises(WorkerLostError, match="rank 2 left after 4 buckets"):
            call()
    assert world.controller.trouble == []
    comms[0].close()
    comms[1].close()
    assert world.controller.jobs["job"].left == {0, 1, 2}


def test_what_a_peer_took_part_in_completes_after_it_has_left(world: World) -> None:
    """Its contribution is in the switch; only the result, lost on the way, is still to be had."""
    comms = world.connect(2)
    lost = threading.Event()
    hold = [True]
    slow = (int.from_bytes(bytes([127, 0, 1, 1]), "big"), comms[0]._session.transport.local[1])

    def alter(datagram: Datagram) -> list[Datagram]:
        if hold[0] and (datagram.dst, datagram.dst_port) == slow:
            lost.set()
            return []
        return [datagram]

    world.switch.alter = alter
    first = comms[0].allreduce_async(ones(3))
    second = comms[0].allreduce_async(ones(4))
    early = world.pool.submit(comms[1].allreduce, ones(3))
    # Rank 1 has its sum once the exponents of rank 0 came through; those are lost as well, so let them pass.
    assert lost.wait(WAIT)
    hold[0] = False
    assert (early.result(WAIT) == 2).all()
    hold[0] = True
    lost.clear()
    comms[1].close()
    error = error_of(second)
    hold[0] = False
    assert type(error) is WorkerLostError
    assert (first.result(WAIT) == 2).all()


def test_the_last_report_arrives_before_the_leave(world: World) -> None:
    """The others must not be told less than this rank took part in."""
    comms = world.connect(2)
    count = 30
    for _ in range(count):
        world.each(lambda comm: comm.allreduce(ones(3)), comms)
    comms[1].close()
    world.controller.wait_for(lambda: 1 in world.controller.jobs["job"].left)
    with pytest.raises(WorkerLostError, match=f"rank 1 left after {count} buckets"):
        comms[0].allreduce(ones())


# A controller that goes away ----------------------------------------------------------------------------------------


def test_reducing_goes_on_while_the_controller_is_away(world: World, caplog: pytest.LogCaptureFixture) -> None:
    comms = world.connect(2)
    port = int(world.controller.address.rpartition(":")[2])
    with caplog.at_level(logging.WARNING, logger="p4reduce"):
        world.controller.stop()
        lost = threading.Event()
        while comms[0].stats()["controller_connected"]:
            assert not lost.wait(0.01)
        for _ in range(3):
            for result in world.each(lambda comm: comm.allreduce(ones()), comms):
                assert (result == 2).all()
        world.controller.jobs["job"].streams.clear()
        world.controller.start(port)
        world.controller.wait_for(lambda: len(world.controller.jobs["job"].streams) == 2)
        world.controller.wait_for(lambda: all(r.submitted == 3 for r in world.controller.jobs["job"].reports.values()))
    messages = [record.getMessage() for record in caplog.records]
    assert sum("progress stream lost, reducing goes on" in message for message in messages) == 2
    assert sum("not reachable" in message or "Socket closed" in message for message in messages) <= 2
    for result in world.each(lambda comm: comm.allreduce(ones()), comms):
        assert (result == 2).all()


def test_closing_while_the_controller_is_away_neither_hangs_nor_raises(world: World) -> None:
    comms = world.connect(2)
    world.controller.stop()
    begin = time.monotonic()
    world.each(lambda comm: comm.close(0.5), comms)
    assert time.monotonic() < begin + 5.0
    world.controller.start()


def test_reports_come_well_within_the_lease(world: World) -> None:
    world.controller.lease_seconds = 0.4
    world.connect(1)
    seen: list[int] = []
    job = world.controller.jobs["job"]

    def reports() -> bool:
        seen.append(id(job.reports.get(0)))
        return len(set(seen)) >= 4

    world.controller.wait_for(reports, timeout=5)


def test_trouble_is_reported_when_the_stream_comes_back(world: World) -> None:
    """A worker that fails while the controller is away tells so afterwards."""
    world.controller.policy.deadline_seconds = 0.4
    comms = world.connect(2)
    port = int(world.controller.address.rpartition(":")[2])
    world.controller.stop()
    assert type(error_of(comms[0].allreduce_async(ones()))) is StalledError
    world.controller.jobs["job"].streams.clear()
    world.controller.start(port)
    world.controller.wait_for(lambda: bool(world.controller.trouble), timeout=WAIT)
    assert world.controller.trouble[0][0] == 0
    with pytest.raises(StalledError):
        comms[1].barrier()


def test_nothing_of_a_failed_start_stays_open(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[UdpTransport] = []
    original = UdpTransport.set_endpoint

    def refuse(self: UdpTransport, endpoint: tuple[str, int]) -> None:
        opened.append(self)
        original(self, endpoint)
        raise TransportError("no path")

    monkeypatch.setattr(UdpTransport, "set_endpoint", refuse)
    with pytest.raises(TransportError, match="no path"):
        p4reduce.connect(world.controller.address, "job", 0, 1)
    assert [transport.fileno() for transport in opened] == [-1]
    assert world.controller.jobs["job"].left == {0}
