# SPDX-License-Identifier: Apache-2.0
"""The steps of a running epoch: reports, departures, and the loud end."""

from __future__ import annotations

from p4reduce_controller.admission import Code
from p4reduce_controller.model import (
    Close,
    Fence,
    Job,
    LeaveDone,
    Reason,
    Register,
    Signal,
    TellFence,
    TellLeft,
    Worker,
    WorkerState,
)
from p4reduce_controller.records import run_of, superseded
from p4reduce_controller.rounds import Rounds
from p4reduce_controller.states import State

MAX_FENCES = 256
"""Fences of past epochs that a late worker can still be told."""


class Runs(Rounds):
    """What happens between the grant and the last leave or the fence."""

    # ---- steps: a running epoch -----------------------------------------------------------------------------------

    def _open(self, job: Job, signal: Signal) -> State:
        worker = run_of(job).workers.get(signal.rank)
        if worker is None or worker.state is WorkerState.LEFT:
            what = "has left" if worker is not None else "is not part of"
            self._reject_stream(signal, Code.FAILED_PRECONDITION, f"rank {signal.rank} {what} job {job.name!r}")
        elif worker.stream is not None:
            self._reject_stream(
                signal, Code.ALREADY_EXISTS, f"{worker.applicant.name} of job {job.name!r} has a stream open already"
            )
        else:
            worker.stream = signal.ticket
            worker.state = WorkerState.REPORTING
            self._actions.append(Register(signal.ticket))
        return job.state

    def _open_past(self, job: Job, signal: Signal) -> State:
        epoch = signal.epoch
        name, fence = self._past.get(epoch, ("", None))
        ending = self._endings.get(epoch)
        if fence is not None and name == job.name:
            if ending is not None and not ending.revoked:
                ending.streams.append(signal.ticket)
            else:
                self._actions.append(TellFence(signal.ticket, fence))
        elif epoch not in self._own:
            # The worker has met nothing but nacks since our predecessor's entries were taken away: it shall know why.
            message = (
                f"job {job.name!r}: the controller was restarted and does not keep running jobs yet; restart the job"
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
        if worker.state is not WorkerState.LEFT:
            worker.heard = signal.now
        if report is not None:
            advanced = report.completed > worker.completed
            worker.submitted, worker.completed = report.submitted, report.completed
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

    def _trouble(self, job: Job, signal: Signal) -> State:
        self._report(job, signal)
        run = run_of(job)
        if run.workers[signal.rank].state is WorkerState.LEFT:
            return job.state
        trouble = signal.report.trouble if signal.report is not None else None
        if trouble is None:
            raise RuntimeError("TROUBLE without a trouble")
        reporter = run.workers[signal.rank].applicant
        ranks: tuple[int, ...] = (signal.rank,)
        if trouble.reason is Reason.STALLED:
            # Who has not handed the bucket in is who the others wait for, as far as the last reports tell.
            late = tuple(r for r, w in run.workers.items() if r != signal.rank and w.submitted <= trouble.bucket)
            ranks = late or ranks
        message = f"job {job.name!r}: {reporter.name}: {trouble.message or trouble.reason.name.lower()}"
        return self._fence(job, Fence(trouble.reason, message, ranks, trouble.bucket))

    def _lose_broken(self, job: Job, signal: Signal) -> State:
        worker = run_of(job).workers[signal.rank]
        worker.stream = None
        if worker.state is WorkerState.LEFT:
            self._announce(job, worker)
            return job.state
        worker.state = WorkerState.LOST
        message = f"job {job.name!r}: {worker.applicant.name} is lost: its progress stream ended without a leave"
        return self._fence(job, Fence(Reason.WORKER_LOST, message, (signal.rank,)))

    def _lose_silent(self, job: Job, signal: Signal) -> State:
        workers = [run_of(job).workers[rank] for rank in signal.ranks]
        for worker in workers:
            worker.state = WorkerState.LOST
        names = ", ".join(worker.applicant.name for worker in workers)
        verb = "is" if len(workers) == 1 else "are"
        message = f"job {job.name!r}: {names} {verb} lost: no report for {self._lease_seconds:g} s"
        return self._fence(job, Fence(Reason.WORKER_LOST, message, signal.ranks))

    def _lose_switch(self, job: Job, signal: Signal) -> State:
        why = signal.message or f"the switch was restarted and holds nothing of epoch {run_of(job).plan.number}"
        return self._fence(job, Fence(Reason.SWITCH_LOST, f"job {job.name!r}: {why}"))

    def _supersede(self, job: Job, signal: Signal) -> State:
        self._refuse_seats(job, Code.ABORTED, superseded(job, signal))
        self._fence(job, Fence(Reason.SUPERSEDED, superseded(job, signal)))
        return self._start(job, signal)

    def _leave(self, job: Job, signal: Signal) -> State:
        run = run_of(job)
        worker = run.workers.get(signal.rank)
        if worker is None:
            self._refuse(
                [signal.ticket],
                Code.NOT_FOUND,
                f"job {job.name!r} has ranks 0 to {job.world_size - 1}, no rank {signal.rank}",
            )
            return job.state
        if worker.state is not WorkerState.LEFT:
            worker.state = WorkerState.LEFT
            worker.heard = signal.now
        if self._staying(job):
            # While its stream is open, a report may still be on the way that says how far it came.
            if worker.stream is None:
                self._announce(job, worker)
            self._actions.append(LeaveDone(signal.ticket))
            return State.LEAVING
        self._end(job, None).tickets.append(signal.ticket)
        self._actions += [Close(w.stream) for w in run.workers.values() if w.stream is not None]
        return self._next_round(job) if job.seats else State.ABSENT

    def _announce(self, job: Job, worker: Worker) -> None:
        """Tell the others that a worker has left, once."""
        if worker.announced:
            return
        worker.announced = True
        for other in self._staying(job):
            if other.stream is not None:
                self._actions.append(TellLeft(other.stream, worker.applicant.rank, worker.submitted))

    def _announce_silent(self, job: Job, now: float) -> None:
        """Do not wait for ever for the stream of a worker that has left to end."""
        for worker in self._unannounced(job):
            if self._lapse(worker) <= now:
                self._announce(job, worker)

    def _leave_past(self, job: Job, signal: Signal) -> State:
        ending = self._endings.get(signal.epoch)
        if ending is not None and ending.fence is None:
            ending.tickets.append(signal.ticket)
        else:
            self._actions.append(LeaveDone(signal.ticket))
        return job.state

    def _fence(self, job: Job, fence: Fence) -> State:
        """End the epoch loudly. The workers are told by `revoked`, once nothing of theirs can count any more."""
        ending = self._end(job, fence)
        ending.streams += [w.stream for w in run_of(job).workers.values() if w.stream is not None]
        job.reason = fence.message
        self._past[ending.plan.number] = (job.name, fence)
        while len(self._past) > MAX_FENCES:
            self._past.popitem(last=False)
        return self._next_round(job) if job.seats else State.FAILED

    def _next_round(self, job: Job) -> State:
        """Ranks that left early wait for the next epoch already."""
        job.run, job.reason = None, ""
        return self._complete(job)
