# SPDX-License-Identifier: Apache-2.0
"""One job of three workers for the compiled program: entries, frames as bytes, and random frames of every kind."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

WORKERS = 3
EPOCH = 7
GROUP = 100
Insert = Callable[[str, tuple[int, ...], str, tuple[int, ...]], Any]


def mac(host: int) -> bytes:
    return bytes((2, 0x70, 0, 0, 0, host))


def ip(host: int) -> bytes:
    return bytes((10, 0, 0, host))


def number(data: bytes) -> int:
    return int.from_bytes(data, "big")


def csum(header: bytes) -> int:
    """RFC 1071, word by word."""
    total = sum(struct.unpack(f">{len(header) // 2}H", header))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


def ipv4(source: bytes, target: bytes, size: int) -> bytes:
    start = struct.pack(">BBHHHBBH", 0x45, 0, 20 + size, 0, 0x4000, 64, 17, 0) + source + target
    return start[:10] + struct.pack(">H", csum(start)) + start[12:]


def contribution(
    rank: int,
    words: list[int],
    *,
    slot: int = 0,
    turn: int = 0,
    op: int = 0,
    tag: int = 5,
    check: int = 0,
    epoch: int = EPOCH,
    count: int | None = None,
) -> bytes:
    """A worker's frame; host rank + 1 sits on port rank + 1 and uses UDP port 40000 + rank."""
    head = struct.pack(
        ">BBBBIHBBIQQ", 1, 1, op, len(words) if count is None else count, epoch, slot, rank, 0, turn, check, tag
    )
    body = head + b"".join(w.to_bytes(256, "big") for w in words)
    udp = struct.pack(">HHHH", 40000 + rank, 20532, 8 + len(body), 0)
    return mac(254) + mac(rank + 1) + b"\x08\x00" + ipv4(ip(rank + 1), ip(254), 8 + len(body)) + udp + body


def result(
    rank: int, words: list[int], *, slot: int = 0, turn: int = 0, op: int = 0, tag: int = 5, check: int = 0
) -> bytes:
    """What worker `rank` must get."""
    head = struct.pack(">BBBBIHBBIQQ", 1, 2, op, len(words), EPOCH, slot, rank, WORKERS, turn, check, tag)
    body = head + b"".join(w.to_bytes(256, "big") for w in words)
    udp = struct.pack(">HHHH", 20532, 40000 + rank, 8 + len(body), 0)
    return mac(rank + 1) + mac(254) + b"\x08\x00" + ipv4(ip(254), ip(rank + 1), 8 + len(body)) + udp + body


def admit(insert: Insert) -> None:
    """Entries of one job of WORKERS workers with 8 slots from slot 16 on, statistics row 1."""
    for rank in range(WORKERS):
        address = number(ip(rank + 1))
        insert(
            "ReduceIngress.admit.admit",
            (rank + 1, address, 40000 + rank, EPOCH, rank),
            "ReduceIngress.admit.admit_worker",
            (1 << rank, (1 << WORKERS) - 1, 16, 8, GROUP, WORKERS, 1),
        )
        insert(
            "ReduceEgress.replicate.replica",
            (rank + 1,),
            "ReduceEgress.replicate.to_worker",
            (number(mac(rank + 1)), address, 40000 + rank, rank),
        )
        insert("ReduceIngress.reply.worker_ports", (rank + 1, address), "ReduceIngress.reply.nack", ())
        insert("ReduceIngress.forward.forward", (number(mac(rank + 1)),), "ReduceIngress.forward.to_port", (rank + 1,))
        source = (rank + 1, number(mac(rank + 1)), address)
        insert("ReduceIngress.forward.sources", source, "ReduceIngress.forward.permit", ())
    insert("ReduceIngress.admit.epochs", (EPOCH,), "ReduceIngress.admit.known_epoch", (1,))
    insert("ReduceIngress.forward.arp", (number(ip(254)),), "ReduceIngress.forward.answer_arp", (number(mac(254)),))


REPLICAS = [(rank + 1, rank + 1) for rank in range(WORKERS)]


def added(*payloads: list[int]) -> list[int]:
    """Payloads are added as one number each."""
    size = 256 * len(payloads[0])
    whole = sum(number(b"".join(w.to_bytes(256, "big") for w in words)) for words in payloads) % (1 << 8 * size)
    data = whole.to_bytes(size, "big")
    return [number(data[at : at + 256]) for at in range(0, size, 256)]


