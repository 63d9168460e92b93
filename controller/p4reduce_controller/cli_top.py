# SPDX-License-Identifier: Apache-2.0
"""`p4reducectl top`: the jobs, live. A thread reads the Watch stream; the main thread draws and listens to the keys."""

from __future__ import annotations

import argparse
import json
import os
import queue
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from p4reduce.errors import ConfigError
from p4reduce.proto import controller_pb2 as pb
from p4reduce_controller import cli_documents as documents
from p4reduce_controller.cli_client import EXIT_UNREACHABLE, PAUSE_SECONDS, Client, explain
from p4reduce_controller.cli_output import digits, grid, job_name, make_console, milliseconds, safe, state
from p4reduce_controller.cli_rates import Document, summary
from p4reduce_controller.cli_views import switch_line

MIN_INTERVAL = 0.1
MAX_INTERVAL = 3600.0
RETRY_SECONDS = 1.0
_COLOURS = ("green", "blue", "magenta", "cyan", "yellow", "bright_red")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add this command to the parser."""
    text = "the jobs and their rates, live; q ends it"
    command = commands.add_parser("top", parents=[common], help=text, description=text)
    command.set_defaults(run=run_top)
    command.add_argument("job", nargs="?", help="only this job")
    command.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="default: %(default)s")
    command.add_argument("--once", action="store_true", help="print the rates of one interval and end")


def run_top(client: Client, options: argparse.Namespace) -> int:
    """`top`. With `--json` one line for each interval."""
    if not MIN_INTERVAL <= options.interval <= MAX_INTERVAL:
        raise ConfigError(
            f"--interval {options.interval} makes no sense: write seconds from {MIN_INTERVAL} to {MAX_INTERVAL:.0f}"
        )
    live = not options.once and not options.json
    if live and not sys.stdout.isatty():
        raise ConfigError("top draws on a terminal, and the output is none: use --once or --json")
    job = "" if options.job is None else job_name(options.job)
    with Watcher(client, job, options.interval, again=live) as watcher:
        if live:
            return _draw(watcher, make_console(), sys.stdin.fileno() if sys.stdin.isatty() else None)
        return _print(watcher, options.json, options.once)


class Watcher:
    """Reads the Watch stream in a thread, so that a key is heard while the controller is silent."""

    def __init__(self, client: Client, job: str, interval: float, *, again: bool) -> None:
        """`again`: a stream that breaks is opened again."""
        self.client = client
        self._request = pb.WatchRequest(job=job, interval_seconds=interval)
        self._patience = interval + client.connection.timeout
        self._again = again
        self._items: queue.SimpleQueue[Document | grpc.RpcError | None] = queue.SimpleQueue()
        self._reader, self._writer = os.pipe()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._call: Any = None
        self._thread = threading.Thread(target=self._read, name="p4reducectl-watch", daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._stopping.set()
            if self._call is not None:
                self._call.cancel()
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def fileno(self) -> int:
        """Readable when there is something to `take`."""
        return self._reader

    def take(self) -> Document | grpc.RpcError | None:
        """The next status document, or why the stream ended (None: the controller ended it). Blocks until then."""
        os.read(self._reader, 1)
        return self._items.get()

    def first(self) -> Document | grpc.RpcError | None:
        """As `take`, but TimeoutError when nothing comes in good time."""
        if not select.select([self._reader], [], [], self._patience)[0]:
            raise TimeoutError
        return self.take()

    def _post(self, item: Document | grpc.RpcError | None) -> None:
        self._items.put(item)
        os.write(self._writer, b"!")

    def _read(self) -> None:
        timeout = self.client.connection.timeout
        patience = time.monotonic() + timeout
        while True:
            with self._lock:
                if self._stopping.is_set():
                    return
                self._call = self.client.stream("Watch", self._request)
            try:
                for reply in self._call:
                    self._post(documents.status(reply))
                    patience = time.monotonic() + timeout
                self._post(None)
            except grpc.RpcError as error:
                if self._stopping.is_set():
                    return
                if self.client.passes(error) and time.monotonic() < patience:
                    self._stopping.wait(PAUSE_SECONDS)
                    continue
                self._post(error)
            if not self._again or self._stopping.wait(RETRY_SECONDS):
                return


def _print(watcher: Watcher, as_json: bool, once: bool) -> int:
    """For scripts. `once` needs two documents: rates are differences."""
    before: Document | None = None
    while True:
        try:
            item = watcher.first()
        except TimeoutError:
            return _give_up(f"no answer from {watcher.client.connection.address} in time")
        if isinstance(item, grpc.RpcError):
            raise item
        if item is None:
            return _give_up(f"the controller at {watcher.client.connection.address} has ended the stream")
        shown = summary(item, before)
        if once and before is None:
            before = item
            continue
        if as_json:
            print(json.dumps(shown), flush=True)
        else:
            console = make_console()
            console.print(table(shown, width=console.width))
        if once:
            return 0
        before = item


def _give_up(text: str) -> int:
    print(f"p4reducectl: {text}", file=sys.stderr)
    return EXIT_UNREACHABLE


def _draw(watcher: Watcher, console: Console, keys: int | None) -> int:
    """Until q or Ctrl-C. A controller that goes away later is waited for."""
    try:
        first = watcher.first()
    except TimeoutError:
        return _give_up(f"no answer from {watcher.client.connection.address} in time")
    if isinstance(first, grpc.RpcError):
        raise first
    shown = None if first is None else summary(first, None)
    before, trouble = first, ""
    with _single_keys(keys), Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(_screen(shown, trouble, console.width), refresh=True)
                sources = [watcher.fileno(), *([] if keys is None else [keys])]
                ready, _, _ = select.select(sources, [], [])
                if keys is not None and keys in ready and os.read(keys, 1) in (b"q", b"Q", b"\x03", b""):
                    return 0
                if watcher.fileno() not in ready:
                    continue
                item = watcher.take()
                if isinstance(item, dict):
                    shown, before, trouble = summary(item, before), item, ""
                elif item is not None:
                    trouble = explain(item, watcher.client.connection)[0]
                else:
                    trouble = "the controller has ended the stream"
        except KeyboardInterrupt:
            return 0


@contextmanager
def _single_keys(keys: int | None) -> Iterator[None]:
    """A key counts without Enter, and is not echoed."""
    if keys is None:
        yield
        return
    before = termios.tcgetattr(keys)
    tty.setcbreak(keys)
    try:
        yield
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


def _screen(shown: Document | None, trouble: str, width: int) -> RenderableType:
    parts: list[RenderableType] = []
    if shown is not None:
        parts.append(table(shown, width=width))
    if trouble:
        parts.append(Text(f"{safe(trouble)}; trying again", "bold red"))
    parts.append(Text("q ends this", "dim"))
    return Group(*parts)


def table(shown: Document, width: int) -> RenderableType:
    """Controller, switch, the pool as a bar, and one line for every job."""
    head = Text(f"controller {safe(shown['server_version'])}, up {shown['uptime_seconds']:.0f} s; ")
    parts: list[RenderableType] = [head.append_text(switch_line(shown["switch"])), _bar(shown, min(64, width - 16))]
    if shown["switch"]["trouble"]:
        parts.append(Text(f"trouble: {safe(shown['switch']['trouble'])}", "red"))
    if not shown["jobs"]:
        return Group(*parts, "no jobs")
    names = ("", "job", "state", "path", ">ranks", ">buckets/s", ">frames/s", ">resent", ">rtt", ">fallbacks")
    rows = grid(*names, gap=1)
    notes: list[RenderableType] = []
    marks = _marks(shown)
    for job in sorted(shown["jobs"], key=documents.is_over):
        name = Text(safe(job["job"]))
        name.truncate(max(11, width - 69), overflow="ellipsis")
        rows.add_row(
            Text(*marks.get(job["job"], ("", ""))),
            name,
            state(job["state"]),
            state(job["path"]),
            f"{job['ranks']}/{job['world_size']}",
            short(job["buckets_per_second"]),
            short(job["frames_per_second"]),
            "" if job["retransmission_percent"] is None else f"{digits(job['retransmission_percent'])} %",
            milliseconds(job["rtt_seconds"] or 0.0),
            str(job["fallbacks"]),
        )
        if job["why"] and (documents.is_over(job) or job["path"] == "ring"):
            notes.append(Text.assemble((f"{safe(job['job'])}: ", "bold"), safe(job["why"])))
    return Group(*parts, rows, *notes)


def short(rate: float | None) -> str:
    """A rate with three digits: 8.25, 123, 45.6 k, 1.23 M; empty when unknown."""
    if rate is None:
        return ""
    for unit in ("", " k", " M", " G"):
        if rate < 999.5:
            return f"{digits(rate)}{unit}"
        rate /= 1000.0
    return f"{rate:.0f} T"


def _holders(shown: Document) -> list[Document]:
    return sorted((job for job in shown["jobs"] if job["pool_size"]), key=lambda job: int(job["pool_base"]))


def _marks(shown: Document) -> dict[str, tuple[str, str]]:
    """The letter and the colour of each job that holds slots, the same in the bar and in the table."""
    return {
        job["job"]: (_LETTERS[index % len(_LETTERS)], _COLOURS[index % len(_COLOURS)])
        for index, job in enumerate(_holders(shown))
    }


def _bar(shown: Document, width: int) -> Text:
    """The switch's slots from first to last: a letter and a colour for each job, dots for what is free."""
    total, leased = shown["slots"]["total"], shown["slots"]["leased"]
    cells: list[tuple[str, str]] = [("·", "dim")] * max(8, width)
    marks = _marks(shown)
    for job in _holders(shown):
        first = job["pool_base"] * len(cells) // max(1, total)
        last = (job["pool_base"] + job["pool_size"]) * len(cells) // max(1, total)
        for cell in range(first, min(len(cells), max(first + 1, last))):
            cells[cell] = marks[job["job"]]
    return Text.assemble(*cells, f" {leased}/{total} slots")
