# SPDX-License-Identifier: Apache-2.0
"""Frames into BMv2: it lives, jobs beside it get right sums, and its memory stays what it was.

`tools/fuzz.py --target bmv2` goes on for longer.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers import engine_bmv2

from fuzz.bmv2 import RAW, SETTLED, Bmv2Target
from fuzz.frames import EngineTarget

pytestmark = pytest.mark.bmv2

SEEDS = 60


@pytest.fixture
def target() -> Iterator[Bmv2Target]:
    if not engine_bmv2.available():
        pytest.skip("simple_switch_grpc is not installed")
    made = Bmv2Target()
    yield made
    made.close()


def test_frames_into_bmv2(target: Bmv2Target) -> None:
    for seed in range(SEEDS):
        target.step(seed)
    assert target.bmv2.bmv2.alive
    assert target.base > 0
    assert SEEDS > SETTLED
    for how in ("forged", "mangled", "mangled below", "replayed"):
        assert target.found[how] > 30, how
    assert target.found["raw"] == SEEDS * RAW
    assert target.found["answers to raw"] > 0, "no bytes came as far as the program's answers"
    assert target.found["sums"] > 100


def test_bmv2_and_engine_answer_alike(target: Bmv2Target) -> None:
    """The same attacks, the same outcome: what was found in a step says how each answered."""
    engine = EngineTarget()
    for seed in range(3):
        EngineTarget.step(target, seed)
        engine.step(seed)
        assert target.found == engine.found
