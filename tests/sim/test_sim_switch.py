# SPDX-License-Identifier: Apache-2.0
"""The rules of the reference switch, one by one (docs/design.md, section 3)."""

from __future__ import annotations

import pytest

from p4reduce.constants import UDP_PORT
from p4reduce.errors import ConfigError
from p4reduce.sim.byhand import field
from p4reduce.sim.network import Datagram
from p4reduce.sim.switch import Count, Member, Membership, ReferenceSwitch
from p4reduce.wire import PROFILES, Kind, Op, Reason, make_header

MEMBERS = tuple(Member(rank, rank + 1, 100 + rank, 4000 + rank) for rank in range(3))
JOB = Membership(epoch=5, members=MEMBERS, pool_base=10, pool_size=4, group=16, stats=1)
SWITCH = 999


class Box:
    """A switch with one job and short frames of one repeated value."""

    def __init__(self) -> None:
        self.switch = ReferenceSwitch(PROFILES["w5"])
        self.switch.admit(JOB)

    def send(self, rank: int, value: int = 0, *, words: int = 1, size: int | None = None, **fields: int) -> list[bytes]:
        return [data for _, data in self.send_to(rank, value, words=words, size=size, **fields)]

    def send_to(
        self, rank: int, value: int = 0, *, words: int = 1, size: int | None = None, **fields: int
    ) -> list[tuple[int, bytes]]:
        header = {"kind": Kind.CONTRIBUTE, "op": Op.ADD, "words": words, "epoch": 5, "rank": rank, **fields}
        payload = value.to_bytes(256 if size is None else size, "big") if words == 1 else bytes([value]) * 1280
        data = make_header(**header) + payload
        datagram = Datagram(100 + rank, 4000 + rank, SWITCH, UDP_PORT, data)
        answers = self.switch.process(rank + 1, datagram)
        for port, answer in answers:
            member = MEMBERS[port - 1]
            assert answer[:4] == (SWITCH, UDP_PORT, member.ip, member.udp_port)
        return [(port, answer.data) for port, answer in answers]

    def counts(self, stats: int = 1) -> dict[str, int]:
        return {event.name: self.switch.count(stats, event) for event in Count if self.switch.count(stats, event)}


def value(frame: bytes) -> int:
    return int.from_bytes(frame[32:288], "big")


def test_the_last_contribution_brings_everybody_the_sum() -> None:
    box = Box()
    assert box.send(0, 5, check=1 << 63) == []
    assert box.send(2, 7, check=1 << 63) == []
    answers = box.send_to(1, 11, check=9)
    assert [port for port, _ in answers] == [1, 2, 3]
    for rank, (_, frame) in enumerate(answers):
        assert value(frame) == 23
        assert (field(frame, "kind"), field(frame, "rank"), field(frame, "count_or_reason")) == (Kind.RESULT, rank, 3)
        assert field(frame, "check") == 9, "modulo 2^64"
    assert box.counts() == {"CONTRIBUTIONS": 3, "RESULTS": 1}


def test_a_frames_words_are_one_number() -> None:
    box = Box()
    for rank in range(3):
        answers = box.send(rank, 0xFF, words=5)
    expected = (3 * int.from_bytes(b"\xff" * 1280, "big")) % (1 << 10240)
    assert int.from_bytes(answers[0][32:], "big") == expected
    assert len(answers[0]) == 32 + 1280


def test_or_joins_bits() -> None:
    box = Box()
    for rank, bits in enumerate((0b0011, 0b0110, 0b1000)):
        answers = box.send(rank, bits, op=Op.OR)
    assert value(answers[0]) == 0b1111


def test_repetitions_are_answered_once_all_have_contributed() -> None:
    box = Box()
    for rank in (0, 0, 1):
        assert box.send(rank, 1) == []
    box.send(2, 1)
    ((port, frame),) = box.send_to(1, 999)
    assert (port, value(frame), field(frame, "rank")) == (2, 3, 1)
    assert box.counts() == {"CONTRIBUTIONS": 3, "RESULTS": 1, "DUPLICATES": 1, "REPEATS": 1}


