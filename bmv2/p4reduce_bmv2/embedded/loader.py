# SPDX-License-Identifier: Apache-2.0
"""Reads BMv2 JSON into program.Program; refuses what is broken (ProgramError) or not supported (UnsupportedProgram)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from p4reduce_bmv2.embedded.errors import ProgramError, UnsupportedProgram
from p4reduce_bmv2.embedded.loader_code import MAX_COUNT, CodeReader
from p4reduce_bmv2.embedded.program import (
    CLAIMS,
    Action,
    Bool,
    Checksum,
    Conditional,
    ConstEntry,
    Field,
    Header,
    Node,
    ParserOp,
    Pipeline,
    Program,
    Stack,
    State,
    TableKey,
    TableNode,
    Transition,
)

_STANDARD_FIELDS = ("ingress_port", "packet_length", "instance_type", "egress_spec", "egress_port")
"""Fields of standard_metadata without which simple_switch does not start."""
_UNSUPPORTED_SECTIONS = {
    "header_union_types": "header union type",
    "header_unions": "header union",
    "header_union_stacks": "header union stack",
    "parse_vsets": "parser value set",
    "meter_arrays": "meter",
    "learn_lists": "digest",
    "extern_instances": "extern",
}


def load(source: Mapping[str, Any] | str | bytes) -> Program:
    """Read a program from JSON text or from the decoded object."""
    if isinstance(source, str | bytes):
        try:
            root = json.loads(source)
        except ValueError as error:
            raise ProgramError(f"not JSON: {error}") from None
        except RecursionError:
            raise ProgramError("the JSON is nested too deeply to be a program") from None
    else:
        root = dict(source) if isinstance(source, Mapping) else source
    if not isinstance(root, dict):
        raise ProgramError("not a BMv2 program: the JSON is no object")
    loader = _Loader(root)
    try:
        program = loader.read()
    except ProgramError:
        # What is not supported may be why something else was not found.
        if not loader.unsupported:
            raise
    if loader.unsupported:
        raise UnsupportedProgram(loader.unsupported)
    return program


class _Loader(CodeReader):
    """One load. Unsupported nodes are collected, so that all are known at the end."""

    def read(self) -> Program:
        """The whole program."""
        root = self.root
        self._check_version()
        self._note_unsupported_sections()
        self._read_headers()
        self.read_objects()
        self.actions = self._read_actions()
        states, first = self._read_parser()
        pipelines = {}
        for index, raw in enumerate(self.items(root, "pipelines", "program")):
            where = f"pipelines[{index}]"
            name = self.text(raw, "name", where)
            pipelines[name] = self._read_pipeline(raw, name, f"pipeline {name}")
        for name in ("ingress", "egress"):
            if name not in pipelines:
                raise ProgramError(f"pipelines: there is no {name!r}")
        return Program(
            name=str(root.get("program", "")),
            headers=self.headers,
            stacks=self.stacks,
            aliases=self._read_aliases(),
            errors=self._read_errors(),
            states=states,
            first_state=first,
            pipelines=pipelines,
            deparse=self._read_deparser(),
            checksums=self._read_checksums(),
            registers=self.registers,
            counters=self.counters,
            field_lists=self.field_lists,
        )

    def _check_version(self) -> None:
        meta = self.get(self.root, "__meta__", dict, "program")
        version = self.get(meta, "version", list, "__meta__")
        if len(version) != 2 or version[0] != 2:
            raise ProgramError(f"__meta__: JSON format version {version} is not 2.x")

    # --- headers -----------------------------------------------------------------------------------------------------

    def _read_headers(self) -> None:
        types = {
            self.text(raw, "name", "header_types"): raw for raw in self.items(self.root, "header_types", "program")
        }
        by_id: dict[int, Header] = {}
        for raw in self.items(self.root, "headers", "program"):
            name = self.text(raw, "name", "headers")
            type_name = self.text(raw, "header_type", f"header {name}")
            if type_name not in types:
                raise ProgramError(f"header {name}: there is no header type {type_name!r}")
            metadata = self.get(raw, "metadata", bool, f"header {name}")
            header = self._make_header(name, type_name, types[type_name], metadata)
            self.headers[name] = header
            by_id[self.get(raw, "id", int, f"header {name}")] = header
        for raw in self.items(self.root, "header_stacks", "program"):
            name = self.text(raw, "name", "header_stacks")
            ids = self.get(raw, "header_ids", list, f"header stack {name}")
            if not ids or any(not isinstance(i, int) or i not in by_id for i in ids):
                raise ProgramError(f"header stack {name}: header_ids names headers that do not exist")
            self.stacks[name] = Stack(name, [by_id[i] for i in ids])
        standard = self.headers.get("standard_metadata")
        missing = [f for f in _STANDARD_FIELDS if standard is None or f not in standard.by_name]
        if missing:
            raise ProgramError(f"standard_metadata lacks {', '.join(missing)}: not a v1model program")

    def _make_header(self, name: str, type_name: str, raw: dict[str, Any], metadata: bool) -> Header:
        where = f"header type {type_name}"
        header = Header(name, type_name, metadata, self.count(raw, "max_length", where) if "max_length" in raw else 0)
        if "length_exp" in raw:
            self.unsupported.add(f"header type with a length expression {type_name}")
        for index, spec in enumerate(self.get(raw, "fields", list, where)):
            if not isinstance(spec, list) or len(spec) < 2 or not isinstance(spec[0], str):
                raise ProgramError(f"{where}: fields[{index}] is not [name, width]")
            varbit = spec[1] == "*"
            if not varbit and (not isinstance(spec[1], int) or not 1 <= spec[1] <= MAX_COUNT):
                raise ProgramError(f"{where}: field {spec[0]} has width {spec[1]!r}")
            if len(spec) > 3 and spec[3]:
                self.unsupported.add(f"saturating field {type_name}.{spec[0]}")
            width = 0 if varbit else spec[1]
            signed = len(spec) > 2 and bool(spec[2])
            header.fields.append(Field(header, spec[0], index, width, signed, varbit))
        header.by_name = {f.name: f for f in header.fields}
        self._check_layout(header)
        return header

    def _check_layout(self, header: Header) -> None:
        if header.metadata:
            return
        if sum(f.width for f in header.fields) % 8:
            raise ProgramError(f"header type {header.type_name} is not a whole number of bytes")
        offset = 0
        for f in header.fields:
            if f.varbit and offset % 8:
                self.unsupported.add(f"varbit field off a byte boundary {header.type_name}.{f.name}")
            offset += f.width
        if sum(f.varbit for f in header.fields) > 1:
            raise ProgramError(f"header type {header.type_name} has more than one varbit field")

    def _read_aliases(self) -> dict[str, Field]:
        aliases = {}
        for raw in self._pairs("field_aliases"):
            if len(raw) != 2:
                raise ProgramError("field_aliases: an entry is not [name, [header, field]]")
            aliases[str(raw[0])] = self.field(raw[1], "field_aliases")
        return aliases

    def _read_errors(self) -> dict[str, int]:
        errors = {"NoError": 0}
        for raw in self._pairs("errors"):
            if len(raw) != 2 or not isinstance(raw[1], int):
                raise ProgramError("errors: an entry is not [name, number]")
            errors[str(raw[0])] = raw[1]
        return errors

    def _pairs(self, section: str) -> list[list[Any]]:
        """A list of lists that may be missing."""
        found = self.root.get(section) or []
        if not isinstance(found, list) or not all(isinstance(item, list) for item in found):
            raise ProgramError(f"{section}: not a list of pairs")
        return found

    def _note_unsupported_sections(self) -> None:
        for section, kind in _UNSUPPORTED_SECTIONS.items():
            for raw in self.some(self.root, section, "program"):
                self.unsupported.add(f"{kind} {raw.get('name', '?')}")
        if len(self.items(self.root, "parsers", "program")) > 1:
            self.unsupported.add("more than one parser")

    # --- parser and deparser -----------------------------------------------------------------------------------------

    def _read_parser(self) -> tuple[dict[str, State], str | None]:
        parsers = self.items(self.root, "parsers", "program")
        if not parsers:
            raise ProgramError("parsers: there is none")
        raw = parsers[0]
        states = {}
        for raw_state in self.items(raw, "parse_states", "parser"):
            state = self._read_state(raw_state)
            states[state.name] = state
        first = self.name(raw.get("init_state"), "parser")
        targets = [(f"parser state {s.name}", t) for s in states.values() for t in self._targets(s)]
        for where, target in [*targets, ("parser", first)]:
            if target is not None and target not in states:
                raise ProgramError(f"{where}: there is no state {target!r}")
        return states, first

    @staticmethod
    def _targets(state: State) -> list[str | None]:
        return [*(t.target for t in state.transitions), state.default]

    def _read_state(self, raw: dict[str, Any]) -> State:
        name = self.text(raw, "name", "parse_states")
        where = f"parser state {name}"
        state = State(name, [], [], [], None)
        for raw_op in self.items(raw, "parser_ops", where):
            op = self._read_parser_op(raw_op, where)
            if op is not None:
                state.ops.append(op)
        for raw_key in self.items(raw, "transition_key", where):
            kind = self.text(raw_key, "type", where)
            if kind not in CLAIMS["parser key"]:
                self.unsupported.add(f"parser key {kind} in state {name}")
                return state
            value = self.value(raw_key, where)
            state.key.append((value, self.width(value)))
        for raw_transition in self.items(raw, "transitions", where):
            self._read_transition(raw_transition, state, where)
        return state

    def _read_transition(self, raw: dict[str, Any], state: State, where: str) -> None:
        kind = raw.get("type", "hexstr")
        target = self.name(raw.get("next_state"), where)
        if kind == "default" or raw.get("value") == "default":
            state.default = target
            return
        if kind != "hexstr":
            self.unsupported.add(f"transition {kind} in {where}")
            return
        size = sum((width + 7) // 8 for _, width in state.key)
        value = self.padded(raw.get("value"), size, where)
        mask = (1 << 8 * size) - 1 if raw.get("mask") is None else self.padded(raw["mask"], size, where)
        parts = []
        shift = 8 * size
        for _, width in state.key:
            padded = (width + 7) // 8 * 8
            shift -= padded
            part_mask = mask >> shift & (1 << padded) - 1
            parts.append((value >> shift & part_mask, part_mask & (1 << width) - 1))
        if any(v & ~m for v, m in parts):
            return  # asks for a bit outside the field: can never match
        state.transitions.append(Transition(tuple(parts), target))

    def _read_parser_op(self, raw: dict[str, Any], where: str) -> ParserOp | None:
        op = self.text(raw, "op", where)
        if op not in CLAIMS["parser op"]:
            self.unsupported.add(f"parser op {op} in {where}")
            return None
        args = self.get(raw, "parameters", list, where)
        counts = {"extract": 1, "extract_VL": 2, "set": 2, "verify": 2, "advance": 1, "primitive": 1}
        if len(args) != counts[op]:
            raise ProgramError(f"{where}: {op} has {len(args)} parameters instead of {counts[op]}")
        if op == "primitive":
            primitive = self.primitive(args[0], [], where)
            return ParserOp(op, (primitive.op, primitive.args)) if primitive else None
        if op in ("extract", "extract_VL"):
            kind = self.text(args[0], "type", where)
            if kind not in ("regular", "stack"):
                self.unsupported.add(f"parser op {op} of a {kind} in {where}")
                return None
            if op == "extract_VL" and kind == "stack":
                self.unsupported.add(f"parser op extract_VL of a stack in {where}")
                return None
            if isinstance(args[0].get("value"), dict):
                self.unsupported.add(f"parser op {op} by a run-time index in {where}")
                return None
            name = self.text(args[0], "value", where)
            target = self.real_header(name, where) if kind == "regular" else self.stack(name, where)
            return ParserOp(op, (target, *(self.expression(a, where) for a in args[1:])))
        if op == "set":
            return ParserOp(
                op, (self.field(self.get(args[0], "value", list, where), where), self.value(args[1], where))
            )
        return ParserOp(op, tuple(self.expression(a, where) for a in args))

    def _read_deparser(self) -> list[Header]:
        deparsers = self.items(self.root, "deparsers", "program")
        if len(deparsers) != 1:
            raise ProgramError(f"deparsers: {len(deparsers)} of them instead of one")
        for raw in self.some(deparsers[0], "primitives", "deparser"):
            self.unsupported.add(f"primitive {raw.get('op', '?')} in the deparser")
        return [self.real_header(name, "deparser") for name in self.get(deparsers[0], "order", list, "deparser")]

    def _read_checksums(self) -> list[Checksum]:
        checksums = []
        for raw in self.some(self.root, "checksums", "program"):
            name = self.text(raw, "name", "checksums")
            where = f"checksum {name}"
            kind = self.text(raw, "type", where)
            if kind not in CLAIMS["checksum"]:
                self.unsupported.add(f"checksum {kind} {name}")
                continue
            calculation = self.calculation(self.text(raw, "calculation", where), where)
            condition = raw.get("if_cond")
            checksums.append(
                Checksum(
                    name=name,
                    target=self.field(self.get(raw, "target", list, where), where),
                    calculation=calculation,
                    condition=Bool(True) if condition is None else self.expression(condition, where),
                    verify=bool(raw.get("verify", True)),
                    update=bool(raw.get("update", True)),
                )
            )
        return checksums

    # --- control -----------------------------------------------------------------------------------------------------

    def _read_actions(self) -> dict[int, Action]:
        actions = {}
        for raw in self.items(self.root, "actions", "program"):
            name = self.text(raw, "name", "actions")
            where = f"action {name}"
            params = [
                (self.text(p, "name", where), self.count(p, "bitwidth", where))
                for p in self.items(raw, "runtime_data", where)
            ]
            action = Action(name, self.get(raw, "id", int, where), params, [])
            for raw_primitive in self.items(raw, "primitives", where):
                primitive = self.primitive(raw_primitive, params, where)
                if primitive is not None:
                    action.body.append(primitive)
            actions[action.id] = action
        return actions

    def _read_pipeline(self, raw: dict[str, Any], name: str, where: str) -> Pipeline:
        nodes: dict[str, Node] = {}
        for raw_table in self.items(raw, "tables", where):
            table = self._read_table(raw_table)
            nodes[table.name] = table
        for raw_node in self.items(raw, "conditionals", where):
            node = self.text(raw_node, "name", where)
            condition = self.expression(self.get(raw_node, "expression", dict, f"conditional {node}"), node)
            true_next, false_next = (self.name(raw_node.get(k), node) for k in ("true_next", "false_next"))
            nodes[node] = Conditional(node, condition, true_next, false_next)
        for raw_node in self.some(raw, "action_calls", where):
            self.unsupported.add(f"action call {raw_node.get('name', '?')}")
        for profile in self.some(raw, "action_profiles", where):
            kind = "action selector" if "selector" in profile else "action profile"
            self.unsupported.add(f"{kind} {profile.get('name', '?')}")
        first = self.name(raw.get("init_table"), where)
        pipeline = Pipeline(name, first, nodes)
        for source, target in [(where, first), *((n, t) for n in nodes for t in successors(nodes[n]))]:
            if target is not None and target not in nodes:
                raise ProgramError(f"{source}: there is no control node {target!r}")
        return pipeline

    def _action(self, action_id: Any, where: str) -> Action:
        if not isinstance(action_id, int) or action_id not in self.actions:
            raise ProgramError(f"{where}: there is no action with id {action_id!r}")
        return self.actions[action_id]

    def _read_table(self, raw: dict[str, Any]) -> TableNode:
        name = self.text(raw, "name", "tables")
        where = f"table {name}"
        kind = self.text(raw, "type", where)
        if kind not in CLAIMS["table"]:
            self.unsupported.add(f"table type {kind} {name}")
        if raw.get("support_timeout"):
            self.unsupported.add(f"table with idle timeout {name}")
        if raw.get("direct_meters"):
            self.unsupported.add(f"table with direct meters {name}")
        actions = [self._action(i, where) for i in self.get(raw, "action_ids", list, where)]
        by_name = {k: self.name(v, where) for k, v in self.get(raw, "next_tables", dict, where).items()}
        hit_miss = "__HIT__" in by_name or "__MISS__" in by_name
        if not hit_miss and any(a.name not in by_name for a in actions):
            raise ProgramError(f"{where}: next_tables does not name every action")
        table = TableNode(
            name=name,
            keys=[self._read_key(k, where) for k in self.items(raw, "key", where)],
            size=self.count(raw, "max_size", where),
            actions=actions,
            counters=bool(raw.get("with_counters")),
            next_by_action={} if hit_miss else {a.id: by_name[a.name] for a in actions},
            next_hit=by_name.get("__HIT__"),
            next_miss=by_name.get("__MISS__"),
            base_next=by_name.get("__MISS__") if hit_miss else self.name(raw.get("base_default_next"), where),
            default=None,
            default_const=False,
            entries=None,
        )
        if raw.get("default_entry") is not None:
            default = self.get(raw, "default_entry", dict, where)
            table.default = self._read_action_entry(default, table, where)
            table.default_const = bool(default.get("action_entry_const") or default.get("action_const"))
        if "entries" in raw:
            table.entries = [self._read_entry(e, table, where) for e in self.items(raw, "entries", where)]
            table.size = len(table.entries)
        return table

    def _read_key(self, raw: dict[str, Any], where: str) -> TableKey:
        match_type = self.text(raw, "match_type", where)
        target = raw.get("target")
        if isinstance(target, dict):
            self.unsupported.add(f"match on an expression in {where}")
            target = ["standard_metadata", "ingress_port"]
        value = self.value({"type": "field", "value": target}, where)
        if match_type not in CLAIMS["match"]:
            self.unsupported.add(f"match {match_type} in {where}")
        mask = raw.get("mask")
        name = str(raw.get("name") or ".".join(map(str, target or ())))
        return TableKey(name, match_type, value, self.width(value), None if mask is None else self.hexstr(mask, where))

    def _read_action_entry(self, raw: dict[str, Any], table: TableNode, where: str) -> tuple[Action, tuple[int, ...]]:
        action = self._action(raw.get("action_id"), where)
        if action not in table.actions:
            raise ProgramError(f"{where}: action {action.name} is not one of the table's")
        params = tuple(self.hexstr(v, where) for v in self.get(raw, "action_data", list, where))
        if len(params) != len(action.params):
            raise ProgramError(f"{where}: action {action.name} is given {len(params)} parameters")
        if any(not 0 <= v < 1 << width for v, (_, width) in zip(params, action.params, strict=True)):
            raise ProgramError(f"{where}: action {action.name} is given a parameter that is too wide")
        return action, params

    def _read_entry(self, raw: dict[str, Any], table: TableNode, where: str) -> ConstEntry:
        key: list[int | tuple[int, int]] = []
        parts = self.items(raw, "match_key", where)
        if len(parts) != len(table.keys):
            raise ProgramError(f"{where}: a const entry has {len(parts)} key fields instead of {len(table.keys)}")
        for part, spec in zip(parts, table.keys, strict=True):
            kind = part.get("match_type")
            if kind != spec.match_type:
                raise ProgramError(f"{where}: a const entry matches {spec.name} by {kind!r}")
            if kind == "exact":
                key.append(self.hexstr(part.get("key"), where))
            elif kind == "lpm":
                key.append((self.hexstr(part.get("key"), where), self.get(part, "prefix_length", int, where)))
            elif kind == "ternary":
                key.append((self.hexstr(part.get("key"), where), self.hexstr(part.get("mask"), where)))
            elif kind == "range":
                key.append((self.hexstr(part.get("start"), where), self.hexstr(part.get("end"), where)))
        action, params = self._read_action_entry(self.get(raw, "action_entry", dict, where), table, where)
        return ConstEntry(tuple(key), action, params, self.get(raw, "priority", int, where))


def successors(node: Node) -> list[str | None]:
    """Where control may go after a node; None is the end of the pipeline."""
    if isinstance(node, Conditional):
        return [node.true_next, node.false_next]
    after = list(node.next_by_action.values()) or [node.next_hit, node.next_miss]
    return [*after, node.base_next] if node.default is None else after
