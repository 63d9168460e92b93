# SPDX-License-Identifier: Apache-2.0
"""Damage to any byte of any result: harmless, or the job falls back and the ring gives the right sum. Never wrong.

A bucket here is one full OR frame and one full ADD frame, in place, so that a rank which has its result has nothing
else any more. One copy is damaged, or every copy that goes to rank 0; resends bring the next one. Cores by hand take
many masks, the whole system in virtual time (helpers/cut_world.py) shows that the job itself falls back, and threads
and sockets that nothing was left out.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from helpers.cut_storm import hurried
from helpers.cut_world import CutWorld

from p4reduce import wire
from p4reduce.constants import HEADER_BYTES
from p4reduce.core.batch import ReceiveBatch
from p4reduce.core.bucket import Bucket, Reduction
from p4reduce.core.config import RetransmissionPolicy
from p4reduce.core.kept import Kept
from p4reduce.core.states import Phase
from p4reduce.errors import IntegrityError
from p4reduce.local_job import LocalJob
from p4reduce.packetize import FIELD_BYTES, BucketCodec
from p4reduce.quantize import LaneFormat, block_exponents
from p4reduce.sim.byhand import ByHand, direct
from p4reduce.sim.network import Faults
from p4reduce.sim.runner import Scenario
from p4reduce.transport.base import Transport
from p4reduce.transport.faults import Wrap
from p4reduce.wire import Kind, Op, unpack_tag

BLOCK = 8
"""Elements that share an exponent: a full OR frame goes with a full ADD frame."""
ELEMENTS = {"w5": 320, "w34": 2176}
MASKS = (0x01, 0x80)
ROUNDS = 12


class Case(NamedTuple):
    """What is done to which result."""

    profile: str
    op: Op
    offset: int
    mask: int
    every: bool


def cases(profile: str, offsets: list[int], masks: tuple[int, ...]) -> Iterator[Case]:
    """Both frames, one copy and every copy; besides the masks one that the offset draws."""
    for op in (Op.OR, Op.ADD):
        for offset in offsets:
            drawn = random.Random(f"{profile} {op} {offset}").randrange(1, 256)
            for mask in {*masks, drawn}:
                for every in (False, True):
                    yield Case(profile, op, offset, mask, every)


def all_offsets(profile: str) -> list[int]:
    return list(range(wire.profile(profile).datagram_bytes))


def some_offsets(profile: str, count: int) -> list[int]:
    """The whole header, and some of the payload."""
    rest = range(HEADER_BYTES, wire.profile(profile).datagram_bytes)
    return [*range(HEADER_BYTES), *sorted(random.Random(profile).sample(rest, count))]


def spoiled(case: Case, frame: bytes) -> bytes:
    made = bytearray(frame)
    made[case.offset] ^= case.mask
    return bytes(made)


def is_target(case: Case, frame: bytes) -> bool:
    return len(frame) > HEADER_BYTES and (frame[1], frame[2]) == (Kind.RESULT, case.op)


VECTORS = {
    name: [np.random.default_rng([count, rank]).standard_normal(count).astype(np.float32) for rank in range(2)]
    for name, count in ELEMENTS.items()
}
RIGHT = {name: direct(vectors, block=BLOCK).tobytes() for name, vectors in VECTORS.items()}


# Cores by hand ------------------------------------------------------------------------------------------------------


def ring(ranks: list[Kept]) -> None:
    """Sum one bucket over all ranks as the ring path does."""
    agreed = np.max([kept.exponents() for kept in ranks], axis=0)
    sums = np.add.reduce([kept.integers(agreed) for kept in ranks]).astype(ranks[0].format.lane_type)
    for kept in ranks:
        kept.finish(sums, agreed)
        kept.release()


class Pair:
    """Two cores, one bucket, one damaged result."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.hand = ByHand(Scenario(2, profile=case.profile, block=BLOCK, or_slots=1, add_slots=1))
        self.buckets = [Reduction(x, x) for x in (vector.copy() for vector in VECTORS[case.profile])]
        self.damaged = 0
        self.wrong = 0

    def run(self) -> str:
        """What came of it: harmless, integrity or silent; the last two were mended by the ring."""
        hand, delivered = self.hand, [False, False]
        hand.submit(*self.buckets)
        for _ in range(ROUNDS):
            self._exchange()
            for rank, bucket in enumerate(self.buckets):
                if bucket.phase is Phase.COMPLETED and not delivered[rank]:
                    delivered[rank] = True
                    self._take(bucket)
            if all(delivered) or any(core.error is not None for core in hand.cores):
                break
            hand.now += 0.6
        assert self.damaged == 1 or (self.case.every and self.damaged > 1)
        if all(delivered):
            return "harmless"
        errors = [core.error for core in hand.cores if core.error is not None]
        assert all(isinstance(error, IntegrityError) for error in errors), errors
        ring([core.handover()[0] for core in hand.cores])
        for rank, bucket in enumerate(self.buckets):
            if not delivered[rank]:
                self._take(bucket)
            assert (bucket.data == -1).all(), "written to after delivery"
        return "integrity" if errors else "silent"

    def _exchange(self) -> None:
        hand = self.hand
        while frames := [(rank, frame) for rank in range(2) for frame in hand.sent(rank)]:
            for rank, frame in frames:
                for to, answer in hand.to_switch(rank, frame):
                    hand.to_worker(to, self._carry(to, answer))

    def _carry(self, to: int, answer: bytes) -> bytes:
        if to != 0 or not is_target(self.case, answer) or (self.damaged and not self.case.every):
            return answer
        self.damaged += 1
        return spoiled(self.case, answer)

    def _take(self, bucket: Reduction) -> None:
        assert bucket.phase is Phase.COMPLETED
        assert bucket.out.tobytes() == RIGHT[self.case.profile], self.case
        bucket.out.fill(-1)


