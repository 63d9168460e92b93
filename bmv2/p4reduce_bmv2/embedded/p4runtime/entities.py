# SPDX-License-Identifier: Apache-2.0
"""Hands each entity of a Write or Read to the module that knows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from p4reduce_bmv2.embedded.p4runtime import counter_entries, replication, table_entries
from p4reduce_bmv2.embedded.p4runtime.pipeline import Pipeline
from p4reduce_bmv2.embedded.p4runtime.status import Code, Refused
from p4reduce_bmv2.embedded.p4runtime.stubs import Message, p4runtime_pb2

_Writer = Callable[[Pipeline, int, Message], None]
_Reader = Callable[[Pipeline, Message], list[Message]]

# What is missing here is UNIMPLEMENTED; simple_switch_grpc says the same of registers, value sets and externs.
_WRITERS: dict[str, _Writer] = {
    "table_entry": table_entries.write,
    "counter_entry": counter_entries.write,
    "direct_counter_entry": counter_entries.write_direct,
    "packet_replication_engine_entry": replication.write,
}
_READERS: dict[str, _Reader] = {
    "table_entry": table_entries.read,
    "counter_entry": counter_entries.read,
    "direct_counter_entry": counter_entries.read_direct,
    "packet_replication_engine_entry": replication.read,
}
_KINDS = (p4runtime_pb2.Update.INSERT, p4runtime_pb2.Update.MODIFY, p4runtime_pb2.Update.DELETE)


def write(pipeline: Pipeline, update: Message) -> None:
    """Apply one update of a batch. Refused with the code that the P4Runtime specification gives."""
    if update.type not in _KINDS:
        raise Refused(Code.INVALID_ARGUMENT, "the update has no type")
    which = _which(update.entity)
    writer = _WRITERS.get(which)
    if writer is None:
        raise Refused(Code.UNIMPLEMENTED, f"writing a {which} is not implemented")
    writer(pipeline, update.type, getattr(update.entity, which))


def read(pipeline: Pipeline, entity: Message) -> list[Message]:
    """Entities that one request of a Read selects."""
    which = _which(entity)
    reader = _READERS.get(which)
    if reader is None:
        raise Refused(Code.UNIMPLEMENTED, f"reading a {which} is not implemented")
    return reader(pipeline, getattr(entity, which))


def replay(old: Pipeline, new: Pipeline) -> None:
    """Carry table entries, default actions, groups and sessions over; registers and counters start at zero.

    Refused when an entry does not fit the new program; what was written to `new` before then is meaningless.
    """
    for kind, entity in _forwarding_state(old):
        write(new, p4runtime_pb2.Update(type=kind, entity=entity))


def _forwarding_state(old: Pipeline) -> Iterator[tuple[int, Message]]:
    everything = p4runtime_pb2.Entity()
    everything.table_entry.table_id = 0
    for entity in read(old, everything):
        info = old.index.table(entity.table_entry.table_id)
        if not (info.const_table or entity.table_entry.is_const):
            yield table_entries.INSERT, entity
    everything.table_entry.is_default_action = True
    for entity in read(old, everything):
        if entity.table_entry.table_id in old.defaults:
            yield table_entries.MODIFY, entity
    for which in ("multicast_group_entry", "clone_session_entry"):
        request = p4runtime_pb2.Entity()
        getattr(request.packet_replication_engine_entry, which).SetInParent()
        for entity in read(old, request):
            yield table_entries.INSERT, entity


def _which(entity: Message) -> str:
    which = entity.WhichOneof("entity")
    if which is None:
        raise Refused(Code.INVALID_ARGUMENT, "an empty entity")
    return str(which)
