# SPDX-License-Identifier: Apache-2.0
"""Between the RPCs, the admission logic and the switch: a lock, a clock, and a mailbox for every RPC that waits."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from p4reduce.core.config import RetransmissionPolicy
from p4reduce.errors import SwitchError
from p4reduce.proto import controller_pb2 as pb
from p4reduce_controller import messages
from p4reduce_controller.admission import Applicant, Code, Refusal
from p4reduce_controller.entries import COUNTER, COUNTER_NAMES, EPOCHS, TABLES, Entity, Epoch, base, difference
from p4reduce_controller.hosts import Hosts
from p4reduce_controller.jobs import Jobs
from p4reduce_controller.link import Connector, Switch, SwitchLink
from p4reduce_controller.marks import Mark, epoch_of, is_mark
from p4reduce_controller.model import (
    Action,
    Close,
    Grant,
    Install,
    LeaveDone,
    PoolView,
    Refuse,
    Register,
    Remove,
    Report,
    Revoke,
    TellFence,
    TellLeft,
)
from p4reduce_controller.pools import PORT_BUDGET, Pools
from p4reduce_controller.store import EpochStore

_LOG = logging.getLogger(__name__)

COUNTERS_SECONDS = 1.0
"""Status does not wait longer for fresh counters: less than a worker waits for status."""
END = None
"""In a mailbox: nothing more will come."""
Mail = pb.JoinReply | pb.LeaveReply | pb.Directive | Refusal | None
Mailbox = queue.SimpleQueue[Mail]


class Coordinator:
    """Owns the jobs. Every method may be called from any thread."""

    def __init__(
        self,
        hosts: Hosts,
        connect: Connector,
        store: EpochStore,
        *,
        pool_slots: int,
        policy: RetransmissionPolicy,
        lease_seconds: float,
        switch_deadline: float,
        port_budget: int = PORT_BUDGET,
        probe_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        timer: bool = True,
    ) -> None:
        """With `timer` off nobody calls `tick` but the owner: for tests with a clock of their own."""
        self.hosts = hosts
        self.switch_deadline = switch_deadline
        self._store = store
        self._policy = policy
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._started = clock()
        self._changed = threading.Condition()
        self._jobs = Jobs(
            Pools(pool_slots), store.next, lease_seconds, port_budget, f"the switch at {hosts.switch.grpc}"
        )
        self._mark = Mark()
        self._mailboxes: dict[int, Mailbox] = {}
        self._numbers = itertools.count(1)
        self._stopping = False
        self._base = base(hosts)
        self._link = SwitchLink(connect, self._reconcile, self._switch_down, probe_seconds=probe_seconds)
        self._timer = threading.Thread(target=self._keep_time, name="p4reduce-leases", daemon=True) if timer else None

    def start(self) -> None:
        """Connect to the switch and bring it into shape. SwitchError."""
        self._link.start()
        if self._timer is not None:
            self._timer.start()

    def stop(self) -> None:
        """Let go of everything. What stands in the switch stays: running jobs do not need a controller to reduce."""
        with self._changed:
            self._stopping = True
            refusal = Refusal(Code.UNAVAILABLE, "the controller is stopping")
            for mailbox in self._mailboxes.values():
                mailbox.put(refusal)
            self._changed.notify_all()
        self._link.stop()
        if self._timer is not None and self._timer.is_alive():
            self._timer.join(timeout=5.0)
        with self._changed:
            self._store.close()

    # ---- RPCs -----------------------------------------------------------------------------------------------------

    @contextmanager
    def mailbox(self) -> Iterator[tuple[int, Mailbox]]:
        """A number for an RPC, and where its answers arrive."""
        mailbox: Mailbox = queue.SimpleQueue()
        with self._changed:
            number = next(self._numbers)
            self._mailboxes[number] = mailbox
            if self._stopping:
                mailbox.put(Refusal(Code.UNAVAILABLE, "the controller is stopping"))
        try:
            yield number, mailbox
        finally:
            with self._changed:
                del self._mailboxes[number]

    def join(self, applicant: Applicant, number: int) -> None:
        """The answer comes to the mailbox: a JoinReply or a Refusal."""
        self._act(lambda now: self._jobs.join(applicant, number, now))

    def withdraw(self, number: int) -> None:
        """The client of a Join is gone."""
        self._act(lambda now: self._jobs.withdraw(number, now))
        # Nobody reads the answer, but the RPC's thread waits for one.
        self._send(number, Refusal(Code.CANCELLED, "the client is gone"))

    def leave(self, job: str, epoch: int, rank: int, number: int) -> None:
        """The answer comes to the mailbox: a LeaveReply or a Refusal."""
        self._act(lambda now: self._jobs.leave(job, epoch, rank, number, now))

    def report(self, number: int, report: Report) -> None:
        """A message on a progress stream. Directives come to its mailbox."""
        self._act(lambda now: self._jobs.report(number, report, now))

    def broken(self, number: int) -> None:
        """A progress stream has ended. Puts an end into its mailbox."""
        self._act(lambda now: self._jobs.broken(number, now))
        self._send(number, END)

    def tick(self) -> None:
        """Look at the clock."""
        self._act(self._jobs.tick)

    def pools(self) -> list[PoolView]:
        """All pools, with who leases them."""
        with self._changed:
            return self._jobs.pools()

    def status(self, only: str) -> pb.StatusReply:
        """State of the switch and of one job (`only`), or of all when it is empty."""
        answers = self._refresh_counters(only)
        with self._changed:
            now = self._clock()
            # A switch that hangs keeps its session for a while.
            connected = self._link.connected and answers
            return pb.StatusReply(
                switch=messages.switch_status(self.hosts, connected),
                jobs=[messages.job_status(job, now) for job in self._jobs.jobs() if only in ("", job.name)],
                server_version=messages.VERSION,
                uptime_seconds=now - self._started,
            )

    # ---- actions --------------------------------------------------------------------------------------------------

    def _act(self, change: Callable[[float], list[Action]]) -> None:
        with self._changed:
            if self._stopping:
                # Streams that break because we stop say nothing about their workers.
                return
            for action in change(self._clock()):
                self._perform(action)
            self._changed.notify_all()

    def _send(self, number: int, mail: Mail) -> None:
        # Without one, the RPC is over and nobody waits.
        mailbox = self._mailboxes.get(number)
        if mailbox is not None:
            mailbox.put(mail)

    def _perform(self, action: Action) -> None:
        match action:
            case Grant(ticket, rank, run):
                self._send(ticket, messages.join_reply(self.hosts, rank, run, self._policy, self._lease_seconds))
            case Refuse(ticket, refusal):
                _LOG.info("refused (%s): %s", refusal.code.value, refusal.message)
                self._send(ticket, refusal)
            case LeaveDone(ticket):
                self._send(ticket, pb.LeaveReply())
            case Register(stream):
                self._send(stream, pb.Directive(registered=pb.Registered()))
            case TellFence(stream, fence):
                self._send(stream, pb.Directive(fence=messages.fence(fence)))
                self._send(stream, END)
            case TellLeft(stream, rank, submitted):
                self._send(stream, pb.Directive(peer_left=pb.PeerLeft(rank=rank, submitted=submitted)))
            case Close(stream):
                self._send(stream, END)
            case Install(plan):
                lease = plan.lease
                _LOG.info(
                    "epoch %d: %d workers, slots %d..%d, group %d",
                    plan.number,
                    len(plan.places),
                    lease.pool_base,
                    lease.pool_base + lease.pool_size - 1,
                    lease.group,
                )
                self._link.submit(partial(self._install, plan), partial(self._installed, plan))
            case Revoke(plan, why):
                _LOG.log(logging.WARNING if why else logging.INFO, "epoch %d is over: %s", plan.number, why or "left")
                self._link.submit(
                    lambda switch: switch.write(plan.revoke(), missing_ok=True), partial(self._revoked, plan)
                )
            case Remove(plan):
                self._link.submit(partial(self._remove, plan), partial(self._removed, plan))

    def _install(self, plan: Epoch, switch: Switch) -> None:
        """In the link's thread. The switch must remember the epoch before it can be granted."""
        self._mark.reserve(switch, plan.number)
        switch.write(plan.install())

    def _remove(self, plan: Epoch, switch: Switch) -> dict[str, int]:
        """In the link's thread. Keep the epoch's counters, then take away what stands beside its admit entries."""
        indices = [cell.index for cell in plan.counters()]
        counters = dict(zip(COUNTER_NAMES, switch.read_counters(COUNTER, indices), strict=True))
        switch.write([update for update in plan.remove() if not self._mark.holds(update.entity)], missing_ok=True)
        return counters

    def _installed(self, plan: Epoch, _: None, error: str | None) -> None:
        self._act(lambda now: self._jobs.installed(plan.number, error, now))

    def _revoked(self, plan: Epoch, _: None, error: str | None) -> None:
        if error is not None:
            _LOG.warning("epoch %d: could not be revoked yet: %s", plan.number, error)
        self._act(lambda now: self._jobs.revoked(plan.number, error, now))

    def _removed(self, plan: Epoch, counters: dict[str, int] | None, error: str | None) -> None:
        if error is not None:
            _LOG.warning("epoch %d: could not be removed yet: %s", plan.number, error)
        self._act(lambda now: self._jobs.removed(plan.number, error, counters or {}, now))

    # ---- the switch -----------------------------------------------------------------------------------------------

    def _reconcile(self, switch: Switch) -> None:
        """Give a switch with a new session what it must hold, and take away everything else."""
        entries = switch.read_tables(TABLES)
        epochs = {epoch_of(entry) for entry in entries if entry.table == EPOCHS and not is_mark(entry)}
        present: list[Entity] = [*(entry for entry in entries if not is_mark(entry)), *switch.read_groups()]
        mark = self._mark.adopt(switch, entries)
        self._mark.clear(switch)
        with self._changed:
            # Whatever an earlier controller granted, its frames may still be on the way.
            self._store.raise_to(mark)
            wanted = list(self._base)
            for plan in self._jobs.live():
                if plan.number in epochs:
                    wanted += plan.rest() + plan.admit()
        switch.write(difference(wanted, present))
        self._act(lambda now: self._jobs.switch_up(epochs, now))

    def _switch_down(self, why: str) -> None:
        self._act(lambda now: self._jobs.switch_down(why, now))

    def _refresh_counters(self, only: str) -> bool:
        """Whether the switch answered, as far as it was asked: it is when a job runs."""
        with self._changed:
            runs = [job.run for job in self._jobs.jobs() if job.run is not None and job.live and only in ("", job.name)]
        if not runs:
            return True
        rows = [[cell.index for cell in run.plan.counters()] for run in runs]
        try:
            values = self._link.ask(
                lambda switch: switch.read_counters(COUNTER, [index for row in rows for index in row]),
                min(self.switch_deadline, COUNTERS_SECONDS),
            )
        except SwitchError as error:
            _LOG.info("counters not refreshed: %s", error)
            return False
        with self._changed:
            # A run that ended meanwhile keeps what was read before its row went to another epoch.
            live = [job.run for job in self._jobs.jobs() if job.live]
            for position, run in enumerate(runs):
                if run not in live:
                    continue
                first = position * len(COUNTER_NAMES)
                run.counters = dict(zip(COUNTER_NAMES, values[first : first + len(COUNTER_NAMES)], strict=True))
        return True

    def _keep_time(self) -> None:
        while True:
            with self._changed:
                if self._stopping:
                    return
                deadline = self._jobs.next_deadline()
                wait = None if deadline is None else deadline - self._clock()
                if wait is None or wait > 0:
                    self._changed.wait(wait)
                    continue
            try:
                self.tick()
            except Exception:
                # A defect must not end the thread: no lost worker would be noticed any more.
                _LOG.exception("unexpected error while looking at the clock")
                with self._changed:
                    self._changed.wait(1.0)
