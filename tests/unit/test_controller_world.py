# SPDX-License-Identifier: Apache-2.0
"""Ranks, a switch and a controller under random faults: once these stop, every job is back, or has failed by name."""

from __future__ import annotations

from collections import Counter

import pytest
from helpers.job_world import STEP, World
from helpers.jobs import LEASE

from p4reduce_controller.model import LeaveDone, Reason, WorkerState
from p4reduce_controller.states import State

FAULTS = [
    "controller",
    "controller",
    "switch",
    "session",
    "dark",
    "drain",
    "mode",
    "lost",
    "damage",
    "freeze",
    "stop",
    "kill",
]
DEADLY = ("stop", "kill")
"""Faults that no job survives."""


class Storm:
    """Random faults, one every few seconds, each undone after a while."""

    def __init__(self, world: World, deadly: bool) -> None:
        self.world = world
        self.rng = world.rng
        self.deadly = deadly
        self.undo: list[tuple[float, str]] = []
        self.fired: Counter[str] = Counter()
        self.hit: set[tuple[str, int]] = set()
        self.next = 2.0

    def step(self) -> None:
        for item in [item for item in self.undo if item[0] <= self.world.now]:
            self.undo.remove(item)
            getattr(self, f"end_{item[1]}")()
        if self.world.now < self.next:
            return
        self.next = self.world.now + self.rng.uniform(0.3, 6.0)
        fault = self.rng.choice(FAULTS if self.deadly and self.rng.random() < 0.2 else FAULTS[: -len(DEADLY)])
        if any(name == fault for _, name in self.undo):
            return
        if getattr(self, f"do_{fault}")():
            self.fired[fault] += 1
            self.world.events.append(f"{self.world.now:g} {fault}")
            self.undo.append((self.world.now + self.rng.uniform(0.1, 4.0), fault))

    def calm(self) -> None:
        for _, name in self.undo:
            getattr(self, f"end_{name}")()
        self.undo.clear()
        self.world.lossy = False

    def nothing(self) -> None:
        """It does not need to be undone, or cannot be."""

    def do_controller(self) -> bool:
        self.world.kill_controller()
        return True

    def end_controller(self) -> None:
        if not self.world.controller:
            self.world.start_controller()

    def do_switch(self) -> bool:
        self.world.kill_switch()
        return True

    def end_switch(self) -> None:
        self.world.up = True
        self.world.session_at = self.world.now + 0.3

    def do_session(self) -> bool:
        self.world.lose_session("connection lost")
        return True

    end_session = nothing

    def do_dark(self) -> bool:
        self.world.dark = True
        return True

    def end_dark(self) -> None:
        self.world.dark = False

    def do_drain(self) -> bool:
        if self.world.controller:
            self.world.rig.note(self.world.rig.jobs.drain(self.world.now))
        return self.world.controller

    def end_drain(self) -> None:
        if self.world.controller:
            self.world.rig.note(self.world.rig.jobs.undrain(self.world.now))

    def do_mode(self) -> bool:
        record = self.world.record("a")
        if not self.world.controller or record is None or not record.live or record.state is State.LEAVING:
            return False
        self.world.rig.note(self.world.rig.jobs.set_mode("a", "off", self.world.now))
        return True

    def end_mode(self) -> None:
        record = self.world.record("a")
        if not self.world.controller:
            self.undo.append((self.world.now + 1.0, "mode"))
        elif record is not None and record.live and record.state is not State.LEAVING:
            self.world.rig.note(self.world.rig.jobs.set_mode("a", "auto", self.world.now))

    def do_lost(self) -> bool:
        held = sorted(self.world.holds)
        if not held or not self.world.session:
            return False
        epoch = self.rng.choice(held)
        del self.world.holds[epoch]
        self.world.rig.note(self.world.rig.jobs.entries_lost({epoch}, self.world.now))
        return True

    end_lost = nothing

    def do_damage(self) -> bool:
        return self.world.damage(self.rng.choice(list(self.world.ranks.values())))

    end_damage = nothing

    def do_freeze(self) -> bool:
        """A moment that is no death."""
        rank = self.rng.choice(list(self.world.ranks.values()))
        if rank.active:
            self.world.freeze(rank, self.rng.uniform(0.5, 5.0))
        return rank.frozen

    end_freeze = nothing

    def do_stop(self) -> bool:
        rank = self.rng.choice(list(self.world.ranks.values()))
        if rank.active:
            self.hit.add((rank.job, rank.rank))
            self.world.freeze(rank, 1e9)
        return rank.frozen

    end_stop = nothing

    def do_kill(self) -> bool:
        rank = self.rng.choice(list(self.world.ranks.values()))
        if rank.active:
            self.hit.add((rank.job, rank.rank))
            self.world.kill(rank)
        return not rank.alive

    end_kill = nothing


