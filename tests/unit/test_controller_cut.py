# SPDX-License-Identifier: Apache-2.0
"""The cut to the ring path and the way back: who orders what, when, from which bucket on."""

from __future__ import annotations

import pytest
from helpers.jobs import LEASE
from helpers.jobs import JobsRig as Rig

from p4reduce_controller.model import (
    Answer,
    Fence,
    Install,
    OrderKind,
    Path,
    Persist,
    Reason,
    Remove,
    Report,
    Revoke,
    TellOrder,
    TellReport,
)
from p4reduce_controller.paths import MAX_DELAY, TRIAL_SECONDS
from p4reduce_controller.states import State
from p4reduce_controller.store import StoreError

INTEGRITY = Fence(Reason.INTEGRITY, "a sum of bucket 5 is wrong", (), 5)


def running(world: int = 2, mode: str = "auto", ring: bool = True) -> tuple[Rig, int, list[int]]:
    """A job of which every rank has handed in 7 buckets and completed 5."""
    rig = Rig()
    epoch, streams = rig.start(world, mode=mode, ring=ring)
    for stream in streams:
        rig.report(stream, 7, 5)
    return rig, epoch, streams


def state(rig: Rig) -> State:
    return rig.record().state


def cut(rig: Rig, streams: list[int]) -> None:
    rig.report(streams[0], 7, 5, trouble=INTEGRITY)
    assert state(rig) is State.CUTTING


def to_ring(rig: Rig, streams: list[int], *buckets: int) -> None:
    cut(rig, streams)
    rig.switch()
    rig.answer_all(streams, *(buckets or (5,) * len(streams)))
    assert state(rig) is State.RING


def to_trial(rig: Rig, streams: list[int]) -> None:
    """From the ring path to a trial, when its time has come."""
    when = rig.jobs._promote_at(rig.record())
    assert when is not None
    rig.now = when
    for stream in streams:
        rig.report(stream, 7, 7)
    rig.tick(when)
    assert state(rig) is State.PREPARING
    rig.switch()
    assert state(rig) is State.TRYING


def to_switch(rig: Rig, streams: list[int], *buckets: int) -> None:
    to_trial(rig, streams)
    rig.answer_all(streams)
    assert state(rig) is State.HOLDING
    rig.answer_all(streams, *(buckets or (9,) * len(streams)))
    assert state(rig) is State.SWITCH


def kinds(rig: Rig, stream: int) -> list[OrderKind]:
    return [order.kind for order in rig.orders(stream)]


def test_the_whole_way_there_and_back() -> None:
    rig, epoch, streams = running(3)
    before = len(rig.log)
    cut(rig, streams)
    assert [type(a) for a in rig.log[before:]] == [Revoke, Persist, TellOrder, TellOrder, TellOrder]
    stop = rig.orders(streams[2])[-1]
    assert (stop.number, stop.kind, stop.epoch) == (2, OrderKind.STOP, epoch)
    assert stop.why == "integrity: rank 0 on host h1 (10.0.0.1): a sum of bucket 5 is wrong"
    rig.report(streams[0], 7, 5, answer=Answer(2, 6))
    rig.report(streams[1], 7, 5, answer=Answer(2, 5))
    assert state(rig) is State.CUTTING
    before = len(rig.log)
    rig.report(streams[2], 7, 6, answer=Answer(2, 7))
    assert [type(a) for a in rig.log[before:]] == [Persist, TellOrder, TellOrder, TellOrder]
    assert state(rig) is State.RING
    run = rig.orders(streams[1])[-1]
    assert (run.number, run.kind, run.epoch, run.first_bucket, run.why) == (
        3,
        OrderKind.RUN_RING,
        epoch + 1,
        5,
        stop.why,
    )
    assert rig.record().run.present == epoch + 1
    assert rig.record().run.epoch == epoch, "the membership keeps its name"
    assert (rig.record().path, rig.record().path_reason) == (Path.RING, stop.why)
    assert not rig.all_free(), "the entries are not revoked yet"
    rig.switch()
    assert rig.all_free()
    assert rig.jobs.next_deadline() == 1.0
    to_switch(rig, streams, 9, 11, 10)
    assert kinds(rig, streams[0])[3:] == [OrderKind.TRIAL, OrderKind.HOLD, OrderKind.RUN_SWITCH]
    trial, _, back = rig.orders(streams[0])[3:]
    assert (trial.epoch, back.epoch, back.first_bucket) == (epoch + 2, epoch + 2, 11)
    assert trial.or_slots == back.or_slots == 3
    assert trial.add_slots == back.add_slots == 27
    assert [order.number for order in rig.orders(streams[0])] == [1, 2, 3, 4, 5, 6]
    job = rig.record()
    assert (job.path, job.promotions, job.fallbacks) == (Path.SWITCH, 1, {"integrity": 1})
    assert job.path_reason == "the switch is healthy again"
    assert [plan.number for plan in rig.jobs.live()] == [epoch + 2]