def outcomes(found: Iterator[Case]) -> Counter[tuple[str, str, str]]:
    """(frame, how many copies, what came of it), counted."""
    seen: Counter[tuple[str, str, str]] = Counter()
    for case in found:
        seen[case.op.name, "every" if case.every else "one", Pair(case).run()] += 1
    return seen


def check(seen: Counter[tuple[str, str, str]]) -> None:
    # A check that fails is asked for again, a header that fits nothing comes again by itself.
    assert {outcome for op, copies, outcome in seen if (op, copies) == ("ADD", "one")} == {"harmless"}
    assert {outcome for op, copies, outcome in seen if (op, copies) == ("ADD", "every")} == {"integrity", "silent"}
    # An exponent may be damaged to a valid one: one copy is enough then to fall back.
    assert {outcome for op, copies, outcome in seen if (op, copies) == ("OR", "one")} <= {"harmless", "integrity"}
    assert {outcome for op, copies, outcome in seen if (op, copies) == ("OR", "every")} == {"integrity", "silent"}
    assert seen["OR", "one", "harmless"] > 10 * seen["OR", "one", "integrity"]


def test_every_byte_of_a_result() -> None:
    seen = outcomes(cases("w5", all_offsets("w5"), ()))
    check(seen)
    # Not to be hit by chance: one copy that has a valid exponent one higher.
    seen = outcomes(case for case in cases("w5", all_offsets("w5"), (1, 2, 128)) if raises_an_exponent(case))
    assert seen["OR", "one", "integrity"] > 10


