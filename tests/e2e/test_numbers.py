# SPDX-License-Identifier: Apache-2.0
"""Numbers of all kinds through whole jobs: lanes, rounding, residuals, integers, on both paths and between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest

import p4reduce
from p4reduce.errors import MismatchError, UsageError
from p4reduce.local_job import LocalJob
from p4reduce.proto import controller_pb2 as pb
from p4reduce.proto import controller_pb2_grpc
from p4reduce.quantize import BLOCKS, LaneFormat, block_exponents, dequantize, quantize
from p4reduce.rounding import Stochastic

Vector = npt.NDArray[np.float32]
WAIT = 60
SIZES = (1, 300, 5000, 40_000)


def each(members: Sequence[p4reduce.Communicator], call: Callable[[p4reduce.Communicator], Any]) -> list[Any]:
    """Call for every member at once; exceptions are results."""

    def attempt(member: p4reduce.Communicator) -> Any:
        try:
            return call(member)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(attempt, members, timeout=WAIT))


def data(rank: int, size: int) -> Vector:
    return (np.random.default_rng([rank, size]).standard_normal(size) * 10.0 ** (rank - 1)).astype(np.float32)


def expected(vectors: list[Vector], bits: int, seed: int | None, mean: bool) -> tuple[Vector, list[Vector]]:
    """Sum and residuals, from the quantizer alone."""
    fmt = LaneFormat(bits, len(vectors), BLOCKS[bits])
    agreed = np.max([block_exponents(x, fmt.block) for x in vectors], axis=0)
    total = np.zeros(len(vectors[0]), dtype=fmt.lane_type)
    residuals = []
    for rank, x in enumerate(vectors):
        lanes, left = np.empty_like(total), np.empty_like(x)
        quantize(x, agreed, fmt, lanes, stream=None if seed is None else Stochastic(seed, rank), residual=left)
        total += lanes
        residuals.append(left)
    out = np.empty_like(vectors[0])
    dequantize(total, agreed, fmt, out, mean)
    return out, residuals


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_all_formats_on_either_path(mode: str) -> None:
    with p4reduce.local(world_size=3, mode=mode, loss=0.0 if mode == "off" else 0.01) as members:
        for size in SIZES:
            vectors = [data(rank, size) for rank in range(3)]
            for bits in (32, 16, 8):
                for seed in (None, 77):
                    residuals = [np.empty_like(x) for x in vectors]
                    choice: dict[str, Any] = {} if seed is None else {"rounding": "stochastic", "seed": seed}
                    found = each(
                        members,
                        lambda one, v=vectors, r=residuals, b=bits, c=choice: one.allreduce(
                            v[one.rank], "mean", lane_bits=b, residual=r[one.rank], **c
                        ),
                    )
                    out, left = expected(vectors, bits, seed, mean=True)
                    assert [one.tobytes() for one in found] == [out.tobytes()] * 3
                    assert [one.tobytes() for one in residuals] == [one.tobytes() for one in left]
            halves = [x.astype(np.float16) for x in vectors]
            found = each(members, lambda one, h=halves: one.allreduce(h[one.rank], lane_bits=16))
            wide, _ = expected([x.astype(np.float32) for x in halves], 16, None, mean=False)
            assert [(one.dtype, one.tobytes()) for one in found] == [
                (np.float16, wide.astype(np.float16).tobytes())
            ] * 3
            whole = [np.arange(size, dtype=np.int32) * (rank + 1) - 5 for rank in range(3)]
            found = each(members, lambda one, w=whole: one.allreduce(w[one.rank], out=w[one.rank]))
            assert [one.tolist() for one in found] == [[6 * i - 15 for i in range(size)]] * 3
        assert {member.path for member in members} == {"ring" if mode == "off" else "switch"}


def test_the_jobs_own_width() -> None:
    vectors = [data(rank, 5000) for rank in range(2)]
    with p4reduce.local(world_size=2, lane_bits=8) as members:
        found = each(members, lambda one: one.allreduce(vectors[one.rank]))
        assert found[0].tobytes() == found[1].tobytes() == expected(vectors, 8, None, mean=False)[0].tobytes()
        found = each(members, lambda one: one.allreduce(vectors[one.rank], lane_bits=32))
        assert found[0].tobytes() == expected(vectors, 32, None, mean=False)[0].tobytes()
        # 5000 elements: one OR frame and one ADD frame in 8 bits, one and three in 32.
        assert members[0].stats()["core"]["frames_sent"] >= 6


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_integers_that_do_not_fit_raise_on_all_ranks_and_the_job_goes_on(mode: str) -> None:
    with p4reduce.local(world_size=3, mode=mode) as members:
        arrays = [np.full(700, 2**30, dtype=np.int32) for _ in range(3)]
        found = each(members, lambda one: one.allreduce(arrays[one.rank], out=arrays[one.rank]))
        assert all(isinstance(error, UsageError) for error in found)
        assert len({str(error) for error in found}) == 1
        assert f"the sum of element 0 over all ranks is {3 * 2**30}" in str(found[0])
        assert all((array == 2**30).all() for array in arrays)
        found = each(members, lambda one: one.allreduce(arrays[one.rank] // 4))
        assert [one.tolist() for one in found] == [[3 * 2**28] * 700] * 3


def test_ranks_that_want_different_lanes_are_told() -> None:
    with p4reduce.local(world_size=2) as members:
        found = each(members, lambda one: one.allreduce(np.ones(10, np.float32), lane_bits=16 if one.rank else 8))
        assert all(isinstance(error, MismatchError) for error in found)


def test_lanes_too_narrow_are_refused_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with p4reduce.local(world_size=1) as (one,):
        config = one._session.config
        monkeypatch.setattr(type(config), "lane_format", property(lambda _: LaneFormat(32, 64)))
        with pytest.raises(UsageError, match="8-bit lanes are too narrow for 64 workers"):
            one.allreduce(np.ones(10, np.float32), lane_bits=8)
        assert one.stats()["submitted"] == 0


def test_training_with_feedback_between_the_paths_ends_in_the_same_bits() -> None:
    """Steps of error feedback, once undisturbed, once while an operator moves the job to the ring and back."""

    def train(members: Sequence[p4reduce.Communicator], switchover: Callable[[int], None]) -> list[bytes]:
        residuals = [np.zeros(20_000, np.float32) for _ in members]
        parameters = np.zeros(20_000, np.float32)
        paths = set()
        for step in range(40):
            switchover(step)
            sent = [data(rank + step % 3, 20_000) - parameters + residuals[rank] for rank in range(len(members))]
            futures = [
                one.allreduce_async(
                    sent[one.rank], "mean", lane_bits=8, rounding="stochastic", seed=step, residual=residuals[one.rank]
                )
                for one in members
            ]
            means = [future.result(WAIT) for future in futures]
            assert len({mean.tobytes() for mean in means}) == 1
            parameters += np.float32(0.1) * means[0]
            paths |= {one.path for one in members}
        seen.append(paths)
        return [parameters.tobytes(), *[residual.tobytes() for residual in residuals]]

    seen: list[set[str]] = []
    with LocalJob(3) as job:
        undisturbed = train(job.members, lambda _: None)
    with LocalJob(3, mode="auto") as job, grpc.insecure_channel(job.controller.address) as channel:
        stub = controller_pb2_grpc.ControllerStub(channel)

        def move(step: int) -> None:
            if step in (5, 11, 23, 31):
                stub.SetMode(pb.SetModeRequest(job="local", mode="off" if step in (5, 23) else "auto"))

        moved = train(job.members, move)
    assert moved == undisturbed
    assert seen[0] == {"switch"}
    assert "ring" in seen[1]
