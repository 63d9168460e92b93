# SPDX-License-Identifier: Apache-2.0
"""Multicast groups and clone sessions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers.runtime import DELETE, INSERT, KINDS, MODIFY, Client, Code, Program, group, refused, running, session
from p4.v1 import p4runtime_pb2

PROGRAM = Program.entities()


@pytest.fixture(scope="module", params=KINDS)
def shared(request: pytest.FixtureRequest) -> Iterator[tuple[str, Client]]:
    with running(request.param) as address, Client(address, 1) as client:
        yield request.param, client


@pytest.fixture
def kind(shared: tuple[str, Client]) -> str:
    return shared[0]


@pytest.fixture
def client(shared: tuple[str, Client]) -> Client:
    client = shared[1]
    if shared[0] == "bmv2":
        # A push alone would leave the nodes of the groups in the replication engine.
        client.push(PROGRAM)
        leftovers = client.read(group(0)) + client.read(session(0))
        client.write(*((DELETE, entity) for entity in leftovers))
    client.push(PROGRAM)
    return client


@pytest.fixture(scope="module")
def own() -> Iterator[Client]:
    with running("embedded") as address, Client(address, 1) as client:
        yield client


@pytest.fixture
def embedded(own: Client) -> Client:
    """For what the embedded switch does as the specification says, and simple_switch_grpc does not."""
    own.push(PROGRAM)
    return own


@pytest.fixture(params=["group", "session"])
def make(request: pytest.FixtureRequest) -> Any:
    return group if request.param == "group" else session


def replicas(entity: Any) -> set[tuple[int | bytes, int]]:
    entry = entity.packet_replication_engine_entry
    which = getattr(entry, entry.WhichOneof("type"))
    return {(getattr(item, item.WhichOneof("port_kind")), item.instance) for item in which.replicas}


def test_insert_modify_delete(client: Client, make: Any) -> None:
    assert client.write((INSERT, make(5, [(1, 1), (2, 1), (1, 2)]))) == [Code.OK]
    assert replicas(client.read(make(5))[0]) == {(1, 1), (2, 1), (1, 2)}
    assert client.write((INSERT, make(5, [(3, 1)]))) == [Code.ALREADY_EXISTS]
    assert client.write((MODIFY, make(5, [(3, 1)]))) == [Code.OK]
    assert replicas(client.read(make(5))[0]) == {(3, 1)}
    assert client.write((DELETE, make(5))) == [Code.OK]
    with refused(Code.NOT_FOUND):
        client.read(make(5))
    assert client.write((DELETE, make(5)), (MODIFY, make(5))) == [Code.NOT_FOUND] * 2
    assert client.write((INSERT, make(5))) == [Code.OK]
    assert replicas(client.read(make(5))[0]) == set()


def test_wildcard_read(client: Client, make: Any) -> None:
    assert client.read(make(0)) == []
    client.write((INSERT, make(9, [(1, 1)])), (INSERT, make(4, [(2, 1)])), (INSERT, make(6, [(3, 1)])))
    assert sorted(map(str, client.read(make(0)))) == sorted(
        map(str, [make(4, [(2, 1)]), make(6, [(3, 1)]), make(9, [(1, 1)])])
    )


def test_groups_and_sessions_are_apart(client: Client) -> None:
    assert client.write((INSERT, group(5, [(1, 1)])), (INSERT, session(5, [(2, 1)]))) == [Code.OK] * 2
    assert client.read(group(0)) == [group(5, [(1, 1)])]
    assert client.read(session(0)) == [session(5, [(2, 1)])]


def test_port_as_bytes(client: Client, make: Any) -> None:
    written = make(5, [(b"\x01", 1), (b"\x01\x05", 2)])
    assert client.write((INSERT, written)) == [Code.OK]
    assert replicas(client.read(make(5))[0]) == {(b"\x01", 1), (b"\x01\x05", 2)}


def test_malformed_replicas(client: Client, make: Any) -> None:
    twice = make(5, [(1, 1), (1, 1)])
    empty_port = make(5, [(b"", 1)])
    no_port = make(5, [(1, 1)])
    entry = no_port.packet_replication_engine_entry
    getattr(entry, entry.WhichOneof("type")).replicas[0].ClearField("egress_port")
    updates = [(INSERT, entity) for entity in (twice, empty_port, no_port)]
    assert client.write(*updates) == [Code.INVALID_ARGUMENT] * 3
    assert client.read(make(0)) == []


def test_same_port_in_both_spellings(embedded: Client, make: Any) -> None:
    assert embedded.write((INSERT, make(5, [(1, 1), (b"\x01", 1)]))) == [Code.INVALID_ARGUMENT]


def test_ports_and_instances_out_of_range(embedded: Client, make: Any) -> None:
    """simple_switch_grpc ignores such a port and takes the instance modulo 2^16."""
    updates = [(INSERT, make(5, [replica])) for replica in ((511, 1), (b"\x02\x00", 1), (1, 1 << 16))]
    assert embedded.write(*updates) == [Code.INVALID_ARGUMENT] * 3


def test_numbers_out_of_range(client: Client) -> None:
    assert client.write((INSERT, group(0, [(1, 1)])), (INSERT, session(0, [(1, 1)]))) == [Code.INVALID_ARGUMENT] * 2
    assert client.write((INSERT, group(1 << 15, [(1, 1)]))) == [Code.OUT_OF_RANGE]
    assert client.write((INSERT, session(1 << 15, [(1, 1)]))) == [Code.INVALID_ARGUMENT]


def test_class_of_service(client: Client) -> None:
    assert client.write((INSERT, session(5, [(1, 1)], class_of_service=1))) == [Code.UNIMPLEMENTED]
    assert client.read(session(0)) == []


def test_truncated_clones(client: Client, kind: str) -> None:
    refusal = Code.UNIMPLEMENTED if kind == "embedded" else Code.UNKNOWN
    assert client.write((INSERT, session(5, [(1, 1)], packet_length_bytes=60))) == [refusal]
    assert client.read(session(0)) == []


def test_neither_group_nor_session(client: Client) -> None:
    empty = p4runtime_pb2.Entity()
    empty.packet_replication_engine_entry.SetInParent()
    assert client.write((INSERT, empty)) == [Code.INVALID_ARGUMENT]
    with refused(Code.INVALID_ARGUMENT):
        client.read(empty)


def test_group_metadata_comes_back(embedded: Client) -> None:
    written = group(5, [(1, 1)])
    written.packet_replication_engine_entry.multicast_group_entry.metadata = b"mine"
    assert embedded.write((INSERT, written)) == [Code.OK]
    assert embedded.read(group(5)) == [written]
