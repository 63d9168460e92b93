# SPDX-License-Identifier: Apache-2.0
"""The controller's shell in virtual time: the real Jobs, a disk, a session with the switch, and crashes.

Actions are performed one by one, in their order, as the coordinator does; a crash may come before any of them. What
Persist has written by then is what the next controller finds.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from p4reduce.core.config import RetransmissionPolicy
from p4reduce.proto import controller_pb2 as pb
from p4reduce_controller import messages
from p4reduce_controller.admission import Applicant, RefusedError
from p4reduce_controller.coordinator import _directive
from p4reduce_controller.hosts import Host, synthetic_mac
from p4reduce_controller.jobs import Jobs
from p4reduce_controller.model import (
    Action,
    Close,
    Forget,
    Grant,
    Install,
    LeaveDone,
    Persist,
    Refuse,
    Remove,
    Revoke,
    TellFence,
)
from p4reduce_controller.pools import Pools
from p4reduce_controller.states import OVER

if TYPE_CHECKING:
    from helpers.cut_rank import CutRank
    from helpers.cut_world import CutWorld

LEASE_SECONDS = 10.0
TICK = 0.1
POLICY = RetransmissionPolicy(
    initial=0.01, minimum=0.004, maximum=0.1, deadline=20.0, early_resend=2, silent=0.1, fallback=0.2
)


class CrashedError(Exception):
    """The controller has died in the middle of something."""


class Control:
    """The controller, from one crash to the next."""

    def __init__(self, world: CutWorld, pool_slots: int, slots: int) -> None:
        self.world = world
        self.draw = world.fork("control")
        self.sizes = (pool_slots, slots)
        self.alive = False
        self.session = False
        self.fuse: int | None = None
        """Actions until it dies."""
        self.fuse_records: int | None = None
        """Records until it dies: right after the last of them is on disk."""
        self.disk: dict[str, str] = {}
        self.drained = False
        self.crashes = 0
        self.streams: dict[int, CutRank] = {}
        self.calls: dict[int, CutRank] = {}
        self.orders: dict[tuple[int, int], str] = {}
        self._numbers = itertools.count(1)
        self._epochs = itertools.count(100)
        self._work: deque[Install | Revoke | Remove] = deque()
        self._working = False
        self._ticking = False
        self.jobs: Any = None

    # ---- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A controller on what is on disk."""
        if self.alive:
            return
        self.alive, self.session, self._working = True, False, False
        self.jobs = Jobs(
            Pools(*self.sizes),
            lambda: next(self._epochs),
            LEASE_SECONDS,
            policy=POLICY,
            credential=lambda: self.draw.randbytes(16),
        )
        if self.drained:
            self.act(lambda now: self.jobs.drain(now))
        records = [json.loads(record) for record in self.disk.values()]
        self.act(lambda now: self.jobs.restore(records, None, now))
        self.later(0.05, 0.4, self.find_session)
        if not self._ticking:
            self._ticking = True
            self.world.clock.at(self.world.now + TICK, self._tick)

    def crash(self) -> None:
        """It dies; what it has said so far arrives, or the first part of it."""
        if not self.alive:
            return
        self.alive, self.session, self.fuse, self.fuse_records = False, False, None, None
        self.crashes += 1
        self._work.clear()
        for number, rank in self.streams.items():
            at = self.world.now + self.draw.choice((0.0, 0.001, 0.05))
            self.world.clock.at(at, rank.awake(self._losing(rank, number)))
        self.streams.clear()
        self.calls.clear()

    @staticmethod
    def _losing(rank: CutRank, number: int) -> Callable[[], None]:
        return lambda: rank.progress.lost(number)

    def later(self, least: float, most: float, call: Callable[[], None]) -> None:
        """Call, unless this controller dies before."""
        life = self.crashes

        def if_alive() -> None:
            if self.alive and self.crashes == life:
                call()

        self.world.clock.at(self.world.now + self.draw.uniform(least, most), if_alive)

    def _tick(self) -> None:
        if self.alive:
            self.act(lambda now: self.jobs.tick(now))
        self.world.clock.at(self.world.now + TICK, self._tick)

    # ---- actions --------------------------------------------------------------------------------------------------

    def act(self, change: Callable[[float], list[Action]]) -> None:
        """Let the logic do something, and perform what it wants."""
        if not self.alive:
            return
        try:
            for action in change(self.world.now):
                self._perform(action)
        except CrashedError:
            self.crash()
            self.world.seen["crashes between actions"] += 1
        if self.alive:
            self._pump()
            self._check()

    def command(self, change: Callable[[float], list[Action]]) -> bool:
        """An operator's call; whether it was taken."""
        try:
            self.act(change)
        except RefusedError:
            return False
        return self.alive

    def set_drained(self, drained: bool) -> None:
        """On disk before it counts."""
        if self.alive:
            self.drained = drained
            self.act(self.jobs.drain if drained else self.jobs.undrain)

    def _perform(self, action: Action) -> None:
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                raise CrashedError
        self.world.seen[type(action).__name__] += 1
        match action:
            case Persist(name, record):
                self.disk[name] = json.dumps(record)
                if self.fuse_records is not None:
                    self.fuse_records -= 1
                    if self.fuse_records < 0:
                        raise CrashedError
            case Forget(name):
                self.disk.pop(name, None)
            case Install() | Revoke() | Remove():
                self._work.append(action)
            case Grant():
                self._grant(action)
            case LeaveDone(ticket):
                self._answer(ticket, lambda rank: rank.stop())
            case Refuse(ticket, refusal):
                self._refuse(ticket, refusal.message)
            case Close(stream):
                self._end_stream(stream)
            case TellFence(stream, fence):
                self._say(stream, pb.Directive(fence=messages.fence(fence)))
                self.world.seen[f"fence {fence.reason.name}"] += 1
                self.world.fences.append(fence.message)
                self._end_stream(stream)
            case _:
                self._say(action.stream, _directive(action))

    def _grant(self, grant: Grant) -> None:
        reply = pb.JoinReply(
            epoch=grant.run.epoch,
            policy=messages.policy(grant.policy),
            order=messages.order(grant.order),
            credential=grant.credential,
        )
        self._answer(grant.ticket, lambda rank: rank.joined(reply))

    def _answer(self, ticket: int, tell: Callable[[CutRank], None]) -> None:
        rank = self.calls.pop(ticket, None)
        if rank is not None:
            self.world.clock.at(self.world.now + rank.delay(), rank.awake(lambda: tell(rank)))

    def _refuse(self, ticket: int, message: str) -> None:
        self.world.seen["refusals"] += 1
        if ticket in self.streams:
            self._end_stream(ticket)
        elif "left" in message or "no epoch" in message:
            self._answer(ticket, lambda rank: rank.stop())
        else:
            self.calls.pop(ticket, None)

    def _say(self, stream: int, directive: pb.Directive) -> None:
        rank = self.streams.get(stream)
        if rank is None:
            return
        if directive.HasField("order"):
            order = directive.order
            self.world.seen[str(order.WhichOneof("kind"))] += 1
            rank.job.orders[order.number] = rank.job.orders.get(order.number) or order.SerializeToString()
            if rank.job.orders[order.number] != order.SerializeToString():
                self.world.blame(f"{rank}: two orders have the number {order.number}")
        rank.progress.down(stream, directive)

    def _end_stream(self, stream: int) -> None:
        rank = self.streams.pop(stream, None)
        if rank is not None:
            rank.progress.down(stream, None)
            self.later(0.0, 0.01, lambda: self.act(lambda now: self.jobs.broken(stream, now)))

    # ---- what comes in ----------------------------------------------------------------------------------------------

    def join(self, rank: CutRank) -> None:
        """A Join call."""
        if not self.alive:
            return
        ticket = next(self._numbers)
        self.calls[ticket] = rank
        ip = ".".join(str(byte) for byte in rank.member.ip.to_bytes(4, "big"))
        host = Host(f"h{rank.member.port}", ip, synthetic_mac(ip), rank.member.port)
        job = rank.job
        applicant = Applicant(
            job.name,
            job.size,
            rank.rank,
            0,
            host,
            rank.member.udp_port,
            1000,
            60.0,
            "auto",
            True,
            rank.nonce,
            2,
            job.want,
        )
        self.later(0.0, 0.05, lambda: self.act(lambda now: self.jobs.join(applicant, ticket, now)))

    def leave(self, rank: CutRank) -> int:
        """A Leave call; its number."""
        ticket = next(self._numbers)
        if self.alive and rank.membership is not None and rank.driver is not None:
            self.calls[ticket] = rank
            epoch, submitted = rank.membership._config.epoch, rank.driver.submitted
            self.later(
                0.0,
                0.05,
                lambda: self.act(
                    lambda now: self.jobs.leave(
                        rank.job.name,
                        epoch,
                        rank.rank,
                        ticket,
                        now,
                        submitted=submitted,
                        wait_seconds=60.0,
                        credential=rank.credential,
                    )
                ),
            )
        return ticket

    def open_stream(self, rank: CutRank) -> int:
        """A new progress stream; its number."""
        number = next(self._numbers)
        self.streams[number] = rank
        return number

    def stream_ended(self, number: int) -> None:
        """A rank has ended its stream, or died."""

        def broken() -> None:
            if self.streams.pop(number, None) is not None:
                self.act(lambda now: self.jobs.broken(number, now))

        self.later(0.0, 0.05, broken)

    def hear(self, number: int, message: pb.ProgressReport, rank: CutRank) -> None:
        """A report has arrived."""
        if self.alive and number in self.streams:
            report = messages.report(message, rank.credential)
            self.act(lambda now: self.jobs.report(number, report, now))

    # ---- the switch -------------------------------------------------------------------------------------------------

    def lose_session(self, why: str) -> None:
        """The connection to the switch is gone, for a while."""
        if not (self.alive and self.session):
            return
        self.session = False
        work, self._work = list(self._work), deque()
        for one in work:
            self._report(one, "no session")
        self.act(lambda now: self.jobs.switch_down(why, now))
        self.later(0.1, 0.6, self.find_session)

    def find_session(self) -> None:
        """What the shell does with a new session: take away what must not be there, then tell."""
        if self.session:
            return
        if not self.world.fabric.up:
            self.later(0.1, 0.4, self.find_session)
            return
        fabric = self.world.fabric
        live = {plan.number for plan in self.jobs.live()}
        for epoch in [epoch for epoch in fabric.holds if epoch not in live]:
            fabric.revoke(epoch)
        self.session = True
        held = set(fabric.holds)
        self.act(lambda now: self.jobs.switch_up(held, now))

    def audit(self, epoch: int) -> None:
        """Entries of an epoch are gone; the audit finds that."""
        self.world.fabric.revoke(epoch)
        self.later(0.0, 1.0, lambda: self.act(lambda now: self.jobs.entries_lost({epoch}, now)))

    def _pump(self) -> None:
        """One piece of work on the switch at a time."""
        if self._work and not self._working:
            self._working = True
            work = self._work.popleft()
            self.later(0.001, 0.05, lambda: self._do(work))

    def _do(self, work: Install | Revoke | Remove) -> None:
        fabric = self.world.fabric
        error = None if self.session and fabric.up else "no session"
        if error is None:
            if isinstance(work, Install):
                fabric.admit(work.plan)
            elif isinstance(work, Revoke):
                fabric.revoke(work.plan.number)
        self._working = False
        self._report(work, error)

    def _report(self, work: Install | Revoke | Remove, error: str | None) -> None:
        number, jobs = work.plan.number, self.jobs
        if isinstance(work, Install):
            self.act(lambda now: jobs.installed(number, error, now))
        elif isinstance(work, Revoke):
            self.act(lambda now: jobs.revoked(number, error, now))
        else:
            self.act(lambda now: jobs.removed(number, error, {"results": 1}, now))

    # ---- what must hold ---------------------------------------------------------------------------------------------

    def record(self, name: str) -> Any:
        """What the controller knows of a job."""
        return next((job for job in self.jobs.jobs() if job.name == name), None) if self.alive else None

    def _check(self) -> None:
        position = 0
        for view in self.jobs.pools():
            if view.base != position:
                self.world.blame(f"slots {position} to {view.base} belong to nobody, or to two")
            position = view.base + view.size
        for job in self.jobs.jobs():
            if job.live:
                saved = json.loads(self.disk.get(job.name, "{}"))
                if saved.get("order", {}).get("number") != job.run.order.number:
                    self.world.blame(f"job {job.name}: its order {job.run.order.number} is not on disk")
                self.world.seen[f"state {job.state.value}"] += 1

    def idle(self) -> bool:
        """Whether no job is there and nothing is leased."""
        return self.alive and not any(view.job for view in self.jobs.pools()) and not self.live()

    def live(self) -> list[str]:
        return [job.name for job in self.jobs.jobs() if job.state not in OVER]
