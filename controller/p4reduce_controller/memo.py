# SPDX-License-Identifier: Apache-2.0
"""A job as it stands on disk, and how it ended, and back. What a record does not tell is lost with the controller.

A record holds credentials: whoever can read the state file can act for its workers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from p4reduce import constants
from p4reduce.core.config import RetransmissionPolicy
from p4reduce.errors import ConfigError
from p4reduce_controller.admission import MODES, Applicant, RefusedError, check_job_name
from p4reduce_controller.entries import Epoch, Place
from p4reduce_controller.hosts import Host, Hosts
from p4reduce_controller.model import Fence, Job, Order, OrderKind, Path, Reason, Run, Worker, WorkerState
from p4reduce_controller.pools import Lease
from p4reduce_controller.states import LIVE, OVER, State

VERSION = 1
MAX_MESSAGE = 4000
"""Characters of an end's message that are kept."""


class MemoError(ValueError):
    """A record that makes no sense, or no sense any more. The text says why."""


def memo(job: Job, endings: Sequence[Epoch]) -> dict[str, Any]:
    """The record of a live job, ready for JSON. `endings`: epochs of its name that the switch still holds part of."""
    run = job.run
    if run is None:
        raise ValueError(f"job {job.name!r} has no membership to remember")
    return {
        "version": VERSION,
        "job": job.name,
        "world_size": job.world_size,
        "incarnation": job.incarnation,
        "state": job.state.name,
        "mode": job.mode,
        "ring": job.ring,
        "path": job.path.name,
        "path_reason": job.path_reason,
        "policy": asdict(job.policy),
        "policy_changed": job.policy_changed,
        "fallbacks": dict(job.fallbacks),
        "promotions": job.promotions,
        "epoch": run.epoch,
        "present": run.present,
        "order": _order(run.order),
        "running": _order(run.running),
        "plan": None if run.plan is None else _epoch(run.plan),
        "or_slots": run.or_slots,
        "add_slots": run.add_slots,
        "counted": run.counted,
        "delay": run.delay,
        "workers": [_worker(run.workers[rank]) for rank in sorted(run.workers)],
        "endings": [_epoch(plan) for plan in endings],
    }


def recall(record: Mapping[str, Any], hosts: Hosts | None, now: float) -> tuple[Job, list[Epoch]]:
    """The job of a record, and its epochs that were ending. Every worker counts as heard from `now`.

    MemoError for what `memo` would never write, and when the hosts file no longer agrees with the record.
    """
    try:
        if record["version"] != VERSION:
            raise MemoError(f"it has version {record['version']!r}, not {VERSION}")
        job = _job(record)
        workers = {worker.applicant.rank: worker for worker in (_recall(job, w, hosts, now) for w in record["workers"])}
        if sorted(workers) != list(range(job.world_size)):
            raise MemoError(f"it holds {len(workers)} of {job.world_size} ranks")
        plan = None if record["plan"] is None else _plan(record["plan"], job.world_size)
        job.run = Run(
            _number(record["epoch"]),
            _number(record["present"]),
            _recall_order(record["order"]),
            _recall_order(record["running"]),
            plan,
            _number(record["or_slots"]),
            _number(record["add_slots"]),
            workers,
            counted=_count(record["counted"]),
            delay=_seconds(record["delay"]),
            settled=now,
        )
        endings = [_plan(ending, len(ending["places"])) for ending in record["endings"]]
    except MemoError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, ConfigError, RefusedError) as error:
        raise MemoError(f"{type(error).__name__}: {error}") from None
    _check(job, job.run)
    return job, endings


def end_memo(job: Job, fence: Fence, state: State) -> dict[str, Any]:
    """How a membership ended, ready for JSON."""
    run = job.run
    if run is None:
        raise ValueError(f"job {job.name!r} has no membership that could have ended")
    return {
        "version": VERSION,
        "job": job.name,
        "epoch": run.epoch,
        "world_size": job.world_size,
        "incarnation": job.incarnation,
        "mode": job.mode,
        "ring": job.ring,
        "state": state.name,
        "reason": fence.reason.name,
        "message": fence.message[:MAX_MESSAGE],
        "ranks": list(fence.ranks),
        "bucket": fence.bucket,
    }


def recall_end(record: Mapping[str, Any]) -> tuple[Job, int, Fence]:
    """The job of an end's record, without its ranks; the epoch that named the membership; the fence. MemoError."""
    try:
        check_job_name(record["job"])
        state, epoch = State[record["state"]], _number(record["epoch"])
        if record["version"] != VERSION or state not in OVER:
            raise MemoError(f"version {record['version']!r} or state {state.name} cannot be")
        ranks = tuple(_number(rank) for rank in record["ranks"])
        fence = Fence(Reason[record["reason"]], _text(record["message"]), ranks, _count(record["bucket"]))
        job = Job(
            record["job"],
            _world(record, ranks),
            _number(record["incarnation"]),
            state,
            reason=fence.message,
            mode=record["mode"],
            ring=bool(record["ring"]),
        )
    except MemoError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RefusedError) as error:
        raise MemoError(f"{type(error).__name__}: {error}") from None
    return job, epoch, fence


_MUST: dict[State, tuple[OrderKind, OrderKind, bool]] = {
    State.SWITCH: (OrderKind.RUN_SWITCH, OrderKind.RUN_SWITCH, True),
    State.CUTTING: (OrderKind.STOP, OrderKind.RUN_SWITCH, False),
    State.RING: (OrderKind.RUN_RING, OrderKind.RUN_RING, False),
    State.PREPARING: (OrderKind.RUN_RING, OrderKind.RUN_RING, True),
    State.TRYING: (OrderKind.TRIAL, OrderKind.RUN_RING, True),
    State.HOLDING: (OrderKind.HOLD, OrderKind.RUN_RING, True),
}
"""Kinds of the current order and of the path's order, and whether there is a lease."""


