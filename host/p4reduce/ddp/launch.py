# SPDX-License-Identifier: Apache-2.0
"""From the environment to a job: modes, job names, process groups."""

from __future__ import annotations

import itertools
import os
import socket
import uuid
import zlib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal, cast

import torch.distributed as dist

from p4reduce.config import Settings
from p4reduce.ddp.ring import TorchRing
from p4reduce.ddp.ways import SumsBuckets
from p4reduce.errors import ConfigError, MismatchError, UsageError

Mode = Literal["auto", "require", "ring", "off"]
_MODES = ("auto", "require", "ring", "off")
RING_TIMEOUT = 60.0
"""Seconds of one collective of the fallback: like the job's own deadline, a rank that is later is missed."""
_names_given = itertools.count()
"""Numbers the jobs named here, since every state of a process needs a job of its own."""


def new_plain_group(process_group: dist.ProcessGroup | None, timeout: float) -> dist.ProcessGroup:
    """A group with the members of `process_group` for buckets as they are; all members must call this.

    A group of its own, because the user's collectives on theirs must not interleave with ours. Buckets in CPU memory
    take gloo, those on a CUDA device NCCL where the process group has it.
    """
    model_group = group_of_model(process_group)
    limit = timedelta(seconds=timeout)
    nccl = "nccl" in dist.get_backend_config(model_group)
    backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
    if process_group is None:
        group = dist.new_group(backend=backend, timeout=limit)
    else:
        members = dist.get_process_group_ranks(model_group)
        group = dist.new_group(members, backend=backend, timeout=limit, use_local_synchronization=True)
    return cast(dist.ProcessGroup, group)


def group_of_model(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The model's process group, of which this rank must be a member (UsageError).

    In mode "off" it carries the buckets, too: the hook's collectives are where DDP's own would be, and as fast. A
    second group would have connections and threads of its own, which nothing else keeps warm.
    """
    if not dist.is_initialized():
        raise UsageError("call torch.distributed.init_process_group() before making a P4ReduceState")
    group = dist.group.WORLD if process_group is None else process_group
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise UsageError("this rank is not a member of the process group given to P4ReduceState")
    return group


def join_job(
    group: dist.ProcessGroup,
    process_group: dist.ProcessGroup | None,
    mode: Mode,
    timeout: float,
    arguments: dict[str, Any],
) -> SumsBuckets:
    """Join a job with the ranks of `group`. `arguments` are for `p4reduce.connect`."""
    arguments.setdefault("rank", dist.get_rank(group))
    arguments.setdefault("world_size", dist.get_world_size(group))
    if _job_is_unnamed(arguments):
        arguments["job"] = _shared_job_name(group)
    _agree_on_incarnation(group, arguments)
    ring: TorchRing | None = None
    if mode in ("auto", "ring"):
        # Up front: once there is trouble it is too late to gather. gloo, since the job's integers are in CPU memory;
        # apart from `group`, since the job's thread and the hook's must not interleave.
        ring = TorchRing.from_group(process_group, min(timeout, RING_TIMEOUT), backend="gloo")
    try:
        # Late, so that a state in mode "off" needs neither grpc nor a socket.
        import p4reduce

        return cast(SumsBuckets, p4reduce.connect(mode="off" if mode == "ring" else mode, ring=ring, **arguments))
    except BaseException:
        if ring is not None:
            ring.close()
        raise


def resolve_mode(mode: str | None) -> Mode:
    """The mode from the argument, the environment, or "auto". ConfigError names the source of a bad one."""
    source = "argument mode"
    if mode is None:
        mode, source = os.environ.get("P4REDUCE_MODE") or "auto", "environment variable P4REDUCE_MODE"
    if mode not in _MODES:
        raise ConfigError(f"{source} is {mode!r}: the hook knows {', '.join(map(repr, _MODES))}")
    return cast(Mode, mode)


def _job_is_unnamed(arguments: Mapping[str, Any]) -> bool:
    """Whether nobody chose a job name. torchrun's run id is no choice: it may be the word "none"."""
    source = Settings.resolve(arguments).sources["job"]
    return source in ("default", "environment TORCHELASTIC_RUN_ID")


def _agree_on_incarnation(group: dist.ProcessGroup, arguments: dict[str, Any]) -> None:
    """Restarts of all hosts together, where torchrun counts them, and each of its agents for itself: they differ.

    Chosen by somebody, it stays, and must be the same on all ranks (MismatchError); every rank takes part nevertheless.
    What this cannot know: that torchrun has replaced an agent by one that counts from 0 again.
    """
    settings = Settings.resolve(arguments)
    counted = settings.sources["incarnation"] == "environment TORCHELASTIC_RESTART_COUNT"
    host = os.environ.get("GROUP_RANK") or socket.gethostname()
    said: list[tuple[bool, str, int]] = [(False, "", 0)] * dist.get_world_size(group)
    dist.all_gather_object(said, (counted, host, settings.incarnation), group=group)
    if all(counts for counts, _, _ in said):
        restarts: dict[str, int] = {}
        for _, name, count in said:
            restarts[name] = max(count, restarts.get(name, 0))
        arguments["incarnation"] = sum(restarts.values())
    elif len({(counts, None if counts else number) for counts, _, number in said}) > 1:
        numbers = ", ".join(
            f"rank {rank}: {number}{' (counted by torchrun)' if counts else ''}"
            for rank, (counts, _, number) in enumerate(said)
        )
        raise MismatchError(
            f"the incarnation must be chosen on all ranks, and the same, or on none: {numbers}",
            job=settings.job,
            ranks=tuple(range(len(said))),
        )


def _shared_job_name(group: dist.ProcessGroup) -> str:
    """A job name for this call, the same on all ranks of the group: rank 0 makes it up."""
    name: list[str | None] = [None]
    if dist.get_rank(group) == 0:
        number = next(_names_given)
        run = os.environ.get("TORCHELASTIC_RUN_ID") or "none"
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) < dist.get_world_size():
            # Other ranks may be another job of the same run.
            run = run if run == "none" else f"{run[:80]}-{zlib.crc32(repr(ranks).encode()):08x}"
        name[0] = (
            f"train-{uuid.uuid4().hex[:16]}" if run == "none" else f"{run[:100]}-{number}" if number else run[:100]
        )
    dist.broadcast_object_list(name, src=dist.get_global_rank(group, 0), group=group)
    if name[0] is None:
        raise UsageError("rank 0 of the process group sent no job name")
    return name[0]
