# SPDX-License-Identifier: Apache-2.0
"""The embedded switch: contributions a second of two workers, all frames full.

Measured twice: the engine alone, called with frames made beforehand, and a switch in a process of its own through UDP
ports, set up by a real controller and fed by a pump that does nothing but send, receive and count.
"""

from __future__ import annotations

import ipaddress
import select
import statistics
import struct
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import numpy as np

from p4reduce import constants, pipeline, wire
from p4reduce.controller_client import ControllerClient
from p4reduce.core.batch import PayloadRows, ReceiveBatch, SendBatch
from p4reduce.errors import SwitchError
from p4reduce.proto import controller_pb2 as pb
from p4reduce.transport.udp import UdpTransport
from p4reduce.wire import HEADER, Kind, Op
from p4reduce_bmv2.embedded.engine import Engine
from p4reduce_bmv2.switch import SwitchProcess
from p4reduce_controller.hosts import Hosts
from p4reduce_controller.server import ControllerServer

WORKERS = 2
SLOTS = 32
TARGET_FRAMES = 10_000
_GROUP = 2
_EPOCH = 7
_WAIT_SECONDS = 10.0


def _address(rank: int) -> int:
    return int(ipaddress.IPv4Address(f"127.0.1.{rank + 1}"))


def _set_up(engine: Engine) -> None:
    """What a controller installs for one epoch."""
    admit, replica = engine.tables["ReduceIngress.admit.admit"], engine.tables["ReduceEgress.replicate.replica"]
    for rank in range(WORKERS):
        port, ip, rid = rank + 1, _address(rank), rank + 2
        admit.insert(
            (port, ip, 40000 + rank, _EPOCH, rank),
            "ReduceIngress.admit.admit_worker",
            [1 << rank, (1 << WORKERS) - 1, 0, SLOTS, _GROUP, WORKERS, 1],
        )
        replica.insert((rid,), "ReduceEgress.replicate.to_worker", [0x027000000000 + ip, ip, 40000 + rank, rank])
    engine.set_multicast_group(_GROUP, [(rank + 1, rank + 2) for rank in range(WORKERS)])


def _headers(rank: int, slots: np.ndarray, round_number: int, words: int, epoch: int) -> np.ndarray:
    headers = np.zeros(len(slots), dtype=HEADER)
    headers["version"], headers["kind"], headers["op"] = constants.VERSION, Kind.CONTRIBUTE, Op.ADD
    headers["words"], headers["epoch"], headers["slot"] = words, epoch, slots
    headers["rank"], headers["round"], headers["tag"] = rank, round_number, wire.pack_tag(round_number, 0, 1)
    return headers


def _frames(profile: wire.Profile, rounds: range) -> list[tuple[int, bytes]]:
    """Contributions of all workers, (ingress port, Ethernet frame), slot by slot and round by round."""
    payloads = np.random.default_rng(3).integers(0, 256, (WORKERS, profile.payload_bytes), dtype=np.uint8)
    size = profile.datagram_bytes
    slots = np.arange(SLOTS)
    before = []
    for rank in range(WORKERS):
        source = struct.pack("!I", _address(rank))
        ethernet = bytes(12) + b"\x08\x00"
        ipv4 = struct.pack("!BBHHHBBH", 0x45, 0, 28 + size, 0, 0x4000, 64, 17, 0) + source + source
        before.append(ethernet + ipv4 + struct.pack("!HHHH", 40000 + rank, constants.UDP_PORT, 8 + size, 0))
    frames = []
    for number in rounds:
        heads = [_headers(rank, slots, number, profile.words, _EPOCH) for rank in range(WORKERS)]
        frames += [
            (rank + 1, before[rank] + heads[rank][slot].tobytes() + payloads[rank].tobytes())
            for slot in range(SLOTS)
            for rank in range(WORKERS)
        ]
    return frames


def run_engine(profile_name: str = "w34", rounds: int = 40, runs: int = 5) -> dict[str, Any]:
    """Contributions a second of `Engine.process`, median of several runs."""
    profile = wire.profile(profile_name)
    engine = Engine(pipeline.find(profile_name).json.read_text())
    _set_up(engine)
    rates = []
    for run in range(runs + 1):
        frames = _frames(profile, range(run * rounds, (run + 1) * rounds))
        results = 0
        started, cpu = time.perf_counter(), time.process_time()
        for port, frame in frames:
            results += len(engine.process(port, frame))
        elapsed, processor = time.perf_counter() - started, time.process_time() - cpu
        if results != len(frames):
            raise SwitchError(f"{len(frames)} contributions of {WORKERS} workers gave {results} results")
        rates.append((len(frames) / elapsed, len(frames) / processor))
    rates = rates[1:]  # the first run warms caches up
    return {
        "profile": profile_name,
        "frames": len(frames),
        "runs": runs,
        "frames_per_second": statistics.median(rate for rate, _ in rates),
        "frames_per_cpu_second": statistics.median(rate for _, rate in rates),
        "target_frames_per_second": TARGET_FRAMES,
    }


