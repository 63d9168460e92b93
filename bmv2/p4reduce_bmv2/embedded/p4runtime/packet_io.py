# SPDX-License-Identifier: Apache-2.0
"""Packet-in and packet-out: between stream messages and frames of the CPU port.

A program that declares controller headers finds the metadata in front of the frame, its fields packed from the
first bit on in P4Info's order, and puts it there itself on the way in.
"""

from __future__ import annotations

from p4reduce_bmv2.embedded.p4runtime.bytestrings import decode, encode
from p4reduce_bmv2.embedded.p4runtime.p4info import ControllerHeader
from p4reduce_bmv2.embedded.p4runtime.status import Code, Refused
from p4reduce_bmv2.embedded.p4runtime.stubs import Message, p4runtime_pb2


def frame_of(packet: Message, header: ControllerHeader | None) -> bytes:
    """The frame that a PacketOut injects. INVALID_ARGUMENT unless every metadata field is there exactly once."""
    given = {item.metadata_id: item.value for item in packet.metadata}
    fields = header.fields if header is not None else ()
    if len(given) != len(packet.metadata) or sorted(given) != sorted(number for number, _ in fields):
        wanted = [number for number, _ in fields]
        raise Refused(
            Code.INVALID_ARGUMENT, f"packet-out needs each of the metadata fields {wanted} once, not {sorted(given)}"
        )
    if header is None:
        return bytes(packet.payload)
    packed = 0
    bits = 0
    for number, width in fields:
        packed = packed << width | decode(given[number], width, f"packet-out metadata {number}")
        bits += width
    padding = -bits % 8
    return (packed << padding).to_bytes(header.bytes, "big") + bytes(packet.payload)


def packet_in(frame: bytes, header: ControllerHeader | None) -> Message | None:
    """The stream message for a frame of the CPU port; None when the frame is shorter than its header."""
    message = p4runtime_pb2.StreamMessageResponse()
    if header is None:
        message.packet.payload = frame
        return message
    if len(frame) < header.bytes:
        return None
    packed = int.from_bytes(frame[: header.bytes], "big")
    left = header.bytes * 8
    for number, width in header.fields:
        left -= width
        value = packed >> left & ((1 << width) - 1)
        message.packet.metadata.add(metadata_id=number, value=encode(value))
    message.packet.payload = frame[header.bytes :]
    return message
