# SPDX-License-Identifier: Apache-2.0
"""The controller's records as messages of the protocol, and back."""

from __future__ import annotations

from typing import Final

from p4reduce import __version__, constants
from p4reduce.core.config import RetransmissionPolicy
from p4reduce.proto import controller_pb2 as pb
from p4reduce_controller.admission import Claim
from p4reduce_controller.hosts import Hosts
from p4reduce_controller.model import Fence, Job, PoolView, Reason, Report, Run, Seat, Worker
from p4reduce_controller.states import State

VERSION: Final = __version__

_TROUBLES = {
    pb.Trouble.UNSPECIFIED: Reason.ABORTED,
    pb.Trouble.MISMATCH: Reason.MISMATCH,
    pb.Trouble.STALLED: Reason.STALLED,
    pb.Trouble.INTEGRITY: Reason.INTEGRITY,
    pb.Trouble.REFUSED: Reason.REFUSED,
    pb.Trouble.ABORTED: Reason.ABORTED,
}
_MAX_MESSAGE = 1000
"""Characters of a worker's trouble that are passed on."""


def claim(request: pb.JoinRequest) -> Claim:
    """A join as it came in."""
    return Claim(
        job=request.job,
        world_size=request.world_size,
        rank=request.rank,
        incarnation=request.incarnation,
        ip=request.ip,
        udp_port=request.udp_port,
        mtu=request.mtu,
        receive_frames=request.receive_frames,
        wait_seconds=request.wait_seconds,
        client_version=request.client_version,
    )


def report(message: pb.ProgressReport) -> Report:
    """A progress report; codes of a newer protocol count as ABORTED."""
    trouble = None
    if message.HasField("trouble"):
        said = message.trouble
        reason = _TROUBLES.get(said.code, Reason.ABORTED)
        trouble = Fence(reason, said.message[:_MAX_MESSAGE], (), said.bucket)
    return Report(message.job, message.epoch, message.rank, message.submitted, message.completed, trouble)


def fence(found: Fence) -> pb.Fence:
    """The end of an epoch."""
    return pb.Fence(reason=int(found.reason), message=found.message, ranks=found.ranks, bucket=found.bucket)  # type: ignore[arg-type]


def policy(found: RetransmissionPolicy) -> pb.RetransmissionPolicy:
    """When workers send again."""
    return pb.RetransmissionPolicy(
        initial_seconds=found.initial,
        min_seconds=found.minimum,
        max_seconds=found.maximum,
        deadline_seconds=found.deadline,
        early_resend=found.early_resend,
    )


def join_reply(
    hosts: Hosts, rank: int, run: Run, retransmission: RetransmissionPolicy, lease_seconds: float
) -> pb.JoinReply:
    """What a rank needs to take part in its epoch."""
    address, port = hosts.endpoint(run.workers[rank].applicant.host)
    return pb.JoinReply(
        epoch=run.plan.number,
        or_slots=run.or_slots,
        add_slots=run.add_slots,
        endpoint_ip=address,
        endpoint_port=port,
        policy=policy(retransmission),
        members=[_member(run.workers[member]) for member in sorted(run.workers)],
        lease_seconds=lease_seconds,
    )


def describe(hosts: Hosts) -> pb.DescribeReply:
    """What a worker must know before it opens its socket."""
    return pb.DescribeReply(
        server_version=VERSION,
        profile=hosts.switch.profile,
        switch_ip=hosts.switch.ip,
        udp_port=constants.UDP_PORT,
        loopback=hosts.loopback,
    )


def switch_status(hosts: Hosts, connected: bool) -> pb.SwitchStatus:
    """The switch. A session is only ever kept as primary."""
    return pb.SwitchStatus(
        address=hosts.switch.grpc,
        device_id=hosts.switch.device_id,
        connected=connected,
        primary=connected,
        profile=hosts.switch.profile,
        slots=constants.SLOTS,
    )


def job_status(job: Job, now: float) -> pb.JobStatus:
    """One job with all its ranks, waiting ones included."""
    shown = "joining" if job.state is State.INSTALLING else job.state.value
    status = pb.JobStatus(
        job=job.name, state=shown, world_size=job.world_size, incarnation=job.incarnation, reason=job.reason
    )
    if job.run is not None and job.state is not State.INSTALLING:
        run = job.run
        status.epoch = run.plan.number
        if job.live:
            status.pool_base, status.pool_size = run.plan.lease.pool_base, run.plan.lease.pool_size
        status.workers.extend(_worker(run.workers[rank], now) for rank in sorted(run.workers))
        for name, value in run.counters.items():
            status.counters[name] = value
    else:
        status.workers.extend(_waiting(job.seats[rank]) for rank in sorted(job.seats))
    return status


def pool(found: PoolView) -> pb.Pool:
    """One pool."""
    return pb.Pool(base=found.base, size=found.size, job=found.job, epoch=found.epoch)


def _member(worker: Worker) -> pb.Member:
    applicant = worker.applicant
    host = applicant.host
    return pb.Member(
        rank=applicant.rank, host=host.name, ip=host.ip, udp_port=applicant.udp_port, switch_port=host.port
    )


def _worker(worker: Worker, now: float) -> pb.WorkerStatus:
    return pb.WorkerStatus(
        member=_member(worker),
        state=worker.state.value,
        submitted=worker.submitted,
        completed=worker.completed,
        silent_seconds=max(0.0, now - worker.heard),
    )


def _waiting(seat: Seat) -> pb.WorkerStatus:
    return pb.WorkerStatus(member=_member(Worker(seat.applicant, 0.0)), state="joined")
