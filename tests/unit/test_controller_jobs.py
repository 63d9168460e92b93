# SPDX-License-Identifier: Apache-2.0
"""Admission and liveness without I/O: what the ranks are told, in which order, and what is left behind."""

from __future__ import annotations

import pytest
from helpers.jobs import LEASE
from helpers.jobs import JobsRig as Rig

from p4reduce_controller.admission import Code
from p4reduce_controller.model import (
    Close,
    Fence,
    Grant,
    Install,
    LeaveDone,
    OrderKind,
    Reason,
    Register,
    Remove,
    Report,
    Revoke,
    TellFence,
    TellLeft,
    TellOrder,
    WorkerState,
)
from p4reduce_controller.states import State
from p4reduce_controller.store import StoreError


def test_nobody_is_answered_before_all_are_there_and_the_switch_is_ready() -> None:
    rig = Rig()
    first, second = rig.join(0), rig.join(1)
    assert rig.answer(first) is None
    assert [type(w) for w in rig.work] == [Install]
    assert rig.answer(second) is None
    rig.switch()
    grants = [rig.answer(first), rig.answer(second)]
    assert all(isinstance(grant, Grant) for grant in grants)
    run = rig.record().run
    assert run.plan.number == 100
    assert [(place.port, place.udp_port) for place in run.plan.places] == [(1, 4000), (2, 4001)]
    assert rig.record().state is State.SWITCH


def test_a_rank_that_is_there_twice_is_refused_and_the_first_stays() -> None:
    rig = Rig()
    first, again = rig.join(0), rig.join(0)
    code, message = rig.refusal(again)
    assert code is Code.ALREADY_EXISTS
    assert "rank 0 on host h1 (10.0.0.1) has already joined (incarnation 0)" in message
    rig.join(1)
    rig.switch()
    assert isinstance(rig.answer(first), Grant)
    code, message = rig.refusal(rig.join(0))
    assert code is Code.ALREADY_EXISTS
    assert "running in epoch 100: raise the incarnation (now 0)" in message


def test_world_sizes_that_differ_are_both_named() -> None:
    rig = Rig()
    rig.join(0, world=2)
    waiting = rig.refusal(rig.join(1, world=3))
    rig.join(1, world=2)
    rig.switch()
    running = rig.refusal(rig.join(2, world=5))
    for (code, message), said in ((waiting, 3), (running, 5)):
        assert code is Code.FAILED_PRECONDITION
        assert f"says world_size {said}, the ranks before it said 2" in message


def test_those_who_wait_in_vain_are_told_of_ranks_with_another_world_size() -> None:
    rig = Rig()
    first, second = rig.join(0, world=4, wait=3.0), rig.join(1, world=4)
    for rank, world in ((2, 8), (3, 5), (5, 8)):
        assert rig.refusal(rig.join(rank, world=world))[0] is Code.FAILED_PRECONDITION
    rig.join(3, world=4)
    rig.tick(3.0)
    for number in (first, second):
        code, message = rig.refusal(number)
        assert code is Code.DEADLINE_EXCEEDED
        assert message == (
            "job 'train': after 3 s rank 2 of 4 has not joined: "
            "rank 2 came with world size 8 and was refused (host h3, 10.0.0.3), "
            "rank 5 came with world size 8 and was refused (host h6, 10.0.0.6): start all ranks with the same number"
        )
    again = rig.join(0, world=4, wait=3.0)
    rig.tick(6.0)
    assert "ranks 1, 2 and 3 of 4 have not joined: start them, or see why they fail" in rig.refusal(again)[1]


def test_two_ranks_cannot_receive_on_one_socket() -> None:
    rig = Rig()
    rig.join(0, world=9, port=5000)
    code, message = rig.refusal(rig.join(8, world=9, port=5000))
    assert code is Code.FAILED_PRECONDITION
    assert "ranks 0 and 8 both say that they receive on 10.0.0.1 port 5000" in message
    assert rig.answer(rig.join(1, world=9, port=5000)) is None, "another host is another socket"


