# SPDX-License-Identifier: Apache-2.0
"""The hook in real DistributedDataParallel training on two gloo ranks, against plain DDP.

Run as a script with a rank, a rendezvous file and a result folder, this file is one of the two ranks: it runs every
scenario in turn and saves what each of them returns. The tests read those results.
"""

from __future__ import annotations

import functools
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from helpers.ddp_models import Model
from helpers.ddp_pair import SMALL_BUCKETS, WORLD, GlooCommunicator, Lookup, Result, compare, data, gradients, train

from p4reduce.ddp import P4ReduceState, allreduce_hook
from p4reduce.ddp.ring import TorchRing
from p4reduce.errors import WorkerLostError

# -- scenarios, run by every rank --


def plain_options(rank: int) -> Result:
    return compare(rank)


def bucket_view(rank: int) -> Result:
    return compare(rank, gradient_as_bucket_view=True)


def static_graph(rank: int) -> Result:
    return compare(rank, static_graph=True)


def unused_parameters(rank: int) -> Result:
    return compare(rank, find_unused_parameters=True, call={"spare": False})


def float64(rank: int) -> Result:
    return compare(rank, dtype=torch.float64)


def float64_nested(rank: int) -> Result:
    """Buckets that are no job's in a backward pass within the backward pass."""
    build = functools.partial(Recomputed, torch.float64)
    torch.manual_seed(4)
    plain = train(DistributedDataParallel(build(), bucket_cap_mb=1e-5), rank, 3, torch.float64)
    with P4ReduceState(GlooCommunicator(), own_comm=True, timeout=30) as state:
        torch.manual_seed(4)
        ddp = DistributedDataParallel(build(), bucket_cap_mb=1e-5)
        ddp.register_comm_hook(state, allreduce_hook)
        return {"plain": plain, "hooked": train(ddp, rank, 3, torch.float64), "stats": state.stats()}


def bfloat16(rank: int) -> Result:
    return compare(rank, steps=2, dtype=torch.bfloat16)


def float16(rank: int) -> Result:
    return compare(rank, steps=2, dtype=torch.float16)


