# SPDX-License-Identifier: Apache-2.0
"""What outlives a controller: the last epoch, the jobs, how the last of them ended, and what operators have set.

An epoch is a 32-bit number that stands in every frame; a frame of an old epoch can never count, because no later epoch
has its number. So the numbers must survive the controller. What guarantees that is the mark on the switch (`marks`):
the store is raised above it before any join is answered, also when the file is lost or was restored from an old copy.
Every store hands out max(last + 1, seconds since 1970), so that numbers go on rising over a switch that was restarted
and forgot its mark, and over a file that is a day old.

The file is SQLite with a write-ahead log, `synchronous = FULL`: what a call has written is on disk when it returns,
and a process that is killed at any moment leaves a file that opens. It holds the credentials of workers, so only its
owner may read it. Beside it lies FILE.lock, which says who uses it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from p4reduce.errors import ConfigError, P4ReduceError

MAX_EPOCH = (1 << 32) - 2
"""One less than 32 bits hold: the mark on the switch is above every epoch handed out."""
SCHEMA_VERSION = 3
APPLICATION_ID = 0x70347264
"""SQLite's `application_id` of our files: "p4rd". Files of schema 1 have none."""
_LOCK_BYTES = 4096
MAX_ENDS = 2048
"""Ends of memberships that a late worker can still be told of. Who starts jobs and lets them fail as fast as he may
(`auth.CALLS_A_SECOND`) needs longer to push another's out than workers need to come back to a restarted controller."""
END_SECONDS = 7 * 86400.0
"""How long they are kept on disk."""

_EPOCH_TABLE = "CREATE TABLE epoch (one INTEGER PRIMARY KEY CHECK (one = 1), last INTEGER NOT NULL)"
_TABLES_SINCE_2 = (
    "CREATE TABLE jobs (name TEXT PRIMARY KEY, record TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE flags (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
)
_TABLES_SINCE_3 = (
    "CREATE TABLE ends (epoch INTEGER PRIMARY KEY, name TEXT NOT NULL, at REAL NOT NULL, shown INTEGER NOT NULL, "
    "record TEXT NOT NULL)",
)
_TABLES = {2: ("jobs", "flags"), 3: ("jobs", "flags", "ends")}
"""Beside the epoch, by schema."""


class StoreError(P4ReduceError):
    """The store cannot keep what it was given. Nothing that depends on it may leave the controller."""


class InUseError(ConfigError):
    """Another process uses the state file."""


@dataclass(frozen=True, slots=True)
class End:
    """How a membership ended: its record, `age` seconds ago. `shown`: its job's name was not used again since."""

    record: dict[str, Any]
    age: float
    shown: bool


class Store(Protocol):
    """Keeps a controller's state. Calls come one at a time, from any thread. StoreError from all that write."""

    @property
    def last(self) -> int:
        """The highest epoch that was handed out or is known to have been; 0 when there is none."""
        ...

    def next(self) -> int:
        """An epoch never handed out before; StoreError when that cannot be guaranteed."""
        ...

    def raise_to(self, epoch: int) -> None:
        """Never hand out `epoch` or a lower one: it was found in use on the switch."""
        ...

    def save(self, name: str, record: dict[str, Any]) -> None:
        """Keep a job's record, which JSON must be able to hold, in the place of its last one."""
        ...

    def forget(self, name: str, end: dict[str, Any] | None = None) -> None:
        """Drop a job's record, if there is one, and keep how it ended. `end["epoch"]` names the membership."""
        ...

    def ends(self) -> list[End]:
        """The last ends, the latest last: MAX_ENDS at most, and none older than END_SECONDS."""
        ...

    def records(self) -> list[dict[str, Any]]:
        """All records, by the jobs' names."""
        ...

    def set_flag(self, name: str, value: object) -> None:
        """Keep what an operator has set; None drops it."""
        ...

    def flags(self) -> dict[str, Any]:
        """All flags that are set."""
        ...

    def close(self) -> None:
        """Release the file, if there is one. Safe to call twice."""
        ...


