# SPDX-License-Identifier: Apache-2.0
"""Random frames and entries that fit a program: the parser's own select values, the program's own constants."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from p4reduce_bmv2.embedded import program as p4
from p4reduce_bmv2.embedded.engine import Engine
from p4reduce_bmv2.embedded.loader import load

SHORTEST = 14
"""Bytes. Less leaves a program's first header out, and what BMv2 then reads is left over from earlier packets."""


def constants(root: Any) -> list[int]:
    """Numbers that occur in a program."""
    found: set[int] = set()

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if node.get("type") == "hexstr" and isinstance(node.get("value"), str):
                found.add(int(node["value"], 16))
            for child in node.values():
                walk(child)
        elif isinstance(node, list):
            for child in node:
                walk(child)

    walk(root)
    return sorted(value for value in found if 0 <= value < 1 << 256)


class FrameMaker:
    """Frames that get far in a program's parser."""

    def __init__(self, root: Any, rng: random.Random) -> None:
        self._program = load(root)
        self._constants = constants(root)
        self._rng = rng

    def frame(self) -> bytes:
        """A frame of random size and content, with fields set on a random way through the parser."""
        rng = self._rng
        self._bits = bytearray(
            rng.randbytes(rng.choice((rng.randrange(SHORTEST, 24), rng.randrange(SHORTEST, 80), 120)))
        )
        if rng.random() < 0.3:
            for index in range(len(self._bits)):
                self._bits[index] = rng.choice((0, 0, 0, 1, 2, 255))
        self._walk()
        if rng.random() < 0.15:
            del self._bits[rng.randrange(SHORTEST, len(self._bits) + 1) :]
        return bytes(self._bits)

    def _walk(self) -> None:
        rng, name, self._position = self._rng, self._program.first_state, 0
        self._at: dict[p4.Header, int] = {}
        self._next: dict[p4.Stack, int] = {}
        for _ in range(20):
            if name is None or self._position >= 8 * len(self._bits):
                return
            state = self._program.states[name]
            for op in state.ops:
                self._operation(op)
            if not state.transitions or rng.random() < 0.12:
                name = state.default
                continue
            chosen = rng.choice(state.transitions)
            for (key, width), (value, mask) in zip(state.key, chosen.parts, strict=True):
                self._choose(state, key, width, (value | rng.getrandbits(width) & ~mask) & (1 << width) - 1)
            name = chosen.target

    def _operation(self, op: p4.ParserOp) -> None:
        target = op.args[0]
        if op.op == "advance":
            self._position += target.value if isinstance(target, p4.Const) else 0
        if not op.op.startswith("extract"):
            return
        if isinstance(target, p4.Stack):
            index = self._next.get(target, 0)
            if index >= len(target.headers):
                return
            self._next[target] = index + 1
            target = target.headers[index]
        header = p4.want(p4.Header, target)
        self._at[header] = self._position
        for field in header.fields:
            if field.width and self._constants and self._rng.random() < 0.3:
                self._set(self._position, field.width, self._rng.choice(self._constants) & field.mask)
            self._position += field.width

    def _choose(self, state: p4.State, key: p4.Expr, width: int, value: int) -> None:
        """Put a select key's value where the parser will find it."""
        if isinstance(key, p4.Ref) and key.field.header in self._at:
            header = key.field.header
            self._set(self._at[header] + sum(f.width for f in header.fields[: key.field.index]), width, value)
        elif isinstance(key, p4.StackLast) and self._next.get(key.stack):
            header = key.stack.headers[self._next[key.stack] - 1]
            self._set(self._at[header] + sum(f.width for f in header.fields[: key.index]), width, value)
        elif isinstance(key, p4.Ref):
            for op in state.ops:
                if op.op == "set" and op.args[0] is key.field and isinstance(op.args[1], p4.Lookahead):
                    self._set(self._position + op.args[1].offset, op.args[1].width, value)

    def _set(self, offset: int, width: int, value: int) -> None:
        right = 8 * len(self._bits) - offset - width
        if right >= 0:
            number = int.from_bytes(self._bits, "big") & ~((1 << width) - 1 << right) | value << right
            self._bits[:] = number.to_bytes(len(self._bits), "big")


RandomEntry = tuple[str, tuple[Any, ...], str, list[int], int]


def random_entries(
    engine: Engine, root: Any, rng: random.Random, allowed: Callable[[str], list[str]]
) -> list[RandomEntry]:
    """Entries for every table that takes some: arguments of Table.insert, with the table's name first.

    `allowed` names the actions that a table's entries may have; the JSON does not say which are for defaults only.
    """
    numbers = constants(root)

    def value(width: int) -> int:
        return rng.choice((*numbers[:50], 0, 1, 2, rng.getrandbits(width))) & (1 << width) - 1

    made = []
    for table in engine.tables.values():
        for _ in range(0 if table.const_entries or not table.keys else rng.randrange(7)):
            key = tuple(_element(field.match_type, field.bitwidth, value, rng) for field in table.keys)
            action = table.actions[rng.choice(allowed(table.name))]
            params = [
                value(width) if rng.random() < 0.5 else rng.randrange(min(5, 1 << width)) for _, width in action.params
            ]
            made.append((table.name, key, action.name, params, rng.randrange(1, 1000) if table.needs_priority else 0))
    return made


def _element(kind: str, width: int, value: Any, rng: random.Random) -> int | tuple[int, int]:
    top, number = (1 << width) - 1, value(width)
    if kind == "lpm":
        length = rng.choice((0, width, rng.randrange(width + 1)))
        return number >> width - length << width - length, length
    if kind == "ternary":
        mask = rng.choice((0, top, 1, rng.getrandbits(width)))
        return number & mask, mask
    if kind == "range":
        other = rng.getrandbits(width)
        return min(number, other), max(number, other)
    return int(number)


def random_replicas(rng: random.Random) -> Sequence[tuple[int, int]]:
    """Ports 1..5, each once: BMv2's order of copies on one port is its hash table's."""
    return [(port, rng.randrange(4)) for port in sorted(rng.sample(range(1, 6), 3))]
