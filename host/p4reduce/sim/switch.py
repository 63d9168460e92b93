# SPDX-License-Identifier: Apache-2.0
"""A switch in plain Python that follows the ingress rules of the P4 program, on UDP payloads.

It is the specification in its shortest form: no tables, no registers, no headers below UDP. What it does with a
datagram must be what the compiled program does; tests hold both against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np

from p4reduce import constants
from p4reduce.errors import ConfigError
from p4reduce.sim.network import Datagram
from p4reduce.wire import HEADER, Kind, Op, Profile, Reason, headers_from_bytes


class Count(IntEnum):
    """Events that the switch counts per epoch."""

    CONTRIBUTIONS = constants.COUNT_CONTRIBUTIONS
    RESULTS = constants.COUNT_RESULTS
    REPEATS = constants.COUNT_REPEATS
    DUPLICATES = constants.COUNT_DUPLICATES
    STALE = constants.COUNT_STALE
    MISMATCH = constants.COUNT_MISMATCH
    REFUSED = constants.COUNT_REFUSED


class Member(NamedTuple):
    """A worker as the switch knows it: where it sits and where its results go."""

    rank: int
    port: int
    ip: int
    udp_port: int


@dataclass(frozen=True, slots=True)
class Membership:
    """What a controller installs for one epoch of a job."""

    epoch: int
    members: tuple[Member, ...]
    pool_base: int
    pool_size: int
    group: int
    """Multicast group, above the flood group."""
    stats: int
    """Row of the counters, not 0."""


class SwitchModel(Protocol):
    """What a simulation needs of a switch."""

    def admit(self, job: Membership) -> None:
        """Install an epoch."""

    def revoke(self, epoch: int) -> None:
        """Remove an epoch; slots keep what they hold."""

    def process(self, port: int, datagram: Datagram) -> list[tuple[int, Datagram]]:
        """Let a datagram in at a port; returns what goes out, (port, datagram), in order."""

    def count(self, stats: int, event: Count) -> int:
        """A counter."""


@dataclass(slots=True)
class _Cell:
    """One version of one slot."""

    epoch: int = 0
    round: int = 0
    tag: tuple[int, int, int] = (0, 0, 0)
    """op, words, tag: what ranks may disagree about."""
    seen: int = 0
    check: int = 0
    payload: int = 0
    """All words of the frame as one number."""


class ReferenceSwitch:
    """A switch compiled for one profile. Nothing ever resets its slots."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._cells: dict[int, _Cell] = {}
        self._jobs: dict[int, Membership] = {}
        self._worker_ports: set[tuple[int, int]] = set()
        self._counters: dict[tuple[int, Count], int] = {}

    def admit(self, job: Membership) -> None:
        """Install an epoch: its members' ports and addresses, slots and multicast group."""
        if job.epoch in self._jobs:
            raise ConfigError(f"epoch {job.epoch} has been installed before")
        self._jobs[job.epoch] = job
        self._worker_ports.update((member.port, member.ip) for member in job.members)

    def revoke(self, epoch: int) -> None:
        """Remove an epoch; slots keep what they hold, and worker ports are still told why they are refused."""
        del self._jobs[epoch]

    def count(self, stats: int, event: Count) -> int:
        """Events counted in a row."""
        return self._counters.get((stats, event), 0)

    def process(self, port: int, datagram: Datagram) -> list[tuple[int, Datagram]]:
        """What ingress and egress do with a datagram. Only the protocol's port is served; nothing is forwarded."""
        if datagram.dst_port != constants.UDP_PORT or len(datagram.data) < constants.HEADER_BYTES:
            return []
        header = {name: int(headers_from_bytes(datagram.data)[name][0]) for name in HEADER.names or ()}
        job = self._jobs.get(header["epoch"])
        stats = job.stats if job else 0
        reason, member = self._admit(port, datagram, header, job)
        if reason is None and job is not None and member is not None:
            return self._aggregate(job, member, header, datagram)
        # A malformed frame is refused before any table has told whose it is.
        self._count(0 if reason is Reason.MALFORMED else stats, Count.REFUSED)
        return self._nack(port, datagram, header, reason or Reason.MALFORMED)

    def _admit(
        self, port: int, datagram: Datagram, header: dict[str, int], job: Membership | None
    ) -> tuple[Reason | None, Member | None]:
        words = header["words"]
        sized = (
            words in (1, self.profile.words)
            and len(datagram.data) == constants.HEADER_BYTES + words * constants.WORD_BYTES
        )
        if (
            not sized
            or header["version"] != constants.VERSION
            or header["kind"] != Kind.CONTRIBUTE
            or header["op"] > Op.OR
        ):
            return Reason.MALFORMED, None
        if job is None:
            return Reason.UNKNOWN_EPOCH, None
        for member in job.members:
            sender = (port, datagram.src, datagram.src_port, header["rank"])
            if (member.port, member.ip, member.udp_port, member.rank) == sender:
                return (Reason.BAD_SLOT if header["slot"] >= job.pool_size else None), member
        return Reason.NOT_ADMITTED, None

    def _aggregate(
        self, job: Membership, member: Member, header: dict[str, int], datagram: Datagram
    ) -> list[tuple[int, Datagram]]:
        worker = 1 << member.rank
        full = (1 << len(job.members)) - 1
        cell = self._cells.setdefault((job.pool_base + header["slot"]) << 1 | (header["round"] & 1), _Cell())
        tag = (header["op"], header["words"], header["tag"])
        payload = _payload(datagram.data)
        if (cell.epoch, cell.round, cell.tag) == (job.epoch, header["round"], tag):
            if cell.seen & worker:
                if cell.seen != full:
                    self._count(job.stats, Count.DUPLICATES)
                    return []
                self._count(job.stats, Count.REPEATS)
                answer = _result(header, cell, len(job.members), member.rank)
                return [(member.port, _reply(datagram, datagram.src, datagram.src_port, answer))]
            cell.seen |= worker
            cell.check = (cell.check + header["check"]) % (1 << 64)
            cell.payload = _combine(header, cell.payload, payload)
        else:
            ahead = (header["round"] - cell.round) % (1 << 32)
            if cell.epoch == job.epoch and ahead == 0:
                self._count(job.stats, Count.MISMATCH)
                return self._nack(member.port, datagram, header, Reason.TAG_MISMATCH)
            if cell.epoch == job.epoch and ahead != 2:
                self._count(job.stats, Count.STALE)
                return []
            cell.epoch, cell.round, cell.tag = job.epoch, header["round"], tag
            cell.seen, cell.check, cell.payload = worker, header["check"], payload
        self._count(job.stats, Count.CONTRIBUTIONS)
        if cell.seen != full:
            return []
        self._count(job.stats, Count.RESULTS)
        return [
            (to.port, _reply(datagram, to.ip, to.udp_port, _result(header, cell, len(job.members), to.rank)))
            for to in job.members
        ]

    def _nack(
        self, port: int, datagram: Datagram, header: dict[str, int], reason: Reason
    ) -> list[tuple[int, Datagram]]:
        # Never answer an answer, nor a stranger.
        if header["kind"] != Kind.CONTRIBUTE or (port, datagram.src) not in self._worker_ports:
            return []
        answer = _encode({**header, "kind": Kind.NACK, "count_or_reason": reason})
        return [(port, _reply(datagram, datagram.src, datagram.src_port, answer))]

    def _count(self, stats: int, event: Count) -> None:
        self._counters[stats, event] = self._counters.get((stats, event), 0) + 1


def _payload(data: bytes) -> int:
    return int.from_bytes(data[constants.HEADER_BYTES :], "big")


def _size(header: dict[str, int]) -> int:
    return header["words"] * constants.WORD_BYTES


def _combine(header: dict[str, int], one: int, other: int) -> int:
    """Payloads added modulo their width, or ORed."""
    both = one + other if header["op"] == Op.ADD else one | other
    return both % (1 << 8 * _size(header))


def _encode(header: dict[str, int]) -> bytes:
    record = np.zeros(1, dtype=HEADER)
    for name, value in header.items():
        record[name] = value
    return record.tobytes()


def _result(header: dict[str, int], cell: _Cell, count: int, rank: int) -> bytes:
    head = _encode({**header, "kind": Kind.RESULT, "count_or_reason": count, "rank": rank, "check": cell.check})
    return head + cell.payload.to_bytes(_size(header), "big")


def _reply(request: Datagram, ip: int, udp_port: int, data: bytes) -> Datagram:
    return Datagram(request.dst, constants.UDP_PORT, ip, udp_port, data)
