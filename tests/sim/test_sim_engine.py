# SPDX-License-Identifier: Apache-2.0
"""The compiled P4 program, run by the embedded engine, in the simulations of the reference switch.

Both switches see the same datagrams and must send the same answers; that is what makes the reference a reference.
"""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import numpy as np
import pytest

from p4reduce import pipeline, wire
from p4reduce.constants import UDP_PORT
from p4reduce.core.bucket import Barrier, Reduction
from p4reduce.errors import MismatchError
from p4reduce.sim.adapter import EngineSwitch, checksum, from_frame, mac_of, to_frame
from p4reduce.sim.byhand import ByHand, direct, finish
from p4reduce.sim.network import Datagram, Faults
from p4reduce.sim.runner import Scenario, Simulation
from p4reduce.sim.switch import Count, Member, Membership, ReferenceSwitch
from p4reduce.wire import Kind, Op, make_header

MEMBERS = tuple(Member(rank, rank + 1, 100 + rank, 4000 + rank) for rank in range(3))
SWITCH = 999


@functools.cache
def program(profile: str) -> Any:
    return json.loads(pipeline.find(profile).json.read_text())


def engine_switch(profile: str = "w5") -> EngineSwitch:
    engine = pytest.importorskip("p4reduce_bmv2.embedded.engine", reason="the embedded engine is not installed")
    return EngineSwitch(engine.Engine(program(profile)))


def test_frames_are_wrapped_and_unwrapped() -> None:
    datagram = Datagram(0x0A000001, 40000, 0x0A0000FE, UDP_PORT, b"p4reduce!")
    frame = to_frame(datagram, mac_of(datagram.src), 0x0270340000FE)
    assert frame[:14].hex() == "0270340000fe" + "02700a000001" + "0800"
    assert checksum(frame[14:34]) == 0
    assert len(frame) == 42 + 9
    assert from_frame(frame, 0x0270340000FE) == datagram


def test_unsound_frames_are_refused() -> None:
    mac = 0x0270340000FE
    frame = to_frame(Datagram(1, 2, 3, 4, bytes(20)), 5, mac)
    for spoiled in (
        frame[:41],
        frame[:-1],
        frame + b"\0",
        frame[:12] + b"\x86\xdd" + frame[14:],
        frame[:22] + b"\x3f" + frame[23:],  # TTL changed, checksum not
        frame[:38] + b"\0\0" + frame[40:],  # UDP length
        frame[:40] + b"\0\1" + frame[42:],  # UDP checksum
    ):
        with pytest.raises(ValueError):
            from_frame(spoiled, mac)
    with pytest.raises(ValueError, match="addressed to"):
        from_frame(frame, mac + 1)


@pytest.mark.parametrize(
    ("profile", "world_size", "sizes"),
    [("w5", 1, (20_000, 0, 1)), ("w5", 2, (1, 321, 5000, 0)), ("w5", 4, (700, 64)), ("w34", 3, (2177, 5000))],
)
def test_a_bad_network_changes_no_bit(profile: str, world_size: int, sizes: tuple[int, ...]) -> None:
    faults = Faults(loss=0.05, duplicate=0.1, reorder=0.2)
    scenario = Scenario(
        world_size, profile=profile, up=faults, down=Faults(loss=0.05, duplicate=0.1, corrupt=0.02), seed=3
    )
    simulation = Simulation(scenario, engine_switch(profile))
    rng = np.random.default_rng(world_size)
    data = [[rng.standard_normal(size, dtype=np.float32) for _ in range(world_size)] for size in sizes]
    outs = [[np.full_like(vector, np.nan) for vector in ranks] for ranks in data]
    for rank in range(world_size):
        for number, ranks in enumerate(data):
            simulation.submit(rank, Reduction(ranks[rank], outs[number][rank]), 1e-4 * rank)
        simulation.submit(rank, Barrier(), 1e-3)
    finish(simulation)
    for number, ranks in enumerate(data):
        expected = direct(ranks).tobytes()
        assert [out.tobytes() for out in outs[number]] == [expected] * world_size
    up, down = simulation.counters(simulation.up), simulation.counters(simulation.down)
    assert min(up.lost, up.duplicated, up.overtaken, down.lost, down.duplicated) > 0


