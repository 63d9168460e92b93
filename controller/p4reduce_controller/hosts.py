# SPDX-License-Identifier: Apache-2.0
"""The hosts file: which switch there is, and which host sits on which of its ports.

    [switch]
    name = "s1"                # what operators call it; default "s1"
    grpc = "127.0.0.1:9559"    # P4Runtime address, or unix:/PATH
    device_id = 0              # default 0, as simple_switch_grpc
    profile = "w34"
    ip = "10.0.0.254"          # where workers send contributions, UDP port 20532
    mac = "02:70:34:00:00:fe"

    [[host]]
    name = "h1"
    ip = "10.0.0.1"
    mac = "02:70:34:00:00:01"
    port = 1                   # switch port, 1..510
    endpoint = "127.0.0.1:40001"   # only for UDP ports of the embedded switch: where this host's workers send to

A host with an `endpoint` needs no `mac`: the embedded switch makes one up from the address (`synthetic_mac`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address
from pathlib import Path
from typing import Any

from p4reduce.constants import UDP_PORT
from p4reduce.errors import ConfigError
from p4reduce.wire import PROFILES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

MAX_PORT = 510
"""Highest usable switch port: BMv2 drops what is sent to 511, and its multicast engine ignores ports from 512 on."""
BROADCAST_MAC = 0xFFFF_FFFF_FFFF
DEFAULT_SWITCH_NAME = "s1"
MAX_NAME = 64

_SWITCH_KEYS = {"name", "grpc", "device_id", "profile", "ip", "mac"}
_HOST_KEYS = {"name", "ip", "mac", "port", "endpoint"}


def synthetic_mac(ip: str) -> str:
    """MAC that the embedded switch gives a UDP port's host: 02:70 and the four bytes of its IPv4 address."""
    return ":".join(f"{byte:02x}" for byte in b"\x02\x70" + IPv4Address(ip).packed)


def mac_number(mac: str) -> int:
    """The 48-bit number of a MAC address written as six hexadecimal pairs."""
    return int(mac.replace(":", ""), 16)


@dataclass(frozen=True, slots=True)
class SwitchConfig:
    """The `[switch]` section. Addresses are text, checked by `Hosts`."""

    grpc: str
    profile: str
    ip: str
    mac: str
    device_id: int = 0
    name: str = DEFAULT_SWITCH_NAME


@dataclass(frozen=True, slots=True)
class Host:
    """One `[[host]]` entry."""

    name: str
    ip: str
    mac: str
    port: int
    endpoint: tuple[str, int] | None = None
    """Address that this host's workers send to instead of the switch's own."""

    @property
    def ip_number(self) -> int:
        """The address as a 32-bit number, as the switch's tables want it."""
        return int(IPv4Address(self.ip))

    @property
    def mac_number(self) -> int:
        """The MAC address as a 48-bit number."""
        return mac_number(self.mac)


@dataclass(frozen=True, slots=True)
class Hosts:
    """A checked hosts file. ConfigError names `source`, the entry and what to do."""

    switch: SwitchConfig
    hosts: tuple[Host, ...]
    source: str = "hosts"

    def __post_init__(self) -> None:
        _check_switch(self.switch, self.source)
        if not self.hosts:
            raise ConfigError(f"{self.source}: no [[host]] entry: add one for every host that runs workers")
        for number, host in enumerate(self.hosts, 1):
            _check_host(host, f"{self.source}: host {number}" + (f" ({host.name})" if host.name else ""))
        _check_unique(self)

    def by_ip(self, ip: str) -> Host | None:
        """The host with this IPv4 address, or None."""
        return next((host for host in self.hosts if host.ip == ip), None)

    def endpoint(self, host: Host) -> tuple[str, int]:
        """Address and UDP port that workers on `host` send contributions to."""
        return host.endpoint or (self.switch.ip, UDP_PORT)

    @property
    def loopback(self) -> bool:
        """Whether all hosts sit on 127.0.0.0/8 behind UDP ports of an embedded switch."""
        return all(host.endpoint and IPv4Address(host.ip).is_loopback for host in self.hosts)

    @classmethod
    def embedded(
        cls, grpc: str, endpoints: Mapping[int, tuple[str, int]], *, profile: str, device_id: int = 0
    ) -> Hosts:
        """Hosts of an embedded switch with UDP ports: port p belongs to 127.0.1.p, whose workers send to endpoints[p].

        `endpoints` maps port numbers (1..254) to addresses, as `EmbeddedSwitch.endpoints` does.
        """
        hosts = []
        for port, address in sorted(endpoints.items()):
            ip = f"127.0.1.{port}"
            hosts.append(Host(f"local{port}", ip, synthetic_mac(ip), port, address))
        switch = SwitchConfig(grpc, profile, "127.0.1.254", synthetic_mac("127.0.1.254"), device_id)
        return cls(switch, tuple(hosts), "embedded switch")


