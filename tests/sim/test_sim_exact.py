# SPDX-License-Identifier: Apache-2.0
"""Whole jobs on the reference switch: the right bits at every rank, whatever the network does."""

from __future__ import annotations

import numpy as np
import pytest

from p4reduce.core.bucket import Barrier, Reduction
from p4reduce.core.config import RetransmissionPolicy
from p4reduce.core.events import Stalled
from p4reduce.errors import JobError, StalledError
from p4reduce.sim.byhand import Vector, direct, finish
from p4reduce.sim.network import Faults
from p4reduce.sim.runner import Scenario, Simulation

SIZES = (1, 255, 256, 257, 0, 320, 321, 640, 5000, 64, 20_000)
LARGE = (2176, 2177, 1, 200_000)


def vectors(world_size: int, sizes: tuple[int, ...], seed: int) -> list[list[Vector]]:
    """[bucket][rank]: numbers of very different magnitudes."""
    rng = np.random.default_rng(seed)
    return [
        [
            (rng.standard_normal(size) * 10.0 ** rng.integers(-30, 30, size=size)).astype(np.float32)
            for _ in range(world_size)
        ]
        for size in sizes
    ]


def reduce_all(scenario: Scenario, data: list[list[Vector]]) -> tuple[Simulation, list[list[bytes]]]:
    """Run a job over all buckets, every second one a mean, and a barrier; returns the results as [bucket][rank]."""
    simulation = Simulation(scenario)
    outs = [[np.full_like(vector, np.nan) for vector in ranks] for ranks in data]
    for rank in range(scenario.world_size):
        for number, ranks in enumerate(data):
            # Ranks submit at different times.
            time = 1e-3 * number + 1e-4 * ((7 * number + 3 * rank) % 10)
            simulation.submit(rank, Reduction(ranks[rank], outs[number][rank], mean=bool(number % 2)), time)
        simulation.submit(rank, Barrier(), 1e-3 * len(data))
    finish(simulation)
    return simulation, [[out.tobytes() for out in ranks] for ranks in outs]


def expect(data: list[list[Vector]], results: list[list[bytes]]) -> None:
    for number, ranks in enumerate(data):
        expected = direct(ranks, mean=bool(number % 2)).tobytes()
        for rank, result in enumerate(results[number]):
            assert result == expected, f"bucket {number}, rank {rank}"


