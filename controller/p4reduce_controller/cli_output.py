# SPDX-License-Identifier: Apache-2.0
"""What all commands of `p4reducectl` share about output: plain when piped, safe whatever a name holds."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from p4reduce.config import MAX_JOB_NAME
from p4reduce.errors import ConfigError

PIPE_WIDTH = 1000
"""Columns of output that is no terminal: one line for each row, whatever its length."""
STYLES = {
    "switch": "green",
    "ring": "yellow",
    "reporting": "green",
    "joining": "yellow",
    "joined": "yellow",
    "cutting": "yellow",
    "preparing": "cyan",
    "trying": "cyan",
    "holding": "cyan",
    "leaving": "cyan",
    "left": "cyan",
    "failed": "bold red",
    "ended": "yellow",
    "lost": "bold red",
    "fenced": "red",
}


class _Trimmed:
    """Standard output without the blanks that fill a table's last column."""

    def write(self, text: str) -> int:
        return sys.stdout.write(re.sub(" +(?=\n)", "", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


def make_console() -> Console:
    """Where tables go: as wide as the terminal; without colours and never folded when piped."""
    if sys.stdout.isatty():
        return Console(highlight=False, markup=False, emoji=False)
    return Console(file=cast(TextIO, _Trimmed()), width=PIPE_WIDTH, highlight=False, markup=False, emoji=False)


def print_json(document: Any) -> None:
    """For programs."""
    print(json.dumps(document, indent=2))


def safe(text: str) -> str:
    """The text with everything escaped that would garble a terminal."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in text
    )


def state(name: str) -> Text:
    """A state in its colour."""
    return Text(safe(name), style=STYLES.get(name, ""))


def grid(*columns: str, folds: str = "", gap: int = 2) -> Table:
    """A table without lines; columns whose name starts with ">" stand to the right.

    Where the terminal is too narrow the column `folds` is folded; the others never are.
    """
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for column in columns:
        name = column.removeprefix(">")
        table.add_column(
            name,
            justify="right" if column.startswith(">") else "left",
            no_wrap=name != folds,
            overflow="fold" if name == folds else "crop",
            min_width=None if name == folds else len(name),
        )
    return table


def note(console: Console, head: str, text: str, style: str = "") -> None:
    """A line of its own for what may be long, indented where it folds."""
    line = Text.assemble((f"{safe(head)}: ", "bold"), (safe(text), style))
    console.print(Padding(line, (0, 0, 0, 2)) if console.width < PIPE_WIDTH else line, soft_wrap=False)


def aside(console: Console, text: str) -> None:
    """A short line that belongs to notes: indented where they are."""
    console.print(f"{'  ' if console.width < PIPE_WIDTH else ''}{safe(text)}")


def slots_text(base: int, size: int) -> str:
    """A range of slots, empty without any."""
    return f"{base}..{base + size - 1}" if size else ""


def digits(value: float) -> str:
    """A number below 1000 with three digits."""
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


def milliseconds(seconds: float) -> str:
    """A round-trip time; empty before the first sample."""
    return f"{digits(seconds * 1e3)} ms" if seconds > 0 else ""


def ago(seconds: float) -> str:
    """How long ago something was, in the largest unit that fits."""
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def counts(values: dict[str, int]) -> str:
    """Named numbers in one line."""
    return ", ".join(f"{safe(name)} {value}" for name, value in values.items())


def names(values: Iterable[str]) -> str:
    """Names in one line."""
    return ", ".join(safe(value) for value in values)


def job_name(text: str) -> str:
    """A job's name as the command line gave it. ConfigError for one that no job can have."""
    if not text.strip():
        raise ConfigError("the job's name is empty: `p4reducectl jobs` lists the names")
    if len(text) > MAX_JOB_NAME:
        raise ConfigError(f"the job's name has {len(text)} characters, and none has more than {MAX_JOB_NAME}")
    if not text.isprintable():
        raise ConfigError(f"the job's name '{safe(text)}' has control characters, and no job's name has")
    return text
