# SPDX-License-Identifier: Apache-2.0
"""Labs for tests: names of their own, a run folder of their own, and nothing left behind."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from p4reduce_bmv2 import lab_run, netns
from p4reduce_bmv2.lab import Lab, LabOptions
from p4reduce_bmv2.lab_state import RUN_DIR_VARIABLE
from p4reduce_bmv2.switch import find_bmv2

WORKER = Path(__file__).with_name("lab_worker.py")
CLI = [sys.executable, "-m", "p4reduce", "lab"]
KINDS = [
    pytest.param("embedded", marks=pytest.mark.netns),
    pytest.param("bmv2", marks=[pytest.mark.bmv2, pytest.mark.netns]),
]
RUN_SECONDS = 100.0
_numbers = itertools.count()


@contextmanager
def run_folder() -> Iterator[Path]:
    """A run folder for the time of some tests. Short, because a socket's path has at most 107 characters."""
    folder = Path(tempfile.mkdtemp(prefix="p4l-"))
    before = os.environ.get(RUN_DIR_VARIABLE)
    os.environ[RUN_DIR_VARIABLE] = str(folder)
    try:
        yield folder
        assert [path.name for path in folder.iterdir()] == []
    finally:
        if before is None:
            del os.environ[RUN_DIR_VARIABLE]
        else:
            os.environ[RUN_DIR_VARIABLE] = before
        shutil.rmtree(folder)


def new_name() -> str:
    return f"test-{os.getpid()}-{next(_numbers)}"


def require(kind: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if kind == "bmv2" and find_bmv2() is None:
        pytest.skip("simple_switch_grpc is not installed")


@contextmanager
def lab(options: LabOptions, name: str = "") -> Iterator[Lab]:
    """A lab that is up, and gone afterwards, which is checked."""
    require(options.switch)
    made = Lab(name or new_name())
    assert made.up(options)
    try:
        yield made
    finally:
        state = made.folder.read()
        made.down()
    assert traces(made) == []
    if state is not None:
        assert [process.pid for process in state.processes.values() if process.alive] == []


def traces(made: Lab) -> list[str]:
    """Namespaces and interfaces that bear the lab's prefix, and its folder."""
    prefix = made.folder.prefix
    names = [path.name for path in netns.RUN_DIR.iterdir()] if netns.RUN_DIR.exists() else []
    names += [line.split(":")[0].strip() for line in Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]]
    return [name for name in names if name.startswith(prefix)] + [str(made.folder.path)] * made.folder.path.exists()


def run(made: Lab, *command: str, timeout: float = RUN_SECONDS) -> tuple[int, dict[int, list[str]], str]:
    """`lab run`: exit code, lines of output by rank, and what came on standard error."""
    out, errors = io.BytesIO(), io.BytesIO()
    code = lab_run.run(made, command, out=out, errors=errors, timeout=timeout)
    lines: dict[int, list[str]] = {}
    for line in out.getvalue().decode().splitlines():
        found = re.fullmatch(r"\[([0-9]+)\] (.*)", line)
        assert found, line
        lines.setdefault(int(found[1]), []).append(found[2])
    return code, lines, errors.getvalue().decode()


def work(made: Lab, *arguments: str, timeout: float = RUN_SECONDS) -> list[dict[str, Any]]:
    """Run lab_worker.py on all workers; the last line of each, by rank."""
    code, lines, errors = run(made, sys.executable, str(WORKER), *arguments, timeout=timeout)
    assert code == 0, errors
    reports = [json.loads(lines[rank][-1]) for rank in sorted(lines)]
    assert [report["rank"] for report in reports] == list(range(len(made.topology(made.state()).hosts)))
    return reports


def check(reports: list[dict[str, Any]]) -> None:
    """All ranks have the same bits, and rank 0 found them right."""
    assert len({report["sha256"] for report in reports}) == 1
    assert [report["wrong"] for report in reports] == [0] * len(reports)


def cli(*arguments: str, timeout: float = 60.0, **options: Any) -> subprocess.CompletedProcess[str]:
    """`p4reduce lab ...`, finished."""
    return subprocess.run([*CLI, *arguments], capture_output=True, text=True, timeout=timeout, check=False, **options)


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def faults(made: Lab, kind: str) -> int:
    """How many frames met this fault (lost, duplicated, reordered) on all links, by the wire's or netem's count."""
    status = made.status()
    ways = [way for worker in status["workers"] for way in worker["link"].values()]
    if status["impairer"] == "wire":
        return sum(way["wire"][kind] for way in ways)
    if kind != "lost":
        pytest.skip("netem counts nothing but drops")
    return sum(way["tc"]["netem"]["drops"] for way in ways)


def at(namespace: str, path: str) -> str:
    """Content of a file under /sys as a namespace sees it."""
    command = [*netns.command_prefix(namespace), "cat", path]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
