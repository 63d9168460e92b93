# SPDX-License-Identifier: Apache-2.0
"""docs/protocol.md says what the code does: its tables are held against headers, enums, states and switches."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from p4reduce import constants, pipeline
from p4reduce.core.bucket import Reduction
from p4reduce.core.states import TABLE
from p4reduce.core.worker import INTEGRITY_LIMIT
from p4reduce.errors import IntegrityError, JobError, MismatchError
from p4reduce.sim.adapter import EngineSwitch
from p4reduce.sim.byhand import ByHand, damage, edit
from p4reduce.sim.modelcheck.mutants import MUTANTS
from p4reduce.sim.modelcheck.violation import SENT, STUCK
from p4reduce.sim.network import Datagram
from p4reduce.sim.runner import Scenario
from p4reduce.sim.switch import Count, Member, Membership, ReferenceSwitch, SwitchModel
from p4reduce.wire import HEADER, PROFILES, Kind, Op, Reason, make_header

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")


def table(first: str) -> list[list[str]]:
    """Cells of the table whose first column is called so, without its two head lines."""
    lines = PAGE.splitlines()
    (begin,) = [number for number, line in enumerate(lines) if line.startswith(f"| {first} |")]
    rows = []
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    assert rows, first
    return rows


def test_header_fields() -> None:
    rows = [(int(row[0]), int(row[1]), row[2]) for row in table("off")]
    fields = HEADER.fields or {}
    assert rows == [(fields[name][1], fields[name][0].itemsize, name) for name in HEADER.names or ()]
    by_name = {row[2]: row[3:] for row in table("off")}
    assert by_name["version"][:2] == [str(constants.VERSION)] * 2
    assert by_name["kind"] == [str(int(kind)) for kind in (Kind.CONTRIBUTE, Kind.RESULT, Kind.NACK)]
    assert by_name["op"][0] == f"{int(Op.ADD)} add, {int(Op.OR)} or"
    assert all(f"{p.words} in {p.name}" in by_name["words"][0].replace("profile ", "") for p in PROFILES.values())


def test_numbers_in_the_text() -> None:
    assert f"port {constants.UDP_PORT} of the switch" in PAGE
    assert f"words of {constants.WORD_BYTES} bytes" in PAGE
    assert "after the third answer" in PAGE
    assert INTEGRITY_LIMIT == 3


def test_reasons() -> None:
    assert [(int(row[0]), row[1]) for row in table("number")] == [(int(reason), reason.name) for reason in Reason]


@pytest.mark.parametrize("reason", Reason)
def test_what_a_worker_makes_of_a_nack(reason: Reason) -> None:
    (said,) = [row[2] for row in table("number") if row[1] == reason.name]
    hand = ByHand(Scenario(2))
    hand.submit(*vectors())
    (frame, *_) = hand.sent(0)
    hand.to_worker(0, edit(frame[: constants.HEADER_BYTES], kind=Kind.NACK, count_or_reason=reason))
    error = hand.cores[0].error
    assert type(error) is {"JobError": JobError, "MismatchError": MismatchError}[said.rpartition(": ")[2]]


def test_life_of_a_bucket() -> None:
    said = [(row[0], row[1], row[2]) for row in table("phase")]
    assert said == [(phase.name, step.name, after.name) for (phase, step), after in TABLE.items()]


# The switch -----------------------------------------------------------------------------------------------------------

MEMBERS = tuple(Member(rank, rank + 1, 100 + rank, 4000 + rank) for rank in range(3))


class Step(NamedTuple):
    rank: int
    round: int = 4
    tag: int = 1
    epoch: int = 5


SITUATIONS: dict[str, tuple[list[Step], Step]] = {
    "another epoch, or nothing": ([Step(0, epoch=6), Step(1, epoch=6)], Step(0)),
    "this epoch, the round two before": ([Step(0, round=2), Step(1, round=2)], Step(0)),
    "the same use; rank not counted, others missing too": ([Step(0)], Step(1)),
    "the same use; only this rank was missing": ([Step(0), Step(1)], Step(2)),
    "the same use, complete; rank counted": ([Step(0), Step(1), Step(2)], Step(1)),
    "the same use, incomplete; rank counted": ([Step(0), Step(1)], Step(1)),
    "this epoch and round, but other op, words or tag": ([Step(0), Step(1)], Step(2, tag=9)),
    "this epoch, a newer round": ([Step(0, round=6)], Step(1)),
    "this epoch, a round further back": ([Step(0, round=0)], Step(1)),
}
"""What has come before, and what comes then."""
COUNTED = {
    "COLLECTING": {Count.CONTRIBUTIONS: 1},
    "COMPLETE": {Count.CONTRIBUTIONS: 1, Count.RESULTS: 1},
    "REPEAT": {Count.REPEATS: 1},
    "DUPLICATE": {Count.DUPLICATES: 1},
    "STALE": {Count.STALE: 1},
    "MISMATCH": {Count.MISMATCH: 1},
}


def reference() -> SwitchModel:
    return ReferenceSwitch(PROFILES["w5"])


def compiled() -> SwitchModel:
    module = pytest.importorskip("p4reduce_bmv2.embedded.engine", reason="the embedded engine is not installed")
    return EngineSwitch(module.Engine(json.loads(pipeline.find("w5").json.read_text())))


def send(switch: SwitchModel, step: Step) -> list[tuple[int, bytes]]:
    member = MEMBERS[step.rank]
    header = {"kind": Kind.CONTRIBUTE, "words": 1, "epoch": step.epoch, "rank": step.rank, "round": step.round}
    data = make_header(**header, tag=step.tag) + (1 << 8 * step.rank).to_bytes(constants.WORD_BYTES, "big")
    datagram = Datagram(member.ip, member.udp_port, 999, constants.UDP_PORT, data)
    return [(port - 1, answer.data) for port, answer in switch.process(member.port, datagram)]


def test_every_situation_is_named_once() -> None:
    rows = table("what the cell holds")
    assert [row[0] for row in rows] == list(SITUATIONS)
    source = (ROOT / "p4" / "include" / "control" / "slot.p4").read_text(encoding="utf-8")
    outcomes = {name.upper() for name in re.findall(r"/\* outcome \*/ action ([a-z]+)\(", source)}
    assert {row[1] for row in rows} == outcomes == set(COUNTED)


@pytest.mark.parametrize("make", [reference, compiled])
@pytest.mark.parametrize("row", table("what the cell holds"), ids=lambda row: row[0])
def test_what_a_switch_does(row: list[str], make: Callable[[], SwitchModel]) -> None:
    situation, outcome, afterwards, answer = row
    switch = make()
    for epoch, stats in ((5, 1), (6, 2)):
        switch.admit(Membership(epoch, MEMBERS, pool_base=0, pool_size=1, group=15 + epoch, stats=stats))
    before, last = SITUATIONS[situation]
    for step in before:
        send(switch, step)
    counts = {event: switch.count(1, event) for event in Count}
    answers = send(switch, last)
    changed = {event: switch.count(1, event) - counts[event] for event in Count}
    assert {event: change for event, change in changed.items() if change} == COUNTED[outcome]
    to = {"none": [], "result to all": [0, 1, 2]}.get(answer, [last.rank])
    assert [rank for rank, _ in answers] == to
    kinds = {data[1] for _, data in answers}
    assert kinds == ({Kind.NACK} if answer.startswith("nack") else {Kind.RESULT} if to else set())
    # What the cell holds now shows when all ranks send what it should hold.
    held = last if afterwards != "unchanged" else before[-1]
    rest = [answer for rank in range(3) for answer in send(switch, held._replace(rank=rank))]
    assert rest
    assert {int.from_bytes(data[constants.HEADER_BYTES :], "big") for _, data in rest} == {0x010101}


# The worker -----------------------------------------------------------------------------------------------------------


def vectors() -> list[Reduction]:
    return [Reduction(np.ones(960, np.float32), np.empty(960, np.float32)) for _ in range(2)]


def test_what_a_worker_counts() -> None:
    """One frame of every row, in the order of the table."""
    hand = ByHand(Scenario(2, or_slots=1, add_slots=1))
    hand.submit(*vectors())
    results: list[bytes] = []
    core = hand.cores[0]
    while len(results) < 3:  # one OR chunk, two of three ADD chunks; the third is outstanding
        frames = [(rank, hand.sent(rank)[0]) for rank in range(2)]
        for rank, frame in frames:
            for to, answer in hand.to_switch(rank, frame):
                hand.to_worker(to, answer)
                results += [answer] if to == 0 else []
    (frame,), (other,) = hand.sent(0), hand.sent(1)
    hand.to_switch(0, frame)
    result = next(answer for to, answer in hand.to_switch(1, other) if to == 0)

    def counted(*frames: bytes) -> str:
        before = core.counters.as_dict()
        hand.to_worker(0, *frames)
        after = core.counters.as_dict()
        names = ("results", "integrity", "duplicates", "stale", "foreign", "malformed")
        found = [name for name in names if after[name] > before[name]]
        return ",".join(found or ["nacks" if sum(core.counters.nacks.values()) else "none"])

    seen = {
        "the same, check wrong": counted(damage(result, 100)),
        "result of the chunk last finished in its slot": counted(results[2]),
        "nack of a finished chunk, result of an older one": counted(results[1]),
        "another epoch or rank": counted(edit(result, epoch=99)),
        "anything else": counted(edit(result, tag=99)),
        "result, equal in every header field to what is outstanding, check right": counted(result),
    }
    hand = ByHand(Scenario(2, or_slots=1, add_slots=1))
    hand.submit(*vectors())
    (frame,) = hand.sent(0)
    core = hand.cores[0]
    nack = edit(frame[: constants.HEADER_BYTES], kind=Kind.NACK, count_or_reason=Reason.UNKNOWN_EPOCH)
    seen["nack of what is outstanding"] = counted(nack)
    assert {row[0]: row[1] for row in table("frame")} == seen


def test_the_third_wrong_answer_ends_the_epoch() -> None:
    hand = ByHand(Scenario(2))
    hand.submit(*vectors())
    frames = [(rank, hand.sent(rank)[0]) for rank in range(2)]
    results = [answer for rank, frame in frames for to, answer in hand.to_switch(rank, frame) if to == 0]
    for _ in range(INTEGRITY_LIMIT):
        assert hand.cores[0].error is None
        hand.to_worker(0, damage(results[0], 100))
        hand.sent(0)
    assert isinstance(hand.cores[0].error, IntegrityError)


def test_mutants_are_described() -> None:
    """Kind and steps are those that tests/sim/test_modelcheck.py asserts."""
    found = {row[0].partition(" (")[0]: (row[1], int(row[2].partition(":")[0])) for row in table("fault")}
    assert list(found) == [mutant.name for mutant in MUTANTS]
    asserted = (Path(__file__).parent / "test_modelcheck.py").read_text(encoding="utf-8")
    for name, (kind, steps) in found.items():
        constant = {SENT: "SENT", STUCK: "STUCK"}[kind]
        assert f'"{name}": ({constant}, {steps}),' in asserted
