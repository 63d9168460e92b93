# SPDX-License-Identifier: Apache-2.0
"""P4Runtime's byte strings: unsigned integers, big-endian, as short as possible (specification, "Bytestrings")."""

from __future__ import annotations

from p4reduce_bmv2.embedded.p4runtime.status import Code, Refused


def encode(value: int) -> bytes:
    """Canonical form: no leading zero byte, but one byte for zero."""
    return value.to_bytes(max(1, (value.bit_length() + 7) // 8), "big")


def decode(data: bytes, bitwidth: int, what: str) -> int:
    """Value of a byte string. Any number of leading zeros is fine; a value wider than `bitwidth` bits is not.

    Refused with INVALID_ARGUMENT, as simple_switch_grpc does (the specification would say OUT_OF_RANGE).
    """
    if not data:
        raise Refused(Code.INVALID_ARGUMENT, f"{what}: empty byte string")
    value = int.from_bytes(data, "big")
    if value.bit_length() > bitwidth:
        raise Refused(Code.INVALID_ARGUMENT, f"{what}: 0x{data.hex()} does not fit into {bitwidth} bits")
    return value
