#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What narrow lanes do to training: losses, gradient errors, and the band in which one fixed factor works.

    python examples/accuracy/study.py --json results.json --plot results.png
    python examples/accuracy/study.py --quick

Workers are simulated in this process with p4reduce's own quantizer, which makes the same integers as a real job
(reducers.py). The whole study takes some ten minutes on one core that has nothing else to do, --quick some seconds.
docs/numerics.md has the results of a run with --seeds 6.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import report
import torch
from reducers import FixedFactor, Float32, Lanes, Reducer
from tasks import TASKS

Make = Callable[[int, int], Reducer]
"""From number of workers and seed."""

VARIANTS: dict[str, Make] = {
    "float32": lambda *_: Float32(),
    "32 bits": lambda n, s: Lanes(32, n, seed=s),
    "32 bits, feedback": lambda n, s: Lanes(32, n, feedback=True, seed=s),
    "16 bits": lambda n, s: Lanes(16, n, rounding="stochastic", seed=s),
    "16 bits, feedback": lambda n, s: Lanes(16, n, rounding="stochastic", feedback=True, seed=s),
    "8 bits": lambda n, s: Lanes(8, n, rounding="stochastic", seed=s),
    "8 bits, feedback": lambda n, s: Lanes(8, n, rounding="stochastic", feedback=True, seed=s),
    "8 bits, nearest": lambda n, s: Lanes(8, n, seed=s),
    "8 bits, nearest, feedback": lambda n, s: Lanes(8, n, feedback=True, seed=s),
    "16 bits, one scale": lambda n, s: Lanes(16, n, rounding="stochastic", fixed=True, seed=s),
    "8 bits, one scale": lambda n, s: Lanes(8, n, rounding="stochastic", fixed=True, seed=s),
}
QUICK = ("float32", "32 bits", "8 bits", "8 bits, feedback")
STEPS = {"characters": 300, "digits": 240}
SWEEP_TASK = "digits"
SWEEP = tuple(range(-2, 41, 3))
"""Powers of two that are tried as a fixed factor."""


@dataclass
class Run:
    """One training. Losses are of data that are not trained on."""

    losses: list[float] = field(default_factory=list)
    """At so many places, the last one at the end."""
    step_error: float = 0.0
    """Mean over all steps of |sum - exact sum| / |exact sum| (L2)."""
    total_error: float = 0.0
    """The same of the sums of all steps together: what does not cancel."""
    seconds: float = 0.0
    """Processor time."""

    @property
    def loss(self) -> float:
        """At the end; infinite when the run has diverged."""
        return self.losses[-1] if math.isfinite(self.losses[-1]) else math.inf


def _fixed_factor(factor: float) -> Make:
    return lambda *_: FixedFactor(factor)


def train(task_name: str, reducer: Reducer, seed: int, workers: int, steps: int, looks: int = 10) -> Run:
    """One training of `steps` steps, in which the loss is looked at so many times."""
    task, run = TASKS[task_name](seed, workers), Run()
    started = time.process_time()
    off = exact_total = np.zeros(1)
    places = {round(steps * k / looks) for k in range(1, looks + 1)}
    for step in range(steps):
        gradients = task.gradients(step)
        exact = np.mean(np.stack(gradients), axis=0, dtype=np.float64)
        mean = reducer.mean(gradients, step)
        with np.errstate(all="ignore"):
            error = mean - exact
            run.step_error += _norm(error) / max(_norm(exact), 1e-30) / steps
            off, exact_total = off + error, exact_total + exact
        task.apply(mean)
        if step + 1 in places:
            run.losses.append(task.loss())
    with np.errstate(all="ignore"):
        run.total_error = float(_norm(off) / np.float64(_norm(exact_total)))
    run.seconds = time.process_time() - started
    return run


def _norm(vector: npt.ArrayLike) -> float:
    # Without BLAS, whose threads are one for each core and wait for each other where other programs run.
    return float(np.sqrt(np.square(vector).sum()))


def study(args: argparse.Namespace) -> dict[str, dict[str, list[Run]]]:
    """All trainings: by task (and "sweep"), then by variant (and factor), one per seed."""
    variants = {name: VARIANTS[name] for name in (QUICK if args.quick else VARIANTS)}
    plan: list[tuple[str, str, str, Make, int]] = []
    for seed in range(args.seeds):
        for task in TASKS:
            plan += [(task, name, task, make, seed) for name, make in variants.items()]
        powers = SWEEP[::6] if args.quick else SWEEP
        plan += [("sweep", f"2^{power}", SWEEP_TASK, _fixed_factor(2.0**power), seed) for power in powers]
    results: dict[str, dict[str, list[Run]]] = {}
    for done, (group, name, task, make, seed) in enumerate(plan):
        _tell(done, len(plan), f"{group}: {name}, seed {seed}")
        steps = 12 if args.quick else STEPS[task]
        run = train(task, make(args.workers, seed), seed, args.workers, steps, 1 if args.quick else 10)
        results.setdefault(group, {}).setdefault(name, []).append(run)
    _tell(len(plan), len(plan), "done\n")
    return results


def _tell(done: int, total: int, what: str) -> None:
    """Progress: one line that changes, or in a log one for every tenth."""
    if sys.stderr.isatty():
        print(f"\r{done}/{total} {what}\033[K", end="", file=sys.stderr, flush=True)
    elif done * 10 // total != (done - 1) * 10 // total:
        print(f"{done}/{total}", file=sys.stderr, flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few steps of a few variants: does it run at all?")
    parser.add_argument("--seeds", type=int, help="trainings of each kind (default 5; 2 with --quick)")
    parser.add_argument("--workers", type=int, default=4, help="workers that are simulated (default 4)")
    parser.add_argument("--json", type=Path, help="write all results there")
    parser.add_argument("--plot", type=Path, help="draw losses and the sweep there (needs matplotlib)")
    args = parser.parse_args()
    args.seeds = args.seeds or (2 if args.quick else 5)
    if args.seeds < 2:
        parser.error("a confidence interval needs at least 2 seeds")
    torch.set_num_threads(1)
    started = time.process_time()
    results = study(args)
    summary = report.summarize(results, baseline="float32")
    print(report.tables(summary))
    print(f"{args.workers} workers, {args.seeds} seeds, {time.process_time() - started:.0f} s of processor time")
    if args.json:
        raw = {
            group: {name: [asdict(run) for run in runs] for name, runs in by.items()} for group, by in results.items()
        }
        args.json.write_text(json.dumps({"workers": args.workers, "summary": summary, "runs": raw}, indent=1) + "\n")
    if args.plot:
        report.plot(results, args.plot)


if __name__ == "__main__":
    main()
