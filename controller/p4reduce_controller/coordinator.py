# SPDX-License-Identifier: Apache-2.0
"""Between the RPCs, the admission logic and the switch: a lock, a clock, and a mailbox for every RPC that waits.

Actions are performed in the order in which the logic gives them. What must be durable before a grant or an order
leaves comes before it, and is on disk when the next action is looked at. When the state cannot be written, nothing
more is said to anybody and the controller ends: running jobs go on, and the next controller finds them as they are.
"""

from __future__ import annotations

import itertools
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from p4reduce.core.config import RetransmissionPolicy
from p4reduce.errors import SwitchError
from p4reduce.proto import controller_pb2 as pb
from p4reduce_controller import messages
from p4reduce_controller.admission import Applicant, Code, Refusal, RefusedError
from p4reduce_controller.audit import Keeper
from p4reduce_controller.entries import COUNTER, COUNTER_NAMES, STRAY_NAMES, Epoch, base, stray_indices
from p4reduce_controller.hosts import Hosts
from p4reduce_controller.jobs import Jobs
from p4reduce_controller.link import Connector, Switch, SwitchGoneError, SwitchLink
from p4reduce_controller.logs import about
from p4reduce_controller.model import (
    Action,
    Close,
    Forget,
    Grant,
    Install,
    Job,
    LeaveDone,
    Path,
    Persist,
    PoolView,
    Refuse,
    Register,
    Remove,
    Report,
    Revoke,
    TellFence,
    TellLeft,
    TellOrder,
    TellPolicy,
    TellReport,
)
from p4reduce_controller.pools import PORT_BUDGET, Pools
from p4reduce_controller.store import Store, StoreError

_LOG = logging.getLogger(__name__)