def test_waiting_ends_for_all_and_names_who_is_missing() -> None:
    rig = Rig()
    numbers = [rig.join(0, world=5, wait=3.0), rig.join(3, world=5, wait=50.0)]
    assert rig.jobs.next_deadline() == 3.0
    rig.tick(2.9)
    assert rig.answer(numbers[0]) is None
    rig.tick(3.0)
    for number in numbers:
        code, message = rig.refusal(number)
        assert code is Code.DEADLINE_EXCEEDED
        assert "after 3 s ranks 1, 2 and 4 of 5 have not joined" in message
    assert rig.jobs.jobs() == []
    assert rig.jobs.next_deadline() is None


def test_a_client_that_is_gone_makes_room_again() -> None:
    rig = Rig()
    gone = rig.join(0)
    rig.note(rig.jobs.withdraw(gone, 1.0))
    assert rig.jobs.jobs() == []
    back, other = rig.join(0), rig.join(1)
    rig.switch()
    assert rig.answer(gone) is None
    assert isinstance(rig.answer(back), Grant)
    assert isinstance(rig.answer(other), Grant)
    rig.note(rig.jobs.withdraw(back, 2.0))
    assert rig.record().state is State.SWITCH, "what has been answered cannot be withdrawn"


def test_a_client_that_dies_while_the_switch_is_set_up() -> None:
    rig = Rig()
    gone, other = rig.join(0), rig.join(1)
    rig.note(rig.jobs.withdraw(gone, 0.0))
    code, message = rig.refusal(other)
    assert code is Code.ABORTED
    assert "rank 0 on host h1 (10.0.0.1) went away" in message
    rig.switch()
    assert [type(a) for a in rig.log if isinstance(a, Install | Revoke | Remove)] == [Install, Revoke, Remove]
    assert rig.all_free()
    assert rig.jobs.jobs() == []


def test_a_switch_that_refuses_the_epoch() -> None:
    rig = Rig()
    numbers = [rig.join(0), rig.join(1)]
    install = rig.work.popleft()
    rig.note(rig.jobs.installed(install.plan.number, "table full", 0.0))
    for number in numbers:
        code, message = rig.refusal(number)
        assert code is Code.UNAVAILABLE
        assert "table full" in message
    assert not rig.all_free(), "what was written in part must come off first"
    rig.switch()
    assert rig.all_free()
    again = [rig.join(0), rig.join(1)]
    rig.switch()
    assert all(isinstance(rig.answer(number), Grant) for number in again)
    assert rig.record().run.plan.number == 101


def test_an_epoch_store_that_fails() -> None:
    rig = Rig(pool_slots=2, slots=2)
    epochs = rig.jobs._next_epoch

    def fail() -> int:
        raise StoreError("the disk is full")

    rig.jobs._next_epoch = fail
    rig.join(0)
    code, message = rig.refusal(rig.join(1))
    assert code is Code.INTERNAL
    assert "the disk is full" in message
    assert not rig.work
    rig.jobs._next_epoch = epochs
    rig.start(2)
    assert rig.record().state is State.SWITCH, "the only pool was not given back"


def test_no_pool_is_free() -> None:
    rig = Rig(pool_slots=2, slots=4)
    rig.start(1, "a")
    rig.start(1, "b")
    first = rig.join(0, 2, "c")
    code, message = rig.refusal(rig.join(1, 2, "c"))
    assert code is Code.RESOURCE_EXHAUSTED
    assert "the switch has no room for it, it needs 2 slots in a row: end another job" in message
    assert rig.refusal(first)[0] is Code.RESOURCE_EXHAUSTED


def test_a_pool_that_is_being_freed_is_waited_for() -> None:
    rig = Rig(pool_slots=2, slots=2)
    epoch, _ = rig.start(1, "a")
    rig.leave(epoch, 0, "a")
    waiting = rig.join(0, 1, "b")
    assert rig.answer(waiting) is None
    assert rig.record("b").state is State.JOINING
    rig.switch()
    assert isinstance(rig.answer(waiting), Grant)


