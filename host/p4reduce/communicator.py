# SPDX-License-Identifier: Apache-2.0
"""What a caller holds: one worker of a job, with numpy arrays in and out."""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from p4reduce.arrays import make_bucket
from p4reduce.config import Settings
from p4reduce.controller_client import ControllerClient
from p4reduce.core.bucket import Barrier, Bucket, Rounding
from p4reduce.core.config import CoreConfig
from p4reduce.driver import Driver, Pending
from p4reduce.errors import ControllerError, UsageError
from p4reduce.membership import Membership, ranks_text
from p4reduce.transport.base import Transport
from p4reduce.transport.faults import FaultyTransport
from p4reduce.wire import MAX_BUCKET

if TYPE_CHECKING:
    from p4reduce.metrics import MetricsServer
    from p4reduce.ring import Ring

FloatArray = npt.NDArray[np.float32]
ReduceOp = Literal["sum", "mean"]
Number = TypeVar("Number", np.float32, np.float16, np.int32)


@dataclass(eq=False)
class Session:
    """The parts of an open communicator. It never refers to the communicator, whose finalizer it serves."""

    settings: Settings
    config: CoreConfig
    client: ControllerClient
    transport: Transport
    ring: Ring | None
    driver: Driver
    membership: Membership
    metrics: MetricsServer | None = None
    pid: int = field(default_factory=os.getpid)
    closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def path(self) -> Literal["switch", "ring"]:
        """The path that new buckets take."""
        return "switch" if self.driver.path.on_switch else "ring"

    def stats(self) -> dict[str, Any]:
        """See `Communicator.stats`."""
        config, driver, transport = self.config, self.driver, self.transport
        faults = asdict(transport.faults) if isinstance(transport, FaultyTransport) else None
        path, runner = driver.path, driver.runner
        or_slots, add_slots = path.slots
        return {
            "job": config.job,
            "rank": config.rank,
            "world_size": config.world_size,
            "epoch": config.epoch,
            "profile": config.profile.name,
            "path": self.path,
            "mode": self.settings.mode,
            "present": path.present,
            "fallbacks": dict(path.fallbacks),
            "promotions": path.promotions,
            "or_slots": or_slots,
            "add_slots": add_slots,
            "controller_connected": self.membership.connected,
            "submitted": driver.submitted,
            "completed": driver.completed,
            "elements": driver.elements,
            "bytes": 4 * driver.elements,
            "seconds": asdict(driver.timings),
            "core": path.counters(),
            "ring": asdict(runner.counters) if runner is not None else None,
            "transport": asdict(transport.counters),
            "faults": faults,
        }

    def shutdown(self, timeout: float | None = None) -> None:
        """Close everything, once; later calls return at once. Does nothing in a forked child.

        `timeout`: seconds to wait for pending buckets, None for what the settings say.
        """
        if os.getpid() != self.pid:
            return  # threads and connection are the parent's
        with self.lock:
            if self.closed:
                return
            self.closed = True
        driver, rank, pending = self.driver, self.config.rank, -1
        over = UsageError(f"rank {rank} of job {self.config.job!r} is closed: connect() again")
        timeout = self.settings.close_timeout if timeout is None else timeout
        end = time.monotonic() + timeout
        try:
            driver.seal(over)
            pending = driver.drain(timeout)
            if not pending:
                # The others may need this rank for what they have not completed: the driver runs on meanwhile.
                waits = driver.error is None and not driver.inside
                self.membership.leave(driver.submitted, max(end - time.monotonic(), 0.0) if waits else 0.0)
        finally:  # also after KeyboardInterrupt, when nobody knows what is pending
            if pending:
                count = f"{pending} of its" if pending > 0 else "some of its"
                self.membership.abort(f"rank {rank} was closed while {count} buckets were pending")
            driver.stop(over)
            if pending:
                self.membership.wait_fenced()
                self.membership.leave(driver.submitted)
            self.membership.stop()
            if self.metrics is not None:
                self.metrics.stop()
            if self.ring is not None:
                self.ring.close()
            self.transport.close()
            self.client.close()


