# SPDX-License-Identifier: Apache-2.0
"""P4ReduceState and the hooks in one process: bookkeeping, errors, copies, what from_env passes on."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.ddp_single import FakeBucket, FakeCommunicator, backward, model, wrapped
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

import p4reduce
from p4reduce.ddp import DeferredState, P4ReduceState, allreduce_hook, launch, noop_hook
from p4reduce.ddp import state as state_module
from p4reduce.ddp.staging import HostDevice, Scratch, arrived
from p4reduce.ddp.ways import PlainWay
from p4reduce.errors import ConfigError, JobError, MismatchError, StalledError, UsageError


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_float32_goes_to_the_communicator_and_is_counted() -> None:
    comm = FakeCommunicator()
    with P4ReduceState(comm) as state:
        ddp = wrapped(state)
        for _ in range(3):
            backward(ddp)
        parameters = sum(p.numel() for p in ddp.parameters())
        stats = state.stats()
    assert stats["steps"] == 3
    assert stats["buckets_switch"] == len(comm.calls) == 1 + 2 + 2
    assert stats["buckets_ring"] == stats["buckets_plain"] == stats["buckets_failed"] == 0
    assert stats["bytes_switch"] == 3 * 4 * parameters == 4 * sum(size for size, _ in comm.calls)
    assert {op for _, op in comm.calls} == {"mean"}
    assert stats["comm"] == {"frames_sent": 5}
    assert stats["error"] is None
    assert stats["reduce_seconds"] >= stats["wait_seconds"] > 0
    assert stats["submit_seconds"] > 0


def test_float32_is_reduced_in_the_buckets_own_memory() -> None:
    comm = FakeCommunicator()
    with P4ReduceState(comm) as state:
        buffer = torch.ones(1000)
        assert allreduce_hook(state, FakeBucket(buffer)).wait() is buffer  # type: ignore[arg-type]
    assert comm.memory == [(buffer.data_ptr(), 4000)]


def test_mode_off_needs_no_communicator() -> None:
    with P4ReduceState(None, mode="off") as state:
        backward(wrapped(state))
        assert state.stats()["buckets_plain"] == 1
        assert state.stats()["comm"] == {}


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_what_no_lane_holds_is_summed_as_it_is(dtype: torch.dtype) -> None:
    comm = FakeCommunicator()
    with P4ReduceState(comm) as state:
        buffer = torch.arange(5).to(dtype)
        result = allreduce_hook(state, FakeBucket(buffer)).wait()  # type: ignore[arg-type]
        assert result is buffer
        assert torch.equal(buffer, torch.arange(5).to(dtype))
        assert state.stats()["buckets_plain"] == 1
        assert state.stats()["bytes_plain"] == 5 * buffer.element_size()
    assert comm.calls == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_goes_to_the_communicator_as_float32(dtype: torch.dtype) -> None:
    comm = FakeCommunicator()
    with P4ReduceState(comm) as state:
        buffer = torch.randn(5000, generator=torch.Generator().manual_seed(0)).to(dtype)
        before = buffer.clone()
        for _ in range(3):
            assert allreduce_hook(state, FakeBucket(buffer)).wait() is buffer  # type: ignore[arg-type]
        assert torch.equal(buffer, before)
        stats = state.stats()
    assert (stats["buckets_switch"], stats["bytes_switch"]) == (3, 3 * 2 * 5000)
    assert len({address for address, _ in comm.memory}) == 1, "one vector, used again"


def test_a_mean_beyond_float16_becomes_infinite_and_is_counted() -> None:
    class Doubles(FakeCommunicator):
        def allreduce_async(self, array: Any, op: str = "sum", out: Any = None) -> Future[Any]:
            out *= 2
            return super().allreduce_async(array, op, out)

    with P4ReduceState(Doubles()) as state:
        buffer = torch.tensor([1.0, 40000.0, -60000.0], dtype=torch.float16)
        reduced = allreduce_hook(state, FakeBucket(buffer)).wait()  # type: ignore[arg-type]
        assert reduced.tolist() == [2.0, float("inf"), float("-inf")]
        assert state.stats()["overflows"] == 2


def test_vectors_of_old_buckets_are_forgotten() -> None:
    """DDP builds its buckets anew: what fitted the old ones is freed a step later."""
    scratch = Scratch(HostDevice())
    held = []
    for sizes in ((10,), (4, 6), (4, 6), (4, 6)):
        scratch.next_step()
        taken = [scratch.take(size) for size in sizes]
        for memory in taken:
            scratch.give(memory, arrived)
        held.append(scratch.held)
    assert held == [10, 20, 10, 10]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.uint8])
def test_what_has_no_mean_is_refused_at_the_optimizer(dtype: torch.dtype) -> None:
    with P4ReduceState(FakeCommunicator()) as state:
        buffer = torch.ones(4).to(dtype)
        assert not allreduce_hook(state, FakeBucket(buffer)).wait().any()  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=f"a bucket of {dtype} on cpu"):
            torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
        assert state.stats()["buckets_failed"] == 1


def test_without_a_job_of_the_same_size_everything_is_plain(caplog: pytest.LogCaptureFixture) -> None:
    comm = FakeCommunicator(world_size=2)
    with caplog.at_level(logging.WARNING, "p4reduce.ddp"), P4ReduceState(comm) as state:
        backward(wrapped(state))
        assert state.stats()["buckets_plain"] == 1
    assert comm.calls == []
    assert "the job has 2 ranks but the process group 1" in caplog.text


def test_a_failed_bucket_lets_backward_return_and_stops_the_optimizer() -> None:
    error = MismatchError("the ranks disagree", job="train", bucket=3, ranks=(1,))
    comm = FakeCommunicator({2: error})
    with P4ReduceState(comm) as state:
        ddp = wrapped(state)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        backward(ddp)
        optimizer.step()
        before = [p.detach().clone() for p in ddp.parameters()]
        backward(ddp)
        assert comm.fired == 1
        assert state.error is error
        gradients = [p.grad for p in ddp.parameters()]
        assert sum(bool(g is not None and g.isnan().all()) for g in gradients) == 2, "exactly one layer's bucket failed"
        for attempt in (optimizer.step, state.check, optimizer.step):
            with pytest.raises(MismatchError) as caught:
                attempt()
            assert caught.value is error
        assert all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
        assert state.stats()["error"] == "MismatchError: the ranks disagree"


def test_an_ignored_error_is_raised_by_the_next_backward_pass_and_not_before() -> None:
    error = JobError("gone")
    comm = FakeCommunicator({0: error})
    with P4ReduceState(comm) as state:
        first = allreduce_hook(state, FakeBucket(torch.ones(3), last=False))  # type: ignore[arg-type]
        assert first.wait().isnan().all()
        second = allreduce_hook(state, FakeBucket(torch.ones(3), last=True))  # type: ignore[arg-type]
        assert torch.equal(second.wait(), torch.ones(3))
        with pytest.raises(JobError) as caught:
            allreduce_hook(state, FakeBucket(torch.ones(3)))  # type: ignore[arg-type]
        assert caught.value is error
    assert len(comm.calls) == 2


def test_ddp_survives_an_error_that_was_raised_at_the_optimizer() -> None:
    with P4ReduceState(FakeCommunicator({0: JobError("gone")})) as state:
        ddp = wrapped(state)
        backward(ddp)
    # A reducer left in the middle of a pass would refuse the next forward or backward.
    with ddp.no_sync():
        backward(ddp)
    ddp.zero_grad()
    with ddp.no_sync():
        backward(ddp)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in ddp.parameters())


def test_an_error_of_the_call_itself_is_treated_alike() -> None:
    class Refuses(FakeCommunicator):
        def allreduce_async(self, array: Any, op: str = "sum", out: Any = None) -> Future[Any]:
            self.fired += 1
            raise UsageError("closed")

    comm = Refuses()
    with P4ReduceState(comm) as state:
        buffer = torch.ones(4)
        assert allreduce_hook(state, FakeBucket(buffer)).wait().isnan().all()  # type: ignore[arg-type]
        assert comm.fired == 1
        with pytest.raises(UsageError, match="closed"):
            state.check()


class FailedWork:
    """A collective that has failed."""

    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer")

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_exception(RuntimeError("Connection closed by peer"))
        return future


@pytest.mark.parametrize("at_once", [False, True])
def test_an_error_of_torch_distributed_is_treated_alike(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(*arguments: Any, **options: Any) -> FailedWork:
        if at_once:
            raise RuntimeError("Connection closed by peer")
        return FailedWork()

    with P4ReduceState(None, mode="off") as state:
        ddp = wrapped(state)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with monkeypatch.context() as patch:
            patch.setattr(PlainWay, "_all_reduce", all_reduce)
            backward(ddp)
        assert all(p.grad is not None and p.grad.isnan().all() for p in ddp.parameters())
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            optimizer.step()
        assert state.stats()["buckets_failed"] == 1
    with ddp.no_sync():
        ddp.zero_grad()
        backward(ddp)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in ddp.parameters())


def test_a_bucket_outside_of_backward_is_followed_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As join() shows them to the hook: there is no end of backward() to wait for."""
    with P4ReduceState(None, mode="off") as state:
        assert allreduce_hook(state, FakeBucket(torch.ones(3))).wait().tolist() == [1.0] * 3  # type: ignore[arg-type]
        monkeypatch.setattr(PlainWay, "_all_reduce", lambda *_: FailedWork())
        assert allreduce_hook(state, FakeBucket(torch.ones(3))).wait().isnan().all()  # type: ignore[arg-type]
        assert (state.stats()["buckets_plain"], state.stats()["buckets_failed"]) == (1, 1)
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            state.check()


