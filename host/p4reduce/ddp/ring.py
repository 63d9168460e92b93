# SPDX-License-Identifier: Apache-2.0
"""The ring of torch.distributed: gloo in CPU memory, or NCCL on the group's device."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import numpy.typing as npt
import torch
import torch.distributed as dist

from p4reduce.errors import RingError, UsageError
from p4reduce.ring.base import RingIntegers, RingLevels

DEFAULT_TIMEOUT = 60.0
_POLL = 0.0002
"""Seconds between two looks at a device that computes: short against a collective, long against a look."""
_MARGIN = 1.0
"""Seconds by which the wait for a collective outlasts the timeout of the group."""
_unfinished: list[Any] = []
"""What belongs to collectives that nobody waits for any more. A process group whose last reference goes while one is
under way blocks the whole process until that has timed out, so the references stay."""


class TorchRing:
    """A `p4reduce.ring.Ring` on a process group of torch.distributed.

    gloo works in the arrays where they are. NCCL gets them through pinned memory, on a stream of its own.

    RingError carries what torch says: which connection broke, or what was waited for. When a rank dies gloo tells the
    others within moments; NCCL may end the process instead, see TORCH_NCCL_ASYNC_ERROR_HANDLING in torch's
    documentation.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float = DEFAULT_TIMEOUT, *, owned: bool = False) -> None:
        """Use `group`, in which nothing else may happen meanwhile; `from_group` makes one for the purpose.

        `timeout`: seconds of one call, after which RingError is raised. `owned`: close() destroys the group.
        Raises UsageError when this process is no member.
        """
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        if self.rank < 0:
            raise UsageError("this process is not a member of the process group")
        self.timeout = timeout
        self._owned = owned
        self._group: dist.ProcessGroup | None = group
        self._broken: str | None = None
        self._stage = _Stage() if dist.get_backend(group) == "nccl" else None
        self.device = "cpu" if self._stage is None else str(self._stage.device)

    @classmethod
    def from_group(
        cls,
        process_group: dist.ProcessGroup | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        *,
        backend: str | None = None,
    ) -> TorchRing:
        """A ring of the members of `process_group` (None: of all), on a group of its own, which close() destroys.

        All members must call this at the same point of the program, the others need not. A group of its own, because
        the user's collectives must not interleave with the ring's. `backend`: "gloo" or "nccl"; as a rule that of the
        process group, gloo unless it is NCCL. With NCCL the device is the current one.

        Raises UsageError without torch.distributed or for a process that is no member, RingError when the others do
        not come within `timeout` seconds.
        """
        if not dist.is_initialized():
            raise UsageError("call torch.distributed.init_process_group() before making a ring")
        if process_group is not None and dist.get_rank(process_group) < 0:
            raise UsageError("this process is not a member of the process group")
        backend = backend or ("nccl" if dist.get_backend(process_group) == "nccl" else "gloo")
        limit = timedelta(seconds=timeout)
        try:
            if process_group is None:
                group = dist.new_group(backend=backend, timeout=limit)
            else:
                members = dist.get_process_group_ranks(process_group)
                group = dist.new_group(members, backend=backend, timeout=limit, use_local_synchronization=True)
        except RuntimeError as error:
            raise RingError(f"no ring of torch.distributed ({backend}) within {timeout:g} s: {error}") from error
        return cls(group, timeout, owned=True)

    def max(self, values: RingLevels) -> None:
        """See Ring."""
        self._reduce(values, dist.ReduceOp.MAX)

    def sum(self, values: RingIntegers) -> None:
        """See Ring."""
        self._reduce(values, dist.ReduceOp.SUM)

    def close(self) -> None:
        """See Ring. The other ranks of gloo notice at once when no call is under way here, else at its timeout."""
        self._broken = self._broken or "this ring is closed"
        group, self._group = self._group, None
        if group is None or not self._owned:
            return
        try:
            if dist.is_initialized():
                dist.destroy_process_group(group)
        except (RuntimeError, ValueError):
            # Destroyed before, as destroy_process_group() without a group does with all of them.
            return

    def _reduce(self, values: npt.NDArray[Any], operation: Any) -> None:
        group, trouble = self._group, self._broken
        if group is None or trouble is not None:
            raise RingError(str(trouble))
        try:
            if self._stage is None:
                self._wait(_start(torch.from_numpy(values), operation, group), group)
            else:
                self._stage.reduce(values, operation, group, self.timeout)
        except (RuntimeError, ValueError) as error:
            text = str(error).strip().partition("\n")[0]
            trouble = self._broken = f"torch.distributed, rank {self.rank} of {self.size}: {text}"
        if trouble is not None:
            # Not from torch's error, nor with `group` in this frame: a traceback that somebody keeps would keep the
            # group's connections open, and the other ranks waiting.
            del group
            raise RingError(trouble)

    def _wait(self, work: dist.Work, group: dist.ProcessGroup) -> None:
        # A group of our own times out by itself, which leaves nothing under way: let it come first.
        limit = self.timeout + _MARGIN if self._owned else self.timeout
        try:
            work.wait(timedelta(seconds=limit))
        except RuntimeError:
            if not work.is_completed():
                _unfinished.append((work, group))
            raise


def _start(tensor: torch.Tensor, operation: Any, group: dist.ProcessGroup) -> dist.Work:
    work: dist.Work | None = dist.all_reduce(tensor, op=operation, group=group, async_op=True)
    if work is None:
        raise RuntimeError("this process is not a member of the group")
    return work


class _Stage:
    """Arrays on their way to a CUDA device and back."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        # The default stream would put the ring behind everything that the caller has queued there.
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._pinned = torch.empty(0, dtype=torch.uint8)
        self._there = torch.empty(0, dtype=torch.uint8)

    def reduce(self, values: npt.NDArray[Any], operation: Any, group: dist.ProcessGroup, timeout: float) -> None:
        """All-reduce in place. RuntimeError when it fails or takes longer than `timeout` seconds."""
        end = time.monotonic() + timeout
        here = torch.from_numpy(values)
        # Within it the device is the current one, too: in the runner's thread it would be the first otherwise.
        with torch.cuda.stream(self._stream):
            if values.nbytes > len(self._pinned):
                self._pinned = torch.empty(values.nbytes, dtype=torch.uint8, pin_memory=True)
                self._there = torch.empty(values.nbytes, dtype=torch.uint8, device=self.device)
            pinned = self._pinned[: values.nbytes].view(here.dtype)
            there = self._there[: values.nbytes].view(here.dtype)
            pinned.copy_(here)
            there.copy_(pinned, non_blocking=True)
            # Here wait() lets the stream wait, not this thread.
            _start(there, operation, group).wait()
            pinned.copy_(there, non_blocking=True)
            done = self._stream.record_event()
        while not done.query():
            if time.monotonic() > end:
                _unfinished.append((group, pinned, there))
                raise RuntimeError(f"a collective on {self.device} did not end within {timeout:g} s")
            time.sleep(_POLL)
        here.copy_(pinned)
