# SPDX-License-Identifier: Apache-2.0
"""One worker of a churn's job: reduces random arrays, several at once, and compares every sum with the exact one."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from p4reduce.communicator import Communicator
from p4reduce.config import Settings
from p4reduce.session import join
from p4reduce.sim.byhand import Vector, direct
from p4reduce_bmv2.campaign.messages import Place

_REPORT_SECONDS = 0.5
_WAIT_SECONDS = 60.0
_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class Work:
    """What the ranks of a job do alike. `rounds`: None goes on until the campaign says `Stop`."""

    seed: str
    rounds: int | None
    largest: int
    """Elements of a bucket at most."""


@dataclass(frozen=True, slots=True)
class Stop:
    """To a worker: go on to a round that all ranks agree upon, and leave."""


@dataclass(frozen=True, slots=True)
class Count:
    """From a worker: what it has done so far. `ended` in the last one; `error`: what ended it, if not well."""

    time: float
    buckets: int
    elements: int
    wrong: int
    ended: bool = False
    error: str = ""


def main(channel: Connection, place: Place, work: Work) -> None:
    """Entry point of the process."""
    from p4reduce_bmv2.campaign.worker import settle_in

    settle_in(place)
    worker = _Worker(channel, place, work)
    error = ""
    try:
        worker.run()
    except BaseException as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"
    with contextlib.suppress(OSError):
        channel.send(worker.count(ended=True, error=error))
    logging.shutdown()
    sys.stderr.flush()
    os._exit(0)


class _Worker:
    def __init__(self, channel: Connection, place: Place, work: Work) -> None:
        self._channel = channel
        self._place = place
        self._work = work
        self._stopping = threading.Event()
        self._said = 0.0
        self.buckets = self.elements = self.wrong = 0

    def count(self, ended: bool = False, error: str = "") -> Count:
        return Count(time.monotonic(), self.buckets, self.elements, self.wrong, ended, error)

    def run(self) -> None:
        place = self._place
        settings = Settings(
            controller=place.controller, job=place.job, rank=place.rank, world_size=place.world_size,
            address=place.address, join_timeout=place.timeout,
        )  # fmt: skip
        with join(settings) as comm:
            number = 0
            while self._goes_on(comm, number):
                self._round(comm, number)
                number += 1
                if time.monotonic() > self._said + _REPORT_SECONDS:
                    self._said = time.monotonic()
                    self._channel.send(self.count())

    def _goes_on(self, comm: Communicator, number: int) -> bool:
        if self._work.rounds is not None:
            return number < self._work.rounds
        if self._channel.poll():
            self._channel.recv()
            self._stopping.set()
        # Only a reduction can make all ranks stop after the same round.
        votes = np.full(1, float(self._stopping.is_set()), dtype=np.float32)
        return float(comm.allreduce(votes)[0]) == 0.0

    def _round(self, comm: Communicator, number: int) -> None:
        dice = random.Random(f"{self._work.seed}/{number}")
        pending = []
        for bucket in range(dice.randrange(1, _IN_FLIGHT + 1)):
            size = int(2 ** dice.uniform(0.0, np.log2(self._work.largest)))
            mean = dice.random() < 0.5
            vectors = [self._vector(number, bucket, rank, size) for rank in range(comm.world_size)]
            op: Any = "mean" if mean else "sum"
            pending.append((vectors, mean, comm.allreduce_async(vectors[comm.rank], op)))
        for vectors, mean, future in pending:
            # A right sum has one form only, bit by bit.
            right = direct(vectors, mean=mean)
            self.wrong += future.result(_WAIT_SECONDS).tobytes() != right.tobytes()
            self.buckets += 1
            self.elements += right.size

    def _vector(self, number: int, bucket: int, rank: int, size: int) -> Vector:
        dice = random.Random(f"{self._work.seed}/{number}/{bucket}/{rank}")
        rng = np.random.default_rng(dice.getrandbits(64))
        vector: Vector = rng.standard_normal(size, dtype=np.float32) * np.float32(10.0 ** dice.randrange(-20, 20))
        return vector
