# SPDX-License-Identifier: Apache-2.0
"""Every error p4reduce raises.

P4ReduceError
├── UsageError          the caller broke a rule: wrong dtype, wrong argument, call after close (also a ValueError)
├── ConfigError         a setting is missing or wrong; says which one and where it came from (also a ValueError)
├── ControllerError     the controller refused or could not be reached; carries the gRPC status code
├── SwitchError         the switch refused or could not be reached
├── TransportError      the worker's socket cannot do what the profile needs (MTU, address, port)
├── RingError           the collective library under the ring path failed
└── JobError            the job cannot go on in this epoch; every later call raises it again
    ├── MismatchError   the ranks disagree about what they reduce
    ├── IntegrityError  a sum failed its check again and again
    ├── WorkerLostError a worker died or left; carries its rank
    └── StalledError    a deadline passed; names the bucket and, where known, the ranks that are missing
"""

from __future__ import annotations


class P4ReduceError(Exception):
    """Root of all errors of this package."""


class UsageError(P4ReduceError, ValueError):
    """The caller broke a rule of the interface. Nothing was sent."""


class ConfigError(P4ReduceError, ValueError):
    """A setting is missing or makes no sense."""


class ControllerError(P4ReduceError):
    """The controller refused, or could not be reached.

    `code` is the name of the gRPC status code ("UNAVAILABLE", "ALREADY_EXISTS", ...).
    """

    def __init__(self, message: str, code: str = "UNKNOWN") -> None:
        super().__init__(message)
        self.code = code


class SwitchError(P4ReduceError):
    """The switch refused, or could not be reached."""


class TransportError(P4ReduceError):
    """The worker's socket cannot carry the frames of this profile."""


class RingError(P4ReduceError):
    """The collective library under the ring path failed, mostly because a rank is gone."""


class JobError(P4ReduceError):
    """The job cannot go on in this epoch.

    `job`, `bucket` and `ranks` say where it happened, as far as known.
    """

    def __init__(self, message: str, *, job: str = "", bucket: int | None = None, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.job = job
        self.bucket = bucket
        self.ranks = ranks


class MismatchError(JobError):
    """The ranks disagree about what they reduce: another shape, dtype, operation or order of calls."""


class IntegrityError(JobError):
    """The sum of a chunk did not match the workers' checks, several times in a row."""


class WorkerLostError(JobError):
    """A worker died, was cut off, or left while others still counted on it. `ranks` names it."""


class StalledError(JobError):
    """A deadline passed without a result. `ranks` names who is missing, where known."""
