# SPDX-License-Identifier: Apache-2.0
"""A loaded BMv2 program as typed objects, and the list of what this switch executes.

The JSON format is the one p4c-bm2-ss writes for v1model (BMv2's docs/JSON_format.md, version 2). Everything outside
the table below is refused at load, by name:

| kind | supported |
|---|---|
| parser op | extract, extract_VL, set, verify, advance, primitive |
| parser key | field, stack_field |
| transition | hexstr, default |
| primitive | assign, assign_VL, assign_header, assign_header_stack, add_header, remove_header, push, pop |
| primitive | mark_to_drop, truncate, exit, clone_ingress_pkt_to_egress, clone_egress_pkt_to_egress |
| primitive | resubmit, recirculate, register_read, register_write, count, log_msg, assert, assume |
| primitive | modify_field_with_hash_based_offset, modify_field_rng_uniform, _jump, _jump_if_zero |
| operator | +, -, *, <<, >>, &, |, ^, ~, ==, !=, <, >, <=, >=, and, or, not, ?, d2b, b2d |
| operator | two_comp_mod, usat_cast, sat_cast, last_stack_index |
| value | field, hexstr, bool, header, header_stack, stack_field, local, runtime_data, register, register_array |
| value | counter_array, calculation, string, parameters_vector, lookahead, expression |
| match | exact, lpm, ternary, range |
| table | simple |
| hash | csum16, crc16, crc16_custom, crc32, crc32_custom, xor16, identity |
| calculation input | field, hexstr, payload |
| checksum | generic |

Also next nodes per action or by __HIT__ and __MISS__, const entries, default entries (const or not), direct and
indirect counters, field lists, errors, aliases. Optional keys arrive as ternary: p4c compiles them so. Not
supported: header unions, header stacks indexed at run time, parser value sets, meters, digests, action profiles and
selectors, idle timeouts, externs.

## Semantics, where P4_16 leaves a choice or BMv2 has its own
- Expressions are computed at unlimited width and truncated where they are written. A signed field that is written a
  value between its maximum and its mask keeps that value, as BMv2's fields do.
- Metadata is zero at the start of every packet. A field of an invalid header reads as 0, or as what this packet last
  had there; BMv2 may show a value of an earlier packet. In a table's key it counts as 0 in both.
- A lookahead past the end of the packet is PacketTooShort; BMv2 counts only the bytes it takes, not those before them.
- A select without a match and without a default accepts: p4c says nothing else to BMv2.
- An index outside a register or counter array: nothing is written, a read leaves its target as it was (BMv2 built
  with its checks; a build without them is undefined). A register read within an expression (value `register`, which
  p4c never writes but BMv2 takes) yields 0 there; BMv2 is undefined.
- End of ingress: clone, resubmit, multicast, drop (egress_spec 511), unicast, in this order. Truncation asked for in
  ingress holds for a unicast packet only; copies start whole.
- A clone or resubmitted or recirculated packet keeps nothing but its field list: ingress_port reads 0 there.
- Egress of one packet's copies runs in the order of the group, one after the other; BMv2 has four threads.
- priority must be 0, as in a simple_switch started with one queue per port; other packets are dropped.
- A packet that fails an assert or assume is dropped and counted; BMv2 aborts.
- A packet that goes round (clone of a clone, resubmit, recirculate) more than MAX_PASSES times is dropped and
  counted, a parser that runs MAX_PARSER_STEPS states stops with ParserTimeout; BMv2 has no limit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

MAX_PASSES = 256
"""Passes through the pipeline that one received frame may cause."""
MAX_PARSER_STEPS = 65536
"""States that the parser visits for one packet, where the parser has loops."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


CLAIMS: dict[str, frozenset[str]] = {
    "parser op": _names("extract extract_VL set verify advance primitive"),
    "parser key": _names("field stack_field"),
    "transition": _names("hexstr default"),
    "primitive": _names(
        "assign assign_VL assign_header assign_header_stack add_header remove_header push pop mark_to_drop truncate "
        "exit clone_ingress_pkt_to_egress clone_egress_pkt_to_egress resubmit recirculate register_read "
        "register_write count log_msg assert assume modify_field_with_hash_based_offset modify_field_rng_uniform "
        "_jump _jump_if_zero"
    ),
    "operator": _names(
        "+ - * << >> & | ^ ~ == != < > <= >= and or not ? d2b b2d two_comp_mod usat_cast sat_cast last_stack_index"
    ),
    "value": _names(
        "field hexstr bool header header_stack stack_field local runtime_data register register_array counter_array "
        "calculation string parameters_vector lookahead expression"
    ),
    "match": _names("exact lpm ternary range"),
    "table": _names("simple"),
    "hash": _names("csum16 crc16 crc16_custom crc32 crc32_custom xor16 identity"),
    "calculation input": _names("field hexstr payload"),
    "checksum": _names("generic"),
}
"""The table above as data; the loader refuses what is not in it and a test holds each item to a test program."""


# --- headers ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Field:
    """One field of one header instance."""

    header: Header
    name: str
    index: int
    width: int
    """Bits; 0 for a varbit field, whose width belongs to the packet."""
    signed: bool = False
    varbit: bool = False

    @property
    def mask(self) -> int:
        return (1 << self.width) - 1

    def __str__(self) -> str:
        return f"{self.header.name}.{self.name}"


@dataclass(slots=True, eq=False)
class Header:
    """One header instance, metadata included."""

    name: str
    type_name: str
    metadata: bool
    max_bytes: int = 0
    """Largest size in bytes of a header with a varbit field; 0: no limit given."""
    fields: list[Field] = field(default_factory=list)
    by_name: dict[str, Field] = field(default_factory=dict)

    @property
    def fixed_bytes(self) -> int:
        """Size without the varbit field."""
        return sum(f.width for f in self.fields) // 8

    @property
    def varbit(self) -> Field | None:
        return next((f for f in self.fields if f.varbit), None)


