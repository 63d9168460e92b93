# SPDX-License-Identifier: Apache-2.0
"""Runs the cores of a job against a switch over a faulty network, in virtual time.

The same job runs on the reference switch and, through adapter.py, on a switch that executes the compiled program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from p4reduce.constants import UDP_PORT
from p4reduce.core.batch import ReceiveBatch, SendBatch
from p4reduce.core.bucket import Bucket
from p4reduce.core.config import CoreConfig, RetransmissionPolicy
from p4reduce.core.events import Completed, Event, Failed
from p4reduce.core.worker import WorkerCore
from p4reduce.errors import ConfigError, StalledError
from p4reduce.sim.clock import VirtualClock
from p4reduce.sim.network import Datagram, Faults, Link, LinkCounters
from p4reduce.sim.switch import Member, Membership, ReferenceSwitch, SwitchModel
from p4reduce.wire import profile as lookup_profile

SWITCH_IP = 0x0A0000FE
FIRST_IP = 0x0A000001
FIRST_UDP_PORT = 40000
GROUP = 16
STATS = 1


@dataclass(frozen=True, slots=True)
class Scenario:
    """A job and the network it runs on. Times in seconds, `rate` in bits per second (0: unlimited).

    `batch`: frames a worker takes or sends at once. `poll`: how long after a datagram a worker looks at its socket.
    """

    world_size: int
    profile: str = "w5"
    or_slots: int = 4
    add_slots: int = 8
    policy: RetransmissionPolicy = field(default_factory=RetransmissionPolicy)
    up: Faults = field(default_factory=Faults)
    down: Faults = field(default_factory=Faults)
    delay: float = 20e-6
    rate: float = 0.0
    poll: float = 10e-6
    batch: int = 16
    seed: int = 0
    epoch: int = 7
    pool_base: int = 0
    block: int = 256
    first_bucket: int = 0
    first_chunk: int = 0
    group: int = GROUP
    stats: int = STATS


def core_config(scenario: Scenario, rank: int) -> CoreConfig:
    """Configuration of one rank's core."""
    if scenario.batch < 1:
        raise ConfigError(f"a batch holds at least one frame, not {scenario.batch}")
    return CoreConfig(
        job="sim",
        epoch=scenario.epoch,
        rank=rank,
        world_size=scenario.world_size,
        profile=lookup_profile(scenario.profile),
        or_slots=scenario.or_slots,
        add_slots=scenario.add_slots,
        policy=scenario.policy,
        block=scenario.block,
        first_bucket=scenario.first_bucket,
        first_chunk=scenario.first_chunk,
    )


def membership(scenario: Scenario) -> Membership:
    """What the switch is told of the job: rank r sits on port r + 1."""
    members = tuple(
        Member(rank, rank + 1, FIRST_IP + rank, FIRST_UDP_PORT + rank) for rank in range(scenario.world_size)
    )
    slots = scenario.or_slots + scenario.add_slots
    return Membership(scenario.epoch, members, scenario.pool_base, slots, scenario.group, scenario.stats)


class Node:
    """A worker: its core, its socket's queue, its timer."""

    def __init__(self, core: WorkerCore, batch: int, clock: VirtualClock, send: Callable[[bytes], None]) -> None:
        self.core = core
        self.running = True
        """Unset it to let the worker die: it takes nothing and sends nothing any more."""
        self.expected = 0
        """Buckets that it has been or will be given."""
        self.events: list[tuple[float, Event]] = []
        self._clock = clock
        self._send = send
        self._inbox: list[bytes] = []
        self._received = ReceiveBatch(core.config.profile, batch)
        self._to_send = SendBatch(batch)
        self._wake = math.inf

    def deliver(self, data: bytes, poll: float) -> None:
        """A datagram has come; it is looked at `poll` seconds later, with all others that come till then."""
        self._inbox.append(data)
        self.wake_at(self._clock.now + poll)

    def wake_at(self, time: float) -> None:
        """Run at `time` unless an earlier wake-up is booked, which books the next itself."""
        if time < self._wake:
            self._wake = time
            self._clock.at(time, lambda: self._run(time))

    def _run(self, booked: float) -> None:
        if booked != self._wake or not self.running:
            return
        self._wake = math.inf
        self.work()

    def work(self) -> None:
        """One round of a driver's loop: receive, transmit until nothing is left, take events, set the timer."""
        now, core = self._clock.now, self.core
        while self._inbox:
            self._received.clear()
            taken, self._inbox = self._inbox[: self._received.capacity], self._inbox[self._received.capacity :]
            for data in taken:
                self._received.append(data)
            core.receive(self._received, now)
            self._transmit(now)
        self._transmit(now)
        deadline = core.next_deadline()
        if deadline is not None:
            # A deadline that has passed would be run for ever in virtual time.
            self.wake_at(max(deadline, math.nextafter(now, math.inf)))

    def _transmit(self, now: float) -> None:
        while True:
            self.core.transmit(self._to_send, now)
            if self._to_send.count == 0:
                break
            for data in self._to_send.frames():
                self._send(data)
        self.events += [(now, event) for event in self.core.events()]


