# SPDX-License-Identifier: Apache-2.0
"""Controller, switch and workers together: gRPC joins, contributions as raw datagrams, sums back to everybody.

The same tests run on the embedded switch with UDP ports, and in a lab of namespaces on the embedded switch and on
BMv2, where forwarding and ARP are served as well.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from p4reduce import constants, pipeline, wire
from p4reduce.proto import controller_pb2 as pb
from p4reduce.proto import controller_pb2_grpc
from p4reduce.wire import Kind, Op, Profile, Reason
from p4reduce_bmv2 import netns
from p4reduce_bmv2.embedded.switch import EmbeddedSwitch
from p4reduce_bmv2.switch import SwitchProcess, find_bmv2
from p4reduce_bmv2.topology import Topology
from p4reduce_controller import cli
from p4reduce_controller.auth import CREDENTIAL
from p4reduce_controller.entries import EPOCHS
from p4reduce_controller.hosts import Hosts, parse
from p4reduce_controller.marks import epoch_of, is_mark
from p4reduce_controller.p4rt import SwitchClient
from p4reduce_controller.server import ControllerServer

DEADLINE = 20.0
HOSTS = 3
GONE = (Reason.UNKNOWN_EPOCH, Reason.NOT_ADMITTED)
"""What frames of a revoked epoch are told: the first once the epoch's name is removed as well."""
LABS = [
    "udp",
    pytest.param("wired", marks=pytest.mark.netns),
    pytest.param("bmv2", marks=[pytest.mark.netns, pytest.mark.bmv2]),
]


@dataclass
class Lab:
    """A switch with HOSTS hosts, and a way to open sockets on them."""

    hosts: Hosts
    open_socket: Callable[[int], socket.socket]


def udp_socket(ip: str) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind((ip, 0))
    made.settimeout(DEADLINE)
    return made


def make_lab(kind: str, stack: ExitStack, profile: str = "w5") -> Lab:
    if kind == "udp":
        switch = stack.enter_context(EmbeddedSwitch(udp_ports=dict.fromkeys(range(1, HOSTS + 1), "127.0.0.1")))
        hosts = Hosts.embedded(switch.grpc_address, switch.endpoints, profile=profile)
        return Lab(hosts, lambda host: udp_socket(hosts.hosts[host].ip))
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if kind == "bmv2" and find_bmv2() is None:
        pytest.skip("simple_switch_grpc is not installed")
    topology = stack.enter_context(Topology(HOSTS, profile=profile))
    process = stack.enter_context(
        SwitchProcess.start("bmv2" if kind == "bmv2" else "embedded", interfaces=topology.interfaces)
    )
    hosts = parse(topology.hosts_toml(process.grpc_address))
    places = topology.hosts
    return Lab(hosts, lambda host: netns.call(places[host].netns, lambda: udp_socket(places[host].ip)))


