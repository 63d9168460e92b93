# SPDX-License-Identifier: Apache-2.0
"""Files that go wrong: hosts files, workers' settings, state files, programs. Taken, or refused with a reason."""

from __future__ import annotations

import copy
import random
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz.frames import demand, program
from p4reduce.config import Settings
from p4reduce.errors import ConfigError
from p4reduce_bmv2.embedded.engine import Engine
from p4reduce_bmv2.embedded.errors import ProgramError
from p4reduce_controller.hosts import MAX_PORT, Hosts, load, parse
from p4reduce_controller.store import MAX_EPOCH, SqliteStore, StoreError

HOSTS = """
[switch]
grpc = "127.0.0.1:9559"
device_id = 0
profile = "w34"
ip = "10.0.0.254"
mac = "02:70:34:00:00:fe"
[[host]]
name = "h1"
ip = "10.0.0.1"
mac = "02:70:34:00:00:01"
port = 1
[[host]]
name = "h2"
ip = "127.0.1.2"
port = 2
endpoint = "127.0.0.1:40002"
"""
SETTINGS = """
[worker]
controller = "127.0.0.1:50051"
job = "train"
rank = 1
world_size = 2
address = "10.0.0.1"
incarnation = 3
join_timeout = 60.0
log_level = "INFO"
"""
VALUES = (
    *("0", "-1", "511", "1e400", "nan", "inf", "99999999999999999999", "true", "[]", "{}", "[[1]]", '""', '"x"', "''"),
    *('"127.0.0.1:0"', '"[::1]:9559"', '"unix:/"', '"127.0.0.1"', '"::"', '"0.0.0.0"', '"w6"', "1979-05-27T07:32:00Z"),
    *('"\\u0000"', '"02:70:34:00:00:FE"', '"ff:ff:ff:ff:ff:ff"', '"127.0.0.1:٣"', '"10.0.0.1 "', '"é"', '"1"', '" "'),
)


def spoilt(draw: random.Random, text: str) -> str:
    """A text with values, lines or characters exchanged, lost, or doubled."""
    lines = text.strip().splitlines()
    for _ in range(draw.choice((1, 1, 2, 4))):
        where = draw.randrange(len(lines))
        kind = draw.randrange(6)
        if kind < 3 and "=" in lines[where]:
            lines[where] = lines[where].split("=")[0] + "= " + draw.choice(VALUES)
        elif kind == 3:
            lines.insert(
                where, draw.choice((lines[draw.randrange(len(lines))], "x = 1", "[a.b]", "[[switch]]", "host = 1"))
            )
        elif kind == 4 and len(lines) > 1:
            del lines[where]
        else:
            line = list(lines[where])
            line.insert(
                draw.randrange(len(line) + 1), draw.choice(["\0", '"', "=", "[", "#", "\\", "٣", "\ud7ff", "\r"])
            )
            lines[where] = "".join(line)
    return "\n".join(lines)


class FileTarget:
    """A folder of its own for all steps."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._folder = tempfile.TemporaryDirectory(prefix="p4reduce-fuzz-")
        self.path = Path(self._folder.name) / "file"

    def close(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()


class HostsTarget(FileTarget):
    """Hosts files: a ConfigError, or hosts that keep the rules."""

    def step(self, seed: int) -> None:
        """One file, as text and as bytes on disk."""
        draw = random.Random(f"hosts {seed}")
        text = spoilt(draw, HOSTS)
        data = text.encode("utf-8", "surrogatepass")
        if draw.random() < 0.2:
            data = data[: draw.randrange(len(data))] + draw.randbytes(3)
        self.path.write_bytes(data)
        calls: list[Callable[[], Hosts]] = [lambda: parse(text), lambda: load(self.path)]
        for call in calls:
            try:
                hosts = call()
            except ConfigError as error:
                self.found["refused"] += 1
                demand(0 < len(str(error)) < 2000, f"a reason of {len(str(error))} characters")
                continue
            self.found["taken"] += 1
            demand(all(1 <= host.port <= MAX_PORT and 0 < host.ip_number < 1 << 32 for host in hosts.hosts), text)
            demand(len({host.port for host in hosts.hosts}) == len(hosts.hosts) > 0, text)


class SettingsTarget(FileTarget):
    """Workers' settings, from a file and from the environment."""

    def step(self, seed: int) -> None:
        """One file, and some variables."""
        draw = random.Random(f"settings {seed}")
        data = spoilt(draw, SETTINGS).encode("utf-8", "surrogatepass")
        if draw.random() < 0.2:
            data = data[: draw.randrange(len(data))] + draw.randbytes(3)
        self.path.write_bytes(data)
        names = ("CONTROLLER", "RANK", "WORLD_SIZE", "ADDRESS", "JOIN_TIMEOUT", "INCARNATION", "LOG_LEVEL", "JOB")
        environ = {f"P4REDUCE_{name}": draw.choice(VALUES).strip('"') for name in draw.sample(names, draw.randrange(3))}
        try:
            settings = Settings.resolve({}, {"P4REDUCE_CONFIG": str(self.path), **environ})
        except ConfigError as error:
            self.found["refused"] += 1
            demand(0 < len(str(error)) < 2000, f"a reason of {len(str(error))} characters")
            return
        self.found["taken"] += 1
        demand(0 <= settings.rank < settings.world_size <= 64, repr(settings))
        demand(0 < settings.join_timeout <= 86400, repr(settings))


