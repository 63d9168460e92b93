# SPDX-License-Identifier: Apache-2.0
"""Checksums and hashes of v1model's HashAlgorithm, as BMv2 computes them.

Input is a number `data` of `bits` bits, most significant bit first; the last byte is filled up with zero bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable


def to_bytes(data: int, bits: int) -> bytes:
    """The input as whole bytes."""
    return (data << (-bits % 8)).to_bytes((bits + 7) // 8, "big")


def csum16(data: int, bits: int) -> int:
    """One's complement of the one's complement sum of 16-bit words (RFC 1071).

    The sum of the words is the number modulo 2^16 - 1, with 0xffff for 0 unless all is zero.
    """
    data <<= -bits % 16
    return -data % 0xFFFF if data else 0xFFFF


def _crc16_table() -> tuple[int, ...]:
    table = []
    for index in range(256):
        value = index
        for _ in range(8):
            value = value >> 1 ^ (0xA001 if value & 1 else 0)
        table.append(value)
    return tuple(table)


_CRC16 = _crc16_table()


def crc16(data: int, bits: int) -> int:
    """CRC-16/ARC: polynomial 0x8005, reflected, initial value 0."""
    crc = 0
    for byte in to_bytes(data, bits):
        crc = crc >> 8 ^ _CRC16[(crc ^ byte) & 0xFF]
    return crc


def crc32(data: int, bits: int) -> int:
    """CRC-32 (IEEE 802.3)."""
    return zlib.crc32(to_bytes(data, bits))


def xor16(data: int, bits: int) -> int:
    """Exclusive or of the 16-bit words."""
    data <<= -bits % 16
    result = 0
    while data:
        result ^= data & 0xFFFF
        data >>= 16
    return result


def identity(data: int, bits: int) -> int:
    """The first eight bytes of the input."""
    return int.from_bytes(to_bytes(data, bits)[:8], "big")


HASHES: dict[str, Callable[[int, int], int]] = {
    "csum16": csum16,
    "crc16": crc16,
    "crc16_custom": crc16,
    "crc32": crc32,
    "crc32_custom": crc32,
    "xor16": xor16,
    "identity": identity,
}
"""The custom CRCs have BMv2's initial parameters; only its Thrift interface could change them."""

HASH_BITS = {"csum16": 16, "crc16": 16, "crc16_custom": 16, "crc32": 32, "crc32_custom": 32, "xor16": 16}
"""Width of a result in bits, where it is less than 64."""
