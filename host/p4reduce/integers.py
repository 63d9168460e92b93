# SPDX-License-Identifier: Apache-2.0
"""int32 to lanes and back, exactly: u = x + bias in lanes of 64 bits, in which up to 64 of them cannot carry.

No block has an exponent, so a bucket's one OR chunk carries nothing but the digest of what is reduced. A sum that
does not fit int32 is found when the sums have come, by all ranks alike.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from p4reduce.errors import UsageError
from p4reduce.packetize import ChunkCodec, Groups, Rows
from p4reduce.quantize import PIECE, LaneFormat, Lanes
from p4reduce.wire import Profile

Int32Array = npt.NDArray[np.int32]

LANE_BITS: Final = 64
_LIMITS: Final = np.iinfo(np.int32)


def integer_format(workers: int) -> LaneFormat:
    """The format of int32 buckets."""
    return LaneFormat(LANE_BITS, workers)


def to_lanes(x: Int32Array, fmt: LaneFormat, out: Lanes) -> None:
    """Write u = x + bias for every element of `x` into the uint64 vector `out`; what follows becomes zero (bias)."""
    lanes = out[: len(x)]
    np.copyto(lanes.view(np.int64), x)
    # Modulo 2^64, so a negative x takes away from the bias.
    np.add(lanes, np.uint64(fmt.bias), out=lanes)
    out[len(x) :] = fmt.bias


def from_lanes(sums: Lanes, fmt: LaneFormat, out: Int32Array) -> UsageError | None:
    """Write the sums of `fmt.workers` contributions, uint64, into `out`.

    Returns an error, and writes nothing, when one of them does not fit int32.
    """
    zero = np.uint64(fmt.workers * fmt.bias)
    scratch = np.empty(min(len(out), PIECE), dtype=np.uint64)
    for write in (False, True):
        for start in range(0, len(out), PIECE):
            piece = out[start : start + PIECE]
            wide = scratch[: len(piece)]
            np.subtract(sums[start : start + len(piece)], zero, out=wide)
            signed = wide.view(np.int64)
            if write:
                np.copyto(piece, signed, casting="unsafe")
            elif signed.min() < _LIMITS.min or signed.max() > _LIMITS.max:
                where = int(np.flatnonzero((signed < _LIMITS.min) | (signed > _LIMITS.max))[0])
                return UsageError(
                    f"the sum of element {start + where} over all ranks is {signed[where]}, which int32 cannot hold; "
                    f"nothing was written, on any rank"
                )
    return None


class IntegerCodec(ChunkCodec):
    """Turns buckets of `count` int32 into payload rows and back."""

    def __init__(self, profile: Profile, workers: int, count: int) -> None:
        """`count`: elements. Raises UsageError when the bucket has more chunks than a tag can number."""
        super().__init__(profile, integer_format(workers), count, blocks=0)

    def encode(self, x: Int32Array, first: int, last: int, rows: Rows, checks: Groups) -> None:
        """Fill rows[first:last] and checks[first:last]; arguments as of BucketCodec.encode()."""
        self._require_rows(rows, self.add_chunks)
        if x.dtype != np.int32 or x.shape != (self.count,):
            raise UsageError(f"this codec is for {self.count} int32, not {x.dtype} of shape {x.shape}")
        for start, stop in self._pieces(first, last):
            native = self._native[: stop - start]
            to_lanes(x[start * self.lanes : stop * self.lanes], self.fmt, native.reshape(-1))
            self._pack(native, start, stop, rows, checks)

    def decode(self, sums: Groups, out: Int32Array) -> UsageError | None:
        """Turn the sums of all chunks, uint64 of shape (add_chunks, groups), into `out`; returns as from_lanes()."""
        if out.shape != (self.count,) or sums.shape != (self.add_chunks, self.groups) or not sums.flags.c_contiguous:
            raise UsageError(f"this codec is for {self.count} elements, sums of {(self.add_chunks, self.groups)}")
        return from_lanes(sums.reshape(-1), self.fmt, out)
