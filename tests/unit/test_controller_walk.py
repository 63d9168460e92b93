# SPDX-License-Identifier: Apache-2.0
"""Jobs under random calls: every call is answered once, nothing leaks, and a restart at any point changes nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest
from helpers.jobs import LEASE
from helpers.jobs import JobsRig as Rig

from p4reduce_controller.admission import RefusedError
from p4reduce_controller.model import (
    ASKING,
    Answer,
    Fence,
    Forget,
    Grant,
    OrderKind,
    Persist,
    Reason,
    Report,
    Revoke,
    TellFence,
    TellOrder,
)
from p4reduce_controller.states import LIVE, OVER, State

STEPS = (
    ["join"] * 12
    + ["switch"] * 12
    + ["answer"] * 12
    + ["open", "promote"] * 6
    + ["report", "silent", "tick", "up", "undrain"] * 3
    + ["newer", "withdraw", "trouble", "break", "leave", "mode", "evict", "fail", "down", "lost", "drain", "lapse"]
    + ["policy", "wake"]
)
WORLDS = {"a": 2, "b": 3, "c": 1, "d": 2}
MODES = {"a": ("auto", True), "b": ("auto", True), "c": ("auto", False), "d": ("require", True)}
REASONS = [Reason.STALLED, Reason.INTEGRITY, Reason.REFUSED, Reason.MISMATCH]


class Walk:
    """A rig, random steps, and what must hold after each of them."""

    def __init__(self, seed: int, restarts: bool) -> None:
        self.rng = random.Random(seed)
        self.rig = Rig(pool_slots=16, slots=40)
        self.restarts = restarts
        self.joins: list[int] = []
        self.leaves: list[int] = []
        self.streams: list[int] = []
        self.excused: set[int] = set()
        """Calls that were cancelled, or whose controller died."""
        self.incarnation = 0
        self.checked = 0
        self.on_disk: dict[str, dict[str, Any]] = {}
        self.content: dict[tuple[int, int], tuple[Any, ...]] = {}
        self.counts: dict[str, int] = {}
        self.states: set[State] = set()
        self.restarted: set[State] = set()
        """States that jobs were in when the controller died."""
        self.fences = 0
        self.ended: set[State] = set()

    def step(self) -> None:
        promoting = any(r.state in (State.PREPARING, State.TRYING, State.HOLDING) for r in self.rig.jobs.jobs())
        restart = self.restarts and self.rng.random() < (0.05 if promoting else 0.005)
        verb = "restart" if restart else self.rng.choice(STEPS)
        self.counts[verb] = self.counts.get(verb, 0) + 1
        getattr(self, f"do_{verb}")(self.rng.choice("abcd"))
        self.check()

    def record(self, job: str) -> Any:
        return next((record for record in self.rig.jobs.jobs() if record.name == job), None)

    def epoch(self, job: str) -> int:
        record = self.record(job)
        return 7 if record is None or record.run is None else record.run.epoch

    def stream(self) -> int | None:
        known = [stream for stream in self.streams if stream in self.rig.jobs._streams]
        return self.rng.choice(known) if known else None

    # ---- steps ----------------------------------------------------------------------------------------------------

    def do_join(self, job: str) -> None:
        mode, ring = MODES[job]
        rank = self.rng.randrange(WORLDS[job])
        nonce = bytes([rank]) * 16 if self.rng.random() < 0.5 else b""
        wait = self.rng.choice([1.0, 20.0])
        more = {"mode": mode, "ring": ring, "nonce": nonce, "slots_min": self.rng.choice([2, 2, 9])}
        self.joins.append(self.rig.join(rank, WORLDS[job], job, self.incarnation, wait, **more))

    def do_newer(self, job: str) -> None:
        if self.rng.random() < 0.2:
            self.incarnation += 1
            self.do_join(job)

    def do_withdraw(self, _: str) -> None:
        if self.joins:
            number = self.rng.choice(self.joins)
            self.excused.add(number)
            self.rig.note(self.rig.jobs.withdraw(number, self.rig.now))

    def do_open(self, job: str) -> None:
        epoch = self.epoch(job)
        for rank in range(WORLDS[job]):
            if self.rng.random() < 0.9:
                self.streams.append(self.rig.open(epoch, rank, job))

    def say(self, **more: Any) -> None:
        stream = self.stream()
        if stream is not None:
            done = self.rng.randrange(40)
            self.rig.report(stream, done + self.rng.randrange(2), done, **more)

    def do_report(self, _: str) -> None:
        self.say()

    def do_silent(self, _: str) -> None:
        self.say(silent=self.rng.choice([0.4, 0.7, 2.0]))

    def do_trouble(self, _: str) -> None:
        trouble = Fence(self.rng.choice(REASONS), "", (), self.rng.randrange(50))
        self.say(trouble=trouble, present=self.rng.choice([0, 1, 100]))

    def do_answer(self, job: str) -> None:
        """All ranks that have a stream answer; sometimes one says no."""
        for stream in list(self.streams):
            name, epoch, _ = self.rig.jobs._streams.get(stream, ("", 0, 0))
            record = self.record(name) if name == job else None
            if record is not None and record.run is not None and record.run.epoch == epoch:
                failed = self.rng.random() < 0.05
                answer = Answer(record.run.order.number, self.rng.randrange(60), failed)
                self.rig.report(stream, answer=answer)

    def do_break(self, _: str) -> None:
        if self.streams and self.rng.random() < 0.3:
            self.rig.note(self.rig.jobs.broken(self.rng.choice(self.streams), self.rig.now))

    def do_wake(self, _: str) -> None:
        """The controller was stopped."""
        if self.rng.random() < 0.3:
            self.rig.jobs.woken(self.rig.now)

    def do_leave(self, job: str) -> None:
        more = {"submitted": self.rng.randrange(40), "wait_seconds": self.rng.choice([0.0, 5.0])}
        self.leaves.append(self.rig.leave(self.epoch(job), self.rng.randrange(3), job, **more))

    def do_mode(self, job: str) -> None:
        self.operate(lambda: self.rig.jobs.set_mode(job, self.rng.choice(["auto", "require", "off"]), self.rig.now))

    def do_evict(self, job: str) -> None:
        if self.rng.random() < 0.3:
            self.operate(lambda: self.rig.jobs.evict(job, self.rig.now))

    def do_policy(self, job: str) -> None:
        self.operate(lambda: self.rig.jobs.set_policy(job, self.rig.jobs.default_policy, self.rig.now))

    def operate(self, call: Any) -> None:
        try:
            self.rig.note(call())
        except RefusedError:
            self.rig.note(self.rig.jobs._taken())

    def do_drain(self, _: str) -> None:
        if self.rng.random() < 0.3:
            self.rig.note(self.rig.jobs.drain(self.rig.now))

    def do_undrain(self, _: str) -> None:
        self.rig.note(self.rig.jobs.undrain(self.rig.now))

    def do_switch(self, _: str) -> None:
        self.rig.switch()

    def do_fail(self, _: str) -> None:
        self.rig.switch("broken")

    def do_down(self, _: str) -> None:
        if self.rng.random() < 0.3:
            self.rig.note(self.rig.jobs.switch_down("down", self.rig.now))

    def do_up(self, _: str) -> None:
        held = [plan.number for plan in self.rig.jobs.live() if self.rng.random() < 0.9]
        self.rig.note(self.rig.jobs.switch_up(held, self.rig.now))

    def do_lost(self, _: str) -> None:
        lost = [plan.number for plan in self.rig.jobs.live() if self.rng.random() < 0.1]
        self.rig.note(self.rig.jobs.entries_lost(lost, self.rig.now))

    def do_tick(self, _: str) -> None:
        self.rig.tick(self.rig.now + self.rng.random())

    def do_promote(self, job: str) -> None:
        """The time of a job on the ring path comes, and its ranks live to see it."""
        record = self.record(job)
        when = None if record is None else self.rig.jobs._promote_at(record)
        if when is not None:
            for stream in [s for s in self.streams if self.rig.jobs._streams.get(s, ("",))[0] == job]:
                self.rig.report(stream)
            self.rig.tick(max(self.rig.now, min(when, self.rig.now + LEASE / 2)))

    def do_lapse(self, _: str) -> None:
        if self.rng.random() < 0.1:
            self.rig.tick(self.rig.now + LEASE)

    def do_restart(self, _: str) -> None:
        open_calls = [number for number in self.joins + self.leaves if self.rig.answer(number) is None]
        self.excused.update(open_calls)
        before = {record.name: record for record in self.rig.jobs.jobs() if record.live}
        self.rig.restart()
        self.streams.clear()
        self.restarted |= {record.state for record in before.values()}
        after = {record.name: record for record in self.rig.jobs.jobs() if record.live}
        assert set(after) == set(before)
        assert {record.state for record in self.rig.jobs.jobs() if not record.live} <= OVER
        for name, old in before.items():
            new = after[name]
            assert (new.run.epoch, new.run.present, new.mode) == (old.run.epoch, old.run.present, old.mode)
            assert (new.path, new.promotions, new.fallbacks) == (old.path, old.promotions, old.fallbacks)
            assert new.run.running.epoch == old.run.running.epoch
            if old.state in (State.SWITCH, State.CUTTING, State.RING, State.LEAVING):
                assert (new.state, new.run.order, new.run.plan) == (old.state, old.run.order, old.run.plan)
            else:
                assert (new.state, new.run.order.kind) == (State.RING, OrderKind.RUN_RING)
                assert new.run.order.number > old.run.order.number

    # ---- what must hold -------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.states |= {record.state for record in self.rig.jobs.jobs()}
        self.check_leases()
        for action in self.rig.log[self.checked :]:
            if isinstance(action, Persist):
                self.on_disk[action.name] = action.record
            elif isinstance(action, Forget):
                self.on_disk.pop(action.name, None)
            elif isinstance(action, TellOrder | Grant):
                self.check_order(action)
            elif isinstance(action, TellFence):
                self.fences += 1
        self.checked = len(self.rig.log)
        live = {record.name for record in self.rig.jobs.jobs() if record.live}
        assert set(self.on_disk) == live
        for record in self.rig.jobs.jobs():
            if record.live:
                written = self.on_disk[record.name]
                assert written["state"] == record.state.name
                assert written["order"]["number"] == record.run.order.number
                assert (written["plan"] is None) == (record.run.plan is None)
                assert (record.run.due is not None) == (
                    record.run.order.kind in ASKING and record.state is not State.LEAVING
                )

    def check_order(self, action: TellOrder | Grant) -> None:
        """No order without its record, and never an epoch with two contents."""
        order = action.order
        found = [r for r in self.on_disk.values() if order.epoch in (r["running"]["epoch"], r["order"]["epoch"])]
        if order.kind is not OrderKind.HOLD:
            assert any(record["order"]["number"] >= order.number for record in found)
        content = (order.kind, order.first_bucket, order.or_slots, order.add_slots)
        if order.kind in (OrderKind.RUN_RING, OrderKind.RUN_SWITCH):
            assert self.content.setdefault((order.epoch, 0), content) == content

    def check_leases(self) -> None:
        views = self.rig.jobs.pools()
        position = 0
        for view in views:
            assert view.base == position, views
            position += view.size
        assert position == 40
        jobs = self.rig.jobs
        plans = [record.leased for record in jobs.jobs() if record.leased is not None]
        plans += [ending.plan for ending in jobs._endings.values()]
        assert len({plan.number for plan in plans}) == len(plans)
        for numbers in (
            [plan.lease.group for plan in plans],
            [plan.lease.stats for plan in plans],
            [rid for plan in plans for rid in plan.lease.rids],
        ):
            assert len(numbers) == len(set(numbers))
        assert {plan.number for plan in jobs.live()} <= {plan.number for plan in plans}

    def finish(self) -> None:
        """Everything comes to its end once time passes and the switch does what it is asked to."""
        rig = self.rig
        rig.note(rig.jobs.undrain(rig.now))
        rig.note(rig.jobs.switch_up({plan.number for plan in rig.jobs.live()}, rig.now))
        for _ in range(4):
            rig.switch()
            rig.tick(rig.now + 1000)
            self.check()
        for number in self.joins + self.leaves:
            assert rig.answer(number) is not None or number in self.excused
        assert rig.all_free()
        assert rig.jobs.next_deadline() is None
        self.ended = {record.state for record in rig.jobs.jobs()}
        assert self.ended <= OVER
        assert self.on_disk == {}
        revoked = {action.plan.number for action in rig.log if isinstance(action, Revoke)}
        assert revoked
        assert self.fences


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_every_call_is_answered_once_and_nothing_leaks(seed: int) -> None:
    walk = Walk(seed, restarts=False)
    for _ in range(1500):
        walk.step()
    walk.finish()
    assert set(walk.counts) == set(STEPS)
    assert walk.states >= LIVE - {State.LEAVING}


def test_the_same_with_a_controller_that_dies_at_any_moment() -> None:
    restarted: set[State] = set()
    states: set[State] = set()
    for seed in range(8):
        walk = Walk(seed, restarts=True)
        for _ in range(1500):
            walk.step()
        walk.finish()
        restarted |= walk.restarted
        states |= walk.states
    assert restarted == LIVE
    assert states == set(State) - {State.ABSENT}


def test_reports_of_strangers_change_nothing() -> None:
    rig = Rig()
    epoch, _ = rig.start(2)
    before = rig.record().run.workers
    for name, number, rank in (("train", epoch, 5), ("train", epoch + 1, 0), ("other", epoch, 0)):
        rig.note(rig.jobs.report(999 + rank, Report(name, number, rank, 9, 9), 0.0))
    assert rig.record().run.workers is before
    assert rig.record().state is State.SWITCH
