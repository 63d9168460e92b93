# SPDX-License-Identifier: Apache-2.0
"""`p4reduce bench` without a lab: options, inputs, figures, table, the shared page, and the program `scalar`."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from p4reduce import quantize
from p4reduce.bench import figures, forwarding, inputs, links, run, show, stages, worker
from p4reduce.bench.figures import Measurement, RankResult, Row, build_row, percentile, ratios
from p4reduce.bench.options import BenchOptions, parse_list, parse_size, parse_sizes, parse_whole, show_size
from p4reduce.bench.shared import Shared
from p4reduce.cli import build_parser, main
from p4reduce.cli_bench import options_of
from p4reduce.errors import P4ReduceError, StalledError, SwitchError, UsageError
from p4reduce.transport.udp import UdpTransport

K, M = 1 << 10, 1 << 20
ROW_KEYS = {
    "workers",
    "size_bytes",
    "lane_bits",
    "path",
    "time_us",
    "time_us_p99",
    "algbw_MBps",
    "lane_sums_per_s",
    "frames_per_s",
    "wire_bytes",
    "line_share",
    "retransmissions",
    "wrong",
}


def row(path: str = "switch", **changes: Any) -> Row:
    content: dict[str, Any] = {
        "workers": 4,
        "size": M,
        "lane_bits": 32,
        "path": path,
        "loss": 0.0,
        "time": 0.01,
        "time_p99": 0.02,
        "frames": 1000.0,
        "wire_bytes": 2e6,
        "line_share": None,
        "retransmissions": 3,
        "wrong": 0,
        "iterations": 20,
    }
    return Row(**{**content, **changes})


class TestOptions:
    @pytest.mark.parametrize(
        ("text", "factor", "sizes"),
        [
            ("64K:1M", 4, [64 * K, 256 * K, M]),
            ("64K:100K", 2, [64 * K, 100 * K]),
            ("1500", 2, [1500]),
            ("4m,64kib,4M", 2, [4 * M, 64 * K]),
            ("1G", 2, [1 << 30]),
        ],
    )
    def test_sizes(self, text: str, factor: int, sizes: list[int]) -> None:
        assert list(parse_sizes(text, factor)) == sizes

    def test_default_range(self) -> None:
        assert [show_size(size) for size in parse_sizes("64K:16M")] == [
            "64K", "128K", "256K", "512K", "1M", "2M", "4M", "8M", "16M",
        ]  # fmt: skip

    @pytest.mark.parametrize("text", ["", "1M:", "x", "64K:1K", "0", "1M,,2M", "-4", "1T"])
    def test_sizes_that_cannot_be(self, text: str) -> None:
        with pytest.raises(UsageError):
            parse_sizes(text)
        with pytest.raises(UsageError, match="factor of 1"):
            parse_sizes("1M", 1)

    def test_lists(self) -> None:
        assert parse_list("2, 4,2", parse_whole, "numbers") == (2, 4)
        for text in ("", "2,", "+2", "٣"):
            with pytest.raises(UsageError):
                parse_list(text, parse_whole, "numbers")

    @pytest.mark.parametrize("size", [1, 1500, 64 * K, 3 * M, 1 << 30])
    def test_a_size_is_shown_exactly(self, size: int) -> None:
        assert parse_size(show_size(size)) == size

    @pytest.mark.parametrize(
        ("wrong", "match"),
        [
            ({"workers": ()}, "workers: at least one"),
            ({"workers": (2, 65)}, "workers: 65"),
            ({"sizes": (6,)}, "multiples of 4"),
            ({"sizes": (2 << 30,)}, "up to 1G"),
            ({"losses": (1.0,)}, "losses: 1.0"),
            ({"lane_bits": (64,)}, "lanes: 64"),
            ({"baselines": ("nccl",)}, "'nccl' is none of gloo, forward, scalar"),
            ({"switch": "tofino"}, "tofino"),
            ({"iterations": 0}, "at least one iteration"),
            ({"seed": -1}, "seed -1"),
            ({"deadline": 0.0}, "deadline of 0 s"),
            ({"baselines": ("forward",), "workers": (1,)}, "two workers"),
        ],
    )
    def test_what_makes_no_sense(self, wrong: dict[str, Any], match: str) -> None:
        with pytest.raises(UsageError, match=match):
            BenchOptions(**wrong)

    def parse(self, *arguments: str) -> BenchOptions:
        return options_of(build_parser().parse_args(["bench", "--switch", "embedded", *arguments]))

    def test_command_line(self) -> None:
        found = self.parse(
            "--workers", "2,4", "--sizes", "1M:4M", "--rate", "100mbit", "--delay", "1ms", "--losses", "0,0.01%,1%",
            "--lanes", "32,8", "--baseline", "gloo,scalar", "--iterations", "3", "--warmup", "1", "--seed", "7",
            "--deadline", "9", "--profile", "w5",
        )  # fmt: skip
        assert found == BenchOptions(
            workers=(2, 4), sizes=(M, 2 * M, 4 * M), switch="embedded", profile="w5", rate=1e8, delay=0.001,
            losses=(0.0, 0.0001, 0.01), lane_bits=(32, 8), baselines=("gloo", "scalar"), iterations=3, warmup=1,
            seed=7, deadline=9.0,
        )  # fmt: skip
        assert self.parse().losses == (0.0,)
        assert self.parse("--loss", "0.1%").losses == (0.001,)
        assert self.parse("--baseline", "all").baselines == ("gloo", "forward", "scalar")

    def test_json_takes_a_file_or_nothing(self) -> None:
        parser = build_parser()
        assert parser.parse_args(["bench"]).json is None
        assert parser.parse_args(["bench", "--json"]).json == "-"
        assert parser.parse_args(["bench", "--json", "x.json"]).json == "x.json"

    def test_errors_come_before_any_lab(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        for wrong, text in (
            (["--sizes", "64Q"], "'64Q' is no size such as 64K or 16M"),
            (["--baseline", "nccl"], "'nccl' is none of gloo, forward, scalar"),
            (["--rate", "fast"], "'fast' is not a rate such as 100mbit"),
            (["--workers", "64", "--lanes", "8"], "no room for the sum of 64 workers"),
            (["--json", str(tmp_path / "no" / "file")], "cannot write"),
        ):
            assert main(["bench", "--switch", "embedded", *wrong]) == 1
            assert text in capsys.readouterr().err


class TestWithoutRoot:
    @pytest.fixture(autouse=True)
    def user(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("os.geteuid", lambda: 1000)

    def test_links_need_root(self) -> None:
        for changes in ({"rate": 1e6}, {"delay": 0.1}):
            with pytest.raises(UsageError, match="run it with sudo, or leave --rate and --delay out"):
                stages.require(BenchOptions(**changes))
        stages.require(BenchOptions())

    def test_bmv2_needs_root(self) -> None:
        with pytest.raises(SwitchError, match="run it with sudo, or take --switch embedded"):
            stages.require(BenchOptions(switch="bmv2"))

    def test_it_says_what_it_cannot_do(self) -> None:
        found = " ".join(run.notes(BenchOptions(baselines=("gloo", "forward")), in_lab=False))
        assert "gloo does not cross the switch here" in found
        assert "forward is measured through the UDP ports" in found
        assert run.notes(BenchOptions(baselines=("gloo",)), in_lab=True) == []


class TestPlan:
    options = BenchOptions(
        sizes=(64 * K, 16 * M), lane_bits=(32, 16), baselines=("gloo", "forward", "scalar"), iterations=9, warmup=2
    )

    def test_in_a_lab(self) -> None:
        found = [(one.path, one.size, one.lane_bits) for one in run.plan_main(self.options, in_lab=True)]
        each = [[("switch", size, 32), ("switch", size, 16), ("gloo", size, 32)] for size in self.options.sizes]
        assert found == [*each[0], *each[1], ("forward", 8778, 32)]
        assert run.plan_scalar(self.options, 0.0, in_lab=True) == [
            Measurement("scalar", run.SCALAR_BYTES, run.SCALAR_ITERATIONS, 1, 120.0)
        ]
        assert run.plan_scalar(self.options, 0.01, in_lab=True) == []

    def test_on_loopback(self) -> None:
        assert "forward" not in {one.path for one in run.plan_main(self.options, in_lab=False)}
        assert [one.path for one in run.plan_scalar(self.options, 0.01, in_lab=False)] == ["forward"]

    def test_a_plan_survives_its_file(self) -> None:
        made = run.plan_main(self.options, in_lab=True)
        plan = worker.Plan(made, 3, "w5", "/page", "eth0", [["10.0.0.254", 20532]], ["10.0.0.1"])
        again = worker.Plan.from_json(plan.as_json())
        assert again == plan
        assert not again.scalar
        assert worker.Plan(made, 3, "w5", "/page", "", [], []).scalar

    def test_names(self) -> None:
        assert Measurement("switch", M, 1, 0, 1.0, 16).name(4) == "switch, 4 workers, 16-bit lanes, 1048576 bytes"
        assert Measurement("forward", 8778, 1, 0, 1.0).name(2) == "forward, 2 workers, frames of 8778 bytes"


class TestInputs:
    @pytest.mark.parametrize("workers", [1, 2, 3, 8, 64])
    @pytest.mark.parametrize("bits", [32, 16])
    def test_every_partial_sum_is_exact(self, workers: int, bits: int) -> None:
        bound = inputs.largest(bits, workers)
        assert bound >= 1
        assert bound * workers <= (1 << bits) - 1
        assert bound * workers < 1 << inputs.FLOAT_BITS

    @pytest.mark.parametrize("workers", [1, 2, 5, 8])
    @pytest.mark.parametrize("bits", [32, 16, 8])
    def test_quantizing_loses_nothing(self, workers: int, bits: int) -> None:
        """So a sum that is wrong is wrong for another reason. Quantized, added and back: the integers' sum."""
        count = 4096
        fmt = quantize.LaneFormat(bits, workers)
        parts = [inputs.integers(1, rank, workers, count, bits).astype(np.float32) for rank in range(workers)]
        block = np.maximum.reduce([quantize.block_exponents(part, fmt.block) for part in parts])
        total = np.zeros(count, np.uint64)
        for part in parts:
            lanes = np.empty(count, np.dtype(f"u{bits // 8}"))
            quantize.quantize(part, block, fmt, lanes)
            total += lanes
        assert int(total.max()) < 1 << bits
        out = np.empty(count, np.float32)
        quantize.dequantize(total.astype(np.dtype(f"u{bits // 8}")), block, fmt, out, False)
        expected = inputs.exact_sum(1, workers, count, bits)
        assert inputs.count_wrong(out, expected.astype(np.float32)) == 0
        assert int(np.abs(expected).max()) > 0

    def test_no_room(self) -> None:
        with pytest.raises(UsageError, match="lanes of 8 bits have no room for the sum of 64 workers"):
            inputs.largest(8, 64)

    def test_ranks_and_seeds_differ_and_repeat(self) -> None:
        one = inputs.integers(1, 0, 2, 1000, 32)
        assert (one == inputs.integers(1, 0, 2, 1000, 32)).all()
        assert (one != inputs.integers(1, 1, 2, 1000, 32)).any()
        assert (one != inputs.integers(2, 0, 2, 1000, 32)).any()
        assert (inputs.exact_sum(1, 2, 1000, 32) == one.astype(np.int64) + inputs.integers(1, 1, 2, 1000, 32)).all()

    def test_wrong_elements_are_counted(self) -> None:
        expected = np.arange(3 << 20, dtype=np.float32)
        result = expected.copy()
        assert inputs.count_wrong(result, expected) == 0
        result[[0, 5, -1]] = (7, np.nan, 0)
        assert inputs.count_wrong(result, expected) == 3


