# SPDX-License-Identifier: Apache-2.0
"""A worker as an automaton: the states of the real core, numbered, and what each frame does to each of them.

There is no model of the worker. A state is kept as the list of frames that led there; to branch from it, a new
WorkerCore is made and given these frames again. The same state and the same frame are run once.

Two histories lead to the same state when everything in the core is equal but its clock readings, timers, round-trip
estimates and counters. Those decide when a chunk is sent again, and nothing else: that what is sent again is byte by
byte what was sent before is checked in every state, by letting all timers run out.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np

from p4reduce.core.batch import ReceiveBatch, SendBatch
from p4reduce.core.bucket import Bucket, Reduction
from p4reduce.core.part import ExponentPart, SumPart
from p4reduce.core.states import Phase
from p4reduce.core.worker import WorkerCore
from p4reduce.errors import MismatchError
from p4reduce.quantize import LaneFormat, block_exponents, dequantize, quantize
from p4reduce.sim.modelcheck.bounds import EPOCHS, PROFILE, Bounds, Vector
from p4reduce.sim.modelcheck.frames import NAMES, Frames
from p4reduce.sim.modelcheck.violation import ACCEPTED, CRASHED, FAILED, UNSOUND, Violation
from p4reduce.sim.runner import core_config
from p4reduce.wire import Reason
from p4reduce.wire import profile as lookup_profile

TIMERS = -1
"""In a history, instead of a frame: all timers run out and what is due is sent."""
_BATCH = 16
_TIMEOUTS = 4


@dataclass(frozen=True, slots=True)
class State:
    """One state of one rank."""

    rank: int
    epoch: int
    """Place in EPOCHS."""
    history: tuple[int, ...]
    """Frames downwards that led here from the epoch's begin, and TIMERS."""
    sent: tuple[int, ...]
    """Every contribution sent in this epoch so far."""
    resent: tuple[int, ...]
    """What the core sends again when its timers run out and nothing comes."""
    done: bool
    """All buckets have completed."""
    error: str
    """Name of the error with which the core has given up, or nothing."""
    waits: bool
    """A result failed its check and the chunk has not been sent again since: the timers change the state."""


class Live:
    """A core that stands in some state."""

    def __init__(self, bounds: Bounds, epoch: int, rank: int) -> None:
        self.now = 0.0
        self.core = WorkerCore(core_config(bounds.scenario(epoch), rank), self.now)
        self.buckets = bounds.buckets(epoch, rank)
        for bucket in self.buckets:
            self.core.submit(bucket, self.now)

    def transmit(self) -> list[bytes]:
        """All that the core sends now."""
        batch = SendBatch(_BATCH)
        frames: list[bytes] = []
        while True:
            self.core.transmit(batch, self.now)
            if batch.count == 0:
                return frames
            frames += batch.frames()

    def receive(self, frames: Iterable[bytes]) -> list[bytes]:
        """Let frames arrive in one batch; returns what the core sends upon them."""
        batch = ReceiveBatch(lookup_profile(PROFILE), _BATCH)
        for frame in frames:
            batch.append(frame)
        try:
            self.core.receive(batch, self.now)
            return self.transmit()
        except Exception as error:  # a core never raises for what it is sent, so whatever comes is its fault
            raise Violation(CRASHED, f"{type(error).__name__}: {error}") from error

    def time_out(self) -> list[bytes]:
        """Let time pass until the timers have run out several times; returns what was sent."""
        frames: list[bytes] = []
        for _ in range(_TIMEOUTS):
            deadline = self.core.next_deadline()
            if deadline is None:
                break
            self.now = max(self.now, deadline)
            frames += self.transmit()
        self.core.events()
        return frames

    def content(self) -> Hashable:
        """Everything that may bear on what the core sends or accepts."""
        core = self.core
        table = core._table
        used = table.used
        slots = (
            table.headers[used].tobytes(),
            *(
                column[used].tobytes()
                for column in (table.total, table.size, table.part, table.index, table.failures, table.answered)
            ),
            table.used.tobytes(),
            table.busy.tobytes(),
        )
        streams = tuple(
            (s._chunk.tobytes(), s._limit, tuple(s._starts), len(s._parts), s.outstanding, s.unsent)
            for s in core._streams
        )
        parts = tuple((key, _part(part)) for key, part in sorted(core._parts.items()))
        buckets = tuple((b.number, b.phase, b.out.tobytes() if isinstance(b, Reduction) else b"") for b in self.buckets)
        queues = tuple(
            tuple(b.number for b in q) for q in (core._queue, core._turns, core._agreed, core._unfinished.values())
        )
        rest = (core._ahead, core._next_key, core.submitted, core.completed, type(core.error))
        return slots, streams, parts, buckets, queues, rest


