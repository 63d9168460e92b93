# SPDX-License-Identifier: Apache-2.0
"""A lab on one machine: a network namespace for each worker, joined to the switch by veth pairs. Needs root.

```
 worker namespace 1            root (or the switch's namespace)
 eth0 10.0.0.1/24  ----veth----  PREFIXs1 = switch port 1
 worker namespace 2
 eth0 10.0.0.2/24  ----veth----  PREFIXs2 = switch port 2
```
The switch side has no address, and nobody needs ARP: every worker knows the switch's address and its peers for good.

Two additions on request. `management` gives every worker a second link, `mgmt0`, to the switch's namespace: a
controller there is reached past the data plane, as on a real switch. `wire_netns` cuts every link in two, with both
inner ends in a namespace of their own, where a program may carry frames between them (p4reduce_bmv2.lab_wire).
"""

from __future__ import annotations

import secrets
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from p4reduce import wire
from p4reduce.errors import SwitchError
from p4reduce_bmv2 import netns
from p4reduce_bmv2.offloads import disable_offloads

WORKER_INTERFACE = "eth0"
MANAGEMENT_INTERFACE = "mgmt0"
SUBNET = "10.0.0."
MANAGEMENT_SUBNET = "10.255.0."
PREFIX_LENGTH = 24
MAX_WORKERS = 200
_SWITCH_HOST = 254
_STOP_DEADLINE = 5.0
"""Seconds that commands of the lab get to end on SIGTERM."""
_CARRIER_DEADLINE = 5.0
_RTNL_NOARP = 0x80
_NUD_PERMANENT = 0x80


@dataclass(frozen=True, slots=True)
class Host:
    """One worker's place: its namespace and addresses, and the switch's side of its link."""

    name: str
    netns: str
    ip: str
    mac: str
    port: int
    interface: str
    """The switch's end of the veth pair."""

    @property
    def management_ip(self) -> str:
        """Address of the management link, where there is one."""
        return f"{MANAGEMENT_SUBNET}{self.port}"

    @property
    def wire_ends(self) -> tuple[str, str]:
        """Interfaces in the wire's namespace: towards the worker, towards the switch."""
        return f"a{self.port}", f"b{self.port}"


