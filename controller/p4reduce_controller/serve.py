# SPDX-License-Identifier: Apache-2.0
"""`p4reduce-controller`: run a controller until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields, replace

from p4reduce import __version__
from p4reduce.core.config import RetransmissionPolicy
from p4reduce.errors import P4ReduceError
from p4reduce.signals import asked_to_stop
from p4reduce.wire import PROFILES
from p4reduce_controller import logs, messages
from p4reduce_controller.auth import Tls
from p4reduce_controller.hosts import load
from p4reduce_controller.server import ControllerServer

EXIT_BAD_INPUT = 2
EXIT_ENDED = 3
DEFAULT_LISTEN = "127.0.0.1:50051"
_LEVELS = ("debug", "info", "warning", "error")
_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.25
_EPILOG = """
exit codes: 0 after a signal (a second one ends it at once); 2 hosts file, options, state file, address or switch are
wrong; 3 another controller has taken this one's place, or its state file could not be written.

two controllers for one switch: start both with --standby. One of them becomes the switch's primary (P4Runtime
arbitration) and serves; the other waits, with neither address nor state file open, and takes over when the first
one's session with the switch ends. A controller that finds another one in its place stops acting at once and, with
--standby, waits again. To let running jobs go on without noticing, both need the same state file and the same
--listen address, so they run on one machine, or share both. A machine that vanishes without closing its connections
keeps its place until the switch notices: then take over by hand with a higher --election-id.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="p4reduce-controller", description="Controller of p4reduce: jobs, slot pools, liveness, fallback."
    )
    parser.add_argument("--version", action="version", version=f"p4reduce {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="run the controller until SIGTERM",
        description="Run the controller until SIGTERM.",
        epilog=_EPILOG,
        formatter_class=_Help,
    )
    _add_options(serve)
    _add_security(serve)
    return parser


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and the epilog as it is written."""


def _add_options(serve: argparse.ArgumentParser) -> None:
    policy = {field.name: field.default for field in fields(RetransmissionPolicy)}
    add = serve.add_argument
    add("--hosts", required=True, metavar="FILE", help="TOML file: the switch, and which host is on which port")
    add("--listen", default=DEFAULT_LISTEN, metavar="ADDR:PORT", help="where workers connect; port 0: any")
    add("--switch", metavar="ADDR:PORT", help="P4Runtime address, instead of the hosts file's")
    add("--profile", choices=sorted(PROFILES), help="compiled P4 program, instead of the hosts file's")
    add(
        "--pool-slots",
        type=int,
        default=64,
        metavar="N",
        help="slots that a job gets which does not say how many it wants",
    )
    add(
        "--state",
        metavar="FILE",
        help="SQLite file that remembers epochs, running jobs, drains and changed default policies: with it a "
        "controller that is started again takes up its jobs where they are; without it only the switch remembers",
    )
    add("--lease", type=float, default=10.0, metavar="SECONDS", help="a worker silent for so long is lost")
    add(
        "--deadline",
        type=float,
        default=policy["deadline"],
        metavar="SECONDS",
        help="workers report a bucket as stalled after so long without any result",
    )
    add(
        "--policy",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"another part of the retransmission policy: {', '.join(messages.POLICY_NAMES)}; may be repeated",
    )
    add("--switch-deadline", type=float, default=5.0, metavar="SECONDS", help="for every call to the switch")
    add("--standby", action="store_true", help="wait while another controller is the switch's primary: see below")
    add(
        "--election-id",
        type=int,
        metavar="N",
        help="take the switch over from a controller with a lower one (default: chosen so that none is pushed out)",
    )
    add("--metrics", metavar="HOST:PORT", help="export metrics for Prometheus; needs the package prometheus_client")
    add("--log-level", choices=_LEVELS, default="info", help="of messages to stderr")
    add("--log-format", choices=logs.FORMATS, default="text", help="json: one object a line")
    add(
        "--ready-json",
        action="store_true",
        help="print one line of JSON once workers can join; with --standby also one when it begins to wait",
    )


def _add_security(serve: argparse.ArgumentParser) -> None:
    add = serve.add_argument_group("security").add_argument
    add("--tls-cert", metavar="FILE", help="PEM certificate (chain) of this controller; with --tls-key")
    add("--tls-key", metavar="FILE", help="its private key, PEM, without a passphrase")
    add("--tls-client-ca", metavar="FILE", help="clients must show a certificate of this authority (mutual TLS)")
    add("--tokens", metavar="FILE", help="TOML file: the operator's token, and which token may join which jobs")
    add(
        "--insecure",
        action="store_true",
        help="listen beyond this machine although TLS or tokens are missing: whoever reaches the address may join, "
        "and drain the switch",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0 after a signal, 2 for bad input, 3 when it had to end by itself."""
    options = _parser().parse_args(argv)
    logs.set_up(options.log_format, options.log_level, sys.stderr)
    stop = threading.Event()
    with asked_to_stop(stop.set):
        try:
            return _run(options, stop)
        except P4ReduceError as error:
            if stop.is_set():
                return 0
            sys.stderr.write(f"p4reduce-controller: {error}\n")
            return EXIT_BAD_INPUT


