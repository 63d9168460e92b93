# SPDX-License-Identifier: Apache-2.0
"""The hook in real DistributedDataParallel training through the switch, one test for everything docs/hook.md lists.

helpers/ddp_ranks.py is one of two ranks: it runs every scenario in turn and saves what each of them returns. The tests
read these results. The same on the embedded switch on loopback and, with root, on BMv2.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import lab as labs
from helpers.ddp_ranks import CHANGES, COMPILED, LANES, PATHS, WORLD, Result

RANKS = Path(__file__).resolve().parents[1] / "helpers" / "ddp_ranks.py"


@contextlib.contextmanager
def on_loopback(**options: Any) -> Iterator[str]:
    """An embedded switch and a controller; its address."""
    from p4reduce_bmv2.embedded.switch import EmbeddedSwitch
    from p4reduce_controller.hosts import Hosts
    from p4reduce_controller.server import ControllerServer

    ports = {n + 1: f"127.0.1.{n + 1}" for n in range(WORLD)}
    with EmbeddedSwitch(udp_ports=ports, seed=5) as switch:
        hosts = Hosts.embedded(switch.grpc_address, switch.endpoints, profile="w34")
        with ControllerServer(hosts, lease_seconds=10.0, **options) as controller:
            yield str(controller.address)


def run_on_loopback(folder: Path, names: list[str]) -> None:
    with on_loopback() as controller:
        environment = {**os.environ, "P4REDUCE_CONTROLLER": controller, "GLOO_SOCKET_IFNAME": "lo"}
        children = [
            subprocess.Popen(
                [sys.executable, str(RANKS), str(folder), f"file://{folder / 'rendezvous'}", *names],
                env={**environment, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(WORLD)
        ]
        try:
            outputs = [child.communicate(timeout=240)[0] for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
        for child, output in zip(children, outputs, strict=True):
            assert child.returncode == 0, output


def run_on_bmv2(folder: Path, names: list[str]) -> None:
    from p4reduce_bmv2.lab import LabOptions

    with labs.run_folder(), labs.lab(LabOptions(workers=WORLD, switch="bmv2")) as lab:
        code, _, errors = labs.run(lab, sys.executable, str(RANKS), str(folder), "env://", *names, timeout=240)
        assert code == 0, errors


RUNNERS = {"loopback": run_on_loopback, "bmv2": run_on_bmv2}


@pytest.fixture(scope="module", params=["loopback", pytest.param("bmv2", marks=[pytest.mark.bmv2, pytest.mark.netns])])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("hook")
    RUNNERS[request.param](folder, [])
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(WORLD)]


def both(ranks: list[dict[str, Any]], name: str) -> list[Result]:
    results = [rank[name] for rank in ranks]
    for result in results:
        assert not isinstance(result, str), result
    return results


def check_equal(results: list[Result], relative: float = 2**-20, absolute: float = 2**-24) -> None:
    """Hook and plain DDP agree, relative to a tensor's largest gradient, and the ranks agree bit for bit."""
    for result in results:
        assert len(result["hooked"]) == len(result["plain"]) > 0
        for hooked, plain in zip(result["hooked"], result["plain"], strict=True):
            scale = max(float(np.abs(g).max(initial=0.0)) for g in plain)
            assert scale > 0
            for a, b in zip(hooked, plain, strict=True):
                np.testing.assert_allclose(a, b, rtol=relative, atol=absolute * scale)
    for a_step, b_step in zip(results[0]["hooked"], results[1]["hooked"], strict=True):
        assert [g.tobytes() for g in a_step] == [g.tobytes() for g in b_step]


def check_path(results: list[Result], steps: int, path: str = "switch", least: int = 1) -> None:
    """Every bucket took this path, at least so many a step."""
    for result in results:
        stats = result["stats"]
        assert stats["error"] is None
        assert stats["steps"] == steps
        counts = {name: stats[f"buckets_{name}"] for name in ("switch", "ring", "plain", "failed")}
        assert counts.pop(path) >= steps * least
        assert set(counts.values()) == {0}


