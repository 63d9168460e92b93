# SPDX-License-Identifier: Apache-2.0
"""TableEntry: write and read (P4Runtime specification, "TableEntry")."""

from __future__ import annotations

from p4reduce_bmv2.embedded.errors import EntryMissing
from p4reduce_bmv2.embedded.p4runtime.bytestrings import decode, encode
from p4reduce_bmv2.embedded.p4runtime.p4info import FieldInfo, TableInfo
from p4reduce_bmv2.embedded.p4runtime.pipeline import NO_NOTE, Note, Pipeline
from p4reduce_bmv2.embedded.p4runtime.status import Code, Refused, engine_refusals
from p4reduce_bmv2.embedded.p4runtime.stubs import Message, p4info_pb2, p4runtime_pb2
from p4reduce_bmv2.embedded.tables import Entry, Key, KeyElement

INSERT = p4runtime_pb2.Update.INSERT
MODIFY = p4runtime_pb2.Update.MODIFY
DELETE = p4runtime_pb2.Update.DELETE


def write(pipeline: Pipeline, kind: int, entry: Message) -> None:
    """Apply one update."""
    info = pipeline.index.table(entry.table_id)
    _check_fields(pipeline, info, entry)
    if entry.is_default_action:
        _write_default(pipeline, kind, info, entry)
        return
    if info.const_table and (kind != MODIFY or entry.HasField("action")):
        raise Refused(Code.PERMISSION_DENIED, f"the entries of table {info.name} are constant")
    key = parse_key(info, entry)
    priority = _priority(info, entry)
    if kind == INSERT:
        _insert(pipeline, info, entry, key, priority)
    elif kind == MODIFY:
        _modify(pipeline, info, entry, key, priority)
    else:
        _delete(pipeline, info, key, priority)


def read(pipeline: Pipeline, request: Message) -> list[Message]:
    """All entries that a request selects, as Entity messages. Table id 0 selects every table."""
    if request.table_id:
        infos = [pipeline.index.table(request.table_id)]
    elif request.match:
        raise Refused(Code.INVALID_ARGUMENT, "a match key needs a table id")
    else:
        infos = list(pipeline.index.tables.values())
    entities = []
    for info in infos:
        if request.is_default_action:
            entities.append(_read_default(pipeline, info))
            continue
        for entry in select(pipeline, info, request):
            pipeline.check_running()
            note = pipeline.notes.get((info.id, entry.handle), NO_NOTE)
            if _filtered(info, request, entry, note):
                continue
            entities.append(_to_entity(pipeline, info, entry, note, request.HasField("counter_data")))
    return entities


def select(pipeline: Pipeline, info: TableInfo, request: Message) -> list[Entry]:
    """Entries with the request's match key and priority; every entry when it has no key. A snapshot."""
    with pipeline.lock:
        if not request.match:
            return list(info.table.entries())
        key = parse_key(info, request)
        if not info.table.needs_priority:
            try:
                return [info.table.get(info.table.find(key))]
            except EntryMissing:
                return []
        wanted = request.priority
        return [entry for entry in info.table.entries() if entry.key == key and wanted in (0, entry.priority)]


def parse_key(info: TableInfo, entry: Message) -> Key:
    """The engine's key for a TableEntry's match fields."""
    key: list[KeyElement] = [_any(field) for field in _in_order(info)]
    seen = set()
    for match in entry.match:
        field = info.fields.get(match.field_id)
        if field is None:
            raise Refused(Code.INVALID_ARGUMENT, f"table {info.name} has no match field {match.field_id}")
        if match.field_id in seen:
            raise Refused(Code.INVALID_ARGUMENT, f"match field {info.name}.{field.name} occurs twice")
        seen.add(match.field_id)
        key[field.position] = _element(info, field, match)
    for field in info.fields.values():
        if field.match_type == "exact" and field.id not in seen:
            raise Refused(Code.INVALID_ARGUMENT, f"match field {info.name}.{field.name} is missing")
    return tuple(key)


def fill_key(info: TableInfo, entry: Entry, proto: Message) -> None:
    """Write an entry's key and priority into a TableEntry; don't-care fields are left out."""
    proto.table_id = info.id
    proto.priority = entry.priority
    for field in info.fields.values():
        element = entry.key[field.position]
        if element == _any(field):
            continue
        match = proto.match.add(field_id=field.id)
        if field.match_type == "optional":
            match.optional.value = encode(element[0] if isinstance(element, tuple) else element or 0)
        elif isinstance(element, tuple):
            first, second = element
            if field.match_type == "lpm":
                match.lpm.value, match.lpm.prefix_len = encode(first), second
            elif field.match_type == "ternary":
                match.ternary.value, match.ternary.mask = encode(first), encode(second)
            else:
                match.range.low, match.range.high = encode(first), encode(second)
        else:
            match.exact.value = encode(element or 0)