def test_answers_to_other_orders_do_not_count_and_the_last_one_does() -> None:
    rig, _, streams = running()
    cut(rig, streams)
    rig.report(streams[0], 7, 5, answer=Answer(2, 5))
    rig.report(streams[0], 7, 5, answer=Answer(2, 6))
    for number in (1, 3):
        rig.report(streams[1], 7, 5, answer=Answer(number, 0))
    assert state(rig) is State.CUTTING
    rig.report(streams[1], 7, 5, answer=Answer(2, 6))
    assert rig.record().run.order.first_bucket == 6


def test_a_ranks_own_reports_are_its_floor() -> None:
    rig, _, streams = running()
    rig.report(streams[1], 7, 6)
    to_ring(rig, streams, 6, 2)
    assert rig.record().run.order.first_bucket == 6


def test_a_second_cut_never_goes_below_the_promotion() -> None:
    rig, _, streams = running()
    to_ring(rig, streams)
    to_switch(rig, streams, 20, 22)
    rig.report(streams[0], 25, 15, trouble=Fence(Reason.REFUSED, "not admitted", (), 22))
    assert state(rig) is State.CUTTING
    rig.answer_all(streams, 17, 16)
    assert rig.record().run.order.first_bucket == 22


def test_silence_of_a_bucket_that_all_have_handed_in_is_the_switchs() -> None:
    rig, _, streams = running()
    rig.report(streams[1], 7, 5, silent=0.99)
    assert state(rig) is State.SWITCH
    rig.report(streams[1], 7, 5, silent=1.0)
    assert state(rig) is State.CUTTING
    assert rig.record().fallbacks == {"silent": 1}
    assert rig.record().path_reason == ("silent: rank 1 on host h2 (10.0.0.2) has had no result of bucket 5 for 1 s")


def test_who_seems_to_be_behind_is_asked_first() -> None:
    rig, _, streams = running(3)
    rig.report(streams[0], 8, 7, silent=1.5)
    asked = [a for a in rig.log if isinstance(a, TellReport)]
    assert asked == [TellReport(streams[1]), TellReport(streams[2])]
    assert state(rig) is State.SWITCH
    rig.report(streams[1], 8, 7)
    assert state(rig) is State.SWITCH
    rig.report(streams[2], 8, 7)
    assert state(rig) is State.CUTTING


def test_after_a_promotion_only_the_switchs_buckets_count() -> None:
    rig, _, streams = running()
    to_ring(rig, streams)
    to_switch(rig, streams, 20, 20)
    rig.report(streams[1], 18, 15)
    rig.report(streams[0], 21, 15, silent=3.0)
    assert state(rig) is State.SWITCH, "rank 1 has not handed bucket 20 in; those before it are the ring's"
    rig.report(streams[1], 21, 16)
    assert state(rig) is State.CUTTING


def test_the_delay_begins_when_all_are_on_the_ring() -> None:
    rig, _, streams = running()
    cut(rig, streams)
    rig.now = 3.0
    rig.answer_all(streams, 5, 5)
    assert rig.jobs._promote_at(rig.record()) == 4.0


@pytest.mark.parametrize("silent", [float("nan"), float("inf"), -3.0])
def test_silence_that_is_no_number_is_none(silent: float) -> None:
    rig, _, streams = running()
    rig.report(streams[0], 7, 5, silent=silent, rtt=silent)
    assert (state(rig), rig.record().run.workers[0].rtt) == (State.SWITCH, 0.0)


