# SPDX-License-Identifier: Apache-2.0
"""Expressions of BMv2 JSON as values: read, compared, rewritten, written back. For fuse.py and shrink.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


class RefusedProgram(ValueError):
    """The compiled program is not of the form that a rewriting step knows."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field's value, or the field as a target."""

    header: str
    name: str


@dataclass(frozen=True, slots=True)
class Const:
    """A number."""

    value: int


@dataclass(frozen=True, slots=True)
class Register:
    """A cell of a register array, read where the expression is evaluated."""

    array: str
    index: Expr


@dataclass(frozen=True, slots=True)
class Op:
    """An operator with its operands: (left, right), for ? (condition, left, right); None where there is none."""

    op: str
    args: tuple[Expr | None, ...]


@dataclass(frozen=True, slots=True)
class Other:
    """Any other operand, as its JSON text."""

    text: str


Expr = Field | Const | Register | Op | Other


def read(operand: Json) -> Expr:
    """An operand of a primitive or of an expression."""
    kind, value = operand.get("type"), operand.get("value")
    if kind == "expression" and isinstance(value, dict):
        return read(value)
    if "op" in operand and "left" in operand:
        names = ("cond", "left", "right") if operand["op"] == "?" else ("left", "right")
        return Op(operand["op"], tuple(None if operand[n] is None else read(operand[n]) for n in names))
    if kind == "field":
        return Field(*operand["value"])
    if kind == "hexstr":
        return Const(int(operand["value"], 16))
    if kind == "register":
        return Register(operand["value"][0], read(operand["value"][1]))
    return Other(json.dumps(operand, sort_keys=True))


def write(e: Expr) -> Json:
    """The operand of an expression."""
    if isinstance(e, Field):
        return {"type": "field", "value": [e.header, e.name]}
    if isinstance(e, Const):
        return {"type": "hexstr", "value": hex(e.value)}
    if isinstance(e, Register):
        return {"type": "register", "value": [e.array, write(e.index)]}
    if isinstance(e, Other):
        found: Json = json.loads(e.text)
        return found
    names = ("cond", "left", "right") if e.op == "?" else ("left", "right")
    inner = {"op": e.op} | {n: None if a is None else write(a) for n, a in zip(names, e.args, strict=True)}
    return {"type": "expression", "value": inner}


def parameter(e: Expr) -> Json:
    """The parameter of a primitive: p4c wraps an expression there once more."""
    found = write(e)
    return {"type": "expression", "value": found} if isinstance(e, Op) else found


def parts(e: Expr) -> Iterator[Expr]:
    """The expression and all that it is made of."""
    yield e
    if isinstance(e, Register):
        yield from parts(e.index)
    elif isinstance(e, Op):
        for arg in e.args:
            if arg is not None:
                yield from parts(arg)


