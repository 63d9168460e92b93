# SPDX-License-Identifier: Apache-2.0
"""The client that the controller is built on, p4runtime-shell's low-level one, against both switches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.runtime import COMPILED, INSERT, KINDS, MODIFY, Code, Program, group, number, running
from p4.v1 import p4runtime_pb2

# Elsewhere only the controller speaks to p4runtime-shell; here the switch is shown to speak with it.
shell = pytest.importorskip("p4runtime_sh.p4runtime")


@pytest.fixture(params=KINDS)
def client(request: pytest.FixtureRequest) -> Iterator[Any]:
    with running(request.param) as address:
        client = shell.P4RuntimeClient(0, address, (0, 1))
        try:
            yield client
        finally:
            client.tear_down()


@pytest.fixture
def program() -> Program:
    return Program.w34()


def push(client: Any) -> None:
    client.set_fwd_pipe_config(str(COMPILED / "w34.p4info.txtpb"), str(COMPILED / "w34.json"))


def update(kind: int, entity: Any) -> Any:
    return p4runtime_pb2.Update(type=kind, entity=entity)


def test_handshake_version_and_p4info(client: Any, program: Program) -> None:
    assert client.api_version() == "1.3.0"
    with pytest.raises(shell.P4RuntimeException, match="FAILED_PRECONDITION"):
        client.get_p4info()
    push(client)
    assert client.get_p4info() == program.p4info


def test_every_table_of_the_program(client: Any, program: Program) -> None:
    """One entry of each, written and read back."""
    push(client)
    ip, mac = bytes([10, 0, 0, 1]), bytes.fromhex("027034000001")
    place = {"ingress_port": b"\x01", "ipv4_src": ip}
    entries = [
        program.entry(
            "admit",
            place | {"udp_src": b"\x9c\x41", "epoch": b"\x07", "rank": b"\0"},
            "admit_worker",
            [b"\x01", b"\x03", b"\0", b"\x40", b"\x14", b"\x02", b"\x01"],
        ),
        program.entry("epochs", {"epoch": b"\x07"}, "known_epoch", [b"\x01"]),
        program.entry("worker_ports", place, "nack"),
        program.entry("sources", {"ingress_port": b"\x01", "src_mac": mac, "src_ip": ip}, "permit"),
        program.entry("forward", {"dst_mac": mac}, "to_port", [b"\x01"]),
        program.entry("forward", {"dst_mac": b"\xff" * 6}, "flood", [b"\x01"]),
        program.entry("arp", {"target_ip": ip}, "answer_arp", [mac]),
        program.entry("replica", {"egress_rid": b"\x64"}, "to_worker", [mac, ip, b"\x9c\x41", b"\0"]),
    ]
    for entity in entries:
        # The compiler writes canonical forms; leading zeros would come back shortened.
        client.write_update(update(INSERT, entity))
    client.write_update(update(INSERT, group(20, [(1, 100), (2, 101)])))
    for entity in entries:
        wanted = p4runtime_pb2.Entity()
        wanted.table_entry.table_id = entity.table_entry.table_id
        wanted.table_entry.match.extend(entity.table_entry.match)
        found = [e for response in client.read_one(wanted) for e in response.entities]
        assert found == [entity]
    counters = [e for response in client.read_one(program.counter("reduce_counter")) for e in response.entities]
    assert len(counters) == 4096


def test_errors_of_a_batch_are_understood(client: Any, program: Program) -> None:
    push(client)
    entry = program.entry("epochs", {"epoch": b"\x07"}, "known_epoch", [b"\x01"])
    client.write_update(update(INSERT, entry))
    # Errors first: the client's iterator never gets past a success that comes before an error.
    request = p4runtime_pb2.WriteRequest()
    request.updates.append(update(INSERT, entry))
    request.updates.append(update(MODIFY, program.entry("epochs", {"epoch": b"\x09"}, "known_epoch", [b"\x01"])))
    with pytest.raises(shell.P4RuntimeWriteException) as caught:
        client.write(request)
    assert [(index, error.canonical_code) for index, error in caught.value.errors] == [
        (0, number(Code.ALREADY_EXISTS)),
        (1, number(Code.NOT_FOUND)),
    ]
    assert all(error.message and error.space for _, error in caught.value.errors)


def test_backup_is_refused(client: Any, capsys: pytest.CaptureFixture[str]) -> None:
    push(client)
    address = client.channel._channel.target().decode()
    backup = shell.P4RuntimeClient(0, address, (0, 0))
    try:
        assert "not the primary" in capsys.readouterr().out
        with pytest.raises(shell.P4RuntimeException, match="PERMISSION_DENIED"):
            push(backup)
    finally:
        backup.tear_down()


def test_packet_out_and_in(client: Any) -> None:
    client.set_fwd_pipe_config(
        str(Path(__file__).parent / "programs" / "entities.p4info.txtpb"),
        str(Path(__file__).parent / "programs" / "entities.json"),
    )
    message = p4runtime_pb2.StreamMessageRequest()
    message.packet.payload = bytes(20)
    message.packet.metadata.add(metadata_id=1, value=b"\x01\xfe")
    message.packet.metadata.add(metadata_id=2, value=b"\0")
    client.stream_out_q.put(message)
    packet = client.get_stream_packet("packet", timeout=10)
    assert packet.packet.payload == bytes(20)


def test_tear_down_and_come_back() -> None:
    """The same election id is free again once the stream has ended in good order."""
    with running("embedded") as address:
        for _ in range(3):
            with contextlib.closing(contextlib.ExitStack()) as undo:
                client = shell.P4RuntimeClient(0, address, (0, 1))
                undo.callback(client.tear_down)
                push(client)
