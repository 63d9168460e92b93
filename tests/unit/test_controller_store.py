# SPDX-License-Identifier: Apache-2.0
"""Epochs: never 0, never twice, whatever happens to clock and file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from p4reduce.errors import ConfigError
from p4reduce_controller.store import MAX_EPOCH, EpochStore, MemoryStore, SqliteStore, StoreError, open_store

NOW = 1_900_000_000


class Clock:
    def __init__(self, now: float = NOW + 0.9) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[EpochStore]:
    made: EpochStore = MemoryStore(clock) if request.param == "memory" else SqliteStore(tmp_path / "state.db", clock)
    yield made
    made.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_epochs_start_at_the_clock_and_rise(store: EpochStore) -> None:
    assert [store.next() for _ in range(3)] == [NOW, NOW + 1, NOW + 2]


def test_a_later_clock_is_followed_and_an_earlier_one_is_not(store: EpochStore, clock: Clock) -> None:
    first = store.next()
    clock.now += 100
    assert store.next() == first + 100
    clock.now -= 1000
    assert store.next() == first + 101


def test_a_clock_at_zero_does_not_give_epoch_0(clock: Clock) -> None:
    clock.now = 0.0
    assert MemoryStore(clock).next() == 1


def test_epochs_seen_elsewhere_are_not_handed_out(store: EpochStore) -> None:
    store.raise_to(NOW + 50)
    assert store.next() == NOW + 51
    store.raise_to(NOW)
    assert store.next() == NOW + 52


def test_the_last_epoch_is_the_last(store: EpochStore) -> None:
    store.raise_to(MAX_EPOCH - 1)
    assert store.next() == MAX_EPOCH
    for _ in range(2):
        with pytest.raises(StoreError, match="no epoch is left"):
            store.next()


def test_a_file_remembers(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "state.db"
    store = SqliteStore(path, clock)
    used = [store.next() for _ in range(5)]
    store.close()
    again = SqliteStore(path, clock)
    assert again.next() == used[-1] + 1
    again.close()


def test_what_was_handed_out_is_on_disk_without_a_clean_close(tmp_path: Path, clock: Clock) -> None:
    path, crash = tmp_path / "state.db", tmp_path / "crash"
    crash.mkdir()
    store = SqliteStore(path, clock)
    used = [store.next() for _ in range(3)]
    for file in tmp_path.glob("state.db*"):
        (crash / file.name).write_bytes(file.read_bytes())
    store.close()
    crashed = SqliteStore(crash / "state.db", clock)
    assert crashed.next() > max(used)
    crashed.close()


def test_a_restored_backup_does_not_repeat(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "state.db"
    store = SqliteStore(path, clock)
    store.next()
    backup = path.read_bytes()
    used = []
    for _ in range(10):
        clock.now += 1.5
        used.append(store.next())
    store.close()
    path.write_bytes(backup)
    clock.now += 1.5
    restored = SqliteStore(path, clock)
    assert restored.next() > max(used)
    restored.close()


def test_two_controllers_cannot_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = SqliteStore(path)
    with pytest.raises(ConfigError, match=r"state\.db: cannot use the state file: .*another controller uses it"):
        SqliteStore(path)
    store.close()
    SqliteStore(path).close()


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    with pytest.raises(ConfigError, match="not a state file of this version"):
        SqliteStore(foreign)
    text = tmp_path / "notes.txt"
    text.write_text("no database at all, but long enough to be looked at" * 20)
    with pytest.raises(ConfigError, match="cannot use the state file"):
        SqliteStore(text)
    with pytest.raises(ConfigError, match="cannot use the state file"):
        SqliteStore(tmp_path / "nowhere" / "state.db")


def test_a_file_that_cannot_be_written_hands_out_nothing(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "state.db"
    store = SqliteStore(path, clock)
    used = store.next()
    store._connection.execute("PRAGMA query_only = ON")
    with pytest.raises(StoreError, match="cannot write the state file"):
        store.next()
    store._connection.execute("PRAGMA query_only = OFF")
    assert store.next() == used + 1
    store.close()


def test_open_store_chooses(tmp_path: Path) -> None:
    assert isinstance(open_store(None), MemoryStore)
    store = open_store(tmp_path / "state.db")
    assert isinstance(store, SqliteStore)
    store.close()
