# SPDX-License-Identifier: Apache-2.0
"""Quantizer: exact scaling, bounds of the lanes, accuracy against exact sums and against a float32 ring."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p4reduce.errors import ConfigError, UsageError
from p4reduce.quantize import PIECE, LaneFormat, Quantizer, block_exponents, dequantize, quantize
from p4reduce.rounding import Stochastic

repeatable = settings(derandomize=True, deadline=None, max_examples=150)
# Bit patterns of float32, with a liking for the edges: zeros, subnormals, powers of two, largest, infinities, NaN.
EDGES = [0, 1, 2, 3, 0x7FFFFF, 0x800000, 0x800001, 0x3F800000, 0x3F7FFFFF, 0x7F7FFFFF, 0x7F000000, 0x7F800000]
EDGES += [0x7F800001, 0x7FC00000]
finite_bits = st.one_of(
    st.sampled_from([bits | sign for bits in EDGES if bits < 0x7F800000 for sign in (0, 1 << 31)]),
    st.integers(0, 0x7F7FFFFF),
    st.integers(0x80000000, 0xFF7FFFFF),
)
any_bits = st.one_of(
    st.sampled_from([bits | sign for bits in EDGES for sign in (0, 1 << 31)]), st.integers(0, 0xFFFFFFFF)
)
formats = st.builds(
    LaneFormat,
    lane_bits=st.sampled_from([8, 16, 32]),
    workers=st.integers(1, 64),
    block=st.sampled_from([1, 3, 8, 256]),
)


def from_bits(bits: list[int]) -> np.ndarray:
    return np.array(bits, dtype=np.uint32).view(np.float32)


def encode(x: np.ndarray, exponents: np.ndarray, fmt: LaneFormat) -> np.ndarray:
    out = np.empty(len(x), dtype=fmt.lane_type)
    quantize(x, exponents, fmt, out)
    return out


def allreduce(
    xs: np.ndarray, lane_bits: int = 32, mean: bool = False, seed: int | None = None
) -> tuple[np.ndarray, np.ndarray, LaneFormat]:
    """Sum rows of float32 as workers and switch would; returns sum, size of a quantum per element, format."""
    fmt = LaneFormat(lane_bits, len(xs))
    exponents = np.maximum.reduce([block_exponents(x) for x in xs])
    sums = np.zeros(xs.shape[1], dtype=fmt.lane_type)
    for rank, x in enumerate(xs):
        lanes = np.empty_like(sums)
        quantize(x, exponents, fmt, lanes, stream=None if seed is None else Stochastic(seed, rank))
        sums += lanes
    out = np.empty(xs.shape[1], dtype=np.float32)
    dequantize(sums, exponents, fmt, out, mean)
    quanta = np.ldexp(1.0, np.maximum(exponents.astype(int), 1) - 126 - fmt.precision)
    return out, np.repeat(quanta, fmt.block)[: len(out)], fmt


def ring(xs: np.ndarray) -> np.ndarray:
    """Sum in float32 in the order of a ring's reduce-scatter: part c starts at rank c and goes round."""
    n, count = xs.shape
    out = np.empty(count, dtype=np.float32)
    bounds = [count * part // n for part in range(n + 1)]
    for part in range(n):
        where = slice(bounds[part], bounds[part + 1])
        total = xs[part, where].copy()
        for step in range(1, n):
            total = total + xs[(part + step) % n, where]
        out[where] = total
    return out


# Format


@pytest.mark.parametrize("lane_bits", [8, 16, 32, 64])
@pytest.mark.parametrize("workers", range(1, 65))
def test_format_numbers_fit_the_lane(lane_bits: int, workers: int) -> None:
    fmt = LaneFormat(lane_bits, workers)
    assert workers * fmt.limit < 1 << lane_bits <= workers * (fmt.limit + 1)
    assert 2 * fmt.bias in (fmt.limit, fmt.limit - 1)

    def largest(p: int) -> int:
        # What the largest 24-bit mantissa becomes: below 25 bits it may be rounded up to the next power of two.
        return 1 << p if p <= 24 else (1 << p) - (1 << (p - 24))

    assert largest(fmt.precision) <= fmt.bias < largest(fmt.precision + 1)


def test_format_known_values() -> None:
    two = LaneFormat(32, 2)
    assert (two.limit, two.bias, two.precision) == (2**31 - 1, 2**30 - 1, 30)
    assert [LaneFormat(32, n).precision for n in (1, 3, 4, 8, 16, 64)] == [31, 29, 29, 28, 27, 25]
    assert LaneFormat(8, 64).precision == 0
    assert [LaneFormat(32, 2, 256).blocks(count) for count in (0, 1, 256, 257)] == [0, 1, 1, 2]


@pytest.mark.parametrize("bad", [(7, 2, 256), (32, 0, 256), (32, 65, 256), (32, 2, 0)])
def test_format_refuses(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError):
        LaneFormat(*bad)


# Exponents


@repeatable
@given(st.lists(any_bits, max_size=30), st.sampled_from([1, 3, 8, 256]))
def test_block_exponents_are_the_largest_exponent_field(bits: list[int], block: int) -> None:
    expected = [max(b >> 23 & 0xFF for b in bits[i : i + block]) for i in range(0, len(bits), block)]
    assert block_exponents(from_bits(bits), block).tolist() == expected


def test_block_exponents_over_many_pieces() -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 32, 3 * PIECE + 300, dtype=np.uint32)
    fields = (bits >> 23 & 0xFF).astype(np.uint8)
    for block in (256, 1000, PIECE + 1):
        expected = [fields[i : i + block].max() for i in range(0, len(bits), block)]
        assert block_exponents(bits.view(np.float32), block).tolist() == expected


