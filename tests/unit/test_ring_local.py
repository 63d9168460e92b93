# SPDX-License-Identifier: Apache-2.0
"""Rings between threads of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers.ring_cases import LIMIT, together

from p4reduce.errors import RingError, UsageError
from p4reduce.ring import Ring, local_rings


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_local_rings_give_maximum_and_sum(size: int) -> None:
    rings = local_rings(size)
    assert [(ring.rank, ring.size, ring.device) for ring in rings] == [(rank, size, "cpu") for rank in range(size)]
    levels = [np.array([rank, 200 - rank], dtype=np.uint8) for rank in range(size)]
    signed = [np.array([-rank - 1, rank], dtype=np.int64) for rank in range(size)]
    narrow = [np.array([2**30 // size, -rank], dtype=np.int32) for rank in range(size)]
    wide = [np.array([2**40, -rank], dtype=np.int64) for rank in range(size)]

    def take_part(rank: int) -> None:
        for _ in range(20):
            counter = np.array([1], dtype=np.int32)
            rings[rank].sum(counter)
            assert counter.tolist() == [size]
        rings[rank].max(levels[rank])
        rings[rank].max(signed[rank])
        rings[rank].sum(narrow[rank])
        rings[rank].sum(wide[rank])

    assert together([partial(take_part, rank) for rank in range(size)]) == [None] * size
    below = size * (size - 1) // 2
    for rank in range(size):
        assert levels[rank].tolist() == [size - 1, 200]
        assert signed[rank].tolist() == [-1, size - 1]
        assert narrow[rank].tolist() == [2**30 // size * size, -below]
        assert wide[rank].tolist() == [size * 2**40, -below]


def test_a_missing_rank_is_named_to_all() -> None:
    rings = local_rings(4, deadline=0.2)
    started = time.monotonic()
    errors = together([partial(ring.sum, np.zeros(1, np.int32)) for ring in (rings[0], rings[2])])
    assert 0.2 <= time.monotonic() - started < LIMIT
    assert [str(error) for error in errors] == ["rank 1, 3 did not come within 0.2 s"] * 2
    assert all(isinstance(error, RingError) for error in errors)
    for ring in rings:  # late ranks and later calls need not wait
        with pytest.raises(RingError, match="rank 1, 3 did not come"):
            ring.max(np.zeros(1, np.uint8))


def test_a_closed_ring_is_named_to_those_that_wait_and_those_that_come() -> None:
    rings = local_rings(3)
    waiting = threading.Thread(target=lambda: errors.extend(together([lambda: rings[0].sum(np.zeros(1, np.int32))])))
    errors: list[Any] = []
    waiting.start()
    rings[2].close()
    rings[2].close()
    waiting.join(LIMIT)
    assert [str(error) for error in errors] == ["rank 2 has closed its ring"]
    with pytest.raises(RingError, match="rank 2 has closed its ring"):
        rings[1].sum(np.zeros(1, np.int32))
    with pytest.raises(RingError, match="rank 2 has closed this ring"):
        rings[2].sum(np.zeros(1, np.int32))
    first, second = local_rings(2, deadline=5.0)
    second.close()  # while nobody waits
    with pytest.raises(RingError, match="rank 1 has closed its ring"):
        first.sum(np.zeros(1, np.int32))


def test_closing_does_not_take_away_what_is_complete() -> None:
    for _ in range(50):
        rings = local_rings(2)
        values = [np.array([rank + 1], dtype=np.int32) for rank in range(2)]

        def take_part(rank: int, rings: list[Ring] = rings, values: list[Any] = values) -> None:
            rings[rank].sum(values[rank])
            rings[rank].close()

        assert together([lambda: take_part(0), lambda: take_part(1)]) == [None, None]
        assert [one.tolist() for one in values] == [[3], [3]]


@pytest.mark.parametrize(
    "other",
    [
        lambda ring: ring.max(np.zeros(2, np.int32)),
        lambda ring: ring.sum(np.zeros(3, np.int32)),
        lambda ring: ring.sum(np.zeros(2, np.int64)),
    ],
)
def test_different_calls_are_refused_on_all_ranks(other: Callable[[Ring], None]) -> None:
    first, second = local_rings(2)
    errors = together([lambda: first.sum(np.zeros(2, np.int32)), lambda: other(second)])
    assert [type(error) for error in errors] == [RingError, RingError]
    assert "the ranks make different calls: " in str(errors[0])
    assert "add of int32(2,)" in str(errors[0])


def test_a_local_ring_is_for_one_thread_at_a_time() -> None:
    ring, other = local_rings(2)
    errors = together([lambda: ring.sum(np.zeros(1, np.int32)), lambda: ring.sum(np.zeros(1, np.int32)), other.close])
    assert sorted(type(error).__name__ for error in errors) in (
        ["NoneType", "RingError", "UsageError"],
        ["NoneType", "RingError", "RingError"],  # the close came first
    )


@pytest.mark.parametrize(("size", "deadline"), [(0, 1.0), (2, 0.0), (2, float("nan"))])
def test_senseless_local_rings_are_refused(size: int, deadline: float) -> None:
    with pytest.raises(UsageError):
        local_rings(size, deadline)
