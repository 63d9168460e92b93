#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check everything of the hook that needs a GPU, on a machine with one: about three minutes, one line a check.

Usage: gpu_check.py [--device cuda|cpu] [--json FILE]

1. Quantizing on the device gives numpy's integers, numbers and residuals, for 2 and 3 workers; how fast, against a copy
   on the device.
2. Two ranks on the one GPU train through the embedded switch, in float32, float16 and bfloat16 (the process group is
   gloo): gradients as plain DDP's, ranks equal bit by bit, the same bits on the switch path and on the ring path; a NaN
   on one rank makes a GradScaler skip the step on both.
3. The same in float32 with NCCL as the process group of two ranks on one GPU (NCCL_HOSTID makes NCCL take them for two
   machines; sockets on lo), and the hook in mode off, whose buckets NCCL sums.
4. The NCCL ring of two ranks sums right, and a job that has it as its ring path ends in the bits of the switch path.

With --device cpu the script itself is tried, without a GPU: gloo takes NCCL's place, and the speeds mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import p4reduce
from p4reduce.ddp import P4ReduceState, allreduce_hook
from p4reduce.ddp.device import DeviceQuantizer
from p4reduce.ddp.ring import TorchRing
from p4reduce.proto import controller_pb2, controller_pb2_grpc
from p4reduce.quantize import BLOCKS, LaneFormat, Quantizer, block_exponents
from p4reduce.rounding import Stochastic

WORLD = 2
TIMEOUT = 60.0
STEPS = 5
PATHS = ("switch", "ring", "plain")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Check what needs a GPU.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", metavar="FILE", help="write what was found as JSON")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=("hook", "nccl"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser


# -- 1: quantization --


def _seconds(device: str, call: Callable[[], Any]) -> float:
    """Median seconds of one call."""
    repeats = 20 if device == "cuda" else 1
    call()
    taken = []
    for _ in range(repeats):
        _finish(device)
        started = time.perf_counter()
        call()
        _finish(device)
        taken.append(time.perf_counter() - started)
    return sorted(taken)[repeats // 2]


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def quantization(device: str) -> dict[str, Any]:
    """Bits compared with numpy's on numbers of every exponent; GB/s of gradients, on a GPU of 16 Mi normal ones."""
    found: dict[str, Any] = {}
    many = torch.randn(1 << 24 if device == "cuda" else 1 << 16, device=device)
    copy = torch.empty_like(many)
    size = many.numel() * 4 / 1e9
    found["copy GB/s"] = round(size / _seconds(device, lambda: copy.copy_(many)), 2)
    for bits in (32, 16, 8):
        for workers in (2, 3):  # 3, since not every division by a power of two tells
            _compare(device, LaneFormat(bits, workers, BLOCKS[bits]))
        ours = DeviceQuantizer(LaneFormat(bits, WORLD, BLOCKS[bits]), device)
        agreed = ours.exponents(many)
        sums = ours.quantize(many, agreed)
        calls: dict[str, Callable[[], Any]] = {
            "exponents": lambda ours=ours: ours.exponents(many),  # type: ignore[misc]
            "quantize": lambda ours=ours, agreed=agreed: ours.quantize(many, agreed),  # type: ignore[misc]
            "dequantize": lambda ours=ours, s=sums, agreed=agreed: ours.dequantize(s, agreed, True),  # type: ignore[misc]
        }
        for name, call in calls.items():
            found[f"{name} {bits} bits GB/s"] = round(size / _seconds(device, call), 2)
    return found


def _compare(device: str, fmt: LaneFormat) -> None:
    ours, theirs = DeviceQuantizer(fmt, device), Quantizer(fmt)
    count = 1 << 20 if device == "cuda" else 1 << 16
    bits = np.random.default_rng(fmt.workers).integers(0, 1 << 32, count, dtype=np.uint32)
    # Bits at random leave hardly a block without an infinity or a NaN: the first half has none.
    bits[: count // 2] &= np.uint32(0xFF7FFFFF)
    wild = bits.view(np.float32)
    levels = block_exponents(wild, fmt.block)
    there, agreed = torch.from_numpy(wild.copy()).to(device), torch.from_numpy(levels).to(device)
    _require(ours.exponents(there).cpu().numpy().tobytes() == levels.tobytes(), f"{fmt}: other exponents")
    for stream in (None, Stochastic(7, 1)):
        lanes = np.empty(len(wild), fmt.lane_type)
        left, back = np.empty(len(wild), np.float32), np.empty(len(wild), np.float32)
        theirs.quantize(wild, levels, lanes, stream=stream, residual=left)
        rest = torch.empty_like(there)
        mine = ours.quantize(there, agreed, stream, rest)
        _require(mine.cpu().numpy().tobytes() == lanes.tobytes(), f"{fmt}, {stream}: other integers")
        _require(rest.cpu().numpy().tobytes() == left.tobytes(), f"{fmt}, {stream}: other residuals")
        for mean in (False, True):
            theirs.dequantize(lanes, levels, back, mean)
            result = ours.dequantize(mine, agreed, mean).cpu().numpy()
            _require(np.array_equal(result, back, equal_nan=True), f"{fmt}, mean {mean}: other numbers")


# -- 2 to 4: one rank --


def _model(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 700, dtype=dtype), torch.nn.Tanh(), torch.nn.Linear(700, 300, dtype=dtype)
    )


def _data(step: int, options: argparse.Namespace, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + options.rank))
    return x.to(options.device, dtype)


