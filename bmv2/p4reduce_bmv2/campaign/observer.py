# SPDX-License-Identifier: Apache-2.0
"""What the campaign knows of controller and switch: status, pools, and the entries that the switch really holds."""

from __future__ import annotations

from collections.abc import Collection
from types import TracebackType
from typing import Any

import grpc

from p4reduce import pipeline
from p4reduce.proto import controller_pb2 as pb
from p4reduce.proto import controller_pb2_grpc
from p4reduce_bmv2.embedded.p4runtime.stubs import p4info_pb2, p4runtime_pb2, p4runtime_pb2_grpc, text_format

CALL_SECONDS = 2.0
EPOCHS = "epochs"
_BACKOFF = [(f"grpc.{name}_reconnect_backoff_ms", 50) for name in ("initial", "min", "max")]
_OPTIONS = [("grpc.enable_http_proxy", 0), *_BACKOFF]


class Observer:
    """Asks the controller, and reads the switch past it (reading needs no arbitration). Errors are grpc.RpcError."""

    def __init__(self, controller: str, switch: str, profile: str, device_id: int = 0) -> None:
        self._channels = [grpc.insecure_channel(address, options=_OPTIONS) for address in (controller, switch)]
        self._controller = controller_pb2_grpc.ControllerStub(self._channels[0])  # type: ignore[no-untyped-call]
        self._switch = p4runtime_pb2_grpc.P4RuntimeStub(self._channels[1])
        self._device_id = device_id
        info = text_format.Parse(pipeline.find(profile).p4info.read_text(), p4info_pb2.P4Info())
        self._tables: dict[int, str] = {table.preamble.id: table.preamble.alias for table in info.tables}
        self._at_rest: frozenset[bytes] = frozenset()

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for channel in self._channels:
            channel.close()

    def status(self, job: str = "", timeout: float = CALL_SECONDS) -> pb.StatusReply:
        """The controller's status."""
        reply: pb.StatusReply = self._controller.Status(pb.StatusRequest(job=job), timeout=timeout)
        return reply

    def job(self, name: str, timeout: float = CALL_SECONDS) -> pb.JobStatus | None:
        """The status of one job; None when the controller does not know it."""
        try:
            return next((job for job in self.status(name, timeout).jobs if job.job == name), None)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                return None
            raise

    def leased(self) -> dict[str, int]:
        """Slots by job. ValueError when the pools overlap or do not cover the switch: slots are lost then."""
        reply = self._controller.Pools(pb.PoolsRequest(), timeout=CALL_SECONDS)
        slots: dict[str, int] = {}
        end = 0
        for pool in sorted(reply.pools, key=lambda pool: pool.base):
            if pool.base != end:
                raise ValueError(f"the pool at slot {pool.base} should begin at {end}")
            end = pool.base + pool.size
            if pool.job:
                slots[pool.job] = slots.get(pool.job, 0) + pool.size
        if end != reply.slots:
            raise ValueError(f"the pools end at slot {end}, the switch has {reply.slots}")
        return slots

    def leaks(self, allowed: Collection[str] = ()) -> list[str]:
        """Slots of other jobs than these; without any, also what the switch holds beyond its state at rest."""
        try:
            # Not before the controller is done with a switch that has come back: simple_switch_grpc dies (SIGSEGV in
            # libpip4info) when entries are read while a pipeline is being pushed.
            if not self.status().switch.connected:
                return ["the controller has no session with the switch"]
            slots = self.leased()
            found = [f"{count} slots are leased to {job}" for job, count in slots.items() if job not in allowed]
            return found + ([] if allowed else self.surplus())
        except ValueError as error:
            return [str(error)]
        except grpc.RpcError as error:
            return [f"cannot look: {error.code()}: {error.details()}"]

    def drain(self, undrain: bool = False) -> pb.DrainReply:
        """Take all jobs off the switch, or allow them back."""
        name = self.status().switch.name
        reply: pb.DrainReply = self._controller.Drain(
            pb.DrainRequest(switch=name, undrain=undrain), timeout=CALL_SECONDS
        )
        return reply

    def set_mode(self, job: str, mode: str) -> pb.SetModeReply:
        """Choose a job's mode."""
        reply: pb.SetModeReply = self._controller.SetMode(pb.SetModeRequest(job=job, mode=mode), timeout=CALL_SECONDS)
        return reply

    # The switch.

    def remember(self) -> None:
        """What the switch holds now is what it holds at rest."""
        self._at_rest = frozenset(self._read())

    def surplus(self) -> list[str]:
        """What the switch holds beyond that, and what it lacks of it; the controller's mark does not count."""
        found = self._read()
        more = [f"{text} is left" for key, text in found.items() if key not in self._at_rest]
        lacking = len(self._at_rest - found.keys())
        return more + ([f"{lacking} entries that stood at rest are gone"] if lacking else [])

    def _read(self) -> dict[bytes, str]:
        request = p4runtime_pb2.ReadRequest(device_id=self._device_id)
        for number in self._tables:
            request.entities.add().table_entry.table_id = number
        request.entities.add().packet_replication_engine_entry.multicast_group_entry.multicast_group_id = 0
        found: dict[bytes, str] = {}
        for reply in self._switch.Read(request, timeout=CALL_SECONDS):
            for entity in reply.entities:
                if not self._is_mark(entity):
                    found[entity.SerializeToString(deterministic=True)] = self._name(entity)
        return found

    def _is_mark(self, entity: Any) -> bool:
        """Whether this is the controller's memory of epochs granted, which stays: statistics row 0."""
        entry = entity.table_entry
        if self._tables.get(entry.table_id) != EPOCHS:
            return False
        params = entry.action.action.params
        return bool(params) and not any(int.from_bytes(param.value, "big") for param in params)

    def _name(self, entity: Any) -> str:
        if entity.WhichOneof("entity") == "table_entry":
            values = [int.from_bytes(match.exact.value, "big") for match in entity.table_entry.match]
            return f"entry {self._tables.get(entity.table_entry.table_id, '?')}{tuple(values)}"
        group = entity.packet_replication_engine_entry.multicast_group_entry.multicast_group_id
        return f"multicast group {group}"
