# SPDX-License-Identifier: Apache-2.0
"""recvmmsg and sendmmsg (Linux, recvmmsg(2)), their C structures laid out as numpy arrays.

The structures of one batch are built once; per call only the payload addresses and lengths of a send change, and
those are written for all messages at once. Every message has two parts: the 32-byte row of the batch's header
array, and a payload row, so nothing is copied between user memory and the kernel's buffers but by the kernel.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import sys

import numpy as np
import numpy.typing as npt

from p4reduce import constants
from p4reduce.core.batch import ReceiveBatch, SendBatch

# The layouts of 64-bit Linux, <bits/socket.h> and <netinet/in.h>; `available` refuses others.
_IOVEC = np.dtype([("base", "u8"), ("len", "u8")])
_MMSGHDR = np.dtype(
    [
        ("name", "u8"),
        ("namelen", "u4"),
        ("pad0", "u4"),
        ("iov", "u8"),
        ("iovlen", "u8"),
        ("control", "u8"),
        ("controllen", "u8"),
        ("flags", "i4"),
        ("pad1", "u4"),
        ("len", "u4"),
        ("pad2", "u4"),
    ]
)
_SOCKADDR_BYTES = 16
_PARTS = 2


def _address(array: npt.NDArray[np.generic]) -> int:
    return int(array.__array_interface__["data"][0])


def sockaddr(ip: str, port: int) -> npt.NDArray[np.uint64]:
    """A sockaddr_in as two 64-bit integers in memory order; the second is padding, 0."""
    raw = struct.pack("=H", socket.AF_INET) + struct.pack(">H", port) + socket.inet_aton(ip)
    halves = np.zeros(2, dtype=np.uint64)
    halves.view(np.uint8)[: len(raw)] = np.frombuffer(raw, dtype=np.uint8)
    return halves


class _Library:
    """The two functions of the C library, with errno kept per thread by ctypes."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.recvmmsg = libc.recvmmsg
        self.recvmmsg.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_void_p]
        self.sendmmsg = libc.sendmmsg
        self.sendmmsg.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int]


_library: _Library | None = None


def available() -> bool:
    """Whether this platform has the calls and the structure layout that this module writes."""
    global _library
    if sys.platform != "linux" or struct.calcsize("P") != 8 or sys.byteorder != "little":
        return False
    if _library is None:
        try:
            _library = _Library()
        except (AttributeError, OSError):
            return False
    return True


def _loaded() -> _Library:
    if not available() or _library is None:
        raise OSError(errno.ENOSYS, "recvmmsg and sendmmsg are not available here")
    return _library


class _Messages:
    """Message headers and io vectors for a batch; `headers` stays at its address for the life of the batch."""

    def __init__(self, capacity: int, headers: npt.NDArray[np.void]) -> None:
        self.capacity = capacity
        self.iov = np.zeros((capacity, _PARTS), dtype=_IOVEC)
        self.messages = np.zeros(capacity, dtype=_MMSGHDR)
        self.iov["base"][:, 0] = _address(headers) + np.arange(capacity) * constants.HEADER_BYTES
        self.iov["len"][:, 0] = constants.HEADER_BYTES
        self.messages["iov"] = _address(self.iov) + np.arange(capacity) * (_PARTS * _IOVEC.itemsize)
        self.messages["iovlen"] = _PARTS
        self.messages["namelen"] = _SOCKADDR_BYTES
        self.pointer = _address(self.messages)


class ReceiveCall:
    """recvmmsg into one ReceiveBatch."""

    def __init__(self, batch: ReceiveBatch) -> None:
        self._recvmmsg = _loaded().recvmmsg
        self.batch = batch
        self._parts = _Messages(batch.capacity, batch.headers)
        self._parts.iov["base"][:, 1] = _address(batch.payload) + np.arange(batch.capacity) * batch.payload.strides[0]
        self._parts.iov["len"][:, 1] = batch.payload.shape[1]
        self._names = np.zeros((batch.capacity, 2), dtype=np.uint64)
        self._parts.messages["name"] = _address(self._names) + np.arange(batch.capacity) * _SOCKADDR_BYTES
        self._lengths = self._parts.messages["len"]
        self._sources = self._names[:, 0]

    def __call__(self, fd: int) -> tuple[int, npt.NDArray[np.uint64]]:
        """Fill the batch from the start without waiting. Returns the datagrams received and who sent them.

        A source is the first half of its sockaddr_in, family, port and address. OSError as for recvmmsg, but for
        an empty queue, which is 0 datagrams.
        """
        batch = self.batch
        # MSG_TRUNC asks for the true length of a datagram, also of one that does not fit (recv(2)).
        flags = socket.MSG_DONTWAIT | socket.MSG_TRUNC
        while True:
            count = self._recvmmsg(fd, self._parts.pointer, batch.capacity, flags, None)
            if count >= 0:
                break
            error = ctypes.get_errno()
            if error in (errno.EAGAIN, errno.EWOULDBLOCK):
                count = 0
                break
            if error != errno.EINTR:
                raise OSError(error, os.strerror(error))
        batch.sizes[:count] = self._lengths[:count]
        batch.count = count
        return count, self._sources[:count]


class SendCall:
    """sendmmsg from one SendBatch to one address."""

    def __init__(self, batch: SendBatch) -> None:
        self._sendmmsg = _loaded().sendmmsg
        self.batch = batch
        self._parts = _Messages(batch.capacity, batch.headers)
        self._base = self._parts.iov["base"][:, 1]
        self._size = self._parts.iov["len"][:, 1]
        self._name = np.zeros(2, dtype=np.uint64)
        self._parts.messages["name"] = _address(self._name)

    def prepare(self, destination: npt.NDArray[np.uint64]) -> None:
        """Write the payload addresses and lengths of all frames, and where they go (`sockaddr`)."""
        self._name[:] = destination
        for group in self.batch.groups:
            window = slice(group.start, group.stop)
            self._base[window] = _address(group.rows) + group.index * group.rows.strides[0]
            self._size[window] = group.sizes

    def __call__(self, fd: int, first: int) -> int:
        """Send the frames from `first` on without waiting, after `prepare`. Returns how many were taken, at least 1.

        OSError as for sendmmsg: the frame at `first` was not taken.
        """
        while True:
            pointer = self._parts.pointer + first * _MMSGHDR.itemsize
            count: int = self._sendmmsg(fd, pointer, self.batch.count - first, socket.MSG_DONTWAIT)
            if count > 0:
                return count
            error = ctypes.get_errno()
            if error != errno.EINTR:
                raise OSError(error, os.strerror(error))
