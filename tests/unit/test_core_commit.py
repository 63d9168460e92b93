# SPDX-License-Identifier: Apache-2.0
"""What a core keeps, how long, what it gives up at the end of an epoch, and how far it runs ahead."""

from __future__ import annotations

import numpy as np
import pytest

from p4reduce.core import worker
from p4reduce.core.bucket import Barrier, Bucket, Reduction
from p4reduce.core.config import RetransmissionPolicy
from p4reduce.core.events import Completed, Event, Silent, Stalled
from p4reduce.core.states import Phase
from p4reduce.core.stream import SPAN_WINDOWS
from p4reduce.core.worker import WorkerCore
from p4reduce.errors import IntegrityError, JobError, UsageError
from p4reduce.sim.byhand import ByHand, damage, direct, field, finish
from p4reduce.sim.network import Faults
from p4reduce.sim.runner import Scenario, Simulation
from p4reduce.wire import PROFILES, Op, unpack_tag

LANES = 320
"""Elements of a full frame of w5."""
PAYLOAD = PROFILES["w5"].payload_bytes


def reduction(chunks: int, seed: int = 0) -> Reduction:
    data = np.random.default_rng(seed).standard_normal(LANES * chunks, dtype=np.float32)
    return Reduction(data, np.empty_like(data))


def numbers(core: WorkerCore) -> list[int]:
    """Buckets that are kept."""
    return [entry.bucket.number for entry in core._ledger]


def place(frame: bytes) -> tuple[int, int]:
    """Bucket and chunk of a frame."""
    return unpack_tag(field(frame, "tag"))[:2]


def answer(hand: ByHand, frame: bytes) -> None:
    """The result of the only worker's frame."""
    hand.to_worker(0, *[data for _, data in hand.to_switch(0, frame)])


# Commitment ---------------------------------------------------------------------------------------------------------


def test_a_sum_goes_when_the_chunks_a_window_later_have_their_results() -> None:
    hand = ByHand(Scenario(1, or_slots=1, add_slots=3))
    core = hand.cores[0]
    hand.submit(reduction(2))
    hand.exchange()
    hand.submit(reduction(5))
    (exponents,) = hand.sent(0)
    answer(hand, exponents)
    kept = []
    pending = hand.sent(0)
    while pending:
        answer(hand, pending.pop(0))
        kept.append(numbers(core))
        pending += hand.sent(0)
    # Chunks 2 to 6 of the stream: chunk 1, the last of bucket 0, is known to be done everywhere with chunk 4.
    assert kept == [[0, 1], [0, 1], [1], [1], [1]]
    assert core.completed == 2


def test_a_later_result_in_another_slot_proves_nothing_for_the_first() -> None:
    hand = ByHand(Scenario(1, or_slots=1, add_slots=2))
    core = hand.cores[0]
    hand.submit(reduction(2))
    hand.exchange()
    hand.submit(reduction(6))
    answer(hand, hand.sent(0)[0])
    stuck, frame = hand.sent(0)
    for _ in range(2):
        answer(hand, frame)
        (frame,) = hand.sent(0)
        assert place(frame)[0] == 1
    assert numbers(core) == [0, 1], "chunk 0 may be missing at another rank"
    answer(hand, stuck)
    assert numbers(core) == [1]


def test_barriers_and_empty_buckets_keep_their_place_in_the_order() -> None:
    hand = ByHand(Scenario(1, or_slots=2, add_slots=2))
    core = hand.cores[0]
    empty = Reduction(np.empty(0, np.float32), np.empty(0, np.float32))
    for bucket in (reduction(10), Barrier(), empty):
        hand.submit(bucket)
        hand.exchange()
    assert numbers(core) == [0, 1, 2]
    hand.submit(reduction(4))
    hand.exchange()
    # 14 ADD chunks have results: bucket 0 goes. Of 4 OR chunks the first two are done everywhere: the barrier goes.
    assert numbers(core) == [2, 3]
    hand.submit(Barrier())
    hand.exchange()
    assert numbers(core) == [3, 4]
    hand.submit(Barrier())
    hand.exchange()
    assert numbers(core) == [3, 4, 5], "bucket 4 waits for bucket 3"


