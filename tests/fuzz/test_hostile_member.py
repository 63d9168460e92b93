# SPDX-License-Identifier: Apache-2.0
"""A hostile member of one job beside another job: real controller, embedded switch, real sockets.

It sits on a port of its own and knows everything: epoch, ranks, slots, rounds, tags, the keys of the signatures. It
floods the switch with frames that would be right if the other job's ranks sent them, with refused ones, and with
results of its own making straight to the other workers' sockets. The other job's sums stay right, and it completes.
"""

from __future__ import annotations

import random
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import p4reduce
from p4reduce import pipeline, signature, wire
from p4reduce.constants import UDP_PORT
from p4reduce.core.bucket import Reduction
from p4reduce.packetize import check, from_wire
from p4reduce.sim.adapter import EngineSwitch, from_frame, mac_of, to_frame
from p4reduce.sim.byhand import ByHand, direct, edit, field
from p4reduce.sim.network import Datagram
from p4reduce.sim.runner import SWITCH_IP, Scenario
from p4reduce.wire import Kind, Op, Reason
from p4reduce_bmv2.embedded.engine import Engine
from p4reduce_bmv2.embedded.switch import EmbeddedSwitch
from p4reduce_controller.hosts import Hosts
from p4reduce_controller.server import ControllerServer

W5 = wire.profile("w5")
HOSTILE = "127.0.1.3"
BUCKETS = 12
WAIT = 60


def frames(draw: random.Random, epoch: int, own_epoch: int, count: int) -> list[bytes]:
    """Contributions in the name of the other job's ranks, results, nacks, and odd ones, all with right checks."""
    made = []
    for _ in range(count):
        op, words = draw.choice((Op.ADD, Op.OR)), draw.choice((1, W5.words))
        payload = draw.randbytes(256 * words) if op is Op.ADD else bytes(256 * words)
        header: dict[str, int] = {
            "kind": draw.choice((Kind.CONTRIBUTE, Kind.CONTRIBUTE, Kind.CONTRIBUTE, Kind.RESULT, Kind.NACK, 0, 77)),
            "op": op,
            "words": words,
            "epoch": draw.choice((epoch, epoch, epoch, epoch - 1, epoch + 1, own_epoch, 0)),
            "slot": draw.choice((draw.randrange(64), 64, 65535)),
            "rank": draw.choice((0, 1, 2, 255)),
            "version": draw.choice((1, 1, 1, 1, 1, 2)),
            "round": draw.choice((draw.randrange(20), (1 << 32) - 1, 1 << 31)),
            "tag": wire.pack_tag(draw.randrange(BUCKETS), draw.randrange(30), draw.getrandbits(16)),
        }
        if header["epoch"] == own_epoch:
            header["rank"] = 1  # its own rank would be itself
        if header["kind"] in (Kind.RESULT, Kind.NACK):
            header["count_or_reason"] = 2 if header["kind"] == Kind.RESULT else draw.choice(list(Reason))
        linear = int(check(from_wire(np.frombuffer(payload, np.uint8).reshape(1, -1)))[0]) if op is Op.ADD else 0
        header["check"] = (linear + signature.expected(header)) % (1 << 64)
        made.append(wire.make_header(**header) + (b"" if header["kind"] == Kind.NACK else payload))
    return made


class Flood:
    """Sends from the hostile member's address until it is stopped."""

    def __init__(self, made: list[bytes], targets: list[tuple[str, int]]) -> None:
        self.sent: Counter[tuple[str, int]] = Counter()
        self.answers: Counter[int] = Counter()
        """Nacks by reason, and results, as reason 0, that came back."""
        self._made = made
        self._targets = targets
        self._over = threading.Event()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((HOSTILE, 0))
        self._socket.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="flood", daemon=True)

    def __enter__(self) -> Flood:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(WAIT)
        self._socket.close()

    def _run(self) -> None:
        turn = 0
        # As fast as its share of a small machine allows: a burst, then the others' turn.
        while not self._over.wait(0.002):
            for frame in self._made[turn % len(self._made) :][:100]:
                for target in self._targets:
                    self._send(frame, target)
            turn += 100
            self._read()

    def _send(self, frame: bytes, target: tuple[str, int]) -> None:
        try:
            self._socket.sendto(frame, target)
            self.sent[target] += 1
        except BlockingIOError:
            pass  # as much as the link takes

    def _read(self) -> None:
        while True:
            try:
                data = self._socket.recv(65536)
            except BlockingIOError:
                return
            header = wire.headers_from_bytes(data)[0]
            self.answers[int(header["count_or_reason"]) if header["kind"] == Kind.NACK else 0] += 1


