# SPDX-License-Identifier: Apache-2.0
"""The benches run and say what they are meant to say. What they measure here means nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench.py"


def run(*arguments: str) -> str:
    command = [sys.executable, str(BENCH), "--runs", "1", "--mebibytes", "1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_json() -> None:
    results: dict[str, Any] = json.loads(run("--json"))
    assert results["engine"]["frames_per_second"] > 0
    assert results["engine"]["frames_per_cpu_second"] > 0
    assert results["udp"]["frames_per_second"] > 0
    assert results["udp"]["frames"] % 64 == 0
    host = results["host"]
    assert host["gbits_per_second"] > 0
    assert host["gbits_per_cpu_second"] > 0
    assert set(host["share"]) == {"encode", "wire", "wait", "decode"}
    # Once to warm up, once measured: 121 frames of sums and 4 of exponents each.
    assert host["frames_sent"] - host["retransmissions"] == 2 * (121 + 4)


@pytest.mark.parametrize("part", ["host", "embedded"])
def test_table(part: str) -> None:
    table = run("--only", part, "--profile", "w5")
    assert "profile w5, median of 1 runs" in table
    assert ("host path, Gb/s of float32" in table) == (part == "host")
    assert ("embedded switch, engine alone, frames/s" in table) == (part == "embedded")
