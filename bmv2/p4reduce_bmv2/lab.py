# SPDX-License-Identifier: Apache-2.0
"""Brings up a lab that outlives its maker, says how it is, and takes it down: `p4reduce lab`. Needs root.

The switch's namespace is the switch's box: switch and controller run in it, and the controller listens on the
management links, so that workers reach it whatever becomes of the data plane. All namespaces are the lab's own, so
labs with different names share no name, address, port or socket, and each may use the same subnets.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from p4reduce.errors import SwitchError, UsageError
from p4reduce.wire import PROFILES
from p4reduce_bmv2 import lab_probe, lab_shape, lab_wire, netns
from p4reduce_bmv2.lab_shape import Shape
from p4reduce_bmv2.lab_state import Folder, LabState, Process, end_processes, inode, is_ours, names
from p4reduce_bmv2.switch import STOP_DEADLINE, Kind, SwitchProcess, find_bmv2
from p4reduce_bmv2.topology import WORKER_INTERFACE, Host, Topology

MAX_WORKERS = 64
CONTROLLER_PORT = 50051
RENDEZVOUS_PORT = 29500
START_SECONDS = 60.0
_PROBE_SECONDS = 10.0
_STATUS_PROBE_SECONDS = 2.0
_POLL = 0.02


@dataclass(frozen=True, slots=True)
class LabOptions:
    """What a lab is made of."""

    workers: int = 2
    switch: Kind = "embedded"
    profile: str = "w34"
    shape: Shape = field(default_factory=Shape)
    seed: int = 0
    """Of the wire's faults; netem draws its own."""
    impairer: str = "auto"
    """Who delays and loses frames where that is asked for: netem, wire, or auto for netem where the kernel has it."""
    deadline: float = 60.0
    """Seconds after which the controller has workers give up a bucket of which nothing comes."""

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MAX_WORKERS:
            raise UsageError(f"{self.workers} workers: a lab has 1 to {MAX_WORKERS}")
        if self.switch not in ("embedded", "bmv2"):
            raise UsageError(f"switch {self.switch!r} is neither embedded nor bmv2")
        if self.profile not in PROFILES:
            raise UsageError(f"profile {self.profile!r} is none of {', '.join(sorted(PROFILES))}")
        if not 0.0 < self.deadline <= 86400.0:
            raise UsageError(f"a deadline of {self.deadline:g} s is not above 0 and at most a day")
        if self.impairer not in ("auto", "netem", "wire"):
            raise UsageError(f"impairer {self.impairer!r} is none of auto, netem, wire")

    def as_dict(self) -> dict[str, Any]:
        """For the state file."""
        return asdict(self)

    @staticmethod
    def from_dict(content: dict[str, Any]) -> LabOptions:
        """Back from the state file."""
        return LabOptions(**{**content, "shape": Shape(**content["shape"])})


