# SPDX-License-Identifier: Apache-2.0
"""A bare P4Runtime client that shows every status code, and switches to point it at."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import text_format
from google.rpc import status_pb2
from p4.config.v1 import p4info_pb2
from p4.v1 import p4runtime_pb2, p4runtime_pb2_grpc

from p4reduce_bmv2.embedded.switch import EmbeddedSwitch
from p4reduce_bmv2.switch import SwitchProcess, find_bmv2

PROGRAMS = Path(__file__).resolve().parent.parent / "p4" / "programs"
COMPILED = Path(__file__).resolve().parent.parent.parent / "p4" / "compiled"
DEADLINE = 10.0
"""Seconds that a test waits for what must come."""
CPU_PORT = 510
INSERT, MODIFY, DELETE = (p4runtime_pb2.Update.INSERT, p4runtime_pb2.Update.MODIFY, p4runtime_pb2.Update.DELETE)
Set = p4runtime_pb2.SetForwardingPipelineConfigRequest
Get = p4runtime_pb2.GetForwardingPipelineConfigRequest
Code = grpc.StatusCode
KINDS = ["embedded", pytest.param("bmv2", marks=pytest.mark.bmv2)]
"""Parameters of a fixture that starts a switch of either kind."""


def number(code: grpc.StatusCode) -> int:
    """The canonical number of a status code."""
    return int(code.value[0])


@dataclass(frozen=True)
class Program:
    """A compiled program and names for its parts."""

    json: bytes
    p4info: Any

    @classmethod
    def load(cls, json: Path, p4info: Path) -> Program:
        return cls(json.read_bytes(), text_format.Parse(p4info.read_text(), p4info_pb2.P4Info()))

    @classmethod
    def entities(cls) -> Program:
        """tests/p4/programs/entities.p4."""
        return cls.load(PROGRAMS / "entities.json", PROGRAMS / "entities.p4info.txtpb")

    @classmethod
    def w34(cls) -> Program:
        """The allreduce program, profile w34."""
        return cls.load(COMPILED / "w34.json", COMPILED / "w34.p4info.txtpb")

    def config(self, cookie: int | None = None) -> Any:
        config = p4runtime_pb2.ForwardingPipelineConfig(p4info=self.p4info, p4_device_config=self.json)
        if cookie is not None:
            config.cookie.cookie = cookie
        return config

    def find(self, kind: str, alias: str) -> Any:
        """The P4Info object of this kind ("tables", "actions", ...) with this alias."""
        return next(item for item in getattr(self.p4info, kind) if item.preamble.alias == alias)

    def entry(
        self,
        table: str,
        match: dict[str, Any] | None = None,
        action: str | None = None,
        params: Sequence[bytes] = (),
        priority: int = 0,
        **fields: Any,
    ) -> Any:
        """An Entity with a TableEntry. A match value is bytes (exact, optional) or a pair, as the field's type says."""
        entity = p4runtime_pb2.Entity()
        proto = entity.table_entry
        info = self.find("tables", table)
        proto.table_id = info.preamble.id
        proto.priority = priority
        for name, value in (match or {}).items():
            field = next(item for item in info.match_fields if item.name == name)
            self._match(proto.match.add(field_id=field.id), field.match_type, value)
        if action is not None:
            proto.action.action.action_id = self.find("actions", action).preamble.id
            for place, param in enumerate(params, 1):
                proto.action.action.params.add(param_id=place, value=param)
        for name, value in fields.items():
            setattr(proto, name, value)
        return entity

    @staticmethod
    def _match(match: Any, kind: int, value: Any) -> None:
        types = p4info_pb2.MatchField
        if kind == types.EXACT:
            match.exact.value = value
        elif kind == types.OPTIONAL:
            match.optional.value = value
        elif kind == types.LPM:
            match.lpm.value, match.lpm.prefix_len = value
        elif kind == types.TERNARY:
            match.ternary.value, match.ternary.mask = value
        else:
            match.range.low, match.range.high = value

    def counter(self, name: str, index: int | None = None, packets: int | None = None, size: int = 0) -> Any:
        """An Entity with a CounterEntry; id 0 for the empty name."""
        entity = p4runtime_pb2.Entity()
        entity.counter_entry.SetInParent()
        if name:
            entity.counter_entry.counter_id = self.find("counters", name).preamble.id
        if index is not None:
            entity.counter_entry.index.index = index
        if packets is not None:
            entity.counter_entry.data.packet_count = packets
            entity.counter_entry.data.byte_count = size
        return entity


def group(number: int, replicas: Sequence[tuple[int | bytes, int]] = ()) -> Any:
    """An Entity with a multicast group; a port given as bytes uses the field of that type."""
    entity = p4runtime_pb2.Entity()
    proto = entity.packet_replication_engine_entry.multicast_group_entry
    proto.multicast_group_id = number
    _add(proto.replicas, replicas)
    return entity


def session(number: int, replicas: Sequence[tuple[int | bytes, int]] = (), **fields: int) -> Any:
    """An Entity with a clone session."""
    entity = p4runtime_pb2.Entity()
    proto = entity.packet_replication_engine_entry.clone_session_entry
    proto.session_id = number
    _add(proto.replicas, replicas)
    for name, value in fields.items():
        setattr(proto, name, value)
    return entity


def _add(repeated: Any, replicas: Sequence[tuple[int | bytes, int]]) -> None:
    for port, instance in replicas:
        kind = "port" if isinstance(port, bytes) else "egress_port"
        repeated.add(instance=instance, **{kind: port})


