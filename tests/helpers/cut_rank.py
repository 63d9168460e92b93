# SPDX-License-Identifier: Apache-2.0
"""A worker process in virtual time: the real Membership, Driver, Path and WorkerCore, without thread and socket."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from helpers.cut_ring import Port
from helpers.mixed_buckets import Expected
from p4reduce.constants import UDP_PORT
from p4reduce.core.batch import ReceiveBatch, SendBatch
from p4reduce.core.bucket import Bucket, IntegerReduction, Reduction
from p4reduce.core.config import CoreConfig
from p4reduce.driver import Driver
from p4reduce.errors import ControllerError, P4ReduceError, UsageError
from p4reduce.membership import Membership, Seat, order_of, policy_of
from p4reduce.orders import RunRing, RunSwitch
from p4reduce.path import Path
from p4reduce.proto import controller_pb2 as pb
from p4reduce.sim.network import Datagram
from p4reduce.sim.runner import SWITCH_IP
from p4reduce.sim.switch import Member
from p4reduce.transport.base import Address, TransportCounters
from p4reduce.wire import Profile

if TYPE_CHECKING:
    from helpers.cut_world import CutJob, CutWorld

OVER = UsageError("closed")
INTERVAL = 1.0
POLL = 5e-5
SCRIBBLE = 88


class Wire:
    """A Transport whose other end is the world's links."""

    def __init__(self, world: CutWorld, member: Member) -> None:
        self.profile: Profile = world.profile
        self.local: Address = ("10.0.0.1", member.udp_port)
        self.mtu = 9000
        self.receive_frames = 1000
        self.counters = TransportCounters()
        self.queue: deque[bytes] = deque()
        self._world = world
        self._member = member

    def set_endpoint(self, endpoint: Address) -> None:
        """There is one switch."""

    def fileno(self) -> int:
        return 0

    def receive(self, batch: ReceiveBatch) -> int:
        batch.clear()
        while self.queue and batch.count < batch.capacity:
            batch.append(self.queue.popleft())
        return batch.count

    def send(self, batch: SendBatch) -> int:
        member = self._member
        for data in batch.frames():
            datagram = Datagram(member.ip, member.udp_port, SWITCH_IP, UDP_PORT, data)
            self._world.up[member.port].send(datagram)
        return batch.count

    def close(self) -> None:
        """Nothing to release."""


