# SPDX-License-Identifier: Apache-2.0
"""A controller under test: real gRPC, a switch that only remembers, a clock that only the test moves."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from p4reduce import __version__
from p4reduce.proto import controller_pb2 as pb
from p4reduce.proto import controller_pb2_grpc
from p4reduce_controller.auth import CREDENTIAL
from p4reduce_controller.fake import FakeSwitch
from p4reduce_controller.hosts import Hosts
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

    def __init__(self, stub: Any, epoch: int, rank: int, job: str = "train", credential: bytes = b"") -> None:
        self.identity = {"job": job, "epoch": epoch, "rank": rank}
        self.metadata = ((CREDENTIAL, credential),)
        self.requests: queue.SimpleQueue[pb.ProgressReport | None] = queue.SimpleQueue()
        self.call = stub.Progress(iter(self.requests.get, None), timeout=DEADLINE, metadata=self.metadata)
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

    def __init__(self, hosts: Hosts = HOSTS, switch: FakeSwitch | None = None, **options: Any) -> None:
        self.switch = switch or FakeSwitch()
        self.kept: list[Stream] = []
        self.clock = Clock()
        defaults: dict[str, Any] = {"lease_seconds": LEASE, "timer": False, "clock": self.clock}
        self.server = ControllerServer(hosts, connect=self.switch.connect, **(defaults | options))
        self.server.start()
        self.channel = grpc.insecure_channel(self.server.address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.stub = controller_pb2_grpc.ControllerStub(self.channel)

    def crash(self) -> None:
        """End the controller first: it must not see its streams break."""
        self.server.stop()
        self.channel.close()

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
        replies = self.join_all(world, job, **changes)
        streams = [Stream(self.stub, reply.epoch, rank, job, reply.credential) for rank, reply in enumerate(replies)]
        for stream in streams:
            assert stream.next().HasField("registered")
            assert stream.next().HasField("order")
        self.kept += streams  # one that is collected ends
        return streams

    def leave(self, stream: Stream) -> None:
        self.stub.Leave(pb.LeaveRequest(**stream.identity), timeout=DEADLINE, metadata=stream.metadata)

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


def refused(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call.result() if hasattr(call, "result") else call()
    error: Any = caught.value
    return error.code().name, error.details()
