# SPDX-License-Identifier: Apache-2.0
"""The allreduce program itself on the engine, and the same frames on BMv2."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
from helpers import engine_bmv2
from helpers.reduce_job import (
    GROUP,
    REPLICAS,
    WORKERS,
    Traffic,
    added,
    admit,
    contribution,
    ip,
    ipv4,
    mac,
    result,
)

from p4reduce import pipeline
from p4reduce_bmv2.embedded.engine import Engine

Frames = list[tuple[int, bytes]]


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
    first, second, third = ([rng.getrandbits(2048) for _ in range(words)] for _ in range(3))
    total = added(first, second, third)
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
    yield 1, other, []
    segment = mac(2) + mac(1) + b"\x08\x00" + ipv4(ip(1), ip(2), 980).replace(b"\x40\x11", b"\x40\x06")
    segment += rng.randbytes(980)
    yield 1, segment, [(2, segment)]
    yield 3, segment, []


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


@pytest.mark.bmv2
@pytest.mark.parametrize(("profile", "frames"), [("w5", 800), ("w34", 400)])
def test_engine_and_bmv2_agree_on_anything(process: engine_bmv2.Bmv2, profile: str, frames: int) -> None:
    """P4REDUCE_RANDOM_FRAMES sets the number of frames for each profile."""
    frames = int(os.environ.get("P4REDUCE_RANDOM_FRAMES", frames))
    rng = random.Random(f"anything {profile}")
    engine, switch = embedded(profile), real(process, profile)
    traffic, left = Traffic(rng, pipeline.find(profile).profile.words), 0
    for index in range(frames):
        port, frame = traffic.frame()
        expected = engine.process(port, frame)
        traffic.heard(expected)
        left += len(expected)
        found = switch.process(port, frame, len(expected))
        assert sorted(found) == sorted(expected), (
            f"frame {index}: {frame[:74].hex()} of {len(frame)} bytes on port {port}"
        )
    assert switch.rest() == []
    assert left > frames / 10
    array = engine.counters["ReduceIngress.reply.reduce_counter"]
    for cell in range(16):
        assert switch.counter("ReduceIngress.reply.reduce_counter", cell)[0] == array.packets[cell]
    assert min(array.packets[6], array.packets[7], *array.packets[8:15]) > 0, "something was never tried"


def test_no_frame_raises() -> None:
    """Cut at every length, and with every byte of the headers damaged, a frame is forwarded, answered or dropped."""
    engine = embedded("w5")
    frame = contribution(0, [1, 2, 3, 4, 5])
    for size in range(1, len(frame)):
        engine.process(1, frame[:size])
    for at in range(74):
        for value in (0, 1, 0x7F, 0xFF):
            engine.process(1, frame[:at] + bytes((value,)) + frame[at + 1 :])
