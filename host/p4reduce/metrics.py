# SPDX-License-Identifier: Apache-2.0
"""Metrics over HTTP for Prometheus: the server that worker and controller share, and what a worker exports.

A scrape takes one snapshot, so that its figures belong together. Nothing is counted here. The text is made by the
package prometheus_client, which the extra `metrics` installs; it is imported when a server starts. docs/metrics.md
lists every metric.
"""

from __future__ import annotations

import logging
import os
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from p4reduce.errors import ConfigError

_LOG = logging.getLogger(__name__)

ENVIRONMENT: Final = "P4REDUCE_METRICS"
LOCAL_RANK: Final = "LOCAL_RANK"
MAX_CONNECTIONS: Final = 16
"""At once; more are closed unanswered."""
READ_SECONDS: Final = 5.0
"""How long a client may take to say what it wants."""
PATHS: Final = ("/", "/metrics")


@dataclass(slots=True)
class Family:
    """One metric: its samples by the values of its labels. The name of a counter is written without "_total"."""

    name: str
    kind: Literal["gauge", "counter"]
    text: str
    labels: tuple[str, ...] = ()
    samples: list[tuple[tuple[str, ...], float]] = field(default_factory=list)

    def add(self, value: float, *labels: object) -> None:
        """Add one sample; label values in the order of `labels`."""
        self.samples.append((tuple(str(label) for label in labels), float(value)))


@dataclass(frozen=True, slots=True)
class CounterOf:
    """How one of a worker's counters is exported: as a metric of its own, or as one value of a label."""

    metric: str
    text: str
    label: str = ""
    value: str = ""


_RESENT = ("p4reduce_worker_retransmissions", "Frames sent again, by cause.", "cause")
_DROPPED = ("p4reduce_worker_dropped", "Frames that came and did not count, by reason.", "reason")
_NACKS = ("p4reduce_worker_nacks", "Refusals by the switch of what was outstanding, by reason.", "reason")

WORKER_COUNTERS: Final[Mapping[str, CounterOf]] = {
    "frames_sent": CounterOf("p4reduce_worker_frames_sent", "Frames sent, those sent again included."),
    "bytes_sent": CounterOf("p4reduce_worker_bytes_sent", "UDP payload of the frames sent, in bytes."),
    "frames_received": CounterOf("p4reduce_worker_frames_received", "Frames received."),
    "results": CounterOf("p4reduce_worker_results", "Results accepted, one for each chunk."),
    "resent_timeout": CounterOf(*_RESENT, "timeout"),
    "resent_early": CounterOf(*_RESENT, "early"),
    "resent_integrity": CounterOf(*_RESENT, "integrity"),
    "duplicates": CounterOf(*_DROPPED, "duplicate"),
    "stale": CounterOf(*_DROPPED, "stale"),
    "foreign": CounterOf(*_DROPPED, "foreign"),
    "malformed": CounterOf(*_DROPPED, "malformed"),
    "integrity": CounterOf(*_DROPPED, "integrity"),
    "late": CounterOf(*_DROPPED, "late"),
    "nacks_unknown_epoch": CounterOf(*_NACKS, "unknown_epoch"),
    "nacks_not_admitted": CounterOf(*_NACKS, "not_admitted"),
    "nacks_bad_slot": CounterOf(*_NACKS, "bad_slot"),
    "nacks_tag_mismatch": CounterOf(*_NACKS, "tag_mismatch"),
    "nacks_malformed": CounterOf(*_NACKS, "malformed"),
    "silences": CounterOf("p4reduce_worker_silences", "Times that results stayed away long enough to be reported."),
    "stalls": CounterOf("p4reduce_worker_stalls", "Times that a deadline passed without a result."),
    "elements": CounterOf("p4reduce_worker_elements", "Elements handed in."),
}
"""By the names that a worker reports to the controller and that `Communicator.stats()["core"]` has."""


def counter_families(
    workers: Iterable[tuple[tuple[str, ...], Mapping[str, Any]]], labels: tuple[str, ...]
) -> Iterator[Family]:
    """Counters of workers, each with the values of `labels` in front. Names that are not known are left out."""
    families: dict[str, Family] = {}
    for values, counters in workers:
        for name, found in WORKER_COUNTERS.items():
            if name not in counters:
                continue
            own = (found.label,) if found.label else ()
            family = families.setdefault(found.metric, Family(found.metric, "counter", found.text, labels + own))
            family.add(counters[name], *values, *((found.value,) if found.label else ()))
    yield from families.values()


