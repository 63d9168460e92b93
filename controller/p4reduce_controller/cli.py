# SPDX-License-Identifier: Apache-2.0
"""`p4reducectl`: look at a controller, and tell it what to do.

Exit codes: 0 well; 1 refused, or what was asked for has failed (docs/operations.md says what that is for each command);
2 wrong usage; 3 controller unreachable; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import grpc

from p4reduce import __version__
from p4reduce.errors import ConfigError
from p4reduce_controller import cli_client, cli_operate, cli_top, cli_views
from p4reduce_controller.cli_client import Connection, explain

EXIT_REFUSED = cli_client.EXIT_REFUSED
EXIT_USAGE = 2
EXIT_UNREACHABLE = cli_client.EXIT_UNREACHABLE
EXIT_INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    common = argparse.ArgumentParser(add_help=False)
    cli_client.add_options(common)
    parser = argparse.ArgumentParser(
        prog="p4reducectl",
        description="Look at a p4reduce controller, and tell it what to do.",
        epilog="Exit codes: 0 well; 1 refused, or what was asked for has failed; 2 wrong usage; 3 no controller.",
    )
    parser.add_argument("--version", action="version", version=f"p4reducectl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    cli_views.add(commands, common)
    cli_operate.add(commands, common)
    cli_top.add(commands, common)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code."""
    options = build_parser().parse_args(argv)
    try:
        connection = Connection.of(options)
        if connection.exposed:
            _say(f"the token goes to {connection.address} in the clear: use --tls-ca")
        with connection.open() as client:
            try:
                status: int = options.run(client, options)
                sys.stdout.flush()  # a reader that has gone shows here, not at exit, where nobody could catch it
            except grpc.RpcError as error:
                text, status = explain(error, connection)
                _say(text)
        return status
    except ConfigError as error:
        _say(str(error))
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_REFUSED


def _say(text: str) -> None:
    print(f"p4reducectl: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
