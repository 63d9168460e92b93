# SPDX-License-Identifier: Apache-2.0
"""What the core tells its driver."""

from __future__ import annotations

from dataclasses import dataclass

from p4reduce.core.bucket import Bucket
from p4reduce.errors import JobError
from p4reduce.wire import Op


@dataclass(frozen=True, slots=True)
class Completed:
    """A bucket has its result."""

    bucket: Bucket


@dataclass(frozen=True, slots=True)
class Failed:
    """The epoch is over for this worker. Comes once; call fail() to get the unfinished buckets back."""

    error: JobError


@dataclass(frozen=True, slots=True)
class Stalled:
    """A stream has had no result for a deadline though chunks are outstanding; comes again after every further one.

    The core goes on sending: what to make of it is the driver's decision.
    """

    bucket: int
    """Number of the bucket whose chunk has waited longest."""
    stream: Op
    seconds: float
    """How long the stream has had no result."""
    outstanding: int
    """Chunks of the stream that wait."""


@dataclass(frozen=True, slots=True)
class Silent:
    """A stream has had no result for policy.silent seconds though chunks are outstanding; comes again as Stalled does.

    Far earlier than Stalled, and no trouble by itself: a rank may simply not have come so far. Who knows whether all
    ranks have submitted the bucket can tell.
    """

    bucket: int
    """Number of the bucket whose chunk has waited longest."""
    seconds: float
    """How long the stream has had no result."""


Event = Completed | Failed | Stalled | Silent
