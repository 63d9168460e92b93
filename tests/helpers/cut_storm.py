# SPDX-License-Identifier: Apache-2.0
"""Storms over a CutWorld: everything that may go wrong, at random, then calm; and what must be true in the end."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from helpers.cut_control import LEASE_SECONDS
from helpers.cut_world import POLICY, CutJob, CutWorld
from p4reduce.sim.network import Faults
from p4reduce.sim.switch import SwitchModel
from p4reduce_controller import paths
from p4reduce_controller.model import Action
from p4reduce_controller.states import State

MILD = (
    "crash",
    "crash",
    "crash",
    "record",
    "record",
    "record",
    "both",
    "both",
    "switch",
    "session",
    "dark",
    "drain",
    "mode",
    "policy",
    "audit",
    "damage",
    "deaf",
    "deaf",
    "freeze",
    "slow",
    "ring",
)
"""What no job dies of."""
DEADLY = ("kill", "stream", "evict", "sleep")
POLICIES = (
    {"window": 2},
    {"window": 3},
    {"window": 8},
    {"window": 0},
    {"initial": 0.004, "minimum": 0.001, "maximum": 0.02, "early_resend": 0},
)
NETWORKS = (
    Faults(),
    Faults(loss=0.05, duplicate=0.05, reorder=0.2),
    Faults(loss=0.2, duplicate=0.1, reorder=0.3),
    Faults(loss=0.02, corrupt=0.05, reorder=0.1, late=0.01),
)


@contextmanager
def hurried() -> Iterator[None]:
    """Controllers that try the switch again soon."""
    before = paths.FIRST_DELAY, paths.MAX_DELAY
    paths.FIRST_DELAY, paths.MAX_DELAY = 0.2, 2.0
    try:
        yield
    finally:
        paths.FIRST_DELAY, paths.MAX_DELAY = before


class Storm:
    """One seed: a world, its storm, and its end."""

    def __init__(
        self,
        seed: int,
        *,
        make: Callable[[], SwitchModel] | None = None,
        buckets: int = 60,
        seconds: float = 8.0,
        only: tuple[str, ...] = (),
    ) -> None:
        """`only`: nothing but these faults."""
        self.draw = draw = random.Random(f"storm {seed}")
        self.faults = only or MILD
        self.deadly = draw.random() < 0.15 and not only
        self.early = draw.random() < 0.25
        """Ranks may leave in the middle of the storm."""
        sizes = draw.choice(((2,), (3,), (3,), (4,), (1,), (2, 2), (3, 2)))
        self.world = CutWorld(
            seed,
            sizes,
            buckets=buckets // len(sizes),
            faults=draw.choice(NETWORKS),
            make=make,
            pool_slots=draw.choice((4, 16, 32)),
        )
        self.seconds = seconds
        self.undo: list[Callable[[], None]] = []
        self.hit = False
        for job in self.world.jobs:
            self.pour(job)

    def pour(self, job: CutJob) -> None:
        """Let buckets be submitted in bursts, all through the storm; the last quarter waits for its end."""
        keep = 0 if self.early else len(job.buckets) // 4
        bursts = self.draw.choice((3, 8, 15))
        job.released = 0
        for number in range(bursts):
            count = (len(job.buckets) - keep) * (number + 1) // bursts
            at = self.seconds * self.draw.uniform(0.7, 1.0) * number / bursts
            self.world.clock.at(at, self.releasing(job, count))

    @staticmethod
    def releasing(job: CutJob, count: int) -> Callable[[], None]:
        def release() -> None:
            job.released = max(job.released, count)

        return release

    def run(self) -> CutWorld:
        """The whole story. What went wrong is in the world's `wrong`."""
        world = self.world
        world.clock.at(0.2 + self.draw.random(), self.strike)
        world.run_until(lambda: world.now > self.seconds, self.seconds + 1)
        self.calm()
        if not (self.early or self.hit or world.run_until(world.settled, 150.0) or world.wrong):
            states = [record.state.value for job in world.jobs if (record := world.control.record(job.name))]
            world.blame(f"not all jobs return to the switch: {states}, {world.casualties[:2]}")
        for job in world.jobs:
            job.released = len(job.buckets)
        if not world.run_until(world.over, 150.0) and not world.wrong:
            world.blame(f"not over: {[str(rank) for rank in world.ranks if not (rank.left or rank.dead)]}")
        if not world.run_until(world.control.idle, 90.0) and not world.wrong:
            world.blame(f"leases are left: {[view for view in world.control.jobs.pools() if view.job]}")
        world.run_until(lambda: not world.control.jobs._streams, 1.0)
        if world.control.jobs._streams:
            world.blame(f"streams are left: {world.control.jobs._streams}")
        self.judge()
        for rank in world.ranks:
            if rank.driver is not None:
                rank.stop()
        return world

    def judge(self) -> None:
        """Every bucket at every rank, unless somebody died."""
        world = self.world
        for text in [*world.casualties, *(error for rank in world.ranks for error in rank.errors)]:
            if "out of place" in text or "internal error" in text or "comes where" in text:
                world.blame(text)
        for job in world.jobs:
            for rank in job.ranks:
                if not rank.untouched():
                    world.blame(f"{rank}: arrays were written to after delivery")
                if len(rank.done) < len(job.buckets) and not self.hit:
                    world.blame(f"{rank}: {len(rank.done)} of {len(job.buckets)} buckets, {rank.errors[:2]}")
            if len({rank.port.place for rank in job.ranks if rank.port is not None}) > 1:
                world.seen["ring ended apart"] += 1
        world.seen["compared"] += sum(job.ring.compared for job in world.jobs)
        world.seen["from the ring"] += sum(len(job.ring.finished) for job in world.jobs)
        for rank in world.ranks:
            if rank.driver is not None:
                world.seen["promotions"] += rank.driver.path.promotions
                world.seen["fallbacks"] += sum(rank.driver.path.fallbacks.values())
                world.seen["retransmissions"] += int(rank.driver.path.counters()["retransmissions"])

    # ---- faults -----------------------------------------------------------------------------------------------------

    def strike(self) -> None:
        world = self.world
        if world.now > self.seconds or world.wrong:
            return
        deadly = self.deadly and all(rank.driver is not None for rank in world.ranks) and self.draw.random() < 0.1
        fault = self.draw.choice(DEADLY if deadly else self.faults)
        world.note(fault)
        world.seen[f"storm {fault}"] += 1
        undo = getattr(self, f"do_{fault}")()
        if undo is not None:
            self.undo.append(undo)
            world.clock.at(
                world.now + self.draw.choice((0.05, 0.3, 1.0)) * self.draw.uniform(0.5, 2.0), self.undoing(undo)
            )
        world.clock.at(world.now + self.draw.choice((0.02, 0.2, 0.8)) * self.draw.uniform(0.5, 1.5), self.strike)

    def undoing(self, undo: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            if undo in self.undo:
                self.undo.remove(undo)
                undo()

        return call

    def calm(self) -> None:
        """The storm is over."""
        while self.undo:
            self.undo.pop()()
        self.world.control.fuse = self.world.control.fuse_records = None
        control = self.world.control
        control.start()
        for rank in self.world.ranks:
            # The others of its job are gone; nobody joins alone.
            rank.dead = rank.dead or (self.hit and rank.driver is None)
        for job in self.world.jobs:
            record = control.record(job.name)
            if record is not None and record.live and record.mode != "auto":
                control.command(self.switching(job.name, "auto"))

    def switching(self, name: str, mode: str) -> Callable[[float], list[Action]]:
        return lambda now: cast(list[Action], self.world.control.jobs.set_mode(name, mode, now))

    def do_crash(self) -> Callable[[], None]:
        control = self.world.control
        if self.draw.random() < 0.3:
            control.crash()
        else:
            control.fuse = self.draw.randrange(8)
        return self.restart

    def do_record(self) -> Callable[[], None]:
        self.world.control.fuse_records = self.draw.randrange(3)
        return self.restart

    def do_both(self) -> Callable[[], None]:
        """The controller dies with an order on disk that not all have heard, and the next one finds an empty switch."""
        self.world.control.fuse_records = self.draw.randrange(3)

        def undo() -> None:
            self.world.fabric.die()
            self.world.fabric.up = True
            self.restart()

        return undo

    def restart(self) -> None:
        control = self.world.control
        control.crash()
        control.start()

    def do_switch(self) -> Callable[[], None]:
        self.world.fabric.die()
        self.world.control.lose_session("connection reset")
        return self.revive

    def revive(self) -> None:
        self.world.fabric.up = True

    def do_session(self) -> None:
        self.world.control.lose_session("connection lost")

    def do_dark(self) -> Callable[[], None]:
        self.world.fabric.dark = True
        return self.light

    def light(self) -> None:
        self.world.fabric.dark = False

    def do_drain(self) -> Callable[[], None]:
        self.world.control.set_drained(True)
        return self.undrain

    def undrain(self) -> None:
        if self.world.control.alive:
            self.world.control.set_drained(False)
        else:
            self.world.control.drained = False  # the next one finds it so

    def do_mode(self) -> Callable[[], None] | None:
        world = self.world
        name = self.draw.choice(world.jobs).name
        record = world.control.record(name)
        if record is None or not record.live or record.state is State.LEAVING:
            return None
        world.control.command(self.switching(name, "off"))

        def back() -> None:
            if world.control.alive:
                world.control.command(self.switching(name, "auto"))

        return back

    def do_policy(self) -> None:
        world = self.world
        name = self.draw.choice(world.jobs).name
        record = world.control.record(name)
        if record is not None and record.live:
            policy = dataclasses.replace(POLICY, **self.draw.choice(POLICIES))
            world.control.command(lambda now: world.control.jobs.set_policy(name, policy, now))

    def do_audit(self) -> None:
        world = self.world
        if world.fabric.holds and world.control.session:
            world.control.audit(self.draw.choice(sorted(world.fabric.holds)))

    def do_damage(self) -> Callable[[], None]:
        self.world.fabric.bad_port = self.draw.choice(self.world.ranks).member.port
        return self.mend

    def mend(self) -> None:
        self.world.fabric.bad_port = 0

    def do_deaf(self) -> Callable[[], None]:
        """One rank gets no sums any more: the others stand further than it does."""
        self.world.fabric.deaf_port = self.draw.choice(self.world.ranks).member.port
        return self.hear

    def hear(self) -> None:
        self.world.fabric.deaf_port = 0

    def do_freeze(self) -> None:
        rank = self.draw.choice(self.world.ranks)
        rank.frozen_until = self.world.now + self.draw.choice((0.05, 0.5, 2.0)) * self.draw.random()

    def do_slow(self) -> Callable[[], None]:
        rank = self.draw.choice(self.world.ranks)
        before, rank.pace = rank.pace, 0.3

        def back() -> None:
            rank.pace = before

        return back

    def do_ring(self) -> Callable[[], None]:
        ring = self.draw.choice(self.world.jobs).ring
        ring.slow = 20.0

        def back() -> None:
            ring.slow = 1.0

        return back

    def do_kill(self) -> None:
        self.hit = True
        self.draw.choice(self.world.ranks).kill()

    def do_sleep(self) -> None:
        """A process is stopped for longer than its lease."""
        self.hit = True
        self.draw.choice(self.world.ranks).frozen_until = self.world.now + 1.5 * LEASE_SECONDS

    def do_stream(self) -> None:
        """A rank's stream breaks, and the controller sees that."""
        rank = self.draw.choice(self.world.ranks)
        number = rank.progress.number
        if number is not None and self.world.control.alive:
            self.hit = True
            self.world.control.stream_ended(number)
            rank.progress.lost(number)

    def do_evict(self) -> None:
        world = self.world
        name = self.draw.choice(world.jobs).name
        if world.control.record(name) is not None:
            self.hit = True
            world.control.command(lambda now: world.control.jobs.evict(name, now))