def test_waiting_for_a_pool_ends_too() -> None:
    rig = Rig(pool_slots=2, slots=2)
    epoch, _ = rig.start(1, "a")
    rig.leave(epoch, 0, "a")
    waiting = rig.join(0, 1, "b", wait=2.0)
    rig.tick(2.0)
    code, message = rig.refusal(waiting)
    assert code is Code.DEADLINE_EXCEEDED
    assert "all ranks are there, but no pool" in message


def test_a_lost_worker_is_revoked_before_the_others_are_told() -> None:
    rig = Rig()
    _, streams = rig.start(3)
    rig.note(rig.jobs.broken(streams[1], 5.0))
    assert rig.record().state is State.FAILED
    assert rig.record().run.workers[1].state is WorkerState.LOST
    assert [type(w) for w in rig.work] == [Revoke]
    assert rig.fences(streams[0]) == []
    rig.switch()
    for stream in (streams[0], streams[2]):
        (fence,) = rig.fences(stream)
        assert (fence.reason, fence.ranks) == (Reason.WORKER_LOST, (1,))
        assert "rank 1 on host h2 (10.0.0.2) is lost: its progress stream ended without a leave" in fence.message
    order = [type(a) for a in rig.log if isinstance(a, Revoke | TellFence | Remove)]
    assert order == [Revoke, TellFence, TellFence, Remove]
    assert rig.all_free()
    assert rig.record().reason == fence.message


def test_a_silent_worker_is_lost_when_its_lease_ends() -> None:
    rig = Rig()
    epoch, streams = rig.start(2)
    rig.now = 7.0
    rig.note(rig.jobs.report(streams[0], Report("train", epoch, 0, 4, 3), 7.0))
    assert rig.jobs.next_deadline() == LEASE
    rig.tick(9.99)
    assert rig.record().state is State.SWITCH
    rig.tick(LEASE)
    rig.switch()
    (fence,) = rig.fences(streams[0])
    assert (fence.reason, fence.ranks) == (Reason.WORKER_LOST, (1,))
    assert "no report for 10 s" in fence.message
    assert rig.fences(streams[1]) == [fence], "the silent one may be listening"


def test_a_worker_that_never_opens_its_stream_is_lost() -> None:
    rig = Rig()
    for rank in range(2):
        rig.join(rank)
    rig.switch()
    stream = rig.open(100, 0)
    rig.tick(5.0)
    rig.note(rig.jobs.report(stream, Report("train", 100, 0), 5.0))
    rig.tick(LEASE)
    rig.switch()
    assert rig.fences(stream)[0].ranks == (1,)


def test_trouble_fences_all_and_passes_on_what_was_said() -> None:
    rig = Rig()
    epoch, streams = rig.start(2)
    trouble = Fence(Reason.MISMATCH, "bucket 4: rank 0 and 1 differ", (), 4)
    rig.note(rig.jobs.report(streams[1], Report("train", epoch, 1, 5, 4, trouble), 1.0))
    rig.switch()
    for stream in streams:
        (fence,) = rig.fences(stream)
        assert (fence.reason, fence.ranks, fence.bucket) == (Reason.MISMATCH, (1,), 4)
        assert "rank 1 on host h2 (10.0.0.2): bucket 4: rank 0 and 1 differ" in fence.message


def test_a_stall_is_blamed_on_who_has_not_handed_the_bucket_in() -> None:
    rig = Rig()
    epoch, streams = rig.start(4)
    for rank, submitted in ((0, 9), (1, 7), (2, 7), (3, 8)):
        rig.note(rig.jobs.report(streams[rank], Report("train", epoch, rank, submitted, 7), 1.0))
    stall = Fence(Reason.STALLED, "bucket 7 is stalled", (), 7)
    rig.note(rig.jobs.report(streams[0], Report("train", epoch, 0, 9, 7, stall), 2.0))
    rig.switch()
    assert rig.fences(streams[3])[0].ranks == (1, 2)


