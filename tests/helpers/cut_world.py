# SPDX-License-Identifier: Apache-2.0
"""The whole system in virtual time, without threads and sockets, and storms of everything that may go wrong.

Real: the controller's Jobs with its records and messages, every rank's Membership, Driver, Path and WorkerCore, and
the switch (the reference switch, or the engine with the compiled program). Modelled: links (sim.network), progress
streams, the session with the switch, the ring's steps (cut_ring.py), the coordinator's shell (cut_control.py), and the
driver's and progress stream's threads (cut_rank.py). A seed stands for everything.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from helpers import mixed_buckets
from helpers.cut_control import POLICY, Control
from helpers.cut_rank import CutRank, expected
from helpers.cut_ring import RingModel
from p4reduce import wire
from p4reduce.core.bucket import Bucket
from p4reduce.quantize import LaneFormat
from p4reduce.sim.clock import VirtualClock
from p4reduce.sim.network import Datagram, Faults, Link
from p4reduce.sim.runner import FIRST_IP, FIRST_UDP_PORT
from p4reduce.sim.switch import Member, Membership, ReferenceSwitch, SwitchModel
from p4reduce.wire import Op
from p4reduce_controller.entries import Epoch
from p4reduce_controller.states import State

__all__ = ["POLICY", "CutJob", "CutWorld", "Fabric"]

SIZES = (0, 1, 64, 65, 320, 321, 1000, 2000)
SLOTS = 64


class Fabric:
    """The switch and what may happen to it."""

    def __init__(self, world: CutWorld, make: Callable[[], SwitchModel]) -> None:
        self.world = world
        self.up = True
        self.dark = False
        self.bad_port = 0
        """What comes in there is damaged: contributions to a sum only."""
        self.deaf_port = 0
        """Sums are lost on their way there."""
        self.spoil: Callable[[int, bytes], bytes] | None = None
        """Changes what goes to a port."""
        self.holds: dict[int, Epoch] = {}
        self._make = make
        self._model = make()

    def admit(self, plan: Epoch) -> None:
        lease = plan.lease
        for other in self.holds.values():
            ours, theirs = range(lease.pool_base, lease.pool_base + lease.pool_size), other.lease.pool_base
            if theirs in ours or lease.pool_base in range(theirs, theirs + other.lease.pool_size):
                self.world.blame(f"epochs {plan.number} and {other.number} share slots")
            if lease.group == other.lease.group or set(lease.rids) & set(other.lease.rids):
                self.world.blame(f"epochs {plan.number} and {other.number} share groups or replicas")
        self.revoke(plan.number)
        members = tuple(Member(one.rank, one.port, one.ip, one.udp_port) for one in plan.places)
        self._model.admit(Membership(plan.number, members, lease.pool_base, lease.pool_size, lease.group, lease.stats))
        self.holds[plan.number] = plan

    def revoke(self, epoch: int) -> None:
        if self.holds.pop(epoch, None) is not None:
            self._model.revoke(epoch)

    def die(self) -> None:
        """It goes, with all it held and knew."""
        self.up = False
        self.holds.clear()
        self._model = self._make()

    def process(self, port: int, datagram: Datagram) -> None:
        if not self.up or self.dark:
            self.world.seen["swallowed"] += 1
            return
        data = datagram.data
        if port == self.bad_port and len(data) > 40 and data[2] == Op.ADD:
            self.world.seen["damaged"] += 1
            place = 32 + (data[40] + 7 * port) % (len(data) - 32)
            datagram = datagram._replace(data=data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        for to, answer in self._model.process(port, datagram):
            if to == self.deaf_port and len(answer.data) > 40 and answer.data[2] == Op.ADD:
                self.world.seen["unheard"] += 1
                continue
            if self.spoil is not None:
                answer = answer._replace(data=self.spoil(to, answer.data))
            self.world.down[to].send(answer)


class CutJob:
    """A job: the same buckets at all ranks."""

    def __init__(
        self,
        world: CutWorld,
        name: str,
        size: int,
        first_port: int,
        count: int,
        content: list[list[Bucket]] | None = None,
    ) -> None:
        self.world, self.name, self.size = world, name, size
        draw = world.fork(f"job {name}")
        self.draw = draw
        self.want = draw.choice((2, 4, 9, 16, 24))
        self.slowness = 1.0
        self.orders: dict[int, bytes] = {}
        self.ring = RingModel(world.clock, size, world.fork(f"ring {name}"), world.blame)
        fmt = LaneFormat(32, size, 256)
        kinds = draw.choice((("default", "barrier"), ("default", "32"), mixed_buckets.KINDS, mixed_buckets.KINDS))
        self.buckets: list[list[Bucket]] = content or [
            mixed_buckets.make(draw, size, draw.choice(kinds), draw.choice(SIZES)) for _ in range(count)
        ]
        self.expected = [expected(ranks, fmt) for ranks in self.buckets]
        self.largest_chunks = 2 * max(SIZES) // world.profile.lanes(32) + 2
        self.released = count
        """Buckets that may be submitted by now."""
        self.ranks = []
        for rank in range(size):
            port = first_port + rank
            self.ranks.append(CutRank(self, rank, Member(rank, port, FIRST_IP + port, FIRST_UDP_PORT + port)))


class CutWorld:
    """Jobs, a controller, a switch and a network."""

    def __init__(
        self,
        seed: int,
        sizes: tuple[int, ...],
        *,
        buckets: int,
        faults: Faults,
        make: Callable[[], SwitchModel] | None = None,
        pool_slots: int = 16,
        profile: str = "w5",
        content: list[list[Bucket]] | None = None,
    ) -> None:
        """`content`: what a single job submits, instead of what the seed draws."""
        self.seed = seed
        self.clock = VirtualClock()
        self.profile = wire.PROFILES[profile]
        self.seen: Counter[str] = Counter()
        self.fences: list[str] = []
        self.events: list[str] = []
        self.wrong: list[str] = []
        self.casualties: list[str] = []
        self.fabric = Fabric(self, make or (lambda: ReferenceSwitch(self.profile)))
        self.control = Control(self, pool_slots, SLOTS)
        self.jobs: list[CutJob] = []
        self.up: dict[int, Link] = {}
        self.down: dict[int, Link] = {}
        port = 1
        for number, size in enumerate(sizes):
            self.jobs.append(CutJob(self, "ab"[number], size, port, buckets, content))
            port += size
        for rank in self.ranks:
            self._cable(rank, faults)
        self.control.start()
        for rank in self.ranks:
            self.clock.at(self.fork(f"start {rank}").random() * 0.3, rank.ask)

    def fork(self, name: str) -> random.Random:
        return random.Random(f"{self.seed} {name}")

    @property
    def now(self) -> float:
        return self.clock.now

    @property
    def ranks(self) -> list[CutRank]:
        return [rank for job in self.jobs for rank in job.ranks]

    def blame(self, text: str) -> None:
        """Something is wrong that must never be."""
        self.wrong.append(f"{self.now:.4f} {text}")

    def failed(self, rank: CutRank) -> None:
        """A rank has given up."""
        self.casualties.append(f"{self.now:.4f} {rank}: {rank.errors[-1]}")

    def note(self, text: str) -> None:
        self.events.append(f"{self.now:.3f} {text}")

    def _cable(self, rank: CutRank, faults: Faults) -> None:
        port = rank.member.port
        # Damage on the way up could raise an exponent for all ranks alike: coarser, and nobody's fault.
        upwards = Faults(faults.loss, faults.duplicate, faults.reorder, late=faults.late)
        self.up[port] = Link(
            self.clock,
            lambda datagram: self.fabric.process(port, datagram),
            seed=f"{self.seed}/up{port}",
            faults=upwards,
        )
        self.down[port] = Link(self.clock, rank.deliver, seed=f"{self.seed}/down{port}", faults=faults)

    # ---- running it -------------------------------------------------------------------------------------------------

    def run_until(self, condition: Callable[[], bool], limit: float) -> bool:
        """Whether it became true within so many virtual seconds, and nothing wrong was seen before."""
        end, looked = self.now + limit, -1.0
        while not self.wrong:
            if self.now >= looked:
                if condition():
                    return True
                looked = self.now + 0.02
            if self.now > end or not self.clock.step():
                break
        return False

    def settled(self) -> bool:
        """Whether every job is on the switch again, with all ranks, and keeps nothing of the past."""
        for job in self.jobs:
            record = self.control.record(job.name)
            if record is None or record.state is not State.SWITCH:
                return False
            for rank in job.ranks:
                path = rank.driver.path if rank.driver is not None else None
                if path is None or not path.on_switch or path.present != record.run.present:
                    return False
                if path._kept or path._held or (rank.port is not None and rank.port.pending):
                    return False
        return True

    def over(self) -> bool:
        """Whether every rank has gone."""
        return all(rank.left or rank.dead for rank in self.ranks)

    def summary(self) -> dict[str, Any]:
        """For people."""
        return {
            "seed": self.seed,
            "now": round(self.now, 3),
            "wrong": self.wrong[:5],
            "casualties": self.casualties[:6],
        }
