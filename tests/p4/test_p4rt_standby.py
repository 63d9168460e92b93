# SPDX-License-Identifier: Apache-2.0
"""Two controllers on one real switch: the standby waits, takes over, and never do both act."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from p4reduce import pipeline
from p4reduce.errors import ConfigError, SwitchError
from p4reduce.proto import controller_pb2 as pb
from p4reduce.proto import controller_pb2_grpc
from p4reduce_bmv2.switch import SwitchProcess, find_bmv2
from p4reduce_controller.election import Candidacy
from p4reduce_controller.entries import Group, Update, Verb
from p4reduce_controller.hosts import Host, Hosts, SwitchConfig
from p4reduce_controller.link import SwitchGoneError
from p4reduce_controller.p4rt import SwitchClient
from p4reduce_controller.server import ControllerServer

DEADLINE = 20.0


@pytest.fixture(params=["embedded", pytest.param("bmv2", marks=pytest.mark.bmv2)])
def kind(request: pytest.FixtureRequest) -> Any:
    if request.param == "bmv2" and find_bmv2() is None:
        pytest.skip("simple_switch_grpc is not installed")
    return request.param


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def lab(address: str) -> Hosts:
    hosts = tuple(Host(f"h{n}", f"10.0.0.{n}", f"02:70:34:00:00:{n:02x}", n) for n in range(1, 5))
    return Hosts(SwitchConfig(address, "w5", "10.0.0.254", "02:70:34:00:00:fe"), hosts)


class Controller:
    """A controller whose start may wait, in a thread of its own."""

    def __init__(self, stack: ExitStack, address: str, **options: Any) -> None:
        self.waiting, self.started = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.server = ControllerServer(
            lab(address), standby=True, on_standby=self.waiting.set, probe_seconds=0.1, **options
        )
        self._thread = threading.Thread(target=self._start)
        self._thread.start()
        stack.callback(self.end)

    def _start(self) -> None:
        try:
            self.server.start()
        except Exception as error:  # handed to the test
            self.error = error
        self.started.set()

    def end(self) -> None:
        self.server.stop()
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()

    def serves(self) -> bool:
        """Whether it became primary, and a worker can join."""
        assert self.started.wait(DEADLINE)
        if self.error is not None:
            raise self.error
        request = pb.JoinRequest(job="train", world_size=1, ip="10.0.0.1", udp_port=4000, mtu=1500, receive_frames=99)
        with grpc.insecure_channel(self.server.address) as channel:
            reply = controller_pb2_grpc.ControllerStub(channel).Join(request, timeout=DEADLINE)
        return bool(reply.epoch)


def test_a_standby_waits_without_file_and_address_and_takes_over(kind: Any, stack: ExitStack, tmp_path: Path) -> None:
    switch = stack.enter_context(SwitchProcess.start(kind))
    one = Controller(stack, switch.grpc_address, state=tmp_path / "one.db")
    assert one.serves()
    two = Controller(stack, switch.grpc_address, state=tmp_path / "two.db")
    assert two.waiting.wait(DEADLINE)
    assert not two.started.is_set()
    assert [file.name for file in tmp_path.glob("two.db*")] == []
    with pytest.raises(ConfigError, match="has not been started"):
        _ = two.server.address
    one.end()
    assert two.serves()
    assert (tmp_path / "two.db").exists()
    assert not two.server.ended.is_set()


def test_a_primary_that_is_pushed_out_stops_at_once(kind: Any, stack: ExitStack) -> None:
    switch = stack.enter_context(SwitchProcess.start(kind))
    one = Controller(stack, switch.grpc_address)
    assert one.serves()
    two = Controller(stack, switch.grpc_address, election_id=1 << 100)
    assert two.serves()
    assert one.server.ended.wait(DEADLINE)
    assert one.server.demoted
    assert "another controller has become primary: this one stops acting" in one.server.why
    with grpc.insecure_channel(one.server.address) as channel:
        stub = controller_pb2_grpc.ControllerStub(channel)
        request = pb.JoinRequest(job="late", world_size=1, ip="10.0.0.1", udp_port=1, mtu=1500, receive_frames=99)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Join(request, timeout=DEADLINE)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
    assert not two.server.ended.is_set()


def test_a_controller_that_does_not_stand_by_is_refused(kind: Any, stack: ExitStack) -> None:
    switch = stack.enter_context(SwitchProcess.start(kind))
    assert Controller(stack, switch.grpc_address).serves()
    with pytest.raises(SwitchError, match="another controller is primary: stop it, wait for its end with --standby"):
        ControllerServer(lab(switch.grpc_address), switch_deadline=0.5).start()


def test_a_standby_can_be_stopped(kind: Any, stack: ExitStack) -> None:
    switch = stack.enter_context(SwitchProcess.start(kind))
    assert Controller(stack, switch.grpc_address).serves()
    two = Controller(stack, switch.grpc_address)
    assert two.waiting.wait(DEADLINE)
    two.end()
    assert isinstance(two.error, SwitchError)
    assert "stopped before this controller became primary" in str(two.error)


def test_several_standbys_and_a_restart_of_the_switch(kind: Any, stack: ExitStack) -> None:
    switch = stack.enter_context(SwitchProcess.start(kind))
    address = switch.grpc_address
    first = Controller(stack, address)
    assert first.serves()
    others = [Controller(stack, address) for _ in range(2)]
    for other in others:
        assert other.waiting.wait(DEADLINE)
        other.waiting.clear()
    switch.stop()
    stack.enter_context(SwitchProcess.start(kind, grpc_addr=address))
    for other in others:
        assert other.waiting.wait(DEADLINE), "they wait again"
    assert not first.server.ended.is_set()
    with grpc.insecure_channel(first.server.address) as channel:
        stub = controller_pb2_grpc.ControllerStub(channel)
        assert stub.Status(pb.StatusRequest(), timeout=DEADLINE).switch.connected
    first.end()
    serving = [other for other in others if other.started.wait(2.0)]
    assert len(serving) == 1
    assert serving[0].serves()
    for other in others:
        other.end()


def test_what_a_former_primary_still_writes_is_refused(kind: Any, stack: ExitStack) -> None:
    switch = stack.enter_context(SwitchProcess.start(kind))

    def connect(candidacy: Candidacy) -> SwitchClient:
        client = SwitchClient(switch.grpc_address, pipeline.find("w5"), candidacy=candidacy)
        stack.callback(client.close)
        return client

    one = connect(Candidacy())
    two = connect(Candidacy(1 << 100))
    update = [Update(Verb.INSERT, Group(7, frozenset({(1, 1)})))]
    one._session.lost = None  # as if it had not noticed yet
    with pytest.raises(SwitchError, match="PERMISSION_DENIED"):
        one.write(update)
    one._session.lost = "another controller has become primary"
    with pytest.raises(SwitchGoneError, match="another controller has become primary"):
        one.write(update)
    assert two.read_groups() == []
