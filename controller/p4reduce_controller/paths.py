# SPDX-License-Identifier: Apache-2.0
"""Which path a job takes: leases, windows, orders, and how long to keep away from a switch that was trouble."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from p4reduce_controller.admission import Applicant, Code
from p4reduce_controller.entries import Epoch, Place
from p4reduce_controller.model import ASKING, Job, Order, OrderKind, Path, TellOrder, WorkerState
from p4reduce_controller.pools import Lease, window
from p4reduce_controller.records import Records, run_of
from p4reduce_controller.states import State

_LOG = logging.getLogger(__name__)

FIRST_DELAY = 1.0
"""Seconds that the switch must have been healthy, and the last cut be past, before a job goes back to it."""
MAX_DELAY = 60.0
STABLE_SECONDS = 60.0
"""Trouble after less than this on the switch path doubles the delay; after more it starts again at FIRST_DELAY."""
TRIAL_SECONDS = 2.0
"""A trial that has not come back by then has failed."""


class Paths(Records):
    """Leases, windows, orders and delays."""

    # ---- what a job may have --------------------------------------------------------------------------------------

    def _lease(self, job: Job, applicants: Sequence[Applicant]) -> Lease | None:
        """A pool for these ranks; None when there is no room."""
        minimum = max(applicant.slots_min for applicant in applicants)
        wants = [applicant.slots_want or self._pools.pool_slots for applicant in applicants]
        return self._pools.take(job.world_size, minimum, max(wants))

    def _window(self, job: Job, applicants: Sequence[Applicant], lease: Lease) -> tuple[int, int]:
        return window(
            lease.pool_size,
            [applicant.receive_frames for applicant in applicants],
            Counter(applicant.host.port for applicant in applicants),
            self._slots_in_use(),
            self._port_budget,
            max(applicant.slots_min for applicant in applicants),
            job.policy.window,
        )

    def _slots_in_use(self) -> Counter[int]:
        """Slots that epochs on the switch keep in flight behind each of its ports."""
        used: Counter[int] = Counter()
        for job in self._jobs.values():
            if job.leased is not None and job.run is not None:
                for place in job.leased.places:
                    used[place.port] += job.run.or_slots + job.run.add_slots
        return used

    def _new_epoch(self) -> int:
        """StoreError when none can be had."""
        epoch = self._next_epoch()
        self._own = range(self._own.start or epoch, epoch + 1)
        return epoch

    def _kept_off(self, mode: str) -> tuple[str, str] | None:
        """Why a job of this kind must not be on the switch now: reason and text; None when it may."""
        if mode == "off":
            return "operator", "mode off"
        if self._switch_down is not None:
            return "no_switch", f"no session with the switch: {self._switch_down}"
        if self._drained:
            return "drained", f"{self._switch_name} is drained"
        return None

    def _falls_back(self, job: Job) -> bool:
        """Whether trouble on the switch path leads to the ring path, and not to a fence."""
        return job.mode == "auto" and self._can_move(job)

    @staticmethod
    def _can_move(job: Job) -> bool:
        """Whether the job has a ring path and all its ranks: a cut needs both."""
        workers = job.run.workers.values() if job.run is not None else ()
        return job.ring and all(worker.state is not WorkerState.LEFT for worker in workers)

    @staticmethod
    def _leavers(job: Job) -> list[int]:
        """Ranks that wait to leave, or have left."""
        run = run_of(job)
        return [r for r, w in run.workers.items() if w.leaving is not None or w.state is WorkerState.LEFT]

    # ---- orders ---------------------------------------------------------------------------------------------------

    def _issue(self, job: Job, state: State, order: Order, now: float) -> State:
        """Make `order` (its number is put in here) the current one, in `state`, on disk before anybody hears of it."""
        run = run_of(job)
        order = Order(
            run.order.number + 1,
            order.kind,
            order.epoch,
            order.first_bucket,
            order.or_slots,
            order.add_slots,
            order.why,
        )
        run.order = order
        run.answers.clear()
        run.doubt = None
        run.due = None
        if order.kind in ASKING:
            run.due = now + (TRIAL_SECONDS if order.kind is OrderKind.TRIAL else self._lease_seconds)
        else:
            run.running, run.present = order, order.epoch
        job.state = state
        self._save(job)
        streams = [worker.stream for worker in run.workers.values() if worker.stream is not None]
        self._actions += [TellOrder(stream, order) for stream in streams]
        return state

    def _answered(self, job: Job) -> bool:
        """Whether every rank has answered the current order."""
        return len(run_of(job).answers) == job.world_size

    def _to_ring(self, job: Job, reason: str, text: str, first: int) -> None:
        """Note, loudly, that the job is on the ring path now."""
        job.path, job.path_reason = Path.RING, f"{reason}: {text}"
        _LOG.warning(
            "job %r: ring path from bucket %d on, epoch %d: %s", job.name, first, run_of(job).present, job.path_reason
        )

    # ---- hysteresis -----------------------------------------------------------------------------------------------

    def _delay(self, job: Job, now: float, on_switch: bool) -> None:
        """After trouble: how long the job keeps off the switch."""
        run = run_of(job)
        fresh = run.delay == 0.0 or (on_switch and now - run.settled >= STABLE_SECONDS)
        run.delay = FIRST_DELAY if fresh else min(2 * run.delay, MAX_DELAY)
        run.not_before = now + run.delay

    def _promote_at(self, job: Job) -> float | None:
        """When the job may go (back) to the switch; None while that is out of the question."""
        run = job.run
        if job.state is not State.RING or run is None or run.no_room or not self._may_promote(job):
            return None
        if any(worker.state is not WorkerState.REPORTING for worker in run.workers.values()):
            return None
        if self._up_since is None:
            return run.not_before
        hurry = job.mode == "require"
        return max(run.not_before, self._up_since + (0.0 if hurry else max(run.delay, FIRST_DELAY)))

    def _may_promote(self, job: Job) -> bool:
        return self._kept_off(job.mode) is None and not self._leavers(job)

    # ---- errors ---------------------------------------------------------------------------------------------------

    def _refuse_off(self, job: Job, kept_off: tuple[str, str]) -> None:
        """Refuse all seats of a job that needs a switch which it cannot have."""
        message = self._is_drained() if kept_off[0] == "drained" else self._no_switch()
        self._refuse_seats(job, Code.UNAVAILABLE, message)


def plan_of(epoch: int, lease: Lease, applicants: Sequence[Applicant]) -> Epoch:
    """An epoch of these ranks, in order of their numbers."""
    places = (Place(a.rank, a.host.ip_number, a.host.mac_number, a.host.port, a.udp_port) for a in applicants)
    return Epoch(epoch, lease, tuple(places))
