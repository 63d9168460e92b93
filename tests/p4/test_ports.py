# SPDX-License-Identifier: Apache-2.0
"""Ports, the packet thread between them, loss injection, and the lock that lets the control plane in."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from p4reduce.constants import UDP_PORT
from p4reduce.errors import SwitchError
from p4reduce_bmv2.embedded.dataplane import BURST, DataPlane, Loss, TurnLock
from p4reduce_bmv2.embedded.ports import (
    UdpPort,
    checksum,
    complete_checksum,
    parse_endpoint,
    synthetic_mac,
)
from p4reduce_bmv2.embedded.state import EngineStats

DEADLINE = 10.0


class EchoEngine:
    """Stands for a program: sends every frame to one port, and remembers it."""

    def __init__(self, out: int = 2) -> None:
        self.out = out
        self.stats = EngineStats()
        self.seen: list[tuple[int, bytes]] = []
        self.fail = False

    def process(self, port: int, frame: bytes) -> list[tuple[int, bytes]]:
        self.seen.append((port, frame))
        if self.fail:
            raise RuntimeError("broken program")
        return [(self.out, frame)]


@pytest.fixture
def port() -> Iterator[UdpPort]:
    port = UdpPort(1, "127.0.0.1")
    yield port
    port.close()


@pytest.fixture
def worker() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.1.7", 0))
        sock.settimeout(DEADLINE)
        yield sock


def arrived(port: Any, count: int) -> list[bytes]:
    """Wait until `count` frames have come in."""
    frames: list[bytes] = []
    end = time.monotonic() + DEADLINE
    while len(frames) < count:
        assert select.select([port], [], [], end - time.monotonic())[0], f"{len(frames)} of {count} frames came"
        frames += port.receive(count - len(frames))
    return frames


def udp_frame(destination: str, dport: int, payload: bytes, **changes: Any) -> bytes:
    """A frame as a program would send it; `changes` replace header fields."""
    fields: dict[str, Any] = {
        "ethertype": 0x0800,
        "version_ihl": 0x45,
        "fragment": 0x4000,
        "protocol": 17,
        "udp_length": 8 + len(payload),
        **changes,
    }
    ipv4 = struct.pack(
        "!BBHHHBBH4s4s",
        fields["version_ihl"],
        0,
        28 + len(payload),
        0,
        fields["fragment"],
        64,
        fields["protocol"],
        0,
        socket.inet_aton("127.0.0.1"),
        socket.inet_aton(destination),
    )
    udp = struct.pack("!HHHH", UDP_PORT, dport, fields["udp_length"], 0)
    return bytes(12) + fields["ethertype"].to_bytes(2, "big") + ipv4 + udp + payload


class TestUdpPort:
    def test_datagram_becomes_a_frame(self, port: UdpPort, worker: socket.socket) -> None:
        payload = b"payload of odd length"
        worker.sendto(payload, port.endpoint)
        (frame,) = arrived(port, 1)
        assert frame[:6] == bytes.fromhex("02707f000001")
        assert frame[6:12] == bytes.fromhex("02707f000107")
        assert frame[12:14] == b"\x08\x00"
        (version, tos, length, identification, fragment, ttl, protocol, _, source, destination) = struct.unpack(
            "!BBHHHBBH4s4s", frame[14:34]
        )
        assert (version, tos, length, identification) == (0x45, 0, 28 + len(payload), 0)
        assert (fragment, ttl, protocol) == (0x4000, 64, 17)
        assert (socket.inet_ntoa(source), socket.inet_ntoa(destination)) == ("127.0.1.7", "127.0.0.1")
        assert checksum(frame[14:34]) == 0
        assert struct.unpack("!HHHH", frame[34:42]) == (worker.getsockname()[1], UDP_PORT, 8 + len(payload), 0)
        assert frame[42:] == payload

    @pytest.mark.parametrize("size", [0, 1, 8736, 65507])
    def test_every_size(self, port: UdpPort, worker: socket.socket, size: int) -> None:
        payload = bytes(range(256)) * 256
        worker.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        worker.sendto(payload[:size], port.endpoint)
        (frame,) = arrived(port, 1)
        assert frame[42:] == payload[:size]
        assert checksum(frame[14:34]) == 0

    def test_headers_are_those_of_the_sender_and_length(self, port: UdpPort, worker: socket.socket) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.bind(("127.0.1.8", 0))
            for sock, payload in ((worker, b"a"), (other, b"b"), (worker, b"cc"), (worker, b"d")):
                sock.sendto(payload, port.endpoint)
                (frame,) = arrived(port, 1)
                assert socket.inet_ntoa(frame[26:30]) == sock.getsockname()[0]
                assert int.from_bytes(frame[34:36], "big") == sock.getsockname()[1]
                assert frame[42:] == payload

    def test_frame_becomes_a_datagram(self, port: UdpPort, worker: socket.socket) -> None:
        address, number = worker.getsockname()
        # Ethernet pads short frames; the UDP length says where the datagram ends.
        port.send(udp_frame(address, number, b"result") + b"padding")
        assert worker.recvfrom(100) == (b"result", port.endpoint)
        port.send(udp_frame(address, number, b""))
        assert worker.recvfrom(100) == (b"", port.endpoint)
        assert port.counters.tx_frames == 2
        assert not port.counters.drops

    @pytest.mark.parametrize(
        ("frame", "reason"),
        [
            (udp_frame("127.0.1.7", 9, b"x", ethertype=0x0806), "not_ipv4_tx"),
            (udp_frame("127.0.1.7", 9, b"x", ethertype=0x86DD), "not_ipv4_tx"),
            (b"", "not_ipv4_tx"),
            (udp_frame("127.0.1.7", 9, b"x", protocol=6), "not_udp_tx"),
            (udp_frame("127.0.1.7", 9, b"x", fragment=0x2000), "not_udp_tx"),
            (udp_frame("127.0.1.7", 9, b"x", fragment=0x0001), "not_udp_tx"),
            (udp_frame("127.0.1.7", 9, b"x", version_ihl=0x46), "malformed_tx"),
            (udp_frame("127.0.1.7", 9, b"x", udp_length=10), "malformed_tx"),
            (udp_frame("127.0.1.7", 9, b"x", udp_length=7), "malformed_tx"),
            (udp_frame("127.0.1.7", 9, b"")[:41], "malformed_tx"),
            (udp_frame("10.0.0.1", 9, b"x"), "not_loopback_tx"),
            (udp_frame("255.255.255.255", 9, b"x"), "not_loopback_tx"),
            (udp_frame("127.0.1.7", 0, b"x"), "error_tx"),
        ],
    )
    def test_what_cannot_leave_is_counted(self, port: UdpPort, frame: bytes, reason: str) -> None:
        port.send(frame)
        assert dict(port.counters.drops) == {reason: 1}
        assert port.counters.tx_frames == 0

    def test_receive_takes_no_more_than_asked(self, port: UdpPort, worker: socket.socket) -> None:
        for number in range(5):
            worker.sendto(bytes([number]), port.endpoint)
        arrived_first = arrived(port, 3)
        assert [frame[42] for frame in arrived_first + arrived(port, 2)] == [0, 1, 2, 3, 4]
        assert port.receive(3) == []
        assert (port.counters.rx_frames, port.counters.rx_bytes) == (5, 5 * 43)

    def test_taken_address(self, port: UdpPort) -> None:
        with pytest.raises(SwitchError, match="port 2: cannot bind UDP"):
            UdpPort(2, *port.endpoint)

    def test_receive_buffer_is_reported(self, port: UdpPort) -> None:
        assert port.receive_buffer > 0


@pytest.mark.parametrize(
    ("text", "wanted"), [("127.0.0.1", ("127.0.0.1", 0)), ("127.0.1.2:40001", ("127.0.1.2", 40001))]
)
def test_endpoints(text: str, wanted: tuple[str, int]) -> None:
    assert parse_endpoint(text) == wanted


@pytest.mark.parametrize("text", ["", "10.0.0.1:5", "0.0.0.0", "localhost:5", "127.0.0.1:x", "127.0.0.1:65536", "::1"])
def test_refused_endpoints(text: str) -> None:
    with pytest.raises(SwitchError):
        parse_endpoint(text)


def test_synthetic_mac() -> None:
    assert synthetic_mac(bytes([127, 0, 1, 1])).hex(":") == "02:70:7f:00:01:01"


class TestChecksum:
    def test_example_of_rfc_1071(self) -> None:
        assert checksum(bytes.fromhex("0001f203f4f5f6f7")) == ~0xDDF2 & 0xFFFF

    def test_odd_length_zeros_and_all_ones(self) -> None:
        assert checksum(b"\x01") == 0xFEFF
        assert checksum(bytes(4)) == 0xFFFF
        assert checksum(b"\xff" * 4) == 0

    def test_completion(self) -> None:
        frame = udp_frame("127.0.1.7", 9, b"abc")
        done = complete_checksum(frame)
        assert done[:40] + done[42:] == frame[:40] + frame[42:]
        pseudo = done[26:34] + struct.pack("!HH", 17, 11)
        assert checksum(pseudo + done[34:]) == 0
        assert complete_checksum(done) == done

    def test_tcp_completion(self) -> None:
        frame = bytearray(udp_frame("127.0.1.7", 9, bytes(30), protocol=6))
        done = complete_checksum(bytes(frame))
        assert done[50:52] != b"\0\0"
        assert checksum(done[26:34] + struct.pack("!HH", 6, 38) + done[34:]) == 0

    @pytest.mark.parametrize("frame", [b"", bytes(60), udp_frame("127.0.1.7", 9, b"", protocol=1)])
    def test_what_has_none_stays(self, frame: bytes) -> None:
        assert complete_checksum(frame) == frame


class TestLoss:
    def test_seeded(self) -> None:
        def pattern(seed: int, port: int = 1, direction: str = "rx") -> list[bool]:
            loss = Loss(0.3, seed)
            return [loss.hits(port, direction) for _ in range(200)]

        assert pattern(1) == pattern(1)
        assert len({tuple(p) for p in (pattern(1), pattern(2), pattern(1, port=2), pattern(1, direction="tx"))}) == 4
        assert 30 < sum(pattern(1)) < 90

    def test_ports_do_not_disturb_each_other(self) -> None:
        alone, mixed = Loss(0.5, 4), Loss(0.5, 4)
        expected = [alone.hits(1, "rx") for _ in range(50)]
        found = []
        for _ in range(50):
            mixed.hits(2, "rx")
            found.append(mixed.hits(1, "rx"))
        assert found == expected

    @pytest.mark.parametrize("probability", [-0.1, 1.0])
    def test_no_probability(self, probability: float) -> None:
        with pytest.raises(ValueError, match="probability"):
            Loss(probability, 0)


class Lab:
    """Two UDP ports, a packet thread, and a worker on each port."""

    def __init__(self, **options: Any) -> None:
        self.ports = {1: UdpPort(1, "127.0.0.1"), 2: UdpPort(2, "127.0.0.1")}
        self.failures: list[BaseException] = []
        self.plane = DataPlane(self.ports, failed=self.failures.append, **options)
        self.sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.sender.bind(("127.0.1.1", 0))
        self.receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.receiver.bind(("127.0.0.1", 0))
        self.receiver.settimeout(DEADLINE)

    def __enter__(self) -> Lab:
        self.plane.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.plane.stop()
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab() as lab:
        yield lab


def live(lab: Lab, engine: Any) -> None:
    with lab.plane.lock:
        lab.plane.go_live(engine)


class ToReceiver(EchoEngine):
    """Sends each frame's payload on to a socket, through port 2."""

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__()
        self.address = address

    def process(self, port: int, frame: bytes) -> list[tuple[int, bytes]]:
        super().process(port, frame)
        return [(2, udp_frame(*self.address, frame[42:]))]


