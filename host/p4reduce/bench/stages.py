# SPDX-License-Identifier: Apache-2.0
"""Where a bench runs: a lab of network namespaces, or, without root, an embedded switch on loopback."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from p4reduce.bench.options import BenchOptions
from p4reduce.demo.processes import Child, Children
from p4reduce.errors import ConfigError, SwitchError, UsageError
from p4reduce.signals import undisturbed

if TYPE_CHECKING:
    from p4reduce_bmv2.lab import Lab
    from p4reduce_bmv2.lab_state import LabState

LAB_NAME = "p4reduce-bench"
_START_SECONDS = 60.0
_END_SECONDS = 10.0
_ALMOST_NONE = 1e-15
"""A loss that never happens: netem rounds it to 0, and the lab's wire would lose one frame of 10^15."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one worker runs and how it is reached."""

    namespace: str
    address: str
    """What its sockets bind to."""
    mac: str
    port: int
    """Of the switch."""
    endpoint: tuple[str, int]
    """Where it sends frames for the switch."""
    environment: Mapping[str, str]


class Stage(Protocol):
    """A switch, a controller, and places for the workers."""

    interface: str
    """Of each worker, towards the switch; empty where they share one host's loopback."""
    impairer: str
    """Who delays and loses frames: netem, wire, or empty for nobody."""

    def places(self) -> list[Place]:
        """By rank. Each call gives them another job."""

    def free_switch(self) -> str:
        """End the controller, which holds the switch, and return the switch's P4Runtime address."""


class LabStage:
    """A lab that is up."""

    def __init__(self, lab: Lab) -> None:
        from p4reduce_bmv2.topology import WORKER_INTERFACE

        self._lab = lab
        self.interface = WORKER_INTERFACE
        impairer = self._state().impairer
        self.impairer = "" if impairer == "none" else impairer

    def _state(self) -> LabState:
        state = self._lab.state()
        problems = self._lab.problems(state)
        if problems:
            raise SwitchError(f"the bench's lab: {'; '.join(problems)}")
        return state

    def places(self) -> list[Place]:
        """One namespace for each worker."""
        from p4reduce import constants
        from p4reduce_bmv2.lab_run import environment

        state = self._state()
        topology = self._lab.topology(state)
        job = f"bench-{time.monotonic_ns()}"
        endpoint = (topology.switch_ip, constants.UDP_PORT)
        return [
            Place(host.netns, host.ip, host.mac, host.port, endpoint, environment(state, topology, rank, job))
            for rank, host in enumerate(topology.hosts)
        ]

    def free_switch(self) -> str:
        """The controller goes; the lab's state no longer misses it."""
        with self._lab.folder.locked():
            state = self._state()
            controller = state.processes.pop("controller", None)
            self._lab.folder.write(state)
        if controller is not None:
            for number in (signal.SIGTERM, signal.SIGKILL):
                controller.signal(number)
                _wait_gone(controller)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(controller.pid, os.WNOHANG)
        return f"unix:{self._lab.folder.path / 'switch.sock'}"


def _wait_gone(process: Any) -> None:
    deadline = time.monotonic() + _END_SECONDS
    while process.alive and time.monotonic() < deadline:
        time.sleep(0.02)


