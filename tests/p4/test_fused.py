# SPDX-License-Identifier: Apache-2.0
"""What our own steps after p4c do to the program: nothing that a frame, a counter or a register could tell."""

from __future__ import annotations

import copy
import importlib
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.reduce_job import GROUP, REPLICAS, WORKERS, Traffic, admit, contribution

from p4reduce import pipeline, wire
from p4reduce_bmv2.embedded.engine import Engine

HERE = Path(__file__).resolve().parent
TOOLS = HERE.parents[1] / "tools"
SUM = "ReduceIngress.slot.sum"
COUNTER = "ReduceIngress.reply.reduce_counter"
pytestmark = pytest.mark.skipif(not TOOLS.is_dir(), reason="needs the source tree")
Frames = list[tuple[int, bytes]]


@pytest.fixture(scope="module")
def tools() -> Iterator[Callable[[str], ModuleType]]:
    sys.path.insert(0, str(TOOLS))
    yield importlib.import_module
    sys.path.remove(str(TOOLS))


def unfused() -> Any:
    return json.loads((HERE / "unfused" / "w5.json").read_text())


def run(program: Any) -> Engine:
    engine = Engine(program)
    admit(lambda table, key, action, params: engine.tables[table].insert(key, action, params))
    engine.set_multicast_group(GROUP, REPLICAS)
    return engine


def state(engine: Engine, words: int) -> dict[str, Any]:
    """Counters and registers, with the words' registers put together where they are apart."""
    registers = {name: list(cells) for name, cells in engine.registers.items()}
    if f"{SUM}1" in registers:
        parts = [registers.pop(f"{SUM}{i}") for i in range(words)]
        registers[f"{SUM}0"] = [
            sum(part << 2048 * (words - 1 - i) for i, part in enumerate(cell)) for cell in zip(*parts, strict=True)
        ]
    return {**registers, "packets": engine.counters[COUNTER].packets}


def compare(one: Engine, other: Engine, words: int, frames: int, seed: str) -> None:
    """The same random frames into both."""
    traffic, left = Traffic(random.Random(seed), words), 0
    for index in range(frames):
        port, frame = traffic.frame()
        expected = one.process(port, frame)
        traffic.heard(expected)
        left += len(expected)
        assert other.process(port, frame) == expected, f"frame {index} on port {port}: {frame[:74].hex()}"
        if index % 500 == 0:
            assert state(one, words) == state(other, words), f"after frame {index}"
    assert state(one, words) == state(other, words)
    assert left > frames / 10
    packets = one.counters[COUNTER].packets
    assert min(packets[6], packets[7], *packets[8:15]) > 0, "something was never tried"


def test_random_frames_cannot_tell_it_from_what_p4c_wrote() -> None:
    """P4REDUCE_RANDOM_FRAMES sets the number of frames."""
    frames = int(os.environ.get("P4REDUCE_RANDOM_FRAMES", "3000"))
    compare(run(unfused()), run(json.loads(pipeline.find("w5").json.read_text())), 5, frames, "fused w5")


def test_the_large_profile_too(tools: Callable[[str], ModuleType]) -> None:
    compiler = shutil.which("p4c-bm2-ss")
    if compiler is None:
        pytest.skip("p4c-bm2-ss is not installed")
    program, _ = tools("compile_p4").compile_profile(compiler, "w34")
    compare(run(program), run(json.loads(pipeline.find("w34").json.read_text())), 34, 600, "fused w34")


CARRIES = [
    [[(1 << 2048) - 1] * 5, [0, 0, 0, 0, 1], [0] * 5],
    [[0, (1 << 2048) - 1, (1 << 2048) - 1, 5, (1 << 2048) - 1], [0, 0, 0, (1 << 2048) - 6, 1], [0, 0, 1, 0, 0]],
    [[(1 << 2048) - 1] * 5, [(1 << 2048) - 1] * 5, [(1 << 2048) - 1] * 5],
]


@pytest.mark.parametrize("payloads", CARRIES, ids=["all the way", "some", "largest"])
def test_carries(payloads: list[list[int]]) -> None:
    """Random words hardly ever carry through more than one word."""
    one, other = run(unfused()), run(json.loads(pipeline.find("w5").json.read_text()))
    whole = sum(int.from_bytes(b"".join(w.to_bytes(256, "big") for w in p), "big") for p in payloads) % (1 << 10240)
    for rank in range(WORKERS):
        frame = contribution(rank, payloads[rank])
        expected = one.process(rank + 1, frame)
        assert other.process(rank + 1, frame) == expected
    assert {frame[74:] for _, frame in expected} == {whole.to_bytes(1280, "big")}


def test_the_compiled_program_is_what_the_steps_make(tools: Callable[[str], ModuleType]) -> None:
    program = unfused()
    assert tools("fuse").fuse(program) == 5
    tools("shrink").shrink(program)
    assert program == json.loads(pipeline.find("w5").json.read_text())


@pytest.mark.parametrize("profile", sorted(wire.PROFILES))
def test_p4info_has_the_programs_registers(profile: str) -> None:
    text_format = pytest.importorskip("google.protobuf.text_format")
    p4info_pb2 = pytest.importorskip("p4.config.v1.p4info_pb2")
    found = pipeline.find(profile)
    info = text_format.Parse(found.p4info.read_text(), p4info_pb2.P4Info())
    declared = {r.preamble.name: (r.type_spec.bitstring.bit.bitwidth, r.size) for r in info.registers}
    program = json.loads(found.json.read_text())
    assert declared == {r["name"]: (r["bitwidth"], r["size"]) for r in program["register_arrays"]}
    assert declared[f"{SUM}0"][0] == 2048 * found.profile.words


