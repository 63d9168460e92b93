# SPDX-License-Identifier: Apache-2.0
"""DDP training through the real stack: hook, communicator, UDP, embedded switch, controller; and the examples.

Run as a script, this file is one rank: it trains as its arguments say and saves what it saw.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
WORLD = 2
STEPS = 4


# -- one rank --


def rank_main(rank: int, folder: Path, scenario: str) -> None:
    import torch
    import torch.distributed as dist

    if scenario == "restart":
        restart(folder)
        return
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    result = {"train": train, "trouble": trouble}[scenario](rank, folder)
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(result))
    if scenario == "train":
        dist.destroy_process_group()
    else:
        # The group died with the other rank; taking it apart in order would wait for that.
        os._exit(0)


def model() -> Any:
    import torch

    torch.manual_seed(1)
    # 40,000 parameters: several frames of every profile in a bucket.
    return torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.Tanh(), torch.nn.Linear(300, 64))


def data(rank: int, step: int) -> Any:
    import torch

    return torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * step + rank))


def gradients(ddp: Any) -> list[np.ndarray[Any, Any]]:
    return [p.grad.numpy().copy() for p in ddp.parameters()]


def train(rank: int, folder: Path) -> dict[str, Any]:
    """Train with plain DDP and with the hook; the last step has a NaN on rank 1."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from p4reduce.ddp import P4ReduceState, allreduce_hook

    outcome: dict[str, Any] = {}
    for kind in ("plain", "hooked"):
        with contextlib.ExitStack() as stack:
            ddp = DistributedDataParallel(model(), bucket_cap_mb=0.02, gradient_as_bucket_view=kind == "hooked")
            if kind == "hooked":
                state = stack.enter_context(P4ReduceState.from_env(timeout=60))
                ddp.register_comm_hook(state, allreduce_hook)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            history = []
            for step in range(STEPS):
                optimizer.zero_grad()
                (ddp(data(rank, step)) - 1.0).square().mean().backward()
                history.append(gradients(ddp))
                optimizer.step()
            outcome[kind] = history
            if kind == "hooked":
                outcome["parameters"] = [p.detach().numpy().copy() for p in ddp.parameters()]
                x = data(rank, STEPS)
                if rank == 1:
                    x[0, 0] = float("nan")
                optimizer.zero_grad()
                ddp(x).square().mean().backward()
                outcome["nan"] = [bool(np.isnan(g).all()) for g in gradients(ddp)]
                outcome["stats"] = state.stats()
    return outcome


def trouble(rank: int, folder: Path) -> dict[str, Any]:
    """Two jobs that end badly, one after the other."""
    disagreed = disagree(rank)
    (folder / f"{rank}.disagreed.pickle").write_bytes(pickle.dumps(disagreed))
    return die(rank)


