# SPDX-License-Identifier: Apache-2.0
"""Cores and a switch without a network: whoever uses it decides which frame arrives where, when and how often."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from p4reduce.constants import HEADER_BYTES, UDP_PORT
from p4reduce.core.batch import ReceiveBatch, SendBatch
from p4reduce.core.bucket import Bucket
from p4reduce.core.worker import WorkerCore
from p4reduce.quantize import Exponents, LaneFormat, block_exponents, dequantize, quantize
from p4reduce.sim.network import Datagram
from p4reduce.sim.runner import SWITCH_IP, Scenario, Simulation, core_config, membership
from p4reduce.sim.switch import ReferenceSwitch, SwitchModel
from p4reduce.wire import headers_from_bytes
from p4reduce.wire import profile as lookup_profile

Vector = npt.NDArray[np.float32]


def field(frame: bytes, name: str) -> int:
    """A field of a frame's header."""
    return int(headers_from_bytes(frame)[name][0])


def edit(frame: bytes, **fields: int) -> bytes:
    """A frame with fields of its header changed."""
    record = headers_from_bytes(frame).copy()
    for name, value in fields.items():
        record[name] = value
    head: bytes = record.tobytes()
    return head + frame[HEADER_BYTES:]


def damage(frame: bytes, byte: int, flip: int = 1) -> bytes:
    """A frame with some bits of one byte changed."""
    changed = bytearray(frame)
    changed[byte] ^= flip
    return bytes(changed)


class ByHand:
    """The job of a scenario whose faults, delays and seed do not matter. `now` is the caller's."""

    def __init__(self, scenario: Scenario, switch: SwitchModel | None = None, *, capacity: int = 64) -> None:
        self.scenario = scenario
        self.now = 0.0
        self.membership = membership(scenario)
        self.profile = lookup_profile(scenario.profile)
        self.switch: SwitchModel = switch if switch is not None else ReferenceSwitch(self.profile)
        self.switch.admit(self.membership)
        self.cores = [WorkerCore(core_config(scenario, rank), self.now) for rank in range(scenario.world_size)]
        self._capacity = capacity

    def submit(self, *buckets: Bucket) -> None:
        """One bucket for every rank."""
        for core, bucket in zip(self.cores, buckets, strict=True):
            core.submit(bucket, self.now)

    def sent(self, rank: int) -> list[bytes]:
        """All that a rank wants to send now."""
        batch = SendBatch(self._capacity)
        frames: list[bytes] = []
        while True:
            self.cores[rank].transmit(batch, self.now)
            if batch.count == 0:
                return frames
            frames += batch.frames()

    def to_switch(self, rank: int, frame: bytes) -> list[tuple[int, bytes]]:
        """Let a rank's frame arrive at the switch; returns (rank, frame) for what the switch sends."""
        member = self.membership.members[rank]
        datagram = Datagram(member.ip, member.udp_port, SWITCH_IP, UDP_PORT, frame)
        ranks = {member.port: member.rank for member in self.membership.members}
        return [(ranks[port], answer.data) for port, answer in self.switch.process(member.port, datagram)]

    def to_worker(self, rank: int, *frames: bytes) -> None:
        """Let frames arrive at a rank, all in one batch."""
        batch = ReceiveBatch(self.profile, max(len(frames), 1))
        for frame in frames:
            batch.append(frame)
        self.cores[rank].receive(batch, self.now)

    def exchange(self, ranks: Iterable[int] | None = None) -> int:
        """Move frames of these ranks (default: all) through the switch until nobody sends; returns how many."""
        count = 0
        ranks = list(range(len(self.cores)) if ranks is None else ranks)
        while True:
            frames = [(rank, frame) for rank in ranks for frame in self.sent(rank)]
            if not frames:
                return count
            for rank, frame in frames:
                count += 1
                for to, answer in self.to_switch(rank, frame):
                    self.to_worker(to, answer)


def direct(
    vectors: list[Vector], *, block: int = 256, mean: bool = False, exponents: Exponents | None = None
) -> Vector:
    """What every rank must get, bit by bit: the integers of all vectors added without any protocol.

    `exponents`: what the ranks agreed upon, if not the largest of every block.
    """
    fmt = LaneFormat(32, len(vectors), block)
    if exponents is None:
        exponents = np.max([block_exponents(vector, block) for vector in vectors], axis=0)
    total = np.zeros(len(vectors[0]), dtype=np.uint32)
    lanes = np.empty_like(total)
    for vector in vectors:
        quantize(vector, exponents, fmt, lanes)
        total += lanes
    out = np.empty(len(total), dtype=np.float32)
    dequantize(total, exponents, fmt, out, mean)
    return out


def finish(simulation: Simulation, limit: float = 60.0) -> None:
    """Run a simulation to its end and raise the first error that a core reported, if any."""
    simulation.run(limit)
    for core in simulation.cores:
        if core.error is not None:
            raise core.error
