# SPDX-License-Identifier: Apache-2.0
"""What a DDP communication hook needs between calls: the job, the group for the rest, the first error."""

from __future__ import annotations

import logging
import os
import time
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.optim.optimizer import register_optimizer_step_pre_hook

from p4reduce.ddp.completer import Endings, Future, OrderedCompleter, Started
from p4reduce.ddp.launch import Mode, group_of_model, join_job, new_plain_group, resolve_mode
from p4reduce.ddp.ledger import Item, Ledger, Outcome
from p4reduce.ddp.numbers import HookSettings, Numbers, Rounding
from p4reduce.ddp.report import Reporter
from p4reduce.ddp.residuals import restore
from p4reduce.ddp.rules import rule_for, size_of
from p4reduce.ddp.staging import present_stream
from p4reduce.ddp.trace import Trace
from p4reduce.ddp.ways import JobWay, PlainWay, SumsBuckets
from p4reduce.errors import UsageError

logger = logging.getLogger("p4reduce.ddp")

DEFAULT_TIMEOUT = 300.0
"""Seconds until a bucket counts as lost: the last net. The job's own deadline is shorter and names who is missing."""
_STATE_VERSION = 1
_PLAIN = Outcome("plain")
_NO_HOOK = (
    "a copy of a DistributedDataParallel model has no communication hook, although it lists one: it trains with plain "
    "allreduce until register_comm_hook is called on it, with a P4ReduceState of its own"
)


