# SPDX-License-Identifier: Apache-2.0
"""Entities by name to and from P4Runtime's messages by number."""

from __future__ import annotations

from typing import Any

from p4.v1 import p4runtime_pb2

from p4reduce.errors import SwitchError
from p4reduce_controller.entries import CounterCell, Entity, Fields, Group, TableEntry


class Codec:
    """Translates with the names of one P4Info."""

    def __init__(self, context: Any) -> None:
        """`context`: p4runtime-shell's look-up of a P4Info's names (p4runtime_sh.context.Context)."""
        self._context = context

    def encode(self, entity: Entity, message: Any, *, key_only: bool = False) -> None:
        """Fill a p4.v1.Entity. SwitchError when the program has no such name, or a value does not fit."""
        if isinstance(entity, TableEntry):
            self._encode_table(entity, message.table_entry, key_only)
        elif isinstance(entity, Group):
            self._encode_group(entity, message, key_only)
        else:
            self._encode_counter(entity, message.counter_entry)

    def table_wildcard(self, table: str) -> Any:
        """A p4.v1.Entity that asks for all entries of a table."""
        entity = p4runtime_pb2.Entity()
        entity.table_entry.table_id = self._known(self._context.get_table(table), f"table {table}").preamble.id
        return entity

    def _encode_table(self, entry: TableEntry, message: Any, key_only: bool) -> None:
        table = self._known(self._context.get_table(entry.table), f"table {entry.table}")
        message.table_id = table.preamble.id
        for name, value in entry.key:
            field = self._known(self._context.get_mf(entry.table, name), f"key {name} of table {entry.table}")
            match = message.match.add(field_id=field.id)
            match.exact.value = _bytes(value, field.bitwidth, f"{entry}: {name}")
        if key_only:
            return
        action = self._known(self._context.get_action(entry.action), f"action {entry.action}")
        message.action.action.action_id = action.preamble.id
        for name, value in entry.params:
            param = self._known(self._context.get_param(entry.action, name), f"parameter {name} of {entry.action}")
            encoded = _bytes(value, param.bitwidth, f"{entry}: {name}")
            message.action.action.params.add(param_id=param.id, value=encoded)

    def _encode_group(self, group: Group, message: Any, key_only: bool) -> None:
        entry = message.packet_replication_engine_entry.multicast_group_entry
        entry.multicast_group_id = group.number
        if key_only:
            return
        for port, instance in sorted(group.replicas):
            # Not the newer bytes field `port`: P4Runtime 1.3 servers do not know it.
            entry.replicas.add(egress_port=port, instance=instance)

    def _encode_counter(self, cell: CounterCell, message: Any) -> None:
        counter = self._known(self._context.get_counter(cell.counter), f"counter {cell.counter}")
        message.counter_id = counter.preamble.id
        message.index.index = cell.index
        message.data.packet_count = cell.packets

    def decode_table(self, entry: Any) -> TableEntry:
        """A p4.v1.TableEntry with exact matches and a plain action."""
        table = self._context.get_obj_by_id(entry.table_id)
        values = {match.field_id: int.from_bytes(match.exact.value, "big") for match in entry.match}
        key: Fields = tuple((field.name, values.get(field.id, 0)) for field in table.match_fields)
        action = self._context.get_obj_by_id(entry.action.action.action_id)
        given = {param.param_id: int.from_bytes(param.value, "big") for param in entry.action.action.params}
        params: Fields = tuple((param.name, given.get(param.id, 0)) for param in action.params)
        return TableEntry(table.preamble.alias, key, action.preamble.alias, params)

    def decode_group(self, entity: Any) -> Group:
        """A p4.v1.Entity with a multicast group."""
        entry = entity.packet_replication_engine_entry.multicast_group_entry
        replicas = frozenset((_port(replica), replica.instance) for replica in entry.replicas)
        return Group(entry.multicast_group_id, replicas)

    def _known(self, found: Any, what: str) -> Any:
        if found is None:
            raise SwitchError(f"the P4 program has no {what}: controller and compiled program do not belong together")
        return found


def _bytes(value: int, bitwidth: int, what: str) -> bytes:
    """The canonical form: no leading zero bytes (P4Runtime specification 1.3, section 8.4)."""
    if value >> bitwidth:
        raise SwitchError(f"{what} {value} does not fit in {bitwidth} bits")
    return value.to_bytes(max((value.bit_length() + 7) // 8, 1), "big")


def _port(replica: Any) -> int:
    if replica.WhichOneof("port_kind") == "port":
        return int.from_bytes(replica.port, "big")
    port: int = replica.egress_port
    return port