def _part(part: object) -> Hashable:
    if isinstance(part, SumPart):
        sums = part._sums[part._done].tobytes() if len(part._sums) else b""
        return part.missing, part.unsent, part._done.tobytes(), part._encoded, part._decoded, sums
    if isinstance(part, ExponentPart):
        return part.missing, part.unsent, part.agreed.tobytes()
    return ()


class Workers:
    """All ranks' automata. States of a rank are numbered from 0, its first state of each epoch included."""

    def __init__(self, bounds: Bounds, frames: Frames, judge: bool) -> None:
        self._bounds = bounds
        self._frames = frames
        self._judge = judge
        self.states: list[list[State]] = [[] for _ in range(bounds.workers)]
        self._numbers: list[dict[Hashable, int]] = [{} for _ in range(bounds.workers)]
        self._steps: dict[tuple[int, int, int], int] = {}
        self._lives: list[tuple[int, Live] | None] = [None] * bounds.workers
        self.right = [self._direct(epoch) for epoch in range(len(EPOCHS))]

    @property
    def executed(self) -> int:
        """Frames that the cores have been given, replays not counted."""
        return len(self._steps)

    def start(self, rank: int, epoch: int) -> int:
        """The state in which a rank begins an epoch, its first frames sent."""
        live = Live(self._bounds, epoch, rank)
        sent = {self._frames.sent(rank, frame) for frame in live.transmit()}
        return self._enter(rank, epoch, live, (), sent)

    def step(self, rank: int, state: int, frame: int) -> int:
        """Let a frame arrive at a rank, or its timers run out. Raises Violation when it takes what is wrong."""
        key = (rank, state, frame)
        after = self._steps.get(key)
        if after is None:
            after = self._steps[key] = self._run(rank, state, frame)
        return after

    def branch(self, rank: int, state: int) -> Live:
        """A core of its own that stands in a state."""
        known = self.states[rank][state]
        live = Live(self._bounds, known.epoch, rank)
        live.transmit()
        for frame in known.history:
            if frame == TIMERS:
                live.time_out()
            else:
                live.receive([self._frames.down[frame].data])
        return live

    def number(self, rank: int, epoch: int, live: Live, sent: Iterable[int]) -> int:
        """Number of the state that a core stands in; UNSOUND when it was never seen."""
        found = self._numbers[rank].get((epoch, live.content(), tuple(sorted(sent))))
        if found is None:
            raise Violation(UNSOUND, "a core has reached a state that the search does not know")
        return found

    def _run(self, rank: int, state: int, frame: int) -> int:
        known = self.states[rank][state]
        cached = self._lives[rank]
        live = cached[1] if cached is not None and cached[0] == state else self.branch(rank, state)
        self._lives[rank] = None
        before, failed = live.core.counters.results, live.core.error
        out = live.time_out() if frame == TIMERS else live.receive([self._frames.down[frame].data])
        if live.core.counters.results > before:
            self._check_accepted(rank, known, frame)
        if live.core.error is not None and failed is None and self._judge:
            self._check_failure(live, frame)
        sent = {*known.sent, *(self._frames.sent(rank, data) for data in out)}
        after = self._enter(rank, known.epoch, live, (*known.history, frame), sent)
        if frame != TIMERS:
            self._lives[rank] = (after, live)
        return after

    def _check_accepted(self, rank: int, known: State, frame: int) -> None:
        result = self._frames.down[frame]
        own = {self._frames.up[sent].place: self._frames.up[sent] for sent in known.sent}.get(result.place)
        same = ("epoch", "slot", "round", "op", "words", "tag")
        if own is None or any(own.header[name] != result.header[name] for name in same):
            raise Violation(ACCEPTED, f"{NAMES[rank]} takes {self._frames.name(result)}, for which it did not ask")
        text = self._frames.wrong(frame)
        if text:
            raise Violation(ACCEPTED, f"{NAMES[rank]} takes {text}")

    def _check_failure(self, live: Live, frame: int) -> None:
        error = live.core.error
        over = frame != TIMERS and self._frames.is_nack(frame, Reason.UNKNOWN_EPOCH)
        if not over and not (self._bounds.disagree and isinstance(error, MismatchError)):
            raise Violation(FAILED, f"{type(error).__name__}: {error}")

    def _enter(self, rank: int, epoch: int, live: Live, history: tuple[int, ...], sent: set[int]) -> int:
        key = (epoch, live.content(), tuple(sorted(sent)))
        states = self.states[rank]
        number = self._numbers[rank].setdefault(key, len(states))
        if number == len(states):
            states.append(State(rank, epoch, history, key[2], (), False, "", False))
            states[number] = self._inspect(number, rank, live)
        return number

    def _inspect(self, number: int, rank: int, live: Live) -> State:
        """Look at a new state: are completed buckets right, is what timers send what was sent before."""
        known = self.states[rank][number]
        for place, bucket in enumerate(live.buckets):
            self._check_bucket(known.epoch, place, bucket)
        twin = self.branch(rank, number)
        if twin.content() != live.content():
            raise Violation(UNSOUND, "the same frames have led a core to another state")
        resent = tuple(dict.fromkeys(self._frames.sent(rank, data) for data in twin.time_out()))
        if not set(resent) <= set(known.sent):
            raise Violation(UNSOUND, "a core's timers have sent what it had not sent before")
        error = live.core.error
        return State(
            rank,
            known.epoch,
            known.history,
            known.sent,
            resent,
            all(bucket.phase is Phase.COMPLETED for bucket in live.buckets),
            "" if error is None else type(error).__name__,
            bool(live.core._table.answered.any()) and error is None,
        )

    def _check_bucket(self, epoch: int, place: int, bucket: Bucket) -> None:
        if bucket.phase is not Phase.COMPLETED or not isinstance(bucket, Reduction):
            return
        if bucket.out.tobytes() != self.right[epoch][place].tobytes():
            raise Violation(ACCEPTED, f"{bucket.describe()} has completed with a wrong result")

    def _direct(self, epoch: int) -> list[Vector]:
        """Every bucket's right result, added without any protocol."""
        results = []
        for bucket, chunks in enumerate(self._bounds.workload):
            vectors = [self._bounds.data(epoch, bucket, rank) for rank in range(self._bounds.workers) if chunks]
            results.append(_sum(vectors) if vectors else np.zeros(0, dtype=np.float32))
        return results


def _sum(vectors: list[Vector]) -> Vector:
    fmt = LaneFormat(32, len(vectors), 256)
    exponents = np.max([block_exponents(vector, fmt.block) for vector in vectors], axis=0)
    total, lanes = np.zeros(len(vectors[0]), dtype=np.uint32), np.empty(len(vectors[0]), dtype=np.uint32)
    for vector in vectors:
        quantize(vector, exponents, fmt, lanes)
        total += lanes
    out = np.empty(len(total), dtype=np.float32)
    dequantize(total, exponents, fmt, out, False)
    return out
