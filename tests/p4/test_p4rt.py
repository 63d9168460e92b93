# SPDX-License-Identifier: Apache-2.0
"""The P4Runtime facade and the whole controller on real switches: the embedded one, and simple_switch_grpc."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from p4reduce import constants, pipeline
from p4reduce.errors import SwitchError
from p4reduce.proto import controller_pb2 as pb
from p4reduce.proto import controller_pb2_grpc
from p4reduce_bmv2.embedded.switch import EmbeddedSwitch
from p4reduce_bmv2.switch import SwitchProcess, find_bmv2
from p4reduce_controller import entries, marks
from p4reduce_controller.auth import CREDENTIAL
from p4reduce_controller.entries import CounterCell, Entity, Epoch, Group, Place, Update, Verb, base, difference
from p4reduce_controller.hosts import Host, Hosts, SwitchConfig
from p4reduce_controller.link import SwitchGoneError
from p4reduce_controller.marks import is_mark
from p4reduce_controller.p4rt import SwitchClient
from p4reduce_controller.pools import Pools
from p4reduce_controller.server import ControllerServer

DEADLINE = 20.0
NOW = 1_900_000_000
PLACES = tuple(Place(rank, 0x0A000001 + rank, 0x027034000001 + rank, rank % 4 + 1, 4000 + rank) for rank in range(64))


@pytest.fixture(params=["embedded", pytest.param("bmv2", marks=pytest.mark.bmv2)])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """P4Runtime address of a switch without ports."""
    if request.param == "embedded":
        with EmbeddedSwitch() as switch:
            yield switch.grpc_address
    else:
        if find_bmv2() is None:
            pytest.skip("simple_switch_grpc is not installed")
        with SwitchProcess.start("bmv2") as process:
            yield process.grpc_address


@pytest.fixture
def connect(address: str) -> Iterator[Callable[..., SwitchClient]]:
    clients: list[SwitchClient] = []

    def make(profile: str = "w5", **options: Any) -> SwitchClient:
        clients.append(SwitchClient(address, pipeline.find(profile), **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def lab(address: str, profile: str = "w5") -> Hosts:
    hosts = tuple(Host(f"h{n}", f"10.0.0.{n}", f"02:70:34:00:00:{n:02x}", n) for n in range(1, 5))
    return Hosts(SwitchConfig(address, profile, "10.0.0.254", "02:70:34:00:00:fe"), hosts)


def content(client: SwitchClient) -> set[Entity]:
    return {*client.read_tables(entries.TABLES), *client.read_groups()}


def largest_epoch() -> Epoch:
    pools = Pools()
    pools.take(1)
    lease = pools.take(64)
    assert lease is not None
    return Epoch(0xFFFFFFFE, lease, PLACES)


def test_what_is_written_is_read_back(address: str, connect: Callable[..., SwitchClient]) -> None:
    client = connect()
    assert client.pushed
    wanted = base(lab(address))
    client.write(difference(wanted, content(client)))
    assert content(client) == set(wanted)
    assert difference(wanted, content(client)) == []
    epoch = largest_epoch()
    client.write(epoch.install())
    assert content(client) == set(wanted) | set(epoch.rest()) | set(epoch.admit())
    client.write(epoch.revoke())
    assert not client.read_tables([entries.ADMIT])
    client.write(epoch.remove())
    assert content(client) == set(wanted)
    client.write(epoch.revoke() + epoch.remove(), missing_ok=True)


def test_entries_can_be_changed(address: str, connect: Callable[..., SwitchClient]) -> None:
    client = connect()
    before = base(lab(address))
    client.write(difference(before, content(client)))
    fewer = lab(address)
    moved = Host("h1", "10.0.0.1", "02:70:34:00:00:01", 9)
    after = base(Hosts(fewer.switch, (moved, *fewer.hosts[1:3])))
    updates = difference(after, content(client))
    assert {update.verb for update in updates} == set(Verb)
    client.write(updates)
    assert content(client) == set(after)


def test_a_batch_that_fails_in_part(connect: Callable[..., SwitchClient]) -> None:
    client = connect()
    epoch = largest_epoch()
    client.write(epoch.install())
    with pytest.raises(SwitchError, match=r"refused insert entry epochs\(epoch=4294967294\): ALREADY_EXISTS .*more\)"):
        client.write(epoch.install())
    group = Update(Verb.DELETE, Group(999, frozenset()))
    with pytest.raises(SwitchError, match="delete multicast group 999: NOT_FOUND"):
        client.write([group, *epoch.remove()])
    assert client.read_groups() == [], "the updates after the failed one were made"


def test_counters_start_at_zero_and_can_be_set(connect: Callable[..., SwitchClient]) -> None:
    client = connect()
    last = constants.STATS_CELLS - 1
    assert client.read_counters(entries.COUNTER, [0, 9, last]) == [0, 0, 0]
    client.write([Update(Verb.MODIFY, CounterCell(entries.COUNTER, cell, cell + 1)) for cell in (9, last)])
    assert client.read_counters(entries.COUNTER, [last, 8, 9]) == [last + 1, 0, 10]
    client.write([Update(Verb.MODIFY, CounterCell(entries.COUNTER, 9))])
    assert client.read_counters(entries.COUNTER, [9]) == [0]
    with pytest.raises(SwitchError, match="read: "):
        client.read_counters(entries.COUNTER, [constants.STATS_CELLS])


def test_a_second_controller_is_refused_and_a_higher_one_takes_over(connect: Callable[..., SwitchClient]) -> None:
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    first = connect(on_lost=lost.put)
    with pytest.raises(SwitchError, match="another controller is connected: stop it, or take over"):
        connect(deadline=0.3)
    assert first.lost is None
    second = connect(election_id=3)
    assert not second.pushed, "the same program is not pushed again"
    assert lost.get(timeout=DEADLINE) == "another controller has become primary"
    late = [Update(Verb.INSERT, Group(5, frozenset({(1, 1)})))]
    with pytest.raises(SwitchGoneError, match="write: another controller has become primary"):
        first.write(late)
    first._session.lost = None
    with pytest.raises(SwitchError, match="PERMISSION_DENIED"):
        first.write(late)  # the switch refuses it as well
    with pytest.raises(SwitchError, match="another controller is primary"):
        connect(election_id=2)
    second.write([Update(Verb.INSERT, Group(5, frozenset({(1, 1)})))])


def test_another_profile_is_pushed_over_the_old_one_without_its_groups(connect: Callable[..., SwitchClient]) -> None:
    old = connect("w5")
    old.write([Update(Verb.INSERT, Group(5, frozenset({(1, 2), (2, 3)})))])
    old.close()
    new = connect("w34")
    assert new.pushed
    assert new.read_groups() == []
    new.write([Update(Verb.INSERT, Group(5, frozenset({(1, 4)})))])
    assert new.read_groups() == [Group(5, frozenset({(1, 4)}))]


def join(server: ControllerServer, ranks: int, job: str = "train") -> list[Any]:
    with grpc.insecure_channel(server.address) as channel:
        stub = controller_pb2_grpc.ControllerStub(channel)
        calls = [
            stub.Join.future(
                pb.JoinRequest(
                    job=job,
                    world_size=ranks,
                    rank=rank,
                    ip=f"10.0.0.{rank % 4 + 1}",
                    udp_port=4000 + rank,
                    mtu=1500,
                    receive_frames=500,
                    wait_seconds=DEADLINE,
                ),
                timeout=DEADLINE,
            )
            for rank in range(ranks)
        ]
        return [call.result() for call in calls]


def leave(stub: Any, replies: list[Any], job: str = "train") -> None:
    for rank, reply in enumerate(replies):
        request = pb.LeaveRequest(job=job, epoch=reply.epoch, rank=rank)
        stub.Leave(request, timeout=DEADLINE, metadata=((CREDENTIAL, reply.credential),))


def test_a_job_comes_and_goes(address: str) -> None:
    hosts = lab(address)
    with ControllerServer(hosts) as server:
        replies = join(server, 8)
        with grpc.insecure_channel(server.address) as channel:
            stub = controller_pb2_grpc.ControllerStub(channel)
            status = stub.Status(pb.StatusRequest(), timeout=DEADLINE)
            assert status.switch.connected
            assert dict(status.jobs[0].counters) == dict.fromkeys(entries.COUNTER_NAMES, 0)
            leave(stub, replies)
            assert not stub.Status(pb.StatusRequest(), timeout=DEADLINE).jobs
    client = SwitchClient(address, pipeline.find("w5"))
    try:
        assert not client.pushed
        found = content(client)
        (mark,) = found - set(base(hosts))
        assert is_mark(mark)
        assert found > set(base(hosts))
    finally:
        client.close()


def stop_here(*_: Any) -> None:
    raise SwitchError("stopped between insert and delete")


def epoch_entries(address: str) -> list[entries.TableEntry]:
    client = SwitchClient(address, pipeline.find("w5"))
    try:
        return client.read_tables([entries.EPOCHS])
    finally:
        client.close()


def test_no_epoch_comes_twice_on_one_switch(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controllers without a file, with clocks that stand still or go back, one of them stopped in mid-write."""
    monkeypatch.setattr(marks, "RESERVE", 4)
    hosts, used = lab(address), []

    def grant(server: ControllerServer, jobs: int) -> None:
        with grpc.insecure_channel(server.address) as channel:
            stub = controller_pb2_grpc.ControllerStub(channel)
            for number in range(jobs):
                replies = join(server, 2, f"job{number}")
                used.append(replies[0].epoch)
                leave(stub, replies, f"job{number}")

    for now in (NOW, NOW, NOW - 500):
        with ControllerServer(hosts, wall=lambda now=now: now) as server:
            grant(server, 6)
    with ControllerServer(hosts, wall=lambda: NOW) as server:
        grant(server, 4)
        monkeypatch.setattr(marks.Mark, "clear", stop_here)
        with pytest.raises(grpc.RpcError, match="stopped between insert and delete"):
            grant(server, 1)
    assert len(epoch_entries(address)) == 2
    monkeypatch.undo()
    with ControllerServer(hosts, wall=lambda: NOW) as server:
        grant(server, 2)
    assert len(set(used)) == len(used) == 24
    (mark,) = epoch_entries(address)
    assert is_mark(mark)
    assert marks.epoch_of(mark) > max(used)