def test_barriers_alone_let_a_sum_go_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "LEAST_LAG", 8)
    hand = ByHand(Scenario(1, or_slots=1, add_slots=1))
    core = hand.cores[0]
    hand.submit(reduction(1))
    hand.exchange()
    counts = []
    for _ in range(20):
        hand.submit(Barrier())
        hand.exchange()
        counts.append(core.kept_buckets)
    # With barrier 8 all ranks have shown that they have buckets 0 .. 0; the barriers behind have a window of 1.
    assert counts == [2, 3, 4, 5, 6, 7, 8] + [1] * 13
    assert core.kept_bytes == 0


def test_no_bucket_starts_too_far_ahead_of_the_first_incomplete_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "LEAST_LAG", 8)
    hand = ByHand(Scenario(1, or_slots=1, add_slots=1))
    core = hand.cores[0]
    hand.submit(reduction(1))
    answer(hand, hand.sent(0)[0])
    (stuck,) = hand.sent(0)
    for _ in range(20):
        hand.submit(Barrier())
    hand.exchange([])
    seen = []
    while frames := hand.sent(0):
        seen += [place(frame)[0] for frame in frames]
        for frame in frames:
            answer(hand, frame)
    assert seen == list(range(1, 8))
    assert core.first_incomplete == 0
    answer(hand, stuck)
    hand.exchange()
    assert core.first_incomplete == core.completed == 21


# Memory -------------------------------------------------------------------------------------------------------------


def test_what_is_kept_is_bounded_while_one_slot_is_stuck() -> None:
    """Small buckets go on around a chunk whose result does not come; without a bound all of them would be kept."""
    window = 4
    hand = ByHand(Scenario(1, or_slots=4, add_slots=window, policy=RetransmissionPolicy(early_resend=0)))
    core = hand.cores[0]
    stuck: list[bytes] = []
    high = in_flight = 0
    for seed in range(200):
        hand.submit(reduction(2, seed))
        while frames := hand.sent(0):
            for frame in frames:
                if not stuck and field(frame, "op") == Op.ADD:
                    stuck.append(frame)
                else:
                    answer(hand, frame)
            high = max(high, core.kept_bytes)
            in_flight = max(in_flight, core._add.outstanding)
    finished = sum(isinstance(event, Completed) for event in core.events())
    assert in_flight <= window
    assert core._ahead >= window, "more would go on if it could"
    # Of every window two chunks are a bucket without the stuck slot. Nothing before the stuck chunk was there to keep.
    assert finished == SPAN_WINDOWS
    assert high == 2 * PAYLOAD * SPAN_WINDOWS * window
    answer(hand, stuck[0])
    hand.exchange()
    assert core.completed == 200
    assert core.kept_bytes == 2 * PAYLOAD * window


def test_memory_goes_round() -> None:
    """Many buckets in a row take no more memory than the few that are kept."""
    hand = ByHand(Scenario(1, or_slots=2, add_slots=4))
    core = hand.cores[0]
    memory = set()
    for seed in range(50):
        hand.submit(reduction(8, seed))
        hand.exchange()
        memory |= {id(buffer) for entry in core._ledger for buffer in getattr(entry.part, "_memory", [])}
        assert core.kept_buckets == 1
        assert core.kept_bytes == 2 * 8 * PAYLOAD
    assert len(memory) <= 6


# The end of an epoch ------------------------------------------------------------------------------------------------


def test_handover_gives_everything_up_and_ends_the_epoch() -> None:
    hand = ByHand(Scenario(2, or_slots=2, add_slots=2))
    buckets: list[list[Bucket]] = [[reduction(2, rank), Barrier(), reduction(5, rank + 2)] for rank in range(2)]
    for row in zip(*buckets, strict=True):
        if row[0] is not buckets[0][2]:
            hand.submit(*row)
            hand.exchange()
    hand.submit(buckets[0][2], buckets[1][2])
    core = hand.cores[0]
    core.submit(reduction(1, 9), hand.now)
    sent = [(rank, frame) for rank in range(2) for frame in hand.sent(rank)]
    frames = [data for rank, frame in sent for to, data in hand.to_switch(rank, frame) if to == 0]
    kept = core.handover()
    assert [one.number for one in kept] == [0, 1, 2, 3]
    assert [one.delivered for one in kept] == [True, True, False, False]
    assert [one.bucket for one in kept[:3]] == buckets[0]
    assert [one.bucket.phase for one in kept] == [Phase.COMPLETED] * 2 + [Phase.HANDED_OVER] * 2
    assert core.first_incomplete == 2
    assert hand.sent(0) == []
    assert core.next_deadline() is None
    with pytest.raises(JobError, match="epoch 7 is over"):
        core.submit(Barrier(), hand.now)
    hand.to_worker(0, *frames)
    assert core.counters.late == len(frames) > 0
    assert core.handover() == []
    assert core.fail(JobError("late")) == []
    assert [one.bucket.phase for one in kept[2:]] == [Phase.HANDED_OVER] * 2
    assert (core.kept_buckets, core.kept_bytes, len(core._parts)) == (0, 0, 0)


