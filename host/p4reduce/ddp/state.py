# SPDX-License-Identifier: Apache-2.0
"""What a DDP communication hook needs between calls: the way to the switch, the group of the ring, the first error."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.optim.optimizer import register_optimizer_step_pre_hook

from p4reduce.config import Settings
from p4reduce.ddp.completer import Ledger, OrderedCompleter, Pending, WaitForMean
from p4reduce.ddp.ring import TorchRing
from p4reduce.errors import ConfigError, StalledError, UsageError

logger = logging.getLogger("p4reduce.ddp")

Mode = Literal["auto", "require", "off"]
_MODES = ("auto", "require", "off")
_names_given = itertools.count()
"""Numbers the jobs named here, since every state of a process needs a job of its own."""
DEFAULT_TIMEOUT = 300.0
"""Seconds until a bucket counts as lost: the last net. The job's own deadline is shorter and names who is missing."""
RING_TIMEOUT = 60.0
"""Seconds of one collective of the fallback: like the job's own deadline, a rank that is later is missed."""


class SumsBuckets(Protocol):
    """The part of `p4reduce.Communicator` the hook needs."""

    @property
    def world_size(self) -> int:
        """Number of ranks summed over."""

    def allreduce_async(
        self,
        array: npt.NDArray[np.float32],
        op: Literal["sum", "mean"] = ...,
        out: npt.NDArray[np.float32] | None = ...,
    ) -> Future[npt.NDArray[np.float32]]:
        """Start reducing `array` into `out`."""

    def stats(self) -> Any:
        """Counters, as a mapping or a dataclass."""

    def close(self) -> None:
        """Leave the job."""


