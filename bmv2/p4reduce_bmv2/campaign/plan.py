# SPDX-License-Identifier: Apache-2.0
"""What will go wrong, when and for how long: drawn from a seed, run by run.

A plan depends on nothing but the campaign's seed, the number of the run and the settings, so any run can be had again.
The runs go through decks: each deck holds every fault once, in an order of its own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from p4reduce.errors import UsageError
from p4reduce.transport.faults import FaultRates


class Expect(Enum):
    """How a run must end."""

    EXACT = "exact"
    """Every rank ends with the bits of the undisturbed run."""
    NAMED = "named_error"
    """Every survivor raises an error that names the victim, and nobody else."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault. `shortest`, `longest`: how long it lasts, in seconds, counted in leases where `leases`."""

    name: str
    expect: Expect
    summary: str
    shortest: float = 0.0
    longest: float = 0.0
    leases: bool = False
    beyond: float = 0.0
    """Seconds on top of the leases."""
    frames: bool = False
    """It needs frames: it happens inside workers' transports, and lasts until it has lost one."""


_CUT = "a worker's link to the switch is cut"
_CUT_OFF = "a worker loses switch and controller"
FAULTS: tuple[Fault, ...] = (
    Fault("switch_kill", Expect.EXACT, "SIGKILL of the switch, started again after a pause", 0.0, 3.0),
    Fault("switch_restart", Expect.EXACT, "SIGTERM of the switch, started again at once"),
    Fault("controller_kill", Expect.EXACT, "SIGKILL of the controller, started again after a pause", 0.0, 2.5),
    Fault("both_kill", Expect.EXACT, "SIGKILL of switch and controller, both started again after a pause", 0.0, 2.0),
    Fault("worker_kill", Expect.NAMED, "SIGKILL of a worker"),
    Fault("worker_stop_short", Expect.EXACT, "SIGSTOP of a worker, SIGCONT within the lease", 0.02, 0.4, leases=True),
    Fault("worker_stop_long", Expect.NAMED, "SIGSTOP of a worker, SIGCONT after its lease", 1.0, 1.3, True, 0.5),
    Fault("link_cut_short", Expect.EXACT, f"{_CUT} for a moment", 0.02, 0.4, frames=True),
    Fault("link_cut_long", Expect.EXACT, f"{_CUT} for seconds", 2.0, 4.0, frames=True),
    Fault("cut_off_short", Expect.EXACT, f"{_CUT_OFF} within the lease", 0.3, 0.6, leases=True, frames=True),
    Fault("cut_off_long", Expect.NAMED, f"{_CUT_OFF} beyond the lease", 1.0, 1.3, True, 0.5, frames=True),
    Fault("loss_burst", Expect.EXACT, "frames of all workers are lost, doubled, reordered", 0.2, 1.0, frames=True),
    Fault("drain", Expect.EXACT, "the switch is drained, and undrained after a pause", 0.1, 1.0),
    Fault("mode_ring", Expect.EXACT, "the job is sent to the ring path, and back to auto after a pause", 0.1, 1.0),
)
BY_NAME = {fault.name: fault for fault in FAULTS}
_LATE = 0.1
"""Share of the faults with an exact end that come after the hold: too late for anything but finishing."""
_LATEST_DELAY = 0.02
"""Seconds between the trigger and the fault, so that it meets any moment of a bucket."""
_BUCKETS = 4
_LAST_STEPS = 6
_OWN_WORDS = 2
"""In its second step DDP itself talks over gloo, about the order of buckets, and a loss then is an error of torch's."""
_SECONDS = ("switch_kill", "controller_kill", "worker_kill", "worker_stop_short", "link_cut_short", "loss_burst")
_LATEST_SECOND = 3.0
_FRAMES = {"frames"}
_CAUSES = {
    "switch_kill": {"switch"},
    "switch_restart": {"switch"},
    "both_kill": {"switch", "controller"},
    "controller_kill": {"controller"},
    "link_cut_short": _FRAMES,
    "link_cut_long": _FRAMES,
    "cut_off_short": _FRAMES,
    "loss_burst": _FRAMES,
    "worker_kill": {"process"},
    "worker_stop_short": {"process"},
}


