# SPDX-License-Identifier: Apache-2.0
"""Admission, paths and liveness of jobs, without I/O: calls and `now` go in, actions come out.

`states.TABLE` says what each event does in each state. `rounds`, `cuts`, `promotion` and `runs` hold the steps,
`paths` and `records` what they share, `operations` the calls of operators and of a restart. Calls come one at a time.
RPCs are known by numbers that the caller chooses, never the same twice. Actions are to be performed in their order.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Mapping

from p4reduce_controller.admission import Applicant, Code
from p4reduce_controller.model import (
    Action,
    Job,
    LeaveDone,
    Remove,
    Report,
    Signal,
    TellFence,
)
from p4reduce_controller.operations import Operations
from p4reduce_controller.states import Event, State


class Jobs(Operations):
    """All jobs of one switch."""

    # ---- joins ----------------------------------------------------------------------------------------------------

    def join(self, applicant: Applicant, ticket: int, now: float) -> list[Action]:
        """A rank asks to join. Answered by Grant or Refuse, at once or later."""
        job = self._jobs.get(applicant.job)
        if applicant.needs_switch and not self._is_member(job, applicant):
            if self._switch_down is not None:
                self._refuse([ticket], Code.UNAVAILABLE, self._no_switch())
                return self._taken()
            if self._drained:
                self._refuse([ticket], Code.UNAVAILABLE, self._is_drained())
                return self._taken()
        event = Event.JOIN
        if job is None:
            job = Job(applicant.job, applicant.world_size, applicant.incarnation)
        elif applicant.incarnation != job.incarnation:
            event = Event.JOIN_NEWER if applicant.incarnation > job.incarnation else Event.JOIN_OLDER
        self._dispatch(job, event, Signal(now, ticket=ticket, rank=applicant.rank, applicant=applicant))
        return self._taken()

    @staticmethod
    def _is_member(job: Job | None, applicant: Applicant) -> bool:
        """Whether this rank is in already: it has lost its answer, or is there twice."""
        return job is not None and job.live and job.run is not None and applicant.incarnation == job.incarnation

    def withdraw(self, ticket: int, now: float) -> list[Action]:
        """The client behind a Join is gone. Nothing happens when it has been answered already."""
        for job in list(self._jobs.values()):
            for rank, seat in job.seats.items():
                if seat.ticket == ticket:
                    self._dispatch(job, Event.WITHDRAW, Signal(now, ticket=ticket, rank=rank))
                    return self._taken()
        return self._taken()

    # ---- the switch -----------------------------------------------------------------------------------------------

    def installed(self, epoch: int, error: str | None, now: float) -> list[Action]:
        """The answer to Install; `error` says why it failed."""
        job = self._job_of(epoch) or self._absent()
        event = Event.INSTALLED if error is None else Event.INSTALL_FAILED
        self._dispatch(job, event, Signal(now, epoch=epoch, message=error or ""))
        return self._taken()

    def revoked(self, epoch: int, error: str | None, now: float) -> list[Action]:
        """The answer to Revoke. The workers are told even when it failed: the epoch is over either way."""
        ending = self._endings[epoch]
        ending.revoked = True
        if ending.fence is not None:
            for stream in ending.streams:
                self._actions.append(TellFence(stream, ending.fence))
            ending.streams.clear()
        if error is None:
            self._actions.append(Remove(ending.plan))
        else:
            self._postpone(ending, now)
        return self._taken()

    def removed(self, epoch: int, error: str | None, counters: Mapping[str, int], now: float) -> list[Action]:
        """The answer to Remove: the lease ends, unless it failed."""
        ending = self._endings[epoch]
        job = self._jobs.get(ending.job)
        if job is not None and job.run is not None and job.run.counted == epoch and counters:
            job.run.counters = dict(counters)
        if error is not None:
            self._postpone(ending, now)
            return self._taken()
        del self._endings[epoch]
        self._actions += [LeaveDone(ticket) for ticket in ending.tickets]
        self._pools.give_back(ending.plan.lease)
        if job is not None and job.live:
            self._save(job)
        for waiting in list(self._jobs.values()):
            self._dispatch(waiting, Event.POOL_FREE, Signal(now))
        return self._taken()

    def switch_down(self, why: str, now: float) -> list[Action]:
        """The session with the switch is lost: running jobs go on as long as they get sums."""
        if self._switch_down is None:
            self._down_since = now
        self._switch_down, self._up_since = why, None
        for job in list(self._jobs.values()):
            self._look_for_silence(job, now)
        return self._taken()

    def switch_up(self, epochs: Collection[int], now: float) -> list[Action]:
        """There is a session again, and the switch holds these epochs. Jobs whose epoch it lost fall back, or fail."""
        self._switch_down, self._up_since = None, now
        self._entries_gone([plan.number for plan in self.live() if plan.number not in epochs], "", now)
        for ending in self._endings.values():
            if ending.retry_at is not None:
                ending.retry_at = now
        self._retry(now)
        return self._taken()

    def entries_lost(self, epochs: Collection[int], now: float) -> list[Action]:
        """An audit found that entries of these epochs are gone from the switch."""
        self._entries_gone(epochs, "the switch has lost entries of the job's epoch", now)
        return self._taken()

    def _entries_gone(self, epochs: Collection[int], message: str, now: float) -> None:
        """Epochs that the switch should hold and does not."""
        for job in list(self._jobs.values()):
            if job.installed is not None and job.installed.number in epochs:
                self._dispatch(job, Event.SWITCH_LOST, Signal(now, message=message))

    # ---- workers --------------------------------------------------------------------------------------------------

    def report(self, stream: int, report: Report, now: float) -> list[Action]:
        """A message on a progress stream; the first one opens it."""
        identity = (report.job, report.epoch, report.rank)
        known = self._streams.get(stream)
        if known is None:
            job = self._current(report.job, report.epoch)
            if self._is_stranger(job, report.rank, report.credential):
                self._refuse([stream], Code.PERMISSION_DENIED, self._strange(report.job, report.rank))
                return self._taken()
            self._streams[stream] = identity
            self._dispatch(job, Event.OPEN, Signal(now, ticket=stream, rank=report.rank, epoch=report.epoch))
        elif known != identity:
            self._refuse(
                [stream],
                Code.INVALID_ARGUMENT,
                f"this stream belongs to rank {known[2]} of job {known[0]!r}, epoch {known[1]}: "
                f"open one stream for every rank",
            )
            return self._taken()
        if stream in self._streams:
            self._hear(stream, report, now)
        return self._taken()

    def _hear(self, stream: int, report: Report, now: float) -> None:
        """What a registered rank says."""
        job = self._current(report.job, report.epoch)
        signal = Signal(now, ticket=stream, rank=report.rank, report=report)
        self._dispatch(job, Event.REPORT if report.trouble is None else Event.TROUBLE, signal)
        run, answer = job.run, report.answer
        if not job.live or run is None or run.epoch != report.epoch:
            return
        if answer is not None and answer.order == run.order.number and run.due is not None:
            run.answers[report.rank] = answer
            self._dispatch(job, Event.ANSWER, signal)
        self._look_for_silence(job, now)
        self._let_go(job, now)

    def _is_stranger(self, job: Job, rank: int, credential: bytes) -> bool:
        """Whether the caller cannot prove to be the rank it says it is."""
        worker = job.run.workers.get(rank) if job.run is not None and job.live else None
        return worker is not None and not hmac.compare_digest(worker.credential, credential or b"")

    @staticmethod
    def _strange(name: str, rank: int) -> str:
        return f"job {name!r}: the credential is not that of rank {rank}: present the one that came with the join"

    def _look_for_silence(self, job: Job, now: float) -> None:
        run = job.run
        if job.state is not State.SWITCH or run is None:
            return
        if run.doubt is not None or any(worker.silent > 0 for worker in run.workers.values()):
            self._dispatch(job, Event.SILENT, Signal(now))

    def _let_go(self, job: Job, now: float) -> None:
        """Let leaving ranks go that are needed no more; one that goes may free another."""
        run = job.run
        while run is not None and job.run is run and job.live:
            ready = [rank for rank, worker in run.workers.items() if self._may_depart(job, worker, now)]
            if not ready:
                return
            self._dispatch(job, Event.DEPART, Signal(now, rank=ready[0]))

    def broken(self, stream: int, now: float) -> list[Action]:
        """A progress stream has ended, whoever ended it."""
        identity = self._streams.pop(stream, None)
        if identity is not None:
            job = self._current(identity[0], identity[1])
            worker = job.run.workers.get(identity[2]) if job.run is not None else None
            if worker is not None and worker.stream == stream:
                self._dispatch(job, Event.BREAK, Signal(now, ticket=stream, rank=identity[2]))
                self._let_go(job, now)
        return self._taken()

    def woken(self, now: float) -> None:
        """This controller goes on after it was stopped: what happened meanwhile comes in now, in any order."""
        self._woken = now

    def leave(
        self,
        name: str,
        epoch: int,
        rank: int,
        ticket: int,
        now: float,
        *,
        submitted: int = 0,
        wait_seconds: float = 0.0,
        credential: bytes = b"",
    ) -> list[Action]:
        """A rank leaves, having taken part in `submitted` buckets; it waits for the others to complete these.

        Answered by LeaveDone; the last one's once the switch holds nothing of the epoch.
        """
        job = self._current(name, epoch)
        if self._is_stranger(job, rank, credential):
            self._refuse([ticket], Code.PERMISSION_DENIED, self._strange(name, rank))
            return self._taken()
        signal = Signal(now, ticket=ticket, rank=rank, epoch=epoch, submitted=submitted, wait_seconds=wait_seconds)
        self._dispatch(job, Event.LEAVE, signal)
        self._let_go(job, now)
        return self._taken()

    # ---- time -----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """Time has passed: ends waits and leases that are over, and moves jobs whose time has come."""
        for job in list(self._jobs.values()):
            if any(seat.expires <= now for seat in job.seats.values()):
                self._dispatch(job, Event.EXPIRE, Signal(now))
            silent = tuple(worker.applicant.rank for worker in self._staying(job) if self._lapse(worker) <= now)
            if silent:
                self._dispatch(job, Event.LAPSE, Signal(now, ranks=silent))
            due = self._due(job)
            if due is not None and due <= now:
                self._dispatch(job, Event.LATE, Signal(now))
            self._let_go(job, now)
            self._miss_switch(job, now)
            promote_at = self._promote_at(job)
            if promote_at is not None and promote_at <= now:
                self._dispatch(job, Event.HEALTHY, Signal(now))
        if self._switch_down is None:
            self._retry(now)
        return self._taken()

    @staticmethod
    def _due(job: Job) -> float | None:
        """When what the controller waits for in this state is overdue."""
        run = job.run
        if run is None or not job.live:
            return None
        return run.doubt.due if run.doubt is not None else run.due

    def _miss_switch(self, job: Job, now: float) -> None:
        """Nobody can tell a switch that is gone from one that only the controller cannot reach, but its sums can."""
        lost_at = self._unreachable_at(job)
        if lost_at is not None and lost_at <= now:
            message = (
                f"{self._switch_name} has been unreachable for {now - self._down_since:.3g} s ({self._switch_down}), "
                f"and no bucket was completed since: start it again, then restart the job"
            )
            self._dispatch(job, Event.SWITCH_LOST, Signal(now, message=message))

    def next_deadline(self) -> float | None:
        """When to call `tick` next; None when nothing is waited for."""
        times = [ending.retry_at for ending in self._endings.values() if ending.retry_at is not None]
        if self._switch_down is not None:
            times.clear()
        for job in self._jobs.values():
            times += [seat.expires for seat in job.seats.values() if job.state is not State.INSTALLING]
            staying = self._staying(job)
            times += [self._lapse(worker) for worker in staying]
            times += [worker.leaving.expires for worker in staying if worker.leaving is not None]
            times += [
                time for time in (self._due(job), self._unreachable_at(job), self._promote_at(job)) if time is not None
            ]
        return min(times, default=None)