def _check(job: Job, run: Run) -> None:
    """MemoError when the parts of a record contradict each other."""
    found = (run.order.kind, run.running.kind, run.plan is not None)
    if job.state in _MUST and found != _MUST[job.state]:
        raise MemoError(f"state {job.state.name} does not go with orders {found[0].name} and {found[1].name}")
    if job.state is State.SWITCH and run.plan is not None and run.plan.number != run.present:
        raise MemoError(f"it is in epoch {run.present}, but leases for {run.plan.number}")
    if job.state is not State.LEAVING and any(w.state is WorkerState.LEFT for w in run.workers.values()):
        raise MemoError(f"a rank has left in state {job.state.name}")


def _world(record: Mapping[str, Any], ranks: Sequence[int] = ()) -> int:
    """The world size. MemoError when that, the mode, or one of the `ranks` cannot be."""
    world: int = _number(record["world_size"])
    if not 1 <= world <= constants.MAX_WORKERS or record["mode"] not in MODES or max(ranks, default=0) >= world:
        raise MemoError(f"world size {world}, mode {record['mode']!r} or ranks {list(ranks)} cannot be")
    return world


def _job(record: Mapping[str, Any]) -> Job:
    check_job_name(record["job"])
    state = State[record["state"]]
    if state not in LIVE:
        raise MemoError(f"state {state.name} cannot be")
    return Job(
        record["job"],
        _world(record),
        _number(record["incarnation"]),
        state,
        mode=record["mode"],
        ring=bool(record["ring"]),
        path=Path[record["path"]],
        path_reason=_text(record["path_reason"]),
        policy=RetransmissionPolicy(**record["policy"]),
        policy_changed=bool(record["policy_changed"]),
        fallbacks=Counter({_text(reason): _count(count) for reason, count in record["fallbacks"].items()}),
        promotions=_count(record["promotions"]),
    )


def _number(value: Any, bits: int = 32) -> int:
    """Of as many bits as the message has in which it is told: one record must not keep all others from being shown."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << bits:
        raise MemoError(f"{value!r} is not a number from 0 to 2^{bits} - 1")
    return value


def _count(value: Any) -> int:
    return _number(value, 64)


def _text(value: Any) -> str:
    """What a message can hold: no half of a surrogate pair. UnicodeError, which is a ValueError."""
    text = str(value)
    text.encode()
    return text


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise MemoError(f"{value!r} is not a number of seconds")
    return float(value)


def _order(order: Order) -> dict[str, Any]:
    return asdict(order) | {"kind": order.kind.name}


def _recall_order(record: Mapping[str, Any]) -> Order:
    return Order(
        _count(record["number"]),
        OrderKind[record["kind"]],
        _number(record["epoch"]),
        _count(record["first_bucket"]),
        _number(record["or_slots"]),
        _number(record["add_slots"]),
        _text(record["why"]),
    )


def _epoch(plan: Epoch) -> dict[str, Any]:
    return {
        "number": plan.number,
        "lease": asdict(plan.lease) | {"rids": list(plan.lease.rids)},
        "places": [asdict(place) for place in plan.places],
    }


def _plan(record: Mapping[str, Any], world: int) -> Epoch:
    lease = Lease(**{**record["lease"], "rids": tuple(_number(rid) for rid in record["lease"]["rids"])})
    for value in (lease.pool_base, lease.pool_size, lease.group, lease.stats):
        _number(value)
    places = tuple(Place(**{key: _count(value) for key, value in place.items()}) for place in record["places"])
    if not len(lease.rids) == len(places) == world:
        raise MemoError(f"an epoch of {world} ranks has {len(places)} places and {len(lease.rids)} rids")
    return Epoch(_number(record["number"]), lease, places)


def _worker(worker: Worker) -> dict[str, Any]:
    applicant = worker.applicant
    host = applicant.host
    return {
        "rank": applicant.rank,
        "host": {"name": host.name, "ip": host.ip, "mac": host.mac, "port": host.port},
        "udp_port": applicant.udp_port,
        "receive_frames": applicant.receive_frames,
        "wait_seconds": applicant.wait_seconds,
        "nonce": applicant.nonce.hex(),
        "slots_min": applicant.slots_min,
        "slots_want": applicant.slots_want,
        "credential": worker.credential.hex(),
        "left": worker.state is WorkerState.LEFT,
        "submitted": worker.submitted,
        "completed": worker.completed,
    }


def _recall(job: Job, record: Mapping[str, Any], hosts: Hosts | None, now: float) -> Worker:
    said = record["host"]
    host = Host(_text(said["name"]), _text(said["ip"]), _text(said["mac"]), _number(said["port"]))
    if hosts is not None:
        known = hosts.by_ip(host.ip)
        if known is None or (known.mac, known.port) != (host.mac, host.port):
            raise MemoError(f"host {host.name} ({host.ip}) is not on port {host.port} any more, says {hosts.source}")
        host = known
    applicant = Applicant(
        job.name,
        job.world_size,
        _number(record["rank"]),
        job.incarnation,
        host,
        _number(record["udp_port"]),
        _number(record["receive_frames"]),
        _seconds(record["wait_seconds"]),
        job.mode,
        job.ring,
        bytes.fromhex(record["nonce"]),
        _number(record["slots_min"]),
        _number(record["slots_want"]),
    )
    return Worker(
        applicant,
        now,
        WorkerState.LEFT if record["left"] else WorkerState.JOINED,
        submitted=_count(record["submitted"]),
        completed=_count(record["completed"]),
        credential=bytes.fromhex(record["credential"]),
        known=False,
    )
