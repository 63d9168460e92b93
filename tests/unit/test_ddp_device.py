# SPDX-License-Identifier: Apache-2.0
"""What is done for buckets on a device, with CPU tensors, and with CUDA where there is any."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from p4reduce.ddp import P4ReduceState, allreduce_hook
from p4reduce.ddp import ways as ways_module
from p4reduce.ddp.device import DeviceQuantizer
from p4reduce.ddp.staging import Arrival, CudaDevice
from p4reduce.quantize import BLOCKS, LaneFormat, Quantizer, block_exponents
from p4reduce.rounding import Stochastic

ROOT = Path(__file__).resolve().parents[2]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FORMATS = [(bits, workers) for bits in (32, 16, 8) for workers in (1, 2, 3, 8) if bits > 8 or workers < 8]


def require(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def cases(block: int) -> Iterator[Any]:
    """float32 vectors that are hard on the arithmetic."""
    rng = np.random.default_rng(5)
    for count in (0, 1, 2, block - 1, block, block + 1, 5 * block + 17):
        yield rng.standard_normal(count).astype(np.float32)
    bits = rng.integers(0, 1 << 32, 20 * block, dtype=np.uint32)
    yield bits.view(np.float32)  # every exponent, infinities and NaN
    finite = bits & np.uint32(0xFF7FFFFF)
    yield finite.view(np.float32)
    yield (finite & np.uint32(0x807FFFFF)).view(np.float32)  # subnormal
    top = np.full(2 * block + 1, np.finfo(np.float32).max, dtype=np.float32)
    top[::3] *= -1
    yield top
    lone = np.full(3 * block, 1e-30, dtype=np.float32)
    lone[block + 1] = 1e30
    yield lone
    halves = (np.arange(4 * block) - 2 * block + 0.5).astype(np.float32)
    halves[::block] = 2.0**20
    yield halves
    yield np.zeros(block + 3, dtype=np.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("bits", "workers"), FORMATS)
@pytest.mark.parametrize("stochastic", [False, True])
def test_torch_gives_the_integers_of_numpy(device: str, bits: int, workers: int, stochastic: bool) -> None:
    require(device)
    fmt = LaneFormat(bits, workers, BLOCKS[bits])
    theirs, ours = Quantizer(fmt), DeviceQuantizer(fmt, device)
    rng = np.random.default_rng(bits + workers)
    for number, x in enumerate(cases(fmt.block)):
        stream = Stochastic(12345678901234567890 + number, workers - 1) if stochastic else None
        local = block_exponents(x, fmt.block)
        there = torch.from_numpy(x.copy()).to(device)
        assert ours.exponents(there).cpu().numpy().tobytes() == local.tobytes()
        # Other ranks have larger exponents in some blocks.
        agreed = np.maximum(local, np.where(rng.random(len(local)) < 0.3, rng.integers(0, 255, len(local)), 0))
        agreed = agreed.astype(np.uint8)
        lanes, residual = np.empty(len(x), fmt.lane_type), np.empty(len(x), np.float32)
        theirs.quantize(x, agreed, lanes, stream=stream, residual=residual)
        levels, left = torch.from_numpy(agreed).to(device), torch.empty_like(there)
        mine = ours.quantize(there, levels, stream, left)
        assert mine.cpu().numpy().tobytes() == lanes.tobytes()
        assert left.cpu().numpy().tobytes() == residual.tobytes()
        # Any sums that can come from the switch.
        sums = rng.integers(0, workers * 2 * fmt.bias + 1, len(x)).astype(fmt.lane_type)
        signed = torch.from_numpy(sums.view(f"i{sums.itemsize}")).to(device)
        for mean in (False, True):
            wanted = np.empty(len(x), np.float32)
            theirs.dequantize(sums, agreed, wanted, mean)
            found = ours.dequantize(signed, levels, mean).cpu().numpy()
            assert np.array_equal(np.isnan(found), np.isnan(wanted))
            known = ~np.isnan(wanted)
            assert found[known].tobytes() == wanted[known].tobytes()


class SlowDevice:
    """A device whose copies come to an end when the test lets them: what CUDA does, on the CPU."""

    immediate = False

    def __init__(self) -> None:
        self.fetched = threading.Event()
        self.log: list[str] = []
        self.inside = False

    def memory(self, count: int) -> torch.Tensor:
        return torch.full((count,), float("nan"))

    def fetch(self, buffer: torch.Tensor, host: torch.Tensor) -> Arrival:
        self.log.append("fetch")

        def arrival() -> None:
            assert self.fetched.wait(20.0)
            host.copy_(buffer)
            self.log.append("fetched")

        return arrival

    def put(self, host: torch.Tensor, buffer: torch.Tensor) -> Arrival:
        assert self.inside, "the copy back belongs to the stream that the future's waiters wait for"
        buffer.copy_(host)
        self.log.append("put")
        return lambda: self.log.append("reused")

    @contextmanager
    def context(self) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False


class Halves:
    """A job of one rank that halves, and notes in which order buckets came."""

    world_size = 1

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def allreduce_async(self, array: Any, op: str = "sum", out: Any = None) -> Future[Any]:
        self.sizes.append(array.size)
        out[:] = array / 2
        future: Future[Any] = Future()
        future.set_result(out)
        return future

    def stats(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


class Bucket:
    def __init__(self, buffer: torch.Tensor, index: int, last: bool) -> None:
        self._buffer, self._index, self._last = buffer, index, last

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last


@pytest.fixture
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
def test_buckets_of_a_device_are_fetched_beside_backward_and_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    device, comm = SlowDevice(), Halves()
    monkeypatch.setattr(ways_module, "device_of", lambda _: device)
    with P4ReduceState(comm) as state:
        for step in range(2):
            # float16 stands for what lies on the device; float32 in CPU memory must not overtake it.
            buffers = [torch.full((3,), 8.0, dtype=torch.float16), torch.full((2,), 6.0)]
            futures = [
                allreduce_hook(state, Bucket(buffer, index, index == 1))  # type: ignore[arg-type]
                for index, buffer in enumerate(buffers)
            ]
            if step == 0:
                assert device.log == ["fetch"], "the hook has returned and nothing has arrived"
                assert comm.sizes == []
                device.fetched.set()
            torch.futures.wait_all(futures)
            assert [buffer.tolist() for buffer in buffers] == [[4.0] * 3, [3.0] * 2]
        assert comm.sizes == [3, 2, 3, 2]
        assert (state.stats()["buckets_switch"], state.error) == (4, None)
    assert device.log.count("reused") == 1, "the vector was used again only after the copy from it"
    assert device.log.index("fetched") < device.log.index("put")


@pytest.mark.usefixtures("_one_rank")
def test_a_copy_that_fails_is_an_error_at_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(SlowDevice):
        def fetch(self, buffer: torch.Tensor, host: torch.Tensor) -> Arrival:
            def arrival() -> None:
                raise RuntimeError("an illegal memory access was encountered")

            return arrival

    monkeypatch.setattr(ways_module, "device_of", lambda _: Broken())
    with P4ReduceState(Halves()) as state:
        bucket = Bucket(torch.ones(3, dtype=torch.float16), 0, True)
        assert allreduce_hook(state, bucket).wait().isnan().all()  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="illegal memory access"):
            state.check()


@pytest.mark.usefixtures("_one_rank")
def test_a_device_that_takes_no_orders_any_more_leaves_nobody_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead(SlowDevice):
        @contextmanager
        def context(self) -> Iterator[None]:
            raise RuntimeError("CUDA error: unspecified launch failure")
            yield

    device = Dead()
    device.fetched.set()
    monkeypatch.setattr(ways_module, "device_of", lambda _: device)
    with P4ReduceState(Halves()) as state:
        for index in range(2):
            bucket = Bucket(torch.ones(3, dtype=torch.float16), index, index == 1)
            with pytest.raises(RuntimeError, match="unspecified launch failure"):
                allreduce_hook(state, bucket).wait()  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="unspecified launch failure"):
            state.check()


class Streams:
    """Stands in for torch.cuda where `CudaDevice` uses it: notes what is asked for, and in which order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.present: list[str] = ["backward's"]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        streams, empty = self, torch.empty

        class Event:
            def synchronize(self) -> None:
                streams.log.append("waited for")

        class Stream:
            def __init__(self, device: torch.device) -> None:
                self.name = "its own"

            def wait_stream(self, other: str) -> None:
                streams.log.append(f"its own waits for {other}")

            def record_event(self) -> Event:
                streams.log.append(f"event in {streams.present[-1]}")
                return Event()

        @contextmanager
        def stream(one: Stream) -> Iterator[None]:
            streams.present.append(one.name)
            yield
            streams.present.pop()

        def memory(*sizes: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            assert pin_memory
            return empty(*sizes, **options)

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams.present[-1])
        monkeypatch.setattr(torch, "empty", memory)


