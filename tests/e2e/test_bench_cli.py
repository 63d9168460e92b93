# SPDX-License-Identifier: Apache-2.0
"""`p4reduce bench` as users meet it: on loopback, in labs of both switches, and what it leaves behind: nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import lab as labs

from p4reduce.bench.stages import LAB_NAME
from p4reduce.cli import main
from p4reduce_bmv2.lab import Lab
from p4reduce_bmv2.lab_state import Process

BENCH = [sys.executable, "-m", "p4reduce", "bench"]
QUICK = ["--iterations", "2", "--warmup", "1"]
DEADLINE = 150.0


@pytest.fixture(autouse=True, scope="module")
def run_folder() -> Iterator[Path]:
    with labs.run_folder() as folder:
        yield folder


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BENCH, *QUICK, *arguments], capture_output=True, text=True, timeout=DEADLINE, check=False)


def measured(*arguments: str) -> dict[str, Any]:
    done = bench("--json", *arguments)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    assert [row["wrong"] for row in document["rows"]] == [0] * len(document["rows"])
    return document


def nothing_left() -> bool:
    return labs.traces(Lab(LAB_NAME)) == []


def test_on_loopback_without_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The supervisor believes it is an ordinary user's."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    target = tmp_path / "bench.json"
    arguments = ["--sizes", "4K,256K", "--workers", "3", "--loss", "1%", "--baseline", "forward", "--json", str(target)]
    assert main(["bench", *QUICK, "--switch", "embedded", *arguments]) == 0
    captured = capsys.readouterr()
    assert "Every sum was exact." in captured.out
    assert "note: forward is measured through the UDP ports" in captured.err
    document = json.loads(target.read_text())
    rows = document["rows"]
    assert [(row["workers"], row["size_bytes"], row["path"]) for row in rows] == [
        (3, 4096, "switch"),
        (3, 262144, "switch"),
        (3, 8778, "forward"),
    ]
    assert rows[1]["frames_per_s"] > 0
    assert rows[1]["wire_bytes"] > 262144
    assert sum(row["wrong"] for row in rows) == 0
    assert {ratio["name"] for ratio in document["ratios"]} == {"frames/s to forward"}
    assert document["switch"]["kind"] == "embedded"


@pytest.mark.parametrize("kind", labs.KINDS)
class TestInALab:
    def test_baselines(self, kind: str) -> None:
        labs.require(kind)
        document = measured("--switch", kind, "--sizes", "64K", "--workers", "2", "--baseline", "all")
        rows = {row["path"]: row for row in document["rows"]}
        assert list(rows) == ["switch", "gloo", "forward", "scalar"]
        assert document["switch"]["kind"] == kind
        # One contribution for each chunk and the exponents', and their Ethernet headers.
        assert rows["switch"]["wire_bytes"] >= 65536 + 9 * 74
        # gloo's TCP crossed the worker's link: a ring of two carries the data once each way.
        assert 65536 < rows["gloo"]["wire_bytes"] < 2 * 65536
        assert rows["forward"]["wire_bytes"] == 8778
        assert rows["scalar"]["size_bytes"] == 65536
        assert all(row["frames_per_s"] > 0 and row["time_us"] > 0 for row in rows.values())
        assert {ratio["name"] for ratio in document["ratios"]} == {
            "frames/s to forward",
            "lane-sums/s to scalar",
            "speed to gloo",
        }
        assert nothing_left()

    def test_losses_and_rate(self, kind: str) -> None:
        labs.require(kind)
        arguments = ["--switch", kind, "--sizes", "512K", "--losses", "0,5%", "--rate", "50mbit", "--seed", "4"]
        document = measured(*arguments)
        clean, lossy = document["rows"]
        assert (clean["loss"], lossy["loss"]) == (0.0, 0.05)
        # A share of a rate that holds: no more than all of it, the bucket's depth apart.
        assert 0.1 < clean["line_share"] < 1.05
        assert clean["time_us"] > 0.9 * 524288 * 8 / 50
        assert lossy["retransmissions"] > 0
        assert [ratio["name"] for ratio in document["ratios"]] == ["switch: time to no loss"]
        assert any("frames are delayed and lost by the lab's" in note for note in document["notes"])
        assert nothing_left()


@pytest.mark.netns
class TestEnds:
    @pytest.fixture(autouse=True)
    def root(self) -> None:
        labs.require("embedded")

    @contextlib.contextmanager
    def running(self) -> Iterator[subprocess.Popen[str]]:
        """A bench that is in the middle of a long measurement."""
        command = [*BENCH, "--switch", "embedded", "--sizes", "4K,64M", "--iterations", "1000", "--warmup", "0"]
        # Ctrl-C is ignored by what a shell starts in the background; not by this.
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        ) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline().split()[:2] == ["n", "size"]
                assert process.stdout.readline().split()[:2] == ["2", "4K"]
                yield process
            finally:
                process.kill()

    @pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_a_signal_ends_it_cleanly(self, number: int, status: int) -> None:
        with self.running() as process:
            mine = children(process.pid)
            assert len(mine) >= 2
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
            assert process.returncode == status
            assert "Traceback" not in errors
        assert nothing_left()
        assert not [pid for pid in mine if Process.of(pid)]

    def test_killed_and_cleaned_up_by_the_next(self) -> None:
        with self.running() as process:
            second = bench("--switch", "embedded", "--sizes", "4K")
            assert second.returncode == 1
            assert "another `p4reduce bench` is running" in second.stderr
            mine = children(process.pid)
            lab_processes = {one.pid for one in Lab(LAB_NAME).state().processes.values()}
            process.kill()
            process.wait(30)
        assert labs.wait_until(lambda: not [pid for pid in mine - lab_processes if Process.of(pid)])
        assert not nothing_left()
        assert bench("--switch", "embedded", "--sizes", "4K").returncode == 0
        assert nothing_left()

    def test_a_measurement_that_takes_too_long_is_named(self) -> None:
        began = time.monotonic()
        done = bench("--switch", "embedded", "--sizes", "64M", "--rate", "10mbit", "--deadline", "2")
        assert done.returncode == 1
        assert "switch, 2 workers, 32-bit lanes, 67108864 bytes" in done.stderr
        assert "(--deadline sets that)" in done.stderr
        assert time.monotonic() - began < 100
        assert nothing_left()


def children(root: int) -> set[int]:
    """The processes that a process has started: workers, and the lab's."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                text = (entry / "stat").read_text()
                if int(text[text.rindex(")") + 2 :].split()[1]) == root and int(entry.name) != os.getpid():
                    found.add(int(entry.name))
    return found
