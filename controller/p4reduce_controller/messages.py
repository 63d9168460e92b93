# SPDX-License-Identifier: Apache-2.0
"""The controller's records as messages of the protocol, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from p4reduce import __version__, constants
from p4reduce.core.config import RetransmissionPolicy
from p4reduce.errors import ConfigError
from p4reduce.proto import controller_pb2 as pb
from p4reduce_controller.admission import Claim, Code, RefusedError
from p4reduce_controller.hosts import Hosts
from p4reduce_controller.logs import printable
from p4reduce_controller.model import (
    Answer,
    Fence,
    Grant,
    Job,
    Order,
    OrderKind,
    Path,
    PoolView,
    Reason,
    Report,
    Seat,
    Worker,
)
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
"""Characters of a worker's trouble or answer that are passed on, with what does not print escaped."""
_MAX_COUNTERS = 64
_MAX_COUNTER_NAME = 64
"""Of a worker's counters: what is beyond is left out."""
_PATHS = {Path.SWITCH: pb.PATH_SWITCH, Path.RING: pb.PATH_RING}
_POLICY_FIELDS = {
    "initial_seconds": "initial",
    "min_seconds": "minimum",
    "max_seconds": "maximum",
    "deadline_seconds": "deadline",
    "early_resend": "early_resend",
    "silent_seconds": "silent",
    "fallback_seconds": "fallback",
    "window": "window",
}
"""Names in the protocol and in RetransmissionPolicy."""
POLICY_NAMES: Final = tuple(_POLICY_FIELDS)


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
        mode=request.mode,
        ring=request.ring,
        nonce=request.nonce,
        slots_min=request.slots_min,
        slots_want=request.slots_want,
    )


def report(message: pb.ProgressReport, credential: bytes = b"") -> Report:
    """A progress report; codes of a newer protocol count as ABORTED. `credential`: of the stream it came on."""
    trouble = answer = None
    if message.HasField("trouble"):
        said = message.trouble
        reason = _TROUBLES.get(said.code, Reason.ABORTED)
        trouble = Fence(reason, _text(said.message), (), said.bucket)
    if message.HasField("answer"):
        given = message.answer
        answer = Answer(given.order, given.bucket, given.failed, _text(given.message))
    names = sorted(name for name in message.counters if len(name) <= _MAX_COUNTER_NAME and name.isprintable())
    return Report(
        message.job,
        message.epoch,
        message.rank,
        message.submitted,
        message.completed,
        trouble,
        answer,
        silent=_seconds(message.silent_seconds),
        present=message.present,
        counters={name: message.counters[name] for name in names[:_MAX_COUNTERS]},
        rtt=_seconds(message.rtt_seconds),
        credential=credential,
    )


def _text(said: str) -> str:
    """A worker's words, as logs and fences show them."""
    return printable(said[:_MAX_MESSAGE])[:_MAX_MESSAGE]


def _seconds(said: float) -> float:
    """A worker's number, or 0 for one that makes no sense."""
    return said if 0.0 <= said < float("inf") else 0.0


def fence(found: Fence) -> pb.Fence:
    """The end of an epoch."""
    return pb.Fence(reason=int(found.reason), message=found.message, ranks=found.ranks, bucket=found.bucket)  # type: ignore[arg-type]


def policy(found: RetransmissionPolicy) -> pb.RetransmissionPolicy:
    """When workers send again, and when they say so."""
    message = pb.RetransmissionPolicy()
    for theirs, ours in _POLICY_FIELDS.items():
        setattr(message, theirs, getattr(found, ours))
    return message


def policy_changes(message: pb.RetransmissionPolicy, zero: Iterable[str]) -> dict[str, float | int]:
    """What a SetPolicy changes, by the names of RetransmissionPolicy. RefusedError for a name that there is not."""
    changes: dict[str, float | int] = {}
    for name in zero:
        if name not in _POLICY_FIELDS:
            known = ", ".join(_POLICY_FIELDS)
            raise RefusedError(Code.INVALID_ARGUMENT, f"a policy has no field {name[:40]!r}: there are {known}")
        changes[_POLICY_FIELDS[name]] = 0
    for theirs, ours in _POLICY_FIELDS.items():
        value = getattr(message, theirs)
        if value:
            changes[ours] = value
    return changes


