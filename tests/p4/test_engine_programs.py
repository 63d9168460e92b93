# SPDX-License-Identifier: Apache-2.0
"""Small P4 programs on the embedded switch's engine and, with the same cases, on simple_switch_grpc."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import engine_bmv2
from helpers.engine_cases import CASES as SHARED_CASES
from helpers.engine_cases import Case
from helpers.engine_cases.model import case, insert, send

from p4reduce import pipeline
from p4reduce_bmv2.embedded import program
from p4reduce_bmv2.embedded.engine import Engine

COMPILED = Path(__file__).parent / "programs" / "compiled"
FRAMES = list[tuple[int, bytes]]
CASES = [
    *SHARED_CASES,
    case(
        "const_default",
        "a table whose only content is a default action that the program fixes",
        [insert("keyed", (1,), "mark", (0x44,))],
        send(1, "01 22 0000 00000000", (3, "02 44 0000 00000000")),
        send(1, "02 22 0000 00000000", (3, "03 22 0000 00000000")),
    ),
    case(
        "error_key",
        "NoError and PacketTooShort take the default way",
        [],
        send(2, "01 22 0000 00000000 00*8", (1, "01 22 0000 00000000 00*8")),
        send(2, "01 22 0000 00000000", (1, "01 22 0000 00000000")),
    ),
    case(
        "error_key",
        "PacketTooShort goes elsewhere",
        [insert("by_error", (1,), "forward", (4,))],
        send(2, "01 22 0000 00000000 00*8", (1, "01 22 0000 00000000 00*8")),
        send(2, "01 22 0000 00000000", (4, "01 22 0000 00000000")),
        embedded_only="simple_switch_grpc takes P4Info's width of an error field, which is 0, and refuses every entry",
    ),
]


def load(name: str) -> Engine:
    return Engine((COMPILED / f"{name}.json").read_text())


def set_up(engine: Engine, setup: tuple[tuple[Any, ...], ...]) -> None:
    for kind, *args in setup:
        if kind == "insert":
            table, key, action, params, priority = args
            engine.tables[table].insert(key, action, params, priority)
        elif kind == "default":
            table, action, params = args
            engine.tables[table].set_default(action, params)
        elif kind == "group":
            engine.set_multicast_group(*args)
        else:
            engine.set_clone_session(*args)


def by_port(frames: FRAMES) -> dict[int, list[str]]:
    """Frames in order, port by port: across ports BMv2 has no order."""
    result: dict[int, list[str]] = {}
    for port, frame in frames:
        result.setdefault(port, []).append(frame.hex())
    return result


@pytest.mark.parametrize("one", CASES, ids=lambda c: c.label)
def test_case(one: Case) -> None:
    engine = load(one.program)
    set_up(engine, one.setup)
    for number, step in enumerate(one.steps):
        assert by_port(engine.process(step.port, step.frame)) == by_port(list(step.expected)), f"step {number}"
    for name, cells in one.registers.items():
        assert {index: engine.registers[name][index] for index in cells} == cells
    for name, counted in one.counters.items():
        array = engine.counters[name]
        assert {index: (array.packets[index], array.bytes[index]) for index in counted} == counted


# --- the same on BMv2 ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bmv2() -> Iterator[engine_bmv2.Bmv2]:
    if not engine_bmv2.available():
        pytest.skip("simple_switch_grpc is not installed")
    switch = engine_bmv2.Bmv2()
    yield switch
    switch.close()


def set_up_bmv2(switch: engine_bmv2.Bmv2, setup: tuple[tuple[Any, ...], ...]) -> None:
    for kind, *args in setup:
        {
            "insert": switch.insert,
            "default": switch.set_default,
            "group": switch.set_multicast_group,
            "session": switch.set_clone_session,
        }[kind](*args)


def run_bmv2(switch: engine_bmv2.Bmv2, one: Case) -> None:
    set_up_bmv2(switch, one.setup)
    for number, step in enumerate(one.steps):
        found = switch.process(step.port, step.frame, len(step.expected))
        assert by_port(found) == by_port(list(step.expected)), f"step {number}"
    assert switch.rest() == []
    for name, counted in one.counters.items():
        assert {index: switch.counter(name, index) for index in counted} == counted


@pytest.mark.bmv2
@pytest.mark.parametrize("one", [c for c in CASES if not c.embedded_only], ids=lambda c: c.label)
def test_case_on_bmv2(bmv2: engine_bmv2.Bmv2, one: Case) -> None:
    bmv2.load(COMPILED / f"{one.program}.json", COMPILED / f"{one.program}.p4info.txtpb")
    run_bmv2(bmv2, one)


# --- what a newer compiler writes ------------------------------------------------------------------------------------


def field(header: str, name: str) -> dict[str, Any]:
    return {"type": "field", "value": [header, name]}


def call(op: str, *parameters: dict[str, Any]) -> dict[str, Any]:
    return {"op": op, "parameters": list(parameters)}


def number(value: int) -> dict[str, Any]:
    return {"type": "hexstr", "value": hex(value)}


def program_with_jumps() -> dict[str, Any]:
    """action_branches with its action's ifs written as jumps, and one more branch that leaves the pipeline."""
    made = json.loads((COMPILED / "action_branches.json").read_text())
    action = next(a for a in made["actions"] if a["name"] == "Run.work")
    limit = {"type": "local", "value": 0}
    above = {"op": ">", "left": field("x", "b"), "right": limit}
    seven = {"op": "==", "left": field("x", "c"), "right": number(7)}
    tests = [{"type": "expression", "value": {"op": "b2d", "left": None, "right": wrap(t)}} for t in (above, seven)]
    tests = [{"type": "expression", "value": t} for t in tests]
    action["primitives"] = [
        call("_jump_if_zero", tests[0], number(9)),
        call("assign", field("x", "d"), number(0xD)),
        call("_jump_if_zero", tests[1], number(5)),
        call("assign", field("x", "c"), {"type": "runtime_data", "value": 1}),
        call("_jump", number(8)),
        call("assign", field("x", "d"), number(0xE)),
        call("exit"),
        call("_jump", number(8)),
        call("_jump", number(10)),
        call("assign", field("x", "a"), {"type": "runtime_data", "value": 0}),
        call("assign", field("x", "b"), number(0)),
    ]
    return made


