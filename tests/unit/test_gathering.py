# SPDX-License-Identifier: Apache-2.0
"""How long results may gather: rates, tails of buckets, idle times and new epochs."""

from __future__ import annotations

import pytest

from p4reduce.gathering import LONGEST_SECONDS, SHARE, Gathering

WINDOW = 24
MORE = 100


def steady(gathering: Gathering, per_second: float, results: int = 0, now: float = 0.0, steps: int = 60) -> float:
    """Results at one rate, looked at every 4 of them; returns the last pause with a full window outstanding."""
    pause = 0.0
    for step in range(1, steps + 1):
        pause = gathering.pause(WINDOW, MORE, WINDOW, results + 4 * step, now + 4 * step / per_second)
    return pause


@pytest.mark.parametrize("per_second", [2_000.0, 5_000.0, 20_000.0, 100_000.0])
def test_a_share_of_the_time_that_a_window_takes(per_second: float) -> None:
    assert steady(Gathering(), per_second) == pytest.approx(SHARE * WINDOW / per_second)


def test_never_longer_than_the_bound() -> None:
    assert steady(Gathering(), 1_000.0) == LONGEST_SECONDS


def test_the_estimate_follows_the_rate() -> None:
    gathering = Gathering()
    slow = steady(gathering, 5_000.0)
    fast = steady(gathering, 50_000.0, results=240, now=240 / 5_000.0)
    assert slow == pytest.approx(SHARE * WINDOW / 5_000.0)
    assert fast == pytest.approx(SHARE * WINDOW / 50_000.0, rel=1e-3)


def test_no_pause_before_a_rate_is_known() -> None:
    assert Gathering().pause(WINDOW, MORE, WINDOW, 10, 1.0) == 0.0


def test_no_pause_for_the_last_chunks_of_a_bucket() -> None:
    gathering = Gathering()
    assert steady(gathering, 10_000.0) > 0.0
    now = 240 / 10_000.0
    assert gathering.pause(WINDOW // 2 - 1, MORE, WINDOW, 241, now + 1e-4) == 0.0
    assert gathering.pause(WINDOW // 2, MORE, WINDOW, 242, now + 2e-4) > 0.0
    assert gathering.pause(0, MORE, WINDOW, 243, now + 3e-4) == 0.0


def test_no_pause_for_the_last_window() -> None:
    gathering = Gathering()
    steady(gathering, 10_000.0)
    assert gathering.pause(WINDOW, 0, WINDOW, 241, 240 / 10_000.0 + 1e-4) == 0.0


def test_the_time_between_buckets_does_not_count() -> None:
    gathering = Gathering()
    before = steady(gathering, 10_000.0)
    gathering.pause(0, 0, WINDOW, 244, 244 / 10_000.0)
    now = 244 / 10_000.0 + 0.015
    assert gathering.pause(WINDOW, MORE, WINDOW, 245, now) == 0.0
    assert gathering.pause(WINDOW, MORE, WINDOW, 249, now + 4e-4) == pytest.approx(before)


def test_a_long_silence_ends_what_is_known() -> None:
    gathering = Gathering()
    steady(gathering, 10_000.0)
    assert gathering.pause(WINDOW, MORE, WINDOW, 241, 5.0) == 0.0
    assert gathering.pause(WINDOW, MORE, WINDOW, 241, 5.0001) == 0.0, "nothing has come since"
    assert gathering.pause(WINDOW, MORE, WINDOW, 245, 5.0005) == pytest.approx(SHARE * WINDOW * 1e-4)


def test_a_slow_moment_is_soon_forgotten() -> None:
    """A rank that was late once must not make the others pause for long."""
    gathering = Gathering()
    before = steady(gathering, 10_000.0)
    now = 240 / 10_000.0 + 0.01
    late = gathering.pause(WINDOW, MORE, WINDOW, 241, now)
    assert late > 2 * before
    for step in range(1, 8):
        pause = gathering.pause(WINDOW, MORE, WINDOW, 241 + 4 * step, now + 4e-4 * step)
    assert pause < 1.25 * before


def test_a_new_epoch_counts_from_zero() -> None:
    gathering = Gathering()
    steady(gathering, 10_000.0)
    now = 240 / 10_000.0
    assert gathering.pause(WINDOW, MORE, WINDOW, 3, now + 1e-4) == 0.0
    assert gathering.pause(WINDOW, MORE, WINDOW, 7, now + 5e-4) == pytest.approx(SHARE * WINDOW * 1e-4)


def test_a_wait_without_results_keeps_the_estimate() -> None:
    gathering = Gathering()
    before = steady(gathering, 10_000.0)
    assert gathering.pause(WINDOW, MORE, WINDOW, 240, 240 / 10_000.0 + 1e-3) == before