def policy_of_options(before: RetransmissionPolicy, options: Iterable[str]) -> RetransmissionPolicy:
    """A policy with parts named as NAME=VALUE. ConfigError."""
    changes: dict[str, float | int] = {}
    for option in options:
        name, equals, value = option.partition("=")
        kind = {"early_resend": int, "window": int}.get(name, float)
        try:
            if name not in _POLICY_FIELDS or not equals:
                raise ValueError
            changes[_POLICY_FIELDS[name]] = kind(value)
        except ValueError:
            raise ConfigError(f"policy {option!r}: write NAME=VALUE, names are {', '.join(POLICY_NAMES)}") from None
    return replace(before, **changes)  # type: ignore[arg-type]


def changed_policy(before: RetransmissionPolicy, changes: dict[str, float | int]) -> RetransmissionPolicy:
    """A policy with some fields changed. RefusedError when the result makes no sense."""
    try:
        return replace(before, **changes)  # type: ignore[arg-type]
    except (ConfigError, TypeError) as error:
        raise RefusedError(Code.INVALID_ARGUMENT, str(error)) from None


def order(found: Order) -> pb.Order:
    """What the ranks shall do."""
    message = pb.Order(number=found.number, why=found.why)
    match found.kind:
        case OrderKind.RUN_SWITCH:
            message.run_switch.CopyFrom(
                pb.RunSwitch(
                    epoch=found.epoch,
                    or_slots=found.or_slots,
                    add_slots=found.add_slots,
                    first_bucket=found.first_bucket,
                )
            )
        case OrderKind.RUN_RING:
            message.run_ring.CopyFrom(pb.RunRing(epoch=found.epoch, first_bucket=found.first_bucket))
        case OrderKind.STOP:
            message.stop.CopyFrom(pb.Stop(epoch=found.epoch))
        case OrderKind.TRIAL:
            message.trial.CopyFrom(pb.Trial(epoch=found.epoch, or_slots=found.or_slots, add_slots=found.add_slots))
        case OrderKind.HOLD:
            message.hold.CopyFrom(pb.Hold())
    return message


def join_reply(hosts: Hosts, grant: Grant, lease_seconds: float) -> pb.JoinReply:
    """What a rank needs to take part."""
    run, begin = grant.run, grant.order
    address, port = hosts.endpoint(run.workers[grant.rank].applicant.host)
    return pb.JoinReply(
        epoch=run.epoch,
        endpoint_ip=address,
        endpoint_port=port,
        policy=policy(grant.policy),
        members=[_member(run.workers[member]) for member in sorted(run.workers)],
        lease_seconds=lease_seconds,
        order=order(begin),
        credential=grant.credential,
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


def switch_status(
    hosts: Hosts, connected: bool, drained: bool, trouble: str, seconds: float, strays: Mapping[str, int]
) -> pb.SwitchStatus:
    """The switch. A session is only ever kept as primary. `strays`: frames of no epoch, see `entries.STRAY_NAMES`."""
    return pb.SwitchStatus(
        address=hosts.switch.grpc,
        device_id=hosts.switch.device_id,
        connected=connected,
        primary=connected,
        profile=hosts.switch.profile,
        slots=constants.SLOTS,
        name=hosts.switch.name,
        drained=drained,
        trouble=trouble,
        connected_seconds=seconds if connected else 0.0,
        **strays,
    )


def job_status(job: Job, now: float) -> pb.JobStatus:
    """One job with all its ranks, waiting ones included."""
    shown = "joining" if job.state is State.INSTALLING else job.state.value
    status = pb.JobStatus(
        job=job.name,
        state=shown,
        world_size=job.world_size,
        incarnation=job.incarnation,
        reason=job.reason,
        mode=job.mode,
        ring=job.ring,
        path_reason=job.path_reason,
        policy=policy(job.policy),
        fallbacks=dict(job.fallbacks),
        promotions=job.promotions,
    )
    if job.over_since is not None:
        status.over_seconds = max(0.0, now - job.over_since)
    run = job.run
    if run is not None and job.state not in (State.JOINING, State.INSTALLING):
        status.epoch, status.present = run.epoch, run.present
        if job.live:
            status.path = _PATHS[job.path]
        plan = job.leased
        if plan is not None:
            status.pool_base, status.pool_size = (plan.lease.pool_base, plan.lease.pool_size)
            status.or_slots, status.add_slots = run.or_slots, run.add_slots
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
        rtt_seconds=worker.rtt,
        counters=worker.counters,
    )


def _waiting(seat: Seat) -> pb.WorkerStatus:
    return pb.WorkerStatus(member=_member(Worker(seat.applicant, 0.0)), state="joined")
