# SPDX-License-Identifier: Apache-2.0
"""p4reduce-switch: the embedded switch as a process.

Exit codes: 0 stopped by SIGTERM or SIGINT (a second one ends it at once), 1 failed while running, 2 could not start.
"""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from p4reduce.errors import P4ReduceError, SwitchError
from p4reduce.signals import asked_to_stop
from p4reduce_bmv2.embedded.numerals import MAX_DEVICE_ID, decimal

if TYPE_CHECKING:
    from p4reduce_bmv2.embedded.switch import EmbeddedSwitch

log = logging.getLogger("p4reduce_bmv2.embedded.daemon")

EXIT_STOPPED = 0
EXIT_FAILED = 1
EXIT_NOT_STARTED = 2
_MAX_DESCRIPTOR = (1 << 31) - 1
_POLL_SECONDS = 0.5


class _Numbered(argparse.Action):
    """Collects PORT@TEXT into a dictionary and refuses a port that is given twice."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        digits, at, text = str(values).partition("@")
        number = decimal(digits)
        if not at or number is None or not text:
            parser.error(f"{option_string} {values}: must be PORT@{self.metavar_end}")
        chosen: dict[int, str] = getattr(namespace, self.dest)
        if number in namespace.interfaces or number in namespace.udp_ports:
            parser.error(f"{option_string} {values}: port {number} is given twice")
        chosen[number] = text

    @property
    def metavar_end(self) -> str:
        """What follows the @ in the usage line."""
        return str(self.metavar).partition("@")[2]


def _probability(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1)")
    return value


def _device_id(text: str) -> int:
    value = decimal(text)
    if value is None or value > MAX_DEVICE_ID:
        raise argparse.ArgumentTypeError(f"{text} is not 0..{MAX_DEVICE_ID} (P4Runtime has 64 bits for it)")
    return value


def build_parser() -> argparse.ArgumentParser:
    """Flags as those of simple_switch_grpc where they mean the same; its bare `--` is accepted and means nothing."""
    parser = argparse.ArgumentParser(
        prog="p4reduce-switch",
        description="A software switch that runs compiled BMv2 JSON behind a P4Runtime server.",
        epilog="It runs until SIGTERM or SIGINT; SIGUSR1 logs the counters of its ports. "
        "UDP ports need no privilege, interfaces (-i) need root.",
    )
    parser.add_argument(
        "-i",
        "--interface",
        dest="interfaces",
        metavar="PORT@IFACE",
        action=_Numbered,
        default={},
        help="attach a network interface as this port; may be repeated",
    )
    parser.add_argument(
        "--udp-port",
        dest="udp_ports",
        metavar="PORT@ADDR[:UDPPORT]",
        action=_Numbered,
        default={},
        help="make a loopback UDP endpoint this port; no UDPPORT or 0 means any free one; may be repeated",
    )
    parser.add_argument(
        "--grpc-server-addr", metavar="ADDR:PORT", default="127.0.0.1:9559", help="default: %(default)s"
    )
    parser.add_argument("--device-id", type=_device_id, metavar="N", default=0, help="P4Runtime device id (default: 0)")
    parser.add_argument("--cpu-port", type=int, metavar="PORT", help="port number of packet-in and packet-out")
    parser.add_argument(
        "--loss", type=_probability, metavar="P", default=0.0, help="drop this share of frames each way"
    )
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="seed of --loss (default: 0)")
    parser.add_argument(
        "-L",
        "--log-level",
        default="info",
        choices=("debug", "info", "warn", "error", "off"),
        help="what is logged on standard error (default: %(default)s)",
    )
    parser.add_argument(
        "--json-ready",
        nargs="?",
        const="-",
        metavar="FD|FILE",
        help="when ready, write one line of JSON (addresses, pid) to standard output, a descriptor or a file",
    )
    parser.add_argument("--no-p4", action="store_true", help="start without a program, as is the default without JSON")
    parser.add_argument("--p4info", type=Path, metavar="FILE", help="P4Info text of the program given as JSON")
    parser.add_argument("json", nargs="?", type=Path, metavar="JSON", help="compiled program to start with")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the switch until it is told to stop; returns the exit code."""
    parser = build_parser()
    arguments = parser.parse_args([word for word in (sys.argv[1:] if argv is None else argv) if word != "--"])
    if arguments.no_p4 and arguments.json:
        parser.error("--no-p4 and a JSON file exclude each other")
    if bool(arguments.json) != bool(arguments.p4info):
        parser.error("a JSON file and --p4info belong together")
    _set_up_logging(arguments.log_level)
    try:
        return _run(arguments)
    except P4ReduceError as error:
        sys.stderr.write(f"p4reduce-switch: {error}\n")
        return EXIT_NOT_STARTED