class Topology:
    """Namespaces and links, made on entry and removed on exit, whatever happens in between."""

    switch_ip = f"{SUBNET}{_SWITCH_HOST}"
    switch_mac = f"02:70:34:00:00:{_SWITCH_HOST:02x}"
    management_ip = f"{MANAGEMENT_SUBNET}{_SWITCH_HOST}"
    """Where a controller in the switch's namespace listens, with `management`."""

    def __init__(
        self,
        workers: int,
        *,
        mtu: int | None = None,
        profile: str = "w34",
        switch_netns: bool = False,
        prefix: str | None = None,
        management: bool = False,
        wire_netns: bool = False,
    ) -> None:
        """`mtu` in bytes (default: what the profile needs, 9000 or 1500 at least); `switch_netns` gives the switch a
        namespace of its own; `prefix` (at most 9 characters) starts every name, and is random by default; `management`
        adds the management links and needs `switch_netns`; with `wire_netns` nothing passes until a wire runs.
        """
        if not 1 <= workers <= MAX_WORKERS:
            raise SwitchError(f"{workers} workers: a lab has 1..{MAX_WORKERS}")
        needed = wire.profile(profile).mtu
        self.mtu = mtu if mtu is not None else max(needed, 1500 if needed <= 1500 else 9000)
        self.profile = profile
        self.prefix = prefix if prefix is not None else f"p4r{secrets.token_hex(3)}"
        if not 1 <= len(self.prefix) <= 9 or not self.prefix.isalnum():
            raise SwitchError(f"prefix {self.prefix!r} is not 1..9 letters and digits")
        if management and not switch_netns:
            raise SwitchError("management links end in the switch's namespace: it needs one of its own")
        self.switch_netns: str | None = f"{self.prefix}sw" if switch_netns else None
        self.wire_netns: str | None = f"{self.prefix}x" if wire_netns else None
        self.management = management
        self.hosts = tuple(
            Host(
                name=f"h{number}",
                netns=f"{self.prefix}w{number}",
                ip=f"{SUBNET}{number}",
                mac=f"02:70:34:00:00:{number:02x}",
                port=number,
                interface=f"{self.prefix}s{number}",
            )
            for number in range(1, workers + 1)
        )
        self._undo = ExitStack()

    @property
    def interfaces(self) -> dict[int, str]:
        """Switch port -> interface, as a switch wants it."""
        return {host.port: host.interface for host in self.hosts}

    @property
    def namespaces(self) -> list[str]:
        """Names of all namespaces that the lab has or will have."""
        own = [name for name in (self.switch_netns, self.wire_netns) if name is not None]
        return own + [host.netns for host in self.hosts]

    def leave(self) -> None:
        """Let everything stay after the context is left; `remove` takes it away, in this process or another."""
        self._undo.pop_all()

    def remove(self, mine: Callable[[str], bool] = lambda _: True) -> None:
        """Remove the links and those namespaces for which `mine` is true; what is not there is passed over.

        For a lab that an earlier process made with the same arguments. Its processes must have ended.
        """
        pyroute2 = _pyroute2()
        ends = {self.switch_netns: [f"{self.prefix}m{host.port}" for host in self.hosts] + [*self.interfaces.values()]}
        ends[self.wire_netns] = [end for host in self.hosts for end in host.wire_ends]
        for name, interfaces in ends.items():
            # Deleting one end deletes both, at once; a namespace alone would take its end away some time later.
            if name is not None and (netns.RUN_DIR / name).exists() and mine(name):
                netns.call(name, partial(_configure, pyroute2, partial(_delete_all, interfaces)))
        for name in self.namespaces:
            if (netns.RUN_DIR / name).exists() and mine(name):
                netns.remove(name)

    def __enter__(self) -> Topology:
        netns.require_root("a lab of network namespaces")
        pyroute2 = _pyroute2()
        with ExitStack() as undo:
            for name in (self.switch_netns, self.wire_netns):
                if name is not None:
                    self._make_namespace(pyroute2, undo, name)
            if self.management:
                self._at_switch(lambda: _configure(pyroute2, lambda ip: _address(ip, "lo", self.management_ip, 32)))
            for host in self.hosts:
                self._make_namespace(pyroute2, undo, host.netns)
                self._make_link(pyroute2, undo, host)
                if self.management:
                    self._make_management_link(pyroute2, host)
            for host in self.hosts:
                self._at_switch(lambda name=host.interface: _configure(pyroute2, lambda ip: _await_carrier(ip, name)))
                netns.call(host.netns, lambda: _configure(pyroute2, lambda ip: _await_carrier(ip, WORKER_INTERFACE)))
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._undo.close()

    def command(self, host: Host, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on a host."""
        return netns.command_prefix(host.netns) + list(command)

    def run(self, host: Host, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """subprocess.run on a host."""
        return subprocess.run(self.command(host, command), **options)

    def popen(self, host: Host, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """subprocess.Popen on a host; ended with the lab if it still runs then."""
        process = subprocess.Popen(self.command(host, command), **options)
        self._undo.callback(_end, process)
        return process

    def hosts_toml(self, grpc: str, device_id: int = 0) -> str:
        """The controller's hosts file for this lab."""
        lines = [
            "[switch]",
            f'grpc = "{grpc}"',
            f"device_id = {device_id}",
            f'profile = "{self.profile}"',
            f'ip = "{self.switch_ip}"',
            f'mac = "{self.switch_mac}"',
        ]
        for host in self.hosts:
            lines += ["", "[[host]]", f'name = "{host.name}"', f'ip = "{host.ip}"', f'mac = "{host.mac}"']
            lines.append(f"port = {host.port}")
        return "\n".join(lines) + "\n"

    def _make_namespace(self, pyroute2: Any, undo: ExitStack, name: str) -> None:
        netns.create(name)
        undo.callback(netns.remove, name)
        netns.call(name, lambda: _configure(pyroute2, lambda ip: _up(ip, "lo")))

    def _make_link(self, pyroute2: Any, undo: ExitStack, host: Host) -> None:
        worker_end = {"ifname": WORKER_INTERFACE, "net_ns_fd": host.netns, "address": host.mac, "mtu": self.mtu}
        inner, outer = host.wire_ends

        def make(ip: Any) -> None:
            peer = worker_end
            if self.wire_netns is not None:
                peer = {"ifname": outer, "net_ns_fd": self.wire_netns, "mtu": self.mtu}
            ip.link("add", ifname=host.interface, kind="veth", mtu=self.mtu, peer=peer)

        def in_wire(ip: Any) -> None:
            ip.link("add", ifname=inner, kind="veth", mtu=self.mtu, peer=worker_end)
            _silent(ip, inner)
            _silent(ip, outer)

        def worker_side(ip: Any) -> None:
            _quiet(WORKER_INTERFACE)
            index = _index(ip, WORKER_INTERFACE)
            ip.addr("add", index=index, address=host.ip, prefixlen=PREFIX_LENGTH)
            _up(ip, WORKER_INTERFACE)
            neighbours = [(self.switch_ip, self.switch_mac)] + [(h.ip, h.mac) for h in self.hosts if h is not host]
            for address, mac in neighbours:
                ip.neigh("add", dst=address, lladdr=mac, ifindex=index, state=_NUD_PERMANENT)

        self._at_switch(lambda: _configure(pyroute2, make))
        # Deleting one end deletes both, at once; a namespace alone would take its end away some time later.
        undo.callback(self._at_switch, lambda: _configure(pyroute2, lambda ip: _delete(ip, host.interface)))
        if self.wire_netns is not None:
            netns.call(self.wire_netns, lambda: _configure(pyroute2, in_wire))
        self._at_switch(lambda: _configure(pyroute2, lambda ip: _silent(ip, host.interface)))
        netns.call(host.netns, lambda: _configure(pyroute2, worker_side))

    def _make_management_link(self, pyroute2: Any, host: Host) -> None:
        """A link of its own to each worker, and routes for one address: no bridge, no ARP between workers."""
        name = f"{self.prefix}m{host.port}"

        def switch_side(ip: Any) -> None:
            peer = {"ifname": MANAGEMENT_INTERFACE, "net_ns_fd": host.netns}
            ip.link("add", ifname=name, kind="veth", peer=peer)
            _no_ipv6(name)
            _up(ip, name)
            ip.route("add", dst=f"{host.management_ip}/32", oif=_index(ip, name), prefsrc=self.management_ip)

        def worker_side(ip: Any) -> None:
            _no_ipv6(MANAGEMENT_INTERFACE)
            _address(ip, MANAGEMENT_INTERFACE, host.management_ip, 32)
            _up(ip, MANAGEMENT_INTERFACE)
            ip.route("add", dst=f"{self.management_ip}/32", oif=_index(ip, MANAGEMENT_INTERFACE))

        self._at_switch(lambda: _configure(pyroute2, switch_side))
        netns.call(host.netns, lambda: _configure(pyroute2, worker_side))

    def _at_switch(self, function: Any) -> None:
        if self.switch_netns is not None:
            netns.call(self.switch_netns, function)
        else:
            function()


def _pyroute2() -> Any:
    try:
        import pyroute2
    except ImportError as error:
        raise SwitchError("a lab needs pyroute2: pip install 'p4reduce[bmv2]'") from error
    return pyroute2


def _configure(pyroute2: Any, change: Any) -> None:
    """Run a change on the calling thread's namespace; netlink's error becomes SwitchError."""
    try:
        with pyroute2.IPRoute() as ip:
            change(ip)
    except pyroute2.NetlinkError as error:
        raise SwitchError(f"netlink refused: {error}") from error


def _index(ip: Any, interface: str) -> int:
    found = ip.link_lookup(ifname=interface)
    if not found:
        raise SwitchError(f"there is no interface {interface}")
    return int(found[0])


def _up(ip: Any, interface: str) -> None:
    ip.link("set", index=_index(ip, interface), state="up")


def _await_carrier(ip: Any, interface: str) -> None:
    """Wait until the kernel has started the link's queue, which it does a moment after both ends are up.

    A frame that is sent before then is lost.
    """
    deadline = time.monotonic() + _CARRIER_DEADLINE
    index = _index(ip, interface)
    while ip.get_links(index)[0].get_attr("IFLA_OPERSTATE") != "UP":
        if time.monotonic() > deadline:
            raise SwitchError(f"interface {interface} did not come up in {_CARRIER_DEADLINE:.0f} s")
        time.sleep(0.005)


def _delete(ip: Any, interface: str) -> None:
    for index in ip.link_lookup(ifname=interface):
        ip.link("del", index=index)


def _delete_all(interfaces: Sequence[str], ip: Any) -> None:
    for interface in interfaces:
        _delete(ip, interface)


def _address(ip: Any, interface: str, address: str, prefixlen: int) -> None:
    ip.addr("add", index=_index(ip, interface), address=address, prefixlen=prefixlen)


def _silent(ip: Any, interface: str) -> None:
    """Bring up an interface on which the kernel itself says nothing."""
    _quiet(interface)
    ip.link("set", index=_index(ip, interface), flags=_RTNL_NOARP, change=_RTNL_NOARP)
    _up(ip, interface)


def _no_ipv6(interface: str) -> None:
    knob = Path(f"/proc/sys/net/ipv6/conf/{interface}/disable_ipv6")
    if knob.exists():
        knob.write_text("1")


def _quiet(interface: str) -> None:
    """Before the interface is up: no IPv6, which would send router solicitations into the switch, and no offloads."""
    _no_ipv6(interface)
    disable_offloads(interface)


def _end(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_DEADLINE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()
