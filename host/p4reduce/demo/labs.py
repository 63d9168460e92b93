# SPDX-License-Identifier: Apache-2.0
"""Where the demo runs: a switch, a controller, and a place for every worker.

The embedded lab is all on loopback: 127.0.1.1 and so on, behind the UDP ports of an embedded switch. The BMv2 lab is a
network of namespaces, one for every worker and one for the controller, and nothing but the switch between them: the
workers' TCP, torch's gloo included, crosses it as well.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from p4reduce.demo.processes import Children, alive
from p4reduce.demo.report import DemoOptions
from p4reduce.errors import ConfigError, SwitchError

DEFAULT_PROFILE = "w34"
READY_SECONDS = 60.0
"""How long a switch or controller may take to come up: seconds on an idle machine, more on a busy one."""
CONTROLLER_PORT = 50051
RENDEZVOUS_PORT = 29400
"""Both in a namespace of the lab's own, where no port is taken."""
_PREFIX = "pd"
"""Starts the names of the demo's namespaces; the supervisor's pid follows."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one torchrun is started, and with what arguments of its own."""

    name: str
    torchrun: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    namespace: str = ""


class Lab(Protocol):
    """What `run_demo` needs of a lab. As a context manager it removes on exit what is no process."""

    kind: str
    description: str
    profile: str

    def start(self, children: Children, deadline: float) -> None:
        """Start switch and controller, and return when both answer. `deadline` is on time.monotonic()."""

    def places(self) -> list[Place]:
        """Where to start the workers."""

    def __enter__(self) -> Lab: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def choose(options: DemoOptions, folder: Path, note: Callable[[str], None]) -> Lab:
    """The lab that `options.switch` means on this machine; `note` is told when "auto" cannot have BMv2.

    ConfigError when "bmv2" was asked for and cannot be had.
    """
    if options.switch == "embedded":
        return EmbeddedLab(options, folder)
    obstacle = bmv2_obstacle(options)
    if not obstacle:
        return Bmv2Lab(options, folder)
    if options.switch == "bmv2":
        raise ConfigError(f"no BMv2 demo here: {obstacle}; --switch embedded works anywhere")
    note(f"Using the embedded switch, because {obstacle}.")
    return EmbeddedLab(options, folder)


def bmv2_obstacle(options: DemoOptions) -> str:
    """Why the BMv2 lab cannot run here; empty when it can."""
    if shutil.which("simple_switch_grpc") is None:
        return "simple_switch_grpc is not on PATH"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if importlib.util.find_spec("pyroute2") is None:
        return "pyroute2 is not installed (pip install 'p4reduce[bmv2]')"
    if options.loss:
        return "BMv2 has no seeded loss"
    return ""


