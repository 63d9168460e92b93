# SPDX-License-Identifier: Apache-2.0
"""What stands in the switch: table entries and multicast groups, by the names of the P4 program.

Pure data. `base` builds what every switch holds, `Epoch` what one epoch adds, `difference` the updates that turn what
is there into what should be there. `p4rt` translates to P4Runtime.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from ipaddress import IPv4Address

from p4reduce import constants
from p4reduce_controller.hosts import BROADCAST_MAC, Hosts, mac_number
from p4reduce_controller.pools import Lease

ADMIT = "admit"
EPOCHS = "epochs"
WORKER_PORTS = "worker_ports"
SOURCES = "sources"
REPLICA = "replica"
FORWARD = "forward"
ARP = "arp"
TABLES = (ADMIT, EPOCHS, WORKER_PORTS, REPLICA, SOURCES, FORWARD, ARP)
COUNTER = "reduce_counter"
COUNTS_PER_ROW = 8
COUNTER_NAMES = {
    "contributions": constants.COUNT_CONTRIBUTIONS,
    "results": constants.COUNT_RESULTS,
    "repeats": constants.COUNT_REPEATS,
    "duplicates": constants.COUNT_DUPLICATES,
    "stale": constants.COUNT_STALE,
    "mismatch": constants.COUNT_MISMATCH,
    "refused": constants.COUNT_REFUSED,
}
FLOOD_INSTANCE = 1
NOBODY = 0
"""The statistics row of frames that belong to no epoch."""
STRAY_NAMES = {"guarded": constants.COUNT_GUARDED, "refused": constants.COUNT_REFUSED}
"""What that row counts."""

Fields = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class TableEntry:
    """One exact-match entry: `key` and `params` are (name, value) pairs in the order of the P4 program."""

    table: str
    key: Fields
    action: str
    params: Fields = ()

    @property
    def identity(self) -> tuple[object, ...]:
        """What the switch tells entries apart by."""
        return self.table, self.key

    def __str__(self) -> str:
        return f"entry {self.table}({', '.join(f'{name}={value}' for name, value in self.key)})"


@dataclass(frozen=True, slots=True)
class Group:
    """One multicast group: a set of (switch port, replication id)."""

    number: int
    replicas: frozenset[tuple[int, int]]

    @property
    def identity(self) -> tuple[object, ...]:
        """What the switch tells groups apart by."""
        return "group", self.number

    def __str__(self) -> str:
        return f"multicast group {self.number}"


@dataclass(frozen=True, slots=True)
class CounterCell:
    """One cell of a counter array, set to `packets` (only ever by a MODIFY)."""

    counter: str
    index: int
    packets: int = 0

    @property
    def identity(self) -> tuple[object, ...]:
        """What the switch tells cells apart by."""
        return self.counter, self.index

    def __str__(self) -> str:
        return f"counter {self.counter}[{self.index}]"


Entity = TableEntry | Group | CounterCell


class Verb(Enum):
    """What a write does with an entity."""

    INSERT = "insert"
    MODIFY = "modify"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Update:
    """One step of a write."""

    verb: Verb
    entity: Entity

    def __str__(self) -> str:
        return f"{self.verb.value} {self.entity}"


def inserts(entities: Iterable[Entity]) -> list[Update]:
    """Insert each, in order."""
    return [Update(Verb.INSERT, entity) for entity in entities]


def deletes(entities: Iterable[Entity]) -> list[Update]:
    """Delete each, in order."""
    return [Update(Verb.DELETE, entity) for entity in entities]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank sits: its address, the port it is behind, and where results are sent."""

    rank: int
    ip: int
    mac: int
    port: int
    udp_port: int


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch's part of the switch. `places` are all ranks in order; `lease.rids` belong to them one by one."""

    number: int
    lease: Lease
    places: tuple[Place, ...]

    def admit(self) -> list[Entity]:
        """The entries that let contributions in. They go in last and come out first."""
        full = (1 << len(self.places)) - 1
        lease = self.lease
        return [
            TableEntry(
                ADMIT,
                (
                    ("ingress_port", p.port),
                    ("ipv4_src", p.ip),
                    ("udp_src", p.udp_port),
                    ("epoch", self.number),
                    ("rank", p.rank),
                ),
                "admit_worker",
                (
                    ("worker", 1 << p.rank),
                    ("full", full),
                    ("pool_base", lease.pool_base),
                    ("pool_size", lease.pool_size),
                    ("group", lease.group),
                    ("workers", len(self.places)),
                    ("stats", lease.stats),
                ),
            )
            for p in self.places
        ]

    def rest(self) -> list[Entity]:
        """Everything but the admit entries: the epoch's name, the replicas' addresses, the multicast group."""
        entities: list[Entity] = [
            TableEntry(EPOCHS, (("epoch", self.number),), "known_epoch", (("stats", self.lease.stats),))
        ]
        for place, rid in zip(self.places, self.lease.rids, strict=True):
            params = (("mac", place.mac), ("ip", place.ip), ("udp_port", place.udp_port), ("rank", place.rank))
            entities.append(TableEntry(REPLICA, (("egress_rid", rid),), "to_worker", params))
        replicas = frozenset((place.port, rid) for place, rid in zip(self.places, self.lease.rids, strict=True))
        return [*entities, Group(self.lease.group, replicas)]

    def counters(self) -> list[CounterCell]:
        """The epoch's row of statistics, at zero."""
        return [CounterCell(COUNTER, self.lease.stats * COUNTS_PER_ROW + event) for event in COUNTER_NAMES.values()]

    def install(self) -> list[Update]:
        """Updates that start the epoch."""
        zero = [Update(Verb.MODIFY, cell) for cell in self.counters()]
        return zero + inserts(self.rest()) + inserts(self.admit())

    def revoke(self) -> list[Update]:
        """Updates after which no contribution of this epoch counts any more."""
        return deletes(self.admit())

    def remove(self) -> list[Update]:
        """Updates that take the rest away, the group before the addresses it leads to."""
        return deletes(reversed(self.rest()))