def test_the_first_error_wins() -> None:
    first, second = JobError("first"), JobError("second")
    comm = FakeCommunicator({0: first, 1: second})
    with P4ReduceState(comm) as state:
        for last in (False, True):
            allreduce_hook(state, FakeBucket(torch.ones(2), last=last)).wait()  # type: ignore[arg-type]
        assert comm.fired == 2
        assert state.error is first


def test_a_bucket_without_an_answer_ends_at_the_timeout() -> None:
    class Silent(FakeCommunicator):
        def allreduce_async(self, array: Any, op: str = "sum", out: Any = None) -> Future[Any]:
            return Future()

    with P4ReduceState(Silent(), timeout=0.05) as state:
        assert allreduce_hook(state, FakeBucket(torch.ones(4))).wait().isnan().all()  # type: ignore[arg-type]
        with pytest.raises(StalledError, match="with 4 elements within"):
            state.check()


def test_futures_complete_in_the_order_of_submission() -> None:
    waiting: list[Future[Any]] = []

    class Held(FakeCommunicator):
        def allreduce_async(self, array: Any, op: str = "sum", out: Any = None) -> Future[Any]:
            waiting.append(Future())
            return waiting[-1]

    order: list[int] = []
    with P4ReduceState(Held()) as state:
        futures = [
            allreduce_hook(state, FakeBucket(torch.ones(1), last=n == 2))  # type: ignore[arg-type]
            for n in range(3)
        ]
        for n, future in enumerate(futures):
            future.add_done_callback(lambda _, n=n: order.append(n))  # type: ignore[misc]
        for held in reversed(waiting):
            held.set_result(np.ones(1, np.float32))
        torch.futures.wait_all(futures)
    assert order == [0, 1, 2]