def raises_an_exponent(case: Case) -> bool:
    """Whether the mask sets just the next bit of a thermometer."""
    place = case.offset - HEADER_BYTES
    if case.op is not Op.OR or place < 0:
        return False
    group, byte = divmod(place % FIELD_BYTES, 8)
    vectors = [vector[place // FIELD_BYTES * BLOCK :][:BLOCK] for vector in VECTORS["w5"]]
    level = max(int(block_exponents(vector, BLOCK)[0]) for vector in vectors)
    return level // 64 == group and level % 64 // 8 == 7 - byte and 1 << level % 8 == case.mask


def test_bytes_of_a_header() -> None:
    check(outcomes(cases("w5", [*range(HEADER_BYTES), 40, 1000], MASKS)))


def test_bytes_of_a_long_result() -> None:
    check(outcomes(cases("w34", some_offsets("w34", 60), MASKS)))


def test_a_core_that_takes_damaged_sums_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = BucketCodec.verify_and_store

    def careless(self, payload, checks, chunk, sums):  # type: ignore[no-untyped-def]
        genuine(self, payload, checks, chunk, sums)
        sums[chunk] = payload.view(">u8").astype(np.uint64)
        return np.ones(len(chunk), dtype=np.bool_)

    monkeypatch.setattr(BucketCodec, "verify_and_store", careless)
    with pytest.raises(AssertionError):
        outcomes(cases("w5", [40, 41], MASKS))


# The whole system ---------------------------------------------------------------------------------------------------


def falls_back(case: Case) -> str:
    """A job whose second bucket is damaged at rank 0; why it took the ring path, or nothing."""
    content: list[list[Bucket]] = [
        [Reduction(x, x, block=BLOCK) for x in (vector.copy() for vector in VECTORS[case.profile])] for _ in range(3)
    ]
    world = CutWorld(7, (2,), buckets=3, faults=Faults(), profile=case.profile, content=content)
    damaged = 0

    def spoil(port: int, frame: bytes) -> bytes:
        nonlocal damaged
        if port != 1 or not is_target(case, frame) or (damaged and not case.every):
            return frame
        if unpack_tag(int.from_bytes(frame[24:32], "big"))[0] != 1:
            return frame
        damaged += 1
        return spoiled(case, frame)

    world.fabric.spoil = spoil
    (job,) = world.jobs
    done = world.run_until(lambda: all(len(rank.done) == 3 for rank in job.ranks), 20.0)
    drivers = [rank.driver for rank in job.ranks if rank.driver is not None]
    reasons = [dict(driver.path.fallbacks) for driver in drivers]
    for rank in job.ranks:
        rank.stop()
    assert done, (case, world.wrong, world.casualties, reasons)
    assert damaged
    assert not world.wrong
    assert len(drivers) == 2
    assert reasons[0] == reasons[1]
    return ", ".join(reasons[0])


def test_a_job_falls_back_for_every_byte() -> None:
    with hurried():
        seen = Counter(
            (case.op.name, case.every, falls_back(case))
            for profile, offsets in (("w5", some_offsets("w5", 60)), ("w34", some_offsets("w34", 12)))
            for case in cases(profile, offsets, ())
        )
    for op in ("OR", "ADD"):
        assert {why for name, every, why in seen if name == op and every} == {"integrity", "silent"}, seen
        assert {why for name, every, why in seen if name == op and not every} <= {"", "integrity"}, seen
        assert seen[op, False, ""] > 0


# Threads and sockets -------------------------------------------------------------------------------------------------


class Damaging:
    """A transport that damages every copy of one result of bucket 1."""

    def __init__(self, inner: Transport, case: Case) -> None:
        self._inner = inner
        self._case = case
        self.damaged = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def receive(self, batch: ReceiveBatch) -> int:
        taken = self._inner.receive(batch)
        for row in range(batch.count):
            head = batch.headers[row]
            bucket = unpack_tag(int(head["tag"]))[0]
            if (head["kind"], head["op"], bucket) == (Kind.RESULT, self._case.op, 1):
                self.damaged += 1
                if self._case.offset < HEADER_BYTES:
                    batch.headers[row : row + 1].view(np.uint8)[self._case.offset] ^= self._case.mask
                else:
                    batch.payload[row, self._case.offset - HEADER_BYTES] ^= self._case.mask
        return taken


class DamagedJob(LocalJob):
    """Its rank 0 gets damaged results."""

    def __init__(self, case: Case, policy: RetransmissionPolicy) -> None:
        super().__init__(3, profile=case.profile, policy=policy)
        self._case = case
        self.ends: list[Damaging] = []

    def _wrap(self, rank: int) -> Wrap | None:
        if rank:
            return None

        def wrap(inner: Transport) -> Transport:
            self.ends.append(Damaging(inner, self._case))
            return self.ends[0]  # type: ignore[return-value]

        return wrap


@pytest.mark.parametrize(
    ("op", "offset", "why"),
    [(Op.ADD, 700, "integrity"), (Op.OR, 100, "integrity"), (Op.ADD, 15, "silent")],
    ids=["sum", "exponents", "round"],
)
def test_a_running_job_goes_on_over_the_ring(op: Op, offset: int, why: str) -> None:
    policy = RetransmissionPolicy(initial=0.02, minimum=0.01, maximum=0.05, silent=0.3, fallback=0.4)
    count = 3000
    fmt = LaneFormat(32, 3)
    job = DamagedJob(Case("w5", op, offset, 0x10, True), policy)
    with job:
        for number in range(4):
            data = [
                np.random.default_rng([number, rank]).standard_normal(count).astype(np.float32) for rank in range(3)
            ]
            expected = direct(data, block=fmt.block)
            futures = [member.allreduce_async(x, out=x) for member, x in zip(job.members, data, strict=True)]
            for future in futures:
                np.testing.assert_array_equal(future.result(30.0), expected)
        stats = [member.stats() for member in job.members]
        assert job.ends[0].damaged >= (3 if why == "integrity" else 1)
    assert all(one["fallbacks"] == {why: 1} for one in stats), [one["fallbacks"] for one in stats]
