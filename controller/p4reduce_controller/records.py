# SPDX-License-Identifier: Apache-2.0
"""The records of jobs and of epochs that end, and the machinery that drives them through `states.TABLE`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import cast

from p4reduce_controller.admission import Applicant, Code, Refusal
from p4reduce_controller.entries import Epoch
from p4reduce_controller.model import (
    Action,
    Ending,
    Fence,
    Job,
    LeaveDone,
    PoolView,
    Refuse,
    Revoke,
    Run,
    Signal,
    Worker,
    WorkerState,
)
from p4reduce_controller.pools import PORT_BUDGET, Pools
from p4reduce_controller.states import TABLE, Event, State

RETRY_SECONDS = 5.0
"""How long to wait before asking the switch again to remove what it did not remove."""
MAX_FAILED = 64
"""Failed jobs whose records are kept for status."""


class Records:
    """State of all jobs, and how it changes. Steps add to `_actions`; whoever calls from outside drains them."""

    def __init__(
        self,
        pools: Pools,
        next_epoch: Callable[[], int],
        lease_seconds: float,
        port_budget: int = PORT_BUDGET,
        switch_name: str = "the switch",
    ) -> None:
        """`next_epoch` hands out epochs, ever higher ones; it may raise StoreError. `switch_name` is for messages."""
        self._pools = pools
        self._next_epoch = next_epoch
        self._lease_seconds = lease_seconds
        self._port_budget = port_budget
        self._jobs: dict[str, Job] = {}
        self._endings: dict[int, Ending] = {}
        self._streams: dict[int, tuple[str, int, int]] = {}
        self._past: OrderedDict[int, tuple[str, Fence]] = OrderedDict()
        self._actions: list[Action] = []
        self._switch_name = switch_name
        self._switch_down: str | None = None
        self._down_since = 0.0
        self._own = range(0)
        """From the first to the last epoch that this controller handed out."""

    # ---- views ----------------------------------------------------------------------------------------------------

    def jobs(self) -> list[Job]:
        """All records, oldest first. Not to be changed."""
        return list(self._jobs.values())

    def live(self) -> list[Epoch]:
        """Epochs that the switch must hold."""
        return [job.run.plan for job in self._jobs.values() if job.live and job.run is not None]

    def pools(self) -> list[PoolView]:
        """All pools in order, with who leases them."""
        holders = {ending.plan.lease.pool_base: (ending.job, ending.plan.number) for ending in self._endings.values()}
        for job in self._jobs.values():
            if (job.live or job.state is State.INSTALLING) and job.run is not None:
                holders[job.run.plan.lease.pool_base] = (job.name, job.run.plan.number)
        size = self._pools.pool_slots
        return [PoolView(base, size, *holders.get(base, ("", 0))) for base in self._pools.bases]

    # ---- the table's machinery ------------------------------------------------------------------------------------

    def _dispatch(self, job: Job, event: Event, signal: Signal) -> None:
        cell = TABLE[job.state][event]
        step = cast(Callable[[Job, Signal], State], getattr(self, f"_{cell.step}"))
        state = step(job, signal)
        if state not in cell.leads_to:
            raise RuntimeError(f"job {job.name!r}: {event.name} in {job.state.name} must not lead to {state.name}")
        self._move(job, state)

    def _move(self, job: Job, state: State) -> None:
        job.state = state
        if state is State.ABSENT:
            if self._jobs.get(job.name) is job:
                del self._jobs[job.name]
            return
        self._jobs[job.name] = job
        failed = [name for name, other in self._jobs.items() if other.state is State.FAILED]
        for name in failed[:-MAX_FAILED]:
            del self._jobs[name]

    def _drain(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def _absent(self, name: str = "") -> Job:
        return Job(name, 0, 0)

    def _job_of(self, epoch: int) -> Job | None:
        return next((j for j in self._jobs.values() if j.run is not None and j.run.plan.number == epoch), None)

    def _current(self, name: str, epoch: int) -> Job:
        """The record, if `epoch` is its present one; else a stand-in that is ABSENT."""
        job = self._jobs.get(name)
        if job is None or job.run is None or job.run.plan.number != epoch:
            return self._absent(name)
        return job

    @staticmethod
    def _staying(job: Job) -> list[Worker]:
        """Workers that owe a sign of life."""
        if not job.live or job.run is None:
            return []
        return [worker for worker in job.run.workers.values() if worker.state is not WorkerState.LEFT]

    @staticmethod
    def _unannounced(job: Job) -> list[Worker]:
        """Workers that left, of which the others were not told yet."""
        if not job.live or job.run is None:
            return []
        return [w for w in job.run.workers.values() if w.state is WorkerState.LEFT and not w.announced]

    def _lapse(self, worker: Worker) -> float:
        return worker.heard + self._lease_seconds

    def _unreachable_at(self, job: Job) -> float | None:
        """When the switch counts as lost to this job; None while there is no reason to think so."""
        if self._switch_down is None or not job.live or job.run is None or job.run.waiting_since is None:
            return None
        return max(self._down_since, job.run.waiting_since) + self._lease_seconds

    def _refuse(self, tickets: Iterable[int], code: Code, message: str) -> None:
        self._actions += [Refuse(ticket, Refusal(code, message)) for ticket in tickets]

    def _refuse_seats(self, job: Job, code: Code, message: str) -> None:
        self._refuse([seat.ticket for seat in job.seats.values()], code, message)
        job.seats.clear()

    def _no_switch(self) -> str:
        return f"the controller has no session with the switch ({self._switch_down}): it keeps trying, join again later"

    # ---- the end of an epoch --------------------------------------------------------------------------------------

    def _end(self, job: Job, fence: Fence | None) -> Ending:
        plan = run_of(job).plan
        ending = Ending(job.name, plan, fence)
        self._endings[plan.number] = ending
        self._actions.append(Revoke(plan, fence.message if fence is not None else ""))
        return ending

    def _postpone(self, ending: Ending, now: float) -> None:
        ending.retry_at = now + RETRY_SECONDS
        # Whoever waits for the end of a Leave has done his part.
        self._actions += [LeaveDone(ticket) for ticket in ending.tickets]
        ending.tickets.clear()

    def _retry(self, now: float) -> None:
        for ending in self._endings.values():
            if ending.retry_at is not None and ending.retry_at <= now:
                ending.retry_at = None
                self._actions.append(Revoke(ending.plan))


def run_of(job: Job) -> Run:
    """The job's epoch; the table only leads here in states that have one."""
    if job.run is None:
        raise RuntimeError(f"job {job.name!r} has no epoch in state {job.state.name}")
    return job.run


def applicant_of(signal: Signal) -> Applicant:
    """Who joins; every JOIN event has one."""
    if signal.applicant is None:
        raise RuntimeError("a join without an applicant")
    return signal.applicant


def superseded(job: Job, signal: Signal) -> str:
    """The message to a job's older incarnation."""
    return f"job {job.name!r}: incarnation {applicant_of(signal).incarnation} replaces incarnation {job.incarnation}"
