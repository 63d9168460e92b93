# SPDX-License-Identifier: Apache-2.0
"""Where a campaign's jobs run: a switch, a controller, and a place for every worker.

Embedded: everything on loopback, no privileges; gloo runs over `lo`, past the switch. BMv2: network namespaces as in
`p4reduce lab`, root needed; gloo runs over the management links (the ring path then outlives the switch), or over the
data links, through the very switch that is being killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from p4reduce.demo.labs import announced_address, embedded_hosts, read_json
from p4reduce.demo.processes import alive
from p4reduce.errors import SwitchError, UsageError
from p4reduce_bmv2 import netns
from p4reduce_bmv2.campaign.daemons import Daemon
from p4reduce_bmv2.campaign.messages import Place
from p4reduce_bmv2.campaign.observer import Observer
from p4reduce_bmv2.campaign.relay import Relay
from p4reduce_bmv2.switch import Kind, SwitchOptions, bmv2_command, embedded_command
from p4reduce_bmv2.topology import MANAGEMENT_INTERFACE, MANAGEMENT_SUBNET, PREFIX_LENGTH, WORKER_INTERFACE, Topology

READY_SECONDS = 60.0
CONTROLLER_PORT = 50051
RingNetwork = Literal["management", "data"]
_PREFIX = "pc"
"""Starts the names of a campaign's namespaces; its pid follows."""
_EMBEDDED_CONTROLLER = "127.0.2.1"
_PORTS = range(20000, 30000)
"""Below those that the kernel hands out by itself: a controller that comes back must find its port free."""


class Arena(ABC):
    """Switch and controller are started on entry, ended on exit, and killed in between. From the main thread only."""

    kind: Kind
    _exposed: Sequence[str] = ()
    """Options for a controller that listens beyond loopback."""

    def __init__(self, folder: Path, workers: int, profile: str, lease: float, deadline: float) -> None:
        """`folder`: for logs and state, with a short path. `lease`, `deadline`: the controller's, in seconds."""
        self.folder = folder
        self.workers = workers
        self.profile = profile
        self.lease = lease
        self._deadline = deadline
        self.switch: Daemon
        self.controller: Daemon
        self.observer: Observer
        self._undo = ExitStack()
        self._ready = folder / "switch.json"
        self._socket = folder / "switch.sock"
        self._listen = ""

    @property
    def logs(self) -> list[Path]:
        """Logs that go on over all runs."""
        return [self.switch.log, self.controller.log]

    def start_switch(self) -> None:
        """Start the switch process; `switch_ready` tells when it listens."""
        self._ready.unlink(missing_ok=True)
        # simple_switch_grpc leaves its socket behind.
        self._socket.unlink(missing_ok=True)
        self.switch.start(self._switch_command())

    def switch_ready(self) -> bool:
        """Whether the switch that was started last listens."""
        return self._socket.exists() if self.kind == "bmv2" else self._ready.exists()

    def start_controller(self) -> None:
        """Start the controller process; `controller_ready` tells when it serves."""
        command = [sys.executable, "-m", "p4reduce_controller.serve", "serve", "--ready-json"]
        command += ["--hosts", str(self.folder / "hosts.toml"), "--state", str(self.folder / "state.sqlite")]
        command += ["--listen", self._listen, "--lease", repr(self.lease), "--deadline", repr(self._deadline)]
        command += self._exposed
        self.controller.start(command)

    def controller_ready(self) -> bool:
        """Whether the controller that was started last serves."""
        return bool(announced_address(self.controller.out))

    @abstractmethod
    def place(self, rank: int, job: str, rendezvous: Path, log: Path, relay: Relay | None = None) -> Place:
        """Where a rank of a job runs; `relay`: its way to the controller, if not the direct one."""

    @abstractmethod
    def relay(self) -> Relay:
        """A way from a worker to the controller that can be cut."""

    def __enter__(self) -> Arena:
        with ExitStack() as undo:
            self._make(undo)
            undo.callback(lambda: self.switch.end())
            self.start_switch()
            self.switch.wait(self.switch_ready, READY_SECONDS)
            (self.folder / "hosts.toml").write_text(self._hosts())
            undo.callback(lambda: self.controller.end())
            self.start_controller()
            self.controller.wait(self.controller_ready, READY_SECONDS)
            self.observer = undo.enter_context(Observer(self._admin(undo), f"unix:{self._socket}", self.profile))
            self.observer.remember()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *details: object) -> None:
        self._undo.close()

    def abort(self) -> None:
        """End switch and controller with SIGABRT, which makes Python write the stacks of all threads to their logs."""
        for daemon in (self.controller, self.switch):
            daemon.end(signal.SIGABRT)

    @abstractmethod
    def _make(self, undo: ExitStack) -> None: ...

    @abstractmethod
    def _switch_command(self) -> list[str]: ...

    @abstractmethod
    def _hosts(self) -> str: ...

    @abstractmethod
    def _admin(self, undo: ExitStack) -> str:
        """Where this process reaches the controller."""


