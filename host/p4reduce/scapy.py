# SPDX-License-Identifier: Apache-2.0
"""The frame as a scapy layer: fields named as in p4reduce.wire.HEADER, the payload raw.

Importing this module needs the extra `scapy` and binds the layer to UDP port 20532, so nothing else imports it before
it is wanted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from p4reduce import constants
from p4reduce.packetize import check, from_wire
from p4reduce.signature import expected
from p4reduce.wire import Kind, Op, Reason, unpack_tag

try:
    from scapy.fields import (
        ByteEnumField,
        ByteField,
        IntField,
        MultipleTypeField,
        ShortField,
        XLongField,
    )
    from scapy.layers.inet import IP, UDP
    from scapy.layers.l2 import Ether
    from scapy.packet import Packet, bind_bottom_up, bind_layers
except ImportError as error:
    raise ImportError("p4reduce.scapy needs scapy: pip install 'p4reduce[scapy]'") from error

KINDS = {int(kind): kind.name.lower() for kind in Kind}
OPS = {int(op): op.name.lower() for op in Op}
REASONS = {int(reason): reason.name.lower().replace("_", " ") for reason in Reason}


class P4Reduce(Packet):  # type: ignore[misc]
    """Header of a frame, 32 bytes, big-endian. What follows it, words of 256 bytes, is the payload."""

    name = "P4Reduce"
    fields_desc = [  # noqa: RUF012  (scapy reads and replaces the list)
        ByteField("version", constants.VERSION),
        ByteEnumField("kind", int(Kind.CONTRIBUTE), KINDS),
        ByteEnumField("op", int(Op.ADD), OPS),
        ByteField("words", 1),
        IntField("epoch", 0),
        ShortField("slot", 0),
        ByteField("rank", 0),
        MultipleTypeField(
            [(ByteEnumField("count_or_reason", 0, REASONS), lambda packet: packet.kind == Kind.NACK)],
            ByteField("count_or_reason", 0),
        ),
        IntField("round", 0),
        XLongField("check", 0),
        XLongField("tag", 0),
    ]

    def mysummary(self) -> str:
        """One line for scapy's summary()."""
        bucket, chunk, _ = unpack_tag(self.tag)
        kind, op = KINDS.get(self.kind, self.kind), OPS.get(self.op, self.op)
        place = f"slot {self.slot} round {self.round} bucket {bucket} chunk {chunk}"
        return f"P4Reduce {kind} {op} epoch {self.epoch} rank {self.rank} {place}"


bind_bottom_up(UDP, P4Reduce, sport=constants.UDP_PORT)
bind_layers(UDP, P4Reduce, dport=constants.UDP_PORT)


def payload_check(payload: bytes) -> int:
    """Linear check of an ADD frame's payload. ValueError when it is not whole groups of 8 bytes."""
    row = np.frombuffer(payload, dtype=np.uint8).reshape(1, -1)
    return int(check(from_wire(row))[0])


def frame_check(header: Packet, payload: bytes) -> int:
    """Check that a contribution or result must carry: its signature, and for ADD the payload's linear check."""
    names = ("epoch", "rank", "round", "tag", "kind", "count_or_reason")
    linear = payload_check(payload) if header.op == Op.ADD else 0
    return (linear + expected({name: getattr(header, name) for name in names})) % (1 << 64)


def contribution(
    payload: bytes,
    *,
    ip_src: str,
    ip_dst: str,
    eth_src: str = "02:00:00:00:00:01",
    eth_dst: str = "02:00:00:00:00:02",
    sport: int = constants.UDP_PORT,
    **header: Any,
) -> Packet:
    """Build a whole contribution, Ethernet to payload; `header` sets fields of P4Reduce.

    `words` follows from the payload, `check` from payload and header, unless they are given: a test may lie.
    """
    if "words" not in header:
        header["words"] = len(payload) // constants.WORD_BYTES
    if "check" not in header:
        header["check"] = frame_check(P4Reduce(**header), payload)
    link = Ether(src=eth_src, dst=eth_dst)
    # Workers send UDP checksum 0, "none": the switch changes the payload and could not correct it.
    network = IP(src=ip_src, dst=ip_dst) / UDP(sport=sport, dport=constants.UDP_PORT, chksum=0)
    return link / network / P4Reduce(**header) / payload