class Recomputed(torch.nn.Module):
    """Activations are computed again, in a backward pass within the backward pass."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.model = Model(dtype)
        self.head = torch.nn.Linear(1, 1).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.utils.checkpoint.checkpoint(self.model, x.requires_grad_(), use_reentrant=True)
        out: torch.Tensor = self.head(hidden)
        return out


OFF: dict[str, tuple[Callable[[], torch.nn.Module], dict[str, Any], dict[str, Any]]] = {
    "defaults": (Model, {}, {}),
    "gradient_as_bucket_view": (Model, {"gradient_as_bucket_view": True}, {}),
    "static_graph": (Model, {"static_graph": True}, {}),
    "find_unused_parameters": (Model, {"find_unused_parameters": True}, {"spare": False}),
    "checkpointed": (Recomputed, {"static_graph": True}, {}),
    # The head's bucket is of the outer backward pass, the last one of the inner.
    "nested": (Recomputed, {"bucket_cap_mb": 1e-5}, {}),
}


def mode_off(rank: int) -> Result:
    """In mode off, with a bucket or two under way at any time."""
    outcome: Result = {}
    for name, (build, options, call) in OFF.items():
        torch.manual_seed(4)
        plain = train(DistributedDataParallel(build(), **{"bucket_cap_mb": SMALL_BUCKETS} | options), rank, 4, **call)
        with P4ReduceState.from_env(mode="off", timeout=30) as state:
            torch.manual_seed(4)
            ddp = DistributedDataParallel(build(), **{"bucket_cap_mb": SMALL_BUCKETS} | options)
            ddp.register_comm_hook(state, allreduce_hook)
            outcome[name] = {"plain": plain, "hooked": train(ddp, rank, 4, **call), "stats": state.stats()}
    return outcome


def mode_off_twice(rank: int) -> Result:
    """Two models in one backward pass, and a rank that runs out of data before the other."""

    def run(models: list[DistributedDataParallel]) -> list[Any]:
        history = []
        first, second = models
        for step in range(3):
            for one in models:
                one.zero_grad()
            x = data(rank, step)
            (first(x) * second(x + 1)).square().mean().backward()
            history.append(gradients(first) + gradients(second))
        with first.join():
            for step in range(1 + rank):
                first.zero_grad()
                first(data(rank, step)).square().mean().backward()
        # One after join(), in which the hook is called without a backward pass.
        first.zero_grad()
        first(data(rank, 7)).square().mean().backward()
        history.append(gradients(first))
        return history

    def build() -> list[DistributedDataParallel]:
        return [DistributedDataParallel(Model(), bucket_cap_mb=SMALL_BUCKETS) for _ in range(2)]

    plain = run(build())
    with P4ReduceState(None, mode="off", timeout=30) as one, P4ReduceState(None, mode="off", timeout=30) as two:
        models = build()
        for ddp, state in zip(models, (one, two), strict=True):
            ddp.register_comm_hook(state, allreduce_hook)
        return {"plain": plain, "hooked": run(models), "stats": one.stats(), "error": one.error or two.error}


def mode_off_wrapped(rank: int) -> Result:
    """A wrapper that does something with the mean once it is there, which must not be before."""
    plain = train(DistributedDataParallel(Model(), bucket_cap_mb=SMALL_BUCKETS), rank, 3)
    with P4ReduceState(None, mode="off", timeout=30) as state:
        ddp = DistributedDataParallel(Model(), bucket_cap_mb=SMALL_BUCKETS)
        ddp.register_comm_hook(state, fp16_compress_wrapper(allreduce_hook))
        return {"plain": plain, "hooked": train(ddp, rank, 3), "stats": state.stats()}


def mixed_dtypes(rank: int) -> Result:
    """float64 and float32 layers in one model: both ways in every step."""

    def build() -> torch.nn.Module:
        torch.manual_seed(3)
        return torch.nn.ModuleDict({"a": torch.nn.Linear(10, 5), "b": torch.nn.Linear(10, 5, dtype=torch.float64)})

    history: dict[str, list[Any]] = {"plain": [], "hooked": []}
    with P4ReduceState(GlooCommunicator(), own_comm=True, timeout=30) as state:
        for kind in history:
            ddp = DistributedDataParallel(Both(build()))
            if kind == "hooked":
                ddp.register_comm_hook(state, allreduce_hook)
            for step in range(3):
                ddp.zero_grad()
                ddp(data(rank, step)).backward()
                history[kind].append(gradients(ddp))
        return {**history, "stats": state.stats()}


class Both(torch.nn.Module):
    def __init__(self, parts: torch.nn.Module) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.parts.get_submodule("a"), self.parts.get_submodule("b")
        total: torch.Tensor = a(x).square().mean() + b(x.double()).square().mean()
        return total


def fp16_wrapper(rank: int) -> Result:
    """torch's own compression wrapper around the hook: it sees float16 buffers and must return float16."""
    with P4ReduceState(GlooCommunicator(), own_comm=True, timeout=30) as state:
        ddp = DistributedDataParallel(Model(), bucket_cap_mb=SMALL_BUCKETS)
        ddp.register_comm_hook(state, fp16_compress_wrapper(allreduce_hook))
        hooked = train(ddp, rank, 3)
        plain = train(DistributedDataParallel(Model()), rank, 3)
        return {"plain": plain, "hooked": hooked, "stats": state.stats()}


def float16_overflow(rank: int) -> Result:
    """Gradients whose sum leaves float16 although their mean does not."""
    with P4ReduceState(None, mode="off", timeout=30) as state:
        model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float16)
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(state, allreduce_hook)
        (ddp(torch.ones(1, 1, dtype=torch.float16)) * 40000.0).sum().backward()
        return {"gradient": gradients(ddp)[0].item()}


def sparse(rank: int) -> Result:
    index = torch.tensor([rank, 3, 3 + rank])
    history: dict[str, list[Any]] = {"plain": [], "hooked": []}
    with P4ReduceState(GlooCommunicator(), own_comm=True, timeout=30) as state:
        for kind in history:
            ddp = DistributedDataParallel(Lookup())
            if kind == "hooked":
                ddp.register_comm_hook(state, allreduce_hook)
            for _ in range(3):
                ddp.zero_grad()
                ddp(index).square().sum().backward()
                history[kind].append(gradients(ddp))
        return {**history, "stats": state.stats()}


