# SPDX-License-Identifier: Apache-2.0
"""Pools, numbers and windows."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p4reduce.errors import ConfigError
from p4reduce_controller.pools import (
    FAIR_WINDOW,
    FIRST_GROUP,
    FIRST_RID,
    LAST_GROUP,
    Lease,
    Numbers,
    Pools,
    Ranges,
    window,
)


def test_numbers_are_the_lowest_free_ones() -> None:
    numbers = Numbers(5, 9)
    assert numbers.take(2) == [5, 6]
    assert numbers.take(2) == [7, 8]
    assert numbers.take(2) is None
    numbers.give_back([7, 5])
    assert numbers.take(3) == [5, 7, 9]
    assert numbers.take(1) is None


def test_numbers_taken_exactly() -> None:
    numbers = Numbers(5, 12)
    assert numbers.take_exactly([8, 6])
    assert not numbers.take_exactly([5, 6]), "6 is gone"
    assert not numbers.take_exactly([9, 9])
    assert not numbers.take_exactly([13])
    assert not numbers.take_exactly([4])
    assert numbers.take(3) == [5, 7, 9]
    assert numbers.take_exactly([12])
    assert numbers.take(2) == [10, 11]
    assert numbers.take(1) is None


def test_ranges_fit_first_and_grow_together() -> None:
    ranges = Ranges(10)
    assert [ranges.take(1, 3) for _ in range(3)] == [(0, 3), (3, 3), (6, 3)]
    assert ranges.take(2, 2) is None, "one slot is left"
    ranges.give_back(3, 3)
    assert ranges.take(1, 2) == (3, 2)
    assert ranges.free == [(5, 1), (9, 1)]
    ranges.give_back(6, 3)
    assert ranges.free == [(5, 5)]
    ranges.give_back(0, 3)
    ranges.give_back(3, 2)
    assert ranges.free == [(0, 10)]


def test_a_range_that_is_smaller_than_wanted_is_the_largest_there_is() -> None:
    ranges = Ranges(20)
    for base, size in ((0, 2), (2, 3), (5, 2), (7, 5), (12, 2), (14, 6)):
        assert ranges.take_exactly(base, size)
    for base, size in ((2, 3), (7, 5)):
        ranges.give_back(base, size)
    assert ranges.take(6, 8) is None
    assert ranges.take(2, 8) == (7, 5)


def test_ranges_taken_exactly() -> None:
    ranges = Ranges(10)
    assert ranges.take_exactly(4, 3)
    for base, size in ((4, 3), (3, 2), (6, 2), (0, 10), (9, 2), (10, 1), (0, 0)):
        assert not ranges.take_exactly(base, size), (base, size)
    assert ranges.take_exactly(7, 3)
    assert ranges.take_exactly(0, 4)
    assert ranges.free == []


def test_a_job_gets_what_it_wants_but_never_more_than_half_of_what_is_free() -> None:
    pools = Pools()
    assert [(lease.pool_base, lease.pool_size) for lease in (pools.take(2), pools.take(2)) if lease] == [
        (0, 64),
        (64, 64),
    ]
    lease = pools.take(2, want=1024)
    assert lease is not None
    assert (lease.pool_base, lease.pool_size) == (128, 448)
    lease = pools.take(2, 300, 400)
    assert lease is not None
    assert (lease.pool_base, lease.pool_size) == (576, 300), "its minimum, though more than half"
    assert pools.take(2, 200) is None
    sizes = []
    while (lease := pools.take(2, want=1024)) is not None:
        sizes.append(lease.pool_size)
    assert sizes == [74, 36, 18, 10, 4, 2, 2, 2]
    assert pools.free == []


def test_leases_share_no_number() -> None:
    pools = Pools()
    first, second = pools.take(3), pools.take(64)
    assert first == Lease(0, 64, FIRST_GROUP, (FIRST_RID, FIRST_RID + 1, FIRST_RID + 2), 1)
    assert second is not None
    assert second.group != FIRST_GROUP
    assert second.stats == 2
    assert not set(second.rids) & {FIRST_RID, FIRST_RID + 1, FIRST_RID + 2}
    assert len(set(second.rids)) == 64


def test_what_is_given_back_can_be_taken_again() -> None:
    pools = Pools(2, slots=4)
    first, second = pools.take(64), pools.take(64)
    assert first is not None
    assert second is not None
    assert pools.take(1) is None
    pools.give_back(first)
    assert pools.take(64) == first


def test_a_failed_take_takes_nothing() -> None:
    pools = Pools(pool_slots=2)
    leases = []
    while (lease := pools.take(64)) is not None:
        leases.append(lease)
    # 8190 rids are enough for 127 jobs of 64 ranks; the slots would have been enough for 512.
    assert len(leases) == 8190 // 64
    rest = pools.take(8190 % 64)
    assert rest is not None
    assert rest.pool_base == 2 * len(leases)


def test_a_lease_taken_exactly_all_or_nothing() -> None:
    old = Pools()
    leases = [old.take(3) for _ in range(3)]
    pools = Pools()
    second = leases[1]
    assert second is not None
    assert pools.take_exactly(second)
    assert not pools.take_exactly(second)
    before = pools.free
    for changed in (
        Lease(0, 4, LAST_GROUP + 1, (30, 31), 9),
        Lease(0, 4, second.group, (30, 31), 9),
        Lease(0, 4, 40, (30, second.rids[0]), 9),
        Lease(0, 4, 40, (30, 30), 9),
        Lease(0, 4, 40, (30, 31), second.stats),
        Lease(second.pool_base - 1, 4, 40, (30, 31), 9),
        Lease(0, 4, 40, (30, 31), 0),
    ):
        assert not pools.take_exactly(changed), changed
    assert pools.free == before
    assert pools.take_exactly(Lease(0, 4, 40, (30, 31), 9)), "what failed above took nothing"
    assert [pools.take(3), pools.take(3)] != leases[:2]


def test_random_leases_never_overlap_and_all_comes_back() -> None:
    rng = random.Random(7)
    pools, held = Pools(slots=200), []
    for _ in range(3000):
        if held and rng.random() < 0.45:
            pools.give_back(held.pop(rng.randrange(len(held))))
        else:
            minimum = rng.randint(2, 20)
            want = rng.choice([0, rng.randint(minimum, 200)])
            free = sum(size for _, size in pools.free)
            lease = pools.take(rng.randint(1, 5), minimum, want)
            if lease is None:
                assert max((size for _, size in pools.free), default=0) < minimum
                continue
            assert minimum <= lease.pool_size <= max(minimum, min(want or 64, free // 2))
            held.append(lease)
        spans = sorted([(lease.pool_base, lease.pool_size) for lease in held] + pools.free)
        position = 0
        for base, size in spans:
            assert base == position, "a gap or an overlap"
            position += size
        assert position == 200
        for numbers in (
            [lease.group for lease in held],
            [lease.stats for lease in held],
            [rid for lease in held for rid in lease.rids],
        ):
            assert len(numbers) == len(set(numbers))
    for lease in held:
        pools.give_back(lease)
    assert pools.free == [(0, 200)]


@pytest.mark.parametrize("slots", [-1, 0, 1, 1025])
def test_pool_sizes_that_make_no_sense(slots: int) -> None:
    with pytest.raises(ConfigError, match=f"pool-slots must be from 2 to 1024 .*, not {slots}"):
        Pools(pool_slots=slots)


def test_window_of_the_first_on_its_port_leaves_half() -> None:
    assert window(64, [1000, 1000], {1: 1, 2: 1}, {}) == (3, 27)
    assert window(64, [1000, 24], {1: 1, 2: 1}, {}) == (3, 21)
    assert window(16, [1000, 1000], {1: 1, 2: 1}, {}) == (2, 14)
    assert window(64, [1000, 1000], {1: 1, 2: 1}, {}, minimum=40) == (5, 35)
    assert window(64, [1000, 1000], {1: 1, 2: 1}, {}, bound=10) == (1, 9)
    assert window(64, [1000, 1000], {1: 1, 2: 1}, {}, minimum=40, bound=2) == (1, 1)


def test_one_job_after_the_other_finds_something_on_the_same_port() -> None:
    used, sizes = 0, []
    for _ in range(6):
        sizes.append(sum(window(64, [1000], {1: 1}, {1: used})))
        used += sizes[-1]
    assert sizes == [30, 15, FAIR_WINDOW, 7, 2, 2]


def test_workers_behind_one_port_share_its_queue() -> None:
    assert sum(window(64, [1000] * 4, {1: 3, 2: 1}, {})) == 10
    assert sum(window(64, [1000] * 4, {1: 3, 2: 1}, {}, port_budget=30)) == FAIR_WINDOW
    assert sum(window(64, [1000] * 8, {1: 8}, {})) == 7, "the first few slots are not halved"


def test_other_jobs_on_the_port_count_but_nobody_gets_nothing() -> None:
    assert sum(window(64, [1000], {1: 1}, {1: 20, 2: 60})) == 20
    assert window(64, [1000], {1: 1}, {1: 60}) == (1, 1)
    assert window(64, [1000] * 64, {1: 64}, {}) == (1, 1)
    assert window(64, [1000], {1: 1}, {1: 500}) == (1, 1)


@given(
    st.integers(2, 1024),
    st.lists(st.integers(2, 5000), min_size=1, max_size=64),
    st.dictionaries(st.integers(1, 510), st.integers(1, 64), min_size=1, max_size=8),
    st.dictionaries(st.integers(1, 510), st.integers(0, 100), max_size=8),
    st.integers(2, 100),
    st.sampled_from([0, 2, 5, 50]),
)
def test_window_stays_within_its_bounds(
    pool: int, frames: list[int], on_port: dict[int, int], used: dict[int, int], minimum: int, bound: int
) -> None:
    or_slots, add_slots = window(pool, frames, on_port, used, minimum=minimum, bound=bound)
    size = or_slots + add_slots
    assert or_slots >= 1
    assert add_slots >= 1
    assert size <= pool
    assert size <= min(frames)
    assert not bound or size <= bound
    assert or_slots == max(size // 8, 1)
    for port, workers in on_port.items():
        assert size <= minimum or workers * size + used.get(port, 0) <= 60
