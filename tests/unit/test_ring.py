# SPDX-License-Identifier: Apache-2.0
"""The runner of the ring path on rings between threads of this process, and that it gives the switch's bits."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers.mixed_buckets import KINDS, Expected
from helpers.mixed_buckets import make as mixed
from helpers.ring_cases import CASES, LIMIT, Rank, Vector, by_switch, data, reductions, same_bits, together

from p4reduce.core.bucket import Barrier, Bucket, IntegerReduction, Reduction
from p4reduce.core.kept import Kept
from p4reduce.core.states import Phase
from p4reduce.errors import ConfigError, IntegrityError, MismatchError, RingError, UsageError
from p4reduce.quantize import LaneFormat, block_exponents, dequantize, quantize
from p4reduce.ring import RingRunner, local_rings, runner


def vector(size: int, value: float = 1.0) -> Vector:
    return np.full(size, value, dtype=np.float32)


def reduction(size: int, value: float = 1.0, mean: bool = False) -> Reduction:
    return Reduction(vector(size, value), vector(size, 0.0), mean)


@pytest.fixture
def make() -> Iterator[Callable[..., list[Rank]]]:
    """Ranks on local rings, not started. All must end at the test's end."""
    made: list[Rank] = []

    def make(size: int, fmt: LaneFormat | None = None, deadline: float = LIMIT) -> list[Rank]:
        ranks = [Rank(ring, fmt) for ring in local_rings(size, deadline)]
        made.extend(ranks)
        return ranks

    yield make
    for rank in made:
        rank.ring.close()
        assert rank.runner.stop(LIMIT)
        assert len(rank.errors) <= 1


# -- the runner: bits --


@pytest.mark.parametrize("world", [2, 4])
def test_the_ring_gives_the_bits_of_the_switch(make: Callable[..., list[Rank]], world: int) -> None:
    expected = by_switch(world)
    assert any(np.isnan(one).any() for one in expected)
    assert any(np.isinf(one).any() for one in expected)
    ranks = make(world)
    for rank in ranks:
        rank.put(reductions(rank.ring.rank)).start()
    for rank in ranks:
        done = rank.wait(len(CASES))
        for case, want, kept in zip(CASES, expected, done, strict=True):
            assert isinstance(kept.bucket, Reduction)
            assert same_bits(kept.bucket.out, want), f"rank {rank.ring.rank}, {case}"
            assert kept.bucket.phase is Phase.COMPLETED
            with pytest.raises(UsageError, match="released"):
                kept.exponents()
        assert rank.runner.pending == 0
        assert rank.runner.counters.buckets == len(CASES)
        assert rank.runner.counters.elements == sum(size for size, *_ in CASES)
        assert rank.runner.counters.seconds > 0.0
        assert rank.runner.counters.compared == 0


