# SPDX-License-Identifier: Apache-2.0
"""Switch and controller as processes that the campaign kills and starts again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from p4reduce.demo import processes
from p4reduce.errors import SwitchError

_STOP_SECONDS = 10.0
_POLL = 0.01
LOG_TAIL = 4000


class Daemon:
    """One process under a name; started again after its end as often as one likes. From the main thread only.

    The kernel kills it when the campaign dies. Standard output goes to `out`, anew with every start; standard error
    is appended to `log`. A fatal signal, SIGABRT above all, makes Python write all stacks there.
    """

    def __init__(self, name: str, folder: Path, namespace: str = "") -> None:
        self.name = name
        self.out = folder / f"{name}.out"
        self.log = folder / f"{name}.log"
        self._namespace = namespace
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, command: Sequence[str]) -> None:
        """Start it; readiness is the caller's business."""
        if self.alive:
            raise SwitchError(f"the {self.name} runs already")
        launcher = [sys.executable, "-I", "-S", str(Path(processes.__file__).resolve()), str(os.getpid())]
        with self.out.open("wb") as out, self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*launcher, self._namespace, *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                env={**os.environ, "PYTHONFAULTHANDLER": "1"},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id; 0 before the first start."""
        return self._process.pid if self._process is not None else 0

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def ended_by(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.poll() if self._process is not None else None

    def send(self, number: int) -> None:
        """Send it a signal."""
        if self._process is not None:
            self._process.send_signal(number)

    def end(self, number: int = signal.SIGTERM) -> None:
        """This signal, patience, SIGKILL; returns when it is gone."""
        if self._process is None:
            return
        if self.alive:
            self._process.send_signal(number)
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()

    def tail(self) -> str:
        """The end of the log."""
        try:
            return self.log.read_bytes()[-LOG_TAIL:].decode(errors="replace").strip()
        except OSError:
            return ""

    def wait(self, condition: Callable[[], bool], seconds: float) -> None:
        """Poll until `condition` holds. SwitchError when it ends or takes longer."""
        deadline = time.monotonic() + seconds
        while not condition():
            if not self.alive:
                raise SwitchError(f"the {self.name} ended with code {self.ended_by}: {self.tail()}")
            if time.monotonic() > deadline:
                raise SwitchError(f"the {self.name} was not ready within {seconds:g} s: {self.tail()}")
            time.sleep(_POLL)
