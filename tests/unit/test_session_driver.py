# SPDX-License-Identifier: Apache-2.0
"""The I/O thread by itself: drivers on an in-memory network with the reference switch, without a controller."""

from __future__ import annotations

import ipaddress
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from p4reduce import constants, wire
from p4reduce.core.bucket import Barrier, Reduction
from p4reduce.core.config import CoreConfig, RetransmissionPolicy
from p4reduce.core.events import Stalled
from p4reduce.core.worker import WorkerCore
from p4reduce.driver import Driver, Pending, Verdict
from p4reduce.errors import JobError, MismatchError, P4ReduceError, UsageError, WorkerLostError
from p4reduce.reports import Trouble
from p4reduce.sim.network import Datagram
from p4reduce.sim.switch import Member, Membership, ReferenceSwitch
from p4reduce.transport.base import Address, Transport
from p4reduce.transport.faults import FaultRates, FaultyTransport
from p4reduce.transport.memory import MemoryNetwork

W5 = wire.profile("w5")
EPOCH = 9
SWITCH = int(ipaddress.IPv4Address("10.0.0.254"))
OVER = UsageError("the test is over")
WAIT = 20


def address(rank: int) -> Address:
    return (f"10.0.0.{rank + 1}", 5000 + rank)


class Net:
    """Drivers of one job on a memory network."""

    def __init__(self, size: int, rates: FaultRates | None = None, deadline: float = 30.0) -> None:
        self.model = ReferenceSwitch(W5)
        members = tuple(
            Member(rank, 1, int(ipaddress.IPv4Address(address(rank)[0])), address(rank)[1]) for rank in range(size)
        )
        self.model.admit(Membership(EPOCH, members, 0, 16, 2, 1))
        self.network = MemoryNetwork(self._carry, W5)
        self.reports: list[Trouble] = []
        self.reported = threading.Event()
        self.verdict_seconds = 0.0
        self.blocked = False
        self.transports: list[Transport] = []
        self.drivers: list[Driver] = []
        policy = RetransmissionPolicy(initial=0.02, minimum=0.005, maximum=0.1, deadline=deadline)
        for rank in range(size):
            transport: Transport = self.network.attach(address(rank))
            if rates is not None:
                transport = FaultyTransport(transport, rates, rank)
            core = WorkerCore(CoreConfig("job", EPOCH, rank, size, W5, 2, 14, policy), time.monotonic())
            driver = Driver(core, transport, self._on_trouble)
            driver.start()
            self.transports.append(transport)
            self.drivers.append(driver)

    def _carry(self, source: Address, frame: bytes) -> Iterable[tuple[Address, bytes]]:
        if self.blocked:
            return []
        request = Datagram(int(ipaddress.IPv4Address(source[0])), source[1], SWITCH, constants.UDP_PORT, frame)
        return [
            ((str(ipaddress.IPv4Address(answer.dst)), answer.dst_port), answer.data)
            for _, answer in self.model.process(1, request)
        ]

    def _on_trouble(self, report: Trouble) -> Verdict:
        self.reports.append(report)
        self.reported.set()
        error = JobError("stalled", bucket=report.bucket) if isinstance(report, Stalled) else report
        assert isinstance(error, P4ReduceError)
        return Verdict(error, self.verdict_seconds)

    def reduce(self, rank: int, array: Any) -> Pending:
        out = np.empty_like(array)
        return self.drivers[rank].submit(Reduction(array, out), lambda: out)

    def close(self) -> None:
        for driver, transport in zip(self.drivers, self.transports, strict=True):
            driver.stop(OVER)
            driver.stop(OVER)
            transport.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Net]]:
    made: list[Net] = []

    def start(*args: Any, **kwargs: Any) -> Net:
        made.append(Net(*args, **kwargs))
        return made[-1]

    yield start
    for net in made:
        net.close()


def values(seed: int, count: int) -> Any:
    return np.random.default_rng(seed).integers(-1000, 1000, count).astype(np.float32)


def error_of(pending: Pending) -> BaseException | None:
    return pending.future.exception(WAIT)


