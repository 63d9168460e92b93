# SPDX-License-Identifier: Apache-2.0
"""What a state says about itself: statistics by path, a line in the log every so many steps, a trace."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from p4reduce.ddp import P4ReduceState, allreduce_hook
from p4reduce.ddp.trace import Trace
from p4reduce.errors import JobError


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Moving:
    """A job of one rank whose buckets take the path that `plan` names, one letter each: s(witch), r(ing), f(ails)."""

    def __init__(self, plan: str) -> None:
        self.world_size = 1
        self.plan = plan
        self.calls = 0
        self.ring = {"buckets": 3, "compared": 1, "elements": 7}
        self.path = "switch"
        self.sent = 0

    def allreduce_async(self, array: Any, op: str = "sum", out: Any = None) -> Future[Any]:
        way = self.plan[self.calls]
        self.calls += 1
        future: Future[Any] = Future()
        if way == "f":
            future.set_exception(JobError("gone"))
            return future
        if way == "r":
            self.path = "ring"
            self.ring["buckets"] += 1
        else:
            self.path = "switch"
            self.sent += 5 * array.size
        out[~np.isfinite(array)] = np.nan
        future.set_result(out)
        return future

    def stats(self) -> dict[str, Any]:
        return {
            "ring": dict(self.ring),
            "core": {"bytes_sent": self.sent, "retransmissions": self.calls},
            "seconds": {"encode": 0.25 * self.calls, "wire": 0.5, "wait": 9.0, "decode": 0.125},
        }

    def close(self) -> None:
        pass


class Bucket:
    def __init__(self, values: torch.Tensor, index: int = 0, last: bool = True) -> None:
        self._values, self._index, self._last = values, index, last

    def buffer(self) -> torch.Tensor:
        return self._values

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last


def reduce(state: P4ReduceState, values: torch.Tensor, index: int = 0, last: bool = True) -> torch.Tensor:
    return allreduce_hook(state, Bucket(values, index, last)).wait()  # type: ignore[arg-type]


def test_buckets_are_counted_by_path() -> None:
    comm = Moving("ssrrsrs")
    with P4ReduceState(comm) as state:
        for count in range(1, 8):
            reduce(state, torch.ones(count))
        reduce(state, torch.ones(3, dtype=torch.float64))
        stats = state.stats()
    assert {key: value for key, value in stats.items() if key.startswith(("buckets", "bytes"))} == {
        "buckets_switch": 4,
        "buckets_ring": 3,
        "buckets_plain": 1,
        "buckets_failed": 0,
        "bytes_switch": 4 * (1 + 2 + 5 + 7),
        "bytes_ring": 4 * (3 + 4 + 6),
        "bytes_plain": 24,
        "bytes_wire": 5 * (1 + 2 + 5 + 7),
    }
    assert stats["wire_bytes_per_element"] == 75 / 28
    assert stats["retransmissions"] == 7
    assert (stats["quantize_seconds"], stats["wire_seconds"], stats["dequantize_seconds"]) == (1.75, 0.5, 0.125)
    json.dumps(stats)


def test_a_bucket_that_fell_back_late_is_the_rings() -> None:
    """It was handed in while the job was on the ring, and is complete when the job is back on the switch."""
    comm = Moving("rs")
    real = comm.allreduce_async

    def promoted(array: Any, op: str = "sum", out: Any = None) -> Future[Any]:
        future = real(array, op, out)
        comm.path = "switch"
        return future

    with P4ReduceState(comm) as state:
        comm.path = "ring"
        comm.allreduce_async = promoted  # type: ignore[method-assign]
        reduce(state, torch.ones(1))
        reduce(state, torch.ones(1))
        assert (state.stats()["buckets_switch"], state.stats()["buckets_ring"]) == (1, 1)


def test_counters_are_asked_for_only_while_there_is_doubt() -> None:
    comm = Moving("ssrss")
    asked = []
    real = comm.stats
    comm.stats = lambda: asked.append(comm.calls) or real()  # type: ignore[method-assign,func-returns-value]
    with P4ReduceState(comm) as state:
        for _ in range(5):
            reduce(state, torch.ones(1))
        assert asked == [0, 3, 4], "at the beginning, for the ring's bucket, and for the one handed in after it"
        assert state.stats()["buckets_ring"] == 1


def test_blocks_that_are_not_finite_are_counted() -> None:
    class Blocks(Moving):
        def allreduce_async(self, array: Any, op: str = "sum", out: Any = None) -> Future[Any]:
            for start in range(0, len(array), 256):
                if not np.isfinite(array[start : start + 256]).all():
                    out[start : start + 256] = np.nan
            return super().allreduce_async(array, op, out)

    with P4ReduceState(Blocks("ss")) as state:
        values = torch.ones(1000)
        values[[300, 400, 999]] = float("inf")
        reduce(state, values)
        reduce(state, torch.ones(256))
        assert state.stats()["blocks_not_finite"] == 2


def test_a_failed_bucket_is_counted_apart() -> None:
    with P4ReduceState(Moving("sf")) as state:
        reduce(state, torch.ones(2))
        reduce(state, torch.ones(2))
        stats = state.stats()
        assert (stats["buckets_switch"], stats["buckets_failed"], stats["bytes_switch"]) == (1, 1, 8)


def test_a_line_every_few_steps(caplog: pytest.LogCaptureFixture) -> None:
    comm = Moving("s" * 5 + "r" * 5)
    with caplog.at_level(logging.INFO, "p4reduce.ddp"), P4ReduceState(comm, log_every=2) as state:
        for step in range(5):
            for last in (False, True):
                reduce(state, torch.ones(1 << 18) * step, last=last)
    lines = [text for text in caplog.messages if text.startswith("step ")]
    assert len(lines) == 2
    assert lines[0].startswith(
        "step 1: buckets switch 4 ring 0 plain 0 failed 0; gradients 4.0 MiB, wire 5.0 MiB; retransmissions 4; "
        "not finite 0 blocks; overflows 0; ms a step: "
    )
    assert lines[1].startswith("step 3: buckets switch 1 ring 3 plain 0 failed 0; gradients 4.0 MiB, wire 1.2 MiB")
    assert re.search(r"beside it quantize 500\.0, wire 0\.0, dequantize 0\.0$", lines[1])


def test_statistics_that_fail_cost_a_line_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    comm = Moving("ss")
    with P4ReduceState(comm, log_every=1) as state:
        comm.stats = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
        for _ in range(2):
            assert reduce(state, torch.ones(2)).tolist() == [1.0, 1.0]
    assert caplog.text.count("no statistics after step") == 2


def events(path: Path) -> list[dict[str, Any]]:
    content = json.loads(path.read_text())
    found: list[dict[str, Any]] = content["traceEvents"]
    return found


def test_trace_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with P4ReduceState(Moving("srsf"), trace=path) as state:
        for index in range(4):
            reduce(state, torch.ones(10 + index), index, last=index == 3)
        assert not path.exists()
        state.write_trace()
        assert len([event for event in events(path) if event["ph"] == "X"]) == 4
    found = events(path)
    begun = [event for event in found if event["ph"] == "b"]
    assert [event["args"]["path"] for event in begun] == ["switch", "ring", "switch", "failed"]
    assert [event["args"]["elements"] for event in begun] == [10, 11, 12, 13]
    assert all(event["args"]["lane_bits"] == 32 and event["args"]["step"] == 0 for event in begun)
    ended = {event["id"]: event["ts"] for event in found if event["ph"] == "e"}
    assert all(ended[event["id"]] >= event["ts"] for event in begun)
    assert all(event["dur"] >= 0 for event in found if event["ph"] == "X")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_trace_can_begin_later(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with P4ReduceState(Moving("ss")) as state:
        reduce(state, torch.ones(1))
        state.write_trace()
        state.trace(path)
        reduce(state, torch.ones(1))
    assert [event["args"]["step"] for event in events(path) if event["ph"] == "b"] == [1]


def test_a_trace_has_a_bounded_size(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t.json", rank=3, world_size=4, limit=10)
    for number in range(25):
        trace.bucket(number, number + 0.25, number + 0.5, index=number, path="switch")
    trace.write()
    content = json.loads((tmp_path / "t.rank3.json").read_text())
    assert content["otherData"] == {"dropped_buckets": 15}
    begun = [event for event in content["traceEvents"] if event["ph"] == "b"]
    assert [event["args"]["index"] for event in begun] == list(range(15, 25))
    assert (begun[0]["ts"], begun[0]["pid"]) == (15_250_000.0, 3)


def test_a_trace_that_cannot_be_written_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with P4ReduceState(Moving("s"), trace=tmp_path / "none" / "trace.json") as state:
        reduce(state, torch.ones(1))
        with pytest.raises(OSError, match="none"):
            state.write_trace()
    assert "no trace" in caplog.text