def die(rank: int) -> dict[str, Any]:
    """Rank 1 vanishes in the middle of a backward pass."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from p4reduce.ddp import P4ReduceState, allreduce_hook

    state = P4ReduceState.from_env(timeout=60)
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.02)
    ddp.register_comm_hook(state, allreduce_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    raised: Exception | None = None
    for step in range(3):
        optimizer.zero_grad()
        loss = ddp(data(rank, step)).square().mean()
        if rank == 1 and step == 2:
            os._exit(0)
        loss.backward()
        try:
            optimizer.step()
        except Exception as error:
            raised = error
    return {"error": raised, "step": step, "nan": any(bool(np.isnan(g).any()) for g in gradients(ddp))}


def disagree(rank: int) -> dict[str, Any]:
    """The ranks have models of different size: both are told, neither hangs."""
    import torch

    from p4reduce.ddp import P4ReduceState, allreduce_hook

    class Bucket:
        def buffer(self) -> Any:
            return torch.ones(1000 + rank)

        def is_last(self) -> bool:
            return True

        def index(self) -> int:
            return 0

    state = P4ReduceState.from_env(timeout=60)
    reduced = allreduce_hook(state, Bucket()).wait()  # type: ignore[arg-type]
    return {"error": state.error, "nan": bool(reduced.isnan().all())}


def restart(folder: Path) -> None:
    """Under torchrun: rank 1 dies in the middle the first time, the second time all train to the end."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from p4reduce.ddp import P4ReduceState, allreduce_hook

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    died = folder / "died"
    with P4ReduceState.from_env(timeout=60) as state:
        comm = state.stats()["comm"]
        (folder / f"{comm['epoch']}-{rank}.job").write_text(comm["job"])
        ddp = DistributedDataParallel(model(), bucket_cap_mb=0.02)
        ddp.register_comm_hook(state, allreduce_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(STEPS):
            if (rank, step) == (1, 2) and not died.exists():
                died.touch()
                os._exit(3)
            optimizer.zero_grad()
            ddp(data(rank, step)).square().mean().backward()
            optimizer.step()
        (folder / f"done-{rank}").write_text(str(state.stats()["buckets_switch"]))
    dist.destroy_process_group()


# -- the tests --


@pytest.fixture(scope="module")
def controllers() -> Iterator[Any]:
    """A function that makes a switch with this loss and a controller for it, and returns the controller's address."""
    from p4reduce_bmv2.embedded.switch import EmbeddedSwitch
    from p4reduce_controller.hosts import Hosts
    from p4reduce_controller.server import ControllerServer

    with contextlib.ExitStack() as stack:

        def start(loss: float = 0.0) -> str:
            ports = {n + 1: f"127.0.1.{n + 1}" for n in range(WORLD)}
            switch = stack.enter_context(EmbeddedSwitch(udp_ports=ports, loss=loss, seed=5))
            hosts = Hosts.embedded(switch.grpc_address, switch.endpoints, profile="w5")
            return str(stack.enter_context(ControllerServer(hosts, lease_seconds=10.0)).address)

        yield start


@pytest.fixture(scope="module")
def lossless(controllers: Any) -> str:
    return str(controllers())


def run_ranks(controller: str, folder: Path, scenario: str) -> list[Any]:
    """Run both ranks. Returns what they saved; None for a rank that saved nothing."""
    environment = {**os.environ, "P4REDUCE_CONTROLLER": controller, "GLOO_SOCKET_IFNAME": "lo"}
    children = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(folder), scenario],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        outputs = [child.communicate(timeout=90)[0] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    for child, output in zip(children, outputs, strict=True):
        assert child.returncode == 0, output
    saved = [folder / f"{rank}.pickle" for rank in range(WORLD)]
    return [pickle.loads(path.read_bytes()) if path.exists() else None for path in saved]


@pytest.fixture(scope="module")
def trained(lossless: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(lossless, tmp_path_factory.mktemp("trained"), "train")


def test_gradients_are_the_mean_within_the_bound(trained: list[dict[str, Any]]) -> None:
    for result in trained:
        for hooked, plain in zip(result["hooked"], result["plain"], strict=True):
            largest = max(np.abs(g).max() for g in plain)
            assert largest > 0
            for a, b in zip(hooked, plain, strict=True):
                # Two ranks leave 30 bits below a block's exponent, and none is above the largest gradient's. The
                # parameters drift by the same amounts, so later steps may differ a little more.
                np.testing.assert_allclose(a, b, rtol=2**-20, atol=float(largest) * 2**-24)


def test_the_ranks_are_equal_bit_for_bit(trained: list[dict[str, Any]]) -> None:
    for key in ("parameters",):
        for a, b in zip(trained[0][key], trained[1][key], strict=True):
            assert a.tobytes() == b.tobytes()
    for a_step, b_step in zip(trained[0]["hooked"], trained[1]["hooked"], strict=True):
        assert [g.tobytes() for g in a_step] == [g.tobytes() for g in b_step]


def test_everything_went_through_the_switch(trained: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(trained):
        stats = result["stats"]
        assert stats["steps"] == STEPS + 1
        assert stats["buckets_ring"] == stats["buckets_plain"] == 0
        assert stats["buckets_switch"] > STEPS + 1
        assert stats["error"] is None
        assert stats["comm"]["rank"] == rank
        assert stats["comm"]["completed"] == stats["buckets_switch"]


def test_nan_on_one_rank_reaches_both(trained: list[dict[str, Any]]) -> None:
    assert [all(result["nan"]) for result in trained] == [True, True]


def test_lost_frames_change_nothing(controllers: Any, trained: list[dict[str, Any]], tmp_path: Path) -> None:
    lossy = run_ranks(controllers(loss=0.05), tmp_path, "train")
    for with_loss, without in zip(lossy, trained, strict=True):
        assert [p.tobytes() for p in with_loss["parameters"]] == [p.tobytes() for p in without["parameters"]]
    assert sum(result["stats"]["comm"]["core"]["retransmissions"] for result in lossy) > 0


@pytest.fixture(scope="module")
def troubled(lossless: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[Any]]:
    """What the ranks saved of the job whose ranks disagree, and of the one with a rank that dies."""
    folder = tmp_path_factory.mktemp("troubled")
    died = run_ranks(lossless, folder, "trouble")
    return [pickle.loads((folder / f"{rank}.disagreed.pickle").read_bytes()) for rank in range(WORLD)], died


def test_a_worker_that_dies_is_named_at_the_optimizer(troubled: tuple[list[Any], list[Any]]) -> None:
    from p4reduce.errors import WorkerLostError

    survivor, dead = troubled[1]
    assert dead is None
    assert isinstance(survivor["error"], WorkerLostError)
    assert survivor["error"].ranks == (1,)
    assert survivor["nan"]


def test_models_that_differ_are_told_apart(troubled: tuple[list[Any], list[Any]]) -> None:
    from p4reduce.errors import JobError

    results = troubled[0]
    assert all(isinstance(result["error"], JobError) for result in results)
    assert any(type(result["error"]).__name__ == "MismatchError" for result in results)
    assert all(result["nan"] for result in results)


TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
# Otherwise the new workers find the old ones' addresses in torchrun's store, and gloo cannot connect.
AFRESH = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def check_restart(folder: Path) -> None:
    assert (folder / "died").exists()
    seen = [path.stem.split("-") for path in folder.glob("*.job")]
    epochs = sorted({int(epoch) for epoch, _ in seen})
    assert len(epochs) == 2
    assert sorted((epochs.index(int(epoch)), int(rank)) for epoch, rank in seen) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({path.read_text() for path in folder.glob("*.job")}) == 1
    assert all(int((folder / f"done-{rank}").read_text()) >= STEPS for rank in range(WORLD))


@pytest.mark.slow
def test_torchrun_restarts_the_job_under_a_new_epoch(lossless: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=1", __file__, "0", str(tmp_path), "restart"],
        env={
            **{**os.environ, **AFRESH, "P4REDUCE_CONTROLLER": lossless},
            **{"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    check_restart(tmp_path)


@pytest.mark.slow
@pytest.mark.bmv2
@pytest.mark.netns
def test_torchrun_on_two_hosts_restarts_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through BMv2, with an agent on each host: only the one whose worker died counts a restart, which is not enough
    for two."""
    from helpers import lab as labs

    from p4reduce_bmv2.lab import LabOptions

    for name, value in AFRESH.items():
        monkeypatch.setenv(name, value)
    rendezvous = "--rdzv-backend=c10d --rdzv-id=again --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT"
    here = "--local-addr=$P4REDUCE_ADDRESS --rdzv-conf=is_host=$((1 - RANK))"
    options = f"--nnodes=2 --nproc-per-node=1 --max-restarts=1 {rendezvous} {here}"
    command = f"exec {' '.join(TORCHRUN)} {options} {__file__} 0 {tmp_path} restart"
    with labs.run_folder(), labs.lab(LabOptions(workers=WORLD, switch="bmv2")) as lab:
        code, _, errors = labs.run(lab, "sh", "-c", command, timeout=120)
        assert code == 0, errors
    check_restart(tmp_path)


def test_example_four_lines(lossless: str) -> None:
    done = subprocess.run(
        [*TORCHRUN, "--standalone", "--nproc-per-node=2", str(ROOT / "examples" / "ddp_four_lines.py")],
        env={**os.environ, "P4REDUCE_CONTROLLER": lossless, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", done.stdout)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 2
    for rank in range(2):
        assert f"rank {rank}: 50 buckets through the switch, 0 through the ring" in done.stdout


def test_example_numpy_local() -> None:
    example = ROOT / "examples" / "numpy_local.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "bit for bit: True" in done.stdout
    error = re.search(r"exact mean: ([0-9.e-]+)", done.stdout)
    assert error is not None
    assert 0.0 < float(error[1]) < 1e-6


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
