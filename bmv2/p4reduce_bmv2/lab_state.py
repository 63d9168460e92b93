# SPDX-License-Identifier: Apache-2.0
"""What a running lab left on this machine: a folder with its state, so that any later process can end it.

A process is known by its pid and its start time, a namespace by its name and inode: neither is ever mistaken for
another that came to bear the same number or name. What runs inside the lab's namespaces belongs to the lab.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from p4reduce.errors import SwitchError, UsageError
from p4reduce_bmv2 import netns

RUN_DIR_VARIABLE = "P4REDUCE_RUN_DIR"
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,31}")
_SHORT = re.compile(r"[a-z0-9]{1,6}")
_VERSION = 1
_POLL = 0.02


@dataclass(frozen=True, slots=True)
class Process:
    """One process for good: pids are used again, this pair is not."""

    pid: int
    start: int
    """Clock ticks from boot to its start (proc(5))."""

    @staticmethod
    def of(pid: int) -> Process | None:
        """The process of this pid; None when there is none, or only what is left for its parent to collect."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return None
        # The name before it may hold spaces and parentheses.
        fields = text[text.rindex(")") + 2 :].split()
        return None if fields[0] in "ZX" else Process(pid, int(fields[19]))

    @property
    def alive(self) -> bool:
        """Whether this very process still runs."""
        return Process.of(self.pid) == self

    def signal(self, number: int) -> None:
        """Send a signal to it, and to no other."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


@dataclass
class LabState:
    """Content of the state file."""

    name: str
    prefix: str
    options: dict[str, Any]
    phase: str = "starting"
    """"up" once everything answers; before, what the file names may not be there yet."""
    impairer: str = "none"
    """Who delays and loses frames: none, netem or wire."""
    namespaces: dict[str, int] = field(default_factory=dict)
    """Inode by name; 0 until it is made."""
    processes: dict[str, Process] = field(default_factory=dict)
    controller: str = ""
    """Address that workers join at."""
    started: float = 0.0
    """Seconds since 1970."""


def run_dir() -> Path:
    """Where labs keep their folders: /run/p4reduce for root, otherwise the user's runtime or temporary folder."""
    if chosen := os.environ.get(RUN_DIR_VARIABLE):
        return Path(chosen)
    if os.geteuid() == 0 and Path("/run").is_dir():
        return Path("/run/p4reduce")
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime, "p4reduce")
    return Path(tempfile.gettempdir(), f"p4reduce-{os.geteuid()}")


def prefix_of(name: str) -> str:
    """What the names of a lab's namespaces and interfaces start with: different for every name."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"lab name {name!r}: 1 to 32 of a-z, 0-9 and _.- are allowed")
    if _SHORT.fullmatch(name):
        return f"p4l{name}"
    # Interface names are short: 15 characters at most.
    return f"p4h{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def names() -> list[str]:
    """Labs that have a state file."""
    return sorted(path.parent.name.removeprefix("lab-") for path in run_dir().glob("lab-*/state.json"))


class Folder:
    """A lab's folder. Use `locked` around everything that changes the lab."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.prefix = prefix_of(name)
        self.path = run_dir() / f"lab-{name}"

    @contextlib.contextmanager
    def locked(self, seconds: float = 120.0) -> Iterator[None]:
        """Keep other processes from changing this lab meanwhile. SwitchError when another one does for long."""
        run_dir().mkdir(mode=0o755, parents=True, exist_ok=True)
        path = run_dir() / f"{self.prefix}.lock"
        deadline = time.monotonic() + seconds
        while (descriptor := _try_lock(path)) is None:
            if time.monotonic() > deadline:
                raise SwitchError(f"another process is changing lab {self.name!r}")
            time.sleep(_POLL)
        try:
            yield
        finally:
            if not self.path.exists():
                path.unlink(missing_ok=True)
            os.close(descriptor)

    def read(self) -> LabState | None:
        """The state, or None when there is no such lab. SwitchError for a file that makes no sense."""
        path = self.path / "state.json"
        try:
            content = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise SwitchError(f"{path} is damaged: {error}") from error
        if content.pop("version", None) != _VERSION:
            raise SwitchError(f"{path} was written by another version of p4reduce")
        processes = {name: Process(**value) for name, value in content.pop("processes").items()}
        return LabState(**content, processes=processes)

    def write(self, state: LabState) -> None:
        """Replace the state file as a whole."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = self.path / "state.json.new"
        scratch.write_text(json.dumps({"version": _VERSION, **asdict(state)}, indent=1))
        scratch.replace(self.path / "state.json")

    def forget(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock, or None. The file goes with the lab, so it may be another by then."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.stat().st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    os.close(descriptor)
    return None


def inode(namespace: str) -> int:
    """Inode of a named namespace, 0 when there is none."""
    try:
        return (netns.RUN_DIR / namespace).stat().st_ino
    except OSError:
        return 0


def is_ours(state: LabState, namespace: str) -> bool:
    """Whether the namespace that has this name now is the lab's."""
    recorded = state.namespaces.get(namespace)
    found = inode(namespace)
    # 0 recorded: the process that made the lab was killed. None of its names was taken when it began.
    return bool(found) and recorded is not None and recorded in (0, found)


def inside(state: LabState) -> list[Process]:
    """All processes in the lab's namespaces but the caller."""
    inodes = {inode(name) for name in state.namespaces if is_ours(state, name)}
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if os.stat(entry / "ns/net").st_ino in inodes and (process := Process.of(int(entry.name))):
                    found.append(process)
    return found


def end_processes(state: LabState, patience: float = 5.0) -> None:
    """End everything that runs in the lab: SIGTERM, `patience` seconds, SIGKILL. SwitchError if that does not do."""

    def running() -> list[Process]:
        known = [process for process in state.processes.values() if process.alive]
        return list({process.pid: process for process in (*known, *inside(state))}.values())

    for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 10.0)):
        deadline = time.monotonic() + seconds
        signalled: set[Process] = set()
        while left := running():
            # Again and again: one of them may have started another in between.
            for process in left:
                if process not in signalled:
                    process.signal(number)
                    signalled.add(process)
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL)
        else:
            return
    raise SwitchError(f"processes {[process.pid for process in running()]} of lab {state.name!r} cannot be ended")
