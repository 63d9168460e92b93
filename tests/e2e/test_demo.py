# SPDX-License-Identifier: Apache-2.0
"""`p4reduce demo` as users run it, and that nothing of it stays behind, however it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

DEMO = [sys.executable, "-m", "p4reduce", "demo"]
NETNS = Path("/run/netns")


class RunningDemo:
    """A demo under way, and everything it has started so far."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*DEMO, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self._seen: dict[int, psutil.Process] = {}

    def find(self, word: str, count: int = 1) -> list[psutil.Process]:
        """Wait until `count` descendants have `word` among their arguments."""
        found: list[psutil.Process] = []

        def enough() -> bool:
            found[:] = [process for process in self._descendants() if word in _arguments(process)]
            return len(found) >= count

        assert wait_until(enough), f"no {word}"
        return found

    def _descendants(self) -> list[psutil.Process]:
        try:
            now = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            now = []
        self._seen.update({process.pid: process for process in now})
        return now

    def end(self, status: int | None) -> str:
        """Wait for the end and check that nothing is left. Returns the output."""
        output, _ = self.process.communicate(timeout=60)
        if status is not None:
            assert self.process.returncode == status, output
        assert self._seen, "nothing was observed, so nothing is shown"
        assert wait_until(lambda: not any(_lives(process) for process in self._seen.values())), [
            _arguments(process) for process in self._seen.values() if _lives(process)
        ]
        return output

    def kill_all(self) -> None:
        for process in (*self._descendants(), *self._seen.values()):
            if _lives(process):
                process.kill()
        self.process.kill()
        self.process.communicate()


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def demo() -> Iterator[Callable[..., RunningDemo]]:
    running: list[RunningDemo] = []

    def start(*arguments: str) -> RunningDemo:
        running.append(RunningDemo(*arguments))
        return running[-1]

    yield start
    for one in running:
        one.kill_all()


def report(*arguments: str) -> dict[str, Any]:
    done = subprocess.run([*DEMO, *arguments, "--json", "-"], capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


FOUR = ("--switch", "embedded", "--workers", "4", "--steps", "40")


@pytest.fixture(scope="module")
def four_workers() -> dict[str, Any]:
    return report(*FOUR)


@pytest.mark.slow
def test_the_switch_trains_as_well_as_plain_ddp(four_workers: dict[str, Any]) -> None:
    found = four_workers
    assert (found["switch"], found["workers"], found["steps"]) == ("embedded", 4, 40)
    assert found["loss_reference"] < found["loss_first"] - 1.5
    assert found["loss_p4reduce"] < found["loss_first"] - 1.5
    assert found["closer_than_seeds"]
    assert found["ranks_bit_identical"]
    assert found["buckets_switch"] > 2 * 40
    assert found["buckets_ring"] == 0
    assert found["frames_sent"] > found["buckets_switch"]


@pytest.mark.slow
def test_lost_frames_change_no_bit_of_the_loss(four_workers: dict[str, Any]) -> None:
    lossy = report(*FOUR, "--loss", "0.01")
    assert lossy["retransmissions"] > 0
    assert lossy["frame_loss"] == 0.01
    for key in ("loss_p4reduce_hex", "parameters_sha256", "loss_reference", "buckets_switch"):
        assert lossy[key] == four_workers[key]
    assert lossy["ranks_bit_identical"]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_an_interrupted_demo_leaves_nothing(
    demo: Callable[..., RunningDemo], number: signal.Signals, status: int
) -> None:
    running = demo("--switch", "embedded", "--steps", "100000")
    running.find("p4reduce.demo.train", 2 + 1)  # torchrun has the word among its arguments as well
    running.process.send_signal(number)
    running.end(status)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "name"),
    [
        ("p4reduce.demo.train", "torchrun"),
        ("p4reduce_bmv2.embedded.daemon", "p4reduce-switch"),
        ("p4reduce_controller.serve", "p4reduce-controller"),
    ],
)
def test_a_part_that_dies_ends_the_demo(demo: Callable[..., RunningDemo], victim: str, name: str) -> None:
    running = demo("--switch", "embedded", "--steps", "100000")
    running.find("p4reduce.demo.train", 2 + 1)
    workers_last = sorted(running.find(victim), key=lambda process: process.create_time())
    workers_last[-1].kill()
    output = running.end(1)
    assert f"p4reduce demo: {name}" in output


@pytest.mark.slow
def test_the_timeout_ends_the_demo(demo: Callable[..., RunningDemo]) -> None:
    running = demo("--switch", "embedded", "--steps", "100000", "--timeout", "4")
    running.find("torch.distributed.run")
    assert "not done in time" in running.end(1)


@pytest.mark.bmv2
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("simple_switch_grpc") is None, reason="simple_switch_grpc is not on PATH")
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
class TestBmv2:
    def test_the_switch_trains_as_well_as_plain_ddp(self) -> None:
        before = set(NETNS.glob("pd*"))
        found = report("--switch", "bmv2", "--steps", "40")
        assert found["switch"] == "bmv2"
        assert found["ranks_bit_identical"]
        assert found["closer_than_seeds"]
        assert found["buckets_switch"] > 40
        assert set(NETNS.glob("pd*")) <= before

    def test_an_interrupted_demo_leaves_nothing(self, demo: Callable[..., RunningDemo]) -> None:
        running = demo("--switch", "bmv2", "--steps", "100000")
        running.find("p4reduce.demo.train", 2 * 2)
        spaces = list(NETNS.glob(f"pd{running.process.pid}w*"))
        assert len(spaces) == 3
        running.process.send_signal(signal.SIGINT)
        running.end(130)
        assert not any(space.exists() for space in spaces)

    def test_namespaces_of_a_killed_demo_go_with_the_next(self, demo: Callable[..., RunningDemo]) -> None:
        from p4reduce.demo import labs

        running = demo("--switch", "bmv2", "--steps", "100000")
        running.find("p4reduce.demo.train", 2 * 2)
        spaces = list(NETNS.glob(f"pd{running.process.pid}w*"))
        running.process.kill()
        running.end(-9)
        assert all(space.exists() for space in spaces)
        links = [Path("/sys/class/net") / f"pd{running.process.pid}s{port}" for port in (1, 2, 3)]
        assert all(link.exists() for link in links)
        labs.remove_leftovers()
        assert not any(path.exists() for path in (*spaces, *links))
