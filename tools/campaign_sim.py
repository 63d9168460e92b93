#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Simulate a million rounds of random jobs over a bad network and compare every sum with the exact one.

Usage: campaign_sim.py [--seeds A-B] [--rounds N] [--switch reference|engine|bmv2] [--loss P] ... [--pcap FILE]

Progress goes to stderr. The last line on stdout is one JSON object; the exit status is 1 when a seed failed. A seed
that fails is printed with the command that runs it again: it fails in the same way, at the same frame. Write that run
to a capture file with --pcap and read it with `p4reduce decode FILE`. All three switches give the same run of a seed,
frame by frame: reference is the protocol in plain Python, engine the compiled program on the embedded switch, and bmv2
the compiled program on simple_switch_grpc (a real process in a virtual network; some 200 rounds a second).
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from p4reduce import pipeline
from p4reduce.errors import ConfigError
from p4reduce.sim.adapter import EngineSwitch
from p4reduce.sim.campaign import Campaign, SeedReport, run_seed
from p4reduce.sim.network import Faults, LinkCounters
from p4reduce.sim.switch import ReferenceSwitch, SwitchModel
from p4reduce.wire import PROFILES, Profile

FAULTS = ("loss", "duplicate", "reorder", "corrupt", "outages")


@functools.cache
def _program(profile_name: str) -> Any:
    return json.loads(pipeline.find(profile_name).json.read_text())


def engine_switch(profile: Profile) -> SwitchModel:
    """The embedded switch's engine, running the compiled program."""
    from p4reduce_bmv2.embedded.engine import Engine

    return EngineSwitch(Engine(_program(profile.name)))


SWITCHES = {"reference": ReferenceSwitch, "engine": engine_switch}
BMV2 = "bmv2"


def run_one(seed: int, campaign: Campaign, switch: str, pcap: str | None = None) -> SeedReport:
    """One seed on the switch of that name; BMv2 is started for it and ended."""
    if switch != BMV2:
        return run_seed(seed, campaign, SWITCHES[switch], pcap)
    tests = str(Path(__file__).resolve().parent.parent / "tests")
    if tests not in sys.path:
        sys.path.insert(0, tests)
    from helpers.bmv2_engine import Bmv2Engine

    engine = Bmv2Engine(campaign.profile)
    try:
        return run_seed(seed, campaign, lambda _: EngineSwitch(engine), pcap)
    finally:
        engine.close()


def _seeds(text: str) -> list[int]:
    first, _, last = text.partition("-")
    try:
        seeds = list(range(int(first), int(last or first) + 1))
    except ValueError:
        seeds = []
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a seed nor a range such as 0-99")
    return seeds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="A million simulated rounds over a bad network, every sum checked.")
    parser.add_argument("--seeds", type=_seeds, default=_seeds("0-99"), metavar="A-B", help="default: 0-99")
    parser.add_argument("--rounds", type=int, default=10_000, metavar="N", help="per seed (default: %(default)s)")
    parser.add_argument("--switch", choices=[*sorted(SWITCHES), BMV2], default="reference", help="default: %(default)s")
    parser.add_argument("--profile", choices=sorted(PROFILES), default="w5", help="frame size (default: %(default)s)")
    for name, default in zip(FAULTS, (0.05, 0.05, 0.2, 0.0, 0.0), strict=True):
        what = "times a second a link goes down" if name == "outages" else "probability for every frame, both ways"
        if name == "corrupt":
            what = "probability for every frame on its way down"
        parser.add_argument(f"--{name}", type=float, default=default, help=f"{what} (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes")
    parser.add_argument("--pcap", metavar="FILE", help="write all frames there; needs a single seed")
    return parser


def _reports(options: argparse.Namespace, campaign: Campaign) -> Iterator[SeedReport]:
    if options.jobs <= 1 or len(options.seeds) == 1:
        for seed in options.seeds:
            yield run_one(seed, campaign, options.switch, options.pcap)
        return
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(run_one, seed, campaign, options.switch) for seed in options.seeds]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _again(options: argparse.Namespace, seed: int) -> str:
    words = ["python", "tools/campaign_sim.py", "--seeds", str(seed), "--rounds", str(options.rounds)]
    words += ["--switch", options.switch, "--profile", options.profile]
    for name in FAULTS:
        words += [f"--{name}", str(getattr(options, name))]
    return shlex.join([*words, "--pcap", f"seed-{seed}.pcap"])


def _summary(options: argparse.Namespace, reports: list[SeedReport], seconds: float) -> dict[str, Any]:
    network = sum((report.network for report in reports), LinkCounters())
    kinds = [report.failure.kind for report in reports if report.failure is not None]
    prints = "".join(report.fingerprint for report in sorted(reports, key=lambda report: report.seed))
    return {
        "seeds": len(reports),
        "rounds": sum(report.rounds for report in reports),
        "buckets": sum(report.buckets for report in reports),
        "frames": sum(report.frames for report in reports),
        "faults": asdict(network),
        "resent": sum(report.resent for report in reports),
        "stale": sum(report.stale for report in reports),
        "repeats": sum(report.repeats for report in reports),
        "wrong": kinds.count("wrong") + kinds.count("count"),
        "hung": kinds.count("hung"),
        "failed": kinds.count("failed"),
        "failing_seeds": sorted(report.seed for report in reports if report.failure is not None),
        "virtual_seconds": round(sum(report.virtual_seconds for report in reports), 3),
        "seconds": round(seconds, 1),
        "switch": options.switch,
        "profile": options.profile,
        "fingerprint": hashlib.blake2b(prints.encode(), digest_size=16).hexdigest(),
    }


def main(arguments: list[str] | None = None) -> int:
    """Run a campaign. Returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.pcap and len(options.seeds) != 1:
        parser.error("--pcap needs a single seed")
    if options.switch == BMV2 and shutil.which("simple_switch_grpc") is None:
        parser.error("--switch bmv2 needs simple_switch_grpc on the PATH")
    both = {"loss": options.loss, "duplicate": options.duplicate, "reorder": options.reorder}
    both["outages"] = options.outages
    try:
        up, down = Faults(**both), Faults(**both, corrupt=options.corrupt)
        campaign = Campaign(options.rounds, up, down, options.profile)
    except ConfigError as error:
        parser.error(str(error))
    started = time.monotonic()
    reports: list[SeedReport] = []
    for report in _reports(options, campaign):
        reports.append(report)
        rounds = sum(one.rounds for one in reports)
        elapsed = time.monotonic() - started
        print(f"{len(reports)}/{len(options.seeds)} seeds, {rounds:,} rounds, {elapsed:.0f} s", file=sys.stderr)
        if report.failure is not None:
            print(f"seed {report.seed}: {report.failure.kind}: {report.failure.message}", file=sys.stderr)
            print(f"  again: {_again(options, report.seed)}", file=sys.stderr)
    summary = _summary(options, reports, time.monotonic() - started)
    print(json.dumps(summary))
    return 1 if summary["failing_seeds"] else 0


if __name__ == "__main__":
    sys.exit(main())
