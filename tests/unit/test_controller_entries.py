# SPDX-License-Identifier: Apache-2.0
"""What the controller writes into the switch, against the names, widths and sizes of the compiled P4 program."""

from __future__ import annotations

from google.protobuf import text_format
from p4.config.v1 import p4info_pb2

from p4reduce import constants, pipeline
from p4reduce_controller import entries
from p4reduce_controller.entries import Entity, Epoch, Group, Place, TableEntry, Update, Verb, base, difference
from p4reduce_controller.hosts import Hosts, parse
from p4reduce_controller.pools import Lease, Pools

LAB = """
[switch]
grpc = "127.0.0.1:9559"
profile = "w5"
ip = "10.0.0.254"
mac = "02:70:34:00:00:fe"
[[host]]
name = "h1"
ip = "10.0.0.1"
mac = "02:70:34:00:00:01"
port = 1
[[host]]
name = "h2"
ip = "10.0.0.2"
mac = "02:70:34:00:00:02"
port = 2
"""
EPOCH = Epoch(
    77,
    Lease(128, 64, 5, (9, 10), 3),
    (Place(0, 0x0A000001, 0x027034000001, 1, 4000), Place(1, 0x0A000002, 0x027034000002, 2, 4001)),
)


def of(entities: list[Entity], table: str) -> list[TableEntry]:
    return [e for e in entities if isinstance(e, TableEntry) and e.table == table]


def test_every_name_and_width_is_the_programs() -> None:
    program = text_format.Parse(pipeline.find("w5").p4info.read_text(), p4info_pb2.P4Info())
    tables = {table.preamble.alias: table for table in program.tables}
    actions = {action.preamble.alias: action for action in program.actions}
    assert set(entries.TABLES) == set(tables)
    assert [c.preamble.alias for c in program.counters] == [entries.COUNTER]
    everything = base(parse(LAB)) + EPOCH.rest() + EPOCH.admit()
    for table in tables:
        assert of(everything, table), f"nothing is ever written to table {table}"
    for entry in everything:
        if not isinstance(entry, TableEntry):
            continue
        fields = tables[entry.table].match_fields
        assert [name for name, _ in entry.key] == [field.name for field in fields]
        action = actions[entry.action]
        assert action.preamble.id in [ref.id for ref in tables[entry.table].action_refs]
        assert [name for name, _ in entry.params] == [param.name for param in action.params]
        widths = [field.bitwidth for field in fields] + [param.bitwidth for param in action.params]
        values = [value for _, value in entry.key + entry.params]
        assert all(0 <= value < 1 << width for value, width in zip(values, widths, strict=True))


def test_a_full_switch_fits_into_the_tables() -> None:
    program = text_format.Parse(pipeline.find("w5").p4info.read_text(), p4info_pb2.P4Info())
    sizes = {table.preamble.alias: table.size for table in program.tables}
    pools = Pools(pool_slots=2)
    used = dict.fromkeys(sizes, 0)
    while (lease := pools.take(8)) is not None:
        epoch = Epoch(1000 + lease.stats, lease, tuple(Place(rank, rank, rank, 1, 1) for rank in range(8)))
        for table in used:
            used[table] += len(of(epoch.rest() + epoch.admit(), table))
    assert used[entries.REPLICA] == 8 * 511, "one row of statistics is nobody's"
    assert all(used[table] <= sizes[table] for table in used), used


def test_the_largest_ranks_bits_fit() -> None:
    places = tuple(Place(rank, rank, rank, 1, 1) for rank in range(constants.MAX_WORKERS))
    epoch = Epoch(1, Lease(0, 64, 2, tuple(range(2, 66)), 1), places)
    params = [dict(e.params) for e in of(epoch.admit(), entries.ADMIT)]
    assert params[63]["worker"] == 1 << 63
    assert {p["full"] for p in params} == {(1 << 64) - 1}
    assert sum(p["worker"] for p in params) == (1 << 64) - 1