@pytest.mark.parametrize("rates", [None, FaultRates(loss=0.05, duplicate=0.05, reorder=0.05)], ids=["clean", "faulty"])
def test_reductions_over_memory(make: Callable[..., Net], rates: FaultRates | None) -> None:
    net = make(3, rates)
    counts = [1, 300, 20_000, 0, 5000]
    arrays = [[values(10 * rank + i, count) for i, count in enumerate(counts)] for rank in range(3)]
    pending = [[net.reduce(rank, array) for array in arrays[rank]] for rank in range(3)]
    for i in range(len(counts)):
        for rank in range(3):
            expected = arrays[0][i] + arrays[1][i] + arrays[2][i]
            np.testing.assert_array_equal(pending[rank][i].future.result(WAIT), expected)
    assert net.reports == []
    if rates is not None:
        for transport in net.transports:
            assert isinstance(transport, FaultyTransport)
            assert min(transport.faults.lost, transport.faults.duplicated, transport.faults.reordered) > 0
    for driver in net.drivers:
        assert (driver.submitted, driver.completed) == (5, 5)
        assert driver.cpu_seconds() > 0
        assert driver.drain(0) == 0


def test_results_are_made_in_the_io_thread_and_their_errors_reach_the_caller(make: Callable[..., Net]) -> None:
    net = make(1)
    (driver,) = net.drivers
    assert driver.submit(Barrier(), lambda: driver.inside).future.result(WAIT) is True
    assert driver.inside is False

    def fail() -> None:
        raise MemoryError("no room for the copy")

    assert isinstance(error_of(driver.submit(Barrier(), fail)), MemoryError)
    assert driver.submit(Barrier(), lambda: 7).future.result(WAIT) == 7


def test_an_owner_lives_as_long_as_its_bucket_is_pending(make: Callable[..., Net]) -> None:
    net = make(2)
    owner = object()
    pending = net.drivers[0].submit(Barrier(), lambda: None, owner)
    assert pending.owner is owner
    net.drivers[1].submit(Barrier(), lambda: None)
    pending.future.result(WAIT)


def test_drain_gives_up_after_its_timeout(make: Callable[..., Net]) -> None:
    net = make(2)
    net.drivers[0].submit(Barrier(), lambda: None)
    assert net.drivers[0].drain(0.05) == 1
    net.drivers[1].submit(Barrier(), lambda: None)
    assert net.drivers[0].drain(WAIT) == 0


def test_stop_fails_what_is_pending(make: Callable[..., Net]) -> None:
    net = make(2)
    pending = net.reduce(0, values(1, 10))
    net.drivers[0].stop(OVER)
    assert str(error_of(pending)) == str(OVER)
    with pytest.raises(UsageError, match="the test is over"):
        net.reduce(0, values(1, 10))


def test_a_fence_beats_an_own_error_of_another_kind(make: Callable[..., Net]) -> None:
    net = make(2)
    net.verdict_seconds = WAIT
    net.model.revoke(EPOCH)
    pending = net.reduce(0, values(1, 10))
    assert net.reported.wait(WAIT)
    assert not pending.future.done()
    net.drivers[0].fence(WorkerLostError("rank 1 is lost", ranks=(1,)))
    error = error_of(pending)
    assert isinstance(error, WorkerLostError)
    assert error.ranks == (1,)


def test_what_is_submitted_while_the_reason_is_awaited_fails_with_it(make: Callable[..., Net]) -> None:
    net = make(2)
    net.verdict_seconds = WAIT
    net.model.revoke(EPOCH)
    pending = [net.reduce(0, values(1, 10))]
    assert net.reported.wait(WAIT)
    pending += [net.reduce(0, values(2, 10)) for _ in range(3)]
    net.drivers[0].fence(WorkerLostError("rank 1 is lost", ranks=(1,)))
    assert {type(error_of(one)) for one in pending} == {WorkerLostError}
    assert len(net.reports) == 1


@pytest.mark.parametrize(
    ("fence", "own"),
    [(MismatchError("the controller's"), True), (JobError("the controller's"), False)],
)
def test_of_two_reasons_of_one_kind_ours_knows_more(make: Callable[..., Net], fence: JobError, own: bool) -> None:
    net = make(2)
    net.verdict_seconds = WAIT
    first = net.reduce(0, values(1, 10))
    second = net.reduce(1, values(1, 11))
    assert net.reported.wait(WAIT)
    for driver in net.drivers:
        driver.fence(fence)
    errors = [error_of(first), error_of(second)]
    assert {type(error) for error in errors} == {type(fence)}
    # Only the rank that came second was told of the mismatch by the switch.
    assert sum("other ranks reduce something else" in str(error) for error in errors) == int(own)


