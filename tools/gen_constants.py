#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Derive host/p4reduce/constants.py from p4/include/config.p4, the one place where shared numbers are written.

Usage: gen_constants.py [--check]
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "p4" / "include" / "config.p4"
TARGET = ROOT / "host" / "p4reduce" / "constants.py"
DEFINE = re.compile(r"^#define P4REDUCE_([A-Z0-9_]+) (\d+)$", re.MULTILINE)
# The profile sets this one; it is not a constant of the protocol.
PER_PROFILE = {"WORDS"}


def render() -> str:
    lines = [
        "# SPDX-License-Identifier: Apache-2.0",
        '"""Numbers shared with the P4 program. Generated from p4/include/config.p4 by tools/gen_constants.py."""',
        "",
        "from typing import Final",
        "",
    ]
    for name, value in DEFINE.findall(SOURCE.read_text()):
        if name not in PER_PROFILE:
            lines.append(f"{name}: Final = {value}")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare; exit 1 when the file is out of date")
    args = parser.parse_args()
    text = render()
    if args.check:
        if not TARGET.exists() or TARGET.read_text() != text:
            print(f"{TARGET.relative_to(ROOT)} is out of date: run make gen", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
