# SPDX-License-Identifier: Apache-2.0
"""The command `p4reduce`. Every subcommand lives in a module `cli_NAME` with two functions: `add` and what it runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from p4reduce import __version__, cli_bench, cli_decode, cli_demo, cli_lab
from p4reduce.errors import P4ReduceError

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    parser = argparse.ArgumentParser(
        prog="p4reduce", description="Data-parallel training with allreduce in a P4 switch."
    )
    parser.add_argument("--version", action="version", version=f"p4reduce {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    cli_demo.add(commands)
    cli_decode.add(commands)
    cli_lab.add(commands)
    cli_bench.add(commands)
    version = commands.add_parser("version", help="print the version")
    version.set_defaults(run=_version)
    return parser


def _version(options: argparse.Namespace) -> int:  # noqa: ARG001 (every command takes the options)
    print(f"p4reduce {__version__}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0 well, 1 failed, 2 wrong use, 130 interrupted."""
    options = build_parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()  # a reader that has gone shows here, not at exit, where nobody could catch it
    except P4ReduceError as error:
        print(f"p4reduce {options.command}: {error}", file=sys.stderr)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        print(f"p4reduce {options.command}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    return status