class Communicator:
    """One rank of a job. Made by `p4reduce.connect` or `p4reduce.local`; close it, or use it as a context manager.

    Every rank must make the same calls in the same order, with the same shapes and operations; ranks that do not are
    told so by a MismatchError on all ranks. Calls may come from any thread: the order in which they are made is the
    order that counts. The first JobError ends the job here, and every later call raises it again.

    A forked child cannot use its parent's communicator; it must connect by itself.
    """

    def __init__(self, session: Session) -> None:
        """For `connect` alone."""
        self._session = session
        self._finalizer = weakref.finalize(self, session.shutdown)

    @property
    def rank(self) -> int:
        """This worker's number, 0 .. world_size - 1."""
        return self._session.config.rank

    @property
    def world_size(self) -> int:
        """Workers of the job."""
        return self._session.config.world_size

    @property
    def job(self) -> str:
        """The job's name."""
        return self._session.config.job

    @property
    def epoch(self) -> int:
        """Number of this generation of the job; the controller uses none twice."""
        return self._session.config.epoch

    @property
    def path(self) -> Literal["switch", "ring"]:
        """The path that buckets take which are handed in now. Both give the same bits."""
        return self._session.path

    @property
    def profile(self) -> str:
        """Name of the switch program's profile."""
        return self._session.config.profile.name

    def allreduce(
        self,
        array: npt.NDArray[Number] | Number,
        op: ReduceOp = "sum",
        out: npt.NDArray[Number] | None = None,
        *,
        lane_bits: int | None = None,
        rounding: Rounding | None = None,
        seed: int = 0,
        residual: FloatArray | None = None,
    ) -> npt.NDArray[Number]:
        """Reduce `array` over all ranks and wait for the result, which is the same, bit for bit, on every rank.

        `array`: float32, float16 or int32, any shape and layout, or a numpy scalar. `op`: "sum" or "mean". `out`: an
        array of the same type and shape that gets the result and is returned; it may be `array` itself. Without it
        the result is a new array.

        Floats travel in lanes of `lane_bits`: 32, 16 or 8; None for the setting of that name. A block of elements
        (256, 512 or 1024 of them) in which any rank has an infinity or NaN comes back as NaN. `rounding`: "nearest"
        (also None), or "stochastic" with a `seed` of 64 bits that should be another one in every call. `residual`: a
        float32 array of the same shape that gets what this rank did not send, `array` less what was sent. float16 is
        reduced as float32 and rounded back. int32 is summed exactly, op "sum" alone. docs/numerics.md has the bounds.
        All arguments but the arrays themselves must be the same on all ranks.

        Raises UsageError for arguments that break these rules (nothing was sent then), and on all ranks when a sum
        does not fit int32 (nothing was written then); a JobError when the job cannot go on. After an exception that
        came while waiting, KeyboardInterrupt included, the arrays may still be in use until the communicator is closed.
        """
        result: npt.NDArray[Number] = self._wait(
            self._submit_reduction(array, op, out, lane_bits, rounding, seed, residual)
        )
        return result

    def allreduce_async(
        self,
        array: npt.NDArray[Number] | Number,
        op: ReduceOp = "sum",
        out: npt.NDArray[Number] | None = None,
        *,
        lane_bits: int | None = None,
        rounding: Rounding | None = None,
        seed: int = 0,
        residual: FloatArray | None = None,
    ) -> Future[npt.NDArray[Number]]:
        """Start `allreduce` and return at once; the future's result is what `allreduce` returns.

        A contiguous float32 or int32 `array` is used where it is, without a copy: neither it nor `out` nor `residual`
        may be touched before the future is done. The future cannot be cancelled, because the other ranks wait. Its
        callbacks run in the I/O thread: they must be short and must not wait for other reductions.
        """
        return self._submit_reduction(array, op, out, lane_bits, rounding, seed, residual).future

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every rank has called this.

        TimeoutError after `timeout` seconds, naming the ranks that are missing; the barrier stays in the sequence.
        Without a timeout the job's own deadline applies (StalledError).
        """
        pending = self._submit(Barrier(), lambda: None)
        try:
            self._wait(pending, timeout)
        except concurrent.futures.TimeoutError:
            if pending.future.done():
                raise
            raise TimeoutError(
                f"job {self.job!r}: barrier (bucket {pending.number}) not complete after {timeout:g} s"
                f"{self._missing(pending.number)}"
            ) from None

    def stats(self) -> dict[str, Any]:
        """Counters and times since `connect`, ready for JSON.

        `seconds`: what the I/O thread did, see `p4reduce.driver.Timings`. `core`: see
        `p4reduce.core.counters.CoreCounters`. `transport`: see `p4reduce.transport.base.TransportCounters`. `bytes`:
        data handed in, four bytes an element. `path`: what new buckets take. `present`: the present epoch,
        while `epoch` names the membership. `fallbacks`: how often the job went to the ring path, by reason;
        `promotions`: back to the switch path. `ring`: see `p4reduce.ring.RingCounters`; None without a ring path.
        """
        return self._session.stats()

    def close(self, timeout: float | None = None) -> None:
        """Leave the job. Waits up to `timeout` seconds for pending buckets (default: the setting close_timeout).

        Buckets that are pending even then fail with UsageError here, and the job ends with an error on the other
        ranks. Safe to call twice and in any state.
        """
        self._session.shutdown(timeout)
        if os.getpid() == self._session.pid:
            self._finalizer.detach()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an exception nobody knows whether the other ranks will ever submit what is pending.
        self.close(0.0 if kind is not None else None)

    def __repr__(self) -> str:
        session = self._session
        error = session.driver.error
        state = "closed" if session.closed else f"failed: {error}" if error is not None else "open"
        return (
            f"<p4reduce.Communicator job={self.job!r} rank={self.rank} world_size={self.world_size} "
            f"epoch={self.epoch} profile={self.profile} {state}>"
        )

    def _submit_reduction(
        self,
        array: object,
        op: ReduceOp,
        out: object,
        lane_bits: int | None,
        rounding: Rounding | None,
        seed: int,
        residual: object,
    ) -> Pending:
        bucket, finish = make_bucket(array, op, out, lane_bits, rounding, seed, residual)
        config = self._session.config
        fmt = bucket.lane_format(config.lane_format)
        fmt.require_usable()
        limit = MAX_BUCKET * config.profile.lanes(fmt.lane_bits)
        if bucket.size > limit:
            raise UsageError(f"one call reduces at most {limit} elements, this has {bucket.size}: split it")
        return self._submit(bucket, finish)

    def _submit(self, bucket: Bucket, finish: Callable[[], Any]) -> Pending:
        session = self._session
        if os.getpid() != session.pid:
            raise UsageError(
                f"this communicator belongs to process {session.pid}, not to its forked child {os.getpid()}: "
                f"connect() in the child"
            )
        return session.driver.submit(bucket, finish, self)

    def _wait(self, pending: Pending, timeout: float | None = None) -> Any:
        if self._session.driver.inside:
            raise UsageError(
                "a callback of allreduce_async runs in the I/O thread and must not wait for another reduction: "
                "use allreduce_async there, or hand over to a thread of your own"
            )
        return pending.future.result(timeout)

    def _missing(self, bucket: int) -> str:
        try:
            missing = self._session.membership.missing(bucket)
        except ControllerError as error:
            return f", and who is missing is not known: {error}"
        return f": {ranks_text(missing)} did not reach it" if missing else ", though all ranks have reached it"