def _following(last: object, clock: Callable[[], float]) -> int:
    if not isinstance(last, int) or last < 0:
        raise StoreError(f"the state file holds {last!r} as the last epoch: it is damaged, name another file")
    epoch = max(last + 1, int(clock()), 1)
    if epoch > MAX_EPOCH:
        raise StoreError(f"no epoch is left after {last}: epochs have 32 bits; is the system clock right?")
    return epoch


def _encode(what: str, value: object) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise StoreError(f"{what} cannot be written as JSON: {error}") from None


class MemoryStore:
    """It is lost with the controller; the switch's mark is not."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._last = 0
        self._records: dict[str, str] = {}
        self._flags: dict[str, str] = {}

    @property
    def last(self) -> int:
        """See `Store.last`."""
        return self._last

    def next(self) -> int:
        """See `Store.next`."""
        self._last = _following(self._last, self._clock)
        return self._last

    def raise_to(self, epoch: int) -> None:
        """See `Store.raise_to`."""
        self._last = max(self._last, epoch)

    def save(self, name: str, record: dict[str, Any]) -> None:
        """See `Store.save`."""
        self._records[name] = _encode(f"the record of job {name!r}", record)

    def forget(self, name: str, end: dict[str, Any] | None = None) -> None:
        """See `Store.forget`."""
        del end
        self._records.pop(name, None)

    def ends(self) -> list[End]:
        """None: there is nobody after us who could ask."""
        return []

    def records(self) -> list[dict[str, Any]]:
        """See `Store.records`."""
        return [json.loads(self._records[name]) for name in sorted(self._records)]

    def set_flag(self, name: str, value: object) -> None:
        """See `Store.set_flag`."""
        self._flags.pop(name, None)
        if value is not None:
            self._flags[name] = _encode(f"the flag {name}", value)

    def flags(self) -> dict[str, Any]:
        """See `Store.flags`."""
        return {name: json.loads(value) for name, value in self._flags.items()}

    def close(self) -> None:
        """Nothing to release."""


class SqliteStore:
    """A state file.

    ConfigError when it cannot be opened, belongs to something else, is damaged, or is of a newer version; InUseError
    when another process uses it. Nothing is changed in a file that is refused.
    """

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.time) -> None:
        self._path = Path(path)
        self._clock = clock
        with contextlib.ExitStack() as undo:
            _check_place(self._path)
            undo.callback(_take_lock(self._path).close)
            self._connection = self._open()
            undo.callback(self._connection.close)
            self._undo = undo.pop_all()

    def _open(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = None
        try:
            # Made here, because SQLite would let everybody read it.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            # The caller serialises; the thread that calls may differ from time to time.
            connection = sqlite3.connect(self._path, timeout=0, isolation_level=None, check_same_thread=False)
            # Exclusive until close: a second controller on the same file would hand out the same epochs.
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            version = self._recognise(connection)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("BEGIN EXCLUSIVE")
            _migrate(connection, version)
            # A damaged record is refused now, not when a job has been half restored, and the file is left as it was.
            self._connection = connection
            self._check_contents()
            connection.execute("COMMIT")
        except (OSError, sqlite3.Error, ConfigError) as error:
            if connection is not None:
                connection.close()
            if isinstance(error, ConfigError):
                raise
            kind = InUseError if "locked" in str(error) else ConfigError
            hint = ": another process uses it" if kind is InUseError else ""
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise kind(f"{self._path}: cannot use the state file: {reason}{hint}") from None
        return connection

    def _check_contents(self) -> None:
        """ConfigError when something in the file cannot be read."""
        try:
            self.records()
            self.ends()
            self.flags()
        except StoreError as error:
            raise self._damaged(str(error).removeprefix(f"{self._path}: ")) from None

    def _recognise(self, connection: sqlite3.Connection) -> int:
        """The schema version of a file that may be used; 0 for an empty one."""
        try:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            report = [row for (row,) in connection.execute("PRAGMA integrity_check(3)")]
        except sqlite3.DatabaseError as error:
            if "locked" in str(error):
                raise
            raise ConfigError(
                f"{self._path}: not a state file, or a damaged one ({error}): restore a copy or name another file"
            ) from None
        if not version and not application and not tables:
            return 0
        ours = application == APPLICATION_ID or (version == 1 and not application)
        if not ours or "epoch" not in tables:
            raise ConfigError(f"{self._path}: not a state file of p4reduce: name another file")
        if version > SCHEMA_VERSION:
            raise ConfigError(
                f"{self._path}: written by a newer p4reduce (schema {version}, this one knows up to "
                f"{SCHEMA_VERSION}): upgrade this controller, or name another file"
            )
        missing = set(_TABLES.get(version, ())) - tables
        if report != ["ok"] or missing or version < 1:
            what = f"no table {', '.join(sorted(missing))}" if missing else "; ".join(report).replace("\n", " ")
            raise self._damaged(f"schema {version}, {what}")
        self._check_epoch(connection)
        return int(version)

    def _check_epoch(self, connection: sqlite3.Connection) -> None:
        try:
            rows = connection.execute("SELECT last FROM epoch LIMIT 2").fetchall()
        except sqlite3.OperationalError as error:
            raise self._damaged(f"the last epoch: {error}") from None
        if len(rows) != 1:
            raise self._damaged("it holds no last epoch" if not rows else "it holds several last epochs")
        (last,) = rows[0]
        if not isinstance(last, int) or last < 0:
            raise self._damaged(f"it holds {str(last)[:40]!r} as the last epoch")

    def _damaged(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self._path}: the state file is damaged ({what}): restore a copy, or move it away and start without it "
            f"(running jobs then have to join again)"
        )

    @property
    def last(self) -> int:
        """See `Store.last`."""
        with self._guard():
            row = self._connection.execute("SELECT last FROM epoch").fetchone()
        return row[0] if row and isinstance(row[0], int) else 0

    def next(self) -> int:
        """See `Store.next`."""
        with self._guard():
            row = self._connection.execute("SELECT last FROM epoch").fetchone()
            epoch = _following(row[0] if row else None, self._clock)
            self._connection.execute("UPDATE epoch SET last = ?", (epoch,))
        return epoch

    def raise_to(self, epoch: int) -> None:
        """See `Store.raise_to`."""
        with self._guard():
            self._connection.execute("UPDATE epoch SET last = max(last, ?) WHERE last < ?", (epoch, epoch))

    def save(self, name: str, record: dict[str, Any]) -> None:
        """See `Store.save`."""
        text = _encode(f"the record of job {name!r}", record)
        with self._transaction():
            self._connection.execute("INSERT OR REPLACE INTO jobs VALUES (?, ?)", (name, text))
            self._hide_ends(name)

    def forget(self, name: str, end: dict[str, Any] | None = None) -> None:
        """See `Store.forget`."""
        text = None if end is None else _encode(f"the end of job {name!r}", end)
        with self._transaction():
            self._connection.execute("DELETE FROM jobs WHERE name = ?", (name,))
            self._hide_ends(name)
            if end is None:
                return
            now = self._clock()
            self._connection.execute(
                "INSERT OR REPLACE INTO ends (epoch, name, at, shown, record) VALUES (?, ?, ?, 1, ?)",
                (end["epoch"], name, now, text),
            )
            self._connection.execute(
                # By when they ended: a job that ran for long has an old epoch.
                "DELETE FROM ends WHERE at < ? OR "
                "epoch NOT IN (SELECT epoch FROM ends ORDER BY at DESC, epoch DESC LIMIT ?)",
                (now - END_SECONDS, MAX_ENDS),
            )

    def _hide_ends(self, name: str) -> None:
        self._connection.execute("UPDATE ends SET shown = 0 WHERE shown AND name = ?", (name,))

    def ends(self) -> list[End]:
        """See `Store.ends`. ConfigError when one is damaged."""
        now = self._clock()
        with self._guard():
            rows = self._connection.execute(
                "SELECT name, at, shown, record FROM ends WHERE at >= ? ORDER BY at DESC, epoch DESC LIMIT ?",
                (now - END_SECONDS, MAX_ENDS),
            ).fetchall()
        found = []
        for name, at, shown, text in reversed(rows):
            what = f"the end of job {name!r}"
            record = self._decode(what, text)
            if not isinstance(record, dict) or not isinstance(at, float):
                raise self._damaged(f"{what} makes no sense")
            # A clock that was set back makes nothing younger than now.
            found.append(End(record, max(now - at, 0.0), bool(shown)))
        return found

    def records(self) -> list[dict[str, Any]]:
        """See `Store.records`. ConfigError when one is damaged."""
        with self._guard():
            rows = self._connection.execute("SELECT name, record FROM jobs ORDER BY name").fetchall()
        found = []
        for name, text in rows:
            record = self._decode(f"the record of job {name!r}", text)
            if not isinstance(record, dict):
                raise self._damaged(f"the record of job {name!r} is no table")
            found.append(record)
        return found

    def set_flag(self, name: str, value: object) -> None:
        """See `Store.set_flag`."""
        with self._guard():
            if value is None:
                self._connection.execute("DELETE FROM flags WHERE name = ?", (name,))
            else:
                text = _encode(f"the flag {name}", value)
                self._connection.execute("INSERT OR REPLACE INTO flags VALUES (?, ?)", (name, text))

    def flags(self) -> dict[str, Any]:
        """See `Store.flags`. ConfigError when one is damaged."""
        with self._guard():
            rows = self._connection.execute("SELECT name, value FROM flags").fetchall()
        return {name: self._decode(f"the flag {name}", text) for name, text in rows}

    def _decode(self, what: str, text: object) -> Any:
        try:
            return json.loads(text) if isinstance(text, str) else self._raise_no_text()
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"{what}: {error}") from None

    @staticmethod
    def _raise_no_text() -> None:
        raise ValueError("no text")

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, UnicodeError) as error:
            raise StoreError(f"{self._path}: cannot use the state file: {error}") from None

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of it is on disk afterwards, or nothing."""
        with self._guard():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close the file and give up the lock on it."""
        self._undo.close()


def _migrate(connection: sqlite3.Connection, version: int) -> None:
    """Inside a transaction: from schema `version` to ours."""
    if version == 0:
        connection.execute(_EPOCH_TABLE)
        connection.execute("INSERT INTO epoch VALUES (1, 0)")
    if version < SCHEMA_VERSION:
        for statement in (*(_TABLES_SINCE_2 if version < 2 else ()), *_TABLES_SINCE_3):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _check_place(path: Path) -> None:
    """ConfigError for what can be no state file, before anything is made beside it."""
    folder = path.parent
    try:
        if path.name in ("", ".."):
            raise ConfigError(f"cannot use {str(path)!r} as the state file: it names a folder: name a file")
        if not folder.exists():
            raise ConfigError(
                f"{path}: cannot use the state file: the folder {folder} does not exist: mkdir -p {folder}"
            )
        if path.is_dir():
            raise ConfigError(f"{path}: cannot use the state file: Is a directory: name a file in it")
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: cannot use the state file: not a regular file")
    except OSError as error:
        raise ConfigError(f"{path}: cannot use the state file: {error.strerror or error}") from None


def _take_lock(path: Path) -> Any:
    """Hold FILE.lock and write into it who we are. The kernel lets go of it when the process ends, however it does."""
    lock_path = path.with_name(path.name + ".lock")
    try:
        # Never removed: whoever waits for a lock on a removed file would wait beside whoever makes it anew.
        lock = os.fdopen(os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot use the state file: {lock_path.name}: {error.strerror or error}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = lock.read(_LOCK_BYTES).strip() or "another process"
        lock.close()
        raise InUseError(
            f"{path}: the state file is in use by {holder}: stop that controller, or give this one a file of its own"
        ) from None
    lock.truncate(0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    lock.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
    lock.flush()
    return lock


def open_store(path: str | Path | None, clock: Callable[[], float] = time.time) -> Store:
    """The store of a controller: a file if one is named, else memory. `clock`: seconds since 1970."""
    return MemoryStore(clock) if path is None else SqliteStore(path, clock)
