# SPDX-License-Identifier: Apache-2.0
"""A network inside the process: transports without sockets, for tests that must not depend on the kernel."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from p4reduce.core.batch import ReceiveBatch, SendBatch
from p4reduce.transport.base import Address, TransportCounters, Waker
from p4reduce.wire import Profile

Switch = Callable[[Address, bytes], Iterable[tuple[Address, bytes]]]
"""Given a frame and where it came from, the frames to deliver and where to."""


class MemoryNetwork:
    """Connects any number of `MemoryTransport`s to one switch function. Thread-safe; the switch is called serially."""

    def __init__(self, switch: Switch, profile: Profile, *, capacity: int = 1024, mtu: int = 65535) -> None:
        """`capacity` datagrams wait for a transport, further ones are lost."""
        self.profile = profile
        self.capacity = capacity
        self.mtu = mtu
        self.lost = 0
        self._switch = switch
        self._lock = threading.Lock()
        self._members: dict[Address, MemoryTransport] = {}

    def attach(self, address: Address) -> MemoryTransport:
        """Open a transport at `address`. ValueError when it is taken."""
        with self._lock:
            if address in self._members:
                raise ValueError(f"{address} is taken")
            transport = MemoryTransport(self, address)
            self._members[address] = transport
            return transport

    def detach(self, address: Address) -> None:
        """Forget the transport at `address`; what is sent there from now on is lost."""
        with self._lock:
            self._members.pop(address, None)

    def carry(self, source: Address, frames: Iterable[bytes]) -> None:
        """Give frames to the switch and deliver what comes out."""
        with self._lock:
            for frame in frames:
                for destination, answer in self._switch(source, frame):
                    member = self._members.get(destination)
                    if member is None or not member.put(answer):
                        self.lost += 1


class MemoryTransport:
    """One end of a `MemoryNetwork`; see `Transport` for the methods."""

    def __init__(self, network: MemoryNetwork, address: Address) -> None:
        self._network = network
        self._local = address
        self._queue: deque[bytes] = deque()
        self._counters = TransportCounters()
        self._waker = Waker()

    @property
    def profile(self) -> Profile:
        """Decides how long a frame may be."""
        return self._network.profile

    @property
    def local(self) -> Address:
        """Where the network delivers to."""
        return self._local

    @property
    def mtu(self) -> int:
        """The network's, in bytes."""
        return self._network.mtu

    @property
    def receive_frames(self) -> int:
        """Datagrams that wait before any is lost."""
        return self._network.capacity

    @property
    def counters(self) -> TransportCounters:
        """Counts since the transport was attached."""
        return self._counters

    def set_endpoint(self, endpoint: Address) -> None:
        """Accepted and ignored: a memory network has one switch."""

    def fileno(self) -> int:
        """Descriptor that polls readable while datagrams wait."""
        return self._waker.fileno()

    def put(self, datagram: bytes) -> bool:
        """Queue one datagram; False when it is lost because the queue is full. Called by the network, serially."""
        if len(self._queue) >= self._network.capacity:
            return False
        self._queue.append(datagram)
        self._waker.wake()
        return True

    def receive(self, batch: ReceiveBatch) -> int:
        """See `Transport.receive`."""
        batch.clear()
        self._waker.drain()
        while self._queue and batch.count < batch.capacity:
            batch.append(self._queue.popleft())
        if self._queue:
            self._waker.wake()
        self._counters.received += batch.count
        return batch.count

    def send(self, batch: SendBatch) -> int:
        """See `Transport.send`. The switch runs in the caller's thread."""
        self._network.carry(self._local, batch.frames())
        self._counters.sent += batch.count
        return batch.count

    def close(self) -> None:
        """Leave the network. Safe to call twice."""
        self._network.detach(self._local)
        self._waker.close()
