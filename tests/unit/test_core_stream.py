# SPDX-License-Identifier: Apache-2.0
"""Timers, resends and stalls of a core whose frames are lost by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from p4reduce.core.bucket import Barrier, Reduction
from p4reduce.core.config import RetransmissionPolicy
from p4reduce.core.events import Stalled
from p4reduce.core.stream import PROBES
from p4reduce.sim.byhand import ByHand, direct, field
from p4reduce.sim.runner import Scenario
from p4reduce.wire import Op, unpack_tag

POLICY = RetransmissionPolicy(
    initial=0.05, minimum=0.002, maximum=0.5, deadline=60.0, early_resend=3, silent=50.0, fallback=50.0
)


def job(
    chunks: int, *, window: int = 8, policy: RetransmissionPolicy = POLICY
) -> tuple[ByHand, Reduction, list[bytes]]:
    """One worker whose ADD stream has just sent its first window; the round trip before took a millisecond."""
    hand = ByHand(Scenario(1, or_slots=1, add_slots=window, policy=policy))
    data = np.random.default_rng(0).standard_normal(320 * chunks, dtype=np.float32)
    bucket = Reduction(data, np.empty_like(data))
    hand.submit(bucket)
    frames = hand.sent(0)
    while field(frames[0], "op") == Op.OR:
        hand.now += 0.001
        deliver(hand, frames)
        frames = hand.sent(0)
    assert hand.sent(0) == []
    return hand, bucket, frames


def deliver(hand: ByHand, frames: list[bytes]) -> None:
    """Frames reach the switch and their results the worker, in one batch."""
    hand.to_worker(0, *[answer for frame in frames for _, answer in hand.to_switch(0, frame)])


def chunks_of(frames: list[bytes]) -> list[int]:
    return [unpack_tag(field(frame, "tag"))[1] for frame in frames]


def told(hand: ByHand) -> list[Stalled]:
    """Stalls that have been reported since the last call."""
    return [event for event in hand.cores[0].events() if isinstance(event, Stalled)]


def deadline(hand: ByHand) -> float:
    time = hand.cores[0].next_deadline()
    assert time is not None
    return time


def test_an_idle_core_has_no_deadline() -> None:
    hand = ByHand(Scenario(1))
    assert hand.cores[0].next_deadline() is None
    hand.now = 3.0
    hand.submit(Barrier())
    assert deadline(hand) == 3.0, "there is something to send"
    frames = hand.sent(0)
    assert deadline(hand) == 3.0 + POLICY.initial
    deliver(hand, frames)
    assert hand.sent(0) == []
    assert hand.cores[0].next_deadline() is None


def test_a_lost_chunk_is_sent_again_with_back_off() -> None:
    hand, _, frames = job(1)
    sent = hand.now
    waits = []
    for _ in range(12):
        due = deadline(hand)
        hand.now = due - 1e-6
        assert hand.sent(0) == []
        hand.now = due
        assert hand.sent(0) == frames
        waits.append(due - sent)
        sent = due
    assert waits[0] == pytest.approx(0.003), "smoothed 1 ms and four times half of it"
    for shorter, longer in itertools.pairwise(waits):
        assert longer == pytest.approx(min(2 * shorter, POLICY.maximum))
    assert waits[-1] == pytest.approx(POLICY.maximum)
    assert hand.cores[0].counters.resent_timeout == 12
    deliver(hand, frames)
    assert hand.cores[0].completed == 1


def test_chunks_that_were_sent_twice_give_no_sample() -> None:
    hand, _, frames = job(2, window=1)
    core = hand.cores[0]
    before = core.counters.srtt
    hand.now = deadline(hand)
    assert hand.sent(0) == frames
    hand.now += 0.0015
    deliver(hand, frames)
    assert core.counters.srtt == before
    frames = hand.sent(0)
    assert core.counters.rto == pytest.approx(0.006), "the doubled timeout holds for the next chunk"
    hand.now += 0.0005
    deliver(hand, frames)
    assert core.counters.srtt == pytest.approx(0.0005), "the first that did not wait for a slow rank"
    hand.sent(0)
    assert core.counters.rto == POLICY.minimum


def test_chunks_that_were_sent_again_early_give_no_sample() -> None:
    hand, _, frames = job(16, window=8)
    core = hand.cores[0]
    hand.now += 0.001
    deliver(hand, frames)
    frames = hand.sent(0)
    hand.now += 0.001
    deliver(hand, frames[1:])
    assert chunks_of(hand.sent(0)) == [8]
    assert core.counters.resent_early == 1
    before = core.counters.srtt
    hand.now += 0.0005
    deliver(hand, frames[:1])
    assert core.counters.srtt == before
    assert core.completed == 1


def test_chunks_that_waited_out_a_silence_give_no_sample() -> None:
    hand, _, frames = job(16, window=16)
    before = hand.cores[0].counters.srtt
    while hand.now < 0.1:
        hand.now = deadline(hand)
        hand.sent(0)
    deliver(hand, frames[10:11])  # was held back, so it was sent only once
    hand.sent(0)
    assert hand.cores[0].counters.srtt == before
    assert hand.cores[0].counters.rto > 0.1, "no sample ends the back-off, either"


def test_results_of_probes_do_not_make_the_rest_look_lost() -> None:
    hand, _, frames = job(16, window=16)
    hand.now = deadline(hand)
    assert chunks_of(hand.sent(0)) == [0, 1, 2, 3]
    deliver(hand, frames[:4])
    assert hand.sent(0) == [], "nobody knows which copies these results answer"
    assert hand.cores[0].counters.resent_early == 0


def test_a_silent_stream_sends_only_its_oldest_chunks_again() -> None:
    hand, bucket, frames = job(32, window=32)
    assert len(frames) == 32
    count = 0
    while hand.now < 5.0:
        hand.now = deadline(hand)
        again = hand.sent(0)
        assert chunks_of(again) == [0, 1, 2, 3][: len(again)]
        count += len(again)
    assert count == hand.cores[0].counters.resent_timeout
    # Doubling from 3 ms to half a second, then twice a second.
    assert 10 * PROBES <= count <= 20 * PROBES
    deliver(hand, frames)
    assert hand.sent(0) == []
    assert bucket.out.tobytes() == direct([bucket.data]).tobytes()


def test_after_silence_all_timers_start_afresh() -> None:
    hand, _, frames = job(16, window=16, policy=replace(POLICY, early_resend=0))
    while hand.now < 1.0:
        hand.now = deadline(hand)
        hand.sent(0)
    deliver(hand, frames[:1])
    assert hand.sent(0) == [], "those that follow are probably on their way"
    again = deadline(hand)
    assert again == pytest.approx(hand.now + 0.003), "without back-off"
    hand.now = again - 1e-4
    deliver(hand, frames[15:])
    hand.now = again
    # Chunks 1 to 3 were sent again as probes, after chunk 15.
    assert chunks_of(hand.sent(0)) == list(range(4, 15)), "a later one has its result, so these are lost"
    assert hand.cores[0].counters.resent_timeout >= 14


def test_a_slow_window_is_not_taken_for_a_lost_one() -> None:
    """The first round trips were 1 ms; now the results of a window come one per millisecond, in order."""
    hand, bucket, frames = job(64, window=32)
    while frames:
        hand.now += 0.001
        deliver(hand, frames[:1])
        frames = frames[1:] + hand.sent(0)
    assert bucket.out.tobytes() == direct([bucket.data]).tobytes()
    assert hand.cores[0].counters.retransmissions == 0
    assert hand.cores[0].counters.srtt > 0.01, "learned meanwhile"


def test_a_window_that_was_lost_whole_is_found() -> None:
    hand, bucket, _ = job(64, window=16)
    while bucket.out.tobytes() != direct([bucket.data]).tobytes():
        hand.now = deadline(hand)
        frames = hand.sent(0)
        hand.now += 0.0005
        deliver(hand, frames)
    assert hand.now < 0.02
    assert hand.cores[0].counters.retransmissions <= 16 + PROBES


def test_overtaken_chunks_are_sent_again_early_and_once_per_timeout() -> None:
    hand, _, frames = job(64, window=8)
    core = hand.cores[0]
    deliver(hand, frames[1:3])
    following = hand.sent(0)
    assert chunks_of(following) == [9, 10], "two are not enough"
    deliver(hand, frames[3:4])
    again = hand.sent(0)
    assert chunks_of(again) == [0, 11]
    assert core.counters.resent_early == 1
    deliver(hand, [*frames[4:], *following, again[1]])
    more = hand.sent(0)
    assert 0 not in chunks_of(more)
    assert core.counters.resent_early == 1, "those were sent before the second copy"
    hand.now += 0.001
    deliver(hand, more[:4])
    assert 0 not in chunks_of(hand.sent(0)), "no sooner than a timeout after the last time"
    assert core.counters.resent_early == 1
    assert core.counters.resent_timeout == 0
    deliver(hand, frames[:1])
    hand.now = 1.0
    hand.exchange()
    assert core.completed == 1


def test_early_resend_repeats_after_a_timeout() -> None:
    hand, _, frames = job(200, window=8)
    core = hand.cores[0]
    frames = frames[1:]
    times = []
    while core.counters.resent_early < 3:
        before = core.counters.resent_early
        hand.now += 0.0004
        deliver(hand, frames)
        frames = hand.sent(0)
        if core.counters.resent_early > before:
            times.append(hand.now)
        frames = [frame for frame in frames if chunks_of([frame]) != [0]]
    assert all(later - sooner >= POLICY.minimum for sooner, later in itertools.pairwise(times))
    assert len(times) == 3


def test_early_resend_can_be_off() -> None:
    hand, _, frames = job(64, policy=replace(POLICY, early_resend=0))
    deliver(hand, frames[1:])
    hand.sent(0)
    assert hand.cores[0].counters.resent_early == 0


def test_resends_that_do_not_fit_a_batch_follow() -> None:
    hand, _, frames = job(16, window=16)
    small = ByHand(Scenario(1, or_slots=1, add_slots=16), capacity=3)
    small.cores = hand.cores
    deliver(hand, frames[15:])
    assert small.sent(0) == []
    small.now = hand.now = deadline(hand)
    deliver(hand, frames[14:15])
    assert chunks_of(small.sent(0)) == list(range(14))


def test_a_resend_of_one_stream_does_not_touch_the_other() -> None:
    hand, _, frames = job(4, window=4)
    hand.submit(Barrier())
    barrier = hand.sent(0)
    assert [field(frame, "op") for frame in barrier] == [Op.OR]
    hand.now += 0.001
    deliver(hand, barrier)
    assert hand.sent(0) == []
    hand.now = deadline(hand)
    assert {field(frame, "op") for frame in hand.sent(0)} == {Op.ADD}
    deliver(hand, frames)
    assert hand.cores[0].completed == 2


def test_a_stall_is_reported_once_per_deadline() -> None:
    hand = ByHand(Scenario(2, policy=RetransmissionPolicy(deadline=2.0)))
    hand.cores[0].submit(Barrier(), 0.0)
    stalls: list[tuple[float, Stalled]] = []
    while hand.now < 7.0:
        for frame in hand.sent(0):
            hand.to_switch(0, frame)
        stalls += [(hand.now, event) for event in told(hand)]
        hand.now = deadline(hand)
    assert [time for time, _ in stalls] == [2.0, 4.0, 6.0]
    event = stalls[0][1]
    assert (event.bucket, event.stream, event.outstanding) == (0, Op.OR, 1)
    assert event.seconds == pytest.approx(2.0)
    assert stalls[2][1].seconds == pytest.approx(6.0)
    assert hand.cores[0].counters.stalls == 3
    assert hand.cores[0].error is None
    hand.cores[1].submit(Barrier(), hand.now)
    hand.exchange()
    assert hand.cores[0].completed == 1


def test_after_a_result_the_deadline_counts_anew() -> None:
    hand, _, frames = job(2, window=2, policy=RetransmissionPolicy(deadline=1.0))
    hand.now = 2.5
    hand.sent(0)
    assert len(told(hand)) == 1
    deliver(hand, frames[:1])
    hand.now = 3.4
    hand.sent(0)
    assert told(hand) == []
    hand.now = 3.5
    hand.sent(0)
    (event,) = told(hand)
    assert isinstance(event, Stalled)
    assert event.seconds == 1.0


def test_a_stall_names_the_bucket_that_waited_longest() -> None:
    hand = ByHand(Scenario(2, policy=RetransmissionPolicy(deadline=1.0)))
    data = np.ones(1000, np.float32)
    for _ in range(2):
        hand.submit(*(Reduction(data, np.empty_like(data)) for _ in range(2)))
    # Exponents of both are agreed, then rank 1 is gone.
    for _ in range(2):
        frames = [(rank, frame) for rank in range(2) for frame in hand.sent(rank) if field(frame, "op") == Op.OR]
        for rank, frame in frames:
            for to, answer in hand.to_switch(rank, frame):
                hand.to_worker(to, answer)
    hand.sent(0)
    hand.now = 1.5
    hand.sent(0)
    (event,) = told(hand)
    assert isinstance(event, Stalled)
    assert (event.bucket, event.stream) == (0, Op.ADD)
    assert event.seconds == 1.5


def test_results_put_the_deadline_off() -> None:
    hand, _, frames = job(20, window=1, policy=RetransmissionPolicy(deadline=1.0))
    for _ in range(10):
        hand.now += 0.9
        hand.sent(0)
        deliver(hand, frames)
        frames = hand.sent(0)
    assert told(hand) == []
    hand.now += 1.1
    hand.sent(0)
    assert len(told(hand)) == 1