class P4ReduceState:
    """State of `allreduce_hook` for one DistributedDataParallel model.

    float32 buckets in CPU memory go to the job: through the switch, or, where that fails, over torch.distributed from
    the same integers, to the same bits. Every other bucket (another dtype, a CUDA device, sparse gradients), every
    bucket in mode "off", and every bucket of a group whose size is not that of the job, is summed by torch.distributed
    as it is, in a gloo group of its own. Which way a bucket goes depends on nothing but its dtype, layout and device,
    so all ranks decide alike. Both give the mean, taken after the sum; float16 is summed as float32, since a float16
    sum overflows early.

    Args:
        comm: where float32 buckets go. None only in mode "off".
        process_group: the group the DDP model was built with; None is the default group. Every member must construct
            its state at the same point of the program, because a group for the ring is made here.
        mode: "auto"; "require" (only through `from_env`: no fallback to torch.distributed, an error instead); "off".
        timeout: seconds until a bucket counts as lost (StalledError on the switch path).
        own_comm: close `comm` together with the state.

    Errors: UsageError when torch.distributed is not initialised, or when `comm` is missing. What goes wrong later in a
    reduction is never raised inside backward(); see `allreduce_hook`.
    """

    def __init__(
        self,
        comm: SumsBuckets | None,
        process_group: dist.ProcessGroup | None = None,
        *,
        mode: Mode = "auto",
        timeout: float = DEFAULT_TIMEOUT,
        own_comm: bool = False,
    ) -> None:
        if mode != "off" and comm is None:
            raise UsageError("P4ReduceState needs a communicator unless its mode is 'off'")
        self._set_up(comm, new_ring_group(process_group, timeout), mode, timeout, own_comm)

    def _set_up(
        self, comm: SumsBuckets | None, ring: dist.ProcessGroup, mode: Mode, timeout: float, own_comm: bool
    ) -> None:
        self.mode = mode
        self.timeout = timeout
        self.world_size = dist.get_world_size(ring)
        self._comm = comm
        self._own_comm = own_comm
        self._ring_group: dist.ProcessGroup | None = ring
        self._switch_usable = mode != "off" and comm is not None and comm.world_size == self.world_size
        if mode != "off" and comm is not None and not self._switch_usable:
            logger.warning(
                "the job has %d ranks but the process group %d: every bucket takes the ring path",
                comm.world_size,
                self.world_size,
            )
        self._ledger = Ledger()
        self._completer = OrderedCompleter(self._ledger)
        self._step_hook = register_optimizer_step_pre_hook(_raise_before_step(self._ledger))
        self._closed = False
        # Without close(): end the thread and unhook the optimizers when the state is collected or the process ends.
        self._finalizer = weakref.finalize(self, _shut_down, self._completer, self._step_hook)
        logger.info("p4reduce hook: mode=%s world_size=%d timeout=%gs", mode, self.world_size, timeout)

    @classmethod
    def from_env(
        cls,
        *,
        process_group: dist.ProcessGroup | None = None,
        mode: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        **overrides: Any,
    ) -> P4ReduceState:
        """Join the job that the environment describes (P4REDUCE_*, and what torchrun sets) and make its state.

        Call it on every rank after `init_process_group`. Rank and world size are those of the group. `overrides`
        go to `p4reduce.connect`. Without a job name (argument `job`, P4REDUCE_JOB, configuration file) rank 0 tells the
        others one: torchrun's run id, which stays the same when torchrun restarts the workers, so that the controller
        can tell the old ones from the new; where that is the word "none", a new unique name.

        Errors: ConfigError for the mode, and whatever `p4reduce.connect` raises.
        """
        chosen = _resolve_mode(mode)
        ring = new_ring_group(process_group, timeout)
        comm: SumsBuckets | None = None
        fallback: TorchRing | None = None
        try:
            if chosen != "off":
                overrides.setdefault("rank", dist.get_rank(ring))
                overrides.setdefault("world_size", dist.get_world_size(ring))
                if _job_is_unnamed(overrides):
                    overrides["job"] = _shared_job_name(ring)
                if chosen == "auto":
                    # Up front: once there is trouble it is too late to gather. gloo, since the job's integers are in
                    # CPU memory; apart from `ring`, since the job's thread and the hook's must not interleave.
                    fallback = TorchRing.from_group(process_group, min(timeout, RING_TIMEOUT), backend="gloo")
                comm = _connect(mode=chosen, ring=fallback, **overrides)
        except BaseException:
            if fallback is not None:
                fallback.close()
            dist.destroy_process_group(ring)
            raise
        state = cls.__new__(cls)
        state._set_up(comm, ring, chosen, timeout, own_comm=True)
        return state

    # -- the hook --

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start reducing a bucket in place. Use `allreduce_hook`; it documents how errors show."""
        if isinstance(cast(object, bucket), tuple):
            raise UsageError("torch.compile's 'python_reducer' passes no buckets: choose another value of optimize_ddp")
        if self._closed:
            raise UsageError("this P4ReduceState is closed or a copy: make a new one with P4ReduceState.from_env()")
        started = time.perf_counter()
        last = bucket.is_last()
        step = self._ledger.begin(last)
        if self._ledger.error_step < step:
            self._ledger.check()
        buffer = bucket.buffer()
        path = "switch" if self._switch_usable and _switch_can_reduce(buffer) else "ring"
        future: torch.futures.Future[torch.Tensor] = (
            torch.futures.Future(devices=[buffer.device]) if buffer.is_cuda else torch.futures.Future()
        )
        try:
            wait = self._start_switch(buffer) if path == "switch" else self._start_ring(buffer)
        except Exception as error:  # raised out of a hook it would leave DDP unusable
            wait = _raiser(error)
        now = time.perf_counter()
        self._ledger.submitted(path, _size(buffer), now - started)
        self._completer.put(Pending(buffer, future, wait, step, last, now))
        return future

    def _start_switch(self, buffer: torch.Tensor) -> WaitForMean:
        view = buffer.detach().numpy()
        reduction = cast(SumsBuckets, self._comm).allreduce_async(view, op="mean", out=view)
        timeout = self.timeout

        def wait() -> None:
            try:
                reduction.result(timeout)
            except FutureTimeoutError:
                if reduction.done():
                    raise
                raise StalledError(f"no sum of a bucket with {view.size} elements within {timeout:g} s") from None

        return wait

    def _start_ring(self, buffer: torch.Tensor) -> WaitForMean:
        # The collective starts here, in the order of the hook calls, which is the same on all ranks; only the waiting
        # is left to the completing thread. So buckets overlap, and one that waits for the switch holds up no other.
        total = buffer.float() if buffer.dtype == torch.float16 else buffer
        work = dist.all_reduce(total, group=self._ring_group, async_op=True)
        if work is None:
            raise UsageError("this rank is not a member of the process group of its P4ReduceState")
        world_size, timeout = self.world_size, timedelta(seconds=self.timeout)

        def wait() -> None:
            work.wait(timeout)
            total.div_(world_size)
            if total is not buffer:
                buffer.copy_(total)

        return wait

    # -- what the user calls --

    @property
    def error(self) -> Exception | None:
        """The first error of a reduction, or None. It stays: a job that failed cannot go on."""
        return self._ledger.error

    def check(self) -> None:
        """Raise the first error of a reduction, if there was one. For optimizers that are not torch.optim ones."""
        self._ledger.check()

    def stats(self) -> dict[str, Any]:
        """Counters since construction, as plain JSON values.

        buckets_*, bytes_* (of gradients) per path; steps (backward passes); submit_seconds spent inside the hook;
        reduce_seconds from submission to result, summed over buckets that overlap; wait_seconds from the submission of
        a pass's last bucket to its result, which is what the reduction adds to backward(); error; comm: what the
        communicator counts.
        """
        ledger = self._ledger
        return {
            "mode": self.mode,
            "world_size": self.world_size,
            "steps": ledger.steps,
            "buckets_switch": ledger.buckets["switch"],
            "buckets_ring": ledger.buckets["ring"],
            "bytes_switch": ledger.bytes["switch"],
            "bytes_ring": ledger.bytes["ring"],
            "submit_seconds": ledger.submit_seconds,
            "reduce_seconds": ledger.reduce_seconds,
            "wait_seconds": ledger.wait_seconds,
            "error": None if ledger.error is None else f"{type(ledger.error).__name__}: {ledger.error}",
            "comm": _as_dict(self._comm.stats()) if self._comm is not None else {},
        }

    def close(self) -> None:
        """Leave the job (when the state joined it), end the thread, unhook the optimizers. May be called again."""
        if self._closed:
            return
        self._closed = True
        if self._comm is not None and self._own_comm:
            # First the communicator: what is still under way fails, and the thread has nothing left to wait for.
            self._comm.close()
        self._finalizer()
        if self._ring_group is not None and dist.is_initialized():
            dist.destroy_process_group(self._ring_group)
        self._ring_group = None

    def __enter__(self) -> P4ReduceState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- copies --

    def __getstate__(self) -> dict[str, Any]:
        logger.warning("the communicator and the process group are left out of a saved or copied P4ReduceState")
        return {"mode": self.mode, "timeout": self.timeout, "world_size": self.world_size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        logger.warning("a restored P4ReduceState cannot reduce: make a new one with P4ReduceState.from_env()")
        self.mode = state["mode"]
        self.timeout = state["timeout"]
        self.world_size = state["world_size"]
        self._comm = None
        self._own_comm = False
        self._ring_group = None
        self._switch_usable = False
        self._ledger = Ledger()
        self._closed = True


def new_ring_group(process_group: dist.ProcessGroup | None, timeout: float) -> dist.ProcessGroup:
    """Make the ring path's gloo group with the members of `process_group`, all of which must call this.

    A group of its own, because the user's collectives on theirs must not interleave with ours.
    """
    if not dist.is_initialized():
        raise UsageError("call torch.distributed.init_process_group() before making a P4ReduceState")
    limit = timedelta(seconds=timeout)
    if process_group is None:
        group = dist.new_group(backend="gloo", timeout=limit)
    else:
        members = dist.get_process_group_ranks(process_group)
        group = dist.new_group(members, backend="gloo", timeout=limit, use_local_synchronization=True)
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError("this rank is not a member of the process group given to P4ReduceState")
    return group


def _job_is_unnamed(arguments: Mapping[str, Any]) -> bool:
    """Whether nobody chose a job name. torchrun's run id is no choice: it may be the word "none"."""
    source = Settings.resolve(arguments).sources["job"]
    return source in ("default", "environment TORCHELASTIC_RUN_ID")


