# SPDX-License-Identifier: Apache-2.0
"""One core at a time against the reference switch, every frame moved by hand."""

from __future__ import annotations

import numpy as np
import pytest

from p4reduce import signature, wire
from p4reduce.core.batch import SendBatch
from p4reduce.core.bucket import Barrier, Bucket, Reduction
from p4reduce.core.events import Completed
from p4reduce.core.states import Phase
from p4reduce.core.worker import WorkerCore
from p4reduce.errors import JobError, UsageError
from p4reduce.sim.byhand import ByHand, Vector, damage, direct, field
from p4reduce.sim.runner import Scenario, core_config
from p4reduce.wire import Kind, Op


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


def test_frames_follow_the_wire_format() -> None:
    hand = ByHand(Scenario(2, or_slots=2, add_slots=3))
    hand.submit(reduction(1000), reduction(1000, 1))
    (first,) = hand.sent(0)
    digest = wire.digest("exponents", 1000, "float32", 32, 256, "sum")
    head = wire.headers_from_bytes(first)[0]
    assert (head["version"], head["kind"], head["op"], head["words"]) == (1, Kind.CONTRIBUTE, Op.OR, 1)
    assert (head["epoch"], head["slot"], head["rank"], head["count_or_reason"]) == (7, 0, 0, 0)
    assert (head["round"], head["tag"]) == (0, wire.pack_tag(0, 0, digest))
    assert head["check"] == signature.expected(head), "an OR frame's check is its signature alone"
    assert len(first) == 32 + 256
    hand.to_switch(0, first)
    (other,) = hand.sent(1)
    for rank, answer in hand.to_switch(1, other):
        hand.to_worker(rank, answer)
    frames = hand.sent(0)
    exponents = hand.cores[0]._parts[hand.cores[0]._table.part[2]]._exponents  # type: ignore[attr-defined]
    digest = wire.digest("sum", digest, exponents.tobytes())
    assert [field(frame, "slot") for frame in frames] == [2, 3, 4], "the window is full"
    assert [field(frame, "tag") for frame in frames] == [wire.pack_tag(0, chunk, digest) for chunk in range(3)]
    assert {(field(frame, "op"), field(frame, "words"), len(frame)) for frame in frames} == {(Op.ADD, 5, 32 + 1280)}


def test_the_last_chunk_is_short_when_it_fits_one_word() -> None:
    for count, words in [(1, [1]), (64, [1]), (65, [5]), (320, [5]), (384, [5, 1]), (385, [5, 5])]:
        _, _, (frames,) = agreed(count)
        assert [field(frame, "words") for frame in frames] == words, count
        assert [len(frame) for frame in frames] == [32 + 256 * n for n in words]


def test_slots_are_their_own_clocks() -> None:
    hand, _, (frames,) = agreed(320 * 9, or_slots=1, add_slots=4)
    assert [field(frame, "slot") for frame in frames] == [1, 2, 3, 4]
    (result,) = results(hand, [[frames[2]]])
    hand.to_worker(0, result)
    (following,) = hand.sent(0)
    assert (field(following, "slot"), field(following, "round")) == (3, 1)
    assert wire.unpack_tag(field(following, "tag"))[1] == 6


def test_a_bucket_of_one_worker_is_its_own_sum() -> None:
    hand = ByHand(Scenario(1))
    bucket = reduction(5000)
    hand.submit(bucket)
    hand.exchange()
    assert completed(hand.cores[0]) == [bucket]
    assert phase(bucket) is Phase.COMPLETED
    assert bucket.out.tobytes() == direct([bucket.data]).tobytes()


def test_data_may_be_out() -> None:
    hand = ByHand(Scenario(2, add_slots=3))
    expected = direct([vector(100_000, 0), vector(100_000, 1)], mean=True)
    arrays = [vector(100_000, 0), vector(100_000, 1)]
    hand.submit(*(Reduction(array, array, mean=True) for array in arrays))
    hand.exchange()
    for array in arrays:
        assert array.tobytes() == expected.tobytes()