def _run(options: argparse.Namespace, stop: threading.Event) -> int:
    while True:
        server = _server(options)
        _serve(server, options, stop)
        if not server.ended.is_set() or stop.is_set():
            return 0
        if not (server.demoted and options.standby):
            sys.stderr.write(f"p4reduce-controller: {server.why}\n")
            return EXIT_ENDED
        _LOG.warning("standing by again: %s", server.why)


def _serve(server: ControllerServer, options: argparse.Namespace, stop: threading.Event) -> None:
    with ExitStack() as stack:
        stack.callback(server.stop)
        # `start` may wait for ever, as a standby: a signal must end that.
        over = threading.Event()
        stack.callback(over.set)
        threading.Thread(target=_relay, args=(stop, over, server), name="p4reduce-signals", daemon=True).start()
        server.start()
        if options.metrics is not None:
            from p4reduce_controller.metrics import start_metrics

            stack.callback(start_metrics(options.metrics, server.coordinator).stop)
        _say(options, _ready(server))
        while not stop.is_set() and not server.ended.wait(_POLL_SECONDS):
            pass


def _relay(stop: threading.Event, over: threading.Event, server: ControllerServer) -> None:
    while not stop.wait(_POLL_SECONDS):
        if over.is_set():
            return
    server.interrupt()


def _server(options: argparse.Namespace) -> ControllerServer:
    hosts = load(options.hosts)
    if options.switch is not None or options.profile is not None:
        switch = replace(
            hosts.switch, grpc=options.switch or hosts.switch.grpc, profile=options.profile or hosts.switch.profile
        )
        hosts = replace(hosts, switch=switch)
    return ControllerServer(
        hosts,
        options.listen,
        pool_slots=options.pool_slots,
        policy=messages.policy_of_options(RetransmissionPolicy(deadline=options.deadline), options.policy),
        lease_seconds=options.lease,
        state=options.state,
        switch_deadline=options.switch_deadline,
        election_id=options.election_id,
        standby=options.standby,
        on_standby=lambda: _say(options, {"ready": False, "standby": True, "pid": os.getpid()}),
        tls=Tls.of(options.tls_cert, options.tls_key, options.tls_client_ca),
        tokens=options.tokens,
        insecure=options.insecure,
    )


def _ready(server: ControllerServer) -> dict[str, object]:
    return {
        "ready": True,
        "address": server.address,
        "switch": server.hosts.switch.grpc,
        "profile": server.hosts.switch.profile,
        "pid": os.getpid(),
    }


def _say(options: argparse.Namespace, line: dict[str, object]) -> None:
    if options.ready_json:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
