# SPDX-License-Identifier: Apache-2.0
"""Orders of the controller in the I/O thread: whatever the moment, every sum has the bits of the undisturbed run."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers.driver_job import ADD_SLOTS, OR_SLOTS, WAIT, DriverJob, Load, check, submit_all, values

from p4reduce.core.events import Stalled
from p4reduce.driver import Pending
from p4reduce.errors import JobError, P4ReduceError, TransportError
from p4reduce.orders import Hold, Order, RunRing, Stop, Trial
from p4reduce.path import State
from p4reduce.transport.faults import FaultRates

Make = Callable[..., DriverJob]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[DriverJob] = []

    def start(*args: Any, **kwargs: Any) -> DriverJob:
        made.append(DriverJob(*args, **kwargs))
        return made[-1]

    yield start
    for job in made:
        job.close()


# Cuts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_a_cut_in_the_middle_of_buckets_changes_no_bit(make: Make, seed: int) -> None:
    rng = random.Random(seed)
    load = Load(100 * seed, 3, 12)
    wanted = load.undisturbed()
    job = make(3)
    job.budget = rng.randrange(5, 120)
    job.deaf = {rng.randrange(3)}  # it stands still long before the others do
    pending = submit_all(job, load)
    assert job.exhausted.wait(WAIT)
    first = job.cut()
    check(pending, wanted)
    assert job.lost > 0
    assert [one.path.state for one in job.drivers] == [State.RING] * 3
    assert [(one.submitted, one.completed) for one in job.drivers] == [(12, 12)] * 3
    # Who had the last ones from the switch compares them still.
    job.wait_for(lambda: [one.runner.counters.buckets for one in job.drivers if one.runner] == [12 - first] * 3)
    assert job.reports == []
    check(submit_all(job, load), wanted)


def test_who_had_a_bucket_compares_it(make: Make) -> None:
    job = make(3)
    job.deaf = {1}
    array = np.random.default_rng(1).integers(-1000, 1000, 700).astype(np.float32)
    pending = [job.reduce(rank, array) for rank in range(3)]
    done = [pending[rank].future.result(WAIT) for rank in (0, 2)]
    assert not pending[1].future.done()
    assert job.cut() == 0
    for result in (*done, pending[1].future.result(WAIT)):
        np.testing.assert_array_equal(result, 3 * array)
    runners = [one.runner for one in job.drivers]
    job.wait_for(lambda: all(runner is not None and runner.counters.buckets == 1 for runner in runners))
    assert [runner.counters.compared for runner in runners if runner] == [1, 0, 1]
    assert [one.completed for one in job.drivers] == [1, 1, 1]


@pytest.mark.parametrize("seed", range(3))
def test_cut_promotion_cut(make: Make, seed: int) -> None:
    load = Load(1000 + seed, 2, 24)
    wanted = load.undisturbed()
    job = make(2, rates=FaultRates(loss=0.02, duplicate=0.02, reorder=0.02))
    pending = submit_all(job, load, 0, 8)
    job.budget = 40 + 30 * seed
    job.cut()
    pending += submit_all(job, load, 8, 12)
    first = job.promote()
    assert first == 12
    job.budget = 30
    pending += submit_all(job, load, 12, 20)
    assert job.cut() >= 12
    pending += submit_all(job, load, 20)
    check(pending, wanted)
    for driver in job.drivers:
        assert driver.path.fallbacks == {"operator": 2}
        assert driver.path.promotions == 1
        assert driver.path.counters()["results"] > 0


def test_a_stop_while_ring_buckets_are_still_running(make: Make) -> None:
    """The switch path was taken up at 4, but rank 1 has handed in 2 of these when it ends again."""
    load = Load(7, 2, 10)
    wanted = load.undisturbed()
    job = make(2, on_ring=True)
    ours = [load.submit(job, 0, number) for number in range(4)]
    theirs = [load.submit(job, 1, number) for number in range(2)]
    assert job.promote() == 4
    ours += [load.submit(job, 0, number) for number in range(4, 9)]
    job.wait_for(lambda: job.drivers[0].path.counters()["frames_sent"] > 2)
    assert job.stop() == 4
    theirs.append(load.submit(job, 1, 2))
    job.run_ring(4)
    theirs += [load.submit(job, 1, number) for number in range(3, 10)]
    ours.append(load.submit(job, 0, 9))
    check([list(pair) for pair in zip(ours, theirs, strict=True)], wanted)


def test_a_cut_before_the_first_bucket(make: Make) -> None:
    load = Load(8, 2, 4)
    job = make(2)
    assert job.cut() == 0
    check(submit_all(job, load), load.undisturbed())


# Promotions --------------------------------------------------------------------------------------------------------


def test_promotion_with_one_rank_ahead(make: Make) -> None:
    load = Load(11, 3, 9)
    wanted = load.undisturbed()
    job = make(3, on_ring=True)
    pending: list[list[Pending]] = [[] for _ in range(3)]
    for rank, count in enumerate((5, 1, 3)):
        pending[rank] += [load.submit(job, rank, number) for number in range(count)]
    assert not any(answer.failed for answer in job.try_switch())
    assert job.hold() == 5
    for rank in range(3):  # held, whatever their numbers
        pending[rank].append(load.submit(job, rank, len(pending[rank])))
    job.run_switch(5)
    for rank in range(3):
        pending[rank] += [load.submit(job, rank, number) for number in range(len(pending[rank]), 9)]
    check([list(ranks) for ranks in zip(*pending, strict=True)], wanted)
    for driver in job.drivers:
        assert driver.runner is not None
        assert driver.runner.counters.buckets == 5
        assert driver.path.on_switch
        assert driver.completed == 9


@pytest.mark.parametrize("stage", ["trial", "hold"])
def test_a_promotion_that_is_given_up(make: Make, stage: str) -> None:
    load = Load(12, 2, 12)
    wanted = load.undisturbed()
    job = make(2, on_ring=True)
    pending = submit_all(job, load, 0, 3)
    job.try_switch()
    if stage == "hold":
        assert job.hold() == 3
    pending += submit_all(job, load, 3, 6)
    job.give_up_trial()
    pending += submit_all(job, load, 6, 9)
    job.carried_out(job.ring_order[0], "ring")
    assert job.promote() == 9
    pending += submit_all(job, load, 9)
    check(pending, wanted)
    assert [one.path.promotions for one in job.drivers] == [1, 1]
    assert [dict(one.path.fallbacks) for one in job.drivers] == [{}, {}]


def test_a_trial_through_a_switch_that_swallows_everything(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p4reduce.path.TRIAL_SECONDS", 0.1)
    job = make(2, on_ring=True)
    epoch = job.install()
    job.budget = 0
    trial = job.tell(Trial(number=job.number(), epoch=epoch, or_slots=OR_SLOTS, add_slots=ADD_SLOTS))
    for answer in job.answers(trial):
        assert answer.failed
        assert "did not come back within 0.1 s" in answer.message
    assert job.exhausted.is_set()
    repeated = job.again(trial)
    assert all(answer.failed and "did not come back" in answer.message for answer in job.answers(repeated))
    pending = [job.reduce(rank, values(1, rank, 500)) for rank in range(2)]
    np.testing.assert_array_equal(pending[0].future.result(WAIT), pending[1].future.result(WAIT))
    job.give_up_trial()
    assert job.promote() == 1
    assert job.reports == []


def test_a_trial_that_the_switch_refuses(make: Make) -> None:
    job = make(2, on_ring=True)
    epoch = job.install()
    job.revoke()
    trial = job.tell(Trial(number=job.number(), epoch=epoch, or_slots=OR_SLOTS, add_slots=ADD_SLOTS))
    assert all(answer.failed and "does not know the epoch" in answer.message for answer in job.answers(trial))
    assert job.reports == []


def test_a_trial_whose_frames_cannot_be_sent(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make(2, on_ring=True)

    def broken(_: Any) -> int:
        raise TransportError("the path's MTU has become 1300")

    monkeypatch.setattr(job.transports[0], "send", broken)
    epoch = job.install()
    trial = job.tell(Trial(number=job.number(), epoch=epoch, or_slots=OR_SLOTS, add_slots=ADD_SLOTS))
    (answer,) = job.answers(trial, [0])
    assert answer.failed
    assert "1300" in answer.message
    assert job.reports == []


# Orders repeated, overtaken, out of place -----------------------------------------------------------------------------


def test_every_order_may_come_again(make: Make) -> None:
    load = Load(21, 2, 10)
    wanted = load.undisturbed()
    job = make(2)
    pending = submit_all(job, load, 0, 3)
    epoch = job.installed
    assert epoch is not None
    job.revoke()
    stop = Stop(number=job.number(), epoch=epoch)
    first = [answer.bucket for answer in job.answers(job.tell(stop))]
    job.tell(stop)
    assert [answer.bucket for answer in job.answers(job.again(stop))] == first
    ring = job.run_ring(min(first))
    job.tell(ring)
    job.again(ring)
    pending += submit_all(job, load, 3, 5)
    trial = Trial(number=job.number(), epoch=job.install(), or_slots=OR_SLOTS, add_slots=ADD_SLOTS)
    job.tell(trial)
    job.tell(trial)
    assert not any(answer.failed for answer in job.answers(trial))
    assert not any(answer.failed for answer in job.answers(job.again(trial)))
    hold = job.tell(Hold(number=job.number()))
    assert [answer.bucket for answer in job.answers(hold)] == [5, 5]
    pending += submit_all(job, load, 5, 7)
    job.tell(hold)
    assert [answer.bucket for answer in job.answers(job.again(hold))] == [5, 5]
    # A controller that was restarted in between may ask for the trial once more.
    assert not any(answer.failed for answer in job.answers(job.again(trial)))
    assert [answer.bucket for answer in job.answers(job.again(hold))] == [5, 5]
    run = job.run_switch(5)
    job.tell(run)
    job.again(run)
    job.tell(stop)  # long overtaken
    pending += submit_all(job, load, 7)
    check(pending, wanted)
    assert job.reports == []
    assert [one.path.promotions for one in job.drivers] == [1, 1]
    assert [one.answer for one in job.drivers] == [None, None]


@pytest.mark.parametrize("floor", [0, 4], ids=["as answered", "as the controller counts"])
def test_a_stop_that_overtakes_the_order_to_take_the_switch(make: Make, floor: int) -> None:
    load = Load(22, 3, 9)
    wanted = load.undisturbed()
    job = make(3, on_ring=True)
    pending: list[list[Pending]] = [[] for _ in range(3)]
    for rank, count in enumerate((4, 2, 3)):
        pending[rank] += [load.submit(job, rank, number) for number in range(count)]
    job.try_switch()
    assert job.hold() == 4
    job.run_switch(4, [0])  # ranks 1 and 2 never hear of it
    for rank in range(3):
        pending[rank] += [load.submit(job, rank, number) for number in range(len(pending[rank]), 7)]
    assert job.stop() == 2  # rank 1 cannot know better
    job.run_ring(max(2, floor))
    for rank in range(3):
        pending[rank] += [load.submit(job, rank, number) for number in (7, 8)]
    check([list(ranks) for ranks in zip(*pending, strict=True)], wanted)
    assert job.reports == []


def test_a_trial_that_overtakes_the_order_to_take_the_ring(make: Make) -> None:
    load = Load(23, 2, 6)
    wanted = load.undisturbed()
    job = make(2)
    pending = submit_all(job, load, 0, 3)
    first = job.stop()
    job.ring_order = (next(job._epochs), first)
    job.ring_again(ranks=[0])
    trial = Trial(number=job.number(), epoch=job.install(), or_slots=OR_SLOTS, add_slots=ADD_SLOTS)
    answers = job.answers(job.tell(trial, [1]), [1])
    assert answers[0].failed
    assert "has not come" in answers[0].message
    job.give_up_trial()
    pending += submit_all(job, load, 3)
    check(pending, wanted)


def test_a_trial_that_overtakes_the_end_of_the_one_before(make: Make) -> None:
    load = Load(24, 2, 6)
    wanted = load.undisturbed()
    job = make(2, on_ring=True)
    pending = submit_all(job, load, 0, 2)
    for stage in ("trying", "holding"):
        job.try_switch()
        if stage == "holding":
            job.hold()
            pending += submit_all(job, load, 2, 4)
        job.revoke()
    assert job.promote() == 4
    pending += submit_all(job, load, 4)
    check(pending, wanted)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (Hold(number=90), r"\(Hold\) is out of place in state switch of epoch 9: no trial"),
        (RunRing(number=90, epoch=50), r"\(RunRing\) is out of place in state switch"),
        (Stop(number=90, epoch=50), r"\(Stop\) is out of place in state switch of epoch 9: epoch 50 is not"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_order_out_of_place_ends_the_job_here_loudly(
    make: Make, caplog: pytest.LogCaptureFixture, order: Order, message: str
) -> None:
    job = make(2)
    pending = job.reduce(0, values(1, 0, 10))
    job.tell(order, [0])
    with pytest.raises(P4ReduceError, match=message):
        pending.future.result(WAIT)
    with pytest.raises(P4ReduceError, match=message):
        job.reduce(0, values(1, 0, 10))
    assert len(job.reports) == 1
    assert [record.levelname for record in caplog.records if "out of place" in record.message] == ["ERROR"]
    job.tell(Stop(number=91, epoch=9), [0])  # too late for any order: nothing comes of it
    assert job.drivers[0].answer is None


# Any moment --------------------------------------------------------------------------------------------------------


class Story:
    """Random orders at random moments while every rank hands its buckets in from a thread of its own."""

    def __init__(self, job: DriverJob, rng: random.Random) -> None:
        self.job, self.rng = job, rng
        self.told: list[str] = []

    def on_switch(self) -> None:
        if self.rng.random() < 0.5:
            self.job.deaf = {self.rng.randrange(self.job.size)}
        self.job.budget = self.rng.randrange(60)
        self.job.exhausted.wait(self.rng.random() * 0.05)
        self.job.cut()
        self.told.append("cut")

    def on_ring(self) -> None:
        job, fate = self.job, self.rng.random()
        job.try_switch()
        if fate < 0.2:
            job.give_up_trial()
            self.told.append("trial given up")
            return
        first = job.hold()
        if fate < 0.4:
            job.give_up_trial()
            self.told.append("hold given up")
        elif fate < 0.6:
            job.run_switch(first, self.rng.sample(range(job.size), job.size - 1))
            job.cut()
            self.told.append("overtaken")
        else:
            job.run_switch(first)
            self.told.append("promoted")

    def go(self, chapters: int) -> None:
        for _ in range(chapters):
            if self.told and self.told[-1] != "promoted":
                self.on_ring()
            else:
                self.on_switch()


@pytest.mark.parametrize("seed", range(8))
def test_random_orders_at_random_moments(make: Make, seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice((2, 3, 4))
    load = Load(5000 + 100 * seed, size, 60, largest=4000)
    wanted = load.undisturbed()
    rates = FaultRates(loss=0.02, duplicate=0.02, reorder=0.02) if seed % 2 else None
    job = make(size, rates=rates)
    pending: list[list[Pending]] = [[] for _ in range(size)]

    def hand_in(rank: int) -> None:
        own = random.Random(100 * seed + rank)
        for number in range(len(load.counts)):
            pending[rank].append(load.submit(job, rank, number))
            if own.random() < 0.3:  # at most a few in flight, so that the story has its time
                pending[rank][max(0, number - own.randrange(6))].future.result(WAIT)

    threads = [threading.Thread(target=hand_in, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    story = Story(job, rng)
    story.go(9)
    for thread in threads:
        thread.join(3 * WAIT)
        assert not thread.is_alive(), story.told
    check([list(ranks) for ranks in zip(*pending, strict=True)], wanted)
    assert not [report for report in job.reports if not isinstance(report, JobError | Stalled)], story.told
    assert "cut" in story.told
