# SPDX-License-Identifier: Apache-2.0
"""The service over real gRPC: who may join and who not, status, options."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from helpers.controller import DEADLINE, HOSTS, LEASE, Rig, refused, until

from p4reduce import __version__
from p4reduce.controller_client import DECIDED
from p4reduce.core.config import RetransmissionPolicy
from p4reduce.errors import ConfigError, SwitchError
from p4reduce.proto import controller_pb2 as pb
from p4reduce.proto import controller_pb2_grpc
from p4reduce_controller import entries
from p4reduce_controller.fake import FakeSwitch
from p4reduce_controller.hosts import parse
from p4reduce_controller.marks import is_mark
from p4reduce_controller.server import ControllerServer


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


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
    "mtu": ({"mtu": 8763}, "FAILED_PRECONDITION", "MTU 8763 is too small, profile w34 needs 8764"),
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
    assert len({reply.credential for reply in replies}) == 2
    assert {len(reply.credential) for reply in replies} == {16}
    for rank, reply in enumerate(replies):
        assert reply.epoch == replies[0].epoch > 0
        assert (reply.endpoint_ip, reply.endpoint_port) == ("127.0.0.1", 41001 + rank)
        begin = reply.order.run_switch
        assert (begin.epoch, begin.first_bucket, reply.order.number) == (reply.epoch, 0, replies[0].order.number)
        assert 1 <= begin.or_slots < begin.add_slots
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
        reply = rig.join(0, world_size=1, ip="10.0.0.1", mtu=1340).result()
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
    assert {(reply.epoch, reply.order.run_switch.or_slots, reply.order.run_switch.add_slots) for reply in replies} == {
        (replies[0].epoch, 1, 2)
    }
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


def test_no_wait_given_is_a_minute(rig: Rig) -> None:
    call = rig.join(0, wait_seconds=0.0)
    rig.waiting(1)
    rig.advance(59.9)
    assert not call.done()
    rig.advance(0.2)
    assert refused(call)[0] == "DEADLINE_EXCEEDED"


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


def test_no_room(rig: Rig) -> None:
    rig.join_all(1, "a")
    calls = [rig.join(rank, job="b", slots_min=1024) for rank in (0, 1)]
    for call in calls:
        code, text = refused(call)
        assert (code, "end another job" in text) == ("RESOURCE_EXHAUSTED", True), text
    assert [name for name in rig.pools() if name] == ["a"]


def test_a_switch_that_refuses(rig: Rig) -> None:
    rig.switch.refuse = lambda update: "the table is full" if "replica" in str(update) else None
    for call in [rig.join(0), rig.join(1)]:
        code, text = refused(call)
        assert code == "UNAVAILABLE"
        assert "the table is full" in text
    assert rig.switch.refused >= 1
    rig.switch.refuse = lambda _: None

    def cleaned() -> bool:
        rig.advance(5.0)  # the removal failed too, and is tried again some time after that is known
        return not any(rig.pools())

    until(cleaned)
    assert all(is_mark(entry) for entry in rig.switch.holds(entries.EPOCHS))
    assert len(rig.join_all()) == 2


def test_status_of_controller_and_switch(rig: Rig) -> None:
    rig.clock.now += 5.0
    status = rig.status()
    assert 0.0 < status.switch.connected_seconds < DEADLINE
    status.switch.connected_seconds = 0.0
    assert (status.server_version, status.uptime_seconds) == (__version__, 5.0)
    assert status.switch == pb.SwitchStatus(
        address="127.0.0.1:9559", device_id=0, connected=True, primary=True, profile="w34", slots=1024, name="s1"
    )
    code, text = refused(lambda: rig.status("nobody"))
    assert (code, "no job 'nobody'" in text) == ("NOT_FOUND", True)


def test_pools(rig: Rig) -> None:
    streams = rig.start(1, "a")
    pools = rig.stub.Pools(pb.PoolsRequest(), timeout=DEADLINE)
    assert pools.slots == 1024
    assert sum(pool.size for pool in pools.pools) == 1024
    assert [pool.job for pool in pools.pools] == ["a", ""]
    assert pools.pools[0].size == rig.job("a").pool_size
    assert pools.pools[0].epoch == rig.job("a").epoch == streams[0].identity["epoch"]


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


def test_a_refusal_says_whether_somebody_has_decided(rig: Rig) -> None:
    """A rank that joins waits for a controller that went away, but not for one that says that it has no switch."""

    def decided(call: Any) -> bool:
        return (DECIDED, "1") in [tuple(pair) for pair in call.trailing_metadata()]

    waiting = rig.join(0)
    rig.waiting(1)
    rig.switch.unreachable = "nobody answers"
    rig.switch.sessions[-1].lose("gone")
    until(lambda: not rig.status().switch.connected)
    no_switch = rig.join(0, job="other")
    assert refused(no_switch)[0] == "UNAVAILABLE"
    assert decided(no_switch)
    wrong = rig.join(5)
    assert refused(wrong)[0] == "INVALID_ARGUMENT"
    assert decided(wrong)
    rig.server.coordinator.stop()
    assert refused(waiting) == ("UNAVAILABLE", "the controller is stopping")
    assert not decided(waiting)
