# SPDX-License-Identifier: Apache-2.0
"""Who may import whom (docs/design.md, sections 4 and 9), read from the sources and tried in fresh interpreters."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import p4reduce

HOST = Path(p4reduce.__file__).resolve().parent
OTHERS = {"p4reduce_controller", "p4reduce_bmv2"}
LAZY = ("local_job.py", "cli", "demo/", "__main__.py", "doctor", "bench/")
"""Modules and folders of the host package that may import controller and bmv2, inside functions."""


class Import(NamedTuple):
    file: str
    line: int
    module: str
    lazy: bool
    """Inside a function, or for type checkers only."""


def imports(path: Path, root: Path) -> Iterator[Import]:
    """Every import of a module, with absolute names."""
    name = path.relative_to(root).as_posix()

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inner = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                inner = True
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(name, child.lineno, alias.name, lazy)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{name}:{child.lineno}: relative import"
                yield Import(name, child.lineno, str(child.module), lazy)
                for alias in child.names:
                    yield Import(name, child.lineno, f"{child.module}.{alias.name}", lazy)
            yield from walk(child, inner)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), False)


def all_imports(root: Path, folder: str = "") -> list[Import]:
    files = sorted((root / folder).rglob("*.py"))
    assert files, f"nothing found in {folder or root}"
    return [
        found for path in files if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")) for found in imports(path, root)
    ]


def top(module: str) -> str:
    return module.partition(".")[0]


def test_host_needs_neither_controller_nor_bmv2() -> None:
    found = [one for one in all_imports(HOST) if top(one.module) in OTHERS]
    assert found, "local() imports both, so this test looks in the wrong place"
    assert [one for one in found if not one.lazy] == []
    assert [one for one in found if not one.file.startswith(LAZY)] == []


def test_the_core_does_no_input_or_output() -> None:
    forbidden = {
        "asyncio",
        "ctypes",
        "grpc",
        "io",
        "logging",
        "multiprocessing",
        "os",
        "queue",
        "random",
        "select",
        "socket",
        "subprocess",
        "threading",
        "time",
        "torch",
    }
    assert [one for one in all_imports(HOST, "core") if top(one.module) in forbidden] == []


NUMBERS = {"packetize", "quantize", "signature", "rounding", "splitmix", "integers"}


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("core", {"core", "wire", "constants", "errors"} | NUMBERS),
        ("transport", {"transport", "core", "wire", "constants", "errors"}),
        ("sim", {"sim", "core", "wire", "constants", "errors"} | NUMBERS),
        ("ring", {"ring", "core", "wire", "constants", "errors"} | NUMBERS),
        ("proto", {"proto"}),
    ],
)
def test_lower_layers_do_not_know_higher_ones(folder: str, allowed: set[str]) -> None:
    ours = [one for one in all_imports(HOST, folder) if top(one.module) == "p4reduce" and one.module != "p4reduce"]
    assert [one for one in ours if one.module.split(".")[1] not in allowed] == []


@pytest.mark.parametrize("name", sorted(f"{name}.py" for name in {"wire", "constants", "errors"} | NUMBERS))
def test_the_lowest_layer_knows_only_itself(name: str) -> None:
    ours = [one.module for one in imports(HOST / name, HOST) if top(one.module) == "p4reduce" and "." in one.module]
    assert {module.split(".")[1] for module in ours} <= {"constants", "errors", "wire"} | NUMBERS


def test_torch_and_scapy_stay_where_they_belong() -> None:
    for package, places in (("torch", ("ddp/", "demo/")), ("scapy", ("scapy.py", "cli", "decode"))):
        found = [one for one in all_imports(HOST) if top(one.module) == package]
        assert [one for one in found if not one.file.startswith(places) and not one.lazy] == []


def modules_after(code: str) -> set[str]:
    """Names of all modules that are loaded in a fresh interpreter after `code`."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_package_is_light() -> None:
    loaded = modules_after("import p4reduce")
    assert "p4reduce.errors" in loaded
    heavy = {"torch", "scapy", "p4runtime_sh", "grpc", "google.protobuf", "asyncio", "p4reduce.session", *OTHERS}
    assert loaded & heavy == set()


def test_connecting_needs_grpc_and_numpy_only() -> None:
    loaded = modules_after("import p4reduce; p4reduce.connect; p4reduce.Communicator; p4reduce.Settings")
    assert {"grpc", "numpy", "p4reduce.session"} <= loaded
    assert loaded & {"torch", "scapy", "p4runtime_sh", "pyroute2", "rich", *OTHERS} == set()


def test_public_names() -> None:
    assert p4reduce.__all__ == sorted(p4reduce.__all__)
    for name in p4reduce.__all__:
        assert getattr(p4reduce, name) is not None
    assert set(p4reduce.__all__) <= set(dir(p4reduce))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = p4reduce.nothing
    assert p4reduce.connect.__doc__
    assert p4reduce.local.__doc__


def test_local_is_the_function_whatever_was_imported_before() -> None:
    modules_after("import p4reduce.local_job; import p4reduce; assert callable(p4reduce.local)")
    modules_after("from p4reduce import local; assert callable(local)")
