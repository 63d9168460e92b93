# SPDX-License-Identifier: Apache-2.0
"""A job of drivers on a memory network with the reference switch, and a controller that is no more than its orders."""

from __future__ import annotations

import dataclasses
import ipaddress
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from p4reduce import constants, wire
from p4reduce.core.bucket import Barrier, Reduction
from p4reduce.core.config import CoreConfig, RetransmissionPolicy
from p4reduce.driver import Driver, Pending
from p4reduce.errors import JobError, P4ReduceError, UsageError
from p4reduce.orders import Answer, Hold, Order, RunRing, RunSwitch, Stop, Trial
from p4reduce.path import Path
from p4reduce.reports import RingFailed, Trouble, Verdict
from p4reduce.ring import local_rings
from p4reduce.sim.network import Datagram
from p4reduce.sim.switch import Member, Membership, ReferenceSwitch
from p4reduce.transport.base import Address, Transport
from p4reduce.transport.faults import FaultRates, FaultyTransport
from p4reduce.transport.memory import MemoryNetwork

W5 = wire.profile("w5")
OVER = UsageError("the test is over")
WAIT = 20
OR_SLOTS, ADD_SLOTS = 2, 14
_SWITCH = int(ipaddress.IPv4Address("10.0.0.254"))
_SUM = bytes([wire.Kind.RESULT, constants.OP_ADD])

Vector = npt.NDArray[np.float32]


def address(rank: int) -> Address:
    return (f"10.0.0.{rank + 1}", 5000 + rank)