def test_completions_that_nobody_took_are_still_told_after_a_handover() -> None:
    hand = ByHand(Scenario(1))
    bucket = Barrier()
    hand.submit(bucket)
    hand.exchange()
    (kept,) = hand.cores[0].handover()
    assert kept.delivered
    assert hand.cores[0].events() == [Completed(bucket)]


def test_handover_works_after_a_failure() -> None:
    hand = ByHand(Scenario(2))
    buckets = [reduction(1, rank) for rank in range(2)]
    hand.submit(*buckets)
    frames = [(rank, hand.sent(rank)[0]) for rank in range(2)]
    result = next(data for rank, frame in frames for to, data in hand.to_switch(rank, frame) if to == 0)
    core = hand.cores[0]
    for _ in range(3):
        hand.to_worker(0, damage(result, 100))
        hand.sent(0)
    assert isinstance(core.error, IntegrityError)
    (kept,) = core.handover()
    assert not kept.delivered
    assert kept.bucket is buckets[0]
    assert isinstance(core.error, IntegrityError)
    with pytest.raises(IntegrityError):
        core.submit(Barrier(), hand.now)


def test_nothing_is_left_to_hand_over_after_fail() -> None:
    hand = ByHand(Scenario(1))
    buckets = [Barrier(), Barrier()]
    hand.submit(buckets[0])
    hand.exchange()
    hand.submit(buckets[1])
    assert hand.cores[0].fail(JobError("over")) == buckets[1:]
    assert hand.cores[0].handover() == []
    assert buckets[1].phase is Phase.ABANDONED


def test_renumber_goes_on_with_the_same_chunks() -> None:
    hand = ByHand(Scenario(2, or_slots=2, add_slots=2))
    hand.submit(reduction(3), reduction(3, 1))
    hand.exchange()
    for core in hand.cores:
        core.renumber(41)
        assert (core.kept_buckets, core.kept_bytes, core.first_incomplete) == (0, 0, 41)
    buckets = [reduction(3, 2), reduction(3, 3)]
    hand.submit(*buckets)
    with pytest.raises(UsageError, match="unfinished"):
        hand.cores[0].renumber(50)
    (frame,) = hand.sent(0)
    assert (place(frame), field(frame, "round"), field(frame, "slot")) == ((41, 0), 0, 1), "the second OR chunk"
    hand.to_switch(0, frame)
    hand.now += 1.0
    hand.exchange()
    assert [core.first_incomplete for core in hand.cores] == [42, 42]
    assert [core.completed for core in hand.cores] == [2, 2]
    assert buckets[0].out.tobytes() == direct([bucket.data for bucket in buckets]).tobytes()
    assert [kept.number for kept in hand.cores[0].handover()] == [41]
    with pytest.raises(JobError):
        hand.cores[0].renumber(43)


def test_numbers_are_not_negative() -> None:
    with pytest.raises(UsageError, match="0 or more"):
        ByHand(Scenario(1)).cores[0].renumber(-1)


# Silence ------------------------------------------------------------------------------------------------------------


