# SPDX-License-Identifier: Apache-2.0
"""Leaving: who waits for whom, what the others are told, and what becomes of cuts and promotions meanwhile."""

from __future__ import annotations

import itertools

import pytest
from helpers.jobs import LEASE
from helpers.jobs import JobsRig as Rig

from p4reduce_controller.admission import Code
from p4reduce_controller.model import Fence, Forget, LeaveDone, OrderKind, Reason, TellLeft, TellOrder, TellReport
from p4reduce_controller.runs import COMEBACK_SECONDS, WAKING_SECONDS
from p4reduce_controller.states import State


def running(world: int = 3, **more: object) -> tuple[Rig, int, list[int]]:
    rig = Rig()
    epoch, streams = rig.start(world, **({"ring": True} | more))
    return rig, epoch, streams


def lefts(rig: Rig) -> list[TellLeft]:
    return [action for action in rig.log if isinstance(action, TellLeft)]


def asked(rig: Rig) -> list[TellReport]:
    return [action for action in rig.log if isinstance(action, TellReport)]


def test_a_leave_waits_until_the_others_have_what_the_rank_took_part_in() -> None:
    rig, epoch, streams = running()
    rig.report(streams[2], 9, 9)
    call = rig.leave(epoch, 1, submitted=8, wait_seconds=30.0)
    assert asked(rig) == [TellReport(streams[0], 8)], "rank 2 has said already that it is done"
    assert rig.answer(call) is None
    assert rig.record().state is State.SWITCH
    rig.report(streams[0], 8, 7)
    assert rig.answer(call) is None
    rig.report(streams[0], 8, 8)
    assert isinstance(rig.answer(call), LeaveDone)
    assert rig.record().state is State.LEAVING
    assert lefts(rig) == [TellLeft(streams[0], 1, 8), TellLeft(streams[2], 1, 8)]


def test_all_leave_at_once() -> None:
    rig, epoch, streams = running()
    calls = [rig.leave(epoch, rank, submitted=5, wait_seconds=30.0) for rank in range(3)]
    assert not any(rig.answer(call) for call in calls)
    for stream in streams:
        rig.report(stream, 5, 5)
    assert sum(isinstance(rig.answer(call), LeaveDone) for call in calls) == 2, "the last one waits for the switch"
    rig.switch()
    assert all(isinstance(rig.answer(call), LeaveDone) for call in calls)
    assert (rig.all_free(), rig.jobs.jobs(), rig.saved()) == (True, [], None)
    assert rig.fences(streams[0]) == []


def test_those_who_have_left_are_not_waited_for() -> None:
    rig, epoch, streams = running(2)
    call = rig.leave(epoch, 0, submitted=8, wait_seconds=30.0)
    other = rig.leave(epoch, 1, submitted=5)
    assert isinstance(rig.answer(other), LeaveDone)
    rig.switch()
    assert isinstance(rig.answer(call), LeaveDone)
    assert lefts(rig) == [TellLeft(streams[0], 1, 5)]


def test_a_wait_ends_by_itself() -> None:
    rig, epoch, streams = running(2)
    call = rig.leave(epoch, 0, submitted=8, wait_seconds=3.0)
    assert rig.jobs.next_deadline() == 3.0
    rig.tick(2.9)
    assert rig.answer(call) is None
    rig.tick(3.0)
    assert isinstance(rig.answer(call), LeaveDone)
    assert lefts(rig) == [TellLeft(streams[1], 0, 8)]


