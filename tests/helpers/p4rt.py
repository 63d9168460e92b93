# SPDX-License-Identifier: Apache-2.0
"""A bare P4Runtime client for tests: independent of the controller's, so that one does not vouch for the other."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import grpc
from p4.v1 import p4runtime_pb2, p4runtime_pb2_grpc

from helpers.switches import EVENTS, ProgramInfo
from p4reduce import pipeline

DEADLINE = 20.0


def canonical(value: int) -> bytes:
    """Shortest big-endian form, one byte at least (P4Runtime specification, section 8.4)."""
    return value.to_bytes(max(1, (value.bit_length() + 7) // 8), "big")


class TableClient:
    """Primary client of one switch that writes entries of our program by name, once it has pushed it."""

    info: ProgramInfo

    def __init__(self, address: str, device_id: int = 0) -> None:
        self.device_id = device_id
        self._groups: list[Any] = []
        self.channel = grpc.insecure_channel(address)
        self.stub = p4runtime_pb2_grpc.P4RuntimeStub(self.channel)
        self._out: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stream = self.stub.StreamChannel(self._messages())
        hello = p4runtime_pb2.StreamMessageRequest()
        hello.arbitration.device_id = device_id
        hello.arbitration.election_id.low = 1
        self._out.put(hello)
        reply = next(self._stream)
        if reply.arbitration.status.code != 0:
            raise RuntimeError(f"not the primary: {reply}")

    def _messages(self) -> Iterator[Any]:
        while (message := self._out.get()) is not None:
            yield message

    def push(self, profile: str) -> None:
        found = pipeline.find(profile)
        self.info = ProgramInfo(found.p4info)
        request = p4runtime_pb2.SetForwardingPipelineConfigRequest(device_id=self.device_id)
        request.election_id.low = 1
        request.action = p4runtime_pb2.SetForwardingPipelineConfigRequest.VERIFY_AND_COMMIT
        request.config.p4info.CopyFrom(self.info.p4info)
        request.config.p4_device_config = found.json.read_bytes()
        self.stub.SetForwardingPipelineConfig(request, timeout=DEADLINE)

    def write(self, kind: int, entity: Any) -> None:
        request = p4runtime_pb2.WriteRequest(device_id=self.device_id)
        request.election_id.low = 1
        request.updates.add(type=kind, entity=entity)
        self.stub.Write(request, timeout=DEADLINE)

    def table_entry(self, table: str, key: dict[str, int]) -> Any:
        entity = p4runtime_pb2.Entity()
        entity.table_entry.table_id = self.info.tables[table].preamble.id
        for match, value in self.info.key(table, key):
            entity.table_entry.match.add(field_id=match.id).exact.value = canonical(value)
        return entity

    def insert(self, table: str, key: dict[str, int], action: str, params: dict[str, int]) -> None:
        entity = self.table_entry(table, key)
        chosen = entity.table_entry.action.action
        chosen.action_id = self.info.actions[action].preamble.id
        for param, value in self.info.params(action, params):
            chosen.params.add(param_id=param.id, value=canonical(value))
        self.write(p4runtime_pb2.Update.INSERT, entity)

    def delete(self, table: str, key: dict[str, int]) -> None:
        self.write(p4runtime_pb2.Update.DELETE, self.table_entry(table, key))

    def set_group(self, group: int, replicas: list[tuple[int, int]]) -> None:
        entity = p4runtime_pb2.Entity()
        made = entity.packet_replication_engine_entry.multicast_group_entry
        made.multicast_group_id = group
        for port, instance in replicas:
            made.replicas.add(egress_port=port, instance=instance)
        self.write(p4runtime_pb2.Update.INSERT, entity)
        self._groups.append(entity)

    def delete_groups(self) -> None:
        """Must come before another push: simple_switch keeps the replicas of groups that a push forgot (bmv2 #891)."""
        while self._groups:
            self.write(p4runtime_pb2.Update.DELETE, self._groups.pop())

    def counters(self, row: int) -> dict[str, int]:
        request = p4runtime_pb2.ReadRequest(device_id=self.device_id)
        for event in EVENTS.values():
            entry = request.entities.add().counter_entry
            entry.counter_id = self.info.counter.preamble.id
            entry.index.index = row * 8 + event
        found = {}
        for response in self.stub.Read(request, timeout=DEADLINE):
            for entity in response.entities:
                found[entity.counter_entry.index.index - row * 8] = entity.counter_entry.data.packet_count
        return {name: found[event] for name, event in EVENTS.items()}

    def close(self) -> None:
        self._out.put(None)
        self._stream.cancel()
        self.channel.close()
