# SPDX-License-Identifier: Apache-2.0
"""What two gloo ranks train for the tests of the hook, and what stands in for the switch there."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from helpers.ddp_models import Model
from p4reduce.ddp import P4ReduceState, allreduce_hook
from p4reduce.errors import WorkerLostError

WORLD = 2
SMALL_BUCKETS = 0.0005  # MiB: about 500 bytes, so the model below needs several buckets

Result = dict[str, Any]


class GlooCommunicator:
    """Stands in for the switch: means over a gloo group, in float64, from its own thread, in order of submission."""

    def __init__(self, fail_at: int = -1) -> None:
        self.world_size = WORLD
        self.fail_at = fail_at
        self.calls = 0
        self.fired = 0
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
        self._thread = ThreadPoolExecutor(1)

    def allreduce_async(self, array: Any, op: str = "sum", out: Any = None) -> Future[Any]:
        number = self.calls
        self.calls += 1
        return self._thread.submit(self._reduce, array, out, number)

    def _reduce(self, array: Any, out: Any, number: int) -> Any:
        if number == self.fail_at:
            self.fired += 1
            raise WorkerLostError("rank 1 is gone", job="test", bucket=number, ranks=(1,))
        total = torch.from_numpy(array.astype(np.float64))
        dist.all_reduce(total, group=self._group)
        out[:] = (total / WORLD).numpy().astype(np.float32)
        return out

    def stats(self) -> dict[str, int]:
        return {"calls": self.calls}

    def close(self) -> None:
        self._thread.shutdown()


class Lookup(torch.nn.Module):
    """One layer with sparse gradients, one without."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = torch.nn.Embedding(7, 4, sparse=True)
        self.head = torch.nn.Linear(4, 1)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.table(index))
        return out


def data(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 10, generator=generator).to(dtype)


def gradients(model: torch.nn.Module) -> list[np.ndarray[Any, Any]]:
    dense = [p.grad.to_dense() if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return [g.detach().to(torch.float64).numpy().copy() for g in dense]


def train(ddp: torch.nn.Module, rank: int, steps: int, dtype: torch.dtype = torch.float32, **arguments: Any) -> Any:
    """Train with SGD. Returns the gradients of every step."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    history = []
    for step in range(steps):
        optimizer.zero_grad()
        ddp(data(rank, step, dtype), **arguments).square().mean().backward()
        history.append(gradients(ddp))
        optimizer.step()
    return history


def compare(rank: int, steps: int = 4, dtype: torch.dtype = torch.float32, call: Any = None, **options: Any) -> Result:
    """Train twice, with the hook and without."""
    options.setdefault("bucket_cap_mb", SMALL_BUCKETS)
    call = call or {}
    plain = train(DistributedDataParallel(Model(dtype), **options), rank, steps, dtype, **call)
    with P4ReduceState(GlooCommunicator(), own_comm=True, timeout=30) as state:
        ddp = DistributedDataParallel(Model(dtype), **options)
        ddp.register_comm_hook(state, allreduce_hook)
        hooked = train(ddp, rank, steps, dtype, **call)
        return {"plain": plain, "hooked": hooked, "stats": state.stats()}
