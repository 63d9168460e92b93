# SPDX-License-Identifier: Apache-2.0
"""Frames for the human eye: single ones and those of a capture file. Needs the extra `scapy`, imported on first use."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from p4reduce import constants
from p4reduce.errors import ConfigError, UsageError
from p4reduce.packetize import FIELD_BYTES, from_thermometers, from_wire
from p4reduce.wire import Kind, Op, headers_from_bytes, unpack_tag

if TYPE_CHECKING:
    from scapy.packet import Packet

_LEVELS_SHOWN = 16
_ETHERNET_HEADER_BYTES = 14
_UDP_HEADER_BYTES = 8
_FIELDS = (
    *("version", "kind", "op", "words", "epoch", "slot", "rank", "count", "reason", "round", "slot_version"),
    *("check", "bucket", "chunk", "digest", "payload_bytes", "check_ok", "levels", "problems"),
)
Decoded = dict[str, Any]
"""One frame: JSON types only. See decode_frame()."""


def decode_frame(data: bytes) -> Decoded:
    """Decode one Ethernet frame.

    The keys: `source` and `destination` ("address:port"); the header's fields under their names, with `kind` and
    `op` in words, `count` (contribution: None) and `reason` (nack, in words) apart, and `bucket`, `chunk`, `digest` in
    place of the tag; `slot_version`, which of the slot's two versions; `payload_bytes`; `check_ok`, whether the
    check is right for payload and header (None for a nack); `levels`, what an OR frame's thermometers say (None when
    they are none); `problems`, a list of sentences, empty for a sound frame. Of a datagram shorter than a header only
    `problems` is known, the rest is None.

    Raises UsageError when the frame carries no UDP datagram of this protocol, ConfigError without scapy.
    """
    _scapy()
    from scapy.layers.l2 import Ether

    # scapy dissects whatever follows, but wants a whole first header.
    decoded = _decode_packet(Ether(data)) if len(data) >= _ETHERNET_HEADER_BYTES else None
    if decoded is None:
        raise UsageError("no frame of this protocol: no UDP datagram on port 20532, nor one that looks like it")
    return decoded


def decode_pcap(path: str | Path) -> Iterator[Decoded]:
    """Decode the frames of a capture file (pcap or pcapng), in order; other packets are passed over.

    Adds to decode_frame()'s keys `number`, counted over all packets from 1 as Wireshark does, and `time`, seconds
    since 1970. Frames count on UDP port 20532 and, because an embedded switch has other ports, wherever a datagram
    looks like one. Raises OSError when the file cannot be read, UsageError when it is no capture, ConfigError
    without scapy.
    """
    _scapy()
    from scapy.error import Scapy_Exception
    from scapy.utils import PcapReader

    with open(path, "rb") as file:
        try:
            reader = PcapReader(file)
        except Scapy_Exception as error:
            raise UsageError(f"{path} is no capture file: {error}") from error
        for number, packet in enumerate(reader, 1):
            decoded = _decode_packet(packet)
            if decoded is not None:
                yield {"number": number, "time": float(packet.time), **decoded}


def format_frame(decoded: Decoded) -> list[str]:
    """Lines that show one decoded frame; the first stands alone as a summary."""
    start = ""
    if "number" in decoded:
        moment = datetime.fromtimestamp(decoded["time"], tz=timezone.utc)
        start = f"#{decoded['number']} {moment:%H:%M:%S.%f} "
    if decoded["kind"] is None:
        return [f"{start}{decoded['source']} > {decoded['destination']}  damaged", *_problem_lines(decoded)]
    what = f"{decoded['kind']} {decoded['op']}"
    if decoded["count"] is not None:
        what += f" of {decoded['count']}"
    if decoded["reason"] is not None:
        what += f": {decoded['reason']}"
    place = f"bucket {decoded['bucket']}, chunk {decoded['chunk']}"
    if decoded["problems"]:
        place += "  PROBLEM"
    lines = [
        f"{start}{decoded['source']} > {decoded['destination']}  {what}, {place}",
        f"    epoch {decoded['epoch']}, rank {decoded['rank']}, slot {decoded['slot']}, round {decoded['round']} "
        f"(version {decoded['slot_version']}), words {decoded['words']}, digest {decoded['digest']:#06x}",
    ]
    if decoded["check_ok"]:
        lines.append(f"    check {decoded['check']:#018x} is right")
    if decoded["levels"]:
        lines.append(f"    levels {_shown(decoded['levels'])}")
    return lines + _problem_lines(decoded)


def looks_like_frame(datagram: bytes) -> bool:
    """Whether a UDP payload is a well-formed frame, whatever port it came from."""
    if len(datagram) < constants.HEADER_BYTES:
        return False
    header = headers_from_bytes(datagram)[0]
    words = 0 if header["kind"] == Kind.NACK else int(header["words"])
    return (
        header["version"] == constants.VERSION
        and header["kind"] in set(Kind)
        and header["op"] in set(Op)
        and header["words"] > 0
        and len(datagram) == constants.HEADER_BYTES + words * constants.WORD_BYTES
    )


def _scapy() -> Any:
    try:
        from p4reduce import scapy
    except ImportError as error:
        raise ConfigError(str(error)) from error
    return scapy


def _decode_packet(packet: Packet) -> Decoded | None:
    from scapy.layers.inet import IP, UDP

    if UDP not in packet or IP not in packet:
        return None
    udp = packet[UDP]
    # What follows the datagram is padding of the link.
    datagram = bytes(udp.payload)[: max(udp.len - _UDP_HEADER_BYTES, 0)]
    if constants.UDP_PORT not in (udp.sport, udp.dport) and not looks_like_frame(datagram):
        return None
    ends = {
        "source": f"{packet[IP].src}:{udp.sport}",
        "destination": f"{packet[IP].dst}:{udp.dport}",
    }
    return {**ends, **_decode_datagram(datagram)}


def _decode_datagram(datagram: bytes) -> Decoded:
    layer = _scapy()
    if len(datagram) < constants.HEADER_BYTES:
        problem = f"{len(datagram)} bytes are no header of {constants.HEADER_BYTES}"
        return {**dict.fromkeys(_FIELDS), "problems": [problem]}
    header = layer.P4Reduce(datagram[: constants.HEADER_BYTES])
    payload = datagram[constants.HEADER_BYTES :]
    nack, result = header.kind == Kind.NACK, header.kind == Kind.RESULT
    bucket, chunk, digest = unpack_tag(header.tag)
    decoded: Decoded = {
        "version": header.version,
        "kind": layer.KINDS.get(header.kind, str(header.kind)),
        "op": layer.OPS.get(header.op, str(header.op)),
        "words": header.words,
        "epoch": header.epoch,
        "slot": header.slot,
        "rank": header.rank,
        "count": header.count_or_reason if result else None,
        "reason": layer.REASONS.get(header.count_or_reason, str(header.count_or_reason)) if nack else None,
        "round": header.round,
        "slot_version": header.round & 1,
        "check": header.check,
        "bucket": bucket,
        "chunk": chunk,
        "digest": digest,
        "payload_bytes": len(payload),
        "check_ok": None,
        "levels": None,
        "problems": _form_problems(header, payload),
    }
    if not nack and payload and len(payload) % constants.WORD_BYTES == 0:
        _judge_payload(decoded, header, payload)
    return decoded


def _form_problems(header: Packet, payload: bytes) -> list[str]:
    problems = []
    if header.version != constants.VERSION:
        problems.append(f"version {header.version}, not {constants.VERSION}")
    if header.kind not in set(Kind):
        problems.append(f"unknown kind {header.kind}")
    if header.op not in set(Op):
        problems.append(f"unknown op {header.op}")
    expected = 0 if header.kind == Kind.NACK else header.words * constants.WORD_BYTES
    if len(payload) != expected:
        problems.append(f"payload of {len(payload)} bytes, the header promises {expected}")
    elif header.kind != Kind.NACK and not payload:
        problems.append("no payload")
    return problems


def _judge_payload(decoded: Decoded, header: Packet, payload: bytes) -> None:
    check = _scapy().frame_check(header, payload)
    decoded["check_ok"] = bool(check == header.check)
    if check != header.check:
        decoded["problems"].append(f"check failed: the header says {header.check:#018x}, it should be {check:#018x}")
    if header.op == Op.OR:
        fields = np.frombuffer(payload, dtype=np.uint8).reshape(-1, FIELD_BYTES)
        levels, valid = from_thermometers(from_wire(fields))
        if valid.all():
            decoded["levels"] = levels.tolist()


def _shown(levels: list[int]) -> str:
    text = " ".join(map(str, levels[:_LEVELS_SHOWN]))
    rest = len(levels) - _LEVELS_SHOWN
    return f"{text} and {rest} more, highest {max(levels)}" if rest > 0 else text


def _problem_lines(decoded: Decoded) -> list[str]:
    return [f"    PROBLEM: {problem}" for problem in decoded["problems"]]
