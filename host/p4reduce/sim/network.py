# SPDX-License-Identifier: Apache-2.0
"""A seeded network of links that lose, copy, delay and damage datagrams, go down, and count what they did."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

from p4reduce.errors import ConfigError
from p4reduce.sim.clock import VirtualClock


class Datagram(NamedTuple):
    """A UDP datagram with its addresses; IPv4 addresses as numbers."""

    src: int
    src_port: int
    dst: int
    dst_port: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong on a link: a probability for every datagram, each drawn by itself.

    `loss`: it vanishes. `duplicate`: a second copy travels by itself. `reorder`: it takes up to `late` seconds
    longer. `corrupt`: one byte of the UDP payload changes, as no real link with checksums would let it.

    Besides, a link goes down `outages` times a second on average, for `outage` seconds on average: all that is sent
    meanwhile vanishes. What is on its way arrives.
    """

    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0
    late: float = 0.001
    outages: float = 0.0
    outage: float = 0.01

    def __post_init__(self) -> None:
        for name in ("loss", "duplicate", "reorder", "corrupt"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"{name} is a probability below 1, not {getattr(self, name)}")
        if not 0.0 <= self.outages < math.inf or not 0.0 < self.outage < math.inf:
            raise ConfigError(
                f"a link goes down 0 or more times a second, each for some time, "
                f"not {self.outages} times for {self.outage} s"
            )


@dataclass(slots=True)
class LinkCounters:
    """What a link has done."""

    sent: int = 0
    lost: int = 0
    duplicated: int = 0
    delayed: int = 0
    overtaken: int = 0
    """Datagrams that arrived after one that was sent later."""
    corrupted: int = 0
    delivered: int = 0
    cut: int = 0
    """Datagrams that vanished because the link was down."""
    outages: int = 0
    """How often the link has been found down: windows in which nothing was sent do not count."""

    def __add__(self, other: LinkCounters) -> LinkCounters:
        return LinkCounters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


class Link:
    """One direction of a cable: a delay in seconds, a rate in bits per second (0: unlimited), faults."""

    def __init__(
        self,
        clock: VirtualClock,
        deliver: Callable[[Datagram], None],
        *,
        seed: str,
        faults: Faults,
        delay: float = 20e-6,
        rate: float = 0.0,
    ) -> None:
        self.counters = LinkCounters()
        self.faults = faults
        self._clock = clock
        self._deliver = deliver
        self._random = random.Random(seed)
        self._delay = delay
        self._rate = rate
        self._free_at = 0.0
        self._numbered = 0
        self._newest = -1
        # Outages have a generator of their own: turning them on changes nothing else that a seed draws.
        self._outage_random = random.Random(f"{seed}/outages")
        self._down_from = self._down_until = 0.0
        self._found_down = False
        if faults.outages:
            self._plan_outage()

    def send(self, datagram: Datagram) -> None:
        """Put a datagram on the link."""
        draw, faults = self._random.random, self.faults
        self.counters.sent += 1
        if self._rate:
            self._free_at = max(self._free_at, self._clock.now) + 8 * len(datagram.data) / self._rate
        if faults.outages and self._down():
            self.counters.cut += 1
            return
        if draw() < faults.loss:
            self.counters.lost += 1
            return
        self._travel(datagram)
        if draw() < faults.duplicate:
            self.counters.duplicated += 1
            self._travel(datagram)

    def _plan_outage(self) -> None:
        """Draw the next window in which the link is down."""
        draw, faults = self._outage_random.expovariate, self.faults
        self._down_from = self._down_until + draw(faults.outages)
        self._down_until = self._down_from + draw(1.0 / faults.outage)
        self._found_down = False

    def _down(self) -> bool:
        now = self._clock.now
        while now >= self._down_until:
            self._plan_outage()
        down = now >= self._down_from
        if down and not self._found_down:
            self._found_down = True
            self.counters.outages += 1
        return down

    def _travel(self, datagram: Datagram) -> None:
        draw, faults = self._random.random, self.faults
        time = max(self._free_at, self._clock.now) + self._delay
        if draw() < faults.reorder:
            self.counters.delayed += 1
            time += draw() * faults.late
        if draw() < faults.corrupt:
            self.counters.corrupted += 1
            data = bytearray(datagram.data)
            data[self._random.randrange(len(data))] ^= self._random.randrange(1, 256)
            datagram = datagram._replace(data=bytes(data))
        number = self._numbered
        self._numbered += 1
        self._clock.at(time, lambda: self._arrive(number, datagram))

    def _arrive(self, number: int, datagram: Datagram) -> None:
        self.counters.delivered += 1
        if number < self._newest:
            self.counters.overtaken += 1
        self._newest = max(self._newest, number)
        self._deliver(datagram)