@dataclass(frozen=True, slots=True)
class Moments:
    """What a plan must know of the training: `steps` in all, of which those from `hold` on wait to be released."""

    steps: int
    hold: int
    world_size: int
    lease: float

    @property
    def latest(self) -> int:
        """The step before which a fault must strike, or it may meet nothing any more."""
        return max(self.hold + 1, self.steps - _LAST_STEPS)

    def __post_init__(self) -> None:
        if not 4 <= self.hold < self.steps:
            raise UsageError(f"a job of {self.steps} steps cannot be held before step {self.hold}: 4 <= hold < steps")


@dataclass(frozen=True, slots=True)
class Stroke:
    """One fault of a run."""

    fault: Fault
    victim: int
    """The rank that a worker's fault meets."""
    duration: float
    """Seconds that the fault lasts."""
    rates: FaultRates
    after: float = 0.0
    """Seconds after the first fault of the run."""

    def describe(self) -> str:
        """For a line of text."""
        whom = f" of rank {self.victim}" if self.fault.name.startswith(("worker", "link", "cut")) else ""
        lasts = f" for {self.duration:.2f} s" if self.duration else ""
        return f"{self.fault.name}{whom}{lasts}"


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. The trigger is the moment at which rank `witness` hands in bucket `bucket` of step `step`."""

    run: int
    step: int
    bucket: int
    witness: int
    delay: float
    """Seconds from the trigger to the first fault."""
    strokes: tuple[Stroke, ...]

    @property
    def fault(self) -> Fault:
        """The first fault."""
        return self.strokes[0].fault

    @property
    def lost(self) -> int | None:
        """The rank that the others must name in the end; None: all ranks end well."""
        return next((stroke.victim for stroke in self.strokes if stroke.fault.expect is Expect.NAMED), None)

    def describe(self) -> str:
        """For a line of text."""
        texts = [
            stroke.describe() + (f" {stroke.after:.2f} s later" if number else "")
            for number, stroke in enumerate(self.strokes)
        ]
        moment = f"at step {self.step}, bucket {self.bucket}, +{1e3 * self.delay:.0f} ms"
        return " and ".join([f"{texts[0]} {moment}", *texts[1:]])


def draw(seed: int, run: int, moments: Moments, chosen: Sequence[Fault] = FAULTS, double: bool = False) -> Plan:
    """The plan of run number `run` (from 0) of the campaign with this seed, over the faults `chosen`.

    `double`: a fault that the job survives is followed by another, while it still deals with the first.
    """
    deck = list(chosen)
    random.Random(f"{seed}/deck/{run // len(deck)}").shuffle(deck)
    fault = deck[run % len(deck)]
    dice = random.Random(f"{seed}/run/{run}")
    late = dice.random() < _LATE and fault.expect is Expect.EXACT and not double
    strokes = [_stroke(dice, fault, moments)]
    if double and fault.expect is Expect.EXACT:
        dice_of_second = random.Random(f"{seed}/second/{run}")
        second = BY_NAME[dice_of_second.choice([name for name in _SECONDS if _apart(name, fault.name)])]
        strokes.append(_stroke(dice_of_second, second, moments, dice_of_second.uniform(0.0, _LATEST_SECOND)))
    lost = any(stroke.fault.expect is Expect.NAMED for stroke in strokes)
    first, end = (moments.hold, moments.latest) if late else (_OWN_WORDS if lost else 0, moments.hold - 1)
    return Plan(
        run=run,
        step=dice.randrange(first, end),
        bucket=dice.randrange(_BUCKETS),
        witness=dice.randrange(moments.world_size),
        delay=dice.uniform(0.0, _LATEST_DELAY),
        strokes=tuple(strokes),
    )


def _stroke(dice: random.Random, fault: Fault, moments: Moments, after: float = 0.0) -> Stroke:
    scale = moments.lease if fault.leases else 1.0
    return Stroke(
        fault=fault,
        victim=dice.randrange(moments.world_size),
        duration=dice.uniform(fault.shortest, fault.longest) * scale + fault.beyond,
        rates=FaultRates(dice.uniform(0.1, 0.6), dice.uniform(0.0, 0.2), dice.uniform(0.0, 0.3)),
        after=after,
    )


def _apart(one: str, other: str) -> bool:
    """Whether two faults have no cause in common."""
    return not _CAUSES.get(one, {one}) & _CAUSES.get(other, {other})