class LoopbackStage:
    """An embedded switch with UDP ports, and its controller; started by `start`."""

    interface = ""
    impairer = ""

    def __init__(self, options: BenchOptions, workers: int, loss: float, folder: Path, children: Children) -> None:
        self._options, self._workers, self._loss = options, workers, loss
        self._folder, self._children = folder, children
        self._switch: dict[str, Any] = {}
        self._controller = ""
        self._controller_child: Child | None = None

    def start(self) -> None:
        """Start switch and controller, and return when both answer."""
        from p4reduce.demo.labs import embedded_hosts, read_json, start_controller, wait_for
        from p4reduce_bmv2.switch import SwitchOptions, embedded_command

        deadline = time.monotonic() + _START_SECONDS
        ready, hosts = self._folder / "switch.json", self._folder / "hosts.toml"
        ready.unlink(missing_ok=True)
        ports = {rank + 1: f"127.0.1.{rank + 1}" for rank in range(self._workers)}
        asked = SwitchOptions(udp_ports=ports, loss=self._loss, seed=self._options.seed)
        self._children.start("p4reduce-switch", embedded_command(asked, ready))
        self._switch = wait_for(lambda: read_json(ready), self._children, deadline, "the switch")
        hosts.write_text(embedded_hosts(self._switch, self._options.profile))
        self._controller = start_controller(self._children, self._folder, hosts, "127.0.0.1:0", deadline)
        self._controller_child = next(child for child in self._children if child.name == "p4reduce-controller")

    def places(self) -> list[Place]:
        """All on this host, each with a loopback address of its own."""
        job = f"bench-{time.monotonic_ns()}"
        found = []
        for rank in range(self._workers):
            host, _, number = self._switch["udp_ports"][str(rank + 1)].rpartition(":")
            address = f"127.0.1.{rank + 1}"
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(self._workers),
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._rendezvous()),
                "GLOO_SOCKET_IFNAME": "lo",
                "P4REDUCE_CONTROLLER": self._controller,
                "P4REDUCE_ADDRESS": address,
                "P4REDUCE_JOB": job,
            }
            # The MAC that UDP ports make up for an address (design, section 6).
            mac = "02:70:7f:00:01:" + f"{rank + 1:02x}"
            found.append(Place("", address, mac, rank + 1, (host, int(number)), environment))
        return found

    def _rendezvous(self) -> int:
        """A port for torch's store, free a moment ago, the same for all ranks of this stage."""
        import socket

        if not getattr(self, "_port", 0):
            with socket.socket() as sock:
                sock.bind(("127.0.0.1", 0))
                self._port = int(sock.getsockname()[1])
        return self._port

    def free_switch(self) -> str:
        """The controller goes."""
        child = self._controller_child
        if child is not None:
            child.expected_to_end = True
            os.kill(child.pid, signal.SIGTERM)
            deadline = time.monotonic() + _END_SECONDS
            while not child.ended():
                if time.monotonic() > deadline:
                    raise SwitchError(f"the controller (pid {child.pid}) did not end: {child.tail()}")
                time.sleep(0.02)
        return str(self._switch["grpc"])


def require(options: BenchOptions) -> None:
    """Whether this machine can do what is asked: UsageError or SwitchError with what would help."""
    if options.switch == "bmv2" and os.geteuid() != 0:
        raise SwitchError(
            "BMv2 needs a lab of network namespaces, and that needs root: run it with sudo, or take --switch embedded"
        )
    if os.geteuid() == 0:
        from p4reduce_bmv2.lab import LabOptions
        from p4reduce_bmv2.lab import require as require_lab

        require_lab(LabOptions(switch="bmv2" if options.switch == "bmv2" else "embedded"))
    elif options.rate or options.delay:
        raise UsageError(
            "rates and delays of links need network namespaces, and those need root: run it with sudo, or leave "
            "--rate and --delay out"
        )


@contextmanager
def bench_lock() -> Iterator[None]:
    """Keeps a second bench from starting on this machine. SwitchError when this is the second."""
    import fcntl

    from p4reduce_bmv2.lab_state import run_dir

    run_dir().mkdir(mode=0o755, parents=True, exist_ok=True)
    path = run_dir() / "bench.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The file goes with the bench that holds it: this must not be the one of a bench that has just ended.
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                try:
                    yield
                finally:
                    path.unlink()
                return
        raise SwitchError("another `p4reduce bench` is running on this machine: wait for it to end")
    finally:
        os.close(descriptor)


@contextmanager
def lab_stage(options: BenchOptions, workers: int, loss: float) -> Iterator[LabStage]:
    """A lab for one number of workers and one loss, removed on exit whatever happened."""
    from p4reduce_bmv2.lab import Lab, LabOptions
    from p4reduce_bmv2.lab_shape import Shape

    # Whoever loses frames also takes time over those that it does not lose: with several losses, none of them is the
    # same lab, with frames carried by the same means.
    several = len(options.losses) > 1
    shape = Shape(rate=options.rate, delay=options.delay, loss=loss or (_ALMOST_NONE if several else 0.0))
    lab = Lab(LAB_NAME)
    lab.down()  # what a bench left that was killed
    try:
        lab.up(
            LabOptions(
                workers=workers,
                switch="bmv2" if options.switch == "bmv2" else "embedded",
                profile=options.profile,
                shape=shape,
                seed=options.seed,
                deadline=min(options.deadline, 86400.0),
            )
        )
        yield LabStage(lab)
    finally:
        with undisturbed():
            lab.down()


@contextmanager
def loopback_stage(
    options: BenchOptions, workers: int, loss: float, folder: Path, children: Children
) -> Iterator[LoopbackStage]:
    """Switch and controller among `children`, which end them."""
    if options.switch != "embedded":
        raise ConfigError("only the embedded switch has UDP ports")
    stage = LoopbackStage(options, workers, loss, folder, children)
    stage.start()
    yield stage
