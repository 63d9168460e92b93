# SPDX-License-Identifier: Apache-2.0
"""Trouble of the I/O thread that an order mends, or ends the job; and what it tells the controller meanwhile."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.driver_job import ADD_SLOTS, OR_SLOTS, WAIT, DriverJob, Load, check, submit_all, values

from p4reduce.core.config import RetransmissionPolicy
from p4reduce.core.events import Stalled
from p4reduce.errors import IntegrityError, JobError, P4ReduceError, RingError, StalledError, TransportError
from p4reduce.orders import Answer, Stop, Trial
from p4reduce.reports import RingFailed, Trouble, Verdict

Make = Callable[..., DriverJob]
SHORT = RetransmissionPolicy(initial=0.02, minimum=0.01, maximum=0.05, deadline=0.3, silent=0.1, fallback=0.2)


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[DriverJob] = []

    def start(*args: Any, **kwargs: Any) -> DriverJob:
        made.append(DriverJob(*args, **kwargs))
        return made[-1]

    yield start
    for job in made:
        job.close()


# Trouble -----------------------------------------------------------------------------------------------------------


def final(trouble: Trouble, seconds: float = 0.0) -> Verdict:
    if isinstance(trouble, RingFailed):
        return Verdict(trouble.error, seconds)
    assert isinstance(trouble, P4ReduceError)
    return Verdict(trouble, seconds)


def test_trouble_waits_for_the_order_that_mends_it(make: Make) -> None:
    """A nack, a stall, frames that cannot be sent: the job goes on where the controller says so."""
    load = Load(31, 2, 8)
    wanted = load.undisturbed()
    job = make(2, policy=SHORT)
    pending = submit_all(job, load, 0, 3)
    check(pending, wanted[:3])
    epoch = job.installed
    assert epoch is not None
    job.revoke()
    pending += submit_all(job, load, 3, 6)
    job.wait_for(lambda: len(job.reports) == 2)
    pending += submit_all(job, load, 6)  # handed in while the order is awaited
    assert {type(report) for report in job.reports} == {JobError}
    stop = job.tell(Stop(number=job.number(), epoch=epoch, why="refused"))
    assert min(answer.bucket for answer in job.answers(stop)) == 3
    assert job.withdrawn == 2
    job.run_ring(3)
    check(pending, wanted)
    assert len(job.reports) == 2


def test_a_stall_that_ends_by_itself_is_taken_back(make: Make) -> None:
    load = Load(32, 2, 3)
    wanted = load.undisturbed()
    job = make(2, policy=SHORT)
    ours = [load.submit(job, 0, 0)]
    job.wait_for(lambda: len(job.reports) >= 1)
    assert isinstance(job.reports[0], Stalled)
    ours.append(load.submit(job, 0, 1))
    theirs = [load.submit(job, 1, number) for number in range(3)]
    ours.append(load.submit(job, 0, 2))
    check([list(pair) for pair in zip(ours, theirs, strict=True)], wanted)
    assert job.withdrawn >= 1
    assert all(isinstance(report, Stalled) for report in job.reports)


def test_trouble_that_no_order_mends_is_an_error(make: Make) -> None:
    times: list[float] = []

    def patience(seconds: float) -> float:
        times.append(seconds)
        return 0.3 - seconds

    def verdict(trouble: Any) -> Verdict:
        assert isinstance(trouble, Stalled)
        return Verdict(lambda: StalledError("rank 1 is missing", ranks=(1,)), patience=patience, bucket=trouble.bucket)

    job = make(2, policy=SHORT, verdict=verdict)
    pending = [job.reduce(0, values(1, 0, 10)), job.barrier(0)]
    for one in pending:
        error = one.future.exception(WAIT)
        assert isinstance(error, StalledError)
        assert error.ranks == (1,)
    assert times[-1] >= 0.3


def test_frames_that_cannot_be_sent(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(33, 2, 6)
    wanted = load.undisturbed()

    def patient(trouble: Any) -> Verdict:
        return Verdict(trouble, patience=lambda seconds: WAIT - seconds)

    job = make(2, verdict=patient)
    check(submit_all(job, load, 0, 2), wanted[:2])

    def broken(_: Any) -> int:
        raise TransportError("the path's MTU has become 1300")

    with monkeypatch.context() as patch:
        patch.setattr(job.transports[1], "send", broken)
        pending = submit_all(job, load, 2, 4)
        job.wait_for(lambda: len(job.reports) == 1)
        # Rank 0 goes on for a while; rank 1 knows better.
        job.wait_for(lambda: job.drivers[0].path.counters()["resent_timeout"] >= 5)
        assert job.cut() == 2
        pending += submit_all(job, load, 4, 5)
        check(pending, wanted[2:5])
        assert len(job.reports) == 1, "what cannot be sent is not tried again and again"
    assert job.promote() == 5
    check(submit_all(job, load, 5), wanted[5:])


@pytest.mark.parametrize("state", ["stopped", "holding"])
def test_an_order_that_never_comes_is_an_error_in_the_end(make: Make, state: str) -> None:
    job = make(2, policy=SHORT, on_ring=state == "holding")
    job.verdict = final
    if state == "stopped":
        job.stop()
    else:
        job.try_switch()
        job.hold()
    pending = job.reduce(0, values(1, 0, 10))
    error = pending.future.exception(WAIT)
    assert isinstance(error, StalledError)
    assert error.bucket == 0
    assert f"bucket 0 waits for the controller's order after {state}, and none has come for 0.3 s" in str(error)
    assert job.drivers[1].error is None, "nothing waits there"


def test_a_ring_that_breaks_ends_the_job(make: Make) -> None:
    job = make(2, on_ring=True)
    job.verdict = lambda trouble: final(trouble, 0.2)
    pending = [job.reduce(0, values(1, 0, 10)), job.barrier(0)]
    assert job.drivers[1].runner is not None
    job.drivers[1].runner._ring.close()
    for one in pending:
        assert isinstance(one.future.exception(WAIT), RingError)
    assert isinstance(job.reports[0], RingFailed)
    assert "rank 1 has closed its ring" in str(job.reports[0].error)


def test_a_final_error_outdoes_trouble_that_could_be_mended(make: Make) -> None:
    """Ring buckets below K still run when the switch path stalls; then the ring breaks."""
    job = make(2, on_ring=True, policy=SHORT)
    behind = job.barrier(0)
    assert job.promote() == 1
    ahead = job.barrier(0)
    job.wait_for(lambda: any(isinstance(report, Stalled) for report in job.reports))
    assert job.drivers[1].runner is not None
    job.drivers[1].runner._ring.close()
    assert isinstance(behind.future.exception(WAIT), RingError)
    assert isinstance(ahead.future.exception(WAIT), RingError)
    assert job.withdrawn == 1


def test_sums_of_switch_and_ring_that_differ_are_an_integrity_error(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make(2)
    job.deaf = {1}
    array = values(1, 0, 700)
    pending = [job.reduce(rank, array) for rank in range(2)]
    pending[0].future.result(WAIT)
    first = job.stop()
    kept = job.drivers[0].path._kept
    assert [one.delivered for one in kept] == [True]
    part = kept[0]._part
    assert part is not None
    monkeypatch.setattr(type(part), "agrees", lambda self, _: self is not part)
    job.run_ring(first)
    job.wait_for(lambda: len(job.reports) >= 1)
    (report,) = [one for one in job.reports if isinstance(one, RingFailed) and isinstance(one.error, IntegrityError)]
    assert "different sums" in str(report.error)
    with pytest.raises(IntegrityError, match="different sums"):
        job.barrier(0)


def test_draining_waits_for_what_the_ring_compares(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make(2)
    job.deaf = {1}
    array = values(1, 0, 700)
    pending = [job.reduce(rank, array) for rank in range(2)]
    pending[0].future.result(WAIT)
    assert job.drivers[1].runner is not None
    ring = job.drivers[1].runner._ring
    gate, largest = threading.Event(), ring.max

    def late(values: Any) -> None:
        assert gate.wait(WAIT)
        largest(values)

    monkeypatch.setattr(ring, "max", late)
    job.cut()
    job.carried_out(job.ring_order[0], "ring")
    started = time.monotonic()
    assert job.drivers[0].drain(0.2) == 0, "nothing of its own"
    assert time.monotonic() - started >= 0.2
    gate.set()
    assert [driver.drain(WAIT) for driver in job.drivers] == [0, 0]
    assert time.monotonic() - started < WAIT


# Reports -----------------------------------------------------------------------------------------------------------


def test_silence_is_told_at_once_and_until_it_ends(make: Make) -> None:
    policy = RetransmissionPolicy(initial=0.02, minimum=0.01, maximum=0.05, deadline=30.0, silent=0.1, fallback=0.2)
    job = make(2, policy=policy)
    driver = job.drivers[0]
    news: list[float] = []
    driver._on_news = lambda: news.append(driver.snapshot().silent)
    pending = [job.reduce(0, values(1, 0, 10))]
    job.wait_for(lambda: driver.snapshot().silent >= 0.1)
    before = driver.snapshot()
    assert (before.submitted, before.completed, before.present) == (1, 0, 9)
    job.wait_for(lambda: driver.snapshot().silent > before.silent)
    pending.append(job.reduce(1, values(1, 1, 10)))
    for one in pending:
        one.future.result(WAIT)
    job.wait_for(lambda: driver.snapshot().silent == 0.0)
    after = driver.snapshot()
    assert after.rtt > 0
    assert after.counters["silences"] >= 1
    job.wait_for(lambda: news[-1] == 0.0)
    assert news[0] >= 0.1
    assert job.reports == []


def test_a_watched_count_is_told_when_it_is_reached(make: Make) -> None:
    job = make(1)
    (driver,) = job.drivers
    told = threading.Event()
    news: list[int] = []

    def on_news() -> None:
        news.append(driver.completed)
        told.set()

    driver._on_news = on_news
    driver.watch(0)
    assert news == [0]
    told.clear()
    driver.watch(2)
    assert not told.is_set()
    for _ in range(3):
        job.barrier(0).future.result(WAIT)
    assert told.wait(WAIT)
    job.wait_for(lambda: news == [0, 2])


def test_complete_is_counted_up_to_the_first_that_is_not(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over both paths: what the switch has done does not count while the ring has not done what came before."""
    job = make(2, on_ring=True)
    assert job.drivers[1].runner is not None
    ring = job.drivers[1].runner._ring
    gate, largest = threading.Event(), ring.max

    def late(values: Any) -> None:
        assert gate.wait(WAIT)
        largest(values)

    monkeypatch.setattr(ring, "max", late)
    early = [job.barrier(0), job.barrier(1)]
    assert job.promote() == 1
    late_ones = [job.barrier(rank) for rank in (0, 1, 0, 1)]
    for one in late_ones:
        one.future.result(WAIT)
    assert [driver.completed for driver in job.drivers] == [0, 0]
    assert not any(one.future.done() for one in early)
    gate.set()
    for one in early:
        one.future.result(WAIT)
    assert [driver.completed for driver in job.drivers] == [3, 3]


