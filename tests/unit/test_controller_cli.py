# SPDX-License-Identifier: Apache-2.0
"""`p4reducectl` and `p4reduce-controller`: output, exit codes, and one line for every mistake."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from rich.console import Console

from p4reduce import __version__
from p4reduce.proto import controller_pb2 as pb
from p4reduce.proto import controller_pb2_grpc
from p4reduce_controller import cli, serve
from p4reduce_controller.fake import FakeSwitch
from p4reduce_controller.hosts import Hosts
from p4reduce_controller.server import ControllerServer

HOSTS = Hosts.embedded("127.0.0.1:9559", {1: ("127.0.0.1", 41001), 2: ("127.0.0.1", 41002)}, profile="w34")
FILE = """
[switch]
grpc = "127.0.0.1:9"
profile = "w5"
ip = "127.0.1.254"
mac = "02:70:7f:00:01:fe"
[[host]]
name = "h1"
ip = "127.0.1.1"
port = 1
endpoint = "127.0.0.1:40001"
"""


@pytest.fixture(scope="module")
def controller() -> Iterator[ControllerServer]:
    with ControllerServer(HOSTS, connect=FakeSwitch().connect, timer=False) as server:
        yield server


@pytest.fixture(scope="module")
def epoch(controller: ControllerServer) -> int:
    """A running job [train], whose name must not be taken for markup."""
    with grpc.insecure_channel(controller.address) as channel:
        stub = controller_pb2_grpc.ControllerStub(channel)
        request = pb.JoinRequest(
            job="[train]", world_size=1, ip="127.0.1.2", udp_port=4001, mtu=65535, receive_frames=99, wait_seconds=9
        )
        return int(stub.Join(request, timeout=20.0).epoch)


def run(controller: ControllerServer, *arguments: str) -> int:
    return cli.main([arguments[0], "--controller", controller.address, *arguments[1:]])


def test_status_as_json(controller: ControllerServer, epoch: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(controller, "status", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["server_version"] == __version__
    assert document["switch"]["connected"] is True
    (job,) = document["jobs"]
    assert (job["job"], job["state"], job["epoch"], job["world_size"]) == ("[train]", "running", epoch, 1)
    assert job["counters"]["results"] == 0
    assert job["workers"][0] | {"silent_seconds": 0.0} == {
        "rank": 0,
        "host": "local2",
        "ip": "127.0.1.2",
        "udp_port": 4001,
        "switch_port": 2,
        "state": "joined",
        "submitted": 0,
        "completed": 0,
        "silent_seconds": 0.0,
    }


def test_pools_as_json(controller: ControllerServer, epoch: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(controller, "pools", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["slots"] == 1024
    assert document["pools"][0] == {"base": 0, "size": 64, "job": "[train]", "epoch": epoch}
    assert document["pools"][15] == {"base": 960, "size": 64, "job": "", "epoch": 0}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("status", ["connected", "[train]", "running", "0..63", "1/1"]),
        ("jobs", ["[train]: running", "local2", "127.0.1.2:4001", "joined", "results 0"]),
        ("pools", ["0..63", "[train]", "960..1023", "free"]),
    ],
)
def test_tables(
    controller: ControllerServer,
    epoch: int,
    command: str,
    expected: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli, "Console", lambda: Console(width=160, force_terminal=False))
    assert run(controller, command) == 0
    shown = capsys.readouterr().out
    for text in [*expected, *([str(epoch)] if command != "status" else [])]:
        assert text in shown


def test_tables_without_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=160)
    status: dict[str, Any] = cli._status(pb.StatusReply())
    cli.show_status(console, status)
    cli.show_jobs(console, status)
    shown = capsys.readouterr().out
    assert shown.count("no jobs") == 2
    assert "not connected" in shown


def test_a_failed_job_shows_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    reply = pb.StatusReply(jobs=[pb.JobStatus(job="a", state="failed", reason="rank 3 is [lost]")])
    document = cli._status(reply)
    cli.show_status(Console(width=160), document)
    cli.show_jobs(Console(width=160), document)
    assert capsys.readouterr().out.count("rank 3 is [lost]") == 2


def test_jobs_of_a_name(controller: ControllerServer, epoch: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(controller, "jobs", "[train]", "--json") == 0
    assert json.loads(capsys.readouterr().out)["jobs"][0]["epoch"] == epoch
    assert run(controller, "jobs", "nobody") == 1
    assert capsys.readouterr().err == "p4reducectl: NOT_FOUND: no job 'nobody': an empty name shows all\n"


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nothing listens."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{reserved.getsockname()[1]}"


def test_an_unreachable_controller(nobody: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--controller", nobody, "--timeout", "2"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert f"no controller at {nobody} within 2 s: start one with `p4reduce-controller serve`" in captured.err


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--controller", "", "--controller is empty: write ADDRESS:PORT, for example 127.0.0.1:50051"),
        ("--controller", "  ", "--controller is empty: write ADDRESS:PORT, for example 127.0.0.1:50051"),
        ("--timeout", "nan", "--timeout nan makes no sense: write seconds above 0, up to 86400"),
        ("--timeout", "inf", "--timeout inf makes no sense: write seconds above 0, up to 86400"),
        ("--timeout", "0", "--timeout 0.0 makes no sense: write seconds above 0, up to 86400"),
        ("--timeout", "-1", "--timeout -1.0 makes no sense: write seconds above 0, up to 86400"),
    ],
)
def test_options_that_make_no_sense(option: str, value: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", option, value]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"p4reducectl: {text}\n")


def test_the_environment_names_the_controller(
    controller: ControllerServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("P4REDUCE_CONTROLLER", controller.address)
    assert cli.main(["pools", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["slots"] == 1024


@pytest.mark.parametrize("arguments", [[], ["dance"], ["status", "--nonsense"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for main in (cli.main, serve.main):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert "usage:" in capsys.readouterr().err


@pytest.fixture
def hosts_file(tmp_path: Path) -> Path:
    path = tmp_path / "hosts.toml"
    path.write_text(FILE)
    return path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run `serve` with what cannot work; its one line."""
    assert serve.main(["serve", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.startswith("p4reduce-controller: ")]
    assert len(lines) == 1
    return lines[0]


def test_serve_without_a_switch(hosts_file: Path, nobody: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--hosts", str(hosts_file), "--listen", "127.0.0.1:0", "--switch", nobody, "--switch-deadline", "0.3"]
    assert f"switch {nobody}: not reachable within 0.3 s: start it" in refused(capsys, *arguments)


def test_serve_on_a_taken_port(
    hosts_file: Path, controller: ControllerServer, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused(capsys, "--hosts", str(hosts_file), "--listen", controller.address)
    assert f"cannot listen on {controller.address}: Address already in use" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--listen", "here"], "write ADDRESS:PORT"),
        (["--pool-slots", "0"], "pool-slots must be from 2 to 1024"),
        (["--lease", "0"], "lease_seconds must be"),
        (["--deadline", "0.01"], "the deadline (0.01 s)"),
        (["--switch", "somewhere"], "grpc must be ADDRESS:PORT"),
        (["--election-id", "0"], "election_id must be"),
        (["--state", "/nowhere/at/all.db"], "cannot use the state file"),
    ],
)
def test_serve_with_bad_options(
    hosts_file: Path, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in refused(capsys, "--hosts", str(hosts_file), *arguments)


def test_serve_with_a_bad_hosts_file(hosts_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts_file.write_text(FILE.replace("port = 1", "port = 0"))
    assert f"{hosts_file}: host 1 (h1): port must be" in refused(capsys, "--hosts", str(hosts_file))
    missing = hosts_file.with_name("missing.toml")
    assert "cannot read the hosts file" in refused(capsys, "--hosts", str(missing))