def _train(ddp: torch.nn.Module, options: argparse.Namespace, dtype: torch.dtype) -> list[torch.Tensor]:
    """Gradients of the first step on the host; parameters move on."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    first: list[torch.Tensor] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        (ddp(_data(step, options, dtype)) - 1).square().mean().backward()
        first = first or [p.grad.detach().float().cpu().clone() for p in ddp.parameters() if p.grad is not None]
        optimizer.step()
    return first


def _wrap(dtype: torch.dtype, device: str) -> DistributedDataParallel:
    model = _model(dtype).to(device)
    return DistributedDataParallel(model, device_ids=[0] if device == "cuda" else None, bucket_cap_mb=0.2)


def _hash(ddp: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in ddp.parameters():
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _hooked(
    state: P4ReduceState, plain: list[torch.Tensor], options: argparse.Namespace, dtype: torch.dtype
) -> dict[str, Any]:
    """Train through a state's hook; `plain`: the first step's gradients without."""
    ddp = _wrap(dtype, options.device)
    ddp.register_comm_hook(state, allreduce_hook)
    hooked = _train(ddp, options, dtype)
    state.check()
    worst = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in zip(hooked, plain, strict=True))
    found = {"worst": worst, "hash": _hash(ddp), "stats": state.stats()}
    return found | {"skipped": _skips(ddp, options, dtype)}


def _skips(ddp: torch.nn.Module, options: argparse.Namespace, dtype: torch.dtype) -> bool:
    """Whether a NaN on rank 1 makes the GradScaler skip the step here."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(options.device, init_scale=4.0)
    before = _hash(ddp)
    x = _data(STEPS, options, dtype)
    if options.rank == 1:
        x[0, 0] = float("nan")
    scaler.scale(ddp(x).float().square().mean()).backward()
    if dtype != torch.float32:
        # The scaler is for float32 gradients; this is what it looks at.
        return all(bool(p.grad.isnan().all()) for p in ddp.parameters() if p.grad is not None)
    scaler.step(optimizer)
    scaler.update()
    return _hash(ddp) == before and scaler.get_scale() == 2.0


def _move_to(path: str, job: str, state: P4ReduceState, rank: int) -> None:
    """Wait until the job takes this path, which for the ring path rank 0 asks for."""
    import grpc

    if path == "ring" and rank == 0:
        with grpc.insecure_channel(os.environ["P4REDUCE_CONTROLLER"]) as channel:
            stub = controller_pb2_grpc.ControllerStub(channel)  # type: ignore[no-untyped-call]
            stub.SetMode(controller_pb2.SetModeRequest(job=job, mode="off"), timeout=10)
    end = time.monotonic() + TIMEOUT
    while state.stats()["comm"]["path"] != path:
        if time.monotonic() > end:
            raise SystemExit(f"FAILED: job {job} did not take the {path} path within {TIMEOUT:g} s")
        time.sleep(0.01)
    dist.barrier()


def _address(options: argparse.Namespace) -> str:
    return f"127.0.1.{options.rank + 1}"


