# SPDX-License-Identifier: Apache-2.0
"""What a core makes of frames that are damaged, refused, late, or not for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from p4reduce import constants
from p4reduce.core.batch import ReceiveBatch
from p4reduce.core.bucket import Barrier, Bucket, Reduction
from p4reduce.core.events import Completed, Failed
from p4reduce.core.states import Phase
from p4reduce.core.worker import WorkerCore
from p4reduce.errors import IntegrityError, JobError, MismatchError
from p4reduce.sim.byhand import ByHand, Vector, damage, direct, edit, field
from p4reduce.sim.runner import Scenario
from p4reduce.wire import Kind, Op, Reason


def vector(count: int, seed: int = 0) -> Vector:
    return np.random.default_rng(seed).standard_normal(count, dtype=np.float32)


def reduction(count: int, seed: int = 0, mean: bool = False) -> Reduction:
    return Reduction(vector(count, seed), np.full(count, 7e7, np.float32), mean)


def phase(bucket: Bucket) -> Phase:
    return bucket.phase


def adds(frames: list[bytes]) -> list[bytes]:
    return [frame for frame in frames if field(frame, "op") == Op.ADD]


def completed(core: WorkerCore) -> list[Bucket]:
    return [event.bucket for event in core.events() if isinstance(event, Completed)]


def failure(core: WorkerCore) -> JobError:
    errors = [event.error for event in core.events() if isinstance(event, Failed)]
    assert len(errors) == 1, "an epoch fails once"
    return errors[0]


def agreed(count: int, world_size: int = 1, **scenario: int) -> tuple[ByHand, list[Reduction], list[list[bytes]]]:
    """A job whose bucket's exponents are agreed, and the first ADD frames of every rank, not delivered yet."""
    hand = ByHand(Scenario(world_size, **scenario))  # type: ignore[arg-type]
    buckets = [reduction(count, rank) for rank in range(world_size)]
    hand.submit(*buckets)
    for rank in range(world_size):
        for frame in hand.sent(rank):
            for to, answer in hand.to_switch(rank, frame):
                hand.to_worker(to, answer)
    frames = [hand.sent(rank) for rank in range(world_size)]
    assert all(adds(sent) == sent and sent for sent in frames)
    return hand, buckets, frames


def results(hand: ByHand, frames: list[list[bytes]], rank: int = 0) -> list[bytes]:
    """What the switch sends to one rank for these frames of all ranks."""
    answers = [answer for who, sent in enumerate(frames) for frame in sent for answer in hand.to_switch(who, frame)]
    return [frame for to, frame in answers if to == rank]


def test_every_damaged_header_byte_is_refused() -> None:
    """ADD and OR results with any one header byte changed in any of several ways change nothing."""
    checked = 0
    for op in (Op.ADD, Op.OR):
        for byte in range(constants.HEADER_BYTES):
            for flip in (0x01, 0x03, 0x80, 0xFF):
                if op == Op.ADD:
                    hand, (bucket,), (frames,) = agreed(320)
                else:
                    hand, bucket = ByHand(Scenario(1)), reduction(320)
                    hand.submit(bucket)
                    frames = hand.sent(0)
                (answer,) = results(hand, [frames])
                core = hand.cores[0]
                before = core.counters.results
                hand.to_worker(0, damage(answer, byte, flip))
                assert core.counters.results == before, (op, byte, flip)
                assert core.error is None
                hand.to_worker(0, answer)
                assert core.counters.results == before + 1, (op, byte, flip)
                hand.exchange()
                assert bucket.out.tobytes() == direct([bucket.data]).tobytes()
                checked += 1
    assert checked == (32 + 32) * 4


def test_every_damaged_payload_byte_of_a_sum_is_refused() -> None:
    hand, (bucket,), (frames,) = agreed(320)
    (answer,) = results(hand, [frames])
    core = hand.cores[0]
    for byte in [*range(32, 64), *range(64, len(answer), 37), len(answer) - 1]:
        for flip in (0x01, 0x80, 0xFF):
            core._table.failures[:] = 0  # each damage as if it were the first
            before = core.counters.integrity
            hand.to_worker(0, damage(answer, byte, flip))
            assert (core.counters.integrity, core.completed) == (before + 1, 0), (byte, flip)
            (again,) = hand.sent(0)
            assert again == frames[0]
    (answer,) = results(hand, [frames])
    hand.to_worker(0, answer)
    assert core.counters.integrity == core.counters.resent_integrity
    assert bucket.out.tobytes() == direct([bucket.data]).tobytes()


