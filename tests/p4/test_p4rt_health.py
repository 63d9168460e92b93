# SPDX-License-Identifier: Apache-2.0
"""A controller that looks after a real switch: audits that find nothing wrong, and a program that was replaced."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from helpers.controller import Stream, until

from p4reduce import pipeline
from p4reduce.proto import controller_pb2 as pb
from p4reduce.proto import controller_pb2_grpc
from p4reduce_bmv2.embedded.switch import EmbeddedSwitch
from p4reduce_bmv2.switch import SwitchProcess, find_bmv2
from p4reduce_controller.audit import Keeper
from p4reduce_controller.hosts import Host, Hosts, SwitchConfig
from p4reduce_controller.server import ControllerServer

DEADLINE = 20.0


def lab(address: str) -> Hosts:
    hosts = tuple(Host(f"h{n}", f"10.0.0.{n}", f"02:70:34:00:00:{n:02x}", n) for n in range(1, 5))
    return Hosts(SwitchConfig(address, "w5", "10.0.0.254", "02:70:34:00:00:fe"), hosts)


class Audits:
    """Counts audits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._done = threading.Semaphore(0)
        audit = Keeper.audit

        def counted(keeper: Keeper, *arguments: Any) -> Any:
            finding = audit(keeper, *arguments)
            self._done.release()
            return finding

        monkeypatch.setattr(Keeper, "audit", counted)

    def wait(self, number: int) -> None:
        while self._done.acquire(blocking=False):
            pass
        for _ in range(number):
            assert self._done.acquire(timeout=DEADLINE)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def start(stack: ExitStack, address: str) -> tuple[ControllerServer, Any]:
    server = stack.enter_context(ControllerServer(lab(address), probe_seconds=0.02, audit_seconds=0.02))
    channel = stack.enter_context(grpc.insecure_channel(server.address))
    return server, controller_pb2_grpc.ControllerStub(channel)


def join(stub: Any, job: str, ranks: int) -> list[Stream]:
    calls = []
    for rank in range(ranks):
        request = pb.JoinRequest(job=job, world_size=ranks, rank=rank, ip=f"10.0.0.{rank + 1}", udp_port=4000)
        request.mtu, request.receive_frames, request.wait_seconds = 1500, 99, DEADLINE
        calls.append(stub.Join.future(request, timeout=DEADLINE))
    replies = [call.result() for call in calls]
    streams = [Stream(stub, reply.epoch, rank, job, reply.credential) for rank, reply in enumerate(replies)]
    for stream in streams:
        assert stream.next().HasField("registered")
        assert stream.next().HasField("order")
    return streams


@pytest.mark.parametrize("kind", ["embedded", pytest.param("bmv2", marks=pytest.mark.bmv2)])
def test_audits_while_jobs_come_and_go_find_nothing(
    kind: Any, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "bmv2" and find_bmv2() is None:
        pytest.skip("simple_switch_grpc is not installed")
    audits = Audits(monkeypatch)
    switch = stack.enter_context(SwitchProcess.start(kind))
    caplog.set_level(logging.WARNING)
    _, stub = start(stack, switch.grpc_address)
    for turn in range(3):
        streams = join(stub, f"job{turn}", 4)
        stays = join(stub, f"stays{turn}", 2)
        audits.wait(2)
        for rank, stream in enumerate(streams):
            request = pb.LeaveRequest(job=f"job{turn}", epoch=stream.identity["epoch"], rank=rank)
            stub.Leave(request, timeout=DEADLINE, metadata=stream.metadata)
        audits.wait(2)
        status = stub.Status(pb.StatusRequest(), timeout=DEADLINE)
        assert status.switch.trouble == ""
        assert {job.job: job.state for job in status.jobs}[f"stays{turn}"] == "switch"
        stub.Evict(pb.EvictRequest(job=f"stays{turn}"), timeout=DEADLINE)
        assert stays[0].next().HasField("fence")
        until(lambda: not any(pool.job for pool in stub.Pools(pb.PoolsRequest(), timeout=DEADLINE).pools))
        for stream in (*stays, *streams):
            stream.half_close()
    assert "audit" not in caplog.text


def test_a_program_that_was_replaced_comes_back_by_itself(stack: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    switch = stack.enter_context(EmbeddedSwitch())
    _, stub = start(stack, switch.grpc_address)
    (stream,) = join(stub, "train", 1)
    other = pipeline.find("w34")
    switch.preload(other.json, other.p4info)
    assert stream.next().fence.reason == pb.Fence.SWITCH_LOST
    until(lambda: stub.Status(pb.StatusRequest(), timeout=DEADLINE).switch.connected)
    (again,) = join(stub, "again", 1)
    assert int(again.identity["epoch"]) > int(stream.identity["epoch"])
    assert "it runs another program (cookie 0x0) in the place of p4reduce's" in caplog.text
