# SPDX-License-Identifier: Apache-2.0
"""Runs commands in a lab: one in one place, or the same command once per worker.

What `run` starts never outlives it: every process carries a mark in its environment, by which also those are found that
have left their parent's session, such as the workers of a torchrun; and the kernel kills the commands themselves when
`run` is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from p4reduce.demo import processes
from p4reduce.errors import SwitchError, UsageError
from p4reduce_bmv2 import netns
from p4reduce_bmv2.lab import RENDEZVOUS_PORT, Lab
from p4reduce_bmv2.lab_state import LabState, Process
from p4reduce_bmv2.topology import WORKER_INTERFACE, Topology

MARK = "P4REDUCE_LAB_RUN"
SWITCH = "switch"
"""In place of a rank: the switch's namespace."""
_TERM_SECONDS = 5.0
_KILL_SECONDS = 5.0
_POLL = 0.02
_DRAIN_SECONDS = 5.0
"""How long output may still come after the last process has ended."""


def environment(state: LabState, topology: Topology, rank: int, job: str) -> dict[str, str]:
    """What a worker of the lab finds in its environment, beside what the caller's holds."""
    world = len(topology.hosts)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": topology.hosts[0].ip,
        "MASTER_PORT": str(RENDEZVOUS_PORT),
        "GLOO_SOCKET_IFNAME": WORKER_INTERFACE,
        "P4REDUCE_CONTROLLER": state.controller,
        "P4REDUCE_ADDRESS": topology.hosts[rank].ip,
        "P4REDUCE_JOB": job,
        "P4REDUCE_LAB": state.name,
    }


def execute(lab: Lab, place: str, command: Sequence[str]) -> None:
    """Become `command` in the namespace of a rank, or of the switch. Returns only by SwitchError or UsageError."""
    netns.require_root("running commands in a lab")
    state = lab.state()
    topology = lab.topology(state)
    variables = {"P4REDUCE_CONTROLLER": state.controller, "P4REDUCE_LAB": state.name}
    if place == SWITCH:
        namespace = topology.switch_netns or ""
    elif place.isdecimal() and int(place) < len(topology.hosts):
        namespace = topology.hosts[int(place)].netns
        variables = environment(state, topology, int(place), state.name)
    else:
        raise UsageError(f"{place!r} is no rank of lab {lab.name!r} (0..{len(topology.hosts) - 1}), nor {SWITCH!r}")
    _require_command(command)
    netns.require(namespace)
    sys.stdout.flush()
    netns.enter(namespace)
    try:
        os.execvpe(command[0], list(command), {**os.environ, **variables})
    except OSError as error:
        raise SwitchError(f"cannot run {command[0]}: {error.strerror}") from error


def run(
    lab: Lab,
    command: Sequence[str],
    *,
    extra: Mapping[str, str] | None = None,
    out: BinaryIO | None = None,
    errors: BinaryIO | None = None,
    timeout: float | None = None,
) -> int:
    """Run a command once per worker, all at once; returns the first exit code that is not 0, else 0.

    Every line they write comes out with the rank in front, on `out` and `errors` (default: this process's own). When
    one fails the others are ended, SIGTERM first. 128 + N means ended by signal N. `extra`: environment variables for
    all. SwitchError when it is not over after `timeout` seconds, or when the lab is damaged before it begins. Call it
    from the main thread.
    """
    netns.require_root("running commands in a lab")
    _require_command(command)
    state = lab.state()
    problems = lab.problems(state)
    if problems:
        raise SwitchError(f"lab {lab.name!r}: {'; '.join(problems)}; `p4reduce lab down` and `up` renew it")
    topology = lab.topology(state)
    mark = f"{state.name}-{os.getpid()}-{time.monotonic_ns()}"
    crew = _Crew(mark, out or sys.stdout.buffer, errors or sys.stderr.buffer)
    # Not the caller's: a job's name must not meet what an earlier run, killed perhaps, left at the controller.
    job = f"{state.name}-{os.getpid()}-{time.monotonic_ns() // 1_000_000}"
    try:
        for rank, host in enumerate(topology.hosts):
            variables = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **os.environ}
            variables |= {**environment(state, topology, rank, job), MARK: mark, **(extra or {})}
            crew.start(rank, host.netns, command, variables)
        return crew.wait(timeout)
    finally:
        crew.end()


def _require_command(command: Sequence[str]) -> None:
    if not command:
        raise UsageError("there is no command to run: put it behind --")
    if shutil.which(command[0]) is None:
        raise UsageError(f"{command[0]!r} is no command on PATH")


class _Crew:
    """The processes of one run."""

    def __init__(self, mark: str, out: BinaryIO, errors: BinaryIO) -> None:
        self._mark = mark
        self._sinks = (out, errors)
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []

    def start(self, rank: int, namespace: str, command: Sequence[str], variables: Mapping[str, str]) -> None:
        # The launcher asks the kernel to kill the command with this process, enters the namespace and becomes it.
        launcher = [sys.executable, "-I", "-S", str(Path(processes.__file__).resolve()), str(os.getpid()), namespace]
        process = subprocess.Popen(
            [*launcher, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(variables),
            start_new_session=True,
        )
        self._processes.append(process)
        for pipe, sink in zip((process.stdout, process.stderr), self._sinks, strict=True):
            reader = threading.Thread(target=self._copy, args=(f"[{rank}] ".encode(), pipe, sink), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _copy(self, prefix: bytes, pipe: BinaryIO, sink: BinaryIO) -> None:
        with pipe:
            for line in pipe:
                with self._lock, contextlib.suppress(BrokenPipeError):
                    sink.write(prefix + line.rstrip(b"\r\n") + b"\n")
                    sink.flush()

    def wait(self, timeout: float | None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            codes = [process.poll() for process in self._processes]
            failed = [code for code in codes if code]
            if failed:
                return failed[0] if failed[0] > 0 else 128 - failed[0]
            if None not in codes:
                return 0
            if deadline is not None and time.monotonic() > deadline:
                ranks = [rank for rank, code in enumerate(codes) if code is None]
                raise SwitchError(f"ranks {ranks} were not done after {timeout:g} s, and were ended")
            time.sleep(_POLL)

    def end(self) -> None:
        """End what still runs, of the commands and of all that they started."""
        if not self._signal_until_gone(signal.SIGTERM, _TERM_SECONDS):
            self._signal_until_gone(signal.SIGKILL, _KILL_SECONDS)
        for process in self._processes:
            process.wait()
        deadline = time.monotonic() + _DRAIN_SECONDS
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))

    def _signal_until_gone(self, number: int, seconds: float) -> bool:
        """Signal all that still run, each once, and those that they start meanwhile. False if some are left."""
        deadline = time.monotonic() + seconds
        signalled: set[Process] = set()
        while True:
            for process in self._processes:
                process.poll()
            left = {*_marked(self._mark)}
            if not left:
                return True
            for one in left - signalled:
                one.signal(number)
            signalled |= left
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL)


def _marked(mark: str) -> Iterator[Process]:
    """All processes that were started with this mark in their environment."""
    entry = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if entry in (folder / "environ").read_bytes().split(b"\0"):
                    process = Process.of(int(folder.name))
                    if process is not None:
                        yield process
