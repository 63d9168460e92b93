# SPDX-License-Identifier: Apache-2.0
"""Metrics of controller and workers, scraped over HTTP and parsed as Prometheus does."""

from __future__ import annotations

import contextlib
import http.client
import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.cli_servicer import EPOCH, RING, job, switch, worker
from prometheus_client.parser import text_string_to_metric_families

from p4reduce import metrics
from p4reduce.core.counters import CoreCounters
from p4reduce.errors import ConfigError
from p4reduce.metrics import Family, MetricsServer, serve_from_environment, serve_metrics, split_address
from p4reduce.proto import controller_pb2 as pb
from p4reduce_controller import metrics as controller_metrics
from p4reduce_controller.entries import COUNTER_NAMES
from p4reduce_controller.metrics import start_metrics
from p4reduce_controller.model import PoolView

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
TIMEOUT = 20.0
STATS: dict[str, Any] = {
    "job": 'tr"ain\\',
    "rank": 3,
    "world_size": 4,
    "epoch": EPOCH,
    "present": EPOCH + 1,
    "profile": "w34",
    "path": "ring",
    "mode": "auto",
    "fallbacks": {"silent": 2, "something new": 1},
    "promotions": 1,
    "controller_connected": True,
    "submitted": 11,
    "completed": 9,
    "elements": 4096,
    "seconds": {"encode": 0.5, "wire": 0.25},
    "core": CoreCounters(frames_sent=100, resent_timeout=3, resent_early=2, duplicates=1, srtt=0.002).as_dict(),
    "ring": {"buckets": 5, "elements": 640, "compared": 1, "seconds": 0.125},
    "transport": {"sent": 100, "received": 90},
}


def get(address: str, path: str = "/metrics", method: str = "GET", **headers: str) -> tuple[int, str, str]:
    """Status, content type and text."""
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers.get("Content-Type", ""), answer.read().decode()
    finally:
        connection.close()


def scrape(address: str) -> dict[tuple[str, ...], float]:
    """All samples: by name and, sorted by the labels' names, their values."""
    status, content_type, text = get(address)
    assert (status, content_type.split(";")[0]) == (200, "text/plain")
    samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            key = (sample.name, *(value for _, value in sorted(sample.labels.items())))
            assert key not in samples, f"{key} twice"
            samples[key] = sample.value
    return samples


# ---- a worker --------------------------------------------------------------------------------------------------------


def test_a_worker() -> None:
    with serve_metrics("127.0.0.1:0", lambda: STATS) as server:
        found = scrape(server.address)
    who = ('tr"ain\\', "3")
    assert found["p4reduce_worker_info", who[0], "auto", "w34", "3"] == 1
    assert found[("p4reduce_worker_epoch", *who)] == EPOCH + 1
    assert found["p4reduce_worker_path", who[0], "ring", "3"] == 1
    assert found["p4reduce_worker_path", who[0], "switch", "3"] == 0
    assert found[("p4reduce_worker_buckets_submitted_total", *who)] == 11
    assert found[("p4reduce_worker_buckets_completed_total", *who)] == 9
    assert found[("p4reduce_worker_elements_total", *who)] == 4096
    assert found[("p4reduce_worker_controller_connected", *who)] == 1
    assert found[("p4reduce_worker_frames_sent_total", *who)] == 100
    assert found[("p4reduce_worker_retransmissions_total", "timeout", *who)] == 3
    assert found[("p4reduce_worker_retransmissions_total", "early", *who)] == 2
    assert found[("p4reduce_worker_retransmissions_total", "integrity", *who)] == 0
    assert found["p4reduce_worker_dropped_total", who[0], "3", "duplicate"] == 1
    assert found["p4reduce_worker_nacks_total", who[0], "3", "tag_mismatch"] == 0
    assert found[("p4reduce_worker_rtt_seconds", *who)] == 0.002
    assert found["p4reduce_worker_fallbacks_total", who[0], "3", "silent"] == 2
    assert found["p4reduce_worker_fallbacks_total", who[0], "3", "drained"] == 0  # there before it happens
    assert found["p4reduce_worker_fallbacks_total", who[0], "3", "something new"] == 1
    assert found[("p4reduce_worker_ring_seconds_total", *who)] == 0.125
    assert found[("p4reduce_worker_datagrams_total", "received", *who)] == 90
    assert found[("p4reduce_worker_io_seconds_total", "encode", *who)] == 0.5


