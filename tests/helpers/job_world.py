# SPDX-License-Identifier: Apache-2.0
"""A small world around the controller's logic: ranks that carry out orders, a switch, a ring, and faults.

Time goes in steps. Buckets are numbers: a bucket is summed by the switch once every rank has handed it to the same
epoch, and each rank gets that result on its own, some steps later or never; by the ring once every rank has put the
same number at the same place. What a rank must have kept, and what it may have dropped, is checked at every cut.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from helpers.jobs import JobsRig
from p4reduce_controller.model import (
    Action,
    Answer,
    Close,
    Fence,
    Grant,
    Install,
    LeaveDone,
    Order,
    Reason,
    Refuse,
    Register,
    Report,
    Revoke,
    TellFence,
    TellLeft,
    TellOrder,
    TellPolicy,
    TellReport,
)
from p4reduce_controller.states import OVER, State

STEP = 0.05
REPORT_SECONDS = 0.5
"""A rank reports at least so often; after an order and when asked, at once."""


@dataclass
class Rank:
    """One worker process, as far as the controller can see it."""

    job: str
    rank: int
    nonce: bytes
    rng: random.Random
    alive: bool = True
    frozen: bool = False
    thaws_at: float = 0.0
    call: int | None = None
    credential: bytes = b""
    membership: int = 0
    stream: int | None = None
    reopen_at: float = 0.0
    fence: Fence | None = None
    refused: str = ""
    # the path
    number: int = 0
    where: str = ""
    """switch, stopped, ring, trying or holding"""
    epoch: int = 0
    first: int = 0
    content: tuple[Any, ...] = ()
    trial: int = 0
    answer: Answer | None = None
    trouble: Fence | None = None
    # buckets
    target: int = 10**9
    submitted: int = 0
    on_way: int = 0
    """Buckets below this are on a path; the others are held."""
    core_next: int = 0
    """First bucket of the switch epoch that is not complete here."""
    ring: list[int] = field(default_factory=list)
    ring_done: int = 0
    done: set[int] = field(default_factory=set)
    completed: int = 0
    last_result: float = 0.0
    told_at: float = 0.0
    wants_report: int | None = None
    leaving: int | None = None
    left: bool = False
    later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    @property
    def active(self) -> bool:
        return self.alive and not self.frozen and self.membership != 0 and self.fence is None and not self.left

    def finish(self, bucket: int, now: float) -> None:
        self.done.add(bucket)
        while self.completed in self.done:
            self.completed += 1
        self.last_result = now

    def waits(self) -> bool:
        """Whether the switch path owes it something."""
        return self.where == "switch" and self.core_next < self.on_way


class World:
    """The controller, its switch, and all ranks."""

    def __init__(self, seed: int, jobs: dict[str, dict[str, Any]]) -> None:
        self.rng = random.Random(seed)
        self.rig = JobsRig(pool_slots=16, slots=64, secret=True)
        self.numbers = itertools.count(10**6)
        self.ranks: dict[tuple[str, int], Rank] = {}
        self.calls: dict[int, Rank] = {}
        self.streams: dict[int, Rank] = {}
        self.mail: list[tuple[float, int, Callable[[], None]]] = []
        self.last_mail: dict[int, float] = {}
        self.log_read = 0
        self.holds: dict[int, Any] = {}
        """Epochs that the switch admits frames of."""
        self.up = True
        """The switch runs."""
        self.session = True
        self.dark = False
        """The switch swallows everything, its session lives."""
        self.lossy = True
        """Answers to trials may be lost."""
        self.controller = True
        self.work_at = 0.0
        self.session_at: float | None = None
        self.leaders: dict[tuple[int, int], tuple[Any, ...]] = {}
        self.orders_seen = 0
        self.compared = 0
        self.troubles = 0
        self.events: list[str] = []
        for name, more in jobs.items():
            world = more.pop("world")
            for rank in range(world):
                made = Rank(name, rank, bytes([rank + 1]) * 16, random.Random(f"{seed} {name} {rank}"))
                self.ranks[name, rank] = made
                self.join(made, world, more)

    @property
    def now(self) -> float:
        return self.rig.now

    def of(self, job: str) -> list[Rank]:
        return [rank for rank in self.ranks.values() if rank.job == job]

    def record(self, job: str) -> Any:
        return next((record for record in self.rig.jobs.jobs() if record.name == job), None)

    # ---- calls ----------------------------------------------------------------------------------------------------

    def join(self, rank: Rank, world: int, more: dict[str, Any]) -> None:
        rank.call = self.rig.join(rank.rank, world, rank.job, wait=60.0, nonce=rank.nonce, **more)
        self.calls[rank.call] = rank

    def say(self, rank: Rank) -> None:
        """A report, if there is somebody to hear it."""
        rank.told_at = self.now
        if not self.controller or rank.stream is None:
            return
        silent = self.now - rank.last_result if rank.waits() else 0.0
        policy = self.record(rank.job)
        if policy is not None and silent < policy.policy.silent:
            silent = 0.0
        report = Report(
            rank.job,
            rank.membership,
            rank.rank,
            rank.submitted,
            rank.completed,
            self.trouble(rank),
            rank.answer,
            silent,
            rank.epoch,
            {"results": len(rank.done)},
            0.001,
            rank.credential,
        )
        self.rig.note(self.rig.jobs.report(rank.stream, report, self.now))

    def trouble(self, rank: Rank) -> Fence | None:
        """What it says when the switch refuses it, or when results are damaged; repeated until the next order."""
        refused = rank.waits() and self.up and not self.dark and rank.epoch not in self.holds
        if rank.trouble is None and refused and rank.rng.random() < 0.5:
            rank.trouble = Fence(Reason.REFUSED, "the switch does not admit it", (), rank.core_next)
        if rank.trouble is not None:
            self.troubles += 1
        return rank.trouble

    def damage(self, rank: Rank) -> bool:
        """Let a rank find a sum wrong again and again, if it waits for one."""
        if rank.active and rank.waits():
            rank.trouble = Fence(Reason.INTEGRITY, "a sum is wrong", (), rank.core_next)
        return rank.trouble is not None

    def kill(self, rank: Rank) -> None:
        rank.alive = False
        if rank.stream is not None and self.controller:
            self.rig.note(self.rig.jobs.broken(rank.stream, self.now))

    # ---- faults ---------------------------------------------------------------------------------------------------

    def kill_controller(self) -> None:
        self.controller = False
        for rank in self.ranks.values():
            rank.stream = None
            rank.reopen_at = self.now + 0.1 + rank.rng.random()
        self.streams.clear()
        self.mail.clear()
        self.last_mail.clear()

    def start_controller(self) -> None:
        self.controller, self.session = True, False
        self.rig.restart()
        self.log_read = len(self.rig.log)
        self.session_at = self.now + 0.2
        self.work_at = self.now

    def kill_switch(self) -> None:
        self.up, self.holds = False, {}
        self.lose_session("connection reset")

    def lose_session(self, why: str) -> None:
        self.session_at = self.now + 0.3
        if self.session and self.controller:
            self.session = False
            self.do_work()  # all of it fails
            self.rig.note(self.rig.jobs.switch_down(why, self.now))
        self.session = False

    def find_session(self) -> None:
        """What the shell does with a new session: take away what must not be there, then tell."""
        if self.session or self.session_at is None or self.now < self.session_at or not (self.up and self.controller):
            return
        live = {plan.number for plan in self.rig.jobs.live()}
        held = {number for number in self.holds if number in live}
        self.holds = {number: self.holds[number] for number in held}
        self.session = True
        self.rig.note(self.rig.jobs.switch_up(held, self.now))

    # ---- the switch's work ----------------------------------------------------------------------------------------

    def do_work(self) -> None:
        error = None if self.session and self.up else "no session"
        while self.rig.work:
            work = self.rig.work.popleft()
            number = work.plan.number
            if isinstance(work, Install):
                if error is None:
                    self.install(work.plan)
                self.rig.note(self.rig.jobs.installed(number, error, self.now))
            elif isinstance(work, Revoke):
                if error is None:
                    self.holds.pop(number, None)
                self.rig.note(self.rig.jobs.revoked(number, error, self.now))
            else:
                self.rig.note(self.rig.jobs.removed(number, error, {"results": 1}, self.now))
            self.route()
            if self.session:
                break

    def install(self, plan: Any) -> None:
        for other in self.holds.values():
            ours, theirs = plan.lease, other.lease
            apart = ours.pool_base + ours.pool_size <= theirs.pool_base
            assert apart or theirs.pool_base + theirs.pool_size <= ours.pool_base, (plan, other)
            assert ours.group != theirs.group
            assert not set(ours.rids) & set(theirs.rids)
        self.holds[plan.number] = plan

    # ---- what the controller says ---------------------------------------------------------------------------------

    def route(self) -> None:
        """Put what the controller has said on its way; each stream in order."""
        for action in self.rig.log[self.log_read :]:
            if isinstance(action, Grant | Refuse | LeaveDone):
                rank = self.calls.get(action.ticket) or self.streams.get(action.ticket)
                if rank is not None:
                    self.post(action.ticket, rank, action)
            elif isinstance(action, Register | TellOrder | TellFence | TellLeft | TellReport | TellPolicy | Close):
                rank = self.streams.get(action.stream)
                if rank is not None:
                    self.post(action.stream, rank, action)
        self.log_read = len(self.rig.log)

    def post(self, line: int, rank: Rank, action: Action) -> None:
        at = max(self.now + rank.rng.choice([0.0, 0.01, 0.08]), self.last_mail.get(line, 0.0))
        self.last_mail[line] = at
        heapq.heappush(self.mail, (at, next(self.numbers), lambda: self.hear(line, rank, action)))

    def deliver(self) -> None:
        while self.mail and self.mail[0][0] <= self.now:
            heapq.heappop(self.mail)[2]()

    def hear(self, line: int, rank: Rank, action: Action) -> None:
        if not rank.alive:
            return
        if rank.frozen:
            rank.later.append((self.now, lambda: self.hear(line, rank, action)))
            return
        match action:
            case Grant(_, number, run, order, credential, _):
                assert number == rank.rank
                if rank.membership == 0:
                    rank.membership, rank.credential = run.epoch, credential
                    rank.last_result = self.now
                    self.obey(rank, order)
                assert (rank.membership, rank.credential) == (run.epoch, credential)
            case LeaveDone():
                rank.left = True
            case Refuse(_, refusal):
                rank.refused = refusal.message
                if line == rank.stream:
                    rank.stream, rank.reopen_at = None, self.now + 0.2
            case TellOrder(_, order):
                if line == rank.stream:
                    self.obey(rank, order)
            case TellFence(_, fence):
                rank.fence = fence
            case TellReport(_, completed):
                rank.wants_report = completed or None
                self.say(rank)

    # ---- orders ---------------------------------------------------------------------------------------------------

    def obey(self, rank: Rank, order: Order) -> None:
        """Carry an order out as docs/design.md §7 wants it."""
        self.orders_seen += 1
        content = (order.kind, order.epoch, order.first_bucket, order.or_slots, order.add_slots)
        record = self.record(rank.job)
        if record is None or record.run is None:
            return
        same = self.leaders.setdefault((rank.membership, order.number), content)
        assert same == content, "one number, two orders"
        if order.number <= rank.number:
            if rank.answer is not None and rank.answer.order == order.number:
                self.say(rank)
            return
        rank.number = order.number
        rank.answer = rank.trouble = None
        getattr(self, f"obey_{order.kind.name.lower()}")(rank, order)
        self.say(rank)

    def obey_run_switch(self, rank: Rank, order: Order) -> None:
        if rank.where == "switch":
            assert (rank.epoch, rank.first) == (order.epoch, order.first_bucket), "out of place"
            return
        assert rank.where in ("", "holding"), rank.where
        assert rank.where == "" or rank.trial == order.epoch
        assert rank.on_way <= order.first_bucket or rank.where == "", "somebody has started what is the switch's"
        rank.where, rank.epoch, rank.first = "switch", order.epoch, order.first_bucket
        rank.core_next = order.first_bucket
        rank.last_result = self.now

    def obey_run_ring(self, rank: Rank, order: Order) -> None:
        if rank.where in ("ring", "trying", "holding"):
            assert (rank.epoch, rank.first) == (order.epoch, order.first_bucket), "out of place"
        else:
            assert rank.where in ("", "stopped"), rank.where
            if rank.where == "stopped":
                self.cut(rank, order)
            rank.epoch, rank.first = order.epoch, order.first_bucket
        rank.where, rank.trial = "ring", 0

    def cut(self, rank: Rank, order: Order) -> None:
        """Put again what the switch epoch has begun, from the order's bucket on."""
        others = [other for other in self.of(rank.job) if other.alive]
        first = order.first_bucket
        assert first <= rank.core_next or rank.core_next < rank.first, "this rank's own buckets are left out"
        for other in others:
            for bucket in range(other.first, min(first, other.submitted)):
                if other.where in ("stopped", "ring") and other.epoch != order.epoch and other.core_next >= other.first:
                    assert bucket in other.done, f"bucket {bucket} is lost at rank {other.rank}"
        for bucket in range(max(first, rank.first), rank.on_way):
            rank.ring.append(bucket)

    def obey_stop(self, rank: Rank, order: Order) -> None:
        if rank.where == "stopped":
            assert rank.epoch == order.epoch
        elif rank.where == "holding":
            assert rank.trial == order.epoch, "out of place"
            # The order to run it was overtaken: what is held here nobody has completed.
            rank.epoch, rank.trial, rank.where = order.epoch, 0, "stopped"
            rank.first = rank.core_next = rank.on_way
        else:
            assert (rank.where, rank.epoch) == ("switch", order.epoch), "out of place"
            rank.where = "stopped"
        rank.answer = Answer(order.number, rank.core_next)

    def obey_trial(self, rank: Rank, order: Order) -> None:
        assert rank.where in ("ring", "trying", "holding"), rank.where
        rank.where, rank.trial = "trying", order.epoch
        if self.lossy and rank.rng.random() < 0.05:
            return  # the answer never comes
        due = self.now + rank.rng.choice([0.0, 0.1, 0.3])
        rank.later.append((due, lambda: self.try_out(rank, order)))

    def try_out(self, rank: Rank, order: Order) -> None:
        if rank.number != order.number:
            return
        good = self.up and not self.dark and order.epoch in self.holds
        rank.answer = Answer(order.number, 0, not good, "" if good else "no frame came back")
        self.say(rank)

    def obey_hold(self, rank: Rank, order: Order) -> None:
        assert rank.where in ("trying", "holding"), rank.where
        rank.where = "holding"
        rank.answer = Answer(order.number, rank.submitted)

    # ---- buckets --------------------------------------------------------------------------------------------------

    def work_on(self, rank: Rank) -> None:
        """Hand a bucket in, and put what is held on its path."""
        if rank.submitted < rank.target and rank.submitted - rank.completed < 6 and rank.rng.random() < 0.6:
            rank.submitted += 1
        while rank.on_way < rank.submitted:
            if rank.where == "switch":
                if rank.on_way < rank.first:
                    rank.ring.append(rank.on_way)
                elif rank.on_way == rank.core_next:
                    rank.last_result = self.now
            elif rank.where in ("ring", "trying"):
                rank.ring.append(rank.on_way)
            else:
                return
            rank.on_way += 1

    def sum_up(self, job: str) -> None:
        """Let the switch and the ring do their part for one job."""
        ranks = self.of(job)
        length = min(len(rank.ring) for rank in ranks)
        for rank in ranks:
            if not rank.active:
                continue
            if rank.ring_done < length and rank.rng.random() < 0.7 and all(other.alive for other in ranks):
                place = rank.ring_done
                numbers = {other.ring[place] for other in ranks}
                assert len(numbers) == 1, f"place {place} of the ring: {numbers}"
                self.compared += rank.ring[place] in rank.done
                rank.finish(rank.ring[place], self.now)
                rank.ring_done += 1
            served = self.up and not self.dark and rank.epoch in self.holds and rank.trouble is None
            if rank.waits() and served and rank.rng.random() < 0.8:
                bucket = rank.core_next
                if all(self.has_handed(other, rank.epoch, bucket) for other in ranks):
                    rank.core_next += 1
                    rank.finish(bucket, self.now)

    @staticmethod
    def has_handed(rank: Rank, epoch: int, bucket: int) -> bool:
        """Whether the switch has this rank's integers, however long ago it was stopped."""
        return rank.epoch == epoch and rank.where in ("switch", "stopped") and rank.first <= bucket < rank.on_way

    # ---- time -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.rig.now = round(self.rig.now + STEP, 6)
        now = self.now
        if self.controller:
            self.find_session()
            if self.rig.work and self.rng.random() < 0.6:
                self.do_work()
            deadline = self.rig.jobs.next_deadline()
            if deadline is not None and deadline <= now:
                self.rig.note(self.rig.jobs.tick(now))
            self.route()
        self.deliver()
        for rank in self.ranks.values():
            self.live(rank)
        for job in {rank.job for rank in self.ranks.values()}:
            self.sum_up(job)
        if self.controller:
            self.route()
            self.check()

    def live(self, rank: Rank) -> None:
        rank.frozen = rank.frozen and self.now < rank.thaws_at
        if not rank.active:
            return
        due = [item for item in rank.later if item[0] <= self.now]
        rank.later = [item for item in rank.later if item[0] > self.now]
        for _, call in due:
            call()
        if rank.stream is None:
            if not self.controller or self.now < rank.reopen_at:
                return
            rank.stream = next(self.numbers)
            self.streams[rank.stream] = rank
            self.say(rank)
            if rank.leaving is not None:
                self.leave(rank)
        self.work_on(rank)
        asked = rank.wants_report is not None and rank.completed >= rank.wants_report
        if asked or self.now - rank.told_at >= REPORT_SECONDS:
            rank.wants_report = None if asked else rank.wants_report
            self.say(rank)

    def leave(self, rank: Rank) -> None:
        rank.leaving = self.rig.leave(
            rank.membership,
            rank.rank,
            rank.job,
            submitted=rank.submitted,
            wait_seconds=60.0,
            credential=rank.credential,
        )
        self.calls[rank.leaving] = rank

    def freeze(self, rank: Rank, seconds: float) -> None:
        rank.frozen = True
        self.events.append(f"{self.now:g} freeze {rank.job}/{rank.rank} {seconds:g}")
        rank.thaws_at = self.now + seconds

    # ---- what must hold -------------------------------------------------------------------------------------------

    def check(self) -> None:
        position = 0
        for view in self.rig.jobs.pools():
            assert view.base == position
            position += view.size
        assert position == 64
        for record in self.rig.jobs.jobs():
            if record.live:
                saved = self.rig.saved(record.name)
                assert saved is not None
                assert saved["order"]["number"] == record.run.order.number
            if record.state is State.RING:
                assert record.path_reason
            if record.state in OVER:
                assert record.reason
