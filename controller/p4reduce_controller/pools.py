# SPDX-License-Identifier: Apache-2.0
"""What a job leases of the switch, and how large its window may be.

A job's pool is one contiguous range of the switch's slots, as large as it wants, but never more than half of what is
free: there is always something left for the next one. With the pool come numbers of which the switch has a limited
stock: a multicast group, a replication id (rid) for every worker, a row of statistics counters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from p4reduce import constants
from p4reduce.errors import ConfigError

PORT_BUDGET = 60
"""Slots in flight behind one switch port. BMv2's egress queue holds 64 packets and drops the rest silently; 4 are left
for nacks, repeated results and whatever else crosses the port."""
FIRST_GROUP = constants.FLOOD_GROUP + 1
LAST_GROUP = 32767
"""PI reserves group ids from 32768 on for clone sessions (p4lang/PI issue 630)."""
FIRST_RID = 2
"""Flooded frames are replicated with instance 1."""
LAST_RID = 8191
"""The egress table of replicas holds 8192 entries."""
FAIR_WINDOW = 8
"""A worker's window up to here keeps the switch busy enough that sharing what is left would cost more than it gives."""
MIN_WINDOW = 2
"""One slot for OR frames, one for ADD frames."""


class Numbers:
    """Hands out the lowest free numbers of a range."""

    def __init__(self, first: int, last: int) -> None:
        self._last = last
        self._next = first
        self._free: list[int] = []

    def take(self, count: int) -> list[int] | None:
        """`count` numbers, ascending, or None when fewer are free."""
        if count > len(self._free) + self._last + 1 - self._next:
            return None
        self._free.sort()
        taken, self._free = self._free[:count], self._free[count:]
        fresh = count - len(taken)
        taken += range(self._next, self._next + fresh)
        self._next += fresh
        return taken

    def take_exactly(self, numbers: Sequence[int]) -> bool:
        """Just these; False, and nothing is taken, when one is not free or not of the range."""
        wanted, free = set(numbers), set(self._free)
        beyond = {number for number in wanted if number >= self._next}
        if len(wanted) != len(numbers) or not wanted - beyond <= free or any(n > self._last for n in beyond):
            return False
        frontier = max(beyond, default=self._next - 1) + 1
        self._free = sorted((free | set(range(self._next, frontier))) - wanted)
        self._next = frontier
        return True

    def give_back(self, numbers: Iterable[int]) -> None:
        """Make numbers available again."""
        self._free += numbers


class Ranges:
    """Contiguous ranges of slots: first fit, neighbours grow together again."""

    def __init__(self, size: int) -> None:
        self._free: list[tuple[int, int]] = [(0, size)]
        """(first slot, slots), ascending, no two adjacent."""

    @property
    def free(self) -> list[tuple[int, int]]:
        """The free ranges, ascending: first slot and number of slots."""
        return list(self._free)

    @property
    def total(self) -> int:
        """Slots that are free."""
        return sum(size for _, size in self._free)

    def take(self, minimum: int, want: int) -> tuple[int, int] | None:
        """The first free range of `want` slots; where there is none, the largest of at least `minimum`, or None."""
        found = next(((base, want) for base, size in self._free if size >= want), None)
        if found is None:
            found = max(self._free, key=lambda item: item[1], default=None)
            if found is None or found[1] < minimum:
                return None
        self.take_exactly(*found)
        return found

    def take_exactly(self, base: int, size: int) -> bool:
        """This range; False, and nothing is taken, when not all of it is free."""
        for position, (first, length) in enumerate(self._free):
            if size > 0 and first <= base and base + size <= first + length:
                rest = [(first, base - first), (base + size, first + length - base - size)]
                self._free[position : position + 1] = [item for item in rest if item[1]]
                return True
        return False

    def give_back(self, base: int, size: int) -> None:
        """Make a range available again."""
        merged: list[tuple[int, int]] = []
        for first, length in sorted([*self._free, (base, size)]):
            if merged and merged[-1][0] + merged[-1][1] == first:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((first, length))
        self._free = merged


@dataclass(frozen=True, slots=True)
class Lease:
    """What one epoch holds of the switch. `pool_base` and `pool_size` are in slots."""

    pool_base: int
    pool_size: int
    group: int
    rids: tuple[int, ...]
    """One replication id for every rank."""
    stats: int
    """Row of the statistics counter; row 0 belongs to nobody."""


