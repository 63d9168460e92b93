# SPDX-License-Identifier: Apache-2.0
"""Random queues of buckets over random networks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p4reduce.core.bucket import Barrier, Bucket, Reduction
from p4reduce.core.config import RetransmissionPolicy
from p4reduce.sim.byhand import direct, finish
from p4reduce.sim.network import Faults
from p4reduce.sim.runner import Scenario, Simulation


class Plan(NamedTuple):
    """A bucket of every rank: a size (None: a barrier), sum or mean, and when each rank submits it."""

    size: int | None
    mean: bool
    waits: tuple[float, ...]


SIZES = st.one_of(st.none(), st.sampled_from([0, 1, 64, 65, 256, 320, 321]), st.integers(0, 3000))
PLANS = st.lists(
    st.builds(Plan, SIZES, st.booleans(), st.tuples(*[st.sampled_from([0.0, 1e-5, 2e-4, 3e-3])] * 3)),
    min_size=1,
    max_size=12,
)
FAULTS = st.builds(
    Faults,
    loss=st.sampled_from([0.0, 0.02, 0.15]),
    duplicate=st.sampled_from([0.0, 0.1]),
    reorder=st.sampled_from([0.0, 0.3]),
)
POLICIES = st.sampled_from(
    [
        RetransmissionPolicy(),
        RetransmissionPolicy(early_resend=0),
        RetransmissionPolicy(initial=0.001, minimum=0.0001, maximum=0.01, early_resend=1),
    ]
)


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    plans=PLANS,
    world_size=st.integers(1, 3),
    or_slots=st.integers(1, 4),
    add_slots=st.integers(1, 6),
    batch=st.integers(1, 8),
    up=FAULTS,
    down=FAULTS,
    policy=POLICIES,
    wrap=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_bucket_completes_with_the_right_bits(
    plans: list[Plan],
    world_size: int,
    or_slots: int,
    add_slots: int,
    batch: int,
    up: Faults,
    down: Faults,
    policy: RetransmissionPolicy,
    wrap: bool,
    seed: int,
) -> None:
    simulation = Simulation(
        Scenario(
            world_size,
            or_slots=or_slots,
            add_slots=add_slots,
            batch=batch,
            up=up,
            down=down,
            policy=policy,
            seed=seed,
            first_chunk=add_slots * ((1 << 32) - 1) if wrap else 0,
            first_bucket=(1 << 24) - 2 if wrap else 0,
        )
    )
    rng = np.random.default_rng(seed)
    submitted: list[list[Bucket]] = []
    clock = [0.0] * world_size
    for plan in plans:
        ranks: list[Bucket] = []
        for rank in range(world_size):
            clock[rank] += plan.waits[rank]
            if plan.size is None:
                bucket: Bucket = Barrier()
            else:
                data = rng.standard_normal(plan.size, dtype=np.float32) * np.float32(2.0 ** rng.integers(-20, 20))
                bucket = Reduction(data, np.full_like(data, np.nan), plan.mean)
            ranks.append(bucket)
            simulation.submit(rank, bucket, clock[rank])
        submitted.append(ranks)
    finish(simulation)
    for rank in range(world_size):
        done = simulation.completed(rank)
        assert sorted(bucket.number for bucket in done) == list(
            range(submitted[0][0].number, submitted[0][0].number + len(plans))
        )
        added = [bucket.number for bucket in done if isinstance(bucket, Reduction) and bucket.data.size]
        assert len(added) == sum(bool(plan.size) for plan in plans)
    for ranks in submitted:
        reductions = [bucket for bucket in ranks if isinstance(bucket, Reduction)]
        if reductions:
            expected = direct([bucket.data for bucket in reductions], mean=reductions[0].mean).tobytes()
            assert [bucket.out.tobytes() for bucket in reductions] == [expected] * world_size
