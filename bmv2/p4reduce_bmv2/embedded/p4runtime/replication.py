# SPDX-License-Identifier: Apache-2.0
"""Multicast groups and clone sessions (P4Runtime specification, "PacketReplicationEngineEntry")."""

from __future__ import annotations

from p4reduce_bmv2.embedded.p4runtime.pipeline import Pipeline
from p4reduce_bmv2.embedded.p4runtime.status import Code, Refused, engine_refusals
from p4reduce_bmv2.embedded.p4runtime.stubs import Message, p4runtime_pb2
from p4reduce_bmv2.embedded.p4runtime.table_entries import DELETE, INSERT
from p4reduce_bmv2.embedded.state import MAX_PORT

FIRST_RESERVED_GROUP = 1 << 15
"""simple_switch_grpc keeps the group ids from here on for its clone sessions."""
MAX_GROUPS = 4096
MAX_SESSION = FIRST_RESERVED_GROUP - 1
MAX_INSTANCE = 0xFFFF


def write(pipeline: Pipeline, kind: int, entry: Message) -> None:
    """Apply one update to a group or session."""
    which = entry.WhichOneof("type")
    if which == "multicast_group_entry":
        _write_group(pipeline, kind, entry.multicast_group_entry)
    elif which == "clone_session_entry":
        _write_session(pipeline, kind, entry.clone_session_entry)
    else:
        raise Refused(Code.INVALID_ARGUMENT, "neither a multicast group nor a clone session")


def read(pipeline: Pipeline, request: Message) -> list[Message]:
    """One group or session; all of them for id 0. NOT_FOUND when the one named is not there."""
    which = request.WhichOneof("type")
    if which == "multicast_group_entry":
        stored, wanted = pipeline.groups, request.multicast_group_entry.multicast_group_id
    elif which == "clone_session_entry":
        stored, wanted = pipeline.sessions, request.clone_session_entry.session_id
    else:
        raise Refused(Code.INVALID_ARGUMENT, "neither a multicast group nor a clone session")
    if wanted and wanted not in stored:
        raise Refused(Code.NOT_FOUND, f"there is no {which.removesuffix('_entry').replace('_', ' ')} {wanted}")
    entities = []
    for number in [wanted] if wanted else sorted(stored):
        entity = p4runtime_pb2.Entity()
        getattr(entity.packet_replication_engine_entry, which).CopyFrom(stored[number])
        entities.append(entity)
    return entities


def _write_group(pipeline: Pipeline, kind: int, entry: Message) -> None:
    number = entry.multicast_group_id
    if number == 0:
        raise Refused(Code.INVALID_ARGUMENT, "0 is no multicast group")
    if number >= FIRST_RESERVED_GROUP:
        raise Refused(Code.OUT_OF_RANGE, f"multicast groups end at {FIRST_RESERVED_GROUP - 1}, not {number}")
    _check_existence(pipeline.groups, kind, number, f"multicast group {number}")
    if kind == INSERT and len(pipeline.groups) >= MAX_GROUPS:
        raise Refused(Code.RESOURCE_EXHAUSTED, f"the switch has {MAX_GROUPS} multicast groups, all in use")
    replicas = [] if kind == DELETE else _replicas(entry)
    with pipeline.lock, engine_refusals():
        if kind == DELETE:
            pipeline.engine.delete_multicast_group(number)
        else:
            pipeline.engine.set_multicast_group(number, replicas)
    _store(pipeline.groups, kind, number, entry)


def _write_session(pipeline: Pipeline, kind: int, entry: Message) -> None:
    number = entry.session_id
    if not 0 < number <= MAX_SESSION:
        raise Refused(Code.INVALID_ARGUMENT, f"clone sessions are 1..{MAX_SESSION}, not {number}")
    _check_existence(pipeline.sessions, kind, number, f"clone session {number}")
    replicas = [] if kind == DELETE else _replicas(entry)
    if kind != DELETE and entry.class_of_service:
        raise Refused(Code.UNIMPLEMENTED, "clone sessions have no class of service here")
    if kind != DELETE and entry.packet_length_bytes:
        raise Refused(Code.UNIMPLEMENTED, "clones cannot be truncated, as on simple_switch")
    with pipeline.lock, engine_refusals():
        if kind == DELETE:
            pipeline.engine.delete_clone_session(number)
        else:
            pipeline.engine.set_clone_session(number, replicas)
    _store(pipeline.sessions, kind, number, entry)


def _check_existence(stored: dict[int, Message], kind: int, number: int, what: str) -> None:
    if kind == INSERT and number in stored:
        raise Refused(Code.ALREADY_EXISTS, f"{what} exists")
    if kind != INSERT and number not in stored:
        raise Refused(Code.NOT_FOUND, f"there is no {what}")


def _store(stored: dict[int, Message], kind: int, number: int, entry: Message) -> None:
    if kind == DELETE:
        del stored[number]
    else:
        stored[number] = type(entry)()
        stored[number].CopyFrom(entry)


def _replicas(entry: Message) -> list[tuple[int, int]]:
    """(egress port, instance) pairs; a client may name the port as a number or as bytes."""
    replicas: dict[tuple[int, int], None] = {}
    for replica in entry.replicas:
        kind = replica.WhichOneof("port_kind")
        if kind == "egress_port":
            port = replica.egress_port
        elif kind == "port" and replica.port:
            port = int.from_bytes(replica.port, "big")
        else:
            raise Refused(Code.INVALID_ARGUMENT, "a replica has no port")
        if port > MAX_PORT:
            # simple_switch silently ignores such a replica (behavioral-model #1341).
            raise Refused(Code.INVALID_ARGUMENT, f"replica port {port} is not 0..{MAX_PORT}")
        if replica.instance > MAX_INSTANCE:
            raise Refused(Code.INVALID_ARGUMENT, f"replica instance {replica.instance} is not 0..{MAX_INSTANCE}")
        if (port, replica.instance) in replicas:
            raise Refused(Code.INVALID_ARGUMENT, f"replica port {port}, instance {replica.instance} occurs twice")
        replicas[port, replica.instance] = None
    return list(replicas)