def test_leaving_one_by_one() -> None:
    rig = Rig()
    epoch, streams = rig.start(3)
    left = rig.leave(epoch, 1, submitted=12)
    assert isinstance(rig.answer(left), LeaveDone)
    assert rig.record().state is State.LEAVING
    assert [a for a in rig.log if isinstance(a, TellLeft)] == [TellLeft(streams[0], 1, 12), TellLeft(streams[2], 1, 12)]
    rig.report(streams[1], 13, 13)
    rig.note(rig.jobs.broken(streams[1], 1.0))
    assert len([a for a in rig.log if isinstance(a, TellLeft)]) == 2
    assert rig.record().state is State.LEAVING
    rig.leave(epoch, 0)
    last = rig.leave(epoch, 2)
    assert rig.answer(last) is None, "the last one waits for the switch"
    assert Close(streams[2]) in rig.log
    rig.switch()
    assert isinstance(rig.answer(last), LeaveDone)
    assert rig.all_free()
    assert rig.jobs.jobs() == []
    assert not [a for a in rig.log if isinstance(a, TellFence)]


def test_leaving_twice_or_too_late_is_no_error() -> None:
    rig = Rig()
    epoch, _ = rig.start(2)
    assert isinstance(rig.answer(rig.leave(epoch, 0)), LeaveDone)
    assert isinstance(rig.answer(rig.leave(epoch, 0)), LeaveDone)
    assert rig.refusal(rig.leave(epoch, 7))[0] is Code.NOT_FOUND
    last, again = rig.leave(epoch, 1), rig.leave(epoch, 1)
    rig.switch()
    assert isinstance(rig.answer(last), LeaveDone)
    assert isinstance(rig.answer(again), LeaveDone)
    assert isinstance(rig.answer(rig.leave(epoch, 1)), LeaveDone)
    assert isinstance(rig.answer(rig.leave(4711, 0, "never seen")), LeaveDone)


def test_leaving_a_failed_job() -> None:
    rig = Rig()
    epoch, streams = rig.start(2)
    rig.note(rig.jobs.broken(streams[0], 1.0))
    assert isinstance(rig.answer(rig.leave(epoch, 1)), LeaveDone)
    rig.switch()
    assert rig.record().state is State.FAILED


def test_a_rank_that_left_can_join_the_next_round_early() -> None:
    rig = Rig()
    epoch, _ = rig.start(2)
    rig.leave(epoch, 0)
    early = rig.join(0)
    assert rig.answer(early) is None
    assert rig.refusal(rig.join(1))[0] is Code.ALREADY_EXISTS, "rank 1 is still in"
    rig.leave(epoch, 1)
    late = rig.join(1)
    rig.switch()
    assert isinstance(rig.answer(early), Grant)
    assert isinstance(rig.answer(late), Grant)
    assert rig.record().run.plan.number == epoch + 1


def test_an_early_rank_does_not_wait_for_ever() -> None:
    rig = Rig()
    epoch, _ = rig.start(2)
    rig.leave(epoch, 0)
    early = rig.join(0, wait=2.0)
    rig.tick(2.0)
    code, message = rig.refusal(early)
    assert code is Code.DEADLINE_EXCEEDED
    assert "rank 1 did not leave epoch 100 in time" in message
    assert rig.record().state is State.LEAVING


def test_a_higher_incarnation_fences_the_running_one_at_once() -> None:
    rig = Rig()
    _, streams = rig.start(2, incarnation=1)
    new = rig.join(0, incarnation=2)
    assert rig.record().state is State.JOINING
    rig.switch()
    for stream in streams:
        (fence,) = rig.fences(stream)
        assert fence.reason is Reason.SUPERSEDED
        assert "incarnation 2 replaces incarnation 1" in fence.message
    other = rig.join(1, incarnation=2)
    rig.switch()
    assert isinstance(rig.answer(new), Grant)
    assert isinstance(rig.answer(other), Grant)
    assert (rig.record().incarnation, rig.record().run.plan.number) == (2, 101)
    code, message = rig.refusal(rig.join(0, incarnation=1))
    assert code is Code.FAILED_PRECONDITION
    assert "is at incarnation 2, rank 0 comes with 1" in message


