# SPDX-License-Identifier: Apache-2.0
"""Cases about the parser, header stacks, varbit fields and validity."""

from __future__ import annotations

from helpers.engine_cases.model import case, octets, send

CASES = [
    case(
        "select_keys",
        "masks, ranges, metadata in a key, first match first",
        [],
        # (1, c[11:0] = 123, port 3): first, then y
        send(3, "01 00 f123 00000000 00*8 aa", (1, "01 01 f123 00000000 00 ff 00*6 aa")),
        send(2, "01 00 f123 00000000 00*8", (1, "01 04 f123 00000000 00*8")),
        # a & f2 = 2: second, which leaves y alone
        send(3, "0e 00 0000 00000000 00*8", (1, "0e 02 0000 00000000 00*8")),
        # 5 and 7 in 5..7 (6 is caught by nothing before: 06 & f2 = 02!), c with bits 0f0 set: third
        send(3, "05 00 00f0 00000000 00*8", (1, "05 03 00f0 00000000 00 ff 00*6")),
        send(3, "06 00 00f0 00000000 00*8", (1, "06 02 00f0 00000000 00*8")),
        # port 4: accept without a path
        send(4, "09 77 0000 00000000", (1, "09 00 0000 00000000")),
        send(5, "09 77 0000 00000000", (1, "09 04 0000 00000000")),
    ),
    case(
        "no_match",
        "nothing selected, too short, and both ways that match",
        # The compiler leaves a select without a default as it is, and BMv2 then accepts: no NoMatch.
        [],
        send(1, "01 00 0000 00000000 00*8", (1, "01 01 0000 00000000 00*8")),
        send(1, "02 00 0000 00000000", (1, "02 01 0000 00000000")),
        send(1, "03 00 0000 00000000", (1, "03 01 0000 00000000")),
        # y does not fit: what was not parsed stays
        send(1, "01 00 0000 00000000 aabb", (1, "01 03 0000 00000000 aabb")),
    ),
    case(
        "lookahead",
        "looking without taking",
        [],
        # 16 bits ahead are 1234, second nibble 2, first byte 12: y is taken
        send(1, "00 00 0000 00000000 1234 5678 9abcdef0", (1, "aa 02 1234 00000000 1234 5678 9abcdef0")),
        send(1, "00 00 0000 00000000 2fee", (1, "00 0f 2fee 00000000 2fee")),
        # one byte ahead: the first look fails
        send(1, "00 00 0000 00000000 2f", (1, "ee 00 0000 00000000 2f")),
    ),
    case(
        "advance",
        "skipped bytes are gone",
        [],
        send(1, "01 00 0000 00000000 eeee 00*8 77", (1, "01 00 0000 00000000 00 bb 00*6 77")),
        send(1, "02 18 0000 00000000 eeeeee 00*8", (1, "02 18 0000 00000000 00 bb 00*6")),
        send(1, "02 00 0000 00000000 00*8", (1, "02 00 0000 00000000 00 bb 00*6")),
        # no whole byte; more than there is
        send(1, "02 09 0000 00000000 00*8", (1, "02 09 0002 00000000 00*8")),
        send(1, "02 18 0000 00000000 eeee", (1, "02 18 0001 00000000 eeee")),
        send(1, "01 00 0000 00000000 ee", (1, "01 00 0001 00000000 ee")),
        send(1, "03 00 0000 00000000 ee", (1, "03 00 0000 00000000 ee")),
    ),
    case(
        "verify",
        "errors of the program's own",
        [],
        send(1, "09 00 0000 00000000 00*8", (1, "09 01 0000 00000000 00*8")),
        send(1, "14 00 0000 00000000 00*8", (1, "14 02 0000 00000000 00*8")),
        send(1, "0a 00 0000 00000000 00*7", (1, "0a 03 0000 00000000 00*7")),
        send(1, "13 00 0000 00000000 00*8", (1, "13 04 0000 00000000 00 ff 00*6")),
    ),
    case(
        "parser_work",
        "assignments, sums, setValid and copies in the parser",
        [],
        # y = 5a 00.., z is a copy of x with b = a; d of x = c + 5
        send(1, "11 22 0003 00000000 99", (1, "11 22 0003 00000008 5a 00*7 11 11 0003 00000000 99")),
        # c = 0: the sum is 5 and y goes away again
        send(1, "11 22 0000 77777777", (1, "11 22 0000 00000005 11 11 0000 77777777")),
    ),
    case(
        "stack",
        "as it came, one and three labels",
        [],
        send(1, "00 00 0000 00000000 03", (1, "00 00 0000 00000000 03")),
        send(1, "00 00 0000 00000000 02 04 07", (1, "00 00 0000 00000000 02 04 07")),
        # a fourth does not fit in three
        send(1, "00 00 0000 00000000 02 04 06 09", (1, "00 ee 0000 00000000 02 04 06 09")),
        # the bottom is missing
        send(1, "00 00 0000 00000000 02 04", (1, "00 00 0000 00000000 02 04")),
    ),
    case(
        "stack",
        "push and pop",
        [],
        # push 1: a new first label (0x55 << 1), the last of three falls off
        send(1, "01 00 0000 00000000 02 05", (1, "01 00 0000 00000000 aa 02 05")),
        send(1, "01 00 0000 00000000 02 04 07", (1, "01 00 0000 00000000 aa 02 04")),
        send(1, "02 00 0000 00000000 02 04 07", (1, "02 00 0000 00000000 04 07")),
        send(1, "02 00 0000 00000000 07", (1, "02 00 0000 00000000")),
        # push 2 makes two that are not valid
        send(1, "03 00 0000 00000000 02 04 07", (1, "03 00 0000 00000000 02")),
        send(1, "04 00 0000 00000000 02 04 07", (1, "04 00 0000 00000000")),
        # copy of the first to the third, the first goes
        send(1, "05 00 0000 00000000 02 05", (1, "05 00 0000 00000000 05 02")),
        # one label, the third made by hand: a push moves all of them, and the third is gone
        send(1, "06 00 0000 00000000 05", (1, "06 00 0000 00000000 05")),
    ),
    case(
        "stack_index",
        "lastIndex, last, and a whole stack copied",
        [],
        send(1, "00 00 0000 00000000 0110 0120 0003", (1, "00 00 0002 00000033 0110 0120 0003")),
        send(1, "00 00 0000 00000000 0240 ff", (1, "00 dd 0000 00000040 0240 0240 ff")),
        send(1, "01 00 0000 00000000 0110 0320", (1, "01 00 0001 00000030 0110 0320 0199 0320")),
    ),
    case(
        "varbit_options",
        "sizes, and what does not fit",
        [],
        # x.b is the size in bits; o = size, bytes, after
        send(1, "00 18 0000 00000000 01 aabbcc 1234 99", (1, "00 18 0000 00000000 01 aabbcc 1234 99")),
        send(1, "00 00 0000 00000000 01 1234 99", (1, "00 00 0000 00000000 01 1234 99")),
        send(1, "00 40 0000 00000000 01 a1a2a3a4a5a6a7a8 1234", (1, "00 40 0000 00000000 01 a1a2a3a4a5a6a7a8 1234")),
        # longer than varbit<64>; no whole byte; more than there is
        send(1, "00 48 0000 00000000 01 00*9 1234", (1, "00 48 0001 00000000 01 00*9 1234")),
        send(1, "00 07 0000 00000000 01 00 1234", (1, "00 07 0002 00000000 01 00 1234")),
        send(1, "00 10 0000 00000000 01 00 12", (1, "00 10 0003 00000000 01 00 12")),
    ),
    case(
        "varbit_options",
        "copies and a checksum over one",
        [],
        send(
            1,
            "01 18 0000 00000000 01 aabbcc 1234",
            (1, "01 18 0000 00000000 01 aabbcc aaaa cc aabbcc 1234"),
        ),
        # setValid clears; the varbit is assigned alone
        send(1, "02 10 0000 00000000 01 aabb 1234", (1, "02 10 0000 00000000 01 aabb 1234 00 aabb 0000")),
        # 1111 + 2222 + aabb + cc05 = 1a9f3 -> a9f4, complement 560b
        send(1, "03 18 0000 11112222 05 aabbcc 1234", (1, "03 18 560b 11112222 05 aabbcc 1234")),
    ),
    case(
        "joining_parser",
        "many paths through few states",
        [],
        # every second byte: 0, 2, 4, 6, 8, 9
        send(1, "00 00 0000 00000000 01 01 01 01 07 08 aa", (1, "00 66 0354 00000000 01 01 44 01 07 99 aa")),
        # all ten
        send(1, "00 00 0000 00000000 00*8 07 08", (1, "00 66 03fe 00000000 00*4 44 55 00 00 07 99")),
        send(1, "00 00 0000 00000000 02 07", (1, "00 00 0000 00000000 02 07")),
        # 0, 1, then 3 is missing
        send(1, "00 00 0000 00000000 00 01", (1, "00 00 0002 00000000 00 01")),
        # 0, 1, 3, 5, 7, 9
        send(1, "00 00 0000 00000000 00 01 01 01 01 33", (1, "00 66 02aa 00000000 00 01 01 55 01 99")),
    ),
    case(
        "set_valid",
        "valid, invalid and again",
        [],
        # a even: no y. setValid makes one of zeros
        send(1, "00 01 0000 00000000 99", (1, "00 01 0000 00000000 00*8 99")),
        # valid already: nothing happens
        send(1, "01 01 0000 00000000 11 22 3333 44444444", (1, "01 01 0000 00000000 11 22 3333 44444444")),
        # taken away and made again: zeros
        send(1, "01 02 0000 00000000 11 22 3333 44444444", (1, "01 02 0000 00000000 00*8")),
        send(1, "01 03 0000 00000000 11 22 3333 44444444 99", (1, "01 03 0000 00000000 99")),
        send(
            1,
            "01 04 0000 00000000 11 22 3333 44444444 99",
            (1, "01 04 0000 00000000 11 22 3333 44444444 11 22 3333 44444444 99"),
        ),
        # a copy of what is not there is not there
        send(1, "00 04 0000 00000000 99", (1, "00 04 0000 00000000 99")),
        send(1, "01 05 1234 00000001 11 22 3333 44444444", (1, "01 05 5555 00000001")),
    ),
    case(
        "header_compare",
        "equal, different, one missing",
        [],
        send(
            1,
            "01 00 0000 00000007 01 00 0000 00000007 02 aabb 02 aabb",
            (1, "01 11 0000 00000007 01 00 0000 00000007 02 aabb 02 aabb"),
        ),
        send(
            1,
            "01 00 0000 00000007 01 00 0000 00000008 02 aabb 02 aabc",
            (2, "01 22 0000 00000007 01 00 0000 00000008 02 aabb 02 aabc"),
        ),
        # a = 0 and y missing: x is not equal to it
        send(1, "00*8 02 aabb 03 aabb", (2, "00 22 00*6 02 aabb 03 aabb")),
    ),
    case(
        "payload",
        "what is only carried, in another order",
        [],
        send(6, "00 11 2222 33333333 706179", (6, "00 11 2222 33333333 706179")),
        send(6, "01 11 2222 33333333 a1*8 706179", (6, "a1*8 01 11 2222 33333333 706179")),
        # shorter than the first header: nothing is parsed, all is carried
        send(6, "01 11", (6, "01 11")),
        send(6, "01 11 2222 33333333 a1*3", (6, "01 11 2222 33333333 a1*3")),
        send(6, octets("00*8") + bytes(range(256)) * 35, (6, octets("00*8") + bytes(range(256)) * 35)),
    ),
]