def wrap(operation: dict[str, Any]) -> dict[str, Any]:
    return {"type": "expression", "value": operation}


JUMPS = case(
    "action_branches",
    "jumps",
    [insert("t", (1,), "work", (0x10, 0xAAAA))],
    send(1, "01 11 0007 00000000", (1, "01 00 aaaa 0000000d")),
    # exit ends the pipeline, not the action
    send(1, "01 11 0008 00000000", (1, "01 00 0008 0000000e")),
    send(1, "01 10 0007 00000000", (1, "10 00 0007 00000000")),
)


def test_jumps() -> None:
    engine = Engine(program_with_jumps())
    set_up(engine, JUMPS.setup)
    for step in JUMPS.steps:
        assert engine.process(step.port, step.frame) == list(step.expected)


@pytest.mark.bmv2
def test_jumps_on_bmv2(bmv2: engine_bmv2.Bmv2, tmp_path: Path) -> None:
    path = tmp_path / "jumps.json"
    path.write_text(json.dumps(program_with_jumps()))
    bmv2.load(path, COMPILED / "action_branches.p4info.txtpb")
    run_bmv2(bmv2, JUMPS)


# --- what the programs cover -----------------------------------------------------------------------------------------


def kinds_of(node: Any) -> set[tuple[str, str]]:
    """Kinds of operators and values below a node of JSON."""
    found: set[tuple[str, str]] = set()
    if isinstance(node, dict):
        if "op" in node and "right" in node:
            found.add(("operator", node["op"]))
        elif isinstance(node.get("type"), str) and "value" in node:
            found.add(("value", node["type"]))
        for child in node.values():
            found |= kinds_of(child)
    elif isinstance(node, list):
        for child in node:
            found |= kinds_of(child)
    return found


