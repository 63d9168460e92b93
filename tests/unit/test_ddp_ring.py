# SPDX-License-Identifier: Apache-2.0
"""TorchRing on real gloo groups of 2 and 4 processes, alone and under the runner.

Run as a script with a rank, a world size, a rendezvous file and a result folder, this file is one of the ranks: it runs
every scenario in turn and saves what each of them returns. The tests read those results. The last scenario is another
one for each world: of four ranks one is killed, of two ranks one falls silent.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.ring_cases import CASES, LIMIT, Rank, by_switch, reductions, same_bits
from torch._C._distributed_c10d import HashStore, PrefixStore

from p4reduce.core.bucket import Barrier, Reduction
from p4reduce.ddp.ring import TorchRing
from p4reduce.errors import MismatchError, RingError, UsageError
from p4reduce.ring import local_rings

WORLDS = (2, 4)
SHORT = 1.5
"""Timeout of rings that are to run into it, in seconds."""

Result = dict[str, Any]


def reduction(size: int, value: float = 1.0) -> Reduction:
    return Reduction(np.full(size, value, dtype=np.float32), np.zeros(size, dtype=np.float32))


def finish(rank: Rank) -> bool:
    """Close as a session does: first the ring, then the thread."""
    rank.ring.close()
    rank.ring.close()
    return rank.runner.stop(LIMIT)


# -- scenarios, run by every rank --


def collectives(number: int, world: int) -> Result:
    """The ring alone: all dtypes, in the caller's memory, empty ones too."""
    ring = TorchRing.from_group(timeout=LIMIT)
    levels = np.array([number, 250 - number], dtype=np.uint8)
    header = np.array([-number, number], dtype=np.int64)
    narrow = np.array([-(2**31 // world), number], dtype=np.int32)
    wide = np.array([2**40, -number], dtype=np.int64)
    empty = np.zeros(0, dtype=np.int32)
    ring.max(levels)
    ring.max(header)
    ring.sum(narrow)
    ring.sum(wide)
    ring.sum(empty)
    outcome: Result = {
        "values": [one.tolist() for one in (levels, header, narrow, wide)],
        "ring": (ring.rank, ring.size, ring.device),
    }
    assert ring._group is not None
    # The making of a ring is bounded by this, too; a rank that is missing there is a scenario of its own for subgroups.
    outcome["timeout"] = ring._group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    ring.close()
    ring.close()
    try:
        ring.sum(narrow)
    except RingError as error:
        outcome["closed"] = str(error)
    return outcome


def bits(number: int, world: int) -> Result:
    """All cases under the runner, twice, on a ring of their own each."""
    results = []
    for _ in range(2):
        rank = Rank(TorchRing.from_group(timeout=LIMIT)).put(reductions(number)).start()
        done = rank.wait(len(CASES))
        results.append([kept.bucket.out for kept in done if isinstance(kept.bucket, Reduction)])
        assert finish(rank)
    return {"results": results}


def small_buckets(number: int, world: int) -> Result:
    """Many, put while they are summed; the user's collectives on the default group go on meanwhile."""
    rank = Rank(TorchRing.from_group(timeout=LIMIT)).start()
    count = 200
    rank.put(Barrier() if n % 3 == 1 else reduction(n % 3, n + number) for n in range(count))
    mine = torch.ones(3)
    for _ in range(20):
        dist.all_reduce(mine)
        mine /= world
    done = rank.wait(count)
    right = all(
        kept.bucket.out.tolist() == [float(world * n + world * (world - 1) // 2)] * (n % 3)
        for n, kept in enumerate(done)
        if isinstance(kept.bucket, Reduction)
    )
    return {
        "numbers": [kept.number for kept in done],
        "right": right,
        "ended": finish(rank),
        "mine": mine.tolist(),
    }


def subgroup(number: int, world: int) -> Result:
    """Rings of half the ranks each, made by these alone, at the same time."""
    half = world // 2
    halves = [dist.new_group(list(range(first, first + half)), backend="gloo") for first in (0, half)]
    mine, others = halves if number < half else halves[::-1]
    outcome: Result = {}
    try:
        TorchRing.from_group(others, LIMIT)
    except UsageError as error:
        outcome["refused"] = str(error)
    assert isinstance(mine, dist.ProcessGroup)
    rank = Rank(TorchRing.from_group(mine, LIMIT)).put([reduction(300, number)]).start()
    (kept,) = rank.wait(1)
    assert isinstance(kept.bucket, Reduction)
    outcome |= {
        "values": set(kept.bucket.out.tolist()),
        "ring": (rank.ring.rank, rank.ring.size),
        "ended": finish(rank),
    }
    dist.barrier()
    return outcome


def borrowed(number: int, world: int) -> Result:
    """A ring on a group that somebody else has made outlives the ring."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    ring = TorchRing(group, LIMIT)
    total = np.ones(1, dtype=np.int32)
    ring.sum(total)
    ring.close()
    mine = torch.ones(1)
    dist.all_reduce(mine, group=group)
    dist.destroy_process_group(group)
    return {"values": (total.item(), mine.item())}


def destroyed_before(number: int, world: int) -> Result:
    """Somebody has destroyed the group before the ring is closed."""
    ring = TorchRing.from_group(timeout=LIMIT)
    ring.sum(np.ones(1, dtype=np.int32))
    dist.destroy_process_group(ring._group)
    ring.close()
    return {}


def mismatch(number: int, world: int) -> Result:
    """Sizes differ: gloo itself would end a process for that."""
    rank = Rank(TorchRing.from_group(timeout=LIMIT))
    rank.put([reduction(100), reduction(100_000 if number else 5), Barrier()]).start()
    error = rank.wait_for_error()
    return {
        "type": type(error),
        "bucket": getattr(error, "bucket", None),
        "text": str(error),
        "done": len(rank.done),
        "ended": finish(rank),
    }


def missing(number: int, world: int) -> Result:
    """The last rank does not come to a bucket. It comes to the next scenario all the same."""
    rank = Rank(TorchRing.from_group(timeout=SHORT)).start()
    outcome: Result = {}
    if number < world - 1:
        started = time.monotonic()
        rank.put([reduction(100)])
        error = rank.wait_for_error()
        outcome = {"type": type(error), "text": str(error), "seconds": time.monotonic() - started}
        outcome["again"] = None
        try:
            rank.ring.sum(np.ones(1, dtype=np.int32))
        except RingError as again:
            outcome["again"] = str(again)
    dist.barrier()
    outcome["ended"] = finish(rank)
    return outcome


def group_that_does_not_form(number: int, world: int) -> Result:
    """The last rank does not come to the making of a ring."""
    outcome: Result = {}
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    if number < world - 1:
        started = time.monotonic()
        try:
            TorchRing.from_group(group, SHORT)
        except RingError as error:
            outcome = {"text": str(error), "seconds": time.monotonic() - started}
    dist.barrier()
    return outcome


SCENARIOS: dict[str, Callable[[int, int], Result]] = {
    f.__name__: f
    for f in (
        *(collectives, bits, small_buckets, subgroup, borrowed, destroyed_before, mismatch, missing),
        group_that_does_not_form,
    )
}


# -- the last scenario --


def killed(number: int, world: int) -> Result:
    """The last rank dies in the middle of a large bucket, without a word. Nobody exits before all know."""
    rank = Rank(TorchRing.from_group(timeout=LIMIT))
    if number == world - 1:
        plain_sum = rank.ring.sum
        pieces = iter(range(3))

        def dying_sum(values: Any) -> None:
            if next(pieces) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            plain_sum(values)

        vars(rank.ring)["sum"] = dying_sum
    rank.put([reduction(10), reduction(3_000_000)]).start()
    error = rank.wait_for_error()
    times = [time.monotonic()]
    outcome = {"type": type(error), "text": str(error), "done": len(rank.done), "ended": finish(rank)}
    times.append(time.monotonic())
    store = PrefixStore("killed", dist.distributed_c10d._get_default_store())
    store.set(str(number), "")
    store.wait([str(survivor) for survivor in range(world - 1)], timedelta(seconds=2 * LIMIT))
    times.append(time.monotonic())
    outcome["seconds"] = np.diff(times).tolist()
    return outcome


def silent(number: int, world: int) -> Result:
    """Rank 1 never comes while rank 0's thread hangs in a collective. Rank 0 must be able to stop, close and exit."""
    rank = Rank(TorchRing.from_group(timeout=LIMIT))
    if number == 1:
        sys.stdin.read()  # until the test has seen rank 0 exit
        return {}
    entered = threading.Event()
    plain_max = rank.ring.max

    def observed_max(values: Any) -> None:
        entered.set()
        plain_max(values)

    vars(rank.ring)["max"] = observed_max
    rank.put([reduction(10)]).start()
    assert entered.wait(LIMIT)
    times = [time.monotonic()]
    stopped = rank.runner.stop(0.3)
    times.append(time.monotonic())
    rank.ring.close()
    times.append(time.monotonic())
    return {
        "stopped": stopped,
        "seconds": np.diff(times).tolist(),
        "said": (len(rank.done), len(rank.errors)),
        "at": times[-1],
    }


LAST = {4: killed, 2: silent}


def attempt(scenario: Callable[[int, int], Result], number: int, world: int) -> Result | str:
    try:
        return scenario(number, world)
    except Exception:  # the other scenarios still count
        return traceback.format_exc()


def main(number: int, world: int, rendezvous: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=number, world_size=world, timeout=timedelta(seconds=LIMIT)
    )
    results = {name: attempt(scenario, number, world) for name, scenario in SCENARIOS.items()}
    (folder / f"{number}.pickle").write_bytes(pickle.dumps(results))
    results["last"] = attempt(LAST[world], number, world)
    (folder / f"{number}.pickle").write_bytes(pickle.dumps(results))
    # No destroy_process_group: after the last scenario ranks are dead or hang, and that must not hold up the exit.


# -- tests, on what the ranks saved --


class Run:
    """Results and exit codes of one world."""

    def __init__(self, world: int, folder: Path) -> None:
        self.world = world
        command = [sys.executable, __file__]
        folders = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
        children = [
            subprocess.Popen(
                [*command, str(number), str(world), str(folder / "rendezvous"), str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
            )
            for number in range(world)
        ]
        try:
            # One after the other: rank 1 of two exits when its standard input ends, and that is after rank 0.
            self.outputs, self.exits = [], []
            for child in children:
                self.outputs.append(child.communicate(timeout=120)[0])
                self.exits.append(time.monotonic())
        finally:
            for child in children:
                child.kill()
                child.wait()
        self.codes = [child.returncode for child in children]
        self.results: list[Result] = [
            pickle.loads((folder / f"{number}.pickle").read_bytes()) for number in range(world)
        ]

    def __getitem__(self, name: str) -> list[Result]:
        """What a scenario returned, of all ranks that lived to its end."""
        found = [result[name] for result in self.results if name in result]
        for one in found:
            assert isinstance(one, dict), one
        return found


@pytest.fixture(scope="module", params=WORLDS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(request.param, tmp_path_factory.mktemp(f"ring{request.param}"))


def test_all_ranks_end_as_they_should(run: Run) -> None:
    expected = [0] * run.world
    if run.world == 4:
        expected[-1] = -signal.SIGKILL
    assert run.codes == expected, run.outputs


def test_collectives_work_in_place(run: Run) -> None:
    n, below = run.world, run.world * (run.world - 1) // 2
    for number, result in enumerate(run["collectives"]):
        assert result["values"] == [[n - 1, 250], [0, n - 1], [-(2**31 // n) * n, below], [n * 2**40, -below]]
        assert result["ring"] == (number, n, "cpu")
        assert result["closed"] == "this ring is closed"
        assert result["timeout"] == LIMIT


def test_the_ring_gives_the_bits_of_the_switch(run: Run) -> None:
    expected = by_switch(run.world)
    assert any(np.isnan(one).any() for one in expected)
    for number, result in enumerate(run["bits"]):
        for outs in result["results"]:
            for case, out, want in zip(CASES, outs, expected, strict=True):
                assert same_bits(out, want), f"rank {number}, {case}"


def test_small_buckets_stay_in_order(run: Run) -> None:
    for result in run["small_buckets"]:
        assert result["numbers"] == list(range(200))
        assert result["right"]
        assert result["ended"]
        assert result["mine"] == [1.0] * 3


def test_subgroups_have_rings_of_their_own(run: Run) -> None:
    half = run.world // 2
    for number, result in enumerate(run["subgroup"]):
        first = number // half * half
        assert result["values"] == {float(sum(range(first, first + half)))}
        assert result["ring"] == (number - first, half)
        assert result["ended"]
        assert result["refused"] == "this process is not a member of the process group"


def test_a_borrowed_group_is_left_alone(run: Run) -> None:
    assert [result["values"] for result in run["borrowed"]] == [(run.world, run.world)] * run.world
    assert len(run["destroyed_before"]) == run.world


def test_different_sizes_are_an_error_on_all_ranks(run: Run) -> None:
    for result in run["mismatch"]:
        assert (result["type"], result["bucket"], result["done"]) == (MismatchError, 1, 1)
        assert "bucket 1, 5 to 100000 elements" in result["text"]
        assert result["ended"]


def test_a_missing_rank_is_an_error_within_the_timeout(run: Run) -> None:
    results = run["missing"]
    assert all(result["ended"] for result in results)
    for number, result in enumerate(results[:-1]):
        assert result["type"] is RingError
        assert f"rank {number} of {run.world}, ring path, bucket 0 (sum of 100 float32): torch" in result["text"]
        # Who does not wait for the missing rank itself learns it from a rank that closes its connections.
        assert result["seconds"] < 3 * SHORT
        assert result["again"]
    assert min(result["seconds"] for result in results[:-1]) > 0.5 * SHORT


def test_a_ring_that_does_not_form_is_an_error(run: Run) -> None:
    for result in run["group_that_does_not_form"][:-1]:
        assert result["text"].startswith(f"no ring of torch.distributed (gloo) within {SHORT:g} s: ")
        assert 0.5 * SHORT < result["seconds"] < 5 * SHORT


@pytest.mark.parametrize("run", [4], indirect=True)
def test_a_killed_rank_is_an_error_at_the_others(run: Run) -> None:
    results = run["last"]
    assert len(results) == 3
    for result in results:
        assert result["type"] is RingError
        assert "bucket 1 (sum of 3000000 float32): torch.distributed, rank" in result["text"]
        assert result["done"] == 1
        assert result["ended"]
        # Some wait for the dead rank itself, the others for one of those, which does not exit yet.
        assert max(result["seconds"]) < LIMIT / 3


@pytest.mark.parametrize("run", [2], indirect=True)
def test_a_hanging_collective_holds_up_neither_stop_nor_close_nor_exit(run: Run) -> None:
    result = run["last"][0]
    assert result["stopped"] is False
    assert max(result["seconds"]) < 5.0
    assert result["said"] == (0, 0)
    assert run.exits[0] - result["at"] < LIMIT / 2


# -- in this process --


def test_without_a_process_group_there_is_no_ring() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        TorchRing.from_group()


@pytest.mark.gpu
def test_nccl_goes_over_the_device() -> None:
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        pytest.skip("needs a CUDA device and NCCL")
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    try:
        rank = Rank(TorchRing.from_group(timeout=LIMIT))
        assert rank.ring.device == "cuda:0"
        inputs = reductions(0)
        wanted = Rank(local_rings(1)[0], rank.fmt).put(reductions(0)).start().wait(len(inputs))
        done = rank.put(inputs).start().wait(len(inputs))
        for one, other in zip(done, wanted, strict=True):
            assert isinstance(one.bucket, Reduction)
            assert isinstance(other.bucket, Reduction)
            assert same_bits(one.bucket.out, other.bucket.out)
        assert finish(rank)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