class Simulation:
    """`world_size` workers around one switch. Everything is drawn from the scenario's seed: runs repeat exactly."""

    def __init__(self, scenario: Scenario, switch: SwitchModel | None = None) -> None:
        self.scenario = scenario
        self.clock = VirtualClock()
        profile = lookup_profile(scenario.profile)
        self.switch: SwitchModel = switch if switch is not None else ReferenceSwitch(profile)
        self.tap: Callable[[float, int, bool, Datagram], None] | None = None
        """Called with (time, rank, upwards, datagram) for every datagram that a worker sends or gets."""
        self.membership = membership(scenario)
        members = self.membership.members
        self.switch.admit(self.membership)
        self.up = [self._link(f"up{rank}", scenario.up, self._at_switch(rank)) for rank in range(len(members))]
        self.down = [self._link(f"down{rank}", scenario.down, self._at_worker(rank)) for rank in range(len(members))]
        self.nodes = [
            Node(
                WorkerCore(core_config(scenario, rank), self.clock.now),
                scenario.batch,
                self.clock,
                self._sender(members[rank]),
            )
            for rank in range(len(members))
        ]

    @property
    def cores(self) -> list[WorkerCore]:
        """The workers' cores, by rank."""
        return [node.core for node in self.nodes]

    def counters(self, links: Sequence[Link]) -> LinkCounters:
        """Sum over links, as self.up and self.down."""
        return sum((link.counters for link in links), LinkCounters())

    def submit(self, rank: int, bucket: Bucket, time: float | None = None) -> None:
        """Give a bucket to a rank's core, now or at a time to come; a core that has failed by then gets it no more."""
        node = self.nodes[rank]
        node.expected += 1

        def give() -> None:
            if node.core.error is None:
                node.core.submit(bucket, self.clock.now)
                node.wake_at(self.clock.now)

        self.clock.at(self.clock.now if time is None else time, give)

    def run(self, limit: float = 60.0) -> None:
        """Run until every running core has completed all buckets that it was or will be given, or has failed.

        Raises StalledError when that takes longer than `limit` seconds of virtual time.
        """
        end = self.clock.now + limit
        while not self.idle():
            time = self.clock.next_time
            if time is None or time > end:
                waiting = tuple(rank for rank, node in enumerate(self.nodes) if not self._at_rest(node))
                raise StalledError(f"ranks {waiting} are not done after {limit} s", ranks=waiting)
            self.clock.step()

    def idle(self) -> bool:
        """Whether nothing is left to do at any running rank."""
        return all(self._at_rest(node) for node in self.nodes)

    def drain(self, limit: float = 60.0) -> None:
        """Run until no call is booked: late copies arrive, too."""
        end = self.clock.now + limit
        while self.clock.next_time is not None and self.clock.next_time <= end:
            self.clock.step()

    def completed(self, rank: int) -> list[Bucket]:
        """Buckets of a rank in the order of completion."""
        return [event.bucket for _, event in self.nodes[rank].events if isinstance(event, Completed)]

    def failure(self, rank: int) -> Failed | None:
        """How a rank failed, if it did."""
        return next((event for _, event in self.nodes[rank].events if isinstance(event, Failed)), None)

    def _at_rest(self, node: Node) -> bool:
        core = node.core
        return not node.running or core.error is not None or core.completed == node.expected

    def _link(self, name: str, faults: Faults, deliver: Callable[[Datagram], None]) -> Link:
        s = self.scenario
        return Link(self.clock, deliver, seed=f"{s.seed}/{name}", faults=faults, delay=s.delay, rate=s.rate)

    def _sender(self, member: Member) -> Callable[[bytes], None]:
        def send(data: bytes) -> None:
            datagram = Datagram(member.ip, member.udp_port, SWITCH_IP, UDP_PORT, data)
            self._seen(member.rank, True, datagram)
            self.up[member.rank].send(datagram)

        return send

    def _at_switch(self, rank: int) -> Callable[[Datagram], None]:
        def arrive(datagram: Datagram) -> None:
            for port, answer in self.switch.process(rank + 1, datagram):
                self.down[port - 1].send(answer)

        return arrive

    def _at_worker(self, rank: int) -> Callable[[Datagram], None]:
        def arrive(datagram: Datagram) -> None:
            self._seen(rank, False, datagram)
            member = self.membership.members[rank]
            if (datagram.dst, datagram.dst_port) == (member.ip, member.udp_port):
                self.nodes[rank].deliver(datagram.data, self.scenario.poll)

        return arrive

    def _seen(self, rank: int, upwards: bool, datagram: Datagram) -> None:
        if self.tap is not None:
            self.tap(self.clock.now, rank, upwards, datagram)
