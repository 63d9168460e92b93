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

import p4reduce
from p4reduce import constants, wire
from p4reduce.proto import controller_pb2 as pb
from p4reduce.proto import controller_pb2_grpc
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
        self.refuse_join: tuple[grpc.StatusCode, str] | None = None
        self.change_reply: Callable[[pb.JoinReply], None] = lambda _: None
        self.trouble: list[tuple[int, pb.Trouble]] = []
        self.jobs: dict[str, FakeJob] = {}
        self.changed = threading.Condition()
        self._epochs = itertools.count(first_epoch)
        self._waiting: dict[str, dict[int, pb.JoinRequest]] = {}
        self._server: Any = None
        self.address = ""

    # The server.

    def start(self, port: int = 0) -> None:
        self._server = grpc.server(ThreadPoolExecutor(32), options=(("grpc.so_reuseport", 0),))
        controller_pb2_grpc.add_ControllerServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        bound = self._server.add_insecure_port(f"{LOOPBACK}:{port}")
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
            with self.switch.lock:
                self.switch.model.revoke(job.epoch)
            for stream in job.streams.values():
                stream.outbox.put(pb.Directive(fence=fence))
                stream.outbox.put(None)

    # RPCs.

    def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeReply:
        return pb.DescribeReply(**self.describe)

    def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinReply:
        if self.refuse_join is not None:
            context.abort(*self.refuse_join)
        with self.changed:
            seats = self._waiting.setdefault(request.job, {})
            seats[request.rank] = request
            if len(seats) == request.world_size:
                self._admit(request.job, self._waiting.pop(request.job))
                self.changed.notify_all()
            elif not self.changed.wait_for(lambda: self._waiting.get(request.job) is not seats, request.wait_seconds):
                missing = [rank for rank in range(request.world_size) if rank not in seats]
                del self._waiting[request.job]
                context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"ranks {missing} have not joined")
            reply = pb.JoinReply(
                epoch=self.jobs[request.job].epoch,
                or_slots=self.or_slots,
                add_slots=self.add_slots,
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
        with self.switch.lock:
            self.switch.model.admit(Membership(epoch, members, 0, self.or_slots + self.add_slots, 2, 1))
        self.jobs[name] = FakeJob(name, epoch, seats)

    def Progress(self, reports: Iterator[pb.ProgressReport], context: Any) -> Iterator[pb.Directive]:
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
        with self.changed:
            job = self.jobs.get(request.job)
            if job is not None and job.epoch == request.epoch and job.fence is None:
                job.left.add(request.rank)
                submitted = job.reports[request.rank].submitted if request.rank in job.reports else 0
                left = pb.PeerLeft(rank=request.rank, submitted=submitted)
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

    def __init__(self) -> None:
        self.switch = UdpSwitch(W5)
        self.controller = FakeController(self.switch, W5)
        self.controller.start()
        self.pool = ThreadPoolExecutor(8)
        self.opened: list[p4reduce.Communicator] = []

    def connect(self, size: int, job: str = "job", **overrides: Any) -> list[p4reduce.Communicator]:
        def one(rank: int) -> p4reduce.Communicator:
            return p4reduce.connect(self.controller.address, job, rank, size, **overrides)

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
