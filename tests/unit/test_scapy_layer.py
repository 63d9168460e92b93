# SPDX-License-Identifier: Apache-2.0
"""The scapy layer against p4reduce.wire."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("scapy", reason="needs the extra scapy")

from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether
from scapy.packet import Raw

from p4reduce import constants, signature, wire
from p4reduce.packetize import BucketCodec
from p4reduce.quantize import LaneFormat, block_exponents
from p4reduce.scapy import P4Reduce, contribution, payload_check

repeatable = settings(derandomize=True, deadline=None, max_examples=150)
header_values = st.fixed_dictionaries(
    {name: st.integers(0, (1 << 8 * wire.HEADER[name].itemsize) - 1) for name in wire.HEADER.names or ()}
)


def test_fields_are_those_of_the_wire_format() -> None:
    assert [field.name for field in P4Reduce.fields_desc] == list(wire.HEADER.names or ())
    assert bytes(P4Reduce()) == wire.make_header(kind=wire.Kind.CONTRIBUTE, words=1)


@repeatable
@given(header_values, st.binary(max_size=20))
def test_layer_and_wire_agree_on_every_header(values: dict[str, int], payload: bytes) -> None:
    encoded = wire.make_header(**values) + payload
    layer = P4Reduce(encoded)
    assert {name: layer.getfieldval(name) for name in values} == values
    assert bytes(layer.payload) == payload
    assert bytes(P4Reduce(**values) / payload) == encoded
    # Dissected and built anew, not echoed from scapy's cache.
    layer.clear_cache()
    assert bytes(layer) == encoded


@pytest.mark.parametrize("ports", [(40000, constants.UDP_PORT), (constants.UDP_PORT, 40000)])
def test_layer_is_found_on_its_port_either_way(ports: tuple[int, int]) -> None:
    payload = wire.make_header(kind=2, slot=9) + bytes(256)
    data = bytes(Ether(dst="02:00:00:00:00:01") / IP() / UDP(sport=ports[0], dport=ports[1]) / payload)
    assert Ether(data)[P4Reduce].slot == 9
    assert isinstance(Ether(data)[P4Reduce].payload, Raw)


def test_layer_is_not_found_on_other_ports() -> None:
    data = bytes(Ether(dst="02:00:00:00:00:01") / IP() / UDP(sport=1, dport=2) / wire.make_header())
    assert P4Reduce not in Ether(data)


def test_contribution_is_a_whole_frame() -> None:
    codec = BucketCodec(wire.PROFILES["w5"], LaneFormat(32, 2), 320)
    x = np.random.default_rng(1).standard_normal(320).astype(np.float32)
    rows, checks = np.zeros((1, 1280), np.uint8), np.zeros(1, np.uint64)
    codec.encode(x, block_exponents(x), 0, 1, rows, checks)
    tag = wire.pack_tag(3, 4, 5)
    packet = contribution(
        rows[0].tobytes(),
        ip_src="10.0.0.1",
        ip_dst="10.0.0.254",
        eth_src="02:00:00:00:00:0a",
        eth_dst="02:00:00:00:00:0b",
        sport=40000,
        epoch=7,
        slot=8,
        rank=1,
        round=9,
        tag=tag,
    )
    data = bytes(packet)
    assert len(data) == 14 + 20 + 8 + 32 + 1280
    assert data[:14].hex() == "02000000000b02000000000a0800"
    frame = Ether(data)
    assert (frame[IP].src, frame[IP].dst, frame[UDP].chksum) == ("10.0.0.1", "10.0.0.254", 0)
    assert (frame[UDP].sport, frame[UDP].dport, frame[UDP].len) == (40000, constants.UDP_PORT, 8 + 32 + 1280)
    header = wire.make_header(kind=1, words=5, epoch=7, slot=8, rank=1, round=9, check=0, tag=tag)
    check = (int(checks[0]) + signature.expected(wire.headers_from_bytes(header)[0])) % 2**64
    header = wire.make_header(kind=1, words=5, epoch=7, slot=8, rank=1, round=9, check=check, tag=tag)
    assert data[42:] == header + rows[0].tobytes()


def test_contribution_may_be_told_to_lie() -> None:
    ends: dict[str, Any] = {"ip_src": "10.0.0.1", "ip_dst": "10.0.0.2"}
    signed = contribution(bytes([1]) * 256, op=wire.Op.OR, **ends)[P4Reduce].check
    both = contribution(bytes([1]) * 256, **ends)[P4Reduce].check
    assert 0 != (both - signed) % 2**64 == payload_check(bytes([1]) * 256)
    lie = contribution(bytes(256), words=34, check=5, **ends)[P4Reduce]
    assert (lie.words, lie.check) == (34, 5)


def test_summary_and_show_say_what_a_frame_is() -> None:
    nack = P4Reduce(kind=wire.Kind.NACK, count_or_reason=wire.Reason.BAD_SLOT, tag=wire.pack_tag(3, 4, 5), epoch=6)
    assert "bad slot" in nack.show(dump=True)
    assert "nack" in nack.show(dump=True)
    assert nack.summary() == "P4Reduce nack add epoch 6 rank 0 slot 0 round 0 bucket 3 chunk 4"
    result = P4Reduce(kind=wire.Kind.RESULT, count_or_reason=3)
    assert "bad slot" not in result.show(dump=True)
    assert "P4Reduce 9 9" in P4Reduce(kind=9, op=9).summary()


def test_scapy_is_imported_only_when_wanted() -> None:
    code = "import sys, p4reduce.packetize, p4reduce.decode; sys.exit('scapy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_scapy_the_extra_is_named() -> None:
    code = "import sys; sys.modules['scapy'] = None; import p4reduce.scapy"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'p4reduce[scapy]'" in done.stderr
