#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check everything of the hook that needs a GPU, on a machine with one: about two minutes, one line a check.

Usage: gpu_check.py [--device cuda|cpu] [--json FILE]

1. Quantizing on the device gives numpy's integers; how fast, against a copy on the device.
2. Two ranks on the one GPU train through the embedded switch: gradients as plain DDP's, ranks equal bit by bit, float32
   and bfloat16 (the process group is gloo).
3. The same run on the switch path and on the ring path ends in the same bits.
4. The NCCL ring of two ranks on one GPU sums right (NCCL_HOSTID makes NCCL take them for two machines; sockets on lo).

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

from p4reduce.ddp import P4ReduceState, allreduce_hook
from p4reduce.ddp.device import DeviceQuantizer
from p4reduce.ddp.ring import TorchRing
from p4reduce.proto import controller_pb2, controller_pb2_grpc
from p4reduce.quantize import BLOCKS, LaneFormat, Quantizer, block_exponents
from p4reduce.rounding import Stochastic

WORLD = 2
TIMEOUT = 60.0
STEPS = 5


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Check what needs a GPU.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", metavar="FILE", help="write what was found as JSON")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=("hook", "ring"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser


# -- 1: quantization --


def _seconds(device: str, call: Callable[[], Any], repeats: int = 20) -> float:
    """Median seconds of one call."""
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
    """Bits compared with numpy's on a million numbers of every exponent; GB/s of gradients on 16 Mi normal ones."""
    found: dict[str, Any] = {}
    rng = np.random.default_rng(0)
    wild = rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint32).view(np.float32)
    many = torch.randn(1 << 24 if device == "cuda" else 1 << 20, device=device)
    copy = torch.empty_like(many)
    size = many.numel() * 4 / 1e9
    found["copy GB/s"] = round(size / _seconds(device, lambda: copy.copy_(many)), 2)
    for bits in (32, 16, 8):
        fmt = LaneFormat(bits, WORLD, BLOCKS[bits])
        ours, theirs = DeviceQuantizer(fmt, device), Quantizer(fmt)
        for stream in (None, Stochastic(7, 1)):
            levels = block_exponents(wild, fmt.block)
            lanes, back = np.empty(len(wild), fmt.lane_type), np.empty(len(wild), np.float32)
            theirs.quantize(wild, levels, lanes, stream=stream)
            there, agreed = torch.from_numpy(wild.copy()).to(device), torch.from_numpy(levels).to(device)
            mine = ours.quantize(there, agreed, stream)
            _require(mine.cpu().numpy().tobytes() == lanes.tobytes(), f"{bits} bits, {stream}: other integers")
            theirs.dequantize(lanes, levels, back, True)
            result = ours.dequantize(mine, agreed, True).cpu().numpy()
            _require(np.array_equal(result, back, equal_nan=True), f"{bits} bits: other numbers")
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


# -- 2 and 3: one rank of a training --


def _model(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 700, dtype=dtype), torch.nn.Tanh(), torch.nn.Linear(700, 300, dtype=dtype)
    )


def _train(ddp: torch.nn.Module, options: argparse.Namespace, dtype: torch.dtype) -> list[torch.Tensor]:
    """Gradients of the first step on the host; parameters move on."""
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    first: list[torch.Tensor] = []
    for step in range(STEPS):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + options.rank))
        optimizer.zero_grad()
        (ddp(x.to(options.device, dtype)) - 1).square().mean().backward()
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