def test_what_a_rank_answers_is_passed_on_in_part() -> None:
    rig, _, streams = running()
    REACH[State.HOLDING](rig, streams)
    rig.answer_all(streams, failed=True, message="x" * 5000)
    assert state(rig) is State.RING
    assert rig.orders(streams[0])[-1].why == f"the trial failed: rank 0 on host h1 (10.0.0.1): {'x' * 500}"


def test_silence_that_is_over_is_forgotten() -> None:
    rig, _, streams = running()
    rig.report(streams[0], 8, 7, silent=5.0)
    rig.report(streams[0], 8, 8)
    rig.report(streams[1], 8, 7)
    assert state(rig) is State.SWITCH


@pytest.mark.parametrize("before", [False, True])
def test_without_a_session_less_silence_is_enough(before: bool) -> None:
    rig, _, streams = running()
    if before:
        rig.note(rig.jobs.switch_down("connection reset", 0.0))
        rig.report(streams[0], 7, 5, silent=0.4)
        assert state(rig) is State.SWITCH
    rig.report(streams[0], 7, 5, silent=0.5)
    if not before:
        assert state(rig) is State.SWITCH
        rig.note(rig.jobs.switch_down("connection reset", 0.0))
    assert state(rig) is State.CUTTING
    assert rig.record().fallbacks == {"switch_lost": 1}


def test_silence_of_another_epoch_does_not_count() -> None:
    rig, epoch, streams = running()
    rig.report(streams[0], 7, 5, silent=3.0, present=epoch + 7)
    assert state(rig) is State.SWITCH


STALLED = Fence(Reason.STALLED, "bucket 7 is stalled", (), 7)


def test_a_stall_that_all_have_handed_in_is_the_switchs() -> None:
    rig, _, streams = running()
    rig.report(streams[1], 8, 7)
    rig.report(streams[0], 8, 7, trouble=STALLED)
    assert state(rig) is State.CUTTING
    assert rig.record().fallbacks == {"stalled": 1}


def test_a_stall_in_doubt_is_asked_about() -> None:
    rig, _, streams = running(3)
    rig.report(streams[1], 8, 7)
    rig.report(streams[0], 8, 7, trouble=STALLED)
    rig.report(streams[0], 8, 7, trouble=STALLED)
    assert [a for a in rig.log if isinstance(a, TellReport)] == [TellReport(streams[2])]
    assert (state(rig), rig.jobs.next_deadline()) == (State.SWITCH, 1.0)
    rig.report(streams[2], 8, 7)
    assert (state(rig), rig.record().fallbacks) == (State.CUTTING, {"stalled": 1})


def test_a_stall_that_stays_in_doubt_is_blamed_on_who_is_behind() -> None:
    rig, _, streams = running(3)
    rig.report(streams[1], 8, 7)
    rig.report(streams[0], 8, 7, trouble=STALLED)
    rig.tick(0.9)
    assert state(rig) is State.SWITCH
    rig.tick(1.0)
    rig.switch()
    (fence,) = rig.fences(streams[0])
    assert (fence.reason, fence.ranks, fence.bucket) == (Reason.STALLED, (2,), 7)
    assert "rank 0 on host h1 (10.0.0.1): bucket 7 is stalled" in fence.message


@pytest.mark.parametrize(("mode", "ring"), [("auto", False), ("require", False), ("require", True)])
@pytest.mark.parametrize("reason", [Reason.STALLED, Reason.INTEGRITY, Reason.REFUSED])
def test_without_a_way_out_trouble_is_an_error_as_ever(mode: str, ring: bool, reason: Reason) -> None:
    rig, _, streams = running(2, mode, ring)
    rig.report(streams[0], 7, 5, silent=30.0)
    assert state(rig) is State.SWITCH
    rig.report(streams[0], 7, 5, trouble=Fence(reason, "as it is", (), 5))
    rig.switch()
    for stream in streams:
        (fence,) = rig.fences(stream)
        assert (fence.reason, fence.ranks, fence.bucket) == (reason, (0,), 5)
        assert fence.message == "job 'train': rank 0 on host h1 (10.0.0.1): as it is"
    assert rig.all_free()