def test_a_worker_with_less_to_tell() -> None:
    """Parts that a version does not have yet, or no more, are no error."""
    with serve_metrics("127.0.0.1:0", lambda: {"job": "a", "rank": 0, "ring": None, "core": {}}) as server:
        assert scrape(server.address) == {("p4reduce_worker_info", "a", "", "", "0"): 1.0}


def test_every_counter_of_the_core_is_exported() -> None:
    """What the core counts a scrape shows, but for sums of others and what is no count."""
    names = set(CoreCounters().as_dict()) - {"srtt", "rto", "retransmissions"}
    assert names <= set(metrics.WORKER_COUNTERS)
    assert set(metrics.WORKER_COUNTERS) - names == {"elements"}


def test_a_scrape_is_a_snapshot_of_now() -> None:
    numbers = iter(range(100))
    with serve_metrics("127.0.0.1:0", lambda: {"job": "a", "rank": 0, "submitted": next(numbers)}) as server:
        values = [scrape(server.address)["p4reduce_worker_buckets_submitted_total", "a", "0"] for _ in range(3)]
    assert values == [0, 1, 2]


# ---- the server ------------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    with serve_metrics("127.0.0.1:0", lambda: STATS) as found:
        yield found


def test_paths_and_methods(server: MetricsServer) -> None:
    assert get(server.address, "/")[0] == 200
    assert get(server.address, "/metrics?name[]=x")[0] == 200
    assert get(server.address, "/etc/passwd")[0] == 404
    assert get(server.address, method="POST")[0] == 501


def test_the_newer_format_is_given_to_who_asks(server: MetricsServer) -> None:
    status, content_type, text = get(server.address, Accept="application/openmetrics-text; version=1.0.0")
    assert (status, content_type.split(";")[0]) == (200, "application/openmetrics-text")
    assert text.endswith("# EOF\n")


def test_a_snapshot_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[Callable[[], dict[str, Any]]] = [lambda: {}["gone"], lambda: {"job": "a", "rank": 0}]
    with serve_metrics("127.0.0.1:0", lambda: answers.pop(0)()) as server:
        with caplog.at_level(logging.ERROR, "p4reduce"):
            status, _, text = get(server.address)
        assert (status, "KeyError" in text) == (500, False)
        assert "metrics: no snapshot" in caplog.text
        assert get(server.address)[0] == 200


def test_clients_that_say_nothing_do_not_keep_others_out(
    server: MetricsServer,
) -> None:
    """So many connections at once and no more; when one ends there is room again."""
    host, port = split_address(server.address)
    silent = [socket.create_connection((host, port), TIMEOUT) for _ in range(metrics.MAX_CONNECTIONS)]
    try:
        refused = socket.create_connection((host, port), TIMEOUT)
        refused.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        with refused, contextlib.suppress(ConnectionResetError):  # another way to say the same
            assert refused.recv(1) == b""
    finally:
        for connection in silent:
            connection.close()
    deadline = time.monotonic() + TIMEOUT
    while True:  # the handlers notice one by one
        try:
            assert get(server.address)[0] == 200
            break
        except (ConnectionError, http.client.HTTPException):
            assert time.monotonic() < deadline, "there was never room again"


def test_scrapes_come_one_after_the_other() -> None:
    """The first waits a moment for the second to come in beside it, which must not happen."""
    entries: list[int] = []
    beside = threading.Event()
    inside = threading.Event()

    def snapshot() -> Iterator[Family]:
        entries.append(len(entries))
        if len(entries) == 1:
            inside.set()
            overlaps.append(beside.wait(0.3))
        else:
            beside.set()
        yield Family("a", "gauge", "text", (), [((), 1.0)])

    overlaps: list[bool] = []
    statuses: list[int] = []
    with MetricsServer("127.0.0.1:0", snapshot) as server:
        first = threading.Thread(target=lambda: statuses.append(get(server.address)[0]))
        first.start()
        assert inside.wait(TIMEOUT)
        statuses.append(get(server.address)[0])
        first.join(TIMEOUT)
    assert (overlaps, entries, statuses) == ([False], [0, 1], [200, 200])


