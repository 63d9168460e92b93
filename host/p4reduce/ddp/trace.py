# SPDX-License-Identifier: Apache-2.0
"""A trace of buckets in Chrome's format (about://tracing, Perfetto): when each was handed in, and when it was there.

The latest buckets are kept, at most `LIMIT`, so that a long run ends with a file of bounded size.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIMIT = 20_000
"""Buckets kept; three events of some 150 bytes each."""
_HOOK_THREAD = 1
_WAY_THREAD = 2

_Entry = tuple[float, float, float, dict[str, Any]]


class Trace:
    """Records the buckets of one rank."""

    def __init__(self, path: str | os.PathLike[str], rank: int, world_size: int, limit: int = LIMIT) -> None:
        """`path`: with more than one rank, `.rank0` and so on is put before its suffix."""
        wanted = Path(path)
        self.path = wanted if world_size == 1 else wanted.with_name(f"{wanted.stem}.rank{rank}{wanted.suffix}")
        self._rank = rank
        self._entries: deque[_Entry] = deque(maxlen=limit)
        self._lock = threading.Lock()
        self._recorded = 0

    def bucket(self, started: float, submitted: float, done: float, **details: Any) -> None:
        """One bucket that is complete: when the hook was called, when it returned, and when the mean was there.

        Times are seconds of time.perf_counter(). `details`: step, index, elements, bytes, path and so on.
        """
        with self._lock:
            self._recorded += 1
            self._entries.append((started, submitted, done, details))

    def write(self) -> None:
        """Write the file, in one piece: whoever reads it finds the old one or the new one. OSError when it cannot."""
        with self._lock:
            entries, dropped = list(self._entries), self._recorded - len(self._entries)
        events = [*self._labels()]
        for serial, entry in enumerate(entries, dropped):
            events.extend(self._events(serial, *entry))
        content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"dropped_buckets": dropped}}
        draft = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        draft.write_text(json.dumps(content), encoding="utf-8")
        draft.replace(self.path)

    def _labels(self) -> Iterator[dict[str, Any]]:
        yield {"name": "process_name", "ph": "M", "pid": self._rank, "tid": 0, "args": {"name": f"rank {self._rank}"}}
        for thread, name in ((_HOOK_THREAD, "hook"), (_WAY_THREAD, "buckets on their way")):
            yield {"name": "thread_name", "ph": "M", "pid": self._rank, "tid": thread, "args": {"name": name}}

    def _events(
        self, serial: int, started: float, submitted: float, done: float, details: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        name = f"bucket {details.get('index', '?')}"
        common = {"name": name, "cat": str(details.get("path", "bucket")), "pid": self._rank}
        yield {**common, "ph": "X", "tid": _HOOK_THREAD, "ts": _us(started), "dur": _us(submitted - started)}
        # Buckets overlap on their way, which complete events of one thread must not.
        way = {**common, "tid": _WAY_THREAD, "id": serial}
        yield {**way, "ph": "b", "ts": _us(submitted), "args": details}
        yield {**way, "ph": "e", "ts": _us(done)}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
