# SPDX-License-Identifier: Apache-2.0
"""The steps of a membership on whichever path: streams, reports, losses and departures."""

from __future__ import annotations

import math

from p4reduce_controller.admission import MAX_WAIT_SECONDS, Code
from p4reduce_controller.model import (
    Close,
    Departure,
    Fence,
    Job,
    LeaveDone,
    Path,
    Reason,
    Register,
    Signal,
    TellFence,
    TellLeft,
    TellOrder,
    TellPolicy,
    TellReport,
    Worker,
    WorkerState,
)
from p4reduce_controller.promotion import Promotion
from p4reduce_controller.records import run_of, superseded
from p4reduce_controller.states import State

MAX_COUNTERS = 64
"""Counters that are kept of a worker."""
MAX_COUNTER_NAME = 64
MAX_LEAVES_EACH = 2
"""Leaves of one rank that wait at a time."""
WAKING_SECONDS = 2.0
"""So long after this controller was stopped a stream that ends may have ended meanwhile, and a leave been missed."""
COMEBACK_SECONDS = 5.0
"""When such ranks must have opened their streams again, all at once: whether all are gone shows then."""


def _seconds(said: float) -> float:
    """A duration that a worker reports; what is none counts as 0."""
    return said if 0.0 <= said < math.inf else 0.0


