# SPDX-License-Identifier: Apache-2.0
"""The I/O thread of a worker: moves batches between transport and core, and buckets onto their path.

One thread owns transport, core and path. Callers hand buckets in under a lock, in the order that all ranks share, and
get futures; the control plane hands in orders and verdicts the same way, the ring's thread what it has summed. The
thread sleeps in poll() until the socket, one of these or the next deadline needs it, and takes results in batches.
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
from typing import TYPE_CHECKING, Any

from p4reduce.core.batch import ReceiveBatch, SendBatch
from p4reduce.core.bucket import Bucket
from p4reduce.core.config import RetransmissionPolicy
from p4reduce.core.events import Completed, Failed, Silent, Stalled
from p4reduce.core.worker import WorkerCore
from p4reduce.errors import JobError, P4ReduceError, StalledError, TransportError
from p4reduce.gathering import Gathering
from p4reduce.orders import Answer, Order
from p4reduce.path import Path
from p4reduce.reports import RingFailed, Silence, Snapshot, Timings, Trouble, Verdict, better, copy_error
from p4reduce.transport.base import BATCH_FRAMES, Transport, Waker

if TYPE_CHECKING:
    from p4reduce.core.kept import Kept
    from p4reduce.ring import Ring, RingRunner

__all__ = ["Driver", "Pending", "Verdict", "copy_error"]

_LOG = logging.getLogger(__name__)
_LONGEST_SLEEP_SECONDS = 60.0
_RING_STOP_SECONDS = 1.0
"""How long the ring's thread may take to end; one that waits for a dead rank is left behind."""


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
class _Inbox:
    """What other threads have left for the I/O thread."""

    buckets: list[Pending] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    summed: list[Kept] = field(default_factory=list)
    policy: RetransmissionPolicy | None = None
    ring_error: P4ReduceError | None = None


def _nothing() -> None:
    pass


