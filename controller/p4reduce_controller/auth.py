# SPDX-License-Identifier: Apache-2.0
"""Who may do what: tokens, TLS, and bounds on how much anybody may ask for.

A tokens file is TOML, best readable by its owner alone:

    operator = "…"            # for SetMode, SetPolicy, Drain and Evict; may do everything else too

    [[join]]
    jobs = "team-a/*"         # job names, with * ? [abc] as in file names, upper and lower case told apart
    token = "…"

A token comes in the metadata of a call, `authorization: Bearer TOKEN`. Without a tokens file everybody who reaches the
controller may do everything, which is why it listens on loopback only unless told otherwise. Tokens are compared in
constant time, all of them at every call, and never logged.
"""

from __future__ import annotations

import fnmatch
import hashlib
import hmac
import ipaddress
import logging
import ssl
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from p4reduce.errors import ConfigError
from p4reduce_controller.admission import Code, RefusedError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

_LOG = logging.getLogger(__name__)

MIN_TOKEN = 16
"""Characters. A shorter one can be guessed."""
CREDENTIAL = "p4reduce-credential-bin"
"""Metadata key of the credential that a JoinReply gave to a rank."""
CALLS_A_SECOND = 100.0
CALL_BURST = 400.0
"""Joins, operators' calls and wrong tokens of one address: a host may start all its ranks at once."""
REPORTS_A_SECOND = 200.0
REPORT_BURST = 400.0
MAX_JOINS = 768
"""Joins that wait at a time."""
MAX_LEAVES = 1024
MAX_STREAMS = 2048
MAX_WATCHES = 512
WATCHES_EACH = 8
"""Streams of status that one token may have open; fewer where so many for every token would be more than MAX_WATCHES.
Without tokens, one address, and ANONYMOUS_WATCHES of all addresses together."""
ANONYMOUS_WATCHES = 32
MAX_LOOKS = 512
LOOKS_EACH = 128
"""Calls of Status under way at a time, of all and of one token: each may ask the switch."""
JOINS_EACH = MAX_JOINS // 2
LEAVES_EACH = MAX_LEAVES // 2
STREAMS_EACH = MAX_STREAMS // 2
"""Of these, how many one token may have open; without tokens, one address."""
MAX_LEAVE_SECONDS = 60.0
"""How long a Leave may wait for the others; who says more waits so long."""
FIRST_REPORT_SECONDS = 5.0
"""How long a progress stream may stay open without a report."""
_PEERS = 1024
"""Addresses whose rates are remembered; who is forgotten begins with a full burst."""


def _digest(token: str) -> bytes:
    # Equal lengths, so that the comparison does not tell how long a token is.
    return hashlib.sha256(token.encode()).digest()


@dataclass(frozen=True)
class Tokens:
    """Digests of the tokens in a tokens file."""

    operator: bytes = field(repr=False)
    joins: tuple[tuple[str, bytes], ...] = field(repr=False)

    @classmethod
    def load(cls, path: str | Path) -> Tokens:
        """Read and check a tokens file. ConfigError, which never shows a token."""
        path = Path(path)
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
            public = path.stat().st_mode & 0o077
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ConfigError(f"{path}: cannot read the tokens file: {reason}") from None
        except tomllib.TOMLDecodeError:
            # The parser's message may show a part of the line.
            raise ConfigError(f"{path}: the tokens file is not valid TOML") from None
        if public:
            _LOG.warning("%s: others than its owner may read or write the tokens file: chmod 600 it", path)
        return cls._parse(document, str(path))

    @classmethod
    def _parse(cls, document: dict[str, Any], where: str) -> Tokens:
        unknown = sorted(set(document) - {"operator", "join"})
        if unknown:
            raise ConfigError(f"{where}: unknown key {', '.join(unknown)}: known are operator and [[join]]")
        operator = _token(document.get("operator"), f"{where}: operator")
        entries = document.get("join", [])
        if not isinstance(entries, list):
            raise ConfigError(f"{where}: join must be a list of tables: write [[join]] with two brackets")
        joins, seen = [], {operator: "operator"}
        for number, entry in enumerate(entries, 1):
            place = f"{where}: join {number}"
            if not isinstance(entry, dict) or set(entry) != {"jobs", "token"}:
                raise ConfigError(f"{place}: it must have the keys jobs and token, and no others")
            jobs, token = entry["jobs"], _token(entry["token"], f"{place}: token")
            if not isinstance(jobs, str) or not jobs or not jobs.isprintable():
                raise ConfigError(f"{place}: jobs must be a pattern of job names, not {jobs!r}")
            if token in seen and seen[token] == "operator":
                raise ConfigError(f"{place}: it has the operator's token: give every purpose a token of its own")
            seen[token] = jobs
            joins.append((jobs, token))
        return cls(operator, tuple(joins))

    @property
    def number(self) -> int:
        """How many different tokens there are, the operator's included."""
        return len({self.operator, *(token for _, token in self.joins)})

    def patterns(self, token: str) -> tuple[bool, list[str]]:
        """Whether this is the operator's token, and the patterns of jobs that it opens."""
        given = _digest(token)
        operator = hmac.compare_digest(given, self.operator)
        return operator, [jobs for jobs, wanted in self.joins if hmac.compare_digest(given, wanted)]


