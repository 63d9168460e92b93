# SPDX-License-Identifier: Apache-2.0
"""Lanes, rounding, seeds and error feedback as the hook asks for them, on one rank with a communicator of its own."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from p4reduce.ddp import P4ReduceState, allreduce_hook
from p4reduce.ddp.numbers import HookSettings, Numbers, bucket_seed
from p4reduce.ddp.residuals import Residuals
from p4reduce.ddp.ways import JobWay
from p4reduce.errors import ConfigError, UsageError


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Lossy:
    """A job of one rank: keeps whole multiples of a quantum that follows the number of bits, rounded to nearest."""

    def __init__(self) -> None:
        self.world_size = 1
        self.calls: list[dict[str, Any]] = []
        self.sent: list[Any] = []

    def allreduce_async(
        self,
        array: Any,
        op: str = "sum",
        out: Any = None,
        *,
        lane_bits: int | None = None,
        rounding: str | None = None,
        seed: int = 0,
        residual: Any = None,
    ) -> Future[Any]:
        self.calls.append({"lane_bits": lane_bits, "rounding": rounding, "seed": seed, "residual": residual})
        assert lane_bits is not None
        given = array.copy()
        if lane_bits < 32:
            quantum = np.float32(2.0 ** (4 - lane_bits))
            out[:] = np.rint(given / quantum) * quantum
        if residual is not None:
            residual[:] = given - out
        self.sent.append(out.copy())
        future: Future[Any] = Future()
        future.set_result(out)
        return future

    def stats(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


class Bucket:
    """A bucket of some parameters, whose gradients are their numbers in order."""

    def __init__(self, parameters: list[torch.Tensor], values: torch.Tensor, index: int = 0, last: bool = True) -> None:
        self._parameters, self._values, self._index, self._last = parameters, values, index, last

    def buffer(self) -> torch.Tensor:
        return self._values

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


def begin(state: P4ReduceState, **options: Any) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.0002, **options)
    ddp.register_comm_hook(state, allreduce_hook)
    return ddp, torch.optim.AdamW(ddp.parameters(), lr=0.01)


def train(ddp: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        ddp(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()


def bits(module: torch.nn.Module) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in module.parameters()]


def test_every_bucket_of_every_step_has_a_seed_of_its_own() -> None:
    seeds = {bucket_seed(seed, step, index) for seed in range(4) for step in range(50) for index in range(20)}
    assert len(seeds) == 4 * 50 * 20
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    # Fixed: a checkpoint is worth nothing if the next version draws other numbers.
    assert bucket_seed(1, 2, 3) == 0xEE3BB459E9E297B


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, (32, "nearest", 0)),
        ({"rounding": "stochastic", "seed": 5}, (32, "stochastic", bucket_seed(5, 1, 0))),
        ({"lane_bits": 16}, (16, "nearest", 0)),
        ({"lane_bits": 16, "error_feedback": False}, (16, "stochastic", bucket_seed(0, 1, 0))),
        ({"lane_bits": 8, "error_feedback": False, "seed": 5}, (8, "stochastic", bucket_seed(5, 1, 0))),
        ({"lane_bits": 8, "rounding": "stochastic", "seed": 5}, (8, "stochastic", bucket_seed(5, 1, 0))),
        ({"lane_bits": 8, "rounding": "nearest"}, (8, "nearest", 0)),
        ({"lane_bits": 8, "exact_steps": 2}, (32, "nearest", 0)),
    ],
)
def test_what_the_communicator_is_asked_for(options: dict[str, Any], wanted: tuple[Any, ...]) -> None:
    comm = Lossy()
    with P4ReduceState(comm, **options) as state:
        ddp, optimizer = begin(state)
        train(ddp, optimizer, 0, 2)
    assert len(comm.calls) == 3, "one bucket in the first step, two in the second"
    call = comm.calls[1]
    assert (call["lane_bits"], call["rounding"], call["seed"]) == wanted
    coarse = options.get("lane_bits", 32) < 32 and not options.get("exact_steps")
    feeds_back = coarse and options.get("error_feedback", True)
    assert (call["residual"] is not None) == feeds_back


def test_exact_steps_end() -> None:
    comm = Lossy()
    with P4ReduceState(comm, lane_bits=8, exact_steps=2) as state:
        train(*begin(state, find_unused_parameters=False), 0, 4)
    assert [(call["lane_bits"], call["residual"] is not None) for call in comm.calls] == [
        *[(32, False)] * 3,
        *[(8, True)] * 4,
    ]


def test_residuals_hold_what_was_not_sent() -> None:
    parameters = [torch.zeros(3)]
    comm = Lossy()
    total, sent = np.zeros(3), np.zeros(3)
    with P4ReduceState(comm, lane_bits=8) as state:
        for step in range(20):
            values = torch.tensor([0.01, -0.02, 0.3]) * (step % 3)
            total += values.numpy()
            sent += allreduce_hook(state, Bucket(parameters, values)).wait().numpy()  # type: ignore[arg-type]
        (residual,) = state.state_dict()["residuals"]
    np.testing.assert_allclose(sent + residual.numpy(), total, atol=1e-5)
    assert np.abs(total - sent).max() <= 2.0**-5 + 1e-6, "never more than half a quantum behind"


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}])
def test_residuals_follow_their_parameters_through_the_rebuild(options: dict[str, Any]) -> None:
    """In every step, whatever the buckets: what is added to a gradient is what the last step did not send of it."""
    comm = Lossy()
    seen: list[int] = []
    with P4ReduceState(comm, lane_bits=8) as state:
        ddp = DistributedDataParallel(model(), bucket_cap_mb=0.0002, **options)
        before: dict[int, torch.Tensor] = {}

        def hook(state, bucket):  # type: ignore[no-untyped-def]
            parameters = bucket.parameters()
            seen.append(len(parameters))
            given = bucket.buffer().clone()
            future = allreduce_hook(state, bucket)
            reduced = future.wait()
            place = 0
            for parameter in parameters:
                part = slice(place, place := place + parameter.numel())
                wanted = given[part] + before.get(id(parameter), torch.zeros(parameter.numel()))
                quantum = 2.0**-4
                assert torch.equal(reduced[part], (wanted / quantum).round() * quantum)
                before[id(parameter)] = wanted - reduced[part]
            return future

        ddp.register_comm_hook(state, hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        train(ddp, optimizer, 0, 5)
        saved = state.state_dict()["residuals"]
    assert sorted(piece.numel() for piece in saved) == sorted(p.numel() for p in ddp.parameters())
    assert any(piece.any() for piece in saved)
    assert len(set(seen)) > 1 or options.get("find_unused_parameters")


@pytest.mark.parametrize("numbers", [{"lane_bits": 8}, {"lane_bits": 16, "exact_steps": 4}, {}])
def test_a_resumed_run_has_the_bits_of_one_that_went_on(numbers: dict[str, Any]) -> None:
    comms = Lossy(), Lossy()
    with P4ReduceState(comms[0], seed=7, **numbers) as state:
        ddp, optimizer = begin(state)
        train(ddp, optimizer, 0, 3)
        file = io.BytesIO()
        parts = {"model": ddp.module, "optimizer": optimizer, "hook": state}
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        count = len(comms[0].calls)
        train(ddp, optimizer, 3, 6)
        through = bits(ddp)
        assert state.stats()["steps"] == 6
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    with P4ReduceState(comms[1], seed=7, **numbers) as state:
        ddp, optimizer = begin(state)
        ddp(torch.ones(4, 8)).square().mean().backward()  # DDP builds its buckets after this one
        ddp.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state.load_state_dict(saved["hook"])
        train(ddp, optimizer, 3, 6)
        assert bits(ddp) == through
        assert state.stats()["steps"] == 6

    def plain(call: dict[str, Any]) -> dict[str, Any]:
        return {**call, "residual": call["residual"] is not None}

    assert [plain(call) for call in comms[1].calls[1:]] == [plain(call) for call in comms[0].calls[count:]]


def test_residuals_loaded_before_the_first_pass_wait_for_their_parameters() -> None:
    parameters = [torch.zeros(2), torch.zeros(3)]
    with P4ReduceState(Lossy(), lane_bits=8) as state:
        allreduce_hook(state, Bucket(parameters, torch.full((5,), 0.01))).wait()  # type: ignore[arg-type]
        saved = state.state_dict()
    assert torch.equal(torch.cat(saved["residuals"]), torch.full((5,), 0.01))
    with P4ReduceState(Lossy(), lane_bits=8) as state:
        state.load_state_dict(saved)
        assert torch.equal(torch.cat(state.state_dict()["residuals"]), torch.full((5,), 0.01))
        for index, parameter in enumerate(parameters):
            bucket = Bucket([parameter], torch.full((len(parameter),), 0.01), index, last=index == 1)
            allreduce_hook(state, bucket).wait()  # type: ignore[arg-type]
        assert torch.equal(torch.cat(state.state_dict()["residuals"]), torch.full((5,), 0.02))
        assert state.stats()["steps"] == 2


def test_another_ranks_residuals_are_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    with P4ReduceState(Lossy(), lane_bits=8) as state:
        allreduce_hook(state, Bucket([torch.zeros(2)], torch.full((2,), 0.01))).wait()  # type: ignore[arg-type]
        saved = {**state.state_dict(), "rank": 1, "world_size": 2}
        with caplog.at_level(logging.WARNING, "p4reduce.ddp"):
            state.load_state_dict(saved)
        assert "those of rank 1 of 2, and this is rank 0 of 1" in caplog.text
        assert not torch.cat(state.state_dict()["residuals"]).any()
        assert state.stats()["steps"] == 1


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with P4ReduceState(Lossy(), lane_bits=8, seed=1) as state:
        allreduce_hook(state, Bucket([torch.zeros(2)], torch.full((2,), 0.01))).wait()  # type: ignore[arg-type]
        saved = state.state_dict()
        with pytest.raises(UsageError, match="saved for another model"):
            state.load_state_dict({**saved, "residuals": [torch.ones(3)]})
        with pytest.raises(UsageError, match="version"):
            state.load_state_dict({"residuals": []})
        assert torch.equal(torch.cat(state.state_dict()["residuals"]), torch.full((2,), 0.01))
        with caplog.at_level(logging.WARNING, "p4reduce.ddp"):
            state.load_state_dict({**saved, "seed": 2})
        assert "saved with seed 2, loaded with seed 1" in caplog.text


def test_a_buffer_that_is_not_its_parameters_gradients_has_no_residual() -> None:
    residuals = Residuals()
    numbers = residuals.note(Bucket([torch.zeros(2)], torch.zeros(4)))  # type: ignore[arg-type]
    assert residuals.of(numbers, 4) is None
    twice = residuals.note(Bucket([torch.zeros(2, dtype=torch.complex64)], torch.zeros(4)))  # type: ignore[arg-type]
    flat = residuals.of(twice, 4)
    assert flat is not None
    assert flat.tolist() == [0.0] * 4
    assert residuals.norm() == 0.0


def test_half_precision_keeps_its_residual_in_float32() -> None:
    comm = Lossy()
    values = torch.full((2,), 0.01, dtype=torch.float16)
    parameter = torch.zeros(2, dtype=torch.float16)
    with P4ReduceState(comm, lane_bits=8) as state:
        for _ in range(6):
            allreduce_hook(state, Bucket([parameter], values.clone())).wait()  # type: ignore[arg-type]
        (residual,) = state.state_dict()["residuals"]
    assert residual.dtype == torch.float32
    sent = sum(float(array[0]) for array in comm.sent)
    assert sent + float(residual[0]) == pytest.approx(6 * float(values[0]), abs=1e-6)


def test_an_old_communicator_is_enough_for_32_bits_alone() -> None:
    class Old(Lossy):
        def allreduce_async(self, array: Any, op: str = "sum", out: Any = None) -> Future[Any]:  # type: ignore[override]
            future: Future[Any] = Future()
            future.set_result(out)
            return future

    with P4ReduceState(Old()) as state:
        train(*begin(state), 0, 2)
        assert state.error is None
    for options in ({"lane_bits": 8}, {"rounding": "stochastic"}, {"error_feedback": True}):
        with pytest.raises(UsageError, match="32 bits alone"):
            P4ReduceState(Old(), **options)


def test_too_many_ranks_for_so_few_bits() -> None:
    comm = Lossy()
    comm.world_size = 64
    with pytest.raises(UsageError, match="8-bit lanes are too narrow for 64 workers"):
        JobWay(comm, Numbers(8), timeout=1.0)
    JobWay(comm, Numbers(16), timeout=1.0).close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lane_bits": 12}, "lane_bits is 12: it must be 32, 16 or 8"),
        ({"rounding": "up"}, "rounding is 'up'"),
        ({"exact_steps": -1}, "exact_steps is -1"),
        ({"seed": 1 << 64}, "seed is"),
    ],
)
def test_numbers_that_make_no_sense(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        P4ReduceState(Lossy(), **options)


class TestSettings:
    def test_argument_environment_file_default(self, tmp_path: Path) -> None:
        file = tmp_path / "p4reduce.toml"
        file.write_text('[worker]\nlane_bits = 16\n[hook]\nexact_steps = 5\nseed = 9\ntrace = "t.json"\n')
        environ = {
            "P4REDUCE_CONFIG": str(file),
            "P4REDUCE_SEED": "0x10",
            "P4REDUCE_ERROR_FEEDBACK": "no",
            "P4REDUCE_ROUNDING": "nearest",
            "P4REDUCE_LOG_EVERY": "100",
        }
        found = HookSettings.resolve({"log_every": 7, "seed": None}, environ)
        assert found.numbers == Numbers(16, "nearest", False, 5, 16)
        assert (found.log_every, found.trace) == (7, "t.json")
        assert HookSettings.resolve({}, {}) == HookSettings(Numbers(), 0, None)
        assert HookSettings.resolve({}, {"P4REDUCE_LANE_BITS": "8"}).numbers.feeds_back

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("LANE_BITS", "12"),
            ("ROUNDING", "up"),
            ("ERROR_FEEDBACK", "maybe"),
            ("EXACT_STEPS", "-1"),
            ("SEED", "x"),
            ("SEED", str(1 << 64)),
            ("LOG_EVERY", "1.5"),
        ],
    )
    def test_a_bad_one_names_its_place(self, name: str, value: str) -> None:
        with pytest.raises(ConfigError, match=f"(?i){name}"):
            HookSettings.resolve({}, {f"P4REDUCE_{name}": value})

    @pytest.mark.parametrize(
        ("text", "message"), [("hook = 3", "must be a table"), ("[hook]\nlanes = 8", "unknown setting lanes")]
    )
    def test_a_bad_file(self, tmp_path: Path, text: str, message: str) -> None:
        file = tmp_path / "p4reduce.toml"
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            HookSettings.resolve({}, {"P4REDUCE_CONFIG": str(file)})
        with pytest.raises(ConfigError, match="cannot read"):
            HookSettings.resolve({}, {"P4REDUCE_CONFIG": str(tmp_path / "none.toml")})
