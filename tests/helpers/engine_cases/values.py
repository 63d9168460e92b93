# SPDX-License-Identifier: Apache-2.0
"""Cases about values: arithmetic, widths, registers, hashes."""

from __future__ import annotations

from helpers.engine_cases.model import case, octets, send


def word(*parts: tuple[int, int]) -> bytes:
    """A 2048-bit number with these values at these bit positions."""
    return sum(value << position for value, position in parts).to_bytes(256, "big")


W = word((0xABCD, 2032), (1, 64), (0xFFFFFFFFFFFFFFFF, 0))
V = word((0x5432, 2032), (0xF0, 0))

CASES = [
    case(
        "arithmetic",
        "results wrap at their width",
        [],
        # a=5, b=7: sum 12; difference -2; product 35 + 7 = 42; -a = 251; 8-bit product 35 = 0x23
        send(1, "05 07 0000 00000000", (1, "0c fe 002a 2300fb00")),
        # a=255, b=2: 257 - 256 = 1; 253; 510 + 7 = 517 = 0x205; -255 = 1; 510 mod 256 = 0xfe
        send(1, "ff 02 0000 00000000", (1, "01 fd 0205 fe000100")),
    ),
    case(
        "logic",
        "bits and shifts",
        [],
        # a=0xf0, b=0x03: and 00; ~b = fc, or f0 -> fc; (0f00) ^ (0000) = 0f00; d << 0 | d >> 3
        send(1, "f0 03 0000 80000008", (1, "00 fc 0f00 90000009")),
        # a=0x14, b=0x28: and 00; ~28 = d7, or 14 = d7; 0140 ^ 000a = 014a; d << 4 | d >> 40 (nothing left)
        send(1, "14 28 0000 12345678", (1, "00 d7 014a 23456780")),
    ),
    case(
        "compare",
        "all comparisons",
        [],
        # a=1, b=2, c=3: != (2), < (4), <= (16), and/or (64), both bools true (128) = 0xd6
        send(1, "01 02 0003 00000000", (1, "01 02 5555 000000d6")),
        # a=b=1, c=4: == (1), <= (16), >= (32), not c==3 (64); bools differ = 0x71
        send(1, "01 01 0004 00000000", (1, "01 01 aaaa 00000071")),
        # a=2, b=1, c=3: != (2), > (8), >= (32); bools differ = 0x2a
        send(1, "02 01 0003 00000000", (1, "02 01 aaaa 0000002a")),
        # a=2, b=1, c=5: as before, and not c==3 (64), bools equal (128) = 0xea
        send(1, "02 01 0005 00000000", (1, "02 01 5555 000000ea")),
    ),
    case(
        "signed",
        "two's complement",
        [],
        # p=-2, q=3: p<q, p>-3; product -6; sum 1; (-2 >> 1) - 1 = -2
        send(1, "fe 03 0000 00", (1, "01 fe fffa 03")),
        # p=-128, q=-1: p<q; product 128; sum -129 -> 127; (-64) - 1 = -65 = 0xbf
        send(1, "80 ff 0000 00", (1, "7f bf 0080 01")),
        # p=q=127: p>-3, equal; product 16129 = 0x3f01; sum 254 -> -2; 63 - 1 = 62
        send(1, "7f 7f 0000 00", (1, "fe 3e 3f01 06")),
    ),
    case(
        "saturating",
        "sums stop at the ends",
        [],
        # unsigned 200+100, 200-100; signed 100+100, 100-100
        send(1, "c8 64 64 64", (1, "c8 64 64 64 ff 64 7f 00")),
        # 100-200 = 0; -100 + -100 = -128; -100 - 100 = -128 (q = 100 -> see below)
        send(1, "64 c8 9c 9c", (1, "64 c8 9c 9c ff 00 80 00")),
        send(1, "01 02 9c 64", (1, "01 02 9c 64 03 00 00 80")),
    ),
    case(
        "slices",
        "slices on both sides, concatenation",
        [],
        # c=1234: a[7:4] = 4; b = c[15:12] ++ c[7:4] = 1,3; d[23:8] = 1234; c = 34 ++ 12
        send(1, "ab cd 1234 eeffffdd", (1, "4b 13 3412 ee1234dd")),
    ),
    case(
        "wide",
        "2048 bits: store, add with a carry out of the top, or, shift",
        [],
        send(1, b"\x00" + W + V + bytes(13), (1, b"\x00" + W + V + bytes(13))),
        # 1: w + stored W. Low 64 bits ff..ff + ff..ff = carry, ff..fe; bit 64: 1 + 1 + carry = 3;
        # top: abcd + abcd = 1579a, the carry out of bit 2047 is lost. odd (100 bits) + 1, tail unchanged.
        send(
            1,
            b"\x01" + W + V + octets("ff*12 f5"),
            (1, b"\x01" + word((0x579A, 2032), (3, 64), (0xFFFFFFFFFFFFFFFE, 0)) + V + octets("00*12 05")),
        ),
        send(
            1,
            b"\x02" + W + V + bytes(13),
            (1, b"\x02" + word((0xFFFF, 2032), (1, 64), (0xFFFFFFFFFFFFFFFF, 0)) + V + bytes(13)),
        ),
        send(
            1,
            b"\x03" + W + V + bytes(13),
            (1, b"\x03" + W + word((0x4320, 2032), (0xF00, 0)) + bytes(13)),
        ),
    ),
    case(
        "odd_fields",
        "fields across byte boundaries",
        [],
        # a(3) b(18) c(3) = 3 bytes: 101 000000000000000001 111 -> a0000f; b + 1 -> 2: 101 0..010 111 = a00017
        send(
            1,
            "a0000f 1112131415 212223242526 31323334353637 f8*9 ab c1",
            (1, "a00017 1112131415 212223242526 31323334353637 f8*9 ab c1"),
        ),
        send(
            1,
            "a0000f ffffffffff ffffffffffff ff*7 f8*9 ab c2",
            (1, "a0000f 0000000000 000000000000 00*7 f8*9 ab c2"),
        ),
        # g(5) i(67): i all ones + 1 = 0, g stays; j (int<12>) = 0x800 - 1 wraps to 0x7ff
        send(
            1,
            "a0000f 00*5 00*6 00*7 afffffffffffffffff 8003",
            (1, "a0000f 00*5 00*6 00*7 a80000000000000000 7ff3"),
        ),
        # g = 21 + a (5) + c (7) = 33 mod 32 = 1
        send(1, "a0000f 00*5 00*6 00*7 a8*1 00*8 0004", (1, "a0000f 00*5 00*6 00*7 08*1 00*8 0004")),
    ),
    case(
        "deep_expression",
        "eighty nested operations in one expression",
        [],
        # Forty times plus one, and the highest bit turned an even number of times: d + 40.
        send(1, "00 00 0000 00000000", (1, "00 01 0000 00000028")),
        send(1, "01 00 0000 00000000", (1, "01 02 0000 00000028")),
        send(1, "01 00 0000 00000001", (1, "01 03 0000 00000029")),
    ),
    case(
        "registers",
        "read, write, and an index outside",
        [],
        send(1, "00 02 0000 00000011", (1, "00 02 0000 00000000")),
        send(1, "00 02 0000 00000022", (1, "00 02 0000 00000011")),
        # outside: nothing is written, the target keeps what it had
        send(1, "00 04 0000 00000033", (1, "00 04 0000 00000033")),
        send(1, "00 ff 0000 00000033", (1, "00 ff 0000 00000033")),
        send(1, "01 ff 0000 00000000", (1, "01 ff 001f 00000000")),
        send(1, "02 fe 0000 00000000", (1, "fe fe 0000 00000000")),
        registers={"Run.words": {0: 0, 2: 0x22, 3: 0}, "Run.narrow": {0: 0, 1: 0x1F}, "Run.signed": {0: 0xFE}},
    ),
    case(
        "register_runs",
        "a run of accesses at one index, inside and outside",
        [],
        send(1, "11 22 3333 00000003", (1, "00 00 0000 00000003")),
        send(1, "44 55 6666 00000003", (1, "11 22 3333 00000003")),
        send(1, "77 88 9999 00000004", (1, "77 88 9999 00000004")),
        registers={"Run.first": {3: 0x44}, "Run.second": {3: 0x55}, "Run.third": {3: 0x6666}},
    ),
    case(
        "hashes",
        "every algorithm over 31 32 33 34",
        [],
        # Over "1234": CRC-32 9be3e0a3, CRC-16/ARC 14ba, complement of 3132 + 3334 9b99, xor 0206, identity 31323334.
        # CRC-16/ARC over 31 07 36373839 is 75dc = 30172: mod 10 + 1000 = 1002 = 03ea. Custom ones over "1": d4c1,
        # 83dcefb7. A size of 0 counts as 1: the base, 5, remains.
        send(
            1,
            "31 32 3334 36373839",
            (
                1,
                octets("31 32 3334 36373839 9be3e0a3 14ba 9b99 0206 0000000031323334")
                + octets("03ea d4c1 83dcefb7 0005"),
            ),
        ),
    ),
    case(
        "randoms",
        "a range of one value, an empty one, and bounds",
        [],
        *[send(1, "00 77 8888 00000000", (1, "00 05 8888 00000001"))] * 5,
    ),
]
