# SPDX-License-Identifier: Apache-2.0
"""A page of memory that all processes of a bench share, to start together without a frame on the network.

All workers run on one machine, so they have one clock (CLOCK_MONOTONIC), whatever network namespace they are in.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from p4reduce.bench.options import MAX_WORKERS
from p4reduce.errors import StalledError

_SETTLE_NS = 1_500_000
"""From the arrival of the last rank to the common start: time for all to be awake."""
_POLL_SECONDS = 0.0002
_ROWS = 4
_SEQUENCE, _ARRIVAL, _CELLS = 0, 1, 3


class Shared:
    """One rank's view of the page. Cells 0 .. 15 are for whatever a measurement tells another process."""

    def __init__(self, path: Path, rank: int, workers: int) -> None:
        self._rank = rank
        self._workers = workers
        self._page = np.memmap(path, dtype=np.int64, mode="r+", shape=(_ROWS, MAX_WORKERS))
        self._passed = 0

    @staticmethod
    def create(path: Path) -> None:
        """Make the file, all zeros. Rows: sequence, two of arrivals, cells."""
        path.write_bytes(bytes(_ROWS * MAX_WORKERS * 8))

    def start(self, deadline: float) -> int:
        """Wait for all ranks, then for a moment they all agree on; returns it, in nanoseconds of the monotonic clock.

        StalledError names the ranks that did not come within `deadline` seconds.
        """
        self._passed += 1
        # Arrivals alternate between two rows: nobody can be two starts ahead of anybody.
        arrivals = self._page[_ARRIVAL + self._passed % 2]
        arrivals[self._rank] = time.monotonic_ns()
        self._page[_SEQUENCE, self._rank] = self._passed
        sequence = self._page[_SEQUENCE, : self._workers]
        limit = time.monotonic() + deadline
        while (sequence < self._passed).any():
            if time.monotonic() > limit:
                missing = tuple(int(rank) for rank in np.flatnonzero(sequence < self._passed))
                raise StalledError(f"ranks {missing} did not come to the start in {deadline:g} s", ranks=missing)
            time.sleep(_POLL_SECONDS)
        start = int(arrivals[: self._workers].max()) + _SETTLE_NS
        while (left := start - time.monotonic_ns()) > 0:
            time.sleep(left / 1e9)
        return start

    def get(self, cell: int) -> int:
        """Read a cell."""
        return int(self._page[_CELLS, cell])

    def put(self, cell: int, value: int) -> None:
        """Write a cell. Each has one writer."""
        self._page[_CELLS, cell] = value

    def wait(self, cell: int, deadline: float, what: str, least: int = 1, poll: float = _POLL_SECONDS) -> int:
        """Wait until a cell is at least `least`, looking every `poll` seconds, and return it. StalledError."""
        limit = time.monotonic() + deadline
        while (value := self.get(cell)) < least:
            if time.monotonic() > limit:
                raise StalledError(f"{what} did not happen within {deadline:g} s")
            time.sleep(poll)
        return value
