# SPDX-License-Identifier: Apache-2.0
"""Many seeded simulations of random jobs over bad networks, every sum compared with the exact one.

A seed stands for everything: the job's shape, its buckets and their data, and what the network does to every frame.
So a seed that fails is all that is needed to see it fail again, frame by frame, with a trace.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from p4reduce.core.bucket import Barrier, Bucket, Reduction
from p4reduce.core.config import RetransmissionPolicy
from p4reduce.errors import ConfigError, JobError, StalledError
from p4reduce.packetize import BucketCodec
from p4reduce.quantize import LaneFormat
from p4reduce.sim.byhand import direct
from p4reduce.sim.network import Faults, LinkCounters
from p4reduce.sim.runner import STATS, Scenario, Simulation
from p4reduce.sim.switch import Count, ReferenceSwitch, SwitchModel
from p4reduce.sim.trace import PcapWriter, Trace
from p4reduce.wire import Profile
from p4reduce.wire import profile as lookup_profile

MakeSwitch = Callable[[Profile], SwitchModel]
BATCH_ROUNDS = 400
"""Rounds that are submitted and checked at a time: memory holds no more."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """What every seed goes through: rounds of slots, and what goes wrong on every link, both ways."""

    rounds: int = 10_000
    up: Faults = field(default_factory=lambda: Faults(loss=0.05, duplicate=0.05, reorder=0.2))
    down: Faults = field(default_factory=lambda: Faults(loss=0.05, duplicate=0.05, reorder=0.2))
    profile: str = "w5"
    limit: float = 300.0
    """Virtual seconds after which a batch counts as hung. Healthy ones take a few."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"a seed needs at least one round, not {self.rounds}")


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong under a seed. `kind`: wrong (a sum), hung, failed (a core gave up), or count (rounds)."""

    kind: str
    message: str
    time: float
    """Virtual seconds."""


@dataclass(slots=True)
class SeedReport:
    """One seed's run."""

    seed: int
    world_size: int
    rounds: int = 0
    """Slot rounds completed: results that every rank got."""
    buckets: int = 0
    frames: int = 0
    """Datagrams that workers sent or got."""
    virtual_seconds: float = 0.0
    fingerprint: str = ""
    network: LinkCounters = field(default_factory=LinkCounters)
    resent: int = 0
    stale: int = 0
    """Contributions that the switch dropped because their slot had moved on."""
    repeats: int = 0
    """Results that the switch sent again."""
    failure: Failure | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return asdict(self)


def draw_scenario(seed: int, campaign: Campaign) -> Scenario:
    """The job that a seed stands for: small windows, numbers near their wrap, impatient timers now and then."""
    draw = random.Random(f"campaign {seed}")
    add_slots = draw.choice((1, 2, 3, 5, 8, 16))
    policies = (
        RetransmissionPolicy(),
        RetransmissionPolicy(initial=0.005, minimum=0.001, maximum=0.05),
        # Below the delay of a late frame: resends meet their originals.
        RetransmissionPolicy(initial=0.001, minimum=0.0002, maximum=0.01, early_resend=draw.choice((0, 1, 3))),
    )
    rounds_to_wrap = draw.choice((0, 3, 200))
    return Scenario(
        draw.choice((1, 2, 2, 2, 3, 3, 4)),
        profile=campaign.profile,
        or_slots=draw.choice((1, 2, 4)),
        add_slots=add_slots,
        policy=draw.choice(policies),
        up=campaign.up,
        down=campaign.down,
        batch=draw.choice((1, 4, 16)),
        seed=seed,
        pool_base=draw.choice((0, 100, 1000)),
        block=draw.choice((64, 256)),
        first_bucket=draw.choice((0, (1 << 24) - 3)),
        first_chunk=add_slots * ((1 << 32) - rounds_to_wrap) if rounds_to_wrap else 0,
    )


