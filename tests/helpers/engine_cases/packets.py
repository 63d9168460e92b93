# SPDX-License-Identifier: Apache-2.0
"""Cases about a packet's fate: drop, copies, clones, rounds, lengths, checksums."""

from __future__ import annotations

from helpers.engine_cases.model import case, group, send, session

IP = "45000054 00004000 4001 {} 0a000001 0a000002"
"""An IPv4 header to fill its checksum in. Without it the words add up to 4500 + 0054 + 4000 + 4001 + 0a00 + 0001 +
0a00 + 0002 = d958; the complement is 26a7. With a TTL one less (3f01 for 4001): d858, complement 27a7."""

CASES = [
    case(
        "drops",
        "in ingress, in egress, and taken back",
        [],
        send(1, "00 04 9999 00000000", (4, "00 04 0000 00000000")),
        send(1, "01 04 9999 00000000"),
        send(1, "02 04 9999 00000000", (3, "02 04 0000 00000000")),
        send(1, "03 04 9999 00000000"),
        send(1, "04 04 9999 00000000"),
        # egress cannot choose a port any more
        send(1, "05 04 9999 00000000", (4, "05 04 0000 00000000")),
    ),
    case(
        "metadata",
        "zero at the start of every packet",
        [],
        # length 10 = a in d; instance type 0, egress port 0 in ingress; b: count 0 in ingress plus 1 in egress
        *[send(5, "01 77 0000 00000000 eeee", (6, "06 01 0005 0000000a eeee"))] * 3,
    ),
    case(
        "lengths",
        "packet_length follows headers in egress",
        [],
        # 8 + 8 + 3 (varbit) + 1 = 20 bytes; egress takes y away after it was read.
        send(1, "00 00*7 11*8 aabbcc ee", (1, "00 14 0014 00000014 aabbcc ee")),
        send(1, "01 00*7 11*8 aabbcc ee", (1, "01 14 001c 0000001c 00*8 aabbcc ee")),
        send(1, "02 00*7 11*8 aabbcc ee", (1, "02 14 000c 0000000c aabbcc ee")),
        send(1, "03 00*7 11*8 aabbcc ee", (1, "03 14 0011 00000011 ee")),
        # a copy does not count
        send(1, "04 00*7 11*8 aabbcc ee", (1, "04 14 0014 00000014 11*8 aabbcc ee")),
    ),
    case(
        "priorities",
        "one queue only",
        [],
        send(1, "00 00 0000 00000000", (1, "00 00 0000 00000000")),
        send(1, "01 00 0000 00000000"),
        send(1, "08 00 0000 00000000", (1, "08 00 0000 00000000")),
    ),
    case(
        "multicast",
        "every copy starts from the same packet",
        [group(1, (2, 7), (3, 0x1234)), group(2, (4, 1), (5, 66), (6, 3))],
        # a: port, b: b + note, c: rid, d: instance type 5, ., group
        send(
            1,
            "01 10 0000 00ff0000",
            (2, "02 20 0007 05ff0001"),
            (3, "03 20 1234 05ff0001"),
        ),
        # the copy with rid 66 is dropped in egress
        send(1, "02 01 0000 00000000", (4, "04 02 0001 05000002"), (6, "06 02 0003 05000002")),
        # no such group
        send(1, "03 01 0000 00000000"),
        # no group: unicast, rid 0, instance type 0
        send(1, "00 01 0000 00000000", (7, "07 02 0000 00000000")),
        # mark_to_drop clears the group; a group set after it wins over the drop port
        send(1, "01 dd 0000 00000000"),
        send(1, "01 de 0000 00000000", (2, "02 bc 0007 05000001"), (3, "03 bc 1234 05000001")),
    ),
    case(
        "multicast_shape",
        "copies with different headers",
        [group(1, (1, 0), (2, 0), (3, 0), (4, 0), (5, 0))],
        send(
            9,
            "a1 a2 a3a4 a5a6a7a8 b1 b2 b3b4 b5b6b7b8 ee",
            (1, "a1 a2 a3a4 a5a6a7a8 b1 b2 0101 b5b6b7b8 ee"),
            (2, "b1 b2 0101 b5b6b7b8 ee"),
            (3, "a1 a2 a3a4 a5a6a7a8 b1 b2 0101 b5b6b7b8 a1 a2 a3a4 00000033 ee"),
            (4, "a1 a2 a3a4 a5a6a7a9 b1 b2 0101 b5b6b7b8 ee"),
            (5, "a1 a2 a3a4 a5a6a7a8 b1 b2 0101 b5b6b7b8 ee"),
        ),
    ),
    case(
        "clone_ingress",
        "the packet as it came, with its field list",
        [session(5, (2, 6), (3, 7))],
        send(4, "00 10 2000 00000000", (1, "00 10 2000 ffffffff")),
        # list 1: kept = b + 1; other and lost are 0, ingress_port too; rid and length (8) in c
        send(
            4,
            "01 10 2000 00000000",
            (1, "01 10 2000 ffffffff"),
            (2, "c1 11 000e 00000000"),
            (3, "c1 11 000f 00000000"),
        ),
        # list 2: other = c
        send(
            4,
            "02 10 2000 00000000 ee",
            (1, "02 10 2000 ffffffff ee"),
            (2, "c1 00 200f 00000000 ee"),
            (3, "c1 00 2010 00000000 ee"),
        ),
        # no such session; a clone of a packet that is dropped
        send(4, "03 10 2000 00000000", (1, "03 10 2000 ffffffff")),
        send(4, "04 10 2000 00000000", (2, "c1 00 000e 00000000"), (3, "c1 00 000f 00000000")),
    ),
    case(
        "clone_egress",
        "the packet as it leaves, with its field list",
        [session(6, (5, 0)), group(1, (2, 0), (3, 0))],
        # the clone starts with b + 1 of the original's egress; kept is b
        send(1, "01 10 0000 00000000 ee", (1, "01 11 0000 12345678 ee"), (5, "e2 10 0005 12345678 ee")),
        send(1, "02 10 0000 00000000", (5, "e2 00 0005 12345678")),
        # one clone for each copy
        send(
            1,
            "03 10 0000 00000000",
            (2, "03 11 0000 12345678"),
            (3, "03 11 0000 12345678"),
            (5, "e2 10 0005 12345678"),
            (5, "e2 10 0005 12345678"),
        ),
    ),
    case(
        "resubmit",
        "as it came, round after round",
        [],
        # no resubmission: b, port 3, length 8, instance type 0
        send(3, "00 10 0000 00000000", (1, "00 10 0003 08000000")),
        # two rounds: round = 2 in b, ingress_port is not kept, instance type 6 in ingress and 0 in egress
        send(3, "02 10 0000 00000000", (1, "02 12 0000 08000006")),
    ),
    case(
        "recirculate",
        "as it left, round after round",
        [],
        send(3, "00 10 0000 00000000", (1, "00 10 0003 00000000")),
        # First round: a 2 -> 1, b + 0, c = 3, round 1. Second: b + 1, c = 0, type 4, round 2. Third: b + 2, and
        # it leaves, whole: truncation ended with the round that asked for it.
        send(3, "02 10 0000 00000000 ee ff", (1, "00 13 0000 00000004 ee ff")),
    ),
    case(
        "truncation",
        "the least length counts, and copies start whole",
        [group(1, (1, 0), (2, 0))],
        send(1, "00 00 0000 00000000 a1a2a3a4", (1, "00 00 0000 00000000 a1a2a3a4")),
        send(1, "01 00 0000 00000000 a1a2a3a4", (1, "01 00 0000 00000000 a1a2")),
        send(1, "02 00 0000 00000000 a1a2a3a4", (1, "02 00 0000")),
        send(1, "03 00 0000 00000000 a1a2a3a4", (1, "03 00 0000 00000000 a1a2a3a4"), (2, "03 00 00")),
        send(1, "04 0b 0000 00000000 a1a2a3a4", (1, "04 0b 0000 00000000 a1a2a3")),
        send(1, "04 ff 0000 00000000 a1a2a3a4", (1, "04 ff 0000 00000000 a1a2a3a4")),
    ),
    case(
        "checksum",
        "verify and update",
        [],
        send(
            1,
            "01 00 ffff 00000000" + IP.format("26a7"),
            (1, "01 00 0000 00000000" + IP.format("27a7").replace("4001", "3f01")),
        ),
        send(
            1,
            "01 00 ffff 00000000" + IP.format("26a8"),
            (1, "01 00 0001 00000000" + IP.format("27a7").replace("4001", "3f01")),
        ),
        # b = 9 is not verified; b = 8 is not updated
        send(
            1,
            "01 09 ffff 00000000" + IP.format("0000"),
            (1, "01 09 0000 00000000" + IP.format("27a7").replace("4001", "3f01")),
        ),
        send(
            1,
            "01 08 ffff 00000000" + IP.format("26a7"),
            (1, "01 08 0000 00000000" + IP.format("26a7").replace("4001", "3f01")),
        ),
        # no header, no error
        send(1, "00 00 ffff 00000000", (1, "00 00 0000 00000000")),
    ),
    case(
        "checksum_always",
        "an odd number of bytes, also of a packet that was not parsed",
        [],
        # 0102 + 0304 + 0500 = 0906 -> f6f9
        send(1, "01 aa 0000 02030405", (1, "01 aa f6f9 02030405")),
        # all zero: the sum is 0
        send(1, "00 aa 1234 00000000", (1, "00 aa ffff 00000000")),
        # ff + ff00.. : ffff + 0000 + 0000 is ffff, its complement 0
        send(1, "ff aa 1234 ff000000", (1, "ff aa 0000 ff000000")),
        send(1, "01 02 03", (1, "01 02 03")),
    ),
    case(
        "checksum_payload",
        "over the unparsed rest, odd and even",
        [],
        # d, (y is missing,) 01, b, rest: 1122 + 3344 + 0177 + a1b2 + c300 = 1aa8f -> aa90; complement 556f
        send(1, "00 77 0000 11223344 a1b2c3", (1, "00 77 556f 11223344 a1b2c3")),
        # with y: d 00000005, y.d 00000006, 0100: 010b; complement fef4
        send(1, "01 00 0000 00000005 00*7 06", (1, "01 00 fef4 00000005 00*7 06")),
        # cut to 11 bytes: the checksum sees 11 of the rest: 0100 + 5 * ffff + ff00 = 5fffb -> 1; complement fffe
        send(1, "03 00 0000 00000000 ff*14", (1, "03 00 fffe 00000000 ff*3")),
        # CRC-32 of 31 32 is 4f5344cd
        send(1, "04 00 3132 00000000", (1, "04 00 3132 4f5344cd")),
        # verified: d + rest = 0001 + 0002 = 0003 -> fffc
        send(1, "07 00 fffc 00000001 0002", (1, "07 00 fffc 00000001 0002")),
        send(1, "07 00 fffd 00000001 0002", (1, "07 ce fffd 00000001 0002")),
    ),
    case(
        "log_assert",
        "true assertions",
        [],
        send(1, "01 02 0000 00000000", (1, "01 02 0001 00000000")),
    ),
    case(
        "log_assert",
        "false ones drop the packet",
        [],
        send(1, "09 02 0000 00000000"),
        send(1, "01 80 0000 00000000"),
        send(1, "01 7f 0000 00000000", (1, "01 7f 0001 00000000")),
        embedded_only="BMv2 aborts",
    ),
]