class Driver:
    """Runs the path of one rank on one transport, from `start` to `stop`. All public methods are thread-safe."""

    def __init__(
        self,
        path: Path | WorkerCore,
        transport: Transport,
        on_trouble: Callable[[Trouble], Verdict],
        *,
        ring: Ring | None = None,
        on_news: Callable[[], None] = _nothing,
        name: str = "p4reduce",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`path`: where to begin; a core stands for a switch path without orders. `ring`: the ring path's library.

        `on_trouble` is called in the I/O thread with what this rank cannot go on with; it may take a second or two.
        `on_news` is called there when a snapshot holds what the controller waits for.
        """
        self.timings = Timings()
        self.submitted = 0
        self.elements = 0
        """In all buckets that were submitted."""
        self.completed = 0
        """Buckets complete here, over both paths, up to the first that is not."""
        self._path = path if isinstance(path, Path) else Path.of_core(path)
        self._transport = transport
        self._on_trouble = on_trouble
        self._on_news = on_news
        self._clock = clock
        # Reentrant: the garbage collector may run a dropped communicator's finalizer wherever this thread allocates.
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._inbox = _Inbox()
        self._pending: dict[int, Pending] = {}
        self._delayed: deque[Pending] = deque()
        self._error: P4ReduceError | None = None
        self._sealed: P4ReduceError | None = None
        self._fence: JobError | None = None
        self._limit = math.inf
        self._limit_error: JobError | None = None
        self._verdict: Verdict | None = None
        self._verdict_since = 0.0
        self._waits_since: float | None = None
        self._silence: Silence | None = None
        self._watched: list[int] = []
        self._changed = False
        self._stopping = False
        self._cpu = 0.0
        self._gathering = Gathering()
        self._waker = Waker()
        self._receive_batch = ReceiveBatch(transport.profile, BATCH_FRAMES)
        self._send_batch = SendBatch(BATCH_FRAMES)
        self._poll = select.poll()
        self._poll.register(transport.fileno(), select.POLLIN)
        self._poll.register(self._waker.fileno(), select.POLLIN)
        self._thread = threading.Thread(target=self._run, name=f"{name}-io", daemon=True)
        self._runner = self._start_ring(ring, name) if ring is not None else None
        self._path.runner = self._runner

    def _start_ring(self, ring: Ring, name: str) -> RingRunner:
        from p4reduce.ring import RingRunner

        config = self._path.config
        return RingRunner(
            ring, config.job, config.rank, self._path.format, self._ring_done, self._ring_failed, name=f"{name}-ring"
        )

    # Called from any thread.

    def start(self) -> None:
        """Start the I/O thread, and the ring's."""
        if self._runner is not None:
            self._runner.start()
        self._thread.start()

    def submit(self, bucket: Bucket, finish: Callable[[], Any], owner: object = None) -> Pending:
        """Queue a bucket. Its future gets `finish()`, or the error that ended the job.

        Raises that error at once when the job is over already.
        """
        with self._lock:
            refusal = self._error or self._sealed
            if refusal is not None:
                raise copy_error(refusal)
            if self._limit_error is not None and self.submitted >= self._limit:
                raise copy_error(self._limit_error)
            pending = Pending(self.submitted, bucket, finish, owner)
            pending.future.set_running_or_notify_cancel()  # what the other ranks wait for cannot be cancelled
            self.submitted += 1
            self.elements += bucket.size
            self._pending[pending.number] = pending
            self._inbox.buckets.append(pending)
            self._wake()
        return pending

    def order(self, order: Order) -> None:
        """An order of the controller's; carried out in the I/O thread."""
        with self._lock:
            self._inbox.orders.append(order)
            self._wake()

    def set_policy(self, policy: RetransmissionPolicy) -> None:
        """Another policy, from now on."""
        with self._lock:
            self._inbox.policy = policy
            self._wake()

    def watch(self, completed: int) -> None:
        """Call `on_news` once so many buckets are complete; at once when they are."""
        with self._lock:
            if completed > self.completed:
                self._watched.append(completed)
                return
        self._on_news()

    def fence(self, error: JobError) -> None:
        """The control plane has ended the job: everything pending and later fails with `error`."""
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

    def seal(self, error: P4ReduceError) -> None:
        """Take no further buckets: `submit` raises `error`. Those that are pending go on."""
        with self._lock:
            self._sealed = self._sealed or error

    def drain(self, timeout: float) -> int:
        """Wait until nothing is pending, at most `timeout` seconds; returns how many buckets still are.

        Waits as well for what the ring compares on behalf of other ranks. Does not wait in the I/O thread, which would
        have to do the work.
        """
        runner = self._runner
        with self._lock:
            if not self.inside:
                self._idle.wait_for(
                    lambda: not self._pending and (runner is None or self._error is not None or not runner.pending),
                    timeout,
                )
            return len(self._pending)

    def stop(self, error: P4ReduceError) -> None:
        """End the threads; what is pending fails with `error`, and so does every later call. Safe to call twice."""
        with self._lock:
            self._stopping = True
            self._wake()
        if self._thread.is_alive() and not self.inside:
            self._thread.join()
        if self._runner is not None:
            self._runner.stop(0.0 if self.inside or self._error is not None else _RING_STOP_SECONDS)
        self._fail(error)
        with self._lock:
            self._error = error
            self._waker.close()

    def cpu_seconds(self) -> float:
        """Processor time that the I/O thread has used, user and system; 0 before it starts, its last value after."""
        if self._thread.ident is not None and self._thread.is_alive():
            self._cpu = time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))
        return self._cpu

    def snapshot(self) -> Snapshot:
        """What the controller is told in a report."""
        path, silence = self._path, self._silence
        counters = {**path.counters(), "elements": self.elements}
        silent = silence.seconds(self._clock()) if silence is not None else 0.0
        return Snapshot(
            self.submitted, self.completed, path.present, path.answer, silent, counters, float(counters.get("srtt", 0))
        )

    @property
    def answer(self) -> Answer | None:
        """To the latest order that asks for one."""
        return self._path.answer

    @property
    def path(self) -> Path:
        """For reading: its parts belong to the I/O thread."""
        return self._path

    @property
    def runner(self) -> RingRunner | None:
        """The ring path, None in a job without."""
        return self._runner

    @property
    def inside(self) -> bool:
        """Whether the caller runs in the I/O thread, as a future's callback does: waiting there would never end."""
        return threading.current_thread() is self._thread

    @property
    def error(self) -> P4ReduceError | None:
        """Why the job is over, None while it is not."""
        return self._error

    def _wake(self) -> None:
        self._changed = True
        self._waker.wake()

    # Called in the ring's thread.

    def _ring_done(self, kept: Kept) -> None:
        with self._lock:
            self._inbox.summed.append(kept)
            self._wake()

    def _ring_failed(self, error: P4ReduceError) -> None:
        with self._lock:
            self._inbox.ring_error = error
            self._wake()

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
            self._fail(self._on_trouble(error).error())
        except BaseException as error:  # whatever ends this thread must not leave callers waiting for ever
            _LOG.exception("the I/O thread failed")
            self._fail(self._on_trouble(P4ReduceError(f"internal error in p4reduce's I/O thread: {error!r}")).error())

    def _take_changes(self) -> None:
        with self._lock:
            self._changed = False
            self._waker.drain()
            inbox, self._inbox = self._inbox, _Inbox()
            fence = self._fence
        if fence is not None:
            self._fail(better(fence, self._verdict))
            return
        if inbox.policy is not None:
            self._path.set_policy(inbox.policy, self._clock())
        for kept in inbox.summed:
            self._complete(kept.number)
        self._delayed.extend(inbox.buckets)
        self._route()
        for order in inbox.orders:
            self._carry_out(order)
        if inbox.ring_error is not None:
            self._trouble(RingFailed(inbox.ring_error))
        if self._limit_error is not None and self._error is None:
            self._enforce_limit(self._limit_error)

    def _route(self) -> None:
        """Send what has been handed in on its way. While a verdict is out nothing new is begun."""
        now = self._clock()
        while self._delayed and self._verdict is None and self._error is None:
            pending = self._delayed.popleft()
            if pending.number < self._limit:
                self._path.route(pending.number, pending.bucket, now)

    def _carry_out(self, order: Order) -> None:
        if self._error is not None or (self._verdict is not None and not self._verdict.recoverable):
            return  # the job ends here, and the controller has been told
        core = self._path.core
        try:
            if not self._path.carry_out(order, self._clock()):
                return
        except P4ReduceError as error:
            self._trouble(error)
            return
        if self._path.core is not core:
            self._silence = None
            self._recover()
        if self._path.answer is not None:
            self._on_news()
        self._route()

    def _recover(self) -> None:
        """What a verdict was out for is over."""
        if self._verdict is not None:
            self._verdict.withdraw()
            self._verdict = None

    def _enforce_limit(self, error: JobError) -> None:
        """Fail what a peer's leaving has made impossible. Earlier buckets go on: nobody left before they could."""
        with self._lock:
            beyond = [pending for number, pending in self._pending.items() if number >= self._limit]
            rest = len(self._pending) - len(beyond)
        if beyond and not rest:
            self._fail(error)

    def _exchange(self) -> bool:
        """Receive one batch and send one; False when there was nothing to do."""
        batch, out, timings = self._receive_batch, self._send_batch, self.timings
        core = self._path.core if not self._path.muted else None
        t0 = time.perf_counter()
        taken = self._transport.receive(batch)
        if core is None:
            return bool(taken)  # nothing that may still come is for us
        t1 = time.perf_counter()
        if batch.count:
            core.receive(batch, self._clock())
        t2 = time.perf_counter()
        core.transmit(out, self._clock())
        t3 = time.perf_counter()
        if out.count:
            self._send(out)
        timings.wire += t1 - t0 + time.perf_counter() - t3
        timings.decode += t2 - t1
        timings.encode += t3 - t2
        return bool(taken or out.count)

    def _send(self, out: SendBatch) -> None:
        try:
            self._transport.send(out)
        except TransportError as error:
            if self._path.on_switch:
                self._path.muted = True
                self._trouble(error)
            else:
                self._path.trial_failed(str(error))
                self._on_news()

    def _take_events(self) -> None:
        path = self._path
        answer = path.answer
        for event in path.events(self._clock()):
            if isinstance(event, Completed):
                self._complete(event.bucket.number)
            elif isinstance(event, Failed):
                self._trouble(event.error)
            elif isinstance(event, Silent):
                self._silence = Silence(event.seconds, self._clock(), path.core.counters.results if path.core else 0)
                self._on_news()
            else:
                self._trouble(event)
        if path.answer is not answer:
            self._on_news()
        if self._silence is not None and (path.core is None or path.core.counters.results != self._silence.results):
            self._silence = None
            self._on_news()

    def _complete(self, number: int) -> None:
        with self._lock:
            pending = self._pending.pop(number, None)
            if pending is None:  # the ring compared what had its result from the switch
                self._idle.notify_all()
                return
            self.completed = next(iter(self._pending), self.submitted)
            reached = [count for count in self._watched if count <= self.completed]
            self._watched = [count for count in self._watched if count > self.completed]
            if not self._pending:
                self._idle.notify_all()
        try:
            result = pending.finish()
        except Exception as error:
            _settle(pending.future, error=error)
        else:
            _settle(pending.future, result)
        if reached:
            self._on_news()
        if self._verdict is not None and self._verdict.overtaken(number):
            self._recover()
            self._route()
        if self._limit_error is not None:
            self._enforce_limit(self._limit_error)

    def _trouble(self, trouble: Trouble) -> None:
        bucket = trouble.bucket if isinstance(trouble, JobError | Stalled) else None
        if self._limit_error is not None and bucket is not None and bucket >= self._limit:
            if not isinstance(trouble, Stalled):
                self._fail(self._limit_error)
            # A stall there is as it must be: `_enforce_limit` ends this once the earlier buckets are through.
            return
        if self._verdict is not None and not self._verdict.recoverable:
            return
        verdict = self._on_trouble(trouble)
        if self._verdict is not None:
            if verdict.recoverable:
                return
            self._verdict.withdraw()
        self._verdict, self._verdict_since = verdict, self._clock()
        if verdict.left(0.0) <= 0.0:
            self._fail(verdict.error())

    def _sleep(self) -> None:
        if self._stopping:
            # Set since the loop looked, and its wake-up may have been drained with an earlier one. Everything else
            # that a wake-up can mean is read after the drain.
            return
        now = self._clock()
        wait = _LONGEST_SLEEP_SECONDS
        deadline = self._path.next_deadline()
        if deadline is not None:
            wait = min(wait, deadline - now)
        if self._verdict is not None:
            left = self._verdict.left(now - self._verdict_since)
            if left <= 0.0:
                self._fail(self._verdict.error())
                return
            wait = min(wait, left)
        wait = min(wait, self._order_due(now))
        busy, started = bool(self._pending), time.perf_counter()
        # At least a millisecond: poll() counts in those, and a deadline just passed must not become a busy loop.
        self._poll.poll(max(1, math.ceil(wait * 1000)))
        if busy:
            self.timings.wait += time.perf_counter() - started
            self._gather()

    def _gather(self) -> None:
        """Let results gather for a moment while many are to come (see p4reduce.gathering)."""
        core = self._path.core
        if core is None or self._path.muted:
            return
        pause = self._gathering.pause(*core.in_flight, core.counters.results, self._clock())
        if pause > 0.0:
            started = time.perf_counter()
            time.sleep(pause)
            self.timings.wait += time.perf_counter() - started

    def _order_due(self, now: float) -> float:
        """Seconds for which buckets may still wait for the controller's next order; trouble when there are none."""
        if not (self._path.waits and self._pending):
            self._waits_since = None
            return math.inf
        if self._waits_since is None:
            self._waits_since = now
        left = self._waits_since + self._path.policy.deadline - now
        if left <= 0.0 and self._verdict is None:
            first = next(iter(self._pending))
            text = (
                f"{self._path.who}: bucket {first} waits for the controller's order after "
                f"{self._path.state.value}, and none has come for {self._path.policy.deadline:g} s"
            )
            self._trouble(StalledError(text, job=self._path.config.job, bucket=first))
        return left if left > 0.0 else math.inf

    def _fail(self, error: P4ReduceError) -> None:
        """End the job for the callers: all that is pending fails, and whatever comes later."""
        with self._lock:
            if self._error is None:
                self._error = error
            failed = list(self._pending.values())
            self._pending.clear()
            self._inbox = _Inbox()
            self._delayed.clear()
            self._idle.notify_all()
        self._path.fail(error if isinstance(error, JobError) else JobError(str(error)))
        if self._runner is not None:
            self._runner.stop(0.0)
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
