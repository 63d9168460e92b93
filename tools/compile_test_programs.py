#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compile the engine's test programs, tests/p4/programs/*.p4, into compiled/ beside them and stamp the result.

Usage: compile_test_programs.py [--check]

--check needs no compiler: it compares the committed stamp with the sources and with the compiled files. A program
whose JSON lies next to its source is not one of these and is left alone.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "tests" / "p4" / "programs"
COMPILED = PROGRAMS / "compiled"
STAMP = COMPILED / "STAMP"


def sources() -> list[Path]:
    """The programs to compile."""
    return [path for path in sorted(PROGRAMS.glob("*.p4")) if not path.with_suffix(".json").exists()]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _stamp(compiler: str) -> str:
    """Hashes of all sources and all outputs: a change of either without the other is found."""
    files = sources() + sorted((PROGRAMS / "include").glob("*.p4"))
    files += sorted(path for path in COMPILED.iterdir() if path != STAMP)
    lines = [f"{_sha256(path)}  {path.relative_to(PROGRAMS).as_posix()}" for path in files]
    return "\n".join([f"compiler {compiler}", *lines]) + "\n"


def check() -> list[str]:
    """Return what is out of date, as sentences; empty when all is well."""
    if not STAMP.exists():
        return [f"{STAMP.relative_to(ROOT)} is missing: run tools/compile_test_programs.py"]
    found = STAMP.read_text()
    expected = _stamp(found.split("\n", 1)[0].removeprefix("compiler "))
    wrong = {line.split()[-1] for line in set(expected.splitlines()) ^ set(found.splitlines())}
    return [f"out of date: tests/p4/programs/{name}: run tools/compile_test_programs.py" for name in sorted(wrong)]


def _without_source_info(node: Any) -> Any:
    """Drop the line numbers that p4c adds to every node."""
    if isinstance(node, dict):
        return {key: _without_source_info(value) for key, value in node.items() if key != "source_info"}
    if isinstance(node, list):
        return [_without_source_info(value) for value in node]
    return node


def _compile(compiler: str, source: Path) -> bool:
    with tempfile.TemporaryDirectory() as scratch:
        raw, info = Path(scratch, "out.json"), Path(scratch, "out.p4info.txt")
        command = [compiler, "--arch", "v1model", "--p4runtime-files", str(info), "-o", str(raw), source.name]
        done = subprocess.run(command, cwd=PROGRAMS, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            print(f"p4c failed for {source.name} (exit {done.returncode}):\n{done.stderr}", file=sys.stderr)
            return False
        program = _without_source_info(json.loads(raw.read_text()))
        (COMPILED / f"{source.stem}.json").write_text(json.dumps(program, indent=1) + "\n")
        (COMPILED / f"{source.stem}.p4info.txtpb").write_text(info.read_text())
    return True


def compile_all() -> int:
    compiler = shutil.which("p4c-bm2-ss")
    if compiler is None:
        print("this needs the P4 compiler p4c-bm2-ss, which is not on PATH; `make p4` says more", file=sys.stderr)
        return 2
    COMPILED.mkdir(exist_ok=True)
    for old in COMPILED.iterdir():
        old.unlink()
    programs = sources()
    failed = [source.name for source in programs if not _compile(compiler, source)]
    if failed:
        return 1
    asked = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    version = (asked.stdout + asked.stderr).partition("Version")[2].strip().split(" ")[0]
    STAMP.write_text(_stamp(f"p4c-bm2-ss {version or 'of unknown version'}"))
    print(f"tests/p4/programs/compiled: {len(programs)} programs")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare stamp, sources and outputs")
    if not parser.parse_args().check:
        return compile_all()
    problems = check()
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
