# SPDX-License-Identifier: Apache-2.0
"""The supervisor of a bench: a lab for every number of workers and loss, the workers in it, and the rows they give."""

from __future__ import annotations

import os
import selectors
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from p4reduce import wire
from p4reduce.bench import machine, scalar, stages
from p4reduce.bench.control import Member, ScalarControl
from p4reduce.bench.figures import Measurement, RankResult, Ratio, Row, build_row, ratios, total_wrong
from p4reduce.bench.inputs import largest
from p4reduce.bench.options import BenchOptions
from p4reduce.bench.shared import Shared
from p4reduce.bench.stages import Place, Stage
from p4reduce.bench.worker import HEADERS_BYTES, JOIN_SECONDS, READY_CELL, Plan
from p4reduce.demo.processes import Child, ChildFailed, Children
from p4reduce.demo.run import Lines
from p4reduce.errors import ConfigError, P4ReduceError

SCALAR_BYTES = 1 << 18
"""The baseline scalar reduces no more at once: its rate is the same, and the time of large sizes would be minutes."""
SCALAR_ITERATIONS = 5
_TICK_SECONDS = 0.2
_GRACE_SECONDS = 30.0
"""Beyond the workers' own deadlines, in which they end themselves."""
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    # A bucket that took the ring path would be measured as something else.
    "P4REDUCE_MODE": "require",
    "P4REDUCE_CONFIG": "",
    "P4REDUCE_JOIN_TIMEOUT": repr(JOIN_SECONDS),
}


class BenchFailed(P4ReduceError):
    """A measurement did not come to its end."""


