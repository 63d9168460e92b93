#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Explore small systems exhaustively, and show that known faults would be found (docs/protocol.md).

    python tools/modelcheck.py                                     # all standard bounds on the compiled P4 program
    python tools/modelcheck.py --workers 3 --rounds 4 --change     # one system
    python tools/modelcheck.py --switch reference                  # the same on the switch in plain Python

The standard systems are searched through classes of states, and those that are small enough state by state as well:
both must find the same.

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
from p4reduce.sim.modelcheck import Bounds, Checker, EngineState, Quotient, ReferenceState, Report, check
from p4reduce.sim.modelcheck.bounds import NEAR_WRAP, PROFILE
from p4reduce.sim.modelcheck.mutants import MUTANTS, Mutant
from p4reduce.sim.modelcheck.switches import SwitchState
from p4reduce.sim.switch import ReferenceSwitch

LARGE = (
    Bounds(3, or_slots=2, add_slots=2, workload=(4, 4), change=True),
    Bounds(3, or_slots=2, add_slots=2, workload=(3, 3, 2), change=True),
    Bounds(2, or_slots=2, add_slots=2, workload=(1, 1, 1, 1, 1, 1), change=True),
)
"""Searched through classes of states only."""
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
    Bounds(3, add_slots=2, workload=(8,), change=True),
    Bounds(3, or_slots=2, workload=(0, 0, 0, 0, 0, 0, 0, 0), change=True),
    *LARGE,
)
"""2 and 3 workers, 1 and 2 slots a stream, 3 and 4 rounds, an epoch change and a switch restart.

The last five have two slots of a stream and an epoch change together; the first four of these 3 workers and 4 rounds.
"""
CORE_LIMIT = 300_000


def maker(switch: str, bounds: Bounds) -> Callable[[], SwitchState]:
    """How to make a fresh switch."""
    profile = wire.PROFILES[PROFILE]
    if switch == "reference":
        return lambda: ReferenceState(ReferenceSwitch(profile))
    from p4reduce_bmv2.embedded.engine import Engine

    program = json.loads(pipeline.find(PROFILE).json.read_text())
    return lambda: EngineState(EngineSwitch(Engine(program)), bounds)


def by_states(bounds: Bounds, switch: str, say: Callable[[str], None]) -> Report:
    """One system, state by state, with a line of progress now and then."""

    def progress(report: Report) -> None:
        if report.states > 1000:
            say(f"  {report.states} states, {report.registers} contents of the registers, {report.seconds:.0f} s")

    report = Checker(bounds, maker(switch, bounds), progress=progress).run()
    say(
        f"  {report.states} states, {report.transitions} steps between them, {report.registers} contents of the "
        f"registers, {report.worker_states} states of cores; {report.drained} shown to complete; "
        f"{report.seconds:.1f} s{'' if report.complete else ', NOT COMPLETE'}"
    )
    for line in report.trace:
        say(f"  {line}")
    return report


def by_classes(bounds: Bounds, switch: str, say: Callable[[str], None]) -> Report:
    """One system through classes of states; when that finds anything, state by state as far as that goes."""

    def progress(report: Report) -> None:
        say(f"  {report.states} classes of states, {report.seconds:.0f} s")

    report = check(bounds, maker(switch, bounds), progress=progress)
    say(
        f"  {report.states} classes of states ({report.unfolded} with ranks told apart), {report.transitions} steps "
        f"between them, {report.registers} contents of cells, {report.worker_states} states of cores; "
        f"{report.drained} shown to complete; {report.seconds:.1f} s{'' if report.complete else ', NOT COMPLETE'}"
    )
    for line in report.trace or [report.violation] * bool(report.kind):
        say(f"  {line}")
    return report


def agree(bounds: Bounds, switch: str, states: Report, classes: Report, say: Callable[[str], None]) -> bool:
    """Whether both searches have found the same, and ranks are all that is exchanged where nothing else is left out.

    The registers of the compiled program remember what a cell held in another size before, which is left out there.
    """
    ranks = Quotient(bounds, maker(switch, bounds), collapse=False, batches=False).run()
    exact = switch == "reference" or not bounds.change
    number = ranks.unfolded == states.states if exact else ranks.unfolded <= states.states
    same = [(report.kind, report.complete) for report in (classes, ranks)] == [(states.kind, states.complete)] * 2
    ok = same and (bool(states.kind) or number)
    say(
        f"  {ranks.states} states but for the order of ranks, which are {ranks.unfolded}; {ranks.seconds:.1f} s: "
        f"{'the same' if ok else 'THE SEARCHES DISAGREE'}"
    )
    return ok