def test_stop_frees_the_port() -> None:
    server = serve_metrics("127.0.0.1:0", dict)
    address = server.address
    with pytest.raises(ConfigError, match=rf"metrics: cannot listen on {address}: Address already in use"):
        serve_metrics(address, dict)
    server.stop()
    server.stop()
    with serve_metrics(address, dict) as again:
        assert again.address == address


@pytest.mark.parametrize(
    "address", ["", "9464", ":9464", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "a:-1", "a:²"]
)
def test_addresses_that_make_no_sense(address: str) -> None:
    with pytest.raises(ConfigError, match="is no ADDRESS:PORT"):
        serve_metrics(address, dict)


def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1:9464"):
        serve_metrics("203.0.113.1:9464", dict)


def test_ipv6() -> None:
    try:
        server = serve_metrics("[::1]:0", lambda: {"job": "a", "rank": 0})
    except ConfigError:
        pytest.skip("this machine has no IPv6 on loopback")
    with server:
        assert server.address.startswith("[::1]:")
        assert get(server.address)[0] == 200


def test_without_prometheus_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'p4reduce\[metrics\]'"):
        serve_metrics("127.0.0.1:0", dict)


def test_the_environment() -> None:
    assert serve_from_environment(dict, {}) is None
    assert serve_from_environment(dict, {"P4REDUCE_METRICS": ""}) is None
    found = serve_from_environment(lambda: STATS, {"P4REDUCE_METRICS": "127.0.0.1:0", "LOCAL_RANK": "7"})
    assert found is not None
    with found:
        assert get(found.address)[0] == 200