def test_nothing_stays_behind_after_close() -> None:
    from torch.optim.optimizer import _global_optimizer_pre_hooks

    threads = threading.active_count()
    hooks = len(_global_optimizer_pre_hooks)
    comm = FakeCommunicator({0: JobError("gone")})
    state = P4ReduceState(comm, own_comm=True)
    ddp = wrapped(state)
    assert len(_global_optimizer_pre_hooks) == hooks + 1
    backward(ddp)
    state.close()
    state.close()
    assert comm.closed == 1
    assert threading.active_count() == threads
    assert len(_global_optimizer_pre_hooks) == hooks
    torch.optim.SGD(ddp.parameters(), lr=0.0).step()
    with pytest.raises(UsageError, match="closed"):
        allreduce_hook(state, FakeBucket(torch.ones(1)))  # type: ignore[arg-type]


def test_a_forgotten_state_ends_its_thread() -> None:
    threads = threading.active_count()
    state = P4ReduceState(FakeCommunicator())
    gone = weakref.ref(state)
    assert threading.active_count() == threads + 1
    del state
    gc.collect()
    assert gone() is None
    assert threading.active_count() == threads


def test_the_callers_communicator_stays_open() -> None:
    comm = FakeCommunicator()
    P4ReduceState(comm).close()
    assert comm.closed == 0


def test_pickling_leaves_the_communicator_behind_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with P4ReduceState(FakeCommunicator(), timeout=7.0) as state, caplog.at_level(logging.WARNING, "p4reduce.ddp"):
        other = pickle.loads(pickle.dumps(state))
    assert other.timeout == 7.0
    assert other.stats()["comm"] == {}
    assert "left out of a saved or copied" in caplog.text
    assert "make a new one" in caplog.text
    with pytest.raises(UsageError, match="copy"):
        allreduce_hook(other, FakeBucket(torch.ones(1)))  # type: ignore[arg-type]
    other.close()


