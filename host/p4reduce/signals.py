# SPDX-License-Identifier: Apache-2.0
"""What SIGTERM, SIGHUP and Ctrl-C do to a command that has something to take down. For the main thread.

`termination_raises` and `undisturbed` are for commands that end, `asked_to_stop` is for those that run until they are
told to.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from p4reduce.errors import UsageError

_ENDS = (signal.SIGTERM, signal.SIGHUP)
_STOPS = (signal.SIGTERM, signal.SIGINT)
_ONE_SECONDS = 0.25
"""Signals that come within so long are one: `timeout` and some shells send theirs to the process and to its group."""


@contextmanager
def termination_raises() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a command the way Ctrl-C does: by an exception, so through every cleanup."""

    def end(number: int, frame: object) -> None:  # noqa: ARG001 (a signal handler's signature)
        raise SystemExit(128 + number)

    with _handlers(_ENDS, end):
        yield


@contextmanager
def asked_to_stop(stop: Callable[[], object] = lambda: None, wakeup: int = -1) -> Iterator[None]:
    """Let SIGTERM and Ctrl-C call `stop`, which must be short; the next of them ends the process at once, as if there
    were no handler: for whoever does not want to wait for a stop that takes long, or hangs.

    `stop` runs when the main thread next executes Python, so that one that waits should wake up now and then.
    `wakeup`: a descriptor that does not block, written to whenever a signal comes, for a main thread in `select`.
    UsageError in any other thread, where Python hears no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("a daemon runs in the main thread, where signals arrive: start it there, or as a process")
    first: list[float] = []

    def handle(number: int, frame: object) -> None:  # noqa: ARG001 (a signal handler's signature)
        if not first:
            first.append(time.monotonic())
            stop()
        elif time.monotonic() > first[0] + _ONE_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    previous = signal.set_wakeup_fd(wakeup) if wakeup >= 0 else -1
    try:
        # Who starts a daemon in the background of a script has it ignore the terminal's Ctrl-C.
        heard = tuple(n for n in _STOPS if n is not signal.SIGINT or signal.getsignal(n) is not signal.SIG_IGN)
        with _handlers(heard, handle):
            yield
    finally:
        if wakeup >= 0:
            signal.set_wakeup_fd(previous)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore them, and Ctrl-C: for a cleanup that a second one must not leave half done. Keep it to seconds."""
    with _handlers((signal.SIGINT, *_ENDS), signal.SIG_IGN):
        yield


@contextmanager
def _handlers(numbers: tuple[signal.Signals, ...], handler: Any) -> Iterator[None]:
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
