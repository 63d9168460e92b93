# SPDX-License-Identifier: Apache-2.0
"""What the driver and the membership tell each other: trouble and what to make of it, and what goes into a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from p4reduce.core.events import Stalled
from p4reduce.errors import JobError, P4ReduceError
from p4reduce.orders import Answer


@dataclass(slots=True)
class Timings:
    """Seconds that the I/O thread spent, by what it did."""

    encode: float = 0.0
    """In the core, making frames to send: quantizing included."""
    wire: float = 0.0
    """In system calls that send and receive."""
    wait: float = 0.0
    """Asleep while buckets were pending."""
    decode: float = 0.0
    """In the core, taking results: dequantizing included."""


@dataclass(frozen=True, slots=True)
class RingFailed:
    """The ring path has ended with this error. No other path is left."""

    error: P4ReduceError


Trouble = P4ReduceError | Stalled | RingFailed
"""What a driver cannot go on with: an error or a stall of the core's, one of the ring's, or one of its own."""


def _nothing() -> None:
    pass


class Verdict:
    """What `Driver`'s on_trouble makes of a trouble."""

    def __init__(
        self,
        error: P4ReduceError | Callable[[], P4ReduceError],
        wait_seconds: float = 0.0,
        *,
        patience: Callable[[float], float] | None = None,
        withdraw: Callable[[], None] = _nothing,
        bucket: int | None = None,
    ) -> None:
        """`error`: what everything fails with when nothing better comes; a function where finding it takes time.

        `wait_seconds`: how long the control plane may take to name a better reason. `patience`: for trouble that an
        order of the controller's can mend: given the seconds since it began, the seconds that are left for that order.
        `withdraw` takes the report back, once an order has come or `bucket`, which was stalled, is complete.
        """
        self._error = error
        self._wait_seconds = wait_seconds
        self._patience = patience
        self._bucket = bucket
        self.withdraw = withdraw

    @property
    def recoverable(self) -> bool:
        """Whether an order of the controller's can mend it."""
        return self._patience is not None

    def left(self, seconds: float) -> float:
        """Seconds to wait still, `seconds` after it began. Ask again within a second: the answer may change."""
        if self._patience is None:
            return self._wait_seconds - seconds
        return min(self._patience(seconds), 1.0)

    def overtaken(self, bucket: int) -> bool:
        """Whether there is no trouble left now that `bucket` is complete."""
        return self._patience is not None and bucket == self._bucket

    def error(self) -> P4ReduceError:
        """The error; finding it may take a second or two."""
        if not isinstance(self._error, P4ReduceError):
            self._error = self._error()
        return self._error

    @property
    def kind(self) -> type[P4ReduceError] | None:
        """The error's type, None while it has not been made."""
        return type(self._error) if isinstance(self._error, P4ReduceError) else None


def better(fence: JobError, verdict: Verdict | None) -> P4ReduceError:
    """Of the controller's reason and our own the one that says more.

    Ours where both are of one kind, unless it is no more than a refusal by the switch, the echo of the fence.
    """
    if verdict is None or verdict.kind is JobError or verdict.kind is not type(fence):
        return fence
    return verdict.error()


@dataclass(frozen=True, slots=True)
class Silence:
    """The switch has been silent for `at_first` seconds at the time `since`, when so many `results` had come."""

    at_first: float
    since: float
    results: int

    def seconds(self, now: float) -> float:
        """How long it has lasted by now."""
        return self.at_first + now - self.since


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the controller is told in a report; see ProgressReport in proto/controller.proto."""

    submitted: int = 0
    completed: int = 0
    present: int = 0
    answer: Answer | None = None
    silent: float = 0.0
    counters: Mapping[str, int | float] = field(default_factory=dict)
    rtt: float = 0.0


def copy_error(error: P4ReduceError) -> P4ReduceError:
    """A fresh exception with the same content: raising one object again and again piles up its traceback."""
    if isinstance(error, JobError):
        return type(error)(str(error), job=error.job, bucket=error.bucket, ranks=error.ranks)
    return type(error)(str(error))