class TestFigures:
    def test_percentile_is_the_nearest_rank(self) -> None:
        assert percentile([5.0], 0.99) == 5.0
        assert percentile(list(range(1, 101)), 0.99) == 99
        assert percentile([3, 1, 2], 0.5) == 2
        with pytest.raises(ValueError, match="no values"):
            percentile([], 0.5)

    def test_row_from_ranks(self) -> None:
        wanted = Measurement("switch", 4000, 3, 1, 10.0)
        starts = [1_000_000, 5_000_000, 9_000_000]
        ranks = [
            RankResult(starts, [2_000_000, 7_000_000, 12_000_000], 1, 30, 2, 9000, 6000),
            RankResult(starts, [1_500_000, 7_500_000, 11_000_000], 2, 60, 3, 3000, 12000),
        ]
        found = build_row(wanted, ranks, workers=2, loss=0.0, rate=1e6)
        # The last rank counts: 1, 2.5 and 3 ms.
        assert found.time == pytest.approx(0.0025)
        assert found.time_p99 == pytest.approx(0.003)
        assert (found.frames, found.retransmissions, found.wrong) == (30.0, 5, 3)
        assert found.wire_bytes == 4000.0
        assert found.line_share == pytest.approx(4000 * 8 / 0.0025 / 1e6)
        assert found.algbw == pytest.approx(1.6e6)
        assert found.busbw == pytest.approx(1.6e6)
        assert found.lane_sums == pytest.approx(400_000)
        assert found.frame_rate == pytest.approx(12_000)

    def test_what_is_not_known_stays_so(self) -> None:
        ranks = [RankResult([0], [1000], frames=1, sent_bytes=5), RankResult([0], [2000])]
        found = build_row(Measurement("gloo", 400, 1, 0, 1.0), ranks, workers=2, loss=0.0, rate=1e6).as_json()
        for name in ("wire_bytes", "line_share", "retransmissions", "frames_per_s"):
            assert found[name] is None

    def test_forwarding(self) -> None:
        wanted = Measurement("forward", 8778, 1, 0, 1.0)
        ranks = [RankResult([], []), RankResult([], [], rates=[1000.0, 2000.0, 0.0, 4000.0])]
        found = build_row(wanted, ranks, workers=2, loss=0.0, rate=0.0)
        assert found.frame_rate == pytest.approx(2000.0)
        assert found.time_p99 == pytest.approx(0.001)
        assert found.lane_sums == 0.0
        with pytest.raises(ValueError, match="no frame arrived"):
            build_row(wanted, [RankResult([], [], rates=[0.0])], workers=2, loss=0.0, rate=0.0)

    def test_json_is_as_documented(self) -> None:
        assert set(row().as_json()) == ROW_KEYS
        report = run.Report({"cores": 2}, {"kind": "bmv2"}, BenchOptions(), [row(), row("gloo", time=0.03)])
        document = json.loads(json.dumps(report.as_dict()))
        assert set(document) >= {"machine", "switch", "rows"}
        assert [set(one) for one in document["rows"]] == [ROW_KEYS, ROW_KEYS]
        assert document["rows"][0]["time_us"] == 10000.0
        assert document["rows"][0]["algbw_MBps"] == pytest.approx(104.858, abs=1e-3)
        assert document["ratios"][0]["name"] == figures.SPEED_TO_GLOO
        report.options = BenchOptions(losses=(0.0, 0.01))
        assert [one["loss"] for one in report.as_dict()["rows"]] == [0.0, 0.0]

    def test_ratios(self) -> None:
        rows = [
            row(time=0.01),
            row("gloo", time=0.02),
            row(loss=0.01, time=0.015),
            row(workers=2, time=0.5),
            row(workers=2, time=0.2, lane_bits=8),
            row("forward", size=8778, time=1e-5, frames=1.0),
            row("scalar", size=256, time=1e-3),
        ]
        found = {(one.workers, one.loss, one.name): one.value for one in ratios(rows)}
        assert found == {
            (4, 0.0, figures.SPEED_TO_GLOO): pytest.approx(2.0),
            (4, 0.0, figures.FRAMES_TO_FORWARD): pytest.approx(1.0),
            (4, 0.0, figures.SUMS_TO_SCALAR): pytest.approx(M / 4 / 0.01 / 64e3),
            (4, 0.01, "switch: time to no loss"): pytest.approx(1.5),
            (2, 0.0, figures.SPEED_TO_32): pytest.approx(2.5),
        }

    def test_link_counters(self) -> None:
        assert links.read("no-such-device") is None
        found = links.read("lo")
        assert found is not None
        assert found.sent_bytes == found.received_bytes
        text = "Tcp: RtoAlgorithm RetransSegs InErrs\nTcp: 1 42 0\nUdp: a\nUdp: 1\n"
        assert links._tcp_again(text) == 42


