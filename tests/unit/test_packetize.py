# SPDX-License-Identifier: Apache-2.0
"""Payloads: lane order, linear check, thermometers, and whole buckets through a switch that adds big words."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p4reduce.errors import ConfigError, UsageError
from p4reduce.packetize import (
    GROUPS_PER_WORD,
    BucketCodec,
    check,
    from_thermometers,
    from_wire,
    splitmix64,
    thermometers,
    to_wire,
    weights,
)
from p4reduce.quantize import PIECE, LaneFormat, block_exponents
from p4reduce.wire import PROFILES, Profile

repeatable = settings(derandomize=True, deadline=None, max_examples=100)
W5, W34 = PROFILES["w5"], PROFILES["w34"]
WORD = 256
GARBAGE = 0xA5


def big_words(row: np.ndarray) -> list[int]:
    """The words of a payload as the switch sees them: integers of 2048 bits."""
    return [int.from_bytes(row[i : i + WORD].tobytes(), "big") for i in range(0, len(row), WORD)]


def switch_add(rows: list[np.ndarray], sizes: np.ndarray) -> np.ndarray:
    """Add payload rows of several workers word by word, modulo 2^2048, as far as each frame reaches."""
    out = np.full_like(rows[0], GARBAGE)
    for chunk, size in enumerate(sizes):
        columns = zip(*(big_words(worker[chunk, :size]) for worker in rows), strict=True)
        sums = b"".join((sum(column) % (1 << 2048)).to_bytes(WORD, "big") for column in columns)
        out[chunk, :size] = np.frombuffer(sums, dtype=np.uint8)
    return out


def switch_or(rows: list[np.ndarray], sizes: np.ndarray) -> np.ndarray:
    out: np.ndarray = np.bitwise_or.reduce(rows)
    for chunk, size in enumerate(sizes):
        out[chunk, size:] = GARBAGE
    return out


def data(rng: np.random.Generator, count: int) -> np.ndarray:
    """Numbers of all sizes, blocks of zeros among them."""
    x = rng.standard_normal(count) * 10.0 ** rng.uniform(-6, 6, count)
    x *= np.repeat(rng.choice([0.0, 1e-42, 1.0, 1e30], count // 256 + 1), 256)[:count]
    return x.astype(np.float32)


def direct(xs: list[np.ndarray], fmt: LaneFormat, mean: bool) -> np.ndarray:
    """Sum as the design defines it: scaled and rounded in float64, where both are exact here, added as integers."""
    count = len(xs[0])
    level = np.zeros(fmt.blocks(count) * fmt.block, dtype=np.int64)
    for x in xs:
        level[:count] = np.maximum(level[:count], x.view(np.uint32) >> 23 & 0xFF)
    level = np.repeat(level.reshape(-1, fmt.block).max(axis=1), fmt.block)[:count]
    e = np.maximum(level, 1) - 126
    with np.errstate(all="ignore"):
        integers = [np.rint(np.ldexp(x.astype(np.float64), fmt.precision - e)).astype(np.int64) for x in xs]
        total = np.add.reduce(integers)
        out: np.ndarray = np.ldexp(total.astype(np.float32).astype(np.float64), e - fmt.precision).astype(np.float32)
        out[level == 255] = np.nan
        return (out / np.float32(fmt.workers)).astype(np.float32) if mean else out


def encode_all(codec: BucketCodec, x: np.ndarray, exponents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows = np.full((codec.add_chunks, codec.payload_bytes), GARBAGE, dtype=np.uint8)
    checks = np.zeros(codec.add_chunks, dtype=np.uint64)
    codec.encode(x, exponents, 0, codec.add_chunks, rows, checks)
    return rows, checks


def new_sums(codec: BucketCodec) -> np.ndarray:
    return np.full((codec.add_chunks, codec.groups), 0xDEAD, dtype=np.uint64)


# Weights and check


def test_splitmix64_known_answers() -> None:
    # Published outputs for the seeds 1234567 and 0.
    assert splitmix64(1234567, 3).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert splitmix64(0, 3).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_weights_are_fixed_odd_and_do_not_depend_on_the_profile() -> None:
    full = weights(W34.payload_bytes // 8)
    assert full.tolist() == [value | 1 for value in splitmix64(0x7034726564756365, 1088).tolist()]
    assert len(set(full.tolist())) == 1088
    assert weights(160).tolist() == full[:160].tolist()
    with pytest.raises(ValueError):
        full[0] = 1


@repeatable
@given(st.integers(0, 2**32), st.integers(1, 5), st.sampled_from([32, 160, 1088]))
def test_check_is_the_weighted_sum_and_linear(seed: int, k: int, groups: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 1 << 64, (k, groups), dtype=np.uint64)
    w = weights(groups).tolist()
    expected = [sum(a * b for a, b in zip(w, row, strict=True)) % (1 << 64) for row in rows.tolist()]
    assert check(rows).tolist() == expected
    assert check(rows.sum(axis=0, keepdims=True)).tolist() == [sum(expected) % (1 << 64)]
    out = np.zeros(k, dtype=np.uint64)
    assert check(rows, out=out) is out
    assert out.tolist() == expected


# Lane order


@pytest.mark.parametrize("lane_bits", [8, 16, 32, 64])
def test_lanes_are_numbered_from_the_low_end_of_each_group(lane_bits: int) -> None:
    lanes = np.arange(1, 3 * 64 // lane_bits + 1).astype(f"u{lane_bits // 8}")
    rows = np.zeros((1, 24), dtype=np.uint8)
    to_wire(lanes.view(np.uint64).reshape(1, 3), rows)
    per_group = 64 // lane_bits
    for i, value in enumerate(lanes.tolist()):
        group = int.from_bytes(rows[0, 8 * (i // per_group) :][:8].tobytes(), "big")
        assert group >> lane_bits * (i % per_group) & (1 << lane_bits) - 1 == value
    assert from_wire(rows).view(lanes.dtype)[0].tolist() == lanes.tolist()


def test_first_bytes_of_a_payload_with_32_bit_lanes() -> None:
    rows = np.zeros((1, 8), dtype=np.uint8)
    to_wire(np.array([0x11223344, 0x55667788], dtype=np.uint32).view(np.uint64).reshape(1, 1), rows)
    assert rows.tobytes().hex() == "5566778811223344"


# Thermometers


def test_thermometer_of_every_level() -> None:
    levels = np.arange(256, dtype=np.uint8)
    fields = thermometers(levels)
    for level in range(256):
        assert sum(int(group) << 64 * i for i, group in enumerate(fields[level])) == (1 << level) - 1
    back, valid = from_thermometers(fields)
    assert valid.all()
    assert back.tolist() == levels.tolist()


def test_or_of_thermometers_is_the_maximum() -> None:
    a, b = np.random.default_rng(1).integers(0, 256, (2, 500), dtype=np.uint8)
    back, valid = from_thermometers(thermometers(a) | thermometers(b))
    assert valid.all()
    assert back.tolist() == np.maximum(a, b).tolist()


def test_every_flipped_bit_is_noticed_unless_it_gives_the_next_level() -> None:
    for level in range(256):
        field = thermometers(np.array([level], dtype=np.uint8))
        flipped = np.repeat(field, 256, axis=0)
        for bit in range(256):
            flipped[bit, bit // 64] ^= np.uint64(1 << bit % 64)
        back, valid = from_thermometers(flipped)
        neighbours = {level - 1: level - 1, level: level + 1}
        expected = [bit for bit in neighbours if 0 <= bit < 255]
        assert np.flatnonzero(valid).tolist() == expected
        assert [int(back[bit]) for bit in expected] == [neighbours[bit] for bit in expected]


def test_all_256_bits_are_no_level() -> None:
    _, valid = from_thermometers(np.full((1, 4), 2**64 - 1, dtype=np.uint64))
    assert not valid.any()


# Chunks


@pytest.mark.parametrize(
    ("profile", "count", "add", "or_"),
    [
        (W34, 0, [], [256]),
        (W34, 1, [256], [256]),
        (W34, 64, [256], [256]),
        (W34, 65, [8704], [256]),
        (W34, 2176, [8704], [8704]),
        (W34, 8 * 256, [8704], [256]),
        (W34, 2176 + 64, [8704, 256], [8704]),
        (W34, 2176 + 65, [8704, 8704], [8704]),
        (W34, 272 * 256 + 1, [8704] * 32 + [256], [8704, 256]),
        (W5, 320, [1280], [256]),
        (W5, 321, [1280, 256], [256]),
        (W5, 40 * 256 + 8 * 256, [1280] * 39, [1280, 256]),
        (Profile("w1", 1), 65, [256, 256], [256]),
    ],
)
def test_sizes_of_chunks(profile: Profile, count: int, add: list[int], or_: list[int]) -> None:
    codec = BucketCodec(profile, LaneFormat(32, 2), count)
    assert (codec.add_sizes().tolist(), codec.or_sizes().tolist()) == (add, or_)
    assert (codec.add_chunks, codec.or_chunks) == (len(add), len(or_))


def test_a_bucket_that_a_tag_cannot_number_is_refused() -> None:
    limit = (1 << 24) * W5.lanes(32)
    with pytest.raises(UsageError, match="16777217 frames"):
        BucketCodec(W5, LaneFormat(32, 2), limit + 1)
    with pytest.raises(UsageError):
        BucketCodec(W5, LaneFormat(32, 2), -1)


def test_a_big_endian_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.byteorder", "big")
    with pytest.raises(ConfigError, match="little-endian"):
        BucketCodec(W5, LaneFormat(32, 2), 1)


# Whole buckets


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 3, 64])
@pytest.mark.parametrize("extra", ["0", "1", "lanes - 1", "lanes", "lanes + 1", "3 * lanes + 5", "3 * lanes + 70"])
@pytest.mark.parametrize(("profile", "lane_bits"), [(W5, 32), (W34, 32), (W5, 8), (W5, 16), (W5, 64)])
def test_bucket_through_a_switch(profile: Profile, lane_bits: int, extra: str, workers: int, mean: bool) -> None:
    count = int(eval(extra, {"lanes": profile.lanes(lane_bits)}))
    rng = np.random.default_rng([count, workers])
    fmt = LaneFormat(lane_bits, workers)
    codecs = [BucketCodec(profile, fmt, count) for _ in range(workers)]
    xs = [data(rng, count) for _ in range(workers)]
    if count > 600:
        xs[workers - 1][300] = np.nan

    contributed = [codec.encode_exponents(block_exponents(x)) for codec, x in zip(codecs, xs, strict=True)]
    or_rows = switch_or(contributed, codecs[0].or_sizes())
    exponents = codecs[0].decode_exponents(or_rows)
    assert exponents.tolist() == [max(column) for column in zip(*(block_exponents(x) for x in xs), strict=True)]

    sent = [encode_all(codec, x, exponents) for codec, x in zip(codecs, xs, strict=True)]
    codec = codecs[-1]
    result = switch_add([rows for rows, _ in sent], codec.add_sizes())
    checks = np.add.reduce([checks for _, checks in sent]).astype(">u8")
    sums, out = new_sums(codec), np.full(count, 7, dtype=np.float32)
    assert codec.verify_and_store(result, checks, np.arange(codec.add_chunks), sums).all()
    codec.decode(sums, exponents, out, mean)
    expected = direct(xs, fmt, mean)
    assert np.isnan(expected).any() == (count > 600)
    assert np.array_equal(out.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("count", [100, 5 * 2176 + 3])
def test_lanes_behind_the_data_are_zero(count: int) -> None:
    fmt = LaneFormat(32, 3)
    codec = BucketCodec(W34, fmt, count)
    x = np.ones(count, dtype=np.float32)
    rows, _ = encode_all(codec, x, block_exponents(x))
    lanes = from_wire(rows).reshape(-1).view(np.uint32)
    used = int(codec.add_sizes().sum()) // 4
    assert (lanes[:count] > fmt.bias).all()
    assert (lanes[count:used] == fmt.bias).all()
    assert used > count


def test_encoding_in_segments_equals_encoding_at_once() -> None:
    count = 2 * PIECE + 3 * 2176 + 40
    fmt = LaneFormat(32, 2)
    x = data(np.random.default_rng(2), count)
    exponents = block_exponents(x)
    codec = BucketCodec(W34, fmt, count)
    rows, checks = encode_all(codec, x, exponents)
    for cuts in ([0, 1, 2, 40, codec.add_chunks], [0, 33, 34, codec.add_chunks - 1, codec.add_chunks]):
        parts, part_checks = np.zeros_like(rows), np.zeros_like(checks)
        for first, last in pairwise(cuts):
            before = parts.copy()
            codec.encode(x, exponents, first, last, parts, part_checks)
            # Other chunks may be in flight.
            assert np.array_equal(np.delete(parts, slice(first, last), 0), np.delete(before, slice(first, last), 0))
        used = int(codec.add_sizes().sum())
        assert parts.reshape(-1)[:used].tobytes() == rows.reshape(-1)[:used].tobytes()
        assert part_checks.tolist() == checks.tolist()


def test_decoding_in_segments_equals_decoding_at_once() -> None:
    count = PIECE + 5 * 2176 + 40
    codec = BucketCodec(W34, LaneFormat(32, 1), count)
    x = data(np.random.default_rng(3), count)
    exponents = block_exponents(x)
    rows, checks = encode_all(codec, x, exponents)
    sums = new_sums(codec)
    assert codec.verify_and_store(rows, checks, np.arange(codec.add_chunks), sums).all()
    whole = np.empty(count, dtype=np.float32)
    codec.decode(sums, exponents, whole, False)
    out = np.full(count, np.nan, dtype=np.float32)
    for first, last in ((0, 1), (1, 34), (34, 34), (34, codec.add_chunks)):
        codec.decode(sums, exponents, out, False, first, last)
        end = min(last * 2176, count)
        assert np.array_equal(out[:end], whole[:end])
        assert np.isnan(out[end:]).all()


def test_results_may_come_in_any_order_repeated_and_in_large_batches() -> None:
    count = 40 * 320 + 5
    codec = BucketCodec(W5, LaneFormat(32, 1), count)
    x = data(np.random.default_rng(4), count)
    rows, checks = encode_all(codec, x, block_exponents(x))
    order = np.random.default_rng(5).permutation(np.repeat(np.arange(codec.add_chunks), 12))
    assert len(order) > PIECE // 320
    sums = new_sums(codec)
    payload = rows[order]
    payload[order == codec.add_chunks - 1, WORD:] = GARBAGE
    assert codec.verify_and_store(payload, checks[order], order, sums).all()
    used = int(codec.add_sizes().sum()) // 8
    assert np.array_equal(sums.reshape(-1)[:used], from_wire(rows).reshape(-1)[:used])


def test_unsound_rows_are_reported_and_not_stored() -> None:
    count = 8 * 320 + 5
    codec = BucketCodec(W5, LaneFormat(32, 1), count)
    x = data(np.random.default_rng(6), count)
    rows, checks = encode_all(codec, x, block_exponents(x))
    good = from_wire(rows)
    bad_rows, bad_checks = rows.copy(), checks.copy()
    bad_rows[2, 700] ^= 1
    bad_rows[8, 255] ^= 0x80
    bad_checks[5] += np.uint64(1)
    sums = new_sums(codec)
    sound = codec.verify_and_store(bad_rows, bad_checks, np.arange(9), sums)
    assert np.flatnonzero(~sound).tolist() == [2, 5, 8]
    assert (sums[[2, 5, 8]] == 0xDEAD).all()
    assert np.array_equal(sums[[0, 1, 3, 4, 6, 7]], good[[0, 1, 3, 4, 6, 7]])


def test_every_damaged_byte_of_a_short_result_is_noticed() -> None:
    fmt, workers = LaneFormat(32, 3), 3
    codec = BucketCodec(W5, fmt, 50)
    xs = [data(np.random.default_rng(seed), 50) + np.float32(1) for seed in range(workers)]
    exponents = np.maximum.reduce([block_exponents(x) for x in xs])
    sent = [encode_all(codec, x, exponents) for x in xs]
    result = switch_add([rows for rows, _ in sent], codec.add_sizes())
    checks = np.add.reduce([checks for _, checks in sent])
    chunk = np.zeros(256, dtype=np.int64)
    sums = new_sums(codec)
    assert codec.verify_and_store(result, checks, chunk[:1], sums).all()
    sums[:] = 0xDEAD
    for mask in (0x01, 0x10, 0x80, 0x5A, 0xFF):
        damaged = np.repeat(result, 256, axis=0)
        damaged[np.arange(256), np.arange(256)] ^= mask
        assert not codec.verify_and_store(damaged, np.repeat(checks, 256), chunk, sums).any()
        flipped = checks ^ (np.uint64(mask) << np.arange(0, 64, 8, dtype=np.uint64))
        assert not codec.verify_and_store(np.repeat(result, 8, axis=0), flipped, chunk[:8], sums).any()
    assert (sums == 0xDEAD).all()


@pytest.mark.parametrize("kept", [[0, 1], [0, 2], [0, 0, 1]])
def test_a_sum_whose_check_covers_other_contributions_is_noticed(kept: list[int]) -> None:
    codec = BucketCodec(W5, LaneFormat(32, 3), 1000)
    xs = list(np.random.default_rng(10).standard_normal((3, 1000)).astype(np.float32))
    exponents = np.maximum.reduce([block_exponents(x) for x in xs])
    sent = [encode_all(codec, x, exponents) for x in xs]
    payload = switch_add([sent[rank][0] for rank in kept], codec.add_sizes())
    checks = np.add.reduce([checks for _, checks in sent])
    assert not codec.verify_and_store(payload, checks, np.arange(codec.add_chunks), new_sums(codec)).any()


# Damaged exponents


def exponent_rows(count: int = 50 * 256) -> tuple[BucketCodec, np.ndarray, np.ndarray]:
    codec = BucketCodec(W5, LaneFormat(32, 2), count)
    local = np.random.default_rng(7).integers(1, 255, codec.blocks, dtype=np.uint8)
    return codec, local, codec.encode_exponents(local)


def test_exponents_come_back_and_the_rest_of_a_row_is_not_read() -> None:
    codec, local, rows = exponent_rows(43 * 256)
    assert codec.or_sizes().tolist() == [1280, 256]
    rows[1, 256:] = GARBAGE
    assert codec.decode_exponents(rows, local).tolist() == local.tolist()


def test_a_field_that_is_no_thermometer_is_an_error() -> None:
    codec, _, rows = exponent_rows()
    rows[1, 32 * 4] ^= 0x80
    with pytest.raises(ValueError, match="block 44 is damaged"):
        codec.decode_exponents(rows)


def test_an_exponent_behind_the_last_block_is_an_error() -> None:
    codec, _, rows = exponent_rows()
    rows[1, 32 * 10 + 7] = 1
    with pytest.raises(ValueError, match="does not exist"):
        codec.decode_exponents(rows)


def test_an_exponent_below_this_workers_own_is_an_error() -> None:
    codec, local, rows = exponent_rows()
    higher = local.copy()
    higher[17] += 1
    assert codec.decode_exponents(rows).tolist() == local.tolist()
    with pytest.raises(ValueError, match="block 17 is damaged"):
        codec.decode_exponents(rows, higher)


def test_wrong_arguments_are_refused() -> None:
    codec = BucketCodec(W5, LaneFormat(32, 2), 1000)
    x, exponents = np.zeros(1000, np.float32), np.zeros(4, np.uint8)
    rows, checks, sums = np.zeros((4, 1280), np.uint8), np.zeros(4, np.uint64), np.zeros((4, 160), np.uint64)
    calls: list[Callable[[], object]] = [
        lambda: codec.encode_exponents(exponents[:3]),
        lambda: codec.encode(x[:999], exponents, 0, 4, rows, checks),
        lambda: codec.encode(x, exponents.astype(np.int64), 0, 4, rows, checks),
        lambda: codec.encode(x, exponents, 0, 5, rows, checks),
        lambda: codec.encode(x, exponents, 2, 1, rows, checks),
        lambda: codec.encode(x, exponents, 0, 4, rows[:, :1279], checks),
        lambda: codec.encode(x.astype(np.float64), exponents, 0, 4, rows, checks),
        lambda: codec.verify_and_store(rows[:3], checks, np.arange(4), sums),
        lambda: codec.decode(sums[:3], exponents, x, False),
        lambda: codec.decode(sums, exponents, x[:999], False),
        lambda: codec.decode(sums, exponents[:3], x, False),
    ]
    for call in calls:
        with pytest.raises(UsageError):
            call()
    assert GROUPS_PER_WORD == 32