COUNTERS_SECONDS = 1.0
"""Status does not wait longer for fresh counters: less than a worker waits for status."""
CREDENTIAL_BYTES = 16
TICK_SECONDS = 0.5
"""The clock is looked at so often at least."""
STALL_SECONDS = 2.0
"""When it was not looked at for so long, this process was stopped, or its machine was. Nobody was heard meanwhile, so
the time does not count: a controller that was asleep must not take all its workers for dead."""
DRAINED = "drained"
POLICY = "policy"
"""Flags in the store: whether the switch is drained, and what operators changed of the default policy."""
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
        open_store: Callable[[], Store],
        *,
        pool_slots: int,
        policy: RetransmissionPolicy,
        lease_seconds: float,
        switch_deadline: float,
        port_budget: int = PORT_BUDGET,
        probe_seconds: float = 2.0,
        audit_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        timer: bool = True,
        on_end: Callable[[str, bool], None] | None = None,
    ) -> None:
        """`open_store` is called once this controller is the switch's primary, or by `open`.

        `on_end` is told why this controller must not go on, and whether another one has taken its place; the other
        reason is that its state cannot be written. With `timer` off nobody calls `tick` but the owner: for tests with
        a clock of their own.
        """
        self.hosts = hosts
        self.switch_deadline = switch_deadline
        self._open_store = open_store
        self._store: Store | None = None
        self._lease_seconds = lease_seconds
        self._audit_seconds = audit_seconds
        self._clock = clock
        self._started = self._looked = clock()
        self._asleep = 0.0
        self._on_end = on_end
        self._changed = threading.Condition()
        self._jobs = self._make_jobs(Pools(pool_slots), policy, port_budget)
        self._keeper = Keeper(base(hosts))
        self._next_audit = 0.0
        self._found = ""
        """What the last audit found wrong."""
        self._strays: dict[str, int] = {}
        """Frames of no epoch that the switch has counted, as last read."""
        self._mailboxes: dict[int, Mailbox] = {}
        self._numbers = itertools.count(1)
        self._stopping = False
        self._link = SwitchLink(
            connect,
            self._reconcile,
            self._switch_down,
            on_demoted=partial(self._end, demoted=True),
            look_after=self._look_after,
            probe_seconds=probe_seconds,
        )
        self._timer = threading.Thread(target=self._keep_time, name="p4reduce-leases", daemon=True) if timer else None

    def _make_jobs(self, pools: Pools, policy: RetransmissionPolicy, port_budget: int) -> Jobs:
        switch = self.hosts.switch
        return Jobs(
            pools,
            self._next_epoch,
            self._lease_seconds,
            port_budget,
            f"switch {switch.name} at {switch.grpc}",
            policy=policy,
            credential=partial(secrets.token_bytes, CREDENTIAL_BYTES),
            hosts=self.hosts,
        )

    def open(self) -> None:
        """Open the store and take up the jobs in it. ConfigError. Not needed: `start` does it."""
        if self._store is not None:
            return
        store = self._open_store()
        with self._changed:
            self._store = store
            records, ends, flags = store.records(), store.ends(), store.flags()
            self._restore_flags(flags)
            if records:
                _LOG.info("%d jobs in the state file", len(records))
        self._act(lambda now: self._jobs.restore(records, self.hosts, now, ends))

    def _restore_flags(self, flags: dict[str, Any]) -> None:
        now = self._now()
        changes = flags.get(POLICY)
        if isinstance(changes, dict) and changes:
            try:
                self._jobs.set_policy("", messages.changed_policy(self._jobs.default_policy, changes), now)
            except RefusedError as error:
                _LOG.warning(
                    "the default policy in the state file does not fit the options, and is left out: %s", error
                )
        if flags.get(DRAINED):
            self._jobs.drain(now)
            _LOG.warning("switch %s is drained: `p4reducectl undrain` ends that", self.hosts.switch.name)

    def start(self) -> None:
        """Become the switch's primary, open the store, bring the switch into shape. SwitchError, ConfigError."""
        self._link.start()
        self.listening()
        if self._timer is not None:
            with self._changed:
                # A standby may have waited for long.
                self._looked = self._clock()
            self._timer.start()

    def listening(self) -> None:
        """Workers can reach this controller from now on, not before: those that were there are awaited."""
        with self._changed:
            self._jobs.await_return(self._now())
            self._changed.notify_all()

    def stop(self) -> None:
        """Let go of everything. What stands in the switch stays: running jobs do not need a controller to reduce."""
        self._halt("the controller is stopping")
        self._link.stop()
        if self._timer is not None and self._timer.is_alive():
            self._timer.join(timeout=5.0)
        with self._changed:
            if self._store is not None:
                self._store.close()

    def _halt(self, why: str) -> None:
        with self._changed:
            self._stopping = True
            refusal = Refusal(Code.UNAVAILABLE, why, away=True)
            for mailbox in self._mailboxes.values():
                mailbox.put(refusal)
            self._changed.notify_all()

    def _end(self, why: str, demoted: bool = False) -> None:
        """From now on nothing is decided and nothing is said any more."""
        with self._changed:
            if self._stopping:
                return
            self._halt(f"this controller has ended: {why}")
        _LOG.error("%s", why)
        if self._on_end is not None:
            self._on_end(why, demoted)

    # ---- RPCs -----------------------------------------------------------------------------------------------------

    @contextmanager
    def mailbox(self) -> Iterator[tuple[int, Mailbox]]:
        """A number for an RPC, and where its answers arrive."""
        mailbox: Mailbox = queue.SimpleQueue()
        with self._changed:
            number = next(self._numbers)
            self._mailboxes[number] = mailbox
            if self._stopping:
                mailbox.put(Refusal(Code.UNAVAILABLE, "the controller is stopping", away=True))
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

    def leave(self, request: pb.LeaveRequest, number: int, credential: bytes) -> None:
        """The answer comes to the mailbox: a LeaveReply or a Refusal."""
        self._act(
            lambda now: self._jobs.leave(
                request.job,
                request.epoch,
                request.rank,
                number,
                now,
                submitted=request.submitted,
                wait_seconds=request.wait_seconds,
                credential=credential,
            )
        )

    def report(self, number: int, report: Report) -> None:
        """A message on a progress stream. Directives come to its mailbox."""
        self._act(lambda now: self._jobs.report(number, report, now))

    def broken(self, number: int) -> None:
        """A progress stream has ended. Puts an end into its mailbox."""
        self._act(lambda now: self._jobs.broken(number, now))
        self.close(number)

    def close(self, number: int) -> None:
        """Put an end into a mailbox."""
        self._send(number, END)

    def refuse(self, number: int, refusal: Refusal) -> None:
        """Answer an RPC with a refusal that was not the jobs' decision."""
        self._send(number, refusal)

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
            now = self._now()
            # A switch that hangs keeps its session for a while.
            connected = self._link.connected and answers
            trouble = self._link.trouble or self._found or ("" if answers else "it does not answer")
            return pb.StatusReply(
                switch=messages.switch_status(
                    self.hosts, connected, self._jobs.drained, trouble, self._link.connected_seconds, self._strays
                ),
                jobs=[messages.job_status(job, now) for job in self._jobs.jobs() if only in ("", job.name)],
                server_version=messages.VERSION,
                uptime_seconds=self._clock() - self._started,
            )

    # ---- operators' calls: RefusedError -----------------------------------------------------------------------------

    def set_mode(self, name: str, mode: str) -> tuple[str, str]:
        """The mode of a job now and before."""
        with self._changed:
            before = self._job(name).mode
            self._command(lambda now: self._jobs.set_mode(name, mode, now))
            return self._job(name).mode, before

    def set_policy(self, name: str, changes: dict[str, float | int]) -> RetransmissionPolicy:
        """The policy of a job, or the default of jobs to come when `name` is empty, with some fields changed."""
        with self._changed:
            before = self._job(name).policy if name else self._jobs.default_policy
            policy = messages.changed_policy(before, changes)
            if not name:
                kept = self._kept(POLICY)
                self._keep(POLICY, (kept if isinstance(kept, dict) else {}) | changes)
            self._command(lambda now: self._jobs.set_policy(name, policy, now))
            _LOG.info("retransmission policy changed: %s", policy, extra=about(job=name or None))
            return policy

    def drain(self, switch: str, undrain: bool) -> tuple[list[str], list[str]]:
        """Names of the jobs that change their path because of this, and of those that stay on the switch."""
        if switch not in ("", self.hosts.switch.name):
            raise RefusedError(
                Code.NOT_FOUND, f"no switch {switch[:64]!r}: this controller has {self.hosts.switch.name}"
            )
        with self._changed:
            if undrain:
                moving = [job.name for job in self._jobs.jobs() if job.live and _would_return(job)]
                staying: list[str] = []
            else:
                moving, staying = (list(names) for names in self._jobs.moving_staying())
            self._keep(DRAINED, None if undrain else True)
            self._command(self._jobs.undrain if undrain else self._jobs.drain)
            _LOG.warning("switch %s is %s by an operator", self.hosts.switch.name, "back" if undrain else "drained")
            return moving, staying

    def evict(self, name: str) -> int:
        """End a job. The epoch that names its membership; 0 when it had none yet."""
        with self._changed:
            run = self._job(name).run
            self._command(lambda now: self._jobs.evict(name, now))
            return run.epoch if run is not None else 0

    def _job(self, name: str) -> Job:
        found = next((job for job in self._jobs.jobs() if job.name == name), None)
        if found is None:
            raise RefusedError(Code.NOT_FOUND, f"no job {name[:128]!r}: `p4reducectl jobs` shows all")
        return found

    def _command(self, change: Callable[[float], list[Action]]) -> None:
        if self._stopping:
            raise RefusedError(Code.UNAVAILABLE, "the controller is stopping")
        self._act(change)
        if self._stopping:
            raise RefusedError(
                Code.UNAVAILABLE,
                "this controller has ended, because its state cannot be written: whether this was done shows when it "
                "is started again",
            )

    def _kept(self, flag: str) -> object:
        return self._store.flags().get(flag) if self._store is not None else None

    def _keep(self, flag: str, value: object) -> None:
        """On disk before it counts."""
        if self._store is None:
            raise RefusedError(Code.UNAVAILABLE, "the controller is starting")
        try:
            self._store.set_flag(flag, value)
        except StoreError as error:
            raise RefusedError(Code.INTERNAL, str(error)) from None

    # ---- actions --------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        """The time that counts. The caller holds the lock."""
        read = self._clock()
        gap, self._looked = read - self._looked, read
        if self._timer is not None and self._timer.is_alive() and gap > STALL_SECONDS:
            self._asleep += gap
            self._jobs.woken(read - self._asleep)
            _LOG.warning("this controller was stopped for %.1f s: leases go on as if that had not been", gap)
        return read - self._asleep

    def _act(self, change: Callable[[float], list[Action]]) -> None:
        try:
            with self._changed:
                if self._stopping:
                    # Streams that break because we stop say nothing about their workers.
                    return
                for action in change(self._now()):
                    self._perform(action)
                self._changed.notify_all()
        except StoreError as error:
            self._end(f"the state cannot be kept: {error}; running jobs go on, start the controller again")

    def _next_epoch(self) -> int:
        if self._store is None:
            raise StoreError("the controller is starting")
        return self._store.next()

    def _send(self, number: int, mail: Mail) -> None:
        # Without one, the RPC is over and nobody waits.
        mailbox = self._mailboxes.get(number)
        if mailbox is not None:
            mailbox.put(mail)

    def _perform(self, action: Action) -> None:
        match action:
            case Persist(name, record):
                self._stored().save(name, record)
            case Forget(name, end):
                self._stored().forget(name, end)
            case Grant():
                self._send(action.ticket, messages.join_reply(self.hosts, action, self._lease_seconds))
            case Refuse(ticket, refusal):
                _LOG.info("refused (%s): %s", refusal.code.value, refusal.message)
                self._send(ticket, refusal)
            case LeaveDone(ticket):
                self._send(ticket, pb.LeaveReply())
            case Install() | Revoke() | Remove():
                self._perform_on_switch(action)
            case Close(stream):
                self._send(stream, END)
            case TellFence(stream, fence):
                self._send(stream, pb.Directive(fence=messages.fence(fence)))
                self._send(stream, END)
            case _:
                self._send(action.stream, _directive(action))

    def _stored(self) -> Store:
        if self._store is None:
            raise StoreError("the controller has no state file open yet")
        return self._store

    def _perform_on_switch(self, action: Install | Revoke | Remove) -> None:
        plan = action.plan
        what = about(job=self._name_of(plan), epoch=plan.number)
        match action:
            case Install():
                lease = plan.lease
                text = "epoch %d: %d workers, slots %d..%d, group %d"
                last = lease.pool_base + lease.pool_size - 1
                _LOG.info(text, plan.number, len(plan.places), lease.pool_base, last, lease.group, extra=what)
                self._link.submit(partial(self._keeper.install, plan), partial(self._installed, plan))
            case Revoke(_, why):
                level = logging.WARNING if why else logging.INFO
                _LOG.log(level, "epoch %d is over: %s", plan.number, why or "no longer used", extra=what)
                self._link.submit(partial(self._keeper.revoke, plan), partial(self._revoked, plan))
            case Remove():
                self._link.submit(partial(self._keeper.remove, plan), partial(self._removed, plan))

    def _name_of(self, plan: Epoch) -> str | None:
        jobs = self._jobs.jobs()
        return next((job.name for job in jobs if job.run is not None and job.run.plan is plan), None)

    # ---- work in the link's thread ----------------------------------------------------------------------------------

    def _installed(self, plan: Epoch, _: None, error: str | None) -> None:
        self._act(lambda now: self._jobs.installed(plan.number, error, now))

    def _note_failure(self, what: str, plan: Epoch, error: str) -> None:
        # Without a session nothing else is to be expected, and its loss was told.
        level = logging.WARNING if self._link.connected else logging.INFO
        _LOG.log(level, "epoch %d could not be %s yet: %s", plan.number, what, error, extra=about(epoch=plan.number))

    def _revoked(self, plan: Epoch, _: None, error: str | None) -> None:
        if error is not None:
            self._note_failure("revoked", plan, error)
        self._act(lambda now: self._jobs.revoked(plan.number, error, now))

    def _removed(self, plan: Epoch, counters: dict[str, int] | None, error: str | None) -> None:
        if error is not None:
            self._note_failure("removed", plan, error)
        self._act(lambda now: self._jobs.removed(plan.number, error, counters or {}, now))

    def _reconcile(self, switch: Switch) -> None:
        """In the link's thread: a new session."""
        self.open()
        with self._changed:
            live, known = self._jobs.live(), self._known_epoch()
        epochs, mark, changed = self._keeper.take_over(switch, live, known)
        with self._changed:
            # Whatever an earlier controller granted, its frames may still be on the way.
            self._stored().raise_to(mark)
        kept = sum(plan.number in epochs for plan in live)
        _LOG.info("switch %s: %d entries changed, %d epochs kept", self.hosts.switch.name, changed, kept)
        self._read_strays(switch)
        self._next_audit = time.monotonic() + self._audit_seconds
        self._found = ""
        self._act(lambda now: self._jobs.switch_up(epochs, now))

    def _known_epoch(self) -> int:
        return max([self._stored().last, *(plan.number for plan in self._jobs.live())])

    def _look_after(self, switch: Switch) -> None:
        """In the link's thread, at every probe: frames of no epoch, and now and then an audit."""
        self._read_strays(switch)
        if time.monotonic() < self._next_audit:
            return
        self._next_audit = time.monotonic() + self._audit_seconds
        with self._changed:
            known = self._known_epoch()
        try:
            finding = self._keeper.audit(switch, known)
        except SwitchGoneError:
            raise
        except SwitchError as error:
            self._found = f"audit: {error}"
            _LOG.warning("switch %s: what an audit found cannot be mended: %s", self.hosts.switch.name, error)
            return
        self._found = f"audit: {finding.text}" if finding.text else ""
        if finding.text:
            _LOG.warning("switch %s: an audit found, and mended what it may: %s", self.hosts.switch.name, finding.text)
        if finding.lost:
            self._act(lambda now: self._jobs.entries_lost(finding.lost, now))

    def _read_strays(self, switch: Switch) -> None:
        try:
            values = switch.read_counters(COUNTER, stray_indices())
        except SwitchGoneError:
            raise
        except SwitchError as error:
            _LOG.info("counters of frames without an epoch not read: %s", error)
        else:
            self._strays = dict(zip(STRAY_NAMES, values, strict=True))

    def _switch_down(self, why: str) -> None:
        self._act(lambda now: self._jobs.switch_down(why, now))

    def _refresh_counters(self, only: str) -> bool:
        """Whether the switch answered, as far as it was asked: it is when a job is on it."""
        with self._changed:
            asked = [
                (job.run, job.installed)
                for job in self._jobs.jobs()
                if job.run is not None and job.installed is not None and only in ("", job.name)
            ]
        rows = [[cell.index for cell in plan.counters()] for _, plan in asked if plan is not None]
        if not rows:
            return True
        try:
            values = self._link.ask(
                lambda switch: switch.read_counters(COUNTER, [index for row in rows for index in row]),
                min(self.switch_deadline, COUNTERS_SECONDS),
            )
        except SwitchError as error:
            _LOG.info("counters not refreshed: %s", error)
            return False
        with self._changed:
            # An epoch that ended meanwhile keeps what was read before its row went to another one.
            present = {id(plan) for job in self._jobs.jobs() if (plan := job.installed) is not None}
            for position, (run, plan) in enumerate(asked):
                if plan is None or id(plan) not in present:
                    continue
                first = position * len(COUNTER_NAMES)
                run.counters = dict(zip(COUNTER_NAMES, values[first : first + len(COUNTER_NAMES)], strict=True))
                run.counted = plan.number
        return True

    def _keep_time(self) -> None:
        while True:
            with self._changed:
                if self._stopping:
                    return
                now, deadline = self._now(), self._jobs.next_deadline()
                if deadline is None or deadline > now:
                    self._changed.wait(TICK_SECONDS if deadline is None else min(deadline - now, TICK_SECONDS))
                    continue
            try:
                self.tick()
            except Exception:
                # A defect must not end the thread: no lost worker would be noticed any more.
                _LOG.exception("unexpected error while looking at the clock")
                with self._changed:
                    self._changed.wait(1.0)


def _directive(action: Register | TellLeft | TellOrder | TellReport | TellPolicy) -> pb.Directive:
    match action:
        case Register():
            return pb.Directive(registered=pb.Registered())
        case TellLeft(_, rank, submitted):
            return pb.Directive(peer_left=pb.PeerLeft(rank=rank, submitted=submitted))
        case TellOrder(_, order):
            return pb.Directive(order=messages.order(order))
        case TellReport(_, completed):
            return pb.Directive(report_now=pb.ReportNow(completed=completed))
        case TellPolicy(_, policy):
            return pb.Directive(policy=messages.policy(policy))


def _would_return(job: Job) -> bool:
    return job.path is Path.RING and job.mode != "off"
