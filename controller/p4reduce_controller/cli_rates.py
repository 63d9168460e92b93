# SPDX-License-Identifier: Apache-2.0
"""What `p4reducectl top` shows, from two status documents: rates are differences over the controller's own time."""

from __future__ import annotations

from typing import Any

from p4reduce_controller.cli_documents import is_over, present

Document = dict[str, Any]
FRAMES = "frames_sent"
RESENT = "retransmissions"
ELEMENTS = "elements"


def summary(now: Document, before: Document | None) -> Document:
    """One line of `top --json`. Rates are None without an earlier document that they can be compared with."""
    seconds = 0.0
    if before is not None:
        # Smaller: the controller was restarted, and all its counting began anew.
        seconds = max(0.0, now["uptime_seconds"] - before["uptime_seconds"])
    earlier = {} if before is None or not seconds else {_identity(job): job for job in before["jobs"]}
    total = now["switch"]["slots"]
    return {
        "server_version": now["server_version"],
        "uptime_seconds": now["uptime_seconds"],
        "interval_seconds": seconds or None,
        "switch": now["switch"],
        "slots": {"total": total, "leased": sum(job["pool_size"] for job in now["jobs"])},
        "jobs": [_row(job, earlier.get(_identity(job)), seconds) for job in now["jobs"]],
    }


def _identity(job: Document) -> tuple[object, ...]:
    # The epoch that names the membership: another one means other workers, whose counts begin at 0.
    return job["job"], job["incarnation"], job["epoch"]


def _row(job: Document, before: Document | None, seconds: float) -> Document:
    if is_over(job):
        before = None  # there is nothing to compare with: its numbers stand still
    frames = _rise(job, before, FRAMES)
    resent = _rise(job, before, RESENT)
    buckets = None
    if before is not None:
        buckets = _positive(_completed(job) - _completed(before))
    elements = _rise(job, before, ELEMENTS)
    return {
        "job": job["job"],
        "state": job["state"],
        "mode": job["mode"],
        "path": job["path"],
        "why": job["reason"] or job["path_reason"],
        "ranks": present(job),
        "world_size": job["world_size"],
        "pool_base": job["pool_base"],
        "pool_size": job["pool_size"],
        "buckets": _completed(job),
        "buckets_per_second": _rate(buckets, seconds),
        "frames_per_second": _rate(frames, seconds),
        "elements_per_second": _rate(elements, seconds * max(1, len(job["workers"]))),
        "retransmission_percent": 100.0 * resent / frames if frames and resent is not None else None,
        "rtt_seconds": None if is_over(job) else max((w["rtt_seconds"] for w in job["workers"]), default=0.0) or None,
        "fallbacks": sum(job["fallbacks"].values()),
        "promotions": job["promotions"],
    }


def _completed(job: Document) -> int:
    return min((worker["completed"] for worker in job["workers"]), default=0)


def _rise(job: Document, before: Document | None, name: str) -> int | None:
    """How much a counter has grown, over all ranks that say so."""
    if before is None:
        return None
    earlier = {worker["rank"]: worker["counters"] for worker in before["workers"]}
    rises = [
        worker["counters"][name] - earlier.get(worker["rank"], {}).get(name, 0)
        for worker in job["workers"]
        if name in worker["counters"]
    ]
    return _positive(sum(rises)) if rises else None


def _positive(rise: int) -> int | None:
    return rise if rise >= 0 else None


def _rate(rise: int | None, seconds: float) -> float | None:
    return None if rise is None or not seconds else rise / seconds
