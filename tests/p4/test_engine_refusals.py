# SPDX-License-Identifier: Apache-2.0
"""What the engine does not execute is refused at load, by name; what is broken is refused with a reason."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p4reduce_bmv2.embedded.engine import Engine
from p4reduce_bmv2.embedded.errors import ProgramError, UnsupportedProgram

COMPILED = Path(__file__).parent / "programs" / "compiled"
Program = dict[str, Any]
Change = Callable[[Program], object]


def source(name: str) -> Program:
    loaded: Program = json.loads((COMPILED / f"{name}.json").read_text())
    return loaded


def action(root: Program, name: str) -> Program:
    return next(a for a in root["actions"] if a["name"] == name)


def table(root: Program, name: str) -> Program:
    return next(t for p in root["pipelines"] for t in p["tables"] if t["name"] == name)


def state(root: Program, name: str) -> Program:
    return next(s for s in root["parsers"][0]["parse_states"] if s["name"] == name)


def put(root: Program, path: str, value: Any) -> None:
    """Set what a path of keys and indices leads to."""
    node: Any = root
    *way, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    for key in way:
        node = node[key]
    node[last] = value


def primitive(op: str, *parameters: Any) -> Change:
    return lambda root: action(root, "Run.forward")["primitives"].append({"op": op, "parameters": list(parameters)})


FIELD = {"type": "field", "value": ["x", "a"]}
ONE = {"type": "hexstr", "value": "0x1"}


def expression(op: str, left: Any, right: Any) -> Any:
    return {"type": "expression", "value": {"type": "expression", "value": {"op": op, "left": left, "right": right}}}


UNSUPPORTED: list[tuple[str, str, Change, str]] = [
    ("meter", "exact", lambda r: r["meter_arrays"].append({"name": "Run.m"}), "meter Run.m"),
    ("digest", "exact", lambda r: r["learn_lists"].append({"name": "note_t"}), "digest note_t"),
    ("extern", "exact", lambda r: r["extern_instances"].append({"name": "Run.e"}), "extern Run.e"),
    ("union", "exact", lambda r: r["header_unions"].append({"name": "u"}), "header union u"),
    ("union type", "exact", lambda r: r["header_union_types"].append({"name": "U"}), "header union type U"),
    ("union stack", "exact", lambda r: r["header_union_stacks"].append({"name": "us"}), "header union stack us"),
    ("value set", "exact", lambda r: r["parse_vsets"].append({"name": "Parse.v"}), "parser value set Parse.v"),
    ("primitive", "exact", primitive("execute_meter", ONE), "primitive execute_meter in action Run.forward"),
    ("digest call", "exact", primitive("generate_digest", ONE, ONE), "primitive generate_digest in action Run.forward"),
    ("legacy", "exact", primitive("modify_field", FIELD, ONE), "primitive modify_field in action Run.forward"),
    (
        "operator",
        "exact",
        primitive("assign", FIELD, expression("%", FIELD, ONE)),
        "operator % in assign in action Run.forward",
    ),
    (
        "header union value",
        "exact",
        primitive("assign", FIELD, {"type": "header_union", "value": "u"}),
        "value header_union in assign in action Run.forward",
    ),
    (
        "stack target",
        "stack",
        lambda r: r["actions"][0]["primitives"].append(
            {"op": "assign", "parameters": [{"type": "stack_field", "value": ["labels", "value"]}, ONE]}
        ),
        "target stack_field of assign in action ",
    ),
    ("hash", "hashes", lambda r: put(r, "calculations/0/algo", "xxh64"), "hash xxh64 in calculation calc"),
    (
        "hash input",
        "hashes",
        lambda r: put(r, "calculations/0/input/0", {"type": "header", "value": "x"}),
        "calculation input header in calculation calc",
    ),
    ("checksum", "checksum", lambda r: put(r, "checksums/0/type", "ipv4"), "checksum ipv4 cksum"),
    ("profile", "exact", lambda r: table(r, "Run.t").update(type="indirect"), "table type indirect Run.t"),
    (
        "selector",
        "exact",
        lambda r: r["pipelines"][0].update(action_profiles=[{"name": "Run.ap"}, {"name": "Run.as", "selector": {}}]),
        "action selector Run.as",
    ),
    ("ageing", "exact", lambda r: table(r, "Run.t").update(support_timeout=True), "table with idle timeout Run.t"),
    (
        "direct meter",
        "exact",
        lambda r: table(r, "Run.t").update(direct_meters="Run.m"),
        "table with direct meters Run.t",
    ),
    ("match", "exact", lambda r: table(r, "Run.t")["key"][0].update(match_type="valid"), "match valid in table Run.t"),
    (
        "key expression",
        "exact",
        lambda r: table(r, "Run.t")["key"][0].update(target={"op": "access_field"}),
        "match on an expression in table Run.t",
    ),
    (
        "parser op",
        "exact",
        lambda r: put(r, "parsers/0/parse_states/0/parser_ops/0/op", "shift"),
        "parser op shift in ",
    ),
    (
        "union extraction",
        "exact",
        lambda r: put(r, "parsers/0/parse_states/0/parser_ops/0/parameters/0/type", "union_stack"),
        "parser op extract of a union_stack in ",
    ),
    (
        "transition",
        "payload",
        lambda r: put(r, "parsers/0/parse_states/0/transitions/0/type", "parse_vset"),
        "transition parse_vset in parser state start",
    ),
    (
        "parser key",
        "payload",
        lambda r: put(r, "parsers/0/parse_states/0/transition_key/0/type", "union_stack_field"),
        "parser key union_stack_field in state start",
    ),
    (
        "deparser",
        "exact",
        lambda r: r["deparsers"][0]["primitives"].append({"op": "assign"}),
        "primitive assign in the de",
    ),
    ("action call", "exact", lambda r: r["pipelines"][0].update(action_calls=[{"name": "call"}]), "action call call"),
    ("saturating", "exact", lambda r: r["header_types"][-1]["fields"][0].append(True), "saturating field data_t.a"),
    ("parsers", "exact", lambda r: r["parsers"].append(r["parsers"][0]), "more than one parser"),
    (
        "backwards",
        "exact",
        primitive("_jump", {"type": "hexstr", "value": "0x0"}),
        "primitive _jump out of its block in ",
    ),
]


@pytest.mark.parametrize(("program", "change", "named"), [u[1:] for u in UNSUPPORTED], ids=[u[0] for u in UNSUPPORTED])
def test_unsupported_is_named(program: str, change: Change, named: str) -> None:
    root = source(program)
    Engine(root)
    change(root)
    with pytest.raises(UnsupportedProgram) as caught:
        Engine(root)
    assert any(node.startswith(named) for node in caught.value.nodes), caught.value.nodes
    assert named in str(caught.value)


def test_everything_unsupported_is_listed_at_once() -> None:
    root = source("exact")
    changes = [change for _, program, change, _ in UNSUPPORTED[:10] if program == "exact"]
    for change in changes:
        change(root)
    with pytest.raises(UnsupportedProgram) as caught:
        Engine(root)
    assert len(caught.value.nodes) == len(changes) == 10
    assert list(caught.value.nodes) == sorted(caught.value.nodes)


BROKEN: list[tuple[str, str, Change, str]] = [
    ("version", "exact", lambda r: put(r, "__meta__/version", [3, 0]), "version [3, 0] is not 2.x"),
    ("no version", "exact", lambda r: r.pop("__meta__"), "'__meta__' is missing"),
    ("no actions", "exact", lambda r: r.pop("actions"), "'actions' is missing"),
    ("actions object", "exact", lambda r: r.update(actions={}), "'actions' is a dict, not a list"),
    ("action number", "exact", lambda r: r.update(actions=[7]), "actions[0] is a int, not an object"),
    ("no ingress", "exact", lambda r: put(r, "pipelines/0/name", "in"), "there is no 'ingress'"),
    ("header type", "exact", lambda r: put(r, "headers/2/header_type", "other_t"), "there is no header type 'other_t'"),
    ("standard", "exact", lambda r: put(r, "headers/1/name", "std"), "not a v1model program"),
    ("odd header", "exact", lambda r: put(r, "header_types/2/fields/0/1", 7), "data_t is not a whole number of bytes"),
    ("width", "exact", lambda r: put(r, "header_types/2/fields/0/1", 0), "field a has width 0"),
    ("field", "exact", lambda r: put(r, "header_types/2/fields/0", "a"), "fields[0] is not [name, width]"),
    ("stack ids", "stack", lambda r: put(r, "header_stacks/0/header_ids", [99]), "headers that do not exist"),
    ("unknown header", "exact", primitive("assign", {"type": "field", "value": ["z", "a"]}, ONE), "no header 'z'"),
    ("unknown field", "exact", primitive("assign", {"type": "field", "value": ["x", "z"]}, ONE), "no field 'z'"),
    ("constant target", "exact", primitive("assign", ONE, ONE), "cannot write to a hexstr"),
    ("not hex", "exact", primitive("assign", FIELD, {"type": "hexstr", "value": "0xzz"}), "not a hexadecimal string"),
    ("parameters", "exact", primitive("assign", FIELD), "assign has 1 parameters instead of 2"),
    (
        "parameter number",
        "exact",
        primitive("assign", FIELD, {"type": "runtime_data", "value": 9}),
        "there is no action parameter 9",
    ),
    ("operand", "exact", primitive("assign", FIELD, expression("&", None, ONE)), "operator & lacks an operand"),
    (
        "register",
        "registers",
        lambda r: put(r, "register_arrays/0/name", "other"),
        "there is no register 'Run.words'",
    ),
    ("calculation", "hashes", lambda r: put(r, "calculations/0/name", "other"), "there is no calculation 'calc'"),
    ("field list", "resubmit", lambda r: r.update(field_lists=[]), "there is no field list 1"),
    ("state", "payload", lambda r: put(r, "parsers/0/init_state", "nowhere"), "there is no state 'nowhere'"),
    (
        "next state",
        "payload",
        lambda r: put(r, "parsers/0/parse_states/0/transitions/0/next_state", "nowhere"),
        "parser state start: there is no state 'nowhere'",
    ),
    (
        "transition width",
        "payload",
        lambda r: put(r, "parsers/0/parse_states/0/transitions/0/value", "0x0101"),
        "0x0101 is not 1 bytes wide",
    ),
    ("action id", "exact", lambda r: put(r, "pipelines/0/tables/0/action_ids", [99]), "there is no action with id 99"),
    ("node", "exact", lambda r: put(r, "pipelines/0/init_table", "nowhere"), "there is no control node 'nowhere'"),
    (
        "circle",
        "hit_miss",
        lambda r: _circle(r),
        "pipeline ingress goes round in circles",
    ),
    ("next tables", "exact", lambda r: table(r, "Run.t").update(next_tables={}), "does not name every action"),
    (
        "entry key",
        "const_entries",
        lambda r: table(r, "Run.first")["entries"][0]["match_key"].pop(),
        "a const entry has 1 key fields instead of 2",
    ),
    (
        "entry kind",
        "const_entries",
        lambda r: table(r, "Run.first")["entries"][0]["match_key"][0].update(match_type="exact"),
        "a const entry matches h.x.a by 'exact'",
    ),
    (
        "entry twice",
        "const_entries",
        lambda r: table(r, "Run.third")["entries"].append(table(r, "Run.third")["entries"][0]),
        "two const entries have the same key",
    ),
    (
        "entry width",
        "const_entries",
        lambda r: table(r, "Run.third")["entries"][0]["match_key"][0].update(key="0x17777"),
        "has 16 bits, 96119 does not fit",
    ),
    (
        "entry data",
        "const_entries",
        lambda r: table(r, "Run.third")["entries"][0]["action_entry"].update(action_data=[]),
        "action Run.note is given 0 parameters",
    ),
    ("deparser", "exact", lambda r: put(r, "deparsers/0/order/0", "z"), "there is no header 'z'"),
    ("deparsers", "exact", lambda r: r.update(deparsers=[]), "0 of them instead of one"),
    ("alias", "exact", lambda r: put(r, "field_aliases/0", ["a"]), "not [name, [header, field]]"),
    ("errors", "exact", lambda r: put(r, "errors/0", ["a", "b"]), "not [name, number]"),
]


def _circle(root: Program) -> None:
    """Let the last table go back to the first."""
    tables = root["pipelines"][0]["tables"]
    end = next(t for t in tables if None in t["next_tables"].values())
    end["next_tables"] = dict.fromkeys(end["next_tables"], root["pipelines"][0]["init_table"])


@pytest.mark.parametrize(("program", "change", "reason"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_broken_programs_say_why(program: str, change: Change, reason: str) -> None:
    root = source(program)
    change(root)
    with pytest.raises(ProgramError) as caught:
        Engine(root)
    assert not isinstance(caught.value, UnsupportedProgram)
    assert reason in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '"exact"', b"\xff\xfe", "{}"])
def test_what_is_no_program(text: str | bytes) -> None:
    with pytest.raises(ProgramError):
        Engine(text)


def nested(depth: int) -> Program:
    """A program with one expression of this depth: d plus one, xor one, plus one, ..."""
    root = source("exact")
    deep: Any = {"type": "field", "value": ["x", "d"]}
    for level in range(depth):
        deep = {"type": "expression", "value": {"op": "^" if level % 2 else "+", "left": deep, "right": ONE}}
    deep = {"type": "expression", "value": deep}
    primitive("assign", {"type": "field", "value": ["x", "d"]}, deep)(root)
    return root


@pytest.mark.parametrize("text", ["[" * 20000, "[" * 20000 + "]" * 20000, '{"a":' * 20000 + "1" + "}" * 20000])
def test_deep_json_is_no_program(text: str) -> None:
    for source in (text, text.encode()):
        with pytest.raises(ProgramError, match="nested too deeply") as caught:
            Engine(source)
        assert not isinstance(caught.value, UnsupportedProgram)


def test_deep_expressions_work_or_are_refused() -> None:
    engine = Engine(nested(250))
    engine.tables["Run.t"].insert((1,), "Run.forward", (2, 0))
    # (0 + 1) ^ 1 is 0 again, 125 times.
    assert engine.process(1, bytes.fromhex("01 00 0000 00000000")) == [(2, bytes.fromhex("01 00 0000 00000000"))]
    with pytest.raises(UnsupportedProgram, match="nested deeper"):
        Engine(nested(5000))


def damaged(root: Program, rng: random.Random) -> Program:
    """A copy with one node removed, replaced or doubled."""
    made = copy.deepcopy(root)
    node: Any = made
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = rng.choice(keys)
        if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.85:
            node = node[key]
            continue
        kind = rng.randrange(4)
        if kind == 0:
            del node[key]
        elif kind == 1 and isinstance(node, list):
            node.append(node[key])
        else:
            node[key] = rng.choice(
                [None, True, -1, 7, 10**9, "x", "0x7", "a[0]", [], {}, ["x", "a"], [1], {"type": "field"}]
            )
        return made


@pytest.mark.parametrize("name", ["exact", "stack_index", "hashes", "clone_ingress", "varbit_options", "const_entries"])
def test_damage_is_refused_or_harmless(name: str) -> None:
    """Whatever is done to a program, the engine loads it or says ProgramError, and then runs any frame."""
    rng = random.Random(f"damage {name}")
    root = source(name)
    refused = 0
    for _ in range(150):
        try:
            engine = Engine(damaged(root, rng))
        except ProgramError:
            refused += 1
            continue
        for size in (1, 8, 40):
            engine.process(1, rng.randbytes(size))
    assert 10 < refused < 150
