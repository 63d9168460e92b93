# SPDX-License-Identifier: Apache-2.0
"""Packets through a whole switch: packet-in and packet-out, UDP ports, and the allreduce program on two workers."""

from __future__ import annotations

import contextlib
import queue
import select
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers.runtime import CPU_PORT, INSERT, KINDS, Client, Code, Program, group, number, running

from p4reduce import constants, wire
from p4reduce.errors import SwitchError
from p4reduce_bmv2.embedded import ports
from p4reduce_bmv2.embedded.p4runtime.device import MAX_QUEUED_PACKETS
from p4reduce_bmv2.embedded.switch import EmbeddedSwitch

DEADLINE = 10.0
OUT_PORT, OUT_PAD = 1, 2
"""Ids of the packet_out fields."""


@pytest.fixture
def program() -> Program:
    return Program.entities()


@pytest.fixture(params=KINDS)
def client(request: pytest.FixtureRequest, program: Program) -> Iterator[Client]:
    with running(request.param) as address, Client(address, 1) as client:
        client.push(program)
        yield client


def key_frame(a: int = 0, b: int = 0, c: int = 0, d: int = 0, rest: bytes = b"") -> bytes:
    """A frame of the test program."""
    return bytes(12) + b"\x12\x34" + a.to_bytes(4, "big") + b.to_bytes(2, "big") + bytes([c, d]) + rest


class TestPacketIo:
    def test_there_and_back(self, client: Client) -> None:
        frame = key_frame(a=5, rest=b"payload")
        client.packet_out(frame, {OUT_PORT: CPU_PORT.to_bytes(2, "big"), OUT_PAD: b"\0"})
        packet = client.next("packet")
        assert packet.payload == frame
        # Ingress port 510 and reason 5, in the shortest form.
        assert [(item.metadata_id, item.value) for item in packet.metadata] == [(1, b"\x01\xfe"), (2, b"\x05")]

    def test_fields_come_in_any_order(self, client: Client) -> None:
        client.packet_out(key_frame(), {OUT_PAD: b"\x7f", OUT_PORT: b"\x01\xfe"})
        assert client.next("packet").payload == key_frame()

    def test_only_the_primary_gets_packets(self, client: Client) -> None:
        address = client._channel._channel.target().decode()
        with Client(address, 9) as primary:
            client.packet_out(key_frame(), {OUT_PORT: b"\x01\xfe", OUT_PAD: b"\0"})
            primary.packet_out(key_frame(a=9), {OUT_PORT: b"\x01\xfe", OUT_PAD: b"\0"})
            assert primary.next("packet").payload == key_frame(a=9)

    @pytest.mark.parametrize(
        "metadata",
        [{}, {OUT_PORT: b"\x01"}, {OUT_PORT: b"\x01", 9: b"\x01"}, {OUT_PORT: b"\x02\x00", OUT_PAD: b"\0"}],
    )
    def test_wrong_metadata(self, program: Program, metadata: dict[int, bytes]) -> None:
        with running("embedded") as address, Client(address, 1) as client:
            client.push(program)
            client.packet_out(key_frame(), metadata)
            error = client.next("error")
            assert error.canonical_code == number(Code.INVALID_ARGUMENT)
            assert error.packet_out.packet_out.payload == key_frame()

    def test_refused_packet_outs(self, program: Program) -> None:
        good = {OUT_PORT: b"\x01\xfe", OUT_PAD: b"\0"}
        with EmbeddedSwitch() as switch, Client(switch.grpc_address) as client:
            client.packet_out(key_frame(), good)
            assert client.next("error").canonical_code == number(Code.PERMISSION_DENIED)
            client.arbitrate(1)
            client.next("arbitration")
            client.packet_out(key_frame(), good)
            assert "pipeline" in client.next("error").message
            client.push(program)
            client.packet_out(key_frame(), good)
            assert "CPU port" in client.next("error").message

    def test_empty_packet(self) -> None:
        with running("embedded") as address, Client(address, 1) as client:
            client.push(Program.w34())
            client.packet_out(b"", {})
            assert client.next("error").canonical_code == number(Code.INVALID_ARGUMENT)

    def test_slow_primary_loses_packets_and_stops_nothing(self, program: Program) -> None:
        """A frame for the CPU port is never waited for; what does not fit into the queue is counted."""
        with EmbeddedSwitch(cpu_port=CPU_PORT) as switch, Client(switch.grpc_address, 1) as client:
            client.push(program)
            device = switch._device
            assert device is not None
            # The queue of a stream whose sender is stuck, without a stream.
            stuck = device._primary
            assert stuck is not None
            original, stuck.outgoing = stuck.outgoing, queue.SimpleQueue()
            for _ in range(MAX_QUEUED_PACKETS + 3):
                device.packet_in(b"\0\0" + key_frame())
            stuck.outgoing = original
            assert switch.stats()["drops"] == {"packet_in_full": 3}


