# SPDX-License-Identifier: Apache-2.0
"""Asks every port of a lab's switch for a sign of life, through the data plane.

An ARP request for the switch's address, sent from the worker's end of the link, must be answered by the P4 program:
that proves port, pipeline and table entries, both ways. A switch whose gRPC server answers may still lack a port.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time

from p4reduce_bmv2 import netns
from p4reduce_bmv2.topology import WORKER_INTERFACE, Host

_ETH_P_ARP = 0x0806
_REPLY = 2
_AGAIN = 0.2
"""Seconds after which the question is repeated: links may lose frames on purpose."""
_FORM = struct.Struct("!6s6sHHHBBH6s4s6s4s")
_MIN_FRAME = 60
"""Ethernet's shortest frame, without its checksum."""
_BROADCAST = b"\xff" * 6


def answers(host: Host, switch_ip: str, seconds: float) -> bool:
    """Whether the switch answers on this host's port within `seconds`."""
    return netns.call(host.netns, lambda: _ask(host, socket.inet_aton(switch_ip), seconds))


def _ask(host: Host, target: bytes, seconds: float) -> bool:
    mac = bytes.fromhex(host.mac.replace(":", ""))
    # The padding comes back as it was: it tells an answer to this question from one to an earlier question.
    token = os.urandom(_MIN_FRAME - _FORM.size)
    sender = socket.inet_aton(host.ip)
    question = _FORM.pack(_BROADCAST, mac, _ETH_P_ARP, 1, 0x0800, 6, 4, 1, mac, sender, bytes(6), target) + token
    deadline = time.monotonic() + seconds
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ARP)) as link:
        link.bind((WORKER_INTERFACE, _ETH_P_ARP))
        while (left := deadline - time.monotonic()) > 0:
            link.send(question)
            if _answered(link, target, token, time.monotonic() + min(left, _AGAIN)):
                return True
    return False


def _answered(link: socket.socket, target: bytes, token: bytes, deadline: float) -> bool:
    while (left := deadline - time.monotonic()) > 0:
        if select.select([link], [], [], left)[0]:
            frame = link.recv(2048)
            if len(frame) >= _MIN_FRAME:
                fields = _FORM.unpack_from(frame)
                if fields[7] == _REPLY and fields[9] == target and frame[_FORM.size : _MIN_FRAME] == token:
                    return True
    return False