def test_a_higher_incarnation_may_come_with_another_world_size() -> None:
    rig = Rig()
    rig.start(3)
    rig.join(0, world=2, incarnation=1)
    rig.join(1, world=2, incarnation=1)
    rig.switch()
    assert rig.record().world_size == 2
    assert rig.record().state is State.SWITCH


@pytest.mark.parametrize("installing", [False, True])
def test_a_higher_incarnation_replaces_one_that_waits(installing: bool) -> None:
    rig = Rig()
    old = [rig.join(0)] + ([rig.join(1)] if installing else [])
    new = rig.join(0, incarnation=1)
    for number in old:
        assert rig.refusal(number)[0] is Code.ABORTED
    new_too = rig.join(1, incarnation=1)
    rig.switch()
    assert isinstance(rig.answer(new), Grant)
    assert isinstance(rig.answer(new_too), Grant)
    assert sum(bool(pool.job) for pool in rig.jobs.pools()) == 1


@pytest.mark.parametrize("incarnation", [0, 3, 7])
def test_a_failed_job_can_be_joined_again_in_any_incarnation(incarnation: int) -> None:
    rig = Rig()
    _, streams = rig.start(2, incarnation=3)
    rig.note(rig.jobs.broken(streams[0], 1.0))
    again = [rig.join(rank, incarnation=incarnation) for rank in (0, 1)]
    rig.switch()
    assert all(isinstance(rig.answer(number), Grant) for number in again)
    assert rig.record().reason == ""
    assert rig.fences(streams[1])[0].reason is Reason.WORKER_LOST
    assert sum(bool(pool.job) for pool in rig.jobs.pools()) == 1


def test_a_stream_is_registered_once_and_belongs_to_one_rank() -> None:
    rig = Rig()
    epoch, streams = rig.start(2)
    run = rig.record().run
    assert rig.told(streams[0]) == [Register(streams[0]), TellOrder(streams[0], run.order)]
    assert (run.order.kind, run.order.epoch, run.order.first_bucket) == (OrderKind.RUN_SWITCH, epoch, 0)
    second = rig.open(epoch, 0)
    assert rig.refusal(second)[0] is Code.ALREADY_EXISTS
    rig.note(rig.jobs.report(streams[0], Report("train", epoch, 1), 0.0))
    assert rig.refusal(streams[0])[0] is Code.INVALID_ARGUMENT
    assert rig.refusal(rig.open(epoch, 5))[0] is Code.FAILED_PRECONDITION
    assert rig.record().state is State.SWITCH


def test_a_late_stream_is_told_why_its_epoch_is_over() -> None:
    rig = Rig()
    for rank in range(2):
        rig.join(rank)
    rig.switch()
    stream = rig.open(100, 0)
    rig.note(rig.jobs.broken(stream, 0.0))
    before = rig.open(100, 1)
    assert rig.fences(before) == [], "not before the entries are revoked"
    rig.switch()
    assert rig.fences(before)[0].ranks == (0,)
    rig.join(0)
    after = rig.open(100, 1)
    assert rig.fences(after) == rig.fences(before), "even when the record has moved on"
    epoch, _ = rig.start(1, "other")
    rig.leave(epoch, 0, "other")
    rig.switch()
    code, message = rig.refusal(rig.open(epoch, 0, "other"))
    assert code is Code.NOT_FOUND
    assert f"has no epoch {epoch} here: it is over; join again" in message


