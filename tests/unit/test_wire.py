# SPDX-License-Identifier: Apache-2.0
"""Header layout, tags, digests and profiles."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p4reduce import constants, wire
from p4reduce.errors import ConfigError

repeatable = settings(derandomize=True, deadline=None, max_examples=300)
# The same layout, written a second time, as struct knows it.
LAYOUT = struct.Struct(">BBBBIHBBIQQ")
NAMES = ("version", "kind", "op", "words", "epoch", "slot", "rank", "count_or_reason", "round", "check", "tag")
header_values = st.tuples(
    *(st.integers(0, (1 << 8 * size) - 1) for size in (1, 1, 1, 1, 4, 2, 1, 1, 4, 8, 8)),
)


# Header


def test_header_has_the_documented_size_and_fields() -> None:
    assert wire.HEADER.itemsize == constants.HEADER_BYTES == LAYOUT.size
    assert wire.HEADER.names == NAMES


@repeatable
@given(header_values)
def test_header_round_trip(values: tuple[int, ...]) -> None:
    encoded = wire.make_header(**dict(zip(NAMES, values, strict=True)))
    assert encoded == LAYOUT.pack(*values)
    record = wire.headers_from_bytes(encoded + b"payload")
    assert record.shape == (1,)
    assert tuple(int(record[name][0]) for name in NAMES) == values


def test_header_defaults() -> None:
    assert wire.make_header() == bytes([constants.VERSION]) + bytes(31)


@pytest.mark.parametrize("size", [0, 1, 31])
def test_too_short_for_a_header(size: int) -> None:
    with pytest.raises(ValueError, match=f"this has {size}"):
        wire.headers_from_bytes(bytes(size))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_header_from_any_buffer(kind: type) -> None:
    assert wire.headers_from_bytes(kind(wire.make_header(slot=513)))["slot"][0] == 513


def test_unknown_field_is_an_error() -> None:
    with pytest.raises(ValueError, match="rung"):
        wire.make_header(rung=1)


# Tag


@repeatable
@given(st.integers(0, 2**24 - 1), st.integers(0, 2**24 - 1), st.integers(0, 2**16 - 1))
def test_tag_round_trip(bucket: int, chunk: int, digest: int) -> None:
    tag = wire.pack_tag(bucket, chunk, digest)
    assert 0 <= tag < 1 << 64
    assert wire.unpack_tag(tag) == (bucket, chunk, digest)


def test_tag_layout_and_wrap() -> None:
    assert wire.pack_tag(0x010203, 0x040506, 0x0708) == 0x0102030405060708
    assert wire.pack_tag(2**24 + 5, 2**24 + 6, 2**16 + 7) == wire.pack_tag(5, 6, 7)


# Digest


@repeatable
@given(st.binary(min_size=1, max_size=64), st.data())
def test_digest_tells_bursts_of_up_to_16_bits(content: bytes, draw: st.DataObject) -> None:
    bits = 8 * len(content)
    width = draw.draw(st.integers(1, min(16, bits)), label="width")
    start = draw.draw(st.integers(0, bits - width), label="start")
    # A burst begins and ends with a changed bit.
    inner = draw.draw(st.integers(0, (1 << width) - 1), label="inner")
    burst = inner | 1 | 1 << (width - 1)
    damaged = (int.from_bytes(content, "big") ^ burst << start).to_bytes(len(content), "big")
    assert wire.digest("sum", 7, content) != wire.digest("sum", 7, damaged)


def test_digest_tells_any_single_exponent_apart() -> None:
    exponents = np.random.default_rng(1).integers(0, 256, 100, dtype=np.uint8)
    reference = wire.digest("sum", 1, exponents.tobytes())
    for position in (0, 50, 99):
        for value in set(range(256)) - {int(exponents[position])}:
            other = exponents.copy()
            other[position] = value
            assert wire.digest("sum", 1, other.tobytes()) != reference


def test_digest_is_fixed_and_covers_every_part() -> None:
    reference: tuple[int | str, ...] = ("exponents", 1000, "float32", 32, 256, "sum")
    digests = {wire.digest(*reference)}
    others: tuple[int | str, ...] = ("sum", 1001, "float16", 16, 128, "mean")
    for i, other in enumerate(others):
        digests.add(wire.digest(*reference[:i], other, *reference[i + 1 :]))
    assert len(digests) == 7
    assert all(0 <= value < 1 << 16 for value in digests)
    # Ranks of different releases must agree, so the value itself may not change.
    assert wire.digest(*reference) == DIGEST_OF_REFERENCE
    assert wire.digest("ab", "c") != wire.digest("a", "bc")
    assert wire.digest() == 0xFFFF


def crc16(content: bytes) -> int:
    """CRC-16/CCITT bit by bit (polynomial 0x1021, start 0xFFFF)."""
    value = 0xFFFF
    for byte in content:
        value ^= byte << 8
        for _ in range(8):
            value = (value << 1 ^ (0x1021 if value & 0x8000 else 0)) & 0xFFFF
    return value


DIGEST_OF_REFERENCE = crc16(
    b"".join(
        len(part).to_bytes(4, "big") + part
        for part in (
            b"exponents",
            (1000).to_bytes(8, "big"),
            b"float32",
            (32).to_bytes(8, "big"),
            (256).to_bytes(8, "big"),
            b"sum",
        )
    )
)


# Profiles


@pytest.mark.parametrize(
    ("name", "words", "payload", "datagram", "mtu"), [("w5", 5, 1280, 1312, 1340), ("w34", 34, 8704, 8736, 8764)]
)
def test_profile_sizes(name: str, words: int, payload: int, datagram: int, mtu: int) -> None:
    found = wire.profile(name)
    assert (found.name, found.words, found.payload_bytes, found.datagram_bytes, found.mtu) == (
        name,
        words,
        payload,
        datagram,
        mtu,
    )
    assert mtu <= {"w5": 1500, "w34": 9000}[name]
    # One more word would not fit the MTU the profile is for.
    assert mtu + constants.WORD_BYTES > {"w5": 1500, "w34": 9000}[name]
    assert [found.lanes(bits) for bits in (8, 16, 32, 64)] == [words * 2048 // bits for bits in (8, 16, 32, 64)]


def test_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"w6.*w5, w34"):
        wire.profile("w6")
