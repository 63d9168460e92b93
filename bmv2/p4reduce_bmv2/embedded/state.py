# SPDX-License-Identifier: Apache-2.0
"""State that outlives a packet: counters, replication groups, clone sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from p4reduce_bmv2.embedded.errors import BadEntry

Replicas = tuple[tuple[int, int], ...]
"""(egress port, replica id) of every copy, in the order in which copies are made."""

MAX_PORT = 510
"""Ports have 9 bits and 511 is the drop port."""
MAX_GROUP = 0xFFFF
MAX_SESSION = 0x7FFF
"""BMv2 keeps the sixteenth bit of a session number for itself."""


@dataclass(slots=True)
class CounterArray:
    """An indirect counter. Both lists have `size` cells; the control plane may read and assign the cells."""

    name: str
    size: int
    packets: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.packets = self.packets or [0] * self.size
        self.bytes = self.bytes or [0] * self.size


class CloneSession(NamedTuple):
    """Where clones go."""

    replicas: Replicas
    packet_length: int = 0
    """Clones are cut to this many bytes; 0 leaves them whole."""


@dataclass(slots=True)
class EngineStats:
    """Packets that the engine itself dropped, for reasons that the program does not see."""

    failed_assertions: int = 0
    too_many_passes: int = 0


def check_replicas(what: str, replicas: Sequence[tuple[int, int]]) -> Replicas:
    """Replicas as a tuple. BadEntry for a port or replica id out of range, or a pair given twice."""
    for port, replica in replicas:
        if not 0 <= port <= MAX_PORT or not 0 <= replica <= 0xFFFF:
            raise BadEntry(f"{what}: port {port}, replica id {replica} is out of range")
    if len(set(replicas)) != len(replicas):
        raise BadEntry(f"{what} holds a (port, replica id) pair twice")
    return tuple((port, replica) for port, replica in replicas)
