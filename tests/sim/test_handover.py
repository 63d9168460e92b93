# SPDX-License-Identifier: Apache-2.0
"""Epochs that end at any moment: what the ranks kept is enough for the ring path, and gives the same bits.

Random jobs are stopped at random moments, and the ring is played here: maximum of the exponents, sum of the integers,
from the first bucket that any rank lacks. Small systems are explored completely: in every state that they can reach
every rank has what another one may still need.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from p4reduce import wire
from p4reduce.core import part, worker
from p4reduce.core.bucket import Barrier, Bucket, Reduction
from p4reduce.core.config import RetransmissionPolicy
from p4reduce.core.kept import Kept
from p4reduce.core.part import SumPart
from p4reduce.core.states import Phase
from p4reduce.core.stream import Stream
from p4reduce.core.worker import WorkerCore
from p4reduce.errors import IntegrityError
from p4reduce.quantize import LaneFormat
from p4reduce.sim.byhand import ByHand, damage, direct
from p4reduce.sim.modelcheck import Bounds, Checker, ReferenceState
from p4reduce.sim.network import Faults
from p4reduce.sim.runner import Scenario, Simulation
from p4reduce.sim.switch import ReferenceSwitch

Vector = npt.NDArray[np.float32]
BLOCK = 64
SEEDS = 300
SIZES = (0, 1, 63, 64, 65, 320, 321, 1000, 3000, 6000, 9000)


def ring(ranks: list[Kept], fmt: LaneFormat) -> None:
    """Sum one bucket over all ranks as the ring path does."""
    agreed = np.max([kept.exponents() for kept in ranks], axis=0)
    total = np.zeros(ranks[0].count, dtype=np.int64)
    for kept in ranks:
        total += kept.integers(agreed).astype(np.int64) - fmt.bias
    sums = (total + fmt.workers * fmt.bias).astype(fmt.lane_type)
    for kept in ranks:
        kept.finish(sums, agreed)
        kept.release()


class Case:
    """A job drawn from a seed: its network, its buckets, and the moments at which its ranks stop."""

    def __init__(self, seed: int, seen: Counter[str]) -> None:
        self.draw = draw = random.Random(f"handover/{seed}")
        self.seen = seen
        self.n = draw.choice((1, 2, 2, 3, 4))
        loss = draw.choice((0.0, 0.05, 0.05, 0.2))
        faults = Faults(loss=loss, duplicate=draw.choice((0.0, 0.1)), reorder=draw.choice((0.0, 0.3)))
        policy = RetransmissionPolicy(
            initial=0.002, minimum=0.0005, maximum=0.02, window=draw.choice((0, 0, 2, 3, 8)), early_resend=2
        )
        self.scenario = Scenario(
            self.n,
            or_slots=draw.choice((1, 2, 4)),
            add_slots=draw.choice((1, 2, 2, 4, 6)),
            batch=draw.choice((1, 4, 16)),
            policy=policy,
            up=faults,
            down=faults,
            block=BLOCK,
            first_bucket=draw.choice((0, 5, (1 << 24) - 3)),
            seed=seed,
        )
        self.fmt = LaneFormat(32, self.n, BLOCK)
        self.simulation = Simulation(self.scenario)
        self.kept: dict[int, list[Kept]] = {}
        self.buckets: list[list[Bucket]] = []
        self.expected: list[Vector | None] = []
        self.given = [0] * self.n

    def plan(self) -> None:
        """Draw buckets; ranks submit each when they have completed all but a few of those before."""
        rng = np.random.default_rng(self.scenario.seed)
        # Some jobs have many small buckets, some barriers almost alone, some few large ones.
        kind = self.draw.choice(("mixed", "mixed", "tiny", "barriers"))
        count = {"mixed": 15, "tiny": 40, "barriers": 60}[kind]
        for _ in range(count):
            barrier = self.draw.random() < {"mixed": 0.2, "tiny": 0.1, "barriers": 0.9}[kind]
            size = self.draw.choice(SIZES if kind == "mixed" else (0, 1, 64, 100))
            mean, inplace = self.draw.random() < 0.5, self.draw.random() < 0.5
            if barrier:
                self.buckets.append([Barrier() for _ in range(self.n)])
                self.expected.append(None)
                continue
            scale = np.float32(2.0 ** self.draw.randrange(-20, 20))
            data = [rng.standard_normal(size, dtype=np.float32) * scale for _ in range(self.n)]
            if size > 70 and self.draw.random() < 0.2:
                data[0][66] = np.nan
            self.expected.append(direct(data, block=BLOCK, mean=mean))
            self.buckets.append([Reduction(x, x if inplace else np.full_like(x, 7), mean) for x in data])

    def run(self) -> None:
        """Submit, stop every rank at its moment, and let the ring sum what is left."""
        self.plan()
        simulation, draw = self.simulation, self.draw
        flight = draw.choice((1, 4, 100))
        tick = 20e-6

        def feed(rank: int) -> Callable[[], None]:
            def call() -> None:
                core = simulation.cores[rank]
                if core.error is not None:
                    return
                if self.given[rank] < len(self.buckets) and core.submitted - core.completed < flight:
                    simulation.submit(rank, self.buckets[self.given[rank]][rank])
                    self.given[rank] += 1
                simulation.clock.at(simulation.clock.now + tick * draw.random() * 4, call)

            return call

        # About as long as the job takes at this loss, so that some stop early and some after the end.
        length = 0.001 + 0.01 * draw.random() * (1 + 100 * self.scenario.up.loss)
        moment = length * draw.random()
        spread = draw.choice((0.0, 1e-4, 1e-3))
        for rank in range(self.n):
            simulation.clock.at(tick * draw.random(), feed(rank))
            simulation.clock.at(moment + spread * draw.random(), self.stopper(rank))
        while len(self.kept) < self.n:
            assert simulation.clock.step()
        simulation.drain()
        self.finish()

    def stopper(self, rank: int) -> Callable[[], None]:
        def stop() -> None:
            core = self.simulation.cores[rank]
            entries = [(entry.bucket.phase, entry.part) for entry in core._ledger]
            for phase, share in entries:
                self.seen[phase.name] += 1
                if isinstance(share, SumPart) and phase is Phase.SUMMING:
                    self.seen["written over"] += share.written_over
                    self.seen["partly encoded"] += 0 < share._encoded < share.chunks
            kept = self.kept[rank] = core.handover()
            done = core.first_incomplete
            self.seen["dropped"] += core.submitted - len(kept)
            self.seen["delivered"] += sum(one.delivered for one in kept)
            numbers = [one.number for one in kept]
            end = self.scenario.first_bucket + core.submitted
            assert numbers == list(range(end - len(kept), end))
            assert not numbers or numbers[0] <= done
            for one in kept:
                self.check_delivered(rank, one)

        return stop

    def check_delivered(self, rank: int, kept: Kept) -> None:
        """A delivered bucket has its result, and the caller may do what he likes with its arrays."""
        place = kept.number - self.scenario.first_bucket
        assert kept.bucket is self.buckets[place][rank]
        if kept.delivered and isinstance(kept.bucket, Reduction):
            assert kept.bucket.out.tobytes() == self.right(place)
            kept.bucket.data[:] = kept.bucket.out[:] = -1.0

    def right(self, place: int) -> bytes:
        vector = self.expected[place]
        assert vector is not None
        return vector.tobytes()

    def finish(self) -> None:
        """All that the ring has to do, and every bucket of every rank at last."""
        first = min(core.first_incomplete for core in self.simulation.cores) - self.scenario.first_bucket
        self.seen["apart"] += len({core.first_incomplete for core in self.simulation.cores}) > 1
        by_rank = [{kept.number: kept for kept in self.kept[rank]} for rank in range(self.n)]
        for place in range(first, len(self.buckets)):
            number = self.scenario.first_bucket + place
            ranks = []
            for rank in range(self.n):
                if place >= self.given[rank]:
                    self.seen["fresh"] += 1
                    ranks.append(Kept.fresh(self.buckets[place][rank], number, self.fmt))
                else:
                    assert number in by_rank[rank], f"rank {rank} has dropped bucket {number}, the first is {first}"
                    ranks.append(by_rank[rank][number])
            ring(ranks, self.fmt)
            self.seen["ring"] += 1
            for rank, kept in enumerate(ranks):
                assert kept.bucket.phase is Phase.COMPLETED
                if isinstance(kept.bucket, Reduction):
                    self.seen["compared"] += kept.delivered and place >= first
                    expected = np.full_like(kept.bucket.out, -1.0).tobytes() if kept.delivered else self.right(place)
                    assert kept.bucket.out.tobytes() == expected, (rank, number)
        for place in range(first):
            for rank in range(self.n):
                bucket = self.buckets[place][rank]
                assert bucket.phase is Phase.COMPLETED
                held = self.scenario.first_bucket + place in by_rank[rank]
                if isinstance(bucket, Reduction) and not held:
                    assert bucket.out.tobytes() == self.right(place)
        for core in self.simulation.cores:
            assert silent(core)


def silent(core: WorkerCore) -> bool:
    """Whether nothing is left in a core."""
    return core.kept_buckets == core.kept_bytes == 0 and core.next_deadline() is None and not core._parts


PHASES = {Phase.QUEUED, Phase.AGREEING, Phase.AGREED, Phase.SUMMING, Phase.COMPLETED}
CASES = {"written over", "partly encoded", "dropped", "delivered", "apart", "fresh", "ring", "compared", "lost"}


@pytest.mark.parametrize("group", range(3))
def test_nothing_that_any_rank_needs_is_dropped(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The least lag that the smallest pools allow, so that its proof is used, too; pieces of two chunks.
    monkeypatch.setattr(worker, "LEAST_LAG", 1)
    monkeypatch.setattr(part, "ENCODE_ELEMENTS", 640)
    seen: Counter[str] = Counter()
    for seed in range(group, SEEDS, 3):
        case = Case(seed, seen)
        case.run()
        seen["lost"] += case.simulation.counters(case.simulation.up + case.simulation.down).lost
    expected = {phase.name for phase in PHASES} | CASES
    assert {name for name in expected if seen[name] > 0} == expected, seen


def test_an_exponent_that_was_damaged_on_its_way_down_is_mended_by_the_ring() -> None:
    """A higher one that is a thermometer, too: the ADD digests differ, and no rank has written a result."""
    hand = ByHand(Scenario(2))
    rng = np.random.default_rng(5)
    data = [rng.standard_normal(1000, dtype=np.float32) for _ in range(2)]
    copies = [x.copy() for x in data]
    buckets = [Reduction(x, x, True) for x in copies]
    expected = direct(data, mean=True).tobytes()
    hand.submit(*buckets)
    frames = [(rank, hand.sent(rank)[0]) for rank in range(2)]
    answers = [answer for rank, frame in frames for answer in hand.to_switch(rank, frame)]
    for rank, answer in answers:
        level = sum(byte.bit_count() for byte in answer[32:64])
        # The lowest group stands first, its lowest bits last.
        byte = 32 + 8 * (level // 64) + 7 - level % 64 // 8
        hand.to_worker(rank, damage(answer, byte, 1 << level % 8) if rank == 0 else answer)
    hand.exchange()
    errors = [core.error for core in hand.cores if core.error is not None]
    assert errors
    assert all(isinstance(error, IntegrityError) for error in errors)
    kept = [core.handover() for core in hand.cores]
    assert [[one.delivered for one in ranks] for ranks in kept] == [[False], [False]]
    ring([ranks[0] for ranks in kept], LaneFormat(32, 2))
    assert [bucket.out.tobytes() for bucket in buckets] == [expected] * 2


# Small systems, completely --------------------------------------------------------------------------------------------

SYSTEMS = (
    Bounds(2, workload=(1, 1, 1, 1)),
    Bounds(2, workload=(1, 0, 2, 0, 1)),
    Bounds(2, or_slots=2, add_slots=2, workload=(1, 1, 1, 1)),
    Bounds(2, add_slots=2, workload=(3, 0, 2, 1)),
    Bounds(2, or_slots=2, workload=(1, 0, 0, 1, 0)),
    Bounds(3, workload=(1, 0, 1)),
    Bounds(3, workload=(0, 0, 0, 0)),
    # More barriers than the lag behind a sum.
    Bounds(2, workload=(1, *[0] * 10)),
)


def explore(bounds: Bounds) -> Counter[str]:
    """Over all states: those in which ranks stand apart, a rank has dropped something, and one that another lacks."""
    checker = Checker(bounds, lambda: ReferenceState(ReferenceSwitch(wire.PROFILES["w5"])), batches=False)
    report = checker.run()
    assert report.complete
    assert not report.violation
    begin = bounds.scenario(0).first_bucket
    places: list[list[tuple[int, int]]] = []
    for rank, states in enumerate(checker._workers.states):
        cores = [checker._workers.branch(rank, state).core for state in range(len(states))]
        places.append([(first_kept(core), core.first_incomplete) for core in cores])
    found: Counter[str] = Counter()
    for _, _, numbers, _ in checker._nodes:
        here = [places[rank][number] for rank, number in enumerate(numbers)]
        needed = min(incomplete for _, incomplete in here)
        found["apart"] += len({incomplete for _, incomplete in here}) > 1
        found["dropped"] += any(kept > begin for kept, _ in here)
        found["lacking"] += any(kept > needed for kept, _ in here)
    return found


def first_kept(core: WorkerCore) -> int:
    """Number of the first bucket that a core keeps, or of the next to come."""
    return next((entry.bucket.number for entry in core._ledger), core._origin + core.submitted)


@pytest.mark.parametrize("bounds", SYSTEMS, ids=lambda b: f"{b.workers}-{b.or_slots}+{b.add_slots}-{b.workload}")
def test_in_every_state_each_rank_has_what_another_may_need(bounds: Bounds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "LEAST_LAG", 1)
    found = explore(bounds)
    assert found["lacking"] == 0
    assert found["apart"] > 0
    assert found["dropped"] > 0


@pytest.mark.parametrize("bounds", SYSTEMS[1::2], ids=lambda b: f"{b.workers}-{b.or_slots}+{b.add_slots}-{b.workload}")
def test_one_chunk_earlier_would_be_too_early(bounds: Bounds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "LEAST_LAG", 1)
    monkeypatch.setattr(Stream, "committed", property(lambda self: self.first_missing - self.window + 1))
    assert explore(bounds)["lacking"] > 0


def test_a_shorter_lag_would_prove_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core that lets buckets in one further than the proof allows."""
    monkeypatch.setattr(worker, "LEAST_LAG", 1)
    feed = WorkerCore._feed

    def farther(self: WorkerCore) -> None:
        self._lag += 1
        feed(self)
        self._lag -= 1

    monkeypatch.setattr(WorkerCore, "_feed", farther)
    monkeypatch.setattr(SumPart, "release", lambda _: None)  # it would have to send again what it has dropped
    assert explore(SYSTEMS[-1])["lacking"] > 0
