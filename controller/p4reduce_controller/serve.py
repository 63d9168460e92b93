# SPDX-License-Identifier: Apache-2.0
"""`p4reduce-controller`: run a controller until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import fields, replace

from p4reduce import __version__
from p4reduce.core.config import RetransmissionPolicy
from p4reduce.errors import P4ReduceError
from p4reduce.wire import PROFILES
from p4reduce_controller.hosts import load
from p4reduce_controller.server import ControllerServer

EXIT_BAD_INPUT = 2
DEFAULT_LISTEN = "127.0.0.1:50051"
_LEVELS = ("debug", "info", "warning", "error")


def _parser() -> argparse.ArgumentParser:
    policy = {field.name: field.default for field in fields(RetransmissionPolicy)}
    parser = argparse.ArgumentParser(
        prog="p4reduce-controller", description="Controller of p4reduce: jobs, slot pools, liveness."
    )
    parser.add_argument("--version", action="version", version=f"p4reduce {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="run the controller until SIGTERM",
        description="Run the controller until SIGTERM. Exit code 2: hosts file, options, address or switch are wrong.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = serve.add_argument
    add("--hosts", required=True, metavar="FILE", help="TOML file: the switch, and which host is on which port")
    add("--listen", default=DEFAULT_LISTEN, metavar="ADDR:PORT", help="where workers connect; port 0: any")
    add("--switch", metavar="ADDR:PORT", help="P4Runtime address, instead of the hosts file's")
    add("--profile", choices=sorted(PROFILES), help="compiled P4 program, instead of the hosts file's")
    add("--pool-slots", type=int, default=64, metavar="N", help="slots of each pool; one pool a job")
    add("--state", metavar="FILE", help="SQLite file that remembers epochs; without it only the switch does")
    add("--lease", type=float, default=10.0, metavar="SECONDS", help="a worker silent for so long is lost")
    add(
        "--deadline",
        type=float,
        default=policy["deadline"],
        metavar="SECONDS",
        help="workers report a bucket as stalled after so long without any result",
    )
    add("--switch-deadline", type=float, default=5.0, metavar="SECONDS", help="for every call to the switch")
    add("--election-id", type=int, default=1, metavar="N", help="a higher one takes the switch over from another")
    add("--log-level", choices=_LEVELS, default="info", help="of messages to stderr")
    add("--ready-json", action="store_true", help="print one line of JSON once workers can join")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0 after a signal, 2 for bad input."""
    options = _parser().parse_args(argv)
    logging.basicConfig(
        level=options.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    stop = threading.Event()
    handlers = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return _serve(options, stop)
    except P4ReduceError as error:
        sys.stderr.write(f"p4reduce-controller: {error}\n")
        return EXIT_BAD_INPUT
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _serve(options: argparse.Namespace, stop: threading.Event) -> int:
    with _server(options) as server:
        if options.ready_json:
            sys.stdout.write(json.dumps(_ready(server)) + "\n")
            sys.stdout.flush()
        stop.wait()
    return 0


def _server(options: argparse.Namespace) -> ControllerServer:
    hosts = load(options.hosts)
    if options.switch is not None or options.profile is not None:
        switch = replace(
            hosts.switch,
            grpc=options.switch or hosts.switch.grpc,
            profile=options.profile or hosts.switch.profile,
        )
        hosts = replace(hosts, switch=switch)
    return ControllerServer(
        hosts,
        options.listen,
        pool_slots=options.pool_slots,
        policy=RetransmissionPolicy(deadline=options.deadline),
        lease_seconds=options.lease,
        state=options.state,
        switch_deadline=options.switch_deadline,
        election_id=options.election_id,
    )


def _ready(server: ControllerServer) -> dict[str, object]:
    return {
        "ready": True,
        "address": server.address,
        "switch": server.hosts.switch.grpc,
        "profile": server.hosts.switch.profile,
        "pid": os.getpid(),
    }


if __name__ == "__main__":
    sys.exit(main())
