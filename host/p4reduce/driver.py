# SPDX-License-Identifier: Apache-2.0
"""The I/O thread of a worker: moves batches between transport and core, and nothing else.

One thread owns both. Callers hand buckets in under a lock, in the order that all ranks share, and get futures; the
control plane hands in verdicts the same way. The thread sleeps in poll() until the socket, a caller or the core's
next deadline needs it.
"""

from __future__ import annotations

import logging
import math
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from p4reduce.core.batch import ReceiveBatch, SendBatch
from p4reduce.core.bucket import Bucket
from p4reduce.core.events import Completed, Failed, Stalled
from p4reduce.core.worker import WorkerCore
from p4reduce.errors import JobError, P4ReduceError
from p4reduce.transport.base import BATCH_FRAMES, Transport, Waker

_LOG = logging.getLogger(__name__)
_LONGEST_SLEEP_SECONDS = 60.0


@dataclass(eq=False, slots=True)
class Pending:
    """A bucket between submission and result."""

    number: int
    bucket: Bucket
    finish: Callable[[], Any]
    """Makes the caller's result, in the I/O thread, once the bucket is complete."""
    owner: object
    """Kept alive until the result is there."""
    future: Future[Any] = field(default_factory=Future)


@dataclass(slots=True)
class Timings:
    """Seconds that the I/O thread spent, by what it did."""

    encode: float = 0.0
    """In the core, making frames to send: quantizing included."""
    wire: float = 0.0
    """In system calls that send and receive."""
    wait: float = 0.0
    """Asleep while buckets were pending."""
    decode: float = 0.0
    """In the core, taking results: dequantizing included."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `Driver.on_trouble` makes of an error of the core."""

    error: P4ReduceError
    wait_seconds: float = 0.0
    """How long the control plane may take to name a better reason before everything fails with `error`."""


def copy_error(error: P4ReduceError) -> P4ReduceError:
    """A fresh exception with the same content: raising one object again and again piles up its traceback."""
    if isinstance(error, JobError):
        return type(error)(str(error), job=error.job, bucket=error.bucket, ranks=error.ranks)
    return type(error)(str(error))


