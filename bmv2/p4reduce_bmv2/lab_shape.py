# SPDX-License-Identifier: Apache-2.0
"""What a lab's links are like: rate, delay, loss, duplicates, reordering, and how tc is told so.

The rate is a token bucket (tc-tbf(8)), the rest netem (tc-netem(8)), at both ends of a link, so in both directions.
Kernels without netem exist, small virtual machines' above all; there p4reduce_bmv2.lab_wire does netem's part.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from p4reduce.errors import SwitchError, UsageError

Impairer = Literal["none", "netem", "wire"]
"""Who delays and loses frames."""
_RATES = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_ETHERNET_HEADER = 14
_QUEUE_BYTES = 1 << 20
"""Least queue in front of a rate limit: a pool's whole window of w34 frames fits."""
_QUEUE_SECONDS = 0.05
_BURST_SECONDS = 0.001
_NETEM_FRAMES = 100_000
"""netem's queue; its default of 1000 frames would lose more than it was asked to."""
_TC_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Shape:
    """One direction of every link. Rates in bit/s of Ethernet frames, times in seconds, the others probabilities."""

    rate: float = 0.0
    """0: not limited."""
    delay: float = 0.0
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    """Probability that a frame is not delayed, and so overtakes those that are."""

    def __post_init__(self) -> None:
        for name in ("loss", "duplicate", "reorder"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise UsageError(f"{name} is a probability below 1, not {value!r}")
        if self.rate and self.rate < 1000.0:
            raise UsageError(f"a rate of {self.rate:g} bit/s is below 1 kbit/s")
        if not 0.0 <= self.delay <= 10.0:
            raise UsageError(f"a delay of {self.delay:g} s is not within 10 s")
        if self.reorder and not self.delay:
            raise UsageError("reordering needs a delay: a frame overtakes those that are delayed")

    @property
    def impaired(self) -> bool:
        """Whether anything but the rate is asked for."""
        return bool(self.delay or self.loss or self.duplicate or self.reorder)

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


def parse_rate(text: str) -> float:
    """Bit/s from tc's notation: 100mbit, 1.5gbit, 800kbit. UsageError."""
    return _parse(text, _RATES, "a rate such as 100mbit")


def parse_time(text: str) -> float:
    """Seconds from 1ms, 250us, 0.5s. UsageError."""
    return _parse(text, _TIMES, "a time such as 1ms")


def parse_probability(text: str) -> float:
    """A probability from 0.1% or 0.001. UsageError."""
    return _parse(text, {"%": 0.01, "": 1.0}, "a share such as 0.1%")


def _parse(text: str, units: Mapping[str, float], what: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z%]*)", text.lower())
    if found is None or found[2] not in units:
        raise UsageError(f"{text!r} is not {what}")
    return float(found[1]) * units[found[2]]


def qdiscs(shape: Shape, interface: str, mtu: int, netem: bool) -> list[list[str]]:
    """tc's arguments that shape what leaves an interface: netem outside, the token bucket within."""
    commands: list[list[str]] = []
    parent = ["root"]
    if netem:
        words = ["netem", "limit", str(_NETEM_FRAMES)]
        if shape.delay:
            words += ["delay", f"{shape.delay * 1e6:.0f}us"]
        for name in ("loss", "duplicate", "reorder"):
            if value := getattr(shape, name):
                words += [name, f"{value * 100:.6f}%"]
        commands.append(["qdisc", "add", "dev", interface, "root", "handle", "1:", *words])
        parent = ["parent", "1:1"]
    if shape.rate:
        in_bytes = shape.rate / 8
        burst = max(4 * (mtu + _ETHERNET_HEADER), int(in_bytes * _BURST_SECONDS))
        limit = max(_QUEUE_BYTES, int(in_bytes * _QUEUE_SECONDS))
        bucket = ["tbf", "rate", f"{shape.rate:.0f}bit", "burst", f"{burst}b", "limit", f"{limit}b"]
        commands.append(["qdisc", "add", "dev", interface, *parent, "handle", "10:", *bucket])
    return commands


def apply(namespace: str, interface: str, shape: Shape, mtu: int, netem: bool) -> None:
    """Shape what leaves an interface of a namespace. SwitchError with tc's own words."""
    for arguments in qdiscs(shape, interface, mtu, netem):
        tc(namespace, arguments)


def netem_available(namespace: str) -> bool:
    """Whether the kernel has netem: tried on the loopback of a namespace of ours, and taken off again."""
    try:
        tc(namespace, ["qdisc", "add", "dev", "lo", "root", "netem", "delay", "0ms"])
    except SwitchError as error:
        if "unknown" in str(error).lower() or "not found" in str(error).lower():
            return False
        raise
    tc(namespace, ["qdisc", "del", "dev", "lo", "root"])
    return True


def statistics(namespace: str, interface: str) -> dict[str, dict[str, int]]:
    """Packets, bytes and drops of the interface's queueing disciplines, by kind (tc -s)."""
    rows: list[dict[str, Any]] = json.loads(tc(namespace, ["-s", "-j", "qdisc", "show", "dev", interface]) or "[]")
    return {row["kind"]: {name: int(row.get(name, 0)) for name in ("packets", "bytes", "drops")} for row in rows}


def tc(namespace: str, arguments: Sequence[str]) -> str:
    """Run tc in a namespace and return what it prints. SwitchError."""
    try:
        done = subprocess.run(
            ["tc", "-n", namespace, *arguments], capture_output=True, text=True, timeout=_TC_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SwitchError(f"cannot shape links: {error} (tc is in the package iproute2)") from error
    if done.returncode != 0:
        raise SwitchError(f"tc {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
