# SPDX-License-Identifier: Apache-2.0
"""One rank of tests/e2e/test_ddp_hook.py: runs every scenario in turn and saves what each of them returns.

Usage: ddp_ranks.py FOLDER RENDEZVOUS [SCENARIO ...], with RANK in the environment.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from helpers.ddp_models import Convolutions, Many, Model, Motley, Tied, Wide, arrays, data, gradients, train
from p4reduce.ddp import P4ReduceState, allreduce_hook

WORLD = 2
SMALL_BUCKETS = 0.0005  # MiB: about 500 bytes, so the models need several buckets
TIMEOUT = 60.0

Result = dict[str, Any]


def joined(rank: int, job: str, **options: Any) -> P4ReduceState:
    if "P4REDUCE_LAB" not in os.environ:
        options.setdefault("address", f"127.0.1.{rank + 1}")
    return P4ReduceState.from_env(job=job, timeout=TIMEOUT, **options)


def spy(seen: list[tuple[int, int]], hook: Any = allreduce_hook) -> Any:
    """A hook that notes bucket numbers and sizes. Without annotations: DDP compares them with the real types."""

    def spying(state, bucket):  # type: ignore[no-untyped-def]
        seen.append((bucket.index(), bucket.buffer().numel()))
        return hook(state, bucket)

    return spying


def compare(
    rank: int,
    job: str,
    build: Callable[[], torch.nn.Module] = Model,
    *,
    steps: int = 4,
    dtype: torch.dtype = torch.float32,
    call: Any = None,
    hook: Any = allreduce_hook,
    numbers: Any = None,
    **options: Any,
) -> Result:
    """Train twice, with the hook and without."""
    options.setdefault("bucket_cap_mb", SMALL_BUCKETS)
    plain = train(DistributedDataParallel(build(), **options), rank, steps, dtype, **(call or {}))
    seen: list[tuple[int, int]] = []
    with joined(rank, job, **(numbers or {})) as state:
        ddp = DistributedDataParallel(build(), **options)
        ddp.register_comm_hook(state, spy(seen, hook))
        hooked = train(ddp, rank, steps, dtype, **(call or {}))
        elements = sum(p.numel() for p in ddp.parameters() if p.requires_grad)
        return {"plain": plain, "hooked": hooked, "seen": seen, "stats": state.stats(), "elements": elements}


def defaults(rank: int) -> Result:
    return compare(rank, "defaults")


def static_graph(rank: int) -> Result:
    return compare(rank, "static", static_graph=True)


def find_unused_parameters(rank: int) -> Result:
    return compare(rank, "unused", find_unused_parameters=True, call={"spare": False})


def gradient_as_bucket_view(rank: int) -> Result:
    return compare(rank, "view", gradient_as_bucket_view=True)


def channels_last(rank: int) -> Result:
    return compare(rank, "channels", Convolutions)


def tied_and_unused(rank: int) -> Result:
    return compare(rank, "tied", Tied, find_unused_parameters=True)


def thousand_parameters(rank: int) -> Result:
    return compare(rank, "many", Many, steps=3)


def float16(rank: int) -> Result:
    return compare(rank, "float16", lambda: Model(torch.float16), dtype=torch.float16)


def bfloat16(rank: int) -> Result:
    return compare(rank, "bfloat16", lambda: Model(torch.bfloat16), dtype=torch.bfloat16)


def float64(rank: int) -> Result:
    return compare(rank, "float64", lambda: Model(torch.float64), dtype=torch.float64, steps=2)


def motley(rank: int) -> Result:
    return compare(rank, "motley", Motley, steps=3)


LANES: tuple[dict[str, Any], ...] = (
    {"lane_bits": 16},
    {"lane_bits": 8},
    {"lane_bits": 8, "rounding": "nearest"},
    {"lane_bits": 8, "exact_steps": 2, "error_feedback": False, "seed": 3},
)


def lanes(rank: int) -> Result:
    """Fewer bits, with error feedback and without."""
    outcome: Result = {}
    for number, options in enumerate(LANES):
        outcome[str(number)] = compare(rank, f"lanes-{number}", Wide, steps=4, numbers=options, bucket_cap_mb=1)
    return outcome


def fp16_wrapper(rank: int) -> Result:
    """torch's own compression wrapper around the hook: it sees float16 buffers and must return float16."""
    return compare(rank, "wrapper", hook=fp16_compress_wrapper(allreduce_hook))