def test_damaged_exponents_are_refused_or_end_the_epoch_but_never_give_a_wrong_sum() -> None:
    outcomes = {"refused": 0, "mismatch": 0}
    for byte in range(32, 32 + 3 * 32):
        for flip in (0x01, 0x80, 0xFF):
            hand = ByHand(Scenario(2))
            buckets = [reduction(512, rank) for rank in range(2)]
            hand.submit(*buckets)
            frames = [hand.sent(rank) for rank in range(2)]
            answers = [a for rank in range(2) for frame in frames[rank] for a in hand.to_switch(rank, frame)]
            hand.to_worker(0, damage(answers[0][1], byte, flip))
            if hand.cores[0].counters.integrity:
                outcomes["refused"] += 1
                hand.exchange([0])
                assert phase(buckets[0]) is Phase.AGREED or phase(buckets[0]) is Phase.SUMMING
            hand.to_worker(1, answers[1][1])
            hand.exchange()
            if hand.cores[0].error or hand.cores[1].error:
                error = hand.cores[0].error or hand.cores[1].error
                assert isinstance(error, IntegrityError)
                outcomes["mismatch"] += 1
                continue
            expected = direct([bucket.data for bucket in buckets])
            for bucket in buckets:
                assert bucket.out.tobytes() == expected.tobytes()
    assert outcomes["refused"] > 250
    assert sum(outcomes.values()) == 3 * 32 * 3


def test_exponents_of_the_only_worker_must_be_its_own() -> None:
    hand = ByHand(Scenario(1))
    bucket = reduction(256)
    hand.submit(bucket)
    (frame,) = hand.sent(0)
    ((_, answer),) = hand.to_switch(0, frame)
    fields = int.from_bytes(answer[32:64], "big")  # one level more is still a thermometer
    groups = [int.from_bytes(answer[32 + 8 * i : 40 + 8 * i], "big") for i in range(4)]
    level = sum(group.bit_count() for group in groups)
    groups[level // 64] |= 1 << (level % 64)
    raised = answer[:32] + b"".join(group.to_bytes(8, "big") for group in groups) + answer[64:]
    assert int.from_bytes(raised[32:64], "big") != fields
    hand.to_worker(0, raised)
    assert hand.cores[0].counters.integrity == 1
    hand.to_worker(0, answer)
    assert phase(bucket) is Phase.AGREED


def test_the_third_failed_check_of_a_chunk_ends_the_epoch() -> None:
    hand, (bucket,), (frames,) = agreed(320)
    (answer,) = results(hand, [frames])
    damaged = damage(answer, 100)
    core = hand.cores[0]
    for turn in range(3):
        hand.to_worker(0, damaged, damaged)  # copies of one answer count once
        assert core.counters.integrity == 2 * (turn + 1)
        if turn < 2:
            assert core.error is None
            assert len(hand.sent(0)) == 1
    error = failure(core)
    assert isinstance(error, IntegrityError)
    assert (error.bucket, error.job) == (0, "sim")
    assert hand.sent(0) == []
    assert core.next_deadline() is None
    hand.to_worker(0, answer)
    assert core.counters.late == 1
    assert phase(bucket) is Phase.SUMMING
    assert core.fail(JobError("x")) == [bucket]
    assert phase(bucket) is Phase.ABANDONED


def test_a_corrupted_contribution_never_becomes_a_result() -> None:
    hand, _, frames = agreed(320, world_size=2)
    spoiled = damage(frames[0][0], 50)
    for answer in results(hand, [[spoiled], frames[1]], rank=1):
        hand.to_worker(1, answer)
    for _ in range(2):
        for answer in results(hand, [[], hand.sent(1)], rank=1):
            hand.to_worker(1, answer)
    assert isinstance(failure(hand.cores[1]), IntegrityError)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: reduction(100), lambda: reduction(101)),
        (lambda: reduction(100), lambda: reduction(100, mean=True)),
        (lambda: reduction(100), Barrier),
        (lambda: reduction(0), Barrier),
        (lambda: reduction(100_000), lambda: reduction(10)),
    ],
)
def test_ranks_that_disagree_are_told(one: Callable[[], Bucket], other: Callable[[], Bucket]) -> None:
    hand = ByHand(Scenario(2))
    refused = other()
    hand.submit(one(), refused)
    hand.exchange()
    assert hand.cores[0].error is None, "who came first waits"
    error = failure(hand.cores[1])
    assert isinstance(error, MismatchError)
    assert (error.bucket, error.ranks, error.job) == (0, (1,), "sim")
    assert hand.cores[1].counters.nacks[Reason.TAG_MISMATCH] > 0
    assert hand.cores[1].fail(JobError("later")) == [refused]
    with pytest.raises(MismatchError):
        hand.cores[1].submit(Barrier(), 0.0)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (Reason.UNKNOWN_EPOCH, JobError),
        (Reason.NOT_ADMITTED, JobError),
        (Reason.BAD_SLOT, JobError),
        (Reason.MALFORMED, JobError),
        (Reason.TAG_MISMATCH, IntegrityError),
    ],
)
def test_nacks_of_outstanding_chunks_end_the_epoch(reason: Reason, kind: type[JobError]) -> None:
    hand, _, (frames,) = agreed(320)
    hand.to_worker(0, edit(frames[0], kind=Kind.NACK, count_or_reason=reason)[:32])
    error = failure(hand.cores[0])
    assert type(error) is kind
    assert error.bucket == 0
    assert hand.cores[0].counters.nacks[reason] == 1


