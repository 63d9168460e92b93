# SPDX-License-Identifier: Apache-2.0
"""What tools/bench_hook.py makes of the times it took."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="module")
def bench() -> Any:
    path = Path(__file__).resolve().parents[2] / "tools" / "bench_hook.py"
    spec = importlib.util.spec_from_file_location("p4reduce_tool_bench_hook", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_interval_of_a_median_holds_it_in_19_of_20_samples(bench: Any) -> None:
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(400):
        low, middle, high = bench.interval(rng.exponential(size=101).tolist())
        assert low <= middle <= high
        held += low <= np.log(2) <= high
    assert 0.92 <= held / 400 <= 0.99
    assert bench.interval([2.0]) == (2.0, 2.0, 2.0)


def test_what_drifts_slowly_cancels_and_one_percent_shows(bench: Any) -> None:
    """Two ranks whose steps become slower all the time; the variant takes 1 % more on each."""

    def rank(speed: float) -> dict[str, list[dict[str, list[float]]]]:
        blocks = []
        for block in range(50):
            times = [speed * (1 + 0.01 * (4 * block + place)) for place in range(4)]
            times[1] *= 1.01
            times[2] *= 1.01
            blocks.append(dict.fromkeys(bench.QUANTITIES, times))
        return {"off": blocks}

    found = bench.evaluate([rank(0.02), rank(0.03)], "noop")
    row = found["variants"]["off"]
    for what in ("step", "cpu", "compute"):
        assert row[what] == pytest.approx((1.01, 1.01, 1.01), abs=1e-9)
    # A difference, in milliseconds a step of one rank.
    assert row["blocked"][1] == pytest.approx(1000 * 0.025 * 0.01 * 2, rel=0.05)
    assert found["base_ms"]["step"] == pytest.approx(1000 * 0.025 * 2, rel=0.05)
    assert found["blocks"] == 50
    assert not set(bench.OF_HOOKS) & set(bench.evaluate([rank(1.0)], "plain")["variants"]["off"])
