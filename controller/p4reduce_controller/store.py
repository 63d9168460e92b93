# SPDX-License-Identifier: Apache-2.0
"""Where epochs come from: never 0, never the same twice.

An epoch is a 32-bit number that stands in every frame; a frame of an old epoch can never count, because no later epoch
has its number. So the numbers must survive the controller. What guarantees that is the mark on the switch (`marks`):
the store is raised above it before any join is answered. Every store hands out max(last + 1, seconds since 1970), so
that numbers go on rising, as a rule, over a switch that was restarted and forgot its mark.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from p4reduce.errors import ConfigError, P4ReduceError

MAX_EPOCH = (1 << 32) - 2
"""One less than 32 bits hold: the mark on the switch is above every epoch handed out."""
SCHEMA_VERSION = 1


class StoreError(P4ReduceError):
    """The store cannot hand out an epoch. Nothing was handed out."""


class EpochStore(Protocol):
    """Hands out epochs. Calls come one at a time, from any thread."""

    def next(self) -> int:
        """An epoch never handed out before; StoreError when that cannot be guaranteed."""
        ...

    def raise_to(self, epoch: int) -> None:
        """Never hand out `epoch` or a lower one: it was found in use on the switch."""
        ...

    def close(self) -> None:
        """Release the file, if there is one."""
        ...


def _following(last: object, clock: Callable[[], float]) -> int:
    if not isinstance(last, int) or last < 0:
        raise StoreError(f"the state file holds {last!r} as the last epoch: it is damaged, name another file")
    epoch = max(last + 1, int(clock()), 1)
    if epoch > MAX_EPOCH:
        raise StoreError(f"no epoch is left after {last}: epochs have 32 bits; is the system clock right?")
    return epoch


class MemoryStore:
    """Epochs from the clock's seconds on. It is lost with the controller; the switch's mark is not."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._last = 0

    def next(self) -> int:
        """See `EpochStore.next`."""
        self._last = _following(self._last, self._clock)
        return self._last

    def raise_to(self, epoch: int) -> None:
        """See `EpochStore.raise_to`."""
        self._last = max(self._last, epoch)

    def close(self) -> None:
        """Nothing to release."""


class SqliteStore:
    """Epochs remembered in an SQLite file, written through to disk before they are handed out.

    ConfigError when the file cannot be opened, belongs to something else, or another controller has it open.
    """

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.time) -> None:
        self._path = Path(path)
        self._clock = clock
        connection: sqlite3.Connection | None = None
        try:
            # The caller serialises; the thread that calls may differ from time to time.
            connection = sqlite3.connect(self._path, timeout=0, isolation_level=None, check_same_thread=False)
            # Exclusive until close: a second controller on the same file would hand out the same epochs.
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("BEGIN EXCLUSIVE")
            self._prepare(connection)
            connection.execute("COMMIT")
        except (sqlite3.Error, ConfigError) as error:
            if connection is not None:
                connection.close()
            if isinstance(error, ConfigError):
                raise
            hint = ": another controller uses it" if "locked" in str(error) else ""
            raise ConfigError(f"{self._path}: cannot use the state file: {error}{hint}") from None
        self._connection = connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == SCHEMA_VERSION:
            return
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if version or tables:
            raise ConfigError(
                f"{self._path}: not a state file of this version (schema {version}, expected {SCHEMA_VERSION}): "
                f"name another file"
            )
        connection.execute("CREATE TABLE epoch (one INTEGER PRIMARY KEY CHECK (one = 1), last INTEGER NOT NULL)")
        connection.execute("INSERT INTO epoch VALUES (1, 0)")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def next(self) -> int:
        """See `EpochStore.next`."""
        try:
            row = self._connection.execute("SELECT last FROM epoch").fetchone()
            epoch = _following(row[0] if row else None, self._clock)
            self._connection.execute("UPDATE epoch SET last = ?", (epoch,))
        except sqlite3.Error as error:
            raise StoreError(f"{self._path}: cannot write the state file: {error}") from None
        return epoch

    def raise_to(self, epoch: int) -> None:
        """See `EpochStore.raise_to`."""
        try:
            self._connection.execute("UPDATE epoch SET last = max(last, ?)", (epoch,))
        except sqlite3.Error as error:
            raise StoreError(f"{self._path}: cannot write the state file: {error}") from None

    def close(self) -> None:
        """Close the file and give up the lock on it."""
        self._connection.close()


def open_store(path: str | Path | None, clock: Callable[[], float] = time.time) -> EpochStore:
    """The store of a controller: a file if one is named, else memory. `clock`: seconds since 1970."""
    return MemoryStore(clock) if path is None else SqliteStore(path, clock)
