# SPDX-License-Identifier: Apache-2.0
"""Counters: indirect ones by index and as a whole, direct ones with and without their entries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers.runtime import DELETE, INSERT, KINDS, MODIFY, Client, Code, Program, refused, running
from p4.v1 import p4runtime_pb2

PROGRAM = Program.entities()
entry, counter = PROGRAM.entry, PROGRAM.counter
KEY: dict[str, Any] = {"d": b"\x01"}


@pytest.fixture(scope="module", params=KINDS)
def shared(request: pytest.FixtureRequest) -> Iterator[tuple[str, Client]]:
    with running(request.param) as address, Client(address, 1) as client:
        yield request.param, client


@pytest.fixture
def kind(shared: tuple[str, Client]) -> str:
    return shared[0]


@pytest.fixture
def client(shared: tuple[str, Client]) -> Client:
    shared[1].push(PROGRAM)
    return shared[1]


@pytest.fixture(scope="module")
def own() -> Iterator[Client]:
    with running("embedded") as address, Client(address, 1) as client:
        yield client


@pytest.fixture
def embedded(own: Client) -> Client:
    """For what the embedded switch does as the specification says, and simple_switch_grpc does not."""
    own.push(PROGRAM)
    return own


def values(entities: list[Any]) -> list[tuple[int, int, int]]:
    """(index, packets, bytes) of CounterEntries."""
    return [
        (e.counter_entry.index.index, e.counter_entry.data.packet_count, e.counter_entry.data.byte_count)
        for e in entities
    ]


def direct(match: dict[str, Any] | None = None, priority: int = 1, table: str = "wide") -> Any:
    entity = p4runtime_pb2.Entity()
    entity.direct_counter_entry.table_entry.CopyFrom(entry(table, match, priority=priority).table_entry)
    return entity


def test_one_cell(client: Client) -> None:
    assert client.write((MODIFY, counter("hits", 3, packets=7, size=900))) == [Code.OK]
    assert values(client.read(counter("hits", 3))) == [(3, 7, 900)]
    assert values(client.read(counter("hits", 4))) == [(4, 0, 0)]


def test_unit_decides_what_is_told(client: Client) -> None:
    assert client.write((MODIFY, counter("volume", 3, packets=7, size=900))) == [Code.OK]
    assert values(client.read(counter("volume", 3))) == [(3, 0, 900)]


def test_wildcard_index_and_wildcard_counter(client: Client) -> None:
    client.write((MODIFY, counter("hits", 15, packets=1, size=2)))
    cells = values(client.read(counter("hits")))
    assert [cell[0] for cell in cells] == list(range(16))
    assert cells[15] == (15, 1, 2)
    assert len(client.read(counter(""))) == 16 + 8


def test_all_cells_at_once(embedded: Client) -> None:
    """simple_switch_grpc: UNIMPLEMENTED."""
    assert embedded.write((MODIFY, counter("hits", packets=4, size=40))) == [Code.OK]
    assert values(embedded.read(counter("hits"))) == [(n, 4, 40) for n in range(16)]


def test_modify_without_data_changes_nothing(embedded: Client) -> None:
    """simple_switch_grpc writes zeros."""
    embedded.write((MODIFY, counter("hits", 3, packets=7)))
    assert embedded.write((MODIFY, counter("hits", 3))) == [Code.OK]
    assert values(embedded.read(counter("hits", 3))) == [(3, 7, 0)]


def test_refused_updates(client: Client, kind: str) -> None:
    assert client.write((INSERT, counter("hits", 3, packets=7))) == [Code.INVALID_ARGUMENT]
    assert client.write((MODIFY, counter("hits", -1, packets=7))) == [Code.INVALID_ARGUMENT]
    if kind == "embedded":
        # simple_switch_grpc takes a DELETE for a reset, and has no word for an index too high.
        assert client.write((DELETE, counter("hits", 3))) == [Code.INVALID_ARGUMENT]
        assert client.write((MODIFY, counter("hits", 16, packets=7))) == [Code.OUT_OF_RANGE]


def test_refused_reads(client: Client, kind: str) -> None:
    with refused(Code.INVALID_ARGUMENT):
        client.read(counter("hits", -1))
    with refused(Code.OUT_OF_RANGE, Code.UNKNOWN):
        client.read(counter("hits", 16))
    unknown = counter("hits", 1)
    unknown.counter_entry.counter_id = 0x12FFFFFF
    with refused(Code.INVALID_ARGUMENT):
        client.read(unknown)
    unknown.counter_entry.counter_id = PROGRAM.p4info.direct_counters[0].preamble.id
    with refused(Code.INVALID_ARGUMENT):
        client.read(unknown)


def test_direct_counter(client: Client) -> None:
    written = entry("wide", KEY, "send_counted", [b"\x01"], priority=1)
    assert client.write((INSERT, written)) == [Code.OK]
    changed = direct(KEY)
    changed.direct_counter_entry.data.packet_count = 3
    changed.direct_counter_entry.data.byte_count = 99
    assert client.write((MODIFY, changed)) == [Code.OK]
    for request in (direct(KEY), direct(priority=0)):
        found = client.read(request)[0].direct_counter_entry
        assert (found.data.packet_count, found.data.byte_count) == (3, 99)
        assert found.table_entry.match == written.table_entry.match
    # With the entry itself, if asked for.
    assert client.read(entry("wide")) == [written]
    request = entry("wide")
    request.table_entry.counter_data.SetInParent()
    assert client.read(request)[0].table_entry.counter_data.packet_count == 3


def test_counter_given_with_the_entry(client: Client) -> None:
    written = entry("wide", KEY, "send_counted", [b"\x01"], priority=1)
    written.table_entry.counter_data.packet_count = 8
    written.table_entry.counter_data.byte_count = 80
    assert client.write((INSERT, written)) == [Code.OK]
    assert client.read(direct(KEY))[0].direct_counter_entry.data.packet_count == 8
    # A change of the action leaves the counter alone.
    other = entry("wide", KEY, "send_counted", [b"\x02"], priority=1)
    assert client.write((MODIFY, other)) == [Code.OK]
    assert client.read(direct(KEY))[0].direct_counter_entry.data.packet_count == 8
    # A new entry starts at zero.
    assert client.write((DELETE, other), (INSERT, other)) == [Code.OK] * 2
    assert client.read(direct(KEY))[0].direct_counter_entry.data.packet_count == 0


def test_direct_counter_of_no_entry(client: Client) -> None:
    absent = direct(KEY)
    absent.direct_counter_entry.data.packet_count = 3
    # The specification says NOT_FOUND, simple_switch_grpc INVALID_ARGUMENT.
    assert client.write((MODIFY, absent))[0] in (Code.NOT_FOUND, Code.INVALID_ARGUMENT)
    with refused(Code.NOT_FOUND, Code.INVALID_ARGUMENT):
        client.read(absent)


def test_direct_counter_of_a_table_without(client: Client) -> None:
    written = entry("small", KEY, "send", [b"\x01"])
    client.write((INSERT, written))
    wrong = direct(KEY, priority=0, table="small")
    wrong.direct_counter_entry.data.packet_count = 3
    assert client.write((MODIFY, wrong)) == [Code.INVALID_ARGUMENT]
    with refused(Code.INVALID_ARGUMENT):
        client.read(wrong)
    written.table_entry.counter_data.packet_count = 1
    assert client.write((MODIFY, written)) == [Code.INVALID_ARGUMENT]


def test_direct_counters_without_a_table_entry(client: Client) -> None:
    empty = p4runtime_pb2.Entity()
    empty.direct_counter_entry.SetInParent()
    assert client.write((MODIFY, empty)) == [Code.INVALID_ARGUMENT]
    with refused(Code.INVALID_ARGUMENT):
        client.read(empty)


def test_direct_counters_of_all_tables(embedded: Client) -> None:
    """simple_switch_grpc: UNIMPLEMENTED."""
    embedded.write((INSERT, entry("wide", KEY, "send_counted", [b"\x01"], priority=1)))
    everything = p4runtime_pb2.Entity()
    everything.direct_counter_entry.table_entry.SetInParent()
    assert len(embedded.read(everything)) == 1