def stray_indices() -> list[int]:
    """The cells of frames that belong to no epoch, in the order of STRAY_NAMES."""
    return [NOBODY * COUNTS_PER_ROW + event for event in STRAY_NAMES.values()]


def base(hosts: Hosts) -> list[Entity]:
    """What the switch holds whether or not there is a job.

    Every host's place is known, so that its workers are told why they are refused. Hosts with an endpoint of their
    own sit behind UDP ports, which carry nothing but our frames; the others get their MAC, ARP and broadcasts served,
    for frames that come in by the host's own port and under its own MAC and IPv4 address.
    """
    entities: list[Entity] = [
        TableEntry(WORKER_PORTS, (("ingress_port", host.port), ("ipv4_src", host.ip_number)), "nack")
        for host in hosts.hosts
    ]
    wired = [host for host in hosts.hosts if host.endpoint is None]
    if not wired:
        return entities
    entities.append(Group(constants.FLOOD_GROUP, frozenset((host.port, FLOOD_INSTANCE) for host in wired)))
    flood = (("group", constants.FLOOD_GROUP),)
    entities.append(TableEntry(FORWARD, (("dst_mac", BROADCAST_MAC),), "flood", flood))
    switch_ip, switch_mac = int(IPv4Address(hosts.switch.ip)), mac_number(hosts.switch.mac)
    entities.append(TableEntry(ARP, (("target_ip", switch_ip),), "answer_arp", (("mac", switch_mac),)))
    for host in wired:
        source = (("ingress_port", host.port), ("src_mac", host.mac_number), ("src_ip", host.ip_number))
        entities.append(TableEntry(SOURCES, source, "permit"))
        entities.append(TableEntry(FORWARD, (("dst_mac", host.mac_number),), "to_port", (("port", host.port),)))
        entities.append(TableEntry(ARP, (("target_ip", host.ip_number),), "answer_arp", (("mac", host.mac_number),)))
    return entities


def difference(wanted: Sequence[Entity], present: Iterable[Entity]) -> list[Update]:
    """Updates that turn `present` into `wanted`: what is in excess goes first, then changes, then what is missing."""
    targets = {entity.identity: entity for entity in wanted}
    found = {entity.identity: entity for entity in present}
    excess = [entity for entity in found.values() if entity.identity not in targets]
    # Nothing may be admitted to an epoch that is half taken down.
    excess.sort(key=lambda entity: not (isinstance(entity, TableEntry) and entity.table == ADMIT))
    changed = [e for e in wanted if e.identity in found and found[e.identity] != e]
    missing = [e for e in wanted if e.identity not in found]
    return deletes(excess) + [Update(Verb.MODIFY, entity) for entity in changed] + inserts(missing)
