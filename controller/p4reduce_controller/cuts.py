# SPDX-License-Identifier: Apache-2.0
"""The steps from the switch path to the ring path: trouble, silence, and the cut that all ranks agree on.

Trouble comes late to the controller, when the job may long be on another path. What it is about is told by the epoch
that the reporter carries out and by the bucket: only trouble with the present switch epoch leads to a cut, and what
the ring path cannot do is an error as it always was.
"""

from __future__ import annotations

import logging

from p4reduce_controller.admission import ranks_text
from p4reduce_controller.model import (
    Doubt,
    Fence,
    Job,
    Order,
    OrderKind,
    Path,
    Reason,
    Report,
    Signal,
    TellReport,
    WorkerState,
)
from p4reduce_controller.records import STARTING, run_of
from p4reduce_controller.rounds import Rounds
from p4reduce_controller.states import State
from p4reduce_controller.store import StoreError

_LOG = logging.getLogger(__name__)

DOUBT_SECONDS = 1.0
"""How long ranks that seem to be behind have to say that they are not, before a stall is blamed on them."""
_RECOVERABLE = {Reason.STALLED: "stalled", Reason.INTEGRITY: "integrity", Reason.REFUSED: "refused"}
"""Troubles of the switch path, and how fallbacks for them are counted."""


