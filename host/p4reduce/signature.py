# SPDX-License-Identifier: Apache-2.0
"""What a check says besides its payload: who contributed, and to what.

The linear check of the payload alone proves that nothing was corrupted, but not that every worker was counted
exactly once: the switch adds payload and check in one go, so a worker that it counted twice would pass. Therefore
every contribution's check also holds a signature: the odd key of its rank times an odd number made of epoch, round
and tag, modulo 2^64. The signatures of all ranks add up to the sum of their keys times that number. A rank that is
counted twice or missing, or a contribution from another round, chunk or epoch, gives another sum: keys differ and
odd numbers have inverses. OR frames, whose payload no linear check covers, carry the signature alone.
"""

from __future__ import annotations

import functools

import numpy as np

from p4reduce import constants
from p4reduce.packetize import Groups, mix, splitmix64

KEY_SEED = int.from_bytes(b"p4r-rank", "big")


@functools.cache
def rank_keys() -> Groups:
    """Keys of all possible ranks, uint64 of shape (256,), all odd; read-only. A rank has 8 bits on the wire."""
    keys: Groups = splitmix64(KEY_SEED, 256) | np.uint64(1)
    keys.flags.writeable = False
    return keys


def total_key(workers: int) -> np.uint64:
    """Sum of the keys of ranks 0 .. workers - 1, modulo 2^64."""
    total: np.uint64 = rank_keys()[:workers].sum(dtype=np.uint64)
    return total


def place(epoch: int, rounds: Groups, tags: Groups) -> Groups:
    """The odd number that stands for where a contribution belongs; `rounds` and `tags` are uint64 of one shape."""
    with np.errstate(over="ignore"):
        number: Groups = mix(mix(tags) + ((rounds << np.uint64(32)) | np.uint64(epoch))) | np.uint64(1)
    return number


def expected(header: np.void | dict[str, int]) -> int:
    """Signature that a single frame's header asks for: its rank's in a contribution, all ranks' in a result."""
    rounds = np.array([int(header["round"])], dtype=np.uint64)
    tags = np.array([int(header["tag"])], dtype=np.uint64)
    where = int(place(int(header["epoch"]), rounds, tags)[0])
    if header["kind"] == constants.KIND_RESULT:
        key = int(total_key(int(header["count_or_reason"])))
    else:
        key = int(rank_keys()[int(header["rank"])])
    return key * where % (1 << 64)