def test_nacks_of_anything_else_are_dropped() -> None:
    hand, _, (frames,) = agreed(320 * 20)
    core = hand.cores[0]
    nack = edit(frames[0], kind=Kind.NACK, count_or_reason=Reason.NOT_ADMITTED)[:32]
    others = {
        "malformed": [nack + b"\0", edit(nack, count_or_reason=0), edit(nack, count_or_reason=6), nack[:31]]
        + [edit(nack, **{name: field(nack, name) + 1}) for name in ("version", "op", "words", "round", "tag", "check")]
        + [edit(nack, slot=12), edit(nack, slot=0xFFFF)],
        "foreign": [edit(nack, epoch=8), edit(nack, rank=1)],
    }
    for name, frames_ in others.items():
        for frame in frames_:
            before = getattr(core.counters, name)
            hand.to_worker(0, frame)
            assert getattr(core.counters, name) == before + 1, frame.hex()
    for answer in results(hand, [frames]):
        hand.to_worker(0, answer)
    hand.to_worker(0, nack)
    assert core.counters.stale == 1, "the chunk has its result"
    assert core.error is None
    assert sum(core.counters.nacks.values()) == 0
    counters = core.counters
    sorted_ = counters.results + counters.duplicates + counters.stale + counters.foreign + counters.malformed
    assert sorted_ == counters.frames_received


def test_a_revoked_epoch_is_found_out() -> None:
    hand, (bucket,), (frames,) = agreed(320)
    hand.switch.revoke(7)
    ((_, nack),) = hand.to_switch(0, frames[0])
    hand.to_worker(0, nack)
    error = failure(hand.cores[0])
    assert "epoch" in str(error)
    assert hand.cores[0].fail(error) == [bucket]


def test_late_results_are_told_from_stale_ones() -> None:
    hand, _, (frames,) = agreed(320 * 12, or_slots=1, add_slots=4)
    core = hand.cores[0]
    rounds = []
    for _ in range(3):
        answers = results(hand, [frames])
        rounds.append(answers)
        hand.to_worker(0, *answers)
        frames = hand.sent(0)
    assert core.completed == 1
    hand.to_worker(0, *rounds[2])
    assert (core.counters.duplicates, core.counters.stale) == (4, 0)
    hand.to_worker(0, *rounds[1], *rounds[0])
    assert (core.counters.duplicates, core.counters.stale) == (4, 8)


def test_frames_for_others_and_nonsense_are_counted() -> None:
    hand, (bucket,), (frames,) = agreed(320 * 20)
    core = hand.cores[0]
    answers = results(hand, [frames])
    answer = answers[0]
    foreign = [edit(answer, epoch=6), edit(answer, rank=3)]
    malformed = [
        b"",
        answer[:31],
        answer[:32],
        answer[:-1],
        answer + b"\0",
        answer[: 32 + 256],
        edit(answer, version=2),
        edit(answer, kind=0),
        edit(answer, kind=Kind.CONTRIBUTE),
        edit(answer, words=1)[: 32 + 256],
        edit(answer, words=2)[: 32 + 512],
        edit(answer, count_or_reason=2),
        edit(answer, count_or_reason=0),
        edit(answer, op=Op.OR),
        edit(answer, round=1),
        edit(answer, tag=field(answer, "tag") ^ 1),
        edit(answer, slot=3),  # of the OR stream, never used
        edit(answer, slot=12),
        edit(answer, slot=65535),
    ]
    hand.to_worker(0, *foreign, *malformed)
    assert (core.counters.foreign, core.counters.malformed, core.counters.results) == (2, len(malformed), 1)
    hand.to_worker(0, *answers)
    hand.exchange()
    assert bucket.out.tobytes() == direct([bucket.data]).tobytes()


def test_a_short_row_in_a_reused_batch_is_not_read() -> None:
    """Rows of a reused batch hold old frames; a datagram shorter than a header must not revive one."""
    hand, _, (frames,) = agreed(320)
    core = hand.cores[0]
    (answer,) = results(hand, [frames])
    batch = ReceiveBatch(hand.profile, 4)
    batch.append(answer)
    batch.clear()
    batch.append(b"\1\2")
    core.receive(batch, 0.0)
    assert (core.completed, core.counters.malformed) == (0, 1)


def test_an_empty_batch_is_nothing() -> None:
    hand = ByHand(Scenario(1))
    hand.to_worker(0)
    assert hand.cores[0].counters.frames_received == 0
    assert hand.cores[0].events() == []


def test_a_barrier_takes_nothing_but_an_empty_word() -> None:
    hand = ByHand(Scenario(2))
    hand.submit(Barrier(), Barrier())
    answers = [answer for rank in range(2) for frame in hand.sent(rank) for answer in hand.to_switch(rank, frame)]
    result = next(frame for to, frame in answers if to == 0)
    core = hand.cores[0]
    hand.to_worker(0, damage(result, 32 + 255))
    assert (core.counters.integrity, core.completed) == (1, 0)
    hand.to_worker(0, result)
    assert core.completed == 1
