# SPDX-License-Identifier: Apache-2.0
"""Turns the offloads of an interface off, as `ethtool -K IF rx off tx off sg off tso off gso off gro off lro off`.

A software switch on a veth pair sees what offloads leave undone: checksums that no hardware will fill in, segments
larger than the MTU. libpcap, too, sizes its ring by these flags when it opens an interface, so they must be off before
a switch starts (behavioral-model #567, #680, #919).
"""

from __future__ import annotations

import array
import errno
import fcntl
import socket
import struct

_SIOCETHTOOL = 0x8946
# linux/ethtool.h: name -> (get, set). Checksums first: without them the kernel gives up TSO by itself.
_SWITCHES = {
    "rx": (0x14, 0x15),
    "tx": (0x16, 0x17),
    "sg": (0x18, 0x19),
    "tso": (0x1E, 0x1F),
    "gso": (0x23, 0x24),
    "gro": (0x2B, 0x2C),
}
_GET_FLAGS, _SET_FLAGS = 0x25, 0x26
_FLAG_LRO = 1 << 15


def disable_offloads(interface: str) -> None:
    """Turn off every offload that the interface lets one turn off. Acts in the calling thread's namespace. OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, setter in _SWITCHES.values():
            _try(sock, interface, setter, 0)
        flags = _try(sock, interface, _GET_FLAGS, 0)
        if flags is not None and flags & _FLAG_LRO:
            _try(sock, interface, _SET_FLAGS, flags & ~_FLAG_LRO)


def read_offloads(interface: str) -> dict[str, bool]:
    """Which offloads are on; those that the interface does not know are left out. OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        values = {name: _try(sock, interface, getter, 0) for name, (getter, _) in _SWITCHES.items()}
    return {name: bool(value) for name, value in values.items() if value is not None}


def _try(sock: socket.socket, interface: str, command: int, value: int) -> int | None:
    """One SIOCETHTOOL call with a struct ethtool_value; None when the driver does not know the command."""
    buffer = array.array("I", [command, value])
    address, _ = buffer.buffer_info()
    request = struct.pack("16sP16x", interface.encode(), address)
    try:
        fcntl.ioctl(sock, _SIOCETHTOOL, request)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
            return None
        raise
    return int(buffer[1])
