# SPDX-License-Identifier: Apache-2.0
"""Where jobs begin, and what operators do to them: modes, room, drains, policies, evictions; and who may say what."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.jobs import JobsRig as Rig

from p4reduce.core.config import RetransmissionPolicy
from p4reduce_controller.admission import Code, RefusedError
from p4reduce_controller.model import (
    Answer,
    Fence,
    Forget,
    Grant,
    Install,
    OrderKind,
    Path,
    Persist,
    Reason,
    Refuse,
    TellPolicy,
)
from p4reduce_controller.states import State


def both(rig: Rig, job: str = "train", **more: object) -> list[int]:
    """Two ranks join; the numbers of their calls."""
    return [rig.join(rank, 2, job, **more) for rank in (0, 1)]


def granted(rig: Rig, call: int) -> Grant:
    answer = rig.answer(call)
    assert isinstance(answer, Grant), answer
    return answer


def begun(rig: Rig, call: int) -> tuple[OrderKind, str]:
    order = granted(rig, call).order
    assert order.first_bucket == 0
    return order.kind, order.why


def test_modes_must_agree() -> None:
    rig = Rig()
    rig.join(0, ring=True)
    code, message = rig.refusal(rig.join(1, ring=True, mode="require"))
    assert code is Code.FAILED_PRECONDITION
    assert message == ("job 'train': rank 1 says mode require, rank 0 said auto: start all ranks with the same mode")


def test_mode_off_begins_on_the_ring_and_stays_there() -> None:
    rig = Rig()
    calls = both(rig, mode="off", ring=True)
    assert [begun(rig, call) for call in calls] == [(OrderKind.RUN_RING, "operator: mode off")] * 2
    assert rig.record().run.plan is None
    streams = [rig.open(100, rank) for rank in (0, 1)]
    rig.tick(5.0)
    assert not rig.work
    rig.note(rig.jobs.set_mode("train", "auto", 5.0))
    rig.tick(5.0)
    assert rig.record().state is State.PREPARING
    rig.switch()
    rig.answer_all(streams)
    rig.answer_all(streams, 3, 4)
    assert (rig.record().path, rig.record().run.order.first_bucket) == (Path.SWITCH, 4)
    assert rig.record().path_reason == "mode auto"


def test_the_job_is_on_disk_before_it_is_granted() -> None:
    rig = Rig()
    both(rig)
    rig.switch()
    kinds = [type(action) for action in rig.log if isinstance(action, Install | Persist | Grant)]
    assert kinds == [Install, Persist, Grant, Grant]


@pytest.mark.parametrize("ring", [False, True])
def test_without_a_switch(ring: bool) -> None:
    rig = Rig()
    rig.note(rig.jobs.switch_down("nobody answers", 0.0))
    calls = both(rig, ring=ring)
    if not ring:
        assert rig.refusal(calls[0])[0] is Code.UNAVAILABLE
        return
    assert begun(rig, calls[0]) == (OrderKind.RUN_RING, "no_switch: no session with the switch: nobody answers")
    for rank in (0, 1):
        rig.open(100, rank)
    assert (rig.record().fallbacks, rig.record().path) == ({"no_switch": 1}, Path.RING)
    rig.tick(3.0)
    assert not rig.work
    rig.note(rig.jobs.switch_up(set(), 3.0))
    assert rig.jobs.next_deadline() == 4.0
    rig.tick(4.0)
    assert rig.record().state is State.PREPARING


def test_one_rank_without_a_ring_makes_a_job_without_a_ring() -> None:
    rig = Rig()
    first = rig.join(0, ring=True)
    rig.note(rig.jobs.switch_down("nobody answers", 0.0))
    second = rig.join(1, ring=False)
    assert rig.refusal(second)[0] is Code.UNAVAILABLE
    assert rig.answer(first) is None
    rig.note(rig.jobs.switch_up(set(), 1.0))
    rig.join(1, ring=False)
    rig.switch()
    assert granted(rig, first).order.kind is OrderKind.RUN_SWITCH
    assert not rig.record().ring


def test_require_is_refused_without_a_switch_even_with_a_ring() -> None:
    rig = Rig()
    rig.note(rig.jobs.switch_down("nobody answers", 0.0))
    assert rig.refusal(rig.join(0, mode="require", ring=True))[0] is Code.UNAVAILABLE


def test_without_room_on_the_ring_until_there_is_some() -> None:
    rig = Rig(pool_slots=2, slots=2)
    epoch, _ = rig.start(1, "first")
    calls = both(rig, ring=True)
    assert begun(rig, calls[1]) == (OrderKind.RUN_RING, "no_room: the switch has no slots left")
    run = rig.record().run
    streams = [rig.open(run.epoch, rank) for rank in (0, 1)]
    assert rig.record().fallbacks == {"no_room": 1}
    rig.tick(5.0)
    assert not rig.work, "what came free is waited for"
    rig.now = 6.0
    for stream in streams:
        rig.report(stream)
    rig.leave(epoch, 0, "first")
    rig.switch()
    rig.tick(6.0)
    assert rig.record().state is State.PREPARING
    assert rig.record().run.plan.lease.pool_base == 0


def test_require_without_room_is_refused_or_waits_as_without_a_ring() -> None:
    rig = Rig(pool_slots=2, slots=2)
    epoch, _ = rig.start(1, "first")
    calls = both(rig, ring=True, mode="require")
    assert rig.refusal(calls[0])[0] is Code.RESOURCE_EXHAUSTED
    rig.leave(epoch, 0, "first")
    calls = both(rig, ring=True, mode="require")
    assert rig.answer(calls[0]) is None
    rig.switch()
    assert granted(rig, calls[0]).order.kind is OrderKind.RUN_SWITCH


def test_a_minimum_that_is_not_there() -> None:
    rig = Rig()
    rig.start(1, "big", slots_want=1024)
    calls = both(rig, ring=True, slots_min=600)
    assert begun(rig, calls[0])[1].startswith("no_room")
    calls = both(rig, "other", slots_min=600)
    assert "it needs 600 slots in a row" in rig.refusal(calls[0])[1]
    both(rig, "third", slots_min=100, slots_want=200)
    rig.switch()
    third = rig.record("third").run
    assert third.plan.lease.pool_size == 200
    assert third.or_slots + third.add_slots == 100, "its minimum, whatever the ports say"


def test_a_switch_that_cannot_be_set_up() -> None:
    rig = Rig()
    calls = both(rig, ring=True)
    rig.switch(error="table full")
    assert begun(rig, calls[0]) == (OrderKind.RUN_RING, "no_switch: the switch could not be set up: table full")
    assert rig.record().state is State.RING
    rig.tick(5.0)
    rig.switch()
    assert rig.all_free()


def test_a_drain_while_the_switch_is_set_up() -> None:
    rig = Rig()
    calls, plain = both(rig, ring=True), both(rig, "plain")
    rig.note(rig.jobs.drain(0.0))
    rig.switch()
    assert begun(rig, calls[0]) == (OrderKind.RUN_RING, "drained: the switch is drained")
    assert granted(rig, plain[0]).order.kind is OrderKind.RUN_SWITCH, "it was let in before"
    assert [pool.job for pool in rig.jobs.pools() if pool.job] == ["plain"]


def test_drain_and_undrain() -> None:
    rig = Rig()
    streams = {name: rig.start(2, name, **more) for name, more in JOBS.items()}
    assert rig.jobs.moving_staying() == (["auto"], ["require", "ringless"])
    rig.note(rig.jobs.drain(1.0))
    assert rig.jobs.drained
    assert [rig.record(name).state for name in JOBS] == [State.CUTTING, State.SWITCH, State.SWITCH]
    rig.answer_all(streams["auto"][1], 3, 2)
    assert rig.record("auto").path_reason == "drained: an operator drains the switch"
    assert rig.jobs.moving_staying() == ([], ["require", "ringless"])
    rig.note(rig.jobs.set_mode("require", "auto", 1.0))
    assert (rig.record("require").state, rig.record("require").fallbacks) == (State.CUTTING, {"drained": 1})
    assert rig.jobs.moving_staying() == ([], ["ringless"])
    code, message = rig.refusal(rig.join(0, job="new"))
    assert code is Code.UNAVAILABLE
    assert "is drained for maintenance: join again after `p4reducectl undrain`" in message
    assert begun(rig, both(rig, "newer", ring=True)[0])[1] == "drained: the switch is drained"
    rig.switch()
    rig.tick(4.0)
    assert rig.record("auto").state is State.RING
    rig.note(rig.jobs.undrain(4.0))
    rig.tick(4.0)
    assert rig.record("auto").state is State.PREPARING, "an operator's cut says nothing about the switch's health"
    rig.switch()
    rig.answer_all(streams["auto"][1], 3, 2)
    rig.answer_all(streams["auto"][1], 3, 2)
    assert rig.record("auto").path_reason == "the switch is not drained any more"


JOBS = {
    "auto": {"ring": True},
    "require": {"ring": True, "mode": "require"},
    "ringless": {},
}


def test_a_drain_ends_the_wait_for_a_pool() -> None:
    rig = Rig(pool_slots=2, slots=2)
    epoch, _ = rig.start(1, "first")
    rig.leave(epoch, 0, "first")
    calls = both(rig)
    assert rig.record().state is State.JOINING
    rig.note(rig.jobs.drain(0.0))
    assert rig.refusal(calls[0])[0] is Code.UNAVAILABLE


def test_set_mode() -> None:
    rig = Rig()
    _, streams = rig.start(2, ring=True)
    assert rig.note(rig.jobs.set_mode("train", "auto", 0.0)) == []
    rig.note(rig.jobs.set_mode("train", "require", 0.0))
    assert rig.saved()["mode"] == "require"
    rig.report(streams[0], 3, 2, silent=9.0)
    assert rig.record().state is State.SWITCH
    rig.note(rig.jobs.set_mode("train", "ring", 0.0))
    assert (rig.record().mode, rig.record().state) == ("off", State.CUTTING)
    assert rig.record().fallbacks == {"operator": 1}
    rig.note(rig.jobs.set_mode("train", "auto", 0.0))
    rig.note(rig.jobs.set_mode("train", "off", 0.0))
    rig.answer_all(streams)
    assert rig.record().path_reason == "operator: mode off"
    rig.switch()
    rig.tick(5.0)
    assert rig.record().state is State.RING
    rig.note(rig.jobs.set_mode("train", "require", 5.0))
    rig.tick(5.0)
    assert rig.record().state is State.PREPARING
    rig.switch()
    rig.note(rig.jobs.set_mode("train", "auto", 5.0))
    assert rig.record().state is State.TRYING
    rig.note(rig.jobs.set_mode("train", "off", 5.0))
    assert rig.record().state is State.RING


def test_require_on_the_ring_does_not_wait_for_the_delay() -> None:
    rig = Rig()
    _, streams = rig.start(2, ring=True)
    rig.report(streams[0], 3, 2, trouble=Fence(Reason.INTEGRITY, "wrong", (), 2))
    rig.answer_all(streams)
    assert rig.jobs._promote_at(rig.record()) == 1.0
    rig.note(rig.jobs.set_mode("train", "require", 0.25))
    assert rig.jobs._promote_at(rig.record()) == 0.25


@pytest.mark.parametrize(
    ("job", "mode", "code", "says"),
    [
        ("train", "", Code.INVALID_ARGUMENT, "none of auto, require, off"),
        ("train", "fast", Code.INVALID_ARGUMENT, "mode 'fast' is none of auto, require, off"),
        ("nobody", "off", Code.NOT_FOUND, "no such job"),
        ("train", "off", Code.FAILED_PRECONDITION, "has no ring path"),
        ("waits", "off", Code.FAILED_PRECONDITION, "is not running: it is joining"),
        ("leaves", "off", Code.FAILED_PRECONDITION, "rank 0 left already"),
    ],
)
def test_modes_that_cannot_be_set(job: str, mode: str, code: Code, says: str) -> None:
    rig = Rig()
    rig.start(2)
    rig.join(0, job="waits")
    epoch, _ = rig.start(2, "leaves", ring=True)
    rig.leave(epoch, 0, "leaves")
    with pytest.raises(RefusedError, match=says) as caught:
        rig.jobs.set_mode(job, mode, 0.0)
    assert caught.value.refusal.code is code


def test_policies() -> None:
    rig = Rig()
    _, streams = rig.start(2, ring=True)
    slow = replace(RetransmissionPolicy(), silent=5.0, fallback=5.0, window=10)
    assert rig.jobs.set_policy("", slow, 0.0) == []
    assert rig.jobs.default_policy == slow
    assert rig.record().policy == RetransmissionPolicy()
    told = rig.note(rig.jobs.set_policy("train", slow, 0.0))
    assert [type(action) for action in told] == [Persist, TellPolicy, TellPolicy]
    rig.report(streams[0], 3, 2, silent=4.9)
    rig.report(streams[1], 3, 2, silent=4.9)
    assert rig.record().state is State.SWITCH
    rig.report(streams[1], 3, 2, silent=5.0)
    assert rig.record().state is State.CUTTING
    call = rig.join(0, 1, "next")
    rig.switch()
    grant = granted(rig, call)
    assert grant.policy == slow
    assert grant.order.or_slots + grant.order.add_slots == 10
    with pytest.raises(RefusedError, match="no such job"):
        rig.jobs.set_policy("nobody", slow, 0.0)


def test_evict() -> None:
    rig = Rig()
    _, streams = rig.start(2, ring=True)
    rig.note(rig.jobs.evict("train", 0.0))
    rig.switch()
    (fence,) = rig.fences(streams[1])
    assert (fence.reason, fence.message) == (Reason.EVICTED, "job 'train': an operator has ended it")
    with pytest.raises(RefusedError, match="it has failed already"):
        rig.jobs.evict("train", 0.0)
    with pytest.raises(RefusedError, match="no such job"):
        rig.jobs.evict("nobody", 0.0)
    waiting = rig.join(0, job="waits")
    rig.note(rig.jobs.evict("waits", 0.0))
    assert rig.refusal(waiting) == (Code.ABORTED, "job 'waits': an operator has ended it")
    calls = both(rig, "installs")
    rig.note(rig.jobs.evict("installs", 0.0))
    assert rig.refusal(calls[1])[0] is Code.ABORTED
    rig.switch()
    assert rig.all_free()


NONCE = bytes(range(16))


def test_a_join_that_is_repeated_gets_the_same_answer() -> None:
    rig = Rig(secret=True)
    first = rig.join(0, nonce=NONCE)
    again = rig.join(0, nonce=NONCE)
    assert rig.refusal(first)[0] is Code.ABORTED
    rig.note(rig.jobs.withdraw(first, 0.0))
    assert len(rig.record().seats) == 1, "the first call's end takes nobody's seat"
    other = rig.join(1, nonce=NONCE[::-1])
    assert rig.record().state is State.INSTALLING
    third = rig.join(0, nonce=NONCE)
    assert rig.refusal(again)[0] is Code.ABORTED
    rig.switch()
    late = rig.join(0, nonce=NONCE)
    assert granted(rig, late).credential == granted(rig, third).credential == b"\x01" * 16
    assert granted(rig, late).order == granted(rig, third).order
    assert granted(rig, other).credential == b"\x02" * 16
    for nonce in (b"", NONCE[::-1]):
        assert rig.refusal(rig.join(0, nonce=nonce))[0] is Code.ALREADY_EXISTS
    rig.note(rig.jobs.switch_down("nobody answers", 0.0))
    assert isinstance(rig.answer(rig.join(0, nonce=NONCE)), Grant), "it needs nothing of the switch"


def test_a_repeated_join_in_a_cut_begins_with_the_path_before() -> None:
    rig = Rig()
    calls = both(rig, ring=True, nonce=NONCE)
    rig.switch()
    stream = rig.open(100, 1)
    rig.note(rig.jobs.drain(0.0))
    late = rig.join(0, ring=True, nonce=NONCE)
    assert granted(rig, late).order == granted(rig, calls[0]).order
    own = rig.open(100, 0)
    assert [order.kind for order in rig.orders(own)] == [OrderKind.STOP]
    rig.answer_all([own, stream])
    assert granted(rig, rig.join(0, ring=True, nonce=NONCE)).order.kind is OrderKind.RUN_RING


def test_a_stream_needs_the_ranks_own_credential() -> None:
    rig = Rig(secret=True)
    both(rig)
    rig.switch()
    own = [rig.record().run.workers[rank].credential for rank in (0, 1)]
    assert own == [b"\x01" * 16, b"\x02" * 16]
    for wrong in (b"", own[1], own[0][:-1]):
        code, message = rig.refusal(rig.open(100, 0, credential=wrong))
        assert code is Code.PERMISSION_DENIED
        assert "job 'train': the credential is not that of rank 0" in message
    assert rig.record().run.workers[0].stream is None
    stream = rig.open(100, 0, credential=own[0])
    assert rig.record().run.workers[0].stream == stream


def test_what_a_worker_counts_is_bounded() -> None:
    rig = Rig()
    _, streams = rig.start(1)
    many = {f"c{number}": number for number in range(500)} | {"x" * 65: 1}
    rig.report(streams[0], 3, 2, counters=dict(reversed(many.items())), rtt=0.25)
    worker = rig.record().run.workers[0]
    assert len(worker.counters) == 64
    assert "x" * 65 not in worker.counters
    assert (worker.counters["c499"], worker.rtt) == (499, 0.25)


def test_progress_never_falls() -> None:
    rig = Rig()
    _, streams = rig.start(1)
    rig.report(streams[0], 9, 8)
    rig.report(streams[0], 3, 2)
    worker = rig.record().run.workers[0]
    assert (worker.submitted, worker.completed) == (9, 8)


def test_a_job_that_ends_is_forgotten_on_disk() -> None:
    rig = Rig()
    epoch, _ = rig.start(1)
    assert rig.saved() is not None
    rig.leave(epoch, 0)
    assert Forget("train") in rig.log
    assert rig.saved() is None


def test_answers_nobody_asked_for_change_nothing() -> None:
    rig = Rig()
    _, streams = rig.start(2, ring=True)
    rig.report(streams[0], 3, 2, answer=Answer(1, 7, True, "no"))
    assert rig.record().state is State.SWITCH
    assert rig.record().run.answers == {}
    assert not [action for action in rig.log if isinstance(action, Refuse)]
