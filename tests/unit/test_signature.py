# SPDX-License-Identifier: Apache-2.0
"""Signatures: a sum in which a rank is missing, counted twice or taken from elsewhere has a wrong check."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from p4reduce import signature, wire
from p4reduce.core.bucket import Barrier, Reduction
from p4reduce.errors import IntegrityError
from p4reduce.sim.byhand import ByHand, edit, field
from p4reduce.sim.runner import Scenario
from p4reduce.wire import Op

WORD = 2**64


def signed(rank: int, **place: int) -> int:
    return signature.expected({"kind": wire.Kind.CONTRIBUTE, "rank": rank, "count_or_reason": 0, **place})


def total(workers: int, **place: int) -> int:
    return signature.expected({"kind": wire.Kind.RESULT, "rank": 0, "count_or_reason": workers, **place})


HERE = {"epoch": 1700000000, "round": 5, "tag": wire.pack_tag(3, 4, 5)}


def test_keys_are_odd_and_all_different() -> None:
    keys = signature.rank_keys().tolist()
    assert len(set(keys)) == 256
    assert all(key % 2 for key in keys)
    with pytest.raises(ValueError, match="read-only"):
        signature.rank_keys()[0] = 1


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 64])
def test_signatures_of_all_ranks_add_up(workers: int) -> None:
    assert sum(signed(rank, **HERE) for rank in range(workers)) % WORD == total(workers, **HERE)


def test_no_other_multiset_of_three_ranks_adds_up() -> None:
    wanted = total(3, **HERE)
    fitting = [
        ranks
        for ranks in itertools.combinations_with_replacement(range(8), 3)
        if sum(signed(rank, **HERE) for rank in ranks) % WORD == wanted
    ]
    assert fitting == [(0, 1, 2)]


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"epoch": 1700000001},
        {"round": 3},
        {"round": 7},
        {"tag": wire.pack_tag(2, 4, 5)},
        {"tag": wire.pack_tag(3, 3, 5)},
        {"tag": wire.pack_tag(3, 4, 6)},
    ],
    ids=str,
)
def test_a_contribution_from_elsewhere_does_not_fit(elsewhere: dict[str, int]) -> None:
    assert (signed(0, **HERE) + signed(1, **{**HERE, **elsewhere})) % WORD != total(2, **HERE)


def test_places_are_odd_and_batches_agree_with_single_frames() -> None:
    rng = np.random.default_rng(3)
    rounds = rng.integers(0, 2**32, 100, dtype=np.uint64)
    tags = rng.integers(0, 2**64, 100, dtype=np.uint64)
    places = signature.place(9, rounds, tags)
    assert len(set(places.tolist())) == 100
    for at, number, tag in zip(places.tolist(), rounds.tolist(), tags.tolist(), strict=True):
        assert at % 2 == 1
        assert signed(4, epoch=9, round=number, tag=tag) == int(signature.rank_keys()[4]) * at % WORD


def miscounted(frame: bytes) -> bytes:
    """Rank 0's frame as rank 1's: what a switch that counts rank 0 twice and rank 1 never would add."""
    return edit(frame, rank=1)


@pytest.mark.parametrize("op", list(Op))
def test_a_switch_that_counts_one_rank_twice_is_found_out(op: Op) -> None:
    """Payload and check agree with each other in such a sum: only the signatures tell."""
    hand = ByHand(Scenario(2))
    buckets = [
        Barrier() if op is Op.OR else Reduction(np.full(50, rank + 1, np.float32), np.zeros(50, np.float32), False)
        for rank in range(2)
    ]
    hand.submit(*buckets)
    for _ in range(10):
        first, second = hand.sent(0), hand.sent(1)
        for frame in first:
            for to, answer in hand.to_switch(0, frame):
                hand.to_worker(to, answer)
        forge = [frame for frame in first if field(frame, "op") == op]
        for frame in [miscounted(frame) for frame in forge] if forge else second:
            for to, answer in hand.to_switch(1, frame):
                hand.to_worker(to, answer)
        hand.now += 1.0
        if hand.cores[0].error is not None:
            break
    assert isinstance(hand.cores[0].error, IntegrityError)
    assert hand.cores[0].counters.integrity >= 3
    assert hand.cores[0].completed == 0
