# SPDX-License-Identifier: Apache-2.0
"""How large the system is that a check explores, and what every rank contributes in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from p4reduce.core.bucket import Barrier, Bucket, Reduction
from p4reduce.errors import ConfigError
from p4reduce.sim.runner import Scenario
from p4reduce.wire import MAX_BUCKET

Vector = npt.NDArray[np.float32]

PROFILE = "w5"
FULL_LANES = 320
"""32-bit lanes of a full frame of that profile."""
SHORT_LANES = 64
EPOCHS = (7, 8)
NEAR_WRAP = (1 << 32) - 2


@dataclass(frozen=True, slots=True)
class Bounds:
    """One system. Copies of frames are not bounded: any frame ever sent may arrive any number of times, or never."""

    workers: int = 2
    or_slots: int = 1
    add_slots: int = 1
    workload: tuple[int, ...] = (1, 1, 1)
    """The buckets that every rank submits at the start: a reduction's number of ADD chunks, 0 for a barrier."""
    first_round: int = NEAR_WRAP
    """Round of the first ADD chunk. By default rounds wrap on the way, and so do the tags' bucket numbers."""
    change: bool = False
    """At any moment the epoch may end, the switch may be restarted with all registers 0, and a new epoch begins."""
    amnesia: bool = False
    """The registers may become 0 at any moment while the epoch goes on: an assumption that does not hold. What must
    remain is safety; that every run completes is not asked."""
    disagree: bool = False
    """The last rank asks for another operation in its second bucket."""

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= 4 or not self.workload or min(self.workload) < 0:
            raise ConfigError("a check takes 1 to 4 workers and at least one bucket")
        if self.disagree and (self.workers < 2 or len(self.workload) < 2):
            raise ConfigError("ranks that disagree must be two, and their second buckets differ")
        if len(EPOCHS) * self.contributions >= SHORT_LANES:
            raise ConfigError(f"every contribution needs a lane of its own; there are {SHORT_LANES - 1}")

    @property
    def contributions(self) -> int:
        """ADD frames of one epoch."""
        return self.workers * sum(self.workload)

    @property
    def rounds(self) -> int:
        """Rounds that the busiest slot goes through."""
        return max(-(-len(self.workload) // self.or_slots), -(-sum(self.workload) // self.add_slots))

    def describe(self) -> str:
        """A short line: workers, slots, rounds, what else may happen."""
        extra = [name for name in ("change", "amnesia", "disagree") if getattr(self, name)]
        work = ",".join(map(str, self.workload))
        slots = f"{self.or_slots}+{self.add_slots}"
        return f"workers={self.workers} slots={slots} rounds={self.rounds} workload={work}" + "".join(
            f" +{name}" for name in extra
        )

    def scenario(self, epoch: int) -> Scenario:
        """The simulation's description of the job in one of EPOCHS, given by its place there."""
        return Scenario(
            self.workers,
            profile=PROFILE,
            or_slots=self.or_slots,
            add_slots=self.add_slots,
            epoch=EPOCHS[epoch],
            first_bucket=MAX_BUCKET - 1 if self.first_round else 0,
            first_chunk=self.first_round * self.add_slots,
        )

    def data(self, epoch: int, bucket: int, rank: int) -> Vector:
        """What a rank contributes to a reduction.

        Every contribution has an element that differs from 0 in a lane where those of all other ranks, chunks and
        epochs have 0. So a sum shows how often each was counted, and no wrong multiset gives the right sum. Signs and
        magnitudes differ between ranks, so that exponents must be agreed; the last lane is negative for all of them,
        so that its sum would reach the next lane if nothing kept them apart.
        """
        chunks = self.workload[bucket]
        before = epoch * sum(self.workload) + sum(self.workload[:bucket])
        vector = np.zeros((chunks - 1) * FULL_LANES + SHORT_LANES, dtype=np.float32)
        for chunk in range(chunks):
            lane = (before + chunk) * self.workers + rank
            vector[chunk * FULL_LANES + lane] = (-1.0) ** rank * 2.0 ** ((bucket + rank) % 3)
            vector[chunk * FULL_LANES + SHORT_LANES - 1] = -1.0
        return vector

    def buckets(self, epoch: int, rank: int) -> list[Bucket]:
        """Fresh buckets of a rank, in the order of submission."""
        made: list[Bucket] = []
        for number, chunks in enumerate(self.workload):
            if chunks == 0 and not self._odd(rank, number):
                made.append(Barrier())
                continue
            data = self.data(epoch, number, rank) if chunks else np.zeros(0, dtype=np.float32)
            made.append(Reduction(data, np.full_like(data, np.nan), mean=self._odd(rank, number)))
        return made

    def _odd(self, rank: int, bucket: int) -> bool:
        return self.disagree and rank == self.workers - 1 and bucket == 1
