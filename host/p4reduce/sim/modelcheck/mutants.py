# SPDX-License-Identifier: Apache-2.0
"""Switches with one known fault each, for showing that a check finds it. Nothing but tests may use them.

A Variant without a fault does what the reference switch does; a test holds both against each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

import numpy as np

from p4reduce import constants
from p4reduce.quantize import LaneFormat
from p4reduce.sim.modelcheck.bounds import Bounds
from p4reduce.sim.network import Datagram
from p4reduce.sim.switch import Member, Membership, ReferenceSwitch, _Cell, _combine, _payload, _reply, _result, _size
from p4reduce.wire import Op, Reason

Header = dict[str, int]
Answers = list[tuple[int, Datagram]]


class Relation(Enum):
    """How a contribution stands to what its cell holds."""

    SAME = auto()
    OTHER_TAG = auto()
    OLDER = auto()
    FRESH = auto()


class Variant(ReferenceSwitch):
    """The reference switch, taken apart so that one rule at a time can be changed."""

    def key(self, job: Membership, header: Header) -> int:
        """Cell of a contribution."""
        return (job.pool_base + header["slot"]) << 1 | (header["round"] & 1)

    def relation(self, cell: _Cell, job: Membership, header: Header) -> Relation:
        """Epoch first, then the round, then the tag."""
        if cell.epoch != job.epoch or self.newer(cell.round, header["round"]):
            return Relation.FRESH
        if header["round"] != cell.round:
            return Relation.OLDER
        return Relation.SAME if cell.tag == (header["op"], header["words"], header["tag"]) else Relation.OTHER_TAG

    def newer(self, held: int, round_: int) -> bool:
        """The next round of the cell, or of a slot with one cell."""
        return (round_ - held) % (1 << 32) in (1, 2)

    def start(self, cell: _Cell, job: Membership, header: Header) -> None:
        """The cell's first contribution."""
        cell.epoch, cell.round = job.epoch, header["round"]
        cell.tag = (header["op"], header["words"], header["tag"])
        cell.seen, cell.check, cell.payload = 0, 0, 0

    def payload(self, job: Membership, header: Header, data: bytes) -> int:  # noqa: ARG002
        """What is added or ORed."""
        return _payload(data)

    def held(self, cell: _Cell, job: Membership) -> _Cell:  # noqa: ARG002
        """What a result is made of."""
        return cell

    def again(self, cell: _Cell, full: int) -> bool:
        """Whether a worker that was counted before is answered with what the cell holds."""
        return cell.seen == full

    def older(self, cell: _Cell) -> bool:  # noqa: ARG002
        """Whether a contribution of an older round starts afresh."""
        return False

    def other_tag(self) -> bool:
        """Whether a contribution with another tag is counted."""
        return False

    def _aggregate(self, job: Membership, member: Member, header: Header, datagram: Datagram) -> Answers:
        worker, full = 1 << member.rank, (1 << len(job.members)) - 1
        cell = self._cells.setdefault(self.key(job, header), _Cell())
        payload = self.payload(job, header, datagram.data)
        relation = self.relation(cell, job, header)
        if relation is Relation.OTHER_TAG and not self.other_tag():
            return self._nack(member.port, datagram, header, Reason.TAG_MISMATCH)
        if relation is Relation.OLDER and not self.older(cell):
            return []
        if relation in (Relation.FRESH, Relation.OLDER):
            self.start(cell, job, header)
        elif cell.seen & worker:
            return self._answer(job, [member], header, cell, datagram) if self.again(cell, full) else []
        cell.seen |= worker
        cell.check = (cell.check + header["check"]) % (1 << 64)
        cell.payload = _combine(header, cell.payload, payload)
        return self._answer(job, list(job.members), header, cell, datagram) if cell.seen == full else []

    def _answer(self, job: Membership, to: list[Member], header: Header, cell: _Cell, datagram: Datagram) -> Answers:
        held, workers = self.held(cell, job), len(job.members)
        return [
            (one.port, _reply(datagram, one.ip, one.udp_port, _result(header, held, workers, one.rank))) for one in to
        ]