class Watched(torch.Tensor):
    """A bucket that notes what is done with it."""

    streams: Streams

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ == "copy_":
            # Where a half comes back, the copy from the host is the one before, which widened it on the device.
            on_device = isinstance(args[0], Watched) and args[0].dtype != torch.float32
            assert on_device or (kwargs or {}).get("non_blocking"), "a copy that waits"
            cls.streams.log.append(f"copy in {cls.streams.present[-1]}")
        return super().__torch_function__(func, types, args, kwargs or {})

    def record_stream(self, stream: Any) -> None:
        self.streams.log.append(f"kept for {stream.name}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_copies_of_a_cuda_device_are_in_its_own_stream(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The very code for CUDA, in CPU memory: every copy in the device's stream, between what it must come after and
    before."""
    streams = Watched.streams = Streams()
    buffer = torch.full((5,), 3.0, dtype=dtype).as_subclass(Watched)
    streams.install(monkeypatch)
    device = CudaDevice(torch.device("cpu"))
    host = device.memory(5)
    arrival = device.fetch(buffer, host)
    assert streams.log == [
        "its own waits for backward's", "copy in its own", "kept for its own", "event in its own"
    ]  # fmt: skip
    arrival()
    assert streams.log.pop() == "waited for"
    assert (host.dtype, host.tolist()) == (torch.float32, [3.0] * 5)
    host.fill_(1.5)
    streams.log.clear()
    with device.context():
        arrival = device.put(host, buffer)
    assert streams.log == ["copy in its own", "kept for its own", "event in its own"]
    assert buffer.tolist() == [1.5] * 5
    arrival()
    assert streams.log.pop() == "waited for"


@pytest.mark.slow
def test_the_script_for_gpus_runs_without_one(tmp_path: Path) -> None:
    """On a machine with a GPU nobody should have to mend it first."""
    command = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), "--device", "cpu", "--json", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out").read_text())
    assert found["device"] == "CPU"
    worst = {name: value for name, value in found.items() if name.endswith("worst gradient against plain DDP")}
    assert len(worst) == 4
    assert sum(name.endswith("GB/s") for name in found) == 10


@pytest.mark.gpu
@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_buckets_on_cuda(dtype: torch.dtype) -> None:
    require("cuda")
    with P4ReduceState(Halves()) as state:
        for step in range(4):
            buffer = torch.full((100_000,), 8.0 + step, dtype=dtype, device="cuda")
            buffer += 2  # on the current stream, which the copy must wait for
            reduced = allreduce_hook(state, Bucket(buffer, 0, True)).wait()  # type: ignore[arg-type]
            assert (reduced == 5 + step / 2).all()
        state.check()
        assert state.stats()["buckets_switch"] == 4
