# SPDX-License-Identifier: Apache-2.0
"""The accuracy study: it runs, its lanes are those of a job on the switch, and 32 bits are as good as a ring."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.ddp_gloo import plain_means

from p4reduce import pipeline
from p4reduce.core.bucket import Reduction
from p4reduce.sim.adapter import EngineSwitch
from p4reduce.sim.byhand import finish
from p4reduce.sim.network import Faults
from p4reduce.sim.runner import Scenario, Simulation

torch = pytest.importorskip("torch", reason="the study trains torch models")
FOLDER = Path(__file__).parents[2] / "examples" / "accuracy"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the example by name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield importlib.import_module
    torch.set_num_threads(threads)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(FOLDER)):
            del sys.modules[name]


def test_quick_study(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [sys.executable, str(FOLDER / "study.py"), "--quick", "--json", str(results)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads(results.read_text())["summary"]
    assert set(summary) == {"characters", "digits", "sweep"}
    for task in ("characters", "digits"):
        assert f"**{task}**" in done.stdout
        by_name = summary[task]
        assert by_name["32 bits"]["step_error"] <= by_name["float32"]["step_error"]
        assert by_name["8 bits"]["step_error"] > 0.01
        # Feedback: what one step lacks the next ones have.
        assert by_name["8 bits, feedback"]["total_error"] < by_name["8 bits"]["total_error"]
        assert not any(one["diverged"] for one in by_name.values())
    assert summary["sweep"]["2^-2"]["step_error"] == pytest.approx(1.0)


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_simulated_workers_give_the_bits_of_a_job(example: Any, bits: int) -> None:
    """Two steps with error feedback, once in the study's way, once through cores and the compiled switch program."""
    module = pytest.importorskip("p4reduce_bmv2.embedded.engine", reason="the embedded engine is not installed")
    reducers, tasks = example("reducers"), example("tasks")
    workers = 4
    task = tasks.Digits(0, workers)
    lanes = reducers.Lanes(bits, workers, rounding="stochastic", feedback=True, seed=5)
    program = json.loads(pipeline.find("w5").json.read_text())
    faults = Faults(loss=0.02)
    simulation = Simulation(Scenario(workers, up=faults, down=faults, seed=1), EngineSwitch(module.Engine(program)))
    residuals = [np.zeros(0, np.float32)] * workers
    for step in range(2):
        gradients = task.gradients(step)
        buckets = []
        for rank, gradient in enumerate(gradients):
            sent = gradient + residuals[rank] if step else gradient
            residuals[rank] = np.empty_like(gradient)
            choice: dict[str, Any] = {"lane_bits": bits, "rounding": "stochastic", "seed": lanes.bucket_seed(step)}
            buckets.append(Reduction(sent, np.empty_like(sent), True, residual=residuals[rank], **choice))
            simulation.submit(rank, buckets[-1])
        finish(simulation)
        mean = lanes.mean(gradients, step)
        for rank, bucket in enumerate(buckets):
            assert bucket.out.tobytes() == mean.tobytes()
            assert residuals[rank].tobytes() == lanes._residuals[rank].tobytes()
        task.apply(mean)


def recorded(tasks: Any, name: str, steps: int, workers: int) -> list[list[Any]]:
    """The workers' gradients at the beginning, in the middle and at the end of a training of full length."""
    trained, watched = tasks.TASKS[name](1, 1), tasks.TASKS[name](1, workers)
    stages = []
    for step in range(steps):
        if step in (0, steps // 2, steps - 1):
            watched.follow(trained)
            stages.append(watched.gradients(step))
        trained.apply(trained.gradients(step)[0])
    return stages


@pytest.mark.parametrize("name", ["characters", "digits"])
def test_32_bits_against_plain_ddp_on_recorded_gradients(example: Any, name: str) -> None:
    """Against the exact mean, beside real gloo: figures of docs/numerics.md, which says why two workers are apart."""
    reducers, tasks, study = example("reducers"), example("tasks"), example("study")
    stages = recorded(tasks, name, study.STEPS[name], workers=8)
    assert len({stage[0].tobytes() for stage in stages}) == 3
    for workers, root_mean_square in ((2, 1.01), (3, 0.97), (4, 0.8), (8, 0.7)):
        buckets = [stage[:workers] for stage in stages]
        lanes = reducers.Lanes(32, workers)
        no_larger = 0
        for gradients, theirs in zip(buckets, plain_means(buckets), strict=True):
            exact = np.array([math.fsum(column) for column in np.stack(gradients).astype(np.float64).T]) / workers
            mean = lanes.mean(gradients, 0)
            ours, rings = np.abs(mean - exact), np.abs(theirs - exact)
            assert np.square(ours).sum() <= root_mean_square**2 * np.square(rings).sum()
            # Half an ulp of the largest element is what any float32 may be off by, and a ring may have been lucky.
            quantum = 2.0 ** (np.frexp(max(np.abs(g).max() for g in gradients))[1] - lanes.fmt.precision)
            half_ulp = float(np.spacing(np.abs(mean).max())) / 2
            assert ours.max() <= max(rings.max(), half_ulp + quantum / 2) * (1.5 if workers == 3 else 1.0)
            no_larger += ours.max() <= rings.max()
        assert no_larger >= (2 if workers > 3 else 0)


def test_intervals(example: Any) -> None:
    report = example("report")
    # The 95 % interval of 1, 2, 3, 4: t(3) = 3.182, standard deviation 1.29099.
    assert report.interval([1.0, 2.0, 3.0, 4.0]) == pytest.approx((2.5, 3.182 * 1.2909944 / 2))
    assert report.interval([1.0, float("inf")])[0] == float("inf")


def test_digits_are_the_same_every_time_and_told_apart(example: Any) -> None:
    digits = example("digits")
    pictures, labels = digits.draw(400, 3, noise=0.0)
    again, _ = digits.draw(400, 3, noise=0.0)
    assert pictures.tobytes() == again.tobytes()
    assert set(labels.tolist()) == set(range(10))
    means = np.stack([pictures[labels == digit].mean(axis=0).ravel() for digit in range(10)])
    nearest = ((pictures.reshape(-1, 1, means.shape[1]) - means) ** 2).sum(-1).argmin(1)
    assert (nearest == labels).mean() > 0.5
