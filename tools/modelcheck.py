#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Explore small systems exhaustively, and show that known faults would be found (docs/protocol.md).

    python tools/modelcheck.py                                     # all standard bounds on the compiled P4 program
    python tools/modelcheck.py --workers 3 --rounds 4 --change     # one system
    python tools/modelcheck.py --switch reference                  # the same on the switch in plain Python

Prints what it covers, and one line of JSON at the end. Exit status 1 when anything was found or left open.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from p4reduce import pipeline, wire
from p4reduce.errors import ConfigError
from p4reduce.sim.adapter import EngineSwitch
from p4reduce.sim.modelcheck import Bounds, Checker, EngineState, ReferenceState, Report
from p4reduce.sim.modelcheck.bounds import NEAR_WRAP, PROFILE
from p4reduce.sim.modelcheck.mutants import MUTANTS, Mutant
from p4reduce.sim.modelcheck.switches import SwitchState
from p4reduce.sim.switch import ReferenceSwitch

STANDARD = (
    Bounds(2, workload=(1, 1, 1, 1), change=True),
    Bounds(2, workload=(4,), change=True),
    Bounds(2, add_slots=2, workload=(8,), change=True),
    Bounds(2, or_slots=2, add_slots=2, workload=(1, 1, 1, 1, 1, 1)),
    Bounds(3, workload=(1, 1, 1), change=True),
    Bounds(3, workload=(1, 1, 1, 1)),
    Bounds(3, workload=(4,), change=True),
    Bounds(3, add_slots=2, workload=(8,)),
    Bounds(3, or_slots=2, workload=(0, 0, 0, 0, 0, 0), change=True),
    Bounds(2, workload=(1, 1, 1), amnesia=True),
    Bounds(3, workload=(0, 0, 0), amnesia=True),
    Bounds(2, workload=(1, 1, 1), disagree=True, change=True),
    Bounds(3, workload=(1, 1, 1), disagree=True),
)
"""2 and 3 workers, 1 and 2 slots a stream, 3 and 4 rounds, an epoch change and a switch restart."""
CORE_LIMIT = 300_000


def maker(switch: str, bounds: Bounds) -> Callable[[], SwitchState]:
    """How to make a fresh switch."""
    profile = wire.PROFILES[PROFILE]
    if switch == "reference":
        return lambda: ReferenceState(ReferenceSwitch(profile))
    from p4reduce_bmv2.embedded.engine import Engine

    program = json.loads(pipeline.find(PROFILE).json.read_text())
    return lambda: EngineState(EngineSwitch(Engine(program)), bounds)


def explore(bounds: Bounds, switch: str, say: Callable[[str], None]) -> Report:
    """One system, with a line of progress now and then."""

    def progress(report: Report) -> None:
        if report.states > 1000:
            say(f"  {report.states} states, {report.registers} contents of the registers, {report.seconds:.0f} s")

    say(f"{bounds.describe()} on {switch}")
    report = Checker(bounds, maker(switch, bounds), progress=progress).run()
    say(
        f"  {report.states} states, {report.transitions} steps between them, {report.registers} contents of the "
        f"registers, {report.worker_states} states of cores; {report.drained} shown to complete; "
        f"{report.seconds:.1f} s{'' if report.complete else ', NOT COMPLETE'}"
    )
    for line in report.trace:
        say(f"  {line}")
    return report


def try_mutant(mutant: Mutant, say: Callable[[str], None]) -> bool:
    """Whether the fault is found, and whether no core takes a wrong sum from such a switch."""

    def make() -> SwitchState:
        return ReferenceState(mutant.switch(wire.PROFILES[PROFILE]))

    report = Checker(mutant.bounds, make).run()
    say(f"mutant: {mutant.name} ({mutant.bounds.describe()})")
    for line in report.trace:
        say(f"  {line}")
    behind = Checker(mutant.bounds, make, judge=False, limit=CORE_LIMIT).run()
    fooled = f"a core is fooled: {behind.violation}" if behind.kind else "no core takes a wrong sum from it"
    say(f"  {fooled} ({behind.states} states{'' if behind.complete else ', not complete'})")
    return bool(report.kind)


def row(report: Report, switch: str) -> dict[str, Any]:
    """What the JSON says of one system."""
    b = report.bounds
    return {
        "workers": b.workers,
        "slots": [b.or_slots, b.add_slots],
        "rounds": b.rounds,
        "workload": list(b.workload),
        "epoch_change_and_restart": b.change,
        "registers_lost": b.amnesia,
        "ranks_disagree": b.disagree,
        "switch": switch,
        "states": report.states,
        "steps": report.transitions,
        "registers": report.registers,
        "switch_steps": report.switch_steps,
        "complete": report.complete,
        "violation": report.violation,
        "cpu_seconds": round(report.seconds, 1),
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--switch", choices=("engine", "reference"), default="engine")
    parser.add_argument("--workers", type=int, help="check one system instead of the standard ones; default 2")
    parser.add_argument("--slots", type=int, help="slots of the ADD stream, default 1")
    parser.add_argument("--or-slots", type=int, help="slots of the OR stream, default 1")
    parser.add_argument("--rounds", type=int, help="rounds of every slot, default 3; not with --workload")
    parser.add_argument("--workload", help="buckets: ADD chunks of each, 0 for a barrier; as 1,1,0,4")
    parser.add_argument("--first-round", type=int, help="default: shortly before rounds wrap")
    parser.add_argument("--change", action="store_true", help="an epoch change and a switch restart at any moment")
    parser.add_argument("--amnesia", action="store_true", help="registers lost at any moment under a living epoch")
    parser.add_argument("--disagree", action="store_true", help="the last rank's second bucket is another one")
    parser.add_argument("--no-mutants", action="store_true", help="do not look for known faults")
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    return parser.parse_args(argv)


def chosen(options: argparse.Namespace) -> tuple[Bounds, ...]:
    """The systems to explore."""
    values = (options.workers, options.slots, options.or_slots, options.rounds, options.workload, options.first_round)
    if all(value is None for value in values) and not (options.change or options.amnesia or options.disagree):
        return STANDARD
    slots, or_slots = options.slots or 1, options.or_slots or 1
    workload = (1,) * (max(slots, or_slots) * (options.rounds or 3))
    if options.workload:
        workload = tuple(int(chunks) for chunks in options.workload.split(","))
    first = NEAR_WRAP if options.first_round is None else options.first_round
    flags = (options.change, options.amnesia, options.disagree)
    return (Bounds(options.workers or 2, or_slots, slots, workload, first, *flags),)


def main(argv: list[str] | None = None) -> int:
    """Run; returns the exit status."""
    options = parse(argv)
    begin = time.monotonic()

    def say(text: str) -> None:
        if not options.json:
            print(text, flush=True)

    try:
        systems = chosen(options)
    except (ConfigError, ValueError) as error:
        print(f"modelcheck: {error}", file=sys.stderr)
        return 2
    reports = [explore(bounds, options.switch, say) for bounds in systems]
    mutants = () if options.no_mutants else MUTANTS
    caught = sum([try_mutant(mutant, say) for mutant in mutants])
    violations = sum(bool(report.kind) for report in reports)
    summary = {
        "bounds": [row(report, options.switch) for report in reports],
        "states": sum(report.states for report in reports),
        "violations": violations,
        "mutants": len(mutants),
        "mutants_caught": caught,
        "seconds": round(time.monotonic() - begin, 1),
    }
    print(json.dumps(summary))
    whole = all(report.complete for report in reports)
    return 0 if violations == 0 and whole and caught == len(mutants) else 1


if __name__ == "__main__":
    raise SystemExit(main())