class Watcher(Protocol):
    """Is told how the bench goes on."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def begin(self, name: str) -> None:
        """A measurement begins."""

    def row(self, row: Row) -> None:
        """A measurement has ended."""


@dataclass(slots=True)
class Report:
    """All that came out."""

    machine: dict[str, Any]
    switch: dict[str, Any]
    options: BenchOptions
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ratios(self) -> list[Ratio]:
        """See `figures.ratios`."""
        return ratios(self.rows)

    @property
    def wrong(self) -> int:
        """Wrong elements."""
        return total_wrong(self.rows)

    def as_dict(self) -> dict[str, Any]:
        """The JSON document. Rows name their loss where the run has several."""
        several = len(self.options.losses) > 1
        rows = [{**row.as_json(), "loss": row.loss} if several else row.as_json() for row in self.rows]
        return {
            "machine": self.machine,
            "switch": self.switch,
            "rows": rows,
            "ratios": [ratio.as_json() for ratio in self.ratios],
            "options": self.options.as_dict(),
            "notes": self.notes,
        }


def plan_main(options: BenchOptions, *, in_lab: bool) -> list[Measurement]:
    """What is measured with the reduction program on the switch, in order."""
    made: list[Measurement] = []
    for size in options.sizes:
        common = (size, options.iterations, options.warmup, options.deadline)
        made += [Measurement("switch", *common, lane_bits=bits) for bits in options.lane_bits]
        if "gloo" in options.baselines:
            made.append(Measurement("gloo", *common))
    if "forward" in options.baselines and in_lab:
        made.append(_forward(options))
    return made


def plan_scalar(options: BenchOptions, loss: float, *, in_lab: bool) -> list[Measurement]:
    """What is measured with the program scalar on the switch."""
    made: list[Measurement] = []
    if "scalar" in options.baselines and not loss:
        frame = scalar.FRAME.payload_bytes
        size = max(min(max(options.sizes), SCALAR_BYTES) // frame, 1) * frame
        warmup = min(options.warmup, 1)
        made.append(Measurement("scalar", size, min(options.iterations, SCALAR_ITERATIONS), warmup, options.deadline))
    if "forward" in options.baselines and not in_lab:
        made.append(_forward(options))
    return made


def _forward(options: BenchOptions) -> Measurement:
    frame = wire.profile(options.profile).datagram_bytes + HEADERS_BYTES
    return Measurement("forward", frame, 1, 0, options.deadline)


def steps(options: BenchOptions) -> int:
    """How many measurements there will be."""
    in_lab = os.geteuid() == 0
    each = [plan_main(options, in_lab=in_lab) + plan_scalar(options, loss, in_lab=in_lab) for loss in options.losses]
    return len(options.workers) * sum(len(plan) for plan in each)


def run_bench(options: BenchOptions, watcher: Watcher) -> Report:
    """Measure everything. Call it from the main thread; leaves no process, namespace or folder behind.

    UsageError, ConfigError and SwitchError say what cannot be had here, BenchFailed names what did not end well.
    """
    require_packages(options)
    stages.require(options)
    for workers in options.workers:
        for bits in options.lane_bits:
            largest(bits, workers)
    report = Report(machine.machine(), machine.switch(options.switch, options.profile), options)
    in_lab = os.geteuid() == 0
    report.notes += notes(options, in_lab=in_lab)
    for text in report.notes:
        watcher.note(text)
    # One bench at a time: the lab has one name, and two would only measure each other.
    try:
        with stages.bench_lock() if in_lab else nullcontext():
            for workers in options.workers:
                for loss in options.losses:
                    _run_stage(report, workers, loss, in_lab, watcher)
    except ChildFailed as error:
        raise BenchFailed(str(error)) from error
    return report


def notes(options: BenchOptions, *, in_lab: bool) -> list[str]:
    """What a reader of the figures has to know."""
    found = []
    if not in_lab:
        found.append("without root: embedded switch with UDP ports on loopback, no links of their own")
        if "gloo" in options.baselines:
            found.append("gloo does not cross the switch here: its figures are those of loopback TCP")
        if "forward" in options.baselines:
            found.append("forward is measured through the UDP ports, by the program scalar")
    if "scalar" in options.baselines and any(options.losses):
        found.append("scalar is measured on links without loss alone")
    return found


def require_packages(options: BenchOptions) -> None:
    """ConfigError, naming what to install, when a package that is needed is missing."""
    import importlib.util

    needed = {"p4runtime_sh": "controller", "p4": "bmv2"}
    if os.geteuid() == 0:
        needed["pyroute2"] = "bmv2"
    if "gloo" in options.baselines:
        needed["torch"] = "torch"
    missing = sorted({extra for module, extra in needed.items() if importlib.util.find_spec(module) is None})
    if missing:
        raise ConfigError(
            f"this bench needs packages that are not installed: pip install 'p4reduce[{','.join(missing)}]'"
        )
    if "scalar" in options.baselines or ("forward" in options.baselines and os.geteuid() != 0):
        scalar.program()


def _run_stage(report: Report, workers: int, loss: float, in_lab: bool, watcher: Watcher) -> None:
    """All measurements with one number of workers and one loss."""
    options = report.options
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="p4reduce-bench-")))
        stage: Stage
        # The namespaces of a lab outlive the children in them, and go when these are gone.
        if in_lab:
            stage = stack.enter_context(stages.lab_stage(options, workers, loss))
            infrastructure = stack.enter_context(Children(folder))
        else:
            infrastructure = stack.enter_context(Children(folder))
            stage = stack.enter_context(stages.loopback_stage(options, workers, loss, folder, infrastructure))
        if (
            stage.impairer
            and (text := f"frames are delayed and lost by the lab's {stage.impairer}") not in report.notes
        ):
            report.notes.append(text)
            watcher.note(text)
        for number, plan in enumerate((plan_main(options, in_lab=in_lab), plan_scalar(options, loss, in_lab=in_lab))):
            if not plan:
                continue
            control = None
            if number:
                control = stack.enter_context(ScalarControl(stage.free_switch()))
                control.load(*scalar.program())
            crew = _Crew(options, workers, loss, plan, stage, watcher, report.rows)
            inner = folder / str(number)
            inner.mkdir()
            crew.run(inner, infrastructure, control)


class _Crew:
    """The workers of one plan, from their start to their end."""

    def __init__(
        self,
        options: BenchOptions,
        workers: int,
        loss: float,
        measurements: list[Measurement],
        stage: Stage,
        watcher: Watcher,
        rows: list[Row],
    ) -> None:
        self._options, self._workers, self._loss = options, workers, loss
        self._measurements, self._stage, self._watcher, self._rows = measurements, stage, watcher, rows
        self._found: list[dict[int, RankResult]] = [{} for _ in measurements]
        self._begun = -1
        self._doing = "joining"
        self._ports: dict[int, int] = {}
        self._places: list[Place] = []
        self._shared: Shared | None = None

    def run(self, folder: Path, infrastructure: Children, control: ScalarControl | None) -> None:
        """Start the workers and take what they say until they have ended."""
        self._places = self._stage.places()
        page, file = folder / "shared", folder / "plan.json"
        Shared.create(page)
        self._shared = Shared(page, 0, self._workers)
        plan = Plan(
            self._measurements,
            self._options.seed,
            self._options.profile,
            str(page),
            self._stage.interface,
            [list(place.endpoint) for place in self._places],
            [place.address for place in self._places],
        )
        file.write_text(plan.as_json())
        command = [sys.executable, "-m", "p4reduce.bench.worker", str(file)]
        with Children(folder) as children:
            crew = [
                children.start(
                    f"rank-{rank}",
                    command,
                    environment={**_ENVIRONMENT, **place.environment},
                    namespace=place.namespace,
                    pipe=True,
                )
                for rank, place in enumerate(self._places)
            ]
            for child in crew:
                child.expected_to_end = True
            self._listen(crew, children, infrastructure, control)
        missing = [
            one for one, found in zip(self._measurements, self._found, strict=True) if len(found) < self._workers
        ]
        if missing:
            raise BenchFailed(f"the workers ended without results for: {missing[0].name(self._workers)}")

    def _listen(
        self, crew: Sequence[Child], children: Children, infrastructure: Children, control: ScalarControl | None
    ) -> None:
        limit = time.monotonic() + 2 * JOIN_SECONDS + _GRACE_SECONDS
        with selectors.DefaultSelector() as selector:
            for rank, child in enumerate(crew):
                if child.process.stdout is not None:
                    selector.register(child.process.stdout, selectors.EVENT_READ, (rank, Lines(child.process.stdout)))
            while selector.get_map() or not all(child.ended() for child in crew):
                if self._read(selector, _TICK_SECONDS, control):
                    limit = time.monotonic() + self._options.deadline + _GRACE_SECONDS
                try:
                    children.check()
                    infrastructure.check()
                except ChildFailed:
                    # What it said last is the better explanation.
                    self._read(selector, 0.0, control)
                    raise
                if time.monotonic() > limit:
                    raise BenchFailed(f"{self._doing}: not done within {self._options.deadline:g} s")

    def _read(self, selector: selectors.BaseSelector, seconds: float, control: ScalarControl | None) -> bool:
        """Take the events that come within `seconds`; false when none came."""
        progress = False
        for key, _ in selector.select(seconds):
            rank, lines = key.data
            for event in lines.events():
                self._take(rank, event, control)
                progress = True
            if lines.ended:
                selector.unregister(key.fileobj)
        return progress

    def _take(self, rank: int, event: dict[str, Any], control: ScalarControl | None) -> None:
        """One event of a worker. BenchFailed when it is the last one."""
        kind = event["event"]
        if kind == "late":
            raise BenchFailed(
                f"{event['name']}: rank {rank} was not done within {event['seconds']:g} s (--deadline sets that)"
            )
        if kind == "failed":
            raise BenchFailed(f"{self._doing}: rank {rank}: {event['error']}")
        if kind == "port":
            self._admit(rank, event["port"], control)
        elif kind == "begin" and event["number"] > self._begun:
            self._begun = event["number"]
            self._doing = self._measurements[self._begun].name(self._workers)
            self._watcher.begin(self._doing)
        elif kind == "result":
            self._result(rank, event["number"], RankResult(**event["found"]))

    def _admit(self, rank: int, port: int, control: ScalarControl | None) -> None:
        """Once all sockets are open, tell the switch, and then the workers."""
        self._ports[rank] = port
        if len(self._ports) == self._workers and control is not None and self._shared is not None:
            members = [
                Member(place.port, place.address, place.mac, self._ports[number])
                for number, place in enumerate(self._places)
            ]
            control.admit(members)
            self._shared.put(READY_CELL, 1)

    def _result(self, rank: int, number: int, found: RankResult) -> None:
        ranks = self._found[number]
        ranks[rank] = found
        if len(ranks) == self._workers:
            ordered = [ranks[one] for one in range(self._workers)]
            wanted = self._measurements[number]
            try:
                row = build_row(wanted, ordered, workers=self._workers, loss=self._loss, rate=self._options.rate)
            except ValueError as error:
                raise BenchFailed(str(error)) from error
            self._rows.append(row)
            self._watcher.row(row)
