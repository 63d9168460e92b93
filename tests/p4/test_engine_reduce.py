# SPDX-License-Identifier: Apache-2.0
"""The allreduce program itself on the engine, and the same frames on BMv2."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers import engine_bmv2

from p4reduce import pipeline
from p4reduce_bmv2.embedded.engine import Engine

WORKERS = 3
EPOCH = 7
GROUP = 100
Frames = list[tuple[int, bytes]]
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
            (rank + 1, address, EPOCH, rank),
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
    insert("ReduceIngress.admit.epochs", (EPOCH,), "ReduceIngress.admit.known_epoch", (1,))
    insert("ReduceIngress.forward.arp", (number(ip(254)),), "ReduceIngress.forward.answer_arp", (number(mac(254)),))


REPLICAS = [(rank + 1, rank + 1) for rank in range(WORKERS)]


def embedded(profile: str) -> Engine:
    engine = Engine(pipeline.find(profile).json.read_text())
    admit(lambda table, key, action, params: engine.tables[table].insert(key, action, params))
    engine.set_multicast_group(GROUP, REPLICAS)
    return engine


@pytest.fixture(scope="module")
def process() -> Iterator[engine_bmv2.Bmv2]:
    if not engine_bmv2.available():
        pytest.skip("simple_switch_grpc is not installed")
    switch = engine_bmv2.Bmv2()
    yield switch
    switch.close()


def real(process: engine_bmv2.Bmv2, profile: str) -> engine_bmv2.Bmv2:
    found = pipeline.find(profile)
    process.load(found.json, found.p4info)
    admit(lambda table, key, action, params: process.insert(table, key, action, params, 0))
    process.set_multicast_group(GROUP, REPLICAS)
    return process


def steps(words: int, rng: random.Random) -> Iterator[tuple[int, bytes, Frames]]:
    """Frames of one whole job and what each must cause: sums, ors, repeats, short frames, an ARP request."""
    size = 1 << 2048
    first, second, third = ([rng.getrandbits(2048) for _ in range(words)] for _ in range(3))
    total = [(a + b + c) % size for a, b, c in zip(first, second, third, strict=True)]
    checks = [rng.getrandbits(64) for _ in range(WORKERS)]
    check = sum(checks) % (1 << 64)
    yield 1, contribution(0, first, check=checks[0]), []
    yield 2, contribution(1, second, check=checks[1]), []
    yield 1, contribution(0, first, check=checks[0]), []  # a duplicate
    yield 3, contribution(2, third, check=checks[2]), [(r + 1, result(r, total, check=check)) for r in range(WORKERS)]
    yield 2, contribution(1, second, check=checks[1]), [(2, result(1, total, check=check))]  # asks again
    either = [a | b | c for a, b, c in zip(first, second, third, strict=True)]
    yield 3, contribution(2, third, slot=3, turn=1, op=1, tag=9), []
    yield 1, contribution(0, first, slot=3, turn=1, op=1, tag=9), []
    answers = [(r + 1, result(r, either, slot=3, turn=1, op=1, tag=9)) for r in range(WORKERS)]
    yield 2, contribution(1, second, slot=3, turn=1, op=1, tag=9), answers
    yield 1, contribution(0, [1], slot=7, turn=2), []
    yield 2, contribution(1, [2], slot=7, turn=2), []
    short = [(r + 1, result(r, [7], slot=7, turn=2)) for r in range(WORKERS)]
    yield 3, contribution(2, [4], slot=7, turn=2), short
    asks = b"\xff" * 6 + mac(1) + bytes.fromhex("0806 0001 0800 06 04 0001") + mac(1) + ip(1) + bytes(6) + ip(254)
    answer = mac(1) + mac(254) + bytes.fromhex("0806 0001 0800 06 04 0002") + mac(254) + ip(254) + mac(1) + ip(1)
    yield 1, asks + bytes(18), [(1, answer + bytes(18))]
    other = mac(2) + mac(1) + b"\x12\x34" + rng.randbytes(1000)
    yield 1, other, [(2, other)]


@pytest.mark.parametrize("profile", ["w5", "w34"])
def test_a_job(profile: str) -> None:
    engine = embedded(profile)
    for index, (port, frame, expected) in enumerate(
        steps(pipeline.find(profile).profile.words, random.Random(profile))
    ):
        assert engine.process(port, frame) == expected, f"step {index}"
    events = engine.counters["ReduceIngress.reply.reduce_counter"].packets[8:15]
    assert events == [9, 3, 1, 1, 0, 0, 0]


@pytest.mark.bmv2
@pytest.mark.parametrize("profile", ["w5", "w34"])
def test_a_job_on_bmv2(process: engine_bmv2.Bmv2, profile: str) -> None:
    switch = real(process, profile)
    for index, (port, frame, expected) in enumerate(
        steps(pipeline.find(profile).profile.words, random.Random(profile))
    ):
        assert sorted(switch.process(port, frame, len(expected))) == sorted(expected), f"step {index}"
    assert switch.rest() == []
    assert [switch.counter("ReduceIngress.reply.reduce_counter", 8 + event)[0] for event in range(7)] == [
        9,
        3,
        1,
        1,
        0,
        0,
        0,
    ]


def anything(rng: random.Random, words: int) -> tuple[int, bytes]:
    """A frame that may be right, late, doubled, of another epoch, tag or op, cut, longer than it says, or damaged."""
    rank = rng.randrange(WORKERS)
    frame = contribution(
        rank,
        [
            rng.choice((0, 1, (1 << 2048) - 1, rng.getrandbits(2048)))
            for _ in range(rng.choice((1, words, words, words)))
        ],
        slot=rng.choice((0, 0, 0, 1, 7, 8)),
        turn=rng.choice((0, 0, 1, 1, 2, 3, 0xFFFFFFFF, 0x80000001)),
        op=rng.choice((0, 0, 0, 1, 1, 2)),
        tag=rng.choice((5, 5, 5, 5, 5, 6)),
        check=rng.getrandbits(64),
        epoch=rng.choice((EPOCH,) * 8 + (6, 0)),
        count=rng.choice((None,) * 9 + (1, words, 2)),
    )
    harm = rng.random()
    if harm < 0.05:
        frame = frame[: rng.randrange(14, len(frame))]
    elif harm < 0.1:
        frame += rng.randbytes(rng.randrange(1, 300))
    elif harm < 0.15:
        at = rng.randrange(74)
        frame = frame[:at] + rng.randbytes(1) + frame[at + 1 :]
    return rng.choice((rank + 1,) * 9 + (rng.randrange(6),)), frame


@pytest.mark.bmv2
@pytest.mark.parametrize(("profile", "frames"), [("w5", 400), ("w34", 100)])
def test_engine_and_bmv2_agree_on_anything(process: engine_bmv2.Bmv2, profile: str, frames: int) -> None:
    rng = random.Random(f"anything {profile}")
    engine, switch = embedded(profile), real(process, profile)
    left = 0
    for index in range(frames):
        port, frame = anything(rng, pipeline.find(profile).profile.words)
        expected = engine.process(port, frame)
        left += len(expected)
        found = switch.process(port, frame, len(expected))
        assert sorted(found) == sorted(expected), (
            f"frame {index}: {frame[:74].hex()} of {len(frame)} bytes on port {port}"
        )
    assert switch.rest() == []
    assert left > frames / 4
    array = engine.counters["ReduceIngress.reply.reduce_counter"]
    for cell in range(16):
        assert switch.counter("ReduceIngress.reply.reduce_counter", cell)[0] == array.packets[cell]


def test_no_frame_raises() -> None:
    """Cut at every length, and with every byte of the headers damaged, a frame is forwarded, answered or dropped."""
    engine = embedded("w5")
    frame = contribution(0, [1, 2, 3, 4, 5])
    for size in range(1, len(frame)):
        engine.process(1, frame[:size])
    for at in range(74):
        for value in (0, 1, 0x7F, 0xFF):
            engine.process(1, frame[:at] + bytes((value,)) + frame[at + 1 :])
