# SPDX-License-Identifier: Apache-2.0
"""One worker of the demo. torchrun starts it: `python -m torch.distributed.run ... -m p4reduce.demo.train`.

It trains three times: plain DDP, plain DDP with another seed (how far apart may two good runs end?), and DDP with the
p4reduce hook. Rank 0 writes one JSON object per line to standard output: {"event": "step", ...} after every step, and
{"event": "result", ...} with the results of all ranks after every run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass
from typing import Any

from p4reduce.demo.processes import die_with_parent

REFERENCE = "reference"
OTHER_SEED = "reference_other_seed"
SWITCH = "p4reduce"
RUNS = (REFERENCE, OTHER_SEED, SWITCH)

BATCH = 32
"""Windows of text per step, over all workers."""
EXAMINATION = 128
"""Windows of held-out text the loss is measured on."""
BUCKET_MIB = 0.25
"""Small, so that a model of 1 MB has several buckets to overlap."""
GLOO_TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one rank has to say about one run. Times in seconds; losses in nats per character of held-out text."""

    loss_first: float
    loss_last: float
    parameters: int
    digest: str
    """SHA-256 of all parameters after the last step."""
    seconds: float
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    stats: dict[str, Any]
    """Of the hook's state; empty in the plain runs."""


def emit(event: dict[str, Any]) -> None:
    """Write one event in one piece, so that nothing else can cut it."""
    os.write(1, json.dumps(event).encode() + b"\n")


def train(run: str, seed: int, steps: int) -> RunResult:
    """Train on this rank. Every rank of the default process group must call it with the same arguments."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from p4reduce.ddp import P4ReduceState, allreduce_hook
    from p4reduce.demo import corpus
    from p4reduce.demo.model import CharacterModel, ModelConfig

    text = corpus.load()
    torch.manual_seed(seed)
    config = ModelConfig(text.symbols)
    model = CharacterModel(config)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = text.batches(seed, rank, world_size, BATCH, config.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    times = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
    with contextlib.ExitStack() as stack:
        ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MIB, gradient_as_bucket_view=True)
        state = stack.enter_context(P4ReduceState.from_env()) if run == SWITCH else None
        if state is not None:
            ddp.register_comm_hook(state, allreduce_hook)
        loss_first = _examine(model, text.examination(EXAMINATION, config.context))
        started = time.perf_counter()
        for step in range(steps):
            window = next(batches)
            begin = time.perf_counter()
            loss = ddp(window[:, :-1], window[:, 1:])
            forward = time.perf_counter()
            optimizer.zero_grad()
            loss.backward()
            backward = time.perf_counter()
            optimizer.step()
            times["forward"] += forward - begin
            times["backward"] += backward - forward
            times["optimizer"] += time.perf_counter() - backward
            if rank == 0:
                emit({"event": "step", "run": run, "step": step + 1, "loss": loss.item()})
        seconds = time.perf_counter() - started
        return RunResult(
            loss_first=loss_first,
            loss_last=_examine(model, text.examination(EXAMINATION, config.context)),
            parameters=sum(p.numel() for p in model.parameters()),
            digest=digest(model),
            seconds=seconds,
            forward_seconds=times["forward"],
            backward_seconds=times["backward"],
            optimizer_seconds=times["optimizer"],
            stats=state.stats() if state is not None else {},
        )


def _examine(model: Any, windows: Any) -> float:
    import torch

    with torch.no_grad():
        return float(model(windows[:, :-1], windows[:, 1:]))


def digest(model: Any) -> str:
    """SHA-256 of all parameters of a torch module, by name."""
    state = hashlib.sha256()
    for name, parameter in model.named_parameters():
        state.update(name.encode())
        state.update(parameter.detach().contiguous().numpy().tobytes())
    return state.hexdigest()


def main(arguments: list[str] | None = None) -> None:
    """Entry point of one worker."""
    die_with_parent()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args(arguments)

    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=GLOO_TIMEOUT))
    try:
        for run in RUNS:
            result = train(run, options.seed + (run == OTHER_SEED), options.steps)
            results: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(results, asdict(result))
            if dist.get_rank() == 0:
                emit({"event": "result", "run": run, "ranks": results})
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
