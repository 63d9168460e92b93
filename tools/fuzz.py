#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fuzz the switch program, the worker's core, the controller and whatever reads files, for as long as you like.

Usage: fuzz.py [--seconds N] [--target NAME ...] [--first-seed N]
       fuzz.py --target NAME --seed N

The time is shared among the targets. A step is one seed, and repeats exactly (but for the controller's threads). A
finding is printed with its seed; after the first of a kind the target goes on. The last line on stdout is JSON; the
exit status is 1 when there was a finding. The targets live in tests/fuzz.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from fuzz.targets import TARGETS, Target

MAX_FINDINGS = 20
"""Kinds of findings after which a target is given up."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Fuzzing with seeds, for as long as you like.")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together (default: %(default)s)")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="may be repeated (default: all)")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, metavar="N", help="try this seed alone, and show where it fails")
    return parser


def _kind(error: BaseException) -> str:
    """Findings with one last line and one place are one kind."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
    return f"{type(error).__name__} at {where}"


def _run(name: str, target: Target, first: int, seconds: float) -> dict[str, Any]:
    findings: dict[str, dict[str, Any]] = {}
    started = shown = time.monotonic()
    seed = first
    while time.monotonic() - started < seconds and len(findings) < MAX_FINDINGS:
        try:
            target.step(seed)
        except Exception as error:  # whatever comes out is what we look for
            kind = _kind(error)
            if kind not in findings:
                findings[kind] = {"seed": seed, "error": f"{kind}: {str(error)[:300]}", "times": 0}
                print(f"{name}: seed {seed}: {kind}: {str(error)[:300]}", file=sys.stderr)
                print(f"  again: python tools/fuzz.py --target {name} --seed {seed}", file=sys.stderr)
            findings[kind]["times"] += 1
        seed += 1
        if time.monotonic() - shown > 10.0:
            shown = time.monotonic()
            print(f"{name}: {seed - first} steps, {len(findings)} kinds of findings", file=sys.stderr)
    seconds = time.monotonic() - started
    return {
        "steps": seed - first,
        "seconds": round(seconds, 1),
        "occurred": dict(target.found),
        "findings": list(findings.values()),
    }


def _once(target: Target, seed: int) -> int:
    try:
        target.step(seed)
    except Exception:  # shown as it came
        traceback.print_exc()
        return 1
    print(json.dumps({"seed": seed, "occurred": dict(target.found)}))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Fuzz. Returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    names = options.target or list(TARGETS)
    if options.seed is not None and len(names) != 1:
        parser.error("--seed needs a single --target")
    # What the controller logs about each hostile request is not what we look for.
    logging.disable(logging.WARNING)
    results = {}
    try:
        for name in names:
            target = TARGETS[name]()
            try:
                if options.seed is not None:
                    return _once(target, options.seed)
                results[name] = _run(name, target, options.first_seed, options.seconds / len(names))
            finally:
                target.close()
    finally:
        logging.disable(logging.NOTSET)
    print(json.dumps({"targets": results}))
    return 1 if any(result["findings"] for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