class TestShow:
    report = run.Report(
        {"processor": "abacus", "cores": 2, "kernel": "Linux 6", "load": 0.1},
        {"kind": "bmv2", "version": "1.15", "profile": "w34"},
        BenchOptions(losses=(0.0, 0.001)),
        [row(), row(loss=0.001, time=0.011), row("forward", size=8778), row("gloo", frames=None, wire_bytes=None)],
    )

    def test_plain(self) -> None:
        out, errors = io.StringIO(), io.StringIO()
        with show.PlainWatcher(out, errors, with_loss=True) as watcher:
            watcher.note("something")
            watcher.begin("a measurement")
            for one in self.report.rows:
                watcher.row(one)
        watcher.finish(self.report)
        assert errors.getvalue() == "note: something\n"
        lines = out.getvalue().splitlines()
        columns = ["n", "size", "count", "type", "path", "time", "us", "p99", "us", "algbw", "MB/s", "busbw", "MB/s"]
        assert lines[0].split() == [*columns, "wire", "bytes", "line", "frames", "frames/s", "again", "wrong", "loss"]
        assert lines[1].split()[:7] == ["4", "1M", "262144", "f32/32", "switch", "10000.0", "20000.0"]
        assert lines[2].split()[-1] == "0.001"
        assert lines[4].split()[10:13] == ["-", "-", "-"]
        assert len({len(line) for line in lines[:5] if line.endswith(("loss", "0.001"))}) == 1
        assert lines[-1] == "Every sum was exact."
        assert any("abacus, 2 cores" in line for line in lines)
        assert [line.split() for line in lines if line.startswith("4  ")][-1][:3] == ["4", "1M", "32"]

    @pytest.mark.parametrize("width", [200, 80])
    def test_terminal(self, width: int) -> None:
        out, bar = io.StringIO(), io.StringIO()
        with show.RichWatcher(
            Console(file=out, width=width), Console(file=bar, width=100, force_terminal=True), 4, with_loss=True
        ) as watcher:
            watcher.note("something")
            watcher.begin("a measurement")
            for one in self.report.rows:
                watcher.row(one)
        watcher.finish(self.report)
        assert "something" in bar.getvalue()
        assert "4/4" in bar.getvalue()
        assert "switch: time to no loss" in out.getvalue()
        assert "Every sum was exact." in out.getvalue()
        assert ("│" in out.getvalue()) == (width == 200)
        assert out.getvalue().count("262144") == 3

    def test_wrong_sums_are_shouted(self) -> None:
        report = run.Report(self.report.machine, self.report.switch, BenchOptions(), [row(wrong=2), row(wrong=1)])
        assert show.closing(report)[-1] == "3 ELEMENTS WERE WRONG. Please report this."

    @pytest.mark.parametrize(("wrong", "status"), [(0, 0), (1, 1)])
    def test_exit_status(
        self, wrong: int, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def measured(options: BenchOptions, watcher: Any) -> run.Report:
            found = run.Report(self.report.machine, self.report.switch, options)
            found.rows.append(row(wrong=wrong))
            watcher.row(found.rows[0])
            return found

        monkeypatch.setattr(run, "run_bench", measured)
        assert main(["bench", "--switch", "embedded", "--json"]) == status
        captured = capsys.readouterr()
        assert json.loads(captured.out)["rows"][0]["wrong"] == wrong
        assert captured.err.splitlines()[0].startswith("  n")


class TestShared:
    def test_all_start_at_one_moment(self, tmp_path: Path) -> None:
        page = tmp_path / "page"
        Shared.create(page)

        def rank(number: int) -> list[int]:
            mine = Shared(page, number, 3)
            return [mine.start(20.0) for _ in range(20)]

        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(rank, range(3)))
        assert found[0] == found[1] == found[2]
        assert found[0] == sorted(set(found[0]))

    def test_who_is_missing_is_named(self, tmp_path: Path) -> None:
        page = tmp_path / "page"
        Shared.create(page)
        with pytest.raises(StalledError, match=r"ranks \(1, 2\) did not come"):
            Shared(page, 0, 3).start(0.05)
        with pytest.raises(StalledError, match="the moon did not happen within"):
            Shared(page, 0, 3).wait(4, 0.05, "the moon")
        Shared(page, 1, 3).put(4, 9)
        assert Shared(page, 0, 3).wait(4, 5.0, "it") == 9


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60) for future in [pool.submit(call) for call in calls]]


