# SPDX-License-Identifier: Apache-2.0
"""The embedded switch inside a process: ports, packet thread and P4Runtime server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from p4reduce.errors import SwitchError
from p4reduce_bmv2.embedded.dataplane import DataPlane
from p4reduce_bmv2.embedded.numerals import MAX_DEVICE_ID
from p4reduce_bmv2.embedded.p4runtime.device import Device
from p4reduce_bmv2.embedded.p4runtime.server import P4RuntimeServer
from p4reduce_bmv2.embedded.p4runtime.status import Refused
from p4reduce_bmv2.embedded.p4runtime.stubs import p4runtime_pb2, text_format
from p4reduce_bmv2.embedded.ports import SMALL_RECEIVE_BUFFER, AfPacketPort, Port, UdpPort, parse_endpoint
from p4reduce_bmv2.embedded.state import MAX_PORT

log = logging.getLogger(__name__)


class EmbeddedSwitch:
    """One switch: a P4Runtime device whose ports are UDP endpoints on loopback and network interfaces.

    Use it as a context manager, or call start() and stop(). A pipeline comes by P4Runtime or preload().
    """

    def __init__(
        self,
        *,
        device_id: int = 0,
        grpc_addr: str = "127.0.0.1:0",
        udp_ports: Mapping[int, str] | None = None,
        interfaces: Mapping[int, str] | None = None,
        loss: float = 0.0,
        seed: int = 0,
        cpu_port: int | None = None,
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`udp_ports`: port number -> ADDR[:UDPPORT]; `interfaces`: port number -> name; `loss`: chance per direction.

        `failed` is told when the packet thread dies. SwitchError when the numbers make no sense.
        """
        self._udp_ports = dict(udp_ports or {})
        self._interfaces = dict(interfaces or {})
        self._device_id = device_id
        self._grpc_addr = grpc_addr
        self._loss = loss
        self._seed = seed
        self._cpu_port = cpu_port
        self._failed = failed
        self._data_plane: DataPlane | None = None
        self._device: Device | None = None
        self._server: P4RuntimeServer | None = None
        self.calls_linger = False
        """After stop(): a call could not be ended. Python waits for its thread at exit, perhaps for many seconds."""
        self._endpoints: dict[int, tuple[str, int]] = {}
        self._check_numbers()

    def _check_numbers(self) -> None:
        both = self._udp_ports.keys() & self._interfaces.keys()
        if both:
            raise SwitchError(f"port {min(both)} is both a UDP endpoint and an interface")
        names = list(self._interfaces.values())
        for name in names:
            if names.count(name) > 1:
                raise SwitchError(f"interface {name} is given to more than one port")
        for number in (*self._udp_ports, *self._interfaces):
            if not 0 <= number <= MAX_PORT:
                raise SwitchError(f"port {number} is not 0..{MAX_PORT}")
        if self._cpu_port is not None and not 1 <= self._cpu_port <= MAX_PORT:
            raise SwitchError(f"CPU port {self._cpu_port} is not 1..{MAX_PORT}")
        if self._cpu_port in self._udp_ports or self._cpu_port in self._interfaces:
            raise SwitchError(f"port {self._cpu_port} is the CPU port and cannot have a link")
        if not 0 <= self._device_id <= MAX_DEVICE_ID:
            raise SwitchError(f"device id {self._device_id} is not 0..{MAX_DEVICE_ID}")
        if not 0.0 <= self._loss < 1.0:
            raise SwitchError(f"loss {self._loss} is not in [0, 1)")

    def start(self) -> None:
        """Open the ports, start the packet thread, listen. SwitchError says what is missing or taken."""
        if self._data_plane is not None:
            raise SwitchError("the switch is running already")
        ports = self._open_ports()
        self._data_plane = DataPlane(
            ports,
            loss=self._loss,
            seed=self._seed,
            cpu_port=self._cpu_port,
            packet_in=self._packet_in,
            failed=self._failed,
        )
        try:
            self._device = Device(
                self._device_id,
                self._data_plane.lock,
                go_live=self._data_plane.go_live,
                inject=self._data_plane.inject,
                cpu_port=self._cpu_port,
                seed=self._seed,
            )
            self._server = P4RuntimeServer(self._device, self._grpc_addr)
            self._data_plane.start()
            self._server.start()
        except BaseException:
            self.stop()
            raise
        log.info("P4Runtime on %s, device %d", self._server.address, self._device_id)
        for number, port in sorted(ports.items()):
            log.info("port %d: %s", number, port.describe())
            if port.receive_buffer < SMALL_RECEIVE_BUFFER:
                log.warning(
                    "port %d: the system grants a receive buffer of %d KiB only; bursts will be lost "
                    "(sysctl net.core.rmem_max, or run as root)",
                    number,
                    port.receive_buffer >> 10,
                )

    def stop(self) -> None:
        """Close everything; may be called again."""
        if self._server is not None:
            self.calls_linger = not self._server.stop()
            self._server = None
        if self._data_plane is not None:
            self._data_plane.stop()
            self._data_plane = None
        self._device = None

    def __enter__(self) -> EmbeddedSwitch:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def grpc_address(self) -> str:
        """Where P4Runtime clients connect, with the real port."""
        if self._server is None:
            raise SwitchError("the switch is not running")
        return self._server.address

    @property
    def endpoints(self) -> dict[int, tuple[str, int]]:
        """Address and UDP port of every UDP port."""
        return dict(self._endpoints)

    def preload(self, json: Path, p4info: Path) -> None:
        """Commit a compiled program, as a P4Runtime client would. SwitchError."""
        if self._device is None:
            raise SwitchError("the switch is not running")
        config = p4runtime_pb2.ForwardingPipelineConfig()
        try:
            config.p4_device_config = json.read_bytes()
            text_format.Parse(p4info.read_text(), config.p4info)
            self._device.preload(config)
        except OSError as error:
            raise SwitchError(f"cannot read {error.filename}: {error.strerror}") from error
        except (text_format.ParseError, UnicodeDecodeError) as error:
            raise SwitchError(f"{p4info} is no P4Info in text form: {error}") from error
        except Refused as error:
            raise SwitchError(f"{json}: {error.message}") from error

    def stats(self) -> dict[str, Any]:
        """Counters: frames, bytes and drops by port, and drops outside of any port."""
        if self._data_plane is None:
            raise SwitchError("the switch is not running")
        stats = self._data_plane.stats()
        if self._device is not None and self._device.packet_ins_dropped:
            stats["drops"]["packet_in_full"] = self._device.packet_ins_dropped
        return stats

    def _packet_in(self, frame: bytes) -> None:
        device = self._device
        if device is not None:
            device.packet_in(frame)

    def _open_ports(self) -> dict[int, Port]:
        ports: dict[int, Port] = {}
        self._endpoints = {}
        try:
            for number, text in self._udp_ports.items():
                udp = UdpPort(number, *parse_endpoint(text))
                ports[number] = udp
                self._endpoints[number] = udp.endpoint
            for number, interface in self._interfaces.items():
                ports[number] = AfPacketPort(number, interface)
        except BaseException:
            for port in ports.values():
                port.close()
            raise
        return ports