def sizes(result: Result) -> list[list[int]]:
    """Elements of the buckets, step by step."""
    steps: list[list[int]] = []
    for index, size in result["seen"]:
        if index == 0:
            steps.append([])
        steps[-1].append(size)
    return steps


def test_first_step_has_a_single_bucket(ranks: list[dict[str, Any]]) -> None:
    for result in both(ranks, "defaults"):
        assert sizes(result)[0] == [result["elements"]]


def test_buckets_are_rebuilt_after_the_first_step(ranks: list[dict[str, Any]]) -> None:
    results = both(ranks, "defaults")
    check_equal(results)
    check_path(results, steps=4)
    for result in results:
        first, *later = sizes(result)
        assert len(later) == 3
        assert all(step == later[0] and len(step) > len(first) and sum(step) == sum(first) for step in later)


def test_static_graph(ranks: list[dict[str, Any]]) -> None:
    results = both(ranks, "static_graph")
    check_equal(results)
    check_path(results, steps=4)
    for result in results:
        assert [len(step) > 1 for step in sizes(result)] == [False, False, True, True]


def test_find_unused_parameters(ranks: list[dict[str, Any]]) -> None:
    results = both(ranks, "find_unused_parameters")
    check_equal(results)
    check_path(results, steps=4, least=2)
    assert all(not g.any() for result in results for step in result["hooked"] for g in step[-2:])


def test_gradient_as_bucket_view(ranks: list[dict[str, Any]]) -> None:
    results = both(ranks, "gradient_as_bucket_view")
    check_equal(results)
    check_path(results, steps=4)


def test_channels_last(ranks: list[dict[str, Any]]) -> None:
    results = both(ranks, "channels_last")
    check_equal(results)
    check_path(results, steps=4)


def test_tied_and_unused_parameters(ranks: list[dict[str, Any]]) -> None:
    results = both(ranks, "tied_and_unused")
    check_equal(results)
    check_path(results, steps=4)
    for result in results:
        assert result["elements"] == 100 + 110, "the tied weight counts once"
        assert all(step[0].any() and not step[1].any() and not step[2].any() for step in result["hooked"])


def test_a_thousand_parameters(ranks: list[dict[str, Any]]) -> None:
    results = both(ranks, "thousand_parameters")
    check_equal(results)
    check_path(results, steps=3)
    assert len(sizes(results[0])[-1]) > 20


@pytest.mark.parametrize(("name", "relative"), [("float16", 2**-10), ("bfloat16", 2**-7), ("fp16_wrapper", 2**-10)])
def test_half_precision(ranks: list[dict[str, Any]], name: str, relative: float) -> None:
    results = both(ranks, name)
    # Parameters that differ by a rounding give gradients that differ by one, so later steps may drift apart.
    check_equal([{**r, "plain": r["plain"][:2], "hooked": r["hooked"][:2]} for r in results], relative, relative)
    check_path(results, steps=4)


@pytest.mark.parametrize("number", range(len(LANES)))
def test_fewer_bits(ranks: list[dict[str, Any]], number: int) -> None:
    options = LANES[number]
    bits = options["lane_bits"]
    results = [result[str(number)] for result in both(ranks, "lanes")]
    # Two ranks, each off by a quantum at most, and what the last step left over.
    quantum = 2.0 ** -(bits - 3)
    first = [{**r, "plain": r["plain"][:2], "hooked": r["hooked"][:2]} for r in results]
    check_equal(first, 4 * quantum, 4 * quantum)
    check_path(results, steps=4)
    exact = options.get("exact_steps", 0)
    for result in results:
        errors = [
            max(float(np.abs(a - b).max()) for a, b in zip(hooked, plain, strict=True))
            for hooked, plain in zip(result["hooked"], result["plain"], strict=True)
        ]
        assert all(error > 1e-7 for error in errors[exact:]), "these bits cannot be exact"
        share = (4 - exact) / 4 * bits / 32 + exact / 4
        assert share * 4 < result["stats"]["wire_bytes_per_element"] < share * 4 * 1.35
    if exact:
        check_equal([{"hooked": r["hooked"][:exact], "plain": r["plain"][:exact]} for r in results])


