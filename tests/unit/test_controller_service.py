# SPDX-License-Identifier: Apache-2.0
"""The service over real gRPC, with a switch that only remembers and a clock that only the test moves."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from p4reduce import __version__
from p4reduce.core.config import RetransmissionPolicy
from p4reduce.errors import ConfigError, SwitchError
from p4reduce.proto import controller_pb2 as pb
from p4reduce.proto import controller_pb2_grpc
from p4reduce_controller import entries
from p4reduce_controller.entries import Verb
from p4reduce_controller.fake import FakeSwitch
from p4reduce_controller.hosts import Hosts, parse
from p4reduce_controller.messages import report
from p4reduce_controller.model import Reason
from p4reduce_controller.server import ControllerServer

DEADLINE = 20.0
LEASE = 10.0
HOSTS = Hosts.embedded("127.0.0.1:9559", {p: ("127.0.0.1", 41000 + p) for p in range(1, 5)}, profile="w34")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def until(condition: Callable[[], bool]) -> None:
    """Wait for what other threads bring about."""
    end = time.monotonic() + DEADLINE
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end, "did not happen"
        pause.wait(0.005)


class Stream:
    """One worker's progress stream."""

    def __init__(self, stub: Any, epoch: int, rank: int, job: str = "train") -> None:
        self.identity = {"job": job, "epoch": epoch, "rank": rank}
        self.requests: queue.SimpleQueue[pb.ProgressReport | None] = queue.SimpleQueue()
        self.call = stub.Progress(iter(self.requests.get, None), timeout=DEADLINE)
        self.report()

    def report(self, **fields: Any) -> None:
        self.requests.put(pb.ProgressReport(**self.identity, **fields))

    def next(self) -> pb.Directive:
        return next(self.call)

    def half_close(self) -> None:
        self.requests.put(None)

    def rest(self) -> list[pb.Directive]:
        return list(self.call)