def no_sync(rank: int) -> Result:
    """Two backward passes under no_sync, the third synchronises the sum of all; twice."""

    def run(ddp: DistributedDataParallel) -> list[Any]:
        history = []
        for first in (0, 3):
            ddp.zero_grad()
            with ddp.no_sync():
                for step in range(first, first + 2):
                    ddp(data(rank, step)).square().mean().backward()
            ddp(data(rank, first + 2)).square().mean().backward()
            history.append(gradients(ddp))
        return history

    plain = run(DistributedDataParallel(Model(), bucket_cap_mb=SMALL_BUCKETS))
    with joined(rank, "no-sync") as state:
        ddp = DistributedDataParallel(Model(), bucket_cap_mb=SMALL_BUCKETS)
        ddp.register_comm_hook(state, allreduce_hook)
        return {"plain": plain, "hooked": run(ddp), "stats": state.stats()}


def join_uneven(rank: int) -> Result:
    """join(): the rank that has run out of data takes part with zeros; the mean stays over all ranks."""
    with joined(rank, "join") as state:
        ddp = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        ddp.register_comm_hook(state, allreduce_hook)
        seen = []
        with ddp.join():
            for _ in range(1 + 2 * rank):
                ddp.zero_grad()
                ddp(torch.ones(1, 1)).sum().backward()
                seen.append(gradients(ddp)[0].item())
        return {"seen": seen, "stats": state.stats()}


def two_models(rank: int) -> Result:
    """Two DDP models in one backward pass: their buckets interleave, each goes to the job of its model."""

    def run(first: torch.nn.Module, second: torch.nn.Module) -> list[Any]:
        history = []
        for step in range(3):
            first.zero_grad()
            second.zero_grad()
            x = data(rank, step)
            (first(x) * second(x + 1)).square().mean().backward()
            history.append(gradients(first) + gradients(second))
        return history

    def build() -> DistributedDataParallel:
        return DistributedDataParallel(Model(), bucket_cap_mb=SMALL_BUCKETS)

    plain = run(build(), build())
    with joined(rank, "two-a") as one, joined(rank, "two-b") as two:
        models = build(), build()
        for ddp, state in zip(models, (one, two), strict=True):
            ddp.register_comm_hook(state, allreduce_hook)
        return {"plain": plain, "hooked": run(*models), "stats": one.stats(), "other": two.stats()}


def two_groups(rank: int) -> Result:
    """A group of both ranks and one of each alone, with a job each, at the same time."""
    alone = [dist.new_group([r]) for r in range(WORLD)][rank]
    together = dist.new_group(list(range(WORLD)))
    assert isinstance(alone, dist.ProcessGroup)
    assert isinstance(together, dist.ProcessGroup)
    outcome: Result = {}
    with (
        joined(rank, f"alone-{rank}", process_group=alone) as own,
        joined(rank, "together", process_group=together) as common,
    ):
        for name, state, group in (("alone", own, alone), ("together", common, together)):
            ddp = DistributedDataParallel(Model(), process_group=group, bucket_cap_mb=SMALL_BUCKETS)
            ddp.register_comm_hook(state, allreduce_hook)
            plain = DistributedDataParallel(Model(), process_group=group, bucket_cap_mb=SMALL_BUCKETS)
            outcome[name] = {"plain": train(plain, rank, 2), "hooked": train(ddp, rank, 2), "stats": state.stats()}
    dist.destroy_process_group(alone)
    dist.destroy_process_group(together)
    return outcome


COMPILED = ("ddp_optimizer", "no_optimization", "python_reducer")


