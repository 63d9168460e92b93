# SPDX-License-Identifier: Apache-2.0
"""The command `p4reduce`: what it parses, calls and prints."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import p4reduce
from p4reduce import cli, cli_demo
from p4reduce.demo import run
from p4reduce.demo.processes import ChildFailed
from p4reduce.demo.report import DemoOptions, DemoReport
from p4reduce.errors import ConfigError

REPORT = DemoReport(
    switch="embedded",
    workers=2,
    steps=10,
    seed=3,
    profile="w34",
    frame_loss=0.01,
    parameters=249_895,
    loss_first=4.75,
    loss_reference=1.875,
    loss_reference_other_seed=1.9,
    loss_p4reduce=1.87,
    loss_p4reduce_hex=(1.87).hex(),
    closer_than_seeds=True,
    ranks_bit_identical=True,
    parameters_sha256="0123456789abcdef" * 4,
    buckets_switch=40,
    buckets_ring=0,
    gradient_bytes=1_000_000,
    frames_sent=12_345,
    retransmissions=67,
    retransmission_causes={"timeout": 60, "early": 7, "integrity": 0},
    seconds_reference=2.5,
    seconds_p4reduce=3.5,
    step_milliseconds={"forward": 8.0, "backward": 15.0, "waiting": 4.0, "optimizer": 1.0, "other": 0.5},
    seconds=20.0,
)


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> list[DemoOptions]:
    """Replaces the demo by one that shows some progress and returns REPORT."""
    calls: list[DemoOptions] = []

    def fake(options: DemoOptions, watcher: Any) -> DemoReport:
        calls.append(options)
        watcher.note("a note")
        watcher.step("reference", 1, 4.0)
        watcher.step("p4reduce", 10, 1.8)
        return REPORT

    monkeypatch.setattr(run, "run_demo", fake)
    return calls


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"p4reduce {p4reduce.__version__}\n"
    done = subprocess.run([sys.executable, "-m", "p4reduce", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"p4reduce {p4reduce.__version__}\n"


def test_the_command_does_not_load_torch() -> None:
    script = "import sys; from p4reduce import cli; cli.build_parser(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    "arguments", [[], ["fly"], ["demo", "--switch", "asic"], ["demo", "--steps", "many"], ["decode"]]
)
def test_wrong_use_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == cli.EXIT_USAGE
    assert "usage: p4reduce" in capsys.readouterr().err


def test_the_demos_options_reach_it(demo: list[DemoOptions], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo"]) == 0
    arguments = ["--switch=embedded", "--workers=4", "--steps=30", "--loss=0.01", "--seed=3", "--profile=w5"]
    assert cli.main(["demo", *arguments, "--timeout=60"]) == 0
    assert demo == [DemoOptions(), DemoOptions("embedded", 4, 30, 0.01, 3, "w5", 60.0)]
    assert "a note" in capsys.readouterr().err


def test_the_table_shows_what_counts(demo: list[DemoOptions], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo"]) == 0
    out = capsys.readouterr().out
    for wanted in (
        "4.7500",
        "1.8750",
        "1.8700",
        "12,345",
        "67",
        "waiting",
        "0.005, less than another seed",
        "0123456789abcdef",
    ):
        assert wanted in out
    assert REPORT.loss_p4reduce_hex in out
    assert "All 2 ranks ended with the same parameters" in out


def test_json_on_standard_output_stands_alone(demo: list[DemoOptions], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == REPORT.as_dict()
    assert "through the switch" in captured.err


def test_json_in_a_file(demo: list[DemoOptions], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "demo.json"
    assert cli.main(["demo", "--json", str(target)]) == 0
    assert json.loads(target.read_text())["frames_sent"] == 12_345
    assert "through the switch" in capsys.readouterr().out
    assert cli.main(["demo", "--json", str(tmp_path / "no" / "demo.json")]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_ranks_that_differ_are_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import dataclasses

    bad = dataclasses.replace(REPORT, ranks_bit_identical=False, closer_than_seeds=False)
    monkeypatch.setattr(run, "run_demo", lambda *_: bad)
    assert cli.main(["demo"]) == 1
    out = capsys.readouterr().out
    assert "THE RANKS ENDED WITH DIFFERENT PARAMETERS" in out
    assert "not less than another seed" in out


@pytest.mark.parametrize("error", [ConfigError("what is wrong"), ChildFailed("what is wrong")])
def test_errors_are_one_line_and_status_1(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: DemoOptions, watcher: Any) -> DemoReport:
        raise error

    monkeypatch.setattr(run, "run_demo", fail)
    assert cli.main(["demo"]) == cli.EXIT_FAILURE
    captured = capsys.readouterr()
    assert captured.err.endswith("p4reduce demo: what is wrong\n")
    assert captured.out == ""


def test_bad_numbers_are_status_1(demo: list[DemoOptions], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--workers", "3"]) == cli.EXIT_FAILURE
    assert "3 workers cannot share a batch of 32" in capsys.readouterr().err
    assert demo == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_go_through_the_cleanup(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    cleaned = []

    def interrupted(options: DemoOptions, watcher: Any) -> DemoReport:
        try:
            os.kill(os.getpid(), number)
            signal.sigtimedwait([], 5.0)
        finally:
            cleaned.append(True)
        return REPORT

    monkeypatch.setattr(run, "run_demo", interrupted)
    before = signal.getsignal(number)
    if number == signal.SIGINT:
        assert cli.main(["demo"]) == cli.EXIT_INTERRUPTED
    else:
        with pytest.raises(SystemExit) as caught:
            cli.main(["demo"])
        assert caught.value.code == 128 + number
    assert cleaned == [True]
    assert signal.getsignal(number) == before


def capture(path: Path) -> Path:
    """A capture file with one nack, written by hand: pcap, Ethernet, IPv4, UDP, header."""
    header = struct.pack(">BBBBIHBBIQQ", 1, 3, 0, 1, 7, 2, 1, 4, 9, 0, 5 << 40)
    udp = struct.pack(">HHHH", 20532, 40000, 8 + len(header), 0) + header
    ip = struct.pack(
        ">BBHHHBBH4s4s", 0x45, 0, 20 + len(udp), 0, 0, 64, 17, 0, bytes([10, 0, 0, 254]), bytes([10, 0, 0, 1])
    )
    frame = bytes(12) + b"\x08\x00" + ip + udp
    path.write_bytes(
        struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 1)
        + struct.pack("<IIII", 1, 0, len(frame), len(frame))
        + frame
    )
    return path


class TestDecode:
    def test_lines(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = str(capture(tmp_path / "one.pcap"))
        assert cli.main(["decode", "--brief", file]) == 0
        brief = capsys.readouterr().out
        assert brief.count("\n") == 1
        assert "10.0.0.254:20532 > 10.0.0.1:40000" in brief
        assert cli.main(["decode", file]) == 0
        full = capsys.readouterr().out
        assert full.startswith(brief)
        assert "epoch 7, rank 1, slot 2, round 9" in full

    def test_json(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["decode", "--json", str(capture(tmp_path / "one.pcap"))]) == 0
        frame = json.loads(capsys.readouterr().out)
        assert (frame["bucket"], frame["rank"], frame["kind"]) == (5, 1, "nack")

    def test_a_file_that_is_not_there(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["decode", str(tmp_path / "none.pcap")]) == cli.EXIT_FAILURE
        assert "none.pcap: No such file" in capsys.readouterr().err

    def test_a_reader_that_stops(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "p4reduce", "decode", str(capture(tmp_path / "one.pcap"))]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.close()
        _, errors = child.communicate(timeout=30)
        assert child.returncode == cli.EXIT_FAILURE
        assert errors == b""


def test_step_of_an_unknown_size_is_drawn_without_a_terminal() -> None:
    import io

    from rich.console import Console

    text = io.StringIO()
    with cli_demo.Display(Console(file=text), 5) as display:
        for step in range(1, 6):
            display.step("reference", step, 2.0)
    assert "plain DDP" in text.getvalue()
    assert "5/5" in text.getvalue()
