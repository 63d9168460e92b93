# SPDX-License-Identifier: Apache-2.0
"""What operators and a restart do to jobs: modes, policies, drains, evictions, and taking up what is on disk."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from p4reduce.core.config import RetransmissionPolicy
from p4reduce_controller.admission import Code, RefusedError, mode_of, ranks_text
from p4reduce_controller.entries import Epoch
from p4reduce_controller.hosts import Hosts
from p4reduce_controller.memo import MAX_MESSAGE, VERSION, MemoError, recall, recall_end
from p4reduce_controller.model import (
    Action,
    Ending,
    Forget,
    Job,
    Order,
    OrderKind,
    Reason,
    Signal,
    TellPolicy,
    WorkerState,
)
from p4reduce_controller.records import STARTING, run_of
from p4reduce_controller.runs import Runs
from p4reduce_controller.states import OVER, Event, State
from p4reduce_controller.store import End

_LOG = logging.getLogger(__name__)

RETURN_SECONDS = 5.0
"""Time for workers to find a controller that was started again: some pauses of theirs, and of gRPC's, of a second."""


class Operations(Runs):
    """Calls of operators, and `restore`."""

    def set_mode(self, name: str, mode: str, now: float) -> list[Action]:
        """Change a job's mode: auto, require, off (or ring). RefusedError when it cannot be."""
        mode = mode_of(mode, "none")
        job = self._running(name)
        if mode == job.mode:
            return []
        run = run_of(job)
        gone = [rank for rank, worker in run.workers.items() if worker.state is WorkerState.LEFT]
        if gone:
            raise RefusedError(
                Code.FAILED_PRECONDITION,
                f"job {name!r}: {ranks_text(gone)} left already: it ends on the path it is on",
            )
        if mode == "off" and not job.ring:
            raise RefusedError(
                Code.FAILED_PRECONDITION,
                f"job {name!r} has no ring path: start all of its ranks with one, or end it with `p4reducectl evict`",
            )
        job.mode = mode
        self._dispatch(job, Event.MODE, Signal(now))
        return self._taken()

    def set_policy(self, name: str, policy: RetransmissionPolicy, now: float) -> list[Action]:
        """Change a job's retransmission policy, or with no name the default of jobs to come. RefusedError."""
        del now
        if not name:
            self.default_policy = policy
            return []
        job = self._running(name)
        job.policy, job.policy_changed = policy, True
        self._save(job)
        streams = [worker.stream for worker in run_of(job).workers.values() if worker.stream is not None]
        self._actions += [TellPolicy(stream, policy) for stream in streams]
        return self._taken()

    def drain(self, now: float) -> list[Action]:
        """Take off the switch what can leave it, and let nothing new on it."""
        if not self._drained:
            self._drained = True
            for job in list(self._jobs.values()):
                self._dispatch(job, Event.DRAIN, Signal(now))
        return self._taken()

    def undrain(self, now: float) -> list[Action]:
        """Let jobs (back) on the switch; `tick` brings them."""
        del now
        self._drained = False
        return self._taken()

    def moving_staying(self) -> tuple[list[str], list[str]]:
        """Jobs on the switch that a drain moves to the ring path, and those that stay there."""
        moving: list[str] = []
        staying: list[str] = []
        for job in self._jobs.values():
            if job.leased is not None and job.state in (State.INSTALLING, State.SWITCH, State.LEAVING):
                (moving if self._falls_back(job) else staying).append(job.name)
        return moving, staying

    def evict(self, name: str, now: float) -> list[Action]:
        """End a job, loudly. RefusedError when there is none."""
        job = self._jobs.get(name)
        if job is None or job.state in OVER:
            why = "no such job: `p4reducectl jobs` shows all" if job is None else f"it has {job.state.value} already"
            raise RefusedError(Code.NOT_FOUND if job is None else Code.FAILED_PRECONDITION, f"job {name!r}: {why}")
        self._dispatch(job, Event.EVICT, Signal(now))
        return self._taken()

    def _running(self, name: str) -> Job:
        job = self._jobs.get(name)
        if job is None:
            raise RefusedError(Code.NOT_FOUND, f"job {name!r}: no such job: `p4reducectl jobs` shows all")
        if not job.live:
            raise RefusedError(Code.FAILED_PRECONDITION, f"job {name!r} is not running: it is {job.state.value}")
        return job

    # ---- after a restart ------------------------------------------------------------------------------------------

    def restore(
        self, records: Iterable[Mapping[str, Any]], hosts: Hosts | None, now: float, ends: Iterable[End] = ()
    ) -> list[Action]:
        """Take up the jobs that an earlier controller has left, before the first `switch_up` and any other call but
        `drain` and `set_policy`. `ends`: how others had ended.

        Every worker has a whole lease's time to open its stream again, see `await_return`. Records that make no
        sense, or no longer fit the hosts file, are logged and forgotten; their workers are told why.
        """
        if self._switch_down is None:
            self._switch_down, self._down_since = STARTING, now
        found: list[tuple[Job, list[Epoch]]] = []
        useless: dict[str, tuple[Mapping[str, Any], str]] = {}
        for record in records:
            name = str(record.get("job", "")) if isinstance(record, Mapping) else ""
            try:
                job, endings = recall(record, hosts or self._hosts, now)
                plan = run_of(job).plan
                if job.name in self._jobs:
                    raise MemoError("it is there twice")
                if plan is not None and not self._pools.take_exactly(plan.lease):
                    raise MemoError(f"what it leases, {plan.lease}, is another job's")
            except MemoError as error:
                _LOG.error("the record of job %r is forgotten, its workers must start again: %s", name, error)
                useless[name] = (record, str(error))
                continue
            self._jobs[job.name] = job
            found.append((job, endings))
        for job, endings in found:
            # After all jobs: a lease that ended long ago may be another job's by now.
            for plan in endings:
                if plan.number not in self._endings and self._pools.take_exactly(plan.lease):
                    self._endings[plan.number] = Ending(job.name, plan, run_of(job).epoch, retry_at=now)
        for end in ends:
            self._restore_end(end, now)
        for name, (record, why) in useless.items():
            if name not in self._jobs or self._jobs[name].state in OVER:
                self._actions.append(Forget(name, self._disown(name, record, why, now)))
        for job, _ in found:
            self._resume(job, now)
        return self._taken()

    def _restore_end(self, end: End, now: float) -> None:
        """A membership that was over before the restart: late workers are told why, operators see it."""
        try:
            job, epoch, fence = recall_end(end.record)
        except MemoError as error:
            _LOG.error("the record of how a job ended is left out: %s", error)
            return
        self._remember(epoch, job.name, fence)
        known = self._jobs.get(job.name)
        if end.shown and (known is None or known.state in OVER):
            self._jobs.pop(job.name, None)
            job.over_since = now - end.age
            self._move(job, job.state)

    def _disown(self, name: str, record: Mapping[str, Any], why: str, now: float) -> dict[str, Any] | None:
        """How a job ended that cannot be taken up again, if its record still tells which it was."""
        message = f"job {name!r}: the controller was restarted and could not take it up again: {why}"
        said: dict[str, Any] = {
            key: record.get(key)
            for key in ("job", "epoch", "world_size", "incarnation", "mode", "ring")
            if isinstance(record, Mapping)
        }
        end = said | {"version": VERSION, "state": State.FAILED.name, "reason": Reason.ABORTED.name}
        end |= {"message": message[:MAX_MESSAGE], "ranks": [], "bucket": 0}
        try:
            recall_end(end)
        except MemoError:
            return None
        self._restore_end(End(end, 0.0, True), now)
        return end

    def await_return(self, now: float) -> None:
        """Restored workers can come back from now on: those that have not yet get a lease's time, and no less than
        RETURN_SECONDS. They look for a controller that was away in growing pauses, whatever their lease.
        """
        grace = max(RETURN_SECONDS - self._lease_seconds, 0.0)
        for job in self._jobs.values():
            if not job.live or job.run is None:
                continue
            away = [worker for worker in job.run.workers.values() if worker.stream is None]
            for worker in away:
                worker.heard = now + grace
            if away and job.run.due is not None:
                job.run.due = max(job.run.due, now + grace + self._lease_seconds)

    def _resume(self, job: Job, now: float) -> None:
        """Put a restored job back to work."""
        run = run_of(job)
        run.not_before = now + run.delay
        _LOG.info("job %r: taken up again in epoch %d, state %s", job.name, run.epoch, job.state.value)
        if job.state in (State.PREPARING, State.TRYING, State.HOLDING):
            plan, old = run.plan, run.running
            if plan is not None:
                self._endings[plan.number] = Ending(job.name, plan, run.epoch, retry_at=now)
                run.plan = None
            order = Order(0, OrderKind.RUN_RING, old.epoch, old.first_bucket, why="the controller was restarted")
            self._issue(job, State.RING, order, now)
        elif job.state is State.CUTTING:
            run.due = now + self._lease_seconds
        elif self._drained:
            # The controller died between the two.
            self._dispatch(job, Event.DRAIN, Signal(now))
