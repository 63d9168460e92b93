# SPDX-License-Identifier: Apache-2.0
"""The steps by which ranks gather and an epoch starts."""

from __future__ import annotations

import hmac
import logging

from p4reduce_controller.admission import Applicant, Code, ranks_text
from p4reduce_controller.model import (
    Fence,
    Grant,
    Install,
    Job,
    LeaveDone,
    Order,
    OrderKind,
    Path,
    Run,
    Seat,
    Signal,
    TellFence,
    Worker,
    WorkerState,
)
from p4reduce_controller.paths import FIRST_DELAY, Paths, plan_of
from p4reduce_controller.records import applicant_of, run_of, superseded
from p4reduce_controller.states import State
from p4reduce_controller.store import MAX_ENDS, StoreError

_LOG = logging.getLogger(__name__)


class Rounds(Paths):
    """Taking a seat, waiting, starting the epoch; and the loud end, after which a new round may begin."""

    # ---- steps: taking a seat -------------------------------------------------------------------------------------

    def _start(self, job: Job, signal: Signal) -> State:
        applicant = applicant_of(signal)
        # Whatever ran under this name is over; its entries live on in `_endings` until they are removed.
        job.world_size, job.incarnation = applicant.world_size, applicant.incarnation
        self._clear(job)
        job.seats.clear()
        job.misfits.clear()
        return self._seat(job, signal)

    def _clear(self, job: Job) -> None:
        """Nothing of the last membership counts in the next one."""
        job.run, job.reason, job.over_since = None, "", None
        job.policy, job.policy_changed = self.default_policy, False
        job.path, job.path_reason, job.promotions = Path.SWITCH, "", 0
        job.fallbacks.clear()

    def _seat(self, job: Job, signal: Signal) -> State:
        self._take_seat(job, signal)
        return self._complete(job, signal)

    def _seat_early(self, job: Job, signal: Signal) -> State:
        applicant = applicant_of(signal)
        member = run_of(job).workers.get(applicant.rank)
        if member is not None and member.state is not WorkerState.LEFT:
            return self._join_again(job, signal)
        self._take_seat(job, signal)
        return job.state

    def _take_seat(self, job: Job, signal: Signal) -> None:
        applicant = applicant_of(signal)
        if applicant.world_size != job.world_size:
            job.misfits[applicant.rank] = (applicant.world_size, f"host {applicant.host.name}, {applicant.host.ip}")
            self._refuse([signal.ticket], Code.FAILED_PRECONDITION, _sizes_differ(job, applicant))
            return
        taken = job.seats.get(applicant.rank)
        if taken is not None:
            if _repeats(taken.applicant, applicant):
                self._move_seat(job, taken, signal)
                return
            self._refuse(
                [signal.ticket],
                Code.ALREADY_EXISTS,
                f"job {job.name!r}: {taken.applicant.name} has already joined (incarnation {job.incarnation}): "
                f"start every rank once, or choose another job name",
            )
            return
        for seat in job.seats.values():
            if (seat.applicant.host, seat.applicant.udp_port) == (applicant.host, applicant.udp_port):
                self._refuse(
                    [signal.ticket],
                    Code.FAILED_PRECONDITION,
                    f"job {job.name!r}: ranks {seat.applicant.rank} and {applicant.rank} both say that they receive on "
                    f"{applicant.host.ip} port {applicant.udp_port}: give every rank a socket of its own",
                )
                return
            if seat.applicant.mode != applicant.mode:
                self._refuse(
                    [signal.ticket],
                    Code.FAILED_PRECONDITION,
                    f"job {job.name!r}: rank {applicant.rank} says mode {applicant.mode}, rank {seat.applicant.rank} "
                    f"said {seat.applicant.mode}: start all ranks with the same mode",
                )
                return
        job.misfits.pop(applicant.rank, None)
        if job.state is not State.LEAVING:  # whose mode is that of the ranks still there
            job.mode = applicant.mode
        job.seats[applicant.rank] = Seat(applicant, signal.ticket, signal.now + applicant.wait_seconds)

    def _move_seat(self, job: Job, seat: Seat, signal: Signal) -> None:
        """The same process asks again: it has lost its first call."""
        self._refuse(
            [seat.ticket], Code.ABORTED, f"job {job.name!r}: {seat.applicant.name} has asked again with another call"
        )
        seat.ticket = signal.ticket

    def _join_again(self, job: Job, signal: Signal) -> State:
        applicant = applicant_of(signal)
        run = run_of(job)
        seat, member = job.seats.get(applicant.rank), run.workers.get(applicant.rank)
        if applicant.world_size != job.world_size:
            self._refuse([signal.ticket], Code.FAILED_PRECONDITION, _sizes_differ(job, applicant))
        elif seat is not None and job.state is State.INSTALLING and _repeats(seat.applicant, applicant):
            self._move_seat(job, seat, signal)
        elif member is not None and _repeats(member.applicant, applicant):
            # The answer was lost on its way. The path to begin with is enough: the stream brings the current order.
            member.heard = signal.now
            self._actions.append(Grant(signal.ticket, applicant.rank, run, run.running, member.credential, job.policy))
        else:
            self._refuse(
                [signal.ticket],
                Code.ALREADY_EXISTS,
                f"job {job.name!r}: rank {applicant.rank} has already joined and the job is running in epoch "
                f"{run.epoch}: raise the incarnation (now {job.incarnation}) to replace it, "
                f"or choose another job name",
            )
        return job.state

    def _refuse_older(self, job: Job, signal: Signal) -> State:
        self._refuse(
            [signal.ticket],
            Code.FAILED_PRECONDITION,
            f"job {job.name!r} is at incarnation {job.incarnation}, rank {signal.rank} comes with "
            f"{applicant_of(signal).incarnation}: this process belongs to a run that was replaced, stop it",
        )
        return job.state

    def _unseat(self, job: Job, signal: Signal) -> State:
        del job.seats[signal.rank]
        return State.JOINING if job.seats else State.ABSENT

    def _unseat_early(self, job: Job, signal: Signal) -> State:
        del job.seats[signal.rank]
        return job.state

    def _expire(self, job: Job, signal: Signal) -> State:
        longest = max(seat.applicant.wait_seconds for seat in job.seats.values() if seat.expires <= signal.now)
        missing = [rank for rank in range(job.world_size) if rank not in job.seats]
        if missing:
            verb = "has" if len(missing) == 1 else "have"
            why = f"{ranks_text(missing)} of {job.world_size} {verb} not joined: {_remedy(job)}"
        else:
            why = "all ranks are there, but no pool of the switch came free: end another job"
        self._refuse_seats(job, Code.DEADLINE_EXCEEDED, f"job {job.name!r}: after {longest:g} s {why}")
        return State.ABSENT

    def _expire_early(self, job: Job, _: Signal) -> State:
        staying = [w.applicant.rank for w in self._staying(job)]
        self._refuse_seats(
            job,
            Code.DEADLINE_EXCEEDED,
            f"job {job.name!r}: {ranks_text(staying)} did not leave epoch {run_of(job).epoch} in time: "
            f"end the job on every rank before it is joined again",
        )
        return job.state

    # ---- steps: starting an epoch ---------------------------------------------------------------------------------

    def _complete(self, job: Job, signal: Signal) -> State:
        """Start the epoch if every rank is there: on the switch if it may, else, where it has one, on the ring."""
        if len(job.seats) < job.world_size:
            return State.JOINING if job.seats else State.ABSENT
        applicants = [job.seats[rank].applicant for rank in range(job.world_size)]
        job.mode, job.ring = applicants[0].mode, all(applicant.ring for applicant in applicants)
        bound = job.mode == "require" or not job.ring
        kept_off = self._kept_off(job.mode)
        if kept_off is not None:
            if not bound:
                return self._start_ring(job, *kept_off, signal.now)
            self._refuse_off(job, kept_off)
            return State.ABSENT
        lease = self._lease(job, applicants)
        if lease is None:
            if not bound:
                return self._start_ring(job, "no_room", "the switch has no slots left", signal.now)
            if self._endings:
                return State.JOINING  # `removed` comes back to this
            minimum = max(applicant.slots_min for applicant in applicants)
            self._refuse_seats(
                job,
                Code.RESOURCE_EXHAUSTED,
                f"job {job.name!r}: the switch has no room for it, it needs {minimum} slots in a row: end another "
                f"job, start the controller with smaller pools (--pool-slots, now {self._pools.pool_slots}), "
                f"or join with a ring path and mode auto",
            )
            return State.ABSENT
        try:
            epoch = self._new_epoch()
        except StoreError as error:
            self._pools.give_back(lease)
            self._refuse_seats(job, Code.INTERNAL, f"job {job.name!r}: {error}")
            return State.ABSENT
        plan = plan_of(epoch, lease, applicants)
        slots = self._window(job, applicants, lease)
        order = Order(1, OrderKind.RUN_SWITCH, epoch, 0, *slots)
        job.run = Run(epoch, epoch, order, order, plan, *slots, {}, counted=epoch, settled=signal.now)
        self._actions.append(Install(plan))
        return State.INSTALLING

    def _start_ring(self, job: Job, reason: str, text: str, now: float) -> State:
        """Begin on the ring path."""
        try:
            epoch = self._new_epoch()
        except StoreError as error:
            self._refuse_seats(job, Code.INTERNAL, f"job {job.name!r}: {error}")
            return State.ABSENT
        order = Order(1, OrderKind.RUN_RING, epoch, 0, why=f"{reason}: {text}")
        job.run = Run(epoch, epoch, order, order, None, 0, 0, {}, settled=now, not_before=now + FIRST_DELAY)
        job.run.no_room = reason == "no_room"
        job.fallbacks[reason] += 1
        self._to_ring(job, reason, text, 0)
        return self._admit(job, State.RING, now)

    def _grant(self, job: Job, signal: Signal) -> State:
        """The switch is ready."""
        kept_off = self._kept_off(job.mode)
        if kept_off is not None and job.ring and job.mode == "auto":
            # It was drained, or lost, meanwhile.
            self._end(job, None)
            return self._start_ring(job, *kept_off, signal.now)
        job.path, job.path_reason = Path.SWITCH, ""
        _LOG.info("job %r: begins on the switch path, epoch %d", job.name, run_of(job).epoch)
        return self._admit(job, State.SWITCH, signal.now)

    def _admit(self, job: Job, state: State, now: float) -> State:
        """Answer every Join, after the job is on disk."""
        run = run_of(job)
        for rank, seat in job.seats.items():
            run.workers[rank] = Worker(seat.applicant, now, credential=self._credential())
        job.state = state
        self._save(job)
        self._actions += [
            Grant(seat.ticket, rank, run, run.order, run.workers[rank].credential, job.policy)
            for rank, seat in job.seats.items()
        ]
        job.seats.clear()
        job.misfits.clear()
        return state

    def _install_failed(self, job: Job, signal: Signal) -> State:
        self._end(job, None)
        if job.ring and job.mode == "auto":
            text = f"the switch could not be set up: {signal.message}"
            state = self._start_ring(job, "no_switch", text, signal.now)
            if job.run is not None and state is State.RING:
                self._delay(job, signal.now, on_switch=False)
            return state
        self._refuse_seats(
            job, Code.UNAVAILABLE, f"job {job.name!r}: the switch could not be set up: {signal.message}: join again"
        )
        return State.ABSENT

    def _abandon(self, job: Job, signal: Signal) -> State:
        gone = job.seats.pop(signal.rank).applicant
        self._refuse_seats(
            job,
            Code.ABORTED,
            f"job {job.name!r}: {gone.name} went away while the switch was being set up: join again",
        )
        self._end(job, None)
        return State.ABSENT

    def _outdate(self, job: Job, signal: Signal) -> State:
        """A newer incarnation comes while the older one still waits."""
        self._refuse_seats(job, Code.ABORTED, superseded(job, signal))
        if job.run is not None:
            self._end(job, None)
        return self._start(job, signal)

    def _evict_seats(self, job: Job, _: Signal) -> State:
        self._refuse_seats(job, Code.ABORTED, f"job {job.name!r}: an operator has ended it")
        if job.run is not None:
            self._end(job, None)
        return State.ABSENT

    # ---- the loud end ---------------------------------------------------------------------------------------------

    def _fence(self, job: Job, fence: Fence, signal: Signal, state: State = State.FAILED) -> State:
        """End the membership. The workers are told by `revoked`, once nothing of theirs can count any more."""
        run = run_of(job)
        streams = [w.stream for w in run.workers.values() if w.stream is not None]
        self._forget(job, fence, state)
        if run.plan is not None:
            self._end(job, fence).streams += streams
        else:
            self._actions += [TellFence(stream, fence) for stream in streams]
        for worker in run.workers.values():
            if worker.leaving is not None:
                # Nobody is kept waiting; it was to be gone anyway.
                self._actions += [LeaveDone(ticket) for ticket in worker.leaving.tickets]
                worker.leaving = None
            if worker.state in (WorkerState.JOINED, WorkerState.REPORTING):
                worker.state = WorkerState.FENCED
        run.due, run.doubt = None, None
        job.reason, job.over_since = fence.message, signal.now
        self._remember(run.epoch, job.name, fence)
        return self._next_round(job, signal) if job.seats else state

    def _remember(self, epoch: int, name: str, fence: Fence) -> None:
        self._past[epoch] = (name, fence)
        while len(self._past) > MAX_ENDS:
            self._past.popitem(last=False)

    def _next_round(self, job: Job, signal: Signal) -> State:
        """Ranks that left early wait for the next epoch already."""
        self._clear(job)
        job.mode = next(iter(job.seats.values())).applicant.mode
        return self._complete(job, signal)


def _repeats(first: Applicant, second: Applicant) -> bool:
    """Whether both are the same process's call."""
    return bool(first.nonce) and hmac.compare_digest(first.nonce, second.nonce)


def _remedy(job: Job) -> str:
    """What those who waited in vain should do."""
    if not job.misfits:
        return "start them, or see why they fail"
    said = ", ".join(
        f"rank {rank} came with world size {size} and was refused ({where})"
        for rank, (size, where) in sorted(job.misfits.items())
    )
    return f"{said}: start all ranks with the same number"


def _sizes_differ(job: Job, applicant: Applicant) -> str:
    return (
        f"job {job.name!r}: rank {applicant.rank} says world_size {applicant.world_size}, the ranks before it said "
        f"{job.world_size}: start all ranks with the same number"
    )
