# SPDX-License-Identifier: Apache-2.0
"""Properties that the protocol rests on, across modules: each ties what one part writes to what another reads.

Properties of single modules stand with their other tests: test_wire.py, test_packetize.py, test_quantize.py,
test_signature.py; random queues of buckets on the reference switch in tests/sim/test_sim_random.py.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p4reduce import constants, pipeline, signature
from p4reduce.constants import UDP_PORT
from p4reduce.core.batch import PayloadRows, ReceiveBatch, SendBatch
from p4reduce.core.bucket import Barrier, Bucket, Reduction
from p4reduce.packetize import BucketCodec, Groups, check, from_wire, to_wire
from p4reduce.quantize import LaneFormat, block_exponents, quantize
from p4reduce.sim.adapter import EngineSwitch
from p4reduce.sim.byhand import ByHand, direct, edit, field, finish
from p4reduce.sim.network import Datagram, Faults
from p4reduce.sim.runner import Scenario, Simulation
from p4reduce.sim.switch import Count, Member, Membership, ReferenceSwitch, SwitchModel
from p4reduce.wire import HEADER, PROFILES, Kind, Op, make_header

W5 = PROFILES["w5"]
HALF = 1 << 31
ROUNDS = st.one_of(
    st.integers(0, (1 << 32) - 1),
    st.sampled_from([0, 1, 2, HALF - 1, HALF, HALF + 1, (1 << 32) - 2, (1 << 32) - 1]),
)
STEPS = st.one_of(st.integers(0, (1 << 32) - 1), st.sampled_from([0, 2, HALF - 2, HALF, HALF + 2, (1 << 32) - 2]))


def repeatable(examples: int = 100) -> settings:
    return settings(derandomize=True, deadline=None, max_examples=examples)


@functools.cache
def program() -> Any:
    return json.loads(pipeline.find("w5").json.read_text())


def new_engine() -> EngineSwitch:
    module = pytest.importorskip("p4reduce_bmv2.embedded.engine", reason="the embedded engine is not installed")
    return EngineSwitch(module.Engine(program()))


# Wire: what a core hands to a driver is what another core's driver hands over


@repeatable()
@given(st.lists(st.tuples(st.sampled_from([1, 5]), st.integers(0, 2**64 - 1)), min_size=1, max_size=12), st.data())
def test_frames_survive_the_way_through_both_batches(frames: list[tuple[int, int]], draw: st.DataObject) -> None:
    """Headers and payloads in groups of any sizes, out as bytes, and back into the rows of a used batch."""
    rng = np.random.default_rng(draw.draw(st.integers(0, 2**32), label="seed"))
    send = SendBatch(len(frames) + 2)
    send.headers.view(np.uint8)[:] = 0xA5
    rows = rng.integers(0, 256, (len(frames), W5.payload_bytes), dtype=np.uint8)
    position = 0
    while position < len(frames):
        stop = draw.draw(st.integers(position + 1, len(frames)), label="end of group")
        index = rng.permutation(np.arange(position, stop))
        sizes = np.array([256 * frames[i][0] for i in range(position, stop)], dtype=np.int64)
        send.groups.append(PayloadRows(position, stop, rows, index, sizes))
        position = stop
    raw = rng.integers(0, 256, (len(frames), HEADER.itemsize), dtype=np.uint8)
    send.headers[: len(frames)] = raw.reshape(-1).view(HEADER)
    send.count = len(frames)
    order = [int(i) for group in send.groups for i in group.index]
    out = list(send.frames())
    assert out == [raw[i].tobytes() + rows[order[i], : 256 * words].tobytes() for i, (words, _) in enumerate(frames)]
    receive = ReceiveBatch(W5, len(frames))
    receive.payload[:] = 0x5A
    for frame in out:
        receive.append(frame)
    for i, frame in enumerate(out):
        size = int(receive.sizes[i])
        assert receive.headers[i].tobytes() + receive.payload[i, : size - HEADER.itemsize].tobytes() == frame


# Lanes: no carry, for every lane width and every number of workers


@pytest.mark.parametrize("lane_bits", [8, 16, 32, 64])
@repeatable(8)
@given(seed=st.integers(0, 2**32))
def test_wide_additions_are_lane_wise_for_every_number_of_workers(lane_bits: int, seed: int) -> None:
    """What the switch adds as integers of 2048 bits is, lane by lane, the sum of what the workers quantized.

    Any bits at all as float32, infinities and NaN among them; exponents as agreed, and exponents that have nothing to
    do with the data, as from a rank that is mad. A carry out of a lane would show in its neighbour.
    """
    rng = np.random.default_rng(seed)
    lanes = 2048 // lane_bits
    largest = np.nextafter(np.float32(2), np.float32(0))
    for workers in range(1, 65):
        fmt = LaneFormat(lane_bits, workers, 32)
        data = rng.integers(0, 1 << 32, (workers, lanes), dtype=np.uint32).view(np.float32)
        if seed % 2:
            # All at one bound, whichever it is in each lane.
            data = np.broadcast_to(largest * rng.choice(np.array([-1, 1], np.float32), lanes), (workers, lanes))
        data = np.ascontiguousarray(data)
        agreed = np.max([block_exponents(vector, 32) for vector in data], axis=0)
        mad = rng.integers(0, 256, len(agreed), dtype=np.uint8)
        total, exact = 0, [0] * lanes
        for rank, vector in enumerate(data):
            u = np.empty(lanes, dtype=fmt.lane_type)
            quantize(vector, mad if rank == 0 and seed % 3 == 0 else agreed, fmt, u)
            row = np.empty((1, 256), dtype=np.uint8)
            to_wire(u.view(np.uint64).reshape(1, -1), row)
            total += int.from_bytes(row.tobytes(), "big")
            exact = [a + int(b) for a, b in zip(exact, u, strict=True)]
        assert total < 1 << 2048
        summed = np.frombuffer(total.to_bytes(256, "big"), dtype=np.uint8).reshape(1, -1)
        assert from_wire(summed).reshape(-1).view(fmt.lane_type).tolist() == exact
        assert max(exact) < 1 << lane_bits


# Rounds: serial arithmetic, in both switches and in the core


def after_two(switch: SwitchModel, first: int, second: int) -> dict[Count, int]:
    """What a switch counts when one rank of two sends `first` and then `second` to the same slot."""
    switch.admit(Membership(5, (Member(0, 1, 100, 4000), Member(1, 2, 101, 4001)), 0, 1, group=16, stats=1))
    for round_ in (first, second):
        header = make_header(kind=Kind.CONTRIBUTE, op=Op.OR, words=1, epoch=5, rank=0, round=round_, tag=round_)
        assert switch.process(1, Datagram(100, 4000, 999, UDP_PORT, header + bytes(256))) == []
    return {event: switch.count(1, event) for event in Count}


@repeatable(150)
@given(ROUNDS, STEPS)
def test_only_the_cells_next_round_starts_it_afresh(first: int, step: int) -> None:
    """The next round of a cell is two ahead, whatever wraps. All others are stale."""
    step -= step % 2  # the other version of a slot is another cell
    second = (first + step) % (1 << 32)
    # A cell that has never been used belongs to no epoch: the first round counts, whatever it is.
    expected = {Count.DUPLICATES: 1} if step == 0 else {Count.CONTRIBUTIONS: 2} if step == 2 else {Count.STALE: 1}
    expected = {Count.CONTRIBUTIONS: 1, **expected}
    for switch in (ReferenceSwitch(W5), new_engine()):
        found = after_two(switch, first, second)
        assert {event: count for event, count in found.items() if count} == expected


@repeatable(100)
@given(st.integers(0, 2**32 - 1), st.one_of(STEPS, st.integers(0, 6)))
def test_the_core_takes_only_the_outstanding_round(start: int, behind: int) -> None:
    """A result whose round is another one is counted as duplicate, stale or malformed, by its distance."""
    hand = ByHand(Scenario(1, or_slots=1, add_slots=1, first_chunk=start))
    hand.submit(Barrier())
    hand.exchange()
    hand.submit(Barrier())
    (frame,) = hand.sent(0)
    ((_, answer),) = hand.to_switch(0, frame)
    core = hand.cores[0]
    assert field(answer, "round") == (start + 1) % (1 << 32)
    results = core.counters.results
    hand.to_worker(0, edit(answer, round=(start + 1 - behind) % (1 << 32)))
    counters = core.counters
    age = (behind - 1) % (1 << 32)  # 0: the one that was finished last
    expected = "results" if behind == 0 else "duplicates" if age == 0 else "stale" if age < HALF else "malformed"
    got = {name: getattr(counters, name) for name in ("duplicates", "stale", "malformed") if getattr(counters, name)}
    got |= {"results": counters.results - results} if counters.results > results else {}
    assert got == {expected: 1}


# Thermometers: the OR of what all ranks send is the largest level of each block


@repeatable(60)
@given(st.integers(1, 64), st.integers(1, 90), st.integers(0, 2**32), st.booleans())
def test_or_of_all_ranks_is_the_maximum(workers: int, blocks: int, seed: int, extreme: bool) -> None:
    rng = np.random.default_rng(seed)
    codec = BucketCodec(W5, LaneFormat(32, workers), 256 * blocks)
    levels = rng.integers(0, 256, (workers, blocks), dtype=np.uint8)
    if extreme:
        levels = rng.choice(np.array([0, 1, 63, 64, 127, 128, 191, 192, 254, 255], np.uint8), (workers, blocks))
    words = [0] * (codec.or_chunks * W5.words)
    for local in levels:
        row = codec.encode_exponents(local).reshape(-1, constants.WORD_BYTES)
        words = [word | int.from_bytes(more.tobytes(), "big") for word, more in zip(words, row, strict=True)]
    result = np.frombuffer(b"".join(word.to_bytes(256, "big") for word in words), dtype=np.uint8)
    found = codec.decode_exponents(result.reshape(codec.or_chunks, -1))
    assert found.tolist() == levels.max(axis=0).tolist()


# Check and signature: right for every rank once, and for nothing else


@repeatable(150)
@given(st.integers(1, 64), st.integers(0, 2**32), st.data())
def test_a_check_is_right_for_every_rank_once_and_nothing_else(workers: int, seed: int, draw: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    groups = rng.integers(0, 1 << 57, (workers, 160), dtype=np.uint64)  # 64 of them do not carry
    epoch, round_, tag = (int(v) for v in rng.integers(1, 1 << 32, 3))
    keys = signature.rank_keys()

    def contribution(rank: int, epoch: int = epoch, round_: int = round_, tag: int = tag) -> int:
        where = signature.place(epoch, np.array([round_], np.uint64), np.array([tag], np.uint64))
        return int(check(groups[rank : rank + 1])[0]) + int(keys[rank]) * int(where[0])

    def verifies(counted: list[int], checks: list[int], sent: Groups = groups) -> bool:
        payload = np.zeros((1, 160), dtype=np.uint64)
        for rank in counted:
            payload[0] += sent[rank]
        header = {"kind": Kind.RESULT, "count_or_reason": workers, "epoch": epoch, "round": round_, "tag": tag}
        return (int(check(payload)[0]) + signature.expected(header) - sum(checks)) % (1 << 64) == 0

    ranks = rng.permutation(workers).tolist()
    good = [contribution(rank) for rank in ranks]
    assert verifies(ranks, good)
    who = draw.draw(st.integers(0, workers - 1), label="rank in fault")
    other = draw.draw(st.integers(0, workers - 1), label="another rank")
    assert not verifies([*ranks, who], [*good, contribution(who)]), "counted twice"
    rest = [rank for rank in ranks if rank != who]
    if rest:
        assert not verifies(rest, [contribution(rank) for rank in rest]), "missing"
    if other != who:
        instead = [*rest, other]
        assert not verifies(instead, [contribution(rank) for rank in instead]), "one in another's place"
    for elsewhere in ({"epoch": epoch + 1}, {"round_": round_ + 2}, {"tag": tag + (1 << 16)}):
        checks = [contribution(rank, **(elsewhere if rank == who else {})) for rank in ranks]
        assert not verifies(ranks, checks), f"from another place: {elsewhere}"
    flipped = groups.copy()
    flipped[who, draw.draw(st.integers(0, 159))] ^= np.uint64(1 << draw.draw(st.integers(0, 63)))
    assert not verifies(ranks, good, flipped), "a bit of a payload changed on its way"


# Bucket queues of random sizes, on the compiled program


@repeatable(40)
@given(
    sizes=st.lists(st.one_of(st.none(), st.sampled_from([0, 1, 64, 65, 320, 321]), st.integers(0, 2500)), max_size=8),
    world_size=st.integers(1, 5),
    slots=st.tuples(st.integers(1, 3), st.integers(1, 5)),
    wrap=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_random_queues_on_the_compiled_program(
    sizes: list[int | None], world_size: int, slots: tuple[int, int], wrap: bool, seed: int
) -> None:
    faults = Faults(loss=0.05, duplicate=0.05, reorder=0.2)
    scenario = Scenario(
        world_size,
        or_slots=slots[0],
        add_slots=slots[1],
        up=faults,
        down=faults,
        seed=seed,
        first_chunk=slots[1] * ((1 << 32) - 2) if wrap else 0,
    )
    simulation = Simulation(scenario, new_engine())
    rng = np.random.default_rng(seed)
    made: list[list[Bucket]] = []
    times = [0.0] * world_size
    for size in sizes:
        ranks: list[Bucket] = []
        for rank in range(world_size):
            data = rng.standard_normal(size or 0, dtype=np.float32)
            ranks.append(Barrier() if size is None else Reduction(data, np.full_like(data, np.nan), bool(seed % 2)))
            times[rank] += float(rng.choice([0.0, 1e-4]))
            simulation.submit(rank, ranks[-1], times[rank])
        made.append(ranks)
    finish(simulation)
    for ranks in made:
        reductions = [bucket for bucket in ranks if isinstance(bucket, Reduction)]
        if reductions:
            expected = direct([one.data for one in reductions], mean=bool(seed % 2)).tobytes()
            assert [one.out.tobytes() for one in reductions] == [expected] * world_size