def _run(arguments: argparse.Namespace) -> int:
    # Here, because it needs the extra, whose absence is an error message and no traceback.
    from p4reduce_bmv2.embedded.switch import EmbeddedSwitch

    stop = threading.Event()
    failures: list[BaseException] = []

    def failed(error: BaseException) -> None:
        failures.append(error)
        stop.set()

    switch = EmbeddedSwitch(
        device_id=arguments.device_id,
        grpc_addr=arguments.grpc_server_addr,
        udp_ports=arguments.udp_ports,
        interfaces=arguments.interfaces,
        loss=arguments.loss,
        seed=arguments.seed,
        cpu_port=arguments.cpu_port,
        failed=failed,
    )
    with asked_to_stop(stop.set), switch, _log_on_request(switch):
        if arguments.json:
            switch.preload(arguments.json, arguments.p4info)
        if arguments.json_ready is not None:
            _announce(switch, arguments.json_ready, arguments.device_id)
        while not stop.wait(_POLL_SECONDS):
            pass
        _log_counters(switch)
    code = EXIT_STOPPED
    if failures:
        sys.stderr.write(f"p4reduce-switch: stopped by an error: {failures[0]!r}\n")
        code = EXIT_FAILED
    if switch.calls_linger:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


@contextmanager
def _log_on_request(switch: EmbeddedSwitch) -> Iterator[None]:
    """Log the counters at SIGUSR1 while the switch runs."""
    previous = signal.signal(signal.SIGUSR1, lambda *_: _log_counters(switch))
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, previous)


def _announce(switch: EmbeddedSwitch, target: str, device_id: int) -> None:
    """Write the line that says where the switch is."""
    ready = {
        "grpc": switch.grpc_address,
        "device_id": device_id,
        "udp_ports": {str(port): f"{host}:{number}" for port, (host, number) in sorted(switch.endpoints.items())},
        "pid": os.getpid(),
    }
    line = json.dumps(ready) + "\n"
    try:
        if target == "-":
            sys.stdout.write(line)
            sys.stdout.flush()
        elif (descriptor := decimal(target)) is not None:
            if descriptor > _MAX_DESCRIPTOR:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            with os.fdopen(descriptor, "w") as stream:
                stream.write(line)
        else:
            # Written aside and renamed, so that a reader never sees half a line.
            scratch = Path(f"{target}.{os.getpid()}")
            scratch.write_text(line)
            scratch.replace(target)
    except OSError as error:
        raise SwitchError(f"cannot write --json-ready {target}: {error.strerror}") from error


def _log_counters(switch: EmbeddedSwitch) -> None:
    """Log what every port carried and dropped."""
    stats = switch.stats()
    for port, counters in stats["ports"].items():
        log.info("port %d: %s", port, json.dumps(counters))
    log.info("drops outside of ports: %s", json.dumps(stats["drops"]))


def _set_up_logging(level: str) -> None:
    levels = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}
    logging.basicConfig(
        stream=sys.stderr,
        level=levels.get(level, logging.CRITICAL + 1),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


if __name__ == "__main__":
    sys.exit(main())
