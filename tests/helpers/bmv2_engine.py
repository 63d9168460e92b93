# SPDX-License-Identifier: Apache-2.0
"""BMv2 with the interface of the embedded engine, so that simulations and fuzzing run on a real switch, frame by frame.

The hard part is to know what a frame has caused. After each a marker goes in, which the program floods to all ports.
simple_switch has one ingress thread, so whatever the frame caused has been put into the ports' queues before the
marker's copies are; queues, their egress threads and the one thread that transmits keep the order of each port. So
when the marker's copy has come out of every port, all that came before it is all that there is: no waiting for
silence, no guess at how much must come. Nothing overtakes or overflows, because frames go in one at a time.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil
from p4.v1 import p4runtime_pb2

from helpers.engine_bmv2 import Bmv2
from p4reduce import pipeline
from p4reduce.sim.adapter import mac_of, to_frame
from p4reduce.sim.network import Datagram

PORTS = (1, 2, 3, 4)
"""Ports that a simulation may use; what would come out of another one is not waited for."""
DEADLINE = 20.0
_MARKER_PORT = 9
_MARKER_IP = 0x0A0000F9
_MARKER_MAC = 0x0270340000F9
_MARKER_UDP = 9
_MARKER_GROUP = 4000
_INSTANCE = 1
"""Replication id of copies that stay as they are."""
_HEADERS = 42


class Bmv2Table:
    """A table by the names of the program."""

    def __init__(self, switch: Bmv2Engine, name: str) -> None:
        self._switch = switch
        self._name = name
        self._keys: dict[int, tuple[tuple[Any, ...], str, Sequence[int]]] = {}
        self._next = 1

    def insert(self, key: Sequence[Any], action: str, params: Sequence[int], priority: int = 0) -> int:
        self._switch.bmv2.insert(self._name, key, action, params, priority)
        handle, self._next = self._next, self._next + 1
        self._keys[handle] = (tuple(key), action, params)
        return handle

    def delete(self, handle: int) -> None:
        self._switch.bmv2.delete(self._name, self._keys.pop(handle)[0])

    def entries(self) -> list[int]:
        return list(self._keys)


class Bmv2Counter:
    """A counter array; each look asks the switch."""

    def __init__(self, switch: Bmv2Engine, name: str) -> None:
        self._switch = switch
        self._name = name

    @property
    def packets(self) -> Bmv2Counter:
        return self

    def __getitem__(self, index: int) -> int:
        return self._switch.bmv2.counter(self._name, index)[0]


class _Names(Mapping[str, Any]):
    """Made when first asked for."""

    def __init__(self, switch: Bmv2Engine, kind: type) -> None:
        self._made: dict[str, Any] = {}
        self._switch = switch
        self._kind = kind

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._kind(self._switch, name)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


class _Process(Bmv2):
    """simple_switch_grpc; what its own tests do not need."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def delete(self, table: str, key: Sequence[Any]) -> None:
        entity = p4runtime_pb2.Entity()
        info = self._named("tables", table)
        entity.table_entry.table_id = info.preamble.id
        for field, element in zip(info.match_fields, key, strict=True):
            entity.table_entry.match.add(field_id=field.id).exact.value = _bytes(element)
        self._write(p4runtime_pb2.Update.DELETE, entity)

    def set_multicast_group(self, number: int, replicas: Sequence[tuple[int, int]]) -> None:
        before = self._replication.pop(("group", number), None)
        if before is not None:
            self._write(p4runtime_pb2.Update.DELETE, before)
        super().set_multicast_group(number, replicas)

    def put(self, port: int, frame: bytes) -> None:
        self._number += 1
        self._frames.put((self._number, port, frame))

    def take(self, seconds: float) -> tuple[int, bytes]:
        """What comes out next: port and frame. TimeoutError."""
        try:
            _, port, frame = self._arrived.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            raise TimeoutError(f"nothing came out for {seconds:.1f} s; the switch {self._state()}") from None
        return port, frame

    def _state(self) -> str:
        code = self._process.poll()
        return "runs" if code is None else f"has ended with {code}"


class Bmv2Engine:
    """One simple_switch_grpc with the compiled program. It is an EngineLike (p4reduce.sim.adapter)."""

    def __init__(self, profile: str = "w5") -> None:
        self.bmv2 = _Process()
        self.frames = 0
        """Frames that were put in, markers left out."""
        self._markers = 0
        self._reset(profile)

    def _reset(self, profile: str) -> None:
        found = pipeline.find(profile)
        self.bmv2.load(found.json, found.p4info)
        self.tables: Mapping[str, Any] = _Names(self, Bmv2Table)
        self.counters: Mapping[str, Any] = _Names(self, Bmv2Counter)
        # Not through self.tables: whoever looks at those sees his own entries only.
        source = (_MARKER_PORT, mac_of(_MARKER_IP), _MARKER_IP)
        self.bmv2.insert("ReduceIngress.forward.sources", source, "ReduceIngress.forward.permit", [], 0)
        flood = "ReduceIngress.forward.flood"
        self.bmv2.insert("ReduceIngress.forward.forward", (_MARKER_MAC,), flood, [_MARKER_GROUP], 0)
        self.bmv2.set_multicast_group(_MARKER_GROUP, [(port, _INSTANCE) for port in PORTS])

    def restart(self, profile: str = "w5") -> None:
        """The program again, registers and tables empty."""
        self._reset(profile)

    @property
    def rss(self) -> int:
        """Bytes of memory that the process holds."""
        return int(psutil.Process(self.bmv2.pid).memory_info().rss)

    def set_multicast_group(self, group: int, replicas: Sequence[tuple[int, int]]) -> None:
        self.bmv2.set_multicast_group(group, replicas)

    def process(self, port: int, frame: bytes) -> list[tuple[int, bytes]]:
        """Put a frame in; returns what comes out of PORTS because of it, port by port, each in order."""
        self.frames += 1
        self._markers += 1
        nonce = self._markers.to_bytes(8, "big")
        datagram = Datagram(_MARKER_IP, _MARKER_UDP, _MARKER_IP, _MARKER_UDP, b"marker" + nonce)
        self.bmv2.put(port, frame)
        self.bmv2.put(_MARKER_PORT, to_frame(datagram, mac_of(_MARKER_IP), _MARKER_MAC))
        missing = set(PORTS)
        out: list[tuple[int, bytes]] = []
        end = time.monotonic() + DEADLINE
        while missing:
            to, answer = self.bmv2.take(end - time.monotonic())
            if answer[_HEADERS : _HEADERS + 6] == b"marker" and answer[_HEADERS + 6 : _HEADERS + 14] == nonce:
                missing.discard(to)
            else:
                out.append((to, answer))
        # Ports race with each other, not within themselves.
        return sorted(out, key=lambda found: found[0])

    def close(self) -> None:
        """End the process."""
        self.bmv2.close()


def _bytes(value: int) -> bytes:
    return value.to_bytes(max(1, (value.bit_length() + 7) // 8), "big")
