# SPDX-License-Identifier: Apache-2.0
"""How `p4reducectl` reaches a controller: address, token, TLS, and one sentence for every way that can fail."""

from __future__ import annotations

import argparse
import json
import os
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc

from p4reduce.errors import ConfigError
from p4reduce.proto import controller_pb2_grpc
from p4reduce_controller.cli_output import safe

DEFAULT_CONTROLLER = "127.0.0.1:50051"
ENVIRONMENT = "P4REDUCE_CONTROLLER"
TOKEN = "P4REDUCE_TOKEN"
TOKEN_FILE = "P4REDUCE_TOKEN_FILE"
TLS_CA = "P4REDUCE_TLS_CA"
TLS_CERT = "P4REDUCE_TLS_CERT"
TLS_KEY = "P4REDUCE_TLS_KEY"
MAX_TIMEOUT = 86400.0
EXIT_REFUSED = 1
EXIT_UNREACHABLE = 3
_OPTIONS = (
    # A proxy for the internet has no business between an operator and the controller.
    ("grpc.enable_http_proxy", 0),
    # A channel of its own, so that a controller which has just come back is found at once.
    ("grpc.use_local_subchannel_pool", 1),
)
# Of several controllers one acts and the others stand by, which they say with UNAVAILABLE: the next call asks another.
_EACH_IN_TURN = ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]}))
PAUSE_SECONDS = 0.1
_NO_CONNECTION = (
    "failed to connect",
    "dns resolution failed",
    "connection refused",
    "no route to host",
    "socket closed",
)
_TLS_WORDS = ("handshake", "certificate", "ssl", "tls")
# What the service says to programs, and what that is at a terminal.
_SHOWS_ALL, _JOBS_SHOWS_ALL = "an empty name shows all", "`p4reducectl jobs` shows all"
_FORBIDDEN = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that every command has."""
    add = parser.add_argument
    add(
        "--controller",
        metavar="ADDR:PORT",
        default=os.environ.get(ENVIRONMENT) or DEFAULT_CONTROLLER,
        help=f"the controller's address (default: ${ENVIRONMENT}, or {DEFAULT_CONTROLLER})",
    )
    add("--json", action="store_true", help="for programs instead of people")
    add("--timeout", type=float, default=5.0, metavar="SECONDS", help="for each answer (default: %(default)s)")
    add("--token", metavar="TOKEN", help=f"the operator's token (default: ${TOKEN}); others can see it in `ps`")
    add("--token-file", metavar="FILE", help=f"a file with the token in its first line (default: ${TOKEN_FILE})")
    add("--tls-ca", metavar="FILE", help=f"use TLS and trust the certificates in this file (default: ${TLS_CA})")
    add("--tls-cert", metavar="FILE", help=f"our own certificate, for mutual TLS (default: ${TLS_CERT})")
    add("--tls-key", metavar="FILE", help=f"the certificate's private key (default: ${TLS_KEY})")


@dataclass(frozen=True, slots=True, repr=False)
class Connection:
    """Where the controller is and how to speak to it. Has no repr: it holds secrets."""

    address: str
    timeout: float
    token: str = ""
    ca: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = None

    @classmethod
    def of(cls, options: argparse.Namespace, environ: Mapping[str, str] | None = None) -> Connection:
        """From the options and the environment. ConfigError for what makes no sense."""
        environ = os.environ if environ is None else environ
        if not options.controller.strip():
            raise ConfigError(f"--controller is empty: write ADDRESS:PORT, for example {DEFAULT_CONTROLLER}")
        if not 0 < options.timeout <= MAX_TIMEOUT:
            raise ConfigError(
                f"--timeout {options.timeout} makes no sense: write seconds above 0, up to {MAX_TIMEOUT:.0f}"
            )
        ca = _read("--tls-ca", options.tls_ca or environ.get(TLS_CA, ""))
        certificate_path = options.tls_cert or environ.get(TLS_CERT, "")
        key_path = options.tls_key or environ.get(TLS_KEY, "")
        if bool(certificate_path) != bool(key_path):
            raise ConfigError("--tls-cert and --tls-key belong together: give both or none")
        if certificate_path and ca is None:
            raise ConfigError("--tls-cert needs --tls-ca: without it the controller cannot be told from an impostor")
        certificate, key = _read("--tls-cert", certificate_path), _read("--tls-key", key_path)
        _check_pem(ca, certificate_path, key_path)
        return cls(options.controller, options.timeout, _token(options, environ), ca, certificate, key)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    @property
    def several(self) -> bool:
        """Whether the address names more than one controller: ipv4:ADDR:PORT,ADDR:PORT."""
        return "," in self.address

    @property
    def exposed(self) -> bool:
        """Whether the token would cross a network in the clear."""
        return bool(self.token) and self.ca is None and not _is_loopback(self.address)

    @contextmanager
    def open(self) -> Iterator[Client]:
        """A client for as long as the block lasts."""
        options = (*_OPTIONS, _EACH_IN_TURN) if self.several else _OPTIONS
        if self.ca is None:
            channel = grpc.insecure_channel(self.address, options=options)
        else:
            credentials = grpc.ssl_channel_credentials(self.ca, self.key, self.certificate)
            channel = grpc.secure_channel(self.address, credentials, options=options)
        with channel:
            yield Client(self, controller_pb2_grpc.ControllerStub(channel))  # type: ignore[no-untyped-call]


class Client:
    """An open connection."""

    def __init__(self, connection: Connection, stub: Any) -> None:
        self.connection = connection
        self._stub = stub

    def call(self, name: str, request: Any) -> Any:
        """One call of the service, with the connection's timeout. grpc.RpcError.

        Of several controllers, those that are away or stand by are passed over.
        """
        connection = self.connection
        end = time.monotonic() + connection.timeout
        while True:
            left = max(end - time.monotonic(), 0.001)
            try:
                return getattr(self._stub, name)(request, timeout=left, metadata=connection.metadata)
            except grpc.RpcError as error:
                if not self.passes(error) or time.monotonic() + PAUSE_SECONDS > end:
                    raise
            threading.Event().wait(PAUSE_SECONDS)

    def passes(self, error: grpc.RpcError) -> bool:
        """Whether another controller may do better."""
        return self.connection.several and error.code() is grpc.StatusCode.UNAVAILABLE

    def stream(self, name: str, request: Any) -> Any:
        """A call that answers again and again: iterate it; `cancel()` ends it. No timeout."""
        return getattr(self._stub, name)(request, metadata=self.connection.metadata)


def explain(error: grpc.RpcError, connection: Connection) -> tuple[str, int]:
    """What to print about a call that failed, and the exit code."""
    code, details = error.code(), safe(error.details() or "no details")
    name = "UNKNOWN" if code is None else code.name
    lower = details.lower()
    unconnected = code is grpc.StatusCode.UNAVAILABLE and any(text in lower for text in _NO_CONNECTION)
    if unconnected and any(word in lower for word in _TLS_WORDS):
        return (
            f"no TLS with {connection.address}: the controller must use TLS, and its certificate must be signed by "
            f"--tls-ca and name the address as you write it{_own_hint(connection)} ({details})",
            EXIT_UNREACHABLE,
        )
    if unconnected or code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return (
            f"no controller at {connection.address} within {connection.timeout:g} s: start one with "
            f"`p4reduce-controller serve`, or name it with --controller or {ENVIRONMENT}"
            + (_own_hint(connection) if connection.ca else "; if it uses TLS, give --tls-ca"),
            EXIT_UNREACHABLE,
        )
    if code is grpc.StatusCode.UNAVAILABLE:
        return f"{name}: {details}", EXIT_UNREACHABLE
    if code in _FORBIDDEN:
        hint = f"give the operator's token with --token-file, {TOKEN_FILE} or {TOKEN}"
        return f"{name}: {details}" + ("" if "token" in lower and connection.token else f": {hint}"), EXIT_REFUSED
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return f"the controller at {connection.address} does not know this command: upgrade it", EXIT_REFUSED
    return f"{name}: {details.replace(_SHOWS_ALL, _JOBS_SHOWS_ALL)}", EXIT_REFUSED


def _own_hint(connection: Connection) -> str:
    """What may be missing besides: a controller that asks for a certificate closes the connection without a word."""
    return "" if connection.certificate else "; if it asks for a client certificate, give --tls-cert and --tls-key too"


def _read(option: str, path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({option}): {error.strerror or error}") from error


def _check_pem(ca: bytes | None, certificate: str, key: str) -> None:
    """gRPC's own complaint about a bad file comes late, on stderr, and names no file."""
    if ca is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=ca.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--tls-ca holds no certificates in PEM form: {error}") from error
    if certificate:
        try:
            context.load_cert_chain(certificate, key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"--tls-cert {certificate} and --tls-key {key} are no certificate and its key, in PEM form and "
                f"without a password: {error}"
            ) from error


def _no_password() -> str:
    raise ValueError("the key has a password")


def _token(options: argparse.Namespace, environ: Mapping[str, str]) -> str:
    if options.token is not None and options.token_file is not None:
        raise ConfigError("--token and --token-file exclude each other: give one")
    if options.token is not None:
        source, token = "--token", options.token
    elif options.token_file is not None or (not environ.get(TOKEN) and environ.get(TOKEN_FILE)):
        source = "--token-file" if options.token_file is not None else TOKEN_FILE
        content = _read(source, options.token_file or environ.get(TOKEN_FILE, "")) or b""
        token = content.decode("utf-8", "replace").partition("\n")[0]
    else:
        source, token = TOKEN, environ.get(TOKEN, "")
        if not token:
            return ""
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(f"the token ({source}) must be printable ASCII characters, and at least one")
    return str(token)


def _is_loopback(address: str) -> bool:
    """Of a gRPC target, which may name several addresses: all of them."""
    if address.startswith("unix:"):
        return True
    for scheme in ("ipv4:", "ipv6:", "dns:///", "dns:"):
        address = address.removeprefix(scheme)
    return all(_is_loopback_host(one.rpartition(":")[0].strip("[]")) for one in address.split(","))


def _is_loopback_host(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
