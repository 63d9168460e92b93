# SPDX-License-Identifier: Apache-2.0
"""What a bucket asks for, in 16 bits: ranks that reduce different things under one number must refuse each other."""

from __future__ import annotations

from p4reduce import wire
from p4reduce.core.bucket import Bucket, IntegerReduction, Reduction
from p4reduce.quantize import LaneFormat


def bucket_digest(bucket: Bucket, default: LaneFormat) -> int:
    """Digest of a bucket's OR chunks in a job with this default, and what the ring path compares (docs/protocol.md).

    Covers operation, element count, dtype, lane and block size, and of a stochastic rounding the seed. ADD chunks
    carry a digest of this one and the agreed exponents.
    """
    fmt = bucket.lane_format(default)
    if isinstance(bucket, IntegerReduction):
        return wire.digest("integers", bucket.size, "int32", fmt.lane_bits, "sum")
    if not isinstance(bucket, Reduction):
        return wire.digest("barrier")
    mode = "mean" if bucket.mean else "sum"
    parts: list[int | str | bytes] = ["exponents", bucket.size, bucket.dtype, fmt.lane_bits, fmt.block, mode]
    if bucket.rounding != "nearest":
        parts += [bucket.rounding, bucket.seed.to_bytes(8, "big")]
    return wire.digest(*parts)
