# SPDX-License-Identifier: Apache-2.0
"""A controller and a switch for tests of the worker's side: both real over gRPC and UDP, both plain inside."""

from __future__ import annotations

import ipaddress
import itertools
import queue
import select
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest

import p4reduce
from p4reduce import constants, wire
from p4reduce.controller_client import DECIDED
from p4reduce.proto import controller_pb2 as pb
from p4reduce.proto import controller_pb2_grpc
from p4reduce.ring import local_rings
from p4reduce.sim.network import Datagram
from p4reduce.sim.switch import Member, Membership, ReferenceSwitch
from p4reduce.transport.base import Waker

LOOPBACK = "127.0.0.1"
W5 = wire.profile("w5")
_PORT = 1
T = TypeVar("T")


class UdpSwitch:
    """The reference switch behind one UDP socket on loopback. `alter` may change, drop or multiply what it sends."""

    def __init__(self, profile: wire.Profile) -> None:
        self.model = ReferenceSwitch(profile)
        self.lock = threading.Lock()
        self.received = 0
        self.alter: Callable[[Datagram], list[Datagram]] = lambda datagram: [datagram]
        self.swallow: Callable[[Datagram], bool] = lambda _: False
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._sock.bind((LOOPBACK, 0))
        self._sock.setblocking(False)
        self.endpoint: tuple[str, int] = self._sock.getsockname()
        self._waker = Waker()
        self._over = False
        self._thread = threading.Thread(target=self._serve, name="udp-switch", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        poller.register(self._waker.fileno(), select.POLLIN)
        switch_ip = int(ipaddress.IPv4Address(LOOPBACK))
        while not self._over:
            poller.poll()
            while not self._over:
                try:
                    data, (ip, port) = self._sock.recvfrom(65536)
                except BlockingIOError:
                    break
                self.received += 1
                request = Datagram(int(ipaddress.IPv4Address(ip)), port, switch_ip, constants.UDP_PORT, data)
                if self.swallow(request):
                    continue
                with self.lock:
                    answers = self.model.process(_PORT, request)
                for _, answer in answers:
                    for changed in self.alter(answer):
                        to = (str(ipaddress.IPv4Address(changed.dst)), changed.dst_port)
                        self._sock.sendto(changed.data, to)

    def send(self, data: bytes, to: tuple[str, int]) -> None:
        """Send any datagram from the switch's address."""
        self._sock.sendto(data, to)

    def stop(self) -> None:
        self._over = True
        self._waker.wake()
        self._thread.join()
        self._waker.close()
        self._sock.close()


@dataclass
class Stream:
    """One progress stream as the controller sees it."""

    rank: int
    outbox: queue.SimpleQueue[pb.Directive | None] = field(default_factory=queue.SimpleQueue)


@dataclass
class FakeJob:
    name: str
    epoch: int
    requests: dict[int, pb.JoinRequest]
    members: tuple[Member, ...] = ()
    order: pb.Order = field(default_factory=pb.Order)
    installed: int | None = None
    """Epoch that the switch admits, None when there is none."""
    first_bucket: int = 0
    """Of the ring path, where the job is on it."""
    ring_epoch: int = 0
    streams: dict[int, Stream] = field(default_factory=dict)
    reports: dict[int, pb.ProgressReport] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    fence: pb.Fence | None = None


class FakeController(controller_pb2_grpc.ControllerServicer):
    """The controller's rules in their shortest form. `trouble` holds what workers reported."""

    def __init__(self, switch: UdpSwitch, profile: wire.Profile, first_epoch: int = 41) -> None:
        self.switch_connected = True
        self.switch = switch
        self.profile = profile
        self.policy = pb.RetransmissionPolicy(
            initial_seconds=0.05, min_seconds=0.01, max_seconds=0.2, deadline_seconds=30.0, early_resend=3
        )
        self.lease_seconds = 5.0
        self.or_slots, self.add_slots = 4, 28
        self.describe: dict[str, Any] = {
            "server_version": "0",
            "profile": profile.name,
            "switch_ip": LOOPBACK,
            "udp_port": constants.UDP_PORT,
            "loopback": True,
        }
        self.fence_on_trouble = True
        self.stand_by = False
        self.refuse_join: tuple[grpc.StatusCode, str] | None = None
        self.change_reply: Callable[[pb.JoinReply], None] = lambda _: None
        self.trouble: list[tuple[int, pb.Trouble]] = []
        self.credentials: dict[str, list[bytes]] = {"Progress": [], "Leave": []}
        self.tokens: set[str] = set()
        self.leaves: list[pb.LeaveRequest] = []
        self.start_on_ring = ""
        """When set: why new jobs begin on the ring path."""
        self.on_report: Callable[[FakeJob, pb.ProgressReport], None] = lambda *_: None
        self.jobs: dict[str, FakeJob] = {}
        self.changed = threading.Condition()
        self._epochs = itertools.count(first_epoch)
        self._waiting: dict[str, dict[int, pb.JoinRequest]] = {}
        self._server: Any = None
        self.address = ""

    # The server.

    def start(self, port: int = 0, credentials: grpc.ServerCredentials | None = None) -> None:
        self._server = grpc.server(ThreadPoolExecutor(32), options=(("grpc.so_reuseport", 0),))
        controller_pb2_grpc.add_ControllerServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        where = f"{LOOPBACK}:{port}"
        if credentials is None:
            bound = self._server.add_insecure_port(where)
        else:
            bound = self._server.add_secure_port(where, credentials)
        self.address = f"{LOOPBACK}:{bound}"
        self._server.start()

    def stop(self) -> None:
        with self.changed:
            for job in self.jobs.values():
                for stream in job.streams.values():
                    stream.outbox.put(None)
        self._server.stop(0).wait()

    # What tests ask and do.

    def wait_for(self, condition: Callable[[], bool], timeout: float = 10.0) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout), "the controller did not see it in time"

    def send_fence(self, job: FakeJob, fence: pb.Fence) -> None:
        """End an epoch: revoke it on the switch, then tell the workers."""
        with self.changed:
            if job.fence is not None:
                return
            job.fence = fence
            self.revoke(job)
            for stream in job.streams.values():
                stream.outbox.put(pb.Directive(fence=fence))
                stream.outbox.put(None)

    def revoke(self, job: FakeJob) -> None:
        """Let the switch admit nothing of the job any more."""
        with self.switch.lock:
            if job.installed is not None and job.installed in self.switch.model._jobs:
                self.switch.model.revoke(job.installed)
        job.installed = None

    def install(self, job: FakeJob) -> int:
        """Let the switch admit a new epoch of the job; its number."""
        epoch = next(self._epochs)
        with self.switch.lock:
            self.switch.model.admit(Membership(epoch, job.members, 0, self.or_slots + self.add_slots, 2, 1))
        job.installed = epoch
        return epoch

    def tell(self, job: FakeJob, why: str = "", **kind: Any) -> int:
        """Give all ranks an order, now and whenever their streams come back; its number."""
        with self.changed:
            job.order = pb.Order(number=job.order.number + 1, why=why, **kind)
            for stream in job.streams.values():
                stream.outbox.put(pb.Directive(order=job.order))
            return job.order.number

    def send(self, job: FakeJob, directive: pb.Directive) -> None:
        with self.changed:
            for stream in job.streams.values():
                stream.outbox.put(directive)

    def answers(self, job: FakeJob, timeout: float = 20.0) -> list[pb.Answer]:
        """What all ranks answer to the present order."""

        def all_there() -> bool:
            return all(
                rank in job.reports and job.reports[rank].answer.order == job.order.number for rank in job.requests
            )

        self.wait_for(all_there, timeout)
        return [job.reports[rank].answer for rank in sorted(job.requests)]

    def stop_switch(self, job: FakeJob, why: str = "operator: test") -> int:
        """First half of a cut: the bucket that RunRing must name."""
        epoch = job.installed
        assert epoch is not None
        self.revoke(job)
        self.tell(job, why, stop=pb.Stop(epoch=epoch))
        return min(answer.bucket for answer in self.answers(job))

    def run_ring(self, job: FakeJob, first: int, why: str = "operator: test") -> None:
        """Second half of a cut."""
        job.ring_epoch, job.first_bucket = next(self._epochs), first
        self.tell(job, why, run_ring=pb.RunRing(epoch=job.ring_epoch, first_bucket=first))

    def cut(self, job: FakeJob, why: str = "operator: test") -> None:
        """Take the job to the ring path."""
        self.run_ring(job, self.stop_switch(job, why), why)

    def give_up_trial(self, job: FakeJob, why: str = "trial failed") -> None:
        """The ring path goes on as before."""
        self.revoke(job)
        self.tell(job, why, run_ring=pb.RunRing(epoch=job.ring_epoch, first_bucket=job.first_bucket))

    def try_switch(self, job: FakeJob) -> list[pb.Answer]:
        """Prepare a new epoch and let all ranks try it."""
        epoch = self.install(job)
        self.tell(job, trial=pb.Trial(epoch=epoch, or_slots=self.or_slots, add_slots=self.add_slots))
        return self.answers(job)

    def hold(self, job: FakeJob) -> int:
        """Let all ranks hold; the bucket that RunSwitch must name."""
        self.tell(job, hold=pb.Hold())
        return max(answer.bucket for answer in self.answers(job))

    def run_switch(self, job: FakeJob, first: int, why: str = "the switch is well") -> None:
        """Take the job to the switch path."""
        assert job.installed is not None
        run = pb.RunSwitch(epoch=job.installed, or_slots=self.or_slots, add_slots=self.add_slots, first_bucket=first)
        self.tell(job, why, run_switch=run)

    def promote(self, job: FakeJob) -> int:
        """Take the job back to the switch path; the first bucket that takes it."""
        assert not any(answer.failed for answer in self.try_switch(job))
        first = self.hold(job)
        self.run_switch(job, first)
        return first

    # RPCs.

    def _note(self, call: str, context: Any) -> None:
        metadata = dict(context.invocation_metadata())
        self.tokens.add(metadata.get("authorization", ""))
        if self.stand_by:
            context.abort(grpc.StatusCode.UNAVAILABLE, "this controller stands by")
        if call in self.credentials:
            self.credentials[call].append(metadata.get("p4reduce-credential-bin", b""))

    def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeReply:
        self._note("Describe", context)
        return pb.DescribeReply(**self.describe)

    def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinReply:
        self._note("Join", context)
        if self.refuse_join is not None:
            context.set_trailing_metadata(((DECIDED, "1"),))
            context.abort(*self.refuse_join)
        with self.changed:
            seats = self._waiting.setdefault(request.job, {})
            seats[request.rank] = request
            self.changed.notify_all()
            if len(seats) == request.world_size:
                self._admit(request.job, self._waiting.pop(request.job))
                self.changed.notify_all()
            elif not self.changed.wait_for(lambda: self._waiting.get(request.job) is not seats, request.wait_seconds):
                missing = [rank for rank in range(request.world_size) if rank not in seats]
                del self._waiting[request.job]
                context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"ranks {missing} have not joined")
            reply = pb.JoinReply(
                epoch=self.jobs[request.job].epoch,
                order=self.jobs[request.job].order,
                credential=b"%016d" % request.rank,
                endpoint_ip=self.switch.endpoint[0],
                endpoint_port=self.switch.endpoint[1],
                policy=self.policy,
                members=[pb.Member(rank=rank, ip=r.ip, udp_port=r.udp_port) for rank, r in sorted(seats.items())],
                lease_seconds=self.lease_seconds,
            )
        self.change_reply(reply)
        return reply

    def _admit(self, name: str, seats: dict[int, pb.JoinRequest]) -> None:
        epoch = next(self._epochs)
        members = tuple(
            Member(rank, _PORT, int(ipaddress.IPv4Address(r.ip)), r.udp_port) for rank, r in sorted(seats.items())
        )
        job = self.jobs[name] = FakeJob(name, epoch, seats, members)
        if self.start_on_ring:
            job.ring_epoch = epoch
            job.order = pb.Order(number=1, why=self.start_on_ring, run_ring=pb.RunRing(epoch=epoch))
            return
        with self.switch.lock:
            self.switch.model.admit(Membership(epoch, members, 0, self.or_slots + self.add_slots, 2, 1))
        job.installed = epoch
        run = pb.RunSwitch(epoch=epoch, or_slots=self.or_slots, add_slots=self.add_slots)
        job.order = pb.Order(number=1, run_switch=run)

    def Progress(self, reports: Iterator[pb.ProgressReport], context: Any) -> Iterator[pb.Directive]:
        self._note("Progress", context)
        first = next(reports)
        job = self.jobs.get(first.job)
        if job is None or job.epoch != first.epoch:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such epoch")
            return
        stream = Stream(first.rank)
        with self.changed:
            job.streams[first.rank] = stream
            self._take_report(job, first)
        if not context.add_callback(lambda: self._ended(job, stream)):
            self._ended(job, stream)
            return
        yield pb.Directive(registered=pb.Registered())
        if job.fence is not None:
            yield pb.Directive(fence=job.fence)
            return
        yield pb.Directive(order=job.order)
        threading.Thread(target=self._read, args=(job, stream, reports), daemon=True).start()
        while (directive := stream.outbox.get()) is not None:
            yield directive

    def _ended(self, job: FakeJob, stream: Stream) -> None:
        stream.outbox.put(None)
        with self.changed:
            if job.streams.get(stream.rank) is stream:
                del job.streams[stream.rank]
            self.changed.notify_all()

    def _read(self, job: FakeJob, stream: Stream, reports: Iterator[pb.ProgressReport]) -> None:
        try:
            for report in reports:
                with self.changed:
                    self._take_report(job, report)
        except Exception:  # gRPC raises a bare Exception when the stream is gone
            pass
        stream.outbox.put(None)

    def _take_report(self, job: FakeJob, report: pb.ProgressReport) -> None:
        job.reports[report.rank] = report
        self.on_report(job, report)
        if report.HasField("trouble"):
            if not any(rank == report.rank for rank, _ in self.trouble):
                self.trouble.append((report.rank, report.trouble))
            if self.fence_on_trouble:
                reason = pb.Trouble.Code.Name(report.trouble.code)
                self.send_fence(
                    job,
                    pb.Fence(
                        reason=reason,
                        message=f"reported: {report.trouble.message}",
                        ranks=[report.rank],
                        bucket=report.trouble.bucket,
                    ),
                )
        self.changed.notify_all()

    def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveReply:
        self._note("Leave", context)
        with self.changed:
            self.leaves.append(request)
            job = self.jobs.get(request.job)
            if job is not None and job.epoch == request.epoch and job.fence is None:
                others = [rank for rank in job.requests if rank != request.rank]
                for stream in job.streams.values():
                    stream.outbox.put(pb.Directive(report_now=pb.ReportNow(completed=request.submitted)))
                self.changed.wait_for(
                    lambda: all(
                        rank in job.left or rank not in job.streams or job.reports[rank].completed >= request.submitted
                        for rank in others
                    ),
                    request.wait_seconds,
                )
                job.left.add(request.rank)
                left = pb.PeerLeft(rank=request.rank, submitted=request.submitted)
                for rank, stream in job.streams.items():
                    if rank not in job.left:
                        stream.outbox.put(pb.Directive(peer_left=left))
            self.changed.notify_all()
        return pb.LeaveReply()

    def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        reply = pb.StatusReply(switch=pb.SwitchStatus(address="fake switch", connected=self.switch_connected))
        with self.changed:
            for job in self.jobs.values():
                status = reply.jobs.add(job=job.name, epoch=job.epoch, state="running")
                for rank in job.requests:
                    report = job.reports.get(rank, pb.ProgressReport())
                    status.workers.add(
                        member=pb.Member(rank=rank), submitted=report.submitted, completed=report.completed
                    )
        return reply