def test_deepcopy_says_that_the_copy_has_no_hook() -> None:
    with P4ReduceState(FakeCommunicator(), timeout=7.0) as state:
        with pytest.warns(RuntimeWarning, match="has no communication hook"):
            other, again = copy.deepcopy([state, state])
        assert other is again
        assert other.timeout == 7.0
        with pytest.raises(UsageError, match="copy"):
            allreduce_hook(other, FakeBucket(torch.ones(1)))  # type: ignore[arg-type]
        other.close()
        assert allreduce_hook(state, FakeBucket(torch.ones(1))).wait().isfinite()  # type: ignore[arg-type]


def test_single_gradients_of_torch_compile_are_refused() -> None:
    with P4ReduceState(FakeCommunicator()) as state, pytest.raises(UsageError, match="optimize_ddp"):
        allreduce_hook(state, (torch.ones(1), torch.nn.Parameter(torch.ones(1))))  # type: ignore[arg-type]


def test_noop_hook_leaves_the_local_gradients() -> None:
    buffer = torch.arange(3.0)
    assert noop_hook(None, FakeBucket(buffer)).wait() is buffer  # type: ignore[arg-type]
    ddp = DistributedDataParallel(model())
    ddp.register_comm_hook(None, noop_hook)
    backward(ddp)
    plain = model()
    backward(plain)
    assert all(
        torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
        for a, b in zip(ddp.parameters(), plain.parameters(), strict=True)
    )


def test_construction_errors() -> None:
    with pytest.raises(UsageError, match="communicator"):
        P4ReduceState(None)
    with pytest.raises(ConfigError, match="argument mode is 'fast'"):
        P4ReduceState.from_env(mode="fast")


def test_without_torch_distributed_it_says_what_to_call() -> None:
    dist.destroy_process_group()
    try:
        with pytest.raises(UsageError, match="init_process_group"):
            P4ReduceState(FakeCommunicator())
    finally:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