def compiled(rank: int) -> Result:
    """torch.compile around DDP: dynamo splits the graph at buckets, or not. The backend needs no C++ compiler."""
    import torch._dynamo

    outcome: Result = {}
    plain = train(DistributedDataParallel(Wide(), bucket_cap_mb=1), rank, 3)
    for variant in COMPILED:
        torch._dynamo.reset()
        torch._dynamo.config.optimize_ddp = variant  # type: ignore[assignment]
        with joined(rank, f"compiled-{variant}") as state:
            ddp = DistributedDataParallel(Wide(), bucket_cap_mb=1)
            ddp.register_comm_hook(state, allreduce_hook)
            error = None
            hooked: list[Any] = []
            try:
                model: Any = torch.compile(ddp, backend="aot_eager")
                hooked = train(model, rank, 3)
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
            outcome[variant] = {"plain": plain, "hooked": hooked, "error": error, "stats": state.stats()}
    torch._dynamo.config.optimize_ddp = True
    torch._dynamo.reset()
    return outcome


def grad_scaler(rank: int) -> Result:
    """AMP with float16 autocast: the scale grows until float16 overflows; NaN or infinity on one rank at times."""

    def run(ddp: torch.nn.Module) -> Result:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
        scales, moved = [], []
        for step in range(24):
            optimizer.zero_grad()
            before = next(ddp.parameters()).detach().clone()
            x = data(rank, step)
            if step in (5, 11) and rank == step % 2:
                x[0, 0] = float("nan") if step == 5 else float("inf")
            with torch.autocast("cpu", dtype=torch.float16):
                loss = ddp(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            moved.append(not torch.equal(before, next(ddp.parameters()).detach()))
        return {"scales": scales, "moved": moved}

    plain = run(DistributedDataParallel(Model(), bucket_cap_mb=SMALL_BUCKETS))
    with joined(rank, "scaler") as state:
        ddp = DistributedDataParallel(Model(), bucket_cap_mb=SMALL_BUCKETS)
        ddp.register_comm_hook(state, allreduce_hook)
        hooked = run(ddp)
        return {"plain": plain, "hooked": hooked, "stats": state.stats(), "error": state.error}


def traced(rank: int) -> Result:
    """A thousand parameters in many buckets, with a trace."""
    with tempfile.TemporaryDirectory() as folder:
        with joined(rank, "traced", trace=Path(folder, "trace.json")) as state:
            ddp = DistributedDataParallel(Many(), bucket_cap_mb=SMALL_BUCKETS)
            ddp.register_comm_hook(state, allreduce_hook)
            train(ddp, rank, 3)
            buckets = state.stats()["buckets_switch"]
        files = [path.name for path in Path(folder).iterdir()]
        content = json.loads(Path(folder, files[0]).read_text())
    return {"files": files, "events": content["traceEvents"], "buckets": buckets}


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def copies(rank: int) -> Result:
    """Pickling a state and copying a DDP model: both possible, both said, and the copy has no hook."""
    messages = Messages()
    logging.getLogger("p4reduce.ddp").addHandler(messages)
    with joined(rank, "copies") as state:
        ddp = DistributedDataParallel(Model(), bucket_cap_mb=SMALL_BUCKETS)
        ddp.register_comm_hook(state, allreduce_hook)
        ddp(data(rank, 0)).square().mean().backward()
        pickle.loads(pickle.dumps(state)).close()
        pickled = list(messages.texts)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            twin = copy.deepcopy(ddp)
        copied = [str(warning.message) for warning in caught]
        before = state.stats()["buckets_switch"]
        twin(data(rank, 1)).square().mean().backward()
        by_copy = state.stats()["buckets_switch"] - before
        ddp(data(rank, 1)).square().mean().backward()
        by_model = state.stats()["buckets_switch"] - before
    logging.getLogger("p4reduce.ddp").removeHandler(messages)
    return {"pickled": pickled, "copied": copied, "by_copy": by_copy, "by_model": by_model}


def checkpoint(rank: int) -> Result:
    """With 32 bits, and with 8 and residuals."""
    eight = {"lane_bits": 8, "seed": 3, "exact_steps": 2}
    return {"32": resumed(rank, "exact", {}), "8": resumed(rank, "lossy", eight)}


def resumed(rank: int, name: str, numbers: dict[str, Any]) -> Result:
    """Train 6 steps; or 3, save, load into new objects after one throw-away pass, and train the other 3."""

    def begin(job: str) -> tuple[Any, ...]:
        state = joined(rank, f"{job}-{name}", **numbers)
        ddp = DistributedDataParallel(Model(), bucket_cap_mb=SMALL_BUCKETS)
        ddp.register_comm_hook(state, allreduce_hook)
        return state, ddp, torch.optim.AdamW(ddp.parameters(), lr=0.01)

    def go(ddp: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            optimizer.zero_grad()
            (ddp(data(rank, step)) - 1.0).square().mean().backward()
            optimizer.step()

    state, ddp, optimizer = begin("checkpoint-a")
    with state:
        go(ddp, optimizer, 0, 3)
        buffer = _saved({"model": ddp.module, "optimizer": optimizer, "hook": state})
        go(ddp, optimizer, 3, 6)
        through = arrays(ddp.parameters())
        steps = [state.stats()["steps"]]
    state, ddp, optimizer = begin("checkpoint-b")
    with state:
        # DDP builds its buckets after the first pass, and blocks follow buckets: this one makes them what they were.
        ddp(data(rank, 0)).square().mean().backward()
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)
        ddp.module.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        state.load_state_dict(loaded["hook"])
        go(ddp, optimizer, 3, 6)
        steps.append(state.stats()["steps"])
        residuals = [piece.numel() for piece in loaded["hook"]["residuals"]]
        return {"through": through, "resumed": arrays(ddp.parameters()), "steps": steps, "residuals": residuals}


def _saved(objects: dict[str, Any]) -> Any:
    buffer = io.BytesIO()
    torch.save({name: item.state_dict() for name, item in objects.items()}, buffer)
    return buffer


@contextlib.contextmanager
def operator() -> Iterator[Any]:
    """What an operator's commands use."""
    import grpc

    from p4reduce.proto import controller_pb2_grpc

    with grpc.insecure_channel(os.environ["P4REDUCE_CONTROLLER"]) as channel:
        yield controller_pb2_grpc.ControllerStub(channel)  # type: ignore[no-untyped-call]


def path_of(state: P4ReduceState) -> str:
    return str(state.stats()["comm"]["path"])


STEPS_OF_ALTERNATION = 12
CHANGES = 6
PATHS = ("switch", "ring", "both")


def alternating_run(rank: int, job: str, plan: dict[tuple[int, int], str], **numbers: Any) -> Result:
    """Train, and change the job's mode when the hook gets the bucket (step, index) that `plan` names."""
    from p4reduce.proto import controller_pb2

    with joined(rank, job, **numbers) as state, operator() as stub:
        # Almost every parameter has a bucket of its own.
        ddp = DistributedDataParallel(Model(), bucket_cap_mb=SMALL_BUCKETS / 10)
        present, made = [0], [0]

        def set_mode(moment: tuple[int, int]) -> None:
            made[0] += 1
            if rank == 0:
                stub.SetMode(controller_pb2.SetModeRequest(job=job, mode=plan[moment]), timeout=10)

        def hook(state, bucket):  # type: ignore[no-untyped-def]
            if (present[0], bucket.index()) in plan:
                set_mode((present[0], bucket.index()))
            return allreduce_hook(state, bucket)

        ddp.register_comm_hook(state, hook)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.02)
        paths = []
        for step in range(-1, STEPS_OF_ALTERNATION):
            present[0] = step
            if step < 0 and (step, 0) in plan:
                set_mode((step, 0))
            elif step >= 0:
                optimizer.zero_grad()
                (ddp(data(rank, step)) - 1.0).square().mean().backward()
                optimizer.step()
            moves = [moment for moment in plan if moment[0] == step]
            if moves:
                wanted = {"off": "ring", "auto": "switch"}[plan[moves[-1]]]
                _until(lambda wanted=wanted: path_of(state) == wanted)  # type: ignore[misc]
                dist.barrier()
            paths.append(path_of(state))
        return {"parameters": arrays(ddp.parameters()), "paths": paths, "made": made[0], "stats": state.stats()}