@pytest.mark.parametrize("loss", [0.0, 0.02])
def test_a_hostile_member_of_another_job_changes_no_sum_and_stops_nobody(loss: float) -> None:
    rng = np.random.default_rng(5)
    with EmbeddedSwitch(udp_ports=dict.fromkeys((1, 2, 3), "127.0.0.1"), loss=loss, seed=3) as switch:
        hosts = Hosts.embedded(switch.grpc_address, switch.endpoints, profile="w5")
        with ControllerServer(hosts) as controller, ThreadPoolExecutor(2) as pool:

            def join(rank: int) -> p4reduce.Communicator:
                return p4reduce.connect(controller.address, "good", rank, 2)

            good = list(pool.map(join, range(2)))
            bad = p4reduce.connect(controller.address, "bad", 0, 1, address=HOSTILE)
            workers = [member._session.transport.local for member in good]
            made = frames(random.Random(1), good[0].epoch, bad.epoch, 1000)
            targets = [*switch.endpoints.values(), *workers]
            with Flood(made, targets) as flood:
                number = 0
                # Until the flood has been one, however the machine shares its time.
                while number < BUCKETS or (number < 50 * BUCKETS and min(flood.sent[to] for to in targets) <= 1000):
                    number += 1
                    size = int(rng.integers(1, 8000))
                    data = [rng.standard_normal(size, dtype=np.float32) for _ in range(2)]
                    futures = [member.allreduce_async(vector) for member, vector in zip(good, data, strict=True)]
                    expected = direct(data).tobytes()
                    for future in futures:
                        assert future.result(WAIT).tobytes() == expected, number
                # The hostile member's own job is as good as any other.
                alone = rng.standard_normal(500, dtype=np.float32)
                assert bad.allreduce_async(alone).result(WAIT).tobytes() == direct([alone]).tobytes()
            stats = [member.stats() for member in good]
            for member in (*good, bad):
                member.close()
        dropped = switch.stats()
    assert min(flood.sent[target] for target in targets) > 1000
    assert {Reason.NOT_ADMITTED, Reason.UNKNOWN_EPOCH, Reason.MALFORMED} <= set(flood.answers)
    assert 0 not in flood.answers, "no result was ever sent to the hostile socket"
    for one in stats:
        assert one["completed"] == number
        assert one["transport"]["foreign"] > 100, "frames that reached a worker's socket from elsewhere"
        assert one["core"]["integrity"] == one["core"]["malformed"] == one["core"]["foreign"] == 0
    assert "engine_error" not in dropped["drops"]


def test_a_result_cannot_be_forged_from_another_port() -> None:
    """A host with raw sockets sends a frame that says it is the switch's result, check and all, to a worker's MAC."""
    engine = Engine(pipeline.find("w5").json.read_text())
    hand = ByHand(Scenario(2), EngineSwitch(engine))
    victim = hand.membership.members[0]
    forward = engine.tables["ReduceIngress.forward.forward"]
    forward.insert((mac_of(victim.ip),), "ReduceIngress.forward.to_port", [victim.port])
    data = [np.ones(320, np.float32), np.full(320, 2, np.float32)]
    buckets = [Reduction(vector, np.zeros_like(vector)) for vector in data]
    hand.submit(*buckets)
    for rank in range(2):
        for frame in hand.sent(rank):
            for to, answer in hand.to_switch(rank, frame):
                hand.to_worker(to, answer)
    (contribution,) = hand.sent(0)
    forged = edit(contribution, kind=Kind.RESULT, count_or_reason=2)
    header = {name: field(forged, name) for name in ("kind", "epoch", "round", "tag", "count_or_reason")}
    linear = int(check(from_wire(np.frombuffer(forged[32:], np.uint8).reshape(1, -1)))[0])
    forged = edit(forged, check=(linear + signature.expected(header)) % (1 << 64))
    datagram = Datagram(SWITCH_IP, UDP_PORT, victim.ip, victim.udp_port, forged)
    hostile_port = 9
    for _, frame in engine.process(hostile_port, to_frame(datagram, 0x020000000009, mac_of(victim.ip))):
        hand.to_worker(0, from_frame(frame, mac_of(victim.ip)).data)
    hand.exchange()
    hand.now = 1.0
    hand.exchange()
    assert [one.out.tobytes() for one in buckets] == [direct(data).tobytes()] * 2
