# SPDX-License-Identifier: Apache-2.0
"""Pools, numbers and windows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p4reduce.errors import ConfigError
from p4reduce_controller.pools import FIRST_GROUP, FIRST_RID, Lease, Numbers, Pools, window


def test_numbers_are_the_lowest_free_ones() -> None:
    numbers = Numbers(5, 9)
    assert numbers.take(2) == [5, 6]
    assert numbers.take(2) == [7, 8]
    assert numbers.take(2) is None
    numbers.give_back([7, 5])
    assert numbers.take(3) == [5, 7, 9]
    assert numbers.take(1) is None


def test_pools_are_equal_disjoint_and_within_the_switch() -> None:
    pools = Pools(pool_slots=100, slots=1024)
    leases = [pools.take(2) for _ in range(10)]
    assert [lease.pool_base for lease in leases if lease] == list(range(0, 1000, 100))
    assert all(lease and lease.pool_size == 100 for lease in leases)
    assert pools.take(2) is None


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
    pools = Pools(pool_slots=512)
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
    # 8190 rids are enough for 127 jobs of 64 ranks; the pools would have been enough for 512.
    assert len(leases) == 8190 // 64
    rest = pools.take(8190 % 64)
    assert rest is not None
    assert rest.pool_base == 2 * len(leases)


@pytest.mark.parametrize("slots", [-1, 0, 1, 1025])
def test_pool_sizes_that_make_no_sense(slots: int) -> None:
    with pytest.raises(ConfigError, match=f"pool-slots must be from 2 to 1024 .*, not {slots}"):
        Pools(pool_slots=slots)


def test_window_of_a_worker_alone_on_its_port() -> None:
    assert window(64, [1000, 1000], {1: 1, 2: 1}, {}) == (7, 53)
    assert window(64, [1000, 24], {1: 1, 2: 1}, {}) == (3, 21)
    assert window(16, [1000, 1000], {1: 1, 2: 1}, {}) == (2, 14)


def test_workers_behind_one_port_share_its_queue() -> None:
    assert sum(window(64, [1000] * 4, {1: 3, 2: 1}, {})) == 20
    assert sum(window(64, [1000] * 4, {1: 3, 2: 1}, {}, port_budget=30)) == 10


def test_other_jobs_on_the_port_count_but_nobody_gets_nothing() -> None:
    assert sum(window(64, [1000], {1: 1}, {1: 20, 2: 60})) == 40
    assert window(64, [1000], {1: 1}, {1: 60}) == (1, 1)
    assert window(64, [1000] * 64, {1: 64}, {}) == (1, 1)


@given(
    st.integers(2, 1024),
    st.lists(st.integers(2, 5000), min_size=1, max_size=64),
    st.dictionaries(st.integers(1, 510), st.integers(1, 64), min_size=1, max_size=8),
    st.dictionaries(st.integers(1, 510), st.integers(0, 100), max_size=8),
)
def test_window_stays_within_its_bounds(
    pool: int, frames: list[int], on_port: dict[int, int], used: dict[int, int]
) -> None:
    or_slots, add_slots = window(pool, frames, on_port, used)
    size = or_slots + add_slots
    assert or_slots >= 1
    assert add_slots >= 1
    assert size <= pool
    assert size <= min(frames)
    assert or_slots == max(size // 8, 1)
    for port, workers in on_port.items():
        assert size == 2 or workers * size + used.get(port, 0) <= 60
