# SPDX-License-Identifier: Apache-2.0
"""From a loaded program to the source of one Python function that runs a packet through it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from p4reduce_bmv2.embedded.analysis import analyse
from p4reduce_bmv2.embedded.emit import Names, Slot
from p4reduce_bmv2.embedded.gen_packet import PacketWriter
from p4reduce_bmv2.embedded.gen_parser import places
from p4reduce_bmv2.embedded.layout import Layout
from p4reduce_bmv2.embedded.program import Program


@dataclass(frozen=True, slots=True)
class Generated:
    """Source text of `make(...)`, which returns `run`, and what to give to it."""

    source: str
    bound: dict[str, Slot | Callable[..., Any]]
    passes: bool
    """run takes further arguments, because a packet may go round more than once."""


def generate(program: Program) -> Generated:
    """Write the function. UnsupportedProgram or ProgramError for what only shows here."""
    usage = analyse(program)
    names = Names()
    positions, header_places = places(program)
    layout = Layout(program, usage, names, header_places)
    writer = PacketWriter(program, usage, names, layout)
    writer.code.depth = 1
    writer.function(positions)
    body = writer.code.text()
    bound = names.bound
    source = f"def make({', '.join(bound)}):\n{body}    return run\n"
    return Generated(source, bound, writer.passes)
