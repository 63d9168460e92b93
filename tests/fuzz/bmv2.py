# SPDX-License-Identifier: Apache-2.0
"""Frames into a real simple_switch_grpc: the engine's steps on it, and bytes that are no frames at all."""

from __future__ import annotations

import random

from helpers.bmv2_engine import PORTS, Bmv2Engine

from fuzz.frames import EngineTarget, demand
from p4reduce.constants import UDP_PORT, VERSION
from p4reduce.sim.adapter import SWITCH_MAC, mac_of, to_frame
from p4reduce.sim.network import Datagram
from p4reduce.sim.runner import FIRST_IP, FIRST_UDP_PORT, SWITCH_IP
from p4reduce.wire import Kind, Op

LENGTHS = (1, 13, 14, 15, 33, 34, 41, 42, 60, 73, 74, 75, 330, 1354, 1500, 9000)
"""Around the ends of headers, of frames, and of what interfaces carry."""
RAW = 40
"""Frames of random bytes before each step, at least."""
SETTLED = 30
"""Steps after which memory must not grow any more."""
GROWTH = 24 << 20
"""Bytes that the allocator may still take after that."""
OTHER_PORTS = (0, 7, 9, 42, 300)


class Bmv2Target(EngineTarget):
    """Two jobs on BMv2 while frames come from ports of their members (even seeds) or of nobody (odd seeds)."""

    def __init__(self) -> None:
        self.bmv2 = Bmv2Engine()
        super().__init__(self.bmv2)
        self.base = 0
        self._steps = 0

    def close(self) -> None:
        """End the process."""
        self.bmv2.close()

    def step(self, seed: int) -> None:
        """Random bytes, then a step of EngineTarget; memory is looked at after each."""
        draw = random.Random(f"bmv2 {seed}")
        for _ in range(RAW):
            self._raw(draw)
        super().step(seed)
        self._steps += 1
        if self._steps == SETTLED:
            self.base = self.bmv2.rss
        demand(not self.base or self.bmv2.rss < self.base + GROWTH, f"memory grows: {self.bmv2.rss >> 20} MiB")

    def _raw(self, draw: random.Random) -> None:
        """Bytes behind no, half or all of the headers that lead to the program's own parser states."""
        size = draw.choice((*LENGTHS, draw.randrange(1, 2000)))
        body = draw.randbytes(size)
        begin = draw.choice((b"", bytes([VERSION, Kind.CONTRIBUTE]), bytes([VERSION, Kind.CONTRIBUTE, Op.OR, 1])))
        to = draw.choice((UDP_PORT, UDP_PORT, 53))
        datagram = Datagram(FIRST_IP, FIRST_UDP_PORT, SWITCH_IP, to, begin + body[42:])
        frame = (to_frame(datagram, mac_of(FIRST_IP), SWITCH_MAC) + body)[: max(size, 1)]
        kind = draw.randrange(3)
        if kind == 0:
            frame = body
        elif kind == 1:
            made = bytearray(frame)
            for _ in range(draw.choice((1, 3))):
                made[draw.randrange(len(made))] = draw.randrange(256)
            frame = bytes(made)
        self.found["raw"] += 1
        self.found["answers to raw"] += len(self.bmv2.process(draw.choice((*PORTS, *OTHER_PORTS)), frame))

    def _look_after(self) -> None:
        demand(self.bmv2.bmv2.alive, "the switch has died")
