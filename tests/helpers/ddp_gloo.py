# SPDX-License-Identifier: Apache-2.0
"""What DistributedDataParallel without a hook makes of gradients: real gloo, all ranks in this process."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

Vector = npt.NDArray[np.float32]
TIMEOUT = timedelta(seconds=30)


def plain_means(buckets: Sequence[Sequence[Vector]]) -> list[Vector]:
    """The mean of every bucket, which holds one vector for each rank: divided first, then summed, as DDP does it."""
    ranks = len(buckets[0])
    store = dist.HashStore()

    def one_rank(rank: int) -> list[Vector]:
        options: Any = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = TIMEOUT
        group = dist.ProcessGroupGloo(store, rank, ranks, options)
        sums = [torch.from_numpy(bucket[rank].copy()).div_(ranks) for bucket in buckets]
        for tensor in sums:
            group.allreduce([tensor]).wait()
        return [tensor.numpy() for tensor in sums]

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(one_rank, range(ranks)))
    for others in results[1:]:
        for ours, theirs in zip(results[0], others, strict=True):
            assert ours.tobytes() == theirs.tobytes()
    return results[0]
