# SPDX-License-Identifier: Apache-2.0
"""The bench's baseline `scalar`: its P4 program on the embedded engine, its entries, and its host loop."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest

from p4reduce import constants
from p4reduce.bench import control, inputs, scalar
from p4reduce.errors import StalledError, SwitchError
from p4reduce.transport.udp import UdpTransport
from p4reduce.wire import Kind, make_header
from p4reduce_bmv2.embedded.engine import Engine
from p4reduce_bmv2.embedded.switch import EmbeddedSwitch

WORKERS = 3
HOSTS = [(rank + 1, f"10.0.0.{rank + 1}", f"02:70:34:00:00:{rank + 1:02x}", 40000 + rank) for rank in range(WORKERS)]


def mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


class TestScalarProgram:
    """The compiled program on the embedded engine, frame by frame."""

    @pytest.fixture
    def engine(self) -> Engine:
        made = Engine(scalar.program()[0].read_text())
        full = (1 << WORKERS) - 1
        for rank, (port, ip, address, udp) in enumerate(HOSTS):
            numbers = [int.from_bytes(mac(address), "big"), int.from_bytes(bytes(map(int, ip.split("."))), "big"), udp]
            made.tables["ScalarIngress.members"].insert((port, rank), "ScalarIngress.member", [1 << rank, full, 9])
            made.tables["ScalarIngress.targets"].insert((rank,), "ScalarIngress.to_worker", [port, *numbers])
            made.tables["ScalarEgress.replicas"].insert((rank + 1,), "ScalarEgress.to_replica", numbers)
        made.set_multicast_group(9, [(rank + 1, rank + 1) for rank in range(WORKERS)])
        return made

    def frame(self, rank: int, values: Any, *, round: int = 1, slot: int = 5, kind: int = 1, words: int = 1) -> bytes:
        header = make_header(kind=kind, words=words, slot=slot, rank=rank, round=round, tag=77)
        payload = header + np.asarray(values, ">u4").tobytes()
        _, ip, address, udp = HOSTS[rank]
        ethernet = mac("02:70:34:00:00:fe") + mac(address) + b"\x08\x00"
        source = bytes(map(int, ip.split(".")))
        ipv4 = bytes.fromhex("4500") + (28 + len(payload)).to_bytes(2, "big") + bytes.fromhex("0000400040110000")
        ports = udp.to_bytes(2, "big") + constants.UDP_PORT.to_bytes(2, "big") + (8 + len(payload)).to_bytes(2, "big")
        return ethernet + ipv4 + source + bytes([10, 0, 0, 254]) + ports + bytes(2) + payload

    def values(self, frame: bytes) -> np.ndarray:
        assert frame[43] == Kind.RESULT
        return np.frombuffer(frame[74:], ">u4")

    def test_the_last_contribution_sends_the_sum_to_all(self, engine: Engine) -> None:
        source = np.random.default_rng(1)
        for number in range(1, 6):
            parts = source.integers(0, 1 << 32, (WORKERS, 64), dtype=np.uint32)
            order = source.permutation(WORKERS)
            for rank in order[:-1]:
                assert engine.process(int(rank) + 1, self.frame(int(rank), parts[rank], round=number)) == []
            last = int(order[-1])
            out = engine.process(last + 1, self.frame(last, parts[last], round=number))
            assert sorted(port for port, _ in out) == [1, 2, 3]
            for port, frame in out:
                assert (self.values(frame) == parts.sum(axis=0, dtype=np.uint32)).all()
                _, ip, address, udp = HOSTS[port - 1]
                assert frame[:6] == mac(address)
                assert frame[30:34] == bytes(map(int, ip.split(".")))
                assert int.from_bytes(frame[36:38], "big") == udp
                assert int.from_bytes(frame[34:36], "big") == constants.UDP_PORT

    def test_what_is_sent_again_counts_once(self, engine: Engine) -> None:
        ones = np.ones(64, np.uint32)
        assert engine.process(1, self.frame(0, ones)) == []
        assert engine.process(1, self.frame(0, ones)) == []
        assert engine.process(2, self.frame(1, ones)) == []
        assert len(engine.process(3, self.frame(2, ones))) == 3
        repeated = engine.process(2, self.frame(1, ones))
        assert [port for port, _ in repeated] == [2]
        assert (self.values(repeated[0][1]) == 3).all()

    def test_rounds_go_up(self, engine: Engine) -> None:
        ones = np.ones(64, np.uint32)
        engine.process(1, self.frame(0, ones, round=4))
        assert engine.process(2, self.frame(1, ones, round=3)) == []
        engine.process(2, self.frame(1, ones, round=4))
        assert (self.values(engine.process(3, self.frame(2, ones, round=4))[0][1]) == 3).all()

    def test_nobody_else_takes_part(self, engine: Engine) -> None:
        ones = np.ones(64, np.uint32)
        for rank in range(WORKERS - 1):
            engine.process(rank + 1, self.frame(rank, ones))
        assert engine.process(1, self.frame(2, ones)) == []  # another port
        assert engine.process(4, self.frame(2, ones)) == []
        assert engine.process(3, self.frame(2, ones[:60])) == []  # cut short
        assert engine.process(3, self.frame(2, ones, slot=256)) == []  # no such cell
        assert len(engine.process(3, self.frame(2, ones))) == 3

    def test_forwarding_reads_no_payload(self, engine: Engine) -> None:
        payload = np.arange(34 * 64, dtype=np.uint32)
        sent = self.frame(0, payload, kind=scalar.KIND_FORWARD, slot=1, words=34)
        ((port, got),) = engine.process(1, sent)
        assert port == 2
        assert got[42:] == sent[42:]
        assert got[:6] == mac(HOSTS[1][2])
        assert engine.process(1, self.frame(0, payload, kind=scalar.KIND_FORWARD, slot=9)) == []


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60) for future in [pool.submit(call) for call in calls]]


class TestScalarWorkers:
    """Program, entries, host loop: through an embedded switch on loopback, with and without losses."""

    @pytest.mark.parametrize("loss", [0.0, 0.05])
    def test_sums(self, loss: float) -> None:
        count = 64 * 150  # more than two windows of cells, twice over
        with ExitStack() as stack:
            ports = dict.fromkeys(range(1, WORKERS + 1), "127.0.0.1")
            switch = stack.enter_context(EmbeddedSwitch(udp_ports=ports, loss=loss, seed=3))
            transports = []
            for rank in range(WORKERS):
                transport = stack.enter_context(closing(UdpTransport(f"127.0.1.{rank + 1}", None, scalar.FRAME)))
                transport.set_endpoint(switch.endpoints[rank + 1])
                transports.append(transport)
            client = stack.enter_context(control.ScalarControl(switch.grpc_address))
            client.load(*scalar.program())
            client.admit(
                [
                    control.Member(rank + 1, f"127.0.1.{rank + 1}", f"02:70:7f:00:01:{rank + 1:02x}", one.local[1])
                    for rank, one in enumerate(transports)
                ]
            )
            crew = [scalar.ScalarWorker(transport, rank) for rank, transport in enumerate(transports)]
            for number in range(3):
                values = [inputs.integers(number, rank, WORKERS, count, 32) for rank in range(WORKERS)]
                outs = [np.empty(count, np.int32) for _ in range(WORKERS)]
                in_threads(
                    *(
                        lambda one=one, value=value, out=out: one.allreduce(value, out, 30.0)
                        for one, value, out in zip(crew, values, outs, strict=True)
                    )
                )
                total = inputs.exact_sum(number, WORKERS, count, 32)
                assert [inputs.count_wrong(out, total) for out in outs] == [0] * WORKERS
            again = sum(one.retransmissions for one in crew)
            assert again > 0 or not loss  # without loss a busy machine may still send again
            assert sum(one.frames for one in crew) == 3 * 150 * WORKERS + again

    def test_nobody_answers(self) -> None:
        with closing(UdpTransport("127.0.0.1", None, scalar.FRAME)) as transport:
            transport.set_endpoint(transport.local)
            values = np.zeros(64, np.int32)
            with pytest.raises(StalledError, match=r"1 of 1 chunks had no result within 0\.1 s"):
                scalar.ScalarWorker(transport, 0).allreduce(values, values, 0.1)

    def test_no_switch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(control, "_SECONDS", 0.2)
        with pytest.raises(SwitchError, match="did not answer P4Runtime"):
            control.ScalarControl("unix:/nowhere.sock")
