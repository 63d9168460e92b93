# SPDX-License-Identifier: Apache-2.0
"""What is generated equals its sources: constants, compiled program, and the header on both sides."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from p4reduce import constants, pipeline, wire

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "tools").is_dir(), reason="needs the source tree")


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"p4reduce_tool_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_constants_are_what_the_generator_writes() -> None:
    generator = tool("gen_constants")
    assert generator.render() == generator.TARGET.read_text()
    names = re.findall(r"^([A-Z0-9_]+): Final = (\d+)$", generator.render(), re.MULTILINE)
    assert len(names) > 25
    for name, value in names:
        assert getattr(constants, name) == int(value)


def test_constants_follow_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    generator = tool("gen_constants")
    changed = tmp_path / "config.p4"
    changed.write_text(generator.SOURCE.read_text().replace("_SLOTS 1024", "_SLOTS 512"))
    monkeypatch.setattr(generator, "SOURCE", changed)
    assert generator.render() != generator.TARGET.read_text()
    assert "\nSLOTS: Final = 512\n" in generator.render()


def test_constants_fit_each_other() -> None:
    assert constants.WORD_BYTES * 8 == constants.WORD_BITS
    assert constants.SLOT_VERSIONS == 2 * constants.SLOTS
    assert constants.STATS_CELLS == 8 * constants.STATS_ROWS
    assert wire.HEADER.itemsize == constants.HEADER_BYTES


def test_compiled_program_is_that_of_the_sources() -> None:
    assert tool("compile_p4").check() == []


@pytest.mark.parametrize("victim", ["include/headers.p4", "compiled/w5.json"])
def test_a_change_without_compiling_is_noticed(victim: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tool("compile_p4")
    copy = tmp_path / "p4"
    shutil.copytree(compiler.P4, copy)
    monkeypatch.setattr(compiler, "P4", copy)
    monkeypatch.setattr(compiler, "COMPILED", copy / "compiled")
    monkeypatch.setattr(compiler, "STAMP", copy / "compiled" / "STAMP")
    assert compiler.check() == []
    with (copy / victim).open("a") as file:
        file.write("\n")
    assert {line.split(":")[1].strip() for line in compiler.check()} == {victim}
    (copy / "compiled" / "STAMP").unlink()
    assert len(compiler.check()) == 1


def test_profiles_of_host_and_compiler_are_the_same() -> None:
    assert {name: profile.words for name, profile in wire.PROFILES.items()} == tool("compile_p4").PROFILES


@pytest.mark.parametrize("name", list(wire.PROFILES))
def test_header_of_the_compiled_program_is_the_hosts(name: str) -> None:
    program = json.loads(pipeline.find(name).json.read_text())
    fields = {entry["name"]: entry["fields"] for entry in program["header_types"]}
    expected = [[field, 8 * wire.HEADER[field].itemsize] for field in wire.HEADER.names or ()]
    assert [field[:2] for field in fields["reduce_t"]] == expected
    words = wire.PROFILES[name].words
    assert fields["short_payload_t"] == [["w0", constants.WORD_BITS, False]]
    assert fields["full_payload_t"] == [["w0", constants.WORD_BITS * words, False]]
