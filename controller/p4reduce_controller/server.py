# SPDX-License-Identifier: Apache-2.0
"""The controller as an object: for the command line, for tests, and inside a process with everything else."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import grpc

from p4reduce import pipeline
from p4reduce.core.config import RetransmissionPolicy
from p4reduce.errors import ConfigError
from p4reduce.proto import controller_pb2_grpc
from p4reduce_controller.coordinator import Coordinator
from p4reduce_controller.hosts import Hosts, load
from p4reduce_controller.link import Connector, Switch
from p4reduce_controller.pools import PORT_BUDGET
from p4reduce_controller.service import ControllerService
from p4reduce_controller.store import open_store

_LOG = logging.getLogger(__name__)

MAX_THREADS = 4096
"""Every Join that waits and every progress stream holds a thread; they are made when needed."""
MIN_LEASE_SECONDS = 0.1


class ControllerServer:
    """One controller: a gRPC server, the jobs, and the session with the switch.

    A context manager; or call `start` and `stop`. Stopping leaves the switch as it is.
    """

    def __init__(
        self,
        hosts: Hosts | str | Path,
        listen: str = "127.0.0.1:0",
        *,
        pool_slots: int = 64,
        policy: RetransmissionPolicy | None = None,
        lease_seconds: float = 10.0,
        state: str | Path | None = None,
        switch_deadline: float = 5.0,
        election_id: int = 1,
        port_budget: int = PORT_BUDGET,
        probe_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        timer: bool = True,
        connect: Connector | None = None,
    ) -> None:
        """ConfigError for what makes no sense. Nothing is opened but the state file.

        `hosts`: checked hosts, or the path of a hosts file. `listen`: ADDRESS:PORT, port 0 for any. `lease_seconds`:
        a worker that does not report for so long is lost. `switch_deadline`: seconds for connecting to the switch and
        for every call to it. `connect` puts another switch in the place of the P4Runtime one; with `timer` off,
        leases end only when `tick` is called: both for tests, as are `clock` (of leases) and `wall` (of epochs).
        """
        self.hosts = hosts if isinstance(hosts, Hosts) else load(hosts)
        self._listen = _split_listen(listen)
        if not MIN_LEASE_SECONDS <= lease_seconds < float("inf"):
            raise ConfigError(f"lease_seconds must be at least {MIN_LEASE_SECONDS}, not {lease_seconds}")
        if not 0 < switch_deadline < float("inf"):
            raise ConfigError(f"switch_deadline must be a number of seconds, not {switch_deadline}")
        if not 0 < election_id < 1 << 128:
            raise ConfigError(f"election_id must be from 1 to 2^128 - 1, not {election_id}")
        self._election_id = election_id
        self._switch_deadline = switch_deadline
        self._pipeline = pipeline.find(self.hosts.switch.profile)
        store = open_store(state, wall)
        try:
            self._coordinator = Coordinator(
                self.hosts,
                connect or self._connect,
                store,
                pool_slots=pool_slots,
                policy=policy or RetransmissionPolicy(),
                lease_seconds=lease_seconds,
                switch_deadline=switch_deadline,
                port_budget=port_budget,
                probe_seconds=probe_seconds,
                clock=clock,
                timer=timer,
            )
        except ConfigError:
            store.close()
            raise
        self._executor: ThreadPoolExecutor | None = None
        self._server: grpc.Server | None = None
        self._port = 0
        self._stopped = False

    def start(self) -> None:
        """Listen, connect to the switch, serve. ConfigError when the address is taken, SwitchError for the switch."""
        host, port = self._listen
        _check_free(host, port)
        executor = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="p4reduce-rpc")
        # Without this option gRPC lets two controllers share a port, and each gets half of the workers.
        server = grpc.server(executor, options=[("grpc.so_reuseport", 0)])
        controller_pb2_grpc.add_ControllerServicer_to_server(ControllerService(self._coordinator), server)  # type: ignore[no-untyped-call]
        try:
            self._port = server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            self._port = 0
            _LOG.debug("gRPC cannot listen: %s", error)
        try:
            if not self._port:
                raise ConfigError(f"cannot listen on {host}:{port}: is the port taken?")
            self._coordinator.start()
            server.start()
        except BaseException:
            server.stop(None)
            executor.shutdown(wait=False)
            self.stop()
            raise
        self._executor, self._server = executor, server
        _LOG.info(
            "controller on %s, switch %s, profile %s", self.address, self.hosts.switch.grpc, self._pipeline.profile.name
        )

    def stop(self) -> None:
        """End all RPCs and the session with the switch. Safe to call twice. The object cannot be started again."""
        if self._stopped:
            return
        self._stopped = True
        self._coordinator.stop()
        if self._server is not None:
            self._server.stop(1.0).wait(5.0)
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    def tick(self) -> None:
        """Look at the clock: only needed with `timer` off."""
        self._coordinator.tick()

    @property
    def address(self) -> str:
        """Where the controller listens, ADDRESS:PORT with the real port."""
        if not self._port:
            raise ConfigError("the controller has not been started")
        return f"{self._listen[0]}:{self._port}"

    def __enter__(self) -> ControllerServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _connect(self, on_lost: Callable[[str], None]) -> Switch:
        # Imported late: whoever brings a switch of his own needs no p4runtime-shell.
        from p4reduce_controller.p4rt import SwitchClient

        return SwitchClient(
            self.hosts.switch.grpc,
            self._pipeline,
            device_id=self.hosts.switch.device_id,
            election_id=self._election_id,
            deadline=self._switch_deadline,
            on_lost=on_lost,
        )


def _split_listen(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"cannot listen on {listen!r}: write ADDRESS:PORT, for example 127.0.0.1:50051")
    return host, int(port)


def _check_free(host: str, port: int) -> None:
    """gRPC's own complaint about a taken port does not say which, and goes to stderr in several lines."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
