# SPDX-License-Identifier: Apache-2.0
"""Configuration, buckets, the table of states, memory, counters."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from p4reduce.core.bucket import Barrier, Reduction
from p4reduce.core.buffers import Buffers
from p4reduce.core.config import CoreConfig, RetransmissionPolicy
from p4reduce.core.counters import CoreCounters
from p4reduce.core.states import TABLE, Phase, Step, after
from p4reduce.errors import ConfigError, UsageError
from p4reduce.wire import PROFILES, Reason


def config(**changes: object) -> CoreConfig:
    fields: dict[str, object] = {
        "job": "t",
        "epoch": 1,
        "rank": 0,
        "world_size": 2,
        "profile": PROFILES["w5"],
        "or_slots": 1,
        "add_slots": 1,
    }
    return CoreConfig(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": 0},
        {"epoch": 1 << 32},
        {"world_size": 0},
        {"world_size": 65},
        {"rank": 2},
        {"rank": -1},
        {"or_slots": 0},
        {"add_slots": 0},
        {"or_slots": 512, "add_slots": 513},
        {"first_chunk": -1},
        {"first_bucket": -1},
    ],
)
def test_config_refuses(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        config(**changes)


def test_config_takes_the_largest_job() -> None:
    assert config(world_size=64, rank=63, or_slots=512, add_slots=512, epoch=(1 << 32) - 1).world_size == 64


@pytest.mark.parametrize(
    "changes",
    [
        {"minimum": 0.0},
        {"minimum": 0.1},
        {"initial": 1.0},
        {"maximum": 0.01},
        {"maximum": float("inf"), "deadline": float("inf")},
        {"deadline": 0.1},
        {"deadline": float("inf")},
        {"deadline": float("nan")},
        {"minimum": float("nan")},
        {"early_resend": -1},
    ],
)
def test_policy_refuses(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        RetransmissionPolicy(**changes)  # type: ignore[arg-type]


def test_reduction_refuses_what_it_cannot_reduce() -> None:
    x = np.zeros(8, np.float32)
    read_only = x.copy()
    read_only.flags.writeable = False
    pairs: list[tuple[Any, Any]] = [
        (x.astype(np.float64), x),
        (x, x.astype(np.float16)),
        (x.reshape(2, 4), x.reshape(2, 4)),
        (x[::2], x[:4]),
        (x, np.zeros(9, np.float32)),
        (x, read_only),
        (x[:6], x[2:]),
    ]
    for data, out in pairs:
        with pytest.raises(UsageError):
            Reduction(data, out)
    assert Reduction(x, x).out is x
    Reduction(read_only, x)
    Reduction(x[:4], x[4:])
    Reduction(x[:0], x[:0])


def test_descriptions_name_number_and_content() -> None:
    reduction = Reduction(np.zeros(3, np.float32), np.zeros(3, np.float32), mean=True)
    reduction.number = 7
    assert reduction.describe() == "bucket 7 (mean of 3 float32)"
    barrier = Barrier()
    barrier.number = 8
    assert barrier.describe() == "bucket 8 (barrier)"


def test_every_phase_can_be_reached_and_left_until_the_end() -> None:
    reached = {Phase.NEW}
    while True:
        more = {to for (source, _), to in TABLE.items() if source in reached} - reached
        if not more:
            break
        reached |= more
    assert reached == set(Phase)
    ends = {Phase.COMPLETED, Phase.ABANDONED}
    assert {source for source, _ in TABLE} == set(Phase) - ends
    assert {step for _, step in TABLE} == set(Step)


def test_transitions_that_are_not_in_the_table_raise() -> None:
    for phase in Phase:
        for step in Step:
            if (phase, step) not in TABLE:
                with pytest.raises(KeyError):
                    after(phase, step)
    assert after(Phase.AGREEING, Step.AGREE) is Phase.AGREED


def test_every_unfinished_phase_can_be_abandoned() -> None:
    taken = set(Phase) - {Phase.NEW, Phase.COMPLETED, Phase.ABANDONED}
    assert {phase for phase, step in TABLE if step is Step.ABANDON} == taken


def test_buffers_reuse_the_smallest_that_fits() -> None:
    buffers = Buffers()
    small, large = buffers.take(1000), buffers.take(5000)
    buffers.give(large)
    buffers.give(small)
    assert buffers.kept_bytes == 6000
    assert buffers.take(900) is small
    assert buffers.take(900) is not large, "more than half of it would be wasted"
    assert buffers.take(2500) is large
    assert buffers.kept_bytes == 0


def test_buffers_keep_no_more_than_their_limit() -> None:
    buffers = Buffers(limit=2500)
    taken = [buffers.take(1000) for _ in range(3)]
    for buffer in taken:
        buffers.give(buffer)
    assert buffers.kept_bytes == 2000
    assert buffers.take(1000) is taken[1], "the oldest went"


def test_counters_are_flat_and_fit_json() -> None:
    counters = CoreCounters(resent_timeout=1, resent_early=2, resent_integrity=4)
    counters.nacks[Reason.BAD_SLOT] += 1
    flat = json.loads(json.dumps(counters.as_dict()))
    assert flat["retransmissions"] == 7
    assert flat["nacks_bad_slot"] == 1
    assert flat["nacks_malformed"] == 0
    assert all(isinstance(value, int | float) for value in flat.values())
