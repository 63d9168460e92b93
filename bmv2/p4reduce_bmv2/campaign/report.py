# SPDX-License-Identifier: Apache-2.0
"""What a campaign shows: a line for every run, a table of faults and outcomes, and one line of JSON."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from p4reduce_bmv2.campaign.outcome import EXACT, HUNG, NAMED, VERDICTS, WRONG, Outcome

_TIMELINE = "    "


class Display:
    """Progress: a bar on a terminal, plain lines elsewhere. A context manager."""

    def __init__(self, total: int, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._live = self._console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), console=self._console, disable=not self._live, transient=True,
        )  # fmt: skip
        self._task = self._progress.add_task("starting", total=total)
        self._done = 0
        self._total = total
        self._bad = 0

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """A line."""
        self._console.print(escape(text))

    def begin(self, text: str) -> None:
        """What is being done now; only on a terminal."""
        bad = f", {self._bad} bad" if self._bad else ""
        self._progress.update(self._task, description=escape(text + bad))

    def finish(self, outcome: Outcome, replay: str, logs: str) -> None:
        """A run has ended."""
        self._done += 1
        self._bad += not outcome.good
        self._progress.advance(self._task)
        mark = "" if outcome.good else "BAD "
        self.say(f"{mark}{self._done}/{self._total} run {outcome.run}: {line(outcome)}")
        if not outcome.good:
            for text in (*complaints(outcome), *(_TIMELINE + entry for entry in outcome.timeline)):
                self.say(f"  {text}")
            self.say(f"  logs: {logs}")
            self.say(f"  again: {replay}")


def line(outcome: Outcome) -> str:
    """One run in one line."""
    parts = [outcome.moment or outcome.fault, outcome.verdict]
    if outcome.resumed is not None:
        parts.append(f"resumed after {outcome.resumed:.2f} s")
    if outcome.named is not None:
        parts.append(f"named after {outcome.named:.2f} s")
    if outcome.returned is not None:
        parts.append(f"on the switch again after {outcome.returned:.2f} s")
    if outcome.path:
        parts.append(f"path at the end: {outcome.path}")
    return ": ".join(parts[:1] + [", ".join(parts[1:])])


def complaints(outcome: Outcome) -> list[str]:
    """What is wrong with a run."""
    found = list(outcome.problems)
    if not outcome.fired:
        found.append("the fault did not fire")
    return found + [f"leak: {leak}" for leak in outcome.leaks]


def table(outcomes: Sequence[Outcome], faults: Sequence[str]) -> Table:
    """Faults and outcomes."""
    made = Table(title="Faults and outcomes")
    made.add_column("fault")
    for name in (
        "runs",
        "fired",
        *VERDICTS,
        "leaked",
        "resumed or named, s",
        "back on the switch, s",
        "path at the end",
    ):
        made.add_column(name, justify="right" if not name.startswith("path") else "left")
    for fault in (*faults, "all"):
        some = [outcome for outcome in outcomes if fault in (outcome.fault, "all")]
        if not some:
            continue
        verdicts = Counter(outcome.verdict for outcome in some)
        paths = Counter(outcome.path for outcome in some if outcome.path and outcome.verdict == EXACT)
        made.add_row(
            fault, str(len(some)), str(sum(outcome.fired for outcome in some)),
            *(str(verdicts[verdict]) for verdict in VERDICTS), str(sum(bool(outcome.leaks) for outcome in some)),
            _spread(some, lambda outcome: outcome.resumed if outcome.resumed is not None else outcome.named),
            _spread(some, lambda outcome: outcome.returned),
            ", ".join(f"{path} {count}" for path, count in sorted(paths.items())),
            end_section=fault == faults[-1],
        )  # fmt: skip
    return made


def print_table(outcomes: Sequence[Outcome], faults: Sequence[str], stream: TextIO) -> None:
    """Print it, as wide as it needs to be where the output is no terminal."""
    console = Console(file=stream, highlight=False)
    if not console.is_terminal:
        console = Console(file=stream, highlight=False, width=200)
    console.print(table(outcomes, faults))


def _spread(outcomes: Sequence[Outcome], value: Callable[[Outcome], float | None]) -> str:
    found = [number for outcome in outcomes if (number := value(outcome)) is not None]
    return f"{statistics.median(found):.2f} (max {max(found):.2f})" if found else ""


def summary(outcomes: Sequence[Outcome], switch: str, seed: int, bits: str, seconds: float) -> dict[str, Any]:
    """The numbers, for JSON."""
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    return {
        "runs": len(outcomes),
        "faults_fired": sum(outcome.fired for outcome in outcomes),
        "exact": verdicts[EXACT],
        "named_error": verdicts[NAMED],
        "hung": verdicts[HUNG],
        "wrong": verdicts[WRONG],
        "leaked": sum(bool(outcome.leaks) for outcome in outcomes),
        "bad_runs": [outcome.run for outcome in outcomes if not outcome.good],
        "bits": bits,
        "switch": switch,
        "seed": seed,
        "seconds": round(seconds, 1),
    }