class DriverJob:
    """`size` ranks. Orders go to all of them unless a test says otherwise."""

    def __init__(
        self,
        size: int,
        *,
        rates: FaultRates | None = None,
        on_ring: bool = False,
        policy: RetransmissionPolicy | None = None,
        verdict: Callable[[Trouble], Verdict] | None = None,
    ) -> None:
        self.size = size
        self.model = ReferenceSwitch(W5)
        self.members = tuple(
            Member(rank, 1, int(ipaddress.IPv4Address(address(rank)[0])), address(rank)[1]) for rank in range(size)
        )
        self.network = MemoryNetwork(self._carry, W5)
        self.reports: list[Trouble] = []
        self.withdrawn = 0
        self.verdict = verdict or self._patient
        self.changed = threading.Condition()
        # The switch: frames that it still takes, ranks whose sums get lost, and how many were.
        self.budget: float = float("inf")
        self.deaf: set[int] = set()
        self.lost = 0
        self.exhausted = threading.Event()
        self._epochs = itertools.count(9)
        self._numbers = itertools.count(2)
        self._lock = threading.Lock()
        self.installed: int | None = None
        self.ring_order: tuple[int, int] = (0, 0)
        policy = policy or RetransmissionPolicy(initial=0.02, minimum=0.01, maximum=0.05, deadline=30.0)
        epoch = next(self._epochs) if on_ring else self.install()
        start: RunRing | RunSwitch = RunSwitch(number=1, epoch=epoch, or_slots=OR_SLOTS, add_slots=ADD_SLOTS)
        if on_ring:
            start, self.ring_order = RunRing(number=1, epoch=epoch), (epoch, 0)
        self.transports: list[Transport] = []
        self.drivers: list[Driver] = []
        for rank, ring in enumerate(local_rings(size, deadline=WAIT)):
            transport: Transport = self.network.attach(address(rank))
            if rates is not None:
                transport = FaultyTransport(transport, rates, rank)
            config = CoreConfig("job", epoch, rank, size, W5, OR_SLOTS, ADD_SLOTS, policy)
            driver = Driver(
                Path(config, start, time.monotonic()), transport, self._on_trouble, ring=ring, on_news=self._notify
            )
            driver.start()
            self.transports.append(transport)
            self.drivers.append(driver)

    # The switch.

    def _carry(self, source: Address, frame: bytes) -> Iterable[tuple[Address, bytes]]:
        with self._lock:
            if self.budget <= 0:
                self.exhausted.set()
                return []
            self.budget -= 1
            request = Datagram(int(ipaddress.IPv4Address(source[0])), source[1], _SWITCH, constants.UDP_PORT, frame)
            answers = self.model.process(1, request)
            found = []
            for _, answer in answers:
                if answer.dst_port - 5000 in self.deaf and answer.data[1:3] == _SUM:
                    self.lost += 1
                    continue
                found.append(((str(ipaddress.IPv4Address(answer.dst)), answer.dst_port), answer.data))
            return found

    def install(self) -> int:
        epoch = next(self._epochs)
        with self._lock:
            self.model.admit(Membership(epoch, self.members, 0, OR_SLOTS + ADD_SLOTS, 2, 1))
            self.budget = float("inf")
            self.deaf = set()
        self.installed = epoch
        return epoch

    def revoke(self) -> None:
        with self._lock:
            if self.installed is not None:
                self.model.revoke(self.installed)
        self.installed = None

    # What drivers tell.

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _on_trouble(self, trouble: Trouble) -> Verdict:
        verdict = self.verdict(trouble)
        with self.changed:
            self.reports.append(trouble)
            self.changed.notify_all()
        return verdict

    def _patient(self, trouble: Trouble) -> Verdict:
        """Recoverable trouble waits; anything else ends the job at once."""
        if isinstance(trouble, RingFailed):
            return Verdict(trouble.error)
        if isinstance(trouble, P4ReduceError) and not isinstance(trouble, JobError):
            return Verdict(trouble)
        bucket = None if isinstance(trouble, P4ReduceError) else trouble.bucket
        error = trouble if isinstance(trouble, P4ReduceError) else JobError("stalled", bucket=bucket)
        return Verdict(error, patience=lambda seconds: WAIT - seconds, withdraw=self._withdraw, bucket=bucket)

    def _withdraw(self) -> None:
        with self.changed:
            self.withdrawn += 1
            self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until drivers have brought it about; they notify with every answer and trouble."""
        with self.changed:
            end = time.monotonic() + WAIT
            while not condition():
                assert time.monotonic() < end, "it did not happen in time"
                self.changed.wait(0.02)

    # The controller.

    def number(self) -> int:
        return next(self._numbers)

    def tell(self, order: Order, ranks: Iterable[int] | None = None) -> Order:
        for rank in range(self.size) if ranks is None else ranks:
            self.drivers[rank].order(order)
        return order

    def again(self, order: Order, ranks: Iterable[int] | None = None) -> Order:
        """The same content under a new number."""
        return self.tell(dataclasses.replace(order, number=self.number()), ranks)

    def answers(self, order: Order, ranks: Iterable[int] | None = None) -> list[Answer]:
        drivers = [self.drivers[rank] for rank in (range(self.size) if ranks is None else ranks)]

        def there() -> bool:
            return all(one.answer is not None and one.answer.order == order.number for one in drivers)

        self.wait_for(there)
        return [one.answer for one in drivers if one.answer is not None]

    def carried_out(self, epoch: int, state: str) -> None:
        self.wait_for(lambda: all((one.path.present, one.path.state.value) == (epoch, state) for one in self.drivers))

    def stop(self) -> int:
        epoch = self.installed
        assert epoch is not None
        self.revoke()
        return min(answer.bucket for answer in self.answers(self.tell(Stop(number=self.number(), epoch=epoch))))

    def run_ring(self, first: int, why: str = "operator: test") -> Order:
        self.ring_order = (next(self._epochs), first)
        return self.ring_again(why)

    def ring_again(self, why: str = "operator: test", ranks: Iterable[int] | None = None) -> Order:
        epoch, first = self.ring_order
        return self.tell(RunRing(number=self.number(), epoch=epoch, first_bucket=first, why=why), ranks)

    def cut(self) -> int:
        first = self.stop()
        self.run_ring(first)
        return first

    def try_switch(self) -> list[Answer]:
        trial = Trial(number=self.number(), epoch=self.install(), or_slots=OR_SLOTS, add_slots=ADD_SLOTS)
        return self.answers(self.tell(trial))

    def hold(self) -> int:
        return max(answer.bucket for answer in self.answers(self.tell(Hold(number=self.number()))))

    def run_switch(self, first: int, ranks: Iterable[int] | None = None) -> Order:
        assert self.installed is not None
        return self.tell(
            RunSwitch(
                number=self.number(),
                epoch=self.installed,
                or_slots=OR_SLOTS,
                add_slots=ADD_SLOTS,
                first_bucket=first,
                why="the switch is well",
            ),
            ranks,
        )

    def promote(self) -> int:
        assert not any(answer.failed for answer in self.try_switch())
        first = self.hold()
        self.run_switch(first)
        return first

    def give_up_trial(self) -> Order:
        self.revoke()
        return self.ring_again("the trial is over")

    # Buckets.

    def reduce(self, rank: int, array: Vector, mean: bool = False, out: Vector | None = None) -> Pending:
        target = np.empty_like(array) if out is None else out
        return self.drivers[rank].submit(Reduction(array, target, mean), lambda: target)

    def barrier(self, rank: int) -> Pending:
        return self.drivers[rank].submit(Barrier(), lambda: None)

    def close(self) -> None:
        for driver in self.drivers:
            driver.fence(JobError("the test is over"))
        for driver, transport in zip(self.drivers, self.transports, strict=True):
            driver.stop(OVER)
            transport.close()


def values(seed: int, rank: int, count: int) -> Vector:
    """Of many magnitudes, so that every sum is rounded."""
    rng = np.random.default_rng([seed, rank])
    return np.ldexp(rng.standard_normal(count), rng.integers(-20, 20, count)).astype(np.float32)


def bits(array: Any) -> Any:
    return np.asarray(array, np.float32).view(np.uint32)


class Load:
    """The same buckets for any number of runs: reductions of all sizes, sums and means, in place or not, barriers."""

    def __init__(self, seed: int, size: int, buckets: int, largest: int = 9000) -> None:
        rng = random.Random(seed)
        self.seed, self.size = seed, size
        self.counts = [rng.choice((0, 1, 255, 320, 2000, rng.randrange(largest))) for _ in range(buckets)]
        self.kinds = [rng.choice(("sum", "mean", "sum in place", "barrier")) for _ in range(buckets)]

    def submit(self, job: DriverJob, rank: int, number: int) -> Pending:
        kind = self.kinds[number]
        if kind == "barrier":
            return job.barrier(rank)
        array = values(self.seed + number, rank, self.counts[number])
        return job.reduce(rank, array, kind == "mean", array if kind == "sum in place" else None)

    def undisturbed(self) -> list[Any]:
        job = DriverJob(self.size)
        try:
            pending = [[self.submit(job, rank, i) for rank in range(self.size)] for i in range(len(self.counts))]
            found = [[one.future.result(WAIT) for one in ranks] for ranks in pending]
            assert job.reports == []
        finally:
            job.close()
        return [ranks[0] for ranks in found]


def check(pending: list[list[Pending]], wanted: list[Any]) -> None:
    """`pending`: per bucket, per rank."""
    for ranks, right in zip(pending, wanted, strict=True):
        for one in ranks:
            result = one.future.result(WAIT)
            if right is None:
                assert result is None
            else:
                np.testing.assert_array_equal(bits(result), bits(right))


def submit_all(job: DriverJob, load: Load, first: int = 0, last: int | None = None) -> list[list[Pending]]:
    numbers = range(first, len(load.counts) if last is None else last)
    return [[load.submit(job, rank, number) for rank in range(job.size)] for number in numbers]
