# SPDX-License-Identifier: Apache-2.0
"""A controller that answers every call of the service with what a test puts in, and keeps what it was asked.

`fake` and `no_settings` are fixtures: a module that names them (`fake = cli_servicer.fake`) has them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from p4reduce.proto import controller_pb2 as pb
from p4reduce.proto import controller_pb2_grpc
from p4reduce_controller import cli

EPOCH = 1_980_000_001


def policy(**changes: Any) -> pb.RetransmissionPolicy:
    found = pb.RetransmissionPolicy(
        initial_seconds=0.05,
        min_seconds=0.01,
        max_seconds=0.5,
        deadline_seconds=60.0,
        early_resend=3,
        silent_seconds=0.5,
        fallback_seconds=1.0,
    )
    found.MergeFrom(pb.RetransmissionPolicy(**changes))
    return found


def worker(rank: int, state: str = "reporting", completed: int = 100, **counters: int) -> pb.WorkerStatus:
    return pb.WorkerStatus(
        member=pb.Member(rank=rank, host=f"h{rank}", ip=f"10.0.0.{rank + 1}", udp_port=40001, switch_port=rank + 1),
        state=state,
        submitted=completed + 1,
        completed=completed,
        silent_seconds=0.25,
        rtt_seconds=0.0004 * (rank + 1),
        counters=counters or {"frames_sent": 1000 * (rank + 1), "retransmissions": 10, "duplicates": rank},
    )


def job(name: str = "train", state: str = "switch", ranks: int = 2, **changes: Any) -> pb.JobStatus:
    """A job of `ranks` ranks on the switch path, with slots 0..63, unless `changes` say otherwise."""
    fields: dict[str, Any] = {
        "job": name,
        "state": state,
        "epoch": EPOCH,
        "present": EPOCH,
        "world_size": ranks,
        "mode": "auto",
        "path": pb.PATH_SWITCH,
        "ring": True,
        "pool_base": 0,
        "pool_size": 64,
        "or_slots": 8,
        "add_slots": 56,
        "policy": policy(),
        "counters": {"contributions": 200, "results": 100, "duplicates": 3, "stale": 1},
        "workers": [worker(rank) for rank in range(ranks)],
    }
    return pb.JobStatus(**fields | changes)


RING = {
    "state": "ring",
    "path": pb.PATH_RING,
    "pool_base": 0,
    "pool_size": 0,
    "or_slots": 0,
    "add_slots": 0,
    "counters": {},
    "path_reason": "bucket 17: no result for 1.0 s",
    "fallbacks": {"silent": 2, "drained": 1},
    "promotions": 2,
}


OVER = {"path": pb.PATH_UNSPECIFIED, "pool_base": 0, "pool_size": 0, "or_slots": 0, "add_slots": 0}
"""What a job has no more that failed or ended."""


def switch(**changes: Any) -> pb.SwitchStatus:
    fields: dict[str, Any] = {
        "name": "s1",
        "address": "127.0.0.1:9559",
        "connected": True,
        "primary": True,
        "profile": "w34",
        "slots": 1024,
        "connected_seconds": 61.0,
    }
    return pb.SwitchStatus(**fields | changes)


class Servicer(controller_pb2_grpc.ControllerServicer):
    """Change `switch`, `jobs`, `pools` and `replies` at will; `refuse` maps a call's name to (code, details)."""

    def __init__(self) -> None:
        self.switch = switch()
        self.jobs: list[pb.JobStatus] = []
        self.pools: list[pb.PoolsReply] = []
        """Answers of Pools, one after the other; the last one for ever."""
        self.watch: Callable[[pb.WatchRequest], Iterator[pb.StatusReply]] | None = None
        self.replies: dict[str, Any] = {}
        self.refuse: dict[str, tuple[grpc.StatusCode, str]] = {}
        self.asked: list[tuple[str, Any]] = []
        self.tokens: list[str] = []
        self.uptime = 12.0

    def _note(self, name: str, request: Any, context: grpc.ServicerContext) -> None:
        self.asked.append((name, request))
        metadata = dict(context.invocation_metadata())
        self.tokens.append(str(metadata.get("authorization", "")))
        if name in self.refuse:
            context.abort(*self.refuse[name])

    def snapshot(self, only: str = "") -> pb.StatusReply:
        return pb.StatusReply(
            switch=self.switch,
            jobs=[one for one in self.jobs if only in ("", one.job)],
            server_version="0.1.0",
            uptime_seconds=self.uptime,
        )

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        self._note("Status", request, context)
        reply = self.snapshot(request.job)
        if request.job and not reply.jobs:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no job {request.job!r}: an empty name shows all")
        return reply

    def Watch(self, request: pb.WatchRequest, context: grpc.ServicerContext) -> Iterator[pb.StatusReply]:
        self._note("Watch", request, context)
        if self.watch is not None:
            yield from self.watch(request)

    def Pools(self, request: pb.PoolsRequest, context: grpc.ServicerContext) -> pb.PoolsReply:
        self._note("Pools", request, context)
        return self.pools.pop(0) if len(self.pools) > 1 else self.pools[0]

    def SetMode(self, request: pb.SetModeRequest, context: grpc.ServicerContext) -> pb.SetModeReply:
        self._note("SetMode", request, context)
        reply: pb.SetModeReply = self.replies["SetMode"]
        return reply

    def SetPolicy(self, request: pb.SetPolicyRequest, context: grpc.ServicerContext) -> pb.SetPolicyReply:
        self._note("SetPolicy", request, context)
        found = policy()
        found.MergeFrom(request.policy)
        for name in request.zero:
            found.ClearField(name)
        return pb.SetPolicyReply(policy=found)

    def Drain(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> pb.DrainReply:
        self._note("Drain", request, context)
        reply: pb.DrainReply = self.replies["Drain"]
        return reply

    def Evict(self, request: pb.EvictRequest, context: grpc.ServicerContext) -> pb.EvictReply:
        self._note("Evict", request, context)
        return pb.EvictReply(epoch=EPOCH)


class Fake:
    """The servicer behind a real gRPC server on a port of its own."""

    def __init__(self, credentials: grpc.ServerCredentials | None = None) -> None:
        self.servicer = Servicer()
        self._executor = ThreadPoolExecutor(8, thread_name_prefix="fake-controller")
        self._server = grpc.server(self._executor)
        controller_pb2_grpc.add_ControllerServicer_to_server(self.servicer, self._server)  # type: ignore[no-untyped-call]
        if credentials is None:
            self.port = self._server.add_insecure_port("127.0.0.1:0")
        else:
            self.port = self._server.add_secure_port("127.0.0.1:0", credentials)
        self.ended = threading.Event()
        """Set when the test is over: what a Watch may wait for."""

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Fake:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self._server.stop(None).wait(10.0)
        self._executor.shutdown()


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own settings must not reach the tests."""
    for name in ("CONTROLLER", "TOKEN", "TOKEN_FILE", "TLS_CA", "TLS_CERT", "TLS_KEY"):
        monkeypatch.delenv(f"P4REDUCE_{name}", raising=False)


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake() as server:
        yield server


def run(server: Any, *arguments: str) -> int:
    """`p4reducectl` with a controller that has an address; its exit code."""
    return cli.main([arguments[0], "--controller", server.address, *arguments[1:]])
