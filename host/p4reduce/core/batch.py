# SPDX-License-Identifier: Apache-2.0
"""Batches of frames: what crosses the border between the sans-I/O core and a driver.

Both directions are arrays, so that a driver fills its system-call structures and the core checks headers for many
frames at once. A driver allocates one batch of each kind and reuses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from p4reduce import constants
from p4reduce.wire import HEADER, HeaderArray, Profile


class PayloadRows(NamedTuple):
    """Payloads of the frames `start` .. `stop` - 1 of a batch: row `index[i]` of `rows`, its first `sizes[i]` bytes.

    `rows` is a C-contiguous uint8 array of shape (n, payload bytes of a full frame). It belongs to a bucket and
    stays valid and unchanged until that bucket has completed.
    """

    start: int
    stop: int
    rows: npt.NDArray[np.uint8]
    index: npt.NDArray[np.int64]  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    sizes: npt.NDArray[np.int64]


class SendBatch:
    """Frames to send. `headers[:count]` are ready, `groups` cover the rows 0 .. count - 1 in order."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.headers: HeaderArray = np.zeros(capacity, dtype=HEADER)
        self.count = 0
        self.groups: list[PayloadRows] = []

    def clear(self) -> None:
        """Forget all frames; the header array is reused."""
        self.count = 0
        self.groups.clear()

    def frames(self) -> Iterator[bytes]:
        """Yield every frame as bytes, a copy each: for simulations and tests, not for the hot path."""
        for group in self.groups:
            for position, (row, size) in enumerate(zip(group.index, group.sizes, strict=True), group.start):
                yield self.headers[position].tobytes() + group.rows[row, :size].tobytes()


class ReceiveBatch:
    """Datagrams received. Row i: `headers[i]`, `payload[i]`, `sizes[i]` bytes in all (header included).

    A datagram longer than a full frame has a size greater than `profile.datagram_bytes`; one shorter than a header
    has a size below 32 and its header row is not to be read.
    """

    def __init__(self, profile: Profile, capacity: int) -> None:
        self.profile = profile
        self.capacity = capacity
        self.headers: HeaderArray = np.zeros(capacity, dtype=HEADER)
        self.payload: npt.NDArray[np.uint8] = np.zeros((capacity, profile.payload_bytes), dtype=np.uint8)
        self.sizes: npt.NDArray[np.int64] = np.zeros(capacity, dtype=np.int64)
        self.count = 0

    def clear(self) -> None:
        """Forget all datagrams; the arrays are reused."""
        self.count = 0

    def append(self, datagram: bytes | memoryview) -> None:
        """Add one datagram, a copy: for simulations and tests. ValueError when the batch is full."""
        if self.count == self.capacity:
            raise ValueError(f"the batch holds {self.capacity} datagrams")
        row, size = self.count, len(datagram)
        head = np.frombuffer(datagram, dtype=np.uint8, count=min(size, constants.HEADER_BYTES))
        self.headers[row : row + 1].view(np.uint8)[: len(head)] = head
        body = np.frombuffer(datagram, dtype=np.uint8)[constants.HEADER_BYTES :][: self.payload.shape[1]]
        self.payload[row, : len(body)] = body
        self.sizes[row] = size
        self.count += 1