def test_a_new_controller_clears_up_after_an_old_one(address: str) -> None:
    hosts = lab(address)
    with ControllerServer(hosts) as server:
        epoch = join(server, 4)[0].epoch
    with ControllerServer(hosts) as server:
        assert join(server, 4)[0].epoch > epoch
        with grpc.insecure_channel(server.address) as channel:
            stub = controller_pb2_grpc.ControllerStub(channel)
            (job,) = stub.Status(pb.StatusRequest(), timeout=DEADLINE).jobs
            assert job.pool_base == 0


@pytest.mark.parametrize("kind", ["embedded", pytest.param("bmv2", marks=pytest.mark.bmv2)])
def test_a_switch_that_is_restarted_under_a_running_job(kind: Any) -> None:
    if kind == "bmv2" and find_bmv2() is None:
        pytest.skip("simple_switch_grpc is not installed")
    first = SwitchProcess.start(kind)
    address = first.grpc_address
    second = None
    try:
        with ControllerServer(lab(address)) as server, grpc.insecure_channel(server.address) as channel:
            stub = controller_pb2_grpc.ControllerStub(channel)
            (reply,) = join(server, 1)
            epoch = reply.epoch
            reports: queue.SimpleQueue[Any] = queue.SimpleQueue()
            reports.put(pb.ProgressReport(job="train", epoch=epoch, rank=0))
            secret = ((CREDENTIAL, reply.credential),)
            directives = stub.Progress(iter(reports.get, None), timeout=DEADLINE, metadata=secret)
            assert next(directives).HasField("registered")
            assert next(directives).HasField("order")
            first.stop()
            second = SwitchProcess.start(kind, grpc_addr=address)
            fence = next(directives).fence
            assert fence.reason == pb.Fence.SWITCH_LOST
            assert join(server, 4)[0].epoch > epoch
            assert stub.Status(pb.StatusRequest(), timeout=DEADLINE).switch.connected
    finally:
        first.stop()
        if second is not None:
            second.stop()


def test_a_switch_that_is_not_there() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        with pytest.raises(SwitchError, match=f"switch {address}: not reachable within 0.2 s"):
            ControllerServer(lab(address), switch_deadline=0.2).start()
