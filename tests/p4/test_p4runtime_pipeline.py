# SPDX-License-Identifier: Apache-2.0
"""Pipeline configs: what is set, saved, committed, refused and read back; and the server as a whole."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from helpers.runtime import DELETE, INSERT, KINDS, MODIFY, Client, Code, Get, Program, Set, group, refused, running
from p4.v1 import p4runtime_pb2


@pytest.fixture(params=KINDS)
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    with running(request.param) as address, Client(address, 1) as client:
        yield client


@pytest.fixture
def embedded() -> Iterator[Client]:
    with running("embedded") as address, Client(address, 1) as client:
        yield client


@pytest.fixture
def program() -> Program:
    return Program.entities()


def test_nothing_works_without_a_pipeline(client: Client, program: Program) -> None:
    with refused(Code.FAILED_PRECONDITION):
        client.get_pipeline()
    with refused(Code.FAILED_PRECONDITION):
        client.write((INSERT, group(5)))
    with refused(Code.FAILED_PRECONDITION):
        client.read(group(0))


def test_config_is_read_back(client: Client, program: Program) -> None:
    client.push(program, cookie=0x123456789ABC)
    everything = client.get_pipeline()
    assert everything.p4info == program.p4info
    assert everything.p4_device_config == program.json
    assert everything.cookie.cookie == 0x123456789ABC
    cookie = client.get_pipeline(Get.COOKIE_ONLY)
    assert cookie.cookie.cookie == 0x123456789ABC
    assert not cookie.HasField("p4info")
    assert not cookie.p4_device_config
    info = client.get_pipeline(Get.P4INFO_AND_COOKIE)
    assert (info.p4info, info.p4_device_config) == (program.p4info, b"")
    assert info.HasField("cookie")
    device = client.get_pipeline(Get.DEVICE_CONFIG_AND_COOKIE)
    assert device.p4_device_config == program.json
    assert not device.HasField("p4info")
    assert device.HasField("cookie")


def test_no_cookie_is_no_cookie(client: Client, program: Program) -> None:
    client.push(program)
    assert not client.get_pipeline(Get.COOKIE_ONLY).HasField("cookie")


def test_unknown_response_type(client: Client, program: Program) -> None:
    client.push(program)
    with refused(Code.INVALID_ARGUMENT):
        client.get_pipeline(9)


def test_new_push_starts_empty(embedded: Client, program: Program) -> None:
    """simple_switch_grpc forgets its groups here and keeps their nodes, so that it replicates twice afterwards."""
    embedded.push(program)
    route = program.entry("routes", {"a": (b"\x0a\0\0\0", 8)}, "send", [b"\x01"])
    assert (
        embedded.write((INSERT, route), (INSERT, group(5, [(1, 1)])), (MODIFY, program.counter("hits", 3, packets=7)))
        == [Code.OK] * 3
    )
    embedded.push(program)
    assert embedded.read(program.entry("routes"), group(0)) == []
    assert embedded.read(program.counter("hits", 3))[0].counter_entry.data.packet_count == 0
    assert embedded.write((INSERT, route), (INSERT, group(5, [(1, 1)]))) == [Code.OK] * 2


def test_verify_changes_nothing(embedded: Client, program: Program) -> None:
    embedded.set_pipeline(Set.VERIFY, program.config())
    with refused(Code.FAILED_PRECONDITION):
        embedded.get_pipeline()


def test_saved_config_is_written_to_before_it_runs(embedded: Client, program: Program) -> None:
    embedded.push(Program.w34(), cookie=1)
    embedded.set_pipeline(Set.VERIFY_AND_SAVE, program.config(cookie=2))
    assert embedded.get_pipeline(Get.COOKIE_ONLY).cookie.cookie == 2
    route = program.entry("routes", {"a": (b"\x0a\0\0\0", 8)}, "send", [b"\x01"])
    assert embedded.write((INSERT, route)) == [Code.OK]
    embedded.set_pipeline(Set.COMMIT)
    assert embedded.read(program.entry("routes")) == [route]
    with refused(Code.NOT_FOUND):
        embedded.set_pipeline(Set.COMMIT)


def test_commit_needs_a_saved_config_and_takes_none(embedded: Client, program: Program) -> None:
    with refused(Code.NOT_FOUND):
        embedded.set_pipeline(Set.COMMIT)
    with refused(Code.INVALID_ARGUMENT):
        embedded.set_pipeline(Set.COMMIT, program.config())


def test_reconcile_keeps_the_forwarding_state(embedded: Client, program: Program) -> None:
    """simple_switch_grpc fails here, because it inserts the constant entries again."""
    client = embedded
    client.push(program, cookie=1)
    entities = [
        program.entry("routes", {"a": (b"\x0a\0\0\0", 8)}, "send", [b"\x01"], metadata=b"note"),
        program.entry(
            "wide",
            {"a": (b"\x01", b"\x03"), "b": (b"\x05", b"\x06"), "c": b"\x09", "d": b"\x01"},
            "send_counted",
            [b"\x02"],
            priority=3,
        ),
    ]
    assert client.write(*((INSERT, entity) for entity in entities)) == [Code.OK] * len(entities)
    client.set_pipeline(Set.RECONCILE_AND_COMMIT, program.config(cookie=2))
    assert client.get_pipeline(Get.COOKIE_ONLY).cookie.cookie == 2
    assert client.read(program.entry("routes")) + client.read(program.entry("wide")) == entities


def test_reconcile_keeps_groups_sessions_and_defaults(embedded: Client, program: Program) -> None:
    """Beyond what simple_switch_grpc keeps."""
    embedded.push(program)
    default = program.entry("routes", action="send", params=[b"\x04"], is_default_action=True)
    assert embedded.write((INSERT, group(5, [(1, 1)])), (MODIFY, default)) == [Code.OK] * 2
    embedded.set_pipeline(Set.RECONCILE_AND_COMMIT, program.config())
    assert embedded.read(group(0)) == [group(5, [(1, 1)])]
    assert embedded.read(program.entry("routes", is_default_action=True)) == [default]


def test_reconcile_that_does_not_fit_leaves_all_as_it_was(embedded: Client, program: Program) -> None:
    embedded.push(program, cookie=1)
    route = program.entry("routes", {"a": (b"\x0a\0\0\0", 8)}, "send", [b"\x01"])
    embedded.write((INSERT, route))
    with refused(Code.INVALID_ARGUMENT):
        embedded.set_pipeline(Set.RECONCILE_AND_COMMIT, Program.w34().config(cookie=2))
    assert embedded.get_pipeline(Get.COOKIE_ONLY).cookie.cookie == 1
    assert embedded.read(program.entry("routes")) == [route]


def test_first_reconcile_is_a_commit(embedded: Client, program: Program) -> None:
    embedded.set_pipeline(Set.RECONCILE_AND_COMMIT, program.config(cookie=4))
    assert embedded.get_pipeline(Get.COOKIE_ONLY).cookie.cookie == 4


def test_unspecified_action(client: Client, program: Program) -> None:
    with refused(Code.INVALID_ARGUMENT):
        client.set_pipeline(Set.UNSPECIFIED, program.config())


@pytest.mark.parametrize("text", [b"", b"no JSON", b"{}", b"[]", b"\xff\xfe"])
def test_broken_device_config(embedded: Client, program: Program, text: bytes) -> None:
    config = program.config()
    config.p4_device_config = text
    embedded.push(program, cookie=1)
    with refused(Code.INVALID_ARGUMENT):
        embedded.set_pipeline(Set.VERIFY_AND_COMMIT, config)
    assert embedded.get_pipeline(Get.COOKIE_ONLY).cookie.cookie == 1


def test_unsupported_program_names_the_nodes(embedded: Client, program: Program) -> None:
    decoded = json.loads(program.json)
    action = next(item for item in decoded["actions"] if item["name"].endswith("send"))
    action["primitives"].append({"op": "transmogrify", "parameters": []})
    config = program.config()
    config.p4_device_config = json.dumps(decoded).encode()
    with refused(Code.INVALID_ARGUMENT) as caught:
        embedded.set_pipeline(Set.VERIFY_AND_COMMIT, config)
    assert "transmogrify" in caught.value.details()


def test_p4info_of_another_program(embedded: Client, program: Program) -> None:
    config = program.config()
    config.p4info.CopyFrom(Program.w34().p4info)
    with refused(Code.INVALID_ARGUMENT) as caught:
        embedded.set_pipeline(Set.VERIFY_AND_COMMIT, config)
    assert "admit" in caught.value.details()


@pytest.mark.parametrize(
    "change",
    ["table", "field count", "field width", "field type", "action", "params", "counter size", "profile"],
)
def test_p4info_that_differs(embedded: Client, program: Program, change: str) -> None:
    config = program.config()
    info = config.p4info
    table = next(item for item in info.tables if item.preamble.alias == "routes")
    if change == "table":
        table.preamble.name = "nowhere"
    elif change == "field count":
        del table.match_fields[:]
    elif change == "field width":
        table.match_fields[0].bitwidth = 31
    elif change == "field type":
        table.match_fields[0].match_type = 2
    elif change == "action":
        table.action_refs[0].id = 1
    elif change == "params":
        next(item for item in info.actions if item.preamble.alias == "send").params.add(id=2, bitwidth=1)
    elif change == "counter size":
        info.counters[0].size = 5
    else:
        table.implementation_id = 5
    with refused(Code.INVALID_ARGUMENT):
        embedded.set_pipeline(Set.VERIFY_AND_COMMIT, config)


def test_wrong_device_id_everywhere(embedded: Client, program: Program) -> None:
    embedded.push(program)
    embedded.device_id = 8
    with refused(Code.NOT_FOUND):
        embedded.push(program)
    with refused(Code.NOT_FOUND):
        embedded.get_pipeline()
    with refused(Code.NOT_FOUND):
        embedded.write()
    with refused(Code.NOT_FOUND):
        embedded.read()


def test_capabilities(client: Client) -> None:
    answer = client.stub.Capabilities(p4runtime_pb2.CapabilitiesRequest(), timeout=10)
    assert answer.p4runtime_api_version == "1.3.0"


def test_only_continue_on_error(client: Client, program: Program) -> None:
    client.push(program)
    for atomicity in (p4runtime_pb2.WriteRequest.ROLLBACK_ON_ERROR, p4runtime_pb2.WriteRequest.DATAPLANE_ATOMIC):
        with refused(Code.UNIMPLEMENTED):
            client.write((INSERT, group(5, [(1, 1)])), atomicity=atomicity)
        with refused(Code.NOT_FOUND):
            client.read(group(5))


def test_entities_that_are_not_implemented(client: Client, program: Program) -> None:
    client.push(program)
    register = p4runtime_pb2.Entity()
    register.register_entry.register_id = program.find("registers", "last").preamble.id
    value_set = p4runtime_pb2.Entity()
    value_set.value_set_entry.value_set_id = 3
    for entity in (register, value_set):
        assert client.write((MODIFY, entity)) == [Code.UNIMPLEMENTED]
        with refused(Code.UNIMPLEMENTED):
            client.read(entity)


def test_empty_update_and_empty_read(embedded: Client, program: Program) -> None:
    embedded.push(program)
    empty = p4runtime_pb2.Entity()
    assert embedded.write((INSERT, empty), (0, group(5)), (DELETE, group(5))) == [
        Code.INVALID_ARGUMENT,
        Code.INVALID_ARGUMENT,
        Code.NOT_FOUND,
    ]
    with refused(Code.INVALID_ARGUMENT):
        embedded.read(empty)
    assert embedded.read() == []


def test_meters_and_digests_are_not_implemented(embedded: Client, program: Program) -> None:
    embedded.push(program)
    for name in ("meter_entry", "direct_meter_entry", "digest_entry", "extern_entry", "action_profile_member"):
        entity = p4runtime_pb2.Entity()
        getattr(entity, name).SetInParent()
        assert embedded.write((MODIFY, entity)) == [Code.UNIMPLEMENTED]


def test_large_batch_keeps_its_details(embedded: Client, program: Program) -> None:
    """A gRPC client takes 8 KiB of metadata; beyond, the texts go and the codes stay."""
    embedded.push(program)
    updates = [(DELETE, program.entry("routes", {"a": (bytes([9, n, 0, 0]), 16)})) for n in range(120)]
    assert embedded.write(*updates) == [Code.NOT_FOUND] * 120


def test_switch_ends_streams_when_it_stops(program: Program) -> None:
    with running("embedded") as address:
        client = Client(address, 1)
    assert client.end() == Code.OK
    client.close()
