# SPDX-License-Identifier: Apache-2.0
"""Both switches on real interfaces, in namespaces: frames in, frames out, and what the control plane then reads."""

from __future__ import annotations

import select
import socket
import struct
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.runtime import CPU_PORT, INSERT, KINDS, MODIFY, Client, Code, Program, group, running, session

from p4reduce.errors import SwitchError
from p4reduce_bmv2 import netns
from p4reduce_bmv2.embedded.ports import AfPacketPort, checksum, widen_receive_buffer
from p4reduce_bmv2.embedded.switch import EmbeddedSwitch
from p4reduce_bmv2.switch import SwitchProcess, find_bmv2
from p4reduce_bmv2.topology import Host, Topology

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif("os.geteuid() != 0", reason="network namespaces need root"),
]
DEADLINE = 10.0
PROGRAM = Program.entities()
ETHERTYPE = 0x1234


class Wire:
    """A raw socket on a host's interface, inside its namespace."""

    def __init__(self, host: Host) -> None:
        def make() -> socket.socket:
            sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
            # A burst of jumbo frames does not fit into the default buffer.
            widen_receive_buffer(sock)
            sock.bind(("eth0", ETHERTYPE))
            return sock

        self.sock = netns.call(host.netns, make)
        self.sock.settimeout(DEADLINE)

    def send(self, frame: bytes) -> None:
        self.sock.send(frame)

    def receive(self) -> bytes:
        return self.sock.recv(65535)

    def silent(self) -> bool:
        """True when nothing waits. Ask only after something later has arrived elsewhere."""
        return not select.select([self.sock], [], [], 0)[0]


def key_frame(a: int = 0, b: int = 0, c: int = 0, d: int = 0, rest: bytes = b"") -> bytes:
    """A frame of the test program."""
    return b"\xff" * 12 + b"\x12\x34" + a.to_bytes(4, "big") + b.to_bytes(2, "big") + bytes([c, d]) + rest


@pytest.fixture(scope="module")
def topology() -> Iterator[Topology]:
    with Topology(3, mtu=9000) as topology:
        yield topology


@pytest.fixture(scope="module")
def wires(topology: Topology) -> Iterator[dict[int, Wire]]:
    wires = {host.port: Wire(host) for host in topology.hosts}
    yield wires
    for wire in wires.values():
        wire.sock.close()


@pytest.fixture(scope="module", params=KINDS)
def switch(request: pytest.FixtureRequest, topology: Topology) -> Iterator[SwitchProcess]:
    if request.param == "bmv2" and find_bmv2() is None:
        pytest.skip("simple_switch_grpc is not installed")
    with SwitchProcess.start(request.param, interfaces=topology.interfaces, cpu_port=CPU_PORT) as process:
        yield process


@pytest.fixture(scope="module")
def connected(switch: SwitchProcess) -> Iterator[Client]:
    with Client(switch.grpc_address, 1) as client:
        yield client


@pytest.fixture
def client(connected: Client) -> Client:
    connected.push(PROGRAM)
    return connected


def route(client: Client, prefix: int, action: str, params: list[bytes]) -> None:
    entity = PROGRAM.entry("routes", {"a": (bytes([prefix, 0, 0, 0]), 8)}, action, params)
    assert client.write((INSERT, entity)) == [Code.OK]


def test_forwarding(client: Client, wires: dict[int, Wire]) -> None:
    route(client, 10, "send", [b"\x02"])
    frame = key_frame(a=0x0A010203, rest=bytes(range(100)))
    wires[1].send(frame)
    assert wires[2].receive() == frame
    # A miss is dropped; what comes after it shows that it went nowhere.
    wires[1].send(key_frame(a=0x0B000000))
    wires[1].send(frame)
    assert wires[2].receive() == frame
    assert all(wire.silent() for wire in wires.values())


def test_jumbo_frames(client: Client, wires: dict[int, Wire]) -> None:
    route(client, 10, "send", [b"\x03"])
    frame = key_frame(a=0x0A000000, rest=bytes(9000 - 8))
    for _ in range(20):
        wires[1].send(frame)
    for _ in range(20):
        assert wires[3].receive() == frame


def test_frame_may_leave_where_it_came_in(client: Client, wires: dict[int, Wire]) -> None:
    """Nothing that the switch sends may come back into it."""
    route(client, 10, "send", [b"\x01"])
    frame = key_frame(a=0x0A000000, d=9, rest=bytes(60))
    wires[1].send(frame)
    assert wires[1].receive() == frame
    found = client.read(PROGRAM.counter("hits", 9))[0].counter_entry.data
    assert (found.packet_count, found.byte_count) == (1, len(frame))