def test_old_rounds_are_stale_and_new_ones_start_fresh() -> None:
    box = Box()
    for rank in range(3):
        box.send(rank, 1, round=0)
    box.send(0, 10, round=2)
    assert box.send(1, 1, round=0) == [], "its cell has moved on"
    assert box.counts()["STALE"] == 1
    box.send(1, 20, round=2)
    assert value(box.send(2, 30, round=2)[0]) == 60
    assert box.send(0, 1, round=2)[0], "repeated, not stale"


def test_rounds_are_serial_numbers() -> None:
    box = Box()
    box.send(0, 1, round=(1 << 32) - 2)
    box.send(0, 2, round=0)
    assert box.send(1, 1, round=(1 << 32) - 2) == []
    assert box.counts()["STALE"] == 1
    for damaged in (4, 6, 1 << 20, (1 << 31) - 2, 1 << 31):
        assert box.send(1, 1, round=damaged) == [], "nobody can be there yet"
    assert box.counts()["STALE"] == 6
    box.send(1, 5, round=0)
    assert value(box.send(2, 5, round=0)[0]) == 12


@pytest.mark.parametrize("other", [{"tag": 2}, {"op": Op.OR}, {"words": 5}])
def test_ranks_that_disagree_are_refused(other: dict[str, int]) -> None:
    box = Box()
    box.send(0, 1, tag=1)
    (nack,) = box.send(1, 1, **{"tag": 1, **other})
    assert (field(nack, "kind"), field(nack, "count_or_reason")) == (Kind.NACK, Reason.TAG_MISMATCH)
    assert len(nack) == 32
    assert box.counts() == {"CONTRIBUTIONS": 1, "MISMATCH": 1}


def test_a_new_epoch_starts_fresh_whatever_the_round() -> None:
    box = Box()
    box.send(0, 1, round=1000)
    box.switch.admit(Membership(6, MEMBERS, 10, 4, 17, 2))
    for rank in range(3):
        answers = box.send(rank, 1, epoch=6, round=0)
    assert value(answers[0]) == 3
    assert box.counts(2) == {"CONTRIBUTIONS": 3, "RESULTS": 1}
    with pytest.raises(ConfigError):
        box.switch.admit(JOB)


@pytest.mark.parametrize(
    ("reason", "stats", "changes"),
    [
        (Reason.UNKNOWN_EPOCH, 0, {"epoch": 99}),
        (Reason.NOT_ADMITTED, 1, {"rank": 1}),
        (Reason.BAD_SLOT, 1, {"slot": 4}),
        (Reason.MALFORMED, 0, {"version": 2}),
        (Reason.MALFORMED, 0, {"op": 2}),
        (Reason.MALFORMED, 0, {"words": 2}),
        (Reason.MALFORMED, 0, {"size": 255}),
        (Reason.MALFORMED, 0, {"size": 257}),
    ],
)
def test_refusals_name_their_reason(reason: Reason, stats: int, changes: dict[str, int]) -> None:
    box = Box()
    header = {"kind": Kind.CONTRIBUTE, "words": 1, "epoch": 5, **changes}
    size = header.pop("size", 256)
    datagram = Datagram(100, 4000, SWITCH, UDP_PORT, make_header(**header) + bytes(size))
    ((port, nack),) = box.switch.process(1, datagram)
    assert (port, nack.dst, nack.dst_port, len(nack.data)) == (1, 100, 4000, 32)
    assert (field(nack.data, "kind"), field(nack.data, "count_or_reason")) == (Kind.NACK, reason)
    assert box.counts(stats) == {"REFUSED": 1}


def test_strangers_and_answers_get_no_answer() -> None:
    box = Box()
    stranger = Datagram(77, 4000, SWITCH, UDP_PORT, make_header(kind=Kind.CONTRIBUTE, words=1, epoch=5) + bytes(256))
    assert box.switch.process(1, stranger) == []
    assert box.switch.process(9, stranger._replace(src=100)) == []
    assert box.send(0, kind=Kind.RESULT) == []
    assert box.send(0, kind=Kind.NACK) == []
    assert box.switch.process(1, Datagram(100, 4000, SWITCH, UDP_PORT, b"short")) == []
    assert box.switch.process(1, Datagram(100, 4000, SWITCH, 53, bytes(100))) == []
    assert box.counts(0)["REFUSED"] == 2
    assert box.counts(1)["REFUSED"] == 2