class SeenBits(Variant):
    """The published scheme: a worker's mark in one version clears its mark in the other, and no round is stored.

    A counter, kept in the cell's round, says when all have contributed ("Scaling Distributed Machine Learning with
    In-Network Aggregation", NSDI 2021, algorithm 3).
    """

    def _aggregate(self, job: Membership, member: Member, header: Header, datagram: Datagram) -> Answers:
        worker, workers = 1 << member.rank, len(job.members)
        key = self.key(job, header)
        cell, other = self._cells.setdefault(key, _Cell()), self._cells.setdefault(key ^ 1, _Cell())
        if cell.seen & worker:
            complete = cell.round == 0
            return self._answer(job, [member], header, cell, datagram) if complete else []
        cell.seen |= worker
        other.seen &= ~worker
        if cell.round == 0:
            cell.check, cell.payload = 0, 0
        cell.round = (cell.round + 1) % workers
        cell.check = (cell.check + header["check"]) % (1 << 64)
        cell.payload = _combine(header, cell.payload, _payload(datagram.data))
        return self._answer(job, list(job.members), header, cell, datagram) if cell.round == 0 else []


class NoEpoch(Variant):
    """The state does not say which epoch it belongs to; an empty cell still counts as fresh."""

    def relation(self, cell: _Cell, job: Membership, header: Header) -> Relation:
        """As if all that the cell holds were of this epoch."""
        if cell.seen:
            cell.epoch = job.epoch
        return super().relation(cell, job, header)


class EarlyReply(Variant):
    """A worker that sends again is answered whether all have contributed or not."""

    def again(self, cell: _Cell, full: int) -> bool:  # noqa: ARG002
        """Always."""
        return True


class NoHeadroom(Variant):
    """Lanes are two's complement and nothing keeps them apart: what a negative sum carries reaches the next lane."""

    def payload(self, job: Membership, header: Header, data: bytes) -> int:
        """Take the bias away, so that negative numbers are negative."""
        payload = super().payload(job, header, data)
        return payload if header["op"] == Op.OR else _shift(payload, _size(header), -_bias(job))

    def held(self, cell: _Cell, job: Membership) -> _Cell:
        """Give all ranks' bias back: without carries that makes up for what was taken away."""
        if cell.tag[0] == Op.OR:
            return cell
        size = cell.tag[1] * constants.WORD_BYTES
        return replace(cell, payload=_shift(cell.payload, size, len(job.members) * _bias(job)))


class PlainRounds(Variant):
    """Rounds are compared as plain numbers."""

    def newer(self, held: int, round_: int) -> bool:
        """Wrong where rounds wrap."""
        return round_ > held


class AnyTag(Variant):
    """A contribution counts even though its tag says that the rank reduces something else."""

    def other_tag(self) -> bool:
        """Yes."""
        return True


class OneVersion(Variant):
    """A slot has one cell, so a new round overwrites the result that somebody may still ask for."""

    def key(self, job: Membership, header: Header) -> int:
        """Without the version."""
        return job.pool_base + header["slot"] << 1


class OldStarts(Variant):
    """A contribution of an older round starts the cell afresh: a late copy resets a slot that is complete."""

    def older(self, cell: _Cell) -> bool:  # noqa: ARG002
        """Yes."""
        return True


@dataclass(frozen=True, slots=True)
class Mutant:
    """A faulty switch and the smallest system in which its fault shows."""

    name: str
    switch: type[ReferenceSwitch]
    bounds: Bounds


MUTANTS = (
    Mutant("seen bits without rounds", SeenBits, Bounds(workload=(0, 0), first_round=0)),
    Mutant("no epoch in the state", NoEpoch, Bounds(workload=(1,), first_round=0, change=True)),
    Mutant("reply without completion", EarlyReply, Bounds(workload=(1,), first_round=0)),
    Mutant("wide add without headroom", NoHeadroom, Bounds(workload=(1,), first_round=0)),
    Mutant("rounds compared as plain numbers", PlainRounds, Bounds(workload=(1, 1, 1))),
    Mutant("another tag accepted", AnyTag, Bounds(workload=(1, 1), first_round=0, disagree=True)),
    Mutant("one version per slot", OneVersion, Bounds(workload=(1, 1), first_round=0)),
    Mutant("an older round starts afresh", OldStarts, Bounds(workload=(1, 1, 1), first_round=0)),
)


def _bias(job: Membership) -> int:
    return LaneFormat(32, len(job.members), 256).bias


def _shift(payload: int, size: int, by: int) -> int:
    """Add a number to every lane of a payload of so many bytes, modulo the lane."""
    lanes = np.frombuffer(payload.to_bytes(size, "big"), dtype=">u4").astype(np.int64) + by
    return int.from_bytes((lanes % (1 << 32)).astype(">u4").tobytes(), "big")
