# SPDX-License-Identifier: Apache-2.0
"""Where the generated code keeps a packet: one local variable per field that matters, the rest stays in the frame.

A header has a validity variable, the offset of its bytes in the frame (a constant where the parser always finds it at
one place), and a flag that says that its fields were changed since. A field wider than LAZY_BITS is decoded when it
is first read: until then its variable holds None. Deparsing copies the frame's bytes unless the flag is set.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from p4reduce_bmv2.embedded.analysis import Usage
from p4reduce_bmv2.embedded.emit import Names
from p4reduce_bmv2.embedded.program import Field, Header, Program, Stack

LAZY_BITS = 64
"""Widest field in bits that is decoded as soon as its header is extracted."""

_CODES = {1: "B", 2: "H", 3: "BH", 4: "I", 5: "BI", 6: "HI", 7: "BHI", 8: "Q"}
_SIZES = {"B": 1, "H": 2, "I": 4, "Q": 8}


@dataclass(slots=True)
class Group:
    """Adjacent fields that begin and end on byte boundaries."""

    offset: int
    """Bytes from the start of the header, or from the end of its varbit field."""
    size: int
    members: list[tuple[Field, int]] = field(default_factory=list)
    """Field and the number of bits to its right."""
    kept: bool = False
    """Its fields have variables."""
    fixed: bool = True
    """Stands before the varbit field, so that its place in the header is known."""

    @property
    def lazy(self) -> bool:
        return self.kept and self.fixed and len(self.members) == 1 and 8 * self.size > LAZY_BITS

    @property
    def codes(self) -> str:
        """struct codes that read the group; empty for one that is too wide."""
        return _CODES.get(self.size, "")

    def shifts(self) -> list[tuple[int, int]]:
        """For each struct code the number of bits to its right, and a mask as wide as itself."""
        result, right = [], 8 * self.size
        for code in self.codes:
            bits = 8 * _SIZES[code]
            right -= bits
            result.append((right, (1 << bits) - 1))
        return result


@dataclass(slots=True)
class HeaderVars:
    """Variables of one header."""

    header: Header
    valid: str
    dirty: str
    offset: str | int
    front: list[Group]
    """Groups before the varbit field, or all of them."""
    back: list[Group]
    """Groups after the varbit field."""
    varbit: str | None
    mutable: bool
    """Somebody may write to it, so that its bytes in the frame are not always what it is."""

    @property
    def groups(self) -> list[Group]:
        return self.front + self.back

    @property
    def front_bytes(self) -> int:
        return sum(g.size for g in self.front)

    def at(self, start: int) -> str:
        """Text of the offset in the frame of the header's byte `start`."""
        if isinstance(self.offset, int):
            return str(self.offset + start)
        return f"{self.offset} + {start}" if start else self.offset


class Layout:
    """Variables of a whole program."""

    def __init__(self, program: Program, usage: Usage, names: Names, places: dict[Header, int | None]) -> None:
        self.names = names
        self.usage = usage
        self.fields: dict[Field, str] = {}
        self.headers: dict[Header, HeaderVars] = {}
        self.next: dict[Stack, str] = {}
        self._lazy: dict[Field, tuple[HeaderVars, Group]] = {}
        for header in program.headers.values():
            if header.metadata:
                for f in header.fields:
                    if usage.live(f, program):
                        self.fields[f] = names.fresh(f"{header.name}_{f.name}")
            else:
                self.headers[header] = self._header(header, places.get(header))
        for stack in program.stacks.values():
            self.next[stack] = names.fresh(f"next_{stack.name}")

    def _header(self, header: Header, place: int | None) -> HeaderVars:
        front, back = _groups(header)
        whole = header in self.usage.total.whole or header.varbit is not None
        known = self.usage.total.reads | self.usage.total.writes
        for group in front + back:
            group.kept = whole or any(f in known for f, _ in group.members)
            if group.kept:
                for f, _ in group.members:
                    self.fields[f] = self.names.fresh(f"{header.name}_{f.name}")
        varbit = header.varbit
        if varbit is not None:
            self.fields[varbit] = self.names.fresh(f"{header.name}_{varbit.name}")
        made = self.usage.total.made | self.usage.total.moved
        offset = place if place is not None and header not in made else self.names.fresh(f"at_{header.name}")
        result = HeaderVars(
            header,
            self.names.fresh(f"valid_{header.name}"),
            self.names.fresh(f"changed_{header.name}"),
            offset,
            front,
            back,
            None if varbit is None else self.fields[varbit],
            header in made or any(f in self.usage.total.writes for f in header.fields),
        )
        for group in front:
            if group.lazy:
                self._lazy[group.members[0][0]] = (result, group)
        return result

    def lazy(self, f: Field) -> tuple[HeaderVars, Group] | None:
        """Header and group of a field that is decoded on first read; None for any other."""
        return self._lazy.get(f)

    def variables(self, header: Header) -> list[str]:
        """All variables of a header, in a fixed order that is the same for every header of one type."""
        v = self.headers[header]
        result = [v.valid, v.dirty] if v.mutable else [v.valid]
        if isinstance(v.offset, str):
            result.append(v.offset)
        return result + [self.fields[f] for f in header.fields if f in self.fields]


def _groups(header: Header) -> tuple[list[Group], list[Group]]:
    """Groups before and after the varbit field."""
    parts: list[list[Group]] = [[], []]
    side, bit, group = 0, 0, None
    for f in header.fields:
        if f.varbit:
            side, bit, group = 1, 0, None
            continue
        if group is None:
            group = Group(bit // 8, 0, fixed=side == 0)
            parts[side].append(group)
        group.members.append((f, bit))
        bit += f.width
        if bit % 8 == 0:
            group.size = bit // 8 - group.offset
            group.members = [(m, bit - start - m.width) for m, start in group.members]
            group = None
    return parts[0], parts[1]
