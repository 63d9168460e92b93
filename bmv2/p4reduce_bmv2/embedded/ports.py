# SPDX-License-Identifier: Apache-2.0
"""Ports of the embedded switch: UDP endpoints on loopback, and AF_PACKET interfaces.

A port turns what its socket receives into whole Ethernet frames and back. It never blocks, and it counts and drops
what it cannot carry.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import socket
import struct
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from p4reduce.constants import UDP_PORT
from p4reduce.errors import SwitchError
from p4reduce_bmv2.embedded.numerals import decimal

ETHERTYPE_IPV4 = b"\x08\x00"
HEADERS_BYTES = 14 + 20 + 8
"""Ethernet, IPv4 without options, UDP."""
RECEIVE_BUFFER = 32 << 20
"""Bytes wanted per port. A full window of w34 frames from every worker must fit while the switch is busy."""
SMALL_RECEIVE_BUFFER = 2 << 20
"""Bytes below which a window of 64 w34 frames does not fit; worth a warning."""
MAX_DATAGRAM = 65535
_CACHE_ENTRIES = 4096
_MAX_FAILURES = 16
"""Receive errors in a row after which an interface is given up."""

# linux/socket.h, linux/if_packet.h; not in Python's socket module.
_SO_RCVBUFFORCE = 33
_SOL_PACKET = 263
_PACKET_ADD_MEMBERSHIP = 1
_PACKET_AUXDATA = 8
_PACKET_IGNORE_OUTGOING = 23
_PACKET_MR_PROMISC = 1
_TP_STATUS_CSUMNOTREADY = 1 << 3
_TP_STATUS_VLAN_VALID = 1 << 4
_TP_STATUS_VLAN_TPID_VALID = 1 << 6
_ETH_P_ALL = 3
_SIOCGIFMTU = 0x8921
_AUXDATA = struct.Struct("=IIIHHHH")
"""struct tpacket_auxdata: status, len, snaplen, mac, net, vlan_tci, vlan_tpid."""


@dataclass(slots=True)
class PortCounters:
    """Frames and bytes of one port. `drops` counts by reason; reasons end in _rx or _tx."""

    rx_frames: int = 0
    rx_bytes: int = 0
    tx_frames: int = 0
    tx_bytes: int = 0
    drops: Counter[str] = field(default_factory=Counter)


class Port(Protocol):
    """What the packet thread needs of a port."""

    number: int
    counters: PortCounters
    receive_buffer: int
    """Bytes that the kernel keeps for frames that have arrived, its own bookkeeping included."""

    def fileno(self) -> int:
        """Descriptor to wait on."""

    def receive(self, limit: int) -> list[bytes]:
        """Up to `limit` frames that have arrived; fewer only when no more are waiting. Never blocks."""

    def send(self, frame: bytes) -> None:
        """Send a frame, or count why not. Never blocks."""

    def describe(self) -> str:
        """Address or interface, for logs."""

    def close(self) -> None:
        """Release the socket."""


def synthetic_mac(address: bytes) -> bytes:
    """MAC that stands for an IPv4 address (4 bytes) on UDP ports: 02:70 and the address."""
    return b"\x02\x70" + address


def parse_endpoint(text: str) -> tuple[str, int]:
    """Split ADDR[:UDPPORT]; the address must be IPv4 loopback, a missing port is 0 (any free one). SwitchError."""
    host, _, port = text.partition(":")
    number = decimal(port or "0")
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError:
        number = None
    if number is None:
        raise SwitchError(f"UDP endpoint {text!r} is not ADDR[:UDPPORT]")
    if not address.is_loopback:
        raise SwitchError(f"UDP endpoint {text!r} is not on loopback (127.0.0.0/8): UDP ports are for one machine only")
    if number > 65535:
        raise SwitchError(f"UDP endpoint {text!r}: the UDP port is not 0..65535")
    return str(address), number


def widen_receive_buffer(sock: socket.socket, wanted: int = RECEIVE_BUFFER) -> int:
    """Ask for a receive buffer, past the system's limit when privileged. Returns the bytes granted."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, wanted)
    except PermissionError:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, wanted)
    # The kernel doubles what is asked for, to have room for its own bookkeeping.
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2


