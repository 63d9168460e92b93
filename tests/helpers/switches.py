# SPDX-License-Identifier: Apache-2.0
"""One interface over the switches that the P4 program's tests run on: crafted frames in, frames out."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from google.protobuf import text_format
from p4.config.v1 import p4info_pb2

from p4reduce import constants, pipeline
from p4reduce_bmv2.embedded.engine import Engine

EVENTS = {
    "contributions": constants.COUNT_CONTRIBUTIONS,
    "results": constants.COUNT_RESULTS,
    "repeats": constants.COUNT_REPEATS,
    "duplicates": constants.COUNT_DUPLICATES,
    "stale": constants.COUNT_STALE,
    "mismatch": constants.COUNT_MISMATCH,
    "refused": constants.COUNT_REFUSED,
    "guarded": constants.COUNT_GUARDED,
}


class SwitchUnderTest(Protocol):
    """Tables by the names of the P4 program, frames as bytes."""

    def insert(self, table: str, key: dict[str, int], action: str, params: dict[str, int]) -> None: ...
    def delete(self, table: str, key: dict[str, int]) -> None: ...
    def set_group(self, group: int, replicas: list[tuple[int, int]]) -> None: ...
    def send(self, port: int, frame: bytes) -> list[tuple[int, bytes]]: ...
    def counters(self, row: int) -> dict[str, int]: ...
    def close(self) -> None: ...


class ProgramInfo:
    """Names of the P4Info: aliases to full names, keys and parameters in their order."""

    def __init__(self, path: Path) -> None:
        self.p4info = text_format.Parse(path.read_text(), p4info_pb2.P4Info())
        self.tables = {table.preamble.alias: table for table in self.p4info.tables}
        self.actions = {action.preamble.alias: action for action in self.p4info.actions}
        self.counter = self.p4info.counters[0]

    def key(self, table: str, key: dict[str, int]) -> list[tuple[Any, int]]:
        """Match fields of the table with the values given, in the table's order."""
        fields = self.tables[table].match_fields
        if {field.name for field in fields} != set(key):
            raise KeyError(f"{table} has the keys {[field.name for field in fields]}, not {list(key)}")
        return [(field, key[field.name]) for field in fields]

    def params(self, action: str, params: dict[str, int]) -> list[tuple[Any, int]]:
        """Parameters of the action with the values given, in its order."""
        wanted = self.actions[action].params
        if {param.name for param in wanted} != set(params):
            raise KeyError(f"{action} takes {[param.name for param in wanted]}, not {list(params)}")
        return [(param, params[param.name]) for param in wanted]


class EngineSwitch:
    """The compiled program in the embedded engine, without ports: every frame's outcome is known at once."""

    def __init__(self, profile: str) -> None:
        found = pipeline.find(profile)
        self.info = ProgramInfo(found.p4info)
        self.engine = Engine(found.json.read_text())

    def _key(self, table: str, key: dict[str, int]) -> tuple[int, ...]:
        return tuple(value for _, value in self.info.key(table, key))

    def insert(self, table: str, key: dict[str, int], action: str, params: dict[str, int]) -> None:
        values = [value for _, value in self.info.params(action, params)]
        target = self.engine.tables[self.info.tables[table].preamble.name]
        target.insert(self._key(table, key), self.info.actions[action].preamble.name, values)

    def delete(self, table: str, key: dict[str, int]) -> None:
        target = self.engine.tables[self.info.tables[table].preamble.name]
        target.delete(target.find(self._key(table, key)))

    def set_group(self, group: int, replicas: list[tuple[int, int]]) -> None:
        self.engine.set_multicast_group(group, replicas)

    def send(self, port: int, frame: bytes) -> list[tuple[int, bytes]]:
        return self.engine.process(port, frame)

    def counters(self, row: int) -> dict[str, int]:
        packets = self.engine.counters[self.info.counter.preamble.name].packets
        return {name: packets[row * 8 + event] for name, event in EVENTS.items()}

    def close(self) -> None:
        pass
