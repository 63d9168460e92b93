# SPDX-License-Identifier: Apache-2.0
"""The campaign as a command: see docs/campaign.md."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from p4reduce.errors import P4ReduceError
from p4reduce.signals import termination_raises
from p4reduce.wire import PROFILES
from p4reduce_bmv2.campaign.campaign import Campaign, Options
from p4reduce_bmv2.campaign.churn import Churn, ChurnOptions
from p4reduce_bmv2.campaign.messages import Training
from p4reduce_bmv2.campaign.outcome import Outcome
from p4reduce_bmv2.campaign.plan import BY_NAME, FAULTS
from p4reduce_bmv2.campaign.report import Display, print_table
from p4reduce_bmv2.campaign.run import Limits

EXIT_BAD = 1
EXIT_USAGE = 2
TOOL = ["python", "tools/campaign_faults.py"]


def _parser() -> argparse.ArgumentParser:
    defaults, training, limits = Options(), Training(), Limits()
    parser = argparse.ArgumentParser(
        description="Training jobs through a real switch and controller, each with one fault at a random moment. "
        "Progress and the table go to stderr; the last line on stdout is JSON. Exit status 1: something was wrong.",
        epilog="Faults: " + "; ".join(f"{fault.name}: {fault.summary}" for fault in FAULTS),
    )
    add = parser.add_argument
    add("--seed", type=int, default=defaults.seed, metavar="N", help="decides all plans (default: %(default)s)")
    add("--runs", type=int, default=defaults.runs, metavar="N", help="default: %(default)s")
    add("--switch", choices=("embedded", "bmv2"), default=defaults.switch, help="default: %(default)s")
    add("--only", type=int, action="append", metavar="RUN", help="do only this run; may be repeated")
    add("--fault", choices=sorted(BY_NAME), action="append", metavar="NAME", help="only such faults; may be repeated")
    add("--double", action="store_true", help="let a second fault follow where the first is survived")
    add("--profile", choices=sorted(PROFILES), default=defaults.profile, help="default: %(default)s")
    add("--lease", type=float, default=defaults.lease, metavar="SECONDS", help="default: %(default)s")
    add("--ring", choices=("management", "data"), default=defaults.ring,
        help="links that gloo uses in network namespaces; data: through the switch (default: %(default)s)")  # fmt: skip
    add("--steps", type=int, default=training.steps, metavar="N", help="of each job (default: %(default)s)")
    add("--hold", type=int, default=training.hold, metavar="N", help="step that waits (default: %(default)s)")
    add("--limit", type=float, default=limits.run, metavar="SECONDS", help="of a run (default: %(default)s)")
    add("--logs", type=Path, metavar="DIR", help="for what bad runs leave (default: a temporary folder)")
    add("--churn", action="store_true", help="no faults: three jobs share the switch while a fourth comes and goes")
    add("--seconds", type=float, default=600.0, metavar="N", help="of the churn (default: %(default)g)")
    add("--keep", action="store_true", help="keep the logs of good runs as well")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign. Returns the exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.runs < 1 or given.lease <= 0 or given.limit <= 0:
        parser.error("--runs, --lease and --limit must be above 0")
    try:
        with termination_raises():
            return _churn(given) if given.churn else _campaign(given)
    except P4ReduceError as error:
        sys.stderr.write(f"campaign: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _churn(given: argparse.Namespace) -> int:
    options = ChurnOptions(given.seconds, given.seed, given.switch, given.profile, logs=given.logs)
    with Display(0, sys.stderr) as display:
        report = Churn(options, display.say).execute()
    print(json.dumps(report))
    return EXIT_BAD if report["problems"] else 0


def _campaign(given: argparse.Namespace) -> int:
    options = Options(
        seed=given.seed,
        runs=given.runs,
        switch=given.switch,
        faults=[fault for fault in FAULTS if given.fault is None or fault.name in given.fault],
        double=given.double,
        only=given.only or (),
        profile=given.profile,
        lease=given.lease,
        ring=given.ring,
        training=Training(steps=given.steps, hold=given.hold),
        limits=Limits(run=given.limit),
        logs=given.logs,
        keep=given.keep,
    )
    total = len(options.only) or options.runs
    with Display(total, sys.stderr) as display:

        def ended(outcome: Outcome, logs: Path) -> None:
            display.finish(outcome, replay(given, outcome.run), str(logs))

        campaign = Campaign(options, display.say, lambda run, text: display.begin(f"run {run}: {text}"), ended)
        report = campaign.execute()
    print_table(campaign.outcomes, [fault.name for fault in options.faults], sys.stderr)
    print(json.dumps(report))
    return EXIT_BAD if report["bad_runs"] else 0


def replay(given: argparse.Namespace, run: int) -> str:
    """The command that does one run again."""
    words = [*TOOL, "--seed", given.seed, "--only", run, "--switch", given.switch, "--profile", given.profile]
    words += ["--lease", given.lease, "--ring", given.ring, "--steps", given.steps, "--hold", given.hold]
    for name in given.fault or ():
        words += ["--fault", name]
    words += ["--double"] if given.double else []
    return shlex.join(str(word) for word in (*words, "--keep"))