class TestForwarding:
    def pair(self, tmp_path: Path) -> tuple[Shared, Shared]:
        page = tmp_path / "page"
        Shared.create(page)
        return Shared(page, 0, 2), Shared(page, 1, 2)

    def test_frames_that_arrive_are_counted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(forwarding, "SECONDS", 0.2)
        monkeypatch.setattr(forwarding, "WARMUP_SECONDS", 0.05)
        left, right = self.pair(tmp_path)
        profile = run.wire.profile("w5")
        with (
            closing(UdpTransport("127.0.0.1", None, profile)) as a,
            closing(UdpTransport("127.0.0.1", None, profile)) as b,
        ):
            a.set_endpoint(b.local)
            b.set_endpoint(a.local)
            sent, seen = in_threads(
                lambda: forwarding.send(a, profile, left, 1, 24, 0, 20.0),
                lambda: forwarding.receive(b, profile, right, 1, 24),
            )
        assert seen.wrong == 0
        arrived = sum(rate * forwarding.SECONDS / 10 for rate in seen.rates)
        assert 0 < arrived <= sent
        # Never more under way than the window, so no more was sent than arrived in all, and a window.
        assert sent <= b.counters.received + 24 + 16

    def test_a_lost_window_is_no_end(self, tmp_path: Path) -> None:
        left, _ = self.pair(tmp_path)
        profile = run.wire.profile("w5")
        with closing(UdpTransport("127.0.0.1", None, profile)) as transport:
            transport.set_endpoint(("127.0.0.1", 9))
            stop = threading.Timer(0.3, lambda: left.put(3, 1))
            stop.start()
            began = time.monotonic()
            assert forwarding.send(transport, profile, left, 1, 8, 0, 20.0) > 8
            assert time.monotonic() - began < 15
            stop.join()


