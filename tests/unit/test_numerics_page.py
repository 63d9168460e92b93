# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/numerics.md against the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from p4reduce.integers import IntegerCodec
from p4reduce.packetize import BucketCodec, ChunkCodec, wire_bytes
from p4reduce.quantize import BLOCKS, LaneFormat
from p4reduce.wire import PROFILES

PAGE = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text(encoding="utf-8")
COUNT = 1 << 20


def table(head: str) -> list[list[str]]:
    """Cells of the table whose head line begins so, without head and rule."""
    lines = PAGE.splitlines()
    (start,) = [number for number, line in enumerate(lines) if line.startswith(head)]
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def bytes_an_element(profile: str, lane_bits: int) -> float:
    shape = PROFILES[profile]
    codec: ChunkCodec
    if lane_bits == 64:
        codec = IntegerCodec(shape, 2, COUNT)
    else:
        codec = BucketCodec(shape, LaneFormat(lane_bits, 2, BLOCKS[lane_bits]), COUNT)
    return wire_bytes(codec) / COUNT


def test_formats_and_bytes_on_the_wire() -> None:
    rows = table("| lanes | block | bytes an element, w5 |")
    assert [row[0] for row in rows] == ["32", "16", "8", "64"]
    for bits, block, w5, w34, ratio, _ in rows:
        assert block == ("\u2013" if bits == "64" else str(BLOCKS[int(bits)]))
        assert w5 == f"{bytes_an_element('w5', int(bits)):.3f}"
        assert w34 == f"{bytes_an_element('w34', int(bits)):.3f}"
        assert float(ratio) == pytest.approx(
            bytes_an_element("w34", 32) / bytes_an_element("w34", int(bits)), abs=0.005
        )


def test_bytes_on_the_wire_are_those_of_the_frames() -> None:
    # 5000 elements of 16 bits on w5: 10 blocks of 512 are 320 bytes of thermometers, one full frame; 640 elements a
    # frame, 7 full ones and 520 elements in an eighth, which is more than a word, so it is full, too.
    codec = BucketCodec(PROFILES["w5"], LaneFormat(16, 2, 512), 5000)
    assert wire_bytes(codec) == 9 * (1280 + 32 + 28)
    # One element: a word of thermometers, a word of data.
    assert wire_bytes(BucketCodec(PROFILES["w5"], LaneFormat(32, 2), 1)) == 2 * (256 + 32 + 28)


def test_precision() -> None:
    workers = (2, 4, 8, 16, 32, 63, 64)
    for bits, *found in table("| lanes | n = 2 | 4 | 8 |"):
        assert [int(cell) for cell in found] == [LaneFormat(int(bits), n).precision for n in workers]


def test_symbols() -> None:
    formats = [LaneFormat(32, 2), LaneFormat(32, 8), LaneFormat(16, 8), LaneFormat(8, 8)]
    limit, bias, precision = table("| symbol | meaning |")
    assert [int(cell) for cell in limit[2:]] == [fmt.limit for fmt in formats]
    assert [int(cell) for cell in bias[2:]] == [fmt.bias for fmt in formats]
    assert [int(cell) for cell in precision[2:]] == [fmt.precision for fmt in formats]


def test_worst_errors() -> None:
    for bits, *found in table("| lanes | n = 2 | n = 8 | n = 32 |"):
        for cell, n in zip(found, (2, 8, 32), strict=True):
            exponent = int(cell.removeprefix("2^").replace("\u2212", "-"))
            assert 2.0**exponent == n / 2 * 2.0 ** -LaneFormat(int(bits), n).precision