def foreign(rng: random.Random) -> tuple[int, bytes]:
    """A frame that is to be forwarded, if it comes from where it says: IPv4 with options, fragments, ARP, others."""
    host, other = rng.sample(range(1, WORKERS + 1), 2)
    source = rng.choice((host,) * 6 + (other, 254))
    link = mac(rng.choice((other,) * 4 + (254, 9))) + mac(rng.choice((host,) * 5 + (source,)))
    body = rng.randbytes(rng.randrange(8, 200))
    kind = rng.randrange(8)
    if kind < 5:
        packet = bytearray(ipv4(ip(source), ip(other), len(body)) + body)
        packet[9] = rng.choice((6, 17, 17, 1))
        packet[0] = rng.choice((0x45, 0x45, 0x46, 0x65))
        packet[6:8] = rng.choice((b"\x40\x00", b"\x20\x00", b"\x00\x10", b"\x20\x10"))
        packet[20:24] = struct.pack(">HH", rng.choice((1, 20532, 40000)), rng.choice((1, 20532, 40001)))
        frame = link + b"\x08\x00" + bytes(packet)
    elif kind < 7:
        form = rng.choice(("0001 0800 06 04", "0001 0800 06 04", "0006 0800 06 04", "0001 86dd 06 04"))
        ask = bytes.fromhex(form) + rng.choice((b"\0\1", b"\0\2"))
        sender = link[6:12] if rng.random() < 0.8 else mac(source)
        frame = link + b"\x08\x06" + ask + sender + ip(source) + bytes(6) + ip(rng.choice((254, other))) + bytes(18)
    else:
        frame = link + rng.choice((b"\x81\x00\x00\x05\x08\x00", b"\x86\xdd", b"\x00\x40")) + body
    return host, frame if rng.random() < 0.9 else frame[: rng.randrange(14, len(frame))]


class Traffic:
    """Random frames in an endless row. Most are right; the others are wrong in one way or another.

    A slot's round goes on once the traffic has heard its result, or when a wrong frame has made the slot stall.
    """

    SLOTS = (0, 1, 7)

    def __init__(self, rng: random.Random, words: int) -> None:
        self._rng = rng
        self._words = words
        self._turns = dict.fromkeys(self.SLOTS, 0xFFFFFFF0)
        self._tries = dict.fromkeys(self.SLOTS, 0)

    def heard(self, answers: list[tuple[int, bytes]]) -> None:
        """What the switch has sent."""
        moves = self._rng.random() < 0.4
        for _, frame in answers if moves else ():
            if len(frame) > 74 and frame[34:36] == b"\x50\x34" and frame[43] == 2:
                slot, turn = number(frame[50:52]), number(frame[54:58])
                if self._turns.get(slot) == turn:
                    self._turns[slot], self._tries[slot] = (turn + 1) % (1 << 32), 0

    def frame(self) -> tuple[int, bytes]:
        """The next one, with its port."""
        rng = self._rng
        if rng.random() < 0.2:
            return foreign(rng)
        rank, slot = rng.randrange(WORKERS), rng.choice(self.SLOTS)
        self._tries[slot] += 1
        if self._tries[slot] > 30:
            self._turns[slot], self._tries[slot] = (self._turns[slot] + 2) % (1 << 32), 0
        turn = self._turns[slot]
        fields: dict[str, int] = {"slot": slot, "turn": turn, "op": turn // 3 % 2, "tag": turn % 1000}
        size = 1 if turn % 5 == 0 else self._words
        port = rank + 1
        if rng.random() < 0.25:
            wrong = rng.randrange(8)
            if wrong == 0:
                fields["turn"] = (turn + rng.choice((-1, -2, 1, 2, 3, 4, 1 << 20, 1 << 31))) % (1 << 32)
            elif wrong == 1:
                fields["op"] = rng.choice((0, 1, 2))
            elif wrong == 2:
                fields["tag"] = turn % 1000 + 1
            elif wrong == 3:
                fields["epoch"] = rng.choice((EPOCH, EPOCH + 1, 0))
            elif wrong == 4:
                fields["count"] = rng.choice((0, 1, 2, self._words))
            elif wrong == 5:
                fields["slot"] = rng.choice((8, 9, 0xFFFF))
            elif wrong == 6:
                port = rng.randrange(6)
            else:
                size = rng.choice((1, self._words))
        payload = [rng.choice((0, 1, (1 << 2048) - 1, rng.getrandbits(2048))) for _ in range(size)]
        return port, self._harmed(contribution(rank, payload, check=rng.getrandbits(64), **fields))

    def _harmed(self, frame: bytes) -> bytes:
        """One in ten is cut, lengthened, damaged in its headers or sent from another UDP port."""
        rng, harm = self._rng, self._rng.randrange(40)
        if harm == 0:
            return frame[: rng.randrange(14, len(frame))]
        if harm == 1:
            return frame + rng.randbytes(rng.randrange(1, 300))
        if harm == 2:
            at = rng.randrange(74)
            return frame[:at] + rng.randbytes(1) + frame[at + 1 :]
        if harm == 3:
            return frame[:34] + rng.choice((b"\x9c\x44", b"\x50\x34")) + frame[36:]
        return frame