def wide_primitives(program: Any) -> Iterator[tuple[str, list[Any], int]]:
    for action in program["actions"]:
        for position, primitive in enumerate(action["primitives"]):
            text = json.dumps(primitive)
            if f'"{SUM}' in text or '"full", "w' in text:
                yield action["name"], action["primitives"], position


def test_nothing_is_left_out_unnoticed(tools: Callable[[str], ModuleType]) -> None:
    """Each step on a word taken away: refused, or it was one that nothing depends on."""
    fuse, count, refused = tools("fuse"), len(list(wide_primitives(unfused()))), 0
    good = unfused()
    fuse.fuse(good)
    for victim in range(count):
        program = unfused()
        name, primitives, position = list(wide_primitives(program))[victim]
        taken = primitives.pop(position)
        try:
            fuse.fuse(program)
        except fuse.RefusedProgram:
            refused += 1
        else:
            assert program == good, f"{name} without {json.dumps(taken)[:200]}"
    assert refused > 0.8 * count > 50


def edit(program: Any, name: str, change: Callable[[str], str]) -> None:
    for action in program["actions"]:
        if action["name"] == f"ReduceIngress.slot.{name}":
            changed = json.loads(change(json.dumps(action["primitives"])))
            assert changed != action["primitives"]
            action["primitives"] = changed
            return
    raise AssertionError(name)


def swapped(text: str, one: str, other: str) -> str:
    return text.replace(one, "\0").replace(other, one).replace("\0", other)


def narrow(program: Any) -> None:
    next(r for r in program["register_arrays"] if r["name"] == f"{SUM}3")["bitwidth"] = 2047


def unmasked(program: Any) -> None:
    for action in program["actions"]:
        if action["name"] == "ReduceIngress.slot.locate":
            target = action["primitives"][0]
            target["parameters"][1] = target["parameters"][1]["value"]["value"]["left"]


def used_elsewhere(program: Any) -> None:
    next(a for a in program["actions"] if a["name"] == "ReduceIngress.reply.nack")["primitives"].append(
        {
            "op": "assign",
            "parameters": [{"type": "field", "value": [h, f]} for h, f in (("reduce", "tag"), ("full", "w2"))],
        }
    )


DEFECTS: dict[str, Callable[[Any], None]] = {
    "words swapped": lambda p: edit(p, "begin_full", lambda t: swapped(t, '"w1"', '"w2"')),
    "sums swapped": lambda p: edit(p, "or_full", lambda t: swapped(t, f'"{SUM}1"', f'"{SUM}2"')),
    "another operator": lambda p: edit(p, "or_full", lambda t: t.replace('"|"', '"^"', 3)),
    "carry against the order": lambda p: edit(
        p, "add_full", lambda t: swapped(swapped(t, '"w0"', '"w4"'), "sum0", "sum4")
    ),
    "carry taken twice": lambda p: edit(p, "add_full", lambda t: t.replace('"0x01"', '"0x02"', 1)),
    "less than turned round": lambda p: edit(p, "last_add_full", lambda t: t.replace('"<"', '">"', 1)),
    "another cell": lambda p: edit(p, "repeat_full", lambda t: t.replace("slot_cell", "slot_state", 2)),
    "a narrower register": narrow,
    "a cell outside": unmasked,
    "a word used elsewhere": used_elsewhere,
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_what_is_not_one_number_is_refused(tools: Callable[[str], ModuleType], defect: str) -> None:
    program = unfused()
    before = copy.deepcopy(program)
    DEFECTS[defect](program)
    assert program != before
    fuse = tools("fuse")
    with pytest.raises(fuse.RefusedProgram):
        fuse.fuse(program)


def test_shrinking_leaves_what_it_does_not_know(tools: Callable[[str], ModuleType]) -> None:
    """A value must not move across something that may change it, and an unknown primitive may."""
    p4json, shrink = tools("p4json"), tools("shrink")
    field: Callable[..., Any] = lambda *names: {"type": "field", "value": list(names)}  # noqa: E731
    array = {"type": "register_array", "value": "r"}
    read = {"op": "register_read", "parameters": [field("scalars", "t"), array, {"type": "hexstr", "value": "0x0"}]}
    use = {"op": "assign", "parameters": [field("h", "f"), field("scalars", "t")]}
    between = {
        "nothing": [],
        "a write of the register": [
            {"op": "register_write", "parameters": [array, {"type": "hexstr", "value": "0x0"}, field("h", "f")]}
        ],
        "an unknown primitive": [{"op": "resubmit", "parameters": []}],
    }
    for name, primitives in between.items():
        program = {
            "header_types": [
                {"name": "s", "fields": [["t", 8, False]]},
                {"name": "h", "fields": [["f", 8, False]]},
                {"name": "m", "fields": [["ingress_port", 9, False], ["_padding", 7, False]]},
            ],
            "headers": [
                {"name": "scalars", "header_type": "s"},
                {"name": "h", "header_type": "h"},
                {"name": "standard_metadata", "header_type": "m"},
            ],
            "register_arrays": [{"name": "r", "bitwidth": 8, "size": 1}],
            "actions": [{"name": "a", "primitives": copy.deepcopy([read, *primitives, use])}],
            "pipelines": [],
            "field_aliases": [],
        }
        shrink.shrink(program)
        inlined = len(program["actions"][0]["primitives"]) == 1 + len(primitives)  # type: ignore[index]
        assert inlined == (name == "nothing"), name
    assert p4json.ones(3) == 7
