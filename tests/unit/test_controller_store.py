# SPDX-License-Identifier: Apache-2.0
"""Epochs: never 0, never twice, whatever happens to clock and file. Records and flags: kept, or the file is refused."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from p4reduce.errors import ConfigError
from p4reduce_controller.store import (
    END_SECONDS,
    MAX_EPOCH,
    SCHEMA_VERSION,
    End,
    InUseError,
    MemoryStore,
    SqliteStore,
    Store,
    StoreError,
    open_store,
)

NOW = 1_900_000_000


class Clock:
    def __init__(self, now: float = NOW + 0.9) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Store]:
    made: Store = MemoryStore(clock) if request.param == "memory" else SqliteStore(tmp_path / "state.db", clock)
    yield made
    made.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_epochs_start_at_the_clock_and_rise(store: Store) -> None:
    assert [store.next() for _ in range(3)] == [NOW, NOW + 1, NOW + 2]


def test_a_later_clock_is_followed_and_an_earlier_one_is_not(store: Store, clock: Clock) -> None:
    first = store.next()
    clock.now += 100
    assert store.next() == first + 100
    clock.now -= 1000
    assert store.next() == first + 101


def test_a_clock_at_zero_does_not_give_epoch_0(clock: Clock) -> None:
    clock.now = 0.0
    assert MemoryStore(clock).next() == 1


def test_epochs_seen_elsewhere_are_not_handed_out(store: Store) -> None:
    store.raise_to(NOW + 50)
    assert store.next() == NOW + 51
    store.raise_to(NOW)
    assert store.next() == NOW + 52


def test_the_last_epoch_is_the_last(store: Store) -> None:
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
    store.close()
    backup = path.read_bytes()
    store, used = SqliteStore(path, clock), []
    for _ in range(10):
        clock.now += 1.5
        used.append(store.next())
    store.close()
    path.write_bytes(backup)
    clock.now += 1.5
    restored = SqliteStore(path, clock)
    assert restored.last < min(used)
    assert restored.next() > max(used)
    restored.close()


def test_two_controllers_cannot_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = SqliteStore(path)
    with pytest.raises(
        InUseError, match=rf"state\.db: the state file is in use by process {os.getpid()} on \S+ since "
    ):
        SqliteStore(path)
    store.close()
    SqliteStore(path).close()


def test_the_lock_goes_with_the_process(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    code = (
        "import sys, time; from p4reduce_controller.store import SqliteStore; "
        "s = SqliteStore(sys.argv[1], lambda: 7.0); s.next(); s.save('train', {'a': 1}); print('held', flush=True); "
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(InUseError, match=f"in use by process {process.pid} on "):
            SqliteStore(path)
        process.kill()
    with closing(SqliteStore(path, lambda: 0.0)) as store:
        assert (store.last, store.next(), store.records()) == (7, 8, [{"a": 1}])


def test_only_the_owner_may_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with closing(SqliteStore(path)) as store:
        store.save("train", {"credential": "secret"})
        for file in tmp_path.iterdir():
            assert file.stat().st_mode & 0o077 == 0, file


def test_records_and_flags_are_kept(store: Store) -> None:
    store.save("b", {"epoch": 7, "ranks": [0, 1]})
    store.save("a", {"epoch": 6})
    store.save("b", {"epoch": 8})
    store.set_flag("drained", True)
    store.set_flag("policy", {"deadline": 5.0})
    assert store.records() == [{"epoch": 6}, {"epoch": 8}]
    assert store.flags() == {"drained": True, "policy": {"deadline": 5.0}}
    store.forget("a")
    store.forget("nobody")
    store.set_flag("drained", None)
    assert store.records() == [{"epoch": 8}]
    assert store.flags() == {"policy": {"deadline": 5.0}}


@pytest.mark.parametrize("value", [{"x": b"bytes"}, {"x": float("nan")}])
def test_what_json_cannot_hold_is_refused(store: Store, value: dict[str, object]) -> None:
    store.save("train", {"epoch": 5})
    with pytest.raises(StoreError, match="the record of job 'train' cannot be written as JSON"):
        store.save("train", value)
    assert store.records() == [{"epoch": 5}]


def test_every_call_is_on_disk_when_it_returns(tmp_path: Path, clock: Clock) -> None:
    """What a kill leaves after each step is a file that holds all steps up to it."""
    path = tmp_path / "state.db"
    steps: list[Callable[[SqliteStore], object]] = [
        lambda s: s.next(),
        lambda s: s.save("a", {"n": 1}),
        lambda s: s.save("a", {"n": 2}),
        lambda s: s.set_flag("drained", True),
        lambda s: s.raise_to(NOW + 9),
        lambda s: s.forget("a"),
    ]
    seen = []
    with closing(SqliteStore(path, clock)) as store:
        for number, step in enumerate(steps):
            step(store)
            crash = tmp_path / f"crash{number}"
            crash.mkdir()
            for file in tmp_path.glob("state.db*"):
                (crash / file.name).write_bytes(file.read_bytes())
            with closing(SqliteStore(crash / "state.db", clock)) as left:
                seen.append((left.last - NOW, left.records(), left.flags()))
    drained = {"drained": True}
    assert seen == [
        (0, [], {}),
        (0, [{"n": 1}], {}),
        (0, [{"n": 2}], {}),
        (0, [{"n": 2}], drained),
        (9, [{"n": 2}], drained),
        (9, [], drained),
    ]


def schema_1(path: Path, last: object = NOW + 5) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE epoch (one INTEGER PRIMARY KEY CHECK (one = 1), last INTEGER NOT NULL)")
        connection.execute("INSERT INTO epoch VALUES (1, ?)", (last,))
        connection.execute("PRAGMA user_version = 1")


def test_schema_2_is_taken_over(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "state.db"
    with closing(SqliteStore(path, clock)) as store:
        store.save("train", {"a": 1})
        used = store.next()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP TABLE ends")
        connection.execute("PRAGMA user_version = 2")
    for _ in range(2):
        with closing(SqliteStore(path, clock)) as store:
            assert (store.records(), store.ends()) == ([{"a": 1}], [])
            assert store.next() > used


def test_ends_are_kept_for_a_while(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p4reduce_controller.store.MAX_ENDS", 16)
    path = tmp_path / "state.db"
    with closing(SqliteStore(path, clock)) as store:
        store.save("a", {"n": 1})
        store.forget("a", {"epoch": 7, "n": 1})
        clock.now += 10.0
        store.forget("b", {"epoch": 5, "n": 2})
        clock.now += 2.0
    with closing(SqliteStore(path, clock)) as store:
        assert store.records() == []
        assert store.ends() == [End({"epoch": 7, "n": 1}, 12.0, True), End({"epoch": 5, "n": 2}, 2.0, True)]
        clock.now -= 1000.0
        assert [end.age for end in store.ends()] == [0.0, 0.0], "a clock that was set back"
        clock.now += 1000.0
        store.save("a", {"n": 3})
        assert [end.shown for end in store.ends()] == [False, True], "a new job has the name"
        store.forget("b")
        assert [end.shown for end in store.ends()] == [False, False], "another one has had it, and ended well"
        clock.now += END_SECONDS - 5.0
        assert [end.record["epoch"] for end in store.ends()] == [5]
        for epoch in range(100, 100 + 32):
            store.forget("c", {"epoch": epoch})
        ends = store.ends()
        assert [end.record["epoch"] for end in ends] == list(range(116, 100 + 32))
        assert [end.shown for end in ends] == [False] * 15 + [True]
        assert store._connection.execute("SELECT count(*) FROM ends").fetchone() == (16,)


def test_the_end_of_a_job_that_ran_for_long_is_kept(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the lowest epoch of all, and is the latest end."""
    monkeypatch.setattr("p4reduce_controller.store.MAX_ENDS", 4)
    with closing(SqliteStore(tmp_path / "state.db", clock)) as store:
        for epoch in range(10, 20):
            clock.now += 1.0
            store.forget("short", {"epoch": epoch})
        clock.now += 1.0
        store.forget("long", {"epoch": 1})
        assert [end.record["epoch"] for end in store.ends()] == [17, 18, 19, 1]