@pytest.mark.parametrize(("profile", "sizes"), [("w5", SIZES), ("w34", LARGE)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_sums_are_right(profile: str, sizes: tuple[int, ...], world_size: int) -> None:
    data = vectors(world_size, sizes, seed=world_size)
    simulation, results = reduce_all(Scenario(world_size, profile=profile), data)
    expect(data, results)
    for core in simulation.cores:
        assert core.completed == len(sizes) + 1
        counters = core.counters
        assert counters.results + counters.duplicates + counters.stale == counters.frames_received
        assert counters.integrity == counters.malformed == counters.foreign == 0


@pytest.mark.parametrize(("profile", "sizes"), [("w5", SIZES), ("w34", LARGE)])
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_a_bad_network_changes_no_bit(profile: str, sizes: tuple[int, ...], world_size: int) -> None:
    """Loss, copies and reordering both ways; damage on the way down, where a worker can ask again."""
    data = vectors(world_size, sizes, seed=world_size)
    faults = {"loss": 0.03, "duplicate": 0.05, "reorder": 0.1}
    clean = reduce_all(Scenario(world_size, profile=profile), data)[1]
    scenario = Scenario(
        world_size, profile=profile, up=Faults(**faults), down=Faults(**faults, corrupt=0.02), seed=world_size + 20
    )
    simulation, results = reduce_all(scenario, data)
    assert results == clean
    expect(data, results)
    up, down = simulation.counters(simulation.up), simulation.counters(simulation.down)
    for link in (up, down):
        assert min(link.lost, link.duplicated, link.delayed, link.overtaken) > 0
    assert down.corrupted > 0
    damaged = sum(
        core.counters.integrity + core.counters.malformed + core.counters.foreign for core in simulation.cores
    )
    assert damaged > 0
    assert sum(core.counters.retransmissions for core in simulation.cores) > 0


def test_an_awful_network_is_survived() -> None:
    data = vectors(2, (5000, 300, 1, 0, 2000), seed=5)
    faults = Faults(loss=0.3, duplicate=0.3, reorder=0.5, late=0.02)
    simulation, results = reduce_all(Scenario(2, up=faults, down=faults, or_slots=2, add_slots=4, seed=3), data)
    expect(data, results)
    assert simulation.counters(simulation.up).lost > 20


def test_the_same_seed_gives_the_same_run() -> None:
    data = vectors(3, SIZES, seed=1)
    faults = Faults(loss=0.05, duplicate=0.05, reorder=0.1)
    runs = [reduce_all(Scenario(3, up=faults, down=faults, seed=9), data)[0] for _ in range(2)]
    assert [core.counters for core in runs[0].cores] == [core.counters for core in runs[1].cores]
    assert runs[0].clock.now == runs[1].clock.now


@pytest.mark.parametrize("slots", [(1, 1), (1, 7), (3, 2)])
def test_every_window_works(slots: tuple[int, int]) -> None:
    data = vectors(3, SIZES, seed=2)
    faults = Faults(loss=0.02, duplicate=0.05, reorder=0.1)
    scenario = Scenario(3, or_slots=slots[0], add_slots=slots[1], up=faults, down=faults, batch=3, seed=4)
    expect(data, reduce_all(scenario, data)[1])


def test_jobs_next_to_each_other_in_the_pool_and_numbers_that_wrap() -> None:
    data = vectors(2, SIZES, seed=3)
    faults = Faults(loss=0.02, duplicate=0.1, reorder=0.1)
    scenario = Scenario(
        2,
        or_slots=3,
        add_slots=3,
        up=faults,
        down=faults,
        pool_base=1000,
        first_chunk=3 * ((1 << 32) - 3) + 1,
        first_bucket=(1 << 24) - 5,
    )
    expect(data, reduce_all(scenario, data)[1])


def test_blocks_of_other_sizes() -> None:
    for block in (32, 100, 4096):
        data = vectors(2, (1000, 5000), seed=block)
        simulation = Simulation(Scenario(2, block=block))
        outs = [[np.empty_like(vector) for vector in ranks] for ranks in data]
        for number, ranks in enumerate(data):
            for rank in range(2):
                simulation.submit(rank, Reduction(ranks[rank], outs[number][rank]))
        finish(simulation)
        for number, ranks in enumerate(data):
            expected = direct(ranks, block=block).tobytes()
            assert [out.tobytes() for out in outs[number]] == [expected] * 2


def test_not_finite_numbers_survive_a_bad_network() -> None:
    data = vectors(2, (2000,), seed=7)
    data[0][0][700], data[0][1][1500] = np.inf, np.nan
    faults = Faults(loss=0.1, duplicate=0.1, reorder=0.2)
    _, results = reduce_all(Scenario(2, up=faults, down=faults, seed=1), data)
    expect(data, results)
    assert np.isnan(np.frombuffer(results[0][0], np.float32)).sum() == 256 + 256


def test_damage_on_the_way_up_ends_the_epoch_or_changes_no_bit() -> None:
    """A spoiled contribution is in the stored sum: nobody may take it, and asking again does not help."""
    outcomes: dict[str, int] = {}
    damaged = 0
    data = vectors(2, (20_000,), seed=8)
    clean = reduce_all(Scenario(2), data)[1]
    for seed in range(12):
        simulation = Simulation(
            Scenario(2, up=Faults(corrupt=0.015), seed=seed, policy=RetransmissionPolicy(deadline=1.0))
        )
        outs = [np.empty_like(vector) for vector in data[0]]
        buckets = [Reduction(data[0][rank], outs[rank]) for rank in range(2)]
        for rank in range(2):
            simulation.submit(rank, buckets[rank])
        try:
            finish(simulation, limit=5.0)
            outcome = "clean"
        except StalledError:
            outcome = "stalled"
            assert any(isinstance(event, Stalled) for node in simulation.nodes for _, event in node.events)
        except JobError as error:
            outcome = type(error).__name__
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        damaged += simulation.counters(simulation.up).corrupted
        for rank in range(2):
            if simulation.completed(rank):
                assert outs[rank].tobytes() == clean[0][rank]
    assert damaged > 10
    assert outcomes.pop("IntegrityError") > 0
    assert set(outcomes) <= {"clean", "stalled", "MismatchError"}


def test_a_missing_peer_is_reported_and_may_come_late() -> None:
    simulation = Simulation(Scenario(3, policy=RetransmissionPolicy(deadline=5.0)))
    data = vectors(3, (3000,), seed=1)[0]
    outs = [np.empty_like(vector) for vector in data]
    simulation.submit(0, Reduction(data[0], outs[0]))
    simulation.submit(2, Reduction(data[2], outs[2]))
    with pytest.raises(StalledError) as caught:
        simulation.run(limit=12.0)
    assert caught.value.ranks == (0, 2)
    for rank in (0, 2):
        stalls = [(time, event) for time, event in simulation.nodes[rank].events if isinstance(event, Stalled)]
        assert [round(time) for time, _ in stalls] == [5, 10]
        assert {event.bucket for _, event in stalls} == {0}
        assert simulation.cores[rank].counters.resent_timeout < 40, "waiting costs little"
    simulation.submit(1, Reduction(data[1], outs[1]))
    finish(simulation)
    assert {out.tobytes() for out in outs} == {direct(data).tobytes()}


def test_a_rank_that_dies_leaves_the_others_stalled_not_wrong() -> None:
    simulation = Simulation(Scenario(2, policy=RetransmissionPolicy(deadline=1.0)))
    data = vectors(2, (20_000,), seed=1)[0]
    outs = [np.empty_like(vector) for vector in data]
    for rank in range(2):
        simulation.submit(rank, Reduction(data[rank], outs[rank]))
    while simulation.cores[1].counters.results < 20:
        simulation.clock.step()
    simulation.nodes[1].running = False
    with pytest.raises(StalledError) as caught:
        simulation.run(limit=3.0)
    assert caught.value.ranks == (0,)
    assert simulation.completed(0) == []


def test_a_pause_of_one_rank_costs_few_frames() -> None:
    """Waiting for a slow rank is not loss: the others send a few probes, not their windows."""
    simulation = Simulation(Scenario(2, profile="w34", add_slots=64))
    data = vectors(2, (300_000,), seed=1)[0]
    outs = [np.empty_like(vector) for vector in data]
    simulation.submit(0, Reduction(data[0], outs[0]), 0.0)
    simulation.submit(1, Reduction(data[1], outs[1]), 0.3)
    finish(simulation)
    assert simulation.cores[0].counters.retransmissions <= 20
    assert outs[0].tobytes() == outs[1].tobytes() == direct(data).tobytes()


def test_little_loss_costs_little_time() -> None:
    """Virtual time of a stream at 1 Gb/s. Generous bounds: benches measure, tests only find what is badly wrong."""
    times = []
    data = vectors(2, (400_000,), seed=1)[0]
    for loss in (0.0, 0.01):
        faults = Faults(loss=loss)
        scenario = Scenario(2, profile="w34", add_slots=32, up=faults, down=faults, rate=1e9, seed=2)
        simulation = Simulation(scenario)
        outs = [np.empty_like(vector) for vector in data]
        for rank in range(2):
            simulation.submit(rank, Reduction(data[rank], outs[rank]))
        finish(simulation)
        times.append(simulation.clock.now)
        if loss == 0.0:
            # The window takes 2.2 ms on the link, the first samples say 0.3 ms: no reason to send anything twice.
            assert [core.counters.retransmissions for core in simulation.cores] == [0, 0]
    assert simulation.counters(simulation.up).lost > 0
    assert 0.0128 < times[0] < 0.015, "1.6 MB and headers at line rate, and a round trip or two"
    assert times[1] < 2.5 * times[0]