class P4ReduceState:
    """State of `allreduce_hook` for one DistributedDataParallel model.

    float32, float16 and bfloat16 buckets go to the job: through the switch, or, where that fails, over
    torch.distributed from the same integers, to the same bits. Every other bucket, every bucket in mode "off", and
    every bucket of a group whose size is not that of the job, is summed by torch.distributed as it is, or refused.
    That happens in a group of the state's own; in mode "off" in the model's, as without a hook, with its timeout.
    `p4reduce.ddp.rules.RULES` says which way a bucket goes; nothing but dtype, layout and device decides, so all ranks
    decide alike. Every way gives the mean, taken after the sum.

    Args:
        comm: where the job's buckets go. None only in mode "off".
        process_group: the group the DDP model was built with; None is the default group. Every member must construct
            its state at the same point of the program, because a group is made here.
        mode: "auto"; "off" (no job: everything goes to torch.distributed as it is); and, through `from_env` alone,
            "require" (no fallback to torch.distributed, an error instead) and "ring" (a job that begins on the ring
            path, with the same bits as on the switch path, until an operator says otherwise).
        timeout: seconds until a bucket counts as lost (StalledError on the switch path).
        own_comm: close `comm` together with the state.
        lane_bits, rounding, error_feedback, exact_steps, seed: see `p4reduce.ddp.numbers.Numbers`.
        log_every: backward passes between two lines of statistics in the log (INFO); 0 for none.
        trace: a file for a trace, see `trace`.

    Errors: UsageError when torch.distributed is not initialised, when `comm` is missing or lacks what the numbers
    need; ConfigError for numbers that make no sense. What goes wrong later in a reduction is never raised inside
    backward(); see `allreduce_hook`.
    """

    def __init__(
        self,
        comm: SumsBuckets | None,
        process_group: dist.ProcessGroup | None = None,
        *,
        mode: Mode = "auto",
        timeout: float = DEFAULT_TIMEOUT,
        own_comm: bool = False,
        lane_bits: int = 32,
        rounding: Rounding | None = None,
        error_feedback: bool | None = None,
        exact_steps: int = 0,
        seed: int = 0,
        log_every: int = 0,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        if mode != "off" and comm is None:
            raise UsageError("P4ReduceState needs a communicator unless its mode is 'off'")
        numbers = Numbers(lane_bits, rounding, error_feedback, exact_steps, seed)
        group = group_of_model(process_group) if mode == "off" else new_plain_group(process_group, timeout)
        try:
            self._set_up(comm, group, mode, timeout, own_comm, numbers, log_every, trace)
        except BaseException:
            if mode != "off":
                dist.destroy_process_group(group)
            raise

    def _set_up(
        self,
        comm: SumsBuckets | None,
        group: dist.ProcessGroup,
        mode: Mode,
        timeout: float,
        own_comm: bool,
        numbers: Numbers,
        log_every: int,
        trace: str | os.PathLike[str] | None,
    ) -> None:
        self.mode = mode
        self.timeout = timeout
        self.numbers = numbers
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._comm = comm
        self._own_comm = own_comm
        self._plain = PlainWay(group, owned=mode != "off")
        fits = comm is not None and comm.world_size == self.world_size
        self._job = JobWay(comm, numbers, timeout) if mode != "off" and comm is not None and fits else None
        if mode != "off" and comm is not None and not fits:
            logger.warning(
                "the job has %d ranks but the process group %d: torch.distributed sums every bucket",
                comm.world_size,
                self.world_size,
            )
        self._ledger = Ledger()
        self._reporter = Reporter(self._ledger, comm, mode, self.world_size, log_every)
        if trace is not None:
            self.trace(trace)
        self._endings = Endings(self._ledger, self._reporter.on_step if log_every else None)
        self._completer = OrderedCompleter(self._endings)
        self._step_hook = register_optimizer_step_pre_hook(_raise_before_step(self._ledger))
        self._closed = False
        # Without close(): end the threads and unhook the optimizers when the state is collected or the process ends.
        self._finalizer = weakref.finalize(self, _shut_down, self._completer, self._step_hook, self._job, self._ledger)
        logger.info("p4reduce hook: mode=%s world_size=%d timeout=%gs %s", mode, self.world_size, timeout, numbers)

    @classmethod
    def from_env(
        cls,
        *,
        process_group: dist.ProcessGroup | None = None,
        mode: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        lane_bits: int | None = None,
        rounding: Rounding | None = None,
        error_feedback: bool | None = None,
        exact_steps: int | None = None,
        seed: int | None = None,
        log_every: int | None = None,
        trace: str | os.PathLike[str] | None = None,
        **overrides: Any,
    ) -> P4ReduceState:
        """Join the job that the environment describes (P4REDUCE_*, and what torchrun sets) and make its state.

        Call it on every rank after `init_process_group`. Rank and world size are those of the group. `overrides`
        go to `p4reduce.connect`. Without a job name (argument `job`, P4REDUCE_JOB, configuration file) rank 0 tells the
        others one: torchrun's run id, which stays the same when torchrun restarts the workers, so that the controller
        can tell the old ones from the new; where that is the word "none", a new unique name.

        From `lane_bits` to `trace` each is also read from P4REDUCE_LANE_BITS and so on, and from the table [hook] of
        the configuration file.

        Errors: ConfigError for the settings, and whatever `p4reduce.connect` raises.
        """
        chosen = resolve_mode(mode)
        settings = HookSettings.resolve(
            {
                **{"lane_bits": lane_bits, "rounding": rounding, "error_feedback": error_feedback},
                **{"exact_steps": exact_steps, "seed": seed, "log_every": log_every, "trace": trace},
            }
        )
        group = group_of_model(process_group) if chosen == "off" else new_plain_group(process_group, timeout)
        comm: SumsBuckets | None = None
        try:
            if chosen != "off":
                comm = join_job(group, process_group, chosen, timeout, dict(overrides))
            state = cls.__new__(cls)
            state._set_up(
                *(comm, group, chosen, timeout, True, settings.numbers),
                *(settings.log_every, settings.trace),
            )
        except BaseException:
            if comm is not None:
                comm.close()
            if chosen != "off":
                dist.destroy_process_group(group)
            raise
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
        item = Item(buffer, step, bucket.index(), last, size_of(buffer), started, started)
        way = rule_for(buffer).way
        if way == "refused":
            future = self._complete(item, _raiser(UsageError(_refusal(buffer)), buffer))
        elif way == "job" and self._job is not None:
            future = self._to_job(self._job, bucket, item)
        else:
            future = self._to_torch(item)
        if last:
            self._plain.end_pass()
        item.submitted = time.perf_counter()
        self._ledger.submit_seconds += item.submitted - started
        return future

    def _to_job(self, job: JobWay, bucket: GradBucket, item: Item) -> Future:
        item.lane_bits = self.numbers.lanes(item.step)
        try:
            reduction = job.start(bucket, item.buffer, item.step, item.index)
        except Exception as error:  # raised out of a hook it would leave DDP unusable
            reduction = _raiser(error, item.buffer)
        return self._complete(item, reduction)

    def _to_torch(self, item: Item) -> Future:
        endings = self._endings

        def on_end(error: Exception | None) -> None:
            endings.note(item, _PLAIN if error is None else None, error)
            if item.last:
                endings.tell(item)

        try:
            return self._plain.start(item.buffer, on_end, inline=self._job is None)
        except Exception as error:  # raised out of a hook it would leave DDP unusable
            return self._complete(item, _raiser(error, item.buffer))

    def _complete(self, item: Item, reduction: Started) -> Future:
        device = item.buffer.device
        future: Future = torch.futures.Future(devices=[device]) if device.type == "cuda" else torch.futures.Future()
        item.submitted = time.perf_counter()
        self._completer.put(item, reduction, future)
        return future

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

        buckets_*, bytes_* (of gradients) by path: switch; ring (the job's integers over torch.distributed); plain
        (torch.distributed without quantization). buckets_failed. bytes_wire: UDP payload sent to the switch, resends
        included; wire_bytes_per_element the same over the elements of the job's buckets; retransmissions.
        blocks_not_finite: blocks that came back as NaN because some rank had a NaN or an infinity in them; overflows:
        elements whose mean did not fit float16 or bfloat16. steps: backward passes, those before a checkpoint included.

        Seconds: submit_seconds inside the hook; reduce_seconds from submission to result, summed over buckets that
        overlap (of plain buckets in CPU memory: to the end of backward()); wait_seconds from the submission of a pass's
        last bucket to its result, which is what the reduction adds to backward(); quantize_, wire_ and
        dequantize_seconds of the job's own thread, beside the training.

        error; comm: what the communicator counts.
        """
        return self._reporter.stats()

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Record buckets from now on, and write them to `path` in Chrome's trace format at close(), or before by
        `write_trace`. With several ranks `.rank0` and so on is put before the suffix."""
        self._ledger.trace = Trace(path, self.rank, self.world_size)

    def write_trace(self) -> None:
        """Write what has been recorded so far. OSError when the file cannot be written; nothing without `trace`."""
        if self._ledger.trace is not None:
            self._ledger.trace.write()

    def close(self) -> None:
        """Leave the job (when the state joined it), end the threads, unhook the optimizers. May be called again."""
        if self._closed:
            return
        self._closed = True
        if self._comm is not None and self._own_comm:
            # First the communicator: what is still under way fails, and the thread has nothing left to wait for.
            self._comm.close()
        self._finalizer()
        if self._plain is not None:
            self._plain.close()

    def __enter__(self) -> P4ReduceState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- checkpoints and copies --

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on from a checkpoint as if nothing had happened, as numbers and plain tensors.

        Between two steps. Residuals are this rank's own, so every rank saves one. Beside them: the number of backward
        passes, from which the seeds and the end of the exact steps follow.
        """
        return {
            "version": _STATE_VERSION,
            "steps": self._ledger.steps,
            "seed": self.numbers.seed,
            "lane_bits": self.numbers.lane_bits,
            "rank": self.rank,
            "world_size": self.world_size,
            "residuals": [] if self._job is None else self._job.residuals.save(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, on the same rank of as many; on another the residuals begin at zero.

        Before the first backward pass or between two steps. Parameters are recognised by the order in which DDP shows
        them, so model and DDP options must be the same. Residuals stay with a change of `lane_bits`; without error
        feedback they are ignored. UsageError when they do not fit the model or `state` is something else.
        """
        if state.get("version") != _STATE_VERSION:
            raise UsageError(f"this is no state of version {_STATE_VERSION}: its version is {state.get('version')!r}")
        if state["seed"] != self.numbers.seed:
            logger.warning(
                "saved with seed %d, loaded with seed %d: other bits from here on", state["seed"], self.numbers.seed
            )
        if self._job is not None and self.numbers.feeds_back:
            restore(self._job.residuals, state, self.rank, self.world_size)
        self._ledger.steps = int(state["steps"])

    def __getstate__(self) -> dict[str, Any]:
        logger.warning(
            "the communicator and the process group are left out of a saved or copied P4ReduceState; for checkpoints "
            "there is state_dict()"
        )
        return {"mode": self.mode, "timeout": self.timeout, "rank": self.rank, "world_size": self.world_size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        logger.warning("a restored P4ReduceState cannot reduce: make a new one with P4ReduceState.from_env()")
        self.mode = state["mode"]
        self.timeout = state["timeout"]
        self.rank = state["rank"]
        self.world_size = state["world_size"]
        self.numbers = Numbers()
        self._comm = self._job = self._plain = None  # type: ignore[assignment]
        self._own_comm = False
        self._ledger = Ledger()
        self._reporter = Reporter(self._ledger, None, self.mode, self.world_size, 0)
        self._closed = True

    def __deepcopy__(self, memo: dict[int, Any]) -> P4ReduceState:
        warnings.warn(_NO_HOOK, RuntimeWarning, stacklevel=2)
        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        copy.__setstate__(self.__getstate__())
        return copy


def _refusal(buffer: torch.Tensor) -> str:
    return (
        f"a bucket of {buffer.dtype} on {buffer.device.type} ({buffer.layout}) cannot be reduced to a mean here: "
        f"docs/hook.md lists what can"
    )


def _raiser(error: Exception, buffer: torch.Tensor) -> Started:
    def wait() -> Outcome:
        raise error

    return Started(wait, present_stream(buffer))


def _raise_before_step(ledger: Ledger) -> Callable[..., None]:
    def check_reduction(optimizer: object, args: object, kwargs: object) -> None:  # noqa: ARG001 (torch's signature)
        ledger.check()

    return check_reduction


def _shut_down(completer: OrderedCompleter, step_hook: Any, job: JobWay | None, ledger: Ledger) -> None:
    step_hook.remove()
    completer.stop()
    if job is not None:
        job.close()
    if ledger.trace is not None:
        try:
            ledger.trace.write()
        except OSError as error:
            logger.error("no trace: %s", error)