class _Pump:
    """One worker's end: sends a slot range of a round, counts results."""

    def __init__(self, rank: int, profile: wire.Profile) -> None:
        self.rank = rank
        self.results = 0
        self._profile = profile
        self.transport = UdpTransport(f"127.0.1.{rank + 1}", None, profile)
        self._rows = np.random.default_rng(rank).integers(0, 256, (1, profile.payload_bytes), dtype=np.uint8)
        self._out = SendBatch(SLOTS)
        self._in = ReceiveBatch(profile, SLOTS)

    def send(self, slots: np.ndarray, round_number: int, epoch: int) -> None:
        count = len(slots)
        self._out.clear()
        self._out.headers[:count] = _headers(self.rank, slots, round_number, self._profile.words, epoch)
        sizes = np.full(count, self._profile.payload_bytes)
        self._out.groups.append(PayloadRows(0, count, self._rows, np.zeros(count, np.int64), sizes))
        self._out.count = count
        self.transport.send(self._out)

    def receive(self) -> None:
        while self.transport.receive(self._in):
            kinds = self._in.headers["kind"][: self._in.count]
            if (kinds != Kind.RESULT).any():
                raise SwitchError("the switch refused a contribution")
            self.results += self._in.count


@contextmanager
def _switch(profile_name: str) -> Iterator[tuple[list[_Pump], int]]:
    """Embedded switch as a process, controller, and the pumps of a job that has joined; gives pumps and epoch."""
    profile = wire.profile(profile_name)
    with ExitStack() as stack:
        ports = dict.fromkeys(range(1, WORKERS + 1), "127.0.0.1")
        switch = stack.enter_context(SwitchProcess.start("embedded", udp_ports=ports))
        hosts = Hosts.embedded(switch.grpc_address, switch.endpoints, profile=profile_name)
        controller = stack.enter_context(ControllerServer(hosts, lease_seconds=3600.0))
        pumps = [_Pump(rank, profile) for rank in range(WORKERS)]
        client = stack.enter_context(closing(ControllerClient(controller.address)))

        def join(pump: _Pump) -> pb.JoinReply:
            stack.callback(pump.transport.close)
            ip, port = pump.transport.local
            request = pb.JoinRequest(
                job="bench", world_size=WORKERS, rank=pump.rank, ip=ip, udp_port=port, mtu=65535, wait_seconds=30,
                receive_frames=pump.transport.receive_frames,
            )  # fmt: skip
            return client.join(request)

        with ThreadPoolExecutor(WORKERS) as pool:
            replies = list(pool.map(join, pumps))
        for pump, reply in zip(pumps, replies, strict=True):
            pump.transport.set_endpoint((reply.endpoint_ip, reply.endpoint_port))
        yield pumps, replies[0].epoch
        for pump, reply in zip(pumps, replies, strict=True):
            client.leave("bench", reply.epoch, pump.rank, credential=reply.credential)


def _exchange(pumps: Sequence[_Pump], epoch: int, first_round: int, rounds: int) -> None:
    """Run rounds over two halves of the window, so that the switch has work while results are counted."""
    halves = (np.arange(SLOTS // 2), np.arange(SLOTS // 2, SLOTS))
    poll = select.poll()
    for pump in pumps:
        poll.register(pump.transport.fileno(), select.POLLIN)
        pump.results = 0
    sent, total, half = 0, 2 * rounds, SLOTS // 2
    while min(pump.results for pump in pumps) < total * half:
        # A half is used again once its own results are there; those of the other half may still be under way.
        while sent < total and min(pump.results for pump in pumps) >= (sent - 1) * half:
            for pump in pumps:
                pump.send(halves[sent % 2], first_round + sent // 2, epoch)
            sent += 1
        if not poll.poll(_WAIT_SECONDS * 1000):
            raise SwitchError(f"no result for {_WAIT_SECONDS:g} s: a frame was lost")
        for pump in pumps:
            pump.receive()


def run_udp(profile_name: str = "w34", rounds: int = 150, runs: int = 5) -> dict[str, Any]:
    """Contributions a second through UDP ports, median of several runs."""
    rates = []
    with _switch(profile_name) as (pumps, epoch):
        for run in range(runs + 1):
            started = time.perf_counter()
            _exchange(pumps, epoch, run * rounds, rounds)
            rates.append(WORKERS * SLOTS * rounds / (time.perf_counter() - started))
    return {
        "profile": profile_name,
        "frames": WORKERS * SLOTS * rounds,
        "runs": runs,
        "frames_per_second": statistics.median(rates[1:]),
        "target_frames_per_second": TARGET_FRAMES,
    }