def test_float64_is_summed_by_torch(ranks: list[dict[str, Any]]) -> None:
    results = both(ranks, "float64")
    check_equal(results, 1e-13, 1e-13)
    check_path(results, steps=2, path="plain")


def test_parameters_of_every_kind_in_one_model(ranks: list[dict[str, Any]]) -> None:
    results = both(ranks, "motley")
    # Gradients of bfloat16 have 8 bits, and the others follow once the parameters do.
    check_equal([{**r, "plain": r["plain"][:1], "hooked": r["hooked"][:1]} for r in results], 2**-7, 2**-7)
    for result in results:
        stats = result["stats"]
        assert stats["error"] is None
        # float32 with complex (as real numbers), bfloat16 and float16 to the job; float64 and sparse to torch.
        assert stats["buckets_switch"] >= 3 * 3
        assert stats["buckets_plain"] == 3 * 2
        assert (stats["buckets_ring"], stats["buckets_failed"]) == (0, 0)
        assert all(gradient.any() or not gradient.size for step in result["hooked"] for gradient in step)


def test_fp16_compress_wrapper(ranks: list[dict[str, Any]]) -> None:
    for result in both(ranks, "fp16_wrapper"):
        stats = result["stats"]
        assert stats["bytes_switch"] == 2 * 4 * result["elements"], "the hook saw two bytes an element in 4 steps"
        for step in result["hooked"]:
            assert all(np.array_equal(g, g.astype(np.float16).astype(np.float64)) for g in step)


def test_no_sync_accumulation(ranks: list[dict[str, Any]]) -> None:
    results = both(ranks, "no_sync")
    check_equal(results)
    check_path(results, steps=2)


def test_join_with_uneven_inputs(ranks: list[dict[str, Any]]) -> None:
    results = both(ranks, "join_uneven")
    assert [r["seen"] for r in results] == [[1.0], [1.0, 0.5, 0.5]]
    check_path(results, steps=3)


def test_two_models_in_one_backward(ranks: list[dict[str, Any]]) -> None:
    results = both(ranks, "two_models")
    check_equal(results)
    check_path(results, steps=3)
    check_path([{"stats": result["other"]} for result in results], steps=3)
    assert {result["stats"]["comm"]["job"] for result in results} == {"two-a"}
    assert {result["other"]["comm"]["job"] for result in results} == {"two-b"}


def test_two_process_groups_with_a_job_each(ranks: list[dict[str, Any]]) -> None:
    results = both(ranks, "two_groups")
    check_equal([result["together"] for result in results])
    check_path([result["together"] for result in results], steps=2)
    for rank, result in enumerate(results):
        check_equal([result["alone"], result["alone"]])
        check_path([result["alone"]], steps=2)
        assert result["alone"]["stats"]["comm"]["job"] == f"alone-{rank}"
        assert (result["alone"]["stats"]["world_size"], result["together"]["stats"]["world_size"]) == (1, 2)
    first, second = (result["alone"]["hooked"][0][0] for result in results)
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("variant", COMPILED[:2])
def test_torch_compile(ranks: list[dict[str, Any]], variant: str) -> None:
    results = [result[variant] for result in both(ranks, "compiled")]
    assert [result["error"] for result in results] == [None, None]
    check_equal(results, 2**-16, 2**-20)
    check_path(results, steps=3)


def test_torch_compile_with_python_reducer_is_refused(ranks: list[dict[str, Any]]) -> None:
    for result in both(ranks, "compiled"):
        assert "choose another value of optimize_ddp" in result["python_reducer"]["error"]


def test_grad_scaler_skips_the_same_steps(ranks: list[dict[str, Any]]) -> None:
    results = both(ranks, "grad_scaler")
    for result in results:
        assert result["hooked"] == result["plain"]
        moved, scales = result["hooked"]["moved"], result["hooked"]["scales"]
        assert not moved[5]
        assert not moved[11]
        assert moved.count(False) > 2, "float16 must have overflowed by itself as well"
        assert moved.count(True) > 8
        assert len(set(scales)) > 2
        assert result["stats"]["blocks_not_finite"] >= 2
        assert result["error"] is None
    assert results[0]["hooked"] == results[1]["hooked"]