_LABELS: Final = ("job_name", "rank")
_STATS: Final[tuple[tuple[str, Literal["gauge", "counter"], str, str], ...]] = (
    ("world_size", "gauge", "p4reduce_worker_world_size", "Ranks of the job."),
    ("present", "gauge", "p4reduce_worker_epoch", "The present epoch."),
    ("controller_connected", "gauge", "p4reduce_worker_controller_connected", "1 while the progress stream is open."),
    ("submitted", "counter", "p4reduce_worker_buckets_submitted", "Buckets handed in."),
    ("completed", "counter", "p4reduce_worker_buckets_completed", "Buckets complete up to the first that is not."),
    ("elements", "counter", "p4reduce_worker_elements", "Elements handed in."),
    ("promotions", "counter", "p4reduce_worker_promotions", "Times that the job went back to the switch path."),
)
_CORE: Final[tuple[tuple[str, str, str], ...]] = (
    ("srtt", "p4reduce_worker_rtt_seconds", "Smoothed round-trip time of a frame; 0: none yet."),
    ("rto", "p4reduce_worker_rto_seconds", "Present retransmission timeout."),
)
_RING: Final[tuple[tuple[str, str, str], ...]] = (
    ("buckets", "p4reduce_worker_ring_buckets", "Buckets summed on the ring path."),
    ("elements", "p4reduce_worker_ring_elements", "Elements summed on the ring path."),
    ("compared", "p4reduce_worker_ring_compared", "Buckets that had come from the switch too, and were equal."),
    ("seconds", "p4reduce_worker_ring_seconds", "Seconds spent on the ring path, waiting for others included."),
)
_PATHS: Final = ("switch", "ring")
FALLBACK_REASONS: Final = (
    "silent",
    "stalled",
    "integrity",
    "refused",
    "switch_lost",
    "drained",
    "operator",
    "no_room",
    "no_switch",
)
"""Why a job may go to the ring path. All are exported from the start: an increase from nothing would not be seen."""


def worker_families(stats: Mapping[str, Any]) -> Iterator[Family]:
    """What a worker exports, from `Communicator.stats()`. Parts that are missing are left out."""
    who = (str(stats.get("job", "")), str(stats.get("rank", "")))
    info = Family("p4reduce_worker_info", "gauge", "Always 1.", (*_LABELS, "profile", "mode"))
    info.add(1, *who, stats.get("profile", ""), stats.get("mode", ""))
    yield info
    for name, kind, metric, text in _STATS:
        if name in stats:
            yield _single(metric, kind, text, stats[name], who)
    if "path" in stats:
        path = Family("p4reduce_worker_path", "gauge", "1 for the path that new buckets take.", (*_LABELS, "path"))
        for name in _PATHS:
            path.add(stats["path"] == name, *who, name)
        yield path
    if "fallbacks" in stats:
        yield fallbacks_family("p4reduce_worker_fallbacks", [(who, stats["fallbacks"])], _LABELS)
    core = {name: value for name, value in (stats.get("core") or {}).items() if name != "elements"}
    yield from counter_families([(who, core)], _LABELS)
    for name, metric, text in _CORE:
        if name in core:
            yield _single(metric, "gauge", text, core[name], who)
    ring = stats.get("ring") or {}
    for name, metric, text in _RING:
        if name in ring:
            yield _single(metric, "counter", text, ring[name], who)
    yield from _by_label("p4reduce_worker_datagrams", "Datagrams, by what became of them.", "event", stats, "transport")
    yield from _by_label("p4reduce_worker_io_seconds", "Seconds of the I/O thread.", "doing", stats, "seconds")


def fallbacks_family(
    metric: str, jobs: Iterable[tuple[tuple[str, ...], Mapping[str, int]]], labels: tuple[str, ...]
) -> Family:
    """Fallbacks by reason, each with the values of `labels` in front."""
    family = Family(metric, "counter", "Times that the job went to the ring path, by reason.", (*labels, "reason"))
    for values, counted in jobs:
        for reason in (*FALLBACK_REASONS, *(name for name in counted if name not in FALLBACK_REASONS)):
            family.add(counted.get(reason, 0), *values, reason)
    return family


def _single(metric: str, kind: Literal["gauge", "counter"], text: str, value: float, who: tuple[str, ...]) -> Family:
    family = Family(metric, kind, text, _LABELS)
    family.add(value, *who)
    return family


def _by_label(metric: str, text: str, label: str, stats: Mapping[str, Any], part: str) -> Iterator[Family]:
    values = stats.get(part) or {}
    if values:
        family = Family(metric, "counter", text, (*_LABELS, label))
        for name, value in values.items():
            family.add(value, str(stats.get("job", "")), str(stats.get("rank", "")), name)
        yield family


def serve_metrics(address: str, stats: Callable[[], Mapping[str, Any]]) -> MetricsServer:
    """Export a worker's `stats` (`Communicator.stats`) at `address` until the server's `stop`. ConfigError."""
    return MetricsServer(address, lambda: worker_families(stats()))


