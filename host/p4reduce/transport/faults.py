# SPDX-License-Identifier: Apache-2.0
"""A transport that loses, duplicates and reorders frames on purpose, both ways, from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from p4reduce import constants
from p4reduce.core.batch import PayloadRows, ReceiveBatch, SendBatch
from p4reduce.errors import ConfigError
from p4reduce.transport.base import Address, Transport, TransportCounters
from p4reduce.wire import HEADER, Profile


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Probability per frame and direction, 0 to 1. `reorder`: the frame is overtaken by the next ones."""

    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0

    def __post_init__(self) -> None:
        for name in ("loss", "duplicate", "reorder"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"{name} is a probability from 0 to 1, not {value!r}")

    def __bool__(self) -> bool:
        return bool(self.loss or self.duplicate or self.reorder)


@dataclass(slots=True)
class FaultCounters:
    """Faults that really happened, both directions together."""

    lost: int = 0
    duplicated: int = 0
    reordered: int = 0


class _Faults:
    """One direction: decides what becomes of each frame. Which frames meet which decision depends on timing; how
    many faults there are among n frames depends on the seed alone."""

    def __init__(self, rates: FaultRates, seed: str, counters: FaultCounters) -> None:
        self._rates = rates
        self._random = random.Random(seed)
        self._counters = counters
        self._held: list[bytes] = []

    def apply(self, frames: Iterable[bytes]) -> list[bytes]:
        """What arrives when `frames` are put in. Frames held back earlier come out behind them."""
        out: list[bytes] = []
        late, self._held = self._held, []
        for frame in frames:
            if self._hit(self._rates.loss):
                self._counters.lost += 1
                continue
            copies = 1
            if self._hit(self._rates.duplicate):
                self._counters.duplicated += 1
                copies = 2
            if self._hit(self._rates.reorder):
                # One copy is overtaken by everything that comes until the next call, and by that call's frames.
                self._counters.reordered += 1
                self._held.append(frame)
                copies -= 1
            out.extend([frame] * copies)
        if late and not out:
            # Nothing has overtaken them yet.
            self._held = late + self._held
            return out
        return out + late

    def _hit(self, rate: float) -> bool:
        return rate > 0.0 and self._random.random() < rate


class FaultyTransport:
    """Wraps a transport; see `Transport` for the methods. For tests and demonstrations: it copies every frame."""

    def __init__(self, inner: Transport, rates: FaultRates, seed: int = 0) -> None:
        self.inner = inner
        self.faults = FaultCounters()
        self._outgoing = _Faults(rates, f"{seed} out", self.faults)
        self._incoming = _Faults(rates, f"{seed} in", self.faults)
        self._arrived: list[bytes] = []

    @property
    def profile(self) -> Profile:
        """The wrapped transport's."""
        return self.inner.profile

    @property
    def local(self) -> Address:
        """The wrapped transport's."""
        return self.inner.local

    @property
    def mtu(self) -> int:
        """The wrapped transport's."""
        return self.inner.mtu

    @property
    def receive_frames(self) -> int:
        """The wrapped transport's."""
        return self.inner.receive_frames

    @property
    def counters(self) -> TransportCounters:
        """The wrapped transport's: what really crossed it."""
        return self.inner.counters

    def set_endpoint(self, endpoint: Address) -> None:
        """Passed on."""
        self.inner.set_endpoint(endpoint)

    def fileno(self) -> int:
        """The wrapped transport's."""
        return self.inner.fileno()

    def receive(self, batch: ReceiveBatch) -> int:
        """Receive with faults. Duplicates may exceed the batch; the rest comes with the next call."""
        taken = self.inner.receive(batch)
        if batch.count:
            self._arrived += self._incoming.apply(_datagrams(batch))
        batch.clear()
        while self._arrived and batch.count < batch.capacity:
            batch.append(self._arrived.pop(0))
        return max(taken, batch.count)

    def send(self, batch: SendBatch) -> int:
        """Send with faults. A frame lost here counts as sent."""
        frames = self._outgoing.apply(batch.frames())
        for first in range(0, len(frames), batch.capacity):
            self.inner.send(_batch(frames[first : first + batch.capacity], self.profile))
        return batch.count

    def close(self) -> None:
        """Passed on; frames held back are gone."""
        self.inner.close()


def _datagrams(batch: ReceiveBatch) -> list[bytes]:
    """All datagrams of a batch as bytes. One that is too long comes out one byte longer than a full frame."""
    out = []
    limit = batch.profile.datagram_bytes
    for row in range(batch.count):
        size = int(batch.sizes[row])
        whole = batch.headers[row].tobytes() + batch.payload[row].tobytes()
        out.append(whole[:size] if size <= limit else whole + b"\0")
    return out


def _batch(frames: list[bytes], profile: Profile) -> SendBatch:
    batch = SendBatch(len(frames))
    rows = np.zeros((len(frames), profile.payload_bytes), dtype=np.uint8)
    sizes = np.zeros(len(frames), dtype=np.int64)
    for row, frame in enumerate(frames):
        batch.headers[row] = np.frombuffer(frame, dtype=HEADER, count=1)[0]
        payload = np.frombuffer(frame, dtype=np.uint8)[constants.HEADER_BYTES :]
        rows[row, : len(payload)] = payload
        sizes[row] = len(payload)
    batch.count = len(frames)
    batch.groups.append(PayloadRows(0, len(frames), rows, np.arange(len(frames)), sizes))
    return batch


Wrap = Callable[[Transport], Transport]
"""How `local()` puts faults between a worker and its socket."""