def _shared_job_name(ring: dist.ProcessGroup) -> str:
    """A job name for this call, the same on all ranks of the group: rank 0 makes it up."""
    name: list[str | None] = [None]
    if dist.get_rank(ring) == 0:
        number = next(_names_given)
        run = os.environ.get("TORCHELASTIC_RUN_ID") or "none"
        name[0] = (
            f"train-{uuid.uuid4().hex[:16]}" if run == "none" else f"{run[:100]}-{number}" if number else run[:100]
        )
    dist.broadcast_object_list(name, src=dist.get_global_rank(ring, 0), group=ring)
    if name[0] is None:
        raise UsageError("rank 0 of the process group sent no job name")
    return name[0]


def _connect(**arguments: Any) -> SumsBuckets:
    # Late, so that a state in mode "off" needs neither grpc nor a socket.
    import p4reduce

    return cast(SumsBuckets, p4reduce.connect(**arguments))


def _resolve_mode(mode: str | None) -> Mode:
    source = "argument mode"
    if mode is None:
        mode, source = os.environ.get("P4REDUCE_MODE") or "auto", "environment variable P4REDUCE_MODE"
    if mode not in _MODES:
        raise ConfigError(f"{source} is {mode!r}: the hook knows {', '.join(map(repr, _MODES))}")
    return cast(Mode, mode)


def _switch_can_reduce(buffer: torch.Tensor) -> bool:
    return buffer.dtype == torch.float32 and buffer.layout == torch.strided and buffer.device.type == "cpu"


def _size(buffer: torch.Tensor) -> int:
    stored = buffer._values() if buffer.is_sparse else buffer
    return stored.numel() * stored.element_size()


def _raiser(error: Exception) -> WaitForMean:
    def wait() -> None:
        raise error

    return wait


def _raise_before_step(ledger: Ledger) -> Callable[..., None]:
    def check_reduction(optimizer: object, args: object, kwargs: object) -> None:  # noqa: ARG001 (torch's signature)
        ledger.check()

    return check_reduction


def _shut_down(completer: OrderedCompleter, step_hook: Any) -> None:
    step_hook.remove()
    completer.stop()


def _as_dict(stats: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(stats) and not isinstance(stats, type):
        return dataclasses.asdict(stats)
    return dict(cast(Mapping[str, Any], stats))
