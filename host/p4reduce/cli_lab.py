# SPDX-License-Identifier: Apache-2.0
"""`p4reduce lab`: network namespaces around a switch, to run workers in as on hosts of their own. Needs root."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from p4reduce.signals import termination_raises
from p4reduce.wire import PROFILES

if TYPE_CHECKING:
    from p4reduce_bmv2.lab import LabOptions

DEFAULT_NAME = "lab"
_EXAMPLES = """\
examples:
  p4reduce lab up --workers 4 --rate 100mbit --delay 1ms --loss 0.1%
  p4reduce lab run -- python examples/ddp_four_lines.py
  p4reduce lab exec 0 -- ip addr
  p4reduce lab down
"""


def add(commands: Any) -> None:
    """Add the subcommand to argparse's subparsers."""
    parser = commands.add_parser(
        "lab",
        help="make a network of namespaces around a switch, and run workers in it",
        description="A lab is a switch, a controller and a network namespace for every worker, joined by links of the "
        "rate, delay and loss that you ask for. It stays until it is taken down. Needs root.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_up(actions)
    _add(actions, "status", "how the lab is; every port is asked through the data plane", _status, as_json=True)
    execute = _add(actions, "exec", "run a command in one place of the lab", _exec)
    execute.add_argument("rank", metavar="RANK", help="a worker's rank, or `switch`")
    execute.add_argument("rest", nargs=argparse.REMAINDER, metavar="-- CMD")
    run = _add(actions, "run", "run a command once per worker, with RANK, WORLD_SIZE and the like set", _run)
    run.add_argument("--timeout", type=float, metavar="SECONDS", help="end it after so long")
    run.add_argument("rest", nargs=argparse.REMAINDER, metavar="-- CMD")
    _add(actions, "restart", "restart the switch in place, also one that has died", _restart, as_json=True)
    _add(actions, "down", "end and remove everything of the lab", _down, as_json=True)


def _add(actions: Any, name: str, text: str, function: Any, *, as_json: bool = False) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("--name", default=DEFAULT_NAME, help="which lab (default: %(default)s)")
    if as_json:
        parser.add_argument("--json", action="store_true", help="answer in JSON")
    parser.set_defaults(run=function)
    return parser


def _add_up(actions: Any) -> None:
    up = _add(actions, "up", "make a lab and leave it running", _up, as_json=True)
    up.add_argument("--workers", type=int, default=2, metavar="N", help="default %(default)s")
    up.add_argument(
        "--switch",
        choices=("auto", "bmv2", "embedded"),
        default="auto",
        help="bmv2: simple_switch_grpc; embedded: Python; auto: bmv2 where it is installed (default)",
    )
    up.add_argument("--profile", choices=sorted(PROFILES), default="w34", help="frame size (default %(default)s)")
    up.add_argument("--rate", metavar="RATE", help="of every link, each way, as 100mbit; default: not limited")
    up.add_argument("--delay", metavar="TIME", help="of every link, each way, as 1ms or 250us")
    for name, text in (
        ("loss", "share of frames that every link loses, each way, as 0.1%% or 0.001"),
        ("duplicate", "share of frames that arrive twice"),
        ("reorder", "share of frames that overtake the delayed ones; needs --delay"),
    ):
        up.add_argument(f"--{name}", metavar="SHARE", help=text)
    up.add_argument(
        "--deadline",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="workers give up a bucket of which nothing comes for so long (default %(default)g)",
    )
    up.add_argument("--seed", type=int, default=0, metavar="N", help="of losses, where netem does not draw them")
    up.add_argument(
        "--impairer",
        choices=("auto", "netem", "wire"),
        default="auto",
        help="who delays and loses frames: the kernel's netem, or a program of the lab; auto: netem if there is one",
    )


def _options(options: argparse.Namespace) -> LabOptions:
    from p4reduce_bmv2.lab import LabOptions
    from p4reduce_bmv2.lab_shape import Shape, parse_probability, parse_rate, parse_time
    from p4reduce_bmv2.switch import Kind, find_bmv2

    parsers = {"rate": parse_rate, "delay": parse_time}
    given = {name: getattr(options, name) for name in ("rate", "delay", "loss", "duplicate", "reorder")}
    shape = Shape(**{name: parsers.get(name, parse_probability)(text) for name, text in given.items() if text})
    kind: Kind = "embedded" if options.switch == "embedded" or _absent(options.switch, find_bmv2()) else "bmv2"
    return LabOptions(
        workers=options.workers,
        switch=kind,
        profile=options.profile,
        shape=shape,
        seed=options.seed,
        impairer=options.impairer,
        deadline=options.deadline,
    )


def _absent(asked: str, binary: str | None) -> bool:
    return asked == "auto" and binary is None


def _up(options: argparse.Namespace) -> int:
    from p4reduce_bmv2.lab import Lab

    lab = Lab(options.name)
    with termination_raises():
        made = lab.up(_options(options))
    return _show(lab.status(), options, "is up" if made else "is up already")


def _status(options: argparse.Namespace) -> int:
    import os

    from p4reduce_bmv2.lab import Lab

    return _show(Lab(options.name).status(probe=os.geteuid() == 0), options, "")


def _restart(options: argparse.Namespace) -> int:
    from p4reduce_bmv2.lab import Lab

    lab = Lab(options.name)
    with termination_raises():
        lab.restart()
    return _show(lab.status(), options, "has its switch back")


def _exec(options: argparse.Namespace) -> int:
    from p4reduce_bmv2.lab import Lab
    from p4reduce_bmv2.lab_run import execute

    execute(Lab(options.name), options.rank, _command(options))
    return 0


def _run(options: argparse.Namespace) -> int:
    from p4reduce_bmv2.lab import Lab
    from p4reduce_bmv2.lab_run import run

    with termination_raises():
        return run(Lab(options.name), _command(options), timeout=options.timeout)


def _down(options: argparse.Namespace) -> int:
    from p4reduce_bmv2.lab import Lab

    removed = Lab(options.name).down()
    if options.json:
        print(json.dumps({"name": options.name, "removed": removed}))
    else:
        print(f"lab {options.name} {'is removed' if removed else 'was not there'}")
    return 0


def _command(options: argparse.Namespace) -> list[str]:
    words: list[str] = options.rest
    return words[1:] if words[:1] == ["--"] else words


def _show(report: dict[str, Any], options: argparse.Namespace, headline: str) -> int:
    """Print a status. 1 when something is wrong with the lab."""
    if options.json:
        print(json.dumps(report))
        return 1 if report["problems"] else 0
    from p4reduce_bmv2.lab import readable

    made = report["options"]
    what = f"{made['switch']} switch, profile {made['profile']}, {made['workers']} workers"
    print(f"lab {report['name']} {headline}: {what}" if headline else f"lab {report['name']}: {what}")
    shape = ", ".join(f"{name} {readable(name, value)}" for name, value in made["shape"].items() if value)
    if shape:
        print(f"links: {shape} (each way; faults by {report['impairer']})")
    for name, process in report["processes"].items():
        print(f"{name}: pid {process['pid']}{'' if process['alive'] else ', ENDED'}")
    print(f"controller: {report['controller']}, from inside the lab; logs in {report['folder']}")
    for worker in report["workers"]:
        answer = {True: "answers", False: "DOES NOT ANSWER", None: "not asked"}[worker.get("answers")]
        print(f"rank {worker['rank']}: {worker['ip']} in namespace {worker['netns']}, port {worker['port']} {answer}")
        if worker.get("link"):
            print(f"  frames lost {', '.join(f'{way}: {_lost(link)}' for way, link in worker['link'].items())}")
    for problem in report["problems"]:
        print(f"p4reduce lab: {problem}", file=sys.stderr)
    return 1 if report["problems"] else 0


def _lost(link: dict[str, Any]) -> str:
    """What one direction of a link lost, by who dropped it; 0 when nobody did."""
    drops = {kind: row["drops"] for kind, row in link["tc"].items()}
    wire = link.get("wire", {})
    drops |= {"wire": wire.get("lost", 0), "full queues": wire.get("overflow", 0)}
    return " + ".join(f"{count} ({who})" for who, count in drops.items() if count) or "0"