def test_every_match_kind_and_direct_counters(client: Client, wires: dict[int, Wire]) -> None:
    key: dict[str, Any] = {"a": (b"\x05", b"\xff"), "b": (b"\x10", b"\x20"), "c": b"\x07", "d": b"\x01"}
    assert (
        client.write(
            (INSERT, PROGRAM.entry("wide", key, "send_counted", [b"\x02"], priority=1)),
            (INSERT, PROGRAM.entry("wide", {"d": b"\x01"}, "send_counted", [b"\x03"], priority=5)),
        )
        == [Code.OK] * 2
    )
    # The wildcard has the higher priority and hides the other.
    hit = key_frame(a=0x99999905, b=0x15, c=7, d=1, rest=bytes(60))
    wires[1].send(hit)
    assert wires[3].receive() == hit
    assert (
        client.write(
            (3, PROGRAM.entry("wide", {"d": b"\x01"}, priority=5)),
            (INSERT, PROGRAM.entry("wide", {"d": b"\x01"}, "send_counted", [b"\x03"], priority=1)),
            (3, PROGRAM.entry("wide", key, priority=1)),
            (INSERT, PROGRAM.entry("wide", key, "send_counted", [b"\x02"], priority=2)),
        )
        == [Code.OK] * 4
    )
    wires[1].send(hit)
    assert wires[2].receive() == hit
    for change in ({"a": 6}, {"b": 0x0F}, {"b": 0x21}, {"c": 8}):
        frame = key_frame(**{"a": 5, "b": 0x15, "c": 7, "d": 1, **change}, rest=bytes(60))
        wires[1].send(frame)
        assert wires[3].receive() == frame
    for edge in (0x10, 0x20):
        frame = key_frame(a=5, b=edge, c=7, d=1, rest=bytes(60))
        wires[1].send(frame)
        assert wires[2].receive() == frame
    request = PROGRAM.entry("wide")
    request.table_entry.counter_data.SetInParent()
    counts = {
        e.table_entry.priority: (e.table_entry.counter_data.packet_count, e.table_entry.counter_data.byte_count)
        for e in client.read(request)
    }
    assert counts == {2: (3, 3 * len(hit)), 1: (4, 4 * len(hit))}


def test_constant_entries_are_at_work(client: Client, wires: dict[int, Wire]) -> None:
    for key, port in ((200, 2), (201, 3)):
        frame = key_frame(d=key, rest=bytes(60))
        wires[1].send(frame)
        assert wires[port].receive() == frame


def test_longest_prefix_and_default_action(client: Client, wires: dict[int, Wire]) -> None:
    longer = PROGRAM.entry("routes", {"a": (b"\x0a\x01\0\0", 16)}, "send", [b"\x03"])
    assert client.write((INSERT, longer)) == [Code.OK]
    route(client, 10, "send", [b"\x02"])
    default = PROGRAM.entry("routes", action="send", params=[b"\x01"], is_default_action=True)
    assert client.write((MODIFY, default)) == [Code.OK]
    for address, port in ((0x0A010000, 3), (0x0A020000, 2), (0x0B000000, 1)):
        frame = key_frame(a=address, rest=bytes(60))
        wires[1].send(frame)
        assert wires[port].receive() == frame


def test_multicast(client: Client, wires: dict[int, Wire]) -> None:
    route(client, 10, "spread", [b"\x05"])
    frame = key_frame(a=0x0A000000, rest=bytes(60))
    assert client.write((INSERT, group(5, [(2, 1), (3, 1), (3, 2)]))) == [Code.OK]
    wires[1].send(frame)
    assert wires[2].receive() == wires[3].receive() == wires[3].receive() == frame
    assert client.write((MODIFY, group(5, [(1, 1)]))) == [Code.OK]
    wires[1].send(frame)
    assert wires[1].receive() == frame
    # Without the group the frame is dropped.
    assert client.write((3, group(5))) == [Code.OK]
    wires[1].send(frame)
    route(client, 11, "send", [b"\x01"])
    last = key_frame(a=0x0B000000, rest=bytes(60))
    wires[1].send(last)
    assert wires[1].receive() == last
    assert all(wire.silent() for wire in wires.values())


def test_clones(client: Client, wires: dict[int, Wire]) -> None:
    route(client, 10, "mirror", [b"\x02"])
    frame = key_frame(a=0x0A000000, rest=bytes(60))
    wires[1].send(frame)
    assert wires[2].receive() == frame
    assert client.write((INSERT, session(7, [(3, 1)]))) == [Code.OK]
    wires[1].send(frame)
    assert wires[2].receive() == wires[3].receive() == frame
    assert client.write((3, session(7))) == [Code.OK]
    assert wires[3].silent()


def test_packet_in_names_the_port(client: Client, wires: dict[int, Wire]) -> None:
    route(client, 10, "send", [CPU_PORT.to_bytes(2, "big")])
    frame = key_frame(a=0x0A000000, rest=bytes(60))
    wires[3].send(frame)
    packet = client.next("packet")
    assert packet.payload == frame
    assert packet.metadata[0].value == b"\x03"


def test_packet_out_reaches_the_wire(client: Client, wires: dict[int, Wire]) -> None:
    frame = key_frame(rest=bytes(60))
    client.packet_out(frame, {1: b"\x02", 2: b"\0"})
    assert wires[2].receive() == frame