def test_a_trace_shows_buckets_that_overlap(ranks: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(both(ranks, "traced")):
        assert result["files"] == [f"trace.rank{rank}.json"]
        begun = {event["id"]: event for event in result["events"] if event["ph"] == "b"}
        ended = {event["id"]: event["ts"] for event in result["events"] if event["ph"] == "e"}
        assert len(begun) == len(ended) == result["buckets"] > 40
        assert all(event["args"]["path"] == "switch" for event in begun.values())
        overlapping = [
            number
            for number in range(1, len(begun))
            if begun[number]["args"]["step"] == begun[number - 1]["args"]["step"]
            and begun[number]["ts"] < ended[number - 1]
        ]
        assert len(overlapping) > 10, "bucket k + 1 is on its way before bucket k has its mean"


def test_pickling_warns(ranks: list[dict[str, Any]]) -> None:
    for result in both(ranks, "copies"):
        assert any("left out of a saved or copied" in text for text in result["pickled"])


def test_deepcopy_says_that_the_copy_has_no_hook(ranks: list[dict[str, Any]]) -> None:
    for result in both(ranks, "copies"):
        assert any("has no communication hook" in text for text in result["copied"])
        assert result["by_copy"] == 0
        assert result["by_model"] > 0


@pytest.mark.parametrize("bits", ["32", "8"])
def test_checkpoint_and_resume(ranks: list[dict[str, Any]], bits: str) -> None:
    for rank in both(ranks, "checkpoint"):
        result = rank[bits]
        assert bool(result["residuals"]) == (bits == "8")
        assert [a.tobytes() for a in result["through"]] == [a.tobytes() for a in result["resumed"]]
        assert result["steps"] == [6, 6]


@pytest.mark.parametrize("bits", [32, 8])
def test_switch_and_ring_and_any_mixture_give_the_same_parameters(ranks: list[dict[str, Any]], bits: int) -> None:
    results = [{name: rank[f"{name} {bits}"] for name in PATHS} for rank in both(ranks, "alternating")]
    for result in results:
        digests = {name: b"".join(a.tobytes() for a in result[name]["parameters"]) for name in PATHS}
        assert digests["switch"] == digests["ring"] == digests["both"]
        counts = {
            name: [result[name]["stats"][f"buckets_{path}"] for path in ("switch", "ring", "plain", "failed")]
            for name in digests
        }
        total = sum(counts["switch"])
        assert counts["switch"] == [total, 0, 0, 0]
        assert counts["ring"] == [0, total, 0, 0]
        assert sum(counts["both"][:2]) == total
        assert min(counts["both"][:2]) > CHANGES
        assert counts["both"][2:] == [0, 0]
        assert result["both"]["made"] == CHANGES
        assert result["both"]["stats"]["comm"]["promotions"] == CHANGES // 2
        assert result["both"]["stats"]["comm"]["fallbacks"] == {"operator": CHANGES // 2}
    digest = [[a.tobytes() for a in result["both"]["parameters"]] for result in results]
    assert digest[0] == digest[1]


def test_an_error_in_the_switch_path_shows_at_the_optimizer(ranks: list[dict[str, Any]]) -> None:
    for result in both(ranks, "evicted"):
        (error,) = result["errors"]
        assert error[0] == 1
        assert "Error" in error[1]
        assert re.search("operator|evict", error[2]), error
        assert all(result["finite"]), "no parameter was touched"
        assert result["usable"]


def test_data_loader_workers_forked_after_connect(ranks: list[dict[str, Any]]) -> None:
    results = both(ranks, "forked_data_loader")
    check_path(results, steps=6)
    for result in results:
        assert result["steps"] == 6
        assert len(result["pids"]) >= 2
        assert result["own"] not in result["pids"]
        assert result["error"] is None