@pytest.mark.parametrize("wait", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_waits_that_make_no_sense_are_none(wait: float) -> None:
    rig, epoch, _ = running(2)
    assert isinstance(rig.answer(rig.leave(epoch, 0, submitted=8, wait_seconds=wait)), LeaveDone)


def test_a_leave_that_is_repeated_is_answered_with_the_first() -> None:
    rig, epoch, streams = running(2)
    calls = [rig.leave(epoch, 0, submitted=8, wait_seconds=30.0) for _ in range(2)]
    rig.report(streams[1], 8, 8)
    assert all(isinstance(rig.answer(call), LeaveDone) for call in calls)


def test_of_many_leaves_of_a_rank_the_last_two_wait() -> None:
    rig, epoch, streams = running(2)
    calls = [rig.leave(epoch, 0, submitted=8, wait_seconds=30.0) for _ in range(4)]
    for call in calls[:2]:
        code, text = rig.refusal(call)
        assert (code, "a newer Leave of rank 0" in text) == (Code.ABORTED, True)
    rig.report(streams[1], 8, 8)
    assert all(isinstance(rig.answer(call), LeaveDone) for call in calls[2:])


def test_a_leaver_still_has_to_live() -> None:
    rig, epoch, streams = running(2)
    call = rig.leave(epoch, 0, submitted=8, wait_seconds=30.0)
    rig.now = 6.0
    rig.report(streams[1], 8, 4)
    rig.tick(LEASE)
    rig.switch()
    assert rig.fences(streams[1])[0].ranks == (0,)
    assert isinstance(rig.answer(call), LeaveDone), "nobody is kept waiting"


def test_a_leaver_takes_part_in_a_cut() -> None:
    rig, epoch, streams = running(2)
    call = rig.leave(epoch, 0, submitted=8, wait_seconds=30.0)
    rig.report(streams[1], 8, 6, silent=2.0)
    assert rig.record().state is State.CUTTING
    rig.answer_all(streams, 8, 6)
    assert rig.record().state is State.RING
    assert rig.answer(call) is None
    assert rig.jobs._promote_at(rig.record()) is None, "somebody leaves"
    rig.report(streams[1], 8, 8)
    assert isinstance(rig.answer(call), LeaveDone)
    assert rig.record().state is State.LEAVING


@pytest.mark.parametrize("done", [False, True])
def test_a_leaver_that_does_not_wait_for_a_cut(done: bool) -> None:
    rig, epoch, streams = running(2)
    rig.report(streams[0], 8, 8)
    rig.report(streams[1], 9, 8, trouble=Fence(Reason.INTEGRITY, "wrong", (), 8))
    rig.report(streams[1], 9, 8)
    assert rig.record().state is State.CUTTING
    call = rig.leave(epoch, 0, submitted=8 if done else 9)
    assert isinstance(rig.answer(call), LeaveDone)
    if done:
        assert rig.record().state is State.LEAVING
        rig.tick(9.0)
        assert rig.record().state is State.LEAVING, "no answer is waited for any more"
    else:
        (fence,) = rig.fences(streams[1])
        assert (fence.reason, fence.ranks) == (Reason.WORKER_LOST, (0,))
        assert "left without waiting while bucket 8 was still to be moved to the ring path" in fence.message


@pytest.mark.parametrize("held", [False, True])
def test_a_leave_ends_a_promotion_under_way(held: bool) -> None:
    rig, epoch, streams = running(2)
    rig.report(streams[0], 1, 0, trouble=Fence(Reason.INTEGRITY, "wrong", (), 0))
    rig.answer_all(streams)
    rig.switch()
    rig.tick(1.0)
    rig.switch()
    if held:
        rig.answer_all(streams)
    assert rig.record().state is (State.HOLDING if held else State.TRYING)
    call = rig.leave(epoch, 0, submitted=1, wait_seconds=9.0)
    assert rig.record().state is State.RING
    assert rig.orders(streams[1])[-1].kind is OrderKind.RUN_RING
    assert rig.answer(call) is None
    rig.report(streams[1], 1, 1)
    assert isinstance(rig.answer(call), LeaveDone)
    rig.switch()
    assert rig.all_free()
    last = rig.leave(epoch, 1, submitted=1)
    assert isinstance(rig.answer(last), LeaveDone), "there is nothing on the switch to wait for"
    assert Forget("train") in rig.log


def test_after_a_rank_has_left_nothing_moves() -> None:
    rig, epoch, streams = running()
    for stream in streams:
        rig.report(stream, 8, 7)
    rig.leave(epoch, 2, submitted=8)
    assert rig.jobs.moving_staying() == ([], ["train"])
    orders = len([a for a in rig.log if isinstance(a, TellOrder)])
    rig.note(rig.jobs.drain(rig.now))
    rig.report(streams[0], 8, 7, silent=9.0)
    assert rig.record().state is State.LEAVING
    rig.note(rig.jobs.undrain(rig.now))
    rig.report(streams[1], 8, 7, trouble=Fence(Reason.STALLED, "stalled", (), 7))
    assert rig.record().state is State.FAILED, "trouble is an error again"
    assert orders == len([a for a in rig.log if isinstance(a, TellOrder)])


def test_a_stall_in_doubt_when_a_rank_leaves() -> None:
    rig, epoch, streams = running()
    for stream in streams:
        rig.report(stream, 8, 7)
    rig.report(streams[0], 9, 8, trouble=Fence(Reason.STALLED, "stalled", (), 8))
    assert rig.record().run.doubt is not None
    rig.leave(epoch, 2, submitted=8)
    assert rig.record().state is State.LEAVING
    rig.tick(1.0)
    assert (rig.record().state, "stalled" in rig.record().reason) == (State.FAILED, True)


def test_a_late_stream_hears_who_leaves_and_who_has_left() -> None:
    rig = Rig()
    for rank in range(3):
        rig.join(rank, 3)
    rig.switch()
    rig.open(100, 0)
    rig.leave(100, 0, submitted=4)
    rig.open(100, 1)
    rig.leave(100, 1, submitted=5, wait_seconds=9.0)
    late = rig.open(100, 2)
    assert [a for a in rig.told(late) if isinstance(a, TellLeft | TellReport)] == [
        TellLeft(late, 0, 4),
        TellReport(late, 5),
    ]


def test_a_leave_needs_the_ranks_own_credential() -> None:
    rig = Rig(secret=True)
    for rank in (0, 1):
        rig.join(rank)
    rig.switch()
    own = rig.record().run.workers[0].credential
    for wrong in (b"", rig.record().run.workers[1].credential, own[:8]):
        code, message = rig.refusal(rig.leave(100, 0, credential=wrong))
        assert code is Code.PERMISSION_DENIED
        assert "the credential is not that of rank 0" in message
    assert rig.record().state is State.SWITCH
    assert isinstance(rig.answer(rig.leave(100, 0, credential=own)), LeaveDone)


# ---- what a controller that was stopped has missed ------------------------------------------------------------------


def woken(done: int = 8) -> tuple[Rig, int, list[int]]:
    """Three ranks have completed `done` of 8 buckets, then the controller was stopped and goes on."""
    rig, epoch, streams = running()
    for stream in streams:
        rig.report(stream, 8, done)
    rig.now = 5.0
    rig.jobs.woken(rig.now)
    return rig, epoch, streams


def break_off(rig: Rig, *streams: int) -> None:
    for stream in streams:
        rig.note(rig.jobs.broken(stream, rig.now))


def test_ranks_that_had_finished_and_are_gone_have_not_failed() -> None:
    rig, epoch, streams = woken()
    for number, stream in enumerate(streams):
        rig.now = 5.0 + number / 10
        break_off(rig, stream)
    assert rig.record().state is State.SWITCH
    assert rig.jobs.next_deadline() == 5.0 + COMEBACK_SECONDS
    rig.tick(5.0 + COMEBACK_SECONDS - 0.1)
    assert rig.record().state is State.SWITCH
    rig.tick(5.0 + COMEBACK_SECONDS)
    job = rig.record()
    assert job.state is State.ENDED
    assert (
        "went away without leaving, while the controller was stopped; when the ranks were last heard, all 8"
        in job.reason
    )
    rig.switch()
    assert (rig.all_free(), rig.saved()) == (True, None)
    assert isinstance(rig.answer(rig.leave(epoch, 0, submitted=8)), LeaveDone), "a leave that comes late"
    rig.start(3)
    assert rig.record().state is State.SWITCH


def test_leaves_and_broken_streams_in_any_order() -> None:
    for order in itertools.permutations(["broken", "leave", "other"]):
        rig, epoch, streams = woken()
        calls = []
        for what in order:
            if what == "broken":
                break_off(rig, *streams)
            else:
                calls += [rig.leave(epoch, rank, submitted=8) for rank in ((0,) if what == "leave" else (1, 2))]
        rig.switch()
        assert all(isinstance(rig.answer(call), LeaveDone) for call in calls), order
        assert (rig.jobs.jobs(), rig.all_free()) == ([], True), "a job that ended well"


def test_what_ranks_did_while_nobody_listened_is_not_known() -> None:
    rig, _, streams = woken(done=7)
    break_off(rig, *streams)
    rig.tick(5.0 + COMEBACK_SECONDS)
    assert rig.record().state is State.ENDED
    assert "when the ranks were last heard, 7 of 8 buckets were complete" in rig.record().reason


def test_one_that_died_meanwhile_is_named_to_the_others() -> None:
    rig, epoch, streams = woken()
    break_off(rig, streams[1], streams[2])
    again = rig.open(epoch, 2)
    rig.now = 5.0 + COMEBACK_SECONDS
    for stream in (streams[0], again):
        rig.report(stream, 8, 8)
    rig.tick(rig.now)
    rig.switch()
    for stream in (streams[0], again):
        (fence,) = rig.fences(stream)
        assert (fence.reason, fence.ranks) == (Reason.WORKER_LOST, (1,))
    assert rig.record().state is State.FAILED
    assert "ended while the controller was stopped, and was not opened again" in rig.record().reason


def test_later_a_stream_that_ends_is_a_loss_at_once() -> None:
    rig, _, streams = woken()
    rig.now = 5.0 + WAKING_SECONDS
    break_off(rig, streams[1])
    assert rig.record().state is State.FAILED
    assert "its progress stream ended without a leave" in rig.record().reason


def test_a_rank_that_has_said_it_leaves_is_not_lost_when_its_stream_ends() -> None:
    rig, epoch, streams = running()
    rig.report(streams[0], 8, 8)
    call = rig.leave(epoch, 0, submitted=8, wait_seconds=30.0)
    break_off(rig, streams[0])
    assert isinstance(rig.answer(call), LeaveDone)
    assert rig.record().state is State.LEAVING
    assert TellLeft(streams[1], 0, 8) in rig.log


def test_on_the_ring_path_it_is_as_long_as_the_others_need_it() -> None:
    rig, epoch, streams = running(mode="off")
    for stream in streams:
        rig.report(stream, 8, 7)
    rig.report(streams[0], 8, 8)
    call = rig.leave(epoch, 0, submitted=8, wait_seconds=30.0)
    break_off(rig, streams[0])
    assert isinstance(rig.answer(call), LeaveDone), "nobody is kept waiting"
    assert [fence.ranks for stream in streams[1:] for fence in rig.fences(stream)] == [(0,), (0,)]


def test_on_the_ring_path_a_leaver_may_have_gone_while_nobody_listened() -> None:
    rig, epoch, streams = running(mode="off")
    for stream in streams:
        rig.report(stream, 8, 7)
    rig.now = 5.0
    rig.jobs.woken(rig.now)
    call = rig.leave(epoch, 0, submitted=8, wait_seconds=30.0)
    break_off(rig, streams[0])
    assert rig.record().state is State.RING
    for stream in streams[1:]:
        rig.report(stream, 8, 8)
    assert isinstance(rig.answer(call), LeaveDone)
    assert rig.record().state is State.LEAVING


def test_a_rank_that_comes_early_does_not_change_the_mode_of_those_still_there() -> None:
    rig, epoch, _ = running(mode="off")
    rig.leave(epoch, 0, submitted=0)
    assert rig.record().state is State.LEAVING
    rig.join(0, 3, mode="auto", ring=True)
    assert (rig.record().mode, rig.saved()["mode"]) == ("off", "off")
    for rank in (1, 2):
        rig.leave(epoch, rank, submitted=0)
    assert (rig.record().state, rig.record().mode) == (State.JOINING, "auto")