def run(seed: int, deadly: bool, seconds: float = 40.0) -> tuple[World, Storm]:
    """Storm, then calm; the jobs that live end on the switch path with all buckets summed."""
    jobs = {
        "a": {"world": 3, "ring": True},
        "b": {"world": 2, "ring": True},
        "c": {"world": 2, "ring": True},
        "d": {"world": 1, "ring": True},
    }
    world = World(seed, jobs)
    storm = Storm(world, deadly)
    for _ in range(int(seconds / STEP)):
        storm.step()
        world.step()
    storm.calm()
    # The longest delay of a promotion, two trials that fail, and what is left of leases.
    for _ in range(int(100 / STEP)):
        world.step()
    return world, storm


def finish(world: World) -> None:
    """The ranks stop handing in, all that they have is summed, they leave, and nothing is left."""
    alive = [rank for rank in world.ranks.values() if rank.active]
    for job in {rank.job for rank in alive}:
        most = max(rank.submitted for rank in world.of(job))
        for rank in world.of(job):
            rank.target = most
    for _ in range(int(20 / STEP)):
        world.step()
    for rank in alive:
        assert rank.completed == rank.submitted == rank.target, (rank.job, rank.rank)
        world.leave(rank)
    for _ in range(int(20 / STEP)):
        world.step()
    assert all(rank.left for rank in alive)
    assert all(isinstance(world.rig.answer(rank.leaving), LeaveDone) for rank in alive if rank.leaving)
    assert world.rig.all_free()
    assert world.holds == {}
    assert all(record.state is State.FAILED for record in world.rig.jobs.jobs())
    assert world.rig.jobs._endings == {}


@pytest.mark.parametrize("seed", range(8))
def test_without_deaths_every_job_survives_and_comes_back(seed: int) -> None:
    world, storm = run(seed, deadly=False)
    for job in "abcd":
        record = world.record(job)
        assert record is not None
        assert record.state is State.SWITCH, (job, record.state, record.reason, record.path_reason, world.events)
        assert all(rank.fence is None for rank in world.of(job))
    assert sum(storm.fired.values()) > 4
    finish(world)


@pytest.mark.parametrize("seed", range(100, 108))
def test_with_deaths_the_others_survive_and_the_dead_are_named(seed: int) -> None:
    world, storm = run(seed, deadly=True)
    for job in "abcd":
        hit = {rank for name, rank in storm.hit if name == job}
        record = world.record(job)
        if not hit:
            assert record is not None
            assert record.state is State.SWITCH, (job, record.reason, world.events)
            continue
        assert record is None or record.state is State.FAILED, (job, record.state)
        if record is not None and record.run is not None:  # a restored one knows how it ended, but not its ranks
            assert {r for r, w in record.run.workers.items() if w.state is WorkerState.LOST} <= hit
        for rank in world.of(job):
            if rank.rank not in hit:
                assert rank.fence is not None, "a survivor was not told"
                assert rank.fence.reason is Reason.WORKER_LOST
                assert set(rank.fence.ranks) <= hit
                assert rank.fence.ranks
    finish(world)


def test_the_storms_have_blown() -> None:
    """Faults of every kind have met jobs, cuts and promotions were many, and results were compared."""
    fired: Counter[str] = Counter()
    fallbacks: Counter[str] = Counter()
    promotions = compared = troubles = 0
    for seed in (3, 103):
        world, storm = run(seed, deadly=seed > 100)
        fired += storm.fired
        compared += world.compared
        troubles += world.troubles
        for record in world.rig.jobs.jobs():
            fallbacks += record.fallbacks
            promotions += record.promotions
    assert set(fired) >= set(FAULTS) - set(DEADLY)
    assert fallbacks["silent"]
    assert fallbacks["switch_lost"]
    assert fallbacks["drained"]
    assert fallbacks["refused"] + fallbacks["integrity"]
    assert promotions > 8
    assert compared
    assert troubles
    assert LEASE > 5.0, "a freeze is no death"