def test_base_of_wired_hosts() -> None:
    entities = base(parse(LAB))
    assert Group(1, frozenset({(1, 1), (2, 1)})) in entities
    assert {dict(e.key)["dst_mac"]: e.params for e in of(entities, "forward")} == {
        0xFFFF_FFFF_FFFF: (("group", 1),),
        0x027034000001: (("port", 1),),
        0x027034000002: (("port", 2),),
    }
    assert {dict(e.key)["target_ip"]: dict(e.params)["mac"] for e in of(entities, "arp")} == {
        0x0A0000FE: 0x0270340000FE,
        0x0A000001: 0x027034000001,
        0x0A000002: 0x027034000002,
    }
    assert [(e.key, e.action) for e in of(entities, "sources")] == [
        ((("ingress_port", 1), ("src_mac", 0x027034000001), ("src_ip", 0x0A000001)), "permit"),
        ((("ingress_port", 2), ("src_mac", 0x027034000002), ("src_ip", 0x0A000002)), "permit"),
    ]
    assert [e.key for e in of(entities, "worker_ports")] == [
        (("ingress_port", 1), ("ipv4_src", 0x0A000001)),
        (("ingress_port", 2), ("ipv4_src", 0x0A000002)),
    ]


def test_base_of_udp_ports_is_their_places_only() -> None:
    hosts = Hosts.embedded("127.0.0.1:9559", {1: ("127.0.0.1", 41), 2: ("127.0.0.1", 42)}, profile="w5")
    assert [e.identity for e in base(hosts)] == [
        ("worker_ports", (("ingress_port", 1), ("ipv4_src", 0x7F000101))),
        ("worker_ports", (("ingress_port", 2), ("ipv4_src", 0x7F000102))),
    ]


def test_an_epoch() -> None:
    assert [dict(e.key) | dict(e.params) for e in of(EPOCH.admit(), "admit")] == [
        {
            "ingress_port": place.port,
            "ipv4_src": place.ip,
            "udp_src": place.udp_port,
            "epoch": 77,
            "rank": place.rank,
            "worker": 1 << place.rank,
            "full": 3,
            "pool_base": 128,
            "pool_size": 64,
            "group": 5,
            "workers": 2,
            "stats": 3,
        }
        for place in EPOCH.places
    ]
    assert Group(5, frozenset({(1, 9), (2, 10)})) in EPOCH.rest()
    assert [(dict(e.key)["egress_rid"], dict(e.params)) for e in of(EPOCH.rest(), "replica")] == [
        (9, {"mac": 0x027034000001, "ip": 0x0A000001, "udp_port": 4000, "rank": 0}),
        (10, {"mac": 0x027034000002, "ip": 0x0A000002, "udp_port": 4001, "rank": 1}),
    ]
    assert [e.params for e in of(EPOCH.rest(), "epochs")] == [(("stats", 3),)]


def test_admit_entries_go_in_last_and_come_out_first() -> None:
    install = EPOCH.install()
    assert [u.entity for u in install[-2:]] == EPOCH.admit()
    assert [str(u) for u in install[:7]] == [f"modify counter reduce_counter[{24 + i}]" for i in range(7)]
    assert EPOCH.revoke() == [Update(Verb.DELETE, e) for e in EPOCH.admit()]
    removed = [u.entity for u in EPOCH.revoke() + EPOCH.remove()]
    written = [u.entity for u in install if u.verb is Verb.INSERT]
    assert sorted(map(str, removed)) == sorted(map(str, written))


def test_difference() -> None:
    there = base(parse(LAB))
    assert difference(there, there) == []
    assert [u.verb for u in difference(there, [])] == [Verb.INSERT] * len(there)
    stale = EPOCH.rest() + EPOCH.admit()
    updates = difference(there, stale + there)
    assert {u.verb for u in updates} == {Verb.DELETE}
    assert [u.entity for u in updates[:2]] == EPOCH.admit(), "first nothing may count any more"
    moved = [Group(1, frozenset({(3, 1)})) if isinstance(e, Group) else e for e in there]
    assert difference(moved, there) == [Update(Verb.MODIFY, Group(1, frozenset({(3, 1)})))]