def test_buckets_are_numbered_and_complete_in_any_order_but_are_counted_in_order() -> None:
    hand = ByHand(Scenario(1, or_slots=4, add_slots=8))
    core = hand.cores[0]
    first, barrier, last = reduction(3200), Barrier(), reduction(10, 1)
    for bucket in (first, barrier, last):
        hand.submit(bucket)
    assert [bucket.number for bucket in (first, barrier, last)] == [0, 1, 2]
    assert core.submitted == 3
    frames = hand.sent(0)
    (answer,) = hand.to_switch(0, frames[1])
    hand.to_worker(0, answer[1])
    assert completed(core) == [barrier]
    assert core.completed == 0, "bucket 0 is not done"
    for frame in frames[:1] + frames[2:]:
        for _, answer_ in hand.to_switch(0, frame):
            hand.to_worker(0, answer_)
    hand.exchange()
    assert completed(core) == [first, last]
    assert core.completed == 3


def test_exponents_of_the_next_bucket_overtake_data_but_its_data_does_not() -> None:
    hand, (first,), (frames,) = agreed(320 * 5, add_slots=2)
    second = reduction(320 * 2, 1)
    hand.submit(second)
    ahead = hand.sent(0)
    assert [field(frame, "op") for frame in ahead] == [Op.OR]
    ((_, answer),) = hand.to_switch(0, ahead[0])
    hand.to_worker(0, answer)
    assert phase(second) is Phase.AGREED
    assert hand.sent(0) == [], "the window is full of bucket 0"
    buckets = []
    while frames:
        for answer in results(hand, [frames]):
            hand.to_worker(0, answer)
        frames = hand.sent(0)
        buckets += [wire.unpack_tag(field(frame, "tag"))[:2] for frame in frames]
    assert buckets == [(0, 2), (0, 3), (0, 4), (1, 0), (1, 1)]
    assert phase(first) is phase(second) is Phase.COMPLETED


def test_agreement_out_of_order_holds_the_later_bucket_back() -> None:
    hand = ByHand(Scenario(1))
    first, second = reduction(100), reduction(100, 1)
    hand.submit(first)
    hand.submit(second)
    one, two = hand.sent(0)
    ((_, answer),) = hand.to_switch(0, two)
    hand.to_worker(0, answer)
    assert (first.phase, second.phase) == (Phase.AGREEING, Phase.AGREED)
    assert hand.sent(0) == []
    ((_, answer),) = hand.to_switch(0, one)
    hand.to_worker(0, answer)
    assert [wire.unpack_tag(field(frame, "tag"))[0] for frame in hand.sent(0)] == [0, 1]


def test_large_buckets_do_not_all_find_their_exponents_at_once() -> None:
    hand = ByHand(Scenario(1, or_slots=8, add_slots=4))
    buckets = [reduction(320 * 10, seed) for seed in range(4)]
    for bucket in buckets:
        hand.submit(bucket)
    (frame,) = hand.sent(0)
    assert [bucket.phase for bucket in buckets] == [Phase.AGREEING, Phase.QUEUED, Phase.QUEUED, Phase.QUEUED]
    ((_, answer),) = hand.to_switch(0, frame)
    hand.to_worker(0, answer)
    assert {field(frame, "op") for frame in hand.sent(0)} == {Op.ADD, Op.OR}, "the next one's follow the first data"
    hand.now = 1.0
    hand.exchange()
    assert all(phase(bucket) is Phase.COMPLETED for bucket in buckets)


def test_small_buckets_fill_the_window() -> None:
    hand = ByHand(Scenario(1, or_slots=8, add_slots=8))
    buckets = [reduction(10, seed) for seed in range(30)]
    for bucket in buckets:
        hand.submit(bucket)
    assert len(hand.sent(0)) == 8
    hand.now = 1.0
    hand.exchange()
    for bucket in buckets:
        assert bucket.out.tobytes() == direct([bucket.data]).tobytes()


def test_nothing_and_barriers_take_one_frame_each() -> None:
    hand = ByHand(Scenario(2))
    empty = [reduction(0), reduction(0)]
    hand.submit(*empty)
    hand.submit(Barrier(), Barrier())
    assert hand.exchange() == 4
    assert len(completed(hand.cores[0])) == len(completed(hand.cores[1])) == 2


