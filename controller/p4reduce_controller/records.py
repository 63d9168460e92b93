# SPDX-License-Identifier: Apache-2.0
"""The records of jobs and of epochs that end, and the machinery that drives them through `states.TABLE`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import cast

from p4reduce.core.config import RetransmissionPolicy
from p4reduce_controller.admission import Applicant, Code, Refusal
from p4reduce_controller.entries import Epoch
from p4reduce_controller.hosts import Hosts
from p4reduce_controller.memo import end_memo, memo
from p4reduce_controller.model import (
    Action,
    Ending,
    Fence,
    Forget,
    Job,
    LeaveDone,
    Persist,
    PoolView,
    Refuse,
    Revoke,
    Run,
    Signal,
    Worker,
    WorkerState,
)
from p4reduce_controller.pools import PORT_BUDGET, Pools
from p4reduce_controller.states import OVER, TABLE, Event, State

RETRY_SECONDS = 5.0
"""How long to wait before asking the switch again to remove what it did not remove."""
STARTING = "the controller has just been started"
"""Why there is no session before the first attempt: no sign of trouble."""
MAX_FAILED = 64
"""Jobs that are over whose records are kept for status."""
NEVER = float("-inf")


class Records:
    """State of all jobs, and how it changes. Steps add to `_actions`; whoever calls from outside takes them."""

    def __init__(
        self,
        pools: Pools,
        next_epoch: Callable[[], int],
        lease_seconds: float,
        port_budget: int = PORT_BUDGET,
        switch_name: str = "the switch",
        *,
        policy: RetransmissionPolicy | None = None,
        credential: Callable[[], bytes] = bytes,
        hosts: Hosts | None = None,
    ) -> None:
        """`next_epoch` hands out epochs, ever higher ones; it may raise StoreError. `switch_name` is for messages.

        `policy` is the default of jobs to come. `credential` makes a worker's secret, 16 random bytes; an empty one is
        never asked for. `hosts`: those that restored jobs must agree with.
        """
        self.default_policy = policy or RetransmissionPolicy()
        self._pools = pools
        self._next_epoch = next_epoch
        self._lease_seconds = lease_seconds
        self._port_budget = port_budget
        self._credential = credential
        self._hosts = hosts
        self._jobs: dict[str, Job] = {}
        self._endings: dict[int, Ending] = {}
        self._streams: dict[int, tuple[str, int, int]] = {}
        self._past: OrderedDict[int, tuple[str, Fence]] = OrderedDict()
        """Fences by membership."""
        self._actions: list[Action] = []
        self._switch_name = switch_name
        self._switch_down: str | None = None
        self._down_since = 0.0
        self._up_since: float | None = None
        self._drained = False
        self._woken = NEVER
        """When this controller went on after it had been stopped."""
        self._own = range(0)
        """From the first to the last epoch that this controller handed out."""

    # ---- views ----------------------------------------------------------------------------------------------------

    @property
    def drained(self) -> bool:
        """Whether an operator has drained the switch."""
        return self._drained

    def jobs(self) -> list[Job]:
        """All records, oldest first. Not to be changed."""
        return list(self._jobs.values())

    def live(self) -> list[Epoch]:
        """Epochs that the switch must hold."""
        return [job.installed for job in self._jobs.values() if job.installed is not None]

    def pools(self) -> list[PoolView]:
        """All ranges of slots in order, with who leases them."""
        views = [PoolView(base, size, "", 0) for base, size in self._pools.free]
        views += [_view(ending.job, ending.plan) for ending in self._endings.values()]
        views += [_view(job.name, job.leased) for job in self._jobs.values() if job.leased is not None]
        return sorted(views, key=lambda view: view.base)

    # ---- the table's machinery ------------------------------------------------------------------------------------

    def _dispatch(self, job: Job, event: Event, signal: Signal) -> None:
        before = job.state
        cell = TABLE[before][event]
        step = cast(Callable[[Job, Signal], State], getattr(self, f"_{cell.step}"))
        state = step(job, signal)
        if state not in cell.leads_to:
            raise RuntimeError(f"job {job.name!r}: {event.name} in {before.name} must not lead to {state.name}")
        self._move(job, state)

    def _move(self, job: Job, state: State) -> None:
        job.state = state
        if state is State.ABSENT:
            if self._jobs.get(job.name) is job:
                del self._jobs[job.name]
            return
        self._jobs.setdefault(job.name, job)
        if state not in OVER:
            return
        # To the end of the line: the oldest is forgotten first.
        self._jobs[job.name] = self._jobs.pop(job.name)
        over = [name for name, other in self._jobs.items() if other.state in OVER]
        for name in over[:-MAX_FAILED]:
            del self._jobs[name]

    def _ignore(self, job: Job, _: Signal) -> State:
        return job.state

    def _taken(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def _absent(self, name: str = "") -> Job:
        return Job(name, 0, 0)

    def _job_of(self, epoch: int) -> Job | None:
        """Whose present or prepared switch epoch this is."""
        for job in self._jobs.values():
            if job.run is not None and job.run.plan is not None and job.run.plan.number == epoch:
                return job
        return None

    def _current(self, name: str, epoch: int) -> Job:
        """The record, if `epoch` names its present membership; else a stand-in that is ABSENT."""
        job = self._jobs.get(name)
        if job is None or job.run is None or job.run.epoch != epoch:
            return self._absent(name)
        return job

    @staticmethod
    def _staying(job: Job) -> list[Worker]:
        """Workers that owe a sign of life."""
        if not job.live or job.run is None:
            return []
        return [worker for worker in job.run.workers.values() if worker.state is not WorkerState.LEFT]

    def _lapse(self, worker: Worker) -> float:
        return worker.heard + self._lease_seconds if worker.expires is None else worker.expires

    def _unreachable_at(self, job: Job) -> float | None:
        """When the switch counts as lost to this job; None while there is no reason to think so."""
        run = job.run
        if self._switch_down is None or run is None or job.state not in (State.SWITCH, State.LEAVING):
            return None
        if run.waiting_since is None or run.plan is None:
            return None
        return max(self._down_since, run.waiting_since) + self._lease_seconds

    def _refuse(self, tickets: Iterable[int], code: Code, message: str) -> None:
        self._actions += [Refuse(ticket, Refusal(code, message)) for ticket in tickets]

    def _refuse_seats(self, job: Job, code: Code, message: str) -> None:
        self._refuse([seat.ticket for seat in job.seats.values()], code, message)
        job.seats.clear()

    def _no_switch(self) -> str:
        return f"the controller has no session with the switch ({self._switch_down}): it keeps trying, join again later"

    def _is_drained(self) -> str:
        return (
            f"{self._switch_name} is drained for maintenance: join again after `p4reducectl undrain`, "
            f"or with a ring path and mode auto or off"
        )

    # ---- on disk --------------------------------------------------------------------------------------------------

    def _save(self, job: Job) -> None:
        endings = [ending.plan for ending in self._endings.values() if ending.job == job.name]
        self._actions.append(Persist(job.name, memo(job, endings)))

    def _forget(self, job: Job, fence: Fence | None = None, state: State = State.ABSENT) -> None:
        """With a fence: its workers, and operators, can still be told of it after a restart."""
        self._actions.append(Forget(job.name, None if fence is None else end_memo(job, fence, state)))

    # ---- the end of an epoch --------------------------------------------------------------------------------------

    def _end(self, job: Job, fence: Fence | None) -> Ending:
        """Take the job's epoch from the switch; its lease ends once that is done."""
        run = run_of(job)
        if run.plan is None:
            raise RuntimeError(f"job {job.name!r} has nothing on the switch to end")
        ending = Ending(job.name, run.plan, run.epoch, fence)
        self._endings[run.plan.number] = ending
        self._actions.append(Revoke(run.plan, fence.message if fence is not None else ""))
        run.plan = None
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


def _view(job: str, plan: Epoch) -> PoolView:
    return PoolView(plan.lease.pool_base, plan.lease.pool_size, job, plan.number)


def run_of(job: Job) -> Run:
    """The job's membership; the table only leads here in states that have one."""
    if job.run is None:
        raise RuntimeError(f"job {job.name!r} has no membership in state {job.state.name}")
    return job.run


def applicant_of(signal: Signal) -> Applicant:
    """Who joins; every JOIN event has one."""
    if signal.applicant is None:
        raise RuntimeError("a join without an applicant")
    return signal.applicant


def superseded(job: Job, signal: Signal) -> str:
    """The message to a job's older incarnation."""
    return f"job {job.name!r}: incarnation {applicant_of(signal).incarnation} replaces incarnation {job.incarnation}"
