# SPDX-License-Identifier: Apache-2.0
"""Which way each bucket of this rank goes: the switch path, the ring path, or nowhere for the moment.

No thread, no lock, no clock: the driver calls everything here in its I/O thread. A `Path` owns at most one core (the
switch path's, or that of a trial) and feeds at most one ring runner. It carries out the controller's orders; where it
stands is one of these states:

| state   | buckets handed in                          | the core                                     |
|---------|--------------------------------------------|----------------------------------------------|
| SWITCH  | below `first` to the ring, else to the core | reduces                                     |
| STOPPED | held                                       | none; what it kept waits for the ring        |
| RING    | to the ring                                | none                                         |
| TRYING  | to the ring                                | reduces zeros, then waits; none if it failed |
| HOLDING | held                                       | waits                                        |

| state   | Stop    | RunRing | Trial   | Hold    | RunSwitch |
|---------|---------|---------|---------|---------|-----------|
| SWITCH  | STOPPED | ✗       | ✗       | ✗       | same      |
| STOPPED | same    | RING    | no      | ✗       | ✗         |
| RING    | ✗       | same    | TRYING  | ✗       | ✗         |
| TRYING  | STOPPED | RING    | same    | HOLDING | ✗         |
| HOLDING | STOPPED | RING    | same    | same    | SWITCH    |

"Same": the order names the epoch (and the bucket) of what is being done already, and changes nothing but the number
that the answer carries; with others in them it is out of place. A Trial of another epoch in TRYING or HOLDING ends the
one before it: the RunRing between them was overtaken. That RunRing, when it comes, repeats what the ring does already.
A Stop in TRYING or HOLDING names the epoch that is tried: a RunSwitch was overtaken, and what this rank holds is what
no rank has completed. A Trial in STOPPED overtook the RunRing that must come first: the answer is no. ✗ is an order
out of place: the ranks do not agree about what happens, so this one gives up rather than sum anything twice or not at
all. An order with a number that is not above the last one's
was carried out before, or overtaken, and is ignored.

**Why no bucket is lost, and all ranks feed the ring the same sequence.** The ring gets every number at most once per
cut, in order, without gaps: from RunRing's bucket b on. b is the lowest number that some rank has not completed, every
core keeps each bucket until it knows that all ranks have completed it, so b and all after it are kept or held here.
When the switch path is taken up at K, the ring still gets all below K and nothing above; a Stop after that appends
from max(b, K) on, behind them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter, deque
from enum import Enum
from typing import TYPE_CHECKING, Final, NoReturn

import numpy as np

from p4reduce.core.bucket import Bucket, Reduction
from p4reduce.core.config import CoreConfig, RetransmissionPolicy
from p4reduce.core.counters import CoreCounters
from p4reduce.core.events import Completed, Event, Failed
from p4reduce.core.worker import WorkerCore
from p4reduce.errors import JobError, P4ReduceError
from p4reduce.orders import Answer, Hold, Order, RunRing, RunSwitch, Stop, Trial, reason

if TYPE_CHECKING:
    from p4reduce.core.kept import Kept
    from p4reduce.ring import RingRunner

_LOG = logging.getLogger(__name__)

TRIAL_SECONDS: Final = 2.0
"""How long a frame of zeros may take to come back."""
_LATEST: Final = ("srtt", "rto")
"""Counters that are no counts: the present value is what matters."""


class State(Enum):
    """Where a path stands; see the table above."""

    SWITCH = "switch"
    STOPPED = "stopped"
    RING = "ring"
    TRYING = "trying"
    HOLDING = "holding"


class Path:
    """The routing of one rank's buckets, and the core that the switch path needs."""

    def __init__(
        self, config: CoreConfig, start: RunSwitch | RunRing, now: float, core: WorkerCore | None = None
    ) -> None:
        """`config`: this rank's place in the job; epoch and slots of a core come from the orders. `start`: the first
        order. `core`: the one that a RunSwitch starts with, when the caller has made it already.
        """
        self.state = State.SWITCH if isinstance(start, RunSwitch) else State.RING
        self.present = start.epoch
        """Epoch of the order that is being carried out."""
        self.answer: Answer | None = None
        self.fallbacks: Counter[str] = Counter()
        """How often this rank went from the switch to the ring, by reason."""
        self.promotions = 0
        self.format = config.lane_format
        self.runner: RingRunner | None = None
        """The ring path; set before the first bucket of a job that has one."""
        self.muted = False
        """The core's frames cannot be sent: it waits to be stopped."""
        self.config = config
        self._number = start.number
        self._next = start.first_bucket
        self._first = start.first_bucket
        self._ring_order = start if isinstance(start, RunRing) else None
        self._kept: list[Kept] = []
        self._held: deque[tuple[int, Bucket]] = deque()
        self._trial: Reduction | None = None
        self._passed = False
        self._trial_until: float | None = None
        self._trial_message = ""
        self._stopped_at = 0
        self._missed = False
        self._past: dict[str, int | float] = {}
        self._core: WorkerCore | None = None
        if isinstance(start, RunSwitch):
            self._core = core or self._new_core(start, now)

    @classmethod
    def of_core(cls, core: WorkerCore) -> Path:
        """The switch path of one core and nothing else."""
        config = core.config
        start = RunSwitch(number=0, epoch=config.epoch, or_slots=config.or_slots, add_slots=config.add_slots)
        path = cls(config, dataclasses.replace(start, first_bucket=config.first_bucket), 0.0, core)
        path._next = config.first_bucket + core.submitted
        return path

    # What it is asked ------------------------------------------------------------------------------------------

    @property
    def core(self) -> WorkerCore | None:
        """What sends and receives frames right now."""
        return self._core

    @property
    def on_switch(self) -> bool:
        """Whether new buckets take the switch path."""
        return self.state is State.SWITCH

    @property
    def waits(self) -> bool:
        """Whether nothing goes on before the controller's next order."""
        return self.state in (State.STOPPED, State.HOLDING)

    @property
    def policy(self) -> RetransmissionPolicy:
        """What counts now."""
        return self.config.policy

    @property
    def slots(self) -> tuple[int, int]:
        """Slots of the core for OR and for ADD frames; none without a core."""
        core = self._core
        return (core.config.or_slots, core.config.add_slots) if core is not None else (0, 0)

    def counters(self) -> dict[str, int | float]:
        """What all cores have counted, in the names of CoreCounters. From any thread: a moment's picture."""
        core = self._core
        return _added(self._past, (core.counters if core is not None else CoreCounters()).as_dict())

    def next_deadline(self) -> float | None:
        """When `events` and the core's transmit() must be called if nothing happens before."""
        core = self._core.next_deadline() if self._core is not None and not self.muted else None
        times = [time for time in (core, self._trial_until) if time is not None]
        return min(times) if times else None

    def set_policy(self, policy: RetransmissionPolicy, now: float) -> None:
        """From now on, and for cores to come."""
        self.config = dataclasses.replace(self.config, policy=policy)
        if self._core is not None:
            self._core.set_policy(policy, now)

    # Buckets ---------------------------------------------------------------------------------------------------

    def route(self, number: int, bucket: Bucket, now: float) -> None:
        """Send a bucket on its way. Numbers come in order, without gaps."""
        if number != self._next:
            raise P4ReduceError(f"bucket {number} comes where {self._next} is due")
        self._next += 1
        if self.waits:
            self._held.append((number, bucket))
        elif self.state is State.SWITCH and number >= self._first:
            self._to_core(number, bucket, now)
        else:
            self._to_ring(number, bucket)

    def _to_core(self, number: int, bucket: Bucket, now: float) -> None:
        if self._core is None:
            raise P4ReduceError(f"bucket {number} has no core in state {self.state.value}")
        self._core.submit(bucket, now)
        if bucket.number != number:
            raise P4ReduceError(f"the core counts bucket {number} as {bucket.number}")

    def _to_ring(self, number: int, bucket: Bucket) -> None:
        from p4reduce.core.kept import Kept

        self._put(Kept.fresh(bucket, number, self.format, self.config.rank))

    def _put(self, kept: Kept) -> None:
        if self.runner is None:
            raise P4ReduceError(f"bucket {kept.number} needs a ring path, and this job has none")
        self.runner.put(kept)

    def _release_held(self, now: float) -> None:
        """Route what was held by what the state says now; the numbers go on where they stood."""
        held, self._held = self._held, deque()
        self._next -= len(held)
        for number, bucket in held:
            self.route(number, bucket, now)

    def events(self, now: float) -> list[Event]:
        """What the core of the switch path has to tell; a trial is judged here."""
        if self._core is None:
            return []
        found = self._core.events()
        if self.state is State.SWITCH:
            return found
        if self.state is State.TRYING and self._trial is not None:
            self._judge(self._trial, found, now)
        return []

    def fail(self, error: JobError) -> None:
        """The job is over: nothing is sent any more, and what was kept is given up."""
        if self._core is not None:
            self._core.fail(error)
        for kept in self._kept:
            kept.release()
        self._kept.clear()
        self._held.clear()
        self._trial_until = None

    # Orders ----------------------------------------------------------------------------------------------------

    def carry_out(self, order: Order, now: float) -> bool:
        """Do what the controller says. False: it was carried out or overtaken before.

        P4ReduceError: the order is out of place, and this rank must give up.
        """
        if order.number <= self._number:
            return False
        self._number = order.number
        self.answer = None
        if isinstance(order, RunSwitch):
            self._run_switch(order, now)
        elif isinstance(order, RunRing):
            self._run_ring(order, now)
        elif isinstance(order, Stop):
            self._stop(order)
        elif isinstance(order, Trial):
            self._try(order, now)
        else:
            self._hold(order)
        return True

    def _run_switch(self, order: RunSwitch, now: float) -> None:
        core = self._core
        if core is None or core.config.epoch != order.epoch:
            self._refuse(order, "its epoch has not been tried here")
        if self.state is State.SWITCH:
            if order.first_bucket != self._first:
                self._refuse(order, f"the switch path was taken up at bucket {self._first}")
            return
        if self.state is not State.HOLDING:
            self._refuse(order, "no Hold came before it")
        if order.first_bucket < self._on_ring():
            self._refuse(order, f"buckets up to {self._on_ring() - 1} are on the ring already")
        core.renumber(order.first_bucket)
        self._first = order.first_bucket
        self.promotions += 1
        self._enter(State.SWITCH, order.epoch)
        self._release_held(now)
        self._tell("switch", order.first_bucket, order)

    def _run_ring(self, order: RunRing, now: float) -> None:
        before = self._ring_order
        same = before is not None and (before.epoch, before.first_bucket) == (order.epoch, order.first_bucket)
        if self.state in (State.RING, State.TRYING, State.HOLDING):
            if not same:
                self._refuse(order, "the ring path goes on with something else")
            if self.state is not State.RING:
                _LOG.info("%s: epoch %d is given up, the ring path goes on: %s", self.who, self.present, order.why)
                self._drop_trial("the ring path goes on")
                self._enter(State.RING, order.epoch)
                self._release_held(now)
            return
        if self.state is State.SWITCH:
            self._refuse(order, "no Stop came before it")
        self._summed_again(order, max(order.first_bucket, self._first))
        self._ring_order = order
        self.fallbacks[reason(order)] += 1
        self._enter(State.RING, order.epoch)
        self._release_held(now)
        self._tell("ring", order.first_bucket, order)

    def _summed_again(self, order: RunRing, first: int) -> None:
        """Give the ring what the stopped core kept, from bucket `first` on. Held buckets follow."""
        # Where the switch path was to begin may lie beyond what has been handed in here.
        end = max(self._on_ring(), self._first)
        lowest = self._kept[0].number if self._kept else end
        # Where this rank never took it up it does not know that bucket, and nothing behind it is complete anywhere.
        if not lowest <= first <= end and not (self._missed and first >= end):
            self._refuse(order, f"bucket {first} is not between {lowest}, the first that was kept here, and {end}")
        lost = [kept.number for kept in self._kept if kept.number < first and not kept.delivered]
        if lost:
            self._refuse(order, f"bucket {lost[0]} is not complete here")
        self._missed = False
        kept, self._kept = self._kept, []
        for one in kept:
            if one.number < first:
                one.release()
            else:
                self._put(one)

    def _stop(self, order: Stop) -> None:
        core = self._core
        if order.epoch != self.present or self.state is State.RING:
            self._refuse(order, f"epoch {order.epoch} is not under way here")
        if self.state is State.SWITCH and core is not None:
            # The numbers that are on the ring do not count: the core's begin behind them.
            self._stopped_at = core.first_incomplete
            self._kept = core.handover()
            self._retire()
            self._enter(State.STOPPED, order.epoch)
            _LOG.info("%s: epoch %d is stopped at bucket %d: %s", self.who, order.epoch, self._stopped_at, order.why)
        elif self.state is not State.STOPPED:
            # The order to go on with this epoch was overtaken: nothing from here on is complete anywhere.
            self._first = self._stopped_at = self._on_ring()
            self._missed = True
            self._drop_trial("stopped")
            self._enter(State.STOPPED, order.epoch)
        self.answer = Answer(order.number, self._stopped_at)

    def _try(self, order: Trial, now: float) -> None:
        if self.state is State.STOPPED:
            self.answer = Answer(order.number, failed=True, message="the order to take the ring path has not come")
            return
        if self.state is State.SWITCH:
            self._refuse(order, "the switch path is under way")
        if self.state is not State.RING:
            if order.epoch == self.present:
                self._tried()
                return
            self._drop_trial("another epoch is tried")
            self._enter(State.RING, order.epoch)
            self._release_held(now)
        self._enter(State.TRYING, order.epoch)
        self._core = self._new_core(order, now)
        lanes = self.config.profile.lanes(self.config.lane_bits)
        self._trial = Reduction(np.zeros(lanes, np.float32), np.empty(lanes, np.float32))
        self._core.submit(self._trial, now)
        self._trial_until = now + TRIAL_SECONDS

    def _judge(self, trial: Reduction, events: list[Event], now: float) -> None:
        for event in events:
            if isinstance(event, Completed) and event.bucket is trial:
                self._passed, self._trial_until = not trial.out.any(), None
                self._tried() if self._passed else self.trial_failed("zeros did not come back as zeros")
                return
            if isinstance(event, Failed):
                self.trial_failed(str(event.error))
                return
        if self._trial_until is not None and now >= self._trial_until:
            self.trial_failed(f"a frame of zeros did not come back within {TRIAL_SECONDS:g} s")

    def trial_failed(self, message: str) -> None:
        """The epoch that is tried does not work; what comes next is the controller's to say."""
        self._trial_message = message
        _LOG.info("%s: epoch %d does not work: %s", self.who, self.present, message)
        self._drop_trial(message)
        self._tried()

    def _tried(self) -> None:
        """Answer the present Trial, once it has been judged."""
        if self._passed:
            self.answer = Answer(self._number)
        elif self._trial is None:
            self.answer = Answer(self._number, failed=True, message=self._trial_message)

    def _hold(self, order: Hold) -> None:
        if self.state is State.TRYING and self._passed:
            self._enter(State.HOLDING, self.present)
        elif self.state is not State.HOLDING:
            self._refuse(order, "no trial has come back")
        self.answer = Answer(order.number, self._on_ring())

    # Parts of it -----------------------------------------------------------------------------------------------

    @property
    def who(self) -> str:
        return f"job {self.config.job!r}, rank {self.config.rank}"

    def _on_ring(self) -> int:
        """The first bucket that has neither gone to the core nor to the ring."""
        return self._held[0][0] if self._held else self._next

    def _enter(self, state: State, epoch: int) -> None:
        self.state, self.present = state, epoch

    def _new_core(self, order: RunSwitch | Trial, now: float) -> WorkerCore:
        config = dataclasses.replace(self.config, epoch=order.epoch, or_slots=order.or_slots, add_slots=order.add_slots)
        return WorkerCore(config, now)

    def _drop_trial(self, why: str) -> None:
        if self._core is not None:
            self._core.fail(JobError(f"{self.who}: epoch {self.present} is over: {why}", job=self.config.job))
        self._retire()

    def _retire(self) -> None:
        core, self._core = self._core, None
        if core is not None:
            self._past = _added(self._past, core.counters.as_dict())
        self.muted = self._passed = False
        self._trial = self._trial_until = None

    def _tell(self, path: str, bucket: int, order: Order) -> None:
        _LOG.warning(
            "job %r, epoch %d, rank %d: %s path from bucket %d on: %s",
            self.config.job, self.present, self.config.rank, path, bucket, order.why or "no reason was given",
        )  # fmt: skip

    def _refuse(self, order: Order, why: str) -> NoReturn:
        text = (
            f"{self.who}: order {order.number} of the controller ({type(order).__name__}) is out of place in state "
            f"{self.state.value} of epoch {self.present}: {why}"
        )
        _LOG.error("%s", text)
        raise P4ReduceError(text)


def _added(past: dict[str, int | float], present: dict[str, int | float]) -> dict[str, int | float]:
    """Counts of both; of what is no count, the present where there is one."""
    both = dict(past)
    for name, value in present.items():
        before = both.get(name, 0)
        both[name] = (value or before) if name in _LATEST else before + value
    return both