class TestDataPlane:
    def test_frames_pass(self, lab: Lab) -> None:
        engine = ToReceiver(lab.receiver.getsockname())
        live(lab, engine)
        for number in range(3 * BURST):
            lab.sender.sendto(bytes([number]), lab.ports[1].endpoint)
        assert [lab.receiver.recv(10)[0] for _ in range(3 * BURST)] == list(range(3 * BURST))
        assert {port for port, _ in engine.seen} == {1}
        # Counted after it has been sent.
        wait_for(lambda: lab.plane.stats()["ports"][2]["tx_frames"] == 3 * BURST)
        stats = lab.plane.stats()
        assert stats["ports"][1]["rx_frames"] == 3 * BURST
        assert stats["drops"] == {}

    def test_busy_port_does_not_starve_the_other(self, lab: Lab) -> None:
        engine = EchoEngine()
        # Nothing is taken before the engine is live, because the thread waits for the lock.
        with lab.plane.lock:
            for _ in range(4 * BURST):
                lab.sender.sendto(b"many", lab.ports[1].endpoint)
            lab.sender.sendto(b"few", lab.ports[2].endpoint)
            lab.plane.go_live(engine)
        wait_for(lambda: len(engine.seen) == 4 * BURST + 1)
        place = [port for port, _ in engine.seen].index(2)
        assert place <= 2 * BURST

    def test_without_a_pipeline(self, lab: Lab) -> None:
        lab.sender.sendto(b"x", lab.ports[1].endpoint)
        wait_for(lambda: lab.plane.drops["no_pipeline"] == 1)

    def test_no_such_port(self, lab: Lab) -> None:
        live(lab, EchoEngine(out=99))
        lab.sender.sendto(b"x", lab.ports[1].endpoint)
        wait_for(lambda: lab.plane.drops["no_such_port"] == 1)

    def test_failing_engine_does_not_end_the_thread(self, lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
        engine = EchoEngine()
        engine.fail = True
        live(lab, engine)
        for _ in range(3):
            lab.sender.sendto(b"x", lab.ports[1].endpoint)
        wait_for(lambda: lab.plane.drops["engine_error"] == 3)
        assert len([record for record in caplog.records if "broken program" in (record.exc_text or "")]) == 1
        assert not lab.failures

    def test_packet_out_and_packet_in(self) -> None:
        got: list[bytes] = []
        with Lab(cpu_port=500, packet_in=got.append) as lab:
            engine = EchoEngine(out=500)
            live(lab, engine)
            lab.plane.inject(b"from the controller")
            wait_for(lambda: got == [b"from the controller"])
            assert engine.seen == [(500, b"from the controller")]

    def test_lost_frames_are_counted_and_the_same_for_a_seed(self) -> None:
        def run(seed: int) -> tuple[list[int], dict[str, Any]]:
            with Lab(loss=0.25, seed=seed) as lab:
                engine = EchoEngine()
                live(lab, engine)
                for number in range(100):
                    lab.sender.sendto(bytes([number]), lab.ports[1].endpoint)
                drops = lab.ports[1].counters.drops
                wait_for(lambda: len(engine.seen) + drops["loss_rx"] == 100)
                out = lab.ports[2].counters
                wait_for(lambda: sum(out.drops.values()) + out.tx_frames == len(engine.seen))
                return [frame[42] for _, frame in engine.seen], lab.plane.stats()["ports"]

        first, stats = run(5)
        assert stats[1]["drops"]["loss_rx"] == 100 - len(first) > 0
        assert stats[2]["drops"]["loss_tx"] > 0
        assert run(5)[0] == first
        assert run(6)[0] != first

    def test_lost_port_is_left_out(self, lab: Lab) -> None:
        engine = EchoEngine()

        def fail(limit: int) -> list[bytes]:
            raise OSError("gone")

        with lab.plane.lock:
            lab.ports[2].receive = fail  # type: ignore[method-assign]
            lab.sender.sendto(b"x", lab.ports[2].endpoint)
            lab.plane.go_live(engine)
        lab.sender.sendto(b"y", lab.ports[1].endpoint)
        wait_for(lambda: len(engine.seen) == 1)
        assert not lab.failures

    def test_failure_of_the_thread_is_told(self) -> None:
        with Lab() as lab:

            def fail(limit: int) -> list[bytes]:
                raise RuntimeError("defect")

            lab.ports[1].receive = fail  # type: ignore[method-assign]
            lab.sender.sendto(b"x", lab.ports[1].endpoint)
            wait_for(lambda: len(lab.failures) == 1)

    def test_drops_of_the_engine_are_told(self, lab: Lab) -> None:
        engine = EchoEngine()
        engine.stats.failed_assertions = 2
        live(lab, engine)
        assert lab.plane.stats()["drops"] == {"failed_assertions": 2}

    def test_stop_before_start(self) -> None:
        DataPlane({1: UdpPort(1, "127.0.0.1")}).stop()

    def test_stop_is_quick_and_releases_the_address(self) -> None:
        with Lab() as lab:
            endpoint = lab.ports[1].endpoint
        UdpPort(1, *endpoint).close()


def test_turn_lock_lets_the_control_plane_in() -> None:
    """A thread that takes the lock again and again leaves room for one that asks once."""
    lock = TurnLock()
    stop = threading.Event()
    turns = 0

    def busy() -> None:
        nonlocal turns
        while not stop.is_set():
            with lock:
                turns += 1

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(50):
            with lock:
                before = turns
                assert turns == before
    finally:
        stop.set()
        thread.join()
    assert turns > 0


def wait_for(condition: Any) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.001)
