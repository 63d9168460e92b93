# SPDX-License-Identifier: Apache-2.0
"""The steps by which ranks gather and an epoch starts."""

from __future__ import annotations

from collections import Counter

from p4reduce_controller.admission import Applicant, Code, ranks_text
from p4reduce_controller.entries import Epoch, Place
from p4reduce_controller.model import (
    Grant,
    Install,
    Job,
    Run,
    Seat,
    Signal,
    Worker,
    WorkerState,
)
from p4reduce_controller.pools import window
from p4reduce_controller.records import Records, applicant_of, run_of, superseded
from p4reduce_controller.states import State
from p4reduce_controller.store import StoreError


class Rounds(Records):
    """Taking a seat, waiting, and starting the epoch."""

    # ---- steps: taking a seat -------------------------------------------------------------------------------------

    def _ignore(self, job: Job, _: Signal) -> State:
        return job.state

    def _start(self, job: Job, signal: Signal) -> State:
        applicant = applicant_of(signal)
        # Whatever ran under this name is over; its entries live on in `_endings` until they are removed.
        job.world_size, job.incarnation = applicant.world_size, applicant.incarnation
        job.run, job.reason = None, ""
        job.seats.clear()
        job.misfits.clear()
        return self._seat(job, signal)

    def _seat(self, job: Job, signal: Signal) -> State:
        self._take_seat(job, signal)
        return self._complete(job)

    def _seat_early(self, job: Job, signal: Signal) -> State:
        applicant = applicant_of(signal)
        member = run_of(job).workers.get(applicant.rank)
        if member is not None and member.state is not WorkerState.LEFT:
            return self._refuse_again(job, signal)
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
        job.misfits.pop(applicant.rank, None)
        job.seats[applicant.rank] = Seat(applicant, signal.ticket, signal.now + applicant.wait_seconds)

    def _refuse_again(self, job: Job, signal: Signal) -> State:
        applicant = applicant_of(signal)
        if applicant.world_size != job.world_size:
            self._refuse([signal.ticket], Code.FAILED_PRECONDITION, _sizes_differ(job, applicant))
        else:
            self._refuse(
                [signal.ticket],
                Code.ALREADY_EXISTS,
                f"job {job.name!r}: rank {applicant.rank} has already joined and the job is running in epoch "
                f"{run_of(job).plan.number}: raise the incarnation (now {job.incarnation}) to replace it, "
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
            f"job {job.name!r}: {ranks_text(staying)} did not leave epoch {run_of(job).plan.number} in time: "
            f"end the job on every rank before it is joined again",
        )
        return job.state

    # ---- steps: starting an epoch ---------------------------------------------------------------------------------

    def _complete(self, job: Job, _: Signal | None = None) -> State:
        """Start the epoch if every rank is there."""
        if len(job.seats) < job.world_size:
            return State.JOINING if job.seats else State.ABSENT
        if self._switch_down is not None:
            self._refuse_seats(job, Code.UNAVAILABLE, self._no_switch())
            return State.ABSENT
        lease = self._pools.take(job.world_size)
        if lease is None:
            if self._endings:
                return State.JOINING  # `removed` comes back to this
            self._refuse_seats(
                job,
                Code.RESOURCE_EXHAUSTED,
                f"job {job.name!r}: all {len(self._pools.bases)} pools of the switch are in use: end another job, "
                f"or start the controller with smaller pools (--pool-slots, now {self._pools.pool_slots})",
            )
            return State.ABSENT
        try:
            epoch = self._next_epoch()
        except StoreError as error:
            self._pools.give_back(lease)
            self._refuse_seats(job, Code.INTERNAL, f"job {job.name!r}: {error}")
            return State.ABSENT
        self._own = range(self._own.start or epoch, epoch + 1)
        applicants = [job.seats[rank].applicant for rank in range(job.world_size)]
        places = tuple(Place(a.rank, a.host.ip_number, a.host.mac_number, a.host.port, a.udp_port) for a in applicants)
        plan = Epoch(epoch, lease, places)
        or_slots, add_slots = window(
            lease.pool_size,
            [a.receive_frames for a in applicants],
            Counter(a.host.port for a in applicants),
            self._slots_in_use(),
            self._port_budget,
        )
        job.run = Run(plan, or_slots, add_slots, {})
        self._actions.append(Install(plan))
        return State.INSTALLING

    def _slots_in_use(self) -> Counter[int]:
        """Slots that running epochs keep in flight behind each switch port."""
        used: Counter[int] = Counter()
        for job in self._jobs.values():
            if job.live and job.run is not None:
                for port, workers in job.run.workers_on_port().items():
                    used[port] += workers * (job.run.or_slots + job.run.add_slots)
        return used

    def _grant(self, job: Job, signal: Signal) -> State:
        run = run_of(job)
        for rank, seat in job.seats.items():
            run.workers[rank] = Worker(seat.applicant, signal.now)
        self._actions += [Grant(seat.ticket, rank, run) for rank, seat in job.seats.items()]
        job.seats.clear()
        job.misfits.clear()
        return State.RUNNING

    def _install_failed(self, job: Job, signal: Signal) -> State:
        self._refuse_seats(
            job, Code.UNAVAILABLE, f"job {job.name!r}: the switch could not be set up: {signal.message}: join again"
        )
        self._end(job, None)
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
