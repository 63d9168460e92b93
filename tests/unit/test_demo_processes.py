# SPDX-License-Identifier: Apache-2.0
"""No child outlives its supervisor, however either of them ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from p4reduce.demo import processes
from p4reduce.demo.processes import ChildFailed, Children

# Prints its pid and the pid of a child in a session of its own (as torchrun's workers are), then sleeps.
FAMILY = """
import os, signal, subprocess, sys, time
if "stubborn" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
print(os.getpid(), child.pid, flush=True)
time.sleep(100)
"""


def read_line(stream: IO[bytes] | None, seconds: float = 20.0) -> str:
    assert stream is not None
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([stream], [], [], seconds)
        assert ready, "no line in time"
        piece = os.read(stream.fileno(), 1)
        assert piece, "the other end has ended"
        line += piece
    return line.decode()


def gone(pid: int) -> bool:
    return processes._start_time(pid) is None


def wait_until(condition: Callable[[], bool]) -> bool:
    return processes._wait_until(condition, 10.0)


@pytest.mark.parametrize("manner", ["polite", "stubborn"])
def test_stop_ends_children_and_their_children(tmp_path: Path, manner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "TERM_SECONDS", 0.5)
    with Children(tmp_path) as children:
        child = children.start("family", [sys.executable, "-c", FAMILY, manner], pipe=True)
        leader, grandchild = map(int, read_line(child.process.stdout).split())
        assert leader == child.pid
        assert os.getpgid(leader) == leader
        assert os.getsid(grandchild) != os.getsid(leader)
        children.check()
    assert gone(leader)
    assert gone(grandchild)
    assert child.process.returncode == (-signal.SIGTERM if manner == "polite" else -signal.SIGKILL)
    children.stop()


def test_an_exception_leaves_no_child(tmp_path: Path) -> None:
    def interrupted() -> None:
        with Children(tmp_path) as children:
            pids.append(children.start("sleeper", ["sleep", "100"]).pid)
            raise KeyboardInterrupt

    pids: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert gone(pids[0])


def test_signal_handlers_are_as_before(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Children(tmp_path):
        pass
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize(
    ("script", "how"),
    [
        ("import sys; print('the reason', file=sys.stderr); sys.exit(3)", "ended with status 3"),
        ("import os, sys; print('the reason', file=sys.stderr, flush=True); os.abort()", "was killed by signal 6"),
        ("import sys; print('the reason', file=sys.stderr)", "ended with status 0"),
    ],
)
def test_a_child_that_ends_is_reported_with_its_last_words(tmp_path: Path, script: str, how: str) -> None:
    with Children(tmp_path) as children:
        child = children.start("victim", [sys.executable, "-c", script])
        assert wait_until(lambda: bool(child.ended()))
        with pytest.raises(ChildFailed, match=rf"(?s)victim {how}.*the reason"):
            children.check()


def test_an_expected_end_is_no_failure(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        good = children.start("good", ["true"])
        bad = children.start("bad", ["false"])
        good.expected_to_end = bad.expected_to_end = True
        assert wait_until(lambda: bool(good.ended() and bad.ended()))
        with pytest.raises(ChildFailed, match="bad ended with status 1"):
            children.check()


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("missing", ["/nonexistent/program"])
        assert wait_until(lambda: bool(child.ended()))
        with pytest.raises(ChildFailed, match=r"(?s)missing ended.*No such file"):
            children.check()


def test_children_see_the_environment_given(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        command = ["sh", "-c", f"echo $FLAVOUR ${processes.SUPERVISOR}"]
        child = children.start("shell", command, environment={"FLAVOUR": "mint"}, pipe=True)
        assert read_line(child.process.stdout).split() == ["mint", str(os.getpid())]


# Starts a plain child, and one that starts a worker as torchrun would; prints all three pids once the worker is up.
SUPERVISOR = """
import sys, time
from pathlib import Path
from p4reduce.demo.processes import Children
worker = (
    "import os, time; from p4reduce.demo.processes import die_with_parent; die_with_parent();"
    "print(os.getpid(), flush=True); time.sleep(100)"
)
agent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {worker!r}], start_new_session=True).wait()"
children = Children(Path(sys.argv[1]))
sleeper = children.start("sleeper", ["sleep", "100"])
torchrun = children.start("agent", [sys.executable, "-c", agent], pipe=True)
worker_pid = torchrun.process.stdout.readline().decode().strip()
print(sleeper.pid, torchrun.pid, worker_pid, flush=True)
time.sleep(100)
"""


def test_children_die_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(tmp_path)], stdout=subprocess.PIPE)
    with supervisor:
        try:
            pids = [int(pid) for pid in read_line(supervisor.stdout).split()]
            assert len(pids) == 3
            assert not any(gone(pid) for pid in pids)
        finally:
            supervisor.kill()
    assert wait_until(lambda: all(gone(pid) for pid in pids))


def test_a_child_whose_parent_is_gone_already_does_not_start(tmp_path: Path) -> None:
    mark = tmp_path / "started"
    launcher = [sys.executable, "-I", "-S", processes.__file__, str(os.getpid() + 1), ""]
    assert subprocess.run([*launcher, "touch", str(mark)], check=False).returncode == -signal.SIGKILL
    assert not mark.exists()
    ended = subprocess.Popen(["true"])
    ended.wait()
    worker = "from p4reduce.demo.processes import die_with_parent as d; d()"
    done = subprocess.run(
        [sys.executable, "-c", worker], env={**os.environ, processes.SUPERVISOR: str(ended.pid)}, check=False
    )
    assert done.returncode == -signal.SIGKILL
