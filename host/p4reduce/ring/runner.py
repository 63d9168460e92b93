# SPDX-License-Identifier: Apache-2.0
"""Sums a job's buckets on a ring, one after the other, to the bits that the switch would have given.

Every rank runs the same buckets in the same order. For each of them:

1. A maximum over a short header, which holds every number with both signs: so each rank learns the largest and the
   smallest, and all see alike whether they are about to reduce the same. Nothing whose length depends on the bucket
   is exchanged before.
2. The maximum of the block exponents; integers have none.
3. The sum of the signed integers q = u - bias, in pieces, so that the memory this needs does not grow with the bucket.
   U = S + workers * bias is what the switch's lanes would hold.

A barrier and a bucket without elements are over after the header. A rank that has lost what it needs says so in the
header or in front of the first piece, and takes part with zeros: all ranks fail together, and nobody waits in vain.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from p4reduce.core.digest import bucket_digest
from p4reduce.core.kept import Kept
from p4reduce.errors import ConfigError, IntegrityError, JobError, MismatchError, P4ReduceError, RingError
from p4reduce.quantize import Exponents, LaneFormat, Lanes
from p4reduce.ring.base import Ring

PIECE = 1 << 20
"""Elements summed in one call: the same on all ranks. Enough to hide a call's cost, little enough to be no burden."""
_FLAGS = 2
"""Integers before each piece: how many ranks have nothing to sum, and the sum of their numbers."""
_WRITING = 5.0
"""Seconds that are more than enough to write a result and to call back."""
_NO_LEVELS: Exponents = np.zeros(0, dtype=np.uint8)


@dataclass(slots=True)
class RingCounters:
    """What one runner has done."""

    buckets: int = 0
    elements: int = 0
    compared: int = 0
    """Buckets whose result this rank had from the switch and found equal."""
    seconds: float = 0.0
    """Time spent on buckets, waiting for other ranks included."""


