# SPDX-License-Identifier: Apache-2.0
"""What the campaign and its workers tell each other through a pipe, and what a worker is started with.

Times are of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from p4reduce.transport.faults import FaultRates


@dataclass(frozen=True, slots=True)
class Training:
    """What decides the bits of a job, together with the number of ranks."""

    seed: int = 0
    steps: int = 100
    hold: int = 80
    """This step waits for `Release`."""
    width: int = 192
    """Of the model's two hidden layers."""
    batch: int = 8
    bucket_mib: float = 0.08


@dataclass(frozen=True, slots=True)
class Trigger:
    """When rank `rank` hands in this bucket of this step it says so, with `Reached`."""

    rank: int
    step: int
    bucket: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker runs, and how it reaches the others."""

    rank: int
    world_size: int
    job: str
    controller: str
    rendezvous: str
    """A file that does not exist yet, for torch.distributed."""
    log: str
    interface: str = "lo"
    """gloo's network."""
    address: str | None = None
    """Source address of frames; None for what the settings choose."""
    namespace: str = ""
    timeout: float = 60.0
    """Seconds, of every wait that has a limit of its own."""


# From the campaign to a worker.


@dataclass(frozen=True, slots=True)
class Pace:
    """Sleep so many seconds after every step."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Release:
    """Go on beyond the held step."""


@dataclass(frozen=True, slots=True)
class Disturb:
    """Let frames suffer for so long, and until at least one was lost; then say `Mended`."""

    rates: FaultRates
    seconds: float


# From a worker to the campaign.


@dataclass(frozen=True, slots=True)
class Ready:
    """Joined; the first step follows."""

    time: float


@dataclass(frozen=True, slots=True)
class Reached:
    """The trigger."""

    time: float


@dataclass(frozen=True, slots=True)
class Step:
    """A step is done. `digest`: of all parameters after it."""

    step: int
    time: float
    digest: str


@dataclass(frozen=True, slots=True)
class Disturbed:
    """The disturbance begins."""

    time: float


@dataclass(frozen=True, slots=True)
class Mended:
    """The disturbance is over. `lost`: frames that it lost."""

    time: float
    lost: int


@dataclass(frozen=True, slots=True)
class Done:
    """All steps are done."""

    time: float
    stats: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Broken:
    """The job ended with an exception. `ours`: it was one of p4reduce's; `ranks`: those that it names."""

    time: float
    kind: str
    message: str
    ours: bool
    ranks: tuple[int, ...] = ()
    stats: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Closed:
    """Everything is closed; the process ends now. `seconds`: how long that took."""

    time: float
    seconds: float
