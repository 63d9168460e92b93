# SPDX-License-Identifier: Apache-2.0
"""Child processes that never outlive the one that started them.

Each child leads a session of its own, so that Ctrl-C in the terminal reaches the supervisor alone, and is ended by pid.
The kernel kills it when the supervisor dies in a way no handler sees (PR_SET_PDEATHSIG). This file is also the small
program that arranges that and then becomes the child: `python processes.py PARENT NAMESPACE COMMAND...`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000
SUPERVISOR = "P4REDUCE_DEMO_SUPERVISOR"
"""Environment variable with the supervisor's pid, for the workers that torchrun starts on our behalf."""
TERM_SECONDS = 3.0
LOG_TAIL_LINES = 25


class ChildFailed(Exception):
    """A child ended that should not have. The message holds the last lines it wrote."""


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent dies, and exit now when that has already happened.

    `parent` is the expected pid of the parent. Without it the supervisor named in the environment must be alive.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # The parent may have died before the call; then nobody would ever send the signal.
    if parent is not None:
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
    elif SUPERVISOR in os.environ and not alive(int(os.environ[SUPERVISOR])):
        os.kill(os.getpid(), signal.SIGKILL)


def alive(pid: int) -> bool:
    """Whether a process of this pid exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class Child:
    """One running child. Standard output is a pipe when asked for; everything else goes to its log file."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log
        self.expected_to_end = False

    @property
    def pid(self) -> int:
        """Process id, also that of its process group and session."""
        return self.process.pid

    def ended(self) -> str:
        """How it ended, in words; empty while it runs. Does not reap it: its pid must not come to mean another."""
        info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            return ""
        exited = info.si_code == os.CLD_EXITED
        return f"ended with status {info.si_status}" if exited else f"was killed by signal {info.si_status}"

    def tail(self) -> str:
        """The last lines of the log."""
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join(f"  {line}" for line in lines)


class Children:
    """All children of one supervisor. As a context manager it leaves none behind.

    Call `start` from the main thread only: the kernel ties the death signal to the thread that forked.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._children: list[Child] = []

    def __iter__(self) -> Iterator[Child]:
        return iter(self._children)

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        namespace: str = "",
        pipe: bool = False,
    ) -> Child:
        """Start a command, in the network namespace `namespace` (a name under /run/netns) if given.

        With `pipe`, `child.process.stdout` is its standard output; the caller must keep reading it.
        """
        log = self._folder / f"{name}.log"
        launcher = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(os.getpid()), namespace]
        variables = {**os.environ, **(environment or {}), SUPERVISOR: str(os.getpid())}
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [*launcher, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipe else errors,
                stderr=errors,
                env=variables,
                start_new_session=True,
            )
        child = Child(name, process, log)
        self._children.append(child)
        return child

    def check(self) -> None:
        """Raise ChildFailed when a child has failed, or has ended at all without being expected to."""
        for child in self._children:
            how = child.ended()
            if how and not (child.expected_to_end and how == "ended with status 0"):
                raise ChildFailed(f"{child.name} {how}; the end of what it wrote:\n{child.tail()}")

    def stop(self) -> None:
        """End all children and their descendants: SIGTERM, seconds of patience, SIGKILL. May be called again."""
        # torchrun gives each of its workers a session of its own: they are no members of the group signalled here.
        grandchildren = _descendants({child.pid for child in self._children})
        for child in reversed(self._children):
            os.killpg(child.pid, signal.SIGTERM)
        if not _wait_until(lambda: self._gone(grandchildren), TERM_SECONDS):
            for child in self._children:
                os.killpg(child.pid, signal.SIGKILL)
            for pid, started in grandchildren.items():
                if _start_time(pid) == started:
                    os.kill(pid, signal.SIGKILL)
            _wait_until(lambda: self._gone(grandchildren), TERM_SECONDS)
        for child in self._children:
            # A group outlives its leader while it has other members.
            os.killpg(child.pid, signal.SIGKILL)
            child.process.wait()
            if child.process.stdout is not None:
                child.process.stdout.close()
        self._children.clear()

    def _gone(self, grandchildren: Mapping[int, int]) -> bool:
        leaders = all(child.ended() for child in self._children)
        return leaders and not any(_start_time(pid) == started for pid, started in grandchildren.items())

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Here, since as a program this file runs without the package.
        from p4reduce.signals import undisturbed

        with undisturbed():
            self.stop()


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll until `condition` holds. False when `seconds` have passed without."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _process_table() -> Iterator[tuple[int, int, int]]:
    """(pid, parent, start time in clock ticks) of every process that is not a zombie."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) is not None:
            yield int(entry.name), int(fields[1]), int(fields[19])


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on (proc(5)); None for a process that is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name before it may hold spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else fields


def _start_time(pid: int) -> int | None:
    """With the pid it names a process for good: pids are used again, this pair is not."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def _descendants(roots: set[int]) -> dict[int, int]:
    """Start times, by pid, of all processes below `roots`."""
    table = list(_process_table())
    found: dict[int, int] = {}
    grown = True
    while grown:
        new = {pid: started for pid, parent, started in table if parent in roots | found.keys() and pid not in found}
        found.update(new)
        grown = bool(new)
    return found


def _become(parent: int, namespace: str, command: list[str]) -> None:
    die_with_parent(parent)
    if namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns({namespace})")
        os.close(descriptor)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
