# SPDX-License-Identifier: Apache-2.0
"""What the admission logic keeps about jobs, and what it asks the outside to do."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from p4reduce_controller.admission import Applicant, Refusal
from p4reduce_controller.entries import Epoch
from p4reduce_controller.states import State


class Reason(IntEnum):
    """Why an epoch is over; numbers as `Fence.Reason` of the protocol."""

    WORKER_LOST = 1
    MISMATCH = 2
    STALLED = 3
    INTEGRITY = 4
    REFUSED = 5
    SUPERSEDED = 6
    SWITCH_LOST = 7
    ABORTED = 8


@dataclass(frozen=True, slots=True)
class Fence:
    """The end of an epoch. `ranks` are to blame, where known."""

    reason: Reason
    message: str
    ranks: tuple[int, ...] = ()
    bucket: int = 0


class WorkerState(Enum):
    """Where one rank of an epoch stands; the value is what status shows."""

    JOINED = "joined"
    REPORTING = "reporting"
    LEFT = "left"
    LOST = "lost"


@dataclass(slots=True)
class Seat:
    """A rank whose Join waits."""

    applicant: Applicant
    ticket: int
    expires: float


@dataclass(slots=True)
class Worker:
    """A rank of an epoch. `heard`: when it last gave a sign of life."""

    applicant: Applicant
    heard: float
    state: WorkerState = WorkerState.JOINED
    stream: int | None = None
    submitted: int = 0
    completed: int = 0
    announced: bool = False
    """Whether the others were told that it left."""


@dataclass(slots=True)
class Run:
    """One epoch of a job."""

    plan: Epoch
    or_slots: int
    add_slots: int
    workers: dict[int, Worker]
    counters: dict[str, int] = field(default_factory=dict)
    """The switch's counters, as last read."""
    waiting_since: float | None = None
    """Since when every rank has handed in a bucket that nobody completes; None when it is not so."""

    def workers_on_port(self) -> Counter[int]:
        """How many ranks sit behind each switch port."""
        return Counter(worker.applicant.host.port for worker in self.workers.values())


@dataclass(slots=True)
class Job:
    """The record of a job's name."""

    name: str
    world_size: int
    incarnation: int
    state: State = State.ABSENT
    seats: dict[int, Seat] = field(default_factory=dict)
    """Ranks that wait for the (next) epoch."""
    run: Run | None = None
    """The present epoch; of a failed job, the last one."""
    reason: str = ""
    misfits: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Ranks that were refused this round for their world size: the size, and the host they came from."""

    @property
    def live(self) -> bool:
        """Whether workers may be reducing."""
        return self.state in (State.RUNNING, State.LEAVING) and self.run is not None


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker says on its progress stream. `trouble`: it cannot go on."""

    job: str
    epoch: int
    rank: int
    submitted: int = 0
    completed: int = 0
    trouble: Fence | None = None


@dataclass(slots=True)
class Ending:
    """An epoch that is over but still has entries on the switch. It keeps its lease until they are gone."""

    job: str
    plan: Epoch
    fence: Fence | None = None
    streams: list[int] = field(default_factory=list)
    """To be told of the fence once the admit entries are revoked."""
    tickets: list[int] = field(default_factory=list)
    """Leave calls to be answered once all is removed."""
    revoked: bool = False
    retry_at: float | None = None
    """When to try again what the switch did not do."""


@dataclass(frozen=True, slots=True)
class Signal:
    """The details of one event; each event uses some of the fields."""

    now: float
    ticket: int = 0
    rank: int = 0
    epoch: int = 0
    ranks: tuple[int, ...] = ()
    message: str = ""
    applicant: Applicant | None = None
    report: Report | None = None


# What the outside shall do, in this order.


@dataclass(frozen=True, slots=True)
class Grant:
    """Answer a Join: yes."""

    ticket: int
    rank: int
    run: Run


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer a Join, a Leave or a progress stream: no."""

    ticket: int
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class LeaveDone:
    """Answer a Leave."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Install:
    """Write an epoch's entries, then call `Jobs.installed`."""

    plan: Epoch


@dataclass(frozen=True, slots=True)
class Revoke:
    """Delete an epoch's admit entries, then call `Jobs.revoked`. `why` is empty when the epoch ended well."""

    plan: Epoch
    why: str = ""


@dataclass(frozen=True, slots=True)
class Remove:
    """Read an epoch's counters and delete what is left of its entries, then call `Jobs.removed`."""

    plan: Epoch


@dataclass(frozen=True, slots=True)
class Register:
    """Tell a progress stream that it is registered."""

    stream: int


@dataclass(frozen=True, slots=True)
class TellFence:
    """Tell a progress stream that its epoch is over, and end it."""

    stream: int
    fence: Fence


@dataclass(frozen=True, slots=True)
class TellLeft:
    """Tell a progress stream that a peer has left."""

    stream: int
    rank: int
    submitted: int


@dataclass(frozen=True, slots=True)
class Close:
    """End a progress stream."""

    stream: int


Action = Grant | Refuse | LeaveDone | Install | Revoke | Remove | Register | TellFence | TellLeft | Close


@dataclass(frozen=True, slots=True)
class PoolView:
    """One pool, for status. `job` is empty and `epoch` 0 when it is free."""

    base: int
    size: int
    job: str
    epoch: int