def test_a_barrier_waits_for_everybody() -> None:
    hand = ByHand(Scenario(3))
    for rank in (0, 2):
        hand.cores[rank].submit(Barrier(), 0.0)
    hand.exchange()
    assert completed(hand.cores[0]) == []
    hand.cores[1].submit(Barrier(), 0.0)
    hand.exchange()
    assert all(len(completed(core)) == 1 for core in hand.cores)


def test_rows_stay_what_they_were_until_the_bucket_completes() -> None:
    hand = ByHand(Scenario(1, add_slots=4))
    core, bucket = hand.cores[0], reduction(320 * 40)
    core.submit(bucket, 0.0)
    sent: list[tuple[SendBatch, list[bytes]]] = []
    while phase(bucket) is not Phase.COMPLETED:
        for kept, frames in sent:
            bodies = [frame[32:] for frame in kept.frames()]
            assert bodies == [frame[32:] for frame in frames]
        batch = SendBatch(16)
        core.transmit(batch, 0.0)
        frames = list(batch.frames())
        sent.append((batch, frames))
        for frame in frames:
            for _, answer in hand.to_switch(0, frame):
                hand.to_worker(0, answer)
    assert len(sent) > 8


@pytest.mark.parametrize("capacity", [1, 2, 5])
def test_small_batches_send_the_same_frames(capacity: int) -> None:
    hand, plain = ByHand(Scenario(1), capacity=capacity), ByHand(Scenario(1))
    for job in (hand, plain):
        for seed in range(3):
            job.submit(reduction(2000, seed))
    while True:
        few, all_ = hand.sent(0), plain.sent(0)
        assert few == all_
        if not few:
            break
        for job in (hand, plain):
            for frame in few:
                for _, answer in job.to_switch(0, frame):
                    job.to_worker(0, answer)
    assert plain.cores[0].completed == 3


def test_copies_within_one_batch_count_once() -> None:
    hand, (bucket,), (frames,) = agreed(320 * 4, add_slots=4)
    answers = results(hand, [frames])
    hand.to_worker(0, answers[0], answers[1], answers[0], answers[1], answers[0], answers[2], answers[3])
    core = hand.cores[0]
    assert core.counters.duplicates == 3
    assert core.completed == 1
    assert bucket.out.tobytes() == direct([bucket.data]).tobytes()


def test_a_sound_copy_behind_a_damaged_one_is_taken_in_the_same_batch() -> None:
    hand, (bucket,), (frames,) = agreed(320, add_slots=4)
    (answer,) = results(hand, [frames])
    hand.to_worker(0, damage(answer, len(answer) - 1), answer, answer)
    core = hand.cores[0]
    assert (core.counters.integrity, core.counters.duplicates, core.completed) == (1, 1, 1)
    assert bucket.out.tobytes() == direct([bucket.data]).tobytes()
    assert hand.sent(0) == []


def test_results_of_several_buckets_and_streams_in_one_batch() -> None:
    hand = ByHand(Scenario(1, or_slots=8, add_slots=8))
    buckets = [reduction(count, count) for count in (1, 700, 64, 5)]
    for bucket in buckets:
        hand.submit(bucket)
    waiting = hand.sent(0)
    while waiting:
        answers = [answer for frame in waiting for _, answer in hand.to_switch(0, frame)]
        hand.to_worker(0, *reversed(answers))
        hand.submit(Barrier())
        waiting = hand.sent(0) if len(buckets) > hand.cores[0].completed else []
    for bucket in buckets:
        assert bucket.out.tobytes() == direct([bucket.data]).tobytes()


def test_buckets_cannot_be_submitted_twice() -> None:
    hand = ByHand(Scenario(1))
    bucket = Barrier()
    hand.submit(bucket)
    with pytest.raises(UsageError, match="before"):
        hand.submit(bucket)
    hand.exchange()
    with pytest.raises(UsageError, match="before"):
        hand.submit(bucket)
    with pytest.raises(UsageError, match="is a Reduction or a Barrier"):
        hand.submit(Bucket())
    assert hand.cores[0].submitted == 1


