# SPDX-License-Identifier: Apache-2.0
"""CounterEntry and DirectCounterEntry: write and read (P4Runtime specification, sections of these names)."""

from __future__ import annotations

from p4reduce_bmv2.embedded.p4runtime import table_entries
from p4reduce_bmv2.embedded.p4runtime.p4info import CounterInfo, DirectCounterInfo, TableInfo
from p4reduce_bmv2.embedded.p4runtime.pipeline import Pipeline
from p4reduce_bmv2.embedded.p4runtime.status import Code, Refused, engine_refusals
from p4reduce_bmv2.embedded.p4runtime.stubs import Message, p4runtime_pb2
from p4reduce_bmv2.embedded.tables import Entry


def write(pipeline: Pipeline, kind: int, entry: Message) -> None:
    """Set one cell, or every cell when the index is left out. Without data nothing changes."""
    _only_modify(kind)
    counter = _counter(pipeline, entry.counter_id)
    cells = _cells(counter, entry)
    if not entry.HasField("data"):
        return
    with pipeline.lock:
        for cell in cells:
            counter.array.packets[cell] = entry.data.packet_count
            counter.array.bytes[cell] = entry.data.byte_count


def read(pipeline: Pipeline, request: Message) -> list[Message]:
    """Cells of one counter or, for id 0, of all. No index means every cell."""
    if request.counter_id:
        counters = [_counter(pipeline, request.counter_id)]
    else:
        counters = list(pipeline.index.counters.values())
    entities = []
    for counter in counters:
        cells = _cells(counter, request)
        with pipeline.lock:
            values = [(cell, counter.array.packets[cell], counter.array.bytes[cell]) for cell in cells]
        for cell, packets, size in values:
            pipeline.check_running()
            entity = p4runtime_pb2.Entity()
            proto = entity.counter_entry
            proto.counter_id = counter.id
            proto.index.index = cell
            _fill(counter, packets, size, proto.data)
            entities.append(entity)
    return entities


def write_direct(pipeline: Pipeline, kind: int, entry: Message) -> None:
    """Set the direct counter of one entry."""
    _only_modify(kind)
    info, _ = _direct(pipeline, entry)
    with pipeline.lock:
        target = _one(info, entry.table_entry)
        if entry.HasField("data"):
            target.packets = entry.data.packet_count
            target.bytes = entry.data.byte_count


def read_direct(pipeline: Pipeline, request: Message) -> list[Message]:
    """Direct counters of one entry, of a table, or of every table (id 0) that has them."""
    if request.HasField("table_entry") and request.table_entry.table_id == 0:
        tables = [pipeline.index.table(number) for number in pipeline.index.direct_counters]
        return [entity for info in tables for entity in _read_table(pipeline, info, request.table_entry)]
    info, _ = _direct(pipeline, request)
    if request.table_entry.match:
        with pipeline.lock:
            _one(info, request.table_entry)
    return _read_table(pipeline, info, request.table_entry)


def _only_modify(kind: int) -> None:
    if kind != table_entries.MODIFY:
        raise Refused(Code.INVALID_ARGUMENT, "counters can only be modified")


def _counter(pipeline: Pipeline, number: int) -> CounterInfo:
    counter = pipeline.index.counters.get(number)
    if counter is None:
        raise Refused(Code.INVALID_ARGUMENT, f"no indirect counter has the id {number:#x}")
    return counter


def _cells(counter: CounterInfo, entry: Message) -> range:
    if not entry.HasField("index"):
        return range(counter.array.size)
    index = entry.index.index
    if index < 0:
        raise Refused(Code.INVALID_ARGUMENT, f"counter index {index} is negative")
    if index >= counter.array.size:
        raise Refused(Code.OUT_OF_RANGE, f"counter {counter.name} has {counter.array.size} cells, not {index + 1}")
    return range(index, index + 1)


def _direct(pipeline: Pipeline, entry: Message) -> tuple[TableInfo, DirectCounterInfo]:
    if not entry.HasField("table_entry"):
        raise Refused(Code.INVALID_ARGUMENT, "a direct counter is named by its table entry")
    info = pipeline.index.table(entry.table_entry.table_id)
    counter = pipeline.index.direct_counters.get(info.id)
    if counter is None:
        raise Refused(Code.INVALID_ARGUMENT, f"table {info.name} has no direct counter")
    if entry.table_entry.is_default_action:
        raise Refused(Code.UNIMPLEMENTED, "default entries have no direct counter here")
    return info, counter


def _one(info: TableInfo, proto: Message) -> Entry:
    """The entry that a key names, or NOT_FOUND. The caller holds the pipeline's lock, which is not reentrant."""
    with engine_refusals():
        return info.table.get(info.table.find(table_entries.parse_key(info, proto), proto.priority))


def _read_table(pipeline: Pipeline, info: TableInfo, request: Message) -> list[Message]:
    units = pipeline.index.direct_counters[info.id]
    entities = []
    for entry in table_entries.select(pipeline, info, request):
        pipeline.check_running()
        entity = p4runtime_pb2.Entity()
        proto = entity.direct_counter_entry
        table_entries.fill_key(info, entry, proto.table_entry)
        _fill(units, entry.packets, entry.bytes, proto.data)
        entities.append(entity)
    return entities


def _fill(units: CounterInfo | DirectCounterInfo, packets: int, size: int, data: Message) -> None:
    data.packet_count = packets if units.packets else 0
    data.byte_count = size if units.bytes else 0
