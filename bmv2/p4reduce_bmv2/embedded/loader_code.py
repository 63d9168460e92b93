# SPDX-License-Identifier: Apache-2.0
"""The part of the loader that reads what actions and expressions are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from p4reduce_bmv2.embedded.errors import ProgramError
from p4reduce_bmv2.embedded.program import (
    CLAIMS,
    Action,
    Argument,
    Bool,
    Calculation,
    Cell,
    Const,
    Counter,
    Expr,
    Field,
    Header,
    Lookahead,
    Op,
    Param,
    Primitive,
    Ref,
    Register,
    SameHeader,
    Stack,
    StackIndex,
    StackLast,
    Valid,
)

T = TypeVar("T")

SIGNATURES: dict[str, tuple[str, ...]] = {
    "assign": ("field", "expr"),
    "assign_VL": ("varbit", "varbit"),
    "assign_header": ("header", "header"),
    "assign_header_stack": ("stack", "stack"),
    "add_header": ("header",),
    "remove_header": ("header",),
    "push": ("stack", "const"),
    "pop": ("stack", "const"),
    "mark_to_drop": ("header",),
    "register_read": ("field", "register", "expr"),
    "register_write": ("register", "expr", "expr"),
    "count": ("counter", "expr"),
    "modify_field_with_hash_based_offset": ("field", "expr", "calculation", "expr"),
    "modify_field_rng_uniform": ("field", "expr", "expr"),
    "clone_ingress_pkt_to_egress": ("expr", "list"),
    "clone_egress_pkt_to_egress": ("expr", "list"),
    "resubmit": ("list",),
    "recirculate": ("list",),
    "truncate": ("expr",),
    "exit": (),
    "log_msg": ("string", "vector"),
    "assert": ("expr",),
    "assume": ("expr",),
    "_jump": ("const",),
    "_jump_if_zero": ("expr", "const"),
}
"""What each primitive takes. `list` is the constant number of a field list."""

MAX_COUNT = 1 << 24
"""Cells of an array, entries of a table, bits of a field: more is a mistake."""
PLACEHOLDER = Field(Header("?", "?", True), "?", 0, 1)
"""Stands for what was noted as unsupported, until the load ends."""
_UNARY = {"~", "not", "d2b", "b2d"}


class CodeReader:
    """Typed access to JSON, name lookup, expressions, primitives."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self.unsupported: set[str] = set()
        self.headers: dict[str, Header] = {}
        self.stacks: dict[str, Stack] = {}
        self.registers: dict[str, Register] = {}
        self.counters: dict[str, Counter] = {}
        self.calculations: dict[str, Calculation] = {}
        self.field_lists: dict[int, list[Field]] = {}
        self.actions: dict[int, Action] = {}

    # --- JSON --------------------------------------------------------------------------------------------------------

    @staticmethod
    def get(raw: Any, key: str, kind: type[T], where: str) -> T:
        """A member of an object, of the given type."""
        if not isinstance(raw, dict):
            raise ProgramError(f"{where}: found {type(raw).__name__} where an object belongs")
        if key not in raw:
            raise ProgramError(f"{where}: {key!r} is missing")
        value = raw[key]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ProgramError(f"{where}: {key!r} is a {type(value).__name__}, not a {kind.__name__}")
        return value

    def text(self, raw: Any, key: str, where: str) -> str:
        return self.get(raw, key, str, where)

    def items(self, raw: Any, key: str, where: str) -> list[dict[str, Any]]:
        """A list of objects."""
        found = self.get(raw, key, list, where)
        for index, item in enumerate(found):
            if not isinstance(item, dict):
                raise ProgramError(f"{where}: {key}[{index}] is a {type(item).__name__}, not an object")
        return found

    def count(self, raw: Any, key: str, where: str) -> int:
        """A number of things, or a width: between 1 and MAX_COUNT."""
        value = self.get(raw, key, int, where)
        if not 1 <= value <= MAX_COUNT:
            raise ProgramError(f"{where}: {key!r} is {value}, not in 1..{MAX_COUNT}")
        return value

    def some(self, raw: Any, key: str, where: str) -> list[dict[str, Any]]:
        """A list of objects that may be missing or null."""
        return [] if raw.get(key) is None else self.items(raw, key, where)

    @staticmethod
    def name(value: Any, where: str) -> str | None:
        """A name, or null."""
        if value is None or isinstance(value, str):
            return value
        raise ProgramError(f"{where}: {value!r} is not a name")

    @staticmethod
    def hexstr(text: Any, where: str) -> int:
        if not isinstance(text, str):
            raise ProgramError(f"{where}: {text!r} is not a hexadecimal string")
        try:
            return int(text, 16)
        except ValueError:
            raise ProgramError(f"{where}: {text!r} is not a hexadecimal string") from None

    def padded(self, text: Any, size: int, where: str) -> int:
        """A hexadecimal string of exactly `size` bytes."""
        value = self.hexstr(text, where)
        if value < 0 or value >> 8 * size:
            raise ProgramError(f"{where}: {text} is not {size} bytes wide")
        return value

    # --- names -------------------------------------------------------------------------------------------------------

    def header(self, name: Any, where: str) -> Header:
        if not isinstance(name, str) or name not in self.headers:
            raise ProgramError(f"{where}: there is no header {name!r}")
        return self.headers[name]

    def real_header(self, name: Any, where: str) -> Header:
        """A header of the packet, not metadata."""
        header = self.header(name, where)
        if header.metadata:
            raise ProgramError(f"{where}: {name} is metadata, not a header")
        return header

    def stack(self, name: Any, where: str) -> Stack:
        if not isinstance(name, str) or name not in self.stacks:
            raise ProgramError(f"{where}: there is no header stack {name!r}")
        return self.stacks[name]

    def field(self, pair: Any, where: str) -> Field:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise ProgramError(f"{where}: {pair!r} is not [header, field]")
        header = self.header(pair[0], where)
        if not isinstance(pair[1], str) or pair[1] not in header.by_name:
            raise ProgramError(f"{where}: header {header.name} has no field {pair[1]!r}")
        return header.by_name[pair[1]]

    def calculation(self, name: str, where: str) -> Calculation:
        if name not in self.calculations:
            raise ProgramError(f"{where}: there is no calculation {name!r}")
        return self.calculations[name]

    @staticmethod
    def width(value: Expr) -> int:
        """Width in bits of what a key reads."""
        if isinstance(value, Ref):
            return value.field.width
        if isinstance(value, StackLast):
            return value.stack.headers[0].fields[value.index].width
        return 1

    # --- objects -----------------------------------------------------------------------------------------------------

    def read_objects(self) -> None:
        """Registers, counters, calculations and field lists."""
        for raw in self.items(self.root, "register_arrays", "program"):
            name = self.text(raw, "name", "register_arrays")
            where = f"register {name}"
            self.registers[name] = Register(name, self.count(raw, "size", where), self.count(raw, "bitwidth", where))
        for raw in self.items(self.root, "counter_arrays", "program"):
            name = self.text(raw, "name", "counter_arrays")
            direct = bool(raw.get("is_direct"))
            size = 0 if direct else self.count(raw, "size", f"counter {name}")
            self.counters[name] = Counter(name, size, direct)
        for raw in self.items(self.root, "calculations", "program"):
            self._read_calculation(raw)
        for raw in self.some(self.root, "field_lists", "program"):
            number = self.get(raw, "id", int, "field_lists")
            elements = self.items(raw, "elements", f"field list {number}")
            self.field_lists[number] = [
                self.field(e.get("value"), f"field list {number}") for e in elements if e.get("type") == "field"
            ]

    def _read_calculation(self, raw: dict[str, Any]) -> None:
        name = self.text(raw, "name", "calculations")
        where = f"calculation {name}"
        algorithm = self.text(raw, "algo", where)
        if algorithm not in CLAIMS["hash"]:
            self.unsupported.add(f"hash {algorithm} in {where}")
        calculation = Calculation(name, algorithm, [], False)
        for part in self.items(raw, "input", where):
            kind = self.text(part, "type", where)
            if kind == "field":
                calculation.parts.append(self.field(part.get("value"), where))
            elif kind == "hexstr":
                bits = self.count(part, "bitwidth", where)
                calculation.parts.append((self.hexstr(part.get("value"), where) & (1 << bits) - 1, bits))
            elif kind == "payload":
                calculation.payload = True
            else:
                self.unsupported.add(f"calculation input {kind} in {where}")
        self.calculations[name] = calculation

    # --- expressions -------------------------------------------------------------------------------------------------

    def constant(self, raw: Any, where: str) -> Const:
        """A constant, as a number or as a value object."""
        if isinstance(raw, int) and not isinstance(raw, bool):
            return Const(raw)
        value = self.value(raw, where)
        if not isinstance(value, Const):
            raise ProgramError(f"{where}: a constant belongs here")
        return value

    def value(self, raw: Any, where: str) -> Expr:
        """A value object of any kind that yields data."""
        kind = self.text(raw, "type", where)
        value = raw.get("value")
        if kind == "field":
            if isinstance(value, list) and len(value) == 2 and value[1] == "$valid$":
                return Valid(self.header(value[0], where))
            return Ref(self.field(value, where))
        if kind == "hexstr":
            return Const(self.hexstr(value, where))
        if kind == "bool":
            return Bool(self.get(raw, "value", bool, where))
        if kind in ("local", "runtime_data"):
            return Param(self.get(raw, "value", int, where))
        if kind == "stack_field":
            return self._stack_field(value, where)
        if kind == "lookahead":
            if not isinstance(value, list) or len(value) != 2 or not all(isinstance(v, int) for v in value):
                raise ProgramError(f"{where}: a lookahead is not [offset, width]")
            return Lookahead(value[0], value[1])
        if kind == "register":
            return self._cell(value, where)
        if kind == "expression":
            return self.expression(value, where)
        self.unsupported.add(f"value {kind} in {where}")
        return Const(0)

    def _cell(self, value: Any, where: str) -> Expr:
        if not isinstance(value, list) or len(value) != 2:
            raise ProgramError(f"{where}: a register is not [array, index]")
        if value[0] not in self.registers:
            raise ProgramError(f"{where}: there is no register {value[0]!r}")
        return Cell(self.registers[value[0]], self.expression(value[1], where))

    def _stack_field(self, value: Any, where: str) -> Expr:
        if not isinstance(value, list) or len(value) != 2:
            raise ProgramError(f"{where}: a stack_field is not [stack, field]")
        stack = self.stack(value[0], where)
        field = stack.headers[0].by_name.get(value[1]) if isinstance(value[1], str) else None
        if field is None:
            raise ProgramError(f"{where}: header stack {stack.name} has no field {value[1]!r}")
        return StackLast(stack, field.index)

    def expression(self, raw: Any, where: str) -> Expr:
        """An expression, wrapped in a value object or bare."""
        if isinstance(raw, dict) and "op" in raw:
            return self._operation(raw, where)
        if isinstance(raw, dict) and raw.get("type") == "expression":
            return self.expression(raw.get("value"), where)
        return self.value(raw, where)

    def _operation(self, raw: dict[str, Any], where: str) -> Expr:
        op = self.text(raw, "op", where)
        left, right = raw.get("left"), raw.get("right")
        if op not in CLAIMS["operator"]:
            self.unsupported.add(f"operator {op} in {where}")
            return Const(0)
        if op == "last_stack_index":
            operand = right if right is not None else left
            return StackIndex(self.stack(self.get(operand, "value", str, where), where))
        if op in ("==", "!="):
            kinds = {self._kind(left), self._kind(right)}
            if "header" in kinds:
                pair = self.header_value(left, where), self.header_value(right, where)
                self._check_alike(*pair, where)
                return SameHeader(*pair, op == "!=")
            if "header_stack" in kinds:
                self.unsupported.add(f"operator {op} of header stacks in {where}")
                return Const(0)
        if op == "?":
            return Op("?", tuple(self.expression(raw.get(k), where) for k in ("cond", "left", "right")))
        if op in _UNARY:
            return Op(op, (self.expression(right, where),))
        if op in ("+", "-") and left is None:
            return Op(op, (Const(0), self.expression(right, where)))
        if left is None or right is None:
            raise ProgramError(f"{where}: operator {op} lacks an operand")
        return Op(op, (self.expression(left, where), self.expression(right, where)))

    @staticmethod
    def _kind(raw: Any) -> str:
        """Type of a value object, through wrapped expressions."""
        while isinstance(raw, dict) and raw.get("type") == "expression" and isinstance(raw.get("value"), dict):
            raw = raw["value"]
        return str(raw.get("type", "")) if isinstance(raw, dict) else ""

    def header_value(self, raw: Any, where: str) -> Header:
        """A header by name. One of a stack by an index is noted as unsupported."""
        while isinstance(raw, dict) and raw.get("type") == "expression":
            raw = raw.get("value")
        if isinstance(raw, dict) and ("op" in raw or isinstance(raw.get("value"), dict)):
            inner = raw if "op" in raw else raw["value"]
            self.unsupported.add(f"operator {inner.get('op', '?')} in {where}")
            return PLACEHOLDER.header
        if self._kind(raw) != "header":
            self.unsupported.add(f"value {self._kind(raw)} in {where}")
            return PLACEHOLDER.header
        return self.header(self.get(raw, "value", str, where), where)

    # --- primitives --------------------------------------------------------------------------------------------------

    def primitive(self, raw: Any, params: Sequence[tuple[str, int]], where: str) -> Primitive | None:
        """One primitive call; None when it was noted as unsupported."""
        op = self.text(raw, "op", where)
        if op not in SIGNATURES:
            self.unsupported.add(f"primitive {op} in {where}")
            return None
        args = self.get(raw, "parameters", list, where)
        kinds = SIGNATURES[op]
        if len(args) != len(kinds):
            raise ProgramError(f"{where}: {op} has {len(args)} parameters instead of {len(kinds)}")
        here = f"{op} in {where}"
        made = tuple(self._argument(kind, arg, here) for kind, arg in zip(kinds, args, strict=True))
        for index in param_indices(made):
            if not 0 <= index < len(params):
                raise ProgramError(f"{here}: there is no action parameter {index}")
        if op in ("assign_header", "assign_header_stack"):
            self._check_alike(made[0], made[1], here)
        return Primitive(op, made)

    @staticmethod
    def _check_alike(one: Argument, other: Argument, where: str) -> None:
        """Two headers or stacks that are assigned must be of one type."""
        pair = [a.headers[0] if isinstance(a, Stack) else a for a in (one, other)]
        sizes = [len(a.headers) if isinstance(a, Stack) else 1 for a in (one, other)]
        types = [(h.type_name, h.metadata) if isinstance(h, Header) else None for h in pair]
        if (types[0] != types[1] or sizes[0] != sizes[1]) and PLACEHOLDER.header not in pair:
            raise ProgramError(f"{where}: the two are not of one type")

    def _argument(self, kind: str, raw: Any, where: str) -> Argument:
        if kind == "field":
            return self._target(raw, where)
        if kind == "varbit":
            field = self.field(raw.get("value"), where) if isinstance(raw, dict) else None
            if field is None or not field.varbit:
                raise ProgramError(f"{where}: a varbit field belongs here")
            return field
        if kind == "expr":
            return self.value(raw, where)
        if kind in ("const", "list"):
            return self._constant_argument(kind, raw, where)
        return self._named_argument(kind, raw, where)

    def _target(self, raw: Any, where: str) -> Field:
        """A field to write to."""
        target = self.value(raw, where)
        if isinstance(target, Ref) and not target.field.varbit:
            return target.field
        kind = self._kind(raw)
        if kind in ("hexstr", "bool", "local", "runtime_data"):
            raise ProgramError(f"{where}: cannot write to a {kind}")
        if kind:
            self.unsupported.add(f"target {kind} of {where}")
        return PLACEHOLDER

    def _constant_argument(self, kind: str, raw: Any, where: str) -> Argument:
        value = self.value(raw, where)
        if not isinstance(value, Const):
            self.unsupported.add(f"run-time operand of {where}")
            return Const(0)
        if kind == "list" and value.value not in self.field_lists:
            raise ProgramError(f"{where}: there is no field list {value.value}")
        return value

    def _named_argument(self, kind: str, raw: Any, where: str) -> Argument:
        given = self.text(raw, "type", where)
        if kind == "header":
            return self.header_value(raw, where)
        if kind == "vector" and given == "parameters_vector":
            # An empty vector is written {}.
            return tuple(self.value(v, where) for v in raw.get("value") or ())
        name = self.text(raw, "value", where)
        if kind == "string" and given == "string":
            return name
        if kind == "stack" and given == "header_stack":
            return self.stack(name, where)
        if kind == "calculation" and given == "calculation":
            return self.calculation(name, where)
        if kind == "register" and given == "register_array" and name in self.registers:
            return self.registers[name]
        if kind == "counter" and given == "counter_array" and name in self.counters and not self.counters[name].direct:
            return self.counters[name]
        raise ProgramError(f"{where}: there is no {kind} {name!r}")


def param_indices(args: Sequence[Argument]) -> list[int]:
    """Numbers of the action parameters that arguments use."""
    found: list[int] = []
    for arg in args:
        if isinstance(arg, Param):
            found.append(arg.index)
        elif isinstance(arg, Op):
            found += param_indices(arg.args)
        elif isinstance(arg, tuple):
            found += param_indices(arg)
    return found