class EmbeddedArena(Arena):
    """On loopback."""

    kind: Kind = "embedded"

    def _make(self, undo: ExitStack) -> None:  # noqa: ARG002 (nothing to take away)
        self.switch = Daemon("switch", self.folder)
        self.controller = Daemon("controller", self.folder)
        self._listen = f"{_EMBEDDED_CONTROLLER}:{_free_port(_EMBEDDED_CONTROLLER)}"
        self._endpoints = dict.fromkeys(range(1, self.workers + 1), "127.0.0.1")

    def _switch_command(self) -> list[str]:
        options = SwitchOptions(udp_ports=self._endpoints, grpc_addr=f"unix:{self._socket}")
        return embedded_command(options, self._ready)

    def _hosts(self) -> str:
        announced = read_json(self._ready)
        # The same ports again after a restart: the hosts file names them.
        self._endpoints = {int(port): text for port, text in announced["udp_ports"].items()}
        return embedded_hosts(announced, self.profile)

    def _admin(self, undo: ExitStack) -> str:  # noqa: ARG002 (nothing to take away)
        return self._listen

    def place(self, rank: int, job: str, rendezvous: Path, log: Path, relay: Relay | None = None) -> Place:
        """On loopback."""
        controller = relay.address if relay is not None else self._listen
        return Place(rank, self.workers, job, controller, str(rendezvous), str(log))

    def relay(self) -> Relay:
        """On loopback."""
        host, _, port = self._listen.rpartition(":")
        return Relay((_EMBEDDED_CONTROLLER, 0), (host, int(port)))


class NamespaceArena(Arena):
    """Network namespaces; with a BMv2, or with an embedded switch on the same interfaces. Needs root."""

    _exposed = ("--insecure",)  # nobody but the workers is in these namespaces

    def __init__(
        self, folder: Path, workers: int, profile: str, lease: float, deadline: float,
        kind: Kind = "bmv2", ring: RingNetwork = "management",
    ) -> None:  # fmt: skip
        """`ring`: which links gloo uses."""
        super().__init__(folder, workers, profile, lease, deadline)
        self.kind = kind
        self._ring = ring
        self._topology = _topology(workers, os.getpid(), profile)

    def _make(self, undo: ExitStack) -> None:
        netns.require_root("a campaign on network namespaces")
        remove_leftovers(self.workers)
        undo.enter_context(self._topology)
        self._space = self._topology.switch_netns or ""
        if self._ring == "management":
            self._join_management_links()
        self.switch = Daemon("switch", self.folder, self._space)
        self.controller = Daemon("controller", self.folder, self._space)
        self._listen = f"{self._topology.management_ip}:{CONTROLLER_PORT}"

    def _join_management_links(self) -> None:
        """Workers reach each other over the management links, through the switch's namespace but past the switch."""
        netns.call(self._space, lambda: Path("/proc/sys/net/ipv4/ip_forward").write_text("1"))
        network = f"{MANAGEMENT_SUBNET}0/{PREFIX_LENGTH}"
        for host in self._topology.hosts:
            route = [
                "route",
                "add",
                network,
                "via",
                self._topology.management_ip,
                "dev",
                MANAGEMENT_INTERFACE,
                "onlink",
            ]
            done = subprocess.run(["ip", "-n", host.netns, *route], capture_output=True, text=True, check=False)
            if done.returncode:
                raise SwitchError(f"cannot join the management links: {done.stderr.strip()}")

    def _switch_command(self) -> list[str]:
        options = SwitchOptions(
            interfaces=self._topology.interfaces, grpc_addr=f"unix:{self._socket}", netns=self._space
        )
        return bmv2_command(options) if self.kind == "bmv2" else embedded_command(options, self._ready)

    def _hosts(self) -> str:
        return self._topology.hosts_toml(f"unix:{self._socket}")

    def _admin(self, undo: ExitStack) -> str:
        # This process is in no namespace of the lab.
        relay = Relay(("127.0.0.1", 0), (self._topology.management_ip, CONTROLLER_PORT), towards=self._space)
        undo.callback(relay.close)
        return relay.address

    def place(self, rank: int, job: str, rendezvous: Path, log: Path, relay: Relay | None = None) -> Place:
        """In the namespace of the rank's host."""
        host = self._topology.hosts[rank]
        return Place(
            rank, self.workers, job, relay.address if relay is not None else self._listen, str(rendezvous), str(log),
            interface=MANAGEMENT_INTERFACE if self._ring == "management" else WORKER_INTERFACE,
            address=host.ip, namespace=host.netns,
        )  # fmt: skip

    def relay(self) -> Relay:
        """In the switch's namespace, where the controller listens."""
        address = self._topology.management_ip
        return Relay((address, 0), (address, CONTROLLER_PORT), inside=self._space, towards=self._space)


def make(
    kind: Kind, folder: Path, *, workers: int = 4, profile: str = "w34", lease: float = 3.0, deadline: float = 20.0,
    ring: RingNetwork = "management",
) -> Arena:  # fmt: skip
    """The arena for a switch. UsageError for one that makes no sense here."""
    if kind == "embedded":
        if ring != "management":
            raise UsageError("the embedded switch carries no TCP on loopback: the ring runs past it")
        return EmbeddedArena(folder, workers, profile, lease, deadline)
    return NamespaceArena(folder, workers, profile, lease, deadline, kind, ring)


def remove_leftovers(workers: int) -> list[str]:
    """Remove the namespaces of campaigns that were killed and could not do it; returns their prefixes. Needs root."""
    form = re.compile(rf"({_PREFIX}([0-9]+))sw")
    names = [path.name for path in netns.RUN_DIR.iterdir()] if netns.RUN_DIR.is_dir() else []
    found = [match for name in names if (match := form.fullmatch(name)) and not alive(int(match[2]))]
    for match in found:
        hosts = sum(name.startswith(f"{match[1]}w") for name in names)
        _topology(max(hosts, workers), int(match[2])).remove()
    return [match[1] for match in found]


def _topology(workers: int, pid: int, profile: str = "w34") -> Topology:
    return Topology(workers, profile=profile, switch_netns=True, management=True, prefix=f"{_PREFIX}{pid}")


def _free_port(host: str) -> int:
    first = os.getpid() % len(_PORTS)
    number: int
    for number in (*_PORTS[first:], *_PORTS[:first]):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, number))
            return number
    raise SwitchError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free on {host}")