class Runs(Promotion):
    """What happens between the grant and the last leave or the fence."""

    # ---- steps: streams and reports -------------------------------------------------------------------------------

    def _open(self, job: Job, signal: Signal) -> State:
        run = run_of(job)
        worker = run.workers.get(signal.rank)
        if worker is None or worker.state is WorkerState.LEFT:
            what = "has left" if worker is not None else "is not part of"
            self._reject_stream(signal, Code.FAILED_PRECONDITION, f"rank {signal.rank} {what} job {job.name!r}")
            return job.state
        if worker.stream is not None:
            self._reject_stream(
                signal, Code.ALREADY_EXISTS, f"{worker.applicant.name} of job {job.name!r} has a stream open already"
            )
            return job.state
        stream = signal.ticket
        worker.stream, worker.expires = stream, None
        worker.state = WorkerState.REPORTING
        self._actions += [Register(stream), TellOrder(stream, run.order)]
        if job.policy_changed:
            self._actions.append(TellPolicy(stream, job.policy))
        for rank, other in run.workers.items():
            if other.state is WorkerState.LEFT:
                self._actions.append(TellLeft(stream, rank, other.submitted))
            elif other.leaving is not None and rank != signal.rank:
                self._actions.append(TellReport(stream, other.leaving.submitted))
        return job.state

    def _open_past(self, job: Job, signal: Signal) -> State:
        epoch = signal.epoch
        name, fence = self._past.get(epoch, ("", None))
        if fence is not None and name == job.name:
            told = [e for e in self._endings.values() if e.membership == epoch and e.fence is fence and not e.revoked]
            if told:
                told[0].streams.append(signal.ticket)
            else:
                self._actions.append(TellFence(signal.ticket, fence))
        elif epoch not in self._own:
            # What ended before our time, or is on a state file that we do not have.
            message = (
                f"job {job.name!r}: this controller knows nothing of epoch {epoch}: it was over before the controller "
                f"was restarted, or the controller runs without the state file it had; restart the job"
            )
            self._actions.append(TellFence(signal.ticket, Fence(Reason.ABORTED, message)))
        else:
            self._reject_stream(
                signal, Code.NOT_FOUND, f"job {job.name!r} has no epoch {epoch} here: it is over; join again"
            )
            return job.state
        self._streams.pop(signal.ticket, None)
        return job.state

    def _reject_stream(self, signal: Signal, code: Code, message: str) -> None:
        self._streams.pop(signal.ticket, None)
        self._refuse([signal.ticket], code, message)

    def _report(self, job: Job, signal: Signal) -> State:
        worker, report = run_of(job).workers[signal.rank], signal.report
        if worker.state is WorkerState.LEFT:
            return job.state
        worker.heard = signal.now
        if report is None:
            return job.state
        advanced = report.completed > worker.completed
        worker.known = True
        # Neither ever falls; what a leave has said may be ahead of the stream.
        worker.submitted = max(worker.submitted, report.submitted)
        worker.completed = max(worker.completed, report.completed)
        worker.present, worker.rtt = report.present, _seconds(report.rtt)
        worker.silent = _seconds(report.silent) if report.present in (0, run_of(job).present) else 0.0
        names = [name for name in report.counters if len(name) <= MAX_COUNTER_NAME]
        worker.counters = {name: report.counters[name] for name in names[:MAX_COUNTERS]}
        self._watch(job, advanced, signal.now)
        return job.state

    def _watch(self, job: Job, advanced: bool, now: float) -> None:
        """Keep track of whether the ranks wait for the switch alone, and not for one of them."""
        run, staying = run_of(job), self._staying(job)
        handed_in = min(worker.submitted for worker in run.workers.values())
        waiting = any(worker.completed < handed_in for worker in staying)
        if not waiting:
            run.waiting_since = None
        elif advanced or run.waiting_since is None:
            run.waiting_since = now

    # ---- steps: losses --------------------------------------------------------------------------------------------

    def _lose_broken(self, job: Job, signal: Signal) -> State:
        worker = run_of(job).workers[signal.rank]
        worker.stream = None
        if worker.state is WorkerState.LEFT:
            return job.state
        if worker.leaving is not None and job.path is Path.SWITCH:
            # It has said that it leaves, and waits no longer. What it took part in is with the switch; the ring path
            # could not go on without it.
            worker.leaving.expires = signal.now
            return job.state
        if signal.now < self._woken + WAKING_SECONDS:
            worker.state, worker.expires = WorkerState.JOINED, self._woken + COMEBACK_SECONDS
            return job.state
        worker.state = WorkerState.LOST
        message = f"job {job.name!r}: {worker.applicant.name} is lost: its progress stream ended without a leave"
        return self._fence(job, Fence(Reason.WORKER_LOST, message, (signal.rank,)), signal)

    def _lose_silent(self, job: Job, signal: Signal) -> State:
        workers = [run_of(job).workers[rank] for rank in signal.ranks]
        how = self._ended(job, workers)
        if how:
            return self._fence(job, Fence(Reason.WORKER_LOST, f"job {job.name!r}: {how}"), signal, State.ENDED)
        for worker in workers:
            worker.state = WorkerState.LOST
        names = ", ".join(worker.applicant.name for worker in workers)
        verb = "is" if len(workers) == 1 else "are"
        why = f"no report for {self._lease_seconds:g} s"
        if all(worker.expires is not None for worker in workers):
            why = "the progress stream ended while the controller was stopped, and was not opened again"
        message = f"job {job.name!r}: {names} {verb} lost: {why}"
        return self._fence(job, Fence(Reason.WORKER_LOST, message, signal.ranks), signal)

    def _ended(self, job: Job, gone: list[Worker]) -> str:
        """How a job may have ended in good order, for all that is known: all ranks that had not left went away while
        nobody listened. Empty: it has not.
        """
        run = run_of(job)
        if len(gone) < len(self._staying(job)):
            return ""
        if not any(worker.known for worker in gone):
            return (
                "no rank came back after the controller was restarted: they ended meanwhile, or cannot reach it; "
                "whether the job had finished is not known"
            )
        if any(worker.expires is None for worker in gone):
            return ""
        handed_in = max(worker.submitted for worker in run.workers.values())
        completed = min(worker.completed for worker in gone)
        last = f"when the ranks were last heard, {completed} of {handed_in} buckets were complete"
        if completed >= handed_in:
            last = f"when the ranks were last heard, all {handed_in} buckets that they had handed in were complete"
        if not handed_in:
            last = (
                "the ranks had handed in nothing when they were last heard; whether the job had finished is not known"
            )
        return f"its ranks went away without leaving, while the controller was stopped; {last}"

    def _supersede(self, job: Job, signal: Signal) -> State:
        self._refuse_seats(job, Code.ABORTED, superseded(job, signal))
        self._fence(job, Fence(Reason.SUPERSEDED, superseded(job, signal)), signal)
        return self._start(job, signal)

    def _evict(self, job: Job, signal: Signal) -> State:
        message = f"job {job.name!r}: an operator has ended it"
        self._refuse_seats(job, Code.ABORTED, message)
        return self._fence(job, Fence(Reason.EVICTED, message), signal)

    # ---- steps: departures ----------------------------------------------------------------------------------------

    def _leave(self, job: Job, signal: Signal) -> State:
        """A rank wants to leave. It stays a member until DEPART."""
        worker = run_of(job).workers.get(signal.rank)
        if worker is None:
            self._refuse(
                [signal.ticket],
                Code.NOT_FOUND,
                f"job {job.name!r} has ranks 0 to {job.world_size - 1}, no rank {signal.rank}",
            )
        elif worker.state is WorkerState.LEFT:
            self._actions.append(LeaveDone(signal.ticket))
        elif worker.leaving is not None:
            tickets = worker.leaving.tickets
            if len(tickets) >= MAX_LEAVES_EACH:
                message = f"job {job.name!r}: a newer Leave of rank {signal.rank} has taken this one's place"
                self._refuse([tickets.pop(0)], Code.ABORTED, message)
            tickets.append(signal.ticket)
        else:
            worker.heard = signal.now
            worker.submitted = max(worker.submitted, signal.submitted)
            wait = signal.wait_seconds if 0 < signal.wait_seconds <= MAX_WAIT_SECONDS else 0.0
            worker.leaving = Departure([signal.ticket], worker.submitted, signal.now + wait)
            if wait:
                self._actions += [
                    TellReport(other.stream, worker.submitted)
                    for other in self._staying(job)
                    if other is not worker and other.stream is not None and other.completed < worker.submitted
                ]
        return job.state

    def _leave_trial(self, job: Job, signal: Signal) -> State:
        """Nobody is promoted while somebody leaves."""
        worker = run_of(job).workers.get(signal.rank)
        if worker is not None:
            self._drop_trial(job, signal.now)
        return self._leave(job, signal)

    def _may_depart(self, job: Job, worker: Worker, now: float) -> bool:
        """Whether a leaving worker is needed no more, or has waited long enough."""
        leaving = worker.leaving
        if leaving is None or worker.state is WorkerState.LEFT:
            return False
        return leaving.expires <= now or not self._behind(job, worker)

    def _behind(self, job: Job, leaver: Worker) -> list[int]:
        """Members that have not completed what `leaver` took part in."""
        return [w.applicant.rank for w in self._staying(job) if w is not leaver and w.completed < leaver.submitted]

    def _depart(self, job: Job, signal: Signal) -> State:
        """A rank has left for good."""
        run = run_of(job)
        worker = run.workers[signal.rank]
        behind = self._behind(job, worker)
        tickets = worker.leaving.tickets if worker.leaving is not None else []
        worker.state, worker.leaving = WorkerState.LEFT, None
        if job.state is State.CUTTING and behind:
            # They cannot be saved without its integers.
            self._actions += [LeaveDone(ticket) for ticket in tickets]
            message = (
                f"job {job.name!r}: {worker.applicant.name} left without waiting while "
                f"bucket {min(run.workers[rank].completed for rank in behind)} was still to be moved to the ring path"
            )
            return self._fence(job, Fence(Reason.WORKER_LOST, message, (signal.rank,)), signal)
        run.due = None
        if self._staying(job):
            job.state = State.LEAVING
            self._save(job)
            for other in self._staying(job):
                if other.stream is not None:
                    self._actions.append(TellLeft(other.stream, signal.rank, worker.submitted))
            self._actions += [LeaveDone(ticket) for ticket in tickets]
            return State.LEAVING
        self._forget(job)
        if run.plan is not None:
            # Its lease ends first: who comes next finds the pool.
            self._end(job, None).tickets += tickets
        else:
            self._actions += [LeaveDone(ticket) for ticket in tickets]
        self._actions += [Close(w.stream) for w in run.workers.values() if w.stream is not None]
        return self._next_round(job, signal) if job.seats else State.ABSENT

    def _leave_past(self, job: Job, signal: Signal) -> State:
        endings = [e for e in self._endings.values() if e.membership == signal.epoch and e.fence is None]
        if endings and endings[-1].retry_at is None:
            endings[-1].tickets.append(signal.ticket)
        else:
            self._actions.append(LeaveDone(signal.ticket))
        return job.state
