#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure what the DDP hook costs: some ranks train the demo's model, with each variant in turn, round after round.

Usage: bench_hook.py [--json] [--rounds N] [--steps N] [--bucket-mib X] [--threads N] [--ranks N] [--only NAME ...]

Variants: plain (DDP as it is), off (the hook in mode "off"), noop (`noop_hook`: no communication at all, the headroom),
torch (torch's own allreduce_hook, to tell ours from what any Python hook costs), switch (through an embedded switch in
another process). "backward" is all of backward(); "compute" only until the hook has the last bucket, in ratio to noop:
what our threads do to the computation, by the interpreter's lock or by taking its core.

All in one run, in an order that rotates; a figure is the median over rounds of its ratio to plain in the same round,
beside it the quartiles. Wall-clock ratios of a machine that does other things as well say little: CPU ratios (user and
system time of the rank's process) say more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VARIANTS = ("plain", "off", "torch", "noop", "switch")
BATCH = 32
TIMEOUT = 60.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="What the DDP hook costs, in ratios to plain DDP.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rounds", type=int, default=30, metavar="N", help="rounds (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="steps of a variant in a round (default: 4)")
    parser.add_argument("--bucket-mib", type=float, default=0.25, help="DDP's bucket_cap_mb (default: the demo's 0.25)")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads in each rank (default: 1)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--only", nargs="*", choices=VARIANTS, default=VARIANTS, help="variants (plain is always run)")
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

        text = corpus.load()
        torch.manual_seed(0)
        config = ModelConfig(text.symbols)
        model = CharacterModel(config)
        self.batches = text.batches(0, options.rank, options.ranks, BATCH, config.context)
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=options.bucket_mib, gradient_as_bucket_view=True)
        if name in ("off", "switch"):
            place: dict[str, Any] = {} if name == "off" else {"job": "bench", "address": f"127.0.1.{options.rank + 1}"}
            state = P4ReduceState.from_env(mode="off" if name == "off" else "auto", timeout=TIMEOUT, **place)
            self.state: Any = stack.enter_context(state)
            self._register(state, allreduce_hook)
        elif name != "plain":
            self._register(None, noop_hook if name == "noop" else torchs_hook)
        self.computed = 0.0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def _register(self, state: Any, hook: Any) -> None:
        def timed(state, bucket):  # type: ignore[no-untyped-def]
            future = hook(state, bucket)
            self.computed = time.perf_counter()
            return future

        self.ddp.register_comm_hook(state, timed)

    def step(self) -> tuple[float, float]:
        """Train one step. Seconds of its backward pass, and of that until the hook had the last bucket."""
        window = next(self.batches)
        loss = self.ddp(window[:, :-1], window[:, 1:])
        self.optimizer.zero_grad()
        started = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()
        self.optimizer.step()
        return ended - started, self.computed - started


def rank_main(options: argparse.Namespace) -> None:
    """Measure, and save what each variant took: lists over rounds."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(options.threads)
    rendezvous = f"file://{options.folder}/rendezvous"
    limit = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=rendezvous, rank=options.rank, world_size=options.ranks, timeout=limit)
    names = [name for name in VARIANTS if name in options.only or name == "plain"]
    taken: dict[str, dict[str, list[float]]] = {
        name: {"step": [], "backward": [], "compute": [], "cpu": []} for name in names
    }
    with contextlib.ExitStack() as stack:
        variants = {name: Variant(name, options, stack) for name in names}
        for variant in variants.values():
            for _ in range(3):  # DDP builds its buckets, and everything else warms up
                variant.step()
        for turn in range(options.rounds):
            for place in range(len(names)):
                name = names[(turn + place) % len(names)]
                dist.barrier()
                wall, cpu = time.perf_counter(), time.process_time()
                backward, compute = map(sum, zip(*(variants[name].step() for _ in range(options.steps)), strict=True))
                taken[name]["step"].append(time.perf_counter() - wall)
                taken[name]["cpu"].append(time.process_time() - cpu)
                taken[name]["backward"].append(backward)
                taken[name]["compute"].append(compute)
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
    """Run both ranks; ratios by variant and quantity."""
    with tempfile.TemporaryDirectory() as folder, _infrastructure(options.ranks) as controller:
        environment = {**os.environ, "P4REDUCE_CONTROLLER": controller, "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder]
        children = [subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(options.ranks)]
        try:
            codes = [child.wait(timeout=1800) for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
        if any(codes):
            raise SystemExit(f"a rank ended with {codes}")
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(options.ranks)]
    return evaluate(ranks, options)


def evaluate(ranks: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Medians of the paired ratios, and milliseconds a step of plain DDP."""
    found: dict[str, Any] = {"rounds": options.rounds, "steps": options.steps, "variants": {}}
    base = ranks[0]["taken"]["plain"]
    found["plain_ms"] = {
        what: 1000 * statistics.median(values) / options.steps for what, values in base.items() if what != "compute"
    }
    for name in ranks[0]["taken"]:
        found["variants"][name] = {}
        for what in ("step", "backward", "compute", "cpu"):
            to = "noop" if what == "compute" else "plain"
            if what == "compute" and (name == "plain" or to not in ranks[0]["taken"]):
                continue
            ratios = sorted(
                a / b for rank in ranks for a, b in zip(rank["taken"][name][what], rank["taken"][to][what], strict=True)
            )
            quarter = len(ratios) // 4
            found["variants"][name][what] = [ratios[quarter], statistics.median(ratios), ratios[-quarter - 1]]
    found["stats"] = ranks[0]["stats"]
    return found


def main() -> None:
    options = _parser().parse_args()
    if options.rank is not None:
        rank_main(options)
        return
    found = measure(options)
    if options.json:
        print(json.dumps(found, indent=1))
        return
    print("plain DDP, ms a step: " + ", ".join(f"{what} {value:.2f}" for what, value in found["plain_ms"].items()))
    for name, row in found["variants"].items():
        cells = [f"{what} {low:.3f} [{middle:.3f}] {high:.3f}" for what, (low, middle, high) in row.items()]
        print(f"{name:>7}  " + "   ".join(cells))


if __name__ == "__main__":
    main()
