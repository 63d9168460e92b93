# SPDX-License-Identifier: Apache-2.0
"""What the driver expects of a transport, and the wake-up call that every loop needs."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Protocol

from p4reduce.core.batch import ReceiveBatch, SendBatch
from p4reduce.wire import Profile

BATCH_FRAMES = 32
"""Frames that one system call moves. More gains little: the kernel's share per frame dominates by then."""

Address = tuple[str, int]
"""IPv4 address in dotted form, and port."""


@dataclass(slots=True)
class TransportCounters:
    """What became of datagrams below the protocol. All counts since the transport was opened."""

    sent: int = 0
    received: int = 0
    foreign: int = 0
    """Received from another address than the endpoint, and dropped."""
    oversized: int = 0
    """Longer than a full frame; passed on with their true size."""
    unsent: int = 0
    """The kernel would not take them (buffer full, link down): lost, the protocol sends them again."""
    waits: int = 0
    """Times that sending paused because the send buffer was full."""


class Transport(Protocol):
    """Moves whole batches of frames between a worker and one endpoint, without ever blocking for long.

    Frames may be lost, duplicated and reordered; they are never joined or split.
    """

    @property
    def profile(self) -> Profile:
        """Decides how long a frame may be."""

    @property
    def local(self) -> Address:
        """Where results must be sent."""

    @property
    def mtu(self) -> int:
        """MTU in bytes of the path to the endpoint."""

    @property
    def receive_frames(self) -> int:
        """Full frames that may wait in the receive buffer before any is lost."""

    @property
    def counters(self) -> TransportCounters:
        """Counts since the transport was opened."""

    def set_endpoint(self, endpoint: Address) -> None:
        """Choose where frames go and the only address they are accepted from."""

    def fileno(self) -> int:
        """File descriptor that polls readable while datagrams wait."""

    def receive(self, batch: ReceiveBatch) -> int:
        """Clear `batch` and fill it with what waits. Returns the datagrams taken off the queue, foreign ones included.

        0 means that nothing waits; a count above `batch.count` means that some were dropped here.
        """

    def send(self, batch: SendBatch) -> int:
        """Send all frames of `batch`; returns how many the kernel took. TransportError: they can never be sent."""

    def close(self) -> None:
        """Release the socket. Safe to call twice."""


class Waker:
    """Lets any thread end another thread's poll(). One reader, any number of writers.

    The owner serialises `wake` and `close`: a descriptor that is closed may already belong to somebody else.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False

    def fileno(self) -> int:
        """File descriptor that polls readable after `wake()`."""
        return self._fd

    def wake(self) -> None:
        """End the reader's poll, now or the next time it polls. Does nothing after `close`."""
        if not self._closed:
            os.eventfd_write(self._fd, 1)

    def drain(self) -> None:
        """Forget all wake-up calls so far."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Release the descriptor. Safe to call twice."""
        if not self._closed:
            self._closed = True
            os.close(self._fd)