class UdpPort:
    """A port whose link is a UDP socket on loopback, so that no privilege is needed.

    A datagram becomes the frame that the program would see on a wire: Ethernet with synthetic MACs, IPv4 from the
    sender to the endpoint's address, UDP to the protocol's port. A frame that leaves is stripped again and sent to
    its IPv4 destination and UDP port, if that is on loopback.
    """

    def __init__(self, number: int, address: str, udp_port: int = 0) -> None:
        self.number = number
        self.counters = PortCounters()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._socket.setblocking(False)
            self.receive_buffer = widen_receive_buffer(self._socket)
            self._socket.bind((address, udp_port))
        except OSError as error:
            self._socket.close()
            raise SwitchError(f"port {number}: cannot bind UDP {address}:{udp_port}: {error.strerror}") from error
        self.endpoint: tuple[str, int] = self._socket.getsockname()
        self._address = socket.inet_aton(address)
        self._headers: dict[tuple[tuple[str, int], int], bytes] = {}
        self._destinations: dict[bytes, tuple[str, int]] = {}

    def fileno(self) -> int:
        """Descriptor to wait on."""
        return self._socket.fileno()

    def describe(self) -> str:
        """The endpoint."""
        return f"udp {self.endpoint[0]}:{self.endpoint[1]}"

    def close(self) -> None:
        """Release the socket."""
        self._socket.close()

    def receive(self, limit: int) -> list[bytes]:
        """Datagrams as frames. The headers depend on sender and length only, so they are built once for each."""
        frames: list[bytes] = []
        recvfrom = self._socket.recvfrom
        headers = self._headers
        try:
            for _ in range(limit):
                payload, source = recvfrom(MAX_DATAGRAM)
                kind = (source, len(payload))
                header = headers.get(kind)
                if header is None:
                    header = self._remember(kind)
                frames.append(header + payload)
        except BlockingIOError:
            pass
        self.counters.rx_frames += len(frames)
        self.counters.rx_bytes += sum(map(len, frames))
        return frames

    def send(self, frame: bytes) -> None:
        """Strip the headers and send the payload to where they point."""
        reason = _why_not_udp(frame)
        if reason is not None:
            self.counters.drops[reason] += 1
            return
        end = 34 + (frame[38] << 8 | frame[39])
        # Destination address, source port, destination port: one slice is the key of the cache.
        destination = self._destinations.get(frame[30:38]) or self._remember_destination(frame)
        try:
            self._socket.sendto(memoryview(frame)[HEADERS_BYTES:end], destination)
        except BlockingIOError:
            self.counters.drops["full_tx"] += 1
            return
        except OSError:
            self.counters.drops["error_tx"] += 1
            return
        self.counters.tx_frames += 1
        self.counters.tx_bytes += len(frame)

    def _remember(self, kind: tuple[tuple[str, int], int]) -> bytes:
        (host, port), length = kind
        source = socket.inet_aton(host)
        ethernet = synthetic_mac(self._address) + synthetic_mac(source) + ETHERTYPE_IPV4
        ipv4 = bytearray(
            struct.pack(
                "!BBHHHBBH4s4s", 0x45, 0, 28 + length, 0, 0x4000, 64, socket.IPPROTO_UDP, 0, source, self._address
            )
        )
        ipv4[10:12] = checksum(ipv4).to_bytes(2, "big")
        header = ethernet + bytes(ipv4) + struct.pack("!HHHH", port, UDP_PORT, 8 + length, 0)
        if len(self._headers) >= _CACHE_ENTRIES:
            self._headers.clear()
        self._headers[kind] = header
        return header

    def _remember_destination(self, frame: bytes) -> tuple[str, int]:
        if len(self._destinations) >= _CACHE_ENTRIES:
            self._destinations.clear()
        destination = (socket.inet_ntoa(frame[30:34]), frame[36] << 8 | frame[37])
        self._destinations[frame[30:38]] = destination
        return destination