@pytest.mark.parametrize("reason", [Reason.MISMATCH, Reason.ABORTED])
def test_what_the_ring_cannot_mend_is_an_error(reason: Reason) -> None:
    rig, _, streams = running()
    rig.report(streams[0], 7, 5, trouble=Fence(reason, "", (), 5))
    assert state(rig) is State.FAILED


def test_trouble_with_an_epoch_that_is_over_is_old_news() -> None:
    rig, epoch, streams = running()
    cut(rig, streams)
    refused = Fence(Reason.REFUSED, "unknown epoch", (), 6)
    rig.report(streams[1], 7, 5, trouble=refused)
    assert state(rig) is State.CUTTING
    rig.answer_all(streams)
    rig.report(streams[1], 7, 5, trouble=refused, present=epoch)
    assert state(rig) is State.RING
    rig.report(streams[1], 7, 5, trouble=Fence(Reason.INTEGRITY, "the paths differ", (), 6))
    assert state(rig) is State.FAILED


@pytest.mark.parametrize("in_cut", [False, True])
def test_trouble_of_the_ring_below_a_promotion_is_an_error(in_cut: bool) -> None:
    rig, _, streams = running()
    to_ring(rig, streams)
    to_switch(rig, streams, 20, 20)
    if in_cut:
        rig.report(streams[0], 25, 15, trouble=Fence(Reason.REFUSED, "unknown epoch", (), 21))
        assert state(rig) is State.CUTTING
    rig.report(streams[1], 25, 15, trouble=Fence(Reason.INTEGRITY, "the paths differ", (), 16))
    assert state(rig) is State.FAILED


def test_who_does_not_stop_is_lost() -> None:
    rig, _, streams = running(3)
    cut(rig, streams)
    rig.report(streams[1], 7, 5, answer=Answer(2, 5))
    rig.now = 6.0
    for stream in streams:
        rig.report(stream, 7, 5)
    rig.tick(LEASE)
    for stream in streams:
        (fence,) = rig.fences(stream)
        assert (fence.reason, fence.ranks) == (Reason.WORKER_LOST, (0, 2))
        assert "rank 0 on host h1 (10.0.0.1), rank 2 on host h3 (10.0.0.3) are lost: no answer" in fence.message
        assert "stop the switch path" in fence.message


def stay(*_: object) -> None:
    """The job is on the switch already."""


REACH = {
    State.SWITCH: stay,
    State.CUTTING: cut,
    State.RING: to_ring,
    State.PREPARING: lambda rig, streams: (to_ring(rig, streams), rig.tick(1.0)),
    State.TRYING: lambda rig, streams: (to_ring(rig, streams), to_trial(rig, streams)),
    State.HOLDING: lambda rig, streams: (
        to_ring(rig, streams),
        to_trial(rig, streams),
        rig.answer_all(streams),
    ),
}


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("where", REACH)
def test_a_lost_worker_is_named_in_every_state(where: State, silent: bool) -> None:
    rig, _, streams = running()
    REACH[where](rig, streams)
    assert state(rig) is where
    if silent:
        rig.now += 5.0
        rig.report(streams[0], 7, 5)
        rig.record().run.due = None
        rig.tick(rig.record().run.workers[1].heard + LEASE)
    else:
        rig.note(rig.jobs.broken(streams[1], rig.now))
    rig.switch()
    (fence,) = rig.fences(streams[0])
    assert (fence.reason, fence.ranks) == (Reason.WORKER_LOST, (1,))
    assert (state(rig), rig.all_free(), rig.saved()) == (State.FAILED, True, None)


@pytest.mark.parametrize("where", REACH)
def test_a_newer_incarnation_replaces_the_job_in_every_state(where: State) -> None:
    rig, epoch, streams = running()
    REACH[where](rig, streams)
    for rank in (0, 1):
        rig.join(rank, incarnation=1, ring=True)
    rig.switch()
    assert rig.fences(streams[0])[0].reason is Reason.SUPERSEDED
    assert (state(rig), rig.record().fallbacks) == (State.SWITCH, {})
    assert rig.record().run.epoch > epoch
    assert sum(bool(pool.job) for pool in rig.jobs.pools()) == 1