class Lab:
    """One lab by its name, there or not."""

    def __init__(self, name: str = "lab") -> None:
        """UsageError for a name that cannot be one."""
        self.name = name
        self.folder = Folder(name)

    def state(self) -> LabState:
        """What is there. SwitchError when nothing is."""
        state = self.folder.read()
        if state is None:
            others = names()
            there = f" (there are: {', '.join(others)})" if others else ""
            make = f"`p4reduce lab up --name {self.name}`"
            raise SwitchError(f"there is no lab {self.name!r}{there}: make one with {make}")
        return state

    def topology(self, state: LabState) -> Topology:
        """Names and addresses of the lab; entering it would make a second one."""
        options = LabOptions.from_dict(state.options)
        return _topology(options, state.prefix, state.impairer == "wire")

    def up(self, options: LabOptions) -> bool:
        """Make the lab and return when every part answers; False when it was there already.

        SwitchError: it cannot be made here, or one of the same name is there that is damaged or made differently.
        Whatever goes wrong, nothing of it stays.
        """
        require(options)
        with self.folder.locked():
            state = self.folder.read()
            if state is not None:
                self._compare(state, options)
                return False
            state = LabState(self.name, self.folder.prefix, options.as_dict())
            try:
                self._make(state, options)
            except BaseException:
                self._remove(state)
                raise
        return True

    def down(self) -> bool:
        """End and remove everything of the lab, whatever state it is in; False when there was nothing."""
        netns.require_root("taking down a lab")
        with self.folder.locked():
            state = self.folder.read()
            if state is None:
                return False
            self._remove(state)
        return True

    def restart(self) -> None:
        """Restart the switch in place, also one that has died, and return when every port answers again.

        Links and controller stay. What the switch held is lost: the controller gives it a new pipeline and ends the
        epochs of running jobs. SwitchError when the lab is damaged otherwise, or the switch does not come up.
        """
        netns.require_root("restarting a lab's switch")
        with self.folder.locked():
            state = self.state()
            old = state.processes.pop("switch", None)
            others = self.problems(state)
            if others:
                raise SwitchError(f"lab {self.name!r}: {'; '.join(others)}")
            if old is not None:
                self._end_switch(old)
            topology = self.topology(state)
            self._start_switch(state, LabOptions.from_dict(state.options), topology)
            self._await_ports(topology)

    @staticmethod
    def _end_switch(switch: Process) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            switch.signal(number)
            deadline = time.monotonic() + STOP_DEADLINE
            while switch.alive and time.monotonic() < deadline:
                time.sleep(_POLL)
        _collect(switch.pid)
        if switch.alive:
            raise SwitchError(f"the switch (pid {switch.pid}) cannot be ended")

    def status(self, probe: bool = True) -> dict[str, Any]:
        """How the lab is, ready for JSON. With `probe` (needs root) every port is asked through the data plane."""
        state = self.state()
        topology = self.topology(state)
        missing = [name for name in state.namespaces if not is_ours(state, name)]
        workers: list[dict[str, Any]] = []
        answered = self._ask_ports(topology, _STATUS_PROBE_SECONDS, missing) if probe else {}
        for rank, host in enumerate(topology.hosts):
            worker: dict[str, Any] = {"rank": rank, "netns": host.netns, "ip": host.ip, "port": host.port}
            if probe:
                worker["answers"] = answered[host.port]
                worker["link"] = self._link(topology, rank) if not missing else {}
            workers.append(worker)
        processes = {name: {"pid": process.pid, "alive": process.alive} for name, process in state.processes.items()}
        silent = [str(worker["port"]) for worker in workers if not worker.get("answers", True)]
        problems = self.problems(state)
        if silent:
            problems.append(f"the switch does not answer on port {', '.join(silent)}")
        return {
            "name": state.name,
            "phase": state.phase,
            "options": state.options,
            "impairer": state.impairer,
            "controller": state.controller,
            "switch_netns": topology.switch_netns,
            "folder": str(self.folder.path),
            "started": state.started,
            "processes": processes,
            "missing_namespaces": missing,
            "workers": workers,
            "problems": problems,
        }

    def problems(self, state: LabState) -> list[str]:
        """What is wrong with the lab, as far as can be told without asking its ports; empty when all is well."""
        found = [] if state.phase == "up" else ["it was never finished"]
        found += [f"its {name} (pid {one.pid}) has ended" for name, one in state.processes.items() if not one.alive]
        return found + [f"namespace {name} is gone" for name in state.namespaces if not is_ours(state, name)]

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _compare(self, state: LabState, options: LabOptions) -> None:
        """SwitchError unless what is there is whole and what was asked for."""
        problems = self.problems(state)
        down = f"`p4reduce lab down --name {self.name}`"
        if problems:
            raise SwitchError(f"lab {self.name!r} is there, but {'; '.join(problems)}: {down} removes it")
        other = differences(LabOptions.from_dict(state.options).as_dict(), options.as_dict())
        if other:
            raise SwitchError(f"lab {self.name!r} is up with other options: {', '.join(other)}; {down} removes it")

    def _make(self, state: LabState, options: LabOptions) -> None:
        plan = _topology(options, state.prefix, False)
        taken = [name for name in (*plan.namespaces, f"{state.prefix}x") if inode(name)]
        if taken:
            raise SwitchError(f"network namespace {taken[0]} exists and is not known to be a lab's")
        try:
            topology = self._make_network(state, options, plan)
        except BaseException:
            # What was made is removed again; a namespace that bears one of the names now is somebody else's.
            state.namespaces = {}
            raise
        self._start(state, options, topology)
        state.phase, state.started = "up", time.time()
        self.folder.write(state)

    def _make_network(self, state: LabState, options: LabOptions, plan: Topology) -> Topology:
        """Namespaces and links, or, on an exception, nothing."""
        # Noted before anything is made, so that whoever finds the pieces after a kill knows whose they are.
        state.namespaces = dict.fromkeys([*plan.namespaces, f"{state.prefix}x"], 0)
        self.folder.write(state)
        state.impairer = _impairer(options, f"{state.prefix}x") if options.shape.impaired else "none"
        topology = _topology(options, state.prefix, state.impairer == "wire")
        state.namespaces = dict.fromkeys(topology.namespaces, 0)
        self.folder.write(state)
        with topology:
            state.namespaces = {name: inode(name) for name in topology.namespaces}
            self.folder.write(state)
            topology.leave()
        return topology

    def _start(self, state: LabState, options: LabOptions, topology: Topology) -> None:
        folder = self.folder.path
        if topology.wire_netns is not None:
            links = [host.port for host in topology.hosts]
            words = lab_wire.command(links, options.shape, options.seed, folder / "wire.counters")
            self._spawn(state, "wire", words, topology.wire_netns)
        assert topology.switch_netns is not None
        address = self._start_switch(state, options, topology)
        (folder / "hosts.toml").write_text(topology.hosts_toml(address))
        command = [sys.executable, "-m", "p4reduce_controller.serve", "serve", "--ready-json"]
        command += ["--hosts", str(folder / "hosts.toml"), "--state", str(folder / "controller.sqlite")]
        # Insecure to other machines, but the lab's namespaces are all that reaches this address.
        command += ["--listen", f"{topology.management_ip}:{CONTROLLER_PORT}", "--insecure"]
        command += ["--deadline", repr(options.deadline)]
        self._spawn(state, "controller", command, topology.switch_netns)
        self._wait(state, "controller", lambda: _announced(folder / "controller.out"))
        state.controller = f"{topology.management_ip}:{CONTROLLER_PORT}"
        self._await_ports(topology)
        # Last, so that a slow or lossy link does not slow the start down.
        netem = state.impairer == "netem"
        for host in topology.hosts:
            for place, name in ((host.netns, WORKER_INTERFACE), (topology.switch_netns, host.interface)):
                lab_shape.apply(place, name, options.shape, topology.mtu, netem)

    def _start_switch(self, state: LabState, options: LabOptions, topology: Topology) -> str:
        """Start the switch, note it, and return its address once it answers there."""
        socket = self.folder.path / "switch.sock"
        # simple_switch_grpc leaves its socket behind.
        socket.unlink(missing_ok=True)
        switch = SwitchProcess.start(
            options.switch,
            interfaces=topology.interfaces,
            netns=topology.switch_netns,
            grpc_addr=f"unix:{socket}",
            log_path=self.folder.path / "switch.log",
            deadline=START_SECONDS,
        )
        self._note(state, "switch", switch.detach())
        return switch.grpc_address

    def _await_ports(self, topology: Topology) -> None:
        silent = [str(port) for port, answer in self._ask_ports(topology, _PROBE_SECONDS).items() if not answer]
        if silent:
            log_tail = _tail(self.folder.path / "switch.log")
            raise SwitchError(f"the switch does not answer on port {', '.join(silent)}: {log_tail}")

    @staticmethod
    def _ask_ports(topology: Topology, seconds: float, missing: Collection[str] = ()) -> dict[int, bool]:
        """Whether each port answers, all asked at once; those of missing namespaces do not."""

        def ask(host: Host) -> bool:
            return host.netns not in missing and lab_probe.answers(host, topology.switch_ip, seconds)

        with ThreadPoolExecutor(len(topology.hosts)) as pool:
            return dict(zip(topology.interfaces, pool.map(ask, topology.hosts), strict=True))

    def _spawn(self, state: LabState, name: str, command: list[str], namespace: str) -> None:
        """Start a process that outlives this one."""
        folder = self.folder.path
        with (folder / f"{name}.out").open("wb") as out, (folder / f"{name}.log").open("wb") as errors:
            process = subprocess.Popen(
                netns.command_prefix(namespace) + command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                start_new_session=True,
            )
        process.returncode = 0  # nobody waits for it here, and Popen would complain about that
        self._note(state, name, process.pid)

    def _note(self, state: LabState, name: str, pid: int) -> None:
        process = Process.of(pid)
        if process is None:
            raise SwitchError(f"the {name} ended at once: {_tail(self.folder.path / f'{name}.log')}")
        state.processes[name] = process
        self.folder.write(state)

    def _wait(self, state: LabState, name: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not condition():
            tail = _tail(self.folder.path / f"{name}.log")
            if not state.processes[name].alive:
                raise SwitchError(f"the {name} ended at start: {tail}")
            if time.monotonic() > deadline:
                raise SwitchError(f"the {name} was not ready within {START_SECONDS:.0f} s: {tail}")
            time.sleep(_POLL)

    def _remove(self, state: LabState) -> None:
        end_processes(state)
        for process in state.processes.values():
            _collect(process.pid)
        # In an unfinished lab it is not yet settled whether there is a wire: its namespace is among the names if so.
        wire = f"{state.prefix}x" in state.namespaces
        topology = _topology(LabOptions.from_dict(state.options), state.prefix, wire)
        topology.remove(lambda name: is_ours(state, name))
        self.folder.forget()

    def _link(self, topology: Topology, rank: int) -> dict[str, Any]:
        """What the link of a rank did to its frames, by direction: tc's numbers, and the wire's if there is one."""
        host = topology.hosts[rank]
        assert topology.switch_netns is not None
        ends = {"up": (host.netns, WORKER_INTERFACE), "down": (topology.switch_netns, host.interface)}
        found: dict[str, Any] = {way: {"tc": lab_shape.statistics(*end)} for way, end in ends.items()}
        counters = lab_wire.read_counters(self.folder.path / "wire.counters")
        for way, row in (("up", 2 * rank), ("down", 2 * rank + 1)):
            if row < len(counters):
                found[way]["wire"] = asdict(counters[row])
        return found


def readable(name: str, value: Any) -> str:
    """An option's value as one would give it: 100mbit, 1ms, 0.1%."""
    if name == "rate":
        for unit, size in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
            if value >= size:
                return f"{value / size:g}{unit}"
        return f"{value:g}bit" if value else "unlimited"
    if name == "delay":
        for unit, size in (("s", 1.0), ("ms", 1e-3)):
            if value >= size:
                return f"{value / size:g}{unit}"
        return f"{value / 1e-6:g}us" if value else "0"
    if name in ("loss", "duplicate", "reorder"):
        return f"{100 * value:g}%"
    return f"{value:g}s" if name == "deadline" else str(value)


def differences(there: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    """Which of a lab's options are not those asked for, with both values."""
    found = []
    for name, value in there.items():
        if name == "shape":
            found += differences(value, asked[name])
        elif value != asked[name]:
            found.append(f"{name} {readable(name, value)}, not {readable(name, asked[name])}")
    return found


def require(options: LabOptions) -> None:
    """SwitchError when this machine cannot have such a lab, with what would help."""
    if os.geteuid() != 0:
        raise SwitchError(
            "a lab needs root, for its network namespaces: run it with sudo; "
            "`p4reduce demo --switch embedded` needs no root"
        )
    if options.switch == "bmv2" and find_bmv2() is None:
        raise SwitchError(
            "simple_switch_grpc is not on PATH: install the package p4lang-bmv2 from p4lang's package archive, "
            "or take --switch embedded"
        )


def _topology(options: LabOptions, prefix: str, wire: bool) -> Topology:
    return Topology(
        options.workers,
        profile=options.profile,
        switch_netns=True,
        prefix=prefix,
        management=True,
        wire_netns=wire,
    )


def _impairer(options: LabOptions, scratch: str) -> str:
    """netem or wire. Asks the kernel in a namespace that is made for it."""
    if options.impairer == "wire":
        return "wire"
    netns.create(scratch)
    try:
        available = lab_shape.netem_available(scratch)
    finally:
        netns.remove(scratch)
    if not available and options.impairer == "netem":
        raise SwitchError("this kernel has no netem (module sch_netem): take --impairer wire, or auto")
    return "netem" if available else "wire"


def _announced(path: Path) -> bool:
    """Whether the controller has written its line of JSON."""
    try:
        return bool(json.loads(path.read_text())["ready"])
    except ValueError:
        return False


def _tail(path: Path, limit: int = 2000) -> str:
    try:
        return path.read_bytes()[-limit:].decode(errors="replace").strip()
    except OSError:
        return ""


def _collect(pid: int) -> None:
    """Take the exit code of a child of this process, if it is one, so that no zombie stays."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