class Sleep:
    """Stands for select.poll: notes for how long the driver would sleep."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def poll(self, milliseconds: int) -> list[Any]:
        self.seconds = milliseconds / 1000
        return []


class NoStatus:
    """A controller client that reaches nobody."""

    def status(self, *_: Any, **__: Any) -> Any:
        raise ControllerError("not asked here", "UNAVAILABLE")


class Progress:
    """A progress stream as ProgressStream keeps it: reports when there is news, opened again when lost."""

    def __init__(self, rank: CutRank) -> None:
        self.rank = rank
        self.number: int | None = None
        self.registered_at: float | None = None
        self.over = False
        self.trouble: pb.Trouble | None = None
        self._pause = 0.1
        self._send_at = math.inf
        self._last_up = self._last_down = 0.0

    # What Membership calls.

    @property
    def registered(self) -> bool:
        return self.registered_at is not None

    @property
    def registered_seconds(self) -> float | None:
        return None if self.registered_at is None else self.rank.world.now - self.registered_at

    def report(self, trouble: pb.Trouble | None = None) -> None:
        self.trouble = self.trouble or trouble
        self._book(self.rank.draw.choice((0.0, 0.001, 0.004)))

    def withdraw(self, instead: pb.Trouble | None = None) -> None:
        self.trouble = instead
        self._book(0.0)

    def expect_end(self) -> None:
        """Nothing is logged here."""

    # The stream.

    def open(self) -> None:
        control = self.rank.world.control
        if self.over or self.rank.dead or self.number is not None:
            return
        if not control.alive:
            self.reopen()
            return
        self.number = control.open_stream(self.rank)
        self._send_at = math.inf
        self._book(self.rank.delay())

    def reopen(self) -> None:
        world = self.rank.world
        pause, self._pause = self._pause, min(2 * self._pause, 1.0)
        world.clock.at(world.now + pause * self.rank.draw.uniform(0.5, 1.5), self.rank.awake(self.open))

    def lost(self, number: int) -> None:
        """This stream has ended, as seen here."""
        if self.number == number:
            if self.registered:
                self._pause = 0.1
            self.number = self.registered_at = None
            self.reopen()

    def stop(self) -> None:
        self.over = True
        if self.number is not None:
            number, self.number = self.number, None
            self.rank.world.control.stream_ended(number)

    def _book(self, delay: float) -> None:
        world = self.rank.world
        at = world.now + delay
        if self.number is not None and at < self._send_at:
            self._send_at = at
            world.clock.at(at, self.rank.awake(lambda: self._send(at)))

    def _send(self, booked: float) -> None:
        if booked != self._send_at or self.number is None or self.over or self.rank.dead:
            return
        self._send_at = math.inf
        membership, number, world = self.rank.membership, self.number, self.rank.world
        assert membership is not None
        report = membership._report()
        if self.trouble is not None:
            report.trouble.CopyFrom(self.trouble)
            world.seen[f"trouble {pb.Trouble.Code.Name(self.trouble.code)}"] += 1
        self._last_up = max(self._last_up, world.now + self.rank.delay())
        world.clock.at(self._last_up, lambda: world.control.hear(number, report, self.rank))
        self._book(INTERVAL)

    def down(self, number: int, directive: pb.Directive | None) -> None:
        """The controller has said something (None: it ends the stream): it arrives after all that was said before."""
        world = self.rank.world
        self._last_down = max(self._last_down, world.now + self.rank.delay())
        world.clock.at(self._last_down, self.rank.awake(lambda: self._take(number, directive)))

    def _take(self, number: int, directive: pb.Directive | None) -> None:
        if self.number != number or self.over or self.rank.dead:
            return
        if directive is None:
            self.lost(number)
        elif directive.HasField("registered"):
            self.registered_at = self.rank.world.now
        else:
            membership = self.rank.membership
            assert membership is not None
            membership._on_directive(directive)
            self.over = self.over or directive.HasField("fence")
            self.rank.wake(self.rank.draw.choice((0.0, 1e-4, 2e-3)))


class CutRank:
    """One rank: joins, submits its buckets at its own speed, leaves."""

    def __init__(self, job: CutJob, rank: int, member: Member) -> None:
        self.job, self.rank, self.member = job, rank, member
        self.world = job.world
        self.draw = job.world.fork(f"{job.name}/{rank}")
        self.dead = False
        self.frozen_until = 0.0
        self.left = False
        self.credential = b""
        self.membership: Membership | None = None
        self.driver: Driver | None = None
        self.port: Port | None = None
        self.progress = Progress(self)
        self.wire = Wire(job.world, member)
        self.sleep = Sleep()
        self.nonce = self.draw.randbytes(16)
        self.done: set[int] = set()
        self.errors: list[str] = []
        self.pace = self.draw.choice((0.002, 0.01, 0.03))
        self.flight = self.draw.choice((1, 3, 10, 40))
        self.next = 0
        self.ticket: int | None = None
        self._wake = math.inf
        self._scribbled: list[Any] = []

    def delay(self) -> float:
        """Of a message between this rank and the controller."""
        longest: float = self.draw.choice((0.0002, 0.001, 0.01, 0.1))
        return longest * self.draw.random()

    def awake(self, call: Callable[[], None]) -> Callable[[], None]:
        """`call`, but not while this process is stopped."""

        def when_awake() -> None:
            if self.world.now < self.frozen_until:
                self.world.clock.at(self.frozen_until, when_awake)
            elif not self.dead:
                call()

        return when_awake

    # ---- join and leave -------------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Join, and again with the same nonce until there is an answer."""
        if self.driver is None and not self.dead:
            self.world.control.join(self)
            self.world.clock.at(self.world.now + 2.0, self.ask)

    def joined(self, reply: pb.JoinReply) -> None:
        if self.driver is not None or self.dead:
            return
        begin, job = reply.order.run_switch, self.job
        config = CoreConfig(
            job.name,
            reply.epoch,
            self.rank,
            job.size,
            self.world.profile,
            begin.or_slots or 1,
            begin.add_slots or 1,
            policy_of(reply.policy),
        )
        self.credential = reply.credential
        start = order_of(reply.order)
        assert isinstance(start, RunSwitch | RunRing)
        membership = Membership(cast(Any, NoStatus()), Seat(config, 10.0, reply.credential, ring=True))
        membership._progress = cast(Any, self.progress)
        driver = Driver(
            Path(config, start, self.world.now),
            self.wire,
            membership.on_trouble,
            on_news=membership.on_news,
            clock=lambda: self.world.now,
        )
        self.port = Port(job.ring, self.rank, driver.path.format, self._summed, self._ring_failed)
        driver._runner = driver.path.runner = cast(Any, self.port)
        driver._poll = cast(Any, self.sleep)
        membership._driver = driver
        self.membership, self.driver = membership, driver
        self.progress.open()
        self.world.clock.at(self.world.now, self._submit)
        self.wake()

    def _summed(self, kept: Any) -> None:
        assert self.driver is not None
        self.driver._ring_done(kept)
        self.wake(self.draw.choice((0.0, 1e-4, 5e-3)))

    def _ring_failed(self, error: P4ReduceError) -> None:
        assert self.driver is not None
        self.driver._ring_failed(error)
        self.wake()

    def _leave(self) -> None:
        """What Communicator.close does: drain, leave while everything still runs, stop."""
        driver, port = self.driver, self.port
        if driver is None or port is None or self.left or self.dead:
            return
        world = self.world
        if driver.error is not None:
            self.stop()
            return
        if driver._pending or (port.pending and self.ticket is None):
            world.clock.at(world.now + 0.01, self.awake(self._leave))
            return
        driver.seal(OVER)
        self.ticket = world.control.leave(self)
        world.clock.at(world.now + 3.0, self.awake(self._leave))

    def stop(self) -> None:
        """The end of this worker, whatever it had."""
        if self.driver is not None and not self.left:
            self.left = True
            self.driver.stop(OVER)
            self.progress.stop()

    def kill(self) -> None:
        """The process dies."""
        self.dead = True
        if self.port is not None:
            self.port.stop()
        if self.progress.number is not None:
            self.world.control.stream_ended(self.progress.number)

    # ---- buckets --------------------------------------------------------------------------------------------------

    def _submit(self) -> None:
        driver, world = self.driver, self.world
        if driver is None or self.dead or self.left:
            return
        if driver.error is not None or self.next == len(self.job.buckets):
            self._leave()
            return
        free = self.next < self.job.released and len(driver._pending) < self.flight
        if free and world.now >= self.frozen_until:
            number, self.next = self.next, self.next + 1
            bucket = self.job.buckets[number][self.rank]
            try:
                pending = driver.submit(bucket, lambda: self._finished(number, bucket))
                pending.future.add_done_callback(lambda future: self._settled(number, future))
            except P4ReduceError as error:
                self.errors.append(str(error))
            self.wake()
        world.clock.at(world.now + self.pace * self.job.slowness * self.draw.random() * 2, self._submit)

    def _finished(self, number: int, bucket: Bucket) -> None:
        """The caller has its result: it checks it, and does with the arrays what it likes."""
        if number in self.done:
            self.world.blame(f"{self}: bucket {number} is delivered twice")
        try:
            self.job.expected[number].check(self.rank)
        except AssertionError as error:
            self.world.blame(f"{self}: bucket {number} is wrong: {error}")
        self.done.add(number)
        if isinstance(bucket, Reduction | IntegerReduction):
            for array in {id(one): one for one in (bucket.data, bucket.out)}.values():
                array.fill(SCRIBBLE)
                self._scribbled.append(array)

    def _settled(self, number: int, future: Any) -> None:
        if future.exception() is not None:
            self.errors.append(f"bucket {number}: {future.exception()}")

    def untouched(self) -> bool:
        """Whether nobody has written to arrays that were the caller's again."""
        return all((array == SCRIBBLE).all() for array in self._scribbled)

    # ---- the I/O thread -------------------------------------------------------------------------------------------

    def deliver(self, datagram: Datagram) -> None:
        if (datagram.dst, datagram.dst_port) == (self.member.ip, self.member.udp_port) and not self.left:
            self.wire.queue.append(datagram.data)
            self.wake(POLL)

    def wake(self, delay: float = 0.0) -> None:
        at = self.world.now + delay
        if at < self._wake:
            self._wake = at
            self.world.clock.at(at, self.awake(lambda: self._run(at)))

    def _run(self, booked: float) -> None:
        """Driver._run until it sleeps."""
        driver = self.driver
        if booked != self._wake or driver is None or self.dead:
            return
        self._wake = math.inf
        try:
            while driver._error is None and not driver._stopping:
                if driver._changed:
                    driver._take_changes()
                moved = driver._exchange()
                driver._take_events()
                if not moved:
                    driver._sleep()
                    if not driver._changed:
                        break
        except P4ReduceError as error:
            driver._fail(driver._on_trouble(error).error())
        if driver.error is not None:
            self.errors.append(f"{type(driver.error).__name__}: {driver.error}")
            self.world.failed(self)
        elif not driver._stopping:
            self.wake(self.sleep.seconds)
            self._measure(driver)

    def _measure(self, driver: Driver) -> None:
        """What is kept is bounded; docs/protocol.md, "What is kept, and how long"."""
        core = driver.path.core
        if core is None:
            return
        window, lag = core.config.add_slots, core._lag
        payload = core.config.profile.payload_bytes
        largest = self.job.largest_chunks
        chunks = 17 * window + 2 * window + 3 * largest
        if core.kept_bytes > 2 * payload * chunks or core.kept_buckets > 2 * lag + self.flight:
            self.world.blame(f"{self}: keeps {core.kept_buckets} buckets, {core.kept_bytes} bytes")

    def clean(self) -> bool:
        """Whether nothing is kept any more."""
        path = self.driver.path if self.driver is not None else None
        return path is None or not (path._kept or path._held)

    def __str__(self) -> str:
        return f"job {self.job.name}, rank {self.rank}"


def expected(buckets: list[Bucket], fmt: Any) -> Expected:
    with np.errstate(all="ignore"):
        return Expected(buckets, fmt)
