# SPDX-License-Identifier: Apache-2.0
"""What the admission logic keeps about jobs, and what it asks the outside to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

from p4reduce.core.config import RetransmissionPolicy
from p4reduce_controller.admission import Applicant, Refusal
from p4reduce_controller.entries import Epoch
from p4reduce_controller.states import LIVE, ON_SWITCH, State


class Path(Enum):
    """Where a job's buckets are summed. The value is what status shows."""

    SWITCH = "switch"
    RING = "ring"


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
    EVICTED = 9


@dataclass(frozen=True, slots=True)
class Fence:
    """The end of an epoch. `ranks` are to blame, where known."""

    reason: Reason
    message: str
    ranks: tuple[int, ...] = ()
    bucket: int = 0


class OrderKind(Enum):
    """What the ranks of a job are ordered to do; see `Order` in the protocol."""

    RUN_SWITCH = "run on the switch path"
    RUN_RING = "run on the ring path"
    STOP = "stop the switch path"
    TRIAL = "try a new epoch on the switch"
    HOLD = "hold new buckets back"


ASKING = frozenset({OrderKind.STOP, OrderKind.TRIAL, OrderKind.HOLD})
"""Orders that every rank answers."""


@dataclass(frozen=True, slots=True)
class Order:
    """What all ranks of a job shall do now. Numbers rise within a membership; fields not of the kind are 0."""

    number: int
    kind: OrderKind
    epoch: int = 0
    first_bucket: int = 0
    or_slots: int = 0
    add_slots: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """A rank's answer to the order with this number; `bucket` as the order's kind says."""

    order: int
    bucket: int = 0
    failed: bool = False
    message: str = ""


class WorkerState(Enum):
    """Where one rank of an epoch stands; the value is what status shows."""

    JOINED = "joined"
    REPORTING = "reporting"
    LEFT = "left"
    LOST = "lost"
    FENCED = "fenced"


@dataclass(slots=True)
class Seat:
    """A rank whose Join waits."""

    applicant: Applicant
    ticket: int
    expires: float


@dataclass(slots=True)
class Departure:
    """A Leave that waits for the others to complete what the rank took part in."""

    tickets: list[int]
    submitted: int
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
    credential: bytes = b""
    """What this rank has to present. Empty: nothing is asked for."""
    leaving: Departure | None = None
    silent: float = 0.0
    """Seconds without a result, as last reported for the present epoch; 0 when it does not wait."""
    counters: dict[str, int] = field(default_factory=dict)
    rtt: float = 0.0
    present: int = 0
    """The epoch of the order that it said it carries out."""
    known: bool = True
    """Whether its numbers are its own. Those of a record on disk are old, until it reports again."""
    expires: float | None = None
    """When it counts as lost, if it does not come back: set when its stream ended while the controller was stopped."""


@dataclass(slots=True)
class Doubt:
    """A stall reported for a bucket that some ranks did not seem to have handed in: they were asked."""

    fence: Fence
    rank: int
    due: float