def test_an_answer_is_news(make: Make) -> None:
    """Whether it is there at once, or only when the trial is over."""
    job = make(1)
    (driver,) = job.drivers
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    driver._on_news = lambda: told.put(driver.answer)
    assert driver.path.core is not None
    job.revoke()
    stop = job.tell(Stop(number=job.number(), epoch=driver.path.present))
    assert told.get(timeout=WAIT) == Answer(stop.number, 0)
    job.run_ring(0)
    trial = job.tell(Trial(number=job.number(), epoch=job.install(), or_slots=OR_SLOTS, add_slots=ADD_SLOTS))
    assert told.get(timeout=WAIT) == Answer(trial.number)


def test_a_policy_counts_at_once_and_for_cores_to_come(make: Make) -> None:
    job = make(2)
    policy = RetransmissionPolicy(initial=0.03, minimum=0.02, maximum=0.2, deadline=5.0)
    for driver in job.drivers:
        driver.set_policy(policy)
    job.wait_for(lambda: all(driver.path.policy == policy for driver in job.drivers))
    job.cut()
    job.promote()
    for one in (job.barrier(0), job.barrier(1)):
        one.future.result(WAIT)
    for driver in job.drivers:
        assert driver.path.core is not None
        assert driver.path.core.config.policy == policy


def test_a_sealed_driver_takes_no_bucket_and_finishes_what_it_has(make: Make) -> None:
    job = make(2)
    pending = job.barrier(0)
    job.drivers[0].seal(JobError("closing"))
    with pytest.raises(JobError, match="closing"):
        job.barrier(0)
    job.barrier(1)
    pending.future.result(WAIT)
    assert job.drivers[0].submitted == 1