class TestFromEnv:
    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []

        def connect(**arguments: Any) -> FakeCommunicator:
            made.append(arguments)
            return FakeCommunicator()

        monkeypatch.setattr(p4reduce, "connect", connect, raising=False)
        for name in (
            "P4REDUCE_CONFIG",
            "P4REDUCE_MODE",
            "P4REDUCE_JOB",
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_RESTART_COUNT",
        ):
            monkeypatch.delenv(name, raising=False)
        return made

    def test_without_a_run_id_every_state_gets_a_new_name(
        self, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        P4ReduceState.from_env().close()
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        P4ReduceState.from_env().close()
        jobs = [call["job"] for call in calls]
        assert len(set(jobs)) == 2
        assert all(job.startswith("train-") for job in jobs)
        assert [(call["rank"], call["world_size"]) for call in calls] == [(0, 1)] * 2

    def test_a_run_id_names_the_job_the_same_after_a_restart(
        self, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "nightly")
        for _ in range(2):
            # A restarted worker is a new process: it counts its states from the start again.
            monkeypatch.setattr(launch, "_names_given", itertools.count())
            P4ReduceState.from_env().close()
            P4ReduceState.from_env().close()
        assert [call["job"] for call in calls] == ["nightly", "nightly-1"] * 2

    def test_restarts_are_those_of_the_host(self, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
        """Each host counts once, whichever of its ranks are there; a number that somebody chose is not touched."""
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
        P4ReduceState.from_env().close()
        monkeypatch.setenv("LOCAL_RANK", "1")
        P4ReduceState.from_env().close()
        P4ReduceState.from_env(incarnation=7).close()
        monkeypatch.setenv("P4REDUCE_INCARNATION", "5")
        P4ReduceState.from_env().close()
        assert [call.get("incarnation") for call in calls] == [2, 2, 7, None]

    def test_a_job_name_somebody_chose_is_kept(
        self, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("P4REDUCE_JOB", "from-env")
        P4ReduceState.from_env(controller="127.0.0.1:1").close()
        P4ReduceState.from_env(job="from-argument").close()
        monkeypatch.delenv("P4REDUCE_JOB")
        settings = tmp_path / "p4reduce.toml"
        settings.write_text('[worker]\njob = "from-file"\n')
        monkeypatch.setenv("P4REDUCE_CONFIG", str(settings))
        P4ReduceState.from_env().close()
        # What is not passed on, connect() finds for itself.
        assert [call.get("job") for call in calls] == [None, "from-argument", None]
        assert calls[0]["controller"] == "127.0.0.1:1"
        assert "controller" not in calls[1]

    def test_mode_off_connects_to_nothing(self, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("P4REDUCE_MODE", "off")
        with P4ReduceState.from_env() as state:
            backward(wrapped(state))
            assert state.stats()["buckets_plain"] == 1
        assert calls == []
        with P4ReduceState.from_env(mode="auto") as state:
            assert state.mode == "auto"
        assert len(calls) == 1

    def test_a_bad_mode_names_its_source(self, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("P4REDUCE_MODE", "never")
        with pytest.raises(ConfigError, match="environment variable P4REDUCE_MODE is 'never'"):
            P4ReduceState.from_env()

    def test_a_failed_connect_leaves_no_group(self, monkeypatch: pytest.MonkeyPatch) -> None:
        groups: list[Any] = []
        real = state_module.new_plain_group  # type: ignore[attr-defined]

        def remember(*arguments: Any) -> Any:
            groups.append(real(*arguments))
            return groups[-1]

        def connect(**arguments: Any) -> FakeCommunicator:
            raise ConfigError("no controller")

        monkeypatch.setattr(state_module, "new_plain_group", remember)
        monkeypatch.setattr(p4reduce, "connect", connect, raising=False)
        with pytest.raises(ConfigError, match="no controller"):
            P4ReduceState.from_env()
        assert len(groups) == 1
        with pytest.raises((KeyError, ValueError)):
            dist.get_process_group_ranks(groups[0])


def test_without_torch_the_import_names_the_extra() -> None:
    script = "import sys; sys.modules['torch'] = None; import p4reduce.ddp"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'p4reduce[torch]'" in done.stderr


class TestDeferred:
    @pytest.fixture
    def made(self, monkeypatch: pytest.MonkeyPatch) -> list[P4ReduceState]:
        states: list[P4ReduceState] = []

        def from_env(**arguments: Any) -> P4ReduceState:
            states.append(P4ReduceState(FakeCommunicator(), **arguments))
            return states[-1]

        monkeypatch.setattr(P4ReduceState, "from_env", from_env)
        return states

    def test_it_joins_at_the_first_bucket(self, made: list[P4ReduceState]) -> None:
        with DeferredState(timeout=9.0) as deferred:
            ddp = DistributedDataParallel(model())
            ddp.register_comm_hook(deferred, allreduce_hook)
            assert (made, deferred.state, deferred.stats(), deferred.error) == ([], None, {}, None)
            deferred.check()
            with pytest.raises(UsageError, match="nothing to save"):
                deferred.state_dict()
            for _ in range(2):
                backward(ddp)
            assert made == [deferred.state]
            assert made[0].timeout == 9.0
            assert deferred.stats()["steps"] == deferred.state_dict()["steps"] == 2
            saved = deferred.state_dict()
        with pytest.raises(UsageError, match="closed"):
            backward(ddp)
        with DeferredState() as deferred:
            deferred.load_state_dict(saved)
            assert deferred.state_dict() == saved
            allreduce_hook(deferred, FakeBucket(torch.ones(1))).wait()  # type: ignore[arg-type]
            assert deferred.stats()["steps"] == 3
            deferred.load_state_dict(saved)
            assert deferred.stats()["steps"] == 2

    def test_closed_before_the_first_bucket_it_joins_nothing(self, made: list[P4ReduceState]) -> None:
        deferred = DeferredState()
        deferred.close()
        with pytest.raises(UsageError, match="closed"):
            allreduce_hook(deferred, FakeBucket(torch.ones(1)))  # type: ignore[arg-type]
        assert made == []

    def test_a_copy_joins_a_job_of_its_own(self, made: list[P4ReduceState], caplog: pytest.LogCaptureFixture) -> None:
        with DeferredState() as deferred:
            allreduce_hook(deferred, FakeBucket(torch.ones(1))).wait()  # type: ignore[arg-type]
            with caplog.at_level(logging.WARNING, "p4reduce.ddp"), pickle.loads(pickle.dumps(deferred)) as other:
                allreduce_hook(other, FakeBucket(torch.ones(1))).wait()  # type: ignore[arg-type]
        assert len(made) == 2
        assert "joins a job of its own" in caplog.text
