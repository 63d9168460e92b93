# SPDX-License-Identifier: Apache-2.0
"""A worker's side of the protocol for one epoch: buckets in, frames out and in, results and events out.

No socket, no thread, no clock. A driver calls

    receive(batch, now)             with what has come
    transmit(batch, now)            until it leaves the batch empty, and sends every batch
    events()                        after both
    next_deadline()                 for how long it may wait for frames or new buckets

and, when the epoch ends but the job goes on, handover() for what the ring path has to sum (kept.py, ledger.py).

`now` is seconds of any clock that never goes back. Everything here works on whole batches: the time per frame is a
few microseconds, besides the passes over its elements.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np

from p4reduce import constants, signature, wire
from p4reduce.core.batch import PayloadRows, ReceiveBatch, SendBatch
from p4reduce.core.bucket import Barrier, Bucket, IntegerReduction, Reduction
from p4reduce.core.buffers import Buffers
from p4reduce.core.config import CoreConfig, RetransmissionPolicy
from p4reduce.core.counters import CoreCounters
from p4reduce.core.digest import bucket_digest
from p4reduce.core.events import Completed, Event, Failed, Silent, Stalled
from p4reduce.core.inbox import Inbox
from p4reduce.core.kept import Kept
from p4reduce.core.ledger import Ledger
from p4reduce.core.part import AnnouncePart, BarrierPart, ExponentPart, FloatPart, Index, IntegerPart, Part, SumPart
from p4reduce.core.slots import Mask, SlotTable, header_groups
from p4reduce.core.states import Phase, Step
from p4reduce.core.stream import Stream
from p4reduce.core.timers import RttEstimator
from p4reduce.errors import IntegrityError, JobError, MismatchError, UsageError
from p4reduce.integers import IntegerCodec
from p4reduce.packetize import BucketCodec
from p4reduce.quantize import LaneFormat
from p4reduce.wire import Op, Reason

INTEGRITY_LIMIT = 3
"""Failed checks of one chunk after which the job gives up: the sum itself is wrong, not one copy of it."""
LEAST_LAG = 256
"""Buckets between the first incomplete one and the last that may start, at least; it grows with the pool."""
_CODECS = 64


class WorkerCore:
    """One rank in one epoch."""

    def __init__(self, config: CoreConfig, now: float) -> None:
        self.config = config
        self.counters = CoreCounters()
        self.submitted = 0
        """Buckets taken."""
        self.completed = 0
        """Buckets that have their result, counted up to the first that has not: all before it are done."""
        self._now = now
        self._error: JobError | None = None
        self._events: list[Event] = []
        self._table = SlotTable(config)
        self._inbox = Inbox(config, self._table, self.counters)
        self._rtt = RttEstimator(config.policy)
        streams = [
            Stream(op, base, window, config.first_chunk, self._table, config.policy, self._rtt, self.counters)
            for op, base, window in (
                (Op.OR, 0, config.or_slots),
                (Op.ADD, config.or_slots, config.add_slots),
            )
        ]
        # The OR stream sends first: few frames, and the data of a whole bucket waits for them.
        self._streams: tuple[Stream, Stream] = (streams[0], streams[1])
        self._or, self._add = self._streams
        self._parts: dict[int, Part] = {}
        self._keys: dict[Part, int] = {}
        self._next_key = 0
        # Number of the first bucket, less those that were submitted before it got that number.
        self._origin = config.first_bucket
        # A bucket starts only once all that are so many before it are complete: the ledger builds on it.
        self._lag = max(LEAST_LAG, 4 * (config.or_slots + config.add_slots))
        self._ledger = Ledger(config.first_bucket, self._streams)
        self._unfinished: dict[int, Bucket] = {}
        # Buckets that have not entered the OR stream; reductions that have, in order, until they enter the ADD stream.
        self._queue: deque[Bucket] = deque()
        self._turns: deque[Bucket] = deque()
        self._agreed: dict[Bucket, SumPart] = {}
        # ADD chunks of reductions in the OR stream or past it of which none has been sent.
        self._ahead = 0
        self._fresh = False
        self._key = signature.rank_keys()[config.rank]
        self._total_key = signature.total_key(config.world_size)
        self._format = config.lane_format
        self._codecs: dict[tuple[int, LaneFormat], BucketCodec] = {}
        self._integer_codecs: dict[int, IntegerCodec] = {}
        self._buffers = Buffers()
        self._use_policy(config.policy, now)

    # Buckets ---------------------------------------------------------------------------------------------------

    def submit(self, bucket: Bucket, now: float) -> None:
        """Take a bucket; sets its number. Nothing is computed or sent before transmit().

        Raises the job's error after a failure, UsageError for a bucket that was submitted before, and for one that is
        too large, or whose lanes are too narrow for so many workers.
        """
        if self._error is not None:
            raise self._error
        if bucket.phase is not Phase.NEW:
            raise UsageError(f"{bucket.describe()} has been submitted before")
        if isinstance(bucket, Reduction):
            self._codec(bucket)
        elif isinstance(bucket, IntegerReduction):
            self._integer_codec(bucket)
        elif not isinstance(bucket, Barrier):
            raise UsageError(f"a bucket is a Reduction or a Barrier, not a {type(bucket).__name__}")
        bucket.number = self._origin + self.submitted
        bucket.step(Step.SUBMIT)
        self.submitted += 1
        self._unfinished[bucket.number] = bucket
        self._ledger.add(bucket)
        self._queue.append(bucket)
        self._now = now
        self._fresh = True

    def fail(self, error: JobError) -> list[Bucket]:
        """End the epoch for this worker: returns the unfinished buckets in order of submission.

        Every later submit() raises `error`, or the error that the core had found before.
        """
        self._error = self._error or error
        unfinished = list(self._unfinished.values())
        for bucket in unfinished:
            bucket.step(Step.ABANDON)
        self._ledger.take_all()
        self._forget()
        return unfinished

    def handover(self) -> list[Kept]:
        """End the epoch for this worker and give up every bucket that some rank may lack, in order.

        These are all from the first that is not known to be complete at all ranks: delivered ones, from which other
        ranks need this one's contribution, and all that are unfinished. Works after Failed, too; there is nothing left
        after fail() or an earlier call. Nothing is sent or accepted any more, submit() raises; events that are
        waiting stay.
        """
        if self._error is None:
            self._error = JobError(
                f"epoch {self.config.epoch} is over; its buckets have been handed over", job=self.config.job
            )
        kept = []
        for entry in self._ledger.take_all():
            bucket, part, local = entry.bucket, entry.part, entry.local
            delivered = bucket.phase is Phase.COMPLETED
            if not delivered:
                bucket.step(Step.HAND_OVER)
            if isinstance(part, ExponentPart):
                local = part.local
            sums = part if isinstance(part, SumPart) else None
            fmt, rank = bucket.lane_format(self._format), self.config.rank
            kept.append(Kept(bucket, bucket.number, fmt, rank=rank, delivered=delivered, part=sums, local=local))
        self._forget()
        return kept

    @property
    def first_incomplete(self) -> int:
        """Number of the first bucket without a result here, or of the next to come; handover() does not change it."""
        return self._origin + self.completed

    def renumber(self, first: int) -> None:
        """Give the next bucket the number `first`. All ranks do so at the same place, after a trial of the path.

        Raises the job's error after a failure, UsageError while a bucket is unfinished. Drops what was kept: no rank
        may need the buckets so far any more.
        """
        if self._error is not None:
            raise self._error
        if self._unfinished:
            raise UsageError(f"{len(self._unfinished)} buckets are unfinished: their numbers cannot change")
        if first < 0:
            raise UsageError(f"buckets are numbered from 0 or more, not {first}")
        self._origin = first - self.submitted
        self._ledger.restart(first)

    def set_policy(self, policy: RetransmissionPolicy, now: float) -> None:
        """Go on with another policy, at once. Ranks may do so at different times."""
        self._use_policy(policy, now)
        self._now = now
        self._fresh = True

    def _use_policy(self, policy: RetransmissionPolicy, now: float) -> None:
        self.config = replace(self.config, policy=policy)
        self._rtt.set_policy(policy)
        or_slots = add_slots = 0
        if policy.window:
            # Both streams need a slot; the exponents get no less than their share.
            total = self.config.or_slots + self.config.add_slots
            or_slots = min(max(-(-policy.window * self.config.or_slots // total), 1), policy.window - 1)
            add_slots = policy.window - or_slots
        self._or.set_policy(policy, or_slots, now)
        self._add.set_policy(policy, add_slots, now)

    def _forget(self) -> None:
        """Of an epoch that is over only counters and events remain."""
        self._unfinished.clear()
        self._queue.clear()
        self._turns.clear()
        self._agreed.clear()
        self._parts.clear()
        self._keys.clear()
        for stream in self._streams:
            stream.forget()
        self._buffers = Buffers()

    @property
    def kept_buckets(self) -> int:
        """Buckets that some rank may still need, unfinished ones included."""
        return len(self._ledger)

    @property
    def kept_bytes(self) -> int:
        """Memory for their contributions and sums."""
        return self._ledger.kept_bytes

    @property
    def in_flight(self) -> tuple[int, int, int]:
        """Chunks of data that have no result yet, those that have not been sent, and how many may be under way."""
        return self._add.outstanding, self._add.unsent, self._add.window

    @property
    def error(self) -> JobError | None:
        """Why the epoch is over, or None."""
        return self._error

    def events(self) -> list[Event]:
        """What has happened since the last call."""
        events, self._events = self._events, []
        return events

    def next_deadline(self) -> float | None:
        """When transmit() must be called if nothing happens before; None while nothing is outstanding."""
        if self._error is not None:
            return None
        if self._fresh:
            return self._now
        deadline = min(min(stream.wake, stream.report_at) for stream in self._streams)
        return None if deadline == math.inf else deadline

    # Sending ---------------------------------------------------------------------------------------------------

    def transmit(self, batch: SendBatch, now: float) -> None:
        """Fill `batch` with what is to be sent now: chunks that are due again, then new ones."""
        batch.clear()
        self._now = now
        if self._error is not None:
            return
        self._feed()
        for stream in self._streams:
            slots = stream.take_due(batch.capacity - batch.count, now)
            if len(slots):
                self._append_again(batch, slots)
            if now >= stream.report_at:
                self._report(stream, now)
        for stream in self._streams:
            for new, index, part in stream.take_new(batch.capacity - batch.count, now):
                self._append_new(batch, stream, new, index, part)
        self.counters.frames_sent += batch.count
        self.counters.rto = self._rtt.timeout
        self._fresh = batch.count > 0

    def _feed(self) -> None:
        """Let buckets into the OR stream, in order.

        Not all at once: finding exponents takes a pass over the data, which must not delay the data of buckets
        before. One large bucket at a time is ahead, or as many small ones as keep the ADD stream's window full. And
        none is further than `_lag` ahead of the first incomplete one.
        """
        limit = self.first_incomplete + self._lag
        while self._queue and self._ahead < 2 * self.config.add_slots and self._queue[0].number < limit:
            bucket = self._queue.popleft()
            bucket.step(Step.ENTER_OR)
            digest = bucket_digest(bucket, self._format)
            if isinstance(bucket, Reduction) and bucket.size:
                self._enter_before(ExponentPart(bucket, self._codec(bucket), digest))
            elif isinstance(bucket, IntegerReduction) and bucket.size:
                self._enter_before(AnnouncePart(bucket, self._integer_codec(bucket), digest))
            else:
                self._enter(self._or, BarrierPart(bucket, self.config.profile, digest))

    def _enter_before(self, part: ExponentPart | AnnouncePart) -> None:
        """Let a bucket in whose ADD chunks are to follow."""
        self._ahead += part.codec.add_chunks
        self._turns.append(part.bucket)
        self._enter(self._or, part)

    def _enter(self, stream: Stream, part: Part) -> None:
        self._ledger[part.bucket.number].part = part
        self._parts[self._next_key] = part
        self._keys[part] = self._next_key
        self._next_key += 1
        stream.enqueue(part)

    def _append_new(self, batch: SendBatch, stream: Stream, slots: Index, index: Index, part: Part) -> None:
        if part.op is Op.ADD and part.bucket.phase is Phase.AGREED:
            part.bucket.step(Step.ENTER_ADD)
            self._ahead -= part.chunks
        part.prepare(int(index[-1]))
        table = self._table
        rounds = stream.rounds(slots)
        sizes = part.sizes.take(index)
        table.words[slots] = sizes // constants.WORD_BYTES
        table.round[slots] = rounds
        tags = np.uint64(part.tag) + (index.astype(np.uint64) << np.uint64(16))
        where = signature.place(self.config.epoch, rounds.astype(np.uint64), tags)
        table.check[slots] = part.checks.take(index) + where * self._key
        table.total[slots] = where * self._total_key
        table.tag[slots] = tags
        table.size[slots] = sizes + constants.HEADER_BYTES
        table.part[slots] = self._keys[part]
        table.index[slots] = index
        self._append(batch, slots, index, sizes, part)

    def _append_again(self, batch: SendBatch, slots: Index) -> None:
        keys = self._table.part.take(slots)
        for start, stop in _runs(keys):
            part = self._parts[int(keys[start])]
            index = self._table.index.take(slots[start:stop])
            self._append(batch, slots[start:stop], index, part.sizes.take(index), part)

    def _append(self, batch: SendBatch, slots: Index, index: Index, sizes: Index, part: Part) -> None:
        start, stop = batch.count, batch.count + len(slots)
        header_groups(batch.headers)[start:stop] = self._table.groups.take(slots, axis=0)
        batch.groups.append(PayloadRows(start, stop, part.rows, index, sizes))
        batch.count = stop
        self.counters.bytes_sent += int(sizes.sum()) + constants.HEADER_BYTES * len(slots)

    def _report(self, stream: Stream, now: float) -> None:
        """Tell of a silence or a stall."""
        silence, stall = stream.silence(now), stream.stalled(now)
        bucket = self._parts[int(self._table.part[stream.oldest()])].bucket
        if silence:
            self.counters.silences += 1
            self._events.append(Silent(bucket.number, silence))
        if stall:
            self.counters.stalls += 1
            self._events.append(Stalled(bucket.number, stream.op, stall, stream.outstanding))

    # Receiving -------------------------------------------------------------------------------------------------

    def receive(self, batch: ReceiveBatch, now: float) -> None:
        """Take what has come. Never raises for what the network sends: bad frames are counted and dropped."""
        self._now = now
        self.counters.frames_received += batch.count
        if batch.count == 0:
            return
        if self._error is not None:
            self.counters.late += batch.count
            return
        rows, slots, refused = self._inbox.sort(batch)
        while len(rows):
            # A slot may come more than once; its first row goes first, the others only if that was damaged.
            first_row = self._table.first_row
            first_row[slots[::-1]] = rows[::-1]
            first = first_row.take(slots) == rows
            if np.count_nonzero(first) == len(rows):
                self._accept(batch, rows, slots, now)
                break
            self._accept(batch, rows[first], slots[first], now)
            rows, slots = rows[~first], slots[~first]
            open_ = self._table.busy.take(slots)
            self.counters.duplicates += int(len(rows) - np.count_nonzero(open_))
            rows, slots = rows[open_], slots[open_]
        # Not busy any more: the refused copy's chunk got its result in this very batch.
        if refused is not None and self._error is None and self._table.busy[refused[1]]:
            self._refused(*refused)
        self._ledger.drop_committed()

    def _accept(self, batch: ReceiveBatch, rows: Index, slots: Index, now: float) -> None:
        """Take the payloads of results, no slot twice; free their slots or ask again."""
        keys = self._table.part.take(slots)
        touched: list[Part] = []
        key = int(keys[0])
        if np.count_nonzero(keys == key) == len(keys):
            part = self._parts[key]
            touched.append(part)
            sound = self._store(part, batch, rows, slots)
        else:
            sound = np.zeros(len(rows), dtype=np.bool_)
            for key in np.unique(keys).tolist():
                mine = (keys == key).nonzero()[0]
                part = self._parts[key]
                touched.append(part)
                sound[mine] = self._store(part, batch, rows[mine], slots[mine])
        good = slots if np.count_nonzero(sound) == len(slots) else slots[sound]
        self.counters.results += len(good)
        self._free(good, now)
        if len(good) < len(slots):
            self._damaged(slots[~sound], now)
        for part in touched:
            if part.missing == 0:
                self._finished(part)
        self._fresh = True

    def _store(self, part: Part, batch: ReceiveBatch, rows: Index, slots: Index) -> Mask:
        first, last = int(rows[0]), int(rows[-1]) + 1
        # Without the signatures, what is left must be the linear check of the payload.
        checks = batch.headers["check"][rows] - self._table.total.take(slots)
        index = self._table.index.take(slots)
        if last - first == len(rows):
            return part.store(batch.payload[first:last], checks, index)
        return part.store(batch.payload[rows], checks, index)

    def _free(self, slots: Index, now: float) -> None:
        if len(slots) == 0:
            return
        adds = slots >= self.config.or_slots
        added = np.count_nonzero(adds)
        if added == len(slots):
            self._add.accept(slots, now)
        elif added == 0:
            self._or.accept(slots, now)
        else:
            self._or.accept(slots[~adds], now)
            self._add.accept(slots[adds], now)
        self.counters.srtt = self._rtt.smoothed or 0.0

    def _damaged(self, slots: Index, now: float) -> None:
        """Results that failed their check. The switch repeats a stored result, so a damaged copy is mended by asking.

        Copies of one answer count once: only an answer to another resend says more about the sum itself.
        """
        table = self._table
        self.counters.integrity += len(slots)
        slots = slots[~table.answered.take(slots)]
        if len(slots) == 0:
            return
        table.answered[slots] = True
        table.failures[slots] += 1
        worst = int(slots[table.failures.take(slots).argmax()])
        if table.failures[worst] >= INTEGRITY_LIMIT:
            part = self._parts[int(table.part[worst])]
            text = (
                f"chunk {int(table.index[worst])} of {part.bucket.describe()} failed its check {INTEGRITY_LIMIT} times"
            )
            self._fail(IntegrityError(text, job=self.config.job, bucket=part.bucket.number))
            return
        adds = slots >= self.config.or_slots
        for stream, mine in ((self._or, slots[~adds]), (self._add, slots[adds])):
            if len(mine):
                stream.repeat(mine, now)

    def _refused(self, reason: Reason, slot: int) -> None:
        bucket = self._parts[int(self._table.part[slot])].bucket
        who = f"job {self.config.job!r}, epoch {self.config.epoch}, rank {self.config.rank}: {bucket.describe()}"
        if reason is Reason.TAG_MISMATCH and slot >= self.config.or_slots:
            # The OR stream's digests have agreed, so it is the exponents that differ.
            text = f"{who}: the ranks were sent different exponents; a result was damaged in a way that its form hides"
            self._fail(IntegrityError(text, job=self.config.job, bucket=bucket.number, ranks=(self.config.rank,)))
            return
        if reason is Reason.TAG_MISMATCH:
            text = f"{who}: other ranks reduce something else at this place (shape, dtype, operation or order of calls)"
            self._fail(MismatchError(text, job=self.config.job, bucket=bucket.number, ranks=(self.config.rank,)))
            return
        text = {
            Reason.UNKNOWN_EPOCH: "the switch does not know the epoch: it is over, or a switch or controller restarted",
            Reason.NOT_ADMITTED: "the switch does not admit this rank from this address and port",
            Reason.BAD_SLOT: "the slot is not in the job's pool: host and controller disagree about its size",
            Reason.MALFORMED: "the switch cannot read the frames: host and switch disagree about the profile",
        }[reason]
        self._fail(JobError(f"{who}: {text}", job=self.config.job, bucket=bucket.number, ranks=(self.config.rank,)))

    def _fail(self, error: JobError) -> None:
        if self._error is None:
            self._error = error
            self._events.append(Failed(error))

    # Completion ------------------------------------------------------------------------------------------------

    def _finished(self, part: Part) -> None:
        """All chunks of a part have their results."""
        del self._parts[self._keys.pop(part)]
        if part.op is Op.OR:
            # All ranks have sent it, and none does before it has all results that are so far behind.
            self._ledger.proved = max(self._ledger.proved, part.bucket.number - self._lag + 1)
        if isinstance(part, ExponentPart | AnnouncePart):
            self._agree(part)
            return
        part.bucket.step(Step.FINISH)
        del self._unfinished[part.bucket.number]
        oldest = next(iter(self._unfinished), self._origin + self.submitted)
        self.completed = oldest - self._origin
        self._events.append(Completed(part.bucket))

    def _agree(self, part: ExponentPart | AnnouncePart) -> None:
        """Exponents of a bucket are known. It and those behind it that were agreed before enter the ADD stream."""
        bucket, entry = part.bucket, self._ledger[part.bucket.number]
        bucket.step(Step.AGREE)
        sums: SumPart
        if isinstance(part, AnnouncePart):
            sums = IntegerPart(part.reduction, part.codec, wire.digest("sum", part.digest), self._buffers)
        else:
            # Ranks that saw different exponents must refuse each other.
            digest = wire.digest("sum", part.digest, part.agreed.tobytes())
            stream = bucket.stream(self.config.rank)
            sums = FloatPart(part.reduction, part.codec, part.agreed, stream, digest, self._buffers)
            entry.local = part.local
        entry.part = self._agreed[bucket] = sums
        while self._turns and self._turns[0] in self._agreed:
            self._enter(self._add, self._agreed.pop(self._turns.popleft()))

    def _codec(self, bucket: Reduction) -> BucketCodec:
        fmt = bucket.lane_format(self._format)
        key = (bucket.size, fmt)
        codec = self._codecs.get(key)
        if codec is None:
            fmt.require_usable()
            _make_room(self._codecs)
            codec = self._codecs[key] = BucketCodec(self.config.profile, fmt, bucket.size)
        return codec

    def _integer_codec(self, bucket: IntegerReduction) -> IntegerCodec:
        codec = self._integer_codecs.get(bucket.size)
        if codec is None:
            _make_room(self._integer_codecs)
            codec = IntegerCodec(self.config.profile, self.config.world_size, bucket.size)
            self._integer_codecs[bucket.size] = codec
        return codec


def _make_room(codecs: dict[Any, Any]) -> None:
    if len(codecs) >= _CODECS:
        codecs.pop(next(iter(codecs)))


def _runs(keys: Index) -> list[tuple[int, int]]:
    """Runs of equal keys as (start, stop)."""
    edges = [0, *((keys[1:] != keys[:-1]).nonzero()[0] + 1).tolist(), len(keys)]
    return list(itertools.pairwise(edges))
