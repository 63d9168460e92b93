# SPDX-License-Identifier: Apache-2.0
"""Table entries: every match kind, every rule on what an entry may say, default and constant entries, reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers.runtime import DELETE, INSERT, KINDS, MODIFY, Client, Code, Program, refused, running

from p4reduce_bmv2.embedded.p4runtime.bytestrings import encode

PROGRAM = Program.entities()
entry = PROGRAM.entry
FULL: dict[str, Any] = {"a": (b"\x0a\x00", b"\xff\x00"), "b": (b"\x05", b"\x01\x00"), "c": b"\x09", "d": b"\x01"}
"""A key of table wide in which every field says something."""


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


def wide(match: dict[str, Any] | None = None, priority: int = 1, port: bytes = b"\x02", **fields: Any) -> Any:
    return entry("wide", FULL if match is None else match, "send_counted", [port], priority=priority, **fields)


def route(prefix: bytes = b"\x0a\0\0\0", length: int = 8, port: bytes = b"\x01", **fields: Any) -> Any:
    return entry("routes", {"a": (prefix, length)}, "send", [port], **fields)


def test_entries_read_as_written(client: Client) -> None:
    small = entry("small", {"d": b"\x07"}, "send", [b"\x01\xfe"], controller_metadata=77, metadata=b"mine")
    entities = [wide(), route(), small]
    assert client.write(*((INSERT, entity) for entity in entities)) == [Code.OK] * 3
    for table, entity in zip(("wide", "routes", "small"), entities, strict=True):
        assert client.read(entry(table)) == [entity]
    # By their keys.
    assert client.read(*entities[:1]) == entities[:1]
    assert client.read(entry("small", {"d": b"\x07"})) == [small]


@pytest.mark.parametrize("left_out", ["a", "b", "c"])
def test_field_left_out_matches_everything(client: Client, left_out: str) -> None:
    match = {name: value for name, value in FULL.items() if name != left_out}
    assert client.write((INSERT, wide(match))) == [Code.OK]
    assert client.read(entry("wide")) == [wide(match)]


def test_default_route_has_no_match_field(client: Client) -> None:
    everything = entry("routes", {}, "send", [b"\x03"])
    assert client.write((INSERT, everything), (INSERT, route())) == [Code.OK] * 2
    assert sorted(map(str, client.read(entry("routes")))) == sorted(map(str, [everything, route()]))


def test_insert_modify_delete(client: Client) -> None:
    assert client.write((INSERT, route())) == [Code.OK]
    assert client.write((INSERT, route(port=b"\x02"))) == [Code.ALREADY_EXISTS]
    assert client.read(entry("routes")) == [route()]
    assert client.write((MODIFY, route(port=b"\x02", metadata=b"new"))) == [Code.OK]
    assert client.read(entry("routes")) == [route(port=b"\x02", metadata=b"new")]
    # A deletion looks at the key only.
    assert client.write((DELETE, entry("routes", {"a": (b"\x0a\0\0\0", 8)}))) == [Code.OK]
    assert client.read(entry("routes")) == []
    assert client.write((DELETE, route())) == [Code.NOT_FOUND]
    assert client.write((MODIFY, route())) == [Code.NOT_FOUND]


def test_prefixes_of_one_address_are_entries_of_their_own(client: Client) -> None:
    entities = [route(length=8), route(length=16), route(b"\x0a\x01\0\0", 16)]
    assert client.write(*((INSERT, entity) for entity in entities)) == [Code.OK] * 3
    assert client.write((DELETE, route(length=16))) == [Code.OK]
    assert sorted(map(str, client.read(entry("routes")))) == sorted(map(str, [entities[0], entities[2]]))


def test_priority_is_part_of_the_key(client: Client) -> None:
    assert client.write((INSERT, wide(priority=1)), (INSERT, wide(priority=2, port=b"\x03"))) == [Code.OK] * 2
    assert client.write((DELETE, wide(priority=1))) == [Code.OK]
    assert client.read(entry("wide")) == [wide(priority=2, port=b"\x03")]


def test_batch_goes_on_after_an_error(client: Client) -> None:
    codes = client.write((INSERT, route()), (DELETE, route(length=9)), (INSERT, route()), (INSERT, route(length=10)))
    assert codes == [Code.OK, Code.NOT_FOUND, Code.ALREADY_EXISTS, Code.OK]
    assert len(client.read(entry("routes"))) == 2


def test_values_come_back_in_their_shortest_form(client: Client) -> None:
    long = entry("routes", {"a": (b"\0\0\x0a\0\0\0", 8)}, "send", [b"\0\0\0\x01"])
    zero = entry("small", {"d": b"\0\0"}, "send", [b"\0\0\0"])
    assert client.write((INSERT, long), (INSERT, zero)) == [Code.OK] * 2
    assert client.read(entry("routes"), entry("small")) == [route(), entry("small", {"d": b"\0"}, "send", [b"\0"])]


@pytest.mark.parametrize(
    "entity",
    [
        pytest.param(entry("small", {"d": b"\x01\x00"}, "send", [b"\x01"]), id="exact too wide"),
        pytest.param(entry("small", {"d": b"\x01"}, "send", [b"\x02\x00"]), id="parameter too wide"),
        pytest.param(entry("small", {}, "send", [b"\x01"]), id="exact field missing"),
        pytest.param(entry("small", {"d": b"\x01"}, "send", []), id="parameter missing"),
        pytest.param(entry("small", {"d": b"\x01"}, "send", [b"\x01", b"\x02"]), id="parameter too many"),
        pytest.param(entry("small", {"d": b"\x01"}, "mirror", [b"\x01"]), id="action of another table"),
        pytest.param(entry("small", {"d": b"\x01"}), id="no action"),
        pytest.param(entry("small", {"d": b"\x01"}, "send", [b"\x01"], priority=3), id="priority without need"),
        pytest.param(entry("small", {"d": b"\x01"}, "send", [b"\x01"], idle_timeout_ns=5), id="idle timeout"),
        pytest.param(entry("small", {"d": b"\x01"}, "send", [b"\x01"], is_default_action=True), id="default with key"),
        pytest.param(route(b"\x0a\0\0\x01", 8), id="bits outside the prefix"),
        pytest.param(route(length=0), id="prefix of length 0"),
        pytest.param(route(length=33), id="prefix too long"),
        pytest.param(route(length=-1), id="prefix of negative length"),
        pytest.param(wide(priority=0), id="no priority"),
        pytest.param(wide(FULL | {"a": (b"\x01", b"\x02")}), id="bits outside the mask"),
        pytest.param(wide(FULL | {"a": (b"\0", b"\0")}), id="empty mask"),
        pytest.param(wide(FULL | {"b": (b"\x06", b"\x05")}), id="range upside down"),
        pytest.param(wide(FULL | {"b": (b"\0\0", b"\xff\xff")}), id="range of everything"),
    ],
)
def test_malformed_entries(client: Client, entity: Any) -> None:
    before = client.read(entry("small"), entry("routes"), entry("wide"))
    assert client.write((INSERT, entity)) == [Code.INVALID_ARGUMENT]
    assert client.read(entry("small"), entry("routes"), entry("wide")) == before == []


def test_wrong_match_kind_unknown_field_and_repeated_field(client: Client, kind: str) -> None:
    wrong = route()
    wrong.table_entry.match[0].exact.value = b"\x01"
    unknown = route()
    unknown.table_entry.match[0].field_id = 9
    assert client.write((INSERT, wrong), (INSERT, unknown)) == [Code.INVALID_ARGUMENT] * 2
    repeated = route()
    repeated.table_entry.match.add().CopyFrom(repeated.table_entry.match[0])
    assert client.write((INSERT, repeated)) == [Code.INVALID_ARGUMENT]


def test_empty_byte_string(embedded: Client) -> None:
    """simple_switch_grpc reads it as 0."""
    assert embedded.write((INSERT, entry("small", {"d": b""}, "send", [b"\x01"]))) == [Code.INVALID_ARGUMENT]


def test_unknown_ids(client: Client) -> None:
    nowhere = route()
    nowhere.table_entry.table_id = 0x2FFFFFF
    counter = route()
    counter.table_entry.table_id = PROGRAM.find("counters", "hits").preamble.id
    nothing = route()
    nothing.table_entry.action.action.action_id = 0x1FFFFFF
    updates = [(INSERT, entity) for entity in (nowhere, counter, nothing)]
    assert client.write(*updates) == [Code.INVALID_ARGUMENT] * 3
    with refused(Code.INVALID_ARGUMENT):
        client.read(nowhere)


def test_member_instead_of_action(client: Client) -> None:
    indirect = route()
    indirect.table_entry.action.action_profile_member_id = 5
    assert client.write((INSERT, indirect)) == [Code.INVALID_ARGUMENT]


def test_full_table(client: Client, kind: str) -> None:
    entities = [entry("small", {"d": bytes([n])}, "send", [b"\x01"]) for n in range(3)]
    # simple_switch_grpc knows only that something went wrong.
    full = Code.RESOURCE_EXHAUSTED if kind == "embedded" else Code.UNKNOWN
    assert client.write(*((INSERT, entity) for entity in entities)) == [Code.OK, Code.OK, full]
    assert len(client.read(entry("small"))) == 2
    assert client.write((DELETE, entities[0]), (INSERT, entities[2])) == [Code.OK] * 2


def test_action_scopes(client: Client) -> None:
    default_only = entry("small", {"d": b"\x01"}, "refuse")
    table_only = entry("small", action="spread", params=[b"\x01"], is_default_action=True)
    assert client.write((INSERT, default_only), (MODIFY, table_only)) == [Code.PERMISSION_DENIED] * 2


def test_default_entry(client: Client) -> None:
    original = entry("routes", action="refuse", is_default_action=True)
    assert client.read(entry("routes", is_default_action=True)) == [original]
    changed = entry("routes", action="send", params=[b"\x09"], is_default_action=True, metadata=b"why")
    assert client.write((MODIFY, changed)) == [Code.OK]
    assert client.read(entry("routes", is_default_action=True)) == [changed]
    # Not among the entries, and back to the program's own without an action.
    assert client.read(entry("routes")) == []
    assert client.write((MODIFY, entry("routes", is_default_action=True))) == [Code.OK]
    assert client.read(entry("routes", is_default_action=True)) == [original]


def test_default_entry_can_only_be_modified(client: Client) -> None:
    changed = entry("routes", action="send", params=[b"\x09"], is_default_action=True)
    assert client.write((INSERT, changed), (DELETE, changed)) == [Code.INVALID_ARGUMENT] * 2
    changed.table_entry.priority = 2
    assert client.write((MODIFY, changed)) == [Code.INVALID_ARGUMENT]


def test_constant_default(client: Client) -> None:
    changed = entry("small", action="refuse", is_default_action=True)
    assert client.write((MODIFY, changed)) == [Code.PERMISSION_DENIED]


def test_constant_entries(client: Client, kind: str) -> None:
    found = client.read(entry("fixed"))
    assert [(e.table_entry.match[0].exact.value, e.table_entry.action.action.params[0].value) for e in found] == [
        (b"\xc8", b"\x02"),
        (b"\xc9", b"\x03"),
    ]
    if kind == "embedded":
        assert all(e.table_entry.is_const for e in found)


@pytest.mark.parametrize("update", [INSERT, MODIFY, DELETE])
@pytest.mark.parametrize("key", [b"\xc8", b"\x01"])
def test_constant_table_is_not_written(embedded: Client, update: int, key: bytes) -> None:
    """simple_switch_grpc lets these through to its tables, which refuse them without saying why."""
    written = entry("fixed", {"d": key}, "send", [b"\x01"])
    assert embedded.write((update, written)) == [Code.PERMISSION_DENIED]


def test_wildcard_reads(client: Client) -> None:
    entities = [wide(), route(), entry("small", {"d": b"\x07"}, "send", [b"\x01"])]
    client.write(*((INSERT, entity) for entity in entities))
    everything = entry("small")
    everything.table_entry.table_id = 0
    found = client.read(everything)
    assert len(found) == 5
    for entity in entities:
        assert entity in found
    everything.table_entry.is_default_action = True
    assert {e.table_entry.table_id for e in client.read(everything)} == {
        PROGRAM.find("tables", name).preamble.id for name in ("wide", "routes", "small", "fixed")
    }


def test_reads_filter(embedded: Client) -> None:
    """simple_switch_grpc filters by table and key only."""
    entities = [wide(priority=1), wide(priority=2, metadata=b"two"), wide(priority=3, controller_metadata=3)]
    entities += [entry("wide", FULL | {"d": b"\x02"}, "refuse_counted", priority=3)]
    embedded.write(*((INSERT, entity) for entity in entities))
    assert embedded.read(entry("wide", priority=3)) == entities[2:]
    assert embedded.read(entry("wide", metadata=b"two")) == entities[1:2]
    assert embedded.read(entry("wide", controller_metadata=3)) == entities[2:3]
    assert embedded.read(entry("wide", {}, "refuse_counted")) == entities[3:]
    assert embedded.read(entry("wide", FULL)) == entities[:3]
    assert embedded.read(entry("wide", FULL, priority=2)) == entities[1:2]
    assert embedded.read(entry("small", {"d": b"\x55"})) == []


def test_key_without_a_table(embedded: Client) -> None:
    lost = entry("small", {"d": b"\x01"})
    lost.table_entry.table_id = 0
    with refused(Code.INVALID_ARGUMENT):
        embedded.read(lost)


def test_modify_without_action_changes_nothing_else(embedded: Client) -> None:
    """simple_switch_grpc, which follows specification 1.3, insists on an action."""
    assert embedded.write((INSERT, wide())) == [Code.OK]
    bare = entry("wide", FULL, priority=1)
    bare.table_entry.counter_data.packet_count = 5
    assert embedded.write((MODIFY, bare)) == [Code.OK]
    request = entry("wide")
    request.table_entry.counter_data.SetInParent()
    found = embedded.read(request)[0].table_entry
    assert found.counter_data.packet_count == 5
    assert found.action == wide().table_entry.action


def test_many_entries_come_in_pieces(client: Client) -> None:
    entities = [route(bytes([11, n, 0, 0]), 16) for n in range(64)]
    assert client.write(*((INSERT, entity) for entity in entities)) == [Code.OK] * 64
    assert len(client.read(entry("routes"))) == 64


def test_encoding() -> None:
    assert [encode(value) for value in (0, 1, 255, 256)] == [b"\0", b"\x01", b"\xff", b"\x01\0"]