def test_silence_is_told_again_and_again_until_a_result_comes() -> None:
    policy = RetransmissionPolicy(silent=0.5, fallback=1.0, deadline=2.0)
    hand = ByHand(Scenario(2, policy=policy))
    core = hand.cores[0]
    core.submit(Barrier(), 0.0)
    told: list[tuple[float, Event]] = []
    while hand.now < 2.2:
        hand.sent(0)
        told += [(hand.now, event) for event in core.events()]
        hand.now = core.next_deadline() or np.inf
    assert [time for time, event in told if isinstance(event, Silent)] == [0.5, 1.0, 1.5, 2.0]
    assert [time for time, event in told if isinstance(event, Stalled)] == [2.0]
    assert told[0][1] == Silent(0, 0.5)
    assert core.counters.silences == 4
    for frame in hand.sent(0):
        hand.to_switch(0, frame)
    hand.cores[1].submit(Barrier(), hand.now)
    hand.exchange([1])
    assert core.completed == 1
    assert core.next_deadline() is not None
    hand.sent(0)
    assert core.next_deadline() is None, "nothing is outstanding"


def test_a_result_ends_a_silence() -> None:
    policy = RetransmissionPolicy(silent=0.5, fallback=1.0, early_resend=0)
    hand = ByHand(Scenario(1, or_slots=1, add_slots=2, policy=policy))
    hand.submit(reduction(2))
    answer(hand, hand.sent(0)[0])
    frames = hand.sent(0)
    hand.now = 0.6
    hand.sent(0)
    assert hand.cores[0].events() == [Silent(0, 0.6)]
    answer(hand, frames[0])
    hand.now = 1.0
    hand.sent(0)
    assert hand.cores[0].events() == []
    hand.now = 1.1
    hand.sent(0)
    (event,) = hand.cores[0].events()
    assert isinstance(event, Silent)
    assert event.seconds == pytest.approx(0.5)


# Policy -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "most"), [(0, (4, 12)), (2, (1, 1)), (3, (1, 2)), (8, (2, 6)), (99, (4, 12))])
def test_the_window_bounds_the_slots_in_use(window: int, most: tuple[int, int]) -> None:
    hand = ByHand(Scenario(1, or_slots=4, add_slots=12, policy=RetransmissionPolicy(window=window)))
    core = hand.cores[0]
    for seed in range(8):
        hand.submit(reduction(40, seed))
        hand.submit(Barrier())
        hand.submit(Barrier())
    high = [0, 0]
    while frames := hand.sent(0):
        high = [max(high[i], stream.outstanding) for i, stream in enumerate(core._streams)]
        for frame in reversed(frames):
            answer(hand, frame)
    assert tuple(high) == most
    assert core.completed == 24


def test_ranks_with_different_windows_do_not_wait_for_each_other_for_ever() -> None:
    """However narrow, the first chunk that a rank misses is within its window."""
    faults = Faults(loss=0.1, reorder=0.3)
    for seed in range(20):
        simulation = Simulation(Scenario(3, or_slots=3, add_slots=7, up=faults, down=faults, seed=seed))
        for rank, core in enumerate(simulation.cores):
            core.set_policy(RetransmissionPolicy(initial=0.002, minimum=0.001, window=2 * rank + 2), 0.0)
        for _ in range(4):
            for rank in range(3):
                simulation.submit(rank, reduction(12, rank))
        finish(simulation)


def test_a_policy_holds_at_once() -> None:
    slow = RetransmissionPolicy(initial=10.0, minimum=5.0, maximum=20.0, deadline=60.0, silent=50.0, fallback=50.0)
    hand = ByHand(Scenario(1, policy=slow))
    core = hand.cores[0]
    hand.submit(Barrier())
    assert len(hand.sent(0)) == 1
    assert core.next_deadline() == 10.0
    fast = RetransmissionPolicy(initial=0.05, maximum=0.5, deadline=3.0, silent=2.0, fallback=2.0)
    hand.now = 1.0
    core.set_policy(fast, hand.now)
    assert core.config.policy is fast
    assert core.next_deadline() == 1.0
    assert hand.sent(0) == []
    assert core.next_deadline() == 1.5, "not before its timer would run out at most"
    hand.now = 1.5
    assert len(hand.sent(0)) == 1
    hand.now = 3.0
    (frame,) = hand.sent(0)
    assert [type(event) for event in core.events()] == [Silent, Stalled]
    core.set_policy(slow, hand.now)
    answer(hand, frame)
    assert core.completed == 1
    assert core.counters.stalls == 1