@dataclass(slots=True, eq=False)
class Stack:
    """A header stack."""

    name: str
    headers: list[Header]


# --- expressions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Const:
    value: int


@dataclass(frozen=True, slots=True)
class Bool:
    value: bool


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of the enclosing action."""

    index: int


@dataclass(frozen=True, slots=True)
class Ref:
    """Value of a field."""

    field: Field


@dataclass(frozen=True, slots=True)
class Cell:
    """Value of a register's cell, read where the expression is evaluated."""

    register: Register
    index: Expr


@dataclass(frozen=True, slots=True)
class Valid:
    """Validity of a header: 0 or 1."""

    header: Header


@dataclass(frozen=True, slots=True)
class StackLast:
    """Field of the last header that was extracted into a stack."""

    stack: Stack
    index: int


@dataclass(frozen=True, slots=True)
class StackIndex:
    """Index of the last header that was extracted into a stack; -1 when there is none."""

    stack: Stack


@dataclass(frozen=True, slots=True)
class Lookahead:
    """Bits ahead of the parser's position."""

    offset: int
    width: int


@dataclass(frozen=True, slots=True)
class SameHeader:
    """True when both headers are valid and equal; `negate` for !=."""

    left: Header
    right: Header
    negate: bool


@dataclass(frozen=True, slots=True)
class Op:
    op: str
    args: tuple[Expr, ...]


Expr = Const | Bool | Param | Ref | Cell | Valid | StackLast | StackIndex | Lookahead | SameHeader | Op


T = TypeVar("T")


def want(kind: type[T], value: object) -> T:
    """The value itself, known to be of this class; TypeError where the loader let something else through."""
    if not isinstance(value, kind):
        raise TypeError(f"found {value!r} where a {kind.__name__} belongs")
    return value


# --- actions, parser, control ----------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Calculation:
    """A hash or checksum over fields: input parts in order, then the unparsed rest where `payload`."""

    name: str
    algorithm: str
    parts: list[Field | tuple[int, int]]
    """A tuple is a constant: (value, bits)."""
    payload: bool


@dataclass(slots=True, eq=False)
class Register:
    name: str
    size: int
    width: int


@dataclass(slots=True, eq=False)
class Counter:
    name: str
    size: int
    direct: bool


Argument = Expr | Field | Header | Stack | Register | Counter | Calculation | str | tuple["Argument", ...]


@dataclass(frozen=True, slots=True)
class Primitive:
    op: str
    args: tuple[Argument, ...]


@dataclass(slots=True, eq=False)
class Action:
    name: str
    id: int
    params: list[tuple[str, int]]
    body: list[Primitive]


@dataclass(frozen=True, slots=True)
class ParserOp:
    """`op` is an entry of the table; extract's argument is a Header or a Stack."""

    op: str
    args: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class Transition:
    """Taken when every (value, mask) pair matches its key part."""

    parts: tuple[tuple[int, int], ...]
    target: str | None


@dataclass(slots=True, eq=False)
class State:
    name: str
    ops: list[ParserOp]
    key: list[tuple[Expr, int]]
    """Value and width in bits."""
    transitions: list[Transition]
    default: str | None


@dataclass(slots=True, eq=False)
class TableKey:
    name: str
    match_type: str
    value: Expr
    width: int
    mask: int | None


@dataclass(frozen=True, slots=True)
class ConstEntry:
    key: tuple[int | tuple[int, int], ...]
    action: Action
    params: tuple[int, ...]
    priority: int
    """As in BMv2: the smallest wins."""


@dataclass(slots=True, eq=False)
class TableNode:
    name: str
    keys: list[TableKey]
    size: int
    actions: list[Action]
    counters: bool
    next_by_action: dict[int, str | None]
    """Action id: next node. Empty where the next node depends on hit and miss."""
    next_hit: str | None
    next_miss: str | None
    base_next: str | None
    """Next node of a miss in a table without a default action."""
    default: tuple[Action, tuple[int, ...]] | None
    default_const: bool
    entries: list[ConstEntry] | None


@dataclass(slots=True, eq=False)
class Conditional:
    name: str
    condition: Expr
    true_next: str | None
    false_next: str | None


Node = TableNode | Conditional


@dataclass(slots=True, eq=False)
class Pipeline:
    name: str
    first: str | None
    nodes: dict[str, Node]


@dataclass(slots=True, eq=False)
class Checksum:
    name: str
    target: Field
    calculation: Calculation
    condition: Expr
    verify: bool
    update: bool


@dataclass(slots=True, eq=False)
class Program:
    """Everything the code generator needs."""

    name: str
    headers: dict[str, Header]
    stacks: dict[str, Stack]
    aliases: dict[str, Field]
    errors: dict[str, int]
    states: dict[str, State]
    first_state: str | None
    pipelines: dict[str, Pipeline]
    deparse: list[Header]
    checksums: list[Checksum]
    registers: dict[str, Register]
    counters: dict[str, Counter]
    field_lists: dict[int, list[Field]]

    def standard(self, name: str) -> Field | None:
        """A standard metadata field by its v1model name, through the aliases; None where the program has none."""
        for alias in (f"standard_metadata.{name}", f"intrinsic_metadata.{name}", f"queueing_metadata.{name}"):
            if alias in self.aliases:
                return self.aliases[alias]
        header = self.headers.get("standard_metadata")
        return header.by_name.get(name) if header else None
