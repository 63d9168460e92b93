# SPDX-License-Identifier: Apache-2.0
"""The worker's side of the controller's gRPC service: deadlines, bounds, and errors that say what to do."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from typing import Any, NoReturn

import grpc

from p4reduce import __version__, constants
from p4reduce.errors import ControllerError
from p4reduce.proto import controller_pb2 as pb
from p4reduce.proto import controller_pb2_grpc
from p4reduce.wire import PROFILES

_JOIN_GRACE_SECONDS = 5.0
"""The server ends a Join by itself after `wait_seconds`; the call's own deadline only guards against a dead server."""

_NO_CONNECTION = ("failed to connect", "dns resolution failed", "connection refused", "no route to host")

_CHANNEL_OPTIONS = (
    # A proxy for the internet has no business between a worker and its controller.
    ("grpc.enable_http_proxy", 0),
    # Every communicator has a connection of its own, so that closing one cannot break another of the same process.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
)


def _is_ipv4(text: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET, text)
    except OSError:
        return False
    return True


class ControllerClient:
    """One connection to the controller. Thread-safe. ControllerError from every method; it carries the gRPC code."""

    def __init__(self, address: str, *, timeout: float = 5.0) -> None:
        """`timeout`: seconds that short calls may take. Connects with the first call."""
        self.address = address
        self.timeout = timeout
        self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._stub = controller_pb2_grpc.ControllerStub(self._channel)  # type: ignore[no-untyped-call]

    def describe(self) -> pb.DescribeReply:
        """What a worker must know before it opens its socket. Waits up to `timeout` for a controller to come up."""
        request = pb.DescribeRequest(client_version=__version__)
        try:
            reply: pb.DescribeReply = self._stub.Describe(request, timeout=self.timeout, wait_for_ready=True)
        except grpc.RpcError as error:
            self._fail("describe", error)
        self._refuse(
            "describe",
            (reply.profile not in PROFILES, f"profile {reply.profile[:40]!r}, which p4reduce {__version__} lacks"),
            (not 0 < reply.udp_port < 1 << 16, f"UDP port {reply.udp_port}"),
            (not reply.loopback and not _is_ipv4(reply.switch_ip), f"switch address {reply.switch_ip[:40]!r}"),
        )
        return reply

    def join(self, request: pb.JoinRequest) -> pb.JoinReply:
        """Blocks until every rank has joined, at most `request.wait_seconds`. The reply is still to be checked."""
        call = self._stub.Join.future(request, timeout=request.wait_seconds + _JOIN_GRACE_SECONDS)
        try:
            reply: pb.JoinReply = call.result()
        except grpc.RpcError as error:
            self._fail("join", error)
        except BaseException:  # KeyboardInterrupt: the server must not go on waiting for us
            call.cancel()
            raise
        return reply

    def check(self, reply: pb.JoinReply, world_size: int) -> None:
        """Refuse a join's reply that no worker can work with. The rank has joined nevertheless, and must leave."""
        self._refuse(
            "join",
            (reply.epoch == 0, "epoch 0"),
            (reply.or_slots == 0, "no slots for OR frames"),
            (reply.add_slots == 0, "no slots for ADD frames"),
            (reply.or_slots + reply.add_slots > constants.SLOTS, "more slots than a switch has"),
            (not _is_ipv4(reply.endpoint_ip), f"endpoint address {reply.endpoint_ip[:40]!r}"),
            (not 0 < reply.endpoint_port < 1 << 16, f"UDP port {reply.endpoint_port}"),
            (len(reply.members) != world_size, f"{len(reply.members)} members"),
            (not 0 < reply.lease_seconds < math.inf, f"a lease of {reply.lease_seconds} s"),
        )

    def _refuse(self, call: str, *problems: tuple[bool, str]) -> None:
        found = [text for wrong, text in problems if wrong]
        if found:
            raise ControllerError(f"controller {self.address} answered {call} with {', '.join(found)}", "INTERNAL")

    def progress(self, reports: Iterator[pb.ProgressReport]) -> Any:
        """Open the progress stream. Returns the call: iterate it for directives, `cancel()` it to end.

        Iterating raises grpc.RpcError when the stream breaks; `explain` turns that into text.
        """
        return self._stub.Progress(reports)

    def leave(self, job: str, epoch: int, rank: int, *, timeout: float | None = None) -> None:
        """Tell the controller that this rank is done with the epoch."""
        try:
            self._stub.Leave(pb.LeaveRequest(job=job, epoch=epoch, rank=rank), timeout=timeout or self.timeout)
        except grpc.RpcError as error:
            self._fail("leave", error)

    def status(self, job: str = "", *, timeout: float | None = None) -> pb.StatusReply:
        """State of the switch and of one job, or of all."""
        try:
            reply: pb.StatusReply = self._stub.Status(pb.StatusRequest(job=job), timeout=timeout or self.timeout)
        except grpc.RpcError as error:
            self._fail("status", error)
        return reply

    def explain(self, error: grpc.RpcError) -> ControllerError:
        """A gRPC error as a ControllerError.

        A controller may answer UNAVAILABLE too, when it has lost the switch; gRPC's own reasons are known by their
        wording, for nothing else tells them apart.
        """
        code = error.code()
        name = code.name if code is not None else "UNKNOWN"
        details = error.details() or "no details"
        silent = name == "DEADLINE_EXCEEDED" and details == "Deadline Exceeded"
        if silent or (name == "UNAVAILABLE" and details.lower().startswith(_NO_CONNECTION)):
            return ControllerError(
                f"controller {self.address} not reachable within {self.timeout:g} s: start it with "
                f"`p4reduce-controller serve ...`, or set P4REDUCE_CONTROLLER to where it is ({details})",
                name,
            )
        return ControllerError(f"controller {self.address}: {details}", name)

    def _fail(self, call: str, error: grpc.RpcError) -> NoReturn:
        explained = self.explain(error)
        raise ControllerError(f"{call}: {explained}", explained.code) from error

    def close(self) -> None:
        """Close the connection; calls in flight end with CANCELLED. Safe to call twice."""
        self._channel.close()
