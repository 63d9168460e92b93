# SPDX-License-Identifier: Apache-2.0
"""Pipeline configs: what is set, saved, committed, refused and read back; and the server as a whole."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import pytest
from helpers.runtime import (
    DEADLINE,
    DELETE,
    INSERT,
    KINDS,
    MODIFY,
    PROGRAMS,
    Client,
    Code,
    Get,
    Program,
    Set,
    group,
    refused,
    running,
)
from p4.config.v1.p4info_pb2 import Preamble as P4InfoPreamble
from p4.v1 import p4runtime_pb2

from p4reduce_bmv2.embedded.p4runtime import entities
from p4reduce_bmv2.embedded.p4runtime.device import Device
from p4reduce_bmv2.embedded.p4runtime.pipeline import Pipeline
from p4reduce_bmv2.embedded.p4runtime.status import MAX_TEXT
from p4reduce_bmv2.embedded.p4runtime.stubs import Message


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


@pytest.mark.parametrize("text", [b"", b"no JSON", b"{}", b"[]", b"\xff\xfe", b"[" * 20000])
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


@pytest.mark.parametrize("kind", ["tables", "actions", "counters", "direct_counters"])
@pytest.mark.parametrize("same", ["id", "name"])
def test_p4info_with_two_of_one_id_or_name(embedded: Client, program: Program, kind: str, same: str) -> None:
    config = program.config()
    objects = getattr(config.p4info, kind)
    again = objects.add()
    again.CopyFrom(objects[0])
    if same == "id":
        again.preamble.name += "x"
    else:
        again.preamble.id += 1
    with refused(Code.INVALID_ARGUMENT) as caught:
        embedded.set_pipeline(Set.VERIFY_AND_COMMIT, config)
    assert "twice" in caught.value.details()


def test_p4info_with_two_match_fields_of_one_id(embedded: Client, program: Program) -> None:
    config = program.config()
    table = next(item for item in config.p4info.tables if len(item.match_fields) > 1)
    table.match_fields[1].id = table.match_fields[0].id
    with refused(Code.INVALID_ARGUMENT) as caught:
        embedded.set_pipeline(Set.VERIFY_AND_COMMIT, config)
    assert "two match fields" in caught.value.details()


def test_author_s_table_that_is_all_const_default(client: Client) -> None:
    """In the JSON it looks like a table that the compiler made."""
    program = Program.load(PROGRAMS / "compiled/const_default.json", PROGRAMS / "compiled/const_default.p4info.txtpb")
    client.push(program)
    (found,) = client.read(program.entry("keyless", is_default_action=True))
    assert [param.value for param in found.table_entry.action.action.params] == [b"\x03"]
    assert client.read(program.entry("keyless")) == []
    change = program.entry("keyless", None, "forward", [b"\x01"], is_default_action=True)
    assert client.write((MODIFY, change)) == [Code.PERMISSION_DENIED]


def test_keyless_table_that_the_compiler_dissolved(client: Client, program: Program) -> None:
    """p4c removes such a table where its default action does nothing, and leaves it in the P4Info."""
    config = program.config()
    config.p4info.tables.add(size=1024).preamble.MergeFrom(P4InfoPreamble(id=0x2FFFFFF, name="gone", alias="gone"))
    client.set_pipeline(Set.VERIFY_AND_COMMIT, config)
    entity = p4runtime_pb2.Entity()
    entity.table_entry.table_id = 0x2FFFFFF
    assert client.write((INSERT, entity)) != [Code.OK]


def error_key() -> Program:
    return Program.load(PROGRAMS / "compiled/error_key.json", PROGRAMS / "compiled/error_key.p4info.txtpb")


def test_key_of_type_error_loads(client: Client) -> None:
    client.push(error_key())


def test_key_of_type_error_has_the_width_of_the_json(embedded: Client) -> None:
    """simple_switch_grpc believes the width 0 of the P4Info and refuses every value."""
    program = error_key()
    (table,) = program.p4info.tables
    assert table.match_fields[0].bitwidth == 0
    embedded.push(program)
    entry = program.entry("by_error", {"m.problem": b"\x01"}, "forward", [b"\x04"])
    wide = program.entry("by_error", {"m.problem": b"\x01" + bytes(4)}, "forward", [b"\x04"])
    assert embedded.write((INSERT, entry), (INSERT, wide)) == [Code.OK, Code.INVALID_ARGUMENT]
    assert embedded.read(program.entry("by_error")) == [entry]


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


@pytest.mark.parametrize("count", [200, 5000])
def test_huge_batch_names_its_first_error(embedded: Client, program: Program, count: int) -> None:
    """Beyond that the client would lose the whole status, and see no more than that its stream was removed."""
    embedded.push(program)
    updates = [(DELETE, program.entry("routes", {"a": (bytes([9, n >> 8, n & 255, 0]), 24)})) for n in range(count)]
    updates[0] = (INSERT, program.entry("routes", {"a": (b"\x0a\0\0\0", 8)}, "send", [b"\x01"]))
    request = p4runtime_pb2.WriteRequest(device_id=0)
    request.election_id.low = 1
    for kind, entity in updates:
        request.updates.add(type=kind, entity=entity)
    with refused(Code.UNKNOWN) as caught:
        embedded.stub.Write(request, timeout=DEADLINE)
    assert caught.value.details().startswith(f"{count - 1} of {count} updates failed, too many to list")
    assert "updates[1]: NOT_FOUND: table" in caught.value.details()
    assert "grpc-status-details-bin" not in dict(caught.value.trailing_metadata())
    # Every update was tried all the same.
    assert len(embedded.read(program.entry("routes"))) == 1


def test_long_message_is_cut(embedded: Client, program: Program) -> None:
    decoded = json.loads(program.json)
    action = next(item for item in decoded["actions"] if item["name"].endswith("send"))
    action["primitives"] += [{"op": f"trans\u00f6morgrify{n}", "parameters": []} for n in range(2000)]
    config = program.config()
    config.p4_device_config = json.dumps(decoded).encode()
    with refused(Code.INVALID_ARGUMENT) as caught:
        embedded.set_pipeline(Set.VERIFY_AND_COMMIT, config)
    details = caught.value.details()
    assert "2000 unsupported" in details
    assert details.endswith("...")
    assert 2000 < len(details) < MAX_TEXT


def test_defect_is_logged_and_internal(
    embedded: Client, program: Program, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("secret")

    embedded.push(program)
    monkeypatch.setattr(entities, "write", fail)
    monkeypatch.setattr(entities, "read", fail)
    for call in (lambda: embedded.write((INSERT, group(5))), lambda: embedded.read(group(5))):
        caplog.clear()
        with refused(Code.INTERNAL) as caught:
            call()
        assert "ZeroDivisionError" in caught.value.details()
        assert "secret" not in caught.value.details()
        # One record of ours, none of gRPC's own about an exception in a handler.
        assert [(r.name.split(".")[0], r.exc_info is not None) for r in caplog.records] == [("p4reduce_bmv2", True)]
    monkeypatch.setattr(Device, "packet_out", fail)
    embedded.packet_out(b"x", {})
    assert embedded.end() == Code.INTERNAL


def test_switch_stops_in_the_middle_of_a_large_write(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()
    real = entities.write

    def slow(pipeline: Pipeline, update: Message) -> None:
        begun.set()
        time.sleep(0.001)  # so that the whole batch would take far longer than the switch may
        real(pipeline, update)

    monkeypatch.setattr(entities, "write", slow)
    request = p4runtime_pb2.WriteRequest(device_id=0)
    request.election_id.low = 1
    update = p4runtime_pb2.Update(type=DELETE, entity=group(5))
    request.updates.extend([update] * 30_000)
    with running("embedded") as address:
        client = Client(address, 1)
        client.push(program)
        call = client.stub.Write.future(request, timeout=60)
        assert begun.wait(DEADLINE)
        start = time.monotonic()
    assert time.monotonic() - start < 3.0
    assert call.code() in (Code.UNAVAILABLE, Code.CANCELLED)
    client.close()


def test_switch_ends_streams_when_it_stops(program: Program) -> None:
    with running("embedded") as address:
        client = Client(address, 1)
    assert client.end() == Code.OK
    client.close()
