# SPDX-License-Identifier: Apache-2.0
"""Maps the ids of a P4Info to the objects of a loaded engine, and refuses a P4Info that is not this program's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from p4reduce_bmv2.embedded.engine import Engine
from p4reduce_bmv2.embedded.p4runtime.status import Code, Refused
from p4reduce_bmv2.embedded.p4runtime.stubs import Message, p4info_pb2
from p4reduce_bmv2.embedded.state import CounterArray
from p4reduce_bmv2.embedded.tables import Table

_MATCH_TYPES = {
    p4info_pb2.MatchField.EXACT: "exact",
    p4info_pb2.MatchField.LPM: "lpm",
    p4info_pb2.MatchField.TERNARY: "ternary",
    p4info_pb2.MatchField.RANGE: "range",
    p4info_pb2.MatchField.OPTIONAL: "optional",
}


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """A match field: its P4Info id and its position in the engine's key."""

    id: int
    name: str
    match_type: str
    """As P4Info says it."""
    engine_type: str
    """As the engine says it: the compiler makes a ternary field of an optional one."""
    bitwidth: int
    position: int


@dataclass(frozen=True, slots=True)
class ActionInfo:
    """An action and its parameters (id, bit width), in the engine's order."""

    id: int
    name: str
    params: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TableInfo:
    """A table: its fields by id, and the actions it may use with their P4Info scope."""

    id: int
    name: str
    table: Table
    fields: dict[int, FieldInfo]
    actions: dict[int, tuple[ActionInfo, int]]
    const_table: bool
    const_default: bool
    ages: bool
    """The program declares an idle timeout, which this switch does not have."""


@dataclass(frozen=True, slots=True)
class CounterInfo:
    """An indirect counter and what it counts."""

    id: int
    name: str
    array: CounterArray
    packets: bool
    bytes: bool


@dataclass(frozen=True, slots=True)
class DirectCounterInfo:
    """A direct counter: what it counts."""

    packets: bool
    bytes: bool


@dataclass(frozen=True, slots=True)
class ControllerHeader:
    """Layout of packet-in or packet-out metadata: (id, bit width) from the first bit on."""

    fields: tuple[tuple[int, int], ...]

    @property
    def bytes(self) -> int:
        """Length of the header in front of the frame."""
        return (sum(width for _, width in self.fields) + 7) // 8


@dataclass(slots=True)
class P4InfoIndex:
    """Everything a request can name, by id."""

    tables: dict[int, TableInfo] = field(default_factory=dict)
    actions: dict[int, ActionInfo] = field(default_factory=dict)
    counters: dict[int, CounterInfo] = field(default_factory=dict)
    direct_counters: dict[int, DirectCounterInfo] = field(default_factory=dict)
    """Direct counters by the id of their table."""
    dissolved: dict[int, str] = field(default_factory=dict)
    """Names of tables without a key that the device config does not have, by id: there is nothing in them."""
    packet_in: ControllerHeader | None = None
    packet_out: ControllerHeader | None = None

    def table(self, table_id: int) -> TableInfo:
        """Table by id; INVALID_ARGUMENT when the program has none of that id, or has not kept it."""
        if table_id in self.dissolved:
            raise Refused(Code.INVALID_ARGUMENT, f"the compiler has dissolved table {self.dissolved[table_id]}")
        try:
            return self.tables[table_id]
        except KeyError:
            raise Refused(Code.INVALID_ARGUMENT, f"no table has the id {table_id:#x}") from None


def build_index(p4info: Message, engine: Engine) -> P4InfoIndex:
    """Index a P4Info against the engine. INVALID_ARGUMENT when the two are not of one program."""
    for kind in ("tables", "actions", "counters", "direct_counters"):
        _refuse_doubles(kind, getattr(p4info, kind))
    index = P4InfoIndex()
    for action in p4info.actions:
        params = tuple((param.id, param.bitwidth) for param in action.params)
        index.actions[action.preamble.id] = ActionInfo(action.preamble.id, action.preamble.name, params)
    for table in p4info.tables:
        if not table.match_fields and table.preamble.name not in engine.all_tables:
            # The compiler may dissolve a table without a key into its default action; the P4Info keeps it.
            index.dissolved[table.preamble.id] = table.preamble.name
            continue
        index.tables[table.preamble.id] = _table(table, engine, index)
    for counter in p4info.counters:
        name = counter.preamble.name
        array = engine.counters.get(name)
        if array is None or array.size != counter.size:
            raise _foreign(f"counter {name} of {counter.size} cells")
        packets, size = _units(counter.spec)
        index.counters[counter.preamble.id] = CounterInfo(counter.preamble.id, name, array, packets, size)
    for counter in p4info.direct_counters:
        packets, size = _units(counter.spec)
        index.direct_counters[counter.direct_table_id] = DirectCounterInfo(packets, size)
    for header in p4info.controller_packet_metadata:
        layout = ControllerHeader(tuple((item.id, item.bitwidth) for item in header.metadata))
        if header.preamble.name == "packet_in":
            index.packet_in = layout
        elif header.preamble.name == "packet_out":
            index.packet_out = layout
    return index