def test_workers_of_one_host_share_the_setting() -> None:
    """Worker 2 takes the second port above; so taken ports show which one it chose."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        setting = {"P4REDUCE_METRICS": f"127.0.0.1:{port - 2}"}
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            serve_from_environment(dict, setting | {"LOCAL_RANK": "2"})
    with pytest.raises(ConfigError, match="LOCAL_RANK='x' is no number"):
        serve_from_environment(dict, setting | {"LOCAL_RANK": "x"})
    with pytest.raises(ConfigError, match=r"port 65536 .* is too high"):
        serve_from_environment(dict, {"P4REDUCE_METRICS": "127.0.0.1:65535", "LOCAL_RANK": "1"})


# ---- the controller --------------------------------------------------------------------------------------------------


class Snapshots:
    """In the place of a coordinator."""

    def __init__(self, *jobs: pb.JobStatus, **changes: Any) -> None:
        self.jobs = list(jobs)
        self.switch = switch(**changes)
        self.views = [PoolView(0, 64, "train", EPOCH), PoolView(64, 32, "old", EPOCH - 5), PoolView(96, 928, "", 0)]
        self.asked: list[str] = []

    def status(self, only: str) -> pb.StatusReply:
        assert only == ""
        self.asked.append("status")
        return pb.StatusReply(switch=self.switch, jobs=self.jobs, server_version="0.1.0", uptime_seconds=12.5)

    def pools(self) -> list[PoolView]:
        self.asked.append("pools")
        return self.views


def scraped(source: Snapshots) -> dict[tuple[str, ...], float]:
    with start_metrics("127.0.0.1:0", source) as server:
        return scrape(server.address)


def test_a_controller() -> None:
    failed = job(
        "[old]", "failed", path=pb.PATH_UNSPECIFIED, pool_size=0, workers=[worker(0, "lost"), worker(1, "left")]
    )
    source = Snapshots(job(), job("other", **RING), failed, drained=True, trouble="3 entries are missing")
    found = scraped(source)
    assert source.asked == ["status", "pools"]
    assert found["p4reduce_controller_info", "w34", "0.1.0"] == 1
    assert found["p4reduce_controller_uptime_seconds",] == 12.5
    assert found["p4reduce_switch_connected", "s1"] == 1
    assert found["p4reduce_switch_drained", "s1"] == 1
    assert found["p4reduce_switch_trouble", "s1"] == 1
    assert found["p4reduce_switch_connected_seconds", "s1"] == 61
    states = {key[1]: value for key, value in found.items() if key[0] == "p4reduce_slots"}
    assert states == {"leased": 64, "changing": 32, "free": 928}
    assert sum(states.values()) == 1024
    assert found["p4reduce_leases", "leased"] == found["p4reduce_leases", "changing"] == 1
    assert found["p4reduce_epoch",] == EPOCH
    assert {key[1]: value for key, value in found.items() if key[0] == "p4reduce_jobs" and value} == {
        "switch": 1,
        "ring": 1,
        "failed": 1,
    }
    assert found["p4reduce_jobs", "cutting"] == 0
    assert found["p4reduce_jobs_by_path", "none"] == found["p4reduce_jobs_by_path", "ring"] == 1
    assert found["p4reduce_jobs_by_mode", "auto"] == 3
    assert found["p4reduce_job_on_switch", "train"] == 1
    assert found["p4reduce_job_on_switch", "other"] == 0
    assert found["p4reduce_job_failed", "[old]"] == 1
    assert found["p4reduce_job_workers", "[old]"] == 0
    assert found["p4reduce_job_buckets_total", "train"] == 100
    assert found["p4reduce_job_promotions_total", "other"] == 2
    assert found["p4reduce_job_fallbacks_total", "other", "silent"] == 2
    assert found["p4reduce_job_fallbacks_total", "train", "silent"] == 0
    assert found["p4reduce_switch_events_total", "stale", "train"] == 1
    assert found["p4reduce_worker_rtt_seconds", "train", "1"] == 0.0008
    assert found["p4reduce_worker_silent_seconds", "train", "0"] == 0.25
    assert found["p4reduce_worker_frames_sent_total", "train", "1"] == 2000
    assert found["p4reduce_worker_dropped_total", "train", "1", "duplicate"] == 1


def test_a_controller_that_has_just_begun() -> None:
    source = Snapshots(connected=False)
    source.views = []
    found = scraped(source)
    assert found["p4reduce_switch_connected", "s1"] == 0
    assert found["p4reduce_jobs", "switch"] == 0
    assert found["p4reduce_epoch",] == 0


def test_the_highest_epoch_stays_when_its_job_has_gone() -> None:
    source = Snapshots(job(present=EPOCH + 3))
    source.views = []
    with start_metrics("127.0.0.1:0", source) as server:
        for jobs, highest, seen in (
            (source.jobs, EPOCH + 3, 2),  # the one that names the membership, and the present one
            (source.jobs, EPOCH + 3, 2),
            ([], EPOCH + 3, 2),
            ([job(present=EPOCH + 500), job("b", epoch=EPOCH + 501, present=EPOCH + 501)], EPOCH + 501, 4),
        ):
            source.jobs = jobs
            found = scrape(server.address)
            assert (found["p4reduce_epoch",], found["p4reduce_epochs_total",]) == (highest, seen)


def test_the_number_of_series_is_bounded() -> None:
    """However many names workers come up with; running jobs are shown before failed ones."""
    failed = [job(f"failed {number}", "failed", ranks=1) for number in range(500)]
    running = [job(f"running {number}", ranks=64) for number in range(40)]
    found = scraped(Snapshots(*failed, *running))
    names = {key[1] for key in found if key[0] == "p4reduce_job_epoch"}
    assert len(names) == controller_metrics.MAX_JOBS
    assert {one.job for one in running} <= names
    assert found["p4reduce_jobs_omitted",] == 540 - 64
    assert found["p4reduce_jobs", "failed"] == 500
    assert sum(key[0] == "p4reduce_worker_rtt_seconds" for key in found) == controller_metrics.MAX_WORKERS
    assert not any(str(EPOCH) in label for key in found for label in key[1:])


def test_names_are_the_codes_own() -> None:
    assert set(controller_metrics.EVENTS) == set(COUNTER_NAMES)


def test_the_page_lists_every_metric() -> None:
    """docs/metrics.md, and nothing that does not exist."""
    worker_names = {family.name + "_total" * (family.kind == "counter") for family in metrics.worker_families(STATS)}
    exporter = controller_metrics.Exporter(Snapshots(job()))
    names = {family.name + "_total" * (family.kind == "counter") for family in exporter.families()}
    written = set(re.findall(r"^\| `(p4reduce_\w+)`", PAGE.read_text(encoding="utf-8"), re.M))
    assert written == worker_names | names


def test_the_page_lists_every_counter_of_a_worker() -> None:
    rows = set(re.findall(r"^\| `([a-z_]+)` \|", PAGE.read_text(encoding="utf-8"), re.M))
    counters = {row for row in rows if not row.startswith("p4reduce_")}
    assert counters == set(CoreCounters().as_dict())
