# SPDX-License-Identifier: Apache-2.0
"""The worker's side of the controller's gRPC service: deadlines, bounds, and errors that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import grpc

from p4reduce import __version__, constants
from p4reduce.errors import ControllerError
from p4reduce.proto import controller_pb2 as pb
from p4reduce.proto import controller_pb2_grpc

_JOIN_GRACE_SECONDS = 5.0
"""The server ends a Join by itself after `wait_seconds`; the call's own deadline only guards against a dead server."""

_CHANNEL_OPTIONS = (
    # A proxy for the internet has no business between a worker and its controller.
    ("grpc.enable_http_proxy", 0),
    # Every communicator has a connection of its own, so that closing one cannot break another of the same process.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
)


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
        if not 0 < reply.udp_port < 1 << 16:
            raise ControllerError(f"controller {self.address} names UDP port {reply.udp_port}", "INTERNAL")
        return reply

    def join(self, request: pb.JoinRequest) -> pb.JoinReply:
        """Blocks until every rank has joined, at most `request.wait_seconds`."""
        call = self._stub.Join.future(request, timeout=request.wait_seconds + _JOIN_GRACE_SECONDS)
        try:
            reply: pb.JoinReply = call.result()
        except grpc.RpcError as error:
            self._fail("join", error)
        except BaseException:  # KeyboardInterrupt: the server must not go on waiting for us
            call.cancel()
            raise
        self._check(reply, request)
        return reply

    def _check(self, reply: pb.JoinReply, request: pb.JoinRequest) -> None:
        """Refuse a reply that this worker cannot work with, before anything is built from it."""
        policy = reply.policy
        problems = [
            (reply.epoch == 0, "epoch 0"),
            (reply.or_slots == 0, "no slots for OR frames"),
            (reply.add_slots == 0, "no slots for ADD frames"),
            (reply.or_slots + reply.add_slots > constants.SLOTS, "more slots than a switch has"),
            (not 0 < reply.endpoint_port < 1 << 16, f"UDP port {reply.endpoint_port}"),
            (len(reply.members) != request.world_size, f"{len(reply.members)} members"),
            (not 0 < policy.min_seconds <= policy.max_seconds, "a retransmission policy without sense"),
            (not 0 < policy.initial_seconds <= policy.deadline_seconds, "a retransmission policy without sense"),
            (not reply.lease_seconds > 0, "no lease time"),
        ]
        found = [text for wrong, text in problems if wrong]
        if found:
            raise ControllerError(f"controller {self.address} answered the join with {', '.join(found)}", "INTERNAL")

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
        """A gRPC error as a ControllerError."""
        code = error.code()
        name = code.name if code is not None else "UNKNOWN"
        details = error.details() or "no details"
        if name == "UNAVAILABLE" or (name == "DEADLINE_EXCEEDED" and details == "Deadline Exceeded"):
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