def alternating(rank: int) -> Result:
    """The same run through the switch, over the ring, and changing between them at seeded buckets."""
    rng = np.random.default_rng(11)
    steps = sorted(int(step) for step in rng.choice(range(1, STEPS_OF_ALTERNATION - 1), CHANGES, replace=False))
    moments = [(step, int(rng.integers(5))) for step in steps]
    plan = {moment: ("off", "auto")[number % 2] for number, moment in enumerate(moments)}
    plans: dict[str, dict[tuple[int, int], str]] = {"switch": {}, "ring": {(-1, 0): "off"}, "both": plan}
    return {
        f"{name} {bits}": alternating_run(rank, f"alternating-{name}-{bits}", moves, lane_bits=bits, seed=9)
        for bits in (32, 8)
        for name, moves in plans.items()
    }


def evicted(rank: int) -> Result:
    """An operator ends the job in the middle: the step's error shows at the optimizer, and DDP stays usable."""
    from p4reduce.proto import controller_pb2

    outcome: Result = {"errors": [], "finite": []}
    with joined(rank, "evicted") as state:
        ddp = DistributedDataParallel(Model(), bucket_cap_mb=SMALL_BUCKETS)
        ddp.register_comm_hook(state, allreduce_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(3):
            if step == 1:
                dist.barrier()
                if rank == 0:
                    with operator() as stub:
                        stub.Evict(controller_pb2.EvictRequest(job="evicted"), timeout=10)
                dist.barrier()
                _until(lambda: _ended(state))
            optimizer.zero_grad()
            try:
                ddp(data(rank, step)).square().mean().backward()
                optimizer.step()
            except Exception as error:
                outcome["errors"].append((step, type(error).__name__, str(error)))
                break
        outcome["finite"] = [bool(p.isfinite().all()) for p in ddp.parameters()]
    # The model itself must still work.
    ddp.zero_grad()
    with ddp.no_sync():
        ddp(data(rank, 5)).square().mean().backward()
    outcome["usable"] = all(np.isfinite(g).all() for g in gradients(ddp))
    return outcome


def _ended(state: P4ReduceState) -> bool:
    return "failed" in repr(state._comm)


def _until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the condition was not met")
        time.sleep(0.01)


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Data that is made in the DataLoader's processes, and says in which."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return data(self.rank, index)[0], os.getpid()


def forked_data_loader(rank: int) -> Result:
    """DataLoader workers forked while the job's threads run: they serve data and leave the parent's job alone."""
    with joined(rank, "loader") as state:
        ddp = DistributedDataParallel(Model(), bucket_cap_mb=SMALL_BUCKETS)
        ddp.register_comm_hook(state, allreduce_hook)
        pids: set[int] = set()
        steps = 0
        for _ in range(2):
            loader = torch.utils.data.DataLoader(
                Numbers(rank), batch_size=2, num_workers=2, multiprocessing_context="fork"
            )
            for x, pid in loader:
                ddp.zero_grad()
                ddp(x).square().mean().backward()
                steps += 1
                pids.update(pid.tolist())
        return {"pids": pids, "own": os.getpid(), "steps": steps, "stats": state.stats(), "error": state.error}


SCENARIOS: dict[str, Callable[[int], Result]] = {
    f.__name__: f
    for f in (
        *(defaults, static_graph, find_unused_parameters, gradient_as_bucket_view, channels_last, tied_and_unused),
        *(
            lanes,
            thousand_parameters,
            motley,
            float16,
            bfloat16,
            float64,
            fp16_wrapper,
            no_sync,
            join_uneven,
            two_models,
            two_groups,
        ),
        *(grad_scaler, traced, copies, checkpoint, alternating, evicted, forked_data_loader, compiled),
    )
}


def attempt(scenario: Callable[[int], Result], rank: int) -> Result | str:
    started = time.perf_counter()
    try:
        return {**scenario(rank), "seconds": time.perf_counter() - started}
    except Exception:
        return traceback.format_exc()


def patience() -> None:
    """No falling back to the ring just because this machine is busy: torch.compile alone can hold up a thread."""
    from p4reduce.proto import controller_pb2

    policy = controller_pb2.RetransmissionPolicy(silent_seconds=15.0, fallback_seconds=15.0)
    with operator() as stub:
        stub.SetPolicy(controller_pb2.SetPolicyRequest(policy=policy), timeout=10)


def main(folder: Path, rendezvous: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=WORLD, timeout=timedelta(seconds=TIMEOUT)
    )
    if rank == 0:
        patience()
    results = {}
    for name in names or SCENARIOS:
        dist.barrier()
        results[name] = attempt(SCENARIOS[name], rank)
        (folder / f"{rank}.pickle").write_bytes(pickle.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