def test_a_file_that_is_refused_is_not_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with closing(SqliteStore(path)) as store:
        store.save("train", {"a": 1})
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP TABLE ends")
        connection.execute("UPDATE jobs SET record = '{'")
        connection.execute("PRAGMA user_version = 2")
    with pytest.raises(ConfigError, match="the record of job 'train'"):
        SqliteStore(path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (2,)
        assert connection.execute("SELECT name FROM sqlite_master WHERE name = 'ends'").fetchall() == []


def test_how_a_job_ended_is_written_with_its_end_or_not_at_all(tmp_path: Path, clock: Clock) -> None:
    with closing(SqliteStore(tmp_path / "state.db", clock)) as store:
        store.save("a", {"n": 1})
        store._connection.execute("CREATE TRIGGER no BEFORE INSERT ON ends BEGIN SELECT raise(ABORT, 'full'); END")
        with pytest.raises(StoreError, match="cannot use the state file: full"):
            store.forget("a", {"epoch": 7})
        assert (store.records(), store.ends()) == ([{"n": 1}], [])
        store.save("b", {"n": 2})
        assert store.records() == [{"n": 1}, {"n": 2}], "no transaction is left open"


def test_schema_1_is_taken_over(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "state.db"
    schema_1(path)
    for _ in range(2):
        with closing(SqliteStore(path, clock)) as store:
            assert (store.records(), store.flags()) == ([], {})
            assert store.next() > NOW + 5
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)


def test_a_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    SqliteStore(path).close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    before = path.read_bytes()
    with pytest.raises(
        ConfigError, match=r"state\.db: written by a newer p4reduce \(schema 4.* up to 3\): upgrade this"
    ):
        SqliteStore(path)
    assert path.read_bytes() == before


def test_files_of_something_else_are_refused_and_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.db"
    with closing(sqlite3.connect(foreign)) as connection, connection:
        connection.execute("CREATE TABLE theirs (x)")
        connection.execute("PRAGMA user_version = 1")
    text = tmp_path / "notes.txt"
    text.write_text("no database at all, but long enough to be looked at" * 20)
    for path, message in (
        (foreign, "not a state file of p4reduce: name another"),
        (text, "not a state file, or a dam"),
    ):
        before = path.read_bytes()
        with pytest.raises(ConfigError, match=message):
            SqliteStore(path)
        assert path.read_bytes() == before
    with pytest.raises(ConfigError, match=r"the folder .*/nowhere does not exist: mkdir -p .*/nowhere$"):
        SqliteStore(tmp_path / "nowhere" / "state.db")


DAMAGES = {
    "record": ("UPDATE jobs SET record = '{\"a\": '", "the record of job 'train'"),
    "no table": ("UPDATE jobs SET record = '[1]'", "the record of job 'train' is no table"),
    "no text": ("UPDATE jobs SET record = x'00ff'", "the record of job 'train': no text"),
    "flag": ("UPDATE flags SET value = 'tru'", "the flag drained"),
    "table": ("DROP TABLE jobs", "no table jobs"),
    "table of ends": ("DROP TABLE ends", "no table ends"),
    "end": ("UPDATE ends SET record = '{\"a\": '", "the end of job 'old'"),
    "nested end": (f"UPDATE ends SET record = '{'[' * 100_000}'", "the end of job 'old'"),
    "column of ends": ("ALTER TABLE ends RENAME COLUMN shown TO seen", "no such column: shown"),
    "time of an end": ("UPDATE ends SET at = 'noon'", "the end of job 'old'"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_content_says_which_file_and_what_to_do(tmp_path: Path, name: str) -> None:
    path = tmp_path / "state.db"
    with closing(SqliteStore(path)) as store:
        store.save("train", {"a": 1})
        store.forget("old", {"epoch": 7})
        store.set_flag("drained", True)
    statement, what = DAMAGES[name]
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement)
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            SqliteStore(path)
        assert not isinstance(caught.value, InUseError)
        assert str(caught.value).startswith(f"{path}: the state file is damaged (")
        assert what in str(caught.value)
        assert "restore a copy, or move it away" in str(caught.value)


def test_damaged_pages_are_found(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with closing(SqliteStore(path)) as store:
        for number in range(200):
            store.save(f"job{number}", {"text": "x" * 200})
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 4096] = bytes(4096)
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"state\.db: .*damaged.*restore a copy"):
        SqliteStore(path)


@pytest.mark.parametrize("given", ["", ".", "/", "..", "folder"])
def test_a_folder_is_no_state_file(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path if given == "folder" else tmp_path / "folder")
    with pytest.raises(ConfigError, match=r"state file.*: name a file"):
        open_store(given)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_only_regular_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        SqliteStore(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        SqliteStore("/dev/null")
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("UPDATE epoch SET last = 'banana'", "'banana' as the last epoch"),
        ("UPDATE epoch SET last = -1", "'-1' as the last epoch"),
        ("UPDATE epoch SET last = 1.5", "'1.5' as the last epoch"),
        ("DELETE FROM epoch", "no last epoch"),
        ("DROP TABLE epoch; CREATE TABLE epoch (last); INSERT INTO epoch VALUES (1), (2)", "several last epochs"),
        ("DROP TABLE epoch; CREATE TABLE epoch (other)", "no such column"),
    ],
)
def test_an_epoch_that_makes_no_sense(tmp_path: Path, statement: str, what: str) -> None:
    path = tmp_path / "state.db"
    SqliteStore(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(statement)
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"state\.db: the state file is damaged \(.*{what}"):
            SqliteStore(path)


def test_an_epoch_of_schema_1_that_makes_no_sense(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    schema_1(path, "banana")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="'banana' as the last epoch"):
        SqliteStore(path)
    assert path.read_bytes() == before


def test_a_file_that_cannot_be_written_hands_out_nothing(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "state.db"
    with closing(SqliteStore(path, clock)) as store:
        used = store.next()
        store._connection.execute("PRAGMA query_only = ON")
        for call in (
            store.next,
            lambda: store.save("a", {}),
            lambda: store.forget("a"),
            lambda: store.raise_to(1 << 31),
        ):
            with pytest.raises(StoreError, match="cannot use the state file: attempt to write a readonly database"):
                call()
        store._connection.execute("PRAGMA query_only = OFF")
        assert store.next() == used + 1


def test_open_store_chooses(tmp_path: Path) -> None:
    assert isinstance(open_store(None), MemoryStore)
    store = open_store(tmp_path / "state.db")
    assert isinstance(store, SqliteStore)
    store.close()
