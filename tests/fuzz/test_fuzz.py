# SPDX-License-Identifier: Apache-2.0
"""Every fuzzing target, bounded. tools/fuzz.py runs them for longer, and one seed again."""

from __future__ import annotations

import importlib.util
import json
import random
import threading
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from helpers.controller import Rig, until

from fuzz import frames, targets
from fuzz.frames import CoreTarget, EngineTarget, Finding, Reducing
from p4reduce.core.bucket import Barrier, Reduction
from p4reduce.errors import IntegrityError
from p4reduce.sim.byhand import ByHand, edit, field
from p4reduce.sim.runner import Scenario
from p4reduce.wire import Kind, Op, Reason
from p4reduce_controller.store import SqliteStore

TOOL = Path(__file__).resolve().parents[2] / "tools" / "fuzz.py"


def run(name: str, seeds: int) -> Counter[str]:
    """Steps of a target with the first seeds; what has occurred."""
    target = targets.TARGETS[name]()
    try:
        steps(target, range(seeds))
    finally:
        target.close()
    return target.found


def steps(target: targets.Target, seeds: range) -> None:
    for seed in seeds:
        target.step(seed)


# Frames


def test_frames_into_the_compiled_program() -> None:
    found = run("engine", 120)
    for how in ("forged", "mangled", "mangled below", "replayed", "raised"):
        assert found[how] > 100
    assert found["sums"] > 500
    assert 0 < found["failed jobs"] < 60, "frames from a member's own port may end its job, but rarely do"
    assert found["raised exponents"] > 0


def test_frames_into_the_core() -> None:
    found = run("core", 200)
    for how in ("forged", "mangled", "nacks", "replayed"):
        assert found[how] > 500
    assert found["sums"] > 400
    assert found["failed jobs"] > 0, "a nack for an outstanding chunk ends the epoch"


def test_a_nack_in_one_batch_with_the_result_that_it_comes_too_late_for() -> None:
    hand = ByHand(Scenario(1))
    hand.submit(Barrier())
    (frame,) = hand.sent(0)
    ((_, answer),) = hand.to_switch(0, frame)
    nack = edit(frame, kind=Kind.NACK, count_or_reason=Reason.NOT_ADMITTED)[:32]
    hand.to_worker(0, answer, nack)
    assert hand.cores[0].error is None
    assert hand.cores[0].completed == 1


def test_frames_into_the_core_in_any_mixture() -> None:
    run("core-mixed", 100)


def test_a_core_that_takes_damaged_sums_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target has teeth: without its check, the core gives wrong sums to somebody."""
    from p4reduce.packetize import BucketCodec

    genuine = BucketCodec.verify_and_store

    def careless(self, payload, checks, chunk, sums):  # type: ignore[no-untyped-def]
        genuine(self, payload, checks, chunk, sums)
        sums[chunk] = payload.view(">u8").astype(np.uint64)
        return np.ones(len(chunk), dtype=np.bool_)

    monkeypatch.setattr(BucketCodec, "verify_and_store", careless)
    target = CoreTarget()
    with pytest.raises(Finding, match="wrong sum"):
        steps(target, range(400))


def test_a_switch_that_admits_from_any_port_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of nobody's port that count: a sum is wrong, or its job is stopped."""
    target = EngineTarget()
    genuine = target._engine.process
    monkeypatch.setattr(target._engine, "process", lambda port, frame: genuine(1 if port > 4 else port, frame))
    with pytest.raises(Finding, match=r"stopped|wrong sum|did not complete|did not end"):
        steps(target, range(1, 200, 2))


def test_the_mangled_and_forged_differ_from_what_they_came_from() -> None:
    draw, frame = random.Random(1), bytes(range(256)) + bytes(32)
    for make in (frames.mangled, frames.forged):
        made = [make(draw, frame) for _ in range(200)]
        assert sum(one != frame for one in made) > 180
        assert len(set(made)) > 100