class TestWorker:
    def test_limited_names_the_measurement(self) -> None:
        with worker.limited("something", 30.0):
            pass  # its timer must not end this process later

    def test_an_error_is_an_event(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        plan = worker.Plan([], 0, "w5", str(tmp_path / "page"), "", [], ["127.0.0.1"])
        (tmp_path / "plan").write_text(plan.as_json())
        Shared.create(tmp_path / "page")
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
        assert worker.main([str(tmp_path / "plan")]) == 0
        assert [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()] == ["joined", "done"]

        def fail(*_: Any) -> None:
            raise SwitchError("it broke")

        monkeypatch.setattr(worker, "carry_out", fail)
        assert worker.main([str(tmp_path / "plan")]) == 1
        assert json.loads(capsys.readouterr().out) == {"event": "failed", "error": "SwitchError: it broke"}


def test_events_that_end_a_bench() -> None:
    wanted = Measurement("switch", M, 1, 0, 5.0)
    crew = run._Crew(BenchOptions(), 2, 0.0, [wanted], None, _Silent(), [])  # type: ignore[arg-type]
    crew._take(0, {"event": "begin", "number": 0}, None)
    with pytest.raises(run.BenchFailed, match=r"switch, 2 workers, 32-bit lanes, 1048576 bytes: rank 1: TypeError"):
        crew._take(1, {"event": "failed", "error": "TypeError"}, None)
    with pytest.raises(run.BenchFailed, match=r"gloo: rank 1 was not done within 5 s \(--deadline sets that\)"):
        crew._take(1, {"event": "late", "name": "gloo", "seconds": 5.0}, None)
    assert issubclass(run.BenchFailed, P4ReduceError)


class _Silent:
    def note(self, text: str) -> None: ...

    def begin(self, name: str) -> None: ...

    def row(self, row: Row) -> None: ...


def test_one_bench_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P4REDUCE_RUN_DIR", str(tmp_path))
    with (
        stages.bench_lock(),
        pytest.raises(SwitchError, match="another `p4reduce bench` is running"),
        stages.bench_lock(),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
    with stages.bench_lock():
        pass