def test_fail_gives_everything_unfinished_back_once() -> None:
    hand, (first,), _ = agreed(320 * 40)
    second, third = Barrier(), reduction(5)
    hand.submit(second)
    hand.submit(third)
    core = hand.cores[0]
    error = JobError("the controller fenced the epoch", job="sim")
    assert core.fail(error) == [first, second, third]
    assert all(phase(bucket) is Phase.ABANDONED for bucket in (first, second, third))
    assert core.fail(JobError("again")) == []
    assert core.error is error
    with pytest.raises(JobError, match="fenced"):
        core.submit(Barrier(), 0.0)
    assert hand.sent(0) == []
    assert core.next_deadline() is None
    assert core.events() == [], "the driver knows already"


def test_not_finite_blocks_come_back_as_nan() -> None:
    hand = ByHand(Scenario(2))
    vectors = [vector(1024, 0), vector(1024, 1)]
    vectors[0][300] = np.nan
    vectors[1][600] = np.inf
    buckets = [Reduction(array, np.empty_like(array)) for array in vectors]
    hand.submit(*buckets)
    hand.exchange()
    for bucket in buckets:
        bad = np.isnan(bucket.out)
        assert bad[256:768].all()
        assert not bad[:256].any()
        assert not bad[768:].any()
        assert bucket.out.tobytes() == direct(vectors).tobytes()


def test_rounds_tags_and_buckets_wrap() -> None:
    """Rounds at 2^32 and bucket numbers at 2^24, in both streams."""
    scenario = Scenario(2, or_slots=2, add_slots=2, first_chunk=2 * ((1 << 32) - 2) + 1, first_bucket=(1 << 24) - 3)
    hand = ByHand(scenario)
    seen: set[tuple[int, int, int]] = set()
    for turn in range(6):
        buckets = [reduction(320 * 3, 10 * turn + rank) for rank in range(2)]
        hand.submit(*buckets)
        while phase(buckets[0]) is not Phase.COMPLETED:
            frames = [(rank, frame) for rank in range(2) for frame in hand.sent(rank)]
            assert frames
            for rank, frame in frames:
                number = wire.unpack_tag(field(frame, "tag"))[0]
                seen.add((field(frame, "op"), field(frame, "round"), number))
                for to, answer in hand.to_switch(rank, frame):
                    hand.to_worker(to, answer)
        assert buckets[0].number == (1 << 24) - 3 + turn
        expected = direct([bucket.data for bucket in buckets])
        for bucket in buckets:
            assert bucket.out.tobytes() == expected.tobytes()
    for op in (Op.ADD, Op.OR):
        rounds = {round_ for op_, round_, _ in seen if op_ == op}
        assert {(1 << 32) - 2, (1 << 32) - 1, 0, 1} <= rounds
    assert {number for _, _, number in seen} == {(1 << 24) - 3, (1 << 24) - 2, (1 << 24) - 1, 0, 1, 2}


def test_tags_with_their_highest_bit_set_are_right() -> None:
    hand = ByHand(Scenario(1, first_bucket=(1 << 24) - 1))
    bucket = reduction(320 * 2)
    hand.submit(bucket)
    (frame,) = hand.sent(0)
    assert field(frame, "tag") >> 63 == 1
    hand.now = 1.0
    hand.exchange()
    assert phase(bucket) is Phase.COMPLETED


def test_counters_add_up() -> None:
    hand = ByHand(Scenario(2))
    hand.submit(reduction(5000), reduction(5000, 1))
    sent = hand.exchange()
    counters = [core.counters for core in hand.cores]
    assert sum(counter.frames_sent for counter in counters) == sent
    assert all(counter.results == counter.frames_received == counter.frames_sent for counter in counters)
    assert counters[0].bytes_sent == 32 * counters[0].frames_sent + 256 * (5 * 1 + 5 * 15 + 5)
    assert counters[0].retransmissions == 0


def test_cores_of_one_job_differ_in_rank_only() -> None:
    scenario = Scenario(3)
    assert {core_config(scenario, rank).rank for rank in range(3)} == {0, 1, 2}
    assert {core_config(scenario, rank).epoch for rank in range(3)} == {7}