def explore(bounds: Bounds, switch: str, search: str, say: Callable[[str], None]) -> dict[str, Any]:
    """One system in the ways that are asked for; what the JSON says of it."""
    say(f"{bounds.describe()} on {switch}")
    report = by_classes(bounds, switch, say) if search == "classes" else by_states(bounds, switch, say)
    found = row(report, switch, search)
    if search == "both":
        classes = by_classes(bounds, switch, say)
        found["classes"] = {
            "states": classes.states,
            "unfolded": classes.unfolded,
            "violation": classes.violation,
            "complete": classes.complete,
            "agrees": agree(bounds, switch, report, classes, say),
            "cpu_seconds": round(classes.seconds, 1),
        }
    return found


def try_mutant(mutant: Mutant, say: Callable[[str], None]) -> bool:
    """Whether the fault is found in both ways. Says, too, whether a core takes a wrong sum from such a switch."""

    def make() -> SwitchState:
        return ReferenceState(mutant.switch(wire.PROFILES[PROFILE]))

    report = Checker(mutant.bounds, make).run()
    say(f"mutant: {mutant.name} ({mutant.bounds.describe()})")
    for line in report.trace:
        say(f"  {line}")
    behind = Checker(mutant.bounds, make, judge=False, limit=CORE_LIMIT).run()
    fooled = f"a core is fooled: {behind.violation}" if behind.kind else "no core takes a wrong sum from it"
    say(f"  {fooled} ({behind.states} states{'' if behind.complete else ', not complete'})")
    classes = Quotient(mutant.bounds, make).run()
    say(f"  through classes of states: {classes.kind}, {classes.steps} steps; state by state {report.steps}")
    return bool(report.kind) and bool(classes.kind)


def row(report: Report, switch: str, search: str) -> dict[str, Any]:
    """What the JSON says of one search. Through classes, `registers` are contents of single cells."""
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
        "search": search,
        "states": report.states,
        **({"unfolded": report.unfolded} if search == "classes" else {}),
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
    parser.add_argument(
        "--search",
        choices=("states", "classes", "both"),
        help="default: both, and classes for what is large, of the standard systems; states of another one",
    )
    parser.add_argument("--no-mutants", action="store_true", help="do not look for known faults")
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    return parser.parse_args(argv)


def chosen(options: argparse.Namespace) -> list[tuple[Bounds, str]]:
    """The systems to explore, and how."""
    values = (options.workers, options.slots, options.or_slots, options.rounds, options.workload, options.first_round)
    if all(value is None for value in values) and not (options.change or options.amnesia or options.disagree):
        return [(bounds, options.search or ("classes" if bounds in LARGE else "both")) for bounds in STANDARD]
    slots, or_slots = options.slots or 1, options.or_slots or 1
    workload = (1,) * (max(slots, or_slots) * (options.rounds or 3))
    if options.workload:
        workload = tuple(int(chunks) for chunks in options.workload.split(","))
    first = NEAR_WRAP if options.first_round is None else options.first_round
    flags = (options.change, options.amnesia, options.disagree)
    return [(Bounds(options.workers or 2, or_slots, slots, workload, first, *flags), options.search or "states")]


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
    rows = [explore(bounds, options.switch, search, say) for bounds, search in systems]
    mutants = () if options.no_mutants else MUTANTS
    caught = sum([try_mutant(mutant, say) for mutant in mutants])
    violations = sum(bool(found["violation"]) for found in rows)
    agreed = all(found.get("classes", {}).get("agrees", True) for found in rows)
    summary = {
        "bounds": rows,
        "states": sum(found["states"] for found in rows),
        "violations": violations,
        "mutants": len(mutants),
        "mutants_caught": caught,
        "seconds": round(time.monotonic() - begin, 1),
    }
    print(json.dumps(summary))
    whole = all(found["complete"] for found in rows) and agreed
    return 0 if violations == 0 and whole and caught == len(mutants) else 1


if __name__ == "__main__":
    raise SystemExit(main())
