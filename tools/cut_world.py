#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whole systems in storms, in virtual time: controllers crash, switches restart, paths change, every sum is checked.

Usage: cut_world.py [--seeds A-B] [--switch reference|engine] [--buckets N] [--jobs N] [--verbose]

A seed stands for a job or two, their buckets, the network, and everything that goes wrong; it repeats exactly. Seeds
in which something is wrong go to stderr, with what happened in them when --verbose is given. The last line on stdout
is one JSON object; the exit status is 1 when a seed was wrong. tests/helpers/cut_world.py says what is real in it.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import multiprocessing
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from helpers.cut_storm import Storm, hurried

from p4reduce import pipeline
from p4reduce.sim.adapter import EngineSwitch
from p4reduce.sim.switch import SwitchModel

SHOWN = 3
"""Complaints of one seed that are printed."""


class Outcome(NamedTuple):
    """One seed's."""

    seed: int
    wrong: list[str]
    seen: Counter[str]
    events: list[str]
    ranks: int
    buckets: int
    virtual: float


@functools.cache
def _program() -> Any:
    return json.loads(pipeline.find("w5").json.read_text())


def _engine() -> SwitchModel:
    from p4reduce_bmv2.embedded.engine import Engine

    return EngineSwitch(Engine(_program()))


def run(seed: int, switch: str, buckets: int) -> Outcome:
    """One storm."""
    logging.disable(logging.CRITICAL)
    with hurried():
        world = Storm(seed, make=_engine if switch == "engine" else None, buckets=buckets).run()
    delivered = sum(len(rank.done) for rank in world.ranks)
    return Outcome(seed, world.wrong, world.seen, world.events, len(world.ranks), delivered, world.now)


def _seeds(text: str) -> list[int]:
    first, _, last = text.partition("-")
    try:
        return list(range(int(first), int(last or first) + 1))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a seed nor a range such as 0-99") from None


def main(arguments: list[str] | None = None) -> int:
    """Run storms. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Whole systems in storms, in virtual time; every sum is checked.")
    parser.add_argument("--seeds", type=_seeds, default=_seeds("0-999"), metavar="A-B", help="default: 0-999")
    parser.add_argument("--switch", choices=("reference", "engine"), default="reference", help="default: %(default)s")
    parser.add_argument("--buckets", type=int, default=60, metavar="N", help="per seed (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default: %(default)s)")
    parser.add_argument("--verbose", action="store_true", help="say what happened in seeds that are wrong")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    seen: Counter[str] = Counter()
    bad: list[int] = []
    done = buckets = 0
    virtual = 0.0
    one = functools.partial(run, switch=options.switch, buckets=options.buckets)
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        for outcome in pool.map(one, options.seeds, chunksize=4):
            done += 1
            buckets += outcome.buckets
            virtual += outcome.virtual
            seen += outcome.seen
            if outcome.wrong:
                bad.append(outcome.seed)
                lines = [*(outcome.events if options.verbose else []), *outcome.wrong[:SHOWN]]
                print(f"seed {outcome.seed}:", *lines, sep="\n  ", file=sys.stderr)
            if done % 100 == 0:
                print(f"{done}/{len(options.seeds)} seeds, {time.monotonic() - started:.0f} s", file=sys.stderr)
    summary = {
        "seeds": done,
        "wrong": len(bad),
        "failing_seeds": bad,
        "buckets_delivered": buckets,
        "virtual_seconds": round(virtual),
        "seconds": round(time.monotonic() - started, 1),
        "switch": options.switch,
        "seen": dict(sorted(seen.items())),
    }
    print(json.dumps(summary))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
