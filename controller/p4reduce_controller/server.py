# SPDX-License-Identifier: Apache-2.0
"""The controller as an object: for the command line, for tests, and inside a process with everything else."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import grpc

from p4reduce import pipeline
from p4reduce.core.config import RetransmissionPolicy
from p4reduce.errors import ConfigError
from p4reduce.proto import controller_pb2_grpc
from p4reduce_controller.auth import Gate, Tls, Tokens, check_listen
from p4reduce_controller.coordinator import Coordinator
from p4reduce_controller.election import Candidacy
from p4reduce_controller.hosts import Hosts, load
from p4reduce_controller.link import Connector, Switch
from p4reduce_controller.pools import PORT_BUDGET
from p4reduce_controller.service import ControllerService
from p4reduce_controller.store import InUseError, Store, open_store

_LOG = logging.getLogger(__name__)
T = TypeVar("T")

MAX_THREADS = 6144
"""More than all bounded calls together (see `auth`), so that an operator's call always finds one: every Join that waits
and every progress stream holds a thread. They are made when needed."""
MIN_LEASE_SECONDS = 0.1
MAX_REQUEST = 64 << 10
"""Bytes of a request. The largest that makes sense, a report with all its counters, has some 4 KiB."""
MAX_METADATA = 16 << 10
TAKEOVER_SECONDS = 15.0
"""How long a standby that takes over waits for the former primary to let go of state file and address."""
_TAKEOVER_PAUSE = 0.1


class ControllerServer:
    """One controller: a gRPC server, the jobs, and the session with the switch.

    A context manager; or call `start` and `stop`. Stopping leaves the switch as it is. `ended` says when it must be
    stopped from within: another controller has taken its place, or its state cannot be written.
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
        election_id: int | None = None,
        standby: bool = False,
        on_standby: Callable[[], None] | None = None,
        tls: Tls | None = None,
        tokens: Tokens | str | Path | None = None,
        insecure: bool = False,
        port_budget: int = PORT_BUDGET,
        probe_seconds: float = 2.0,
        audit_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        timer: bool = True,
        connect: Connector | None = None,
    ) -> None:
        """ConfigError for what makes no sense. Nothing is opened yet.

        `hosts`: checked hosts, or the path of a hosts file. `listen`: ADDRESS:PORT, port 0 for any; beyond this machine
        it takes `tls` and `tokens` (or a client authority), or `insecure`. `lease_seconds`: a worker that does not
        report for so long is lost. `switch_deadline`: seconds for connecting to the switch and for every call to it.
        `election_id`: None: chosen so that no other controller is pushed out. `standby`: `start` waits while another
        controller is the switch's primary, and calls `on_standby` when it begins to; state file and address are
        opened after that. `connect` puts another switch in the place of the P4Runtime one; with `timer` off, leases
        end only when `tick` is called: both for tests, as are `clock` (of leases) and `wall` (of epochs).
        """
        self.hosts = hosts if isinstance(hosts, Hosts) else load(hosts)
        self._listen = _split_listen(listen)
        _check_numbers(lease_seconds, switch_deadline, election_id)
        self._tls = tls.credentials() if tls is not None else None
        self._tokens = tokens if isinstance(tokens, Tokens) or tokens is None else Tokens.load(tokens)
        check_listen(self._listen[0], tls, self._tokens is not None, insecure)
        self._standby = standby
        self._on_standby = on_standby
        self._candidacy = Candidacy(election_id, standby=standby, patience=switch_deadline, on_backup=self._backup)
        self._switch_deadline = switch_deadline
        self._pipeline = pipeline.find(self.hosts.switch.profile)
        self._state, self._wall = state, wall
        self._stop = threading.Event()
        self.ended: threading.Event = threading.Event()
        """Set when this controller must be stopped; `why` says why, `demoted` whether another one is in its place."""
        self.why, self.demoted = "", False
        self._coordinator = Coordinator(
            self.hosts,
            connect or self._connect,
            self._open_store,
            pool_slots=pool_slots,
            policy=policy or RetransmissionPolicy(),
            lease_seconds=lease_seconds,
            switch_deadline=switch_deadline,
            port_budget=port_budget,
            probe_seconds=probe_seconds,
            audit_seconds=audit_seconds,
            clock=clock,
            timer=timer,
            on_end=self._end,
        )
        self._executor: ThreadPoolExecutor | None = None
        self._server: grpc.Server | None = None
        self._port = 0
        self._stopped = False

    def start(self) -> None:
        """Connect to the switch, become its primary, listen, serve.

        ConfigError when the address or the state file is taken, SwitchError for the switch, also when `stop` is called
        while a standby waits.
        """
        try:
            if not self._standby:
                # What is wrong here is said at once. A standby comes to it when it takes over.
                _check_free(*self._listen)
                self._coordinator.open()
            self._coordinator.start()
            self._serve()
        except BaseException:
            self.stop()
            raise
        _LOG.info(
            "controller on %s, switch %s, profile %s", self.address, self.hosts.switch.grpc, self._pipeline.profile.name
        )

    def _serve(self) -> None:
        host, port = self._listen
        if self._standby:
            self._patiently(lambda: _check_free(host, port))
        executor = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="p4reduce-rpc")
        options = [
            # Without this option gRPC lets two controllers share a port, and each gets half of the workers.
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", MAX_REQUEST),
            ("grpc.max_metadata_size", MAX_METADATA),
        ]
        server = grpc.server(executor, options=options, maximum_concurrent_rpcs=MAX_THREADS)
        service = ControllerService(self._coordinator, Gate(self._tokens))
        controller_pb2_grpc.add_ControllerServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        self._executor, self._server = executor, server
        address = f"{host}:{port}"
        try:
            if self._tls is None:
                self._port = server.add_insecure_port(address)
            else:
                self._port = server.add_secure_port(address, self._tls)
        except RuntimeError as error:
            _LOG.debug("gRPC cannot listen: %s", error)
        if not self._port:
            raise ConfigError(f"cannot listen on {address}: is the port taken?")
        server.start()
        self._coordinator.listening()

    def _open_store(self) -> Store:
        if not self._standby:
            return open_store(self._state, self._wall)
        return self._patiently(lambda: open_store(self._state, self._wall))

    def _patiently(self, attempt: Callable[[], T]) -> T:
        """Try for a while: the former primary may still hold what is needed."""
        end = time.monotonic() + TAKEOVER_SECONDS
        while True:
            try:
                return attempt()
            except (InUseError, _TakenError):  # noqa: PERF203
                if time.monotonic() >= end or self._stop.wait(_TAKEOVER_PAUSE):
                    raise

    def _backup(self, primary: int) -> None:
        _LOG.warning(
            "standing by: another controller is primary of switch %s at %s (election id %d); this one takes over when "
            "its session ends",
            self.hosts.switch.name,
            self.hosts.switch.grpc,
            primary,
        )
        if self._on_standby is not None:
            self._on_standby()

    def _end(self, why: str, demoted: bool) -> None:
        self.why, self.demoted = why, demoted
        self.ended.set()

    def stop(self) -> None:
        """End all RPCs and the session with the switch. Safe to call twice. The object cannot be started again."""
        if self._stopped:
            return
        self._stopped = True
        self._stop.set()
        self._coordinator.stop()
        if self._server is not None:
            self._server.stop(1.0).wait(5.0)
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    def interrupt(self) -> None:
        """End a `start` that waits as a standby: it raises SwitchError. Nothing else is stopped."""
        self._stop.set()

    @property
    def coordinator(self) -> Coordinator:
        """What metrics are taken from."""
        return self._coordinator

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
            candidacy=self._candidacy,
            deadline=self._switch_deadline,
            on_lost=on_lost,
            stop=self._stop,
        )


def _check_numbers(lease_seconds: float, switch_deadline: float, election_id: int | None) -> None:
    if not MIN_LEASE_SECONDS <= lease_seconds < float("inf"):
        raise ConfigError(f"lease_seconds must be at least {MIN_LEASE_SECONDS}, not {lease_seconds}")
    if not 0 < switch_deadline < float("inf"):
        raise ConfigError(f"switch_deadline must be a number of seconds, not {switch_deadline}")
    if election_id is not None and not 0 < election_id < 1 << 128:
        raise ConfigError(f"election_id must be from 1 to 2^128 - 1, not {election_id}")


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
        raise _TakenError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


class _TakenError(ConfigError):
    """The address to listen on cannot be had."""