class Driver:
    """Runs one core on one transport, from `start` to `stop`. All public methods are thread-safe."""

    def __init__(
        self,
        core: WorkerCore,
        transport: Transport,
        on_trouble: Callable[[P4ReduceError | Stalled], Verdict],
        *,
        name: str = "p4reduce",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_trouble` is called in the I/O thread with what ends the epoch on this side; it may take a second or two.

        It gets a JobError or Stalled from the core, or another P4ReduceError when this driver cannot go on.
        """
        self.timings = Timings()
        self.submitted = 0
        self.completed = 0
        self._core = core
        self._transport = transport
        self._on_trouble = on_trouble
        self._clock = clock
        # Reentrant: the garbage collector may run a dropped communicator's finalizer wherever this thread allocates.
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._inbox: deque[Pending] = deque()
        self._pending: dict[int, Pending] = {}
        self._error: P4ReduceError | None = None
        self._fence: JobError | None = None
        self._limit = math.inf
        self._limit_error: JobError | None = None
        self._verdict: tuple[float, P4ReduceError] | None = None
        self._changed = False
        self._stopping = False
        self._cpu = 0.0
        self._waker = Waker()
        self._receive_batch = ReceiveBatch(transport.profile, BATCH_FRAMES)
        self._send_batch = SendBatch(BATCH_FRAMES)
        self._poll = select.poll()
        self._poll.register(transport.fileno(), select.POLLIN)
        self._poll.register(self._waker.fileno(), select.POLLIN)
        self._thread = threading.Thread(target=self._run, name=f"{name}-io", daemon=True)

    # Called from any thread.

    def start(self) -> None:
        """Start the I/O thread."""
        self._thread.start()

    def submit(self, bucket: Bucket, finish: Callable[[], Any], owner: object = None) -> Pending:
        """Queue a bucket. Its future gets `finish()`, or the error that ended the epoch.

        Raises that error at once when the epoch is over already.
        """
        with self._lock:
            if self._error is not None:
                raise copy_error(self._error)
            if self._limit_error is not None and self.submitted >= self._limit:
                raise copy_error(self._limit_error)
            pending = Pending(self.submitted, bucket, finish, owner)
            pending.future.set_running_or_notify_cancel()  # what the other ranks wait for cannot be cancelled
            self.submitted += 1
            self._pending[pending.number] = pending
            self._inbox.append(pending)
            self._wake()
        return pending

    def fence(self, error: JobError) -> None:
        """The control plane has ended the epoch: everything pending and later fails with `error`."""
        with self._lock:
            if self._fence is None:
                self._fence = error
            self._wake()

    def limit(self, buckets: int, error: JobError) -> None:
        """A peer has left after `buckets` buckets: those after them can never complete and fail with `error`."""
        with self._lock:
            if buckets < self._limit:
                self._limit = buckets
                self._limit_error = error
            self._wake()

    def drain(self, timeout: float) -> int:
        """Wait until nothing is pending, at most `timeout` seconds; returns how many buckets still are.

        Does not wait in the I/O thread, which would have to do the work.
        """
        with self._lock:
            if not self.inside:
                self._idle.wait_for(lambda: not self._pending, timeout)
            return len(self._pending)

    def stop(self, error: P4ReduceError) -> None:
        """End the thread; what is pending fails with `error`, and so does every later call. Safe to call twice."""
        with self._lock:
            self._stopping = True
            self._wake()
        if self._thread.is_alive() and not self.inside:
            self._thread.join()
        self._fail(error)
        with self._lock:
            self._error = error
            self._waker.close()

    def cpu_seconds(self) -> float:
        """Processor time that the I/O thread has used, user and system; 0 before it starts, its last value after."""
        if self._thread.ident is not None and self._thread.is_alive():
            self._cpu = time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))
        return self._cpu

    @property
    def inside(self) -> bool:
        """Whether the caller runs in the I/O thread, as a future's callback does: waiting there would never end."""
        return threading.current_thread() is self._thread

    @property
    def error(self) -> P4ReduceError | None:
        """Why the epoch is over, None while it is not."""
        return self._error

    def _wake(self) -> None:
        self._changed = True
        self._waker.wake()

    # In the I/O thread only.

    def _run(self) -> None:
        try:
            while self._error is None and not self._stopping:
                if self._changed:
                    self._take_changes()
                moved = self._exchange()
                self._take_events()
                if not moved:
                    self._sleep()
        except P4ReduceError as error:
            self._fail(self._on_trouble(error).error)
        except BaseException as error:  # whatever ends this thread must not leave callers waiting for ever
            _LOG.exception("the I/O thread failed")
            self._fail(self._on_trouble(P4ReduceError(f"internal error in p4reduce's I/O thread: {error!r}")).error)

    def _take_changes(self) -> None:
        with self._lock:
            self._changed = False
            self._waker.drain()
            arrived = list(self._inbox)
            self._inbox.clear()
            fence = self._fence
        if fence is not None:
            self._fail(self._better(fence))
            return
        now = self._clock()
        for pending in arrived:
            # While a verdict is out the epoch is over already: what comes now fails with the rest.
            if pending.number < self._limit and self._verdict is None:
                self._core.submit(pending.bucket, now)
        if self._limit_error is not None:
            self._enforce_limit(self._limit_error)

    def _better(self, fence: JobError) -> P4ReduceError:
        """Of the controller's reason and our own the one that says more.

        Ours where both are of one kind, unless it is no more than a refusal by the switch, the echo of the fence.
        """
        own = self._verdict[1] if self._verdict is not None else None
        return own if type(own) is type(fence) and type(own) is not JobError else fence

    def _enforce_limit(self, error: JobError) -> None:
        """Fail what a peer's leaving has made impossible. Earlier buckets go on: the switch has all it needs."""
        with self._lock:
            beyond = [pending for number, pending in self._pending.items() if number >= self._limit]
            rest = len(self._pending) - len(beyond)
        if beyond and not rest:
            self._fail(error)

    def _exchange(self) -> bool:
        """Receive one batch and send one; False when there was nothing to do."""
        batch, out, timings = self._receive_batch, self._send_batch, self.timings
        t0 = time.perf_counter()
        taken = self._transport.receive(batch)
        t1 = time.perf_counter()
        if batch.count:
            self._core.receive(batch, self._clock())
        t2 = time.perf_counter()
        self._core.transmit(out, self._clock())
        t3 = time.perf_counter()
        if out.count:
            self._transport.send(out)
        timings.wire += t1 - t0 + time.perf_counter() - t3
        timings.decode += t2 - t1
        timings.encode += t3 - t2
        return bool(taken or out.count)

    def _take_events(self) -> None:
        for event in self._core.events():
            if isinstance(event, Completed):
                self._complete(event.bucket)
            elif isinstance(event, Failed):
                self._trouble(event.error)
            else:
                self._trouble(event)

    def _complete(self, bucket: Bucket) -> None:
        with self._lock:
            pending = self._pending.pop(bucket.number, None)
            self.completed += 1
            if not self._pending:
                self._idle.notify_all()
        if pending is not None:
            try:
                result = pending.finish()
            except Exception as error:
                _settle(pending.future, error=error)
            else:
                _settle(pending.future, result)
        if self._limit_error is not None:
            self._enforce_limit(self._limit_error)

    def _trouble(self, report: JobError | Stalled) -> None:
        if self._limit_error is not None and report.bucket is not None and report.bucket >= self._limit:
            if isinstance(report, Stalled):
                return  # as it must: `_enforce_limit` ends this once the earlier buckets are through
            self._fail(self._limit_error)
        elif self._verdict is None:
            verdict = self._on_trouble(report)
            self._verdict = (self._clock() + verdict.wait_seconds, verdict.error)

    def _sleep(self) -> None:
        if self._stopping:
            # Set since the loop looked, and its wake-up may have been drained with an earlier one. Everything else
            # that a wake-up can mean is read after the drain.
            return
        now = self._clock()
        wait = _LONGEST_SLEEP_SECONDS
        deadline = self._core.next_deadline()
        if deadline is not None:
            wait = min(wait, deadline - now)
        if self._verdict is not None:
            if now >= self._verdict[0]:
                self._fail(self._verdict[1])
                return
            wait = min(wait, self._verdict[0] - now)
        busy, started = bool(self._pending), time.perf_counter()
        # At least a millisecond: poll() counts in those, and a deadline just passed must not become a busy loop.
        self._poll.poll(max(1, math.ceil(wait * 1000)))
        if busy:
            self.timings.wait += time.perf_counter() - started

    def _fail(self, error: P4ReduceError) -> None:
        """End the epoch for the callers: all that is pending fails, and whatever comes later."""
        with self._lock:
            if self._error is None:
                self._error = error
            failed = list(self._pending.values())
            self._pending.clear()
            self._inbox.clear()
            self._idle.notify_all()
        self._core.fail(error if isinstance(error, JobError) else JobError(str(error)))
        for pending in failed:
            _settle(pending.future, error=copy_error(error))


def _settle(future: Future[Any], result: Any = None, error: BaseException | None = None) -> None:
    """Give a future its outcome. Its callbacks run here, and none of them may end the I/O thread.

    concurrent.futures logs what a callback raises, but lets through what is no Exception: SystemExit above all.
    """
    try:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
    except BaseException as raised:
        _LOG.error("a callback of allreduce_async raised %r in the I/O thread, which goes on", raised)
