# SPDX-License-Identifier: Apache-2.0
"""`p4reducectl`: what the looking commands print, exit codes, and one line for every mistake; `serve`'s bad input."""

from __future__ import annotations

import argparse
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from helpers import cli_servicer
from helpers.cli_servicer import EPOCH, OVER, RING, Fake, job, run, switch, worker

from p4reduce import __version__
from p4reduce.proto import controller_pb2 as pb
from p4reduce_controller import cli, cli_output, serve

no_settings = cli_servicer.no_settings
fake = cli_servicer.fake


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
REASON = (
    "rank 3 on host node-17 (10.0.0.4) is lost: its progress stream broke off; bucket 1234 can never be complete, so "
    "the job is over; start it again"
)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
LONG_NAME = "llama-pretraining-run-with-a-long-name-2026-11-30"


def narrow(monkeypatch: pytest.MonkeyPatch, columns: int = 80) -> None:
    """As on a terminal of so many columns, but without colours."""
    from rich.console import Console

    def console() -> Console:
        return Console(width=columns, force_terminal=False, highlight=False, markup=False)

    for name in ("cli_views", "cli_operate", "cli_top"):
        monkeypatch.setattr(f"p4reduce_controller.{name}.make_console", console)


def test_status_as_json(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.servicer.jobs = [job("[train]"), job("other", **RING)]
    assert run(fake, "status", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["server_version", "uptime_seconds", "switch", "jobs"]
    assert document["switch"] == {
        "name": "s1",
        "address": "127.0.0.1:9559",
        "device_id": 0,
        "connected": True,
        "connected_seconds": 61.0,
        "primary": True,
        "profile": "w34",
        "slots": 1024,
        "drained": False,
        "trouble": "",
        "guarded": 0,
        "refused": 0,
    }
    first, second = document["jobs"]
    assert (first["job"], first["state"], first["path"], first["present"]) == ("[train]", "switch", "switch", EPOCH)
    assert (first["counters"]["results"], first["policy"]["early_resend"]) == (100, 3)
    assert first["workers"][1] == {
        "rank": 1,
        "host": "h1",
        "ip": "10.0.0.2",
        "udp_port": 40001,
        "switch_port": 2,
        "state": "reporting",
        "submitted": 101,
        "completed": 100,
        "silent_seconds": 0.25,
        "rtt_seconds": 0.0008,
        "counters": {"duplicates": 1, "frames_sent": 2000, "retransmissions": 10},
    }
    assert (second["path"], second["fallbacks"], second["promotions"]) == ("ring", {"drained": 1, "silent": 2}, 2)


def test_every_field_of_a_status_is_in_the_json(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    """A field that is added to the protocol must reach programs."""
    fake.servicer.jobs = [job()]
    assert run(fake, "jobs", "--json") == 0
    document = json.loads(capsys.readouterr().out)

    def fields(message: Any) -> set[str]:
        return {field.name for field in message.DESCRIPTOR.fields}

    assert set(document) == fields(pb.StatusReply)
    assert set(document["switch"]) == fields(pb.SwitchStatus)
    assert set(document["jobs"][0]) == fields(pb.JobStatus)
    assert set(document["jobs"][0]["policy"]) == fields(pb.RetransmissionPolicy)
    flat = (fields(pb.WorkerStatus) - {"member"}) | fields(pb.Member)
    assert set(document["jobs"][0]["workers"][0]) == flat


def test_pools_as_json(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.servicer.pools = [
        pb.PoolsReply(slots=1024, pools=[pb.Pool(size=64, job="a", epoch=5), pb.Pool(base=64, size=960)])
    ]
    assert run(fake, "pools", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["slots"] == 1024
    assert document["pools"] == [
        {"base": 0, "size": 64, "job": "a", "epoch": 5},
        {"base": 64, "size": 960, "job": "", "epoch": 0},
    ]
    assert run(fake, "pools") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["0..63", "64", "a", "5"],
        ["64..1023", "960", "free"],
        ["960", "of", "1024", "slots", "are", "free"],
    ]


def test_tables(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.servicer.jobs = [job("[train]"), job("other", **RING)]
    assert run(fake, "status") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["controller 0.1.0, up 12 s", "switch s1: connected, profile w34, 1024 slots"]
    assert lines[2].split() == ["job", "state", "path", "epoch", "ranks", "slots", "buckets"]
    assert lines[3].split() == ["[train]", "switch", "switch", str(EPOCH), "2/2", "0..63", "100"]
    assert lines[4].split() == ["other", "ring", "ring", str(EPOCH), "2/2", "100"]
    assert lines[5] == "other: on the ring path: bucket 17: no result for 1.0 s"
    assert len(lines) == 6
    assert run(fake, "jobs") == 0
    shown = capsys.readouterr().out
    assert "switch path; slots 0..63 (8 OR + 56 ADD)" in shown
    assert "ring path; fallbacks: drained 1, silent 2; promotions: 2" in shown
    assert "10.0.0.2:40001" in shown
    assert "0.80 ms" in shown


def test_counters(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.servicer.jobs = [job(ranks=3), job("other", **RING | {"workers": [pb.WorkerStatus()]})]
    assert run(fake, "counters") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["switch:", "contributions", "200,", "duplicates", "3,", "results", "100,", "stale", "1"] in lines
    # all ranks, least of which rank, most of which rank
    assert ["frames_sent", "6000", "1000", "0", "3000", "2"] in lines
    assert ["retransmissions", "30", "10", "0", "10", "0"] in lines
    assert ["the", "workers", "have", "reported", "no", "counters", "yet"] in lines
    assert run(fake, "counters", "train", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["jobs"]
    assert list(found) == ["job", "present", "switch", "workers", "fallbacks", "promotions"]
    assert found["workers"][2] == {
        "rank": 2,
        "counters": {"duplicates": 2, "frames_sent": 3000, "retransmissions": 10},
    }


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({}, 0, "switch s1: connected, profile w34, 1024 slots"),
        ({"primary": False}, 0, "connected, standby"),
        ({"drained": True}, 0, "drained: jobs run on the ring path: `p4reducectl undrain s1` ends it"),
        ({"trouble": "3 entries are missing"}, 1, "trouble: 3 entries are missing"),
        ({"connected": False, "trouble": "gone"}, 1, "not connected"),
    ],
)
def test_switches(
    fake: Fake, changes: dict[str, Any], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.servicer.switch = switch(**changes)
    assert run(fake, "switches") == code
    assert text in capsys.readouterr().out
    assert run(fake, "switches", "--json") == code
    (found,) = json.loads(capsys.readouterr().out)["switches"]
    assert found["name"] == "s1"


def test_status_without_jobs_or_switch(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.servicer.switch = switch(connected=False, trouble="connection refused")
    assert run(fake, "status") == 1
    shown = capsys.readouterr().out
    assert "not connected" in shown
    assert "trouble: connection refused" in shown
    assert "no jobs" in shown
    assert run(fake, "jobs") == 0
    assert capsys.readouterr().out == "no jobs\n"


def test_a_failed_job_fits_80_columns(
    fake: Fake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every column keeps its content whole, and the reason follows in full."""
    far = worker(0, completed=1_234_567, frames_sent=10**12)
    far.member.ip, far.member.udp_port, far.member.switch_port = "172.100.200.201", 65535, 510
    far.silent_seconds, far.rtt_seconds = 999.9, 0.9
    fake.servicer.jobs = [job("small"), job("eval", ranks=4, workers=[far] * 4)]
    far.state = "fenced"
    over = job(LONG_NAME, "failed", ranks=4, reason=REASON, workers=[far] * 4, over_seconds=7500.0, **OVER)
    over.workers[2].state = "lost"
    fake.servicer.jobs.append(over)
    narrow(monkeypatch)
    wide = {}
    for command in ("status", "jobs", "counters"):
        run(fake, command)
        wide[command] = capsys.readouterr().out
        assert max(len(line.rstrip()) for line in wide[command].splitlines()) <= 80
        assert str(EPOCH) in wide[command]
    for command in ("status", "jobs"):
        assert REASON in " ".join(wide[command].split())
    (row,) = [line for line in wide["status"].splitlines() if " failed " in line and str(EPOCH) in line]
    assert row.split()[-3:] == [str(EPOCH), "0/4", "1234567"]
    flat = " ".join(wide["jobs"].split())
    assert flat.count("172.100.200.201:65535 510 reporting 1234567/1234568 999.9 s 900 ms") == 4
    assert flat.count("172.100.200.201:65535 510 fenced 1234567/1234568") == 3
    assert flat.count("172.100.200.201:65535 510 lost 1234567/1234568") == 1
    assert wide["counters"].split().count(str(10**12)) == 4


def test_a_job_that_is_over_does_not_look_alive(
    fake: Fake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state, since when, and why, first; nothing that only a running job has; running jobs before it."""
    fake.servicer.jobs = [
        job("lost", "failed", reason="job 'lost': rank 1 is lost", over_seconds=35.0, **OVER),
        job("gone", "ended", reason="no rank came back", over_seconds=200_000.0, **OVER),
        job("train"),
    ]
    narrow(monkeypatch)
    assert run(fake, "jobs") == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [line for line in lines if line.startswith(("lost:", "gone:", "train:"))]
    assert [head.split(",")[0] for head in heads] == [
        "train: switch",
        "lost: failed 35 s ago",
        "gone: ended 2 days ago",
    ]
    shown = lines[lines.index(heads[1]) :]
    assert shown[1].strip() == "why: rank 1 is lost"
    assert not [line for line in shown if "silent" in line or " ms" in line or "path" in line or "slots" in line]
    assert run(fake, "status") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[3:6]] == [["train", "switch"], ["lost", "failed"], ["gone", "ended"]]
    ranks = [word for line in lines[3:6] for word in line.split() if word.endswith("/2")]
    assert ranks == ["2/2", "0/2", "0/2"]
    assert [line.strip() for line in lines[6:]] == [
        "lost: failed 35 s ago: rank 1 is lost",
        "gone: ended 2 days ago: no rank came back",
    ]
    assert run(fake, "jobs", "gone", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["jobs"]
    assert (found["state"], found["reason"], found["over_seconds"]) == ("ended", "no rank came back", 200_000.0)


def test_frames_of_no_epoch_are_shown_when_there_are_some(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("status", "counters", "switches"):
        run(fake, command)
        assert not re.search("guarded|refused", capsys.readouterr().out)
    fake.servicer.switch = switch(guarded=7, refused=12)
    for command in ("status", "counters", "switches"):
        run(fake, command)
        out = capsys.readouterr().out
        assert "guarded: 7 (frames dropped: not from the host behind the port" in out
        assert "refused: 12 (contributions to an epoch that the switch does not know)\n" in out
    run(fake, "counters", "--json")
    assert json.loads(capsys.readouterr().out)["strays"] == {"guarded": 7, "refused": 12}


def test_a_pipe_gets_one_line_for_each_job(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.servicer.jobs = [job(LONG_NAME, "failed", reason=REASON)]
    run(fake, "status")
    out = capsys.readouterr().out
    assert f"{LONG_NAME}: failed 0 s ago: {REASON}\n" in out
    assert next(line for line in out.splitlines() if line.startswith(LONG_NAME)).split()[1] == "failed"
    assert "\x1b" not in out
    assert not re.search(r" $", out, re.M)


def test_what_the_controller_says_cannot_garble_the_terminal(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.servicer.jobs = [job("a\x1b[2Jb", "failed", reason="x\x1b]0;y\x07\nz")]
    run(fake, "status")
    run(fake, "jobs")
    fake.servicer.refuse["Status"] = (grpc.StatusCode.INTERNAL, "bad\x1b[31m")
    run(fake, "status")
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert "a\\x1b[2Jb" in captured.out
    assert "bad\\x1b[31m" in captured.err


def test_jobs_of_a_name(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.servicer.jobs = [job("a"), job("b", "failed", reason=REASON)]
    assert run(fake, "jobs", "a") == 0
    assert run(fake, "jobs") == 0  # all: that one of them has failed is not what was asked
    assert run(fake, "jobs", "b") == 1
    assert run(fake, "counters", "b") == 1
    capsys.readouterr()
    assert run(fake, "jobs", "nobody") == 1
    assert capsys.readouterr().err == "p4reducectl: NOT_FOUND: no job 'nobody': `p4reducectl jobs` shows all\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("", "the job's name is empty"),
        (" ", "the job's name is empty"),
        ("a\nb", "the job's name 'a\\nb' has control characters"),
        ("a\x1b[31m", "the job's name 'a\\x1b[31m' has control characters"),
        ("a\udcff", "the job's name 'a\\udcff' has control characters"),
        ("x" * 129, "the job's name has 129 characters"),
    ],
)
@pytest.mark.parametrize("command", [("jobs",), ("counters",), ("evict",), ("policy",), ("mode", "auto")])
def test_names_that_no_job_has(
    fake: Fake, command: tuple[str, ...], name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(fake, command[0], name, *command[1:]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"p4reducectl: {text}")
    assert captured.err.count("\n") == 1
    assert fake.servicer.asked == []


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nothing listens."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{reserved.getsockname()[1]}"


COMMANDS = [
    ["status"],
    ["jobs"],
    ["pools"],
    ["counters"],
    ["switches"],
    ["drain", "s1"],
    ["undrain", "s1"],
    ["mode", "a", "auto"],
    ["policy"],
    ["evict", "a"],
    ["top", "--once"],
    ["top", "--json"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_an_unreachable_controller(nobody: str, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command, "--controller", nobody, "--timeout", "2"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert f"no controller at {nobody} within 2 s: start one with `p4reduce-controller serve`" in captured.err


def test_a_controller_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert cli.main(["status", "--controller", address, "--timeout", "0.3"]) == 3
        assert f"no controller at {address} within 0.3 s" in capsys.readouterr().err
        assert cli.main(["top", "--once", "--interval", "0.1", "--controller", address, "--timeout", "0.3"]) == 3
        assert f"no answer from {address}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "details", "status", "text"),
    [
        (grpc.StatusCode.UNAVAILABLE, "the controller is stopping", 3, "UNAVAILABLE: the controller is stopping\n"),
        (grpc.StatusCode.INTERNAL, "oh", 1, "INTERNAL: oh\n"),
        (grpc.StatusCode.UNIMPLEMENTED, "no", 1, "does not know this command: upgrade it\n"),
        (
            grpc.StatusCode.UNAUTHENTICATED,
            "who?",
            1,
            "UNAUTHENTICATED: who?: give the operator's token with --token-file",
        ),
        (grpc.StatusCode.PERMISSION_DENIED, "no", 1, "PERMISSION_DENIED: no: give the operator's token"),
    ],
)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_refusals(
    fake: Fake,
    command: list[str],
    code: grpc.StatusCode,
    details: str,
    status: int,
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = ("Status", "Pools", "Watch", "SetMode", "SetPolicy", "Drain", "Evict")
    fake.servicer.refuse = dict.fromkeys(calls, (code, details))
    assert run(fake, *command) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("p4reducectl: ")
    assert text in captured.err
    assert captured.err.count("\n") == 1


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
    fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("P4REDUCE_CONTROLLER", fake.address)
    assert cli.main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["switch"]["name"] == "s1"


def test_a_reader_that_has_seen_enough(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def gone(*_: object) -> None:
        raise BrokenPipeError

    redirected: list[tuple[int, int]] = []
    monkeypatch.setattr("p4reduce_controller.cli_views.print_json", gone)
    monkeypatch.setattr("os.dup2", lambda source, target: redirected.append((source, target)))
    assert run(fake, "status", "--json") == 1
    assert len(redirected) == 1


def test_an_interrupted_command(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("p4reduce_controller.cli_views.print_json", interrupted)
    assert run(fake, "status", "--json") == 130


@pytest.mark.parametrize("arguments", [[], ["dance"], ["status", "--nonsense"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for main in (cli.main, serve.main):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert "usage:" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"p4reducectl {__version__}\n"


@pytest.mark.parametrize("arguments", [["drain"], ["mode", "a"], ["mode", "a", "fast"], ["evict"], ["policy", "--min"]])
def test_wrong_usage_of_a_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert f"usage: p4reducectl {arguments[0]}" in capsys.readouterr().err


def test_safe_keeps_what_can_be_printed() -> None:
    assert cli_output.safe("plain text, größer, 模型") == "plain text, größer, 模型"
    assert cli_output.safe("\t\x00\udc80") == "\\t\\x00\\udc80"


def test_workers_of_a_joining_job(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.servicer.jobs = [
        job("a", "joining", workers=[worker(1, "joined")], world_size=3, epoch=0, present=0, path=pb.PATH_UNSPECIFIED)
    ]
    assert run(fake, "status") == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["a", "joining", "1/3", "0..63", "100"]


# ---- serve -----------------------------------------------------------------------------------------------------------


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


def test_serve_on_a_taken_port(hosts_file: Path, fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(capsys, "--hosts", str(hosts_file), "--listen", fake.address)
    assert f"cannot listen on {fake.address}: Address already in use" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--listen", "here"], "write ADDRESS:PORT"),
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
    free = ["--listen", "127.0.0.1:0"]  # the default's port may be taken
    assert expected in refused(capsys, "--hosts", str(hosts_file), *free, *arguments)


def test_serve_with_a_bad_hosts_file(hosts_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts_file.write_text(FILE.replace("port = 1", "port = 0"))
    assert f"{hosts_file}: host 1 (h1): port must be" in refused(capsys, "--hosts", str(hosts_file))
    missing = hosts_file.with_name("missing.toml")
    assert "cannot read the hosts file" in refused(capsys, "--hosts", str(missing))


# ---- docs/operations.md ----------------------------------------------------------------------------------------------


def keys(document: Any) -> set[str]:
    """All keys of a document but those of counters and of fallbacks, which are names of something counted."""
    if isinstance(document, list):
        return set().union(*(keys(one) for one in document))
    if not isinstance(document, dict):
        return set()
    inner = (keys(value) for name, value in document.items() if name not in ("counters", "fallbacks"))
    return set(document).union(*inner)


def test_the_page_lists_every_key_of_the_json(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    written = set(re.findall(r"`(\w+)`", text[text.index("### JSON") : text.index("## Several jobs")]))
    fake.servicer.jobs = [job()]
    fake.servicer.pools = [pb.PoolsReply(pools=[pb.Pool(size=1024)])]
    fake.servicer.replies = {"SetMode": pb.SetModeReply(), "Drain": pb.DrainReply()}
    fake.servicer.watch = lambda _: iter([fake.servicer.snapshot()] * 2)
    found: set[str] = set()
    for command in COMMANDS:
        options = ["--wait", "9"] if command[0] == "drain" else ["--once"] if command[0] == "top" else []
        assert run(fake, *command, *options, "--json") == 0
        document = json.loads(capsys.readouterr().out)
        if command[0] == "counters":
            document["jobs"][0]["switch"] = {}
        found |= keys(document)
    assert found <= written
    assert written - found <= {command[0] for command in COMMANDS}


def test_the_page_lists_every_command_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index("## p4reducectl") : text.index("### JSON")]
    commands = {row.split()[0] for row in re.findall(r"^\| `([^`]+)`", table, re.M)}
    parser = cli.build_parser()
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    assert commands == set(subparsers.choices) == {command[0] for command in COMMANDS}
    for command in subparsers.choices.values():
        for action in command._actions:
            for option in action.option_strings:
                assert option in ("-h", "--help") or f"`{option}" in table, option
