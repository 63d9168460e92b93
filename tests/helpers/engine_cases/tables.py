# SPDX-License-Identifier: Apache-2.0
"""Cases about tables and control flow. Most frames are data_t: a, b (8 bits), c (16), d (32)."""

from __future__ import annotations

from helpers.engine_cases.model import case, default, insert, send

ANY = (0, 0)

CASES = [
    # --- exact -------------------------------------------------------------------------------------------------------
    case(
        "exact",
        "hit, drop and miss",
        [
            insert("t", (0x0A,), "forward", (3, 0xBEEF)),
            insert("t", (0x0B,), "drop"),
            insert("t", (0x0C,), "forward", (0, 0)),
        ],
        send(1, "0a 01 0002 00000003", (3, "0a 01 beef 00000003")),
        send(1, "0b 01 0002 00000003"),
        send(1, "0c 01 0002 00000003", (0, "0c 01 0000 00000003")),
        send(1, "0d 01 0002 00000003"),
        send(1, "0a 01 0002 00000003 7061796c6f6164", (3, "0a 01 beef 00000003 7061796c6f6164")),
    ),
    case(
        "exact_wide",
        "validity, 128 bits and one bit in one key",
        [
            insert("t", (2, 1, 0xFE80 << 112 | 7, 1), "forward", (4,)),
            insert("t", (2, 1, 0xFE80 << 112 | 7, 0), "forward", (5,)),
            # w is not there: its fields count as 0 in a key.
            insert("t", (2, 0, 0, 0), "forward", (6,)),
        ],
        send(2, "01 00 0000 00000000 fe80 00*13 07 80", (4, "01 00 0000 00000000 fe80 00*13 07 80")),
        send(2, "01 00 0000 00000000 fe80 00*13 07 7f", (5, "01 00 0000 00000000 fe80 00*13 07 7f")),
        send(2, "01 00 0000 00000000 fe80 00*13 08 80", (9, "01 00 0000 00000000 fe80 00*13 08 80")),
        send(3, "01 00 0000 00000000 fe80 00*13 07 80", (9, "01 00 0000 00000000 fe80 00*13 07 80")),
        send(2, "02 00 0000 00000000 fe80", (6, "02 00 0000 00000000 fe80")),
    ),
    case(
        "masked_key",
        "a mask over a field and a slice of another",
        [
            insert("t", (0x00120030, 0b1010), "forward", (1,)),
            insert("t", (0x00FF00F0, 0b0000), "forward", (2,)),
        ],
        # d & 00ff00f0 = 00120030; a[5:2] of 1110_1011 is 1010
        send(1, "eb 00 0000 ff12ff3f", (1, "eb 00 0000 ff12ff3f")),
        send(1, "ef 00 0000 ff12ff3f", (9, "ef 00 0000 ff12ff3f")),
        send(1, "c3 00 0000 55ff55f5", (2, "c3 00 0000 55ff55f5")),
    ),
    case(
        "key_kinds",
        "signed, computed and metadata keys, parameters of odd widths",
        [
            # s = -2 (0xfe), (n + o) mod 16 = 3
            insert("one", (0xFE, 3), "go", (2, 0xA, 0x7F)),
            insert("two", ((0x10, 0xF0),), "go", (5, 0x1, 0xFE), 10),
        ],
        # n=1, o=2: sum 3, m.sum 3: only one. s = 127 + 1 wraps to -128.
        send(1, "fe 12", (2, "80 a2")),
        # n=9, o=a: 19 mod 16 = 3 hits one (n becomes a), m.sum = 0x13 hits two: s = -2 + 1, n = 1.
        send(1, "fe 9a", (5, "ff 1a")),
        send(1, "02 12", (9, "02 12")),
    ),
    # --- lpm ---------------------------------------------------------------------------------------------------------
    case(
        "lpm",
        "the longest prefix wins",
        [
            insert("t", ((0x0A000000, 8),), "forward", (1,)),
            insert("t", ((0x0A0B0000, 16),), "forward", (2,)),
            insert("t", ((0x0A0B0C0D, 32),), "forward", (3,)),
            insert("t", ((0x0A0B8000, 17),), "forward", (4,)),
        ],
        send(1, "00 00 0000 0a0a0a0a", (1, "00 00 0000 0a0a0a0a")),
        send(1, "00 00 0000 0a0b0c0e", (2, "00 00 0000 0a0b0c0e")),
        send(1, "00 00 0000 0a0b0c0d", (3, "00 00 0000 0a0b0c0d")),
        send(1, "00 00 0000 0a0b8c0d", (4, "00 00 0000 0a0b8c0d")),
        send(1, "00 00 0000 0b0b0c0d", (9, "00 00 0000 0b0b0c0d")),
    ),
    case(
        "lpm",
        "prefix of length 0",
        [insert("t", ((0, 0),), "forward", (1,)), insert("t", ((0x80000000, 1),), "forward", (2,))],
        send(1, "00 00 0000 7fffffff", (1, "00 00 0000 7fffffff")),
        send(1, "00 00 0000 80000000", (2, "00 00 0000 80000000")),
    ),
    case(
        "lpm_exact",
        "exact fields on both sides of a prefix",
        [
            insert("t", (1, (0x0A000000, 8), 2), "forward", (1,)),
            insert("t", (1, (0x0A0B0000, 16), 3), "forward", (2,)),
            insert("t", (1, (0, 0), 3), "forward", (3,)),
        ],
        send(1, "01 02 0000 0a0b0000", (1, "01 02 0000 0a0b0000")),
        send(1, "01 03 0000 0a0b0000", (2, "01 03 0000 0a0b0000")),
        send(1, "01 03 0000 0a0c0000", (3, "01 03 0000 0a0c0000")),
        send(1, "02 03 0000 0a0b0000", (9, "02 03 0000 0a0b0000")),
    ),
    # --- ternary, range, optional ------------------------------------------------------------------------------------
    case(
        "ternary",
        "the highest priority wins, whatever the order of insertion",
        [
            insert("t", ((0x12, 0xFF), ANY, (0, 0)), "forward", (1,), 10),
            insert("t", ((0x10, 0xF0), ANY, (0, 0)), "forward", (2,), 20),
            insert("t", ((0x10, 0xF0), (0x00FF, 0x00FF), (0, 0)), "forward", (3,), 30),
            insert("t", (ANY, ANY, (0x0A000000, 8)), "forward", (4,), 5),
        ],
        send(1, "12 00 0000 00000000", (2, "12 00 0000 00000000")),
        send(1, "13 00 aaff 00000000", (3, "13 00 aaff 00000000")),
        send(1, "22 00 0000 0a112233", (4, "22 00 0000 0a112233")),
        send(1, "22 00 0000 0b112233", (9, "22 00 0000 0b112233")),
    ),
    case(
        "range",
        "bounds belong to a range",
        [
            insert("t", ((10, 20), 1, ANY), "forward", (1,), 1),
            insert("t", ((15, 15), 1, ANY), "forward", (2,), 2),
            insert("t", ((0, 0xFFFF), 2, (0x01, 0x01)), "forward", (3,), 1),
        ],
        send(1, "01 00 0009 00000000", (9, "01 00 0009 00000000")),
        send(1, "01 00 000a 00000000", (1, "01 00 000a 00000000")),
        send(1, "01 00 000f 00000000", (2, "01 00 000f 00000000")),
        send(1, "01 00 0014 00000000", (1, "01 00 0014 00000000")),
        send(1, "01 00 0015 00000000", (9, "01 00 0015 00000000")),
        send(1, "02 03 ffff 00000000", (3, "02 03 ffff 00000000")),
        send(1, "02 02 ffff 00000000", (9, "02 02 ffff 00000000")),
    ),
    case(
        "optional",
        "a value or anything",
        [
            insert("t", (7, 1), "forward", (1,), 2),
            insert("t", (None, 1), "forward", (2,), 1),
        ],
        send(1, "07 01 0000 00000000", (1, "07 01 0000 00000000")),
        send(1, "08 01 0000 00000000", (2, "08 01 0000 00000000")),
        send(1, "07 02 0000 00000000", (9, "07 02 0000 00000000")),
    ),
    # --- entries and defaults of the program -------------------------------------------------------------------------
    case(
        "const_entries",
        "order of const entries, prefixes, exact",
        [],
        # a=12, c=6: the first of the two ranges that match; d in 10/8 but not 10.11/16
        send(1, "12 00 0006 0a010101", (1, "12 08 0006 0a010101")),
        send(1, "12 00 0064 0a0b0101", (2, "12 10 0064 0a0b0101")),
        send(1, "1f 00 0065 0b000000", (3, "1f ee 0065 0b000000")),
        send(1, "2f 00 7777 0a000000", (9, "2f 77 7777 0a000000")),
    ),
    case(
        "default_action",
        "defaults of the program",
        [],
        send(1, "01 22 0000 00000000", (5, "01 22 0000 00000000")),
    ),
    case(
        "default_action",
        "defaults set at run time, also of a table without a key",
        [default("t", "mark", (0x33,)), default("keyless", "mark", (0x44,)), insert("t", (1,), "forward", (6,))],
        send(1, "01 22 0000 00000000", (6, "01 44 0000 00000000")),
        send(1, "02 22 0000 00000000", (0, "02 44 0000 00000000")),
    ),
    # --- what follows a table ----------------------------------------------------------------------------------------
    case(
        "hit_miss",
        "three ways through",
        [insert("first", (1,), "set_b", (0x11,)), insert("second", (5,), "set_b", (0x55,))],
        send(1, "01 00 0005 00000000", (1, "01 11 0006 00000001")),
        send(1, "02 00 0005 00000000", (1, "02 55 0006 00000002")),
        send(1, "02 00 0007 00000000", (1, "02 dd 0008 00000003")),
    ),
    case(
        "action_run",
        "a switch with a shared and a default branch",
        [insert("t", (1,), "one"), insert("t", (2,), "two", (0x22,)), insert("t", (3,), "three")],
        send(1, "01 99 0000 00000000", (1, "01 01 1111 000000ff")),
        send(1, "02 99 0000 00000000", (1, "02 22 2323 000000ff")),
        send(1, "03 99 0000 00000000", (1, "03 99 2323 000000ff")),
        send(1, "04 99 0000 000000ff", (1, "04 99 dddd 00000000")),
    ),
    case(
        "action_branches",
        "if and else inside an action",
        [insert("t", (1,), "work", (0x10, 0xAAAA))],
        send(1, "01 11 0007 00000000", (1, "01 00 aaaa 0000000d")),
        send(1, "01 11 0008 00000000", (1, "01 00 0009 0000000d")),
        send(1, "01 10 0007 00000000", (1, "10 00 0007 00000000")),
        # the default's limit is 100 (0x64)
        send(1, "02 65 0007 00000000", (1, "02 00 cccc 0000000d")),
        send(1, "02 64 0007 00000000", (1, "64 00 0007 00000000")),
    ),
    case(
        "exits",
        "exit in an action, in ingress and in egress",
        [insert("t", (1,), "stop", (0x33,)), insert("t", (2,), "stop", (0x44,)), insert("t", (3,), "go")],
        send(1, "01 00 0000 00000000", (1, "01 33 0000 0000e2e1")),
        send(1, "02 00 0000 00000000", (1, "02 44 0000 000000e1")),
        send(1, "03 00 0000 00000000", (1, "03 00 2222 0000e2e1")),
        send(1, "09 00 0000 00000000", (1, "09 00 1111 0000e2e1")),
    ),
    case(
        "deep_control",
        "seventy levels of if",
        [insert("t", (7,), "set_c", (0x7777,)), insert("t", (8,), "leave")],
        # a > n for n = 0..a-1: a steps (at most 70); the table is behind all seventy.
        send(1, "00 07 0000 00000000", (1, "00 00 0000 00000000")),
        send(1, "21 07 0000 00000000", (1, "21 21 0000 00000000")),
        send(1, "ff 07 0000 00000000", (1, "ff 46 7777 00000001")),
        send(1, "ff 09 0000 00000000", (1, "ff 46 0000 00000002")),
        send(1, "ff 08 0000 00000000", (1, "ff 08 0000 00000000")),
        counters={"Run.tally": {0: (4, 32), 32: (4, 32), 33: (3, 24), 69: (3, 24), 70: (0, 0)}},
    ),
    case(
        "counters",
        "cells, and an index outside",
        [insert("t", (5,), "forward", (4,))],
        send(1, "01 05 0000 00000000", (4, "01 05 0000 00000000")),
        send(1, "01 06 0000 00000000 ffff", (0, "01 06 0000 00000000 ffff")),
        send(1, "03 05 0000 00000000", (4, "03 05 0000 00000000")),
        send(1, "04 05 0000 00000000", (4, "04 05 0000 00000000")),
        counters={"Run.events": {0: (0, 0), 1: (2, 18), 2: (0, 0), 3: (1, 8)}},
    ),
]
