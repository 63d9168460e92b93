#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Generate the Python code of host/p4reduce/proto/*.proto.

Needs grpcio-tools 1.48 to 1.62: what these emit runs with the protobuf < 3.21 that p4runtime-shell pins and with
newer ones. Usage: gen_proto.py [--check]
"""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOST = ROOT / "host"
PROTO = HOST / "p4reduce" / "proto"


def generate(target: Path) -> None:
    sources = [str(path) for path in sorted(PROTO.glob("*.proto"))]
    command = [sys.executable, "-W", "ignore", "-m", "grpc_tools.protoc", f"-I{HOST}"]
    command += [f"--python_out={target}", f"--pyi_out={target}", f"--grpc_python_out={target}", *sources]
    subprocess.run(command, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare; exit 1 when a file is out of date")
    args = parser.parse_args()
    if importlib.util.find_spec("grpc_tools") is None:
        print("gen_proto needs grpcio-tools: pip install -c constraints.txt 'p4reduce[dev]'", file=sys.stderr)
        return 2
    if not args.check:
        generate(HOST)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        made = sorted(path for path in Path(scratch).rglob("*") if path.is_file())
        stale = []
        for path in made:
            committed = HOST / path.relative_to(scratch)
            if not committed.is_file() or committed.read_bytes() != path.read_bytes():
                stale.append(path.relative_to(scratch).as_posix())
    for name in stale:
        print(f"host/{name} is out of date: run make gen", file=sys.stderr)
    return 1 if stale or not made else 0


if __name__ == "__main__":
    sys.exit(main())
