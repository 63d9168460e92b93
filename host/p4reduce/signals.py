# SPDX-License-Identifier: Apache-2.0
"""What SIGTERM, SIGHUP and Ctrl-C do to a command that has something to take down. For the main thread."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ENDS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def termination_raises() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a command the way Ctrl-C does: by an exception, so through every cleanup."""

    def end(number: int, frame: object) -> None:  # noqa: ARG001 (a signal handler's signature)
        raise SystemExit(128 + number)

    with _handlers(_ENDS, end):
        yield


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
