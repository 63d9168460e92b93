# SPDX-License-Identifier: Apache-2.0
"""What a case is: a program, entries, frames, and what must come out, all worked out by hand from the P4 source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Frames = tuple[tuple[int, bytes], ...]


@dataclass(frozen=True)
class Step:
    """One frame in, and the frames that must leave, in any order between ports but in this order on each."""

    port: int
    frame: bytes
    expected: Frames


@dataclass(frozen=True)
class Case:
    program: str
    name: str
    setup: tuple[tuple[Any, ...], ...]
    steps: tuple[Step, ...]
    registers: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """Cells of the engine's registers afterwards; BMv2 has no way to read them."""
    counters: Mapping[str, Mapping[int, tuple[int, int]]] = field(default_factory=dict)
    """Packets and bytes of cells of indirect counters afterwards."""
    embedded_only: str = ""
    """Why BMv2 cannot run this case or need not agree."""

    @property
    def label(self) -> str:
        return f"{self.program}-{self.name.replace(' ', '_')}"


def octets(text: str) -> bytes:
    """Bytes of a hexadecimal text; "aa*3" repeats, blanks do not count."""
    out = b""
    for word in text.split():
        part, _, count = word.partition("*")
        out += bytes.fromhex(part) * int(count or 1)
    return out


def send(port: int, frame: str | bytes, *expected: tuple[int, str | bytes]) -> Step:
    """A frame that arrives on a port, and what must leave."""
    return Step(port, _bytes(frame), tuple((p, _bytes(f)) for p, f in expected))


def _bytes(frame: str | bytes) -> bytes:
    return frame if isinstance(frame, bytes) else octets(frame)


def insert(
    table: str, key: Sequence[Any], action: str, params: Sequence[int] = (), priority: int = 0
) -> tuple[Any, ...]:
    return ("insert", f"Run.{table}", tuple(key), action if "." in action else f"Run.{action}", tuple(params), priority)


def default(table: str, action: str, params: Sequence[int] = ()) -> tuple[Any, ...]:
    return ("default", f"Run.{table}", f"Run.{action}", tuple(params))


def group(number: int, *replicas: tuple[int, int]) -> tuple[Any, ...]:
    return ("group", number, replicas)


def session(number: int, *replicas: tuple[int, int]) -> tuple[Any, ...]:
    return ("session", number, replicas)


def case(program: str, name: str, setup: Sequence[tuple[Any, ...]], *steps: Step, **more: Any) -> Case:
    return Case(program, name, tuple(setup), steps, **more)