@pytest.mark.parametrize("before", [False, True])
def test_a_stream_from_before_the_controllers_restart_is_told_of_it(before: bool) -> None:
    rig = Rig()
    if not before:
        rig.start(2)
    for epoch in (99, 5000):
        late = rig.open(epoch, 1)
        (fence,) = rig.fences(late)
        assert fence.reason is Reason.ABORTED
        assert fence.message == (
            f"job 'train': this controller knows nothing of epoch {epoch}: it was over before the controller was "
            "restarted, or the controller runs without the state file it had; restart the job"
        )
        assert len(rig.told(late)) == 1, "it is not registered"
        rig.note(rig.jobs.report(late, Report("train", epoch, 1, 3, 2), rig.now))
        rig.note(rig.jobs.broken(late, rig.now))
    if not before:
        assert rig.record().state is State.SWITCH


def test_without_a_switch_nobody_joins_and_running_jobs_go_on() -> None:
    rig = Rig()
    epoch, streams = rig.start(2)
    half = rig.join(0, job="other")
    rig.note(rig.jobs.switch_down("connection lost", rig.now))
    code, message = rig.refusal(rig.join(0, job="third"))
    assert code is Code.UNAVAILABLE
    assert "connection lost" in message
    rig.note(rig.jobs.report(streams[0], Report("train", epoch, 0, 5, 5), 1.0))
    assert rig.record().state is State.SWITCH
    rig.note(rig.jobs.switch_up({epoch}, 2.0))
    assert rig.record().state is State.SWITCH
    other = rig.join(1, job="other")
    rig.switch()
    assert isinstance(rig.answer(half), Grant)
    assert isinstance(rig.answer(other), Grant)


def test_a_switch_that_lost_the_epoch_ends_the_job() -> None:
    rig = Rig()
    _, streams = rig.start(2)
    kept, _ = rig.start(1, "kept")
    rig.note(rig.jobs.switch_down("restarted", rig.now))
    rig.note(rig.jobs.switch_up({kept}, 2.0))
    assert rig.record("kept").state is State.SWITCH
    rig.switch()
    assert rig.fences(streams[0])[0].reason is Reason.SWITCH_LOST
    assert rig.record().state is State.FAILED
    assert [pool.job for pool in rig.jobs.pools() if pool.job] == ["kept"]


def test_workers_are_told_even_when_the_switch_cannot_revoke_and_the_pool_stays_taken() -> None:
    rig = Rig(pool_slots=2, slots=2)
    _, streams = rig.start(2)
    rig.note(rig.jobs.broken(streams[0], 1.0))
    rig.switch(error="timeout")
    assert not [action for action in rig.log if isinstance(action, Remove)]
    assert rig.fences(streams[1])[0].reason is Reason.WORKER_LOST
    assert not rig.all_free(), "the old epoch's entries may still be there"
    assert rig.jobs.next_deadline() == 5.0
    rig.tick(5.0)
    rig.switch(error="timeout")
    rig.note(rig.jobs.switch_down("gone", rig.now))
    rig.tick(20.0)
    assert not rig.work, "there is nobody to ask"
    rig.note(rig.jobs.switch_up(set(), 21.0))
    rig.switch()
    assert rig.all_free()
    assert len(rig.fences(streams[1])) == 1


def test_the_last_leave_is_answered_even_when_the_switch_fails() -> None:
    rig = Rig()
    epoch, _ = rig.start(1)
    last = rig.leave(epoch, 0)
    rig.switch(error="timeout")
    assert isinstance(rig.answer(last), LeaveDone)
    rig.tick(5.0)
    rig.switch()
    assert rig.all_free()


def test_failed_records_do_not_pile_up() -> None:
    rig = Rig()
    for number in range(70):
        _, streams = rig.start(1, f"job{number}")
        rig.note(rig.jobs.broken(streams[0], 1.0))
        rig.switch()
    assert [record.name for record in rig.jobs.jobs()] == [f"job{number}" for number in range(6, 70)]


def test_two_jobs_behind_the_same_ports_share_the_windows() -> None:
    rig = Rig()
    rig.start(2, "a")
    rig.start(2, "b")
    windows = [rig.record(name).run.or_slots + rig.record(name).run.add_slots for name in "ab"]
    assert windows == [30, 15]
