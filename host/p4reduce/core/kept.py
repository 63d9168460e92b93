# SPDX-License-Identifier: Apache-2.0
"""A bucket as the ring path needs it: the same integers that the switch has added, or would have.

When an epoch ends, ranks stand at different places. Every bucket from the first that some rank lacks is summed again,
by all ranks, without the switch. Whoever had delivered it takes part with the contribution it kept and compares.
A Kept belongs to one thread at a time, like the bucket's arrays; it shares nothing with any core.
"""

from __future__ import annotations

import numpy as np

from p4reduce.core.bucket import Barrier, Bucket, IntegerReduction, Reduction
from p4reduce.core.part import SumPart
from p4reduce.core.states import Phase, Step
from p4reduce.errors import IntegrityError, UsageError
from p4reduce.integers import from_lanes, to_lanes
from p4reduce.quantize import PIECE, Exponents, LaneFormat, Lanes, Quantizer, block_exponents


class Kept:
    """One bucket: `exponents()`, then the ring's maximum, `integers()`, its sum, `finish()`; `release()` at the end."""

    def __init__(
        self,
        bucket: Bucket,
        number: int,
        fmt: LaneFormat,
        *,
        rank: int | None = None,
        delivered: bool = False,
        part: SumPart | None = None,
        local: Exponents | None = None,
    ) -> None:
        """For the core. `part`: its share of the ADD stream, if it got so far; `local`: its own exponents, if found."""
        self.bucket = bucket
        self.number = number
        self.delivered = delivered
        """The switch path has completed it: its arrays are the caller's again. Does not change."""
        self.format = fmt
        """The bucket's own."""
        self._rank = rank
        self._part = part
        self._local = local
        self._released = False

    @classmethod
    def fresh(cls, bucket: Bucket, number: int, fmt: LaneFormat, rank: int | None = None) -> Kept:
        """A bucket that no core has seen, in a job with this default format. Sets its number.

        `rank`: this worker's, which stochastic rounding needs. UsageError without it, for a bucket that a core has
        seen, for one whose lanes are too narrow for so many workers, and for what is no bucket.
        """
        if not isinstance(bucket, Barrier | Reduction | IntegerReduction):
            raise UsageError(f"a bucket is a Reduction or a Barrier, not a {type(bucket).__name__}")
        if bucket.phase is not Phase.NEW:
            raise UsageError(f"{bucket.describe()} has been submitted before")
        if rank is None and isinstance(bucket, Reduction) and bucket.rounding == "stochastic":
            raise UsageError("stochastic rounding needs the rank, whose random numbers it uses")
        fmt = bucket.lane_format(fmt)
        fmt.require_usable()
        bucket.number = number
        bucket.step(Step.HAND_OVER)
        return cls(bucket, number, fmt, rank=rank)

    @property
    def count(self) -> int:
        """Elements; 0 for a barrier."""
        return self.bucket.size

    def exponents(self) -> Exponents:
        """This rank's own block exponents, never the agreed ones: uint8 of shape (blocks,), a copy.

        They are found now where the core had not come to it; the data are still as submitted then. Integers have none.
        """
        self._require_held()
        if self._local is None:
            data = self.bucket.data if isinstance(self.bucket, Reduction) else np.zeros(0, dtype=np.float32)
            self._local = block_exponents(data, self.format.block)
        local: Exponents = self._local.copy()
        return local

    def integers(self, agreed: Exponents) -> Lanes:
        """This rank's contribution u = q + bias, native lanes of shape (count,), a new array.

        What was encoded for the switch is taken from there: the data may have been written over since. The rest, or
        all of it when nothing was encoded or other exponents are agreed now, is quantized from the data, and the
        residual of that written. Raises IntegrityError when other exponents are agreed and the data are gone.
        """
        self._require_held()
        self._require_agreed(agreed)
        lanes = np.empty(self.count, dtype=self.format.lane_type)
        if not self.count:
            return lanes
        done = 0
        if self._part is not None and self._part.uses(agreed):
            done = self._part.contribution(lanes)
        elif self.delivered or (self._part is not None and self._part.written_over):
            raise IntegrityError(
                f"{self.bucket.describe()}: the ranks agree on other exponents than over the switch, "
                f"and the data that would have to be rounded anew are gone",
                bucket=self.number,
            )
        if done < self.count:
            self._make(agreed, lanes[done:], done)
        return lanes

    def _make(self, agreed: Exponents, lanes: Lanes, start: int) -> None:
        """Integers of the elements from `start` on, and residuals with them: the same as the core would have made."""
        bucket = self.bucket
        if isinstance(bucket, IntegerReduction):
            to_lanes(bucket.data[start:], self.format, lanes)
        elif isinstance(bucket, Reduction):
            stream = bucket.stream(self._rank) if self._rank is not None else None
            residual = bucket.residual[start:] if bucket.residual is not None else None
            quantizer = Quantizer(self.format, min(len(lanes), PIECE))
            quantizer.quantize(bucket.data[start:], agreed, lanes, start, stream=stream, residual=residual)

    def finish(self, sums: Lanes, agreed: Exponents) -> None:
        """Take the sum of all ranks' integers, native lanes of shape (count,).

        Not delivered: the result is written to the bucket's `out`, and the bucket is complete. Delivered: nothing is
        written. Raises IntegrityError when what the switch had sent is not the same, and writes nothing then. Integers
        whose sum does not fit complete their bucket with its error.
        """
        self._require_held()
        self._require_agreed(agreed)
        if sums.shape != (self.count,) or sums.dtype != self.format.lane_type:
            raise UsageError(
                f"{self.bucket.describe()} needs {self.count} {np.dtype(self.format.lane_type).name} sums, "
                f"not {sums.dtype} of shape {sums.shape}"
            )
        if self._part is not None:
            self._compare(self._part, sums, agreed)
        if self.delivered:
            return
        if isinstance(self.bucket, Reduction) and self.count:
            quantizer = Quantizer(self.format, min(self.count, PIECE))
            quantizer.dequantize(sums, agreed, self.bucket.out, self.bucket.mean)
        elif isinstance(self.bucket, IntegerReduction):
            self.bucket.error = from_lanes(sums, self.format, self.bucket.out)
        self.bucket.step(Step.FINISH)

    def release(self) -> None:
        """Free the memory. A bucket that has not been finished is the caller's again, without a result."""
        if self._released:
            return
        self._released = True
        if self.bucket.phase is Phase.HANDED_OVER:
            self.bucket.step(Step.ABANDON)
        if self._part is not None:
            self._part.drop()
        self._part = self._local = None

    def _compare(self, part: SumPart, sums: Lanes, agreed: Exponents) -> None:
        """Every result that the switch has sent must be the ring's, bit by bit."""
        if part.uses(agreed):
            if part.agrees(sums):
                return
            text = "switch and ring have added the same integers to different sums"
        elif self.delivered:
            text = "it was delivered with other exponents than the ranks agree on now"
        else:
            return  # nothing has been delivered, and integers() has found the data intact
        raise IntegrityError(f"{self.bucket.describe()}: {text}", bucket=self.number)

    def _require_agreed(self, agreed: Exponents) -> None:
        blocks = self.bucket.blocks(self.format)
        if agreed.dtype != np.uint8 or agreed.shape != (blocks,):
            raise UsageError(f"{blocks} uint8 block exponents needed, not {agreed.dtype} of shape {agreed.shape}")

    def _require_held(self) -> None:
        if self._released:
            raise UsageError(f"{self.bucket.describe()} has been released")

    def __repr__(self) -> str:
        state = "delivered" if self.delivered else self.bucket.phase.name
        return f"<Kept {self.bucket.describe()}: {state}>"