def load(path: str | Path) -> Hosts:
    """Read and check a hosts file. ConfigError when it cannot be read, is no TOML, or breaks a rule."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{path}: cannot read the hosts file: {reason}") from None
    return parse(text, str(path))


def parse(text: str, source: str = "hosts") -> Hosts:
    """Check the text of a hosts file; `source` names it in errors."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from None
    _refuse_unknown(document, {"switch", "host"}, source)
    section = document.get("switch")
    if not isinstance(section, dict):
        raise ConfigError(f"{source}: section [switch] is missing: it needs grpc, profile, ip and mac")
    entries = document.get("host", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{source}: host must be a list of tables: write [[host]] with two brackets")
    where = f"{source}: [switch]"
    _refuse_unknown(section, _SWITCH_KEYS, where)
    switch = SwitchConfig(
        grpc=_text(section, "grpc", where),
        profile=_text(section, "profile", where),
        ip=_text(section, "ip", where),
        mac=_text(section, "mac", where).lower(),
        device_id=_number(section, "device_id", where, 0),
        name=_text(section, "name", where) if "name" in section else DEFAULT_SWITCH_NAME,
    )
    hosts = tuple(_parse_host(entry, f"{source}: host {number}") for number, entry in enumerate(entries, 1))
    return Hosts(switch, hosts, source)


def _parse_host(entry: dict[str, Any], where: str) -> Host:
    if isinstance(entry.get("name"), str) and entry["name"]:
        where += f" ({entry['name']})"
    _refuse_unknown(entry, _HOST_KEYS, where)
    ip = _text(entry, "ip", where)
    endpoint = None
    if "endpoint" in entry:
        endpoint = _endpoint(_text(entry, "endpoint", where), where)
    if endpoint is not None and "mac" not in entry:
        _check_ip(ip, where)
        mac = synthetic_mac(ip)
    else:
        mac = _text(entry, "mac", where).lower()
    return Host(_text(entry, "name", where), ip, mac, _number(entry, "port", where), endpoint)


def _refuse_unknown(table: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        raise ConfigError(f"{where}: unknown key {', '.join(unknown)}: known are {', '.join(sorted(known))}")


def _text(table: Mapping[str, Any], key: str, where: str) -> str:
    value = table.get(key)
    if value is None:
        raise ConfigError(f"{where}: {key} is missing")
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}: {key} must be a text that is not empty, not {value!r}")
    return value


def _number(table: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = table.get(key, default)
    if value is None:
        raise ConfigError(f"{where}: {key} is missing")
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{where}: {key} must be a whole number, not {value!r}")
    return value


def _split_address(text: str, what: str, where: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"{where}: {what} must be ADDRESS:PORT with a port from 1 to 65535, not {text!r}")
    return host, int(port)


def _endpoint(text: str, where: str) -> tuple[str, int]:
    host, port = _split_address(text, "endpoint", where)
    _check_ip(host, where, "endpoint")
    return host, port


def _check_ip(ip: str, where: str, key: str = "ip") -> None:
    try:
        address = IPv4Address(ip)
    except AddressValueError:
        raise ConfigError(f"{where}: {key} {ip!r} is not an IPv4 address") from None
    if address.is_unspecified or address.is_multicast or int(address) == 0xFFFF_FFFF:
        raise ConfigError(f"{where}: {key} {ip} is not the address of one host")


def _check_mac(mac: str, where: str) -> None:
    pairs = mac.split(":")
    if len(pairs) != 6 or not all(len(pair) == 2 and set(pair) <= set("0123456789abcdef") for pair in pairs):
        raise ConfigError(f"{where}: mac {mac!r} is not a MAC address: write six pairs like 02:70:34:00:00:01")
    if int(pairs[0], 16) & 1 or mac_number(mac) == 0:
        raise ConfigError(f"{where}: mac {mac} is not the address of one interface (a group address, or zero)")


def _check_switch(switch: SwitchConfig, source: str) -> None:
    where = f"{source}: [switch]"
    # A socket in the file system serves a switch in a network namespace of its own.
    if not switch.grpc.startswith("unix:/"):
        _split_address(switch.grpc, "grpc", where)
    if switch.profile not in PROFILES:
        raise ConfigError(f"{where}: profile {switch.profile!r} is unknown: choose one of {', '.join(PROFILES)}")
    _check_name(switch.name, where)
    if not 0 <= switch.device_id < 1 << 64:
        raise ConfigError(f"{where}: device_id must be from 0 to 2^64 - 1, not {switch.device_id}")
    _check_ip(switch.ip, where)
    _check_mac(switch.mac, where)


def _check_name(name: str, where: str) -> None:
    """Names stand in messages, on command lines and in metrics."""
    if len(name) > MAX_NAME or not name.isprintable() or name != name.strip():
        raise ConfigError(
            f"{where}: name {name[:MAX_NAME]!r} must be up to {MAX_NAME} printable characters, no blank at either end"
        )


def _check_host(host: Host, where: str) -> None:
    _check_name(host.name, where)
    _check_ip(host.ip, where)
    _check_mac(host.mac, where)
    if not 1 <= host.port <= MAX_PORT:
        raise ConfigError(f"{where}: port must be from 1 to {MAX_PORT}, not {host.port}")
    if host.endpoint is not None:
        _check_ip(host.endpoint[0], where, "endpoint")
        if not IPv4Address(host.ip).is_loopback:
            raise ConfigError(
                f"{where}: endpoint is for UDP ports of the embedded switch, whose workers sit on 127.0.1.1, 127.0.1.2 "
                f"and so on: ip is {host.ip}"
            )


def _check_unique(hosts: Hosts) -> None:
    """No two entries may share a name, an address, a MAC or a port; the switch's own addresses count."""
    taken: dict[tuple[str, object], str] = {
        ("ip", hosts.switch.ip): "[switch]",
        ("mac", hosts.switch.mac): "[switch]",
    }
    for host in hosts.hosts:
        facts: list[tuple[str, object]] = [
            ("name", host.name),
            ("ip", host.ip),
            ("mac", host.mac),
            ("port", host.port),
            ("endpoint", host.endpoint),
        ]
        for fact in facts:
            if fact[1] is None:
                continue
            if fact in taken:
                raise ConfigError(
                    f"{hosts.source}: {taken[fact]} and host {host.name} have the same {fact[0]} {fact[1]}: "
                    f"every host needs its own"
                )
            taken[fact] = f"host {host.name}"
