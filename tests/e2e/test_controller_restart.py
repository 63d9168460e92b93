# SPDX-License-Identifier: Apache-2.0
"""A controller that is killed under running jobs, and the next one on the same file: nobody notices."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from helpers.controller_process import ControllerProcess, write_hosts

import p4reduce
from p4reduce.proto import controller_pb2 as pb
from p4reduce.proto import controller_pb2_grpc
from p4reduce.ring import local_rings
from p4reduce_bmv2.switch import SwitchProcess

DEADLINE = 60.0
RANKS = 2
COUNT = 5000


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Lab:
    """An embedded switch as a process, and controllers for it that all listen on one address and keep one file."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        ports = dict.fromkeys(range(1, RANKS + 1), "127.0.0.1")
        self.switch = stack.enter_context(SwitchProcess.start("embedded", udp_ports=ports))
        self._hosts = write_hosts(folder, self.switch.grpc_address, self.switch.endpoints)
        self.state = folder / "state.db"
        self.address = f"127.0.0.1:{free_port()}"

    def controller(self, *options: str) -> ControllerProcess:
        arguments = ("--hosts", str(self._hosts), "--listen", self.address, "--state", str(self.state), *options)
        process = ControllerProcess(*arguments)
        self._stack.callback(process.end)
        return process

    def kill_switch(self) -> None:
        os.kill(self.switch.pid, signal.SIGKILL)
        self.switch.stop()

    def start_switch(self) -> None:
        """Another one at the same addresses."""
        ports = {port: f"{host}:{number}" for port, (host, number) in self.switch.endpoints.items()}
        started = SwitchProcess.start("embedded", udp_ports=ports, grpc_addr=self.switch.grpc_address)
        self.switch = self._stack.enter_context(started)

    def status(self) -> pb.StatusReply:
        with grpc.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = controller_pb2_grpc.ControllerStub(channel)  # type: ignore[no-untyped-call]
            reply: pb.StatusReply = stub.Status(pb.StatusRequest(), timeout=DEADLINE, wait_for_ready=True)
            return reply

    def job(self) -> pb.JobStatus:
        (job,) = self.status().jobs
        return job


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with ExitStack() as stack:
        yield Lab(stack, tmp_path)


class Training:
    """RANKS members that reduce until told to stop, and check every sum."""

    def __init__(self, address: str, ring: bool, **settings: Any) -> None:
        rings: list[Any] = list(local_rings(RANKS)) if ring else [None] * RANKS
        self._pool = ThreadPoolExecutor(2 * RANKS)
        self._stop = RANKS * [0]
        self._last = threading.Event()
        self._lock = threading.Lock()
        self._limit: int | None = None
        self.done = [0] * RANKS
        joins = [
            self._pool.submit(
                p4reduce.connect,
                controller=address,
                job="train",
                rank=rank,
                world_size=RANKS,
                ring=rings[rank],
                **settings,
            )
            for rank in range(RANKS)
        ]
        self.members = [join.result(DEADLINE) for join in joins]
        self._loops = [self._pool.submit(self._loop, rank) for rank in range(RANKS)]

    def _loop(self, rank: int) -> None:
        step = 0
        while True:
            with self._lock:
                if self._limit is not None and step >= self._limit:
                    return
                self.done[rank] = step
            data = np.random.default_rng([rank, step]).integers(-1000, 1000, COUNT).astype(np.float32)
            total = sum(
                np.random.default_rng([other, step]).integers(-1000, 1000, COUNT).astype(np.float32)
                for other in range(RANKS)
            )
            result = self.members[rank].allreduce(data, op="sum")
            assert np.array_equal(result, total), (rank, step)
            step += 1

    def advance(self, steps: int = 3) -> None:
        """Wait until every rank has done so many steps more."""
        before = list(self.done)
        self.until(lambda: all(now >= then + steps for now, then in zip(self.done, before, strict=True)))

    def until(self, condition: Callable[[], bool]) -> None:
        end, pause = time.monotonic() + DEADLINE, threading.Event()
        while not condition():
            for loop in self._loops:
                if loop.done():
                    loop.result()
                    raise AssertionError("a rank has ended")
            assert time.monotonic() < end, f"did not happen; steps {self.done}"
            pause.wait(0.02)

    def end(self) -> int:
        """Let all ranks end after the same step; raises what any of them raised."""
        with self._lock:
            self._limit = max(self.done) + 2
        for loop in self._loops:
            loop.result(DEADLINE)
        for closing in [self._pool.submit(member.close) for member in self.members]:
            closing.result(DEADLINE)
        self._pool.shutdown()
        return self._limit


@pytest.mark.parametrize("ring", [False, True], ids=["switch only", "with a ring"])
def test_a_controller_that_is_killed_and_started_again(lab: Lab, ring: bool) -> None:
    first = lab.controller().ready()
    training = Training(lab.address, ring)
    training.advance()
    before = lab.job()
    assert (before.state, before.path) == ("switch", pb.PATH_SWITCH)
    first.kill()
    training.advance()  # running jobs need no controller
    second = lab.controller().ready()
    training.until(lambda: all(worker.state == "reporting" for worker in lab.job().workers))
    training.advance()
    after = lab.job()
    assert (after.state, after.epoch, after.present, after.pool_base) == ("switch", *ids(before))
    assert after.counters["contributions"] > before.counters["contributions"]
    assert not after.fallbacks
    assert "0 entries changed, 1 epochs kept" in second.log, second.log
    training.end()
    training_over = lab.status()
    assert not training_over.jobs
    second.popen.terminate()
    assert second.wait() == 0
    assert "Traceback" not in second.log


