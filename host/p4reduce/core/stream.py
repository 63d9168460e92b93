# SPDX-License-Identifier: Apache-2.0
"""One stream of chunks: window, rounds, chunk queue, timers.

Chunk g of a stream lives in slot g mod window and may be sent once chunk g - window has its result; a slot clocks
itself and waits for no other. What makes that safe stands in states.py.

Retransmission. Every chunk has a timer, set to the worker's timeout (timers.py) when it is sent and doubled, up to
the policy's maximum, every time the chunk is sent again because it ran out. A timer that ran out is not yet a loss:

- While results come, but none for a chunk that was sent later, the chunk may well stand in a queue behind those that
  have theirs: a window that is sent at once takes longer than a round trip. It is left alone. (TCP restarts its one
  timer with every acknowledgement to the same end: RFC 6298, section 5.3.)
- When the stream has had no result for a whole timeout, a rank is probably slow: it keeps all results from all
  others. Only the oldest chunks are sent again, and with the next result all timers start afresh. So waiting for a
  slow rank costs some frames per back-off, not a window of them, and a burst that was lost whole is found missing
  a timeout later.

Early resend. When `early_resend` chunks sent after a chunk have results, its frame or its result is probably lost; it
is sent again at once, no more than once per timeout, and without back-off.

A slot whose chunk waits does not hold up the others, but only so far: what every other slot finishes meanwhile cannot
be committed and must be kept. No chunk is sent that is SPAN_WINDOWS windows, or the slots that the policy allows,
ahead of the first one without a result. That one may always be sent, so this stops nothing for good.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from p4reduce.core.config import RetransmissionPolicy
from p4reduce.core.counters import CoreCounters
from p4reduce.core.part import Part
from p4reduce.core.slots import Index, Mask, SlotTable
from p4reduce.core.timers import RttEstimator
from p4reduce.wire import Op

Times = npt.NDArray[np.float64]

SPAN_WINDOWS = 16
"""How many windows a stream may run ahead of its first chunk without a result."""
PROBES = 4
"""Oldest chunks that are sent again while a stream is silent."""
_NOBODY = np.empty(0, dtype=np.int64)


class Cause(IntEnum):
    """Why a chunk is due."""

    TIMEOUT = 0
    EARLY = 1
    INTEGRITY = 2


class Stream:
    """Slots `base` .. `base` + `window` - 1 of the pool. Slots go in and out as numbers of the whole pool."""

    def __init__(
        self,
        op: Op,
        base: int,
        window: int,
        first_chunk: int,
        table: SlotTable,
        policy: RetransmissionPolicy,
        rtt: RttEstimator,
        counters: CoreCounters,
    ) -> None:
        self.op = op
        self.base = base
        self.window = window
        self.outstanding = 0
        self.unsent = 0
        self.first_missing = first_chunk
        """Number of the first chunk without a result; all before it have theirs."""
        self._rtt = rtt
        self.wake = math.inf
        """Not before this time is any chunk due."""
        self._policy = policy
        self._counters = counters
        self._limit = first_chunk
        self._starts: list[int] = []
        self._parts: list[Part] = []
        span = slice(base, base + window)
        self._busy = table.busy[span]
        self._used = table.used[span]
        self._answered = table.answered[span]
        self._failures = table.failures[span]
        # The chunk that is outstanding in a slot, or else the next one that may be sent there.
        slot = np.arange(window, dtype=np.int64)
        self._chunk: Index = first_chunk + (slot - first_chunk) % window
        self._sent: Times = np.zeros(window)
        self._due: Times = np.zeros(window)
        self._timeout: Times = np.zeros(window)
        self._early_at: Times = np.zeros(window)
        self._sequence: Index = np.zeros(window, dtype=np.int64)
        self._passed: Index = np.zeros(window, dtype=np.int64)
        self._cause: npt.NDArray[np.uint8] = np.zeros(window, dtype=np.uint8)
        self._resent: Mask = np.zeros(window, dtype=np.bool_)
        # No sample by Karn's rule: sent again, or its timer has run out.
        self._unclean: Mask = np.zeros(window, dtype=np.bool_)
        # Sent before the stream had a result since it was idle.
        self._waited: Mask = np.zeros(window, dtype=np.bool_)
        self._next_sequence = 0
        self._idle = True
        self._waiting = True
        self._silent = False
        self._progress = 0.0
        self._stalls = 0
        self._silences = 0
        self._span = SPAN_WINDOWS * window

    @property
    def report_at(self) -> float:
        """When the next silence or stall is to be reported, unless a result comes before."""
        if self.outstanding == 0:
            return math.inf
        silent_at, stall_at = self._report_times()
        return min(silent_at, stall_at)

    def _report_times(self) -> tuple[float, float]:
        policy = self._policy
        silent_at = self._progress + policy.silent * (self._silences + 1)
        return silent_at, self._progress + policy.deadline * (self._stalls + 1)

    @property
    def committed(self) -> int:
        """All chunks below this number have their results at every rank: the chunks a window later have theirs here."""
        return self.first_missing - self.window

    def set_policy(self, policy: RetransmissionPolicy, slots: int, now: float) -> None:
        """Go on with another policy. `slots`: how many this stream may use at once, 0 for all."""
        self._policy = policy
        self._span = slots or SPAN_WINDOWS * self.window
        np.minimum(self._timeout, policy.maximum, out=self._timeout)
        np.minimum(self._due, now + policy.maximum, out=self._due)
        np.minimum(self._early_at, now + policy.maximum, out=self._early_at)
        self._set_wake()

    def enqueue(self, part: Part) -> None:
        """Append a bucket's chunks to the stream."""
        self._starts.append(self._limit)
        self._parts.append(part)
        self._limit += part.chunks
        self.unsent += part.chunks
        part.end = self._limit

    def forget(self) -> None:
        """The epoch is over: let go of the buckets. Nothing else may be called afterwards."""
        self._parts.clear()
        self._starts.clear()

    def take_new(self, room: int, now: float) -> list[tuple[Index, Index, Part]]:
        """Choose up to `room` chunks to send for the first time, lowest numbers first, and count them as sent.

        Returns (slots, chunk numbers within the bucket, part) for every bucket concerned.
        """
        if self.unsent == 0 or self.outstanding == self.window:
            return []
        limit = min(self._limit, self.first_missing + self._span)
        slots = np.flatnonzero(~self._busy & (self._chunk < limit))
        if len(slots) == 0:
            return []
        chunk = self._chunk.take(slots)
        order = chunk.argsort()[:room]
        slots, chunk = slots.take(order), chunk.take(order)
        self._start(slots, now)
        taken = []
        position = 0
        while position < len(slots):
            which = bisect_right(self._starts, int(chunk[position])) - 1
            start, part = self._starts[which], self._parts[which]
            stop = len(slots)
            if int(chunk[-1]) >= start + part.chunks:
                stop = int(np.searchsorted(chunk, start + part.chunks))
            taken.append((slots[position:stop] + self.base, chunk[position:stop] - start, part))
            part.unsent -= stop - position
            position = stop
        while self._parts and self._parts[0].unsent == 0:
            del self._parts[0], self._starts[0]
        return taken

    def rounds(self, slots: Index) -> Index:
        """Rounds of the chunks outstanding in `slots`, modulo 2^32."""
        return (self._chunk.take(slots - self.base) // self.window) & 0xFFFFFFFF

    def take_due(self, room: int, now: float) -> Index:
        """Choose up to `room` chunks to send again, and count them as sent. Returns their slots, oldest first."""
        if now < self.wake:
            return _NOBODY
        due = self._hold_back(self._busy & (self._due <= now), now)
        slots = np.flatnonzero(due)
        if len(slots) == 0:
            self._set_wake()
            return _NOBODY
        slots = slots.take(self._chunk.take(slots).argsort()[:room])
        self._restart(slots, now)
        self._set_wake()
        return slots + self.base

    def accept(self, slots: Index, now: float) -> None:
        """The chunks outstanding in `slots`, no slot twice, have their results: free the slots."""
        slots = slots - self.base
        self._sample(slots, now)
        self._busy[slots] = False
        self._chunk[slots] += self.window
        self.first_missing = int(np.minimum.reduce(self._chunk))
        self.outstanding -= len(slots)
        self._progress = now
        self._stalls = self._silences = 0
        self._waiting = False
        if self.outstanding == 0:
            self._silent = False
            self._idle = self.unsent == 0
            self.wake = math.inf
            return
        if self._silent:
            self._silent = False
            self._timeout[self._busy] = self._rtt.estimate
            self._due[self._busy] = now + self._rtt.estimate
            self.wake = now + self._rtt.estimate
        self._find_passed(slots, now)

    def repeat(self, slots: Index, now: float) -> None:
        """Results of the chunks in `slots` failed their check: ask for them again at once."""
        slots = slots - self.base
        self._due[slots] = now
        self._cause[slots] = Cause.INTEGRITY
        self.wake = now

    def stalled(self, now: float) -> float:
        """Seconds without a result when a stall is to be reported now, else 0. Counts it as reported."""
        if self.outstanding == 0 or now < self._report_times()[1]:
            return 0.0
        seconds = now - self._progress
        self._stalls = max(self._stalls + 1, int(seconds / self._policy.deadline))
        return seconds

    def silence(self, now: float) -> float:
        """Seconds without a result when a silence is to be reported now, else 0. Counts it as reported."""
        if self.outstanding == 0 or now < self._report_times()[0]:
            return 0.0
        seconds = now - self._progress
        self._silences = max(self._silences + 1, int(seconds / self._policy.silent))
        return seconds

    def oldest(self) -> int:
        """Slot of the oldest outstanding chunk; there must be one."""
        slots = np.flatnonzero(self._busy)
        return int(slots[self._chunk.take(slots).argmin()]) + self.base

    def _start(self, slots: Index, now: float) -> None:
        if self._idle:
            self._idle = False
            self._progress = now
            self._waiting = True
        timeout = self._rtt.timeout
        self._busy[slots] = True
        self._used[slots] = True
        self._answered[slots] = False
        self._failures[slots] = 0
        self._sent[slots] = now
        self._due[slots] = now + timeout
        self._timeout[slots] = timeout
        self._early_at[slots] = now
        self._cause[slots] = Cause.TIMEOUT
        self._resent[slots] = False
        self._unclean[slots] = False
        self._waited[slots] = self._waiting
        self._number(slots)
        self.outstanding += len(slots)
        self.unsent -= len(slots)
        self.wake = min(self.wake, now + timeout)

    def _number(self, slots: Index) -> None:
        """Remember the order of sending."""
        self._sequence[slots] = np.arange(self._next_sequence, self._next_sequence + len(slots))
        self._next_sequence += len(slots)
        self._passed[slots] = 0

    def _restart(self, slots: Index, now: float) -> None:
        cause = self._cause.take(slots)
        counts = np.bincount(cause, minlength=len(Cause))
        self._counters.resent_timeout += int(counts[Cause.TIMEOUT])
        self._counters.resent_early += int(counts[Cause.EARLY])
        self._counters.resent_integrity += int(counts[Cause.INTEGRITY])
        timeout = self._timeout.take(slots)
        if counts[Cause.TIMEOUT]:
            timeout = np.minimum(np.where(cause == Cause.TIMEOUT, 2 * timeout, timeout), self._policy.maximum)
            self._timeout[slots] = timeout
            self._rtt.back_off(float(timeout[cause == Cause.TIMEOUT].max()))
        self._due[slots] = now + timeout
        self._early_at[slots] = now + timeout
        self._cause[slots] = Cause.TIMEOUT
        self._resent[slots] = True
        self._unclean[slots] = True
        self._answered[slots] = False
        self._number(slots)

    def _hold_back(self, due: Mask, now: float) -> Mask:
        """Of the chunks whose timers ran out keep those that are probably lost; returns what stays due."""
        ran_out = due & (self._cause == Cause.TIMEOUT)
        if not np.count_nonzero(ran_out):
            return due
        silent_at = self._progress + self._rtt.estimate
        held = ran_out.copy()
        if now < silent_at:
            held &= self._passed == 0
            self._due[held] = silent_at
        else:
            self._silent = True
            self._unclean |= ran_out
            busy = np.flatnonzero(self._busy)
            oldest = busy.take(self._chunk.take(busy).argsort()[:PROBES])
            held[oldest] = False
            # They are looked at again with the next probe, or start afresh with the next result.
            backed_off = now + np.minimum(2 * self._timeout[oldest], self._policy.maximum)
            self._due[held] = np.where(ran_out[oldest], backed_off, self._due[oldest]).min()
        kept: Mask = due & ~held
        return kept

    def _set_wake(self) -> None:
        self.wake = float(self._due[self._busy].min()) if self.outstanding else math.inf

    def _sample(self, slots: Index, now: float) -> None:
        """One sample per batch, its median: many per round trip would make SRTT forget too fast."""
        clean = slots[~self._unclean.take(slots)]
        if len(clean) == 0:
            return
        waited = self._waited.take(clean)
        waiting = int(np.count_nonzero(waited))
        if 0 < waiting < len(clean):
            clean = clean[~waited]
        sent = self._sent.take(clean)
        sent.sort()
        self._rtt.sample(now - float(sent[len(sent) // 2]), waiting == len(waited))

    def _find_passed(self, done: Index, now: float) -> None:
        """Find outstanding chunks that enough later ones have overtaken."""
        # Of a chunk that was sent twice nobody knows which copy has its result now.
        done = done[~self._resent.take(done)]
        if len(done) == 0:
            return
        sequence = np.sort(self._sequence.take(done))
        self._passed += len(done) - np.searchsorted(sequence, self._sequence, side="right")
        if self._policy.early_resend == 0:
            return
        late = self._busy & (self._passed >= self._policy.early_resend) & (self._early_at <= now)
        if np.count_nonzero(late):
            self._due[late] = now
            self._cause[late] = Cause.EARLY
            self.wake = now
