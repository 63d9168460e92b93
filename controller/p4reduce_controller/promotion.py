# SPDX-License-Identifier: Apache-2.0
"""The steps from the ring path to the switch path: install a new epoch, try it, hold, go.

While an epoch is prepared and tried, the ring path goes on. Only the last step, to agree on a bucket that nobody has
reached, holds new buckets back for a moment. Whatever goes wrong before it, the job stays where it is.
"""

from __future__ import annotations

import logging

from p4reduce_controller.cuts import Cuts
from p4reduce_controller.model import Install, Job, Order, OrderKind, Path, Signal
from p4reduce_controller.paths import plan_of
from p4reduce_controller.records import run_of
from p4reduce_controller.states import State
from p4reduce_controller.store import StoreError

_LOG = logging.getLogger(__name__)

MAX_SAID = 500
"""Characters of a rank's answer that are passed on."""


_HEALTHY = "the switch is healthy again"
_WHY_BACK = {"drained": "the switch is not drained any more", "no_room": "there is room on the switch"}
"""Why a job goes to the switch, by why it was on the ring path."""


def _why_back(job: Job) -> str:
    reason = job.path_reason.partition(": ")[0]
    return f"mode {job.mode}" if reason == "operator" else _WHY_BACK.get(reason, _HEALTHY)


class Promotion(Cuts):
    """Going (back) to the switch path."""

    def _room(self, job: Job, _: Signal) -> State:
        """Something came free: look again."""
        run_of(job).no_room = False
        return job.state

    def _mode_ring(self, job: Job, signal: Signal) -> State:
        if job.mode == "require":
            run_of(job).not_before = signal.now
        self._save(job)
        return job.state

    def _promote(self, job: Job, signal: Signal) -> State:
        run = run_of(job)
        if not self._may_promote(job):
            return job.state
        applicants = [run.workers[rank].applicant for rank in range(job.world_size)]
        lease = self._lease(job, applicants)
        if lease is None:
            run.no_room = True
            return job.state
        try:
            epoch = self._new_epoch()
        except StoreError as error:
            _LOG.warning("job %r: stays on the ring path: %s", job.name, error)
            self._pools.give_back(lease)
            self._delay(job, signal.now, on_switch=False)
            return job.state
        run.plan = plan_of(epoch, lease, applicants)
        run.or_slots, run.add_slots = self._window(job, applicants, lease)
        job.state = State.PREPARING
        self._save(job)
        self._actions.append(Install(run.plan))
        return State.PREPARING

    def _prepared(self, job: Job, signal: Signal) -> State:
        run = run_of(job)
        if run.plan is None:
            raise RuntimeError(f"job {job.name!r} has nothing prepared")
        if not self._may_promote(job):
            return self._drop_trial(job, signal.now)
        order = Order(
            0, OrderKind.TRIAL, run.plan.number, 0, run.or_slots, run.add_slots, "the switch is there: a trial"
        )
        return self._issue(job, State.TRYING, order, signal.now)

    def _unprepared(self, job: Job, signal: Signal) -> State:
        return self._fail_trial(job, f"the switch could not be set up: {signal.message}", signal.now)

    def _tried(self, job: Job, signal: Signal) -> State:
        run = run_of(job)
        for rank, answer in run.answers.items():
            if answer.failed:
                said = answer.message[:MAX_SAID] or "the trial failed"
                return self._fail_trial(job, f"{run.workers[rank].applicant.name}: {said}", signal.now)
        if not self._answered(job):
            return job.state
        if not self._may_promote(job):
            return self._drop_trial(job, signal.now)
        return self._issue(job, State.HOLDING, Order(0, OrderKind.HOLD, why="the trial was good"), signal.now)

    def _held(self, job: Job, signal: Signal) -> State:
        run = run_of(job)
        for rank, answer in run.answers.items():
            if answer.failed:
                said = answer.message[:MAX_SAID] or "it cannot hold buckets back"
                return self._fail_trial(job, f"{run.workers[rank].applicant.name}: {said}", signal.now)
        if not self._answered(job):
            return job.state
        if run.plan is None:
            raise RuntimeError(f"job {job.name!r} has nothing prepared")
        if not self._may_promote(job):
            return self._drop_trial(job, signal.now)
        first = max(run.running.first_bucket, *(answer.bucket for answer in run.answers.values()))
        job.promotions += 1
        job.path, job.path_reason = Path.SWITCH, _why_back(job)
        run.settled, run.counted, run.counters = signal.now, run.plan.number, {}
        run.waiting_since = None
        for worker in run.workers.values():
            worker.silent = 0.0
        order = Order(0, OrderKind.RUN_SWITCH, run.plan.number, first, run.or_slots, run.add_slots, job.path_reason)
        state = self._issue(job, State.SWITCH, order, signal.now)
        _LOG.warning(
            "job %r: switch path from bucket %d on, epoch %d: %s", job.name, first, run.present, job.path_reason
        )
        return state

    # ---- what ends it ---------------------------------------------------------------------------------------------

    def _drop_trial(self, job: Job, now: float, why: str = "") -> State:
        """Take what was prepared from the switch again, and tell the ranks to go on where they are."""
        run, ordered = run_of(job), job.state is not State.PREPARING
        self._end(job, None)
        if ordered:
            old = run.running
            why = why or old.why
            return self._issue(job, State.RING, Order(0, old.kind, old.epoch, old.first_bucket, why=why), now)
        job.state = State.RING
        self._save(job)
        return State.RING

    def _fail_trial(self, job: Job, text: str, now: float) -> State:
        self._delay(job, now, on_switch=False)
        _LOG.info("job %r: stays on the ring path, tries again in %g s: %s", job.name, run_of(job).delay, text)
        return self._drop_trial(job, now, f"the trial failed: {text}")

    def _trial_late(self, job: Job, signal: Signal) -> State:
        run = run_of(job)
        missing = [run.workers[rank].applicant.name for rank in sorted(run.workers) if rank not in run.answers]
        return self._fail_trial(job, f"no answer in time from {', '.join(missing)}", signal.now)

    def _trial_lost(self, job: Job, signal: Signal) -> State:
        return self._fail_trial(job, signal.message or "the switch lost the epoch", signal.now)

    def _give_up(self, job: Job, signal: Signal) -> State:
        return self._drop_trial(job, signal.now)

    def _mode_trial(self, job: Job, signal: Signal) -> State:
        if job.mode == "off":
            return self._drop_trial(job, signal.now)
        self._save(job)
        return job.state