def hook_rank(options: argparse.Namespace) -> dict[str, Any]:
    """Train with plain DDP, on the switch path and on the ring path; with NCCL also in mode off."""
    found: dict[str, Any] = {}
    nccl = options.part == "nccl"
    for dtype in (torch.float32,) if nccl else (torch.float32, torch.float16, torch.bfloat16):
        plain = _train(_wrap(dtype, options.device), options, dtype)
        for path in ("switch", "ring"):
            name = f"{path}-{dtype}".replace("torch.", "")
            job = f"{options.part}-{name}"
            with P4ReduceState.from_env(job=job, timeout=TIMEOUT, address=_address(options)) as state:
                _move_to(path, job, state, options.rank)
                found[name] = _hooked(state, plain, options, dtype)
        if nccl:
            with P4ReduceState.from_env(mode="off", timeout=TIMEOUT) as state:
                found["plain-float32"] = _hooked(state, plain, options, dtype)
    return found


def ring_rank(options: argparse.Namespace) -> dict[str, Any]:
    """The ring of torch.distributed, on NCCL where there is a GPU: alone, and as the ring path of a job."""
    backend = "nccl" if options.device == "cuda" else "gloo"
    ring = TorchRing.from_group(timeout=TIMEOUT, backend=backend)
    rng = np.random.default_rng(options.rank)
    numbers = rng.integers(-(2**30), 2**30, 1_000_003, dtype=np.int32)
    total = numbers.copy()
    started = time.perf_counter()
    ring.sum(total)
    seconds = time.perf_counter() - started
    levels = rng.integers(0, 255, 5000, dtype=np.uint8)
    largest = levels.copy()
    ring.max(largest)
    others = np.random.default_rng(1 - options.rank)
    wanted = numbers + others.integers(-(2**30), 2**30, 1_000_003, dtype=np.int32)
    wanted_levels = np.maximum(levels, others.integers(0, 255, 5000, dtype=np.uint8))
    right = bool((total == wanted).all() and (largest == wanted_levels).all())
    return {"right": right, "device": ring.device, "seconds": seconds, "hashes": _both_paths(ring, options)}


def _both_paths(ring: TorchRing, options: argparse.Namespace) -> dict[str, str]:
    """What a job sums on the switch path, and another with `ring` on the ring path, from the same arrays."""
    rng = np.random.default_rng(20 + options.rank)
    arrays = [rng.standard_normal(size, dtype=np.float32) for size in (1, 1000, 300_000)]
    hashes = {}
    for path, mode, its_ring in (("switch", "require", None), ("ring", "off", ring)):
        place: dict[str, Any] = {"job": f"bits-{path}", "rank": options.rank, "world_size": WORLD}
        digest = hashlib.sha256()
        with p4reduce.connect(mode=mode, ring=its_ring, address=_address(options), **place) as comm:
            _require(comm.path == path, f"the job that should take the {path} path takes the other")
            for bits in (32, 16, 8):
                for array in arrays:
                    digest.update(comm.allreduce(array, "mean", lane_bits=bits).tobytes())
        hashes[path] = digest.hexdigest()
    return hashes