@pytest.mark.parametrize("late", [False, True])
def test_a_trial_that_fails_leaves_the_job_where_it_is(late: bool) -> None:
    rig, epoch, streams = running()
    to_ring(rig, streams)
    to_trial(rig, streams)
    old = rig.record().run.running
    if late:
        rig.report(streams[0], 7, 7, answer=Answer(rig.record().run.order.number))
        rig.tick(rig.now + TRIAL_SECONDS)
    else:
        rig.answer_all(streams, failed=True, message="no frame came back")
    assert state(rig) is State.RING
    again = rig.orders(streams[1])[-1]
    assert (again.kind, again.epoch, again.first_bucket) == (old.kind, old.epoch, old.first_bucket)
    assert again.number == old.number + 2
    assert ("no answer in time from rank 1" if late else "no frame came back") in again.why
    assert rig.record().run.present == epoch + 1
    assert rig.record().run.delay == 2.0
    rig.switch()
    assert rig.all_free()
    to_trial(rig, streams)
    assert rig.record().run.plan.number == epoch + 3


def test_the_delay_doubles_with_every_trouble_and_starts_again_after_a_quiet_minute() -> None:
    rig, _, streams = running()
    to_ring(rig, streams)
    delays = []
    for _ in range(8):
        began = rig.now
        to_trial(rig, streams)
        delays.append(rig.now - began)
        rig.answer_all(streams, failed=True)
        rig.switch()
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, MAX_DELAY]
    to_switch(rig, streams)
    rig.now += 30.0
    rig.report(streams[0], 12, 11, trouble=Fence(Reason.REFUSED, "", (), 11))
    assert rig.record().run.delay == MAX_DELAY
    rig.answer_all(streams, 11, 11)
    to_switch(rig, streams, 12, 12)
    for _ in range(11):
        rig.now += 6.0
        for stream in streams:
            rig.report(stream, 14, 13)
    rig.report(streams[0], 14, 13, trouble=Fence(Reason.REFUSED, "", (), 13))
    assert rig.record().run.delay == 1.0


def test_who_does_not_hold_is_lost() -> None:
    rig, _, streams = running()
    REACH[State.HOLDING](rig, streams)
    rig.report(streams[0], 9, 7, answer=Answer(rig.record().run.order.number, 9))
    rig.now += 5.0
    for stream in streams:
        rig.report(stream, 9, 8)
    rig.tick(rig.now + LEASE - 5.0)
    rig.switch()
    assert rig.fences(streams[0])[0].ranks == (1,)
    assert "hold new buckets back" in rig.fences(streams[0])[0].message


@pytest.mark.parametrize("where", [State.TRYING, State.HOLDING])
def test_a_switch_that_goes_away_under_a_trial(where: State) -> None:
    rig, _, streams = running()
    REACH[where](rig, streams)
    rig.note(rig.jobs.switch_down("killed", rig.now))
    rig.note(rig.jobs.switch_up(set(), rig.now + 0.5))
    rig.now += 0.5
    assert state(rig) is State.RING
    rig.switch()
    assert rig.jobs._promote_at(rig.record()) == rig.now + 2.0, "the delay has doubled"
    to_switch(rig, streams)


def test_a_promotion_that_comes_too_late_for_the_session() -> None:
    rig, _, streams = running()
    REACH[State.HOLDING](rig, streams)
    rig.note(rig.jobs.switch_down("killed", rig.now))
    rig.answer_all(streams, 9, 9)
    assert state(rig) is State.RING
    assert kinds(rig, streams[0])[-1] is OrderKind.RUN_RING
    assert rig.jobs._promote_at(rig.record()) is None


def test_trouble_with_the_trial_itself_only_ends_the_trial() -> None:
    rig, _, streams = running()
    REACH[State.TRYING](rig, streams)
    rig.report(streams[0], 7, 7, trouble=Fence(Reason.REFUSED, "no"), present=rig.record().run.plan.number)
    assert state(rig) is State.RING