class RingRunner:
    """One daemon thread that sums buckets on a ring, strictly in the order of put().

    Callbacks come from that thread and must not wait for anything; no two at once. Each bucket that is finished goes to
    `on_done`, released, its result in place. The first error goes to `on_error`, once, and ends the runner: the ring is
    closed, so that the other ranks notice, and what was put and what is put later is dropped (and stays the caller's to
    release).

    put() and stop() may be called from any thread.
    """

    def __init__(
        self,
        ring: Ring,
        job: str,
        rank: int,
        fmt: LaneFormat,
        on_done: Callable[[Kept], None],
        on_error: Callable[[P4ReduceError], None],
        name: str = "p4reduce-ring",
    ) -> None:
        """`fmt`: the job's default format. `job`, `rank` are for messages and must fit the ring.

        ConfigError when the ring has other ranks.
        """
        if (ring.size, ring.rank) != (fmt.workers, rank):
            raise ConfigError(
                f"job {job!r}: this is rank {rank} of {fmt.workers}, but rank {ring.rank} of {ring.size} on its ring"
            )
        self.counters = RingCounters()
        self._ring = ring
        self._job = job
        self._rank = rank
        self._fmt = fmt
        self._on_done = on_done
        self._on_error = on_error
        self._scratch: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        self._changed = threading.Condition()
        self._queue: deque[Kept] = deque()
        self._busy = False
        self._ended = False
        # Held while a result is written and while a callback runs: whoever has taken it after setting `_ended` knows
        # that no more of either follows.
        self._delivery = threading.RLock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    def put(self, kept: Kept) -> None:
        """Sum this bucket after all that were put before. Dropped after an error or stop()."""
        with self._changed:
            if not self._ended:
                self._queue.append(kept)
                self._changed.notify()

    @property
    def pending(self) -> int:
        """Buckets that were put and are neither finished nor dropped."""
        with self._changed:
            return len(self._queue) + self._busy

    def stop(self, timeout: float = 10.0) -> bool:
        """End the thread; unfinished buckets are dropped. Returns whether it has ended within `timeout` seconds.

        It may hang in a collective until the ring's deadline. Even then it writes no result and calls nobody any more:
        what it is writing just now is waited for, whatever the timeout, since that takes moments (a callback that,
        against the rules, waits for something is not waited for endlessly). May be called again.
        """
        end = time.monotonic() + timeout
        self._drop_all()
        if threading.current_thread() is self._thread:
            return False
        if self._delivery.acquire(timeout=max(timeout, _WRITING)):
            self._delivery.release()
        if self._thread.ident is not None:
            self._thread.join(max(end - time.monotonic(), 0.0))
        return not self._thread.is_alive()

    # The thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (kept := self._next()) is not None:
            started = time.perf_counter()
            try:
                self._reduce(kept)
            except P4ReduceError as error:
                self._fail(kept, error)
            except Exception as error:  # whatever it is, somebody waits for this bucket
                wrapped = RingError(f"{type(error).__name__}: {error}")
                wrapped.__cause__ = error
                self._fail(kept, wrapped)
            self.counters.seconds += time.perf_counter() - started
            # A reference kept until the next bucket comes would hold this one's memory.
            del kept

    def _next(self) -> Kept | None:
        with self._changed:
            self._busy = False
            self._changed.wait_for(lambda: self._queue or self._ended)
            if self._ended:
                return None
            self._busy = True
            return self._queue.popleft()

    def _reduce(self, kept: Kept) -> None:
        count = kept.count
        own, trouble = _NO_LEVELS, None
        if count:
            try:
                own = kept.exponents()
            except Exception as error:  # the other ranks must hear of it first
                trouble = error
        self._compare(kept, count, trouble)
        agreed, sums = own, np.zeros(0, dtype=kept.format.lane_type)
        if count:
            agreed = np.array(own, dtype=np.uint8)
            if len(agreed):
                self._ring.max(agreed)
            sums = self._sum(kept, agreed, count)
        with self._delivery:
            if self._ended:
                return
            kept.finish(sums, agreed)
            self.counters.buckets += 1
            self.counters.elements += count
            self.counters.compared += kept.delivered
            kept.release()
            # Not pending any more for whoever is told.
            with self._changed:
                self._busy = False
            self._on_done(kept)

    def _compare(self, kept: Kept, count: int, trouble: Exception | None) -> None:
        """See to it that all ranks reduce the same, and have what they need for it."""
        # Lengths and types of the arrays to come are compared themselves: digests may be equal by chance.
        what = [kept.number, bucket_digest(kept.bucket, self._fmt), count, kept.format.lane_bits, kept.format.block]
        ours = np.array(what, dtype=np.int64)
        header = np.concatenate([ours, -ours, [0 if trouble is None else self._rank + 1]]).astype(np.int64)
        self._ring.max(header)
        largest, smallest = header[: len(what)], -header[len(what) : -1]
        if (largest != smallest).any():
            numbers, _, counts, *_ = (
                f"{low}" if low == high else f"{low} to {high}" for low, high in zip(smallest, largest, strict=True)
            )
            self._meet()
            raise MismatchError(
                f"{self._where(kept)}: the ranks reduce different things here "
                f"(shape, operation or order of calls): bucket {numbers}, {counts} elements",
                job=self._job,
                bucket=kept.number,
            )
        self._share_trouble(kept, trouble, 1 if header[-1] else 0, int(header[-1]) - 1)

    def _share_trouble(self, kept: Kept, trouble: Exception | None, count: int, number: int) -> None:
        """Fail on all ranks when `count` of them, whose numbers add up to `number`, cannot take part.

        Raises this rank's own `trouble` where there is one.
        """
        if count:
            self._meet()
            if trouble is not None:
                raise trouble
            who = f"rank {number}" if count == 1 else f"{count} ranks"
            raise IntegrityError(
                f"{self._where(kept)}: {who} cannot sum it again",
                job=self._job,
                bucket=kept.number,
                ranks=(number,) if count == 1 else (),
            )

    def _meet(self) -> None:
        """All ranks are about to fail alike: nobody closes connections while another still waits for the news."""
        with contextlib.suppress(RingError):
            self._ring.max(np.zeros(1, dtype=np.int64))

    def _sum(self, kept: Kept, agreed: Exponents, count: int) -> Lanes:
        """Sums as the switch's lanes would hold them, in the memory of this rank's own integers."""
        fmt = kept.format
        trouble: Exception | None = None
        try:
            lanes = kept.integers(agreed)
        except Exception as error:  # the other ranks must hear of it first
            lanes, trouble = np.full(count, fmt.bias, dtype=fmt.lane_type), error
        unsigned = np.uint64 if fmt.lane_bits == 64 else np.uint32
        bias, zero = unsigned(fmt.bias), unsigned(fmt.workers * fmt.bias)
        for start in range(0, count, PIECE):
            piece = self._piece(min(PIECE, count - start), np.int64 if fmt.lane_bits == 64 else np.int32)
            values = piece[_FLAGS:].view(unsigned)
            stop = start + len(values)
            piece[:_FLAGS] = 0 if trouble is None else (1, self._rank)
            # Unsigned arithmetic wraps, which leaves the difference in two's complement.
            np.subtract(lanes[start:stop], bias, out=values, dtype=unsigned)
            self._ring.sum(piece)
            if start == 0:
                self._share_trouble(kept, trouble, int(piece[0]), int(piece[1]))
            np.add(values, zero, out=values)
            np.copyto(lanes[start:stop], values, casting="unsafe")
        return lanes

    def _piece(self, count: int, integer: type[np.signedinteger[Any]]) -> npt.NDArray[np.signedinteger[Any]]:
        size = (_FLAGS + count) * np.dtype(integer).itemsize
        if len(self._scratch) < size:
            self._scratch = np.empty(size, dtype=np.uint8)
        return self._scratch[:size].view(integer)

    # Ends ------------------------------------------------------------------------------------------------------

    def _fail(self, kept: Kept, error: P4ReduceError) -> None:
        if isinstance(error, RingError):
            text = RingError(f"{self._where(kept)}: {error}")
            text.__cause__ = error.__cause__ or error
            error = text
        elif isinstance(error, JobError):
            error.job = error.job or self._job
            error.bucket = kept.number if error.bucket is None else error.bucket
        with self._delivery:
            if self._drop_all():
                self._on_error(error)
        self._ring.close()

    def _drop_all(self) -> bool:
        """End the runner; whether it had not ended before."""
        with self._changed:
            first, self._ended = not self._ended, True
            self._busy = False
            self._queue.clear()
            self._changed.notify_all()
            return first

    def _where(self, kept: Kept) -> str:
        return f"job {self._job!r}, rank {self._rank} of {self._fmt.workers}, ring path, {kept.bucket.describe()}"