class Lab:
    """An embedded switch with UDP ports and a worker's socket for each."""

    def __init__(self, ports: int, **options: Any) -> None:
        self.switch = EmbeddedSwitch(
            udp_ports=dict.fromkeys(range(1, ports + 1), "127.0.0.1"), cpu_port=CPU_PORT, **options
        )
        self.workers = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(ports)]
        for rank, sock in enumerate(self.workers):
            sock.bind((f"127.0.1.{rank + 1}", 0))
            sock.settimeout(DEADLINE)

    def __enter__(self) -> Lab:
        self._undo = contextlib.ExitStack()
        for sock in self.workers:
            self._undo.callback(sock.close)
        self._undo.enter_context(self.switch)
        self.client = self._undo.enter_context(Client(self.switch.grpc_address, 1))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def send(self, rank: int, payload: bytes) -> None:
        self.workers[rank].sendto(payload, self.switch.endpoints[rank + 1])

    def silent(self, rank: int) -> bool:
        """True when nothing waits at a worker. Ask only after something later has arrived."""
        return not select.select([self.workers[rank]], [], [], 0)[0]


class Admitted(Lab):
    """The allreduce program, epoch 7, every worker admitted to a pool of 4 slots from slot 8."""

    EPOCH, POOL_BASE, POOL_SIZE, GROUP, ROW = 7, 8, 4, 20, 3

    def __enter__(self) -> Admitted:
        super().__enter__()
        program = Program.w34()
        self.program = program
        self.client.push(program)
        n = len(self.workers)
        entities = [program.entry("epochs", {"epoch": bytes([self.EPOCH])}, "known_epoch", [bytes([self.ROW])])]
        for rank, sock in enumerate(self.workers):
            host, udp_port = sock.getsockname()
            ip = socket.inet_aton(host)
            port = bytes([rank + 1])
            place = {"ingress_port": port, "ipv4_src": ip}
            params = [1 << rank, (1 << n) - 1, self.POOL_BASE, self.POOL_SIZE, self.GROUP, n, self.ROW]
            entities.append(
                program.entry(
                    "admit",
                    place
                    | {"udp_src": udp_port.to_bytes(2, "big"), "epoch": bytes([self.EPOCH]), "rank": bytes([rank])},
                    "admit_worker",
                    [value.to_bytes(8, "big") for value in params],
                )
            )
            entities.append(program.entry("worker_ports", place, "nack"))
            entities.append(
                program.entry(
                    "replica",
                    {"egress_rid": bytes([100 + rank])},
                    "to_worker",
                    [b"\x02\x70" + ip, ip, udp_port.to_bytes(2, "big"), bytes([rank])],
                )
            )
        entities.append(group(self.GROUP, [(rank + 1, 100 + rank) for rank in range(n)]))
        codes = self.client.write(*((INSERT, entity) for entity in entities))
        assert codes == [Code.OK] * len(entities)
        return self

    def contribution(self, rank: int, /, words: int = 34, **fields: int) -> tuple[bytes, Any]:
        """A contribution and its payload as native lanes."""
        header = np.zeros(1, wire.HEADER)
        values = {
            "version": 1,
            "kind": 1,
            "words": words,
            "epoch": self.EPOCH,
            "rank": rank,
            "check": rank + 5,
            **fields,
        }
        for name, value in values.items():
            header[name] = value
        lanes = np.random.default_rng(rank).integers(0, 1 << 30, 64 * words, dtype=np.uint32)
        return header.tobytes() + lanes.astype(">u4").tobytes(), lanes

    def receive(self, rank: int) -> tuple[Any, Any]:
        """Header and lanes of what a worker gets."""
        data, source = self.workers[rank].recvfrom(65535)
        assert source == self.switch.endpoints[rank + 1]
        return np.frombuffer(data[:32], wire.HEADER)[0], np.frombuffer(data[32:], ">u4")

    def counts(self) -> dict[int, int]:
        """Packet counters of the epoch's row, the non-zero ones."""
        cells = self.client.read(*(self.program.counter("reduce_counter", self.ROW * 8 + n) for n in range(8)))
        values = [cell.counter_entry.data.packet_count for cell in cells]
        return {event: value for event, value in enumerate(values) if value}


