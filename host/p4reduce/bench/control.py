# SPDX-License-Identifier: Apache-2.0
"""Puts p4/scalar.p4 on a running switch by P4Runtime, in place of what the controller had there."""

from __future__ import annotations

import ipaddress
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from p4reduce.errors import ConfigError, SwitchError

_SECONDS = 30.0
_ELECTION = 1 << 62
"""Above every controller's; the one that was there has ended anyway."""
_GROUP = 9


@dataclass(frozen=True, slots=True)
class Member:
    """Where a worker is."""

    port: int
    ip: str
    mac: str
    udp_port: int


class ScalarControl:
    """The only P4Runtime client of a switch while the scalar program is on it."""

    def __init__(self, address: str, device_id: int = 0) -> None:
        """Become primary. SwitchError when the switch does not answer; ConfigError when a package is missing."""
        try:
            import grpc
            from p4.v1 import p4runtime_pb2, p4runtime_pb2_grpc
        except ImportError as error:
            raise ConfigError(
                f"the baseline scalar needs {error.name}, which is missing: pip install 'p4reduce[bmv2]'"
            ) from error
        self._grpc, self._pb, self._device = grpc, p4runtime_pb2, device_id
        self._channel = grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
        self._stub = p4runtime_pb2_grpc.P4RuntimeStub(self._channel)
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        try:
            self._arbitrate()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the session; the program stays on the switch."""
        self._requests.put(None)
        self._channel.close()

    def __enter__(self) -> ScalarControl:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def load(self, json: Path, p4info: Path) -> None:
        """Replace the switch's program."""
        from google.protobuf import text_format

        request = self._pb.SetForwardingPipelineConfigRequest(
            device_id=self._device, action=self._pb.SetForwardingPipelineConfigRequest.VERIFY_AND_COMMIT
        )
        text_format.Parse(p4info.read_text(), request.config.p4info)
        request.config.p4_device_config = json.read_bytes()
        request.election_id.low = _ELECTION
        self._call("take the program", self._stub.SetForwardingPipelineConfig, request)
        info = request.config.p4info
        self._tables = {table.preamble.name: table for table in info.tables}
        self._actions = {action.preamble.name: action.preamble.id for action in info.actions}

    def admit(self, members: Sequence[Member]) -> None:
        """Install the workers; rank r is the r-th."""
        request = self._pb.WriteRequest(device_id=self._device)
        request.election_id.low = _ELECTION
        group = request.updates.add(type=self._pb.Update.INSERT).entity.packet_replication_engine_entry
        group.multicast_group_entry.multicast_group_id = _GROUP
        full = (1 << len(members)) - 1
        for rank, member in enumerate(members):
            mac, ip = int(member.mac.replace(":", ""), 16), int(ipaddress.IPv4Address(member.ip))
            address = [mac, ip, member.udp_port]
            group.multicast_group_entry.replicas.add(egress_port=member.port, instance=rank + 1)
            ingress = "ScalarIngress"
            self._insert(
                request, f"{ingress}.members", [member.port, rank], f"{ingress}.member", [1 << rank, full, _GROUP]
            )
            self._insert(request, f"{ingress}.targets", [rank], f"{ingress}.to_worker", [member.port, *address])
            self._insert(request, "ScalarEgress.replicas", [rank + 1], "ScalarEgress.to_replica", address)
        self._call("take the entries", self._stub.Write, request)

    def _insert(self, request: Any, table: str, key: Sequence[int], action: str, values: Sequence[int]) -> None:
        entry = request.updates.add(type=self._pb.Update.INSERT).entity.table_entry
        entry.table_id = self._tables[table].preamble.id
        for field_id, value in enumerate(key, 1):
            entry.match.add(field_id=field_id).exact.value = _bytes(value)
        entry.action.action.action_id = self._actions[action]
        for param_id, value in enumerate(values, 1):
            entry.action.action.params.add(param_id=param_id, value=_bytes(value))

    def _arbitrate(self) -> None:
        message = self._pb.StreamMessageRequest()
        message.arbitration.device_id = self._device
        message.arbitration.election_id.low = _ELECTION
        self._requests.put(message)
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def requests() -> Iterator[Any]:
            while (one := self._requests.get()) is not None:
                yield one

        def read(stream: Any) -> None:
            try:
                for answer in stream:
                    answers.put(answer)
            except self._grpc.RpcError as error:
                answers.put(error)

        stream = self._stub.StreamChannel(requests(), wait_for_ready=True)
        threading.Thread(target=read, args=(stream,), name="scalar-p4runtime", daemon=True).start()
        try:
            answer = answers.get(timeout=_SECONDS)
        except queue.Empty:
            raise SwitchError(f"the switch did not answer P4Runtime within {_SECONDS:.0f} s") from None
        if isinstance(answer, self._grpc.RpcError) or answer.arbitration.status.code:
            raise SwitchError(f"the switch did not make the bench its controller: {answer}")

    def _call(self, what: str, method: Any, request: Any) -> None:
        try:
            method(request, timeout=_SECONDS)
        except self._grpc.RpcError as error:
            raise SwitchError(f"the switch did not {what} of the baseline scalar: {error.details()}") from error


def _bytes(value: int) -> bytes:
    """P4Runtime's canonical form: big-endian, no leading zeros, at least one byte."""
    return value.to_bytes(max((value.bit_length() + 7) // 8, 1), "big")
