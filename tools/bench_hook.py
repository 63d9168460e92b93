#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure what the DDP hook costs: some ranks train the demo's model as the demo does, with and without, step by step.

Usage: bench_hook.py [--json] [--blocks N] [--ranks N] [--base plain|noop] [--only NAME ...] [--pin] [--threads N]

Variants: plain (DDP as it is), again (the same once more: what this bench cannot tell apart), off (the hook in mode
"off"), torch (torch's own allreduce_hook, to tell ours from what any Python hook costs), noop (`noop_hook`: no
communication at all, the headroom), switch (through an embedded switch in another process).

A block is four steps, base, variant, variant, base, so that whatever drifts slowly hits both alike; the variants take
turns, all in one process group. A figure is the median over the blocks of the ratio of the two steps in the middle to
the two outside, and the 95 % interval of that median (order statistics, no assumption about the distribution).

step: by the clock, all ranks added up. cpu: processor time of the ranks' processes, all threads. backward: backward()
alone. compute, with --base noop: backward until the hook has the last bucket, and computing, the processor time of the
training thread meanwhile. What is left of compute the kernel knows (schedstat): waiting for a core; and blocked, here
as a difference in milliseconds a step, which is waiting for the interpreter's lock.

--pin: the training threads have a core each, everything else (the hook's threads, the switch) the next ones. With
--ranks 1 --base noop --only switch that shows what the hook's threads do to backward() where they have a core.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

VARIANTS = ("plain", "again", "off", "torch", "noop", "switch")
WARM_UP = 5
"""Steps of each variant: DDP builds its buckets, everything else warms up."""
TIMEOUT = 60.0
QUANTITIES = ("step", "cpu", "backward", "compute", "computing", "blocked")
OF_HOOKS = ("compute", "computing", "blocked")
"""What only a hook that measures can know."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="What the DDP hook costs, in ratios to plain DDP.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--blocks", type=int, default=200, metavar="N", help="blocks of each variant (default: 200)")
    parser.add_argument("--base", choices=("plain", "noop"), default="plain", help="ratios to this (default: plain)")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads in each rank (default: 1)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--only", nargs="*", choices=VARIANTS, default=VARIANTS[1:], help="variants (default: all)")
    parser.add_argument("--pin", action="store_true", help="training and everything else on two cores")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser


# -- one rank --


class Variant:
    """One model that trains in its own way."""

    def __init__(self, name: str, options: argparse.Namespace, stack: contextlib.ExitStack) -> None:
        import torch
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook as torchs_hook
        from torch.nn.parallel import DistributedDataParallel

        from p4reduce.ddp import P4ReduceState, allreduce_hook, noop_hook
        from p4reduce.demo import corpus
        from p4reduce.demo.model import CharacterModel, ModelConfig
        from p4reduce.demo.train import BATCH, BUCKET_MIB

        text = corpus.load()
        torch.manual_seed(0)
        config = ModelConfig(text.symbols)
        model = CharacterModel(config)
        self.rank = options.rank
        self.batches = text.batches(0, options.rank, options.ranks, BATCH, config.context)
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MIB, gradient_as_bucket_view=True)
        self.computed = self.computing = self.blocked = 0.0
        self.state: Any = None
        if name in ("off", "switch"):
            place: dict[str, Any] = {} if name == "off" else {"job": "bench", "address": f"127.0.1.{options.rank + 1}"}
            state = P4ReduceState.from_env(mode="off" if name == "off" else "auto", timeout=TIMEOUT, **place)
            self.state = stack.enter_context(state)
            self._register(state, allreduce_hook, options.base == "noop")
        elif name in ("noop", "torch"):
            self._register(None, noop_hook if name == "noop" else torchs_hook, options.base == "noop")
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def _register(self, state: Any, hook: Any, timed: bool) -> None:
        if not timed:
            self.ddp.register_comm_hook(state, hook)
            return

        def timing(state, bucket):  # type: ignore[no-untyped-def]
            future = hook(state, bucket)
            if bucket.is_last():
                self.computed, self.computing, self.blocked = _moment()
            return future

        self.ddp.register_comm_hook(state, timing)

    def step(self) -> dict[str, float]:
        """Train one step as the demo does. Seconds."""
        window = next(self.batches)
        wall, cpu = time.perf_counter(), time.process_time()
        loss = self.ddp(window[:, :-1], window[:, 1:])
        self.optimizer.zero_grad()
        begin, thread, blocked = _moment()
        loss.backward()
        end = time.perf_counter()
        self.optimizer.step()
        if self.rank == 0:
            loss.item()
        return {
            "step": time.perf_counter() - wall,
            "cpu": time.process_time() - cpu,
            "backward": end - begin,
            "compute": self.computed - begin,
            "computing": self.computing - thread,
            "blocked": self.blocked - blocked,
        }


def _moment() -> tuple[float, float, float]:
    """By the clock, of this thread's processor time, and of the time that this thread was not even ready to run."""
    wall, running = time.perf_counter(), time.thread_time()
    ready = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return wall, running, wall - running - ready


def _pin(rank: int, ranks: int, training: bool) -> None:
    """The calling thread, and those that it starts from now on, to the core of the training thread or to the others."""
    cores = sorted(os.sched_getaffinity(os.getppid()))
    if len(cores) < ranks + 1:
        raise SystemExit(f"--pin with {ranks} ranks needs {ranks + 1} cores, there are {len(cores)}")
    os.sched_setaffinity(0, {cores[rank]} if training else set(cores[ranks:]))


def rank_main(options: argparse.Namespace) -> None:
    """Measure, and save what each block took."""
    from datetime import timedelta

    if options.pin:
        _pin(options.rank, options.ranks, training=False)

    import torch
    import torch.distributed as dist

    torch.set_num_threads(options.threads)
    rendezvous = f"file://{options.folder}/rendezvous"
    limit = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=rendezvous, rank=options.rank, world_size=options.ranks, timeout=limit)
    names = [name for name in VARIANTS if name in options.only and name != options.base]
    taken: dict[str, list[dict[str, list[float]]]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        variants = {name: Variant(name, options, stack) for name in (options.base, *names)}
        if options.pin:
            _pin(options.rank, options.ranks, training=True)
        for variant in variants.values():
            for _ in range(WARM_UP):
                variant.step()
        for turn in range(options.blocks):
            for place in range(len(names)):
                name = names[(turn + place) % len(names)]
                steps = []
                for one in (options.base, name, name, options.base):
                    dist.barrier()
                    steps.append(variants[one].step())
                taken[name].append({what: [step[what] for step in steps] for what in QUANTITIES})
        stats = variants["switch"].state.stats() if "switch" in variants else {}
    Path(options.folder, f"{options.rank}.json").write_text(json.dumps({"taken": taken, "stats": stats}))
    dist.destroy_process_group()


# -- the whole --


@contextlib.contextmanager
def _infrastructure(ranks: int) -> Iterator[str]:
    from p4reduce_bmv2.embedded.switch import EmbeddedSwitch
    from p4reduce_controller.hosts import Hosts
    from p4reduce_controller.server import ControllerServer

    ports = {n + 1: f"127.0.1.{n + 1}" for n in range(ranks)}
    with EmbeddedSwitch(udp_ports=ports) as switch:
        hosts = Hosts.embedded(switch.grpc_address, switch.endpoints, profile="w34")
        with ControllerServer(hosts) as controller:
            yield str(controller.address)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all ranks; ratios by variant and quantity."""
    cores = os.sched_getaffinity(0)
    load = [os.getloadavg()[0]]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        needs_switch = "switch" in options.only
        if options.pin:
            os.sched_setaffinity(0, set(sorted(cores)[options.ranks :]))
        controller = stack.enter_context(_infrastructure(options.ranks)) if needs_switch else ""
        # Threads keep their cores; this one only waits from here on, and says by its own which there are.
        os.sched_setaffinity(0, cores)
        environment = {**os.environ, "P4REDUCE_CONTROLLER": controller, "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"OMP_NUM_THREADS": str(options.threads), "MKL_NUM_THREADS": str(options.threads)}
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder]
        children = [subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(options.ranks)]
        try:
            codes = [child.wait(timeout=3600) for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
        if any(codes):
            raise SystemExit(f"a rank ended with {codes}")
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(options.ranks)]
    load.append(os.getloadavg()[0])
    return {"load": load, "cores": len(cores), **evaluate([rank["taken"] for rank in ranks], options.base)} | {
        "stats": ranks[0]["stats"]
    }


def evaluate(ranks: Sequence[dict[str, list[dict[str, list[float]]]]], base: str) -> dict[str, Any]:
    """Medians of the paired ratios with their intervals, and milliseconds of a base step on one rank."""
    found: dict[str, Any] = {"base": base, "base_ms": {}, "variants": {}}
    outside: dict[str, list[float]] = {what: [] for what in QUANTITIES}
    for name in ranks[0]:
        row = found["variants"][name] = {}
        for what in QUANTITIES:
            if what in OF_HOOKS and (base == "plain" or name in ("plain", "again")):
                continue
            ratios = []
            for blocks in zip(*(rank[name] for rank in ranks), strict=True):
                first, second, third, fourth = (sum(times) for times in zip(*(b[what] for b in blocks), strict=True))
                if what == "blocked":
                    ratios.append(1000 * (second + third - first - fourth) / 2 / len(ranks))
                else:
                    ratios.append((second + third) / (first + fourth))
                outside[what] += [first / len(ranks), fourth / len(ranks)]
            row[what] = interval(ratios)
    found["base_ms"] = {what: 1000 * statistics.median(times) for what, times in outside.items() if times}
    found["blocks"] = min(len(blocks) for blocks in ranks[0].values())
    return found


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median with its 95 % interval: lower end, median, upper end."""
    ordered = sorted(values)
    reach = 1.96 * math.sqrt(len(ordered)) / 2
    low, high = math.floor(len(ordered) / 2 - reach), math.ceil(len(ordered) / 2 + reach)
    return ordered[max(low, 0)], statistics.median(ordered), ordered[min(high, len(ordered) - 1)]


def main() -> None:
    options = _parser().parse_args()
    if options.rank is not None:
        rank_main(options)
        return
    found = measure(options)
    if options.json:
        print(json.dumps(found, indent=1))
        return
    times = ", ".join(f"{what} {value:.2f}" for what, value in found["base_ms"].items())
    print(f"load {found['load'][0]:.1f} to {found['load'][1]:.1f} on {found['cores']} cores; {found['blocks']} blocks")
    print(f"{found['base']}, ms a step: {times}")
    print("ratios to it: median (its 95 % interval)")
    for name, row in found["variants"].items():
        cells = [f"{what} {middle:.4f} ({low:.4f} to {high:.4f})" for what, (low, middle, high) in row.items()]
        print(f"{name:>7}  " + "   ".join(cells))


if __name__ == "__main__":
    main()
