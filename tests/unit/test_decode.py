# SPDX-License-Identifier: Apache-2.0
"""Decoding of frames and captures for the human eye."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("scapy", reason="needs the extra scapy")

from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import ARP, Ether
from scapy.utils import PcapNgWriter, PcapWriter

from p4reduce import constants, signature, wire
from p4reduce.decode import decode_frame, decode_pcap, format_frame, looks_like_frame
from p4reduce.errors import ConfigError, UsageError
from p4reduce.packetize import BucketCodec, thermometers, to_wire
from p4reduce.quantize import LaneFormat
from p4reduce.scapy import contribution, payload_check

PAYLOAD = np.random.default_rng(1).integers(0, 256, 256, dtype=np.uint8).tobytes()
TAG = wire.pack_tag(11, 12, 0xABC)
SIGNED = {"kind": wire.Kind.CONTRIBUTE, "epoch": 7, "rank": 1, "round": 9, "tag": TAG, "count_or_reason": 0}
CHECK = (payload_check(PAYLOAD) + signature.expected(SIGNED)) % 2**64


def frame(payload: bytes = PAYLOAD, **header: Any) -> bytes:
    fields = {"epoch": 7, "slot": 3, "rank": 1, "round": 9, "tag": TAG, **header}
    return bytes(contribution(payload, ip_src="10.0.0.1", ip_dst="10.0.0.254", sport=40000, **fields))


def datagram(payload: bytes, sport: int = 40000, dport: int = constants.UDP_PORT) -> bytes:
    link = Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02")
    return bytes(link / IP(src="10.0.0.1", dst="10.0.0.2") / UDP(sport=sport, dport=dport) / payload)


def test_contribution() -> None:
    decoded = decode_frame(frame())
    assert decoded == {
        "source": "10.0.0.1:40000",
        "destination": "10.0.0.254:20532",
        "version": 1,
        "kind": "contribute",
        "op": "add",
        "words": 1,
        "epoch": 7,
        "slot": 3,
        "rank": 1,
        "count": None,
        "reason": None,
        "round": 9,
        "slot_version": 1,
        "check": CHECK,
        "bucket": 11,
        "chunk": 12,
        "digest": 0xABC,
        "payload_bytes": 256,
        "check_ok": True,
        "levels": None,
        "problems": [],
    }
    lines = format_frame(json.loads(json.dumps(decoded)))
    assert lines == [
        "10.0.0.1:40000 > 10.0.0.254:20532  contribute add, bucket 11, chunk 12",
        "    epoch 7, rank 1, slot 3, round 9 (version 1), words 1, digest 0x0abc",
        f"    check {CHECK:#018x} is right",
    ]


@pytest.mark.parametrize("where", [0, 100, 255])
def test_a_check_that_fails_is_said(where: int) -> None:
    damaged = bytearray(frame())
    damaged[14 + 20 + 8 + 32 + where] ^= 1
    decoded = decode_frame(bytes(damaged))
    assert decoded["check_ok"] is False
    assert len(decoded["problems"]) == 1
    assert f"check failed: the header says {CHECK:#018x}" in decoded["problems"][0]
    assert format_frame(decoded)[0].endswith("chunk 12  PROBLEM")
    assert format_frame(decoded)[-1].startswith("    PROBLEM: check failed")
    assert not any("is right" in line for line in format_frame(decoded))


def test_result_says_how_many_it_sums() -> None:
    decoded = decode_frame(frame(kind=wire.Kind.RESULT, count_or_reason=4))
    assert (decoded["count"], decoded["reason"], decoded["check_ok"]) == (4, None, True)
    assert "result add of 4, bucket 11" in format_frame(decoded)[0]


@pytest.mark.parametrize("reason", list(wire.Reason))
def test_nack_says_why(reason: wire.Reason) -> None:
    header = wire.make_header(kind=wire.Kind.NACK, words=34, count_or_reason=reason, tag=TAG, check=99)
    decoded = decode_frame(datagram(header, sport=constants.UDP_PORT, dport=40000))
    assert (decoded["kind"], decoded["count"], decoded["check_ok"], decoded["problems"]) == ("nack", None, None, [])
    assert decoded["reason"] == reason.name.lower().replace("_", " ")
    assert f"nack add: {decoded['reason']}, bucket 11" in format_frame(decoded)[0]


def test_levels_of_an_or_frame() -> None:
    codec = BucketCodec(wire.PROFILES["w5"], LaneFormat(32, 2), 20 * 256)
    local = np.arange(100, 120, dtype=np.uint8)
    decoded = decode_frame(frame(codec.encode_exponents(local)[0].tobytes(), op=wire.Op.OR))
    assert decoded["levels"] == [*range(100, 120), *[0] * 20]
    assert (decoded["check_ok"], decoded["problems"], decoded["words"]) == (True, [], 5)
    assert format_frame(decoded)[-1].endswith(
        "levels 100 101 102 103 104 105 106 107 108 109 110 111 112 113 114 115 and 24 more, highest 119"
    )


def test_an_or_frame_need_not_hold_levels() -> None:
    decoded = decode_frame(frame(bytes([2]) + bytes(255), op=wire.Op.OR))
    assert (decoded["levels"], decoded["problems"]) == (None, [])
    short = np.zeros((8, 32), dtype=np.uint8)
    to_wire(thermometers(np.full(8, 255, dtype=np.uint8)), short)
    assert format_frame(decode_frame(frame(short.tobytes(), op=wire.Op.OR)))[-1] == "    levels " + " ".join(
        ["255"] * 8
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"version": 2}, "version 2, not 1"),
        ({"kind": 9}, "unknown kind 9"),
        ({"op": 7}, "unknown op 7"),
        ({"words": 5}, "payload of 256 bytes, the header promises 1280"),
        ({"words": 0}, "payload of 256 bytes, the header promises 0"),
        ({"kind": 3}, "payload of 256 bytes, the header promises 0"),
    ],
)
def test_malformed_headers_are_shown_with_what_is_wrong(change: dict[str, Any], problem: str) -> None:
    decoded = decode_frame(frame(**change))
    assert problem in decoded["problems"]
    assert format_frame(decoded)[-1] == f"    PROBLEM: {problem}"


def test_a_frame_without_payload_is_a_problem() -> None:
    assert decode_frame(frame(b"", words=0))["problems"] == ["no payload"]


@pytest.mark.parametrize("size", [0, 5, 31])
def test_too_short_for_a_header(size: int) -> None:
    # Short frames are padded by the link to 60 bytes; that is no part of the datagram.
    data = datagram(bytes(size)).ljust(60, b"\0")
    decoded = decode_frame(data)
    assert decoded["problems"] == [f"{size} bytes are no header of 32"]
    assert decoded.keys() == decode_frame(frame()).keys()
    assert format_frame(decoded) == [
        "10.0.0.1:40000 > 10.0.0.2:20532  damaged",
        f"    PROBLEM: {size} bytes are no header of 32",
    ]


@pytest.mark.parametrize("data", [b"", b"junk", bytes(60), frame()[:13], datagram(b"hello", dport=53)])
def test_other_frames_are_refused(data: bytes) -> None:
    with pytest.raises(UsageError, match="no frame of this protocol"):
        decode_frame(data)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.integers(12, 73), st.integers(1, 255), st.integers(0, 330))
def test_damaged_frames_never_break_the_decoder(where: int, mask: int, size: int) -> None:
    damaged = bytearray(frame())
    damaged[where] ^= mask
    try:
        lines = format_frame(decode_frame(bytes(damaged[:size])))
    except UsageError:
        # Damage below the header can make it another protocol's frame.
        assert where < 42 or size < 42 + 1
    else:
        assert lines


def test_what_looks_like_a_frame_on_another_port() -> None:
    body = frame()[42:]
    assert decode_frame(datagram(body, sport=5001, dport=5002))["slot"] == 3
    assert looks_like_frame(body)
    assert looks_like_frame(wire.make_header(kind=wire.Kind.NACK, words=1))
    unlike = [b"", body[:31], body[:-1], body + b"x", bytes([2]) + body[1:], body[:1] + b"\0" + body[2:]]
    unlike += [body[:2] + b"\x02" + body[3:], body[:3] + b"\x02" + body[4:], wire.make_header(kind=1)]
    for other in unlike:
        assert not looks_like_frame(other)


@pytest.mark.parametrize("writer", [PcapWriter, PcapNgWriter])
def test_capture(tmp_path: Path, writer: Any) -> None:
    path = tmp_path / "some.pcap"
    packets = [
        Ether(src="02:00:00:00:00:01", dst="ff:ff:ff:ff:ff:ff")
        / ARP(hwsrc="02:00:00:00:00:01", psrc="10.0.0.1", pdst="10.0.0.2"),
        Ether(frame()),
        Ether(datagram(b"a name, please", dport=53)),
        Ether(datagram(frame(kind=wire.Kind.RESULT, count_or_reason=2)[42:], sport=5001, dport=5002)),
    ]
    for i, packet in enumerate(packets):
        packet.time = 1_700_000_000.25 + i
    with writer(str(path)) as file:
        file.write(packets)
    found = list(decode_pcap(path))
    assert [(one["number"], one["kind"]) for one in found] == [(2, "contribute"), (4, "result")]
    assert [one["time"] for one in found] == pytest.approx([1_700_000_001.25, 1_700_000_003.25])
    assert all(one["check_ok"] for one in found)
    assert format_frame(found[0])[0].startswith("#2 22:13:21.250000 10.0.0.1:40000 > ")


def test_capture_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "text.pcap"
    path.write_bytes(b"this is a text, not a capture file, and a long one")
    with pytest.raises(UsageError, match="no capture file"):
        list(decode_pcap(path))
    path.write_bytes(b"")
    with pytest.raises(UsageError, match="no capture file"):
        list(decode_pcap(path))
    with pytest.raises(FileNotFoundError):
        list(decode_pcap(tmp_path / "missing.pcap"))


def test_without_scapy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import p4reduce

    monkeypatch.delattr(p4reduce, "scapy")
    monkeypatch.setitem(sys.modules, "p4reduce.scapy", None)
    with pytest.raises(ConfigError, match="p4reduce"):
        decode_frame(frame())