class World:
    """A controller, a switch, and threads that stand for the ranks."""

    def __init__(self, credentials: grpc.ServerCredentials | None = None) -> None:
        self.switch = UdpSwitch(W5)
        self.controller = FakeController(self.switch, W5)
        self.controller.start(credentials=credentials)
        self.pool = ThreadPoolExecutor(8)
        self.opened: list[p4reduce.Communicator] = []

    def connect(
        self, size: int, job: str = "job", *, ring: bool = False, **overrides: Any
    ) -> list[p4reduce.Communicator]:
        rings: list[Any] = local_rings(size, deadline=20.0) if ring else [None] * size

        def one(rank: int) -> p4reduce.Communicator:
            return p4reduce.connect(self.controller.address, job, rank, size, ring=rings[rank], **overrides)

        comms = self.each(one, range(size))
        self.opened += comms
        return comms

    def each(self, function: Callable[[Any], T], items: Any) -> list[T]:
        """Call in parallel, one thread an item; exceptions come through."""
        futures = [self.pool.submit(function, item) for item in items]
        return [future.result(30) for future in futures]

    def close(self) -> None:
        self.each(lambda comm: comm.close(0.0), self.opened)
        self.controller.stop()
        self.switch.stop()
        self.pool.shutdown()


# What the tests of a worker's session share: a module that says `world = control.new_world` has that fixture.


@pytest.fixture
def new_world() -> Iterator[World]:
    """A world for a test of its own."""
    made = World()
    yield made
    made.close()


@pytest.fixture
def calm_world() -> Iterator[World]:
    """A world whose controller does nothing by itself when a rank is in trouble."""
    made = World()
    made.controller.fence_on_trouble = False
    yield made
    made.close()


def arrays(seed: int, size: int, count: int = 3000) -> list[Any]:
    """For each of `size` ranks an array of numbers of many magnitudes."""
    rng = np.random.default_rng(seed)
    return [np.ldexp(rng.standard_normal(count), rng.integers(-9, 9, count)).astype(np.float32) for _ in range(size)]


def reduce(world: World, comms: list[p4reduce.Communicator], given: list[Any], op: Any = "mean") -> list[Any]:
    """What each rank gets."""
    return world.each(lambda comm: comm.allreduce(given[comm.rank], op), comms)


def the_job(world: World) -> FakeJob:
    """The job that `World.connect` makes unless told otherwise."""
    return world.controller.jobs["job"]