class StateTarget(FileTarget):
    """State files: refused, or they hand out epochs that rise."""

    structured = True
    """Whether files may also be sound databases with senseless contents."""

    def step(self, seed: int) -> None:
        """One file, damaged as bytes or as a database."""
        draw = random.Random(f"state {seed}")
        for old in self.path.parent.glob("file*"):
            old.unlink()
        store = SqliteStore(self.path, lambda: 1000.0)
        first = store.next()
        store.close()
        if self.structured and draw.random() < 0.5:
            self._rewrite(draw)
        else:
            data = bytearray(self.path.read_bytes())
            for _ in range(draw.choice((1, 3, 30))):
                where = draw.choice((draw.randrange(100), draw.randrange(len(data))))
                data[where] = draw.choice((0, 1, 255, draw.randrange(256)))
            if draw.random() < 0.3:
                del data[draw.randrange(len(data)) :]
            self.path.write_bytes(data)
        self._use(first)

    def _rewrite(self, draw: random.Random) -> None:
        connection = sqlite3.connect(self.path)
        statement = draw.choice(
            (
                "DELETE FROM epoch",
                "DROP TABLE epoch",
                "UPDATE epoch SET last = 'x'",
                "UPDATE epoch SET last = 1.5",
                "UPDATE epoch SET last = x'00ff'",
                "UPDATE epoch SET last = -5",
                "UPDATE epoch SET last = 9223372036854775807",
                "UPDATE epoch SET last = 4294967294",
                "PRAGMA user_version = 2",
                "CREATE TABLE more (x)",
                "DROP TABLE epoch; CREATE TABLE epoch (last)",
                "DROP TABLE epoch; CREATE VIEW epoch AS SELECT 1 AS one, 7 AS last",
            )
        )
        connection.executescript(statement)
        connection.close()

    def _use(self, first: int) -> None:
        try:
            store = SqliteStore(self.path, lambda: 2000.0)
        except ConfigError:
            self.found["refused"] += 1
            return
        try:
            epochs = [store.next() for _ in range(3)]
        except StoreError:
            self.found["refused later"] += 1
        else:
            self.found["taken"] += 1
            demand(epochs == sorted(set(epochs)), f"epochs {epochs}")
            demand(all(isinstance(epoch, int) and 1 <= epoch <= MAX_EPOCH for epoch in epochs), f"epochs {epochs}")
            demand(epochs[0] > first, f"epoch {epochs[0]} after {first}")
        finally:
            store.close()


class ProgramTarget:
    """JSON programs into the engine: the compiled program with a few nodes removed, replaced or doubled."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()

    def close(self) -> None:
        """Nothing to release."""

    def step(self, seed: int) -> None:
        """One program; if it loads, it runs any frame."""
        draw = random.Random(f"program {seed}")
        root = copy.deepcopy(program("w5"))
        for _ in range(draw.choice((1, 1, 2, 5))):
            self._damage(draw, root)
        try:
            engine = Engine(root)
        except ProgramError as error:
            self.found["refused"] += 1
            demand(len(str(error)) > 0, "no reason")
            return
        self.found["taken"] += 1
        for size in (1, 14, 42, 74, 74 + 256, 74 + 1280):
            frame = bytearray(draw.randbytes(size))
            frame[12:14] = b"\x08\x00"[: max(0, size - 12)]
            engine.process(1, bytes(frame))

    @staticmethod
    def _damage(draw: random.Random, root: Any) -> None:
        node = root
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = draw.choice(keys)
            if isinstance(node[key], dict | list) and node[key] and draw.random() < 0.9:
                node = node[key]
                continue
            kind = draw.randrange(4)
            if kind == 0:
                del node[key]
            elif kind == 1 and isinstance(node, list):
                node.append(node[key])
            else:
                values = [
                    None,
                    True,
                    -1,
                    7,
                    1 << 70,
                    1.5,
                    "x",
                    "0x7",
                    "a[0]",
                    [],
                    {},
                    ["x", "a"],
                    {"type": "field"},
                    "",
                ]
                node[key] = draw.choice(values)
            return
