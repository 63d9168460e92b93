# SPDX-License-Identifier: Apache-2.0
"""int32 in 64-bit lanes: exact for every number of workers, and what does not fit is found, not wrapped."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from p4reduce import constants, integers
from p4reduce.errors import UsageError
from p4reduce.integers import IntegerCodec, from_lanes, integer_format, to_lanes
from p4reduce.wire import PROFILES, Profile

Int32 = npt.NDArray[np.int32]
W5, W34 = PROFILES["w5"], PROFILES["w34"]
LOW, HIGH = -(2**31), 2**31 - 1


def through_a_switch(vectors: list[Int32], profile: Profile) -> tuple[Int32, UsageError | None]:
    """Encode all, add whole words as the switch does, verify, decode."""
    count = len(vectors[0])
    codec = IntegerCodec(profile, len(vectors), count)
    rows = np.zeros((codec.add_chunks, codec.payload_bytes), dtype=np.uint8)
    checks = np.zeros(codec.add_chunks, dtype=np.uint64)
    words = [0] * codec.add_chunks
    total = np.zeros_like(checks)
    for x in vectors:
        codec.encode(x, 0, codec.add_chunks, rows, checks)
        total += checks
        sizes = codec.add_sizes().tolist()
        words = [
            word + int.from_bytes(row[:size].tobytes(), "big")
            for word, row, size in zip(words, rows, sizes, strict=True)
        ]
    result = np.full_like(rows, 0xAA)
    for row, word, size in zip(result, words, sizes, strict=True):
        assert word < 1 << 8 * size, "the sum of all lanes carries out of the frame"
        row[:size] = np.frombuffer(word.to_bytes(size, "big"), dtype=np.uint8)
    sums = np.zeros((codec.add_chunks, codec.groups), dtype=np.uint64)
    assert codec.verify_and_store(result, total, np.arange(codec.add_chunks), sums).all()
    out = np.full(count, 77, dtype=np.int32)
    return out, codec.decode(sums, out)


@pytest.mark.parametrize("workers", range(1, constants.MAX_WORKERS + 1))
def test_sums_are_exact_for_every_number_of_workers(workers: int) -> None:
    rng = np.random.default_rng(workers)
    vectors = [rng.integers(-(2**31 // workers), HIGH // workers, 700).astype(np.int32) for _ in range(workers)]
    for rank, x in enumerate(vectors):
        # The extremes themselves, and what adds up to them.
        x[:4] = (LOW, HIGH, 0, -1) if rank == 0 else (0, 0, 0, 0)
        x[4], x[5] = -(2**31 // workers), HIGH // workers
    if workers > 1:
        vectors[1][0], vectors[1][1] = HIGH, LOW
    out, error = through_a_switch(vectors, W5 if workers % 2 else W34)
    assert error is None
    assert out.tolist() == np.sum(vectors, axis=0, dtype=np.int64).tolist()


@pytest.mark.parametrize("workers", [2, 3, 64])
@pytest.mark.parametrize(("value", "sign"), [(HIGH, 1), (LOW, -1)])
def test_a_sum_that_does_not_fit_is_an_error_and_writes_nothing(workers: int, value: int, sign: int) -> None:
    vectors = [np.arange(500, dtype=np.int32) for _ in range(workers)]
    for x in vectors:
        x[321] = x[400] = value
    out, error = through_a_switch(vectors, W5)
    assert isinstance(error, UsageError)
    assert f"element 321 over all ranks is {workers * value}" in str(error)
    assert (out == 77).all()
    # One more or less than fits.
    for x in vectors:
        x[321] = x[400] = 0
    vectors[0][321], vectors[1][321] = value, 0
    assert through_a_switch(vectors, W5)[1] is None
    vectors[1][321] = sign
    out, error = through_a_switch(vectors, W5)
    assert str(value + sign) in str(error)
    assert (out == 77).all()


@pytest.mark.parametrize("count", [0, 1, 32, 33, 160, 161, 5000])
def test_all_sizes(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integers, "PIECE", 100)
    codec = IntegerCodec(W5, 2, count)
    assert (codec.or_chunks, codec.blocks, codec.add_chunks) == (1, 0, -(-count // 160))
    if count:
        vectors = [np.arange(count, dtype=np.int32) * (rank + 1) for rank in range(2)]
        out, error = through_a_switch(vectors, W5)
        assert error is None
        assert out.tolist() == [3 * i for i in range(count)]


def test_what_follows_the_elements_is_zero() -> None:
    fmt = integer_format(3)
    lanes = np.zeros(10, dtype=np.uint64)
    to_lanes(np.array([LOW, 0, HIGH], dtype=np.int32), fmt, lanes)
    assert [int(u) - fmt.bias for u in lanes] == [LOW, 0, HIGH, *[0] * 7]
    out = np.empty(3, dtype=np.int32)
    assert from_lanes(np.array([3 * fmt.bias + v for v in (LOW, 0, HIGH)], dtype=np.uint64), fmt, out) is None
    assert out.tolist() == [LOW, 0, HIGH]


def test_wrong_arrays_are_refused() -> None:
    codec = IntegerCodec(W5, 2, 100)
    rows, checks = np.zeros((1, 1280), np.uint8), np.zeros(1, np.uint64)
    wrong: list[Any] = [np.zeros(100, np.int64), np.zeros(99, np.int32), np.zeros((100, 1), np.int32)]
    for x in wrong:
        with pytest.raises(UsageError):
            codec.encode(x, 0, 1, rows, checks)
    with pytest.raises(UsageError):
        codec.decode(np.zeros((1, 159), np.uint64), np.zeros(100, np.int32))
    with pytest.raises(UsageError):
        codec.decode(np.zeros((1, 160), np.uint64), np.zeros(99, np.int32))
