# SPDX-License-Identifier: Apache-2.0
"""What stands in for communicator and bucket where the hook's state is tested in one process."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from p4reduce.ddp import P4ReduceState, allreduce_hook


class FakeCommunicator:
    """Sums over one rank, or fails: `failures` maps the number of a call to the error its future gets."""

    def __init__(self, failures: dict[int, Exception] | None = None, world_size: int = 1) -> None:
        self.world_size = world_size
        self.failures = failures or {}
        self.calls: list[tuple[int, str]] = []
        self.memory: list[tuple[int, int]] = []
        self.fired = 0
        self.closed = 0

    def allreduce_async(self, array: Any, op: str = "sum", out: Any = None) -> Future[Any]:
        assert array.dtype == np.float32
        assert array.ctypes.data == out.ctypes.data, "the hook must reduce in place"
        number = len(self.calls)
        self.calls.append((array.size, op))
        self.memory.append((array.ctypes.data, array.nbytes))
        future: Future[Any] = Future()
        if number in self.failures:
            self.fired += 1
            future.set_exception(self.failures[number])
        else:
            future.set_result(out)
        return future

    def stats(self) -> dict[str, int]:
        return {"frames_sent": len(self.calls)}

    def close(self) -> None:
        self.closed += 1


class FakeBucket:
    def __init__(self, buffer: torch.Tensor, last: bool = True) -> None:
        self._buffer, self._last = buffer, last

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def is_last(self) -> bool:
        return self._last

    def index(self) -> int:
        return 0


def model(hidden: int = 16) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 4))


def wrapped(state: P4ReduceState) -> DistributedDataParallel:
    # About 200 bytes: every layer gets a bucket of its own once DDP has rebuilt them after the first step.
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.0002)
    ddp.register_comm_hook(state, allreduce_hook)
    return ddp


def backward(ddp: torch.nn.Module) -> None:
    ddp(torch.ones(2, 8)).square().sum().backward()