class Rig:
    """A controller under test and its clients."""

    def __init__(self, hosts: Hosts = HOSTS, **options: Any) -> None:
        self.switch = FakeSwitch()
        self.clock = Clock()
        defaults: dict[str, Any] = {"lease_seconds": LEASE, "timer": False, "clock": self.clock}
        self.server = ControllerServer(hosts, connect=self.switch.connect, **(defaults | options))
        self.server.start()
        self.channel = grpc.insecure_channel(self.server.address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.stub = controller_pb2_grpc.ControllerStub(self.channel)

    def close(self) -> None:
        self.channel.close()
        self.server.stop()

    def request(self, rank: int = 0, **changes: Any) -> pb.JoinRequest:
        fields: dict[str, Any] = {
            "job": "train",
            "world_size": 2,
            "rank": rank,
            "ip": f"127.0.1.{rank % 4 + 1}",
            "udp_port": 4000 + rank,
            "mtu": 65535,
            "receive_frames": 500,
            "wait_seconds": 30.0,
            "client_version": __version__,
        }
        return pb.JoinRequest(**(fields | changes))

    def join(self, rank: int = 0, **changes: Any) -> Any:
        return self.stub.Join.future(self.request(rank, **changes), timeout=DEADLINE)

    def join_all(self, world: int = 2, job: str = "train", **changes: Any) -> list[pb.JoinReply]:
        calls = [self.join(rank, world_size=world, job=job, **changes) for rank in range(world)]
        return [call.result() for call in calls]

    def start(self, world: int = 2, job: str = "train", **changes: Any) -> list[Stream]:
        epoch = self.join_all(world, job, **changes)[0].epoch
        streams = [Stream(self.stub, epoch, rank, job) for rank in range(world)]
        for stream in streams:
            assert stream.next().HasField("registered")
        return streams

    def leave(self, stream: Stream) -> None:
        self.stub.Leave(pb.LeaveRequest(**stream.identity), timeout=DEADLINE)

    def status(self, job: str = "") -> pb.StatusReply:
        return self.stub.Status(pb.StatusRequest(job=job), timeout=DEADLINE)

    def names(self) -> list[str]:
        return [job.job for job in self.status().jobs]

    def job(self, job: str = "train") -> pb.JobStatus:
        (found,) = self.status(job).jobs
        return found

    def waiting(self, ranks: int, job: str = "train") -> None:
        """Wait until so many ranks have taken their seats."""
        until(lambda: any(found.job == job and len(found.workers) == ranks for found in self.status().jobs))

    def pools(self) -> list[str]:
        return [pool.job for pool in self.stub.Pools(pb.PoolsRequest(), timeout=DEADLINE).pools]

    def advance(self, seconds: float) -> None:
        self.clock.now += seconds
        self.server.tick()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def refused(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call.result() if hasattr(call, "result") else call()
    error: Any = caught.value
    return error.code().name, error.details()


def test_describe(rig: Rig) -> None:
    reply = rig.stub.Describe(pb.DescribeRequest(client_version=__version__), timeout=DEADLINE)
    assert (reply.server_version, reply.profile, reply.udp_port, reply.loopback) == (__version__, "w34", 20532, True)
    assert rig.stub.Describe(pb.DescribeRequest(), timeout=DEADLINE) == reply
    code, text = refused(lambda: rig.stub.Describe(pb.DescribeRequest(client_version="99.0"), timeout=DEADLINE))
    assert (code, "upgrade the controller first" in text) == ("FAILED_PRECONDITION", True)


BAD_JOINS: dict[str, tuple[dict[str, Any], str, str]] = {
    "empty name": ({"job": ""}, "INVALID_ARGUMENT", "the job name is empty"),
    "blank name": ({"job": "  "}, "INVALID_ARGUMENT", "the job name is empty"),
    "long name": ({"job": "x" * 129}, "INVALID_ARGUMENT", "has 129 characters: shorten it to 128"),
    "control characters": ({"job": "a\x1b[31m"}, "INVALID_ARGUMENT", "control characters"),
    "no world": ({"world_size": 0}, "INVALID_ARGUMENT", "world_size 0 is out of range"),
    "large world": ({"world_size": 65}, "INVALID_ARGUMENT", "1 to 64 ranks"),
    "rank": ({"rank": 2}, "INVALID_ARGUMENT", "rank 2 is out of range: with world_size 2, ranks go from 0 to 1"),
    "udp port": ({"udp_port": 0}, "INVALID_ARGUMENT", "udp_port 0 is out of range"),
    "large udp port": ({"udp_port": 65536}, "INVALID_ARGUMENT", "udp_port 65536 is out of range"),
    "host": ({"ip": "10.9.9.9"}, "NOT_FOUND", "'10.9.9.9': embedded switch knows 127.0.1.1, 127.0.1.2, 127.0.1.3"),
    "mtu": ({"mtu": 1500}, "FAILED_PRECONDITION", "MTU 1500 is too small, profile w34 needs 8764"),
    "receive buffer": ({"receive_frames": 1}, "FAILED_PRECONDITION", "holds 1 full frames"),
    "negative wait": ({"wait_seconds": -1.0}, "INVALID_ARGUMENT", "wait_seconds -1.0"),
    "endless wait": ({"wait_seconds": float("inf")}, "INVALID_ARGUMENT", "wait_seconds inf"),
    "nan wait": ({"wait_seconds": float("nan")}, "INVALID_ARGUMENT", "wait_seconds nan"),
    "newer client": ({"client_version": "7.1.0"}, "FAILED_PRECONDITION", "the client 7.1.0: upgrade the controller"),
    "odd version": ({"client_version": "banana"}, "INVALID_ARGUMENT", "'banana' is no version"),
}


@pytest.mark.parametrize("name", BAD_JOINS)
def test_joins_that_are_refused_at_once(rig: Rig, name: str) -> None:
    changes, code, text = BAD_JOINS[name]
    got = refused(rig.join(**changes))
    assert got[0] == code
    assert text in got[1]
    assert rig.names() == []
    assert rig.switch.holds(entries.ADMIT) == []


def test_all_ranks_join_and_the_switch_admits_them_before_they_know(rig: Rig) -> None:
    rig.switch.gate.clear()
    calls = [rig.join(0), rig.join(1)]
    rig.waiting(2)
    assert rig.job().state == "joining"
    assert not any(call.done() for call in calls)
    assert rig.switch.holds(entries.ADMIT) == []
    rig.switch.gate.set()
    replies = [call.result() for call in calls]
    assert len(rig.switch.holds(entries.ADMIT)) == 2
    for rank, reply in enumerate(replies):
        assert reply.epoch == replies[0].epoch > 0
        assert (reply.endpoint_ip, reply.endpoint_port) == ("127.0.0.1", 41001 + rank)
        assert (reply.or_slots, reply.add_slots) == (7, 53)
        assert reply.lease_seconds == LEASE
        assert [(m.rank, m.host, m.ip, m.udp_port, m.switch_port) for m in reply.members] == [
            (0, "local1", "127.0.1.1", 4000, 1),
            (1, "local2", "127.0.1.2", 4001, 2),
        ]
    admit = [dict(e.key) for e in rig.switch.holds(entries.ADMIT)]
    assert [(key["ingress_port"], key["ipv4_src"], key["epoch"], key["rank"]) for key in admit] == [
        (1, 0x7F000101, replies[0].epoch, 0),
        (2, 0x7F000102, replies[0].epoch, 1),
    ]


def test_workers_of_wired_hosts_send_to_the_switch() -> None:
    text = """
[switch]
grpc = "127.0.0.1:9559"
profile = "w5"
ip = "10.0.0.254"
mac = "02:70:34:00:00:fe"
[[host]]
name = "h1"
ip = "10.0.0.1"
mac = "02:70:34:00:00:01"
port = 1
"""
    rig = Rig(parse(text))
    try:
        assert not rig.stub.Describe(pb.DescribeRequest(), timeout=DEADLINE).loopback
        reply = rig.join(0, world_size=1, ip="10.0.0.1", mtu=1500).result()
        assert (reply.endpoint_ip, reply.endpoint_port) == ("10.0.0.254", 20532)
        assert len(rig.switch.holds(entries.FORWARD)) == 2
        assert len(rig.switch.holds(entries.ARP)) == 2
        assert sorted(group.number for group in rig.switch.groups()) == [1, 2]
    finally:
        rig.close()


def test_the_policy_is_passed_on() -> None:
    policy = RetransmissionPolicy(initial=0.5, minimum=0.25, maximum=2.0, deadline=9.0, early_resend=7)
    rig = Rig(policy=policy)
    try:
        got = rig.join(0, world_size=1).result().policy
        assert (got.initial_seconds, got.min_seconds, got.max_seconds) == (0.5, 0.25, 2.0)
        assert (got.deadline_seconds, got.early_resend) == (9.0, 7)
    finally:
        rig.close()


def test_sixty_four_ranks_behind_four_ports(rig: Rig) -> None:
    replies = rig.join_all(64, receive_frames=1000)
    assert {(reply.epoch, reply.or_slots, reply.add_slots) for reply in replies} == {(replies[0].epoch, 1, 2)}
    assert len(rig.switch.holds(entries.ADMIT)) == 64
    assert len(rig.switch.holds(entries.REPLICA)) == 64
    (group,) = rig.switch.groups()
    assert len(group.replicas) == 64
    assert sorted({port for port, _ in group.replicas}) == [1, 2, 3, 4]


def test_a_rank_that_joins_twice(rig: Rig) -> None:
    first = rig.join(0)
    rig.waiting(1)
    code, text = refused(rig.join(0))
    assert (code, "has already joined" in text) == ("ALREADY_EXISTS", True)
    second = rig.join(1)
    assert first.result().epoch == second.result().epoch
    code, text = refused(rig.join(1))
    assert (code, "the job is running in epoch" in text) == ("ALREADY_EXISTS", True)


def test_world_sizes_that_differ(rig: Rig) -> None:
    first = rig.join(0)
    rig.waiting(1)
    code, text = refused(rig.join(1, world_size=3))
    assert code == "FAILED_PRECONDITION"
    assert "rank 1 says world_size 3, the ranks before it said 2" in text
    assert not first.done()


def test_the_wait_ends_for_every_rank(rig: Rig) -> None:
    calls = [rig.join(0, world_size=3, wait_seconds=5.0), rig.join(2, world_size=3, wait_seconds=25.0)]
    rig.waiting(2)
    rig.advance(4.9)
    assert not any(call.done() for call in calls)
    rig.advance(0.2)
    for call in calls:
        code, text = refused(call)
        assert (code, "rank 1 of 3 has not joined" in text) == ("DEADLINE_EXCEEDED", True)


def test_a_cancelled_join_withdraws_its_rank(rig: Rig) -> None:
    gone = rig.join(0)
    rig.waiting(1)
    gone.cancel()
    until(lambda: rig.names() == [])
    assert [reply.members[0].rank for reply in rig.join_all()] == [0, 0]


def test_a_join_whose_client_dies_withdraws_its_rank(rig: Rig) -> None:
    channel = grpc.insecure_channel(rig.server.address, options=[("grpc.use_local_subchannel_pool", 1)])
    gone = controller_pb2_grpc.ControllerStub(channel).Join.future(rig.request(0), timeout=DEADLINE)
    rig.waiting(1)
    channel.close()
    until(lambda: rig.names() == [])
    assert gone.done()


def test_no_free_pool() -> None:
    rig = Rig(pool_slots=512)
    try:
        rig.join_all(1, "a")
        rig.join_all(1, "b")
        for call in [rig.join(rank, job="c") for rank in (0, 1)]:
            code, text = refused(call)
            assert (code, "all 2 pools" in text) == ("RESOURCE_EXHAUSTED", True)
        assert rig.pools() == ["a", "b"]
    finally:
        rig.close()


def test_a_switch_that_refuses(rig: Rig) -> None:
    rig.switch.refuse = lambda update: "the table is full" if "replica" in str(update) else None
    for call in [rig.join(0), rig.join(1)]:
        code, text = refused(call)
        assert code == "UNAVAILABLE"
        assert "the table is full" in text
    assert rig.switch.refused >= 1
    rig.switch.refuse = lambda _: None
    rig.advance(5.0)
    until(lambda: not any(rig.pools()))
    assert rig.switch.holds(entries.EPOCHS) == []
    assert len(rig.join_all()) == 2


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
    assert not rig.switch.holds(entries.EPOCHS)
    job = rig.job()
    assert [worker.state for worker in job.workers] == ["reporting", "lost", "reporting"]
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
    assert rig.job().state == "running"
    assert rig.job().workers[1].silent_seconds == pytest.approx(9.9)
    rig.advance(0.2)
    for stream in (first, second):
        fence = stream.next().fence
        assert (fence.reason, list(fence.ranks)) == (pb.Fence.WORKER_LOST, [1])
        assert "no report for 10 s" in fence.message


def test_a_worker_that_never_opens_its_stream_is_lost(rig: Rig) -> None:
    epoch = rig.join_all()[0].epoch
    stream = Stream(rig.stub, epoch, 0)
    stream.next()
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
    code, text = refused(Stream(rig.stub, 7, 1).next)
    assert (code, "has no epoch 7 here" in text) == ("NOT_FOUND", True)
    code, text = refused(Stream(rig.stub, epoch, 1, "other").next)
    assert (code, f"job 'other' has no epoch {epoch}" in text) == ("NOT_FOUND", True)


def test_a_second_stream_of_a_rank_is_refused(rig: Rig) -> None:
    first, _ = rig.start()
    code, text = refused(Stream(rig.stub, first.identity["epoch"], 0).next)
    assert (code, "has a stream open already" in text) == ("ALREADY_EXISTS", True)
    assert rig.job().state == "running"


def test_status_shows_counters_by_name_and_keeps_the_last_of_a_failed_job(rig: Rig) -> None:
    streams = rig.start()
    job = rig.job()
    assert dict(job.counters) == dict.fromkeys(entries.COUNTER_NAMES, 0)
    assert (job.pool_base, job.pool_size, job.world_size, job.incarnation) == (0, 64, 2, 0)
    (epoch_entry,) = rig.switch.holds(entries.EPOCHS)
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


def test_status_of_controller_and_switch(rig: Rig) -> None:
    rig.clock.now += 5.0
    status = rig.status()
    assert (status.server_version, status.uptime_seconds) == (__version__, 5.0)
    assert status.switch == pb.SwitchStatus(
        address="127.0.0.1:9559", device_id=0, connected=True, primary=True, profile="w34", slots=1024
    )
    code, text = refused(lambda: rig.status("nobody"))
    assert (code, "no job 'nobody'" in text) == ("NOT_FOUND", True)


def test_pools(rig: Rig) -> None:
    streams = rig.start(1, "a")
    pools = rig.stub.Pools(pb.PoolsRequest(), timeout=DEADLINE)
    assert pools.slots == 1024
    assert [(pool.base, pool.size) for pool in pools.pools] == [(base, 64) for base in range(0, 1024, 64)]
    assert [pool.job for pool in pools.pools] == ["a"] + [""] * 15
    assert pools.pools[0].epoch == rig.job("a").epoch == streams[0].identity["epoch"]


def test_a_lost_switch_session(rig: Rig) -> None:
    first, second = rig.start()
    rig.switch.unreachable = "nobody answers"
    rig.switch.sessions[-1].lose("connection reset")
    until(lambda: not rig.status().switch.connected)
    code, text = refused(rig.join(0, job="other"))
    assert (code, "connection reset" in text) == ("UNAVAILABLE", True)
    first.report(submitted=8)
    until(lambda: rig.job().workers[0].submitted == 8)
    assert rig.job().state == "running"
    rig.switch.unreachable = None
    until(lambda: rig.status().switch.connected)
    assert len(rig.switch.sessions) == 2
    assert rig.job().state == "running"
    assert len(rig.join_all(2, "other")) == 2
    rig.leave(second)
    rig.leave(first)
    assert rig.pools().count("train") == 0


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
        epoch = rig.join_all()[0].epoch
        stream = Stream(rig.stub, epoch, 0)
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


def test_a_port_that_is_taken(rig: Rig) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:.*[Aa]ddress already in use"):
        ControllerServer(HOSTS, rig.server.address, connect=FakeSwitch().connect).start()


def test_a_switch_that_cannot_be_reached_leaves_nothing_behind() -> None:
    switch = FakeSwitch()
    switch.unreachable = "switch 127.0.0.1:9559: not reachable"
    server = ControllerServer(HOSTS, connect=switch.connect)
    threads = threading.active_count()
    with pytest.raises(SwitchError, match="not reachable"):
        server.start()
    until(lambda: threading.active_count() <= threads)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"listen": "50051"}, "write ADDRESS:PORT"),
        ({"listen": "127.0.0.1:99999"}, "write ADDRESS:PORT"),
        ({"pool_slots": 1}, "pool-slots must be"),
        ({"lease_seconds": 0.0}, "lease_seconds must be"),
        ({"switch_deadline": -1.0}, "switch_deadline must be"),
        ({"election_id": 0}, "election_id must be"),
        ({"hosts": "/nowhere/hosts.toml"}, "cannot read the hosts file"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], text: str) -> None:
    hosts = options.pop("hosts", HOSTS)
    with pytest.raises(ConfigError, match=text):
        ControllerServer(hosts, connect=FakeSwitch().connect, **options)