def run_seed(
    seed: int, campaign: Campaign, make_switch: MakeSwitch = ReferenceSwitch, pcap: str | Path | None = None
) -> SeedReport:
    """Run one seed to the end, or to its first failure, which the report holds. `pcap`: write all frames there."""
    scenario = draw_scenario(seed, campaign)
    simulation = Simulation(scenario, make_switch(lookup_profile(campaign.profile)))
    writer = PcapWriter(pcap) if pcap is not None else None
    trace = Trace(simulation, writer)
    report = SeedReport(seed, scenario.world_size)
    maker = _Maker(seed, scenario)
    try:
        while report.failure is None and report.rounds < campaign.rounds:
            _run_batch(simulation, maker, min(BATCH_ROUNDS, campaign.rounds - report.rounds), campaign.limit, report)
    finally:
        if writer is not None:
            writer.close()
    report.frames, report.fingerprint = trace.frames, trace.fingerprint
    report.virtual_seconds = simulation.clock.now
    report.network = simulation.counters(simulation.up) + simulation.counters(simulation.down)
    report.resent = sum(core.counters.retransmissions for core in simulation.cores)
    report.stale = simulation.switch.count(STATS, Count.STALE)
    report.repeats = simulation.switch.count(STATS, Count.REPEATS)
    return report


class _Maker:
    """Draws buckets and says how many rounds each takes."""

    def __init__(self, seed: int, scenario: Scenario) -> None:
        self._draw = random.Random(f"buckets {seed}")
        self._rng = np.random.default_rng([seed, 5])
        self._scenario = scenario
        self._format = LaneFormat(32, scenario.world_size, scenario.block)
        self._lanes = lookup_profile(scenario.profile).lanes(32)

    def bucket(self) -> tuple[list[Bucket], int]:
        """One bucket for every rank, and its rounds."""
        draw, kind = self._draw, self._draw.random()
        world = self._scenario.world_size
        if kind < 0.05:
            return [Barrier() for _ in range(world)], 1
        if kind < 0.08:
            size = 0
        elif kind < 0.5:
            size = draw.randrange(1, 65)
        else:
            size = draw.randrange(1, draw.choice((2, 4, 30)) * self._lanes)
        mean = draw.random() < 0.3
        buckets: list[Bucket] = []
        for _ in range(world):
            data = self._rng.standard_normal(size, dtype=np.float32)
            data *= np.float32(2.0 ** draw.randrange(-30, 30))
            buckets.append(Reduction(data, np.full_like(data, np.nan), mean))
        codec = BucketCodec(lookup_profile(self._scenario.profile), self._format, size)
        return buckets, codec.or_chunks + codec.add_chunks

    def wait(self) -> float:
        """Seconds between two submissions of a rank."""
        return self._draw.choice((0.0, 0.0, 1e-5, 2e-4))


def _run_batch(simulation: Simulation, maker: _Maker, wanted: int, limit: float, report: SeedReport) -> None:
    made: list[list[Bucket]] = []
    rounds = 0
    times = [simulation.clock.now] * report.world_size
    while rounds < wanted:
        buckets, takes = maker.bucket()
        for rank, bucket in enumerate(buckets):
            times[rank] += maker.wait()
            simulation.submit(rank, bucket, times[rank])
        made.append(buckets)
        rounds += takes
    try:
        simulation.run(limit)
    except StalledError as error:
        report.failure = Failure("hung", str(error), simulation.clock.now)
        return
    report.failure = _first_error(simulation) or _first_wrong(made, simulation)
    for node in simulation.nodes:
        node.events.clear()  # they hold on to their buckets
    if report.failure is not None:
        return
    report.rounds += rounds
    report.buckets += len(made)
    counted = simulation.switch.count(STATS, Count.RESULTS)
    if counted != report.rounds:
        text = f"the switch has completed {counted} rounds, the job has {report.rounds}"
        report.failure = Failure("count", text, simulation.clock.now)


def _first_error(simulation: Simulation) -> Failure | None:
    errors: list[JobError] = [core.error for core in simulation.cores if core.error is not None]
    if not errors:
        return None
    return Failure("failed", "; ".join(f"{type(error).__name__}: {error}" for error in errors), simulation.clock.now)


def _first_wrong(made: list[list[Bucket]], simulation: Simulation) -> Failure | None:
    block = simulation.scenario.block
    for buckets in made:
        reductions = [bucket for bucket in buckets if isinstance(bucket, Reduction)]
        if not reductions:
            continue
        expected = direct([one.data for one in reductions], block=block, mean=reductions[0].mean)
        for rank, one in enumerate(reductions):
            if one.out.tobytes() == expected.tobytes():
                continue
            where = int(np.flatnonzero(one.out.view(np.uint32) != expected.view(np.uint32))[0])
            text = f"{one.describe()}, rank {rank}, element {where}: {one.out[where]!r}, not {expected[where]!r}"
            return Failure("wrong", text, simulation.clock.now)
    return None
