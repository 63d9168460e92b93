# SPDX-License-Identifier: Apache-2.0
"""Errors of the embedded switch's engine.

EngineError
├── ProgramError         the JSON is not a BMv2 program: broken, inconsistent, of another version (also a ValueError)
│   └── UnsupportedProgram   a valid program that uses nodes outside the supported subset; names every one
└── BadEntry             a table entry, group or cell that does not fit the program (also a ValueError)
    ├── TableFull        the table holds as many entries as its declared size
    ├── EntryExists      an entry with this key (and priority) is there already
    └── EntryMissing     there is no such entry, group or session
"""

from __future__ import annotations

from collections.abc import Iterable

from p4reduce.errors import P4ReduceError


class EngineError(P4ReduceError):
    """Root of what the engine raises. Packets never raise: they are forwarded or dropped."""


class ProgramError(EngineError, ValueError):
    """The program cannot be loaded; the text says where in the JSON and why."""


class UnsupportedProgram(ProgramError):
    """The program is valid but uses nodes that this switch does not execute.

    `nodes` lists each as "kind name", sorted, every one once, so that one attempt shows all that is missing.
    """

    def __init__(self, nodes: Iterable[str]) -> None:
        self.nodes = tuple(sorted(set(nodes)))
        super().__init__(f"the program uses {len(self.nodes)} unsupported node(s): " + "; ".join(self.nodes))


class BadEntry(EngineError, ValueError):
    """A table entry, group or cell that does not fit the program. Nothing was changed."""


class TableFull(BadEntry):
    """The table holds as many entries as its declared size."""


class EntryExists(BadEntry):
    """An entry with this key (and, where the table has priorities, this priority) is there already."""


class EntryMissing(BadEntry):
    """There is no such entry, group or session."""