@pytest.mark.parametrize("where", [State.PREPARING, State.TRYING, State.HOLDING])
def test_a_wrong_sum_of_the_ring_during_a_promotion_is_an_error(where: State) -> None:
    rig, _, streams = running()
    REACH[where](rig, streams)
    run = rig.record().run
    present = run.present if where is State.PREPARING else run.plan.number
    rig.report(streams[0], 7, 6, trouble=Fence(Reason.INTEGRITY, "the paths differ", (), 6), present=present)
    assert state(rig) is State.FAILED


def test_an_install_that_fails_is_tried_again_later() -> None:
    rig, _, streams = running()
    to_ring(rig, streams)
    rig.tick(1.0)
    rig.switch(error="table full")
    assert state(rig) is State.RING
    assert len(rig.orders(streams[0])) == 3, "the ranks were never told"
    rig.tick(3.0)
    assert state(rig) is State.PREPARING


def test_a_restarted_switch_moves_the_job_and_brings_it_back() -> None:
    rig, epoch, streams = running()
    rig.note(rig.jobs.switch_down("killed", 0.0))
    rig.note(rig.jobs.switch_up(set(), 0.2))
    assert rig.record().fallbacks == {"switch_lost": 1}
    assert f"the switch was restarted and holds nothing of epoch {epoch}" in rig.record().path_reason
    rig.switch()
    rig.answer_all(streams, 5, 5)
    assert rig.jobs.next_deadline() == 1.2, "a second after the session"
    to_switch(rig, streams)


def test_lost_entries_lead_to_a_cut_or_a_fence() -> None:
    rig, epoch, streams = running()
    rig.note(rig.jobs.entries_lost({epoch + 50}, 0.0))
    assert state(rig) is State.SWITCH
    rig.note(rig.jobs.entries_lost({epoch}, 0.0))
    assert rig.record().fallbacks == {"switch_lost": 1}
    rig.answer_all(streams, 5, 5)
    other, _, told = running(ring=False)
    other.note(other.jobs.entries_lost({epoch}, 0.0))
    other.switch()
    assert other.fences(told[0])[0].reason is Reason.SWITCH_LOST
    assert "has lost entries" in other.fences(told[0])[0].message


def test_no_epoch_is_left_for_the_ring() -> None:
    rig, _, streams = running()
    cut(rig, streams)

    def fail() -> int:
        raise StoreError("the disk is full")

    rig.jobs._next_epoch = fail
    rig.answer_all(streams, 5, 5)
    assert rig.fences(streams[1])[0].message == "job 'train': the disk is full"


def test_no_epoch_is_left_for_a_promotion() -> None:
    rig, _, streams = running()
    to_ring(rig, streams)
    epochs = rig.jobs._next_epoch

    def fail() -> int:
        raise StoreError("the disk is full")

    rig.jobs._next_epoch = fail
    rig.tick(1.0)
    assert state(rig) is State.RING
    assert rig.jobs._pools.free == [(0, 1024)]
    rig.jobs._next_epoch = epochs
    to_switch(rig, streams)


def test_late_answers_of_the_switch_about_a_promotion_given_up() -> None:
    rig, _, streams = running()
    to_ring(rig, streams)
    rig.tick(1.0)
    install = rig.work[-1]
    assert isinstance(install, Install)
    rig.note(rig.jobs.drain(1.0))
    assert state(rig) is State.RING
    assert [type(work) for work in rig.work] == [Install, Revoke]
    rig.switch()
    assert [type(a) for a in rig.log if isinstance(a, Install | Revoke | Remove)][-3:] == [Install, Revoke, Remove]
    assert rig.all_free()


def test_a_stream_gets_the_current_order_whenever_it_opens() -> None:
    rig = Rig()
    for rank in (0, 1):
        rig.join(rank, ring=True)
    rig.switch()
    first = rig.open(100, 0)
    rig.report(first, 3, 0, trouble=INTEGRITY)
    second = rig.open(100, 1)
    assert [order.number for order in rig.orders(second)] == [2]
    rig.note(rig.jobs.report(second, Report("train", 100, 1, answer=Answer(2, 0)), 0.0))
    assert state(rig) is State.CUTTING
    rig.report(first, 3, 0, answer=Answer(2, 0))
    assert state(rig) is State.RING
