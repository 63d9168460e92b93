# SPDX-License-Identifier: Apache-2.0
"""Frames that come again, late, and out of order: what the published seen-bit scheme gets wrong and this one must not.

The published rule ("Scaling Distributed Machine Learning with In-Network Aggregation", NSDI 2021, algorithm 3) is
here to show that the schedule has teeth.
"""

from __future__ import annotations

import random

import numpy as np

from p4reduce.core.bucket import Reduction
from p4reduce.core.states import Phase
from p4reduce.sim.byhand import ByHand, Vector, direct, field
from p4reduce.sim.runner import Scenario
from p4reduce.sim.switch import Count
from p4reduce.wire import Op

SCHEDULE = ("A0", "B0", "A1", "A0", "B1", "A2", "B2")
"""Workers A and B, one slot, three chunks. The second A0 is a resend that was overtaken by A1."""


class PublishedSlot:
    """One slot of the published scheme for two workers: versions by chunk parity, seen marks, a counter."""

    def __init__(self) -> None:
        self.sums = [0, 0]
        self.count = [0, 0]
        self.seen = [[False, False], [False, False]]

    def take(self, worker: int, chunk: int, value: int) -> int | None:
        version = chunk % 2
        if self.seen[version][worker]:
            return self.sums[version] if self.count[version] == 0 else None
        self.seen[version][worker] = True
        self.seen[1 - version][worker] = False
        self.count[version] = (self.count[version] + 1) % 2
        self.sums[version] = value if self.count[version] == 1 else self.sums[version] + value
        return self.sums[version] if self.count[version] == 0 else None


def test_the_schedule_breaks_the_published_scheme() -> None:
    slot = PublishedSlot()
    sums = [slot.take("AB".index(step[0]), int(step[1]), 10 ** int(step[1])) for step in SCHEDULE]
    assert (sums[1], sums[4]) == (2, 20)
    assert sums[6] == 101, "the stale 1 in place of 100"


def prepared(world_size: int, chunks: int, slots: int) -> tuple[ByHand, list[Reduction], Vector]:
    """A job whose exponents are agreed; its ADD frames have not been sent."""
    hand = ByHand(Scenario(world_size, or_slots=1, add_slots=slots))
    rng = np.random.default_rng(chunks)
    data = [rng.standard_normal(320 * chunks, dtype=np.float32) for _ in range(world_size)]
    buckets = [Reduction(vector, np.zeros_like(vector)) for vector in data]
    hand.submit(*buckets)
    while buckets[0].phase is not Phase.AGREED:
        frames = [(rank, frame) for rank in range(world_size) for frame in hand.sent(rank)]
        for rank, frame in frames:
            for to, answer in hand.to_switch(rank, frame):
                hand.to_worker(to, answer)
    return hand, buckets, direct(data)


def test_three_chunks_in_one_slot_survive_the_schedule() -> None:
    hand, buckets, expected = prepared(2, chunks=3, slots=1)
    kept: dict[str, bytes] = {}
    for step in SCHEDULE:
        rank = "AB".index(step[0])
        for frame in hand.sent(rank):
            kept[step[0] + str(field(frame, "round"))] = frame
        for to, answer in hand.to_switch(rank, kept[step]):
            hand.to_worker(to, answer)
    assert hand.switch.count(1, Count.REPEATS) == 1, "the late A0 was answered with the sum it belonged to"
    for bucket in buckets:
        assert bucket.phase is Phase.COMPLETED
        assert bucket.out.tobytes() == expected.tobytes()


def test_copies_two_rounds_old_change_nothing() -> None:
    hand, buckets, expected = prepared(2, chunks=6, slots=1)
    sent: list[tuple[int, bytes]] = []
    answers: list[tuple[int, bytes]] = []
    while buckets[0].phase is not Phase.COMPLETED:
        frames = [(rank, frame) for rank in range(2) for frame in hand.sent(rank)]
        for rank, frame in frames:
            old = [copy for copy in sent if field(copy[1], "round") == field(frame, "round") - 2]
            for copy_rank, copy in old:
                for to, answer in hand.to_switch(copy_rank, copy):
                    hand.to_worker(to, answer)
            for to, answer in hand.to_switch(rank, frame):
                answers.append((to, answer))
                hand.to_worker(to, *[late for who, late in answers[:-4] if who == to], answer)
        sent += frames
    assert hand.switch.count(1, Count.STALE) > 0, "after the cell has moved on"
    assert hand.switch.count(1, Count.REPEATS) > 0, "before"
    assert all(core.counters.stale > 0 for core in hand.cores)
    for bucket in buckets:
        assert bucket.out.tobytes() == expected.tobytes()


def test_any_frame_ever_sent_may_come_again_at_any_time() -> None:
    """An adversary who keeps all frames, both ways, and delivers any of them whenever it likes."""
    for seed in range(10):
        draw = random.Random(seed)
        world_size = 2 + seed % 2
        hand, buckets, expected = prepared(world_size, chunks=8, slots=1 + seed % 3)
        upwards: list[tuple[int, bytes]] = []
        downwards: list[tuple[int, bytes]] = []
        steps = 0
        while any(bucket.phase is not Phase.COMPLETED for bucket in buckets):
            steps += 1
            assert steps < 5000
            for rank in range(world_size):
                upwards += [(rank, frame) for frame in hand.sent(rank)]
            for rank, frame in draw.sample(upwards, min(3, len(upwards))):
                downwards += hand.to_switch(rank, frame)
            for rank, frame in draw.sample(downwards, min(3, len(downwards))):
                hand.to_worker(rank, frame)
        assert hand.switch.count(1, Count.STALE) + hand.switch.count(1, Count.REPEATS) > 20
        for bucket in buckets:
            assert bucket.out.tobytes() == expected.tobytes(), seed
        # At the end everything comes once more.
        before = [core.counters.results for core in hand.cores]
        for rank, frame in upwards:
            for to, answer in hand.to_switch(rank, frame):
                hand.to_worker(to, answer)
        for rank, frame in downwards:
            hand.to_worker(rank, frame)
        assert [core.counters.results for core in hand.cores] == before
        assert all(core.error is None for core in hand.cores)


def test_a_restarted_switch_under_a_new_epoch_mixes_nothing() -> None:
    """Frames of the old epoch reach slots that the new one uses: they are refused, and no sum holds them."""
    old, _, _ = prepared(2, chunks=4, slots=2)
    late = [(rank, frame) for rank in range(2) for frame in old.sent(rank)]
    assert {field(frame, "op") for _, frame in late} == {Op.ADD}
    old.switch.revoke(7)
    new = ByHand(Scenario(2, or_slots=1, add_slots=2, epoch=8), old.switch)
    rng = np.random.default_rng(1)
    data = [rng.standard_normal(320 * 4, dtype=np.float32) for _ in range(2)]
    buckets = [Reduction(vector, np.zeros_like(vector)) for vector in data]
    new.submit(*buckets)
    nacks = 0
    while buckets[0].phase is not Phase.COMPLETED:
        frames = [(rank, frame) for rank in range(2) for frame in new.sent(rank)]
        for rank, frame in frames:
            for to, answer in [nack for who, copy in late for nack in new.to_switch(who, copy)]:
                nacks += 1
                new.to_worker(to, answer)
            for to, answer in new.to_switch(rank, frame):
                new.to_worker(to, answer)
    assert nacks == sum(core.counters.foreign for core in new.cores) > 0
    for bucket in buckets:
        assert bucket.out.tobytes() == direct(data).tobytes()