def serve_from_environment(
    stats: Callable[[], Mapping[str, Any]], environ: Mapping[str, str] | None = None
) -> MetricsServer | None:
    """As P4REDUCE_METRICS says, None without it. ConfigError.

    Several workers of one host share the setting: each takes the port that is LOCAL_RANK (0 without it) above the one
    that is written there, unless that is 0, which means any.
    """
    environ = os.environ if environ is None else environ
    address = environ.get(ENVIRONMENT, "")
    if not address:
        return None
    host, port = split_address(address)
    local = environ.get(LOCAL_RANK, "") or "0"
    if not local.isascii() or not local.isdigit():
        raise ConfigError(f"metrics: {LOCAL_RANK}={local!r} is no number")
    if port:
        port += int(local)
    if port > 65535:
        raise ConfigError(f"metrics: port {port} ({ENVIRONMENT}={address} and {LOCAL_RANK}={local}) is too high")
    return serve_metrics(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", stats)


class MetricsServer:
    """An HTTP server that answers every scrape with a fresh snapshot. Close it with `stop`, or use it in `with`."""

    def __init__(self, address: str, snapshot: Callable[[], Iterable[Family]]) -> None:
        """Starts to listen. `address`: ADDRESS:PORT, port 0 for any.

        ConfigError: the address makes no sense or is taken, or prometheus_client is missing. An exception of
        `snapshot` is logged and answered with status 500.
        """
        host, port = split_address(address)
        encoders = _encoders(snapshot)
        handler = type("Handler", (_Handler,), {"encode": staticmethod(encoders)})
        try:
            family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._server = _server(family, target, handler)
        except OSError as error:
            raise ConfigError(f"metrics: cannot listen on {address}: {error.strerror or error}") from None
        self._host = host
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="p4reduce-metrics", daemon=True
        )
        self._thread.start()
        _LOG.info("metrics on http://%s/metrics", self.address)

    @property
    def address(self) -> str:
        """ADDRESS:PORT with the real port."""
        port = int(self._server.server_address[1])
        return f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"

    def stop(self) -> None:
        """Close the port. Safe to call twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(READ_SECONDS)

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def split_address(address: str) -> tuple[str, int]:
    """Host and port. ConfigError when it is not ADDRESS:PORT."""
    host, colon, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"metrics: {address!r} is no ADDRESS:PORT, for example 127.0.0.1:9464")
    return host, int(port)


class _Handler(BaseHTTPRequestHandler):
    """GET / and /metrics; everything else is refused."""

    timeout = READ_SECONDS
    encode: Callable[[str], tuple[bytes, str]]

    def do_GET(self) -> None:
        if urlsplit(self.path).path not in PATHS:
            self.send_error(HTTPStatus.NOT_FOUND, "look at /metrics")
            return
        try:
            output, content_type = self.encode(self.headers.get("Accept", ""))
        except Exception:
            # Whatever a snapshot trips over must neither end the server nor go unseen.
            _LOG.exception("metrics: no snapshot")
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, "no snapshot, see the log")
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(output)))
        self.end_headers()
        self.wfile.write(output)

    def log_message(self, format: str, *args: Any) -> None:
        _LOG.debug("metrics: %s %s", self.client_address[0], format % args)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 2 * MAX_CONNECTIONS
    allow_reuse_address = True

    def __init__(self, target: Any, handler: type[BaseHTTPRequestHandler]) -> None:
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(target, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, _request: Any, client_address: Any) -> None:
        # Mostly a client that went away.
        _LOG.debug("metrics: request of %s failed", client_address, exc_info=True)


def _server(family: int, target: Any, handler: type[BaseHTTPRequestHandler]) -> _Server:
    kind = type("Server", (_Server,), {"address_family": family})
    server: _Server = kind(target, handler)
    return server


def _encoders(snapshot: Callable[[], Iterable[Family]]) -> Callable[[str], tuple[bytes, str]]:
    """From what a client accepts to text and content type. The one place that knows prometheus_client."""
    try:
        from prometheus_client import CollectorRegistry
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
        from prometheus_client.exposition import choose_encoder
        from prometheus_client.registry import Collector
    except ImportError:
        raise ConfigError("metrics need the package prometheus_client: pip install 'p4reduce[metrics]'") from None
    kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}

    class Snapshot(Collector):
        def collect(self) -> Iterator[Any]:
            for family in snapshot():
                made = kinds[family.kind](family.name, family.text, labels=family.labels)
                for labels, value in family.samples:
                    made.add_metric(labels, value)
                yield made

    # Its own registry: what else a process exports is not ours to show, and two servers must not meet.
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Snapshot())
    lock = threading.Lock()

    def encode(accept: str) -> tuple[bytes, str]:
        encoder, content_type = choose_encoder(accept)
        with lock:  # however many scrape, one snapshot is taken at a time
            return encoder(registry), content_type

    return encode
