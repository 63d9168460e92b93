# SPDX-License-Identifier: Apache-2.0
"""Checksums and hashes of v1model's HashAlgorithm, as BMv2 computes them.

Input is a number `data` of `bits` bits, most significant bit first; the last byte is filled up with zero bits.
"""

from __future__ import annotations

import binascii
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


def crc_ccitt(data: int, bits: int) -> int:
    """CRC-16 with polynomial 0x1021, not reflected, initial value 0xffff."""
    return binascii.crc_hqx(to_bytes(data, bits), 0xFFFF)


def crc32(data: int, bits: int) -> int:
    """CRC-32 (IEEE 802.3)."""
    return zlib.crc32(to_bytes(data, bits))


def _xor(width: int) -> Callable[[int, int], int]:
    mask = (1 << width) - 1

    def xor(data: int, bits: int) -> int:
        data <<= -bits % width
        result = 0
        while data:
            result ^= data & mask
            data >>= width
        return result

    xor.__name__ = f"xor{width}"
    return xor


xor16 = _xor(16)
xor32 = _xor(32)


def identity(data: int, bits: int) -> int:
    """The first eight bytes of the input."""
    return int.from_bytes(to_bytes(data, bits)[:8], "big")


HASHES: dict[str, Callable[[int, int], int]] = {
    "csum16": csum16,
    "cksum16": csum16,
    "crc16": crc16,
    "crc16_custom": crc16,
    "crcCCITT": crc_ccitt,
    "crc32": crc32,
    "crc32_custom": crc32,
    "xor16": xor16,
    "xor32": xor32,
    "identity": identity,
}
"""The custom CRCs have BMv2's initial parameters; only its Thrift interface could change them."""

HASH_BITS = {
    "csum16": 16,
    "cksum16": 16,
    "crc16": 16,
    "crc16_custom": 16,
    "crcCCITT": 16,
    "crc32": 32,
    "crc32_custom": 32,
}
"""Width of a result in bits, where it is less than 64."""