@dataclass(slots=True)
class Run:
    """A membership: the ranks of a job from their common grant to the last leave or the fence."""

    epoch: int
    """Names the membership in Progress and Leave, whatever epochs follow."""
    present: int
    """The epoch of the path that the ranks are on."""
    order: Order
    """The current order."""
    running: Order
    """The last RUN_SWITCH or RUN_RING: what the ranks do meanwhile."""
    plan: Epoch | None
    """What is leased of the switch: the present epoch's, or that of the epoch being prepared, or none."""
    or_slots: int
    add_slots: int
    """The window of `plan`, or of the last one."""
    workers: dict[int, Worker]
    counters: dict[str, int] = field(default_factory=dict)
    """The switch's counters of epoch `counted`, as last read."""
    counted: int = 0
    waiting_since: float | None = None
    """Since when every rank has handed in a bucket that nobody completes; None when it is not so."""
    answers: dict[int, Answer] = field(default_factory=dict)
    """Of the ranks, to the current order."""
    due: float | None = None
    """When the answers must be there."""
    doubt: Doubt | None = None
    delay: float = 0.0
    """Seconds that the switch must have been healthy before the next promotion; 0: there was no trouble yet."""
    settled: float = 0.0
    """Since when the job is on its path."""
    not_before: float = 0.0
    """No promotion before this."""
    no_room: bool = False
    """The last promotion found no room; tried again when something comes free."""

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
    """The present membership; of a failed job, the last one."""
    reason: str = ""
    over_since: float | None = None
    """When it failed or ended."""
    misfits: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Ranks that were refused this round for their world size: the size, and the host they came from."""
    mode: str = "auto"
    ring: bool = False
    """Whether every rank of the membership has a ring path."""
    path: Path = Path.SWITCH
    path_reason: str = ""
    """Why it is on that path; empty: from the beginning, and nothing is wrong."""
    policy: RetransmissionPolicy = field(default_factory=RetransmissionPolicy)
    policy_changed: bool = False
    """Since the ranks were granted."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Times that it went, or had to begin, on the ring path, by reason."""
    promotions: int = 0

    @property
    def live(self) -> bool:
        """Whether workers may be reducing, on whichever path."""
        return self.state in LIVE and self.run is not None

    @property
    def installed(self) -> Epoch | None:
        """The epoch whose entries the switch must hold for this job, if there is one."""
        return self.run.plan if self.run is not None and self.state in ON_SWITCH else None

    @property
    def leased(self) -> Epoch | None:
        """The epoch whose lease this job holds: `installed`, or one that is being installed."""
        installing = self.state in (State.INSTALLING, State.PREPARING)
        return self.run.plan if self.run is not None and installing else self.installed


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker says on its progress stream. `trouble`: it cannot go on. Times in seconds."""

    job: str
    epoch: int
    rank: int
    submitted: int = 0
    completed: int = 0
    trouble: Fence | None = None
    answer: Answer | None = None
    silent: float = 0.0
    present: int = 0
    counters: Mapping[str, int] = field(default_factory=dict)
    rtt: float = 0.0
    credential: bytes = b""


@dataclass(slots=True)
class Ending:
    """An epoch that is over but still has entries on the switch. It keeps its lease until they are gone."""

    job: str
    plan: Epoch
    membership: int
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
    submitted: int = 0
    wait_seconds: float = 0.0


# What the outside shall do, in this order.


@dataclass(frozen=True, slots=True)
class Grant:
    """Answer a Join: yes. `run.epoch` names the membership, `order` says where to begin."""

    ticket: int
    rank: int
    run: Run
    order: Order
    credential: bytes
    policy: RetransmissionPolicy


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
    """Delete an epoch's admit entries, then call `Jobs.revoked`. `why` is empty unless the job failed."""

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


@dataclass(frozen=True, slots=True)
class TellOrder:
    """Tell a progress stream the job's current order."""

    stream: int
    order: Order


@dataclass(frozen=True, slots=True)
class TellReport:
    """Ask a progress stream for a report: at once, and again when `completed` buckets are complete, unless 0."""

    stream: int
    completed: int = 0


@dataclass(frozen=True, slots=True)
class TellPolicy:
    """Tell a progress stream the retransmission policy that counts from now on."""

    stream: int
    policy: RetransmissionPolicy


@dataclass(frozen=True, slots=True)
class Persist:
    """Write a job's record to disk before any action that follows. `record` is ready for JSON."""

    name: str
    record: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Forget:
    """Delete a job's record from disk; it may have none. `end`: how it ended, ready for JSON, is kept for a while."""

    name: str
    end: dict[str, Any] | None = None


Action = (
    Grant
    | Refuse
    | LeaveDone
    | Install
    | Revoke
    | Remove
    | Register
    | TellFence
    | TellLeft
    | TellOrder
    | TellReport
    | TellPolicy
    | Close
    | Persist
    | Forget
)


@dataclass(frozen=True, slots=True)
class PoolView:
    """One pool, for status. `job` is empty and `epoch` 0 when it is free."""

    base: int
    size: int
    job: str
    epoch: int
