# SPDX-License-Identifier: Apache-2.0
"""The campaign: an undisturbed run for the bits, then one run after another, each with its fault."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from p4reduce.errors import SwitchError
from p4reduce_bmv2.campaign import arena as arenas
from p4reduce_bmv2.campaign.arena import Arena, RingNetwork
from p4reduce_bmv2.campaign.crew import fork_server
from p4reduce_bmv2.campaign.messages import Training
from p4reduce_bmv2.campaign.outcome import EXACT, Outcome
from p4reduce_bmv2.campaign.plan import FAULTS, Fault, Moments, draw
from p4reduce_bmv2.campaign.report import summary
from p4reduce_bmv2.campaign.run import Limits, Run
from p4reduce_bmv2.switch import Kind


@dataclass(frozen=True)
class Options:
    """What a campaign is told."""

    seed: int = 0
    runs: int = 200
    switch: Kind = "embedded"
    faults: Sequence[Fault] = FAULTS
    double: bool = False
    """A second fault follows where the first is survived."""
    only: Sequence[int] = ()
    """Numbers of the runs to do; empty: the first `runs`."""
    workers: int = 4
    profile: str = "w34"
    lease: float = 3.0
    deadline: float = 20.0
    ring: RingNetwork = "management"
    training: Training = field(default_factory=Training)
    limits: Limits = field(default_factory=Limits)
    logs: Path | None = None
    """Folder for what bad runs leave; None: a new temporary one."""
    keep: bool = False
    """Keep the logs of good runs as well."""


class Campaign:
    """Call `execute` once, from the main thread."""

    def __init__(
        self,
        options: Options,
        say: Callable[[str], None] = lambda _: None,
        on_begin: Callable[[int, str], None] = lambda *_: None,
        on_outcome: Callable[[Outcome, Path], None] = lambda *_: None,
    ) -> None:
        """`on_begin` gets the number of a run and its plan in words; `on_outcome` its record and its logs' folder."""
        self._options = options
        self._say = say
        self._on_begin = on_begin
        self._on_outcome = on_outcome
        self._context = fork_server()
        self.outcomes: list[Outcome] = []
        self.reference: list[str] = []
        training = options.training
        self._moments = Moments(training.steps, training.hold, options.workers, options.lease)
        self._training = replace(training, seed=options.seed)

    def execute(self) -> dict[str, Any]:
        """Run all; returns the summary. SwitchError: switch, controller or the undisturbed run do not work at all."""
        options = self._options
        started = time.monotonic()
        # Short, because a socket's path has at most 107 characters.
        logs = options.logs or Path(tempfile.mkdtemp(prefix="p4c-"))
        logs.mkdir(parents=True, exist_ok=True)
        remaining = list(options.only or range(options.runs))
        generation = 0
        try:
            while remaining:
                with tempfile.TemporaryDirectory(prefix="p4c-") as scratch, self._arena(Path(scratch)) as arena:
                    try:
                        self._season(arena, remaining, logs)
                    finally:
                        if any(not outcome.good for outcome in self.outcomes) or options.keep:
                            for log in arena.logs:
                                shutil.copy(log, logs / f"{log.stem}-{generation}.log")
                generation += 1
        except (KeyboardInterrupt, SystemExit):
            if options.logs is None:
                shutil.rmtree(logs)
            raise
        if not any(logs.iterdir()):
            logs.rmdir()
        return summary(self.outcomes, options.switch, options.seed, self.reference[-1], time.monotonic() - started)

    def _season(self, arena: Arena, remaining: list[int], logs: Path) -> None:
        """Runs on one arena, until all are done or one has left it in doubt."""
        if not self.reference:
            self._undisturbed(arena, logs)
        while remaining:
            number = remaining.pop(0)
            plan = draw(self._options.seed, number, self._moments, self._options.faults, self._options.double)
            self._on_begin(number, plan.describe())
            run = Run(
                arena, self._context, self._training, plan, self.reference, logs / f"run{number}",
                self._options.limits, number,
            )  # fmt: skip
            offsets = [(log, log.stat().st_size if log.exists() else 0) for log in arena.logs]
            outcome = run.execute()
            self.outcomes.append(outcome)
            if outcome.good and not self._options.keep:
                run.forget()
            else:
                _keep(outcome, offsets, logs / f"run{number}")
            self._on_outcome(outcome, logs / f"run{number}")
            if not outcome.good:
                # What follows must not suffer from what this one left behind.
                if outcome.verdict not in (EXACT,) or outcome.leaks:
                    arena.abort()
                return

    def _undisturbed(self, arena: Arena, logs: Path) -> None:
        folder = logs / "undisturbed"
        self._say("the undisturbed run")
        limits = replace(self._options.limits, run=max(self._options.limits.run, Limits().run))
        run = Run(arena, self._context, self._training, None, None, folder, limits)
        outcome = run.execute()
        if outcome.verdict != EXACT or outcome.leaks:
            raise SwitchError(
                f"the undisturbed run ended {outcome.verdict}: {'; '.join(outcome.problems + outcome.leaks)}; "
                f"its logs are in {folder}"
            )
        if not (any("slots" in text for text in run.held) and any("entry admit" in text for text in run.held)):
            raise SwitchError(f"a running job holds slots and entries, and the search for leaks saw {run.held}")
        self.reference = run.digests
        self._say(f"the undisturbed run took {outcome.seconds:.1f} s; bits at its end: {self.reference[-1]}")
        run.forget()

    def _arena(self, folder: Path) -> Arena:
        options = self._options
        return arenas.make(
            options.switch, folder, workers=options.workers, profile=options.profile, lease=options.lease,
            deadline=options.deadline, ring=options.ring,
        )  # fmt: skip


def _keep(outcome: Outcome, offsets: Sequence[tuple[Path, int]], folder: Path) -> None:
    """Put what switch and controller wrote during the run, and its record, beside the workers' logs."""
    folder.mkdir(parents=True, exist_ok=True)
    for log, offset in offsets:
        if log.exists():
            (folder / log.name).write_bytes(log.read_bytes()[offset:])
    (folder / "outcome.json").write_text(json.dumps(outcome.as_dict(), indent=1))
