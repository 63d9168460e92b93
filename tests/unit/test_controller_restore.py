# SPDX-License-Identifier: Apache-2.0
"""A controller that takes up what another one has left on disk."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from helpers.jobs import HOSTS, LEASE
from helpers.jobs import JobsRig as Rig

from p4reduce.core.config import RetransmissionPolicy
from p4reduce_controller.admission import Code
from p4reduce_controller.hosts import Hosts, SwitchConfig
from p4reduce_controller.memo import MemoError, memo, recall, recall_end
from p4reduce_controller.model import (
    Fence,
    Forget,
    Grant,
    Install,
    LeaveDone,
    OrderKind,
    Path,
    Persist,
    Reason,
    Revoke,
    TellFence,
    TellLeft,
    TellOrder,
    TellPolicy,
    WorkerState,
)
from p4reduce_controller.operations import RETURN_SECONDS
from p4reduce_controller.states import State
from p4reduce_controller.store import End

NONCE = bytes(range(16))
TROUBLE = Fence(Reason.REFUSED, "not admitted", (), 5)


def running(**more: Any) -> tuple[Rig, int, list[int]]:
    rig = Rig()
    epoch, streams = rig.start(2, **({"ring": True} | more))
    for stream in streams:
        rig.report(stream, 7, 5)
    return rig, epoch, streams


def cutting(rig: Rig, streams: list[int]) -> None:
    rig.report(streams[0], 7, 5, trouble=TROUBLE)


def ring(rig: Rig, streams: list[int]) -> None:
    cutting(rig, streams)
    rig.answer_all(streams, 5, 6)


def preparing(rig: Rig, streams: list[int]) -> None:
    ring(rig, streams)
    rig.switch()
    rig.tick(1.0)


def trying(rig: Rig, streams: list[int]) -> None:
    preparing(rig, streams)
    rig.switch()


def holding(rig: Rig, streams: list[int]) -> None:
    trying(rig, streams)
    rig.answer_all(streams)


def back(rig: Rig, streams: list[int]) -> None:
    holding(rig, streams)
    rig.answer_all(streams, 8, 9)


def leaving(rig: Rig, _: list[int]) -> None:
    rig.leave(100, 1, submitted=7)


REACH: dict[str, tuple[Callable[[Rig, list[int]], None], State, State]] = {
    "switch": (lambda *_: None, State.SWITCH, State.SWITCH),
    "cutting": (cutting, State.CUTTING, State.CUTTING),
    "ring": (ring, State.RING, State.RING),
    "preparing": (preparing, State.PREPARING, State.RING),
    "trying": (trying, State.TRYING, State.RING),
    "holding": (holding, State.HOLDING, State.RING),
    "back": (back, State.SWITCH, State.SWITCH),
    "leaving": (leaving, State.LEAVING, State.LEAVING),
}


def essence(rig: Rig) -> dict[str, Any]:
    """What a restart must not change."""
    job = rig.record()
    record = memo(job, [])
    for name in ("order", "running", "state", "plan", "endings", "or_slots", "add_slots"):
        del record[name]
    for worker in record["workers"]:
        # Progress is what was last written.
        del worker["submitted"], worker["completed"]
    return record


@pytest.mark.parametrize("where", REACH)
def test_every_state_comes_back(where: str) -> None:
    rig, _, streams = running(nonce=NONCE)
    reach, before, after = REACH[where]
    reach(rig, streams)
    assert rig.record().state is before
    old, order, pools = essence(rig), rig.record().run.order, rig.jobs.pools()
    running_order = rig.record().run.running
    plan = rig.record().run.plan
    rig.now += 100.0
    rig.restart()
    job = rig.record()
    assert job.state is after
    assert essence(rig) == old
    assert rig.jobs.pools() == pools
    if before is after:
        assert (job.run.order, job.run.plan) == (order, plan)
    else:
        content = (job.run.order.kind, job.run.order.epoch, job.run.order.first_bucket)
        assert content == (running_order.kind, running_order.epoch, running_order.first_bucket)
        assert job.run.order.number == order.number + 1
        assert rig.jobs._endings[plan.number].plan == plan
        assert rig.saved()["state"] == "RING"
    assert all(worker.heard == rig.now for worker in job.run.workers.values())
    assert rig.jobs.next_deadline() == rig.now + LEASE


@pytest.mark.parametrize("where", REACH)
def test_every_state_goes_on_to_the_end(where: str) -> None:
    rig, epoch, streams = running()
    REACH[where][0](rig, streams)
    rig.restart()
    held = {plan.number for plan in rig.jobs.live()}
    rig.note(rig.jobs.switch_up(held, rig.now))
    rig.switch()
    ranks = [0] if where == "leaving" else [0, 1]
    streams = [rig.open(epoch, rank) for rank in ranks]
    assert [order.number for order in rig.orders(streams[0])] == [rig.record().run.order.number]
    if where == "leaving":
        assert TellLeft(streams[0], 1, 7) in rig.log
    if where == "cutting":
        rig.answer_all(streams, 5, 6)
        assert rig.record().run.order.first_bucket == 5
    if rig.record().state is State.RING:
        rig.switch()
        rig.tick(rig.jobs._promote_at(rig.record()))
        rig.switch()
        rig.answer_all(streams)
        rig.answer_all(streams, 8, 8)
    assert rig.record().state is (State.LEAVING if where == "leaving" else State.SWITCH)
    calls = [rig.leave(epoch, rank, submitted=8) for rank in ranks]
    rig.switch()
    assert all(isinstance(rig.answer(call), LeaveDone) for call in calls)
    assert (rig.all_free(), rig.jobs.jobs(), rig.saved()) == (True, [], None)
    assert not [action for action in rig.log if isinstance(action, TellFence)]


def test_workers_that_do_not_come_back_are_lost_after_a_whole_lease() -> None:
    rig, epoch, _ = running()
    rig.now = 50.0
    rig.restart()
    stream = rig.open(epoch, 0)
    rig.tick(50.0 + LEASE - 0.1)
    assert rig.record().state is State.SWITCH
    rig.report(stream, 7, 5)
    rig.tick(50.0 + LEASE)
    rig.switch()
    assert rig.fences(stream)[0].ranks == (1,)


def test_workers_have_time_to_come_back_however_short_the_lease() -> None:
    rig, epoch, streams = running()
    cutting(rig, streams)
    rig.now = 50.0
    rig.restart()
    rig.jobs._lease_seconds = 1.0
    rig.tick(50.9)
    rig.now = 60.0  # it took so long until the controller could be reached
    rig.jobs.await_return(rig.now)
    stream = rig.open(epoch, 0)
    for moment in (61.0, 62.0, 63.0, 64.0, 64.9):
        rig.now = moment
        rig.report(stream, 7, 5)
        rig.tick(moment)
        assert rig.record().state is State.CUTTING
    rig.tick(60.0 + RETURN_SECONDS)
    assert rig.fences(stream)[0].ranks == (1,)


def test_who_does_not_stop_after_a_restart_is_lost() -> None:
    rig, epoch, streams = running()
    cutting(rig, streams)
    rig.now = 50.0
    rig.restart()
    streams = [rig.open(epoch, rank) for rank in (0, 1)]
    rig.now = 55.0
    for stream in streams:
        rig.report(stream, 7, 5)
    rig.tick(50.0 + LEASE)
    assert rig.fences(streams[0])[0].ranks == (0, 1)


def test_a_switch_that_lost_the_epoch_meanwhile() -> None:
    rig, _, _ = running()
    rig.restart()
    rig.note(rig.jobs.switch_up(set(), rig.now))
    assert (rig.record().state, rig.record().fallbacks) == (State.CUTTING, {"switch_lost": 1})


def test_the_delay_of_a_promotion_is_kept() -> None:
    rig, epoch, streams = running()
    trying(rig, streams)
    rig.answer_all(streams, failed=True)
    assert rig.record().run.delay == 2.0
    rig.now = 60.0
    rig.restart()
    rig.note(rig.jobs.switch_up(set(), 60.0))
    for rank in (0, 1):
        rig.open(epoch, rank)
    assert rig.jobs._promote_at(rig.record()) == 62.0


def test_a_controller_that_died_between_a_drain_and_its_cuts() -> None:
    rig, epoch, _ = running()
    rig.restart(drained=True)
    assert (rig.record().state, rig.record().fallbacks) == (State.CUTTING, {"drained": 1})
    assert rig.saved()["state"] == "CUTTING"
    streams = [rig.open(epoch, rank) for rank in (0, 1)]
    rig.answer_all(streams, 5, 6)
    assert rig.record().state is State.RING


def test_before_the_first_session_silence_is_judged_as_with_one() -> None:
    rig, epoch, _ = running()
    rig.restart()
    streams = [rig.open(epoch, rank) for rank in (0, 1)]
    for stream in streams:
        rig.report(stream, 7, 5, silent=0.9)
    assert rig.record().state is State.SWITCH
    assert rig.refusal(rig.join(0, job="new"))[0] is Code.UNAVAILABLE
    rig.note(rig.jobs.switch_down("nobody answers", rig.now))
    assert rig.record().state is State.CUTTING


def test_a_lost_answer_to_a_join_survives_a_restart() -> None:
    rig = Rig(secret=True)
    calls = [rig.join(rank, nonce=NONCE, ring=True) for rank in (0, 1)]
    rig.switch()
    before = [rig.answer(call) for call in calls]
    rig.restart()
    again = [rig.answer(rig.join(rank, nonce=NONCE, ring=True)) for rank in (0, 1)]
    for old, new in zip(before, again, strict=True):
        assert isinstance(old, Grant)
        assert isinstance(new, Grant)
        assert (old.rank, old.order, old.credential) == (new.rank, new.order, new.credential)
    assert rig.refusal(rig.open(100, 0, credential=b"x" * 16))[0] is Code.PERMISSION_DENIED


def test_a_changed_policy_is_told_again() -> None:
    rig, epoch, _ = running()
    policy = RetransmissionPolicy(deadline=5.0)
    rig.note(rig.jobs.set_policy("train", policy, 0.0))
    rig.restart()
    stream = rig.open(epoch, 0)
    assert TellPolicy(stream, policy) in rig.log


def test_a_lease_that_another_job_has_by_now_is_not_taken_again() -> None:
    rig, _, streams = running()
    ring(rig, streams)
    stale = rig.saved()
    assert len(stale["endings"]) == 1
    rig.switch()
    assert rig.saved()["endings"] == [], "written when the switch was clean"
    rig.start(2, "other")
    records = [stale, rig.saved("other")]
    fresh = Rig()
    fresh.note(fresh.jobs.restore(records, None, 0.0))
    assert [(view.job, view.base) for view in fresh.jobs.pools() if view.job] == [("other", 0)]
    assert fresh.record().state is State.RING


def test_two_records_that_claim_one_lease() -> None:
    rig, _, _ = running()
    twin = copy.deepcopy(rig.saved()) | {"job": "twin"}
    fresh = Rig()
    fresh.note(fresh.jobs.restore([rig.saved(), twin, rig.saved()], None, 0.0))
    assert [(job.name, job.state) for job in fresh.jobs.jobs()] == [("train", State.SWITCH), ("twin", State.FAILED)]
    (forget,) = fresh.log
    assert (forget.name, forget.end["job"]) == ("twin", "twin"), "the good record stays"
    assert sum(view.size for view in fresh.jobs.pools()) == 1024


def test_a_hosts_file_that_has_changed(caplog: pytest.LogCaptureFixture) -> None:
    rig, epoch, _ = running()
    switch = SwitchConfig("127.0.0.1:9559", "w34", "10.0.0.254", "02:70:34:00:00:fe")
    same = Hosts(switch, tuple(HOSTS))
    fresh = Rig()
    fresh.note(fresh.jobs.restore([rig.saved()], same, 0.0))
    assert fresh.record().run.workers[0].applicant.host is same.hosts[0]
    moved = Hosts(switch, (HOSTS[0], HOSTS[2]))
    other = Rig()
    other.note(other.jobs.restore([rig.saved()], moved, 0.0))
    assert [(job.name, job.state) for job in other.jobs.jobs()] == [("train", State.FAILED)]
    assert [action.name for action in other.log if isinstance(action, Forget)] == ["train"]
    assert "host h2 (10.0.0.2) is not on port 2 any more" in caplog.text
    assert other.all_free()
    late = other.open(epoch, 0)
    (fence,) = other.fences(late)
    assert fence.reason is Reason.ABORTED
    assert "could not take it up again: host h2 (10.0.0.2) is not on port 2 any more" in fence.message
    other.restart()
    assert other.fences(other.open(epoch, 1)) == [fence], "also after the next restart"


JUNK = [None, "x", "", -1, 1 << 64, 1.5, float("nan"), True, [], {}, [1], {"a": 1}]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in a record."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


@pytest.mark.parametrize("where", REACH)
def test_damaged_records_are_forgotten_and_never_fatal(where: str) -> None:
    rng = random.Random(where)
    rig, epoch, streams = running(nonce=NONCE)
    REACH[where][0](rig, streams)
    good = json.loads(json.dumps(rig.saved()))
    recall(good, None, 0.0)
    forgotten = 0
    for path in places(good):
        for junk in [*rng.sample(JUNK, 4), KeyError]:
            record = copy.deepcopy(good)
            inside = record
            for key in path[:-1]:
                inside = inside[key]
            if junk is KeyError:
                del inside[path[-1]]
            else:
                inside[path[-1]] = junk
            fresh = Rig()
            fresh.note(fresh.jobs.restore([record], None, 0.0))
            forgotten += any(isinstance(action, Forget) for action in fresh.log)
            # What is taken for good must work.
            name = fresh.jobs.jobs()[0].name if fresh.jobs.jobs() else "train"
            fresh.open(epoch, 0, name)
            fresh.note(fresh.jobs.switch_up(set(), 1.0))
            fresh.tick(100.0)
            for _ in range(3):
                fresh.switch()
            assert sum(view.size for view in fresh.jobs.pools()) == 1024
            assert fresh.all_free()
    assert forgotten > 100


@pytest.mark.parametrize("record", [None, [], "x", 7, {}, {"version": 2}, {"version": 1}])
def test_what_is_no_record_at_all(record: Any) -> None:
    rig = Rig()
    rig.note(rig.jobs.restore([record], None, 0.0))
    assert rig.jobs.jobs() == []
    if isinstance(record, dict):
        with pytest.raises(MemoError):
            recall(record, None, 0.0)


def test_what_goes_to_disk_comes_before_what_others_see() -> None:
    rig, _, streams = running()
    back(rig, streams)
    on_disk = 0
    for action in rig.log:
        if isinstance(action, Persist):
            on_disk = action.record["order"]["number"]
        elif isinstance(action, TellOrder):
            assert action.order.number <= on_disk
    kinds = [type(a) for a in rig.log if isinstance(a, Persist | Install | Revoke)]
    assert kinds[:2] == [Install, Persist]
    assert on_disk == 6
    assert rig.record().path is Path.SWITCH
    assert rig.orders(streams[0])[-1].kind is OrderKind.RUN_SWITCH


def test_a_job_that_failed_before_the_restart_is_not_forgotten() -> None:
    rig, epoch, streams = running()
    rig.note(rig.jobs.broken(streams[1], 5.0))
    first = rig.record().reason
    rig.restart()
    job = rig.record()
    assert (job.state, job.reason, job.world_size, job.run) == (State.FAILED, first, 2, None)
    (fence,) = rig.fences(rig.open(epoch, 0))
    assert (fence.reason, fence.ranks, fence.message) == (Reason.WORKER_LOST, (1,), first)
    assert isinstance(rig.answer(rig.leave(epoch, 0)), LeaveDone)
    rig.note(rig.jobs.switch_up([], rig.now))
    again, _ = rig.start(2)
    assert (rig.record().state, rig.record().over_since) == (State.SWITCH, None)
    (told,) = rig.fences(rig.open(epoch, 0))
    assert told == fence, "the name has another membership now, the old one is still told"
    rig.restart()
    assert rig.record().run.epoch == again, "a job that runs is shown, not how the one before ended"
    assert rig.fences(rig.open(epoch, 1)) == [fence]


def test_ends_that_make_no_sense_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    rig, epoch, _ = running()
    rig.note(rig.jobs.evict("train", 0.0))
    (good,) = rig.ends
    for name in good:
        for value in JUNK:
            fresh = Rig()
            fresh.note(fresh.jobs.restore([], None, 0.0, [End(good | {name: value}, 1.0, True)]))
            fresh.jobs.tick(1.0)
            assert fresh.log == []
    assert "the record of how a job ended is left out" in caplog.text
    fresh = Rig()
    fresh.note(fresh.jobs.restore([], None, 0.0, [End(good, 1.0, True)]))
    assert fresh.record().over_since == -1.0
    assert fresh.fences(fresh.open(epoch, 0))[0].reason is Reason.EVICTED


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("incarnation", 1 << 63), ("epoch", 1 << 40), ("present", 1 << 40), ("or_slots", 1 << 40)),
        *(("add_slots", 1 << 40), ("path_reason", "\ud800"), ("fallbacks", {"\ud800": 1})),
    ],
)
def test_a_record_that_no_reply_could_hold_is_not_taken_up(name: str, value: Any) -> None:
    rig, _, _ = running()
    good = rig.saved("train")
    assert good is not None
    recall(good, None, 0.0)
    with pytest.raises(MemoError):
        recall(good | {name: value}, None, 0.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("world_size", 1 << 40),
        ("world_size", 0),
        ("incarnation", 1 << 63),
        ("mode", "odd"),
        ("message", "\ud800"),
        ("ranks", [64]),
    ],
)
def test_an_end_that_no_reply_could_hold_is_left_out(name: str, value: Any) -> None:
    """One such record would keep every other job from being shown."""
    rig, _, _ = running()
    rig.note(rig.jobs.evict("train", 0.0))
    (good,) = rig.ends
    recall_end(good)
    with pytest.raises(MemoError):
        recall_end(good | {name: value})


def test_when_no_rank_comes_back_it_is_not_called_a_failure() -> None:
    rig, epoch, _ = running()
    rig.restart()
    rig.tick(LEASE)
    job = rig.record()
    assert job.state is State.ENDED
    assert "no rank came back after the controller was restarted" in job.reason
    assert [worker.state for worker in job.run.workers.values()] == [WorkerState.FENCED] * 2
    rig.switch()
    assert rig.all_free()
    assert rig.fences(rig.open(epoch, 0))[0].message == job.reason, "one that was merely late"


def test_one_that_comes_back_makes_the_other_a_lost_one() -> None:
    rig, epoch, _ = running()
    rig.restart()
    stream = rig.open(epoch, 0)
    rig.now = LEASE / 2
    rig.report(stream, 7, 7)
    rig.tick(LEASE)
    assert rig.record().state is State.FAILED
    rig.switch()
    assert rig.fences(stream)[0].ranks == (1,)


def test_a_record_whose_epoch_cannot_be_leaves_no_end() -> None:
    rig, _, _ = running()
    fresh = Rig()
    fresh.note(fresh.jobs.restore([rig.saved() | {"state": "FAILED", "epoch": 1 << 63}], None, 0.0))
    assert (fresh.log, fresh.jobs.jobs()) == ([Forget("train")], [])