class Cuts(Rounds):
    """Leaving the switch path."""

    def _cut(self, job: Job, reason: str, text: str, now: float) -> State:
        """Stop the switch path. The ring path begins once every rank has said how far it came."""
        run = run_of(job)
        epoch = run.present
        self._end(job, None)
        if reason not in ("operator", "drained"):
            # What an operator does says nothing about the switch.
            self._delay(job, now, on_switch=True)
        run.not_before = max(run.not_before, now + run.delay)
        job.fallbacks[reason] += 1
        job.path_reason = f"{reason}: {text}"
        run.waiting_since = None
        _LOG.info("job %r: stops epoch %d on the switch: %s", job.name, epoch, job.path_reason)
        return self._issue(job, State.CUTTING, Order(0, OrderKind.STOP, epoch, why=job.path_reason), now)

    def _stopped(self, job: Job, signal: Signal) -> State:
        """A rank has stopped."""
        run = run_of(job)
        if not self._answered(job):
            return job.state
        # What a rank had reported as complete is complete, and below the epoch's first bucket the ring path is at work.
        floor = run.running.first_bucket
        first = min(max(a.bucket, floor, run.workers[r].completed) for r, a in run.answers.items())
        try:
            epoch = self._new_epoch()
        except StoreError as error:
            return self._fence(job, Fence(Reason.ABORTED, f"job {job.name!r}: {error}"), signal)
        reason, _, text = job.path_reason.partition(": ")
        run.settled = signal.now
        run.not_before = max(run.not_before, signal.now + run.delay)
        order = Order(0, OrderKind.RUN_RING, epoch, first, why=job.path_reason)
        job.path = Path.RING
        state = self._issue(job, State.RING, order, signal.now)
        self._to_ring(job, reason, text, first)
        return state

    # ---- trouble --------------------------------------------------------------------------------------------------

    def _trouble(self, job: Job, signal: Signal) -> State:
        self._report(job, signal)
        run, report = run_of(job), signal.report
        if run.workers[signal.rank].state is WorkerState.LEFT:
            return job.state
        if report is None or report.trouble is None:
            raise RuntimeError("TROUBLE without a trouble")
        trouble = report.trouble
        reporter = run.workers[signal.rank].applicant
        message = f"job {job.name!r}: {reporter.name}: {trouble.message or trouble.reason.name.lower()}"
        ranks: tuple[int, ...] = (signal.rank,)
        late = self._late(job, signal.rank, trouble.bucket)
        if trouble.reason is Reason.STALLED:
            # Who has not handed the bucket in is who the others wait for, as far as the last reports tell.
            ranks = late or ranks
        fence = Fence(trouble.reason, message, ranks, trouble.bucket)
        if trouble.reason not in _RECOVERABLE or job.state is State.LEAVING:
            return self._fence(job, fence, signal)
        if self._outlived(job, report):
            return job.state
        # A sum that is wrong is the ring's: of a trial nothing is heard but its answer.
        tried = run.plan is not None and report.present == run.plan.number and trouble.reason is not Reason.INTEGRITY
        if tried and job.state in (State.TRYING, State.HOLDING):
            return self._fail_trial(job, f"{reporter.name}: {trouble.message or trouble.reason.name}", signal.now)
        if job.state is not State.SWITCH or not self._falls_back(job) or self._of_ring(job, trouble):
            return self._fence(job, fence, signal)
        if late and trouble.reason is Reason.STALLED:
            if run.doubt is None:
                run.doubt = Doubt(fence, signal.rank, signal.now + DOUBT_SECONDS)
                self._ask(job, late)
            return job.state
        text = message.removeprefix(f"job {job.name!r}: ")
        return self._cut(job, _RECOVERABLE[trouble.reason], text, signal.now)

    def _outlived(self, job: Job, report: Report) -> bool:
        """Whether a trouble is about a switch epoch that is over already, or being stopped."""
        run = run_of(job)
        if report.trouble is not None and self._of_ring(job, report.trouble):
            return False
        present = {0, run.present, run.plan.number if run.plan is not None else 0}
        return job.state is State.CUTTING or report.present not in present

    @staticmethod
    def _of_ring(job: Job, trouble: Fence) -> bool:
        """Whether a trouble is the ring path's, which may still be at work below the switch epoch's first bucket."""
        below = 0 < trouble.bucket < run_of(job).running.first_bucket
        return job.path is Path.SWITCH and trouble.reason is Reason.INTEGRITY and below

    def _late(self, job: Job, reporter: int, bucket: int) -> tuple[int, ...]:
        """Ranks that have not handed `bucket` in, as far as their reports tell."""
        return tuple(r for r, w in run_of(job).workers.items() if r != reporter and w.submitted <= bucket)

    def _ask(self, job: Job, ranks: tuple[int, ...]) -> None:
        """Ask ranks how far they are."""
        streams = [run_of(job).workers[rank].stream for rank in ranks]
        self._actions += [TellReport(stream) for stream in streams if stream is not None]

    # ---- silence --------------------------------------------------------------------------------------------------

    def _silence(self, job: Job, signal: Signal) -> State:
        """See whether the switch is silent, and not a rank."""
        run = run_of(job)
        if not self._falls_back(job):
            return job.state
        doubt = run.doubt
        if doubt is not None and not self._late(job, doubt.rank, doubt.fence.bucket):
            run.doubt = None
            text = doubt.fence.message.removeprefix(f"job {job.name!r}: ")
            return self._cut(job, "stalled", text, signal.now)
        lost = self._switch_down if self._switch_down != STARTING else None
        limit = job.policy.fallback if lost is None else job.policy.silent
        for rank, worker in run.workers.items():
            if worker.silent < limit:
                continue
            bucket = max(worker.completed, run.running.first_bucket)
            late = self._late(job, rank, bucket)
            if late:
                self._ask(job, late)
                continue
            text = f"{worker.applicant.name} has had no result of bucket {bucket} for {worker.silent:.3g} s"
            if lost is None:
                return self._cut(job, "silent", text, signal.now)
            return self._cut(job, "switch_lost", f"{text}, and the session is lost: {lost}", signal.now)
        return job.state

    def _settle(self, job: Job, signal: Signal) -> State:
        """Ranks that were asked after a stall are still behind, or have left: it is theirs."""
        doubt = run_of(job).doubt
        if doubt is None:
            raise RuntimeError("nothing is in doubt")
        return self._fence(job, doubt.fence, signal)

    # ---- the switch, and operators --------------------------------------------------------------------------------

    def _lose_switch(self, job: Job, signal: Signal) -> State:
        run = run_of(job)
        if run.plan is None:
            return job.state
        why = signal.message or f"the switch was restarted and holds nothing of epoch {run.plan.number}"
        if job.state is State.SWITCH and self._falls_back(job):
            return self._cut(job, "switch_lost", why, signal.now)
        return self._fence(job, Fence(Reason.SWITCH_LOST, f"job {job.name!r}: {why}"), signal)

    def _drain(self, job: Job, signal: Signal) -> State:
        if not self._falls_back(job):
            return job.state
        return self._cut(job, "drained", f"an operator drains {self._switch_name}", signal.now)

    def _mode(self, job: Job, signal: Signal) -> State:
        if job.mode == "off":
            return self._cut(job, "operator", "mode off", signal.now)
        if self._drained and self._falls_back(job):
            # It had stayed because of the mode that it had.
            return self._drain(job, signal)
        self._save(job)
        return job.state

    def _mode_cut(self, job: Job, _: Signal) -> State:
        self._save(job)
        return job.state

    # ---- ranks that do not answer ---------------------------------------------------------------------------------

    def _lose_mute(self, job: Job, signal: Signal) -> State:
        """Ranks report, but do not carry out an order that all must carry out."""
        run = run_of(job)
        ranks = tuple(rank for rank in sorted(run.workers) if rank not in run.answers)
        for rank in ranks:
            run.workers[rank].state = WorkerState.LOST
        names = ", ".join(run.workers[rank].applicant.name for rank in ranks)
        message = (
            f"job {job.name!r}: {names} {'is' if len(ranks) == 1 else 'are'} lost: no answer to the order to "
            f"{run.order.kind.value} for {self._lease_seconds:g} s, though {ranks_text(ranks)} still reported"
        )
        return self._fence(job, Fence(Reason.WORKER_LOST, message, ranks), signal)

    # ---- for the steps above --------------------------------------------------------------------------------------

    def _report(self, job: Job, signal: Signal) -> State:
        raise NotImplementedError

    def _fail_trial(self, job: Job, text: str, now: float) -> State:
        raise NotImplementedError
