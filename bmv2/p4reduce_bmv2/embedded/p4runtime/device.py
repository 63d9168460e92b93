# SPDX-License-Identifier: Apache-2.0
"""The device behind the P4Runtime server: pipelines, clients, and the rules of who may do what. No gRPC calls.

Two locks. `_control` serialises everything a client does, arbitration included, so that a new primary is chosen only
between two writes, as the specification asks. `lock` is the packet thread's: it is taken for single operations on the
engine, never for a whole request.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from p4reduce_bmv2.embedded.engine import Engine
from p4reduce_bmv2.embedded.p4runtime import entities, packet_io
from p4reduce_bmv2.embedded.p4runtime.arbitration import Arbitration, Notice
from p4reduce_bmv2.embedded.p4runtime.pipeline import Pipeline, load
from p4reduce_bmv2.embedded.p4runtime.status import Code, Refused, RpcStatus, batch_status
from p4reduce_bmv2.embedded.p4runtime.stubs import Message, p4runtime_pb2

MAX_QUEUED_PACKETS = 1024
"""Packet-ins that wait for a slow primary; what comes after is dropped. (BMv2 would stall every port instead.)"""

_CLOSE_SECONDS = 0.5

_SetRequest = p4runtime_pb2.SetForwardingPipelineConfigRequest
_GetRequest = p4runtime_pb2.GetForwardingPipelineConfigRequest


class Client:
    """One stream: what the server still has to send to it."""

    def __init__(self) -> None:
        self.outgoing: queue.SimpleQueue[Message | Refused | None] = queue.SimpleQueue()
        """Messages; then Refused or None, which ends the stream with that status or with OK."""
        self.arbitrated = False
        self.closed = False


class Device:
    """One switch. Every method may be called from any thread."""

    def __init__(
        self,
        device_id: int,
        lock: AbstractContextManager[object],
        *,
        go_live: Callable[[Engine], None],
        inject: Callable[[bytes], None],
        cpu_port: int | None = None,
        seed: int = 0,
    ) -> None:
        """`go_live` is called, under `lock`, with the engine of a committed pipeline; `inject` takes packet-outs."""
        self.device_id = device_id
        self.cpu_port = cpu_port
        self.packet_ins_dropped = 0
        self._seed = seed
        self._lock = lock
        self._go_live = go_live
        self._inject = inject
        self._control = threading.RLock()
        self._stopping = threading.Event()
        self._arbitration = Arbitration()
        self._primary: Client | None = None
        """What the packet thread, which takes no control lock, may read."""
        self._live: Pipeline | None = None
        self._current: Pipeline | None = None
        """What reads and writes refer to: the live pipeline, or one that is saved and not yet committed."""

    # Clients

    def arbitrate(self, client: Client, update: Message) -> None:
        """Handle a MasterArbitrationUpdate. Refused: the stream must end."""
        with self._control:
            if client.closed:
                return
            if update.device_id != self.device_id:
                code = Code.FAILED_PRECONDITION if client.arbitrated else Code.NOT_FOUND
                raise Refused(code, f"this is device {self.device_id}, not {update.device_id}")
            self._check_role(update.role.name)
            election_id = _number(update.election_id) if update.HasField("election_id") else None
            notices = self._arbitration.update(client, election_id)
            client.arbitrated = True
            self._notify(notices)

    def disconnect(self, client: Client) -> None:
        """The client's stream ended; may be called again."""
        with self._control:
            client.closed = True
            self._notify(self._arbitration.remove(client))

    def packet_out(self, client: Client, packet: Message) -> None:
        """Inject a packet-out, or answer why it was dropped with a StreamError."""
        with self._control:
            try:
                if self._primary is not client:
                    raise Refused(Code.PERMISSION_DENIED, "only the primary may send packets")
                if self._live is None:
                    raise Refused(Code.FAILED_PRECONDITION, "no pipeline is committed")
                if self.cpu_port is None:
                    raise Refused(Code.FAILED_PRECONDITION, "the switch was started without a CPU port")
                frame = packet_io.frame_of(packet, self._live.index.packet_out)
                if not frame:
                    raise Refused(Code.INVALID_ARGUMENT, "an empty packet")
            except Refused as error:
                message = p4runtime_pb2.StreamMessageResponse()
                message.error.canonical_code = error.code
                message.error.message = error.message
                message.error.packet_out.packet_out.CopyFrom(packet)
                client.outgoing.put(message)
                return
        self._inject(frame)

    def packet_in(self, frame: bytes) -> None:
        """Hand a frame of the CPU port to the primary, if there is one. Called by the packet thread, never waits."""
        client = self._primary
        live = self._live
        if live is None or client is None:
            return
        message = packet_io.packet_in(frame, live.index.packet_in)
        if message is None or client.outgoing.qsize() >= MAX_QUEUED_PACKETS:
            self.packet_ins_dropped += 1
            return
        client.outgoing.put(message)

    def close(self) -> None:
        """End every stream, and a Write or Read in progress after the entity that it is at.

        Loading a pipeline cannot be interrupted; then the streams are left to the gRPC server, which ends them too.
        """
        self._stopping.set()
        if not self._control.acquire(timeout=_CLOSE_SECONDS):
            return
        try:
            for client in self._arbitration.everyone():
                if isinstance(client, Client):
                    client.outgoing.put(None)
        finally:
            self._control.release()

    # Pipeline

    def set_pipeline(self, request: Message) -> None:
        """SetForwardingPipelineConfig."""
        with self._control:
            self._check_writer(request)
            action = request.action
            if action == _SetRequest.COMMIT:
                self._commit_saved(request)
                return
            if action not in (
                _SetRequest.VERIFY,
                _SetRequest.VERIFY_AND_SAVE,
                _SetRequest.VERIFY_AND_COMMIT,
                _SetRequest.RECONCILE_AND_COMMIT,
            ):
                raise Refused(Code.INVALID_ARGUMENT, "the request has no action")
            pipeline = self.load(request.config)
            if action == _SetRequest.VERIFY:
                return
            if action == _SetRequest.RECONCILE_AND_COMMIT and self._current is not None:
                try:
                    entities.replay(self._current, pipeline)
                except Refused as error:
                    raise Refused(Code.INVALID_ARGUMENT, f"the state does not fit: {error.message}") from error
            self._current = pipeline
            if action != _SetRequest.VERIFY_AND_SAVE:
                self._commit(pipeline)

    def load(self, config: Message) -> Pipeline:
        """Compile a config without touching the running one."""
        return load(config, self._lock, seed=self._seed, cpu_port=self.cpu_port, stopping=self._stopping)

    def preload(self, config: Message) -> None:
        """Commit a config at start-up, without a client."""
        with self._control:
            self._current = self.load(config)
            self._commit(self._current)

    def _commit_saved(self, request: Message) -> None:
        if request.HasField("config"):
            raise Refused(Code.INVALID_ARGUMENT, "COMMIT takes no config")
        if self._current is None or self._current is self._live:
            raise Refused(Code.NOT_FOUND, "no config is saved")
        self._commit(self._current)

    def _commit(self, pipeline: Pipeline) -> None:
        with self._lock:
            self._live = pipeline
            self._go_live(pipeline.engine)

    def get_pipeline(self, request: Message) -> Message:
        """GetForwardingPipelineConfig: of the config that reads and writes refer to."""
        with self._control:
            self._check_device(request.device_id)
            config = self._pipeline().config
        kind = request.response_type
        response = p4runtime_pb2.GetForwardingPipelineConfigResponse()
        if kind not in _GetRequest.ResponseType.values():
            raise Refused(Code.INVALID_ARGUMENT, f"response type {kind}")
        response.config.SetInParent()
        if config.HasField("cookie"):
            response.config.cookie.CopyFrom(config.cookie)
        if kind in (_GetRequest.ALL, _GetRequest.P4INFO_AND_COOKIE):
            response.config.p4info.CopyFrom(config.p4info)
        if kind in (_GetRequest.ALL, _GetRequest.DEVICE_CONFIG_AND_COOKIE):
            response.config.p4_device_config = config.p4_device_config
        return response

    # Entities

    def write(self, request: Message) -> RpcStatus | None:
        """Apply a batch, each update for itself (CONTINUE_ON_ERROR). None when all succeeded."""
        with self._control:
            self._check_writer(request)
            pipeline = self._pipeline()
            if request.atomicity != p4runtime_pb2.WriteRequest.CONTINUE_ON_ERROR:
                raise Refused(Code.UNIMPLEMENTED, "only CONTINUE_ON_ERROR is implemented, as on simple_switch_grpc")
            outcomes: list[Refused | None] = []
            for update in request.updates:
                if self._stopping.is_set():
                    done = f"{len(outcomes)} of {len(request.updates)} updates were handled"
                    raise Refused(Code.UNAVAILABLE, f"the switch is stopping: {done}")
                outcomes.append(_outcome(pipeline, update))
        return batch_status(outcomes)

    def read(self, request: Message) -> list[Message]:
        """Entities that a Read selects. The first request that fails gives the status, as on simple_switch_grpc."""
        with self._control:
            self._check_device(request.device_id)
            self._check_role(request.role)
            pipeline = self._pipeline()
            return [entity for wanted in request.entities for entity in entities.read(pipeline, wanted)]

    def capabilities(self, request: Message) -> None:
        """Check a CapabilitiesRequest; 0 asks for the server as a whole."""
        device_id = getattr(request, "device_id", 0)
        if device_id:
            self._check_device(device_id)

    # Checks

    def _check_device(self, device_id: int) -> None:
        if device_id != self.device_id:
            raise Refused(Code.NOT_FOUND, f"this is device {self.device_id}, not {device_id}")

    def _check_role(self, role: str) -> None:
        if role:
            raise Refused(Code.NOT_FOUND, f"there is no role {role!r}: this switch has the default role only")

    def _check_writer(self, request: Message) -> None:
        self._check_device(request.device_id)
        self._check_role(request.role)
        election_id = _number(request.election_id) if request.HasField("election_id") else None
        if not self._arbitration.is_primary(election_id):
            raise Refused(Code.PERMISSION_DENIED, f"election id {election_id} is not the primary's")

    def _pipeline(self) -> Pipeline:
        if self._current is None:
            raise Refused(Code.FAILED_PRECONDITION, "no forwarding pipeline config is set")
        return self._current

    def _notify(self, notices: list[Notice]) -> None:
        primary = self._arbitration.primary
        self._primary = primary if isinstance(primary, Client) else None
        for notice in notices:
            if not isinstance(notice.client, Client):
                continue
            message = p4runtime_pb2.StreamMessageResponse()
            message.arbitration.device_id = self.device_id
            if notice.election_id is not None:
                message.arbitration.election_id.high = notice.election_id >> 64
                message.arbitration.election_id.low = notice.election_id & (1 << 64) - 1
            message.arbitration.status.code = notice.code
            message.arbitration.status.message = "is primary" if notice.code == Code.OK else "is backup"
            notice.client.outgoing.put(message)


def _outcome(pipeline: Pipeline, update: Message) -> Refused | None:
    try:
        entities.write(pipeline, update)
    except Refused as error:
        return Refused(error.code, error.message)  # without the traceback, which would keep everything of a large batch
    return None


def _number(election_id: Message) -> int:
    return int(election_id.high) << 64 | int(election_id.low)