def rebuild(e: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """The expression with `change` applied to every part of it, the innermost first."""
    if isinstance(e, Register):
        e = Register(e.array, rebuild(e.index, change))
    elif isinstance(e, Op):
        e = Op(e.op, tuple(None if a is None else rebuild(a, change) for a in e.args))
    return change(e)


def ones(width: int) -> int:
    """The largest number of so many bits."""
    return (1 << width) - 1


class Widths:
    """Widths of the program's fields and registers, and what follows for expressions."""

    def __init__(self, program: Json) -> None:
        types = {t["name"]: t for t in program["header_types"]}
        self.fields: dict[Field, int] = {}
        for header in program["headers"]:
            for name, width, signed, *_ in types[header["header_type"]]["fields"]:
                if not signed and isinstance(width, int):
                    self.fields[Field(header["name"], name)] = width
        self.registers: dict[str, int] = {r["name"]: r["bitwidth"] for r in program["register_arrays"]}
        self.sizes: dict[str, int] = {r["name"]: r["size"] for r in program["register_arrays"]}

    def bits(self, e: Expr) -> int | None:
        """Bits that hold every value the expression can have, which then is not negative; None: not known."""
        if isinstance(e, Field):
            return self.fields.get(e)
        if isinstance(e, Const):
            return e.value.bit_length()
        if isinstance(e, Register):
            return self.registers.get(e.array)
        if not isinstance(e, Op):
            return None
        widths = [None if a is None else self.bits(a) for a in e.args]
        if e.op == "&":
            known = [w for w in widths if w is not None]
            return min(known) if known else None
        if e.op == "<<" and isinstance(e.args[1], Const):
            return None if widths[0] is None else widths[0] + e.args[1].value
        if e.op == ">>" and isinstance(e.args[1], Const):
            return None if widths[0] is None else max(0, widths[0] - e.args[1].value)
        left, right = widths[-2:]
        if left is None or right is None:
            return None
        if e.op in ("|", "^", "?"):
            return max(left, right)
        return max(left, right) + 1 if e.op == "+" else None

    def without_masks(self, e: Expr) -> Expr:
        """The same value without masks that take nothing away."""

        def change(part: Expr) -> Expr:
            if isinstance(part, Op) and part.op == "&" and isinstance(part.args[1], Const) and part.args[0] is not None:
                width, mask = self.bits(part.args[0]), part.args[1].value
                if width is not None and mask & ones(width) == ones(width):
                    return part.args[0]
            return part

        return rebuild(e, change)

    @staticmethod
    def cut(e: Expr, width: int) -> Expr:
        """An expression for a target of so many bits, which cuts off the rest: the same without a last mask."""
        while isinstance(e, Op) and e.op == "&" and e.args[1] == Const(ones(width)) and e.args[0] is not None:
            e = e.args[0]
        return e


VALUES = {"assign": (1,), "register_write": (1, 2), "register_read": (2,), "count": (1,), "truncate": (0,)}
"""Which parameters of the primitives that rewriting may touch are values."""
TARGETS = {"assign", "register_read"}
"""Primitives whose first parameter is a field that is written."""


@dataclass(slots=True)
class Step:
    """One primitive of an action: values as expressions, everything else as it is."""

    op: str
    raw: list[Json]
    values: dict[int, Expr]

    @staticmethod
    def of(primitive: Json) -> Step:
        """Take a primitive apart."""
        raw = primitive["parameters"]
        return Step(primitive["op"], raw, {n: read(raw[n]) for n in VALUES.get(primitive["op"], ()) if n < len(raw)})

    def json(self) -> Json:
        """Put it together again."""
        return {"op": self.op, "parameters": [parameter(self.values[n]) if n in self.values else p
                                              for n, p in enumerate(self.raw)]}  # fmt: skip

    @property
    def target(self) -> Field | None:
        """The field that is written; None for primitives that write none, or that are not known."""
        if self.op in TARGETS and self.raw[0].get("type") == "field":
            return Field(*self.raw[0]["value"])
        return None

    @property
    def written(self) -> str | None:
        """The register array that is written."""
        return self.raw[0]["value"] if self.op == "register_write" else None

    def reads(self) -> Iterator[Expr]:
        """All parts of all values, and the cell of a register_read."""
        for value in self.values.values():
            yield from parts(value)
        if self.op == "register_read":
            yield Register(self.raw[1]["value"], self.values[2])

    def disturbs(self, e: Expr) -> bool:
        """Whether the step may change what the expression yields. A primitive that is not known may."""
        if self.op not in VALUES and self.op not in ("mark_to_drop",):
            return True
        for part in parts(e):
            if isinstance(part, Register) and part.array == self.written:
                return True
            if isinstance(part, Field) and (
                part == self.target or (self.op == "mark_to_drop" and part.header == "standard_metadata")
            ):
                return True
        return False


def field_references(program: Json) -> Iterator[Field]:
    """Every [header, field] that anything but the declarations names, targets included, as often as it does."""

    def walk(node: Any) -> Iterator[Field]:
        if isinstance(node, dict):
            for value in node.values():
                yield from walk(value)
        elif isinstance(node, list):
            if len(node) == 2 and all(isinstance(item, str) for item in node):
                yield Field(*node)
            for value in node:
                yield from walk(value)

    for section, content in program.items():
        if section not in ("header_types", "headers", "field_aliases", "errors", "enums"):
            yield from walk(content)