class Worker:
    """One rank: its socket, its place in an epoch, its progress stream."""

    def __init__(self, rank: int, host: int, lab: Lab, profile: Profile) -> None:
        self.rank = rank
        self.profile = profile
        self.ip = lab.hosts.hosts[host].ip
        self.sock = lab.open_socket(host)
        self.epoch = 0
        self.endpoint = ("", 0)
        self.secret: Any = ()
        self.stream: Any = None
        self.requests: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def request(self, world_size: int, job: str, incarnation: int) -> pb.JoinRequest:
        return pb.JoinRequest(
            job=job,
            world_size=world_size,
            rank=self.rank,
            incarnation=incarnation,
            ip=self.ip,
            udp_port=self.sock.getsockname()[1],
            mtu=65535,
            receive_frames=200,
            wait_seconds=DEADLINE,
        )

    def report(self, job: str, **fields: Any) -> None:
        self.requests.put(pb.ProgressReport(job=job, epoch=self.epoch, rank=self.rank, **fields))

    def send(self, payload: bytes, *, slot: int = 0, op: int = Op.ADD, check: int = 0, **header: Any) -> None:
        fields = {"kind": Kind.CONTRIBUTE, "op": op, "words": len(payload) // constants.WORD_BYTES, "slot": slot}
        fields |= {"epoch": self.epoch, "rank": self.rank, "check": check, "tag": wire.pack_tag(1, slot, 77)}
        self.sock.sendto(wire.make_header(**(fields | header)) + payload, self.endpoint)

    def receive(self) -> tuple[Any, bytes]:
        data, source = self.sock.recvfrom(65536)
        assert source == self.endpoint, "answers come from where contributions go"
        return wire.headers_from_bytes(data)[0], data[constants.HEADER_BYTES :]

    def refused(self, payload: bytes, **header: Any) -> Reason:
        """The reason of the nack that this contribution is answered with."""
        self.send(payload, **header)
        answer, rest = self.receive()
        assert (answer["kind"], answer["rank"], rest) == (Kind.NACK, header.get("rank", self.rank), b"")
        return Reason(int(answer["count_or_reason"]))

    def silent(self) -> bool:
        """Whether nothing has arrived. Ask only after an answer that would have come later."""
        return not select.select([self.sock], [], [], 0)[0]


class Rig:
    def __init__(self, kind: str, stack: ExitStack, profile: str = "w5", **options: Any) -> None:
        self.stack = stack
        self.profile = wire.profile(profile)
        self.lab = make_lab(kind, stack, profile)
        self.server = stack.enter_context(ControllerServer(self.lab.hosts, **options))
        self.stub = self.client(self.server.address)

    def restart(self, **options: Any) -> None:
        """Another controller for the same switch."""
        self.server.stop()
        self.server = self.stack.enter_context(ControllerServer(self.lab.hosts, **options))
        self.stub = self.client(self.server.address)

    def client(self, address: str) -> Any:
        channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        return controller_pb2_grpc.ControllerStub(self.stack.enter_context(channel))

    def workers(self, places: list[int]) -> list[Worker]:
        """One worker for every entry, rank by rank: the host it runs on."""
        made = [Worker(rank, host, self.lab, self.profile) for rank, host in enumerate(places)]
        for worker in made:
            self.stack.callback(worker.sock.close)
        return made

    def join(self, workers: list[Worker], job: str = "train", incarnation: int = 0) -> None:
        calls = [
            self.stub.Join.future(worker.request(len(workers), job, incarnation), timeout=DEADLINE)
            for worker in workers
        ]
        for worker, call in zip(workers, calls, strict=True):
            reply = call.result()
            worker.epoch = reply.epoch
            worker.endpoint = (reply.endpoint_ip, reply.endpoint_port)
            worker.secret = ((CREDENTIAL, reply.credential),)
            self.open(worker, job)
            assert next(worker.stream).HasField("registered")
            assert next(worker.stream).order.run_switch.epoch == worker.epoch

    def open(self, worker: Worker, job: str = "train", **fields: Any) -> None:
        """Open the worker's progress stream, in the place of the one it had."""
        worker.requests = queue.SimpleQueue()
        worker.report(job, **fields)
        requests = iter(worker.requests.get, None)
        worker.stream = self.stub.Progress(requests, timeout=DEADLINE, metadata=worker.secret)

    def leave(self, worker: Worker, job: str = "train") -> None:
        request = pb.LeaveRequest(job=job, epoch=worker.epoch, rank=worker.rank)
        self.stub.Leave(request, timeout=DEADLINE, metadata=worker.secret)

    def counters(self, job: str = "train") -> dict[str, int]:
        (status,) = self.stub.Status(pb.StatusRequest(job=job), timeout=DEADLINE).jobs
        return dict(status.counters)

    def counted(self, contributions: int) -> None:
        """Wait until the switch has counted so many: BMv2 has queues, a datagram sent is not one processed."""
        end = time.monotonic() + DEADLINE
        while self.counters()["contributions"] < contributions:
            assert time.monotonic() < end, self.counters()


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with ExitStack() as stack:
        yield Rig(request.param, stack)


def lanes(rank: int, slot: int, words: int) -> Any:
    """Big-endian 64-bit groups with headroom, different for every rank and slot."""
    return np.random.default_rng([rank, slot]).integers(0, 1 << 56, words * 32, dtype=np.uint64)


def reduce(workers: list[Worker], slot: int, words: int, op: int = Op.ADD, round: int = 0) -> None:
    """Every worker contributes; every worker must get the exact sum (or OR), addressed to it."""
    values = [lanes(worker.rank, slot, words) for worker in workers]
    for worker, value in zip(workers, values, strict=True):
        worker.send(value.astype(">u8").tobytes(), slot=slot, op=op, check=(1 << 63) + worker.rank, round=round)
    expected = np.bitwise_or.reduce(values) if op == Op.OR else np.sum(values, axis=0, dtype=np.uint64)
    check = sum((1 << 63) + worker.rank for worker in workers) % (1 << 64)
    for worker in workers:
        header, payload = worker.receive()
        assert (header["kind"], header["rank"], header["slot"]) == (Kind.RESULT, worker.rank, slot)
        assert (header["epoch"], header["round"], header["count_or_reason"]) == (worker.epoch, round, len(workers))
        assert payload == expected.astype(">u8").tobytes()
        if op == Op.ADD:
            assert header["check"] == check


@pytest.mark.parametrize("rig", LABS, indirect=True)
class TestJob:
    def test_sums_reach_every_worker_and_are_counted(self, rig: Rig) -> None:
        workers = rig.workers([0, 1, 2])
        rig.join(workers)
        for slot in range(8):
            reduce(workers, slot, rig.profile.words)
        reduce(workers, 8, 1)
        reduce(workers, 9, 1, Op.OR)
        reduce(workers, 9, 1, round=1)
        assert rig.counters() == {
            "contributions": 33,
            "results": 11,
            "repeats": 0,
            "duplicates": 0,
            "stale": 0,
            "mismatch": 0,
            "refused": 0,
        }

    def test_several_ranks_on_one_host(self, rig: Rig) -> None:
        workers = rig.workers([0, 0, 1, 0])
        rig.join(workers)
        for slot in range(4):
            reduce(workers, slot, rig.profile.words)

    def test_a_lost_worker_ends_the_epoch(self, rig: Rig) -> None:
        workers = rig.workers([0, 1, 2])
        rig.join(workers)
        reduce(workers, 0, 1)
        payload = bytes(constants.WORD_BYTES)
        workers[0].send(payload, slot=1)
        rig.counted(4)
        workers[1].stream.cancel()
        for worker in (workers[0], workers[2]):
            fence = next(worker.stream).fence
            assert (fence.reason, list(fence.ranks)) == (pb.Fence.WORKER_LOST, [1])
        # Whoever has been told must find the switch closed to all, the lost one included.
        for worker in workers:
            assert worker.refused(payload, slot=1) in GONE
        assert all(worker.silent() for worker in workers)

    def test_after_a_failure_the_name_is_joined_again_and_the_old_epoch_stays_out(self, rig: Rig) -> None:
        workers = rig.workers([0, 1])
        rig.join(workers)
        old = workers[0].epoch
        workers[0].send(lanes(0, 0, 1).astype(">u8").tobytes())
        rig.counted(1)
        workers[1].report("train", trouble=pb.Trouble(code=pb.Trouble.INTEGRITY, message="odd sums", bucket=4))
        for worker in workers:
            assert next(worker.stream).fence.reason == pb.Fence.INTEGRITY
        rig.join(workers)
        assert workers[0].epoch > old
        assert workers[1].refused(bytes(constants.WORD_BYTES), epoch=old) in GONE
        reduce(workers, 0, 1)

    def test_a_newer_incarnation_takes_over(self, rig: Rig) -> None:
        old, new = rig.workers([0, 1]), rig.workers([0, 1])
        rig.join(old)
        reduce(old, 0, 1)
        rig.join(new, incarnation=1)
        assert next(old[0].stream).fence.reason == pb.Fence.SUPERSEDED
        assert old[0].refused(bytes(constants.WORD_BYTES)) in GONE
        reduce(new, 0, 1)
        assert old[0].silent()

    def test_two_jobs_use_the_same_slot_numbers_without_meeting(self, rig: Rig) -> None:
        first, second = rig.workers([0, 1]), rig.workers([1, 2])
        rig.join(first, "a")
        rig.join(second, "b")
        assert first[0].epoch != second[0].epoch
        first[0].send(bytes(constants.WORD_BYTES), slot=3)
        reduce(second, 3, 1)
        assert second[0].refused(bytes(constants.WORD_BYTES), epoch=first[0].epoch) is Reason.NOT_ADMITTED
        first[1].send(bytes(constants.WORD_BYTES), slot=3)
        assert [worker.receive()[0]["kind"] for worker in first] == [Kind.RESULT] * 2
        assert rig.counters("b")["results"] == 1

    def test_leaving_frees_the_switch(self, rig: Rig) -> None:
        workers = rig.workers([0, 1])
        rig.join(workers)
        rig.leave(workers[0])
        workers[0].stream.cancel()
        left = next(workers[1].stream).peer_left
        assert (left.rank, left.submitted) == (0, 0)
        rig.leave(workers[1])
        assert not any(pool.job for pool in rig.stub.Pools(pb.PoolsRequest(), timeout=DEADLINE).pools)
        assert workers[0].refused(bytes(constants.WORD_BYTES)) is Reason.UNKNOWN_EPOCH

    def test_a_new_controller_with_an_old_clock_gets_no_old_sums(self, rig: Rig) -> None:
        old = rig.workers([0, 1])
        rig.join(old)
        reduce(old, 0, 1)
        epoch = old[0].epoch
        for worker in old:
            rig.leave(worker)
        rig.restart(wall=lambda: epoch)
        new = rig.workers([1, 0, 2])
        rig.join(new)
        assert new[0].epoch > epoch
        reduce(new, 0, 1)
        client = SwitchClient(rig.lab.hosts.switch.grpc, pipeline.find("w5"), election_id=1 << 40)
        (mark,) = (epoch_of(entry) for entry in client.read_tables([EPOCHS]) if is_mark(entry))
        client.close()
        assert mark > new[0].epoch
        assert new[0].refused(bytes(constants.WORD_BYTES), epoch=mark) is Reason.NOT_ADMITTED

    def test_groups_that_another_program_left_behind(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        """P4Runtime forgets the groups when a program is pushed; the replication engine of BMv2 does not."""
        old = rig.workers([0, 1, 2])
        rig.join(old)
        reduce(old, 0, 1)
        rig.server.stop()
        with monkeypatch.context() as patch:
            patch.setattr(SwitchClient, "read_groups", lambda _: [])
            foreign = SwitchClient(rig.lab.hosts.switch.grpc, pipeline.find("w34"), election_id=1 << 40)
            assert foreign.pushed
            foreign.close()
        rig.restart()
        new = rig.workers([0, 1, 2])
        rig.join(new)
        reduce(new, 0, 1)
        # A round trip through each worker's port: what else there was for it would have come before.
        reduce(new, 1, 1)
        assert all(worker.silent() for worker in [*old, *new])

    def test_who_outlives_the_controller_is_told_by_the_next(self, rig: Rig) -> None:
        workers = rig.workers([0, 1])
        rig.join(workers)
        reduce(workers, 0, 1)
        rig.restart()
        assert workers[0].refused(bytes(constants.WORD_BYTES), slot=1) in GONE
        for worker in workers:
            rig.open(worker, submitted=2, completed=1)
            (directive,) = worker.stream
            assert directive.fence.reason == pb.Fence.ABORTED
            assert "the controller runs without the state file it had" in directive.fence.message
        rig.join(workers)
        reduce(workers, 0, 1)

    def test_slots_of_the_pool_and_no_other(self, rig: Rig) -> None:
        workers = rig.workers([0])
        rig.join(workers)
        reduce(workers, 63, 1)
        assert workers[0].refused(bytes(constants.WORD_BYTES), slot=64) is Reason.BAD_SLOT
        assert rig.counters()["refused"] == 1

    def test_a_host_without_a_job_is_told_so(self, rig: Rig) -> None:
        workers = rig.workers([0, 1])
        rig.join([workers[0]])
        workers[1].endpoint = rig.lab.hosts.endpoint(rig.lab.hosts.hosts[1])
        assert workers[1].refused(bytes(constants.WORD_BYTES), epoch=5) is Reason.UNKNOWN_EPOCH
        assert workers[1].refused(bytes(constants.WORD_BYTES), epoch=workers[0].epoch, rank=0) is Reason.NOT_ADMITTED


@pytest.mark.parametrize("rig", LABS[1:], indirect=True)
class TestForwarding:
    def test_hosts_reach_each_other_through_the_switch(self, rig: Rig) -> None:
        first, second = (worker.sock for worker in rig.workers([0, 1]))
        first.sendto(b"through the switch", second.getsockname())
        assert second.recvfrom(100) == (b"through the switch", first.getsockname())

    def test_what_goes_to_the_switchs_other_ports_goes_nowhere(self, rig: Rig) -> None:
        first, second = (worker.sock for worker in rig.workers([0, 1]))
        first.sendto(b"nobody is here", (rig.lab.hosts.switch.ip, 9))
        first.sendto(b"after", second.getsockname())
        assert second.recvfrom(100)[0] == b"after"


def test_full_frames_of_the_large_profile() -> None:
    with ExitStack() as stack:
        rig = Rig("udp", stack, "w34")
        workers = rig.workers([0, 1])
        rig.join(workers)
        for slot in range(4):
            reduce(workers, slot, 34)


class Process:
    """`p4reduce-controller serve` as a process of its own."""

    def __init__(self, stack: ExitStack, *arguments: str) -> None:
        command = [sys.executable, "-m", "p4reduce_controller.serve", "serve", "--ready-json", *arguments]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        stack.callback(self._end)
        assert self.popen.stdout is not None
        if not select.select([self.popen.stdout], [], [], DEADLINE)[0]:
            pytest.fail("the controller is not ready in time")
        line = self.popen.stdout.readline()
        assert line, self.popen.communicate()[1]
        self.ready: dict[str, Any] = json.loads(line)
        self.address: str = self.ready["address"]

    def _end(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.communicate()

    def terminate(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        self.popen.send_signal(number)
        out, err = self.popen.communicate(timeout=DEADLINE)
        return self.popen.returncode, out, err


def hosts_file(folder: Path, switch: SwitchProcess) -> Path:
    """A hosts file for an embedded switch with one UDP port."""
    file = folder / "hosts.toml"
    endpoint = ":".join(map(str, switch.endpoints[1]))
    file.write_text(
        f'[switch]\ngrpc = "{switch.grpc_address}"\nprofile = "w5"\nip = "127.0.1.254"\n'
        f'mac = "02:70:7f:00:01:fe"\n[[host]]\nname = "one"\nip = "127.0.1.1"\nport = 1\n'
        f'endpoint = "{endpoint}"\n'
    )
    return file


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_controller_as_a_process(
    tmp_path: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as stack:
        switch = stack.enter_context(SwitchProcess.start("embedded", udp_ports={1: "127.0.0.1"}))
        file = hosts_file(tmp_path, switch)
        state = ("--state", str(tmp_path / "state.db"))
        process = Process(stack, "--hosts", str(file), "--listen", "127.0.0.1:0", *state)
        assert process.ready | {"address": "", "pid": 0} == {
            "ready": True,
            "address": "",
            "switch": switch.grpc_address,
            "profile": "w5",
            "pid": 0,
        }
        assert process.ready["pid"] == process.popen.pid
        request = pb.JoinRequest(
            job="train", world_size=1, ip="127.0.1.1", udp_port=4000, mtu=1500, receive_frames=9, wait_seconds=9
        )
        with grpc.insecure_channel(process.address) as channel:
            first = controller_pb2_grpc.ControllerStub(channel).Join(request, timeout=DEADLINE)
            assert first.endpoint_port == switch.endpoints[1][1]
        assert cli.main(["jobs", "train", "--json", "--controller", process.address]) == 0
        assert json.loads(capsys.readouterr().out)["jobs"][0]["epoch"] == first.epoch
        code, out, err = process.terminate(number)
        assert (code, out) == (0, ""), err
        assert "Traceback" not in err
        again = Process(stack, "--hosts", str(file), "--listen", process.address, *state)
        with grpc.insecure_channel(again.address) as channel:
            stub = controller_pb2_grpc.ControllerStub(channel)
            with pytest.raises(grpc.RpcError, match="the job is running in epoch"):
                stub.Join(request, timeout=DEADLINE)
            request.incarnation = 1
            assert stub.Join(request, timeout=DEADLINE).epoch > first.epoch
        assert again.terminate(number)[0] == 0


def test_a_controller_that_is_killed_while_jobs_come_fast(tmp_path: Path) -> None:
    """Far more than one job a second, no state file: the clock alone would hand out the same epochs again."""
    used: list[int] = []
    with ExitStack() as stack:
        switch = stack.enter_context(SwitchProcess.start("embedded", udp_ports={1: "127.0.0.1"}))
        file = hosts_file(tmp_path, switch)
        for _ in range(2):
            process = Process(stack, "--hosts", str(file), "--listen", "127.0.0.1:0")
            with grpc.insecure_channel(process.address) as channel:
                stub = controller_pb2_grpc.ControllerStub(channel)
                for number in range(40):
                    request = pb.JoinRequest(
                        job=f"job{number}", world_size=1, ip="127.0.1.1", udp_port=4000, mtu=1500, receive_frames=9
                    )
                    reply = stub.Join(request, timeout=DEADLINE)
                    used.append(reply.epoch)
                    goodbye = pb.LeaveRequest(job=request.job, epoch=reply.epoch, rank=0)
                    stub.Leave(goodbye, timeout=DEADLINE, metadata=((CREDENTIAL, reply.credential),))
            assert process.terminate(signal.SIGKILL)[0] == -signal.SIGKILL
    assert len(set(used)) == len(used) == 80


def test_a_controller_that_cannot_start_says_so_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "hosts.toml"
    file.write_text("[switch]\n")
    done = subprocess.run(
        [sys.executable, "-m", "p4reduce_controller.serve", "serve", "--hosts", str(file)],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"p4reduce-controller: {file}: [switch]: grpc is missing\n"
