# SPDX-License-Identifier: Apache-2.0
"""Workers in namespaces of their own, through a switch on real interfaces: the same bodies on both switches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from helpers import lab as labs

from p4reduce_bmv2.lab import Lab, LabOptions
from p4reduce_bmv2.lab_shape import Shape

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
heavy = pytest.mark.skipif(os.environ.get("P4REDUCE_HEAVY") != "1", reason="heavy: set P4REDUCE_HEAVY=1 to run it")

SLOW = {"shape": Shape(rate=20e6), "profile": "w5", "deadline": 2.0}


@pytest.fixture(scope="module")
def get_lab() -> Iterator[Callable[..., Lab]]:
    """Labs by their options: made when first asked for, and shared by the tests of this file."""
    made: dict[LabOptions, Lab] = {}
    with labs.run_folder(), ExitStack() as undo:

        def get(**options: Any) -> Lab:
            wanted = LabOptions(**options)
            if wanted not in made:
                made[wanted] = undo.enter_context(labs.lab(wanted))
            return made[wanted]

        yield get


@pytest.mark.parametrize("kind", labs.KINDS)
class TestBoth:
    @pytest.mark.parametrize(("workers", "profile"), [(2, "w34"), (4, "w5")])
    def test_sums_are_right_bit_for_bit(self, get_lab: Any, kind: str, workers: int, profile: str) -> None:
        lab = get_lab(workers=workers, switch=kind, profile=profile)
        reports = labs.work(lab, "reduce", "--elements", "100003", "--check-all")
        assert len(reports) == workers
        labs.check(reports)
        assert reports[0]["core"]["results"] > 0

    def test_ddp_example_trains(self, get_lab: Any, kind: str) -> None:
        code, lines, errors = labs.run(
            get_lab(workers=2, switch=kind), sys.executable, str(EXAMPLES / "ddp_four_lines.py")
        )
        assert code == 0, errors
        assert lines[0][-1] == "rank 0: 50 buckets through the switch, 0 through the ring"
        assert lines[1][-1] == "rank 1: 50 buckets through the switch, 0 through the ring"
        losses = [float(line.split()[-1]) for line in lines[0][:-1]]
        assert losses[-1] < losses[0] / 4

    def test_ring_and_switch_path_at_once(self, get_lab: Any, kind: str) -> None:
        lab = get_lab(workers=2, switch=kind)
        reports = labs.work(lab, "reduce", "--ring", "--elements", "1000000", "--rounds", "3")
        labs.check(reports)
        for report in reports:
            assert report["ring_wrong"] == 0
            # At once indeed: some reduction was under way while a ring's was (one clock for all processes).
            assert any(a < d and c < b for a, b in report["spans"] for c, d in report["ring_spans"])
        # gloo's TCP crossed the switch too: forwarded frames are no contributions, but they were on the link.
        link = lab.topology(lab.state()).hosts[0]
        received = int(labs.at(link.netns, "/sys/class/net/eth0/statistics/rx_packets"))
        assert received > reports[0]["core"]["frames_received"] + 100

    def test_8_workers_with_loss_delay_reordering_and_duplicates(self, get_lab: Any, kind: str) -> None:
        shape = Shape(delay=0.001, loss=0.01, duplicate=0.01, reorder=0.05)
        lab = get_lab(workers=8, switch=kind, shape=shape)
        reports = labs.work(lab, "reduce", "--elements", "300000")
        labs.check(reports)
        assert labs.faults(lab, "lost") > 0
        assert sum(report["core"]["retransmissions"] for report in reports) > 0
        for fault in ("duplicated", "reordered"):
            assert labs.faults(lab, fault) > 0

    def test_a_rate_holds(self, get_lab: Any, kind: str) -> None:
        lab = get_lab(workers=2, switch=kind, **SLOW)
        reports = labs.work(lab, "reduce", "--elements", "500000", "--rounds", "1")
        labs.check(reports)
        # 2 MB of lanes are 16 Mbit, one way; the burst of a millisecond does not matter.
        assert min(report["seconds"] for report in reports) > 0.8 * 16e6 / 20e6
        for worker in lab.status()["workers"]:
            assert worker["link"]["up"]["tc"]["tbf"]["bytes"] > 2e6
            assert worker["link"]["down"]["tc"]["tbf"]["bytes"] > 2e6

    def test_switch_killed_and_restarted(self, get_lab: Any, kind: str) -> None:
        lab = get_lab(workers=2, switch=kind, **SLOW)
        with running(lab) as process:
            lab.state().processes["switch"].signal(signal.SIGKILL)
            check_errors(process, "StalledError", "had no result for 2")
        assert any("switch" in problem and "ended" in problem for problem in lab.status()["problems"])
        lab.restart()
        assert lab.status()["problems"] == []
        labs.check(labs.work(lab, "reduce", "--elements", "10000"))
        # Killed and restarted while the job runs: the controller ends the epoch, long before any deadline.
        with running(lab) as process:
            lab.state().processes["switch"].signal(signal.SIGKILL)
            lab.restart()
            check_errors(process, "", "the switch was restarted|had no result")
        labs.check(labs.work(lab, "reduce", "--elements", "10000"))

    def test_frames_of_a_stranger_do_not_count(self, get_lab: Any, kind: str, tmp_path: Path) -> None:
        lab = get_lab(workers=4, switch=kind, profile="w5")
        found = labs.work(
            lab, "stranger", "--folder", str(tmp_path), "--elements", "200000", "--rounds", "4", "--check-all"
        )
        assert found[3]["flooded"] > 100
        labs.check(found[:3])
        counters = found[0]["counters"]
        assert counters["refused"] > 100
        assert counters["mismatch"] == 0

    @heavy
    @pytest.mark.slow
    def test_64_mib_of_8_workers_at_1_percent_loss(self, get_lab: Any, kind: str) -> None:
        lab = get_lab(workers=8, switch=kind, shape=Shape(loss=0.01))
        elements = (64 << 20) // 4
        reports = labs.work(lab, "reduce", "--elements", str(elements), "--rounds", "1", timeout=600.0)
        labs.check(reports)
        lost = labs.faults(lab, "lost")
        assert lost > 0.005 * 16 * elements / (34 * 64)
        print(f"{kind}: {max(report['seconds'] for report in reports):.1f} s, {lost} frames lost")


class running:
    """Workers that reduce until something fails, all under way on entry; killed on exit if they still run."""

    def __init__(self, lab: Lab) -> None:
        command = [
            *labs.CLI,
            "run",
            "--name",
            lab.name,
            "--timeout",
            "60",
            "--",
            sys.executable,
            str(labs.WORKER),
            "hold",
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def __enter__(self) -> subprocess.Popen[str]:
        assert self.process.stdout is not None
        for _ in range(2):
            line = self.process.stdout.readline()
            assert '"running"' in line, line + self.process.stdout.read()
        return self.process

    def __exit__(self, *details: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def check_errors(process: subprocess.Popen[str], error: str, text: str) -> None:
    """The run ends by itself with the workers' status, and a worker named the cause."""
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 3, output
    reports = [json.loads(line.partition("] ")[2]) for line in output.splitlines() if '"error"' in line]
    # The first to fail ends the others, which may not come to speak.
    assert reports, output
    for report in reports:
        assert error in report["error"]
        assert any(part in report["text"] for part in text.split("|")), report