def rank_main(options: argparse.Namespace) -> None:
    """One rank of a part."""
    nccl = options.part != "hook" and options.device == "cuda"
    if options.device == "cuda":
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(1)
    # The same bits in two runs are asked for, not just in the reduction.
    torch.use_deterministic_algorithms(True)
    dist.init_process_group(
        "nccl" if nccl else "gloo",
        init_method=f"file://{options.folder}/{options.part}",
        rank=options.rank,
        world_size=WORLD,
        timeout=timedelta(seconds=TIMEOUT),
    )
    found = hook_rank(options)
    if options.part == "nccl":
        found["ring"] = ring_rank(options)
    Path(options.folder, f"{options.part}-{options.rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


# -- the whole --


def _require(good: bool, text: str) -> None:
    if not good:
        raise SystemExit(f"FAILED: {text}")


@contextlib.contextmanager
def _infrastructure() -> Iterator[str]:
    from p4reduce_bmv2.embedded.switch import EmbeddedSwitch
    from p4reduce_controller.hosts import Hosts
    from p4reduce_controller.server import ControllerServer

    ports = {n + 1: f"127.0.1.{n + 1}" for n in range(WORLD)}
    with EmbeddedSwitch(udp_ports=ports) as switch:
        hosts = Hosts.embedded(switch.grpc_address, switch.endpoints, profile="w34")
        with ControllerServer(hosts) as controller:
            yield str(controller.address)


def run_ranks(part: str, options: argparse.Namespace, controller: str, folder: str) -> list[dict[str, Any]]:
    """Both ranks of a part; what they found."""
    children = []
    for rank in range(WORLD):
        environment = {
            **os.environ,
            "P4REDUCE_CONTROLLER": controller,
            "GLOO_SOCKET_IFNAME": "lo",
            # Two ranks on one GPU: NCCL refuses that unless it takes them for two machines.
            **{"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"},
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        }
        command = [sys.executable, __file__, "--device", options.device, "--part", part, "--folder", folder]
        children.append(subprocess.Popen([*command, "--rank", str(rank)], env=environment))
    try:
        codes = [child.wait(timeout=300) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    _require(not any(codes), f"{part}: a rank ended with {codes}")
    return [json.loads(Path(folder, f"{part}-{rank}.json").read_text()) for rank in range(WORLD)]


def check_hook(ranks: list[dict[str, Any]], part: str) -> dict[str, Any]:
    """Against plain DDP, between ranks, and between paths."""
    found: dict[str, Any] = {}
    bounds = {"float32": 2.0**-20, "float16": 2.0**-9, "bfloat16": 2.0**-6}
    for dtype, bound in bounds.items():
        runs = [(path, [rank[f"{path}-{dtype}"] for rank in ranks if f"{path}-{dtype}" in rank]) for path in PATHS]
        runs = [(path, run) for path, run in runs if run]
        if not runs:
            continue
        hashes = {one["hash"] for path, run in runs for one in run if path != "plain"}
        _require(len(hashes) == 1, f"{part}, {dtype}: ranks or paths ended in different bits")
        _require(len({one["hash"] for one in runs[-1][1]}) == 1, f"{part}, {dtype}: ranks ended in different bits")
        worst = max(one["worst"] for _, run in runs for one in run)
        _require(worst < bound, f"{part}, {dtype}: a gradient is off by {worst:g} of the largest")
        for path, run in runs:
            _require(all(one["skipped"] for one in run), f"{part}, {dtype}, {path}: a NaN did not stop both ranks")
            stats = run[0]["stats"]
            counts = {name: stats[f"buckets_{name}"] for name in (*PATHS, "failed")}
            _require(counts.pop(path) > STEPS, f"{part}, {dtype}: no buckets took the {path} path")
            _require(not any(counts.values()), f"{part}, {dtype}: buckets took another path than the {path} path")
        found[f"{part}, {dtype}: worst gradient against plain DDP"] = worst
    return found


def main() -> None:
    options = _parser().parse_args()
    if options.rank is not None:
        rank_main(options)
        return
    _require(options.device == "cpu" or torch.cuda.is_available(), "there is no CUDA device")
    name = torch.cuda.get_device_name(0) if options.device == "cuda" else "CPU"
    found: dict[str, Any] = {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda}
    found |= quantization(options.device)
    print(f"{name}: quantizing gives numpy's integers, numbers and residuals", flush=True)
    with tempfile.TemporaryDirectory() as folder, _infrastructure() as controller:
        found |= check_hook(run_ranks("hook", options, controller, folder), "gloo")
        print("two ranks train through the hook; switch path and ring path give the same bits", flush=True)
        backend = "nccl" if options.device == "cuda" else "gloo"
        ranks = run_ranks("nccl", options, controller, folder)
        found |= check_hook(ranks, f"group of {backend}")
        print(f"the same with a group of {backend}, and the hook in mode off", flush=True)
        ring = [rank["ring"] for rank in ranks]
        _require(all(rank["right"] for rank in ring), f"the ring's sums are wrong: {ring}")
        hashes = {digest for rank in ring for digest in rank["hashes"].values()}
        _require(len(hashes) == 1, f"switch path and ring path of {ring[0]['device']} give different bits")
        found["ring"] = ring[0]["device"]
        print(f"the ring sums right on {ring[0]['device']}, and gives the bits of the switch path", flush=True)
    for key, value in found.items():
        print(f"{key:>55}  {value}")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
