# SPDX-License-Identifier: Apache-2.0
"""What a worker's core is told when an epoch begins. Every rank of a job gets the same, but for its rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from p4reduce import constants
from p4reduce.errors import ConfigError, UsageError
from p4reduce.quantize import BLOCKS, LaneFormat
from p4reduce.wire import Profile


@dataclass(frozen=True, slots=True)
class RetransmissionPolicy:
    """When a worker sends again and when it gives up hope. The controller hands it out; times in seconds.

    The timeout of RFC 6298 starts at `initial` and stays within `minimum` and `maximum`, back-off included.
    After `deadline` seconds without any result the core reports a stall. A chunk is sent again early once
    `early_resend` chunks sent after it have their results; 0 turns that off.

    After `silent` seconds without a result though chunks are outstanding the controller is told. Where all ranks have
    handed the bucket in, `fallback` seconds of that end the switch path of a job that has a ring path. `window` bounds
    the slots that a worker uses at once; 0: all that were leased.
    """

    initial: float = 0.05
    minimum: float = 0.01
    maximum: float = 0.5
    deadline: float = 60.0
    early_resend: int = 3
    silent: float = 0.5
    fallback: float = 1.0
    window: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.minimum <= self.initial <= self.maximum < float("inf"):
            raise ConfigError(
                f"retransmission timeouts must be 0 < minimum <= initial <= maximum, "
                f"not {self.minimum} <= {self.initial} <= {self.maximum}"
            )
        if not self.maximum <= self.deadline < float("inf"):
            raise ConfigError(f"the deadline ({self.deadline} s) must not be below the maximum ({self.maximum} s)")
        if self.early_resend < 0:
            raise ConfigError(f"early_resend must be 0 (off) or a number of results, not {self.early_resend}")
        if not 0.0 < self.silent <= self.fallback < float("inf"):
            raise ConfigError(f"it must be 0 < silent <= fallback, not {self.silent} <= {self.fallback}")
        if self.window < 0 or self.window == 1:
            raise ConfigError(f"window must be 0 (all that was leased) or at least 2 slots, not {self.window}")


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """One worker's place in one epoch of a job.

    The OR stream owns the pool's slots 0 .. or_slots - 1, the ADD stream the add_slots after them. `first_bucket`
    and `first_chunk` number the first bucket and the first chunk of both streams; they are 0 but in tests, which
    start shortly before the numbers wrap. `lane_bits` and `block` are for buckets that do not say otherwise; block 0
    stands for the size that goes with the lanes.
    """

    job: str
    epoch: int
    rank: int
    world_size: int
    profile: Profile
    or_slots: int
    add_slots: int
    policy: RetransmissionPolicy = field(default_factory=RetransmissionPolicy)
    lane_bits: int = 32
    block: int = 0
    first_bucket: int = 0
    first_chunk: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.epoch < 1 << 32:
            raise ConfigError(f"an epoch is a number of 32 bits and never 0, not {self.epoch}")
        if not 1 <= self.world_size <= constants.MAX_WORKERS:
            raise ConfigError(f"a switch serves 1..{constants.MAX_WORKERS} workers, not {self.world_size}")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} is not one of 0..{self.world_size - 1}")
        if self.or_slots < 1 or self.add_slots < 1 or self.or_slots + self.add_slots > constants.SLOTS:
            raise ConfigError(
                f"each stream needs a slot and both have at most {constants.SLOTS}, "
                f"not {self.or_slots} + {self.add_slots}"
            )
        if self.first_bucket < 0 or self.first_chunk < 0:
            raise ConfigError("buckets and chunks are numbered from 0 or more")
        if self.block == 0 and self.lane_bits in BLOCKS:
            object.__setattr__(self, "block", BLOCKS[self.lane_bits])
        try:
            self.lane_format.require_usable()
        except UsageError as error:
            raise ConfigError(str(error)) from None

    @property
    def lane_format(self) -> LaneFormat:
        """Of buckets that do not say otherwise."""
        return LaneFormat(self.lane_bits, self.world_size, self.block)
