# SPDX-License-Identifier: Apache-2.0
"""What the kernel counted on a worker's link, in its own network namespace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_DEVICES = Path("/proc/thread-self/net/dev")
_SNMP = Path("/proc/thread-self/net/snmp")


@dataclass(frozen=True, slots=True)
class LinkCounters:
    """Counts since the link was made; bytes are those of whole Ethernet frames, without checksum and preamble."""

    received_bytes: int
    received_frames: int
    sent_bytes: int
    sent_frames: int
    tcp_again: int
    """TCP segments sent again, on all links of the namespace."""


def read(interface: str) -> LinkCounters | None:
    """Counters of an interface of this thread's namespace; None when there is none of this name."""
    for line in _DEVICES.read_text().splitlines():
        name, colon, rest = line.partition(":")
        if colon and name.strip() == interface:
            numbers = [int(word) for word in rest.split()]
            # proc(5): eight columns of what was received, bytes and packets first; then the same of what was sent.
            return LinkCounters(numbers[0], numbers[1], numbers[8], numbers[9], _tcp_again(_SNMP.read_text()))
    return None


def _tcp_again(text: str) -> int:
    """RetransSegs from /proc/net/snmp: lines of names and lines of values take turns."""
    rows = [line.split() for line in text.splitlines() if line.startswith("Tcp:")]
    return int(dict(zip(rows[0], rows[1], strict=True))["RetransSegs"]) if len(rows) == 2 else 0