def _token(value: object, where: str) -> bytes:
    if not isinstance(value, str) or len(value) < MIN_TOKEN or not value.isascii() or not value.isprintable():
        raise ConfigError(
            f"{where}: a token must be a text of at least {MIN_TOKEN} printable ASCII characters, "
            f"for example from: openssl rand -hex 32"
        )
    if value != value.strip():
        raise ConfigError(f"{where}: a token must not begin or end with a blank")
    return _digest(value)


@dataclass(frozen=True)
class Caller:
    """What the sender of a call may do."""

    operator: bool
    patterns: tuple[str, ...]
    owner: bytes = field(default=b"", repr=False)
    """The digest of the token; empty without tokens."""

    def may_see(self, job: str) -> bool:
        """Whether a job is this caller's, or all are."""
        return self.operator or any(fnmatch.fnmatchcase(job, pattern) for pattern in self.patterns)

    def check_job(self, job: str) -> None:
        """Refuse to deal with a job that is not this caller's."""
        if not self.may_see(job):
            raise RefusedError(
                Code.PERMISSION_DENIED, f"the token is not for job {job[:128]!r}: use the token of this job"
            )


EVERYBODY = Caller(True, ())


class Gate:
    """Checks every call. Thread-safe; RefusedError says no."""

    def __init__(self, tokens: Tokens | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokens = tokens
        self._rates = Rates(CALLS_A_SECOND, CALL_BURST, clock)
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._shares: dict[tuple[str, bytes | str], int] = {}

    def caller(self, context: grpc.ServicerContext) -> Caller:
        """Who calls. UNAUTHENTICATED without a token, PERMISSION_DENIED with a wrong one."""
        if self._tokens is None:
            return EVERYBODY
        token = bearer(context.invocation_metadata())
        if token is None:
            self._count_wrong(context)
            raise RefusedError(
                Code.UNAUTHENTICATED,
                "this controller wants a token: set token or P4REDUCE_TOKEN to the job's (workers) or the operator's "
                "(p4reducectl)",
            )
        operator, patterns = self._tokens.patterns(token)
        if not operator and not patterns:
            self._count_wrong(context)
            raise RefusedError(Code.PERMISSION_DENIED, "the token is none of this controller's: ask who runs it")
        return Caller(operator, tuple(patterns), _digest(token))

    def check_join(self, context: grpc.ServicerContext, job: str) -> None:
        """Whether the caller may join this job now."""
        caller = self.caller(context)
        self.check_rate(context)
        caller.check_job(job)

    def check_operator(self, context: grpc.ServicerContext) -> None:
        """Whether the caller may change what others do."""
        caller = self.caller(context)
        self.check_rate(context)
        if not caller.operator:
            raise RefusedError(Code.PERMISSION_DENIED, "this takes the operator's token, not a job's")

    def check_rate(self, context: grpc.ServicerContext) -> None:
        """RESOURCE_EXHAUSTED when this address asks too often."""
        address = peer(context)
        if not self._rates.take(address):
            raise RefusedError(
                Code.RESOURCE_EXHAUSTED,
                f"too many calls from {address}: at most {CALLS_A_SECOND:.0f} a second, try again later",
            )

    def enter(self, what: str, most: int, each: int, context: grpc.ServicerContext) -> Callable[[], None]:
        """Count a call that lasts: up to `most` at a time, up to `each` of one token, or address without tokens.

        Returns what must be called when it ends.
        """
        share = what, self.caller(context).owner or peer(context)
        with self._lock:
            if self._shares.get(share, 0) >= each:
                whose = "this token" if self._tokens is not None else "this address"
                raise RefusedError(
                    Code.RESOURCE_EXHAUSTED,
                    f"{each} {what} of {whose} are open, which is the limit for one: try again later",
                )
            if self._counts.get(what, 0) >= most:
                raise RefusedError(
                    Code.RESOURCE_EXHAUSTED, f"{most} {what} are open, which is the limit: try again later"
                )
            self._counts[what] = self._counts.get(what, 0) + 1
            self._shares[share] = self._shares.get(share, 0) + 1

        def leave() -> None:
            with self._lock:
                self._counts[what] -= 1
                self._shares[share] -= 1
                if not self._shares[share]:
                    del self._shares[share]

        return leave

    def watch(self, context: grpc.ServicerContext) -> Callable[[], None]:
        """As `enter`, for a stream of status. Every token has a share that no other can take."""
        if self._tokens is None:
            return self.enter("watches", ANONYMOUS_WATCHES, WATCHES_EACH, context)
        number = self._tokens.number
        each = max(min(WATCHES_EACH, MAX_WATCHES // number), 1)
        return self.enter("watches", min(number * each, MAX_WATCHES), each, context)

    def _count_wrong(self, context: grpc.ServicerContext) -> None:
        # What is over the rate is not logged either: a flood of calls must not fill the disk.
        self.check_rate(context)
        _LOG.warning("call without a valid token from %s", peer(context))


class Rates:
    """Token buckets by name: `rate` a second, `burst` at once. Thread-safe."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._lock = threading.Lock()
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, name: str) -> bool:
        """Whether one more is within the rate; if so, it is counted."""
        return self.wait(name) == 0.0

    def wait(self, name: str) -> float:
        """Seconds until one more is within the rate; 0: it is now, and is counted."""
        with self._lock:
            now = self._clock()
            level, then = self._levels.pop(name, (self._burst, now))
            level = min(self._burst, level + (now - then) * self._rate)
            short = max(1.0 - level, 0.0)
            self._levels[name] = (level if short else level - 1.0, now)
            if len(self._levels) > _PEERS:
                self._levels.popitem(last=False)
        return short / self._rate


def bearer(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The token in a call's metadata."""
    for key, value in metadata:
        if key == "authorization":
            text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
            scheme, _, token = text.partition(" ")
            if scheme.lower() == "bearer" and token.strip():
                return token.strip()
    return None


def credential(metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    """What a rank presents to prove that it is one; empty without."""
    for key, value in metadata:
        if key == CREDENTIAL and isinstance(value, bytes):
            return value
    return b""


def peer(context: grpc.ServicerContext) -> str:
    """The caller's address without its port."""
    kind, _, rest = context.peer().partition(":")
    return rest.rpartition(":")[0] if kind in ("ipv4", "ipv6") else "this machine"


# ---- TLS and where to listen ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tls:
    """Files of a server that speaks TLS; with `client_ca`, clients must show a certificate of that authority."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    @classmethod
    def of(cls, cert: str | Path | None, key: str | Path | None, client_ca: str | Path | None) -> Tls | None:
        """From options. ConfigError when they do not go together; None when none is given."""
        if cert is None and key is None and client_ca is None:
            return None
        if cert is None or key is None:
            raise ConfigError("TLS needs a certificate and its key: give both --tls-cert and --tls-key")
        return cls(Path(cert), Path(key), Path(client_ca) if client_ca is not None else None)

    def credentials(self) -> grpc.ServerCredentials:
        """What gRPC wants. ConfigError names the file that is wrong, before gRPC would fail without a word."""
        cert, key = _read(self.cert, "certificate"), _read(self.key, "key")
        ca = _read(self.client_ca, "client authority") if self.client_ca is not None else None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # An empty passphrase: the alternative is a question at the terminal.
            context.load_cert_chain(self.cert, self.key, password="")
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"--tls-cert {self.cert} and --tls-key {self.key} cannot be used together: "
                f"{_reason(error)}: give a PEM certificate and its own key, without a passphrase"
            ) from None
        if ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except ssl.SSLError as error:
                raise ConfigError(
                    f"--tls-client-ca {self.client_ca}: {_reason(error)}: give a PEM certificate"
                ) from None
        return grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=ca is not None)


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or "not usable"


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the {what}: {error.strerror}") from None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address to listen on."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_listen(host: str, tls: Tls | None, tokens: bool, insecure: bool) -> None:
    """Refuse to serve other machines in the clear, or anybody on them, unless told that this is meant."""
    if is_loopback(host):
        return
    lacks = []
    if tls is None:
        lacks.append("TLS (--tls-cert, --tls-key): tokens and credentials can be read on the way")
    if not tokens and (tls is None or tls.client_ca is None):
        lacks.append("tokens (--tokens) or client certificates (--tls-client-ca): everybody may join and drain")
    if not lacks:
        return
    text = f"listening on {host}, which other machines can reach, without {' and without '.join(lacks)}"
    if not insecure:
        raise ConfigError(f"{text}: add them, listen on 127.0.0.1, or say --insecure")
    _LOG.warning("%s", text)
