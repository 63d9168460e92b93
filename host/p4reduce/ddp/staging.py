# SPDX-License-Identifier: Apache-2.0
"""Buckets that are not float32 in CPU memory, on their way there and back.

A device copies in its own time: `fetch` and `put` only start, so that neither backward() nor the job waits for a copy
that the other could overlap. The code around it is the same for every device.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

Arrival = Callable[[], None]
"""Blocks until a copy has come to its end."""


class Device(Protocol):
    """How buckets of one device get into float32 vectors in CPU memory, and back."""

    immediate: bool
    """fetch() has nothing left to do when it returns."""

    def memory(self, count: int) -> torch.Tensor:
        """A float32 vector in CPU memory that fetch() and put() are quick with."""

    def fetch(self, buffer: torch.Tensor, host: torch.Tensor) -> Arrival:
        """Start copying a bucket, after everything that its device has been told to do with it."""

    def put(self, host: torch.Tensor, buffer: torch.Tensor) -> Arrival:
        """Start copying back, rounding to the bucket's dtype. Within `context()`."""

    def context(self) -> AbstractContextManager[Any]:
        """Around put() and the completion of the bucket's future, which so comes after the copy."""


def arrived() -> None:
    """The arrival of what is there already."""


class HostDevice:
    """CPU memory: float16 and bfloat16."""

    immediate = True

    def memory(self, count: int) -> torch.Tensor:
        """See Device."""
        return torch.empty(count)

    def fetch(self, buffer: torch.Tensor, host: torch.Tensor) -> Arrival:
        """See Device."""
        host.copy_(buffer.detach())
        return arrived

    def put(self, host: torch.Tensor, buffer: torch.Tensor) -> Arrival:
        """See Device."""
        buffer.detach().copy_(host)
        return arrived

    def context(self) -> AbstractContextManager[Any]:
        """See Device."""
        return contextlib.nullcontext()


class CudaDevice:
    """One CUDA device: pinned memory and a stream of its own, so that copies run beside what backward() computes."""

    immediate = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def memory(self, count: int) -> torch.Tensor:
        """See Device."""
        return torch.empty(count, pin_memory=True)

    def fetch(self, buffer: torch.Tensor, host: torch.Tensor) -> Arrival:
        """See Device."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # Widened on the device, which is good at it.
            host.copy_(buffer.detach().float(), non_blocking=True)
            buffer.record_stream(self._stream)
            done = self._stream.record_event()
        return done.synchronize  # type: ignore[no-any-return]

    def put(self, host: torch.Tensor, buffer: torch.Tensor) -> Arrival:
        """See Device."""
        if buffer.dtype == host.dtype:
            buffer.detach().copy_(host, non_blocking=True)
        else:
            # Narrowed on the device: a copy that changes the dtype would do that on the host first, and wait.
            buffer.detach().copy_(host.to(self._device, non_blocking=True))
        buffer.record_stream(self._stream)
        return self._stream.record_event().synchronize  # type: ignore[no-any-return]

    def context(self) -> AbstractContextManager[Any]:
        """See Device. A Future made with `devices=` lets its waiters wait for the stream that is current here."""
        return torch.cuda.stream(self._stream)


def device_of(buffer: torch.Tensor) -> Device:
    """A device for buckets like this one."""
    return CudaDevice(buffer.device) if buffer.is_cuda else HostDevice()


def present_stream(buffer: torch.Tensor) -> Callable[[], AbstractContextManager[Any]] | None:
    """What brings another thread to the stream that is current here and now; None where there are no streams."""
    if not buffer.is_cuda:
        return None
    stream = torch.cuda.current_stream(buffer.device)
    return lambda: torch.cuda.stream(stream)


class Scratch:
    """Vectors that are used again in the next step, because fresh memory costs more than the copy into it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._free: dict[int, list[tuple[torch.Tensor, Arrival]]] = {}
        self._sizes: set[int] = set()
        """What this step has needed."""

    def take(self, count: int) -> torch.Tensor:
        """A float32 vector; whatever was copied from it before has arrived."""
        with self._lock:
            self._sizes.add(count)
            kept = self._free.get(count)
            found = kept.pop() if kept else None
        if found is None:
            return self.device.memory(count)
        memory, arrival = found
        arrival()
        return memory

    def give(self, memory: torch.Tensor, arrival: Arrival) -> None:
        """Take a vector back. It is not used before `arrival`."""
        with self._lock:
            self._free.setdefault(memory.numel(), []).append((memory, arrival))

    def next_step(self) -> None:
        """Forget the sizes that the last step had no use for: DDP has built its buckets anew."""
        with self._lock:
            if self._sizes:
                self._free = {size: kept for size, kept in self._free.items() if size in self._sizes}
                self._sizes = set()

    @property
    def held(self) -> int:
        """Elements that lie ready."""
        with self._lock:
            return sum(size * len(kept) for size, kept in self._free.items())