def hook_rank(options: argparse.Namespace) -> dict[str, Any]:
    """Train with plain DDP, on the switch path and on the ring path."""
    import grpc

    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        plain = _train(_wrap(dtype, options.device), options, dtype)
        for path in ("switch", "ring"):
            job = f"{path}-{dtype}".replace("torch.", "")
            with P4ReduceState.from_env(job=job, timeout=TIMEOUT, address=f"127.0.1.{options.rank + 1}") as state:
                if path == "ring" and options.rank == 0:
                    with grpc.insecure_channel(os.environ["P4REDUCE_CONTROLLER"]) as channel:
                        stub = controller_pb2_grpc.ControllerStub(channel)  # type: ignore[no-untyped-call]
                        stub.SetMode(controller_pb2.SetModeRequest(job=job, mode="off"), timeout=10)
                end = time.monotonic() + TIMEOUT
                while state.stats()["comm"]["path"] != path and time.monotonic() < end:
                    time.sleep(0.01)
                dist.barrier()
                ddp = _wrap(dtype, options.device)
                ddp.register_comm_hook(state, allreduce_hook)
                hooked = _train(ddp, options, dtype)
                state.check()
                worst = max(
                    float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))
                    for a, b in zip(hooked, plain, strict=True)
                )
                found[job] = {"worst": worst, "hash": _hash(ddp), "stats": state.stats()}
    return found


def ring_rank(options: argparse.Namespace) -> dict[str, Any]:
    """The ring of torch.distributed, on NCCL where there is a GPU."""
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
    ring.close()
    others = np.random.default_rng(1 - options.rank)
    wanted = numbers + others.integers(-(2**30), 2**30, 1_000_003, dtype=np.int32)
    wanted_levels = np.maximum(levels, others.integers(0, 255, 5000, dtype=np.uint8))
    return {
        "right": bool((total == wanted).all() and (largest == wanted_levels).all()),
        "device": ring.device,
        "seconds": seconds,
    }


def rank_main(options: argparse.Namespace) -> None:
    """One rank of a part."""
    nccl = options.part == "ring" and options.device == "cuda"
    if options.device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl" if nccl else "gloo",
        init_method=f"file://{options.folder}/{options.part}",
        rank=options.rank,
        world_size=WORLD,
        timeout=timedelta(seconds=TIMEOUT),
    )
    found = (hook_rank if options.part == "hook" else ring_rank)(options)
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


def check_hook(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Against plain DDP, between ranks, and between paths."""
    found: dict[str, Any] = {}
    for dtype, bound in (("float32", 2.0**-20), ("bfloat16", 2.0**-7)):
        hashes = {rank[f"{path}-{dtype}"]["hash"] for rank in ranks for path in ("switch", "ring")}
        _require(len(hashes) == 1, f"{dtype}: ranks or paths ended in different bits")
        worst = max(rank[f"{path}-{dtype}"]["worst"] for rank in ranks for path in ("switch", "ring"))
        _require(worst < bound, f"{dtype}: a gradient is off by {worst:g} of the largest")
        for path in ("switch", "ring"):
            stats = ranks[0][f"{path}-{dtype}"]["stats"]
            _require(stats[f"buckets_{path}"] >= STEPS, f"{dtype}: buckets took another path than the {path}'s")
        found[f"{dtype}, worst gradient against plain DDP"] = worst
    return found


def main() -> None:
    options = _parser().parse_args()
    if options.rank is not None:
        rank_main(options)
        return
    _require(options.device == "cpu" or torch.cuda.is_available(), "there is no CUDA device")
    name = torch.cuda.get_device_name(0) if options.device == "cuda" else "CPU"
    found: dict[str, Any] = {"device": name, "torch": torch.__version__}
    found |= quantization(options.device)
    print(f"{name}: quantizing gives numpy's integers")
    with tempfile.TemporaryDirectory() as folder, _infrastructure() as controller:
        found |= check_hook(run_ranks("hook", options, controller, folder))
        print("two ranks train through the hook; switch path and ring path give the same bits")
        ring = run_ranks("ring", options, controller, folder)
        _require(all(rank["right"] for rank in ring), f"the ring's sums are wrong: {ring}")
        found["ring"] = ring[0]["device"]
        print(f"the ring sums right on {ring[0]['device']}")
    for key, value in found.items():
        print(f"{key:>45}  {value}")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
