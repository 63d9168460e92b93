# SPDX-License-Identifier: Apache-2.0
"""The frame on the wire (docs/design.md, section 3): header layout, profiles, tags.

Headers are numpy structured records, so that a whole batch is built or checked at once.
"""

from __future__ import annotations

import binascii
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from p4reduce import constants
from p4reduce.errors import ConfigError

HEADER = np.dtype(
    [
        ("version", "u1"),
        ("kind", "u1"),
        ("op", "u1"),
        ("words", "u1"),
        ("epoch", ">u4"),
        ("slot", ">u2"),
        ("rank", "u1"),
        ("count_or_reason", "u1"),
        ("round", ">u4"),
        ("check", ">u8"),
        ("tag", ">u8"),
    ]
)
"""One header, 32 bytes, big-endian. `count_or_reason`: contributions summed in a result, reason in a nack."""

HeaderArray = npt.NDArray[np.void]
IP_UDP_BYTES = 28
MAX_BUCKET = 1 << 24
"""Bucket and chunk numbers have 24 bits in a tag; both wrap."""


class Kind(IntEnum):
    """What a frame is."""

    CONTRIBUTE = constants.KIND_CONTRIBUTE
    RESULT = constants.KIND_RESULT
    NACK = constants.KIND_NACK


class Op(IntEnum):
    """What the switch does with the payload's words."""

    ADD = constants.OP_ADD
    OR = constants.OP_OR


class Reason(IntEnum):
    """Why the switch refused a contribution."""

    UNKNOWN_EPOCH = constants.REASON_UNKNOWN_EPOCH
    NOT_ADMITTED = constants.REASON_NOT_ADMITTED
    BAD_SLOT = constants.REASON_BAD_SLOT
    TAG_MISMATCH = constants.REASON_TAG_MISMATCH
    MALFORMED = constants.REASON_MALFORMED


@dataclass(frozen=True, slots=True)
class Profile:
    """One compiled form of the P4 program: how many words of 2048 bits a full frame carries, what MTU that needs."""

    name: str
    words: int

    @property
    def payload_bytes(self) -> int:
        """Payload of a full frame in bytes."""
        return self.words * constants.WORD_BYTES

    @property
    def datagram_bytes(self) -> int:
        """UDP payload of a full frame in bytes: header and words."""
        return constants.HEADER_BYTES + self.payload_bytes

    @property
    def mtu(self) -> int:
        """Smallest interface MTU in bytes that a full frame passes without fragmentation."""
        return IP_UDP_BYTES + self.datagram_bytes

    def lanes(self, lane_bits: int) -> int:
        """Elements of `lane_bits` bits in a full frame."""
        return self.payload_bytes * 8 // lane_bits


PROFILES: dict[str, Profile] = {p.name: p for p in (Profile("w5", 5), Profile("w34", 34))}


def profile(name: str) -> Profile:
    """Look a profile up by name; ConfigError names the known ones."""
    try:
        return PROFILES[name]
    except KeyError:
        raise ConfigError(f"unknown profile {name!r}: choose one of {', '.join(PROFILES)}") from None


def pack_tag(bucket: int, chunk: int, digest: int) -> int:
    """Build the 64-bit tag: bucket number (24 bits), chunk number within the bucket (24), digest (16)."""
    return (bucket % MAX_BUCKET) << 40 | (chunk % MAX_BUCKET) << 16 | (digest & 0xFFFF)


def unpack_tag(tag: int) -> tuple[int, int, int]:
    """Split a tag into (bucket, chunk, digest)."""
    return tag >> 40, tag >> 16 & 0xFFFFFF, tag & 0xFFFF


def digest(*parts: int | str | bytes) -> int:
    """Digest of what is reduced, 16 bits.

    CRC-16 (polynomial 0x1021), because it finds every error burst of up to 16 bits for certain: two ranks whose
    agreed exponents differ in one byte can never share a digest.
    """
    value = 0xFFFF
    for part in parts:
        if isinstance(part, int):
            part = struct.pack(">q", part)
        elif isinstance(part, str):
            part = part.encode()
        value = binascii.crc_hqx(struct.pack(">I", len(part)) + part, value)
    return value


def headers_from_bytes(data: bytes | bytearray | memoryview) -> HeaderArray:
    """View the first 32 bytes of a datagram as one header record (shape (1,)); ValueError when it is shorter."""
    if len(data) < constants.HEADER_BYTES:
        raise ValueError(f"a frame has at least {constants.HEADER_BYTES} bytes, this has {len(data)}")
    return np.frombuffer(data, dtype=HEADER, count=1)


def make_header(**fields: Any) -> bytes:
    """Encode one header; fields left out are 0, `version` is filled in. For tests and tools, not for the hot path."""
    record = np.zeros(1, dtype=HEADER)
    record["version"] = constants.VERSION
    for name, value in fields.items():
        record[name] = value
    return record.tobytes()
