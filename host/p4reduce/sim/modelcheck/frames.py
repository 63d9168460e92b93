# SPDX-License-Identifier: Apache-2.0
"""Every frame that a check has come across, as a small number, and what a result must be."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import NamedTuple

import numpy as np

from p4reduce.constants import HEADER_BYTES
from p4reduce.sim.modelcheck.bounds import EPOCHS, Bounds
from p4reduce.sim.modelcheck.violation import ACCEPTED, SENT, Violation
from p4reduce.wire import HEADER, Kind, Op, Reason, headers_from_bytes

NAMES = "ABCD"


class Frame(NamedTuple):
    """A frame that a rank sent (upwards) or that was sent to it, and its header."""

    rank: int
    data: bytes
    header: dict[str, int]

    @property
    def place(self) -> tuple[int, int, int]:
        """Epoch, slot and round: where a contribution is counted."""
        return self.header["epoch"], self.header["slot"], self.header["round"]


def read(rank: int, data: bytes) -> Frame:
    """Decode the header."""
    record = headers_from_bytes(data)[0]
    return Frame(rank, data, {name: int(record[name]) for name in HEADER.names or ()})


class Frames:
    """Numbers frames in the order in which they are first seen; upwards and downwards count by themselves."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.up: list[Frame] = []
        self.down: list[Frame] = []
        self._up: dict[tuple[int, bytes], int] = {}
        self._down: dict[tuple[int, bytes], int] = {}
        self._contributions: dict[tuple[int, int, int], dict[int, Frame]] = {}
        self._wrong: dict[int, str] = {}

    def sent(self, rank: int, data: bytes) -> int:
        """Number of a contribution; a rank that sends two different ones to one place is a violation."""
        number = self._up.setdefault((rank, data), len(self.up))
        if number == len(self.up):
            frame = read(rank, data)
            self.up.append(frame)
            other = self._contributions.setdefault(frame.place, {}).setdefault(rank, frame)
            if other is not frame:
                raise Violation(ACCEPTED, f"two different contributions: {self.name(frame)} and {self.name(other)}")
        return number

    def answered(self, rank: int, data: bytes) -> int:
        """Number of a result or nack addressed to a rank."""
        number = self._down.setdefault((rank, data), len(self.down))
        if number == len(self.down):
            self.down.append(read(rank, data))
        return number

    def epoch_of(self, frame: Frame) -> int:
        """Place of the frame's epoch in EPOCHS."""
        return EPOCHS.index(frame.header["epoch"])

    def is_nack(self, number: int, reason: Reason) -> bool:
        """Whether a frame downwards is a nack of that kind."""
        header = self.down[number].header
        return header["kind"] == Kind.NACK and header["count_or_reason"] == reason

    def wrong(self, number: int) -> str:
        """What is wrong with a result, or an empty text. Lanes are added one by one here, without any wide word."""
        if number not in self._wrong:
            self._wrong[number] = self._judge(self.down[number])
        return self._wrong[number]

    def check_sent(self, number: int) -> None:
        """Raise for a result that is not exactly right."""
        text = self.wrong(number)
        if text:
            raise Violation(SENT, text)

    def _judge(self, result: Frame) -> str:
        if result.header["kind"] == Kind.NACK:
            return ""
        given = self._contributions.get(result.place, {})
        if len(given) < self.bounds.workers:
            return f"{self.name(result)}: not every rank has contributed; it holds {self.census(result)}"
        if len({(f.header["op"], f.header["words"], f.header["tag"]) for f in given.values()}) > 1:
            return f"{self.name(result)}: the ranks disagree; it holds {self.census(result)}"
        expected = self._expected(result, [given[rank] for rank in sorted(given)])
        if result.data != expected.data:
            return f"{self.name(result)} holds {self.census(result)}, not {self.census(expected)}"
        return ""

    def _expected(self, result: Frame, given: list[Frame]) -> Frame:
        lanes = np.stack([np.frombuffer(frame.data[HEADER_BYTES:], dtype=">u4") for frame in given])
        total = np.bitwise_or.reduce(lanes) if given[0].header["op"] == Op.OR else lanes.sum(axis=0, dtype=np.uint64)
        header = headers_from_bytes(given[0].data).copy()
        header["kind"], header["rank"], header["count_or_reason"] = Kind.RESULT, result.rank, len(given)
        header["check"] = sum(frame.header["check"] for frame in given) % (1 << 64)
        return read(result.rank, header.tobytes() + total.astype(">u4").tobytes())

    def census(self, result: Frame) -> str:
        """Which contributions a result holds, found by its check: signatures make every small multiset different."""
        near = [f for f in self.up if f.header["op"] == result.header["op"]]
        for size in range(1, self.bounds.workers + 2):
            for chosen in itertools.combinations_with_replacement(near, size):
                if sum(f.header["check"] for f in chosen) % (1 << 64) == result.header["check"]:
                    counts = Counter(self.short(frame) for frame in chosen)
                    text = " + ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items())
                    return f"{text}{self._damage(result, list(chosen))}"
        return "nothing that can be told"

    def _damage(self, result: Frame, chosen: list[Frame]) -> str:
        if len({len(frame.data) for frame in (result, *chosen)}) > 1:
            return ", of different sizes"
        off = np.frombuffer(self._expected(result, chosen).data[HEADER_BYTES:], dtype=">u4").astype(np.int64)
        off = np.frombuffer(result.data[HEADER_BYTES:], dtype=">u4").astype(np.int64) - off
        lanes = np.flatnonzero(off)
        return f", but {len(lanes)} lanes are off by up to {abs(off).max()}" if len(lanes) else ""

    def round_of(self, frame: Frame) -> int:
        """Round counted from the slot's first."""
        slots = self.bounds.or_slots if frame.header["op"] == Op.OR else self.bounds.add_slots
        first = self.bounds.first_round * self.bounds.add_slots // slots
        return (frame.header["round"] - first) % (1 << 32)

    def short(self, frame: Frame) -> str:
        """A contribution in few letters: rank, stream, slot, round, and a mark for the second epoch."""
        stream = "OR" if frame.header["op"] == Op.OR else "ADD"
        late = "'" * self.epoch_of(frame)
        return f"{NAMES[frame.rank]}:{stream}{frame.header['slot']}.{self.round_of(frame)}{late}"

    def name(self, frame: Frame) -> str:
        """A frame in words."""
        kind = Kind(frame.header["kind"])
        if kind is Kind.CONTRIBUTE:
            return self.short(frame)
        if kind is Kind.NACK:
            return f"nack {Reason(frame.header['count_or_reason']).name} of {self.short(frame)}"
        return f"result {self.short(frame)[2:]} to {NAMES[frame.rank]}"
