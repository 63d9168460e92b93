# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding: the generator, that it is a function of (seed, rank, index), and that it favours nobody."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p4reduce.errors import UsageError
from p4reduce.quantize import BLOCKS, PIECE, LaneFormat, Quantizer, block_exponents, quantize
from p4reduce.rounding import Dice, Stochastic
from p4reduce.splitmix import mix, mix_into, mix_number, splitmix64

repeatable = settings(derandomize=True, deadline=None, max_examples=100)
MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


def plain(z: int) -> int:
    """SplitMix64's output function, as it is published."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def by_the_book(seed: int, rank: int, index: int) -> Fraction:
    """u of one element, as the documentation says."""
    word = plain(plain(plain(seed) + rank + 1 & MASK) + (index // 2 + 1) * GAMMA & MASK)
    return Fraction(word >> (40 if index % 2 else 8) & 0xFFFFFF, 1 << 24)


def draw(stream: Stochastic, start: int, count: int) -> np.ndarray:
    out = np.empty(count, dtype=np.float32)
    Dice(max(count, 1)).draw(stream, start, out)
    return out


# The generator


def test_known_outputs_of_splitmix64() -> None:
    # From the reference implementation by S. Vigna, seed 1234567.
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert splitmix64(1234567, 5).tolist() == known


@repeatable
@given(st.lists(st.integers(0, MASK), min_size=1, max_size=20))
def test_three_forms_of_one_function(numbers: list[int]) -> None:
    z = np.array(numbers, dtype=np.uint64)
    expected = [plain(number) for number in numbers]
    assert mix(z).tolist() == expected
    assert [mix_number(number) for number in numbers] == expected
    mix_into(z, np.empty_like(z))
    assert z.tolist() == expected


@repeatable
@given(st.integers(0, MASK), st.integers(0, 63), st.integers(0, 1 << 40), st.integers(0, 40))
def test_numbers_are_as_documented(seed: int, rank: int, start: int, count: int) -> None:
    found = draw(Stochastic(seed, rank), start, count)
    assert [Fraction(float(u)) for u in found] == [by_the_book(seed, rank, start + i) for i in range(count)]


def test_pieces_do_not_matter() -> None:
    stream = Stochastic(99, 3)
    whole = draw(stream, 0, 5000)
    dice = Dice(1000)
    for start, count in ((0, 1), (1, 1), (1, 2), (7, 999), (8, 1000), (4001, 999), (17, 0)):
        out = np.empty(count, dtype=np.float32)
        dice.draw(stream, start, out)
        assert out.tobytes() == whole[start : start + count].tobytes()


def test_numbers_are_uniform_and_streams_independent() -> None:
    """Mean, spread, 64 bins, neighbours, ranks and seeds, each within 5 standard deviations."""
    count = 1 << 18
    rows = [
        draw(Stochastic(seed, rank), 0, count).astype(np.float64) for seed in (0, 1, 1 << 63) for rank in (0, 1, 63)
    ]
    for row in rows:
        assert 0.0 <= row.min() < row.max() < 1.0
        assert abs(row.mean() - 0.5) < 5 * math.sqrt(1 / 12 / count)
        assert abs(((row - 0.5) ** 2).mean() - 1 / 12) < 5 * math.sqrt(1 / 180 / count)
        bins = np.bincount((row * 64).astype(int), minlength=64)
        chi = ((bins - count / 64) ** 2).sum() / (count / 64)
        assert abs(chi - 63) < 5 * math.sqrt(2 * 63)
    centred = [12 * (row - 0.5) for row in rows]
    pairs = [(a, b) for i, a in enumerate(centred) for b in centred[:i]]
    pairs += [(row[lag:], row[:-lag]) for row in centred for lag in (1, 2, 256)]
    for a, b in pairs:
        assert abs(float((a * b).mean()) / 12) < 5 / math.sqrt(len(a))


@pytest.mark.parametrize(("seed", "rank"), [(-1, 0), (1 << 64, 0), (0, -1), (0, 64)])
def test_what_is_no_stream_is_refused(seed: int, rank: int) -> None:
    with pytest.raises(UsageError):
        Stochastic(seed, rank)


# Quantizing with it


def chosen(fmt: LaneFormat, count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of both signs and many magnitudes, their agreed exponents, and what they are in quanta, exactly."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(count) * 10.0 ** rng.uniform(-6, 0, count)).astype(np.float32)
    exponents = np.maximum(block_exponents(x, fmt.block), np.uint8(127 + seed % 3))
    power = fmt.precision + 126 - np.repeat(exponents.astype(int), fmt.block)[:count]
    return x, exponents, np.ldexp(x.astype(np.float64), power)


def integers(x: np.ndarray, exponents: np.ndarray, fmt: LaneFormat, stream: Stochastic | None) -> np.ndarray:
    out = np.empty(len(x), dtype=fmt.lane_type)
    quantize(x, exponents, fmt, out, stream=stream)
    return out.astype(np.int64) - fmt.bias


@pytest.mark.parametrize("lane_bits", [8, 16, 32])
@pytest.mark.parametrize("workers", [1, 2, 5, 51])
def test_up_where_the_number_drawn_is_below_the_distance(lane_bits: int, workers: int) -> None:
    fmt = LaneFormat(lane_bits, workers, BLOCKS[lane_bits])
    x, exponents, exact = chosen(fmt, 3000, workers)
    for seed in (0, 7, MASK):
        found = integers(x, exponents, fmt, Stochastic(seed, workers - 1))
        for i, y in enumerate(exact):
            below = math.floor(y)
            # The distance is exact but for numbers in (-1, 0), where it is a float32 as near as can be.
            up = by_the_book(seed, workers - 1, i) < Fraction(float(np.float32(y - below)))
            assert found[i] == below + up


@pytest.mark.parametrize("lane_bits", [8, 16, 32])
@pytest.mark.parametrize("workers", range(1, 65))
def test_bounds_hold_for_every_width_and_number_of_workers(lane_bits: int, workers: int) -> None:
    """|q| <= B for the largest numbers of a block, whatever is drawn; nothing is off by a whole quantum."""
    fmt = LaneFormat(lane_bits, workers, 64)
    largest = np.nextafter(np.float32(2), np.float32(0))
    steps = np.linspace(-1, 1, 129).astype(np.float32)
    x = np.concatenate([np.full(64, largest), np.full(64, -largest), largest * steps]).astype(np.float32)
    exponents = np.full(fmt.blocks(len(x)), 127, dtype=np.uint8)
    exact = np.ldexp(x.astype(np.float64), fmt.precision - 1)
    for stream in (None, Stochastic(1, 0), Stochastic(2, workers - 1)):
        u = np.empty(len(x), dtype=fmt.lane_type)
        quantize(x, exponents, fmt, u, stream=stream)
        assert int(u.max()) <= fmt.limit
        assert workers * int(u.max()) < 1 << lane_bits
        q = u.astype(np.int64) - fmt.bias
        assert np.abs(q).max() <= fmt.bias
        error = np.abs(q - exact)
        assert (error <= 0.5).all() if stream is None else (error < 1).all()


@pytest.mark.parametrize("lane_bits", [8, 16, 32])
@pytest.mark.parametrize("workers", [1, 2, 3, 8, 43])
def test_expected_value_is_exact(lane_bits: int, workers: int) -> None:
    """Over 600 seeds, for numbers of both signs; rounding to nearest fails the same test by far."""
    fmt = LaneFormat(lane_bits, workers, 256)
    rng = np.random.default_rng([lane_bits, workers])
    # Within a few quanta of zero, where rounding to nearest loses everything below half a quantum.
    exact = np.concatenate([rng.uniform(-0.45, 0.45, 200), rng.uniform(0, 0.4, 200), rng.uniform(-0.4, 0, 200)])
    exact = np.concatenate([exact, rng.uniform(-1, 1, 200) * ((1 << fmt.precision) - 1)])
    x = np.ldexp(exact, -fmt.precision).astype(np.float32)
    exponents = np.full(fmt.blocks(len(x)), 126, dtype=np.uint8)
    exact = np.ldexp(x.astype(np.float64), fmt.precision)
    seeds = 600
    total = np.zeros(len(x))
    for seed in range(seeds):
        total += integers(x, exponents, fmt, Stochastic(seed, workers - 1))
    distance = exact - np.floor(exact)
    variance = distance * (1 - distance) * seeds
    error = total - seeds * exact
    assert (np.abs(error) <= 5 * np.sqrt(variance) + 1e-3).all()
    for part in (slice(0, 200), slice(200, 400), slice(400, 600), slice(0, len(x))):
        margin = 4 * math.sqrt(variance[part].sum()) + 1e-3
        assert abs(error[part].sum()) <= margin
        nearest = seeds * (integers(x, exponents, fmt, None) - exact)
        if part.start:  # one sign only
            assert abs(nearest[part].sum()) > 10 * margin


@pytest.mark.parametrize("lane_bits", [8, 16, 32])
def test_whole_numbers_and_zeros_are_left_alone(lane_bits: int) -> None:
    fmt = LaneFormat(lane_bits, 3)
    reach = 1 << min(fmt.precision, 23)
    exact = np.array([0, 1, -1, 2, -2, reach - 1, 1 - reach, reach // 2], dtype=np.float64)
    x = np.append(np.ldexp(exact, -fmt.precision).astype(np.float32), np.float32(-0.0))
    for seed in range(50):
        found = integers(x, np.array([126], dtype=np.uint8), fmt, Stochastic(seed, 1))
        assert found.tolist() == [*exact.tolist(), 0]


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("lane_bits", [8, 16, 32])
def test_ranges_and_pieces_give_the_same_integers_and_residuals(lane_bits: int, stochastic: bool) -> None:
    fmt = LaneFormat(lane_bits, 3, 100)
    stream = Stochastic(12345, 2) if stochastic else None
    x, exponents, _ = chosen(fmt, 2 * PIECE + 777, 4)
    x[5000], x[6000] = np.nan, np.inf
    exponents = np.maximum(exponents, block_exponents(x, 100))
    whole, left = np.empty(len(x), dtype=fmt.lane_type), np.full_like(x, np.nan)
    quantize(x, exponents, fmt, whole, stream=stream, residual=left)
    assert np.isfinite(left).all()
    assert (left != 0).any()
    quantizer = Quantizer(fmt, largest=1000)
    for start, stop in ((0, 1), (99, 101), (300, 310), (4900, 9001), (PIECE - 3, len(x)), (len(x) - 9, len(x)), (7, 7)):
        u, residual = np.empty(stop - start, dtype=fmt.lane_type), np.empty(stop - start, dtype=np.float32)
        quantizer.quantize(x[start:stop], exponents, u, start, stream=stream, residual=residual)
        assert np.array_equal(u, whole[start:stop])
        assert residual.tobytes() == left[start:stop].tobytes()


# Residuals


@repeatable
@given(
    st.sampled_from([8, 16, 32, 64]),
    st.integers(1, 42),
    st.booleans(),
    st.lists(st.one_of(st.integers(0, 0x7F7FFFFF), st.integers(0, 0x02000000)), min_size=1, max_size=30),
    st.integers(0, 2**32),
)
def test_sent_and_residual_add_up(lane_bits: int, workers: int, random: bool, bits: list[int], seed: int) -> None:
    """Exactly, for any finite numbers; one case may be off by 2^-25 quanta, see quantize()."""
    rng = np.random.default_rng(seed)
    x = np.array(bits, dtype=np.uint32).view(np.float32) * rng.choice(np.array([-1, 1], np.float32), len(bits))
    fmt = LaneFormat(lane_bits, workers, 7)
    exponents = np.maximum(block_exponents(x, 7), np.uint8(rng.integers(0, 200)))
    u, residual = np.empty(len(x), dtype=fmt.lane_type), np.empty(len(x), dtype=np.float32)
    quantize(x, exponents, fmt, u, stream=Stochastic(seed, 0) if random else None, residual=residual)
    for i, value in enumerate(x):
        quantum = Fraction(2) ** (max(int(exponents[i // 7]), 1) - 126 - fmt.precision)
        sent = (int(u[i]) - fmt.bias) * quantum
        off = Fraction(float(value)) - sent - Fraction(float(residual[i]))
        distance = abs(Fraction(float(value))) / quantum
        if random and 0 < distance < Fraction(1, 2) and sent:
            assert abs(off) <= quantum / (1 << 25)
        else:
            assert off == 0
        assert abs(Fraction(float(residual[i]))) <= (quantum if random else quantum / 2)


def test_residual_is_zero_where_nothing_finite_was_reduced() -> None:
    fmt = LaneFormat(8, 2, 64)
    x = np.linspace(-1, 1, 192).astype(np.float32)
    x[3], x[70] = np.nan, -np.inf
    agreed = block_exponents(x, 64)
    assert agreed.tolist() == [255, 255, 127]
    residual = np.full(192, np.nan, dtype=np.float32)
    u = np.empty(192, dtype=np.uint8)
    quantize(x, agreed, fmt, u, residual=residual)
    assert not residual[:128].any()
    assert residual[128:].any()
    # Another rank's block is not finite: this one has sent nothing of it, and keeps nothing either.
    quantize(np.ones(192, np.float32), agreed, fmt, u, stream=Stochastic(1, 1), residual=residual)
    assert not residual[:128].any()


def test_residual_after_data_that_changed_is_what_was_really_sent() -> None:
    """Exponents too small for the data: the integers are clipped, and the residual knows it."""
    fmt = LaneFormat(16, 2, 64)
    x = np.array([0.25, 8.0, -8.0, np.nan, np.inf], dtype=np.float32)
    u, residual = np.empty(5, dtype=np.uint16), np.empty(5, dtype=np.float32)
    quantize(x, np.array([126], dtype=np.uint8), fmt, u, residual=residual)
    quantum = 2.0**-fmt.precision
    sent = (u.astype(np.int64) - fmt.bias) * quantum
    assert residual[:3].tolist() == (x[:3] - sent[:3].astype(np.float32)).tolist()
    assert residual[3:].tolist() == [0, 0]


def test_residuals_of_wrong_shape_are_refused() -> None:
    fmt, x = LaneFormat(16, 2), np.zeros(10, dtype=np.float32)
    wrong: list[Any] = [np.zeros(9, np.float32), np.zeros(10), np.zeros(20, np.float32)[::2]]
    for bad in wrong:
        with pytest.raises(UsageError):
            quantize(x, np.zeros(1, np.uint8), fmt, np.zeros(10, np.uint16), residual=bad)


def test_error_feedback_loses_nothing_in_the_long_run() -> None:
    """What all steps have sent together is what was given, but for the last residual."""
    fmt = LaneFormat(8, 4, 1024)
    rng = np.random.default_rng(3)
    x = rng.standard_normal(2000).astype(np.float32)
    x[::2] *= np.float32(1e-3)
    residual = np.zeros_like(x)
    total, naive = np.zeros(len(x)), np.zeros(len(x))
    for _ in range(64):
        given_, left = x + residual, np.empty_like(x)
        exponents = block_exponents(given_, 1024)
        u = np.empty(len(x), dtype=np.uint8)
        quantize(given_, exponents, fmt, u, residual=left)
        quanta = np.ldexp(1.0, np.repeat(exponents.astype(int), 1024)[: len(x)] - 126 - fmt.precision)
        total += (u.astype(int) - fmt.bias) * quanta
        residual = left
        quantize(x, exponents, fmt, u)
        naive += (u.astype(int) - fmt.bias) * quanta
    assert np.allclose(total + residual, 64.0 * x, rtol=0, atol=1e-5)
    assert np.abs(total - 64.0 * x).max() <= 0.2
    assert np.abs(naive - 64.0 * x).max() > 5
