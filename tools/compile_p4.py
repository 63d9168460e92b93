#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compile p4/p4reduce.p4 for every profile into p4/compiled/ and stamp the result with its sources.

What p4c writes goes through two steps of our own: fuse.py makes one number of a frame's words, shrink.py spares BMv2
work on every packet. Tests hold the result against what p4c wrote; for that the small profile's is kept as it was.

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
sys.path.insert(0, str(ROOT / "tools"))

import fuse  # noqa: E402
import shrink  # noqa: E402

P4 = ROOT / "p4"
TOOLS = ("compile_p4.py", "fuse.py", "p4json.py", "shrink.py")
COMPILED = P4 / "compiled"
UNFUSED = ROOT / "tests" / "p4" / "unfused"
STAMP = COMPILED / "STAMP"
PROFILES = {"w5": 5, "w34": 34}
SMALL = "w5"
PLAIN = {"scalar": "p4/scalar.p4"}
"""Programs that `p4reduce bench` compares with; they stay as p4c writes them."""


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _stamp(compiler: str) -> str:
    """Hashes of all sources and all outputs: a change of either without the other is found."""
    lines = [f"compiler {compiler}"]
    sources = sorted(P4.rglob("*.p4"))
    outputs = sorted(p for p in COMPILED.iterdir() if p.suffix in (".json", ".txtpb"))
    lines += [f"{_sha256(path)}  {path.relative_to(P4).as_posix()}" for path in sources + outputs]
    others = [ROOT / "tools" / name for name in TOOLS] + sorted(UNFUSED.glob("*.json"))
    lines += [f"{_sha256(path)}  {path.relative_to(ROOT).as_posix()}" for path in others]
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


def without_source_info(node: Any) -> Any:
    """Drop the line numbers p4c adds to every node: two thirds of the file, and noise in every diff."""
    if isinstance(node, dict):
        return {key: without_source_info(value) for key, value in node.items() if key != "source_info"}
    if isinstance(node, list):
        return [without_source_info(value) for value in node]
    return node


def compile_profile(compiler: str, name: str) -> tuple[Any, str] | None:
    """Program and P4Info of a profile, or of a plain program, as p4c writes them; None when it fails, and said why."""
    options = [PLAIN[name]] if name in PLAIN else [f"-DP4REDUCE_WORDS={PROFILES[name]}", "p4/p4reduce.p4"]
    with tempfile.TemporaryDirectory() as scratch:
        raw, info = Path(scratch, "out.json"), Path(scratch, "out.p4info.txt")
        command = [compiler, "--arch", "v1model", "--Werror"]
        command += ["--p4runtime-files", str(info), "-o", str(raw), *options]
        if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
            return None
        return without_source_info(json.loads(raw.read_text())), info.read_text()


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
    UNFUSED.mkdir(exist_ok=True)
    for name in [*PROFILES, *PLAIN]:
        found = compile_profile(compiler, name)
        if found is None:
            print(f"p4c failed for {name}", file=sys.stderr)
            return 1
        program, info = found
        if name == SMALL:
            (UNFUSED / f"{name}.json").write_text(json.dumps(program, separators=(",", ":")) + "\n")
        if name in PROFILES:
            count = fuse.fuse(program)
            shrink.shrink(program)
            info = fuse.fuse_p4info(info, count)
        (COMPILED / f"{name}.json").write_text(json.dumps(program, indent=1) + "\n")
        (COMPILED / f"{name}.p4info.txtpb").write_text(info)
        print(f"p4/compiled/{name}.json")
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
