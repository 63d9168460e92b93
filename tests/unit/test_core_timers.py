# SPDX-License-Identifier: Apache-2.0
"""The estimator of RFC 6298 and what it makes of misleading samples."""

from __future__ import annotations

import pytest

from p4reduce.core.config import RetransmissionPolicy
from p4reduce.core.timers import RttEstimator

POLICY = RetransmissionPolicy(initial=0.05, minimum=0.002, maximum=0.5)


def test_before_any_sample_the_timeout_is_the_initial_one() -> None:
    rtt = RttEstimator(POLICY)
    assert rtt.timeout == rtt.estimate == 0.05
    assert rtt.smoothed is None


def test_samples_follow_the_rfc() -> None:
    rtt = RttEstimator(POLICY)
    rtt.sample(0.010, waited=False)
    assert rtt.smoothed == 0.010
    assert rtt.estimate == pytest.approx(0.010 + 4 * 0.005)
    rtt.sample(0.018, waited=False)
    variation = 0.75 * 0.005 + 0.25 * 0.008
    assert rtt.smoothed == pytest.approx(0.011)
    assert rtt.estimate == pytest.approx(0.011 + 4 * variation)


def test_bounds_hold() -> None:
    rtt = RttEstimator(POLICY)
    for _ in range(100):
        rtt.sample(1e-6, waited=False)
    assert rtt.estimate == POLICY.minimum
    for _ in range(200):
        rtt.sample(9.0, waited=False)
    assert rtt.estimate == POLICY.maximum
    rtt.sample(-1.0, waited=False)
    assert POLICY.minimum <= rtt.estimate <= POLICY.maximum


def test_back_off_holds_until_the_next_sample() -> None:
    rtt = RttEstimator(POLICY)
    rtt.sample(0.001, waited=False)
    estimate = rtt.estimate
    rtt.back_off(0.3)
    rtt.back_off(0.1)
    assert rtt.timeout == 0.3
    assert rtt.estimate == estimate
    rtt.sample(0.001, waited=False)
    assert rtt.timeout == rtt.estimate < 0.3


def test_chunks_that_waited_for_others_may_only_lower_the_estimate() -> None:
    rtt = RttEstimator(POLICY)
    rtt.sample(0.040, waited=True)
    rtt.sample(0.010, waited=True)
    assert rtt.smoothed == 0.010, "the smallest stands in"
    rtt.sample(0.045, waited=True)
    assert rtt.smoothed == 0.010
    rtt.sample(0.004, waited=False)
    assert rtt.smoothed == 0.004, "the first real one replaces it"
    before = rtt.smoothed
    rtt.sample(0.050, waited=True)
    assert rtt.smoothed == before
    rtt.sample(0.001, waited=True)
    assert rtt.smoothed < before


def test_no_sample_counts_for_more_than_twice_the_estimate() -> None:
    rtt = RttEstimator(POLICY)
    for _ in range(50):
        rtt.sample(0.001, waited=False)
    rtt.sample(0.4, waited=False)
    assert rtt.smoothed == pytest.approx(0.001 + (POLICY.minimum - 0.001) / 8)
    # One in three is another rank's timeout: the estimate stays near the round trip.
    for turn in range(300):
        rtt.sample(rtt.estimate if turn % 3 == 0 else 0.001, waited=False)
    assert rtt.smoothed is not None
    assert rtt.smoothed < 0.003
    assert rtt.estimate < 0.015


def test_a_round_trip_that_got_longer_is_learned() -> None:
    rtt = RttEstimator(POLICY)
    for _ in range(50):
        rtt.sample(0.001, waited=False)
    for _ in range(40):
        rtt.sample(0.020, waited=False)
    assert rtt.smoothed is not None
    assert 0.015 < rtt.smoothed <= 0.020
    assert rtt.estimate > 0.020


def test_an_estimate_of_nothing_grows_again() -> None:
    rtt = RttEstimator(POLICY)
    rtt.sample(0.0, waited=False)
    for _ in range(60):
        rtt.sample(0.010, waited=False)
    assert rtt.estimate > 0.010
