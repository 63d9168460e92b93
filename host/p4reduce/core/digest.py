# SPDX-License-Identifier: Apache-2.0
"""What a bucket asks for, in 16 bits: ranks that reduce different things under one number must refuse each other."""

from __future__ import annotations

from p4reduce import wire
from p4reduce.core.bucket import Bucket, Reduction


def bucket_digest(bucket: Bucket, lane_bits: int, block: int) -> int:
    """Digest of a bucket's OR chunks, and what the ring path compares (docs/protocol.md, "Numbers").

    Covers operation, element count, dtype, lane and block size. ADD chunks carry a digest of this one and the agreed
    exponents.
    """
    if not isinstance(bucket, Reduction):
        return wire.digest("barrier")
    mode = "mean" if bucket.mean else "sum"
    return wire.digest("exponents", bucket.data.size, "float32", lane_bits, block, mode)