def accumulation(rank: int) -> Result:
    """Two backward passes under no_sync, the third synchronises the sum of all."""

    def run(ddp: DistributedDataParallel) -> list[Any]:
        with ddp.no_sync():
            for step in range(2):
                ddp(data(rank, step)).square().mean().backward()
        ddp(data(rank, 2)).square().mean().backward()
        return [gradients(ddp)]

    plain = run(DistributedDataParallel(Model(), bucket_cap_mb=SMALL_BUCKETS))
    with P4ReduceState(GlooCommunicator(), own_comm=True, timeout=30) as state:
        ddp = DistributedDataParallel(Model(), bucket_cap_mb=SMALL_BUCKETS)
        ddp.register_comm_hook(state, allreduce_hook)
        return {"plain": plain, "hooked": run(ddp), "stats": state.stats()}


def uneven_inputs(rank: int) -> Result:
    """join(): the rank that has run out of data takes part with zeros; the mean stays over all ranks."""
    with P4ReduceState(GlooCommunicator(), own_comm=True, timeout=30) as state:
        ddp = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        ddp.register_comm_hook(state, allreduce_hook)
        seen = []
        with ddp.join():
            for _ in range(1 + rank):
                ddp.zero_grad()
                ddp(torch.ones(1, 1)).sum().backward()
                seen.append(gradients(ddp)[0].item())
        return {"seen": seen, "stats": state.stats()}


def not_finite(rank: int) -> Result:
    """NaN on rank 1 alone."""
    with P4ReduceState(GlooCommunicator(), own_comm=True, timeout=30) as state:
        ddp = DistributedDataParallel(Model())
        ddp.register_comm_hook(state, allreduce_hook)
        x = data(rank, 0)
        if rank == 1:
            x[0, 0] = float("nan")
        ddp(x).square().mean().backward()
        return {"nan": [bool(np.isnan(g).any()) for g in gradients(ddp)], "error": state.error}


def subgroup(rank: int) -> Result:
    """A process group of one rank: its size is not the job's, so torch.distributed sums it all in that group."""
    groups = [dist.new_group([r], backend="gloo") for r in range(WORLD)]
    group = groups[rank]
    assert isinstance(group, dist.ProcessGroup)
    with P4ReduceState(GlooCommunicator(), group, own_comm=True, timeout=30) as state:
        ddp = DistributedDataParallel(Model(), process_group=group)
        ddp.register_comm_hook(state, allreduce_hook)
        ddp(data(rank, 0)).square().mean().backward()
        alone = Model()
        alone(data(rank, 0)).square().mean().backward()
        return {"plain": [gradients(alone)], "hooked": [gradients(ddp)], "stats": state.stats()}


def failure(rank: int) -> Result:
    """The second bucket of the second step fails on both ranks."""
    comm = GlooCommunicator(fail_at=2)
    with P4ReduceState(comm, own_comm=True, timeout=30) as state:
        ddp = DistributedDataParallel(Model(), bucket_cap_mb=SMALL_BUCKETS)
        ddp.register_comm_hook(state, allreduce_hook)
        optimizer = torch.optim.AdamW(ddp.parameters())
        for step in range(2):
            optimizer.zero_grad()
            ddp(data(rank, step)).square().mean().backward()
            if step == 0:
                optimizer.step()
        raised: Exception | None = None
        before = [p.detach().clone() for p in ddp.parameters()]
        try:
            optimizer.step()
        except WorkerLostError as error:
            raised = error
        unchanged = all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
        nan = [bool(np.isnan(g).all()) for g in gradients(ddp)]
        ranks = raised.ranks if isinstance(raised, WorkerLostError) else None
        outcome = {
            "same": raised is state.error,
            "ranks": ranks,
            "unchanged": unchanged,
            "nan": nan,
            "fired": comm.fired,
        }
    # The DDP object must still work, without the hook's help.
    with ddp.no_sync():
        ddp.zero_grad()
        ddp(data(rank, 5)).square().mean().backward()
    outcome["usable"] = all(np.isfinite(g).all() for g in gradients(ddp))
    return outcome


