# SPDX-License-Identifier: Apache-2.0
"""What a worker tells the controller, and what goes out nowhere."""

from __future__ import annotations

import logging
import threading
import urllib.request
from typing import Any

import numpy as np
import pytest
from helpers import control
from helpers.control import FakeJob, World, arrays, reduce, the_job

import p4reduce
from p4reduce.errors import (
    ConfigError,
)
from p4reduce.proto import controller_pb2 as pb

WAIT = 20
world = control.calm_world


def test_what_a_join_tells_of_the_ring(world: World) -> None:
    world.connect(2, ring=True, slots_min=4, slots_want=32)
    requests = world.controller.jobs["job"].requests
    for request in requests.values():
        assert (request.mode, request.ring, request.slots_min, request.slots_want) == ("auto", True, 4, 32)
        assert len(request.nonce) == 16
    assert requests[0].nonce != requests[1].nonce
    world.connect(1, job="other")
    assert world.controller.jobs["other"].requests[0].ring is False


def test_credential_and_token_go_where_they_belong(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="p4reduce"):
        comms = world.connect(2, token="a-secret-token")
        world.each(lambda comm: comm.close(), comms)
    assert world.controller.tokens == {"Bearer a-secret-token"}
    assert set(world.controller.credentials["Progress"]) == {b"%016d" % rank for rank in range(2)}
    assert sorted(world.controller.credentials["Leave"]) == [b"%016d" % rank for rank in range(2)]
    assert "a-secret-token" not in caplog.text
    assert "a-secret-token" not in repr(comms[0]._session)
    assert "token=set (argument)" in caplog.text


def test_a_token_from_a_file(world: World, tmp_path: Any) -> None:
    file = tmp_path / "token"
    file.write_text("from-a-file\nnot this\n")
    world.connect(1, token_file=str(file))
    assert world.controller.tokens == {"Bearer from-a-file"}
    for content in ("", "\n", "uml\u00e4ut"):
        file.write_text(content)
        with pytest.raises(ConfigError, match=r"token_file .*/token must hold printable ASCII"):
            p4reduce.connect(world.controller.address, "job", 0, 1, token_file=str(file))
    with pytest.raises(ConfigError, match=r"cannot read token_file .*nowhere: No such file"):
        p4reduce.connect(world.controller.address, "job", 0, 1, token_file=str(tmp_path / "nowhere"))


def test_reports_carry_counters_round_trip_and_the_present_epoch(world: World) -> None:
    world.controller.lease_seconds = 0.4
    comms = world.connect(2, ring=True)
    job = the_job(world)
    reduce(world, comms, arrays(9, 2))
    world.controller.wait_for(lambda: job.reports[0].completed == 1 and job.reports[0].rtt_seconds > 0)
    report = job.reports[0]
    assert (report.epoch, report.present, report.silent_seconds) == (41, 41, 0.0)
    assert report.counters["results"] > 10
    assert "srtt" not in report.counters
    assert report.counters["elements"] == 3000
    world.controller.cut(job)
    world.controller.wait_for(lambda: {job.reports[rank].present for rank in range(2)} == {42})
    before = report.counters["results"]
    world.controller.wait_for(lambda: job.reports[0].counters["results"] >= before)
    assert job.reports[0].epoch == 41


def test_silence_is_reported_at_once_and_taken_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p4reduce.membership._LONGEST_INTERVAL_SECONDS", 100.0)
    world.controller.policy.silent_seconds = world.controller.policy.fallback_seconds = 0.1
    # Reports come for news only.
    world.controller.lease_seconds = world.controller.policy.deadline_seconds = 1000.0
    comms = world.connect(2, ring=True)
    job = the_job(world)
    future = comms[0].allreduce_async(np.ones(5, np.float32))
    world.controller.wait_for(lambda: job.reports[0].silent_seconds >= 0.1)
    assert (job.reports[0].submitted, job.reports[0].completed) == (1, 0)
    comms[1].allreduce(np.ones(5, np.float32))
    future.result(WAIT)
    world.controller.wait_for(lambda: job.reports[0].silent_seconds == 0.0)
    assert world.controller.trouble == []


def test_a_report_when_the_controller_asks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p4reduce.membership._LONGEST_INTERVAL_SECONDS", 100.0)
    world.controller.lease_seconds = world.controller.policy.deadline_seconds = 1000.0
    comms = world.connect(2)
    job = the_job(world)
    seen: list[tuple[int, int]] = []

    def on_report(_: FakeJob, report: pb.ProgressReport) -> None:
        if report.rank == 0:
            seen.append((report.submitted, report.completed))

    world.controller.on_report = on_report
    reduce(world, comms, arrays(10, 2, 10))
    world.controller.send(job, pb.Directive(report_now=pb.ReportNow()))
    world.controller.wait_for(lambda: (1, 1) in seen)
    world.controller.send(job, pb.Directive(report_now=pb.ReportNow(completed=3)))
    for _ in range(2):
        reduce(world, comms, arrays(10, 2, 10))
    world.controller.wait_for(lambda: (3, 3) in seen)


def test_a_policy_that_comes_later_counts(world: World, caplog: pytest.LogCaptureFixture) -> None:
    comms = world.connect(1)
    job = the_job(world)
    driver = comms[0]._session.driver
    bad = pb.RetransmissionPolicy(initial_seconds=1.0, min_seconds=2.0, max_seconds=1.0, deadline_seconds=9.0)
    with caplog.at_level(logging.ERROR, logger="p4reduce"):
        world.controller.send(job, pb.Directive(policy=bad))
        good = pb.RetransmissionPolicy(
            initial_seconds=0.1, min_seconds=0.05, max_seconds=0.4, deadline_seconds=8.0, silent_seconds=2.0
        )
        world.controller.send(job, pb.Directive(policy=good))
        gone = threading.Event()
        while driver.path.policy.deadline != 8.0:
            assert not gone.wait(0.01)
    assert driver.path.policy.silent == driver.path.policy.fallback == 2.0
    assert "the controller's policy is not taken" in caplog.text
    assert (comms[0].allreduce(np.ones(3, np.float32)) == 1).all()


def test_an_order_of_an_unknown_kind_is_not_ignored(world: World) -> None:
    world.connect(1, ring=True)
    world.controller.tell(the_job(world))
    world.controller.wait_for(lambda: bool(world.controller.trouble))
    assert world.controller.trouble[0][1].code == pb.Trouble.ABORTED
    assert "does not know what order 2 means" in world.controller.trouble[0][1].message


def test_metrics_are_served_where_the_environment_says(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("prometheus_client")
    monkeypatch.setenv("P4REDUCE_METRICS", "127.0.0.1:0")
    (comm,) = world.connect(1)
    comm.allreduce(np.ones(7, np.float32))
    server = comm._session.metrics
    assert server is not None
    with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=WAIT) as answer:
        text = answer.read().decode()
    assert 'p4reduce_worker_elements_total{job_name="job",rank="0"} 7.0' in text
    monkeypatch.setenv("P4REDUCE_METRICS", server.address)  # taken
    with caplog.at_level(logging.WARNING, logger="p4reduce"):
        (other,) = world.connect(1, job="other")
    assert "rank 0 goes on without metrics" in caplog.text
    assert (other.allreduce(np.ones(7, np.float32)) == 1).all()
    comm.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://{server.address}/metrics", timeout=WAIT)
