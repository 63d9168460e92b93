# SPDX-License-Identifier: Apache-2.0
"""The soak: a short one, and that it finds what it is there to find."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "soak.py"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak_tool", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    monkeypatch.setitem(sys.modules, "soak_tool", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_twenty_seconds() -> None:
    """In a process of its own, whose memory is nobody else's."""
    options = ["--seconds", "20", "--seed", "1", "--loss", "0.01"]
    done = subprocess.run([sys.executable, str(TOOL), *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["problems"] == []
    assert report["cycles"] >= 5
    assert report["buckets"] > 50
    assert report["jobs"] > report["cycles"]
    assert min(report["lost"], report["duplicated"], report["reordered"], report["retransmissions"]) > 0
    assert (report["wrong"], report["engine_errors"]) == (0, 0)
    assert done.stderr.count(" problems\n") == report["cycles"]


def test_wrong_sums_and_what_is_left_are_found(soak: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cycle, whose exact sums are said to be others, and after which an entry is left."""

    def nonsense(data: list[Any], mean: bool) -> Any:
        return np.zeros(len(data[0]) + 1, np.float32)

    genuine, looks = soak._until_equal, itertools.count()
    monkeypatch.setattr(soak, "direct", nonsense)
    monkeypatch.setattr(soak, "_entries", lambda _: {"admit": next(looks)})
    monkeypatch.setattr(soak, "_until_equal", lambda look, wanted: genuine(look, wanted, 0.1))
    run = soak.Soak(soak.Options(seconds=0.1, members=2, largest=100, profile="w5"))
    report = run.run()
    assert report["cycles"] == 1
    assert report["wrong"] > 0
    assert "wrong sum of" in run.problems[0]
    assert any(problem.startswith("entries are left: {'admit': ") for problem in run.problems)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"growth_mib": 25.0}, "memory grew by 25.0 MiB"),
        ({"threads": [20, 29]}, "threads grew from 20 to 29"),
        ({"descriptors": [20, 25]}, "descriptors grew"),
        ({"engine_errors": 3}, "the engine failed on 3 frames"),
        ({"lost": 0}, "no frame was lost"),
    ],
)
def test_what_grows_is_a_problem(soak: ModuleType, change: dict[str, Any], said: str) -> None:
    sound = {"growth_mib": 1.0, "threads": [20, 24], "descriptors": [20, 20], "engine_errors": 0}
    sound |= {"lost": 1, "duplicated": 1, "reordered": 1}
    run = soak.Soak(soak.Options())
    run._judge(dict(sound))
    assert run.problems == []
    run._judge({**sound, **change})
    (problem,) = run.problems
    assert said in problem


@pytest.mark.parametrize("arguments", [["--seconds", "0"], ["--members", "17"], ["--profile", "w6"]])
def test_options_that_make_no_sense(soak: ModuleType, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        soak.main(arguments)
    assert caught.value.code == 2
