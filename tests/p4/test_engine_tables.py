# SPDX-License-Identifier: Apache-2.0
"""The engine's control plane: tables, counters, groups, sessions, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from p4reduce_bmv2.embedded.engine import Engine
from p4reduce_bmv2.embedded.errors import BadEntry, EntryExists, EntryMissing, TableFull
from p4reduce_bmv2.embedded.tables import Entry, KeyField

COMPILED = Path(__file__).parent / "programs" / "compiled"
FRAME = bytes.fromhex("0a 00 0000 00000000")


def load(name: str) -> Engine:
    return Engine((COMPILED / f"{name}.json").read_text())


def port_of(engine: Engine, frame: bytes = FRAME) -> int | None:
    out = engine.process(1, frame)
    return out[0][0] if out else None


# --- tables ----------------------------------------------------------------------------------------------------------


def test_a_table_describes_itself() -> None:
    engine = load("ternary")
    table = engine.tables["Run.t"]
    assert table.keys == (
        KeyField("h.x.a", "ternary", 8),
        KeyField("h.x.c", "ternary", 16),
        KeyField("h.x.d", "lpm", 32),
    )
    assert {name: info.params for name, info in table.actions.items()} == {"Run.forward": (("port", 9),)}
    assert (table.needs_priority, table.has_counters, table.const_entries, table.const_default) == (
        True,
        False,
        False,
        False,
    )
    assert table.size == 1024
    assert table.default == ("Run.forward", (9,))


def test_tables_that_the_compiler_made_are_hidden() -> None:
    assert set(load("exact").tables) == {"Run.t"}
    assert set(load("default_action").tables) == {"Run.t", "Run.keyless"}
    # The JSON cannot tell this keyless table of the author's from those; whoever has the P4Info can.
    engine = load("const_default")
    assert set(engine.tables) == {"Run.keyed"}
    assert {"Run.keyed", "Run.keyless"} < set(engine.all_tables)


def test_life_of_an_entry() -> None:
    engine = load("exact")
    table = engine.tables["Run.t"]
    handle = table.insert((0x0A,), "Run.forward", (3, 1))
    assert port_of(engine) == 3
    assert table.find((0x0A,)) == handle
    assert table.get(handle) == Entry(handle, (0x0A,), "Run.forward", (3, 1), 0)
    table.modify(handle, "Run.forward", (4, 1))
    assert port_of(engine) == 4
    table.modify(handle, "Run.drop", ())
    assert port_of(engine) is None
    assert [e.action for e in table.entries()] == ["Run.drop"]
    table.delete(handle)
    assert (len(table), port_of(engine)) == (0, None)
    again = table.insert((0x0A,), "Run.forward", (5, 1))
    assert again != handle
    assert port_of(engine) == 5
    for gone in (lambda: table.get(handle), lambda: table.delete(handle), lambda: table.modify(handle, "Run.drop", ())):
        with pytest.raises(EntryMissing):
            gone()
    with pytest.raises(EntryMissing):
        table.find((0x0B,))


def test_a_searching_table_sees_changes_at_once() -> None:
    """Results are remembered; every change must forget them."""
    engine = load("ternary")
    table = engine.tables["Run.t"]
    low = table.insert(((0, 0), (0, 0), (0, 0)), "Run.forward", (1,), 1)
    assert port_of(engine) == 1
    high = table.insert(((0x0A, 0xFF), (0, 0), (0, 0)), "Run.forward", (2,), 2)
    assert port_of(engine) == 2
    table.modify(high, "Run.forward", (3,))
    assert port_of(engine) == 3
    table.delete(high)
    assert port_of(engine) == 1
    table.delete(low)
    assert port_of(engine) == 9
    table.set_default("Run.forward", (8,))
    assert port_of(engine) == 8


def test_a_searching_table_remembers_a_bounded_number_of_results() -> None:
    engine = load("lpm")
    engine.tables["Run.t"].insert(((0, 1),), "Run.forward", (1,))
    for value in range(5000):
        assert port_of(engine, bytes(4) + value.to_bytes(4, "big")) == 1
    assert len(engine.tables["Run.t"]._cache) <= 4096


def test_equal_priorities_go_to_the_older_entry() -> None:
    engine = load("ternary")
    table = engine.tables["Run.t"]
    table.insert(((0x0A, 0xFF), (0, 0), (0, 0)), "Run.forward", (1,), 7)
    table.insert(((0x0A, 0x0F), (0, 0), (0, 0)), "Run.forward", (2,), 7)
    assert port_of(engine) == 1


def test_a_full_table() -> None:
    table = load("exact").tables["Run.t"]
    handles = [table.insert((value,), "Run.drop", ()) for value in range(4)]
    with pytest.raises(TableFull, match="holds 4 entries"):
        table.insert((9,), "Run.drop", ())
    table.delete(handles[0])
    table.insert((9,), "Run.drop", ())


def test_the_same_key_twice() -> None:
    exact = load("exact").tables["Run.t"]
    exact.insert((1,), "Run.drop", ())
    with pytest.raises(EntryExists):
        exact.insert((1,), "Run.forward", (1, 1))
    ternary = load("ternary").tables["Run.t"]
    key = ((1, 1), (0, 0), (0, 0))
    ternary.insert(key, "Run.forward", (1,), 1)
    ternary.insert(key, "Run.forward", (1,), 2)
    with pytest.raises(EntryExists):
        ternary.insert(key, "Run.forward", (1,), 2)
    # Another spelling of the same key.
    optional = load("optional").tables["Run.t"]
    optional.insert((7, 1), "Run.forward", (1,), 1)
    with pytest.raises(EntryExists):
        optional.insert(((7, 0xFF), 1), "Run.forward", (1,), 1)


def test_a_masked_key_is_stored_masked() -> None:
    table = load("masked_key").tables["Run.t"]
    handle = table.insert((0xFFFFFFFF, 1), "Run.forward", (1,))
    assert table.get(handle).key == (0x00FF00F0, 1)
    with pytest.raises(EntryExists):
        table.insert((0x00FF00F0, 1), "Run.forward", (1,))


BAD: list[tuple[str, tuple[Any, ...], str, tuple[Any, ...], int, str]] = [
    ("exact", (256,), "Run.drop", (), 0, "has 8 bits, 256 does not fit"),
    ("exact", (-1,), "Run.drop", (), 0, "-1 does not fit"),
    ("exact", ((1, 1),), "Run.drop", (), 0, "does not fit"),
    ("exact", (None,), "Run.drop", (), 0, "does not fit"),
    ("exact", (1, 2), "Run.drop", (), 0, "has 1 key fields, not 2"),
    ("exact", (), "Run.drop", (), 0, "has 1 key fields, not 0"),
    ("exact", (1,), "Run.other", (), 0, "has no action 'Run.other'"),
    ("exact", (1,), "Run.drop", (1,), 0, "takes 0 parameters, not 1"),
    ("exact", (1,), "Run.forward", (512, 0), 0, "port of Run.forward has 9 bits, 512 does not fit"),
    ("exact", (1,), "Run.forward", ("1", 0), 0, "'1' does not fit"),
    ("exact", (1,), "Run.drop", (), 5, "has no priorities"),
    ("lpm", ((0x0A000001, 8),), "Run.forward", (1,), 0, "bits outside its mask or prefix"),
    ("lpm", ((0, 33),), "Run.forward", (1,), 0, "does not fit"),
    ("lpm", (0,), "Run.forward", (1,), 0, "(lpm) cannot be 0"),
    ("ternary", ((3, 1), (0, 0), (0, 0)), "Run.forward", (1,), 1, "bits outside its mask or prefix"),
    ("ternary", ((0, 0), (0, 0), (0, 0)), "Run.forward", (1,), 0, "needs a priority of 1 or more"),
    ("ternary", ((0, 256), (0, 0), (0, 0)), "Run.forward", (1,), 1, "does not fit"),
    ("range", ((2, 1), 1, (0, 0)), "Run.forward", (1,), 1, "the range 2..1 is empty"),
    ("range", ((0, 0x10000), 1, (0, 0)), "Run.forward", (1,), 1, "does not fit"),
    ("default_action", (), "Run.mark", (1,), 0, "has 1 key fields, not 0"),
]


@pytest.mark.parametrize(("program", "key", "action", "params", "priority", "reason"), BAD)
def test_bad_entries(
    program: str, key: tuple[Any, ...], action: str, params: tuple[Any, ...], priority: int, reason: str
) -> None:
    table = load(program).tables["Run.t"]
    with pytest.raises(BadEntry) as caught:
        table.insert(key, action, params, priority)
    assert reason in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert len(table) == 0


def test_what_the_program_fixes() -> None:
    tables = load("const_entries").tables
    first = tables["Run.first"]
    assert [(e.key, e.params, e.const) for e in first.entries()] == [
        (((0x12, 0xFF), (5, 7)), (1,), True),
        (((0x10, 0xF0), (6, 100)), (2,), True),
        (((0x10, 0xF0), (0, 0xFFFF)), (3,), True),
    ]
    # The first entry is the one that wins: its priority is the largest.
    priorities = [e.priority for e in first.entries()]
    assert priorities == sorted(priorities, reverse=True)
    handle = next(first.entries()).handle
    for change in (
        lambda: first.insert(((0, 0), (0, 1)), "Run.forward", (1,), 1),
        lambda: first.modify(handle, "Run.forward", (1,)),
        lambda: first.delete(handle),
        lambda: first.set_default("Run.forward", (1,)),
        first.reset_default,
    ):
        with pytest.raises(BadEntry, match="the program fixes"):
            change()


def test_defaults() -> None:
    engine = load("default_action")
    table = engine.tables["Run.t"]
    assert (table.default, port_of(engine)) == (("Run.forward", (5,)), 5)
    table.set_default("Run.forward", (6,))
    assert (table.default, port_of(engine)) == (("Run.forward", (6,)), 6)
    table.reset_default()
    assert (table.default, port_of(engine)) == (("Run.forward", (5,)), 5)
    with pytest.raises(BadEntry):
        table.set_default("Run.forward", ())
    root = json.loads((COMPILED / "default_action.json").read_text())
    del next(t for t in root["pipelines"][0]["tables"] if t["name"] == "Run.t")["default_entry"]
    without = Engine(root)
    assert without.tables["Run.t"].default is None
    assert without.process(1, FRAME) == [(0, FRAME)]
    without.tables["Run.t"].set_default("Run.forward", (7,))
    assert port_of(without) == 7
    without.tables["Run.t"].reset_default()
    assert port_of(without) == 0


# --- counters, replication, packets ----------------------------------------------------------------------------------


def test_direct_counters_belong_to_their_entry() -> None:
    engine = load("counters")
    table = engine.tables["Run.t"]
    assert table.has_counters
    one = table.insert((5,), "Run.forward", (1,))
    two = table.insert((6,), "Run.forward", (1,))
    engine.process(1, bytes.fromhex("00 05 0000 00000000"))
    engine.process(1, bytes.fromhex("00 05 0000 00000000 aabb"))
    engine.process(1, bytes.fromhex("00 07 0000 00000000"))
    assert [(table.get(h).packets, table.get(h).bytes) for h in (one, two)] == [(2, 18), (0, 0)]
    table.modify(one, "Run.forward", (2,))
    assert table.get(one).packets == 2
    table.get(one).packets = 100
    engine.process(1, bytes.fromhex("00 05 0000 00000000"))
    assert table.get(one).packets == 101


def test_cells_may_be_assigned() -> None:
    engine = load("counters")
    array = engine.counters["Run.events"]
    assert (array.size, len(array.packets), len(array.bytes)) == (4, 4, 4)
    array.packets[1], array.bytes[1] = 7, 70
    engine.process(1, bytes.fromhex("01 00 0000 00000000"))
    assert (array.packets[1], array.bytes[1]) == (8, 78)
    registers = load("registers")
    registers.registers["Run.words"][2] = 0xABCD
    ((_, frame),) = registers.process(1, bytes.fromhex("00 02 0000 00000000"))
    assert frame[4:] == bytes.fromhex("0000abcd")


def test_groups_and_sessions() -> None:
    engine = load("multicast")
    engine.set_multicast_group(1, [(2, 1), (3, 1)])
    assert engine.multicast_groups == {1: ((2, 1), (3, 1))}
    assert [p for p, _ in engine.process(1, bytes.fromhex("01 00 0000 00000000"))] == [2, 3]
    engine.set_multicast_group(1, [(4, 1)])
    assert [p for p, _ in engine.process(1, bytes.fromhex("01 00 0000 00000000"))] == [4]
    engine.delete_multicast_group(1)
    assert engine.process(1, bytes.fromhex("01 00 0000 00000000")) == []
    with pytest.raises(EntryMissing):
        engine.delete_multicast_group(1)
    with pytest.raises(EntryMissing):
        engine.delete_clone_session(1)
    for number, replicas in (
        (0, []),
        (65536, []),
        (1, [(511, 0)]),
        (1, [(-1, 0)]),
        (1, [(1, 65536)]),
        (1, [(1, 0)] * 2),
    ):
        with pytest.raises(BadEntry):
            engine.set_multicast_group(number, replicas)
    for number, replicas, length in ((32768, [], 0), (-1, [], 0), (1, [(511, 0)], 0), (1, [], -1)):
        with pytest.raises(BadEntry):
            engine.set_clone_session(number, replicas, length)


def test_a_clone_session_may_cut_its_clones() -> None:
    ingress = load("clone_ingress")
    ingress.set_clone_session(5, [(2, 0)], 3)
    found = dict(ingress.process(4, bytes.fromhex("01 10 2000 00000000")))
    assert (len(found[1]), found[2]) == (8, bytes.fromhex("c1 11 00"))
    egress = load("clone_egress")
    egress.set_clone_session(6, [(5, 0)], 2)
    found = dict(egress.process(1, bytes.fromhex("01 10 0000 00000000")))
    assert (len(found[1]), found[5]) == (8, bytes.fromhex("e2 10"))


def test_what_is_no_frame() -> None:
    engine = load("exact")
    for port, frame in ((1, b""), (-1, b"x"), (511, b"x")):
        with pytest.raises(ValueError, match="a frame of"):
            engine.process(port, frame)


def test_a_packet_that_goes_round_for_ever_is_dropped() -> None:
    engine = load("resubmit")
    assert engine.process(1, bytes.fromhex("fe 00 0000 00000000")) != []
    assert engine.stats.too_many_passes == 0
    root = json.loads((COMPILED / "resubmit.json").read_text())
    for action in root["actions"]:
        action["primitives"] = [
            p for p in action["primitives"] if p["parameters"][0].get("value") != ["scalars", "meta_t.round"]
        ]
    endless = Engine(root)
    assert endless.process(1, bytes.fromhex("01 00 0000 00000000")) == []
    assert endless.stats.too_many_passes == 1
    root = json.loads((COMPILED / "clone_egress.json").read_text())
    condition = next(c for c in root["pipelines"][1]["conditionals"] if "instance_type" in str(c["expression"]))
    condition["true_next"] = condition["false_next"]
    copies = Engine(root)
    copies.set_clone_session(6, [(5, 0)])
    assert 200 < len(copies.process(1, bytes.fromhex("01 00 0000 00000000"))) < 300
    assert copies.stats.too_many_passes == 1


def test_failed_assertions_are_counted() -> None:
    engine = load("log_assert")
    for frame in ("09 00 0000 00000000", "01 80 0000 00000000", "01 00 0000 00000000"):
        engine.process(1, bytes.fromhex(frame))
    assert engine.stats.failed_assertions == 2


def test_log_messages_go_to_logging(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="p4reduce_bmv2.embedded.engine"):
        load("log_assert").process(1, bytes.fromhex("07 00 0000 0000002a"))
    assert "a is 7, d is 42" in caplog.messages