class Pools:
    """Leases come and go; nothing here is thread-safe or does I/O."""

    def __init__(self, pool_slots: int = 64, slots: int = constants.SLOTS) -> None:
        """`pool_slots`: what a job gets that does not say how many slots it wants.

        ConfigError when that is not from 2 (one OR, one ADD slot) to `slots`.
        """
        if not MIN_WINDOW <= pool_slots <= slots:
            raise ConfigError(f"pool-slots must be from {MIN_WINDOW} to {slots} (the switch's slots), not {pool_slots}")
        self.slots = slots
        self.pool_slots = pool_slots
        self._ranges = Ranges(slots)
        self._groups = Numbers(FIRST_GROUP, LAST_GROUP)
        self._rids = Numbers(FIRST_RID, LAST_RID)
        self._stats = Numbers(1, constants.STATS_ROWS - 1)

    @property
    def free(self) -> list[tuple[int, int]]:
        """The ranges that nobody leases, ascending: first slot and number of slots."""
        return self._ranges.free

    def take(self, workers: int, minimum: int = MIN_WINDOW, want: int = 0) -> Lease | None:
        """Lease a pool and its numbers for `workers` ranks; None when the switch has not enough left of one.

        The pool has at most `want` slots (0: `pool_slots`), at most half of those that are free (an even number), but
        never fewer than `minimum`. Where the free slots lie too scattered, it is the largest range there is.
        """
        minimum = max(minimum, MIN_WINDOW)
        half = self._ranges.total // 2
        size = max(minimum, min(want or self.pool_slots, half - half % 2))
        pool, group, stats = self._ranges.take(minimum, size), self._groups.take(1), self._stats.take(1)
        rids = self._rids.take(workers)
        if pool is None or group is None or stats is None or rids is None:
            if pool is not None:
                self._ranges.give_back(*pool)
            for numbers, taken in ((self._groups, group), (self._stats, stats), (self._rids, rids)):
                numbers.give_back(taken or ())
            return None
        return Lease(*pool, group[0], tuple(rids), stats[0])

    def take_exactly(self, lease: Lease) -> bool:
        """Lease again what an earlier controller had leased; False, and nothing is taken, when that is not free."""
        if not self._ranges.take_exactly(lease.pool_base, lease.pool_size):
            return False
        taken: list[tuple[Numbers, Sequence[int]]] = []
        for numbers, wanted in ((self._groups, [lease.group]), (self._stats, [lease.stats]), (self._rids, lease.rids)):
            if not numbers.take_exactly(wanted):
                self._ranges.give_back(lease.pool_base, lease.pool_size)
                for stock, given in taken:
                    stock.give_back(given)
                return False
            taken.append((numbers, wanted))
        return True

    def give_back(self, lease: Lease) -> None:
        """End a lease. Its entries must be off the switch: whoever gets the pool next would share it otherwise."""
        self._ranges.give_back(lease.pool_base, lease.pool_size)
        self._groups.give_back([lease.group])
        self._rids.give_back(lease.rids)
        self._stats.give_back([lease.stats])


def window(
    pool_slots: int,
    receive_frames: Iterable[int],
    workers_on_port: Mapping[int, int],
    slots_in_use: Mapping[int, int],
    port_budget: int = PORT_BUDGET,
    minimum: int = MIN_WINDOW,
    bound: int = 0,
) -> tuple[int, int]:
    """Slots that each worker of a job may use at once: (OR slots, ADD slots).

    A worker never has more frames coming than its receive buffer holds (`receive_frames`, one number a worker), than
    its pool has slots, or than the policy's `bound` (0: none). All workers behind a switch port together should have
    no more than `port_budget`. `workers_on_port` counts this job's workers, `slots_in_use` what other jobs already use
    behind a port. A job takes half of what is left of a port, so that the next job behind it finds something; but the
    first FAIR_WINDOW slots of a worker are not halved, and every job gets `minimum` whatever others took: too many
    frames in flight cost retransmissions, never a wrong sum.
    """
    size = pool_slots
    for port, workers in workers_on_port.items():
        left = max(port_budget - slots_in_use.get(port, 0), 0)
        size = min(size, max(left // 2, min(left, FAIR_WINDOW * workers)) // workers)
    size = min(max(size, minimum), pool_slots, *receive_frames)
    size = max(min(size, bound) if bound else size, MIN_WINDOW)
    or_slots = max(size // 8, 1)
    return or_slots, size - or_slots
