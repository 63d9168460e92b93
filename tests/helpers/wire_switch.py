# SPDX-License-Identifier: Apache-2.0
"""A whole switch under test: real interfaces, raw sockets at the workers' ends."""

from __future__ import annotations

import select
import socket
import time

from scapy.layers.l2 import ARP, Ether

from helpers.frames import Worker, arp_request
from helpers.p4rt import TableClient

SENTINEL_IP = "10.255.255.254"
SENTINEL_MAC = "02:70:34:ff:ff:fe"
DEADLINE = 10.0
PACKET_OUTGOING = 4


class WireSwitch:
    """A switch reached through interfaces. After every frame a sentinel goes through each port.

    The switch's single ingress thread and the order within a port's queue make sure that everything which the frame
    caused on a port comes out before that port's sentinel answer: no waiting for silence, no sleeping.
    """

    def __init__(self, client: TableClient, sockets: dict[int, socket.socket], profile: str) -> None:
        self.client = client
        self.client.push(profile)
        self.sockets = sockets
        self.insert = self.client.insert
        self.delete = self.client.delete
        self.set_group = self.client.set_group
        self.counters = self.client.counters
        number = int(SENTINEL_MAC.replace(":", ""), 16)
        for port in sockets:
            self.insert("sources", Worker.at(0, port).source, "permit", {})
        self.insert("arp", {"target_ip": Worker(0, 0, SENTINEL_IP).ip_number}, "answer_arp", {"mac": number})

    def send(self, port: int, frame: bytes) -> list[tuple[int, bytes]]:
        self.sockets[port].send(frame)
        # The frame's own port first: its answer proves that the frame has passed ingress.
        return self._until_sentinel(port) + [
            found for other in self.sockets if other != port for found in self._until_sentinel(other)
        ]

    def _until_sentinel(self, port: int) -> list[tuple[int, bytes]]:
        link = self.sockets[port]
        link.send(arp_request(Worker.at(200, port), SENTINEL_IP))
        end = time.monotonic() + DEADLINE
        got = []
        while True:
            if not select.select([link], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"port {port} did not answer its sentinel within {DEADLINE} s")
            data, address = link.recvfrom(16384)
            if address[2] == PACKET_OUTGOING:
                continue
            parsed = Ether(data)
            if ARP in parsed and parsed[ARP].psrc == SENTINEL_IP:
                return got
            got.append((port, data))

    def close(self) -> None:
        self.client.delete_groups()
