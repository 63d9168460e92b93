# SPDX-License-Identifier: Apache-2.0
"""`p4reducectl` and the metrics against the controller itself, with a switch that only remembers."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from helpers import cli_servicer
from helpers.cli_servicer import run
from prometheus_client.parser import text_string_to_metric_families

from p4reduce import __version__
from p4reduce.proto import controller_pb2 as pb
from p4reduce.proto import controller_pb2_grpc
from p4reduce_controller.fake import FakeSwitch
from p4reduce_controller.hosts import Hosts
from p4reduce_controller.metrics import start_metrics
from p4reduce_controller.server import ControllerServer

no_settings = cli_servicer.no_settings


HOSTS = Hosts.embedded("127.0.0.1:9559", {1: ("127.0.0.1", 41001), 2: ("127.0.0.1", 41002)}, profile="w34")
OPERATOR = "the-operators-token"
OURS = "the-token-of-team-a"
TOKENS = f"""
operator = "{OPERATOR}"
[[join]]
jobs = "a/*"
token = "{OURS}"
"""


@pytest.fixture
def controller() -> Iterator[ControllerServer]:
    with ControllerServer(HOSTS, connect=FakeSwitch().connect, timer=False) as server:
        yield server


def join(server: ControllerServer, job: str, *, ring: bool = True, token: str = "") -> pb.JoinReply:
    """A job of one rank, on the switch."""
    request = pb.JoinRequest(
        job=job, world_size=1, ip="127.0.1.2", udp_port=4001, mtu=65535, receive_frames=99, wait_seconds=9, ring=ring
    )
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(server.address) as channel:
        stub = controller_pb2_grpc.ControllerStub(channel)
        reply: pb.JoinReply = stub.Join(request, timeout=20.0, metadata=metadata)
    return reply


def answer(server: ControllerServer, capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    """What `--json` prints."""
    capsys.readouterr()
    assert run(server, *arguments, "--json") == code
    return json.loads(capsys.readouterr().out)


def test_looking(controller: ControllerServer, capsys: pytest.CaptureFixture[str]) -> None:
    epoch = join(controller, "[train]").epoch
    document = answer(controller, capsys, "status")
    assert document["server_version"] == __version__
    assert document["switch"]["connected"] is True
    name = document["switch"]["name"]
    (job,) = document["jobs"]
    assert {key: job[key] for key in ("job", "state", "path", "mode", "ring", "epoch", "present", "world_size")} == {
        **{"job": "[train]", "state": "switch", "path": "switch", "mode": "auto", "ring": True},
        **{"epoch": epoch, "present": epoch, "world_size": 1},
    }
    assert job["counters"]["results"] == 0
    assert job["policy"]["deadline_seconds"] == 60.0
    assert job["workers"][0]["state"] == "joined"
    pools = answer(controller, capsys, "pools")
    assert pools["pools"][0]["job"] == "[train]"
    assert sum(pool["size"] for pool in pools["pools"]) == pools["slots"] == 1024
    assert answer(controller, capsys, "switches")["switches"][0]["name"] == name
    top = answer(controller, capsys, "top", "--once", "--interval", "0.1")
    assert top["jobs"][0]["buckets_per_second"] == 0.0
    for command in ("status", "jobs", "counters", "pools", "switches"):
        assert run(controller, command) == 0
    assert "[train]" in capsys.readouterr().out
    assert run(controller, "jobs", "nobody") == 1
    assert capsys.readouterr().err == "p4reducectl: NOT_FOUND: no job 'nobody': `p4reducectl jobs` shows all\n"
    assert run(controller, "top", "nobody", "--once") == 1
    assert "NOT_FOUND: no job 'nobody'" in capsys.readouterr().err


def test_operating(controller: ControllerServer, capsys: pytest.CaptureFixture[str]) -> None:
    epoch = join(controller, "a").epoch
    join(controller, "b", ring=False)
    changed = answer(controller, capsys, "policy", "a", "--min", "0.02", "--early-resend", "0", "--window", "8")
    assert (changed["policy"]["min_seconds"], changed["policy"]["early_resend"], changed["policy"]["window"]) == (
        0.02,
        0,
        8,
    )
    assert answer(controller, capsys, "policy", "a") == changed
    assert answer(controller, capsys, "policy")["policy"]["min_seconds"] == 0.01
    assert run(controller, "policy", "a", "--min", "9") == 1
    assert "INVALID_ARGUMENT: retransmission timeouts must be" in capsys.readouterr().err
    name = answer(controller, capsys, "switches")["switches"][0]["name"]
    drained = answer(controller, capsys, "drain", name, code=1)
    assert drained == {"switch": name, "drained": True, "moving": ["a"], "staying": ["b"]}
    assert answer(controller, capsys, "switches")["switches"][0]["drained"] is True
    assert answer(controller, capsys, "jobs", "a")["jobs"][0]["state"] == "cutting"
    assert run(controller, "drain", "elsewhere") == 1
    assert "NOT_FOUND: no switch 'elsewhere'" in capsys.readouterr().err
    assert answer(controller, capsys, "undrain", name)["drained"] is False
    assert run(controller, "mode", "b", "off") == 1
    assert "FAILED_PRECONDITION: job 'b' has no ring path" in capsys.readouterr().err
    assert answer(controller, capsys, "mode", "b", "require") == {"job": "b", "mode": "require", "before": "auto"}
    assert answer(controller, capsys, "evict", "a") == {"job": "a", "epoch": epoch}
    failed = answer(controller, capsys, "jobs", "a", code=1)["jobs"][0]
    assert (failed["state"], "operator" in failed["reason"]) == ("failed", True)
    for command in (["evict", "nobody"], ["mode", "nobody", "off"], ["policy", "nobody", "--min", "0.02"]):
        assert run(controller, *command) == 1
        assert "NOT_FOUND: no job 'nobody'" in capsys.readouterr().err


def test_drain_waits_for_what_is_left(controller: ControllerServer, capsys: pytest.CaptureFixture[str]) -> None:
    join(controller, "b", ring=False)
    name = answer(controller, capsys, "switches")["switches"][0]["name"]
    document = answer(controller, capsys, "drain", name, "--wait", "0.3", code=1)
    assert (document["staying"], document["left"]) == (["b"], ["b"])
    assert run(controller, "evict", "b") == 0
    assert answer(controller, capsys, "drain", name, "--wait", "20")["left"] == []


def test_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS)
    path.chmod(0o600)
    with ControllerServer(HOSTS, connect=FakeSwitch().connect, timer=False, tokens=path) as server:
        join(server, "a/1", token=OURS)
        join(server, "b/1", token=OPERATOR)
        for command in (["status"], ["evict", "a/1"]):
            assert run(server, *command) == 1
            assert "UNAUTHENTICATED" in capsys.readouterr().err
            assert run(server, *command, "--token", "none-of-these-tokens") == 1
            assert "PERMISSION_DENIED" in capsys.readouterr().err
        seen = answer(server, capsys, "status", "--token", OURS)
        assert [job["job"] for job in seen["jobs"]] == ["a/1"]
        assert run(server, "jobs", "b/1", "--token", OURS) == 1
        assert "NOT_FOUND: no job 'b/1'" in capsys.readouterr().err
        for command in (["evict", "a/1"], ["mode", "a/1", "off"], ["policy", "--min", "0.02"], ["drain", "s1"]):
            assert run(server, *command, "--token", OURS) == 1
            assert "PERMISSION_DENIED: this takes the operator's token, not a job's" in capsys.readouterr().err
        assert len(answer(server, capsys, "status", "--token", OPERATOR)["jobs"]) == 2
        assert run(server, "evict", "a/1", "--token", OPERATOR) == 0


def test_metrics(controller: ControllerServer) -> None:
    epoch = join(controller, "a").epoch
    with start_metrics("127.0.0.1:0", controller.coordinator) as server:
        connection = http.client.HTTPConnection(server.address, timeout=20.0)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
    found = {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["p4reduce_epoch",] == epoch
    assert found["p4reduce_jobs", "switch"] == 1
    assert found["p4reduce_slots", "leased"] + found["p4reduce_slots", "free"] == 1024
    assert found["p4reduce_slots", "changing"] == 0
    assert found["p4reduce_job_on_switch", "a"] == 1
    assert found["p4reduce_switch_events_total", "results", "a"] == 0
    assert found["p4reduce_worker_silent_seconds", "a", "0"] >= 0