# Quantization


@repeatable
@given(formats, st.lists(finite_bits, min_size=1, max_size=12), st.integers(0, 254))
def test_quantize_rounds_the_exact_value_half_to_even(fmt: LaneFormat, bits: list[int], others: int) -> None:
    x = from_bits(bits)
    exponents = np.maximum(block_exponents(x, fmt.block), np.uint8(others))
    expected = []
    for i, value in enumerate(x):
        e = max(int(exponents[i // fmt.block]), 1) - 126
        expected.append(round(Fraction(float(value)) * Fraction(2) ** (fmt.precision - e)) + fmt.bias)
    assert encode(x, exponents, fmt).tolist() == expected


@repeatable
@given(formats, st.lists(any_bits, min_size=1, max_size=12), st.lists(st.integers(0, 255), min_size=12, max_size=12))
def test_lanes_never_carry_whatever_the_input(fmt: LaneFormat, bits: list[int], levels: list[int]) -> None:
    x = from_bits(bits)
    # First as agreed, then with exponents that have nothing to do with the data.
    for exponents in (block_exponents(x, fmt.block), np.array(levels, dtype=np.uint8)):
        u = encode(x, exponents, fmt).astype(object)
        assert min(u) >= 0
        assert max(u) <= fmt.limit
        assert fmt.workers * max(u) < 1 << fmt.lane_bits


@pytest.mark.parametrize("lane_bits", [8, 16, 32])
@pytest.mark.parametrize("workers", range(1, 65))
def test_largest_magnitudes_reach_the_bounds_but_do_not_cross_them(lane_bits: int, workers: int) -> None:
    fmt = LaneFormat(lane_bits, workers)
    largest = np.nextafter(np.float32(2), np.float32(0))
    u = encode(np.array([largest, -largest], dtype=np.float32), np.array([127], dtype=np.uint8), fmt).astype(object)
    assert 0 <= u[1] < u[0] <= fmt.limit
    assert u[0] - fmt.bias == fmt.bias - u[1]
    # No bit of the lane is given away: twice the scale would not fit.
    assert 2 * (u[0] - fmt.bias) > fmt.bias


def test_64_bit_lanes_hold_24_bit_numbers_of_very_different_size() -> None:
    x = np.array([1.0, 2.0**-38, -(2.0**-40), 1e-30], dtype=np.float32)
    fmt = LaneFormat(64, 3)
    exponents = block_exponents(x)
    u = encode(x, exponents, fmt)
    out = np.empty(4, dtype=np.float32)
    dequantize(u * np.uint64(3), exponents, fmt, out, mean=True)
    assert out[:3].tolist() == x[:3].tolist()
    assert out[3] == 0


@pytest.mark.parametrize("lane_bits", [8, 16, 32, 64])
def test_rest_of_the_lanes_is_zero(lane_bits: int) -> None:
    fmt = LaneFormat(lane_bits, 2)
    out = np.empty(10, dtype=fmt.lane_type)
    quantize(np.ones(7, dtype=np.float32), np.array([127], dtype=np.uint8), fmt, out)
    assert out[7:].tolist() == [fmt.bias] * 3
    assert (out[:7] > fmt.bias).all()


@repeatable
@given(formats, st.integers(0, 2**32 - 1), st.integers(0, 254), st.booleans())
def test_dequantize_is_the_exact_scale_of_the_rounded_sum(fmt: LaneFormat, seed: int, level: int, mean: bool) -> None:
    reach = fmt.workers * min(fmt.bias, (1 << fmt.precision) - (1 << max(fmt.precision - 24, 0)))
    total = seed % (2 * reach + 1) - reach
    sums = np.array([total + fmt.workers * fmt.bias], dtype=fmt.lane_type)
    out = np.empty(1, dtype=np.float32)
    dequantize(sums, np.array([level], dtype=np.uint8), fmt, out, mean)
    with np.errstate(over="ignore"):
        expected = np.float32(math.ldexp(float(np.float32(total)), max(level, 1) - 126 - fmt.precision))
        if mean:
            expected = expected / np.float32(fmt.workers)
    assert out[0] == expected


@repeatable
@given(st.lists(finite_bits, min_size=1, max_size=12), st.integers(1, 16))
def test_equal_contributions_come_back_exactly(bits: list[int], workers: int) -> None:
    # All of one magnitude's block: block of one element, so nothing is lost before the sum.
    x, fmt = from_bits(bits), LaneFormat(32, workers, 1)
    exponents = block_exponents(x, 1)
    sums = (encode(x, exponents, fmt).astype(np.uint64) * np.uint64(workers)).astype(np.uint32)
    out = np.empty(len(x), dtype=np.float32)
    dequantize(sums, exponents, fmt, out, mean=False)
    with np.errstate(over="ignore"):
        assert out.tolist() == (x.astype(np.float64) * workers).astype(np.float32).tolist()


def test_zeros_stay_zero() -> None:
    xs = np.zeros((3, 600), dtype=np.float32)
    xs[1] = -0.0
    xs[2, 300] = 1e-45
    out, _, _ = allreduce(xs)
    assert np.flatnonzero(out).tolist() == [300]
    assert out[300] == np.float32(1e-45)


@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan])
def test_a_block_that_is_not_finite_is_nan_everywhere(poison: float) -> None:
    xs = np.random.default_rng(2).standard_normal((3, 1000)).astype(np.float32)
    xs[1, 300] = poison
    fmt = LaneFormat(32, 3)
    exponents = np.maximum.reduce([block_exponents(x) for x in xs])
    with np.errstate(all="raise"):
        for x in xs:
            u = encode(x, exponents, fmt)
            assert (u[256:512] == fmt.bias).all()
        out, _, _ = allreduce(xs)
    assert np.isnan(out[256:512]).all()
    assert np.isfinite(out[:256]).all()
    assert np.isfinite(out[512:]).all()


def test_a_sum_beyond_float32_is_infinite_and_the_mean_taken_afterwards() -> None:
    largest = np.finfo(np.float32).max
    xs = np.array([[largest, -largest, largest, 3.0]] * 3, dtype=np.float32)
    xs[2, 2] = -largest
    with np.errstate(all="raise"):
        total, _, _ = allreduce(xs)
        mean, _, _ = allreduce(xs, mean=True)
    assert total.tolist() == [np.inf, -np.inf, largest, 0.0]
    assert mean.tolist() == [np.inf, -np.inf, largest / np.float32(3), 0.0]


@pytest.mark.parametrize("lane_bits", [16, 32])
def test_ranges_that_start_inside_a_block_equal_the_whole(lane_bits: int) -> None:
    rng = np.random.default_rng(3)
    count = 2 * PIECE + 777
    x = (rng.standard_normal(count) * 10.0 ** rng.integers(-44, 38, count)).astype(np.float32)
    x[5000] = np.nan
    fmt = LaneFormat(lane_bits, 2)
    exponents = block_exponents(x)
    whole = encode(x, exponents, fmt)
    back = np.empty(count, dtype=np.float32)
    dequantize(whole, exponents, fmt, back, mean=True)
    quantizer = Quantizer(fmt, largest=1000)
    for start, stop in ((0, 1), (255, 257), (300, 310), (4900, 9000), (PIECE - 3, count), (count - 9, count), (7, 7)):
        u = np.empty(stop - start, dtype=fmt.lane_type)
        quantizer.quantize(x[start:stop], exponents, u, start)
        assert np.array_equal(u, whole[start:stop])
        part = np.empty(stop - start, dtype=np.float32)
        quantizer.dequantize(whole[start:stop], exponents, part, True, start)
        assert np.array_equal(part, back[start:stop], equal_nan=True)


def test_wrong_arguments_are_refused() -> None:
    fmt = LaneFormat(32, 2)
    x, exponents, out = np.zeros(300, np.float32), np.zeros(2, np.uint8), np.zeros(300, np.uint32)
    calls: list[Callable[[], object]] = [
        lambda: quantize(x.astype(np.float64), exponents, fmt, out),
        lambda: quantize(x.reshape(3, 100), exponents, fmt, out),
        lambda: quantize(np.zeros(600, np.float32)[::2], exponents, fmt, out),
        lambda: quantize(x, exponents[:1], fmt, out),
        lambda: quantize(x, exponents.astype(np.int64), fmt, out),
        lambda: quantize(x, exponents, fmt, out[:299]),
        lambda: quantize(x, exponents, fmt, out.astype(np.int32)),
        lambda: dequantize(out, exponents, fmt, x.astype(np.float16), False),
        lambda: dequantize(out[:299], exponents, fmt, x, False),
        lambda: block_exponents(x.astype(np.float16)),
    ]
    for call in calls:
        with pytest.raises(UsageError):
            call()


# Accuracy. Let T be the exact sum of an element and RN rounding to float32. Each of n workers rounds to a whole number
# of quanta (a quantum is 2^(e-p), 2^e being above every number of the block), the integers are added exactly, and the
# sum is rounded once: the result is RN(T + d) with |d| <= n/2 quanta. Two bounds follow, for every input.
#   1. |RN(T + d) - T| <= half an ulp of the result + n/2 quanta.
#   2. RN(T + d) is the float32 nearest to T + d, so it is no farther from it than RN(T) is; going from T + d to T costs
#      |d| twice. No float32 is nearer to T than RN(T). So the error is at most n quanta above that of *any* method with
#      a float32 result: a ring, too, and be it exact by luck.
# A ring in turn pays up to half an ulp of the partial sum at each of its n-1 additions. Where the numbers of a block
# are of about one size that is more in every block. Where they are not, the small ones lose what is below a quantum,
# and a block can be worse than the ring's by what bound 2 says.

COUNT = 256 * 24
Draw = Callable[[np.random.Generator, int], np.ndarray]
ONE_SCALE: dict[str, Draw] = {
    "normal": lambda rng, n: rng.standard_normal((n, COUNT)),
    "positive": lambda rng, n: rng.uniform(0, 1, (n, COUNT)),
    "scale per block": lambda rng, n: (
        rng.standard_normal((n, COUNT)) * np.repeat(10.0 ** rng.uniform(-37, 36, COUNT // 256), 256)
    ),
}
MANY_SCALES: dict[str, Draw] = {
    "all magnitudes": lambda rng, n: rng.choice([-1, 1], (n, COUNT)) * 10.0 ** rng.uniform(-38, 38, (n, COUNT)) / n,
    "heavy tail": lambda rng, n: rng.laplace(size=(n, COUNT)) ** 3,
    "scale per element": lambda rng, n: rng.standard_normal((n, COUNT)) * 10.0 ** rng.uniform(-3, 3, COUNT),
    "scale per worker": lambda rng, n: rng.standard_normal((n, COUNT)) * 10.0 ** rng.uniform(-3, 3, (n, 1)),
    "sparse": lambda rng, n: rng.standard_normal((n, COUNT)) * (rng.random((n, COUNT)) < 0.05),
}


def exact_sum(xs: np.ndarray) -> np.ndarray:
    return np.array([math.fsum(column) for column in xs.astype(np.float64).T])


@pytest.mark.parametrize("workers", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("kind", [*ONE_SCALE, *MANY_SCALES])
def test_error_against_the_exact_sum_and_against_a_ring(kind: str, workers: int) -> None:
    rng = np.random.default_rng([workers, 20532])
    xs = {**ONE_SCALE, **MANY_SCALES}[kind](rng, workers).astype(np.float32)
    exact = exact_sum(xs)
    out, quanta, _ = allreduce(xs)
    ours, theirs = np.abs(out - exact), np.abs(ring(xs) - exact)
    half_ulp = np.spacing(np.abs(out)).astype(np.float64) / 2
    assert ours.max() > 0
    assert (ours <= half_ulp + workers / 2 * quanta).all()
    assert (ours <= theirs + workers * quanta).all()
    if kind in ONE_SCALE:
        assert (ours.reshape(-1, 256).max(axis=1) <= theirs.reshape(-1, 256).max(axis=1)).all()
    else:
        # No theorem, but what these tensors show: the largest error of the tensor is the ring's or little more.
        assert ours.max() <= 1.1 * theirs.max()


@pytest.mark.parametrize("lane_bits", [8, 16, 32])
@pytest.mark.parametrize("workers", [1, 2, 7, 63])
@pytest.mark.parametrize("kind", [*ONE_SCALE, *MANY_SCALES])
def test_error_of_every_width_and_rounding_is_within_its_bound(kind: str, workers: int, lane_bits: int) -> None:
    xs = {**ONE_SCALE, **MANY_SCALES}[kind](np.random.default_rng([workers, 7]), workers).astype(np.float32)
    exact = exact_sum(xs)
    for seed, most in ((None, 0.5), (0, 1.0), (1, 1.0)):
        out, quanta, _ = allreduce(xs, lane_bits, seed=seed)
        half_ulp = np.spacing(np.abs(out)).astype(np.float64) / 2
        assert (np.abs(out - exact) <= half_ulp + workers * most * quanta).all()


def adversarial(kind: str, workers: int) -> np.ndarray:
    """Arrays that are hard on one scale for a block, or on sums in general."""
    rng = np.random.default_rng([workers, 8])
    xs = rng.standard_normal((workers, COUNT)).astype(np.float32)
    if kind == "one huge element":
        xs[0, ::1000] = np.float32(1e30)
    elif kind == "denormals":
        xs = rng.integers(-(2**18), 2**18, xs.shape).astype(np.float32) * np.float32(2.0**-149)
    else:
        xs[1:] = -xs[0] / (workers - 1) * (1 + 1e-6 * xs[1:])
    return xs


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
@pytest.mark.parametrize("kind", ["one huge element", "denormals", "signs that cancel"])
def test_adversarial_arrays_in_32_bits(kind: str, workers: int) -> None:
    """Every element is within its bound; what is no worse than a ring, and what is: the table of docs/numerics.md."""
    xs = adversarial(kind, workers)
    exact = exact_sum(xs)
    out, quanta, _ = allreduce(xs)
    ours, theirs = np.abs(out - exact), np.abs(ring(xs) - exact)
    assert (ours <= np.spacing(np.abs(out)).astype(np.float64) / 2 + workers / 2 * quanta).all()
    ratio = float(np.sqrt(np.square(ours).sum()) / max(np.sqrt(np.square(theirs).sum()), 1e-300))
    if kind == "denormals":
        assert not ours.any()
        assert not theirs.any()
    elif kind == "signs that cancel" and workers == 2:
        # Of two that cancel the difference is exact in float32: there a ring has no error at all.
        assert not theirs.any()
        assert np.sqrt(np.square(ours).sum()) == pytest.approx(1.9e-8, rel=0.05)
        assert (ours <= quanta).all()
    elif kind == "signs that cancel":
        assert ratio == pytest.approx({4: 0.08, 8: 0.33, 16: 0.96}[workers], rel=0.05)
        assert ours.max() <= theirs.max()
    else:
        # A ring sums the small ones as if the huge one were not there. Here its block has no scale for them: they
        # are lost, which nothing that looks at the vector can see.
        assert ratio == pytest.approx({2: 2.0e7, 4: 1.3e7, 8: 9.6e6, 16: 6.9e6}[workers], rel=0.05)
        huge = np.repeat(np.abs(exact).reshape(-1, 256).max(axis=1) > 1e20, 256)
        assert (out[huge & (np.abs(exact) < 1e20)] == 0).all()
        assert np.linalg.norm(ours) < 1e-28 * np.linalg.norm(exact)
        assert np.linalg.norm(ours[~huge]) <= 1.01 * np.linalg.norm(theirs[~huge])


@pytest.mark.parametrize("workers", [3, 4, 8, 16])
def test_error_of_normal_data_is_well_below_a_ring(workers: int) -> None:
    xs = ONE_SCALE["normal"](np.random.default_rng([workers, 1]), workers).astype(np.float32)
    exact = exact_sum(xs)
    ours, theirs = allreduce(xs)[0] - exact, ring(xs) - exact
    assert np.sqrt((ours**2).mean()) < 0.8 * np.sqrt((theirs**2).mean())


@pytest.mark.parametrize("workers", [1, 2, 5, 16])
def test_integers_are_summed_exactly(workers: int) -> None:
    values = np.random.default_rng(4).integers(-(2**20) + 1, 2**20, (workers, 2000))
    out, _, _ = allreduce(values.astype(np.float32))
    assert np.array_equal(out, values.sum(axis=0))


def test_order_of_workers_does_not_matter() -> None:
    xs = np.random.default_rng(5).standard_normal((5, 3000)).astype(np.float32)
    order = [3, 1, 4, 0, 2]
    # The data is such that float32 does depend on the order.
    assert not np.array_equal(ring(xs), ring(xs[order]))
    assert np.array_equal(allreduce(xs)[0], allreduce(xs[order])[0])
    assert np.array_equal(allreduce(xs, mean=True)[0], allreduce(xs[order], mean=True)[0])
