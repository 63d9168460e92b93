# SPDX-License-Identifier: Apache-2.0
"""The supervisor's listening, and the comparison it makes, with workers that only pretend."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from p4reduce.demo import run
from p4reduce.demo.processes import Child, ChildFailed, Children
from p4reduce.demo.report import DemoOptions, build_report
from p4reduce.errors import ConfigError, P4ReduceError


class Recorder:
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps: list[tuple[str, int, float]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, run: str, step: int, loss: float) -> None:
        self.steps.append((run, step, loss))


RESENT = {"resent_timeout": 1, "resent_early": 2, "resent_integrity": 0}


def rank_result(loss: float, digest: str = "aa", **stats: Any) -> dict[str, Any]:
    return {
        "loss_first": 4.5,
        "loss_last": loss,
        "parameters": 10,
        "digest": digest,
        "seconds": 2.0,
        "forward_seconds": 0.4,
        "backward_seconds": 1.0,
        "optimizer_seconds": 0.1,
        "stats": stats,
    }


def hook_result(loss: float, digest: str = "aa") -> dict[str, Any]:
    return rank_result(
        loss,
        digest,
        buckets_switch=40,
        buckets_ring=1,
        bytes_switch=160,
        bytes_ring=4,
        bytes_plain=0,
        wait_seconds=0.3,
        comm={"core": {"frames_sent": 100, "retransmissions": 3, **RESENT}},
    )


RUNS: dict[str, Any] = {
    "reference": [rank_result(1.90), rank_result(1.90)],
    "reference_other_seed": [rank_result(1.95, "bb")] * 2,
    "p4reduce": [hook_result(1.91, "cc"), hook_result(1.91, "cc")],
}


def events(runs: dict[str, Any]) -> str:
    """A program that prints the events of rank 0, with noise of libraries in between."""
    lines = []
    for name, ranks in runs.items():
        lines += [{"event": "step", "run": name, "step": step, "loss": 2.0 / step} for step in (1, 2)]
        lines.append({"event": "result", "run": name, "ranks": ranks})
    text = "a warning\n" + "\n".join(json.dumps(line) for line in lines) + '\n[1]\n{"other": 1}\n'
    return f"import sys; sys.stdout.write({text!r})"


def start(children: Children, folder: Path, script: str, name: str = "workers") -> Child:
    program = folder / f"{name}.py"
    program.write_text(script)
    child = children.start(name, [sys.executable, str(program)], pipe=True)
    child.expected_to_end = True
    return child


def listen(tmp_path: Path, *scripts: str, seconds: float = 20.0) -> tuple[dict[str, Any], Recorder]:
    recorder = Recorder()
    with Children(tmp_path) as children:
        workers = [start(children, tmp_path, script, f"workers{number}") for number, script in enumerate(scripts)]
        return run.collect(workers, children, recorder, time.monotonic() + seconds), recorder


def test_events_are_picked_out_of_the_output(tmp_path: Path) -> None:
    results, recorder = listen(tmp_path, events(RUNS))
    assert results == RUNS
    assert recorder.steps == [(name, step, 2.0 / step) for name in RUNS for step in (1, 2)]


def test_several_workers_with_a_host_of_their_own(tmp_path: Path) -> None:
    results, _ = listen(tmp_path, events(RUNS), "print('I am rank 1')")
    assert results == RUNS


def test_a_long_line_arrives_whole(tmp_path: Path) -> None:
    runs = {name: [{**ranks[0], "padding": "x" * 300_000}] for name, ranks in RUNS.items()}
    results, _ = listen(tmp_path, events(runs))
    assert results == runs


def test_a_worker_that_fails_ends_the_demo(tmp_path: Path) -> None:
    script = "import sys; print('boom', file=sys.stderr); sys.exit(1)"
    with pytest.raises(ChildFailed, match=r"(?s)workers1 ended with status 1.*boom"):
        listen(tmp_path, "import time; time.sleep(100)", script)


def test_a_switch_that_dies_ends_the_demo(tmp_path: Path) -> None:
    def supervise(children: Children) -> None:
        worker = start(children, tmp_path, "import time; time.sleep(100)")
        children.start("switch", [sys.executable, "-c", "print('out of memory')"])
        run.collect([worker], children, Recorder(), time.monotonic() + 20)

    with Children(tmp_path) as children, pytest.raises(ChildFailed, match=r"(?s)switch ended.*out of memory"):
        supervise(children)


def test_missing_results_are_named(tmp_path: Path) -> None:
    runs = {name: ranks for name, ranks in RUNS.items() if name != "p4reduce"}
    with pytest.raises(P4ReduceError, match="without results for p4reduce"):
        listen(tmp_path, events(runs))


def test_the_deadline_says_how_far_it_came(tmp_path: Path) -> None:
    script = events({"reference": RUNS["reference"]}) + "; sys.stdout.flush(); import time; time.sleep(100)"
    with pytest.raises(run.DemoTimeout, match="finished runs: reference"):
        listen(tmp_path, script, seconds=1.0)


def test_the_report_compares_the_runs() -> None:
    report = build_report(DemoOptions(steps=10, loss=0.5), "embedded", "w34", RUNS, 12.0)
    assert report.loss_first == 4.5
    assert (report.loss_reference, report.loss_reference_other_seed, report.loss_p4reduce) == (1.90, 1.95, 1.91)
    assert float.fromhex(report.loss_p4reduce_hex) == report.loss_p4reduce
    assert report.closer_than_seeds
    assert report.ranks_bit_identical
    assert (report.buckets_switch, report.buckets_ring) == (40, 1)
    assert (report.frames_sent, report.retransmissions, report.gradient_bytes) == (200, 6, 328)
    assert report.retransmission_causes == {"timeout": 2, "early": 4, "integrity": 0}
    assert report.step_milliseconds == pytest.approx(
        {"forward": 40.0, "backward": 70.0, "waiting": 30.0, "optimizer": 10.0, "other": 50.0}
    )
    wanted: tuple[str, ...] = (
        "switch",
        "workers",
        "steps",
        "loss_first",
        "loss_reference",
        "loss_p4reduce",
        "ranks_bit_identical",
    )
    wanted += ("buckets_switch", "buckets_ring", "frames_sent", "retransmissions", "seconds", "loss_p4reduce_hex")
    assert set(wanted) <= json.loads(json.dumps(report.as_dict())).keys()


def test_the_report_sees_ranks_that_differ_and_losses_that_drift() -> None:
    runs = {**RUNS, "p4reduce": [hook_result(1.99, "cc"), hook_result(1.99, "dd")]}
    report = build_report(DemoOptions(steps=10), "embedded", "w34", runs, 12.0)
    assert not report.ranks_bit_identical
    assert not report.closer_than_seeds


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"switch": "asic"}, "asic"),
        ({"workers": 0}, "0 workers"),
        ({"workers": 3}, "3 workers cannot share"),
        ({"workers": 64}, "64 workers"),
        ({"steps": 0}, "0 steps"),
        ({"loss": 1.0}, "loss 1.0"),
        ({"loss": float("nan")}, "loss nan"),
        ({"seed": -1}, "seed -1"),
        ({"seed": 1 << 31}, "seed 2147483648"),
        ({"seed": 10**30}, "seed 1"),
        ({"timeout": 0.0}, "timeout 0.0"),
        ({"timeout": -1.0}, "timeout -1.0"),
        ({"timeout": float("nan")}, "timeout nan"),
        ({"timeout": float("inf")}, "timeout inf"),
    ],
)
def test_options_that_make_no_sense(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        DemoOptions(**wrong)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else real(name))
    with pytest.raises(ConfigError, match=r"pip install 'p4reduce\[torch\]'"):
        run.require_packages()