def _refuse_doubles(kind: str, objects: Iterable[Message]) -> None:
    """An id, or a name, names one object."""
    ids: set[int] = set()
    names: set[str] = set()
    for preamble in (item.preamble for item in objects):
        if preamble.id in ids or preamble.name in names:
            raise Refused(Code.INVALID_ARGUMENT, f"P4Info {kind}: {preamble.name} ({preamble.id:#x}) is there twice")
        ids.add(preamble.id)
        names.add(preamble.name)


def _foreign(what: str) -> Refused:
    return Refused(Code.INVALID_ARGUMENT, f"the P4Info is not of this program: the device config has no {what}")


def _units(spec: Message) -> tuple[bool, bool]:
    unit = spec.unit
    return unit != p4info_pb2.CounterSpec.BYTES, unit != p4info_pb2.CounterSpec.PACKETS


def _table(proto: Message, engine: Engine, index: P4InfoIndex) -> TableInfo:
    name = proto.preamble.name
    table = engine.all_tables.get(name)
    if table is None:
        raise _foreign(f"table {name}")
    if proto.implementation_id:
        raise Refused(Code.INVALID_ARGUMENT, f"table {name} uses an action profile, which this switch does not execute")
    return TableInfo(
        id=proto.preamble.id,
        name=name,
        table=table,
        fields=_fields(proto, table),
        actions=_actions(proto, table, index),
        const_table=proto.is_const_table or table.const_entries,
        const_default=bool(proto.const_default_action_id) or table.const_default,
        ages=proto.idle_timeout_behavior != p4info_pb2.Table.NO_TIMEOUT,
    )


def _fields(proto: Message, table: Table) -> dict[int, FieldInfo]:
    if len(proto.match_fields) != len(table.keys):
        raise _foreign(f"table {table.name} of {len(proto.match_fields)} match fields")
    positions = {key.name: position for position, key in enumerate(table.keys)}
    by_name = all(match.name in positions for match in proto.match_fields)
    fields = {}
    for place, match in enumerate(proto.match_fields):
        position = positions[match.name] if by_name else place
        key = table.keys[position]
        match_type = _MATCH_TYPES.get(match.match_type)
        # Types without a width of their own, error and string among them, have the width that the compiler chose.
        any_width = match.HasField("type_name") or not match.bitwidth
        same = match_type == key.match_type or (match_type, key.match_type) == ("optional", "ternary")
        if match_type is None or not same or (match.bitwidth != key.bitwidth and not any_width):
            raise _foreign(f"match field {table.name}.{match.name} of {match.bitwidth} bits ({match_type})")
        if match.id in fields:
            raise Refused(Code.INVALID_ARGUMENT, f"P4Info: table {table.name} has two match fields {match.id}")
        fields[match.id] = FieldInfo(match.id, match.name, match_type, key.match_type, key.bitwidth, position)
    return fields


def _actions(proto: Message, table: Table, index: P4InfoIndex) -> dict[int, tuple[ActionInfo, int]]:
    actions = {}
    for ref in proto.action_refs:
        info = index.actions.get(ref.id)
        known = table.actions.get(info.name) if info else None
        if info is None or known is None:
            raise _foreign(f"action {info.name if info else hex(ref.id)} in table {table.name}")
        if len(info.params) != len(known.params):
            raise _foreign(f"action {info.name} of {len(info.params)} parameters")
        params = tuple((number, width) for (number, _), (_, width) in zip(info.params, known.params, strict=True))
        actions[ref.id] = (ActionInfo(info.id, info.name, params), ref.scope)
    return actions
