# SPDX-License-Identifier: Apache-2.0
"""How a bench looks: progress while it runs, a table of rows, ratios, and what to make of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from p4reduce.bench.figures import Ratio, Row
from p4reduce.bench.options import show_size

if TYPE_CHECKING:
    from rich.console import Console

    from p4reduce.bench.run import Report

COLUMNS = (
    "n",
    "size",
    "count",
    "type",
    "path",
    "time us",
    "p99 us",
    "algbw MB/s",
    "busbw MB/s",
    "wire bytes",
    "line",
    "frames",
    "frames/s",
    "again",
    "wrong",
)
WIDTHS = (3, 8, 10, 8, 8, 12, 12, 11, 11, 12, 7, 9, 10, 8, 7)
LOSS_COLUMN, LOSS_WIDTH = "loss", 7


def cells(row: Row, *, with_loss: bool) -> list[str]:
    """One row as text."""
    forward = row.path == "forward"
    number = (
        str(row.workers),
        show_size(row.size),
        "-" if forward else f"{row.count}",
        "frame"
        if forward
        else "int32"
        if row.path == "scalar"
        else f"f32/{row.lane_bits}"
        if row.path == "switch"
        else "f32",
        row.path,
        f"{row.time * 1e6:.1f}",
        f"{row.time_p99 * 1e6:.1f}",
        f"{row.algbw / 1e6:.1f}",
        "-" if forward else f"{row.busbw / 1e6:.1f}",
        _maybe(row.wire_bytes, ".0f"),
        _maybe(row.line_share, ".1%"),
        _maybe(row.frames, ".0f"),
        _maybe(row.frame_rate, ".0f"),
        _maybe(row.retransmissions, "d"),
        str(row.wrong),
    )
    return [*number, f"{row.loss:.4g}"] if with_loss else [*number]


def _maybe(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def heading(*, with_loss: bool) -> str:
    """The first line of the plain table."""
    return _line([*COLUMNS, LOSS_COLUMN] if with_loss else COLUMNS)


def plain(row: Row, *, with_loss: bool) -> str:
    """A line of the plain table."""
    return _line(cells(row, with_loss=with_loss))


def _line(texts: Sequence[str]) -> str:
    widths = (*WIDTHS, LOSS_WIDTH)
    return " ".join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=False)).rstrip()


def ratio_table(found: Sequence[Ratio], *, with_loss: bool) -> list[list[str]]:
    """The ratios as rows of text, a heading first: one row for each thing measured, one column for each ratio."""
    if not found:
        return []
    names = list(dict.fromkeys(one.name for one in found))
    table = [["n", "size", "lanes", *(["loss"] if with_loss else []), *names]]
    groups: dict[tuple[int, int, int, float], dict[str, str]] = {}
    for one in found:
        groups.setdefault((one.workers, one.size, one.lane_bits, one.loss), {})[one.name] = f"{one.value:.3g}"
    for (workers, size, bits, loss), values in groups.items():
        start = [str(workers), show_size(size), str(bits), *([f"{loss:.4g}"] if with_loss else [])]
        table.append(start + [values.get(name, "-") for name in names])
    return table


def ratio_lines(found: Sequence[Ratio], *, with_loss: bool) -> list[str]:
    """The same, aligned."""
    table = ratio_table(found, with_loss=with_loss)
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))] if table else []
    return ["  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True)) for row in table]


def closing(report: Report) -> list[str]:
    """The last lines: machine, switch, and whether everything was right."""
    machine, switch = report.machine, report.switch
    where = (
        f"{machine['processor']}, {machine['cores']} cores, {machine['kernel']}, load {machine['load']} at the start"
    )
    what = f"{switch['kind']} {switch['version']}, profile {switch['profile']}"
    iterations = f"{report.options.iterations} iterations after {report.options.warmup} to warm up"
    verdict = "Every sum was exact." if not report.wrong else f"{report.wrong} ELEMENTS WERE WRONG. Please report this."
    return [where, f"{what}; {iterations}, seed {report.options.seed}", verdict]


class PlainWatcher:
    """Rows as they come, and notes, without a terminal."""

    def __init__(self, out: TextIO, errors: TextIO, *, with_loss: bool) -> None:
        self._out, self._errors, self._with_loss = out, errors, with_loss
        self._headed = False

    def __enter__(self) -> PlainWatcher:
        return self

    def __exit__(self, *details: object) -> None:
        return None

    def note(self, text: str) -> None:
        """A line beside the table."""
        print(f"note: {text}", file=self._errors, flush=True)

    def begin(self, name: str) -> None:
        """Says nothing."""

    def row(self, row: Row) -> None:
        """A line of the table."""
        if not self._headed:
            self._headed = True
            print(heading(with_loss=self._with_loss), file=self._out)
        print(plain(row, with_loss=self._with_loss), file=self._out, flush=True)

    def finish(self, report: Report) -> None:
        """What comes after the rows."""
        for line in [*ratio_lines(report.ratios, with_loss=self._with_loss), *closing(report)]:
            print(line, file=self._out)


class RichWatcher:
    """A progress bar on a terminal, the table when all is done."""

    def __init__(self, console: Console, progress: Console, steps: int, *, with_loss: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._console, self._with_loss = console, with_loss
        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=progress,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=steps)

    def __enter__(self) -> RichWatcher:
        self._progress.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._progress.stop()

    def note(self, text: str) -> None:
        """A line above the bar."""
        self._progress.console.print(f"note: {text}")

    def begin(self, name: str) -> None:
        """Names what is under way."""
        self._progress.update(self._task, description=name)

    def row(self, row: Row) -> None:  # noqa: ARG002 (the table is drawn when all are there)
        """One step further."""
        self._progress.advance(self._task)

    def finish(self, report: Report) -> None:
        """Table, ratios, and the rest; without frames where the terminal is too narrow for them."""
        columns = (*COLUMNS, LOSS_COLUMN)[: len(COLUMNS) + self._with_loss]
        rows = [cells(found, with_loss=self._with_loss) for found in report.rows]
        widths = [max(map(len, texts)) for texts in zip(columns, *rows, strict=True)]
        if sum(widths) + 3 * len(widths) + 1 > self._console.width:
            lines = [heading(with_loss=self._with_loss)]
            lines += [plain(found, with_loss=self._with_loss) for found in report.rows]
            lines += ratio_lines(report.ratios, with_loss=self._with_loss)
        else:
            self._table("", columns, rows, [bool(found.wrong) for found in report.rows])
            ratios = ratio_table(report.ratios, with_loss=self._with_loss)
            if ratios:
                self._table("ratios within this run", ratios[0], ratios[1:], [False] * len(ratios))
            lines = []
        for line in [*lines, *closing(report)]:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], marked: Sequence[bool]) -> None:
        from rich.table import Table

        table = Table(title=title or None, title_justify="left")
        for name in columns:
            table.add_column(name, justify="left" if name in ("type", "path") else "right", no_wrap=True)
        for texts, mark in zip(rows, marked, strict=False):
            table.add_row(*texts, style="bold red" if mark else None)
        self._console.print(table)
