# SPDX-License-Identifier: Apache-2.0
"""`p4reducectl top`: rates from two snapshots, the script modes, and the live table on a pseudo-terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import queue
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from helpers import cli_servicer
from helpers.cli_servicer import EPOCH, RING, Fake, job, run, switch, worker
from rich.console import Console

from p4reduce.proto import controller_pb2 as pb
from p4reduce_controller import cli_documents, cli_top
from p4reduce_controller.cli_rates import summary

no_settings = cli_servicer.no_settings
fake = cli_servicer.fake


DEADLINE = 30.0


def document(uptime: float, *jobs: pb.JobStatus) -> dict[str, Any]:
    return cli_documents.status(pb.StatusReply(switch=switch(), jobs=jobs, uptime_seconds=uptime))


def grown(ranks: int = 2, **counters: int) -> pb.JobStatus:
    return job(ranks=ranks, workers=[worker(rank, completed=120 + rank, **counters) for rank in range(ranks)])


def test_rates_are_differences_over_the_controllers_time() -> None:
    before = document(10.0, job(workers=[worker(0, completed=100), worker(1, completed=104)]))
    now = document(14.0, grown(frames_sent=9000, retransmissions=90, elements=8_000_000))
    (row,) = summary(now, before)["jobs"]
    assert row["buckets"] == 120
    assert row["buckets_per_second"] == (120 - 100) / 4.0
    assert row["frames_per_second"] == ((9000 - 1000) + (9000 - 2000)) / 4.0
    assert row["retransmission_percent"] == 100.0 * (80 + 80) / 15000
    assert row["elements_per_second"] == 8_000_000 / 4.0  # of one rank, not of all together
    assert row["rtt_seconds"] == 0.0008
    assert summary(now, before)["interval_seconds"] == 4.0
    assert summary(now, before)["slots"] == {"total": 1024, "leased": 64}


@pytest.mark.parametrize(
    "before",
    [
        None,
        document(20.0, job()),  # the controller was restarted since
        document(14.0, job()),  # the same moment
        document(10.0, job("other")),
        document(10.0, job(epoch=EPOCH - 1)),  # other workers under the same name
        document(10.0, job(incarnation=1)),
        document(10.0, job(workers=[worker(0, completed=500, frames_sent=99_999, retransmissions=99_999)])),
    ],
)
def test_no_rate_without_something_to_compare_with(before: dict[str, Any] | None) -> None:
    (row,) = summary(document(14.0, grown(frames_sent=9000, retransmissions=90)), before)["jobs"]
    assert row["buckets_per_second"] is None
    assert row["frames_per_second"] is None
    assert row["retransmission_percent"] is None
    assert row["buckets"] == 120


def test_an_idle_job_has_rates_of_zero_and_no_percentage() -> None:
    (row,) = summary(document(12.0, job()), document(10.0, job()))["jobs"]
    assert (row["buckets_per_second"], row["frames_per_second"]) == (0.0, 0.0)
    assert row["retransmission_percent"] is None


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (None, ""),
        (0.0, "0.00"),
        (8.25, "8.25"),
        (9.996, "10.0"),
        (99.96, "100"),
        (999.4, "999"),
        (999.6, "1.00 k"),
        (45_600.0, "45.6 k"),
        (1.234e6, "1.23 M"),
        (5e9, "5.00 G"),
        (5e12, "5 T"),
    ],
)
def test_rates_in_few_places(rate: float | None, text: str) -> None:
    assert cli_top.short(rate) == text


def snapshots(fake: Fake, count: int) -> None:
    """Let Watch answer so often at once, one second of the controller's apart, with growing counts."""
    jobs = [job(), job("other", **RING)]

    def watch(_: pb.WatchRequest) -> Iterator[pb.StatusReply]:
        for index in range(count):
            for one in jobs:
                for each in one.workers:
                    each.completed += 5
                    each.counters["frames_sent"] += 50
            yield pb.StatusReply(switch=switch(), jobs=jobs, server_version="0.1.0", uptime_seconds=10.0 + index)

    fake.servicer.watch = watch