def job_names(rank: int) -> Result:
    """from_env on both ranks agrees on a name nobody gave."""
    import p4reduce

    made: list[dict[str, Any]] = []
    rings: list[TorchRing] = []

    def connect(**arguments: Any) -> GlooCommunicator:
        ring = arguments.pop("ring")
        rings.append(ring)
        made.append({**arguments, "ring": (ring.rank, ring.size, ring.device)})
        return GlooCommunicator()

    vars(p4reduce)["connect"] = connect
    for restarts in (None, rank):
        if restarts is not None:
            # Two hosts; the second one's torchrun has restarted its worker, and with it the first one's.
            os.environ.update(TORCHELASTIC_RESTART_COUNT=str(restarts), LOCAL_RANK="0")
        P4ReduceState.from_env(timeout=30).close()
    del os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["LOCAL_RANK"]
    # The other rank's is made by now, too: closing earlier would break its connections.
    dist.barrier()
    for ring in rings:
        ring.close()
    return {"made": made}


SCENARIOS: dict[str, Callable[[int], Result]] = {
    f.__name__: f
    for f in (
        *(plain_options, bucket_view, static_graph, unused_parameters, float64, bfloat16, float16, mixed_dtypes),
        float64_nested,
        *(mode_off, mode_off_twice, mode_off_wrapped),
        *(
            fp16_wrapper,
            float16_overflow,
            sparse,
            accumulation,
            uneven_inputs,
            not_finite,
            subgroup,
            failure,
            job_names,
        ),
    )
}


def attempt(scenario: Callable[[int], Result], rank: int) -> Result | str:
    try:
        return scenario(rank)
    except Exception:  # the other scenarios still count
        return traceback.format_exc()


def main(rank: int, rendezvous: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=30)
    )
    results = {name: attempt(scenario, rank) for name, scenario in SCENARIOS.items()}
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(results))
    dist.destroy_process_group()


