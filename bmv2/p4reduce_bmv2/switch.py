# SPDX-License-Identifier: Apache-2.0
"""Starts a switch as a process of its own, waits until it is ready, and stops it by its pid.

Two kinds, one interface: "embedded" (p4reduce-switch) and "bmv2" (simple_switch_grpc).
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import grpc

from p4reduce.errors import SwitchError
from p4reduce_bmv2 import netns as namespaces

log = logging.getLogger(__name__)

Kind = Literal["embedded", "bmv2"]
BMV2_BINARY = "simple_switch_grpc"
START_DEADLINE = 20.0
"""Seconds. BMv2 listens within one on an idle machine."""
STOP_DEADLINE = 5.0
"""Seconds from SIGTERM to SIGKILL."""
_POLL = 0.02
_LOG_TAIL = 2000
_ADD_PORT_FAILED = "Add port operation failed"
"""simple_switch_grpc logs this, starts without the port, and says nothing more (behavioral-model #1055, #1146)."""


def find_bmv2() -> str | None:
    """Path of simple_switch_grpc, None when it is not installed."""
    return shutil.which(BMV2_BINARY)


@dataclass(frozen=True, slots=True)
class SwitchOptions:
    """What a switch is started with."""

    interfaces: Mapping[int, str] = field(default_factory=dict)
    """Port number -> network interface."""
    udp_ports: Mapping[int, str] = field(default_factory=dict)
    """Port number -> ADDR[:UDPPORT]; embedded switch only."""
    device_id: int = 0
    grpc_addr: str = "127.0.0.1:0"
    """HOST:PORT, port 0 for any free one, or unix:PATH."""
    cpu_port: int | None = None
    netns: str | None = None
    """Network namespace to run in. The gRPC address is then best unix:PATH, which is reachable from outside."""
    log_level: str | None = None
    loss: float = 0.0
    """Share of frames lost in each direction; embedded switch only."""
    seed: int = 0


class SwitchProcess:
    """A running switch. Made by start(); use it as a context manager."""

    def __init__(self, process: subprocess.Popen[bytes], kind: Kind, options: SwitchOptions, log_path: Path) -> None:
        """For start() only."""
        self._process = process
        self.kind: Kind = kind
        self.device_id = options.device_id
        self.grpc_address = options.grpc_addr
        """Where P4Runtime clients connect."""
        self.endpoints: dict[int, tuple[str, int]] = {}
        """UDP ports of an embedded switch: address and UDP port by port number."""
        self.log_path = log_path
        self._keep_log = True

    @classmethod
    def start(
        cls,
        kind: Kind = "embedded",
        *,
        log_path: Path | None = None,
        deadline: float = START_DEADLINE,
        **options: Any,
    ) -> SwitchProcess:
        """Start a switch and return when its P4Runtime server answers.

        `options` are the fields of SwitchOptions. Without `log_path` the log is a temporary file that goes with the
        switch. `deadline` is in seconds. SwitchError says why it did not come up, with the end of its log.
        """
        chosen = SwitchOptions(**options)
        if kind == "bmv2" and (chosen.udp_ports or chosen.loss):
            raise SwitchError("simple_switch_grpc has neither UDP ports nor loss injection: use the embedded switch")
        if chosen.netns is not None:
            namespaces.require(chosen.netns)
        if kind == "bmv2":
            chosen = replace(chosen, grpc_addr=_free_address(chosen.grpc_addr, chosen.netns))
        with tempfile.TemporaryDirectory(prefix="p4reduce-switch-") as scratch:
            ready = Path(scratch, "ready")
            command = bmv2_command(chosen) if kind == "bmv2" else embedded_command(chosen, ready)
            if chosen.netns is not None:
                command = namespaces.command_prefix(chosen.netns) + command
            log_file = log_path or _temporary_log(kind)
            switch = cls(_spawn(command, log_file), kind, chosen, log_file)
            switch._keep_log = log_path is not None
            try:
                switch._wait_until_ready(time.monotonic() + deadline, ready)
            except BaseException:
                switch.stop()
                raise
        return switch

    @property
    def pid(self) -> int:
        """Process id of the switch."""
        return self._process.pid

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        return self._process.poll()

    def log_tail(self, limit: int = _LOG_TAIL) -> str:
        """The end of the log, in at most `limit` bytes."""
        try:
            data = self.log_path.read_bytes()
        except OSError:
            return ""
        return data[-limit:].decode(errors="replace").strip()

    def detach(self) -> int:
        """Let the switch run on without this object, which must not be used any more. Returns its pid."""
        # Nobody waits for it here; without an exit code Popen would complain when it is collected.
        self._process.returncode = 0
        return self._process.pid

    def stop(self, deadline: float = STOP_DEADLINE) -> int:
        """End the process: SIGTERM, then SIGKILL after `deadline` seconds. Returns its exit code; may be repeated."""
        process = self._process
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(deadline)
            except subprocess.TimeoutExpired:
                log.warning("switch %d did not stop within %.0f s and is killed", process.pid, deadline)
                process.kill()
                process.wait()
        if not self._keep_log:
            self.log_path.unlink(missing_ok=True)
        if self.grpc_address.startswith("unix:"):
            # simple_switch_grpc leaves its socket behind.
            Path(self.grpc_address.removeprefix("unix:")).unlink(missing_ok=True)
        return process.returncode

    def __enter__(self) -> SwitchProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _wait_until_ready(self, deadline: float, ready: Path) -> None:
        if self.kind == "embedded":
            self._read_announcement(deadline, ready)
        self._wait_for_server(deadline)
        if self.kind == "bmv2" and _ADD_PORT_FAILED in self.log_tail(1 << 20):
            raise SwitchError(f"simple_switch_grpc could not add a port (is the interface there?): {self.log_tail()}")

    def _read_announcement(self, deadline: float, ready: Path) -> None:
        while not ready.exists():
            self._check_alive(deadline, "announce itself")
            time.sleep(_POLL)
        announced: dict[str, Any] = json.loads(ready.read_text())
        self.grpc_address = announced["grpc"]
        for port, text in announced["udp_ports"].items():
            host, _, number = text.rpartition(":")
            self.endpoints[int(port)] = (host, int(number))

    def _wait_for_server(self, deadline: float) -> None:
        """Wait for Capabilities to be answered. The call is named by hand: this module needs no P4Runtime stubs."""
        # The first attempt comes too early as a rule, and gRPC would wait a second before the next.
        backoff = [(f"grpc.{name}_reconnect_backoff_ms", 50) for name in ("initial", "min", "max")]
        with grpc.insecure_channel(self.grpc_address, options=[("grpc.enable_http_proxy", 0), *backoff]) as channel:
            call = channel.unary_unary("/p4.v1.P4Runtime/Capabilities")
            while True:
                self._check_alive(deadline, f"answer P4Runtime on {self.grpc_address}")
                try:
                    call(b"", timeout=1.0)
                    break
                except grpc.RpcError as error:
                    if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                        break
                time.sleep(_POLL)
        # Somebody else may have answered, if the address was taken and the switch has ended for that.
        self._check_alive(deadline, "stay alive")

    def _check_alive(self, deadline: float, what: str) -> None:
        code = self._process.poll()
        if code is not None:
            raise SwitchError(f"the {self.kind} switch ended with code {code} at start: {self.log_tail()}")
        if time.monotonic() > deadline:
            raise SwitchError(f"the {self.kind} switch did not {what} in time: {self.log_tail()}")


def embedded_command(options: SwitchOptions, ready: Path) -> list[str]:
    """Command line of an embedded switch under this very interpreter, which writes its addresses to `ready`."""
    command = [sys.executable, "-m", "p4reduce_bmv2.embedded.daemon", "--json-ready", str(ready)]
    command += ["--grpc-server-addr", options.grpc_addr, "--device-id", str(options.device_id)]
    command += ["--log-level", options.log_level or "info"]
    for port, interface in options.interfaces.items():
        command += ["-i", f"{port}@{interface}"]
    for port, endpoint in options.udp_ports.items():
        command += ["--udp-port", f"{port}@{endpoint}"]
    if options.cpu_port is not None:
        command += ["--cpu-port", str(options.cpu_port)]
    if options.loss:
        command += ["--loss", repr(options.loss), "--seed", str(options.seed)]
    return command


def bmv2_command(options: SwitchOptions) -> list[str]:
    """Command line of simple_switch_grpc. SwitchError when it is not installed.

    Its log goes to the console, which costs nothing at level "error", the default here: a build with logging macros
    would format every packet into it at its own default.
    """
    binary = find_bmv2()
    if binary is None:
        raise SwitchError(
            f"{BMV2_BINARY} is not on PATH: install the package p4lang-bmv2 from p4lang's package archive, "
            "or use the embedded switch, which needs neither it nor root"
        )
    command = [binary, "--no-p4", "--device-id", str(options.device_id)]
    command += ["--log-console", "-L", options.log_level or "error"]
    # Every build parses the option, and one with Thrift would otherwise take port 9090, once per machine.
    command += ["--thrift-port", _free_address("127.0.0.1:0", options.netns).rpartition(":")[2]]
    for port, interface in options.interfaces.items():
        command += ["-i", f"{port}@{interface}"]
    command += ["--", "--grpc-server-addr", options.grpc_addr]
    if options.cpu_port is not None:
        command += ["--cpu-port", str(options.cpu_port)]
    return command


def _temporary_log(kind: Kind) -> Path:
    descriptor, name = tempfile.mkstemp(prefix=f"p4reduce-{kind}-", suffix=".log")
    os.close(descriptor)
    return Path(name)


def _spawn(command: list[str], log_file: Path) -> subprocess.Popen[bytes]:
    try:
        # A session of its own: Ctrl-C at a terminal reaches the program that manages the switch, which then stops it.
        with log_file.open("ab") as sink:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
            )
    except OSError as error:
        raise SwitchError(f"cannot start {command[0]}: {error}") from error


def _free_address(address: str, netns: str | None) -> str:
    """Replace port 0 by a free one, and refuse an address that somebody listens on.

    simple_switch_grpc can do neither: it would share the port with another gRPC server, call by call.
    """
    if address.startswith("unix:"):
        return address
    host, _, text = address.rpartition(":")
    if not host or not (text.isascii() and text.isdigit()):
        raise SwitchError(f"gRPC address {address!r} is not HOST:PORT")

    def probe() -> int:
        with socket.socket() as sock:
            # Passes over connections that are still closing, not over a listener.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, int(text)))
            return int(sock.getsockname()[1])

    try:
        port = namespaces.call(netns, probe) if netns is not None else probe()
    except (OSError, OverflowError) as error:
        raise SwitchError(f"cannot listen on {address}: {error}") from error
    return f"{host}:{port}"
