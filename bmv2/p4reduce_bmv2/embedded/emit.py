# SPDX-License-Identifier: Apache-2.0
"""Text of generated Python: an indented buffer, values with bounds, names for objects."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Value(NamedTuple):
    """A Python expression and what is known about its result. None: no bound known."""

    text: str
    low: int | None
    high: int | None
    boolean: bool = False
    """The text yields True or False, not 1 or 0."""

    @property
    def constant(self) -> int | None:
        """The result, where it is known at load."""
        return self.low if self.low is not None and self.low == self.high else None

    def within(self, low: int, high: int) -> bool:
        """Whether the result is certainly in low..high."""
        return self.low is not None and self.high is not None and low <= self.low and self.high <= high


def nesting(text: str) -> int:
    """How deep parentheses are nested."""
    deepest = depth = 0
    for character in text:
        if character == "(":
            depth += 1
            deepest = max(deepest, depth)
        elif character == ")":
            depth -= 1
    return deepest


def number(value: int) -> Value:
    """A literal."""
    text = str(value) if abs(value) < 1 << 16 else hex(value)
    return Value(text if value >= 0 else f"({text})", value, value)


class Code:
    """Lines of Python with the current indentation."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    @contextmanager
    def block(self, header: str) -> Iterator[None]:
        """An indented block; `pass` where nothing was written into it."""
        self.line(header)
        self.depth += 1
        start = len(self.lines)
        yield
        if len(self.lines) == start:
            self.line("pass")
        self.depth -= 1

    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


class Slot(NamedTuple):
    """An object of the engine that generated code uses: a kind and a name, resolved when the code is loaded."""

    kind: str
    name: str


class Names:
    """Python identifiers: unique, readable, and the objects that the generated code is given under them."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._by_object: dict[Slot | Callable[..., Any], str] = {}

    def fresh(self, hint: str) -> str:
        """A new identifier that resembles the hint."""
        base = re.sub(r"[^0-9A-Za-z_]+", "_", hint).strip("_") or "x"
        base = base if not "0" <= base[0] <= "9" else f"x{base}"
        name = f"{base}_"
        count = 1
        while name in self._taken:
            count += 1
            name = f"{base}_{count}"
        self._taken.add(name)
        return name

    def bind(self, wanted: Slot | Callable[..., Any]) -> str:
        """Identifier under which the generated code finds an object of the engine, or a function."""
        if wanted not in self._by_object:
            hint = f"{wanted.kind}_{wanted.name}" if isinstance(wanted, Slot) else wanted.__name__
            self._by_object[wanted] = self.fresh(hint)
        return self._by_object[wanted]

    @property
    def bound(self) -> dict[str, Slot | Callable[..., Any]]:
        """Everything that was bound, by identifier."""
        return {name: wanted for wanted, name in self._by_object.items()}
