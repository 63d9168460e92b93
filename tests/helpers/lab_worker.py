# SPDX-License-Identifier: Apache-2.0
"""What the workers of a lab run in the tests: `python lab_worker.py MODE OPTIONS`, one line of JSON at the end.

reduce    allreduces seeded data, checked bit for bit; with --ring, gloo allreduces go on at the same time
hold      allreduces without end, until an error
stranger  all ranks but the last reduce; the last sends frames that look as if they were of the job
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import p4reduce
from p4reduce import quantize, wire
from p4reduce.communicator import Communicator
from p4reduce.controller_client import ControllerClient

PIECE = 1 << 20
DEADLINE = 60.0
RING_ROUNDS = 20
RING_ELEMENTS = 1 << 18
FLOOD = 64
Floats = npt.NDArray[np.float32]


def piece(seed: int, rank: int, at: int, count: int) -> Floats:
    """Elements from `at` on of a rank's data: numbers of many sizes."""
    source = np.random.default_rng([seed, rank, at])
    powers = source.integers(-20, 20, size=-(-PIECE // 512))
    values = source.standard_normal(count, dtype=np.float32)
    return np.ldexp(values, np.repeat(powers, 512)[:count], dtype=np.float32)


def data(seed: int, rank: int, elements: int) -> Floats:
    parts = [piece(seed, rank, at, min(PIECE, elements - at)) for at in range(0, elements, PIECE)]
    return np.concatenate(parts)


def count_wrong(seed: int, result: Floats, world: int) -> int:
    """How many elements of a sum are not, bit for bit, what the quantized data of all ranks add up to."""
    wrong = 0
    fmt = quantize.LaneFormat(32, world)
    for at in range(0, len(result), PIECE):
        got = result[at : at + PIECE]
        parts = [piece(seed, rank, at, len(got)) for rank in range(world)]
        exponents = np.maximum.reduce([quantize.block_exponents(part) for part in parts])
        total, lanes = np.zeros(len(got), np.uint32), np.empty(len(got), np.uint32)
        for part in parts:
            quantize.quantize(part, exponents, fmt, lanes)
            total += lanes
        expected = np.empty(len(got), np.float32)
        quantize.dequantize(total, exponents, fmt, expected, False)
        wrong += int((expected.view(np.uint32) != got.view(np.uint32)).sum())
    return wrong


def reduce(options: argparse.Namespace) -> dict[str, Any]:
    ring = Ring() if options.ring else None
    with p4reduce.connect() as comm:
        if ring is not None:
            ring.start()
        report = rounds(comm, options, comm.world_size)
        if ring is not None:
            report |= ring.join()
    return report


def rounds(comm: Communicator, options: argparse.Namespace, world: int) -> dict[str, Any]:
    wrong, seconds, digest = 0, 0.0, hashlib.sha256()
    spans = []
    for number in range(options.rounds):
        seed = options.seed + number
        mine = data(seed, comm.rank, options.elements)
        comm.barrier()
        began = time.monotonic()
        result = comm.allreduce(mine, out=mine)
        spans.append((began, time.monotonic()))
        seconds += spans[-1][1] - began
        digest.update(result.tobytes())
        if comm.rank == 0 or options.check_all:
            wrong += count_wrong(seed, result, world)
    core = comm.stats()["core"]
    report = {"rank": comm.rank, "wrong": wrong, "seconds": seconds, "spans": spans}
    return report | {"sha256": digest.hexdigest(), "core": core}


class Ring:
    """Allreduces of gloo in a thread, over the same links."""

    def __init__(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        self._dist = dist
        self._wrong = -1
        self._spans: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        import torch

        wrong = 0
        spans = []
        for number in range(RING_ROUNDS):
            began = time.monotonic()
            values = torch.full((RING_ELEMENTS,), number + self._dist.get_rank(), dtype=torch.int64)
            self._dist.all_reduce(values)
            spans.append((began, time.monotonic()))
            world = self._dist.get_world_size()
            wrong += int((values != world * number + world * (world - 1) // 2).sum())
        self._wrong, self._spans = wrong, spans

    def join(self) -> dict[str, Any]:
        self._thread.join(DEADLINE)
        self._dist.destroy_process_group()
        return {"ring_wrong": self._wrong, "ring_spans": self._spans}


def hold(options: argparse.Namespace) -> dict[str, Any]:
    values, last = np.ones(options.elements, np.float32), time.monotonic()
    with p4reduce.connect() as comm:
        try:
            while True:
                comm.allreduce(values)
                if last:
                    print(json.dumps({"running": comm.rank}), flush=True)
                last = 0.0
        except p4reduce.P4ReduceError as error:
            print(json.dumps({"rank": comm.rank, "error": type(error).__name__, "text": str(error)}), flush=True)
            raise SystemExit(3) from None


def stranger(options: argparse.Namespace) -> dict[str, Any]:
    """Rank 0 tells the stranger the epoch, reduces once its first frames are out, and tells it when to stop."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
    folder = Path(options.folder)
    if rank == world:
        return flood(folder, world)
    with p4reduce.connect(world_size=world) as comm:
        if rank == 0:
            description = {"epoch": comm.epoch, "profile": comm.profile}
            scratch = folder / "epoch.new"
            scratch.write_text(json.dumps(description))
            scratch.replace(folder / "epoch")
        await_(lambda: (folder / "flooding").exists())
        report = rounds(comm, options, world)
        comm.barrier()
        if rank == 0:
            client = ControllerClient(os.environ["P4REDUCE_CONTROLLER"])
            report["counters"] = dict(client.status(comm.job).jobs[0].counters)
            client.close()
            (folder / "stop").touch()
    return report


def flood(folder: Path, world: int) -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from helpers.frames import Contribution, Worker, words_of

    await_(lambda: (folder / "epoch").exists())
    job = json.loads((folder / "epoch").read_text())
    source = np.random.default_rng(1)
    words = wire.profile(job["profile"]).words
    frames = []
    for number in range(FLOOD):
        member = Worker.at(number % world)
        # Half of them come from the address of a member, half from the stranger's own.
        mine = Worker(member.rank, world + 1, f"10.0.0.{world + 1}", f"02:70:34:00:00:{world + 1:02x}", 40000)
        contribution = Contribution(
            member if number & 1 else mine,
            words_of(int(source.integers(1 << 32)), words),
            epoch=job["epoch"],
            slot=int(source.integers(64)),
            round=int(source.integers(4)),
            op=number & 2 and 1,
            tag=wire.pack_tag(int(source.integers(4)), int(source.integers(64)), int(source.integers(1 << 16))),
        )
        frames.append(contribution.frame())
    sent = 0
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as link:
        link.bind(("eth0", 0))
        stop = folder / "stop"
        deadline = time.monotonic() + DEADLINE
        while not stop.exists() and time.monotonic() < deadline:
            for frame in frames[:8]:
                link.send(frame)
                sent += 1
            frames = frames[8:] + frames[:8]
            (folder / "flooding").touch()
            time.sleep(0.002)  # leaves the switch time for the job
    return {"rank": world, "flooded": sent}


def await_(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.005)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("reduce", "hold", "stranger"))
    parser.add_argument("--elements", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ring", action="store_true")
    parser.add_argument("--check-all", action="store_true", help="every rank checks, not rank 0 alone")
    parser.add_argument("--folder", default=".")
    options = parser.parse_args()
    modes: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "reduce": reduce,
        "hold": hold,
        "stranger": stranger,
    }
    print(json.dumps(modes[options.mode](options)), flush=True)


if __name__ == "__main__":
    main()
