# SPDX-License-Identifier: Apache-2.0
"""The worker's side of the controller's gRPC service: deadlines, bounds, and errors that say what to do."""

from __future__ import annotations

import json
import logging
import math
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import grpc

from p4reduce import __version__, constants
from p4reduce.errors import ConfigError, ControllerError
from p4reduce.proto import controller_pb2 as pb
from p4reduce.proto import controller_pb2_grpc
from p4reduce.wire import PROFILES

if TYPE_CHECKING:
    from p4reduce.config import Settings

_LOG = logging.getLogger(__name__)
T = TypeVar("T")

CREDENTIAL = "p4reduce-credential-bin"
"""Metadata of Progress and Leave: proves that the caller is the rank it speaks for."""

DECIDED = "p4reduce-decided"
"""Trailing metadata of a refusal that is the controller's answer, and no sign that it is away."""

_JOIN_GRACE_SECONDS = 5.0
"""The server ends a Join by itself after `wait_seconds`; the call's own deadline only guards against a dead server."""
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 0.5
_ANOTHER_TRY_SECONDS = 1.0
"""An attempt that lasted so long had reached a controller: patience begins anew after it."""

_LAST_ATTEMPT_SECONDS = 0.25
"""Before the time is up, for gRPC to say why it cannot connect."""

_NO_CONNECTION = ("failed to connect", "dns resolution failed", "connection refused", "no route to host")

_CHANNEL_OPTIONS = (
    # A proxy for the internet has no business between a worker and its controller.
    ("grpc.enable_http_proxy", 0),
    # Every communicator has a connection of its own, so that closing one cannot break another of the same process.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
# Of several controllers one acts and the others stand by, which they say with UNAVAILABLE: the next call asks another.
_EACH_IN_TURN = ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]}))


def _is_ipv4(text: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET, text)
    except OSError:
        return False
    return True


def _is_decided(error: grpc.RpcError) -> bool:
    """Whether a controller has said no, and knew what it said."""
    return any(key == DECIDED for key, _ in error.trailing_metadata() or ())


def _is_away(error: grpc.RpcError) -> bool:
    return error.code() is grpc.StatusCode.UNAVAILABLE and not _is_decided(error)


def _open_channel(address: str, tls: dict[str, bytes]) -> grpc.Channel:
    options = (*_CHANNEL_OPTIONS, *((_EACH_IN_TURN,) if "," in address else ()))
    if not tls:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(**tls), options=options)


