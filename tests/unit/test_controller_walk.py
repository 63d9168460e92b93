# SPDX-License-Identifier: Apache-2.0
"""The admission logic under random calls: every call is answered once, and nothing leaks."""

from __future__ import annotations

from helpers.jobs import LEASE
from helpers.jobs import JobsRig as Rig
from hypothesis import given, settings
from hypothesis import strategies as st

from p4reduce_controller.model import (
    Fence,
    Reason,
    Report,
    Revoke,
    TellFence,
)
from p4reduce_controller.states import State

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["join", "join", "join", "newer", "withdraw", "open", "report", "trouble", "break", "leave", "leave"]
            + ["switch", "switch", "switch", "fail", "down", "up", "tick", "lapse"]
        ),
        st.integers(0, 2),
        st.sampled_from(["a", "b", "c"]),
        st.integers(0, 50),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_whatever_happens_every_call_is_answered_once_and_nothing_leaks(
    steps: list[tuple[str, int, str, int]],
) -> None:
    rig = Rig(pool_slots=512)
    joins: list[int] = []
    leaves: list[int] = []
    streams: list[int] = []
    withdrawn: set[int] = set()
    incarnation = 0
    for verb, rank, job, pick in steps:
        record = next((r for r in rig.jobs.jobs() if r.name == job), None)
        epoch = record.run.plan.number if record is not None and record.run is not None else 7
        if verb == "newer":
            incarnation += 1
        if verb in ("join", "newer"):
            world = {"a": 2, "b": 3, "c": 1}[job]
            joins.append(rig.join(rank % world, world, job, incarnation, wait=1 + pick))
        elif verb == "withdraw" and joins:
            number = joins[pick % len(joins)]
            withdrawn.add(number)
            rig.note(rig.jobs.withdraw(number, rig.now))
        elif verb == "open":
            streams.append(rig.open(epoch, rank, job))
        elif verb in ("report", "trouble") and streams:
            trouble = Fence(Reason.STALLED, "", (), pick) if verb == "trouble" else None
            stream = streams[pick % len(streams)]
            identity = rig.jobs._streams.get(stream, (job, epoch, rank))
            rig.note(rig.jobs.report(stream, Report(*identity, pick, pick - pick % 2, trouble), rig.now))
        elif verb == "break" and streams:
            rig.note(rig.jobs.broken(streams[pick % len(streams)], rig.now))
        elif verb == "leave":
            leaves.append(rig.leave(epoch, rank, job))
        elif verb in ("switch", "fail"):
            rig.switch("broken" if verb == "fail" else None)
        elif verb == "down":
            rig.note(rig.jobs.switch_down("down", rig.now))
        elif verb == "up":
            rig.note(rig.jobs.switch_up({plan.number for plan in rig.jobs.live()}, rig.now))
        elif verb == "tick":
            rig.tick(rig.now + pick / 10)
        elif verb == "lapse":
            rig.tick(rig.now + LEASE)
        bases = [pool.epoch for pool in rig.jobs.pools() if pool.job]
        assert len(bases) == len(set(bases))
    rig.note(rig.jobs.switch_up({plan.number for plan in rig.jobs.live()}, rig.now))
    for _ in range(4):
        rig.switch()
        rig.tick(rig.now + 1000)
    for number in joins:
        assert rig.answer(number) is not None or number in withdrawn
    for number in leaves:
        assert rig.answer(number) is not None
    assert rig.all_free()
    assert rig.jobs.next_deadline() is None
    assert all(record.state is State.FAILED for record in rig.jobs.jobs())
    for number, action in enumerate(rig.log):
        if isinstance(action, TellFence) and "the controller was restarted" not in action.fence.message:
            assert any(isinstance(earlier, Revoke) for earlier in rig.log[:number])