def kinds_in(root: dict[str, Any]) -> set[tuple[str, str]]:
    """Every claimed kind of node that a program uses."""
    found: set[tuple[str, str]] = set()
    for action in root["actions"]:
        found |= {("primitive", p["op"]) for p in action["primitives"]}
        found |= kinds_of([p["parameters"] for p in action["primitives"]])
    for state in root["parsers"][0]["parse_states"]:
        for op in state["parser_ops"]:
            found.add(("parser op", op["op"]))
            if op["op"] == "primitive":
                found.add(("primitive", op["parameters"][0]["op"]))
            found |= kinds_of(op["parameters"])
        found |= {("parser key", k["type"]) for k in state["transition_key"]}
        found |= {("transition", t["type"]) for t in state["transitions"]}
    for control in root["pipelines"]:
        for table in control["tables"]:
            found.add(("table", table["type"]))
            found |= {("match", k["match_type"]) for k in table["key"]}
        found |= kinds_of([c["expression"] for c in control["conditionals"]])
    for calculation in root["calculations"]:
        found.add(("hash", calculation["algo"]))
        found |= {("calculation input", i["type"]) for i in calculation["input"]}
    found |= kinds_of([c["if_cond"] for c in root["checksums"]])
    return found | {("checksum", c["type"]) for c in root["checksums"]}


def test_every_claim_is_in_a_program_that_runs() -> None:
    run = {c.program for c in CASES} | {"timestamps"}
    assert {p.stem for p in COMPILED.glob("*.json")} == run
    covered = kinds_in(program_with_jumps())
    for name in run:
        covered |= kinds_in(json.loads((COMPILED / f"{name}.json").read_text()))
    covered |= kinds_in(json.loads(pipeline.find("w5").json.read_text()))
    claimed = {(kind, name) for kind, names in program.CLAIMS.items() for name in names}
    assert claimed - covered == set()


def test_the_compiled_programs_are_those_of_the_sources() -> None:
    """What tools/compile_test_programs.py --check does."""
    path = Path(__file__).parents[2] / "tools" / "compile_test_programs.py"
    spec = importlib.util.spec_from_file_location("compile_test_programs", path)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert len(tool.sources()) >= 40
    assert tool.check() == []


def test_the_documented_table_is_the_claim() -> None:
    documented: dict[str, set[str]] = {}
    for line in (program.__doc__ or "").splitlines():
        if line.startswith("| ") and not line.startswith("| kind"):
            kind, _, names = line.strip("| ").partition(" | ")
            documented.setdefault(kind, set()).update(names.split(", "))
    assert documented == {kind: set(names) for kind, names in program.CLAIMS.items()}


def test_timestamps_come_from_the_clock() -> None:
    ticks = iter([0x1_2345_6789, 0x1_2345_9ABC, 0x1_2345_9AEE])
    engine = Engine((COMPILED / "timestamps.json").read_text(), clock=lambda: next(ticks))
    (found,) = engine.process(1, bytes(8))
    # d: ingress, 32 bits; c: egress, 16 bits; a: entry into the queue, 8 bits; b: queue depths and waiting time
    assert found == (1, bytes.fromhex("ee 00 9abc 23456789"))


def test_random_repeats_with_its_seed() -> None:
    source = (COMPILED / "randoms.json").read_text()
    spread = copy.deepcopy(json.loads(source))
    for action in spread["actions"]:
        for primitive in action["primitives"]:
            if primitive["op"] == "modify_field_rng_uniform":
                primitive["parameters"][2]["value"] = "0xff"
    first, second, other = ([Engine(spread, seed=seed).process(1, bytes(8)) for _ in range(1)] for seed in (1, 1, 2))
    assert first == second
    assert first != other