# -- tests, on what the ranks saved --


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ddp")
    command = [sys.executable, __file__]
    children = [
        subprocess.Popen(
            [*command, str(rank), str(folder / "rendezvous"), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        outputs = [child.communicate(timeout=120)[0] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    for child, output in zip(children, outputs, strict=True):
        assert child.returncode == 0, output
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(WORLD)]


def both(ranks: list[dict[str, Any]], name: str) -> list[Result]:
    results = [rank[name] for rank in ranks]
    for result in results:
        assert not isinstance(result, str), result
    return results


def check_equal(results: list[Result], relative: float) -> None:
    """Hook and plain DDP agree, and the ranks agree bit for bit."""
    for result in results:
        assert len(result["hooked"]) == len(result["plain"]) > 0
        for hooked, plain in zip(result["hooked"], result["plain"], strict=True):
            scale = max(np.abs(g).max() for g in plain)
            assert scale > 0
            for a, b in zip(hooked, plain, strict=True):
                np.testing.assert_allclose(a, b, rtol=relative, atol=relative * scale)
    for a_step, b_step in zip(results[0]["hooked"], results[1]["hooked"], strict=True):
        for a, b in zip(a_step, b_step, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["plain_options", "bucket_view", "static_graph"])
def test_gradients_equal_plain_ddp(ranks: list[dict[str, Any]], name: str) -> None:
    results = both(ranks, name)
    check_equal(results, 1e-6)
    for result in results:
        stats = result["stats"]
        assert stats["buckets_ring"] == stats["buckets_plain"] == 0
        assert stats["steps"] == 4
        assert stats["buckets_switch"] > 4, "the model must not fit one bucket"


def test_unused_parameters_are_zero(ranks: list[dict[str, Any]]) -> None:
    results = both(ranks, "unused_parameters")
    check_equal(results, 1e-6)
    assert all(not g.any() for result in results for step in result["hooked"] for g in step[-2:])
    assert results[0]["stats"]["buckets_switch"] > 4


@pytest.mark.parametrize(("name", "relative"), [("bfloat16", 2e-2), ("float16", 2e-3), ("fp16_wrapper", 2e-3)])
def test_half_precision_goes_to_the_job(ranks: list[dict[str, Any]], name: str, relative: float) -> None:
    results = both(ranks, name)
    check_equal(results, relative)
    for result in results:
        assert result["stats"]["buckets_switch"] > 1
        assert result["stats"]["buckets_plain"] == 0
        assert result["stats"]["overflows"] == 0


@pytest.mark.parametrize("name", ["float64", "float64_nested"])
def test_float64_is_summed_as_it_is(ranks: list[dict[str, Any]], name: str) -> None:
    results = both(ranks, name)
    check_equal(results, 1e-12)
    for result in results:
        assert result["stats"]["buckets_switch"] == 0
        assert result["stats"]["buckets_plain"] > 1


def test_a_model_of_two_dtypes_uses_both_ways(ranks: list[dict[str, Any]]) -> None:
    results = both(ranks, "mixed_dtypes")
    check_equal(results, 1e-6)
    assert [(r["stats"]["buckets_switch"], r["stats"]["buckets_plain"]) for r in results] == [(3, 3), (3, 3)]


@pytest.mark.parametrize("name", OFF)
def test_mode_off_gives_the_bits_of_plain_ddp(ranks: list[dict[str, Any]], name: str) -> None:
    """Two ranks: dividing by two is exact before the sum, as DDP does it, and after."""
    results = [result[name] for result in both(ranks, "mode_off")]
    check_equal(results, 0.0)
    for result in results:
        counts = {key: value for key, value in result["stats"].items() if key.startswith("buckets")}
        assert counts.pop("buckets_plain") > 5
        assert not any(counts.values())
        assert result["stats"]["reduce_seconds"] >= result["stats"]["wait_seconds"] > 0


def test_mode_off_in_two_models_and_after_join(ranks: list[dict[str, Any]]) -> None:
    results = both(ranks, "mode_off_twice")
    check_equal(results, 0.0)
    assert [(result["stats"]["steps"], result["error"]) for result in results] == [(6, None), (6, None)]


def test_mode_off_within_a_wrapper(ranks: list[dict[str, Any]]) -> None:
    results = both(ranks, "mode_off_wrapped")
    check_equal(results, 2e-3)
    assert results[0]["stats"]["buckets_plain"] > 3


def test_float16_is_summed_without_overflow(ranks: list[dict[str, Any]]) -> None:
    assert [r["gradient"] for r in both(ranks, "float16_overflow")] == [40000.0, 40000.0]


def test_sparse_gradients_are_summed_as_they_are(ranks: list[dict[str, Any]]) -> None:
    results = both(ranks, "sparse")
    check_equal(results, 1e-6)
    assert results[0]["stats"]["buckets_plain"] == 3
    assert results[0]["stats"]["buckets_switch"] == 3


def test_accumulated_gradients_are_reduced_once(ranks: list[dict[str, Any]]) -> None:
    results = both(ranks, "accumulation")
    check_equal(results, 1e-6)
    assert all(r["stats"]["steps"] == 1 for r in results)


def test_uneven_inputs_keep_the_mean_over_all_ranks(ranks: list[dict[str, Any]]) -> None:
    results = both(ranks, "uneven_inputs")
    assert [r["seen"] for r in results] == [[1.0], [1.0, 0.5]]
    assert [r["stats"]["buckets_switch"] for r in results] == [2, 2]


def test_nan_reaches_every_rank_without_being_an_error(ranks: list[dict[str, Any]]) -> None:
    for result in both(ranks, "not_finite"):
        assert all(result["nan"])
        assert result["error"] is None


def test_a_group_of_another_size_is_summed_in_that_group(ranks: list[dict[str, Any]]) -> None:
    results = both(ranks, "subgroup")
    for result in results:
        check_equal([result, result], 0.0)
        assert result["stats"]["buckets_switch"] == 0
        assert result["stats"]["buckets_plain"] == 1
    assert not np.array_equal(results[0]["hooked"][0][0], results[1]["hooked"][0][0])


def test_a_failed_bucket_stops_the_optimizer_and_nothing_else(ranks: list[dict[str, Any]]) -> None:
    for result in both(ranks, "failure"):
        assert result["fired"] == 1
        assert result["same"]
        assert result["ranks"] == (1,)
        assert result["unchanged"]
        assert any(result["nan"])
        assert not all(result["nan"])
        assert result["usable"]


def test_the_ranks_agree_on_a_job_name(ranks: list[dict[str, Any]]) -> None:
    first, second = both(ranks, "job_names")
    names = [call["job"] for call in first["made"]]
    assert names == [call["job"] for call in second["made"]]
    assert len(set(names)) == 2
    assert [call["rank"] for call in first["made"] + second["made"]] == [0, 0, 1, 1]
    assert all(call["world_size"] == WORLD for call in first["made"] + second["made"])
    assert [call.get("incarnation") for call in first["made"] + second["made"]] == [None, 1] * 2
    assert [call["ring"] for call in first["made"] + second["made"]] == [(0, 2, "cpu")] * 2 + [(1, 2, "cpu")] * 2


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