class AfPacketPort:
    """A port on a network interface, through a raw AF_PACKET socket. Needs root (CAP_NET_RAW)."""

    def __init__(self, number: int, interface: str) -> None:
        self.number = number
        self.interface = interface
        self.counters = PortCounters()
        self._failures = 0
        try:
            index = socket.if_nametoindex(interface)
        except OSError:
            raise SwitchError(f"port {number}: there is no interface {interface!r}") from None
        try:
            # Protocol 0 hears nothing, so that nothing of other interfaces slips in before bind.
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        except PermissionError:
            raise SwitchError(f"port {number}: interface {interface} needs root (CAP_NET_RAW)") from None
        try:
            self._socket.setblocking(False)
            self.receive_buffer = widen_receive_buffer(self._socket)
            self._bind(index)
        except OSError as error:
            self._socket.close()
            raise SwitchError(f"port {number}: interface {interface}: {error.strerror}") from error
        request = struct.pack("16sI20x", interface.encode(), 0)
        self.mtu = int(struct.unpack_from("16sI", fcntl.ioctl(self._socket, _SIOCGIFMTU, request))[1])
        # Ethernet header and one VLAN tag on top of the MTU; one byte more shows a longer frame.
        self._limit = self.mtu + 14 + 4 + 1

    def _bind(self, index: int) -> None:
        sock = self._socket
        membership = struct.pack("iHH8s", index, _PACKET_MR_PROMISC, 0, b"")
        sock.setsockopt(_SOL_PACKET, _PACKET_ADD_MEMBERSHIP, membership)
        sock.setsockopt(_SOL_PACKET, _PACKET_AUXDATA, 1)
        with contextlib.suppress(OSError):  # Linux before 4.20: receive() sorts them out
            sock.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        sock.bind((self.interface, _ETH_P_ALL))

    def fileno(self) -> int:
        """Descriptor to wait on."""
        return self._socket.fileno()

    def describe(self) -> str:
        """The interface."""
        return f"interface {self.interface}"

    def close(self) -> None:
        """Release the socket."""
        self._socket.close()

    def receive(self, limit: int) -> list[bytes]:
        """Frames that came in from the link. Raises OSError when the interface is gone for good."""
        frames: list[bytes] = []
        drops = self.counters.drops
        for _ in range(limit):
            try:
                frame, ancillary, flags, address = self._socket.recvmsg(self._limit, 64)
            except BlockingIOError:
                break
            except OSError as error:
                self._failed(error)
                break
            if address[2] == socket.PACKET_OUTGOING:
                continue
            if flags & socket.MSG_TRUNC or len(frame) == self._limit:
                # Segmentation offload of the sender: no link of this MTU could carry it on.
                drops["oversize_rx"] += 1
                continue
            if len(frame) < 14:
                drops["runt_rx"] += 1
                continue
            frames.append(self._repair(frame, ancillary))
        if frames:
            self._failures = 0
        self.counters.rx_frames += len(frames)
        self.counters.rx_bytes += sum(map(len, frames))
        return frames

    def send(self, frame: bytes) -> None:
        """Send the frame as it is."""
        try:
            self._socket.send(frame)
        except BlockingIOError:
            self.counters.drops["full_tx"] += 1
        except OSError as error:
            reasons = {errno.ENOBUFS: "full_tx", errno.EMSGSIZE: "oversize_tx", errno.ENETDOWN: "down_tx"}
            self.counters.drops[reasons.get(error.errno or 0, "error_tx")] += 1
        else:
            self.counters.tx_frames += 1
            self.counters.tx_bytes += len(frame)

    def _failed(self, error: OSError) -> None:
        """ENETDOWN comes once when the interface goes down, and the port works again when it is back."""
        self.counters.drops["down_rx"] += 1
        self._failures += 1
        if self._failures > _MAX_FAILURES or self.interface not in {name for _, name in socket.if_nameindex()}:
            raise error

    def _repair(self, frame: bytes, ancillary: list[tuple[int, int, bytes]]) -> bytes:
        """Undo what the kernel or the sender's offloads left out: a VLAN tag, a transport checksum."""
        for level, kind, data in ancillary:
            if level != _SOL_PACKET or kind != _PACKET_AUXDATA or len(data) < _AUXDATA.size:
                continue
            status, _, _, _, _, tci, tpid = _AUXDATA.unpack_from(data)
            if status & _TP_STATUS_CSUMNOTREADY:
                frame = complete_checksum(frame)
            if status & _TP_STATUS_VLAN_VALID:
                tag = tpid if status & _TP_STATUS_VLAN_TPID_VALID else 0x8100
                frame = frame[:12] + struct.pack("!HH", tag, tci) + frame[12:]
        return frame


def checksum(data: bytes | bytearray) -> int:
    """Internet checksum (RFC 1071). Summing 16-bit words with carry is the remainder modulo 0xffff."""
    if len(data) % 2:
        data = bytes(data) + b"\0"
    total = int.from_bytes(data, "big")
    # The carried sum of anything but zeros is never 0.
    return ~(total % 0xFFFF or (0xFFFF if total else 0)) & 0xFFFF


def complete_checksum(frame: bytes) -> bytes:
    """Fill in the TCP or UDP checksum of an IPv4 frame whose sender left it to hardware that is not there."""
    if len(frame) < 34 or frame[12:14] != ETHERTYPE_IPV4:
        return frame
    start = 14 + (frame[14] & 0x0F) * 4
    end = 14 + int.from_bytes(frame[16:18], "big")
    offset = {socket.IPPROTO_TCP: 16, socket.IPPROTO_UDP: 6}.get(frame[23])
    if offset is None or end > len(frame) or start + offset + 2 > end:
        return frame
    at = start + offset
    segment = frame[start:at] + b"\0\0" + frame[at + 2 : end]
    pseudo = frame[26:34] + struct.pack("!HH", frame[23], end - start)
    value = checksum(pseudo + segment) or 0xFFFF
    return frame[:at] + value.to_bytes(2, "big") + frame[at + 2 :]


def _why_not_udp(frame: bytes) -> str | None:
    """Reason why a frame is no whole UDP datagram over IPv4 to loopback, or None."""
    if frame[12:14] != ETHERTYPE_IPV4:
        return "not_ipv4_tx"
    if len(frame) < HEADERS_BYTES or frame[14] != 0x45:
        return "malformed_tx"
    if frame[23] != socket.IPPROTO_UDP or frame[20] & 0x3F or frame[21]:
        return "not_udp_tx"
    if frame[30] != 127:
        return "not_loopback_tx"
    length = frame[38] << 8 | frame[39]
    return None if 8 <= length <= len(frame) - 34 else "malformed_tx"
