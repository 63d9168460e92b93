# SPDX-License-Identifier: Apache-2.0
"""Crafted frames for the P4 program: every field can be set wrong."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import ARP, Ether
from scapy.packet import Packet, Raw

from p4reduce import constants, wire
from p4reduce.wire import Kind, Op

SWITCH_IP = "10.0.0.254"
SWITCH_MAC = "02:70:34:00:00:fe"


@dataclass(frozen=True)
class Worker:
    """One worker as the switch's entries know it."""

    rank: int
    port: int
    ip: str = ""
    mac: str = ""
    udp_port: int = 0

    @staticmethod
    def at(rank: int, port: int | None = None) -> Worker:
        port = rank + 1 if port is None else port
        return Worker(rank, port, f"10.0.0.{port}", f"02:70:34:00:00:{port:02x}", 40000 + rank)

    @property
    def ip_number(self) -> int:
        return int.from_bytes(bytes(int(part) for part in self.ip.split(".")), "big")

    @property
    def mac_number(self) -> int:
        return int(self.mac.replace(":", ""), 16)

    @property
    def source(self) -> dict[str, int]:
        """Key of the entry that says that its host sits here."""
        return {"ingress_port": self.port, "src_mac": self.mac_number, "src_ip": self.ip_number}


def words_of(values: int | list[int], words: int) -> bytes:
    """A payload of `words` words: every 32-bit lane holds `values`, or the values given, repeated."""
    lanes = np.resize(np.atleast_1d(np.asarray(values, dtype=np.uint32)), words * 64)
    return lanes.view("<u8").astype(">u8").tobytes()


@dataclass
class Contribution:
    """A contribution by its fields; `frame()` builds Ethernet, IPv4, UDP and all."""

    worker: Worker
    payload: bytes
    epoch: int = 7
    slot: int = 0
    round: int = 0
    op: int = Op.ADD
    tag: int = wire.pack_tag(1, 0, 0xABCD)
    check: int = 1
    words: int | None = None
    version: int = constants.VERSION
    kind: int = Kind.CONTRIBUTE
    rank: int | None = None
    ip: str | None = None
    trailer: bytes = b""
    udp_options: dict[str, int] = field(default_factory=dict)
    ip_options: dict[str, object] = field(default_factory=dict)

    def header(self) -> bytes:
        words = len(self.payload) // constants.WORD_BYTES if self.words is None else self.words
        return wire.make_header(
            version=self.version,
            kind=self.kind,
            op=self.op,
            words=words,
            epoch=self.epoch,
            slot=self.slot,
            rank=self.worker.rank if self.rank is None else self.rank,
            round=self.round,
            check=self.check,
            tag=self.tag,
        )

    def frame(self) -> bytes:
        worker = self.worker
        body = Raw(self.header() + self.payload + self.trailer)
        udp = UDP(sport=worker.udp_port, dport=constants.UDP_PORT, **self.udp_options)
        ip = IP(src=self.ip or worker.ip, dst=SWITCH_IP, flags="DF", **self.ip_options)
        return bytes(Ether(src=worker.mac, dst=SWITCH_MAC) / ip / udp / body)


@dataclass(frozen=True)
class Answer:
    """A frame that left the switch, taken apart."""

    port: int
    ether: Packet
    header: dict[str, int]
    payload: bytes

    @staticmethod
    def parse(port: int, frame: bytes) -> Answer:
        ether = Ether(frame)
        data = bytes(ether[UDP].payload)
        record = wire.headers_from_bytes(data)[0]
        header = {name: int(record[name]) for name in wire.HEADER.names or ()}
        return Answer(port, ether, header, data[constants.HEADER_BYTES :])

    @property
    def ip(self) -> Packet:
        return self.ether[IP]

    @property
    def udp(self) -> Packet:
        return self.ether[UDP]

    def checksum_is_right(self) -> bool:
        """The IPv4 header's ones' complement sum (RFC 791) is all ones."""
        head = bytes(self.ether)[14:34]
        total = sum(struct.unpack(">10H", head))
        while total >> 16:
            total = (total & 0xFFFF) + (total >> 16)
        return total == 0xFFFF


def arp_request(worker: Worker, target_ip: str) -> bytes:
    """A broadcast ARP request, padded to Ethernet's minimum as a real interface does."""
    request = Ether(src=worker.mac, dst="ff:ff:ff:ff:ff:ff") / ARP(hwsrc=worker.mac, psrc=worker.ip, pdst=target_ip)
    return bytes(request).ljust(60, b"\0")
