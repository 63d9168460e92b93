# SPDX-License-Identifier: Apache-2.0
"""The demo's supervisor: starts a switch, a controller and the workers, listens to rank 0, and ends them all again."""

from __future__ import annotations

import importlib.util
import json
import os
import selectors
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import IO, Any, Protocol

from p4reduce.demo import labs
from p4reduce.demo.folders import scratch_folder
from p4reduce.demo.labs import Lab
from p4reduce.demo.processes import Child, Children
from p4reduce.demo.report import DemoOptions, DemoReport, build_report
from p4reduce.demo.train import RUNS
from p4reduce.errors import ConfigError, P4ReduceError

_PACKAGES = {
    "torch": "torch",
    "p4runtime_sh": "controller",
    "p4": "bmv2",
    "rich": "controller",
}
"""Modules the demo needs, and the extras of p4reduce that bring them."""
_TICK_SECONDS = 0.2


class Watcher(Protocol):
    """Is told how the demo goes on."""

    def note(self, text: str) -> None:
        """Something worth a line happened."""

    def step(self, run: str, step: int, loss: float) -> None:
        """Rank 0 has finished step `step` (from 1) of `run`, with this training loss."""


class DemoTimeout(P4ReduceError):
    """The demo took longer than it may."""


def require_packages() -> None:
    """ConfigError, naming what to install, when a package the demo needs is missing."""
    missing = {extra: True for module, extra in _PACKAGES.items() if importlib.util.find_spec(module) is None}
    if missing:
        raise ConfigError(
            f"the demo needs packages that are not installed: pip install 'p4reduce[{','.join(missing)}]'"
        )


def run_demo(options: DemoOptions, watcher: Watcher) -> DemoReport:
    """Run the whole demo and compare. Must be called from the main thread; leaves no process and no namespace behind.

    Errors: ConfigError for what is missing on this machine, ChildFailed when a child dies, DemoTimeout.
    """
    require_packages()
    started = time.monotonic()
    deadline = started + options.timeout
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder())
        # Namespaces must outlive the processes in them, so the lab is left after the children are gone.
        lab = stack.enter_context(labs.choose(options, folder, watcher.note))
        children = stack.enter_context(Children(folder))
        lab.start(children, deadline)
        watcher.note(f"{lab.description}; training on {options.workers} workers")
        workers = start_workers(lab, children, options)
        runs = collect(workers, children, watcher, deadline)
        profile = lab.profile
        kind = lab.kind
    return build_report(options, kind, profile, runs, time.monotonic() - started)


def start_workers(lab: Lab, children: Children, options: DemoOptions) -> list[Child]:
    """Start torchrun: once for all workers on this host, or once in every host's namespace."""
    training = ["-m", "p4reduce.demo.train", "--steps", str(options.steps), "--seed", str(options.seed)]
    started = []
    for place in lab.places():
        command = [sys.executable, "-m", "torch.distributed.run", *place.torchrun, *training]
        environment = {**os.environ, **_WORKER_ENVIRONMENT, **place.environment}
        child = children.start(place.name, command, environment=environment, namespace=place.namespace, pipe=True)
        child.expected_to_end = True
        started.append(child)
    return started


_WORKER_ENVIRONMENT = {
    # One thread each: the sums inside torch then have one order, and the workers share the machine's cores.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Nobody but us decides what kind of job this is.
    "P4REDUCE_MODE": "auto",
    "P4REDUCE_JOB": "",
    "P4REDUCE_CONFIG": "",
}


def collect(
    workers: Sequence[Child], children: Children, watcher: Watcher, deadline: float
) -> dict[str, list[dict[str, Any]]]:
    """Read the workers' events until all of them have ended. Returns what every rank reported, by run."""
    results: dict[str, list[dict[str, Any]]] = {}
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            if worker.process.stdout is None:
                raise ValueError(f"{worker.name} was started without a pipe")
            selector.register(worker.process.stdout, selectors.EVENT_READ, Lines(worker.process.stdout))
        while selector.get_map() or not all(worker.ended() for worker in workers):
            for key, _ in selector.select(_TICK_SECONDS):
                lines: Lines = key.data
                for event in lines.events():
                    if event["event"] == "step":
                        watcher.step(event["run"], event["step"], event["loss"])
                    elif event["event"] == "result":
                        results[event["run"]] = event["ranks"]
                if lines.ended:
                    selector.unregister(key.fileobj)
            children.check()
            if time.monotonic() > deadline:
                done = ", ".join(results) or "none"
                raise DemoTimeout(f"the demo is not done in time (finished runs: {done}); --timeout gives it longer")
    missing = [run for run in RUNS if run not in results]
    if missing:
        raise P4ReduceError(f"the workers ended without results for {', '.join(missing)}")
    return results


class Lines:
    """Cuts what a pipe delivers into lines and picks the events among them; libraries may print lines of their own."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._rest = b""
        self.ended = False

    def events(self) -> Iterator[dict[str, Any]]:
        """Read what is there. Call it only when the pipe is readable."""
        data = os.read(self._stream.fileno(), 65536)
        self.ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            event = _parse(line)
            if event is not None:
                yield event


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
