# SPDX-License-Identifier: Apache-2.0
"""From runs to numbers that mean something: confidence intervals over seeds, tables, a plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from study import Run

    Results = Mapping[str, Mapping[str, Sequence[Run]]]

# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half width of its 95 % confidence interval, of independent values, at least two."""
    n = len(values)
    mean = sum(values) / n
    if not math.isfinite(mean):
        return mean, math.nan
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    quantile = _T95[n - 2] if n - 2 < len(_T95) else 1.96 + 2.5 / (n - 1)
    return mean, quantile * math.sqrt(variance / n)


def summarize(results: Results, baseline: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Losses with intervals; differences from the baseline, seed by seed: same start, same data."""
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for group, by_name in results.items():
        base = results[group if baseline in by_name else "digits"][baseline]
        for name, runs in by_name.items():
            differences = [run.loss - other.loss for run, other in zip(runs, base, strict=True)]
            one: dict[str, Any] = {"diverged": sum(not math.isfinite(run.loss) for run in runs)}
            one["loss"], one["loss_95"] = interval([run.loss for run in runs])
            one["difference"], one["difference_95"] = interval(differences)
            one["step_error"] = sum(run.step_error for run in runs) / len(runs)
            one["total_error"] = sum(run.total_error for run in runs) / len(runs)
            base_loss, base_half = interval([run.loss for run in base])
            one["within"] = abs(one["loss"] - base_loss) <= base_half
            summary.setdefault(group, {})[name] = one
    return summary


def tables(summary: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Markdown."""
    lines = []
    for group, by_name in summary.items():
        lines += [
            f"**{group}**",
            "",
            "| | loss | against float32, same seeds | in its interval | error of a step | error of all steps |",
            "|---|---|---|---|---|---|",
        ]
        for name, one in by_name.items():
            if one["diverged"]:
                lines.append(f"| {name} | diverges | | no | | |")
                continue
            lines.append(
                f"| {name} | {one['loss']:.4f} ± {one['loss_95']:.4f} | "
                f"{one['difference']:+.4f} ± {one['difference_95']:.4f} | {'yes' if one['within'] else 'no'} | "
                f"{_short(one['step_error'])} | {_short(one['total_error'])} |"
            )
        lines.append("")
    return "\n".join(lines)


def _short(value: float) -> str:
    return f"{value:.1e}" if value < 1e-3 or value >= 100 else f"{value:.3f}"


def plot(results: Results, path: Path) -> None:
    """Losses over time by task, and the sweep. SystemExit without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    tasks = [group for group in results if group != "sweep"]
    figure, axes = pyplot.subplots(1, len(results), figsize=(5 * len(results), 4.2), layout="constrained")
    for axis, group in zip(axes, tasks, strict=False):
        for number, (name, runs) in enumerate(results[group].items()):
            curves = [run.losses for run in runs]
            means = [sum(at) / len(at) for at in zip(*curves, strict=True)]
            axis.plot([10 * (k + 1) for k in range(len(means))], means, label=name, linewidth=1, **_style(name, number))
        axis.set(title=group, xlabel="% of the steps", ylabel="loss on held-out data")
    axes[0].legend(fontsize=7)
    powers, losses, halves = [], [], []
    for name, runs in results["sweep"].items():
        mean, half = interval([min(run.loss, 10.0) for run in runs])
        powers.append(int(name.removeprefix("2^")))
        losses.append(mean)
        halves.append(half)
    axes[-1].errorbar(powers, losses, halves, marker="o", markersize=3, capsize=2)
    base, half = interval([run.loss for run in results["digits"]["float32"]])
    axes[-1].axhspan(base - half, base + half, alpha=0.3, color="gray")
    axes[-1].set(title="digits, one fixed factor, 32 bits", xlabel="log2 of the factor", ylabel="loss (10 at most)")
    axes[-1].set_yscale("log")
    figure.savefig(path, dpi=120)


def _style(name: str, number: int) -> dict[str, Any]:
    return {"color": f"C{number % 10}" if number < 10 else "black", "linestyle": "--" if "feedback" in name else "-"}
