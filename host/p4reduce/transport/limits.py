# SPDX-License-Identifier: Apache-2.0
"""What a path and a socket can hold: routes, MTU, and how many frames fit into a receive buffer."""

from __future__ import annotations

import socket

from p4reduce.errors import TransportError
from p4reduce.transport.base import Address
from p4reduce.wire import IP_UDP_BYTES, PROFILES, Profile

# <linux/in.h> and <asm-generic/socket.h>: Python does not name these.
_IP_MTU = 14
_SO_SNDBUFFORCE = 32
_SO_RCVBUFFORCE = 33


def frame_truesize(datagram_bytes: int) -> int:
    """Receive buffer bytes that the kernel charges for one datagram, an upper estimate.

    The kernel counts whole allocations, not payload (skb->truesize): data with headers, headroom and
    skb_shared_info rounded up to a power of two, and the sk_buff itself. Measured on Linux 6.18, loopback: 832
    bytes for a datagram of 32, 1280 for 288, 2304 for 1312, 16640 for 8736.
    """
    allocation = datagram_bytes + IP_UDP_BYTES + 16 + 64 + 320
    return (1 << (allocation - 1).bit_length()) + 512


def buffered_frames(buffer_bytes: int, profile: Profile) -> int:
    """Full frames that a receive buffer of `buffer_bytes` (as SO_RCVBUF reads) holds for certain, at least 1.

    A quarter is left out: the kernel may give back the memory of datagrams that were read in lumps of up to a
    quarter of the buffer (udp_rmem_release).
    """
    return max(1, buffer_bytes * 3 // 4 // frame_truesize(profile.datagram_bytes))


def path_mtu(address: Address) -> int:
    """MTU in bytes of the route to an address, as the kernel knows it. Sends nothing. TransportError: no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)
            return probe.getsockopt(socket.IPPROTO_IP, _IP_MTU)
        except OSError as error:
            raise TransportError(f"no route to the switch at {address[0]}: {error.strerror}") from error


def source_address(address: Address) -> str:
    """The local IPv4 address that the routing table chooses towards `address`. TransportError: no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)
            return str(probe.getsockname()[0])
        except OSError as error:
            raise TransportError(f"no route to the switch at {address[0]}: {error.strerror}") from error


def check_mtu(profile: Profile, mtu: int) -> None:
    """TransportError, with what to do, when a full frame of `profile` does not pass an interface of `mtu` bytes."""
    if mtu >= profile.mtu:
        return
    fits = [p for p in PROFILES.values() if p.mtu <= mtu]
    smaller = f"run the switch with profile {max(fits, key=lambda p: p.words).name}, or " if fits else ""
    raise TransportError(
        f"profile {profile.name} needs an MTU of {profile.mtu} bytes, the path to the switch has {mtu}: {smaller}raise "
        f"it on every host and switch port with `ip link set dev <interface> mtu 9000`"
    )


def _set_buffer(sock: socket.socket, forced: int, plain: int, size: int) -> None:
    try:
        sock.setsockopt(socket.SOL_SOCKET, forced, size)
    except OSError:
        sock.setsockopt(socket.SOL_SOCKET, plain, size)


def set_buffers(sock: socket.socket, wanted: int) -> int:
    """Make both socket buffers as large as allowed, up to `wanted` bytes; returns the receive buffer's real size.

    The forced options need CAP_NET_ADMIN; the plain ones are cut at net.core.rmem_max and wmem_max. All are doubled
    by the kernel for its own overhead, and read back doubled.
    """
    _set_buffer(sock, _SO_RCVBUFFORCE, socket.SO_RCVBUF, wanted // 2)
    _set_buffer(sock, _SO_SNDBUFFORCE, socket.SO_SNDBUF, wanted // 2)
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