def test_a_wrong_sum_is_told_from_a_coarse_one() -> None:
    job = Reducing(random.Random(3), ByHand(Scenario(2)))
    job.hand.exchange()
    found: Counter[str] = Counter()
    job.judge(found, must=True)
    assert found["sums"] > 0
    bucket = next(one for ranks in job.buckets for one in ranks if isinstance(one, Reduction) and one.data.size)
    bucket.out[0] += np.float32(1)
    with pytest.raises((Finding, ValueError)):
        job.judge(found, must=True)


def test_a_level_raised_on_its_way_up_shows_in_nothing_but_the_rounding() -> None:
    """What the protocol does not find (docs/design.md, section 3): all ranks agree on the level, and on the sum."""
    hand = ByHand(Scenario(2))
    data = [np.full(3, 1 / 3, np.float32), np.full(3, 2 / 3, np.float32)]
    buckets = [Reduction(vector, np.empty_like(vector)) for vector in data]
    hand.submit(*buckets)
    (frame,) = hand.sent(0)
    assert field(frame, "op") == Op.OR
    changed = frames.raised(random.Random(0), frame)
    assert changed != frame
    hand.to_switch(0, changed)
    hand.exchange([1])
    hand.now = 1.0
    hand.exchange()
    assert buckets[0].out.tobytes() == buckets[1].out.tobytes()
    assert buckets[0].out[0] == pytest.approx(1.0, abs=2.0**-24)
    assert not any(isinstance(core.error, IntegrityError) for core in hand.cores)


# Requests


def test_messages_into_the_controller() -> None:
    before = threading.active_count()
    found = run("controller", 60)
    for call in ("Join", "Leave", "Progress", "Status", "Describe", "Pools", "raw"):
        assert found[call] > 20
    assert found["jobs that went on"] > 40
    for code in ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "DEADLINE_EXCEEDED"):
        assert found[code] > 5
    # Threads of the server's pool end when it is collected; they must not grow with the calls.
    assert threading.active_count() < before + 60


def test_a_cancelled_join_lets_go_of_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helpers.controller.DEADLINE", 3.0)
    rig = Rig()
    try:
        call = rig.join(0, wait_seconds=20.0)
        rig.waiting(1)
        call.cancel()
        until(lambda: not rig.names())
        until(lambda: not rig.server._coordinator._mailboxes)
    finally:
        rig.close()


# Files


def test_hosts_files() -> None:
    found = run("hosts", 1500)
    assert found["refused"] > 1000
    assert found["taken"] > 20


def test_settings_files() -> None:
    found = run("settings", 1000)
    assert found["refused"] > 500
    assert found["taken"] > 10


def test_state_files() -> None:
    found = run("state", 120)
    assert min(found["refused"], found["refused later"], found["taken"]) > 5


def test_a_state_file_of_the_target_is_a_sound_one_before_it_is_damaged(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "file", lambda: 1000.0)
    assert store.next() == 1000
    store.close()


def test_programs_into_the_engine() -> None:
    found = run("program", 150)
    assert found["refused"] > 50
    assert found["taken"] > 20


# The tool


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_tool", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tool_runs_all_targets_for_their_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool().main(["--seconds", "0.4", "--target", "hosts", "--target", "core"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["targets"]) == {"hosts", "core"}
    assert all(target["steps"] > 0 and not target["findings"] for target in found["targets"].values())


def test_the_tool_prints_a_finding_and_its_seed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def __init__(self) -> None:
            self.found: Counter[str] = Counter()

        def step(self, seed: int) -> None:
            if seed >= 7:
                raise KeyError(seed)

        def close(self) -> None:
            pass

    monkeypatch.setitem(targets.TARGETS, "broken", Broken)
    assert tool().main(["--seconds", "0.2", "--target", "broken"]) == 1
    printed = capsys.readouterr()
    (finding,) = json.loads(printed.out)["targets"]["broken"]["findings"]
    assert finding["seed"] == 7
    assert "KeyError" in finding["error"]
    assert "python tools/fuzz.py --target broken --seed 7" in printed.err
    assert tool().main(["--target", "broken", "--seed", "3"]) == 0
    assert tool().main(["--target", "broken", "--seed", "9"]) == 1