@pytest.mark.parametrize("lane_bits", [8, 16, 32, 64])
@pytest.mark.parametrize("workers", [1, 3, 63])
def test_sums_are_those_of_the_lanes(lane_bits: int, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's view, with the largest and smallest integers; the others are a ring that adds theirs."""
    fmt = LaneFormat(lane_bits, workers, block=16)
    extreme = [vector(40, 1.0 - 2**-24) * (-1 if rank % 2 else 1) for rank in range(workers)]
    extreme[0][16:] = data(0, 24, False)
    agreed = np.max([block_exponents(x, 16) for x in extreme], axis=0)
    lanes = np.zeros((workers, 40), dtype=fmt.lane_type)
    for x, row in zip(extreme, lanes, strict=True):
        quantize(x, agreed, fmt, row)
    sums = lanes.sum(axis=0, dtype=fmt.lane_type)
    assert int(sums.max()) <= 2**lane_bits - 1
    want = vector(40, 0.0)
    dequantize(sums, agreed, fmt, want, mean=False)

    class Others:
        rank, size, device = 0, workers, "cpu"
        sums: list[tuple[str, int]] = []  # noqa: RUF012

        def max(self, values: Any) -> None:
            if values.dtype == np.uint8:
                np.maximum(values, agreed, out=values)

        def sum(self, values: Any) -> None:
            start = sum(size for _, size in self.sums)
            self.sums.append((values.dtype.name, len(values) - 2))
            part = lanes[1:, start : start + len(values) - 2].astype(object)
            total = part.sum(axis=0) - (workers - 1) * fmt.bias + values[2:].astype(object)
            assert all(abs(one) < 2 ** (31 if lane_bits < 64 else 63) for one in total)
            values[2:] = total

        def close(self) -> None:
            raise AssertionError

    monkeypatch.setattr(runner, "PIECE", 17)
    ring = Others()
    rank = Rank(ring, fmt)
    rank.put([Reduction(extreme[0], vector(40, 0.0))]).start()
    (kept,) = rank.wait(1)
    assert isinstance(kept.bucket, Reduction)
    assert same_bits(kept.bucket.out, want)
    name = "int64" if lane_bits == 64 else "int32"
    assert ring.sums == [(name, 17), (name, 17), (name, 6)]
    assert rank.runner.stop(LIMIT)


@pytest.mark.parametrize("lane_bits", [8, 16, 32])
@pytest.mark.parametrize("world", [1, 3])
def test_buckets_of_every_format_in_one_job(
    make: Callable[..., list[Rank]], monkeypatch: pytest.MonkeyPatch, world: int, lane_bits: int
) -> None:
    """Bits and residuals are those of the lanes, whatever the job's own format; in pieces of odd sizes."""
    monkeypatch.setattr(runner, "PIECE", 777)
    draw = random.Random(f"ring/{world}/{lane_bits}")
    kinds = [*KINDS, *draw.choices(KINDS, k=16)]
    draw.shuffle(kinds)
    ranks = make(world, LaneFormat(lane_bits, world, 64))
    expected = []
    for number, kind in enumerate(kinds):
        buckets = mixed(draw, world, kind)
        expected.append(Expected(buckets, ranks[0].fmt))
        for rank, bucket in zip(ranks, buckets, strict=True):
            rank.put([bucket], first=number)
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.wait(len(kinds))
        for one in expected:
            one.check(rank.ring.rank)


def test_integers_that_do_not_fit_fail_alike_and_the_ring_goes_on(make: Callable[..., list[Rank]]) -> None:
    ranks = make(2)
    buckets = []
    for rank in ranks:
        x = np.full(1000, 2**30 + rank.ring.rank, dtype=np.int32)
        buckets.append(IntegerReduction(x, np.zeros_like(x)))
        rank.put([buckets[-1], reduction(5)]).start()
    for rank in ranks:
        rank.wait(2)
    assert {str(bucket.error)[:60] for bucket in buckets} == {
        f"the sum of element 0 over all ranks is {2**31 + 1}, which int32 "[:60]
    }
    assert not any(bucket.out.any() for bucket in buckets)


@pytest.mark.parametrize("theirs", [{"lane_bits": 16}, {"block": 128}])
def test_formats_are_compared_themselves(
    make: Callable[..., list[Rank]], monkeypatch: pytest.MonkeyPatch, theirs: dict[str, int]
) -> None:
    """Other lanes or blocks would give a collective library arrays of other lengths, which some do not survive."""
    monkeypatch.setattr(runner, "bucket_digest", lambda *_: 7)
    ranks = make(2)
    ranks[0].put([reduction(1000)]).start()
    ranks[1].put([Reduction(vector(1000), vector(1000), **theirs)]).start()  # type: ignore[arg-type]
    for rank in ranks:
        assert isinstance(rank.wait_for_error(), MismatchError)


def test_large_buckets_go_in_pieces(make: Callable[..., list[Rank]], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (9_999, 10_000, 10_001, 25_000, 3)
    results: list[list[Vector]] = []
    lengths: list[int] = []
    for piece in (runner.PIECE, 10_000):
        monkeypatch.setattr(runner, "PIECE", piece)
        first, second = make(2)
        lengths.clear()
        plain_sum = first.ring.sum

        def recorded(values: Any, add: Callable[[Any], None] = plain_sum) -> None:
            lengths.append(len(values))
            add(values)

        monkeypatch.setattr(first.ring, "sum", recorded)
        for rank in (first, second):
            rank.put([Reduction(data(rank.ring.rank, n, True), vector(n)) for n in sizes]).start()
        second.wait(len(sizes))
        results.append([kept.bucket.out for kept in first.wait(len(sizes)) if isinstance(kept.bucket, Reduction)])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    flags = 2
    assert [n - flags for n in lengths] == [9_999, 10_000, 10_000, 1, 10_000, 10_000, 5_000, 3]


# -- the runner: order, threads --


def test_small_buckets_stay_in_order(make: Callable[..., list[Rank]]) -> None:
    ranks = make(3)
    for rank in ranks:
        rank.start()
    count = 300
    for rank in ranks:
        rank.put(Barrier() if n % 3 == 1 else reduction(n % 3, n + rank.ring.rank) for n in range(count))
    for rank in ranks:
        done = rank.wait(count)
        assert [kept.number for kept in done] == list(range(count))
        for n, kept in enumerate(done):
            assert kept.bucket.phase is Phase.COMPLETED
            if isinstance(kept.bucket, Reduction):
                assert kept.bucket.out.tolist() == [3.0 * n + 3.0] * (n % 3)
        assert rank.threads == {"p4reduce-ring"}
        assert rank.runner.pending == 0


def test_put_may_come_from_many_threads(make: Callable[..., list[Rank]]) -> None:
    (rank,) = make(1)
    rank.start()
    together([partial(rank.put, [Barrier() for _ in range(200)], first) for first in (0, 1000, 2000)])
    numbers = [kept.number for kept in rank.wait(600)]
    for first in (0, 1000, 2000):
        assert [n for n in numbers if first <= n < first + 1000] == list(range(first, first + 200))
    assert len(numbers) == 600


def test_buckets_wait_for_the_start(make: Callable[..., list[Rank]]) -> None:
    (rank,) = make(1)
    rank.put([Barrier(), Barrier()])
    assert rank.runner.pending == 2
    assert rank.done == []
    rank.start().wait(2)
    assert rank.runner.pending == 0


# -- the runner: errors --


@pytest.mark.parametrize(
    ("one", "other", "numbers", "text"),
    [
        (lambda: reduction(100), lambda: reduction(200), (5, 5), "bucket 5, 100 to 200 elements"),
        (lambda: reduction(100), lambda: reduction(100, mean=True), (5, 5), "bucket 5, 100 elements"),
        (lambda: reduction(0), Barrier, (5, 5), "bucket 5, 0 elements"),
        (lambda: reduction(100), Barrier, (5, 5), "bucket 5, 0 to 100 elements"),
        (lambda: reduction(100), lambda: reduction(100), (5, 6), "bucket 5 to 6, 100 elements"),
        (lambda: reduction(100), lambda: reduction(100), (5, 5 + 2**40), "bucket 5 to 1099511627781, 100 elements"),
    ],
)
def test_ranks_that_reduce_different_things_are_all_told(
    make: Callable[..., list[Rank]],
    one: Callable[[], Bucket],
    other: Callable[[], Bucket],
    numbers: tuple[int, int],
    text: str,
) -> None:
    ranks = make(3)
    for rank in ranks:
        rank.put([reduction(10)], first=4)
    ranks[0].put([one()], numbers[0])
    ranks[1].put([other()], numbers[1])
    ranks[2].put([one()], numbers[0])
    for rank in ranks:
        rank.put([Barrier()], first=9).start()
    for rank in ranks:
        error = rank.wait_for_error()
        assert isinstance(error, MismatchError)
        assert text in str(error)
        assert f"rank {rank.ring.rank} of 3, ring path, bucket {error.bucket}" in str(error)
        assert error.bucket == numbers[rank.ring.rank == 1]
        assert error.job == "test"
    check_ended(ranks, done=1)


def test_a_digest_that_happens_to_be_equal_does_not_hide_a_size(
    make: Callable[..., list[Rank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "bucket_digest", lambda *_: 7)
    ranks = make(2)
    for rank in ranks:
        rank.put([reduction(10 + rank.ring.rank)]).start()
    for rank in ranks:
        assert isinstance(rank.wait_for_error(), MismatchError)


def test_a_different_digest_alone_is_enough(make: Callable[..., list[Rank]]) -> None:
    ring, other = local_rings(2)
    # Another block size: same number, same elements.
    ranks = [Rank(ring), Rank(other, LaneFormat(32, 2, block=128))]
    for rank in ranks:
        rank.put([reduction(512)]).start()
    for rank in ranks:
        assert isinstance(rank.wait_for_error(), MismatchError)
        assert rank.runner.stop(LIMIT)


@pytest.mark.parametrize("method", ["exponents", "integers"])
@pytest.mark.parametrize("size", [5, 3000])
def test_a_rank_that_lacks_its_integers_tells_all(
    make: Callable[..., list[Rank]], monkeypatch: pytest.MonkeyPatch, method: str, size: int
) -> None:
    monkeypatch.setattr(runner, "PIECE", 1000)
    ranks = make(4)
    gone = IntegrityError("the data are gone")
    fired = []

    def fail(*_: Any) -> Any:
        fired.append(method)
        raise gone

    for rank in ranks:
        rank.put([reduction(10)])
        kept = Kept.fresh(reduction(size), 1, rank.fmt)
        if rank.ring.rank == 2:
            monkeypatch.setattr(kept, method, fail)
        rank.runner.put(kept)
        rank.put([Barrier()], first=2).start()
    for rank in ranks:
        error = rank.wait_for_error()
        if rank.ring.rank == 2:
            assert error is gone
        else:
            assert isinstance(error, IntegrityError)
            assert error.ranks == (2,)
            assert "rank 2 cannot sum it again" in str(error)
        assert (error.bucket, getattr(error, "job", "")) == (1, "test")
    assert fired == [method]
    check_ended(ranks, done=1)


def test_several_ranks_that_lack_their_integers_are_counted(
    make: Callable[..., list[Rank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = make(3)
    for rank in ranks:
        kept = Kept.fresh(reduction(10), 0, rank.fmt)
        if rank.ring.rank:
            monkeypatch.setattr(kept, "integers", lambda _: 1 / 0)
        rank.runner.put(kept)
        rank.start()
    error = ranks[0].wait_for_error()
    assert isinstance(error, IntegrityError)
    assert "2 ranks cannot sum it again" in str(error)
    assert error.ranks == ()
    for rank in ranks[1:]:
        assert isinstance(rank.wait_for_error(), RingError)
        assert "ZeroDivisionError" in str(rank.errors[0])


class Delivered:
    """A Kept whose bucket this rank has from the switch already."""

    delivered = True

    def __init__(self, size: int, number: int, fmt: LaneFormat, equal: bool) -> None:
        self._inner = Kept.fresh(reduction(size), number, fmt)
        self.bucket, self.number, self.count, self.format = self._inner.bucket, number, size, fmt
        self.exponents, self.integers, self.release = (
            self._inner.exponents,
            self._inner.integers,
            self._inner.release,
        )
        self.equal = equal
        self.seen: list[list[int]] = []

    def finish(self, sums: Any, agreed: Any) -> None:
        self.seen.append(sums.tolist())
        if not self.equal:
            raise IntegrityError("switch and ring differ", bucket=self.number)


def test_a_delivered_bucket_is_compared(make: Callable[..., list[Rank]]) -> None:
    first, second = make(2)
    kept: Any = Delivered(3, 0, first.fmt, equal=True)
    first.runner.put(kept)
    first.start()
    second.put([reduction(3)]).start()
    assert first.wait(1) == [kept]
    assert first.runner.counters.compared == 1
    (other,) = second.wait(1)
    assert isinstance(other.bucket, Reduction)
    assert other.bucket.out.tolist() == [2.0] * 3
    lanes = np.zeros(3, dtype=np.uint32)
    quantize(vector(3), block_exponents(vector(3)), first.fmt, lanes)
    assert kept.seen == [(2 * lanes).tolist()]


def test_a_delivered_bucket_that_differs_ends_the_ring(make: Callable[..., list[Rank]]) -> None:
    ranks = make(3)
    kept: Any = Delivered(3, 0, ranks[1].fmt, equal=False)
    for rank in ranks:
        if rank.ring.rank == 1:
            rank.runner.put(kept)
        else:
            rank.put([reduction(3)])
        rank.put([Barrier()], first=1).start()
    assert str(ranks[1].wait_for_error()) == "switch and ring differ"
    for rank in (ranks[0], ranks[2]):  # they have their sum, and learn at the next bucket that a rank is gone
        assert isinstance(rank.wait_for_error(), RingError)
        assert "bucket 1 (barrier): rank 1 has closed" in str(rank.errors[0])
        assert [one.number for one in rank.done] == [0]


def check_ended(ranks: list[Rank], done: int) -> None:
    """Each had one error, drops what came behind and what comes now, and its thread has ended."""
    for rank in ranks:
        rank.put([Barrier()], first=77)
        assert rank.runner.pending == 0
        assert rank.runner.stop(LIMIT)
        assert len(rank.errors) == 1
        assert len(rank.done) == done


def test_a_missing_rank_ends_the_others_with_what_is_known(make: Callable[..., list[Rank]]) -> None:
    ranks = make(3, deadline=0.2)
    for rank in ranks[:2]:
        rank.put([reduction(10)]).start()
    for rank in ranks[:2]:
        error = rank.wait_for_error()
        assert isinstance(error, RingError)
        assert str(error) == (
            f"job 'test', rank {rank.ring.rank} of 3, ring path, bucket 0 (sum of 10 float32): "
            f"rank 2 did not come within 0.2 s"
        )
    check_ended(ranks[:2], done=0)


def test_whatever_a_ring_raises_is_an_error_of_the_job(
    make: Callable[..., list[Rank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (rank,) = make(1)
    cause = KeyError("surprise")

    def fail(_: Any) -> None:
        raise cause

    monkeypatch.setattr(rank.ring, "max", fail)
    rank.put([Barrier()]).start()
    error = rank.wait_for_error()
    assert isinstance(error, RingError)
    assert "bucket 0 (barrier): KeyError: 'surprise'" in str(error)
    assert error.__cause__ is cause


def test_a_ring_of_other_ranks_is_refused() -> None:
    ring = local_rings(2)[1]
    for rank, workers in ((0, 2), (1, 3)):
        with pytest.raises(ConfigError, match=f"this is rank {rank} of {workers}, but rank 1 of 2 on its ring"):
            RingRunner(ring, "test", rank, LaneFormat(32, workers), print, print)


# -- the runner: stop --


class HangingRing:
    """Its collectives wait until they are let go, then pretend that all went well."""

    rank, size, device = 0, 2, "cpu"

    def __init__(self) -> None:
        self.entered, self.let_go = threading.Event(), threading.Event()

    def max(self, values: Any) -> None:
        self.entered.set()
        assert self.let_go.wait(LIMIT)

    def sum(self, values: Any) -> None:
        pass

    def close(self) -> None:
        pass


def test_stop_returns_while_a_collective_hangs_and_nothing_follows() -> None:
    ring = HangingRing()
    rank = Rank(ring)
    bucket = reduction(10)
    rank.put([bucket, Barrier()]).start()
    assert ring.entered.wait(LIMIT)
    assert rank.runner.pending == 2
    started = time.monotonic()
    assert not rank.runner.stop(0.2)
    assert time.monotonic() - started < 5.0
    assert rank.runner.pending == 0
    ring.let_go.set()
    assert rank.runner.stop(LIMIT)
    assert (rank.done, rank.errors) == ([], [])
    assert bucket.out.tolist() == [0.0] * 10
    assert bucket.phase is Phase.HANDED_OVER
    rank.put([Barrier()], first=5)
    assert rank.runner.pending == 0


def test_stop_waits_for_a_result_that_is_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(local_rings(1)[0])
    kept = Kept.fresh(reduction(10), 0, rank.fmt)
    entered, let_go = threading.Event(), threading.Event()
    plain_finish = kept.finish

    def slow_finish(sums: Any, agreed: Any) -> None:
        entered.set()
        assert let_go.wait(LIMIT)
        plain_finish(sums, agreed)

    monkeypatch.setattr(kept, "finish", slow_finish)
    rank.runner.put(kept)
    rank.start()
    assert entered.wait(LIMIT)
    done_at_stop: list[int] = []

    def stop() -> None:
        rank.runner.stop(0.0)
        done_at_stop.append(len(rank.done))

    stopping = threading.Thread(target=stop)
    stopping.start()
    stopping.join(0.2)
    assert stopping.is_alive()
    let_go.set()
    stopping.join(LIMIT)
    assert done_at_stop == [1]
    assert rank.runner.stop(LIMIT)


def test_stop_without_start_and_twice() -> None:
    rank = Rank(local_rings(1)[0])
    rank.put([Barrier()])
    assert rank.runner.stop(0.0)
    assert rank.runner.stop(0.0)
    assert rank.runner.pending == 0


def test_stop_from_a_callback_does_not_wait_for_itself() -> None:
    said: list[bool] = []
    (ring,) = local_rings(1)
    fmt = LaneFormat(32, 1)
    one = RingRunner(ring, "test", 0, fmt, lambda _: said.append(one.stop(LIMIT)), print)
    one.put(Kept.fresh(Barrier(), 0, fmt))
    one.put(Kept.fresh(Barrier(), 1, fmt))
    one.start()
    deadline = time.monotonic() + LIMIT
    while not one.stop(1.0):
        assert time.monotonic() < deadline
    assert said in ([False], [])  # the stop below may have come first
