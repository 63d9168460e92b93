# SPDX-License-Identifier: Apache-2.0
"""A kept bucket: its own exponents, its integers from wherever they still are, and what it makes of the ring's sum."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from p4reduce import wire
from p4reduce.core import part as part_module
from p4reduce.core.bucket import Barrier, Bucket, IntegerReduction, Reduction
from p4reduce.core.digest import bucket_digest
from p4reduce.core.kept import Kept
from p4reduce.core.states import Phase
from p4reduce.errors import IntegrityError, UsageError
from p4reduce.packetize import BucketCodec
from p4reduce.quantize import Exponents, LaneFormat, block_exponents, dequantize, quantize
from p4reduce.sim.byhand import ByHand, direct, field
from p4reduce.sim.runner import Scenario
from p4reduce.wire import PROFILES, Op

Lanes = npt.NDArray[Any]
FMT = LaneFormat(32, 2)
LANES = 320


def vector(count: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Every block has another exponent."""
    scale = np.ldexp(np.float32(1), np.arange(count) // 256 % 7)
    x: npt.NDArray[np.float32] = np.random.default_rng(seed).standard_normal(count, dtype=np.float32) * scale
    return x


def reduction(count: int, seed: int = 0, *, inplace: bool = False, mean: bool = False) -> Reduction:
    data = vector(count, seed)
    return Reduction(data, data if inplace else np.full_like(data, 7.0), mean)


def integers(x: npt.NDArray[np.float32], agreed: Exponents, fmt: LaneFormat = FMT) -> Lanes:
    lanes = np.empty(len(x), dtype=fmt.lane_type)
    quantize(x, agreed, fmt, lanes)
    return lanes


def agree(*vectors: npt.NDArray[np.float32]) -> Exponents:
    largest: Exponents = np.max([block_exponents(x) for x in vectors], axis=0)
    return largest


class Pair:
    """Two ranks, a bucket of `count` elements each, and how far rank 0 gets with it."""

    def __init__(self, count: int, *, inplace: bool = False, results: int = 0) -> None:
        """`results`: how many ADD results rank 0 is given."""
        self.hand = ByHand(Scenario(2, or_slots=2, add_slots=4))
        self.buckets = [reduction(count, rank, inplace=inplace) for rank in range(2)]
        self.data = [bucket.data.copy() for bucket in self.buckets]
        self.agreed = agree(*self.data)
        self.hand.submit(*self.buckets)
        left = results
        while frames := [(rank, frame) for rank in range(2) for frame in self.hand.sent(rank)]:
            for rank, frame in frames:
                for to, answer in self.hand.to_switch(rank, frame):
                    if to == 0 and field(answer, "op") == Op.ADD:
                        if not left:
                            continue
                        left -= 1
                    self.hand.to_worker(to, answer)
        assert not left
        (self.kept,) = self.hand.cores[0].handover()

    def sums(self) -> Lanes:
        total: Lanes = integers(self.data[0], self.agreed) + integers(self.data[1], self.agreed)
        return total

    def right(self) -> bytes:
        return direct(self.data).tobytes()


# Fresh --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 70000])
@pytest.mark.parametrize("mean", [False, True])
def test_a_fresh_bucket_is_quantized_from_its_data(count: int, mean: bool) -> None:
    buckets = [reduction(count, rank, mean=mean) for rank in range(2)]
    ranks = [Kept.fresh(bucket, 12, FMT) for bucket in buckets]
    agreed = np.max([kept.exponents() for kept in ranks], axis=0)
    assert np.array_equal(agreed, agree(*[bucket.data for bucket in buckets]))
    sums = ranks[0].integers(agreed) + ranks[1].integers(agreed)
    for kept in ranks:
        assert (kept.number, kept.bucket.number, kept.count, kept.delivered) == (12, 12, count, False)
        kept.finish(sums, agreed)
        kept.release()
        assert kept.bucket.phase is Phase.COMPLETED
    expected = direct([bucket.data for bucket in buckets], mean=mean).tobytes()
    assert [bucket.out.tobytes() for bucket in buckets] == [expected] * 2


@pytest.mark.parametrize("lane_bits", [8, 16, 32, 64])
def test_all_lane_widths(lane_bits: int) -> None:
    fmt = LaneFormat(lane_bits, 3, 16)
    data = vector(100)
    kept = Kept.fresh(Reduction(data, np.empty_like(data)), 0, fmt)
    own = kept.exponents()
    assert np.array_equal(own, block_exponents(data, 16))
    lanes = kept.integers(own)
    assert lanes.dtype == fmt.lane_type
    assert np.array_equal(lanes, integers(data, own, fmt))
    sums = 3 * lanes
    assert sums.dtype == fmt.lane_type
    kept.finish(sums, own)
    assert isinstance(kept.bucket, Reduction)
    expected = np.empty_like(data)
    dequantize(sums, own, fmt, expected, False)
    assert kept.bucket.out.tobytes() == expected.tobytes()


def test_a_barrier_has_nothing() -> None:
    kept = Kept.fresh(Barrier(), 3, FMT)
    assert kept.exponents().shape == (0,)
    assert kept.integers(kept.exponents()).dtype == np.uint32
    kept.finish(np.empty(0, np.uint32), kept.exponents())
    assert kept.bucket.phase is Phase.COMPLETED


def test_what_is_not_finite_comes_back_as_nan() -> None:
    bucket = reduction(300)
    bucket.data[3] = np.inf
    kept = Kept.fresh(bucket, 0, FMT)
    own = kept.exponents()
    assert list(own) == [255, own[1]]
    kept.finish(2 * kept.integers(own), own)
    assert np.isnan(bucket.out[:256]).all()
    assert np.array_equal(bucket.out[256:], 2 * bucket.data[256:])


def test_only_new_buckets_are_fresh() -> None:
    pair = Pair(10)
    with pytest.raises(UsageError, match="submitted before"):
        Kept.fresh(pair.buckets[0], 5, FMT)
    with pytest.raises(UsageError, match="not a str"):
        Kept.fresh("bucket", 5, FMT)  # type: ignore[arg-type]


# Out of a core --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("results", range(6))
def test_integers_are_the_same_wherever_the_epoch_ended(
    results: int, inplace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five chunks, the last one short; pieces of two. Results written over the data do not matter."""
    monkeypatch.setattr(part_module, "ENCODE_ELEMENTS", 2 * LANES)
    pair = Pair(4 * LANES + 50, inplace=inplace, results=results)
    kept = pair.kept
    changed = not np.array_equal(pair.buckets[0].data, pair.data[0])
    assert changed == (inplace and results >= 2), "pieces that are whole have been written"
    assert kept.delivered == (results == 5)
    own = kept.exponents()
    assert np.array_equal(own, block_exponents(pair.data[0]))
    own[:] = 0
    assert kept.exponents().any(), "the caller's copy is the caller's"
    if kept.delivered:
        assert pair.buckets[0].out.tobytes() == pair.right()
        pair.buckets[0].out[:] = pair.buckets[0].data[:] = np.nan
    for _ in range(2):
        lanes = kept.integers(pair.agreed)
        assert np.array_equal(lanes, integers(pair.data[0], pair.agreed))
        lanes[:] = 0
    kept.finish(pair.sums(), pair.agreed)
    if kept.delivered:
        assert np.isnan(pair.buckets[0].out).all(), "nothing is written twice"
    else:
        assert pair.buckets[0].out.tobytes() == pair.right()
    assert pair.buckets[0].phase is Phase.COMPLETED


@pytest.mark.parametrize("step", ["queued", "agreeing", "agreed"])
def test_buckets_that_have_not_come_to_their_sums(step: str) -> None:
    hand = ByHand(Scenario(1, or_slots=1, add_slots=1))
    hand.submit(reduction(3 * LANES, 5))
    if step != "queued":
        frames = hand.sent(0)
    bucket = reduction(700, 1, inplace=True)
    hand.submit(bucket)
    if step != "queued":
        for _, answer in hand.to_switch(0, frames[0]):
            hand.to_worker(0, answer)
        ors = [frame for frame in hand.sent(0) if field(frame, "op") == Op.OR]
        for frame in ors if step == "agreed" else []:
            for _, answer in hand.to_switch(0, frame):
                hand.to_worker(0, answer)
    assert bucket.phase.name == step.upper()
    kept = hand.cores[0].handover()[1]
    assert kept.bucket is bucket
    agreed = np.maximum(kept.exponents(), 129)
    assert np.array_equal(kept.exponents(), block_exponents(bucket.data))
    assert np.array_equal(kept.integers(agreed), integers(bucket.data, agreed, LaneFormat(32, 1)))


def test_other_exponents_are_used_while_the_data_are_there() -> None:
    for inplace, results in ((False, 0), (False, 3), (True, 0), (True, 4)):
        pair = Pair(5 * LANES, inplace=inplace, results=results)
        assert not pair.hand.cores[0].completed
        coarse = pair.agreed + np.uint8(1)
        lanes = pair.kept.integers(coarse)
        assert np.array_equal(lanes, integers(pair.data[0], coarse))
        sums = lanes + integers(pair.data[1], coarse)
        pair.kept.finish(sums, coarse)
        assert pair.buckets[0].out.tobytes() == direct(pair.data, exponents=coarse).tobytes()


def test_other_exponents_are_refused_once_the_data_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_module, "ENCODE_ELEMENTS", 2 * LANES)
    for inplace, results in ((True, 2), (True, 5), (False, 5)):
        pair = Pair(5 * LANES, inplace=inplace, results=results)
        coarse = pair.agreed.copy()
        coarse[-1] += 1
        with pytest.raises(IntegrityError, match="other exponents") as caught:
            pair.kept.integers(coarse)
        assert caught.value.bucket == 0
        assert len(pair.kept.integers(pair.agreed)) == 5 * LANES


def test_a_delivered_sum_with_other_exponents_is_an_integrity_error() -> None:
    pair = Pair(LANES, results=1)
    with pytest.raises(IntegrityError, match="other exponents"):
        pair.kept.finish(pair.sums(), pair.agreed + np.uint8(1))


@pytest.mark.parametrize("results", [1, 2, 5])
def test_every_result_of_the_switch_is_compared(results: int) -> None:
    """One element of each chunk differs in turn: found in those of which the switch has sent the sum."""
    found = []
    for chunk in range(5):
        pair = Pair(4 * LANES + 50, results=results)
        before = pair.buckets[0].out.copy()
        sums = pair.sums()
        sums[chunk * LANES + 49] += 1
        try:
            pair.kept.finish(sums, pair.agreed)
        except IntegrityError:
            found.append(chunk)
            if not np.array_equal(pair.buckets[0].out, before):
                pytest.fail("something was written")
    assert found == list(range(results))


def test_after_release_there_is_nothing() -> None:
    pair = Pair(2 * LANES, results=1)
    memory = pair.kept._part
    assert memory is not None
    assert memory.memory_bytes > 0
    pair.kept.release()
    pair.kept.release()
    assert memory.memory_bytes == 0
    assert pair.buckets[0].phase is Phase.ABANDONED
    for call in (
        pair.kept.exponents,
        lambda: pair.kept.integers(pair.agreed),
        lambda: pair.kept.finish(pair.sums(), pair.agreed),
    ):
        with pytest.raises(UsageError, match="released"):
            call()


def test_wrong_shapes_are_the_callers_fault() -> None:
    kept = Kept.fresh(reduction(300), 0, FMT)
    own = kept.exponents()
    lanes = kept.integers(own)
    exponents: list[Any] = [own[:1], own.astype(np.int64)]
    for wrong in exponents:
        with pytest.raises(UsageError, match="2 uint8 block exponents"):
            kept.integers(wrong)
        with pytest.raises(UsageError, match="2 uint8 block exponents"):
            kept.finish(lanes, wrong)
    wrong_sums: list[Any] = [lanes[:-1], lanes.astype(np.int64)]
    for sums in wrong_sums:
        with pytest.raises(UsageError, match="300 uint32 sums"):
            kept.finish(sums, own)
    assert kept.bucket.phase is Phase.HANDED_OVER


# What it rests on -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane_bits", [8, 16, 32, 64])
def test_packing_can_be_undone(lane_bits: int) -> None:
    fmt = LaneFormat(lane_bits, 2)
    for count in (1, 31, 1279, 1280, 3000):
        codec = BucketCodec(PROFILES["w5"], fmt, count)
        data = vector(count)
        agreed = block_exponents(data)
        rows = np.full((codec.add_chunks, codec.payload_bytes), 0xAA, dtype=np.uint8)
        checks = np.empty(codec.add_chunks, dtype=np.uint64)
        for encoded in range(codec.add_chunks + 1):
            codec.encode(data, agreed, 0, encoded, rows, checks)
            lanes = np.full(count, 99, dtype=fmt.lane_type)
            done = codec.native_lanes(rows, encoded, lanes)
            assert done == min(encoded * codec.lanes, count)
            assert np.array_equal(lanes[:done], integers(data, agreed, fmt)[:done])
            assert (lanes[done:] == 99).all()
        with pytest.raises(UsageError, match="lanes needed"):
            codec.native_lanes(rows, 1, np.empty(count + 1, dtype=fmt.lane_type))


def test_the_digest_tells_what_is_reduced() -> None:
    assert bucket_digest(Barrier(), FMT) == wire.digest("barrier")
    bucket = reduction(100)
    assert bucket_digest(bucket, FMT) == wire.digest("exponents", 100, "float32", 32, 256, "sum")
    data, numbers = vector(100), np.zeros(100, dtype=np.int32)
    others: list[tuple[Bucket, LaneFormat]] = [
        (bucket, LaneFormat(16, 2, 256)),
        (bucket, LaneFormat(32, 2, 64)),
        (reduction(101), FMT),
        (reduction(100, mean=True), FMT),
        (Barrier(), FMT),
        (Reduction(data, data, lane_bits=8), FMT),
        (Reduction(data, data, block=128), FMT),
        (Reduction(data, data, rounding="stochastic"), FMT),
        (Reduction(data, data, rounding="stochastic", seed=1), FMT),
        (Reduction(data, data, rounding="stochastic", seed=1 << 63), FMT),
        (Reduction(data, data, dtype="float16"), FMT),
        (IntegerReduction(numbers, numbers), FMT),
        (IntegerReduction(numbers[1:], numbers[1:]), FMT),
    ]
    digests = {bucket_digest(*other) for other in others} | {bucket_digest(bucket, FMT)}
    assert len(digests) == len(others) + 1
    # What makes no difference to the sum makes none here: the same, said otherwise; a seed that is not used.
    for same in (
        Reduction(data, data, lane_bits=32, block=256),
        Reduction(data, data, seed=5, residual=np.zeros_like(data)),
    ):
        assert bucket_digest(same, FMT) == bucket_digest(bucket, FMT)
    assert bucket_digest(Reduction(data, data, lane_bits=16), FMT) == bucket_digest(bucket, LaneFormat(16, 2, 512))


def test_describes_itself() -> None:
    assert repr(Kept.fresh(Barrier(), 4, FMT)) == "<Kept bucket 4 (barrier): HANDED_OVER>"
    assert "delivered" in repr(Pair(10, results=1).kept)
