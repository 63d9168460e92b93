# SPDX-License-Identifier: Apache-2.0
"""What a job leases of the switch, and how large its window may be.

The switch's slots are divided into equal pools, one pool a job. With the pool come numbers of which the switch has a
limited stock: a multicast group, a replication id (rid) for every worker, a row of statistics counters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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

    def give_back(self, numbers: Iterable[int]) -> None:
        """Make numbers available again."""
        self._free += numbers


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
    """Static equal pools. Leases come and go; nothing here is thread-safe or does I/O."""

    def __init__(self, pool_slots: int = 64, slots: int = constants.SLOTS) -> None:
        """ConfigError when `pool_slots` is not from 2 (one OR, one ADD slot) to `slots`."""
        if not MIN_WINDOW <= pool_slots <= slots:
            raise ConfigError(f"pool-slots must be from {MIN_WINDOW} to {slots} (the switch's slots), not {pool_slots}")
        self.slots = slots
        self.pool_slots = pool_slots
        self.bases = tuple(range(0, slots - pool_slots + 1, pool_slots))
        self._pools = Numbers(0, len(self.bases) - 1)
        self._groups = Numbers(FIRST_GROUP, LAST_GROUP)
        self._rids = Numbers(FIRST_RID, LAST_RID)
        self._stats = Numbers(1, constants.STATS_ROWS - 1)

    def take(self, workers: int) -> Lease | None:
        """Lease a pool and its numbers for `workers` ranks; None when the switch has not enough left of one."""
        pool, group, stats = self._pools.take(1), self._groups.take(1), self._stats.take(1)
        rids = self._rids.take(workers)
        if pool is None or group is None or stats is None or rids is None:
            for numbers, taken in (
                (self._pools, pool),
                (self._groups, group),
                (self._stats, stats),
                (self._rids, rids),
            ):
                numbers.give_back(taken or ())
            return None
        return Lease(self.bases[pool[0]], self.pool_slots, group[0], tuple(rids), stats[0])

    def give_back(self, lease: Lease) -> None:
        """End a lease. Its entries must be off the switch: whoever gets the pool next would share it otherwise."""
        self._pools.give_back([self.bases.index(lease.pool_base)])
        self._groups.give_back([lease.group])
        self._rids.give_back(lease.rids)
        self._stats.give_back([lease.stats])


def window(
    pool_slots: int,
    receive_frames: Iterable[int],
    workers_on_port: Mapping[int, int],
    slots_in_use: Mapping[int, int],
    port_budget: int = PORT_BUDGET,
) -> tuple[int, int]:
    """Slots that each worker of a job may use at once: (OR slots, ADD slots).

    A worker never has more frames coming than its receive buffer holds (`receive_frames`, one number a worker), and
    all workers behind a switch port together no more than `port_budget`. `workers_on_port` counts this job's workers,
    `slots_in_use` what other jobs already use behind a port. Every job gets MIN_WINDOW whatever others took: too many
    frames in flight cost retransmissions, never a wrong sum.
    """
    size = min(pool_slots, *receive_frames)
    for port, workers in workers_on_port.items():
        size = min(size, (port_budget - slots_in_use.get(port, 0)) // workers)
    size = max(size, MIN_WINDOW)
    or_slots = max(size // 8, 1)
    return or_slots, size - or_slots
