# SPDX-License-Identifier: Apache-2.0
"""`p4reduce bench`: how fast the switch path is, next to baselines on the same switch."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from p4reduce.bench.options import BASELINES, BenchOptions, parse_list, parse_sizes, parse_whole
from p4reduce.documents import write_json
from p4reduce.signals import termination_raises

if TYPE_CHECKING:
    from p4reduce.bench.show import PlainWatcher, RichWatcher

_PROFILES = ("w34", "w5")
_EXAMPLES = """\
examples:
  p4reduce bench --workers 2,4,8 --sizes 64K:16M --baseline gloo,forward,scalar
  p4reduce bench --workers 4 --sizes 16M --rate 100mbit --baseline gloo
  p4reduce bench --sizes 4M --losses 0,0.01%,0.1%,1% --json bench.json
"""


def add(commands: Any) -> None:
    """Add the subcommand to argparse's subparsers."""
    parser = commands.add_parser(
        "bench",
        help="measure allreduce through the switch, and baselines on the same switch",
        description="Makes a lab for every number of workers, measures allreduce through the switch for every size, "
        "checks every result against the exact sum, and removes the lab. Baselines are measured on the same switch in "
        "the same run. Without root it uses an embedded switch on loopback.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workers", default="2", metavar="N,N", help="numbers of workers (default %(default)s)")
    parser.add_argument(
        "--sizes",
        default="64K:16M",
        metavar="SIZES",
        help="bytes of float32 of each worker: a list of sizes and ranges (default %(default)s)",
    )
    parser.add_argument("--factor", type=int, default=2, metavar="F", help="step of a range (default %(default)s)")
    parser.add_argument(
        "--switch",
        choices=("auto", "bmv2", "embedded"),
        default="auto",
        help="bmv2: simple_switch_grpc, needs root; embedded: Python; auto: bmv2 where it is possible (default)",
    )
    parser.add_argument("--profile", choices=_PROFILES, default="w34", help="frame size (default %(default)s)")
    parser.add_argument("--rate", metavar="RATE", help="of every link, each way, as 100mbit; default: not limited")
    parser.add_argument("--delay", metavar="TIME", help="of every link, each way, as 1ms or 250us")
    losses = parser.add_mutually_exclusive_group()
    losses.add_argument("--loss", metavar="SHARE", help="share of frames that every link loses, each way, as 0.1%%")
    losses.add_argument("--losses", metavar="SHARES", help="several of them, and ratios to none: 0,0.01%%,0.1%%,1%%")
    parser.add_argument("--lanes", default="32", metavar="BITS", help="lane widths, of 32,16,8 (default %(default)s)")
    parser.add_argument(
        "--baseline", default="", metavar="NAMES", help=f"of {','.join(BASELINES)}, or all (default: none)"
    )
    parser.add_argument("--iterations", type=int, default=20, metavar="N", help="default %(default)s")
    parser.add_argument("--warmup", type=int, default=5, metavar="N", help="iterations before (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of inputs and losses (default %(default)s)")
    parser.add_argument(
        "--deadline", type=float, default=120.0, metavar="SECONDS", help="for one measurement (default %(default)g)"
    )
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write JSON to FILE, or to standard output (-, default)"
    )
    parser.set_defaults(run=run)


def options_of(options: argparse.Namespace) -> BenchOptions:
    """The checked settings. UsageError."""
    from p4reduce_bmv2.lab_shape import parse_probability, parse_rate, parse_time

    losses = options.losses if options.losses is not None else options.loss
    if options.baseline == "all":
        options.baseline = ",".join(BASELINES)
    return BenchOptions(
        workers=parse_list(options.workers, parse_whole, "numbers of workers"),
        sizes=parse_sizes(options.sizes, options.factor),
        switch=_switch(options.switch),
        profile=options.profile,
        rate=parse_rate(options.rate) if options.rate else 0.0,
        delay=parse_time(options.delay) if options.delay else 0.0,
        losses=parse_list(losses, parse_probability, "losses") if losses is not None else (0.0,),
        lane_bits=parse_list(options.lanes, parse_whole, "lane widths"),
        baselines=parse_list(options.baseline, str, "baselines") if options.baseline else (),
        iterations=options.iterations,
        warmup=options.warmup,
        seed=options.seed,
        deadline=options.deadline,
    )


def _switch(asked: str) -> str:
    from p4reduce_bmv2.switch import find_bmv2

    if asked != "auto":
        return asked
    return "bmv2" if os.geteuid() == 0 and find_bmv2() is not None else "embedded"


def run(options: argparse.Namespace) -> int:
    """Measure and show. 1 when a result was wrong."""
    from p4reduce.bench.run import run_bench
    from p4reduce.cli_demo import check_writable

    bench = options_of(options)
    if options.json is not None:
        check_writable(options.json)
    with termination_raises():
        # The watcher ends first: an error is printed below the bar, not over it.
        with _watcher(bench, options.json) as watcher:
            report = run_bench(bench, watcher)
        watcher.finish(report)
    if options.json is not None:
        write_json(report.as_dict(), options.json)
    return 1 if report.wrong else 0


def _watcher(bench: BenchOptions, target: str | None) -> PlainWatcher | RichWatcher:
    """The table goes where the JSON does not."""
    from p4reduce.bench.run import steps
    from p4reduce.bench.show import PlainWatcher, RichWatcher

    out = sys.stderr if target == "-" else sys.stdout
    with_loss = any(bench.losses)
    if out.isatty():
        from rich.console import Console

        return RichWatcher(Console(file=out, highlight=False), Console(stderr=True), steps(bench), with_loss=with_loss)
    return PlainWatcher(out, sys.stderr, with_loss=with_loss)
