# SPDX-License-Identifier: Apache-2.0
"""Puts a switch that takes whole Ethernet frames into a simulation of UDP datagrams.

The frames are built and read here, byte by byte: Ethernet II, IPv4 without options (RFC 791), UDP (RFC 768) with
checksum 0. What the switch sends must be such a frame, with the right lengths and header checksum.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from p4reduce.sim.network import Datagram
from p4reduce.sim.switch import Count, Member, Membership

SWITCH_MAC = 0x0270340000FE
_ETHERTYPE_IPV4 = 0x0800
_PROTOCOL_UDP = 17
_TTL = 64
_COUNTS_PER_ROW = 8
_INGRESS = "ReduceIngress"


class TableLike(Protocol):
    """What is used of a match-action table."""

    def insert(self, key: Sequence[Any], action: str, params: Sequence[int], priority: int = 0) -> int:
        """Add an entry; returns its handle."""

    def delete(self, handle: int) -> None:
        """Remove an entry."""


class EngineLike(Protocol):
    """What is used of an engine that runs the compiled program."""

    @property
    def tables(self) -> Mapping[str, TableLike]:
        """Tables by their names in the compiled program."""

    @property
    def counters(self) -> Mapping[str, Any]:
        """Counter arrays by name; each has a list `packets`."""

    def set_multicast_group(self, group: int, replicas: Sequence[tuple[int, int]]) -> None:
        """Create a group of (port, replica id)."""

    def process(self, port: int, frame: bytes) -> list[tuple[int, bytes]]:
        """Run a frame through the program."""


def mac_of(ip: int) -> int:
    """The address of a simulated worker: 02:70 and the four bytes of its IPv4 address."""
    return 0x0270 << 32 | ip


def to_frame(datagram: Datagram, src_mac: int, dst_mac: int) -> bytes:
    """Wrap a datagram into an Ethernet frame."""
    udp = struct.pack("!HHHH", datagram.src_port, datagram.dst_port, 8 + len(datagram.data), 0)
    fields = [0x45, 0, 28 + len(datagram.data), 0, 0, _TTL, _PROTOCOL_UDP, 0, datagram.src, datagram.dst]
    fields[7] = checksum(struct.pack("!BBHHHBBHII", *fields))
    ip = struct.pack("!BBHHHBBHII", *fields)
    ethernet = dst_mac.to_bytes(6, "big") + src_mac.to_bytes(6, "big") + _ETHERTYPE_IPV4.to_bytes(2, "big")
    return ethernet + ip + udp + datagram.data


def from_frame(frame: bytes, dst_mac: int) -> Datagram:
    """Unwrap a frame addressed to `dst_mac`; ValueError for anything but a sound UDP datagram."""
    if len(frame) < 42 or frame[12:14] != _ETHERTYPE_IPV4.to_bytes(2, "big"):
        raise ValueError("not an IPv4 frame")
    if frame[:6] != dst_mac.to_bytes(6, "big"):
        raise ValueError(f"addressed to {frame[:6].hex(':')}, not to {dst_mac.to_bytes(6, 'big').hex(':')}")
    version, _, total, _, _, _, protocol, _, src, dst = struct.unpack("!BBHHHBBHII", frame[14:34])
    if version != 0x45 or protocol != _PROTOCOL_UDP or checksum(frame[14:34]) != 0:
        raise ValueError("not a plain UDP packet, or its IPv4 header checksum is wrong")
    src_port, dst_port, length, udp_checksum = struct.unpack("!HHHH", frame[34:42])
    if total != len(frame) - 14 or length != total - 20 or udp_checksum != 0:
        raise ValueError(f"lengths disagree: frame {len(frame)}, IPv4 {total}, UDP {length}")
    return Datagram(src, src_port, dst, dst_port, frame[42:])


def checksum(header: bytes) -> int:
    """Internet checksum (RFC 1071) of an even number of bytes; 0 when it is taken over a sound header."""
    total: int = sum(struct.unpack(f"!{len(header) // 2}H", header))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


class EngineSwitch:
    """An engine with the compiled program, as a SwitchModel. It does the controller's part: entries and groups."""

    def __init__(self, engine: EngineLike) -> None:
        self.engine = engine
        self._members: dict[int, Member] = {}
        self._handles: dict[int, list[tuple[str, int]]] = {}
        self._next_replica = 1

    def admit(self, job: Membership) -> None:
        """Install an epoch: replicas and group first, contributions last."""
        full = (1 << len(job.members)) - 1
        handles = self._handles[job.epoch] = []
        replicas = []
        for member in job.members:
            replica, self._next_replica = self._next_replica, self._next_replica + 1
            replicas.append((member.port, replica))
            params = [mac_of(member.ip), member.ip, member.udp_port, member.rank]
            table, action = "ReduceEgress.replicate.replica", "ReduceEgress.replicate.to_worker"
            handles.append((table, self.engine.tables[table].insert((replica,), action, params)))
        self.engine.set_multicast_group(job.group, replicas)
        self._worker_ports(job)
        table, action = f"{_INGRESS}.admit.epochs", f"{_INGRESS}.admit.known_epoch"
        handles.append((table, self.engine.tables[table].insert((job.epoch,), action, [job.stats])))
        table, action = f"{_INGRESS}.admit.admit", f"{_INGRESS}.admit.admit_worker"
        for member in job.members:
            key = (member.port, member.ip, member.udp_port, job.epoch, member.rank)
            params = [1 << member.rank, full, job.pool_base, job.pool_size, job.group, len(job.members), job.stats]
            handles.append((table, self.engine.tables[table].insert(key, action, params)))

    def revoke(self, epoch: int) -> None:
        """Remove an epoch's entries, in the reverse order; worker ports stay."""
        for table, handle in reversed(self._handles.pop(epoch)):
            self.engine.tables[table].delete(handle)

    def process(self, port: int, datagram: Datagram) -> list[tuple[int, Datagram]]:
        """Run a datagram through the program as a frame. ValueError when what comes out is no sound frame."""
        frame = to_frame(datagram, mac_of(datagram.src), SWITCH_MAC)
        return [
            (to, from_frame(answer, mac_of(self._members[to].ip))) for to, answer in self.engine.process(port, frame)
        ]

    def count(self, stats: int, event: Count) -> int:
        """Events counted in a row."""
        packets: list[int] = self.engine.counters[f"{_INGRESS}.reply.reduce_counter"].packets
        return packets[stats * _COUNTS_PER_ROW + event]

    def _worker_ports(self, job: Membership) -> None:
        table, action = f"{_INGRESS}.reply.worker_ports", f"{_INGRESS}.reply.nack"
        for member in job.members:
            if member.port not in self._members:
                self._members[member.port] = member
                self.engine.tables[table].insert((member.port, member.ip), action, [])