class TestEmbeddedPorts:
    """What the embedded switch's interface ports do beyond forwarding."""

    @pytest.fixture
    def own(self) -> Iterator[Topology]:
        with Topology(2, mtu=1500) as topology:
            yield topology

    def test_checksum_left_to_hardware_is_completed(self, own: Topology) -> None:
        sender = own.hosts[0]
        own.run(sender, ["ethtool", "-K", "eth0", "tx", "on"], check=True, capture_output=True)
        port = AfPacketPort(1, sender.interface)
        try:
            sock = netns.call(sender.netns, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            with sock:
                sock.sendto(b"odd", (own.switch_ip, 20532))
            assert select.select([port], [], [], DEADLINE)[0]
            (frame,) = port.receive(1)
            assert frame[40:42] != b"\0\0"
            assert checksum(frame[26:34] + struct.pack("!HH", 17, len(frame) - 34) + frame[34:]) == 0
        finally:
            port.close()

    def test_vlan_tag_stays(self, own: Topology) -> None:
        host = own.hosts[0]
        port = AfPacketPort(1, host.interface)
        wire = Wire(host)
        try:
            # 0x8100 first: the kernel takes the tag out of the frame and hands it over beside it.
            frame = b"\xff" * 12 + b"\x81\x00\x20\x07" + b"\x12\x34" + bytes(60)
            wire.send(frame)
            assert select.select([port], [], [], DEADLINE)[0]
            assert port.receive(1) == [frame]
        finally:
            wire.sock.close()
            port.close()

    def test_oversize_frames_are_counted(self, own: Topology) -> None:
        own.run(own.hosts[0], ["ip", "link", "set", "eth0", "mtu", "4000"], check=True)
        # The switch's side still has 1500, yet veth delivers what fits the receiver's own limit only.
        port = AfPacketPort(1, own.hosts[0].interface)
        try:
            assert port.mtu == 1500
            port.send(bytes(1600))
            assert port.counters.drops == {"oversize_tx": 1}
        finally:
            port.close()

    def test_interface_down_and_up(self, own: Topology) -> None:
        link = own.hosts[0].interface
        port = AfPacketPort(1, link)
        wire = Wire(own.hosts[0])
        try:
            subprocess.run(["ip", "link", "set", link, "down"], check=True)
            assert select.select([port], [], [], DEADLINE)[0]
            assert port.receive(8) == []
            port.send(key_frame())
            assert port.counters.drops == {"down_rx": 1, "down_tx": 1}
            subprocess.run(["ip", "link", "set", link, "up"], check=True)
            # The kernel starts the link's queue a moment later and loses what is sent before.
            for _ in range(int(DEADLINE / 0.05)):
                wire.send(key_frame(rest=bytes(60)))
                if select.select([port], [], [], 0.05)[0]:
                    break
            assert port.receive(1) == [key_frame(rest=bytes(60))]
        finally:
            wire.sock.close()
            port.close()

    def test_interface_that_vanishes(self, own: Topology) -> None:
        port = AfPacketPort(1, own.hosts[0].interface)
        try:
            subprocess.run(["ip", "link", "del", own.hosts[0].interface], check=True)
            assert select.select([port], [], [], DEADLINE)[0]
            with pytest.raises(OSError, match="down"):
                port.receive(8)
        finally:
            port.close()

    def test_missing_interface(self) -> None:
        with pytest.raises(SwitchError, match="no interface 'p4rnone'"):
            EmbeddedSwitch(interfaces={1: "p4rnone"}).start()

    def test_both_sorts_of_port(self, own: Topology) -> None:
        with EmbeddedSwitch(interfaces={1: own.hosts[0].interface}, udp_ports={2: "127.0.0.1"}) as switch:
            assert list(switch.endpoints) == [2]
            links = {number: port["link"] for number, port in switch.stats()["ports"].items()}
            assert links[1] == f"interface {own.hosts[0].interface}"


def test_switch_in_a_namespace_of_its_own(tmp_path: Any) -> None:
    kinds = ["embedded"] + (["bmv2"] if find_bmv2() else [])
    with Topology(2, switch_netns=True) as topology:
        wires = {host.port: Wire(host) for host in topology.hosts}
        for kind in kinds:
            with (
                SwitchProcess.start(
                    kind,  # type: ignore[arg-type]
                    interfaces=topology.interfaces,
                    netns=topology.switch_netns,
                    grpc_addr=f"unix:{tmp_path}/{kind}.sock",
                ) as process,
                Client(process.grpc_address, 1) as client,
            ):
                client.push(PROGRAM)
                route(client, 10, "send", [b"\x02"])
                wires[1].send(key_frame(a=0x0A000000, rest=bytes(60)))
                assert wires[2].receive() == key_frame(a=0x0A000000, rest=bytes(60))
            assert not (tmp_path / f"{kind}.sock").exists()
        for wire in wires.values():
            wire.sock.close()


def test_bmv2_that_lacks_a_port_is_an_error() -> None:
    if find_bmv2() is None:
        pytest.skip("simple_switch_grpc is not installed")
    with pytest.raises(SwitchError, match=r"(?s)add a port.*Add port operation failed"):
        SwitchProcess.start("bmv2", interfaces={1: "p4rnone"})


def test_no_interfaces_at_all() -> None:
    with running("embedded") as address:
        assert address.startswith("127.0.0.1:")