class Client:
    """One P4Runtime client: a stream and calls."""

    def __init__(self, address: str, election_id: int | None = None, device_id: int = 0) -> None:
        """Connects; with an election id it also arbitrates and waits for the answer."""
        self.device_id = device_id
        self.election_id = election_id
        self._channel = grpc.insecure_channel(address)
        self.stub = p4runtime_pb2_grpc.P4RuntimeStub(self._channel)
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.incoming: queue.Queue[Any] = queue.Queue()
        """Stream messages, and last the status code with which the stream ended."""
        self._stream = self.stub.StreamChannel(iter(self._outgoing.get, None))
        self._reader = threading.Thread(target=self._read_stream)
        self._reader.start()
        if election_id is not None:
            self.arbitrate(election_id)
            assert self.next("arbitration").status.code in (0, number(Code.ALREADY_EXISTS))

    def _read_stream(self) -> None:
        try:
            for message in self._stream:
                self.incoming.put(message)
            self.incoming.put(self._stream.code())
        except grpc.RpcError as error:
            self.incoming.put(error.code())

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Break the stream off, as a client does that dies."""
        self._stream.cancel()
        self._outgoing.put(None)
        self._reader.join()
        self._channel.close()

    def finish(self) -> None:
        """Close the sending side; the server ends the stream."""
        self._outgoing.put(None)

    def send(self, message: Any) -> None:
        self._outgoing.put(message)

    def arbitrate(self, election_id: int | None, device_id: int | None = None, role: str = "") -> None:
        message = p4runtime_pb2.StreamMessageRequest()
        message.arbitration.device_id = self.device_id if device_id is None else device_id
        if election_id is not None:
            message.arbitration.election_id.high = election_id >> 64
            message.arbitration.election_id.low = election_id & (1 << 64) - 1
        if role:
            message.arbitration.role.name = role
        self.election_id = election_id
        self.send(message)

    def next(self, kind: str) -> Any:
        """The next stream message, which must be of this kind."""
        message = self.incoming.get(timeout=DEADLINE)
        assert not isinstance(message, grpc.StatusCode), f"the stream ended with {message}"
        assert message.WhichOneof("update") == kind, message
        return getattr(message, kind)

    def end(self) -> grpc.StatusCode:
        """Status with which the stream ended, other messages passed over."""
        while not isinstance(message := self.incoming.get(timeout=DEADLINE), grpc.StatusCode):
            pass
        return message

    def packet_out(self, payload: bytes, metadata: dict[int, bytes]) -> None:
        message = p4runtime_pb2.StreamMessageRequest()
        message.packet.payload = payload
        for metadata_id, value in metadata.items():
            message.packet.metadata.add(metadata_id=metadata_id, value=value)
        self.send(message)

    def set_pipeline(self, action: int, config: Any = None, **fields: Any) -> None:
        request = Set(device_id=self.device_id, action=action, **fields)
        self._elect(request)
        if config is not None:
            request.config.CopyFrom(config)
        self.stub.SetForwardingPipelineConfig(request, timeout=DEADLINE)

    def push(self, program: Program, cookie: int | None = None) -> None:
        self.set_pipeline(Set.VERIFY_AND_COMMIT, program.config(cookie))

    def get_pipeline(self, kind: int = Get.ALL) -> Any:
        request = Get(device_id=self.device_id, response_type=kind)
        return self.stub.GetForwardingPipelineConfig(request, timeout=DEADLINE).config

    def write(self, *updates: tuple[int, Any], **fields: Any) -> list[grpc.StatusCode]:
        """Status code of every update of the batch; any error but UNKNOWN is raised."""
        request = p4runtime_pb2.WriteRequest(device_id=self.device_id, **fields)
        self._elect(request)
        for kind, entity in updates:
            request.updates.add(type=kind, entity=entity)
        try:
            self.stub.Write(request, timeout=DEADLINE)
        except grpc.RpcError as error:
            if error.code() != Code.UNKNOWN:
                raise
            return [_code(item.canonical_code) for item in batch_errors(error)]
        return [Code.OK] * len(updates)

    def read(self, *entities: Any) -> list[Any]:
        request = p4runtime_pb2.ReadRequest(device_id=self.device_id, entities=entities)
        return [entity for response in self.stub.Read(request, timeout=DEADLINE) for entity in response.entities]

    def _elect(self, request: Any) -> None:
        if self.election_id is not None:
            request.election_id.high = self.election_id >> 64
            request.election_id.low = self.election_id & (1 << 64) - 1


def batch_errors(error: grpc.RpcError) -> list[Any]:
    """The p4.v1.Error of every update, from the trailer of a failed Write."""
    details = dict(error.trailing_metadata())["grpc-status-details-bin"]
    errors = []
    for packed in status_pb2.Status.FromString(details).details:
        item = p4runtime_pb2.Error()
        assert packed.Unpack(item)
        errors.append(item)
    return errors


def _code(value: int) -> grpc.StatusCode:
    return next(code for code in grpc.StatusCode if code.value[0] == value)


@contextlib.contextmanager
def refused(*codes: grpc.StatusCode) -> Iterator[pytest.ExceptionInfo[grpc.RpcError]]:
    """The block must fail with one of these status codes."""
    with pytest.raises(grpc.RpcError) as caught:
        yield caught
    assert caught.value.code() in codes, caught.value.details()


@contextlib.contextmanager
def running(kind: str, device_id: int = 0) -> Iterator[str]:
    """A switch with a CPU port and without ports; gives its gRPC address."""
    if kind == "embedded":
        with EmbeddedSwitch(device_id=device_id, cpu_port=CPU_PORT) as switch:
            yield switch.grpc_address
        return
    if find_bmv2() is None:
        pytest.skip("simple_switch_grpc is not installed")
    with SwitchProcess.start("bmv2", device_id=device_id, cpu_port=CPU_PORT) as process:
        yield process.grpc_address
