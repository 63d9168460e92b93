# SPDX-License-Identifier: Apache-2.0
"""Admission and liveness of jobs, without I/O: calls and `now` go in, actions come out.

`states.TABLE` says what each event does in each state; `rounds` and `runs` hold the steps, `records` the machinery.
Calls come one at a time. RPCs are known by numbers that the caller chooses, never the same twice.
"""

from __future__ import annotations

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
from p4reduce_controller.runs import Runs
from p4reduce_controller.states import Event, State


class Jobs(Runs):
    """All jobs of one switch."""

    def join(self, applicant: Applicant, ticket: int, now: float) -> list[Action]:
        """A rank asks to join. Answered by Grant or Refuse, at once or later."""
        if self._switch_down is not None:
            self._refuse([ticket], Code.UNAVAILABLE, self._no_switch())
            return self._drain()
        job = self._jobs.get(applicant.job)
        event = Event.JOIN
        if job is None:
            job = Job(applicant.job, applicant.world_size, applicant.incarnation)
        elif applicant.incarnation != job.incarnation:
            event = Event.JOIN_NEWER if applicant.incarnation > job.incarnation else Event.JOIN_OLDER
        self._dispatch(job, event, Signal(now, ticket=ticket, rank=applicant.rank, applicant=applicant))
        return self._drain()

    def withdraw(self, ticket: int, now: float) -> list[Action]:
        """The client behind a Join is gone. Nothing happens when it has been answered already."""
        for job in list(self._jobs.values()):
            for rank, seat in job.seats.items():
                if seat.ticket == ticket:
                    self._dispatch(job, Event.WITHDRAW, Signal(now, ticket=ticket, rank=rank))
                    return self._drain()
        return self._drain()

    def installed(self, epoch: int, error: str | None, now: float) -> list[Action]:
        """The answer to Install; `error` says why it failed."""
        job = self._job_of(epoch) or self._absent()
        event = Event.INSTALLED if error is None else Event.INSTALL_FAILED
        self._dispatch(job, event, Signal(now, epoch=epoch, message=error or ""))
        return self._drain()

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
        return self._drain()

    def removed(self, epoch: int, error: str | None, counters: Mapping[str, int], now: float) -> list[Action]:
        """The answer to Remove: the lease ends, unless it failed."""
        ending = self._endings[epoch]
        job = self._job_of(epoch)
        if job is not None and job.run is not None and counters:
            job.run.counters = dict(counters)
        if error is not None:
            self._postpone(ending, now)
            return self._drain()
        del self._endings[epoch]
        self._actions += [LeaveDone(ticket) for ticket in ending.tickets]
        self._pools.give_back(ending.plan.lease)
        for waiting in list(self._jobs.values()):
            self._dispatch(waiting, Event.POOL_FREE, Signal(now))
        return self._drain()

    def report(self, stream: int, report: Report, now: float) -> list[Action]:
        """A message on a progress stream; the first one opens it."""
        identity = (report.job, report.epoch, report.rank)
        known = self._streams.get(stream)
        if known is None:
            self._streams[stream] = identity
            job = self._current(report.job, report.epoch)
            self._dispatch(job, Event.OPEN, Signal(now, ticket=stream, rank=report.rank, epoch=report.epoch))
        elif known != identity:
            self._refuse(
                [stream],
                Code.INVALID_ARGUMENT,
                f"this stream belongs to rank {known[2]} of job {known[0]!r}, epoch {known[1]}: "
                f"open one stream for every rank",
            )
            return self._drain()
        if stream in self._streams:
            job = self._current(report.job, report.epoch)
            event = Event.REPORT if report.trouble is None else Event.TROUBLE
            self._dispatch(job, event, Signal(now, ticket=stream, rank=report.rank, report=report))
        return self._drain()

    def broken(self, stream: int, now: float) -> list[Action]:
        """A progress stream has ended, whoever ended it."""
        identity = self._streams.pop(stream, None)
        if identity is not None:
            job = self._current(identity[0], identity[1])
            worker = job.run.workers.get(identity[2]) if job.run is not None else None
            if worker is not None and worker.stream == stream:
                self._dispatch(job, Event.BREAK, Signal(now, ticket=stream, rank=identity[2]))
        return self._drain()

    def leave(self, name: str, epoch: int, rank: int, ticket: int, now: float) -> list[Action]:
        """A rank leaves. Answered by LeaveDone; the last one's once the switch holds nothing of the epoch."""
        job = self._current(name, epoch)
        self._dispatch(job, Event.LEAVE, Signal(now, ticket=ticket, rank=rank, epoch=epoch))
        return self._drain()

    def switch_down(self, why: str, now: float) -> list[Action]:
        """The session with the switch is lost: joins are refused, running jobs go on as long as they get sums."""
        if self._switch_down is None:
            self._down_since = now
        self._switch_down = why
        return self._drain()

    def switch_up(self, epochs: Collection[int], now: float) -> list[Action]:
        """There is a session again, and the switch holds these epochs. Those it lost are fenced."""
        self._switch_down = None
        for job in list(self._jobs.values()):
            if job.run is not None and job.run.plan.number not in epochs:
                self._dispatch(job, Event.SWITCH_LOST, Signal(now))
        for ending in self._endings.values():
            if ending.retry_at is not None:
                ending.retry_at = now
        self._retry(now)
        return self._drain()

    def tick(self, now: float) -> list[Action]:
        """Time has passed: ends waits and leases that are over."""
        for job in list(self._jobs.values()):
            if any(seat.expires <= now for seat in job.seats.values()):
                self._dispatch(job, Event.EXPIRE, Signal(now))
            silent = tuple(worker.applicant.rank for worker in self._staying(job) if self._lapse(worker) <= now)
            if silent:
                self._dispatch(job, Event.LAPSE, Signal(now, ranks=silent))
            self._announce_silent(job, now)
            self._miss_switch(job, now)
        if self._switch_down is None:
            self._retry(now)
        return self._drain()

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
            times += [self._lapse(worker) for worker in self._staying(job) + self._unannounced(job)]
            lost_at = self._unreachable_at(job)
            if lost_at is not None:
                times.append(lost_at)
        return min(times, default=None)