def _read(name: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {name} {path}: {error.strerror}") from error


def _secrets(settings: Settings) -> tuple[str, dict[str, bytes]]:
    """The token and what TLS needs. ConfigError for files that cannot be read."""
    token = settings.token or ""
    if not token and settings.token_file is not None:
        first, *_ = (_read("token_file", settings.token_file) or b"").splitlines() or [b""]
        token = first.decode("ascii", "replace").strip()
        if not token.isprintable() or not token.isascii() or not token:
            raise ConfigError(
                f"token_file {settings.token_file} must hold printable ASCII characters in its first line"
            )
    parts = {
        "root_certificates": _read("tls_ca", settings.tls_ca),
        "private_key": _read("tls_key", settings.tls_key),
        "certificate_chain": _read("tls_cert", settings.tls_cert),
    }
    return token, {name: content for name, content in parts.items() if content is not None}


class ControllerClient:
    """One connection to the controller. Thread-safe. ControllerError from every method; it carries the gRPC code."""

    def __init__(
        self, address: str, *, timeout: float = 5.0, token: str = "", tls: dict[str, bytes] | None = None
    ) -> None:
        """`address`: host:port, or a gRPC target with several. `timeout`: seconds that short calls may take, and for
        which a controller that is away is asked again. `token`: goes with every call. `tls`: arguments of
        grpc.ssl_channel_credentials. Connects with the first call.
        """
        self.address = address
        self.timeout = timeout
        # With one controller alone there is no other to ask.
        self._patience = timeout if "," in address else 0.0
        self._metadata: tuple[tuple[str, str | bytes], ...] = (("authorization", f"Bearer {token}"),) if token else ()
        self._tls = bool(tls)
        self._channel = _open_channel(address, tls or {})
        self._stub = controller_pb2_grpc.ControllerStub(self._channel)  # type: ignore[no-untyped-call]

    @classmethod
    def of(cls, settings: Settings) -> ControllerClient:
        """The client that the settings describe. ConfigError for files that cannot be read."""
        token, tls = _secrets(settings)
        return cls(settings.controller, timeout=settings.connect_timeout, token=token, tls=tls)

    def _until_available(self, attempt: Callable[[], T], patience: float, away: float | None = None) -> T:
        """Try again while there is no controller, for `patience` seconds since one was last there.

        `away`: until when to wait for a controller that cannot be reached, whenever it was last there. `patience` is
        for one then that answers, and says that it cannot decide now.
        """
        end, pause = 0.0, _FIRST_PAUSE_SECONDS
        first, warned = True, False
        while True:
            started = time.monotonic()
            try:
                return attempt()
            except grpc.RpcError as error:
                now = time.monotonic()
                if first or now - started > _ANOTHER_TRY_SECONDS:
                    end = now + patience
                until = end if away is None or _is_decided(error) else away
                if error.code() is not grpc.StatusCode.UNAVAILABLE or now + pause > until:
                    raise
                if away is not None and until == away and away - now > 1.0 and not warned:
                    warned, left = True, away - now
                    _LOG.warning(
                        "controller %s is away, waiting for it, %.3g s at most: %s", self.address, left, error.details()
                    )
            first = False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def describe(self) -> pb.DescribeReply:
        """What a worker must know before it opens its socket. Waits up to `timeout` for a controller to come up: where
        nothing has ever answered, the address may be wrong, and that should be said soon.
        """
        request = pb.DescribeRequest(client_version=__version__)
        last = min(_LAST_ATTEMPT_SECONDS, self.timeout / 2)
        end = time.monotonic() + self.timeout - last

        def call(seconds: float, wait: bool) -> pb.DescribeReply:
            reply: pb.DescribeReply = self._stub.Describe(
                request, timeout=max(seconds, 0.001), wait_for_ready=wait, metadata=self._metadata
            )
            return reply

        def attempt() -> pb.DescribeReply:
            try:
                return call(end - time.monotonic(), True)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise
            # A call that waits for a connection does not tell why there is none.
            return call(last, False)

        try:
            reply = self._until_available(attempt, self.timeout, away=end + last)
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
        """Blocks until every rank has joined, at most `request.wait_seconds`. The reply is still to be checked.

        Asks again while the controller is away, all that time, since it was there to `describe`: the request's nonce
        makes that the same Join.
        """
        started, whole = time.monotonic(), request.wait_seconds

        def attempt() -> pb.JoinReply:
            gone = time.monotonic() - started
            if gone > _FIRST_PAUSE_SECONDS:
                request.wait_seconds = max(whole - gone, 0.1)
            call = self._stub.Join.future(
                request, timeout=request.wait_seconds + _JOIN_GRACE_SECONDS, metadata=self._metadata
            )
            try:
                reply: pb.JoinReply = call.result()
            except grpc.RpcError:
                raise
            except BaseException:  # KeyboardInterrupt: the server must not go on waiting for us
                call.cancel()
                raise
            return reply

        try:
            return self._until_available(attempt, self.timeout, away=started + whole)
        except grpc.RpcError as error:
            if _is_away(error):
                raise ControllerError(
                    f"join: controller {self.address} went away while this rank was joining, and did not come back "
                    f"within the {whole:g} s of join_timeout: start it again ({error.details()})",
                    "UNAVAILABLE",
                ) from error
            self._fail("join", error)

    def check(self, reply: pb.JoinReply, world_size: int, *, ring: bool = False) -> None:
        """Refuse a join's reply that no worker can work with. The rank has joined nevertheless, and must leave."""
        order = reply.order
        on_ring = order.HasField("run_ring")
        start = order.run_ring if on_ring else order.run_switch
        switch = order.run_switch
        self._refuse(
            "join",
            (reply.epoch == 0, "epoch 0"),
            (not on_ring and not order.HasField("run_switch"), "no order to begin with"),
            (on_ring and not ring, "an order to take the ring path, which this rank does not have"),
            (start.epoch == 0, "an order for epoch 0"),
            (not on_ring and switch.or_slots == 0, "no slots for OR frames"),
            (not on_ring and switch.add_slots == 0, "no slots for ADD frames"),
            (switch.or_slots + switch.add_slots > constants.SLOTS, "more slots than a switch has"),
            (start.first_bucket != 0, f"an order for buckets from {start.first_bucket} on"),
            (not _is_ipv4(reply.endpoint_ip), f"endpoint address {reply.endpoint_ip[:40]!r}"),
            (not 0 < reply.endpoint_port < 1 << 16, f"UDP port {reply.endpoint_port}"),
            (len(reply.members) != world_size, f"{len(reply.members)} members"),
            (not 0 < reply.lease_seconds < math.inf, f"a lease of {reply.lease_seconds} s"),
        )

    def _refuse(self, call: str, *problems: tuple[bool, str]) -> None:
        found = [text for wrong, text in problems if wrong]
        if found:
            raise ControllerError(f"controller {self.address} answered {call} with {', '.join(found)}", "INTERNAL")

    def progress(self, reports: Iterator[pb.ProgressReport], credential: bytes = b"") -> Any:
        """Open the progress stream. Returns the call: iterate it for directives, `cancel()` it to end.

        Iterating raises grpc.RpcError when the stream breaks; `explain` turns that into text.
        """
        return self._stub.Progress(reports, metadata=self._with(credential))

    def leave(
        self,
        job: str,
        epoch: int,
        rank: int,
        *,
        submitted: int = 0,
        wait_seconds: float = 0.0,
        credential: bytes = b"",
        patience: float = 0.0,
    ) -> None:
        """Tell the controller that this rank is done after `submitted` buckets; see LeaveRequest.

        `patience`: seconds for which a controller that is away is asked again, counted from now.
        """
        end = time.monotonic() + max(patience, wait_seconds, self._patience)
        request = pb.LeaveRequest(job=job, epoch=epoch, rank=rank, submitted=submitted, wait_seconds=wait_seconds)

        def attempt() -> None:
            request.wait_seconds = min(wait_seconds, max(end - time.monotonic(), 0.0))
            timeout = self.timeout + request.wait_seconds
            self._stub.Leave(request, timeout=timeout, metadata=self._with(credential))

        try:
            self._until_available(attempt, 0.0, away=end)
        except grpc.RpcError as error:
            self._fail("leave", error)

    def status(self, job: str = "", *, timeout: float | None = None) -> pb.StatusReply:
        """State of the switch and of one job, or of all."""
        timeout = timeout or self.timeout

        def attempt() -> pb.StatusReply:
            reply: pb.StatusReply = self._stub.Status(
                pb.StatusRequest(job=job), timeout=timeout, metadata=self._metadata
            )
            return reply

        try:
            return self._until_available(attempt, min(timeout, self._patience))
        except grpc.RpcError as error:
            self._fail("status", error)

    def _with(self, credential: bytes) -> tuple[tuple[str, str | bytes], ...]:
        return (*self._metadata, (CREDENTIAL, credential)) if credential else self._metadata

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
            hint = (
                "; TLS is on here: does tls_ca fit its certificate, and is that for this address?" if self._tls else ""
            )
            return ControllerError(
                f"controller {self.address} not reachable within {self.timeout:g} s: start it with "
                f"`p4reduce-controller serve ...`, or set P4REDUCE_CONTROLLER to where it is ({details}){hint}",
                name,
            )
        return ControllerError(f"controller {self.address}: {details}", name)

    def _fail(self, call: str, error: grpc.RpcError) -> NoReturn:
        explained = self.explain(error)
        raise ControllerError(f"{call}: {explained}", explained.code) from error

    def close(self) -> None:
        """Close the connection; calls in flight end with CANCELLED. Safe to call twice."""
        self._channel.close()