def test_ranks_that_disagree_are_told() -> None:
    hand = ByHand(Scenario(2), engine_switch())
    data = np.ones(100, np.float32)
    hand.submit(Reduction(data, data.copy()), Reduction(data[:50], np.empty(50, np.float32)))
    hand.exchange()
    assert hand.cores[0].error is None
    assert isinstance(hand.cores[1].error, MismatchError)


def random_datagram(draw: random.Random, number: int) -> tuple[int, Datagram]:
    """A contribution that is often right and sometimes wrong in one way, on few slots and tags.

    Rounds go on slowly, from shortly before they wrap, with a leap now and then.
    """
    rank = draw.randrange(3)
    round_ = ((1 << 32) - 20 + number // 100 + draw.choice((0, 0, 0, 0, 1, -1, -2))) % (1 << 32)
    words = (1, 1, 5)[round_ % 3] if draw.randrange(20) else 5
    header = {
        "kind": Kind.CONTRIBUTE,
        "op": round_ % 2 if draw.randrange(20) else Op.OR,
        "words": words,
        "epoch": 6 if draw.randrange(8) == 0 else 5,
        "slot": draw.randrange(2),
        "rank": rank,
        "round": round_ if draw.randrange(200) else draw.choice((0, round_ + 2, round_ + 4, 1 << 31)) % (1 << 32),
        "check": draw.getrandbits(64),
        "tag": round_ if draw.randrange(20) else 2,
    }
    size = 256 * words
    port, ip = rank + 1, 100 + rank
    fault = draw.randrange(40)
    if fault < 12:
        name, value = (
            ("version", 2),
            ("kind", Kind.RESULT),
            ("kind", Kind.NACK),
            ("kind", 9),
            ("op", 2),
            ("words", 2),
            ("words", 34),
            ("epoch", 99),
            ("slot", 4),
            ("slot", 65535),
            ("rank", (rank + 1) % 3),
            ("count_or_reason", 200),
        )[fault]
        header[name] = value
    elif fault == 12:
        size = draw.choice((0, 1, 255, 257, 1279, 1281))
    elif fault == 13:
        ip = 77
    elif fault == 14:
        port = 9
    data = make_header(**header) + draw.randbytes(size)
    if fault == 15:
        data = data[: draw.randrange(32)]
    return port, Datagram(ip, 4000 + rank, SWITCH, 53 if fault == 16 else UDP_PORT, data)


def test_both_switches_answer_alike() -> None:
    """Thousands of random contributions: same answers to the same ports in the same order, same counters."""
    engine, reference = engine_switch(), ReferenceSwitch(wire.PROFILES["w5"])
    for switch in (engine, reference):
        switch.admit(Membership(5, MEMBERS, pool_base=10, pool_size=4, group=16, stats=1))
        switch.admit(Membership(6, MEMBERS[:2], pool_base=14, pool_size=2, group=17, stats=2))
    draw = random.Random(1)
    answers = 0
    for number in range(6000):
        port, datagram = random_datagram(draw, number)
        ours, theirs = reference.process(port, datagram), engine.process(port, datagram)
        assert ours == theirs, (number, datagram)
        answers += len(ours)
    assert answers > 1000
    for stats in range(3):
        for event in Count:
            assert reference.count(stats, event) == engine.count(stats, event), (stats, event)
    seen = {event for event in Count if reference.count(1, event) > 20}
    assert seen == set(Count)


def test_a_revoked_epoch_is_refused_by_both() -> None:
    for switch in (engine_switch(), ReferenceSwitch(wire.PROFILES["w5"])):
        hand = ByHand(Scenario(2), switch)
        hand.submit(Barrier(), Barrier())
        (frame,) = hand.sent(0)
        hand.switch.revoke(7)
        ((rank, nack),) = hand.to_switch(0, frame)
        hand.to_worker(rank, nack)
        assert hand.cores[0].error is not None
        assert hand.switch.count(0, Count.REFUSED) == 1
