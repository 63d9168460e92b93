# SPDX-License-Identifier: Apache-2.0
"""Buckets of every format through cores, switch and lossy network, and out of the middle of it onto the ring."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.mixed_buckets import KINDS, Expected, make

from p4reduce import pipeline
from p4reduce.core import part, worker
from p4reduce.core.bucket import Barrier, Bucket, IntegerReduction, Reduction
from p4reduce.core.config import CoreConfig
from p4reduce.core.kept import Kept
from p4reduce.core.part import SumPart
from p4reduce.core.states import Phase
from p4reduce.core.worker import WorkerCore
from p4reduce.errors import ConfigError, IntegrityError, MismatchError, UsageError
from p4reduce.quantize import BLOCKS, LaneFormat
from p4reduce.sim.adapter import EngineSwitch
from p4reduce.sim.byhand import ByHand, damage, finish
from p4reduce.sim.network import Faults
from p4reduce.sim.runner import Scenario, Simulation
from p4reduce.sim.switch import ReferenceSwitch, SwitchModel
from p4reduce.wire import PROFILES

W5 = PROFILES["w5"]
LOSSY = Faults(loss=0.05, duplicate=0.05, reorder=0.2)


def engine() -> EngineSwitch:
    module = pytest.importorskip("p4reduce_bmv2.embedded.engine", reason="the embedded engine is not installed")
    return EngineSwitch(module.Engine(json.loads(pipeline.find("w5").json.read_text())))


def default(scenario: Scenario) -> LaneFormat:
    return LaneFormat(32, scenario.world_size, scenario.block)


# Through the switch


@pytest.mark.parametrize("make_switch", [lambda: ReferenceSwitch(W5), engine], ids=["reference", "program"])
@pytest.mark.parametrize("seed", range(6))
def test_mixed_formats_in_one_job(make_switch: Callable[[], SwitchModel], seed: int) -> None:
    """In any order, on the unchanged program, with losses: the right bits and residuals on every rank."""
    draw = random.Random(f"mixed/{seed}")
    scenario = Scenario(1 + seed % 4, up=LOSSY, down=LOSSY, seed=seed, block=draw.choice((64, 256)))
    simulation = Simulation(scenario, make_switch())
    expected, times = [], [0.0] * scenario.world_size
    kinds = [*KINDS, *draw.choices(KINDS, k=12)]
    draw.shuffle(kinds)
    for kind in kinds:
        buckets = make(draw, scenario.world_size, kind, 1000 if kind == "overflow" else None)
        expected.append(Expected(buckets, default(scenario)))
        for rank, bucket in enumerate(buckets):
            times[rank] += draw.choice((0.0, 1e-4))
            simulation.submit(rank, bucket, times[rank])
    finish(simulation)
    lost = simulation.counters(simulation.up + simulation.down).lost
    assert lost > 0
    assert any(one.error for one in expected) == (scenario.world_size > 1)
    for one in expected:
        for rank in range(scenario.world_size):
            assert one.ranks[rank].phase is Phase.COMPLETED
            one.check(rank)


def test_a_sum_that_int32_cannot_hold_is_the_same_error_on_all_ranks() -> None:
    hand = ByHand(Scenario(3))
    data = [np.full(500, 2**30, dtype=np.int32) for _ in range(3)]
    buckets = [IntegerReduction(x, x if rank else np.zeros_like(x)) for rank, x in enumerate(data)]
    after = [Reduction(np.ones(10, np.float32), np.zeros(10, np.float32)) for _ in range(3)]
    hand.submit(*buckets)
    hand.submit(*after)
    hand.exchange()
    assert {str(bucket.error) for bucket in buckets} == {
        f"the sum of element 0 over all ranks is {3 << 30}, which int32 cannot hold; nothing was written, on any rank"
    }
    assert [bucket.out.tolist() for bucket in buckets] == [[0] * 500, *[[2**30] * 500] * 2]
    # The job goes on.
    assert [one.out.tolist() for one in after] == [[3.0] * 10] * 3


DATA = np.linspace(-1, 1, 300).astype(np.float32)


def floats(**choice: Any) -> Reduction:
    return Reduction(DATA.copy(), DATA.copy(), **choice)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"lane_bits": 16}, {}),
        ({"lane_bits": 16}, {"lane_bits": 8}),
        ({"block": 64}, {}),
        ({"rounding": "stochastic"}, {}),
        ({"rounding": "stochastic", "seed": 1}, {"rounding": "stochastic", "seed": 2}),
        ({"dtype": "float16"}, {}),
    ],
)
def test_ranks_that_want_different_numbers_refuse_each_other(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    hand = ByHand(Scenario(2))
    hand.submit(floats(**ours), floats(**theirs))
    hand.exchange()
    assert any(isinstance(core.error, MismatchError) for core in hand.cores)
    assert not any(core.completed for core in hand.cores)


def test_integers_and_floats_refuse_each_other() -> None:
    hand = ByHand(Scenario(2))
    numbers = np.zeros(300, dtype=np.int32)
    hand.submit(floats(), IntegerReduction(numbers, numbers))
    hand.exchange()
    assert any(isinstance(core.error, MismatchError) for core in hand.cores)


def test_integers_are_not_committed_by_what_announces_them() -> None:
    """With small windows the OR stream runs ahead by many buckets; what is kept must not go before its sum has come."""
    hand = ByHand(Scenario(2, or_slots=1, add_slots=1))
    x = [np.arange(200, dtype=np.int32) for _ in range(2)]
    hand.submit(*[IntegerReduction(one, one) for one in x])
    for _ in range(6):
        hand.submit(Barrier(), Barrier())
    # Only OR frames get through.
    while frames := [(rank, frame) for rank in range(2) for frame in hand.sent(rank) if frame[2] == 1]:
        for rank, frame in frames:
            for to, answer in hand.to_switch(rank, frame):
                hand.to_worker(to, answer)
    for core in hand.cores:
        kept = core.handover()
        assert [one.number for one in kept] == list(range(7))
        assert not kept[0].delivered
        assert kept[0].integers(kept[0].exponents()).tolist() == [int(v) + kept[0].format.bias for v in range(200)]


# What is refused


def test_lanes_too_narrow_for_so_many_workers_are_refused() -> None:
    def core(world_size: int, **more: Any) -> WorkerCore:
        return WorkerCore(CoreConfig("narrow", 1, 0, world_size, W5, 1, 1, **more), 0.0)

    for world_size in range(1, 65):
        usable = LaneFormat(8, world_size).precision >= 1
        assert usable == (world_size < 64)
        bucket = floats(lane_bits=8)
        if usable:
            core(world_size).submit(bucket, 0.0)
            core(world_size, lane_bits=8)
            continue
        with pytest.raises(UsageError, match=r"8-bit lanes are too narrow for 64 workers.*16 bits"):
            core(world_size).submit(bucket, 0.0)
        with pytest.raises(UsageError, match="too narrow"):
            Kept.fresh(bucket, 0, LaneFormat(32, world_size))
        assert bucket.phase is Phase.NEW
        with pytest.raises(ConfigError, match="too narrow"):
            core(world_size, lane_bits=8)
        core(world_size).submit(floats(lane_bits=16), 0.0)


def test_a_job_has_a_width_of_its_own() -> None:
    for bits, block in BLOCKS.items():
        config = CoreConfig("width", 1, 0, 2, W5, 1, 1, lane_bits=bits)
        assert config.lane_format == LaneFormat(bits, 2, block)
        assert floats().lane_format(config.lane_format) == config.lane_format
        assert floats(lane_bits=16).lane_format(config.lane_format) == LaneFormat(16, 2, 512)
        assert floats(block=7).lane_format(config.lane_format) == LaneFormat(bits, 2, 7)
    assert floats(lane_bits=32).lane_format(LaneFormat(32, 2, 64)) == LaneFormat(32, 2, 64)


@pytest.mark.parametrize(
    "choice",
    [
        {"lane_bits": 12},
        {"lane_bits": 0},
        {"block": 0},
        {"rounding": "up"},
        {"seed": -1},
        {"seed": 1 << 64},
        {"residual": np.zeros(299, np.float32)},
        {"residual": np.zeros(300)},
        {"residual": DATA},
        {"residual": np.broadcast_to(np.float32(0), 300)},
    ],
    ids=str,
)
def test_buckets_that_make_no_sense(choice: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Reduction(DATA, np.empty_like(DATA), **choice)


def test_integers_that_make_no_sense() -> None:
    good = np.zeros(10, dtype=np.int32)
    wrong: list[tuple[Any, Any]] = [
        (good.astype(np.int64), good),
        (good, good.astype(np.float32)),
        (good, good[1:]),
        (good[:-1], good[1:]),
        (good[::2], np.zeros(5, np.int32)),
    ]
    for data, out in wrong:
        with pytest.raises(UsageError):
            IntegerReduction(data, out)


def test_stochastic_rounding_off_the_core_needs_the_rank() -> None:
    with pytest.raises(UsageError, match="rank"):
        Kept.fresh(floats(rounding="stochastic"), 0, LaneFormat(32, 2))


# Out of the middle of it, onto the ring


def ring(ranks: list[Kept]) -> None:
    """Sum one bucket over all ranks as the ring path does."""
    fmt = ranks[0].format
    agreed = np.max([kept.exponents() for kept in ranks], axis=0)
    lanes = [kept.integers(agreed) for kept in ranks]
    sums = np.sum(lanes, axis=0, dtype=fmt.lane_type)
    for kept in ranks:
        kept.finish(sums, agreed)
        kept.release()


class Case:
    """A job of mixed buckets, whose ranks stop at moments drawn from a seed."""

    def __init__(self, seed: int, seen: Counter[str]) -> None:
        self.draw = draw = random.Random(f"numbers/{seed}")
        self.seen = seen
        self.n = draw.choice((1, 2, 2, 3))
        faults = Faults(loss=draw.choice((0.0, 0.1)), duplicate=0.05, reorder=0.2)
        self.scenario = Scenario(self.n, or_slots=2, add_slots=draw.choice((2, 4)), up=faults, down=faults, seed=seed)
        self.simulation = Simulation(self.scenario)
        self.kept: list[list[Kept]] = [[] for _ in range(self.n)]
        self.expected = []
        for _ in range(12):
            self.expected.append(Expected(make(draw, self.n), default(self.scenario)))

    def run(self) -> None:
        simulation, draw = self.simulation, self.draw
        for rank in range(self.n):
            time = 0.0
            for one in self.expected:
                time += draw.choice((0.0, 2e-4))
                simulation.submit(rank, one.ranks[rank], time)
        moment, spread = 0.02 * draw.random() ** 2, draw.choice((0.0, 1e-4, 1e-3))
        stopped = []
        for rank in range(self.n):

            def stop(rank: int = rank) -> None:
                core = simulation.cores[rank]
                for entry in core._ledger:
                    share = entry.part
                    self.seen[entry.bucket.phase.name] += 1
                    if isinstance(share, SumPart) and entry.bucket.phase is Phase.SUMMING:
                        self.seen["partly encoded"] += 0 < share._encoded < share.chunks
                        self.seen["all encoded"] += share._encoded == share.chunks
                        self.seen["written over"] += share.written_over
                self.kept[rank] = core.handover()
                stopped.append(rank)

            simulation.clock.at(moment + spread * draw.random(), stop)
        while len(stopped) < self.n:
            assert simulation.clock.step()
        simulation.drain()
        self.finish()

    def finish(self) -> None:
        first = min(core.first_incomplete for core in self.simulation.cores)
        by_rank = [{kept.number: kept for kept in kept_} for kept_ in self.kept]
        for place, one in enumerate(self.expected):
            ranks = []
            for rank, bucket in enumerate(one.ranks):
                kept = by_rank[rank].get(place)
                if bucket.phase is Phase.COMPLETED:
                    self.spoil(one, rank)
                elif kept is None:
                    kept = Kept.fresh(bucket, place, default(self.scenario), rank)
                    self.seen["fresh"] += 1
                if kept is not None:
                    ranks.append(kept)
            if place < first:
                continue
            delivered = [kept.delivered for kept in ranks]
            ring(ranks)
            self.seen["ring"] += 1
            for rank, was in enumerate(delivered):
                if was:
                    self.seen["compared"] += 1
                    self.untouched(one.ranks[rank])
                else:
                    assert one.ranks[rank].phase is Phase.COMPLETED
                    one.check(rank)
                    self.seen["residual"] += one.residuals[rank] is not None

    def spoil(self, one: Expected, rank: int) -> None:
        """Delivered: all is as it should be, and the caller may do what he likes with his arrays."""
        bucket = one.ranks[rank]
        one.check(rank)
        if isinstance(bucket, Reduction | IntegerReduction):
            bucket.data[:] = bucket.out[:] = -1
        if isinstance(bucket, Reduction) and bucket.residual is not None:
            bucket.residual[:] = -1

    def untouched(self, bucket: Bucket) -> None:
        if isinstance(bucket, Reduction | IntegerReduction):
            assert (bucket.out == -1).all()
        if isinstance(bucket, Reduction) and bucket.residual is not None:
            assert (bucket.residual == -1).all()


@pytest.mark.parametrize("group", range(2))
def test_a_handover_changes_no_bit_of_results_and_residuals(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped anywhere: what the ring finishes has the bits, and the residuals, of the undisturbed run."""
    monkeypatch.setattr(worker, "LEAST_LAG", 1)
    monkeypatch.setattr(part, "ENCODE_ELEMENTS", 640)
    seen: Counter[str] = Counter()
    for seed in range(group, 120, 2):
        Case(seed, seen).run()
    wanted = {"partly encoded", "all encoded", "written over", "fresh", "ring", "compared", "residual"}
    wanted |= {"QUEUED", "AGREEING", "AGREED", "SUMMING", "COMPLETED"}
    assert {name for name in wanted if seen[name] > 0} == wanted, seen


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_other_exponents_on_the_ring_leave_other_residuals(bits: int) -> None:
    """A damaged OR result: the ring agrees on the right exponents, and the residual goes with what counts."""
    hand = ByHand(Scenario(2))
    rng = np.random.default_rng(5)
    buckets: list[Reduction] = []
    residual = np.empty(0, dtype=np.float32)
    for _ in range(2):
        x = rng.standard_normal(1000, dtype=np.float32)
        residual = np.full_like(x, 9)
        buckets.append(Reduction(x, x.copy(), lane_bits=bits, rounding="stochastic", seed=3, residual=residual))
    expected = Expected(buckets, LaneFormat(32, 2))
    hand.submit(*buckets)
    frames = [(rank, hand.sent(rank)[0]) for rank in range(2)]
    for to, answer in [answer for rank, frame in frames for answer in hand.to_switch(rank, frame)]:
        level = sum(byte.bit_count() for byte in answer[32:64])
        # The lowest group stands first, its lowest bits last.
        byte = 32 + 8 * (level // 64) + 7 - level % 64 // 8
        hand.to_worker(to, damage(answer, byte, 1 << level % 8) if to == 0 else answer)
    hand.exchange()
    assert any(isinstance(core.error, IntegrityError) for core in hand.cores)
    assert buckets[0].residual is not None
    residual = buckets[0].residual
    assert not (residual == 9).any()
    kept = [core.handover()[0] for core in hand.cores]
    before = residual.copy()
    ring(kept)
    assert residual.tobytes() != before.tobytes()
    for rank in range(2):
        expected.check(rank)
