# SPDX-License-Identifier: Apache-2.0
"""The service's messages as plain data: what `--json` prints and the tables show. docs/operations.md lists the keys."""

from __future__ import annotations

from typing import Any

from p4reduce.proto import controller_pb2 as pb
from p4reduce_controller.states import OVER

_PATHS = {pb.PATH_SWITCH: "switch", pb.PATH_RING: "ring"}
_OVER = {state.value for state in OVER}
POLICY_FIELDS = (
    "initial_seconds",
    "min_seconds",
    "max_seconds",
    "deadline_seconds",
    "early_resend",
    "silent_seconds",
    "fallback_seconds",
    "window",
)


def status(reply: pb.StatusReply) -> dict[str, Any]:
    """Controller, switch and jobs; the names are the protocol's."""
    return {
        "server_version": reply.server_version,
        "uptime_seconds": reply.uptime_seconds,
        "switch": switch(reply.switch),
        "jobs": [job(one) for one in reply.jobs],
    }


def switch(found: pb.SwitchStatus) -> dict[str, Any]:
    """One switch."""
    return {
        "name": found.name,
        "address": found.address,
        "device_id": found.device_id,
        "connected": found.connected,
        "connected_seconds": found.connected_seconds,
        "primary": found.primary,
        "profile": found.profile,
        "slots": found.slots,
        "drained": found.drained,
        "trouble": found.trouble,
        "guarded": found.guarded,
        "refused": found.refused,
    }


def job(found: pb.JobStatus) -> dict[str, Any]:
    """One job with all its ranks. `path` is "switch", "ring", or empty when it is on none."""
    return {
        "job": found.job,
        "state": found.state,
        "mode": found.mode,
        "path": _PATHS.get(found.path, ""),
        "path_reason": found.path_reason,
        "reason": found.reason,
        "ring": found.ring,
        "epoch": found.epoch,
        "present": found.present,
        "world_size": found.world_size,
        "incarnation": found.incarnation,
        "pool_base": found.pool_base,
        "pool_size": found.pool_size,
        "or_slots": found.or_slots,
        "add_slots": found.add_slots,
        "fallbacks": dict(sorted(found.fallbacks.items())),
        "promotions": found.promotions,
        "over_seconds": found.over_seconds,
        "policy": policy(found.policy),
        "counters": dict(sorted(found.counters.items())),
        "workers": [_worker(worker) for worker in found.workers],
    }


def is_over(found: dict[str, Any]) -> bool:
    """Whether a job, as `job` makes it, runs no more."""
    return found["state"] in _OVER


def present(found: dict[str, Any]) -> int:
    """Ranks of a job that are there: joined, and neither lost nor gone."""
    return 0 if is_over(found) else sum(worker["state"] in ("joined", "reporting") for worker in found["workers"])


def _worker(found: pb.WorkerStatus) -> dict[str, Any]:
    member = found.member
    return {
        "rank": member.rank,
        "host": member.host,
        "ip": member.ip,
        "udp_port": member.udp_port,
        "switch_port": member.switch_port,
        "state": found.state,
        "submitted": found.submitted,
        "completed": found.completed,
        "silent_seconds": found.silent_seconds,
        "rtt_seconds": found.rtt_seconds,
        "counters": dict(sorted(found.counters.items())),
    }


def policy(found: pb.RetransmissionPolicy) -> dict[str, Any]:
    """A retransmission policy; times in seconds."""
    return {name: getattr(found, name) for name in POLICY_FIELDS}


def pools(reply: pb.PoolsReply) -> dict[str, Any]:
    """All pools in the order of their slots."""
    found = [{"base": pool.base, "size": pool.size, "job": pool.job, "epoch": pool.epoch} for pool in reply.pools]
    return {"slots": reply.slots, "pools": found}