class TestAllreduceOverUdpPorts:
    @pytest.mark.parametrize("words", [1, 34])
    def test_sum_reaches_every_worker(self, words: int) -> None:
        with Admitted(3) as lab:
            sent = [lab.contribution(rank, words, tag=99) for rank in range(3)]
            for rank, (payload, _) in enumerate(sent):
                lab.send(rank, payload)
            for rank in range(3):
                header, lanes = lab.receive(rank)
                assert (header["kind"], header["rank"], header["count_or_reason"]) == (constants.KIND_RESULT, rank, 3)
                assert (header["words"], header["tag"], header["check"]) == (words, 99, 5 + 6 + 7)
                assert np.array_equal(lanes, sum(lanes.astype(np.uint64) for _, lanes in sent))
            assert lab.counts() == {constants.COUNT_CONTRIBUTIONS: 3, constants.COUNT_RESULTS: 1}

    def test_duplicate_gets_the_result_alone(self) -> None:
        with Admitted(2) as lab:
            first, _ = lab.contribution(0)
            lab.send(0, first)
            lab.send(1, lab.contribution(1)[0])
            expected = lab.receive(0)[1]
            lab.receive(1)
            lab.send(0, first)
            header, lanes = lab.receive(0)
            assert header["kind"] == constants.KIND_RESULT
            assert np.array_equal(lanes, expected)
            assert lab.silent(1)
            assert lab.counts()[constants.COUNT_REPEATS] == 1

    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({"epoch": 8}, constants.REASON_UNKNOWN_EPOCH),
            ({"rank": 1}, constants.REASON_NOT_ADMITTED),
            ({"slot": 4}, constants.REASON_BAD_SLOT),
            ({"version": 2}, constants.REASON_MALFORMED),
        ],
    )
    def test_nack(self, fields: dict[str, int], reason: int) -> None:
        with Admitted(2) as lab:
            lab.send(0, lab.contribution(0, **fields)[0])
            header, lanes = lab.receive(0)
            assert (header["kind"], header["count_or_reason"], len(lanes)) == (constants.KIND_NACK, reason, 0)

    def test_new_push_forgets_the_job(self) -> None:
        """Registers, entries and groups are gone: the same contribution is of no known epoch."""
        with Admitted(1) as lab:
            payload, _ = lab.contribution(0)
            lab.send(0, payload)
            assert lab.receive(0)[0]["kind"] == constants.KIND_RESULT
            lab.client.push(lab.program)
            lab.send(0, payload)
            cell = lab.program.counter("reduce_counter", constants.COUNT_REFUSED)
            wait_for_count(lab.client, cell, 1)
            assert lab.silent(0)

    def test_lost_frames_are_repeated_until_all_have_the_sum(self) -> None:
        with Admitted(2, loss=0.3, seed=11) as lab:
            contributions = [lab.contribution(rank, words=1)[0] for rank in range(2)]
            got: set[int] = set()
            for _ in range(200):
                for rank in {0, 1} - got:
                    lab.send(rank, contributions[rank])
                ready, _, _ = select.select([lab.workers[rank] for rank in {0, 1} - got], [], [], 0.02)
                for sock in ready:
                    sock.recv(65535)
                    got.add(lab.workers.index(sock))
                if got == {0, 1}:
                    break
            assert got == {0, 1}
            ports = lab.switch.stats()["ports"]
            assert sum(count for port in ports.values() for count in port["drops"].values()) > 0


def wait_for_count(client: Client, cell: Any, count: int) -> None:
    """Read a counter until it shows the count; each read takes its time, so this is no busy loop."""
    for _ in range(2000):
        if client.read(cell)[0].counter_entry.data.packet_count >= count:
            return
    raise AssertionError(f"the counter did not reach {count}")


class TestEntitiesOverUdpPorts:
    """The test program lets frames in as Ethernet only, so what UDP ports carry misses its keys."""

    def test_frames_that_are_not_udp_do_not_leave(self, program: Program) -> None:
        with Lab(1) as lab:
            lab.client.push(program)
            lab.client.packet_out(key_frame(), {OUT_PORT: b"\x01", OUT_PAD: b"\0"})
            lab.client.packet_out(key_frame(), {OUT_PORT: b"\x01\xfe", OUT_PAD: b"\0"})
            lab.client.next("packet")
            assert lab.switch.stats()["ports"][1]["drops"] == {"not_ipv4_tx": 1}


def test_numbers_that_make_no_sense() -> None:
    for options in (
        {"udp_ports": {511: "127.0.0.1"}},
        {"udp_ports": {1: "127.0.0.1"}, "interfaces": {1: "lo"}},
        {"interfaces": {1: "lo", 2: "lo"}},
        {"cpu_port": 0},
        {"udp_ports": {5: "127.0.0.1"}, "cpu_port": 5},
        {"loss": 1.0},
        {"udp_ports": {-1: "127.0.0.1"}},
    ):
        with pytest.raises(SwitchError):
            EmbeddedSwitch(**options)  # type: ignore[arg-type]


def test_small_receive_buffer_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(ports, "widen_receive_buffer", lambda *_: 1 << 18)
    with EmbeddedSwitch(udp_ports={1: "127.0.0.1"}) as switch:
        assert switch.stats()["ports"][1]["receive_buffer"] == 1 << 18
    assert "256 KiB" in caplog.text
    assert "net.core.rmem_max" in caplog.text


def test_failed_start_leaves_nothing_open() -> None:
    with EmbeddedSwitch(udp_ports={1: "127.0.0.1"}) as running_switch:
        host, udp_port = running_switch.endpoints[1]
        with pytest.raises(SwitchError, match="cannot bind UDP"):
            EmbeddedSwitch(udp_ports={1: "127.0.0.1", 2: f"{host}:{udp_port}"}).start()
        with pytest.raises(SwitchError, match="cannot listen"):
            EmbeddedSwitch(udp_ports={1: "127.0.0.1"}, grpc_addr=running_switch.grpc_address).start()
        with pytest.raises(SwitchError, match="running already"):
            running_switch.start()