def test_once(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    snapshots(fake, 2)
    assert run(fake, "top", "--once", "--interval", "0.5") == 0
    ((_, request),) = fake.servicer.asked
    assert (request.job, request.interval_seconds) == ("", 0.5)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "controller 0.1.0, up 11 s; switch s1: connected, profile w34, 1024 slots"
    assert lines[1] == "aaaa" + 60 * "·" + " 64/1024 slots"
    assert lines[3].split() == [
        *("a", "train", "switch", "switch", "2/2", "5.00", "100", "0.00", "%", "0.80", "ms", "0"),
    ]
    assert lines[4].split()[:5] == ["other", "ring", "ring", "2/2", "5.00"]
    assert lines[5] == "other: bucket 17: no result for 1.0 s"
    assert "\x1b" not in "".join(lines)


def test_once_as_json_is_one_line_with_rates(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    snapshots(fake, 2)
    assert run(fake, "top", "train", "--once", "--json") == 0
    assert fake.servicer.asked[0][1].job == "train"
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["jobs"][0]["buckets_per_second"] == 5.0
    assert found["jobs"][1]["why"] == "bucket 17: no result for 1.0 s"


def test_json_gives_a_line_for_every_interval(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    """And says so when the controller ends the stream."""
    snapshots(fake, 4)
    assert run(fake, "top", "--json") == 3
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.out.splitlines()]
    assert [line["interval_seconds"] for line in lines] == [None, 1.0, 1.0, 1.0]
    assert [line["jobs"][0]["buckets"] for line in lines] == [105, 110, 115, 120]
    assert "has ended the stream" in captured.err


def test_a_stream_that_breaks_is_an_error_for_scripts(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    def watch(_: pb.WatchRequest) -> Iterator[pb.StatusReply]:
        yield pb.StatusReply(switch=switch())
        raise RuntimeError("broken on purpose")

    fake.servicer.watch = watch
    assert run(fake, "top", "--json") == 1
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1
    assert "UNKNOWN: Exception iterating responses: broken on purpose" in captured.err


def test_top_without_a_terminal(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(fake, "top") == 2
    assert "top draws on a terminal, and the output is none: use --once or --json" in capsys.readouterr().err


@pytest.mark.parametrize("interval", ["0", "0.05", "nan", "inf", "-1", "3601"])
def test_intervals_that_make_no_sense(fake: Fake, interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(fake, "top", "--once", "--interval", interval) == 2
    assert "write seconds from 0.1 to 3600" in capsys.readouterr().err


def test_the_pool_as_a_bar() -> None:
    """Every job shows, however few slots it has; what is free is dots."""
    jobs = [job("b", pool_base=512, pool_size=256), job("a", pool_base=0, pool_size=2), job("c", **RING)]
    shown = cli_top._bar(summary(document(1.0, *jobs), None), 32)
    assert shown.plain == "a" + 15 * "·" + 8 * "b" + 8 * "·" + " 258/1024 slots"
    assert cli_top._bar(summary(document(1.0), None), 8).plain == "········ 0/1024 slots"


def test_the_bar_and_the_table_share_letters() -> None:
    jobs = [job("late", pool_base=512, pool_size=256), job("ring", pool_size=0), job("early", pool_base=0)]
    console = Console(width=100, force_terminal=False, highlight=False)
    with console.capture() as captured:
        console.print(cli_top.table(summary(document(1.0, *jobs), None), width=100))
    lines = captured.get().splitlines()
    assert lines[1].startswith("aaaa" + 28 * "·" + 16 * "b")
    assert [line.split()[:2] for line in lines[3:6]] == [["b", "late"], ["ring", "switch"], ["a", "early"]]


def test_the_table_fits_80_columns() -> None:
    name = "llama-pretraining-run-with-a-long-name-2026-11-30"
    counters = {"frames_sent": 10**9, "retransmissions": 10**8}
    before = document(
        1.0, job(name, "preparing", ranks=64, workers=[worker(0, completed=0, **dict.fromkeys(counters, 0))])
    )
    far = worker(0, completed=10**6, **counters)
    far.rtt_seconds = 0.49999
    changes = {"fallbacks": {"silent": 12345}, "path_reason": "why " * 30, "path": pb.PATH_RING}
    after = job(name, "preparing", ranks=64, workers=[far] * 64, **changes)
    console = Console(width=80, force_terminal=False, highlight=False)
    with console.capture() as captured:
        console.print(cli_top.table(summary(document(3.0, job("b"), after), before), width=80))
    lines = captured.get().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    (row,) = [line for line in lines if " preparing " in line]
    assert " ".join(row.split()) == "b llama-pret… preparing ring 64/64 500 k 32.0 G 10.0 % 500 ms 12345"
    assert " ".join(captured.get().split()).count("why") == 30


class Terminal:
    """`p4reducectl top` in a process of its own, on a pseudo-terminal of 80 columns."""

    def __init__(self, fake: Fake) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(slave)
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "p4reduce_controller.cli", "top", "--controller", fake.address, "--interval", "0.1"],
            stdin=slave,
            stdout=slave,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        self._slave = slave
        self._chunks: queue.Queue[bytes] = queue.Queue()
        self.text = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # how Linux says that the other end is closed
            while True:
                self._chunks.put(os.read(self.master, 65536))

    def wait_for(self, pattern: str) -> None:
        """Until the pattern has been drawn since the last call."""
        try:
            while not re.search(pattern, self.text, re.S):
                self.text += self._chunks.get(timeout=DEADLINE).decode(errors="replace")
        except queue.Empty:
            raise AssertionError(f"{pattern!r} was not drawn: {self.text[-2000:]!r}") from None
        self.text = ""

    def press(self, key: str) -> None:
        os.write(self.master, key.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE)
        os.close(self._slave)
        self._reader.join(DEADLINE)  # the slave's last end is closed: reading ends
        os.close(self.master)


@pytest.fixture
def steps() -> queue.Queue[pb.StatusReply | None]:
    return queue.Queue()


@pytest.fixture
def terminal(fake: Fake, steps: queue.Queue[pb.StatusReply | None]) -> Iterator[Terminal]:
    """A live `top`; each snapshot put into `steps` is one reply, None ends the stream."""

    def watch(_: pb.WatchRequest) -> Iterator[pb.StatusReply]:
        while not fake.ended.is_set():
            try:
                found = steps.get(timeout=0.1)
            except queue.Empty:
                continue
            if found is None:
                return
            yield found

    fake.servicer.watch = watch
    found = Terminal(fake)
    yield found
    found.close()


def snapshot(uptime: float, *jobs: pb.JobStatus) -> pb.StatusReply:
    return pb.StatusReply(switch=switch(), jobs=jobs, server_version="0.1.0", uptime_seconds=uptime)


def test_live(fake: Fake, steps: queue.Queue[pb.StatusReply | None], terminal: Terminal) -> None:
    """Draws each snapshot, survives a controller that goes away, and ends with q, the terminal as it was."""
    steps.put(snapshot(1.0, job()))
    terminal.wait_for(r"train .*2/2.*q ends this")
    steps.put(snapshot(2.0, grown(frames_sent=9000, retransmissions=90)))
    terminal.wait_for(r"20\.0.*15\.0 k")
    steps.put(None)
    terminal.wait_for(r"has ended the stream; trying again")
    steps.put(snapshot(3.0, job("other", **RING)))
    terminal.wait_for(r"other .*ring.*no result for 1\.0 s")
    fake.servicer.refuse["Watch"] = (grpc.StatusCode.UNAVAILABLE, "stopping")
    steps.put(None)
    terminal.wait_for(r"UNAVAILABLE: stopping; trying again")
    terminal.press("x")  # means nothing
    terminal.press("q")
    assert terminal.process.wait(DEADLINE) == 0
    assert termios.tcgetattr(terminal._slave) == terminal.before


def test_live_ends_with_an_interrupt(steps: queue.Queue[pb.StatusReply | None], terminal: Terminal) -> None:
    steps.put(snapshot(1.0, job()))
    terminal.wait_for("q ends this")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.process.wait(DEADLINE) == 0
    assert termios.tcgetattr(terminal._slave) == terminal.before


def test_live_needs_a_controller_to_begin_with(fake: Fake) -> None:
    fake.servicer.refuse["Watch"] = (grpc.StatusCode.NOT_FOUND, "no job 'x'")
    terminal = Terminal(fake)
    try:
        terminal.wait_for("NOT_FOUND: no job 'x'")
        assert terminal.process.wait(DEADLINE) == 1
    finally:
        terminal.close()
