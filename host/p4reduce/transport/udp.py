# SPDX-License-Identifier: Apache-2.0
"""One UDP socket per worker, with batched system calls where the platform has them.

Nothing is fragmented: IP_MTU_DISCOVER is IP_PMTUDISC_DO, because BMv2 and the program see single packets only. The
UDP checksum is off (SO_NO_CHECK): the switch changes the payload without touching it, and the frame's own check is
stronger.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
from typing import Protocol

import numpy as np
import numpy.typing as npt

from p4reduce import constants
from p4reduce.core.batch import ReceiveBatch, SendBatch
from p4reduce.errors import TransportError
from p4reduce.transport import mmsg
from p4reduce.transport.base import Address, TransportCounters
from p4reduce.transport.limits import buffered_frames, check_mtu, frame_truesize, path_mtu, set_buffers
from p4reduce.wire import Profile

# <linux/in.h> and <asm-generic/socket.h>: Python does not name these.
_IP_MTU_DISCOVER = 10
_IP_PMTUDISC_DO = 2
_SO_NO_CHECK = 11

_LONGEST_DATAGRAM = 1 << 16

_SEND_WAIT_SECONDS = 0.05
"""Longest pause for a full send buffer. Results wait in the receive buffer meanwhile, which holds the whole window."""

_TRANSIENT = frozenset(
    (
        errno.EAGAIN,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ECONNREFUSED,
        errno.EPERM,  # a packet filter's verdict
    )
)


class _Calls(Protocol):
    """How batches reach the socket."""

    def receive(self, sock: socket.socket, batch: ReceiveBatch, endpoint: Address | None) -> int:
        """Fill `batch` with the endpoint's datagrams; returns how many were taken off the queue, all sources."""

    def prepare(self, batch: SendBatch, endpoint: Address) -> None:
        """Choose what `send` sends, and where to."""

    def send(self, sock: socket.socket, first: int) -> int:
        """Send frames from `first` on; returns how many were taken (at least 1), or raises OSError."""


class _BatchedCalls:
    """recvmmsg and sendmmsg; the structures are kept for the batches seen last."""

    def __init__(self) -> None:
        self._receive: mmsg.ReceiveCall | None = None
        self._send: mmsg.SendCall | None = None
        self._name = np.zeros(2, dtype=np.uint64)
        self._named: Address | None = None

    def _sockaddr(self, endpoint: Address | None) -> npt.NDArray[np.uint64]:
        if endpoint is not None and endpoint != self._named:
            self._name = mmsg.sockaddr(*endpoint)
            self._named = endpoint
        return self._name

    def receive(self, sock: socket.socket, batch: ReceiveBatch, endpoint: Address | None) -> int:
        if self._receive is None or self._receive.batch is not batch:
            self._receive = mmsg.ReceiveCall(batch)
        count, sources = self._receive(sock.fileno())
        if count:
            ours = sources == self._sockaddr(endpoint)[0]
            if not ours.all():
                kept = np.flatnonzero(ours)
                batch.count = len(kept)
                batch.headers[: batch.count] = batch.headers[kept]
                batch.payload[: batch.count] = batch.payload[kept]
                batch.sizes[: batch.count] = batch.sizes[kept]
        return count

    def prepare(self, batch: SendBatch, endpoint: Address) -> None:
        if self._send is None or self._send.batch is not batch:
            self._send = mmsg.SendCall(batch)
        self._send.prepare(self._sockaddr(endpoint))

    def send(self, sock: socket.socket, first: int) -> int:
        if self._send is None:
            raise ValueError("prepare a batch first")
        return self._send(sock.fileno(), first)


