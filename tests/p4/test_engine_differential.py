# SPDX-License-Identifier: Apache-2.0
"""Random entries and frames for every test program: engine and BMv2 must agree."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from helpers import engine_bmv2
from helpers.engine_fuzz import FrameMaker, random_entries, random_replicas

from p4reduce_bmv2.embedded.engine import Engine
from p4reduce_bmv2.embedded.errors import BadEntry

COMPILED = Path(__file__).parent / "programs" / "compiled"
FRAMES = 25
DIFFERENT = {
    "timestamps": "clocks differ",
    "log_assert": "BMv2 aborts on a failed assertion",
    "optional": "random masks are no optional keys",
    "error_key": "BMv2 refuses every entry whose key is an error",
}
PROGRAMS = [p for p in sorted(COMPILED.glob("*.json")) if p.stem not in DIFFERENT]


@pytest.fixture(scope="module")
def bmv2() -> Iterator[engine_bmv2.Bmv2]:
    if not engine_bmv2.available():
        pytest.skip("simple_switch_grpc is not installed")
    switch = engine_bmv2.Bmv2()
    yield switch
    switch.close()


def fill(engine: Engine, switch: engine_bmv2.Bmv2, root: Any, rng: random.Random) -> int:
    """The same entries and groups in both; returns how many entries both took."""
    taken = 0
    for name, key, action, params, priority in random_entries(engine, root, rng, switch.entry_actions):
        refusals = []
        try:
            engine.tables[name].insert(key, action, params, priority)
        except BadEntry as error:
            refusals.append(error)
        try:
            switch.insert(name, key, action, params, priority)
        except grpc.RpcError as error:
            refusals.append(error)
        assert len(refusals) != 1, f"only one took {name} {key}: {refusals}"
        taken += not refusals
    for number in range(1, 6):
        replicas = random_replicas(rng)
        engine.set_multicast_group(number, replicas)
        switch.set_multicast_group(number, replicas)
        engine.set_clone_session(number, replicas[:1])
        switch.set_clone_session(number, replicas[:1])
    return taken


def ports(frames: list[tuple[int, bytes]]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for port, frame in frames:
        found.setdefault(port, []).append(frame.hex())
    return found


def without_cpu(frames: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """BMv2 sends frames for the CPU port to the controller."""
    return [(port, frame) for port, frame in frames if port != engine_bmv2.CPU_PORT]


@pytest.mark.bmv2
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: p.stem)
def test_engine_and_bmv2_agree(bmv2: engine_bmv2.Bmv2, path: Path) -> None:
    root = json.loads(path.read_text())
    rng = random.Random(f"differential {path.stem}")
    engine = Engine(root)
    bmv2.load(path, path.with_name(f"{path.stem}.p4info.txtpb"))
    fill(engine, bmv2, root, rng)
    maker = FrameMaker(root, rng)
    left = 0
    for number in range(FRAMES):
        port, frame = rng.randrange(8), maker.frame()
        expected = without_cpu(engine.process(port, frame))
        left += len(expected)
        found = bmv2.process(port, frame, len(expected))
        assert ports(found) == ports(expected), f"frame {number}: {frame.hex()} on port {port}"
    assert bmv2.rest() == []
    assert left, "every frame was dropped: this compared nothing"