class EmbeddedLab:
    """Everything on loopback, without root."""

    kind = "embedded"

    def __init__(self, options: DemoOptions, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self.profile = options.profile or DEFAULT_PROFILE
        self.description = "Embedded switch on loopback"
        self._controller = ""

    def __enter__(self) -> EmbeddedLab:
        return self

    def __exit__(self, *details: object) -> None:
        return None

    def start(self, children: Children, deadline: float) -> None:
        """Start switch and controller."""
        from p4reduce_bmv2.switch import SwitchOptions, embedded_command

        ready = self._folder / "switch.json"
        options = self._options
        ports = {worker + 1: f"127.0.1.{worker + 1}" for worker in range(options.workers)}
        asked = SwitchOptions(udp_ports=ports, loss=options.loss, seed=options.seed)
        children.start("p4reduce-switch", embedded_command(asked, ready))
        switch = wait_for(lambda: read_json(ready), children, deadline, "the switch")
        hosts = self._folder / "hosts.toml"
        hosts.write_text(embedded_hosts(switch, self.profile))
        self._controller = start_controller(children, self._folder, hosts, "127.0.0.1:0", deadline)

    def places(self) -> list[Place]:
        """One torchrun for all workers."""
        environment = {"P4REDUCE_CONTROLLER": self._controller, "GLOO_SOCKET_IFNAME": "lo"}
        return [Place("torchrun", ["--standalone", f"--nproc-per-node={self._options.workers}"], environment)]


class Bmv2Lab:
    """simple_switch_grpc between network namespaces. Needs root."""

    kind = "bmv2"

    def __init__(self, options: DemoOptions, folder: Path) -> None:
        from p4reduce_bmv2.topology import Topology

        self._options = options
        self._folder = folder
        self.profile = options.profile or DEFAULT_PROFILE
        self.description = f"BMv2 between {options.workers} network namespaces"
        # One more host than workers: the controller's.
        self._topology = Topology(options.workers + 1, profile=self.profile, prefix=f"{_PREFIX}{os.getpid()}")
        self._controller = ""

    def __enter__(self) -> Bmv2Lab:
        remove_leftovers()
        self._topology.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._topology.__exit__(*details)

    def start(self, children: Children, deadline: float) -> None:
        """Start switch and controller."""
        from p4reduce_bmv2.switch import SwitchOptions, bmv2_command

        # A socket in the file system, because namespaces do not share loopback.
        socket = self._folder / "switch.sock"
        address = f"unix:{socket}"
        asked = SwitchOptions(interfaces=self._topology.interfaces, grpc_addr=address)
        children.start("simple_switch_grpc", bmv2_command(asked))
        wait_for(socket.exists, children, deadline, "the switch")
        hosts = self._folder / "hosts.toml"
        hosts.write_text(self._topology.hosts_toml(address))
        host = self._topology.hosts[-1]
        listen = f"{host.ip}:{CONTROLLER_PORT}"
        self._controller = start_controller(children, self._folder, hosts, listen, deadline, host.netns)

    def places(self) -> list[Place]:
        """One torchrun in every worker's namespace, as on hosts of their own."""
        workers = self._topology.hosts[:-1]
        environment = {"P4REDUCE_CONTROLLER": self._controller, "GLOO_SOCKET_IFNAME": "eth0"}
        common = [f"--nnodes={len(workers)}", "--nproc-per-node=1"]
        common += [f"--master-addr={workers[0].ip}", f"--master-port={RENDEZVOUS_PORT}"]
        return [
            Place(f"torchrun-{host.name}", [*common, f"--node-rank={rank}"], environment, host.netns)
            for rank, host in enumerate(workers)
        ]


def embedded_hosts(switch: Mapping[str, Any], profile: str) -> str:
    """Hosts file for the UDP ports that an embedded switch announced."""
    lines = ["[switch]", f'grpc = "{switch["grpc"]}"', f'profile = "{profile}"', 'ip = "127.0.1.254"']
    lines.append('mac = "02:70:7f:00:01:fe"')
    for port, endpoint in switch["udp_ports"].items():
        lines += ["", "[[host]]", f'name = "local{port}"', f'ip = "127.0.1.{port}"']
        lines += [f"port = {port}", f'endpoint = "{endpoint}"']
    return "\n".join(lines) + "\n"


def start_controller(
    children: Children, folder: Path, hosts: Path, listen: str, deadline: float, namespace: str = ""
) -> str:
    """Start the controller and return the address it listens on."""
    command = [sys.executable, "-m", "p4reduce_controller.serve", "serve", "--ready-json"]
    command += ["--hosts", str(hosts), "--listen", listen, "--state", str(folder / "controller.sqlite")]
    # Nobody but the demo's own processes and namespaces reaches these addresses.
    command += ["--insecure"]
    child = children.start("p4reduce-controller", command, namespace=namespace)
    address: str = wait_for(lambda: announced_address(child.log), children, deadline, "the controller")
    return address


def announced_address(log: Path) -> str:
    """The address in the line of JSON that a controller writes when it is ready; empty before."""
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("{") and line.endswith("}"):
            return str(json.loads(line)["address"])
    return ""


def wait_for(condition: Callable[[], Any], children: Children, deadline: float, what: str) -> Any:
    """Poll until `condition` gives something true, and return that.

    ChildFailed when a child dies meanwhile, SwitchError when it takes too long.
    """
    limit = min(deadline, time.monotonic() + READY_SECONDS)
    while not (value := condition()):
        children.check()
        if time.monotonic() > limit:
            tails = "\n".join(f"{child.name}:\n{child.tail()}" for child in children)
            raise SwitchError(f"{what} did not come up in time. The end of what was written:\n{tails}")
        time.sleep(0.02)
    return value


def read_json(path: Path) -> Any:
    """Content of a file that may not be there yet, or not completely; None then."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def remove_leftovers() -> None:
    """Remove the links and namespaces of demos whose supervisor was killed and could not do it. Needs root."""
    import pyroute2

    with pyroute2.IPRoute() as route:
        # First the links: a namespace lives on while a connection in it has not been given up.
        for name in _leftovers(Path("/sys/class/net"), "s"):
            for index in route.link_lookup(ifname=name):
                route.link("del", index=index)
    for name in _leftovers(Path("/run/netns"), "w"):
        pyroute2.netns.remove(name)


def _leftovers(folder: Path, letter: str) -> list[str]:
    """Names in `folder` that p4reduce_bmv2.topology made for a demo that no longer runs."""
    if not folder.is_dir():
        return []
    form = re.compile(rf"{_PREFIX}([0-9]+){letter}[0-9]+")
    found = [match for path in folder.iterdir() if (match := form.fullmatch(path.name))]
    return [match[0] for match in found if not alive(int(match[1]))]
