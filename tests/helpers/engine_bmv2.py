# SPDX-License-Identifier: Apache-2.0
"""simple_switch_grpc as a function from frames to frames, driven like the embedded engine.

Frames go in and out over BMv2's own gRPC stream (--dp-grpc-server-addr), so no interface and no root is needed. The
stream's messages are simple enough to be coded here: the generated code is in no package.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import text_format
from p4.config.v1 import p4info_pb2
from p4.v1 import p4runtime_pb2, p4runtime_pb2_grpc

from p4reduce_bmv2.embedded.tables import KeyElement

DEADLINE = 20.0
PATIENCE = 2.0
"""Seconds to wait for a frame that must come."""
GRACE = 0.05
"""Seconds to wait at the end of a case for frames that must not come."""
REFUSAL = 0.2
"""Seconds within which a stream that is refused is refused."""
CPU_PORT = 510
_STREAM = "/p4.bm.DataplaneInterface/PacketStream"


def available() -> bool:
    return shutil.which("simple_switch_grpc") is not None


# --- the data plane stream -------------------------------------------------------------------------------------------


def _varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def encode(message: tuple[int, int, bytes]) -> bytes:
    """PacketStreamRequest: id (1), port (3), packet (4)."""
    number, port, packet = message
    return b"\x08" + _varint(number) + b"\x18" + _varint(port) + b"\x22" + _varint(len(packet)) + packet


def decode(data: bytes) -> tuple[int, int, bytes]:
    """PacketStreamResponse: (id, port, packet)."""
    found: dict[int, Any] = {1: 0, 3: 0, 4: b""}
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(data):
        tag = varint()
        if tag & 7 == 2:
            size = varint()
            found[tag >> 3] = data[position : position + size]
            position += size
        else:
            found[tag >> 3] = varint()
    return found[1], found[3], found[4]


# --- the process -----------------------------------------------------------------------------------------------------


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Bmv2:
    """One simple_switch_grpc process; `load` gives it a program and empties everything."""

    def __init__(self) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="p4reduce-bmv2-")
        control, data = (f"unix:{self._scratch.name}/{name}" for name in ("control", "data"))
        command = ["simple_switch_grpc", "--no-p4", "-L", "off", "--thrift-port", str(_free_port()), "--"]
        command += ["--grpc-server-addr", control, "--dp-grpc-server-addr", data, "--cpu-port", str(CPU_PORT)]
        with open(f"{self._scratch.name}/log", "wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self._channels = [grpc.insecure_channel(control), grpc.insecure_channel(data)]
        for channel in self._channels:
            grpc.channel_ready_future(channel).result(timeout=DEADLINE)
        self._stub = p4runtime_pb2_grpc.P4RuntimeStub(self._channels[0])
        self._hello: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stream = self._stub.StreamChannel(iter(self._hello.get, None))
        self._arbitrate()
        self._frames: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._arrived: queue.Queue[tuple[int, int, bytes]] = queue.Queue()
        self._responses: Any = None
        self._number = 0
        self._replication: dict[tuple[str, int], Any] = {}
        self._info: Any = None

    def _arbitrate(self) -> None:
        message = p4runtime_pb2.StreamMessageRequest()
        message.arbitration.election_id.low = 1
        self._hello.put(message)
        assert next(self._stream).arbitration.status.code == 0

    def _open_stream(self) -> None:
        """The stream is refused until the switch has started, which it does a moment after its first program."""
        method = self._channels[1].stream_stream(_STREAM, request_serializer=encode, response_deserializer=decode)
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            responses = method(iter(self._frames.get, None))
            refused = threading.Event()
            reader = threading.Thread(target=self._read, args=(responses, refused), daemon=True)
            reader.start()
            if not refused.wait(REFUSAL):
                self._responses, self._reader = responses, reader
                return
            self._frames.put(None)  # ends the refused call's iterator
        raise TimeoutError(f"simple_switch_grpc took no frames within {DEADLINE} s")

    def _read(self, responses: Any, refused: threading.Event) -> None:
        with contextlib.suppress(grpc.RpcError):
            for item in responses:
                self._arrived.put(item)
        refused.set()

    def close(self) -> None:
        self._frames.put(None)
        self._hello.put(None)
        if self._responses is not None:
            self._responses.cancel()
            self._reader.join()
        self._stream.cancel()
        for channel in self._channels:
            channel.close()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._scratch.cleanup()

    # --- control plane, with the engine's arguments ------------------------------------------------------------------

    def load(self, json: Path, p4info: Path) -> None:
        """Push a program. Groups first: simple_switch would keep the replicas of those that a push forgets."""
        for entity in self._replication.values():
            self._write(p4runtime_pb2.Update.DELETE, entity)
        self._replication.clear()
        self._info = text_format.Parse(p4info.read_text(), p4info_pb2.P4Info())
        request = p4runtime_pb2.SetForwardingPipelineConfigRequest()
        request.election_id.low = 1
        request.action = p4runtime_pb2.SetForwardingPipelineConfigRequest.VERIFY_AND_COMMIT
        request.config.p4info.CopyFrom(self._info)
        request.config.p4_device_config = json.read_bytes()
        self._stub.SetForwardingPipelineConfig(request, timeout=DEADLINE)
        if self._responses is None:
            self._open_stream()

    def _write(self, kind: int, entity: Any) -> None:
        request = p4runtime_pb2.WriteRequest()
        request.election_id.low = 1
        request.updates.add(type=kind, entity=entity)
        self._stub.Write(request, timeout=DEADLINE)

    def _named(self, kind: str, name: str) -> Any:
        return next(item for item in getattr(self._info, kind) if item.preamble.name == name)

    def _action(self, target: Any, name: str, params: Sequence[int]) -> None:
        info = self._named("actions", name)
        target.action_id = info.preamble.id
        for param, value in zip(info.params, params, strict=True):
            target.params.add(param_id=param.id, value=_bytes(value))

    def entry_actions(self, table: str) -> list[str]:
        """Actions that entries of a table may have."""
        refs = self._named("tables", table).action_refs
        ids = [ref.id for ref in refs if ref.scope != p4info_pb2.ActionRef.DEFAULT_ONLY]
        return sorted(item.preamble.name for item in self._info.actions if item.preamble.id in ids)

    def insert(self, table: str, key: Sequence[KeyElement], action: str, params: Sequence[int], priority: int) -> None:
        entity = p4runtime_pb2.Entity()
        info = self._named("tables", table)
        entity.table_entry.table_id = info.preamble.id
        entity.table_entry.priority = priority
        for field, element in zip(info.match_fields, key, strict=True):
            _match(entity.table_entry, field, element)
        self._action(entity.table_entry.action.action, action, params)
        self._write(p4runtime_pb2.Update.INSERT, entity)

    def set_default(self, table: str, action: str, params: Sequence[int]) -> None:
        entity = p4runtime_pb2.Entity()
        entity.table_entry.table_id = self._named("tables", table).preamble.id
        entity.table_entry.is_default_action = True
        self._action(entity.table_entry.action.action, action, params)
        self._write(p4runtime_pb2.Update.MODIFY, entity)

    def set_multicast_group(self, number: int, replicas: Sequence[tuple[int, int]]) -> None:
        entity = p4runtime_pb2.Entity()
        entry = entity.packet_replication_engine_entry.multicast_group_entry
        entry.multicast_group_id = number
        self._replicate("group", number, entry, replicas, entity)

    def set_clone_session(self, number: int, replicas: Sequence[tuple[int, int]]) -> None:
        entity = p4runtime_pb2.Entity()
        entry = entity.packet_replication_engine_entry.clone_session_entry
        entry.session_id = number
        self._replicate("session", number, entry, replicas, entity)

    def _replicate(self, kind: str, number: int, entry: Any, replicas: Sequence[tuple[int, int]], entity: Any) -> None:
        for port, instance in replicas:
            entry.replicas.add(egress_port=port, instance=instance)
        self._write(p4runtime_pb2.Update.INSERT, entity)
        self._replication[kind, number] = entity

    def counter(self, name: str, index: int) -> tuple[int, int]:
        """Packets and bytes of a cell of an indirect counter."""
        request = p4runtime_pb2.ReadRequest()
        entry = request.entities.add().counter_entry
        entry.counter_id = self._named("counters", name).preamble.id
        entry.index.index = index
        (entity,) = _read_all(self._stub.Read(request, timeout=DEADLINE))
        data = entity.counter_entry.data
        return int(data.packet_count), int(data.byte_count)

    # --- packets -----------------------------------------------------------------------------------------------------

    def process(self, port: int, frame: bytes, expected: int) -> list[tuple[int, bytes]]:
        """Send one frame and return what it caused, as soon as `expected` frames have come."""
        self._number += 1
        self._frames.put((self._number, port, frame))
        end = time.monotonic() + PATIENCE
        out: list[tuple[int, bytes]] = []
        while len(out) < expected:
            try:
                number, egress, packet = self._arrived.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                break
            if number == self._number:
                out.append((egress, packet))
            else:
                self._arrived.put((number, egress, packet))
                break
        return out

    def rest(self) -> list[tuple[int, bytes]]:
        """Frames that nobody asked for."""
        out = []
        with contextlib.suppress(queue.Empty):
            while True:
                _, port, packet = self._arrived.get(timeout=GRACE)
                out.append((port, packet))
        return out


def _read_all(responses: Iterator[Any]) -> list[Any]:
    return [entity for response in responses for entity in response.entities]


def _bytes(value: int) -> bytes:
    return value.to_bytes(max(1, (value.bit_length() + 7) // 8), "big")


def _match(entry: Any, field: Any, element: KeyElement) -> None:
    """One match field; what matches anything is left out, as P4Runtime wants it."""
    kind = p4info_pb2.MatchField.MatchType.Name(field.match_type).lower()
    whole = (1 << field.bitwidth) - 1
    if element is None or element in {"ternary": ((0, 0),), "lpm": ((0, 0),), "range": ((0, whole),)}.get(kind, ()):
        return
    match = entry.match.add(field_id=field.id)
    if kind == "exact":
        match.exact.value = _bytes(element)
    elif kind == "optional":
        match.optional.value = _bytes(element)
    elif kind == "lpm":
        match.lpm.value, match.lpm.prefix_len = _bytes(element[0]), element[1]
    elif kind == "ternary":
        value, mask = element if isinstance(element, tuple) else (element, whole)
        match.ternary.value, match.ternary.mask = _bytes(value), _bytes(mask)
    else:
        match.range.low, match.range.high = _bytes(element[0]), _bytes(element[1])