def test_a_limit_ends_what_lies_beyond_and_lets_the_rest_complete(make: Callable[..., Net]) -> None:
    net = make(2)
    net.blocked = True
    first, second = net.reduce(0, values(1, 3000)), net.reduce(0, values(2, 3000))
    peer = net.reduce(1, values(3, 3000))
    net.drivers[0].limit(1, WorkerLostError("rank 1 left", ranks=(1,)))
    net.drivers[0].limit(2, WorkerLostError("a later limit changes nothing", ranks=(0,)))
    with pytest.raises(WorkerLostError, match="rank 1 left"):
        net.reduce(0, values(2, 3))
    assert not second.future.done()
    net.blocked = False
    np.testing.assert_array_equal(first.future.result(WAIT), values(1, 3000) + values(3, 3000))
    np.testing.assert_array_equal(peer.future.result(WAIT), first.future.result(0))
    error = error_of(second)
    assert isinstance(error, WorkerLostError)
    assert "rank 1 left" in str(error)


def test_a_stall_beyond_the_limit_is_the_peers_leaving(make: Callable[..., Net]) -> None:
    net = make(2, deadline=0.2)
    pending = net.reduce(0, values(1, 10))
    net.drivers[0].limit(0, WorkerLostError("rank 1 left", ranks=(1,)))
    assert isinstance(error_of(pending), WorkerLostError)
    assert net.reports == []


def test_submissions_while_a_verdict_is_out_wait_for_it(make: Callable[..., Net]) -> None:
    net = make(2)
    net.verdict_seconds = 0.5
    net.model.revoke(EPOCH)
    first = net.reduce(0, values(1, 10))
    assert net.reported.wait(WAIT)
    started = time.monotonic()
    second = net.reduce(0, values(1, 10))
    errors = [error_of(first), error_of(second)]
    assert time.monotonic() - started > 0.2
    assert {str(error) for error in errors} == {str(net.reports[0])}
    assert len(net.reports) == 1


def test_a_stall_is_reported_once(make: Callable[..., Net]) -> None:
    net = make(2, deadline=0.1)
    net.verdict_seconds = 0.5
    pending = net.reduce(0, values(1, 10))
    error = error_of(pending)
    assert isinstance(error, JobError)
    assert error.bucket == 0
    assert len(net.reports) == 1, "further deadlines passed while the verdict was out"
    assert isinstance(net.reports[0], Stalled)


@pytest.mark.parametrize("raised", [RuntimeError("not mine"), SystemExit(1), KeyboardInterrupt()], ids=repr)
def test_no_callback_ends_the_io_thread(make: Callable[..., Net], raised: BaseException) -> None:
    net = make(1)
    called = threading.Event()

    def broken(_: Any) -> None:
        called.set()
        raise raised

    net.blocked = True  # so that the callback is there before the result
    first = net.reduce(0, values(1, 10))
    first.future.add_done_callback(broken)
    net.blocked = False
    first.future.result(WAIT)
    assert called.wait(WAIT)
    assert (net.reduce(0, values(2, 10)).future.result(WAIT) == values(2, 10)).all()


def test_a_stop_is_not_slept_through(make: Callable[..., Net], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its wake-up may be drained together with an earlier one, after the loop has asked whether to stop."""
    driver = make(1).drivers[0]
    taking, stopping = threading.Event(), threading.Event()
    take_changes, wake = driver._take_changes, driver._wake

    def late() -> None:
        taking.set()
        assert stopping.wait(WAIT)
        take_changes()

    def announced() -> None:
        wake()
        if driver._stopping:
            stopping.set()

    monkeypatch.setattr(driver, "_take_changes", late)
    monkeypatch.setattr(driver, "_wake", announced)
    driver.limit(10**9, WorkerLostError("left", ranks=(1,)))
    assert taking.wait(WAIT)
    stopper = threading.Thread(target=driver.stop, args=(OVER,))
    stopper.start()
    stopper.join(WAIT)
    assert not stopper.is_alive()
