# SPDX-License-Identifier: Apache-2.0
"""The gRPC service p4.v1.P4Runtime of one device."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import grpc

from p4reduce.errors import SwitchError
from p4reduce_bmv2.embedded.numerals import decimal
from p4reduce_bmv2.embedded.p4runtime.arbitration import MAX_CLIENTS
from p4reduce_bmv2.embedded.p4runtime.device import Client, Device
from p4reduce_bmv2.embedded.p4runtime.status import Code, Refused
from p4reduce_bmv2.embedded.p4runtime.stubs import Message, p4runtime_pb2, p4runtime_pb2_grpc

log = logging.getLogger(__name__)

API_VERSION = "1.3.0"
"""Same as simple_switch_grpc."""
MAX_MESSAGE_BYTES = 256 << 20
READ_CHUNK = 512
"""Entities per ReadResponse, well below the 4 MiB that a client accepts by default."""
STOP_GRACE = 0.2
"""Seconds that calls in progress get when the server stops."""
STOP_WAIT = 0.5
"""Seconds that gRPC gets after that to report that all calls have ended, and then that their threads get to end."""

KEEPALIVE_MS = 10_000

_T = TypeVar("_T")


class _Servicer:
    """The six calls of the service. A blocked stream holds one thread of the pool, so streams are limited."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._streams = threading.BoundedSemaphore(MAX_CLIENTS)

    # The names are the service's.
    def Write(self, request: Message, context: grpc.ServicerContext) -> Message:
        status = _guard(context, self._device.write, request)
        if status is not None:
            context.abort_with_status(status)
        return p4runtime_pb2.WriteResponse()

    def Read(self, request: Message, context: grpc.ServicerContext) -> Iterator[Message]:
        entities = _guard(context, self._device.read, request)
        for start in range(0, len(entities), READ_CHUNK):
            yield p4runtime_pb2.ReadResponse(entities=entities[start : start + READ_CHUNK])

    def SetForwardingPipelineConfig(self, request: Message, context: grpc.ServicerContext) -> Message:
        _guard(context, self._device.set_pipeline, request)
        return p4runtime_pb2.SetForwardingPipelineConfigResponse()

    def GetForwardingPipelineConfig(self, request: Message, context: grpc.ServicerContext) -> Message:
        return _guard(context, self._device.get_pipeline, request)

    def Capabilities(self, request: Message, context: grpc.ServicerContext) -> Message:
        _guard(context, self._device.capabilities, request)
        return p4runtime_pb2.CapabilitiesResponse(p4runtime_api_version=API_VERSION)

    def StreamChannel(self, requests: Iterator[Message], context: grpc.ServicerContext) -> Iterator[Message]:
        if not self._streams.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_CLIENTS} streams are open, which is the limit")
        client = Client()
        try:
            # The callback wakes the loop below when the client has gone; False means that it has gone already.
            if not context.add_callback(lambda: client.outgoing.put(None)):
                return
            threading.Thread(target=self._listen, args=(requests, client), name="p4runtime-stream", daemon=True).start()
            while (message := client.outgoing.get()) is not None:
                if isinstance(message, Refused):
                    context.abort(message.grpc_code, message.message)
                yield message
        finally:
            self._device.disconnect(client)
            self._streams.release()

    def _listen(self, requests: Iterator[Message], client: Client) -> None:
        """Handle what a client sends until it stops sending; then its stream ends."""
        end: Refused | None = None
        try:
            for request in requests:
                kind = request.WhichOneof("update")
                if kind == "arbitration":
                    self._device.arbitrate(client, request.arbitration)
                elif kind == "packet":
                    self._device.packet_out(client, request.packet)
                else:
                    log.debug("stream message %s ignored", kind)
        except Refused as error:
            end = error
        except grpc.RpcError:
            log.debug("a P4Runtime client went away")
        except Exception as error:
            end = _unexpected(error)
        client.outgoing.put(end)


def _guard(context: grpc.ServicerContext, call: Callable[[Message], _T], request: Message) -> _T:
    try:
        return call(request)
    except Refused as error:
        refused = error
    except Exception as error:
        refused = _unexpected(error)
    context.abort(refused.grpc_code, refused.message)
    raise refused  # abort has raised; this tells the type checker


def _unexpected(error: Exception) -> Refused:
    """A defect of this switch: the log has where, the client only that."""
    log.error("a P4Runtime request failed by a defect of the switch", exc_info=error)
    return Refused(Code.INTERNAL, f"a defect of the switch, see its log: {type(error).__name__}")


class P4RuntimeServer:
    """A listening server. `address` is host:port, port 0 for any free one, or unix:PATH."""

    def __init__(self, device: Device, address: str) -> None:
        self._device = device
        self._threads = f"p4runtime-{id(self):x}"
        """Starts the names of the threads that run calls."""
        # Streams hold their threads, other calls share the rest.
        pool = ThreadPoolExecutor(max_workers=MAX_CLIENTS + 8, thread_name_prefix=self._threads)
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            # Off, or a second switch on the same address would silently take half of the connections.
            ("grpc.so_reuseport", 0),
            # A primary whose machine vanishes must make room; without these the server would notice after two hours.
            ("grpc.keepalive_time_ms", KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
        ]
        _check_free(address)
        self._pool = pool
        self._server = grpc.server(pool, options=options)
        p4runtime_pb2_grpc.add_P4RuntimeServicer_to_server(_Servicer(device), self._server)
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise SwitchError(f"cannot listen on {address}: {error}") from error
        self.address = address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
        """Where clients connect, with the real port."""

    def start(self) -> None:
        """Accept calls."""
        self._server.start()

    def stop(self) -> bool:
        """End all streams and calls; returns when the address is free again. False when threads of calls are left.

        It takes two seconds at most. What cannot be interrupted by then, the decoding of a huge request or the loading
        of a program, goes on in threads of its own without effect; but Python will wait for these when it exits.
        """
        self._device.close()
        self._server.stop(STOP_GRACE).wait(STOP_GRACE + STOP_WAIT)
        self._pool.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + STOP_WAIT
        calls = [thread for thread in threading.enumerate() if thread.name.startswith(self._threads)]
        for thread in calls:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in calls)


def _check_free(address: str) -> None:
    """Try to bind first: gRPC's own message for a taken port says little and comes with log lines of its C core."""
    if address.startswith("unix:"):
        return
    host, _, text = address.rpartition(":")
    port = decimal(text)
    if not host or port is None:
        raise SwitchError(f"gRPC address {address!r} is not HOST:PORT")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError, ValueError, TypeError) as error:  # the last two: a name that cannot be one
            raise SwitchError(f"cannot listen on {address}: {error}") from error