def _in_order(info: TableInfo) -> list[FieldInfo]:
    return sorted(info.fields.values(), key=lambda field: field.position)


def _any(field: FieldInfo) -> KeyElement:
    """The key element that matches everything; -1, which no entry has, for an exact field."""
    if field.engine_type == "range":
        return (0, (1 << field.bitwidth) - 1)
    return {"exact": -1, "optional": None}.get(field.engine_type, (0, 0))


def _element(info: TableInfo, field: FieldInfo, match: Message) -> KeyElement:
    what = f"match field {info.name}.{field.name}"
    kind = match.WhichOneof("field_match_type")
    if kind != field.match_type:
        raise Refused(Code.INVALID_ARGUMENT, f"{what} is {field.match_type}, not {kind}")
    value = getattr(match, kind)
    width = field.bitwidth
    if kind in ("exact", "optional"):
        number = decode(value.value, width, what)
        return (number, (1 << width) - 1) if field.engine_type == "ternary" else number
    element: tuple[int, int]
    if kind == "lpm":
        element = (decode(value.value, width, what), value.prefix_len)
        if not 0 <= value.prefix_len <= width:
            raise Refused(Code.INVALID_ARGUMENT, f"{what}: prefix length {value.prefix_len} of {width} bits")
        if element[0] & ((1 << (width - value.prefix_len)) - 1):
            raise Refused(Code.INVALID_ARGUMENT, f"{what}: bits outside the prefix must be 0")
    elif kind == "ternary":
        element = (decode(value.value, width, what), decode(value.mask, width, what))
        if element[0] & ~element[1]:
            raise Refused(Code.INVALID_ARGUMENT, f"{what}: bits outside the mask must be 0")
    else:
        element = (decode(value.low, width, what), decode(value.high, width, what))
        if element[0] > element[1]:
            raise Refused(Code.INVALID_ARGUMENT, f"{what}: the low bound is above the high bound")
    if element == _any(field):
        raise Refused(Code.INVALID_ARGUMENT, f"{what} matches everything: leave the field out")
    return element


def _priority(info: TableInfo, entry: Message) -> int:
    if info.table.needs_priority and entry.priority <= 0:
        raise Refused(Code.INVALID_ARGUMENT, f"entries of table {info.name} need a priority above 0")
    if not info.table.needs_priority and entry.priority != 0:
        raise Refused(Code.INVALID_ARGUMENT, f"entries of table {info.name} have no priority")
    return int(entry.priority)


def _check_fields(pipeline: Pipeline, info: TableInfo, entry: Message) -> None:
    """Fields of a TableEntry that this switch has no use for."""
    if entry.HasField("time_since_last_hit"):
        raise Refused(Code.INVALID_ARGUMENT, "time_since_last_hit is for reads")
    if entry.idle_timeout_ns:
        code = Code.UNIMPLEMENTED if info.ages else Code.INVALID_ARGUMENT
        raise Refused(code, f"table {info.name} has no idle timeout")
    if entry.HasField("meter_config") or entry.HasField("meter_counter_data"):
        raise Refused(Code.INVALID_ARGUMENT, f"table {info.name} has no direct meter")
    if entry.HasField("counter_data") and info.id not in pipeline.index.direct_counters:
        raise Refused(Code.INVALID_ARGUMENT, f"table {info.name} has no direct counter")


def _parse_action(info: TableInfo, entry: Message) -> tuple[str, tuple[int, ...]]:
    kind = entry.action.WhichOneof("type")
    if kind != "action":
        raise Refused(Code.INVALID_ARGUMENT, f"table {info.name} needs an action, not {kind}")
    proto = entry.action.action
    if proto.action_id not in info.actions:
        raise Refused(Code.INVALID_ARGUMENT, f"table {info.name} has no action with the id {proto.action_id:#x}")
    action, scope = info.actions[proto.action_id]
    wrong = p4info_pb2.ActionRef.TABLE_ONLY if entry.is_default_action else p4info_pb2.ActionRef.DEFAULT_ONLY
    if scope == wrong:
        place = "default action" if entry.is_default_action else "action of an entry"
        raise Refused(Code.PERMISSION_DENIED, f"{action.name} may not be the {place} of table {info.name}")
    given = {param.param_id: param.value for param in proto.params}
    wanted = [number for number, _ in action.params]
    if len(given) != len(proto.params) or sorted(given) != sorted(wanted):
        raise Refused(
            Code.INVALID_ARGUMENT,
            f"action {action.name} needs the parameters {wanted}, not {sorted(given)}",
        )
    values = tuple(decode(given[number], width, f"{action.name} parameter {number}") for number, width in action.params)
    return action.name, values