class _PlainCalls:
    """recvfrom_into and sendto, one frame a call: for platforms without the batched ones."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._endpoint: Address | None = None
        self._buffer = memoryview(bytearray(_LONGEST_DATAGRAM))

    def receive(self, sock: socket.socket, batch: ReceiveBatch, endpoint: Address | None) -> int:
        batch.clear()
        taken = 0
        with contextlib.suppress(BlockingIOError):
            while taken < batch.capacity:
                size, source = sock.recvfrom_into(self._buffer)
                taken += 1
                if source == endpoint:
                    batch.append(self._buffer[:size])
        return taken

    def prepare(self, batch: SendBatch, endpoint: Address) -> None:
        self._frames = list(batch.frames())
        self._endpoint = endpoint

    def send(self, sock: socket.socket, first: int) -> int:
        if self._endpoint is None:
            raise ValueError("prepare a batch first")
        sock.sendto(self._frames[first], self._endpoint)
        return 1


class UdpTransport:
    """A worker's socket. One thread at a time.

    `endpoint` may be given later with `set_endpoint`: the socket's port must be known before a worker can join, and
    the endpoint only afterwards. Until then every datagram is foreign.
    """

    def __init__(
        self, bind_ip: str, endpoint: Address | None, profile: Profile, *, batched: bool | None = None
    ) -> None:
        """Open and bind the socket, on a port that the kernel chooses.

        `batched=False` uses one system call a frame; None takes the batched ones where the platform has them.
        TransportError: the address is not this host's.
        """
        self._profile = profile
        self._endpoint = endpoint
        self._mtu: int | None = None
        self._counters = TransportCounters()
        self._calls: _Calls = _BatchedCalls() if (mmsg.available() if batched is None else batched) else _PlainCalls()
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._open(bind_ip)
        except OSError as error:
            self._sock.close()
            raise TransportError(
                f"cannot open a UDP socket on {bind_ip}: {error.strerror}: set P4REDUCE_ADDRESS to an address of this "
                f"host's interface towards the switch"
            ) from error
        self._local: Address = self._sock.getsockname()

    def _open(self, bind_ip: str) -> None:
        sock = self._sock
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_DO)
        sock.setsockopt(socket.SOL_SOCKET, _SO_NO_CHECK, 1)
        wanted = constants.SLOTS * frame_truesize(self._profile.datagram_bytes) * 4 // 3
        self._receive_bytes = set_buffers(sock, wanted)
        sock.bind((bind_ip, 0))

    @property
    def profile(self) -> Profile:
        """Decides how long a frame may be."""
        return self._profile

    @property
    def local(self) -> Address:
        """The socket's own address and port."""
        return self._local

    @property
    def mtu(self) -> int:
        """MTU in bytes of the route to the endpoint. TransportError: there is no endpoint yet, or no route."""
        if self._mtu is None:
            if self._endpoint is None:
                raise TransportError("the path's MTU is not known before the endpoint is")
            self._mtu = path_mtu(self._endpoint)
        return self._mtu

    @property
    def receive_frames(self) -> int:
        """Full frames that the receive buffer holds for certain."""
        return buffered_frames(self._receive_bytes, self._profile)

    @property
    def counters(self) -> TransportCounters:
        """Counts since the socket was opened."""
        return self._counters

    def set_endpoint(self, endpoint: Address) -> None:
        """Choose where frames go and the only address they are accepted from. TransportError: MTU too small."""
        self._endpoint = endpoint
        self._mtu = None
        check_mtu(self._profile, self.mtu)

    def fileno(self) -> int:
        """The socket's descriptor; -1 after `close`."""
        return self._sock.fileno()

    def receive(self, batch: ReceiveBatch) -> int:
        """See `Transport.receive`. TransportError: the socket is unusable."""
        try:
            taken = self._calls.receive(self._sock, batch, self._endpoint)
        except OSError as error:
            if error.errno in _TRANSIENT:
                batch.clear()
                return 0
            raise TransportError(f"receiving on {self._local[0]} failed: {error.strerror}") from error
        if taken:
            counters = self._counters
            counters.received += taken
            counters.foreign += taken - batch.count
            if batch.count:
                counters.oversized += int(np.count_nonzero(batch.sizes[: batch.count] > self._profile.datagram_bytes))
        return taken

    def send(self, batch: SendBatch) -> int:
        """See `Transport.send`. TransportError: a frame is too long for the path, or the socket is unusable."""
        if self._endpoint is None:
            raise TransportError("frames cannot be sent before the endpoint is known")
        if not batch.count:
            return 0
        self._calls.prepare(batch, self._endpoint)
        sent = 0
        while sent < batch.count:
            taken = self._send_some(sent)
            if not taken:
                break
            sent += taken
        self._counters.sent += sent
        self._counters.unsent += batch.count - sent
        return sent

    def _send_some(self, first: int) -> int:
        """Send frames from `first` on; 0 when the kernel takes none, even after a pause."""
        for pause in (True, False):
            try:
                return self._calls.send(self._sock, first)
            except OSError as error:
                if error.errno not in _TRANSIENT:
                    raise self._send_error(error) from error
                if error.errno != errno.EAGAIN:
                    break
            if pause:
                self._counters.waits += 1
                self._wait_writable()
        return 0

    def _wait_writable(self) -> None:
        poller = select.poll()
        poller.register(self._sock, select.POLLOUT)
        poller.poll(_SEND_WAIT_SECONDS * 1000)

    def _send_error(self, error: OSError) -> TransportError:
        if error.errno == errno.EMSGSIZE and self._endpoint is not None:
            self._mtu = None
            try:
                check_mtu(self._profile, self.mtu)
            except TransportError as explained:
                return explained
        return TransportError(f"sending from {self._local[0]} to {self._endpoint} failed: {error.strerror}")

    def close(self) -> None:
        """Close the socket. Safe to call twice."""
        self._sock.close()
