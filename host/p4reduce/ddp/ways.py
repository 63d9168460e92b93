# SPDX-License-Identifier: Apache-2.0
"""The two ways of a bucket: through the job, as integers, or through torch.distributed as it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from p4reduce.ddp.completer import Started
from p4reduce.ddp.ledger import Outcome
from p4reduce.ddp.numbers import Numbers, require_accepted
from p4reduce.ddp.residuals import Residuals
from p4reduce.ddp.staging import Arrival, Device, Scratch, arrived, device_of
from p4reduce.errors import StalledError, UsageError
from p4reduce.quantize import BLOCKS, LaneFormat

_present_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
"""What backward() computes in this thread, or None: outside of it, where join() and unused parameters take buckets, and
when it is at its end, as in the first pass of a static graph. Older versions of torch do not say."""
_ENGINE: Any = torch.autograd.Variable._execution_engine


class SumsBuckets(Protocol):
    """The part of `p4reduce.Communicator` the hook needs."""

    @property
    def world_size(self) -> int:
        """Number of ranks summed over."""

    @property
    def allreduce_async(self) -> Callable[..., Future[Any]]:
        """As `p4reduce.Communicator.allreduce_async`."""

    def stats(self) -> Any:
        """Counters, as a mapping or a dataclass."""

    def close(self) -> None:
        """Leave the job."""


class PathLabels:
    """Which path the buckets of a job took: the switch path unless the ring path has counted one more.

    Of two buckets that complete at the same moment on different paths the labels may be exchanged; the numbers stay
    right. Other users of the same communicator count as well.
    """

    def __init__(self, comm: SumsBuckets) -> None:
        self._comm = comm
        self._handed_in = 0
        self._completed = 0
        self._doubtful = 0
        """So many buckets, from the first, may be the ring's. Asking for the counters costs something; the others need
        not."""
        self._before = self._counted()
        self._labelled = 0

    def hand_in(self) -> None:
        """A bucket is about to be handed in."""
        self._handed_in += 1
        self._look()

    def complete(self) -> Literal["switch", "ring"]:
        """The path of the bucket that has just been completed. Buckets complete in the order of hand_in()."""
        self._look()
        self._completed += 1
        if self._completed > self._doubtful or self._counted() - self._before <= self._labelled:
            return "switch"
        self._labelled += 1
        return "ring"

    def _look(self) -> None:
        if getattr(self._comm, "path", "switch") == "ring":
            self._doubtful = self._handed_in

    def _counted(self) -> int:
        stats = self._comm.stats()
        ring = stats.get("ring") if isinstance(stats, dict) else None
        return int(ring["buckets"] - ring["compared"]) if ring else 0


@dataclass(slots=True)
class _Reduction:
    """One bucket in the job."""

    buffer: torch.Tensor
    host: torch.Tensor
    arguments: dict[str, Any]
    view: npt.NDArray[np.float32]
    arrival: Arrival
    residual: torch.Tensor | None = None


class JobWay:
    """Buckets to the job: float32 where it lies, everything else through float32 vectors in CPU memory."""

    def __init__(self, comm: SumsBuckets, numbers: Numbers, timeout: float) -> None:
        """`timeout`: seconds until a bucket counts as lost.

        UsageError: the communicator lacks what `numbers` need, or has too many ranks for so few bits.
        """
        LaneFormat(numbers.lane_bits, comm.world_size).require_usable()
        self.residuals = Residuals()
        self._comm = comm
        self._numbers = numbers
        self._explicit = require_accepted(numbers, comm.allreduce_async)
        self._timeout = timeout
        self._labels = PathLabels(comm)
        self._scratch: dict[tuple[str, int | None], Scratch] = {}
        self._later: ThreadPoolExecutor | None = None
        self._step = 0

    def start(self, bucket: GradBucket, buffer: torch.Tensor, step: int, index: int) -> Started:
        """Start the mean of a bucket, in place. Raises what the communicator raises at once."""
        self._labels.hand_in()
        if step != self._step:
            self._step = step
            for idle in self._scratch.values():
                idle.next_step()
        direct = buffer.dtype == torch.float32 and buffer.device.type == "cpu"
        scratch = None if direct else self._scratch_for(buffer)
        host = buffer.detach() if scratch is None else scratch.take(buffer.numel())
        arrival = arrived if scratch is None else scratch.device.fetch(buffer, host)
        reduction = _Reduction(buffer, host, {}, host.numpy(), arrival)
        if self._explicit:
            reduction.arguments = self._numbers.arguments(step, index)
            reduction.residual = self._residual(bucket, buffer, step)
        future = self._submit(reduction, now=scratch is None or scratch.device.immediate)
        lanes = self._numbers.lanes(step)
        device = None if scratch is None else scratch.device
        return Started(
            lambda: self._wait(reduction, future, scratch, lanes),
            None if device is None or device.immediate else device.context,
        )

    def close(self) -> None:
        """End what threads there are. What was started must be complete, or fail by itself."""
        if self._later is not None:
            self._later.shutdown(wait=False)

    def _scratch_for(self, buffer: torch.Tensor) -> Scratch:
        key = (buffer.device.type, buffer.device.index)
        if key not in self._scratch:
            self._scratch[key] = Scratch(self._device(buffer))
        return self._scratch[key]

    def _device(self, buffer: torch.Tensor) -> Device:
        return device_of(buffer)

    def _residual(self, bucket: GradBucket, buffer: torch.Tensor, step: int) -> torch.Tensor | None:
        if not self._numbers.feeds_back:
            return None
        parameters = self.residuals.note(bucket)
        return self.residuals.of(parameters, buffer.numel()) if step >= self._numbers.exact_steps else None

    def _submit(self, reduction: _Reduction, now: bool) -> Callable[[float], Future[Any]]:
        """Hand a bucket to the communicator, at once or, once there are copies to wait for, in a thread, in order."""
        if now and self._later is None:
            future = self._hand_over(reduction)
            return lambda _: future
        if self._later is None:
            self._later = ThreadPoolExecutor(1, thread_name_prefix="p4reduce-ddp-fetch")
        submission = self._later.submit(self._hand_over, reduction)
        return submission.result

    def _hand_over(self, reduction: _Reduction) -> Future[Any]:
        reduction.arrival()
        arguments = reduction.arguments
        if reduction.residual is not None:
            reduction.host.add_(reduction.residual)
            arguments["residual"] = reduction.residual.numpy()
        return self._comm.allreduce_async(reduction.view, op="mean", out=reduction.view, **arguments)

    def _wait(
        self, reduction: _Reduction, submission: Callable[[float], Future[Any]], scratch: Scratch | None, lanes: int
    ) -> Outcome:
        view = reduction.view
        future: Future[Any] | None = None
        try:
            future = submission(self._timeout)
            future.result(self._timeout)
        except FutureTimeoutError:
            if future is not None and future.done():
                raise
            text = f"no sum of a bucket with {view.size} elements within {self._timeout:g} s"
            raise StalledError(text) from None
        # A block that is not finite is NaN in all its elements, so the first of each tells.
        bad = int(np.isnan(view[:: BLOCKS[lanes]]).sum())
        overflows = 0
        if scratch is not None:
            if reduction.buffer.dtype != torch.float32:
                overflows = int(np.count_nonzero(np.abs(view) > torch.finfo(reduction.buffer.dtype).max))
            scratch.give(reduction.host, scratch.device.put(reduction.host, reduction.buffer))
        return Outcome(self._labels.complete(), bad, overflows)


class PlainWay:
    """Buckets to torch.distributed, without quantization."""

    def __init__(self, group: dist.ProcessGroup, owned: bool = True) -> None:
        """The group's timeout is that of a bucket. `owned`: close() destroys it."""
        self._owned = owned
        self._group: dist.ProcessGroup | None = group
        self._world_size = dist.get_world_size(group)
        self._unfinished: deque[Callable[[], object]] = deque()
        self._options = dist.AllreduceOptions()  # a sum
        if hasattr(self._options, "asyncOp"):  # not in older versions of torch
            self._options.asyncOp = True

    def start(
        self, buffer: torch.Tensor, on_end: Callable[[Exception | None], None], *, inline: bool = False
    ) -> torch.futures.Future[Any]:
        """Start the mean of a bucket, in place. The future gets the buffer in any case, after `on_end`.

        The collective starts here, in the order of the hook calls, which is the same on all ranks. What follows it is
        done in a thread of torch.distributed's; `inline` and in CPU memory, by the thread of backward() when it has
        nothing else to do: other threads, and their turns with the interpreter's lock, are most of what a hook costs
        beside plain DDP. Then `end_pass` must be called. `on_end` gets the error, if there is one;
        the buffer may hold anything then.
        """
        total = buffer.float() if buffer.dtype == torch.float16 else buffer
        work, world_size = self._all_reduce(total), self._world_size

        def finish(wait: Callable[[], object]) -> torch.Tensor:
            trouble = None
            try:
                wait()
                total.div_(world_size)
                if total is not buffer:
                    buffer.copy_(total)
            except Exception as error:  # raised from here it would lose its type, or reach backward()
                trouble = error
            on_end(trouble)
            return buffer

        if not inline or buffer.is_cuda or _present_node() is None:
            followed: torch.futures.Future[Any] = work.get_future().then(lambda done: finish(done.value))
            return followed
        future: torch.futures.Future[Any] = torch.futures.Future()
        self._unfinished.append(lambda: future.set_result(finish(work.wait)))
        return future

    def end_pass(self) -> None:
        """Have everything finished before DDP waits for it: to be called in the hook of the last bucket.

        backward() makes the calls that were asked for in their order, and DDP asks for its own after this hook. With
        reentrant checkpoints a backward() runs inside another, each with calls of its own: so it is the last bucket's
        that finishes all of them.
        """
        if self._unfinished and _present_node() is not None:
            _ENGINE.queue_callback(self._finish_all)
        else:
            self._finish_all()

    def _finish_all(self) -> None:
        while self._unfinished:
            self._unfinished.popleft()()

    def _all_reduce(self, total: torch.Tensor) -> dist.Work:
        """As dist.all_reduce(), which in one bucket after the other looks anew at what cannot change."""
        if self._group is None:
            raise UsageError("this P4ReduceState is closed")
        if total.is_complex():
            total = torch.view_as_real(total)
        return self._group.allreduce([total], self._options)

    def close(self) -> None:
        """Destroy the group, if it was made for this."""
        if self._owned and self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None