def ids(job: pb.JobStatus) -> tuple[int, int, int]:
    return job.epoch, job.present, job.pool_base


def test_killed_again_and_again(lab: Lab) -> None:
    process = lab.controller().ready()
    training = Training(lab.address, ring=True)
    first = lab.job().epoch
    for pause in (1, 2, 3):
        training.advance(pause)
        process.kill()
        process = lab.controller().ready()
    training.until(lambda: all(worker.state == "reporting" for worker in lab.job().workers))
    job = lab.job()
    assert (job.epoch, job.path, sum(job.fallbacks.values())) == (first, pb.PATH_SWITCH, 0)
    training.end()


def test_a_controller_that_is_stopped_for_longer_than_a_lease(lab: Lab) -> None:
    process = lab.controller("--lease", "1").ready()
    training = Training(lab.address, ring=True)
    training.advance()
    before = lab.job()
    process.popen.send_signal(signal.SIGSTOP)
    threading.Event().wait(4.0)  # the fault's length
    training.advance()
    process.popen.send_signal(signal.SIGCONT)
    training.until(lambda: "was stopped for" in process.log)
    training.advance()
    training.until(lambda: all(worker.state == "reporting" for worker in lab.job().workers))
    job = lab.job()
    assert (job.state, ids(job), dict(job.fallbacks)) == ("switch", ids(before), {})
    training.end()


@pytest.mark.parametrize("ring", [False, True], ids=["switch only", "with a ring"])
def test_ranks_that_close_while_the_controller_is_stopped_have_not_failed(lab: Lab, ring: bool) -> None:
    process = lab.controller().ready()
    training = Training(lab.address, ring, connect_timeout=0.5, close_timeout=0.5)
    training.advance()
    process.popen.send_signal(signal.SIGSTOP)
    threading.Event().wait(2.5)  # the fault's length: longer than a stall of the machine
    training.end()
    process.popen.send_signal(signal.SIGCONT)
    end, pause = time.monotonic() + DEADLINE, threading.Event()
    while (jobs := lab.status().jobs) and jobs[0].state not in ("failed", "ended"):
        assert time.monotonic() < end, jobs
        pause.wait(0.05)
    assert "was stopped for" in process.log
    assert [(job.state, job.reason) for job in jobs if job.state != "ended"] == []


def test_ranks_that_close_while_there_is_no_controller_have_not_failed(lab: Lab) -> None:
    first = lab.controller("--lease", "1").ready()
    training = Training(lab.address, ring=False, close_timeout=0.3)
    training.advance()
    first.kill()
    training.end()
    lab.controller("--lease", "1").ready()
    end, pause = time.monotonic() + DEADLINE, threading.Event()
    while (job := lab.job()).state == "switch":
        assert time.monotonic() < end
        pause.wait(0.1)
    assert (job.state, "no rank came back" in job.reason) == ("ended", True)


def test_a_standby_takes_over_and_the_jobs_go_on(lab: Lab) -> None:
    primary = lab.controller("--standby").ready()
    standby = lab.controller("--standby")
    said = standby.line()
    assert (said["ready"], said["standby"]) == (False, True)
    training = Training(lab.address, ring=True)
    training.advance()
    before = lab.job()
    primary.kill()
    standby.ready()
    training.until(lambda: all(worker.state == "reporting" for worker in lab.job().workers))
    training.advance()
    after = lab.job()
    assert (after.state, ids(after)) == ("switch", ids(before))
    assert "0 entries changed, 1 epochs kept" in standby.log, standby.log
    # The first one comes back, and waits in its turn.
    back = lab.controller("--standby")
    assert back.line()["standby"]
    training.advance()
    assert lab.job().epoch == before.epoch
    training.end()
    back.popen.terminate()
    assert back.wait() == 0, back.log


def test_a_switch_that_is_killed_comes_back_without_an_operator(lab: Lab) -> None:
    process = lab.controller().ready()
    training = Training(lab.address, ring=True)
    training.advance()
    before = lab.job().present
    lab.kill_switch()
    training.advance()
    job = lab.job()
    assert (job.path, sum(job.fallbacks.values())) == (pb.PATH_RING, 1)
    lab.start_switch()
    training.until(lambda: lab.job().path == pb.PATH_SWITCH)
    training.advance()
    job = lab.job()
    assert (job.state, job.promotions) == ("switch", 1)
    assert job.present > before
    training.end()
    story = [line for line in process.log.splitlines() if " WARNING " in line]
    assert len(story) == 4, "\n".join(story)
    for line, word in zip(story, ("lost", "ring path from bucket", "is back", "switch path from bucket"), strict=True):
        assert word in line


def test_both_controller_and_switch_are_killed(lab: Lab) -> None:
    process = lab.controller().ready()
    training = Training(lab.address, ring=True)
    training.advance()
    process.kill()
    lab.kill_switch()
    lab.start_switch()
    lab.controller().ready()
    training.advance()
    training.until(lambda: lab.job().path == pb.PATH_SWITCH)
    training.advance()
    assert lab.job().promotions == 1
    training.end()
