# SPDX-License-Identifier: Apache-2.0
"""The gRPC service: requests in, answers out; every decision is the coordinator's."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import NoReturn

import grpc

from p4reduce import constants
from p4reduce.proto import controller_pb2 as pb
from p4reduce.proto import controller_pb2_grpc
from p4reduce.wire import profile
from p4reduce_controller import messages
from p4reduce_controller.admission import Code, Refusal, RefusedError, check, check_version
from p4reduce_controller.coordinator import Coordinator, Mailbox

GRACE_SECONDS = 10.0
"""How much longer than promised an RPC waits for its answer, should everything else fail."""


class ControllerService(controller_pb2_grpc.ControllerServicer):
    """Translates between gRPC and the coordinator. Join and Progress block a thread each."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._profile = profile(coordinator.hosts.switch.profile)

    def Describe(self, request: pb.DescribeRequest, context: grpc.ServicerContext) -> pb.DescribeReply:
        """See the protocol."""
        try:
            check_version(request.client_version)
        except RefusedError as error:
            _abort(context, error.refusal)
        return messages.describe(self._coordinator.hosts)

    def Join(self, request: pb.JoinRequest, context: grpc.ServicerContext) -> pb.JoinReply:
        """See the protocol."""
        try:
            applicant = check(messages.claim(request), self._coordinator.hosts, self._profile)
        except RefusedError as error:
            _abort(context, error.refusal)
        with self._coordinator.mailbox() as (number, mailbox):
            context.add_callback(lambda: self._coordinator.withdraw(number))
            self._coordinator.join(applicant, number)
            if not context.is_active():
                # The client may have gone before there was anything to withdraw.
                self._coordinator.withdraw(number)
                _abort(context, Refusal(Code.CANCELLED, "the client is gone"))
            answer = self._receive(mailbox, applicant.wait_seconds + GRACE_SECONDS)
            if answer is None:
                self._coordinator.withdraw(number)
                answer = Refusal(Code.DEADLINE_EXCEEDED, f"job {applicant.job!r}: no decision in time, join again")
        if not isinstance(answer, pb.JoinReply):
            _abort(context, answer)
        return answer

    def Progress(
        self, request_iterator: Iterator[pb.ProgressReport], context: grpc.ServicerContext
    ) -> Iterator[pb.Directive]:
        """See the protocol."""
        with self._coordinator.mailbox() as (number, mailbox):
            if not context.add_callback(lambda: self._coordinator.broken(number)):
                return
            reader = threading.Thread(
                target=self._read_reports,
                args=(number, request_iterator),
                name=f"p4reduce-reports-{number}",
                daemon=True,
            )
            reader.start()
            # Ends at the latest when the RPC does: `broken` puts an end into the mailbox.
            while (mail := mailbox.get()) is not None:
                if not isinstance(mail, pb.Directive):
                    _abort(context, mail)
                yield mail

    def _read_reports(self, number: int, reports: Iterator[pb.ProgressReport]) -> None:
        try:
            for report in reports:
                self._coordinator.report(number, messages.report(report))
        except grpc.RpcError:
            pass  # how gRPC ends the iterator of a call that was cancelled or whose client died
        finally:
            self._coordinator.broken(number)

    def Leave(self, request: pb.LeaveRequest, context: grpc.ServicerContext) -> pb.LeaveReply:
        """See the protocol."""
        with self._coordinator.mailbox() as (number, mailbox):
            self._coordinator.leave(request.job, request.epoch, request.rank, number)
            answer = self._receive(mailbox, self._coordinator.switch_deadline + GRACE_SECONDS)
        if isinstance(answer, Refusal):
            _abort(context, answer)
        return pb.LeaveReply()

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        """See the protocol."""
        reply = self._coordinator.status(request.job)
        if request.job and not reply.jobs:
            _abort(context, Refusal(Code.NOT_FOUND, f"no job {request.job!r}: an empty name shows all"))
        return reply

    def Pools(self, _request: pb.PoolsRequest, _context: grpc.ServicerContext) -> pb.PoolsReply:
        """See the protocol."""
        pools = [messages.pool(view) for view in self._coordinator.pools()]
        return pb.PoolsReply(pools=pools, slots=constants.SLOTS)

    @staticmethod
    def _receive(mailbox: Mailbox, timeout: float) -> pb.JoinReply | pb.LeaveReply | Refusal | None:
        try:
            mail = mailbox.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(mail, pb.Directive):
            raise TypeError("a directive is no answer to this call")
        return mail


def _abort(context: grpc.ServicerContext, mail: object) -> NoReturn:
    refusal = mail if isinstance(mail, Refusal) else Refusal(Code.INTERNAL, f"unexpected answer {type(mail).__name__}")
    context.abort(grpc.StatusCode[refusal.code.value], refusal.message)
    raise RuntimeError("gRPC's abort does not return")
