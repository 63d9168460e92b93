# SPDX-License-Identifier: Apache-2.0
"""`p4reduce decode`: the frames of a capture file."""

from __future__ import annotations

import argparse
import json
from typing import Any

from p4reduce.errors import UsageError


def add(commands: Any) -> None:
    """Add the subcommand to argparse's subparsers."""
    parser = commands.add_parser("decode", help="show the frames in a capture file")
    parser.add_argument("file", help="a pcap or pcapng file, as tcpdump, the switch or a simulation writes them")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--brief", action="store_true", help="one line per frame")
    how.add_argument("--json", action="store_true", help="one JSON object per frame and line")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print every frame of the file."""
    from p4reduce.decode import decode_pcap, format_frame

    try:
        for frame in decode_pcap(options.file):
            if options.json:
                print(json.dumps(frame))
            else:
                lines = format_frame(frame)
                print("\n".join(lines[:1] if options.brief else lines))
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(f"cannot read {options.file}: {error.strerror or error}") from None
    return 0