def _note(entry: Message) -> Note:
    return Note(entry.controller_metadata, entry.metadata)


def _set_counter(entry: Message, target: Entry) -> None:
    if entry.HasField("counter_data"):
        target.packets = entry.counter_data.packet_count
        target.bytes = entry.counter_data.byte_count


def _insert(pipeline: Pipeline, info: TableInfo, entry: Message, key: Key, priority: int) -> None:
    if not entry.HasField("action"):
        raise Refused(Code.INVALID_ARGUMENT, "an INSERT needs an action")
    action, params = _parse_action(info, entry)
    with pipeline.lock, engine_refusals():
        handle = info.table.insert(key, action, params, priority)
        _set_counter(entry, info.table.get(handle))
        pipeline.notes[info.id, handle] = _note(entry)


def _modify(pipeline: Pipeline, info: TableInfo, entry: Message, key: Key, priority: int) -> None:
    """Without an action only the direct counter changes, which constant entries allow too."""
    action = _parse_action(info, entry) if entry.HasField("action") else None
    with pipeline.lock, engine_refusals():
        handle = info.table.find(key, priority)
        if action is not None:
            _refuse_const(info, handle)
            info.table.modify(handle, *action)
            pipeline.notes[info.id, handle] = _note(entry)
        _set_counter(entry, info.table.get(handle))


def _delete(pipeline: Pipeline, info: TableInfo, key: Key, priority: int) -> None:
    with pipeline.lock, engine_refusals():
        handle = info.table.find(key, priority)
        _refuse_const(info, handle)
        info.table.delete(handle)
        pipeline.notes.pop((info.id, handle), None)


def _refuse_const(info: TableInfo, handle: int) -> None:
    if info.table.get(handle).const:
        raise Refused(Code.PERMISSION_DENIED, f"this entry of table {info.name} is constant")


def _write_default(pipeline: Pipeline, kind: int, info: TableInfo, entry: Message) -> None:
    if kind != MODIFY:
        raise Refused(Code.INVALID_ARGUMENT, "a default entry can only be modified")
    if entry.match or entry.priority:
        raise Refused(Code.INVALID_ARGUMENT, "a default entry has neither match fields nor a priority")
    if info.const_default:
        raise Refused(Code.PERMISSION_DENIED, f"the default action of table {info.name} is constant")
    if entry.HasField("counter_data"):
        raise Refused(Code.UNIMPLEMENTED, "default entries have no direct counter here")
    action = _parse_action(info, entry) if entry.HasField("action") else None
    with pipeline.lock, engine_refusals():
        if action is None:
            info.table.reset_default()
            pipeline.defaults.pop(info.id, None)
        else:
            info.table.set_default(*action)
            pipeline.defaults[info.id] = _note(entry)


def _fill_action(info: TableInfo, name: str, params: tuple[int, ...], proto: Message) -> None:
    for action, _ in info.actions.values():
        if action.name == name:
            proto.action_id = action.id
            for (number, _), value in zip(action.params, params, strict=True):
                proto.params.add(param_id=number, value=encode(value))
            return


def _read_default(pipeline: Pipeline, info: TableInfo) -> Message:
    entity = p4runtime_pb2.Entity()
    proto = entity.table_entry
    proto.table_id = info.id
    proto.is_default_action = True
    with pipeline.lock:
        default = info.table.default
    if default is not None:
        _fill_action(info, *default, proto.action.action)
    note = pipeline.defaults.get(info.id, NO_NOTE)
    proto.controller_metadata, proto.metadata = note.controller_metadata, note.metadata
    return entity


def _filtered(info: TableInfo, request: Message, entry: Entry, note: Note) -> bool:
    """True when a field of the request other than its key excludes the entry."""
    if request.priority and request.priority != entry.priority:
        return True
    if request.controller_metadata and request.controller_metadata != note.controller_metadata:
        return True
    if request.metadata and request.metadata != note.metadata:
        return True
    if request.HasField("action"):
        action = info.actions.get(request.action.action.action_id)
        return action is None or action[0].name != entry.action
    return False


def _to_entity(pipeline: Pipeline, info: TableInfo, entry: Entry, note: Note, counters: bool) -> Message:
    entity = p4runtime_pb2.Entity()
    proto = entity.table_entry
    fill_key(info, entry, proto)
    _fill_action(info, entry.action, entry.params, proto.action.action)
    proto.controller_metadata, proto.metadata, proto.is_const = note.controller_metadata, note.metadata, entry.const
    units = pipeline.index.direct_counters.get(info.id)
    if counters and units is not None:
        proto.counter_data.packet_count = entry.packets if units.packets else 0
        proto.counter_data.byte_count = entry.bytes if units.bytes else 0
    return entity
