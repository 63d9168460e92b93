#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compile p4/p4reduce.p4 for every profile into p4/compiled/ and stamp the result with its sources.

Usage: compile_p4.py [--check]

--check needs no compiler: it compares the committed stamp with the sources and with the compiled files.
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
P4 = ROOT / "p4"
COMPILED = P4 / "compiled"
STAMP = COMPILED / "STAMP"
PROFILES = {"w5": 5, "w34": 34}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _stamp(compiler: str) -> str:
    """Hashes of all sources and all outputs: a change of either without the other is found."""
    lines = [f"compiler {compiler}"]
    sources = sorted(P4.rglob("*.p4"))
    outputs = sorted(p for p in COMPILED.iterdir() if p.suffix in (".json", ".txtpb"))
    lines += [f"{_sha256(path)}  {path.relative_to(P4).as_posix()}" for path in sources + outputs]
    return "\n".join(lines) + "\n"


def check() -> list[str]:
    """Return what is out of date, as sentences; empty when all is well."""
    if not STAMP.exists():
        return ["p4/compiled/STAMP is missing: run `make p4`"]
    text = STAMP.read_text()
    compiler = text.split("\n", 1)[0].removeprefix("compiler ")
    expected = _stamp(compiler).splitlines()
    found = text.splitlines()
    return [f"out of date: {line.split()[-1]}: run `make p4`" for line in set(expected) ^ set(found)]


def _without_source_info(node: Any) -> Any:
    """Drop the line numbers p4c adds to every node: two thirds of the file, and noise in every diff."""
    if isinstance(node, dict):
        return {key: _without_source_info(value) for key, value in node.items() if key != "source_info"}
    if isinstance(node, list):
        return [_without_source_info(value) for value in node]
    return node


def compile_all() -> int:
    compiler = shutil.which("p4c-bm2-ss")
    if compiler is None:
        print(
            "make p4 needs the P4 compiler p4c-bm2-ss, which is not on PATH.\n"
            "Install the package p4lang-p4c from p4lang's package archive (https://github.com/p4lang/p4c#readme).\n"
            "Without it everything else works: the compiled program is part of the source tree.",
            file=sys.stderr,
        )
        return 2
    COMPILED.mkdir(exist_ok=True)
    for name, words in PROFILES.items():
        with tempfile.TemporaryDirectory() as scratch:
            raw, info = Path(scratch, "out.json"), Path(scratch, "out.p4info.txt")
            command = [compiler, "--arch", "v1model", "--Werror", f"-DP4REDUCE_WORDS={words}"]
            command += ["--p4runtime-files", str(info), "-o", str(raw), "p4/p4reduce.p4"]
            done = subprocess.run(command, cwd=ROOT, check=False)
            if done.returncode != 0:
                print(f"p4c failed for profile {name} (exit {done.returncode})", file=sys.stderr)
                return 1
            program = _without_source_info(json.loads(raw.read_text()))
            (COMPILED / f"{name}.json").write_text(json.dumps(program, indent=1) + "\n")
            (COMPILED / f"{name}.p4info.txtpb").write_text(info.read_text())
            print(f"p4/compiled/{name}.json: {words} words a frame")
    asked = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    version = (asked.stdout + asked.stderr).partition("Version")[2].strip().split(" ")[0]
    STAMP.write_text(_stamp(f"p4c-bm2-ss {version or 'of unknown version'}"))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare stamp, sources and outputs")
    if not parser.parse_args().check:
        return compile_all()
    problems = check()
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
