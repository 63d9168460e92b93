# SPDX-License-Identifier: Apache-2.0
"""The gRPC service: requests in, answers out; every decision is the coordinator's, who may ask is the gate's."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NoReturn

import grpc

from p4reduce import constants
from p4reduce.controller_client import DECIDED
from p4reduce.proto import controller_pb2 as pb
from p4reduce.proto import controller_pb2_grpc
from p4reduce.wire import profile
from p4reduce_controller import messages
from p4reduce_controller.admission import MAX_WAIT_SECONDS, Code, Refusal, RefusedError, check, check_version
from p4reduce_controller.auth import (
    FIRST_REPORT_SECONDS,
    JOINS_EACH,
    LEAVES_EACH,
    LOOKS_EACH,
    MAX_JOINS,
    MAX_LEAVE_SECONDS,
    MAX_LEAVES,
    MAX_LOOKS,
    MAX_STREAMS,
    REPORT_BURST,
    REPORTS_A_SECOND,
    STREAMS_EACH,
    Caller,
    Gate,
    Rates,
    credential,
)
from p4reduce_controller.coordinator import Coordinator, Mailbox

GRACE_SECONDS = 10.0
"""How much longer than promised an RPC waits for its answer, should everything else fail."""
DEFAULT_INTERVAL = 1.0
MIN_INTERVAL = 0.1
MAX_INTERVAL = 3600.0
"""Seconds between the answers of a Watch."""


class ControllerService(controller_pb2_grpc.ControllerServicer):
    """Translates between gRPC and the coordinator. Join, Leave, Progress and Watch block a thread each."""

    def __init__(self, coordinator: Coordinator, gate: Gate | None = None) -> None:
        self._coordinator = coordinator
        self._gate = gate or Gate()
        self._profile = profile(coordinator.hosts.switch.profile)

    # ---- workers --------------------------------------------------------------------------------------------------

    def Describe(self, request: pb.DescribeRequest, context: grpc.ServicerContext) -> pb.DescribeReply:
        """See the protocol."""
        with _refusals(context):
            self._gate.caller(context)
            check_version(request.client_version)
        return messages.describe(self._coordinator.hosts)

    def Join(self, request: pb.JoinRequest, context: grpc.ServicerContext) -> pb.JoinReply:
        """See the protocol."""
        with ExitStack() as stack:
            with _refusals(context):
                self._gate.check_join(context, request.job)
                applicant = check(messages.claim(request), self._coordinator.hosts, self._profile)
                stack.callback(self._gate.enter("joins", MAX_JOINS, JOINS_EACH, context))
            number, mailbox = stack.enter_context(self._coordinator.mailbox())
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
        with ExitStack() as stack:
            with _refusals(context):
                caller = self._gate.caller(context)
                stack.callback(self._gate.enter("progress streams", MAX_STREAMS, STREAMS_EACH, context))
            number, mailbox = stack.enter_context(self._coordinator.mailbox())
            if not context.add_callback(lambda: self._coordinator.broken(number)):
                return
            opening = _Opening()
            reader = threading.Thread(
                target=self._read_reports,
                args=(number, caller, credential(context.invocation_metadata()), request_iterator, opening),
                name=f"p4reduce-reports-{number}",
                daemon=True,
            )
            reader.start()
            if not opening.wait(FIRST_REPORT_SECONDS):
                _abort(
                    context,
                    Refusal(Code.DEADLINE_EXCEEDED, f"no report within {FIRST_REPORT_SECONDS:g} s: open it again"),
                )
            # Ends at the latest when the RPC does: `broken` puts an end into the mailbox.
            while (mail := mailbox.get()) is not None:
                if not isinstance(mail, pb.Directive):
                    _abort(context, mail)
                yield mail

    def _read_reports(
        self, number: int, caller: Caller, secret: bytes, reports: Iterator[pb.ProgressReport], opening: _Opening
    ) -> None:
        rates = Rates(REPORTS_A_SECOND, REPORT_BURST)
        try:
            for report in reports:
                if not opening.begin():
                    return  # too late: a rank that is registered now would be lost at once
                # Of every report: what has ended asks for no credential, and tells how it ended.
                caller.check_job(report.job)
                # Who reports too often is read more slowly, and gRPC slows the sender down.
                while (wait := rates.wait("")) > 0:
                    time.sleep(wait)
                self._coordinator.report(number, messages.report(report, secret))
        except RefusedError as error:
            self._coordinator.refuse(number, error.refusal)
        except grpc.RpcError:
            pass  # how gRPC ends the iterator of a call that was cancelled or whose client died
        finally:
            self._coordinator.broken(number)
            opening.begin()

    def Leave(self, request: pb.LeaveRequest, context: grpc.ServicerContext) -> pb.LeaveReply:
        """See the protocol."""
        with ExitStack() as stack:
            with _refusals(context):
                self._gate.caller(context).check_job(request.job)
                wait = request.wait_seconds
                if not (math.isfinite(wait) and 0 <= wait <= MAX_WAIT_SECONDS):
                    raise RefusedError(
                        Code.INVALID_ARGUMENT, f"wait_seconds {wait} makes no sense: 0 to {MAX_WAIT_SECONDS:.0f}"
                    )
                wait = request.wait_seconds = min(wait, MAX_LEAVE_SECONDS)
                stack.callback(self._gate.enter("leaves", MAX_LEAVES, LEAVES_EACH, context))
            number, mailbox = stack.enter_context(self._coordinator.mailbox())
            context.add_callback(lambda: self._coordinator.close(number))
            self._coordinator.leave(request, number, credential(context.invocation_metadata()))
            answer = self._receive(mailbox, wait + self._coordinator.switch_deadline + GRACE_SECONDS)
        if isinstance(answer, Refusal):
            _abort(context, answer)
        return pb.LeaveReply()

    # ---- looking --------------------------------------------------------------------------------------------------

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        """See the protocol. With a job's token, only jobs that it is for are shown."""
        with ExitStack() as stack, _refusals(context):
            stack.callback(self._gate.enter("looks", MAX_LOOKS, LOOKS_EACH, context))
            return self._status(request.job, context)

    def _status(self, job: str, context: grpc.ServicerContext) -> pb.StatusReply:
        caller = self._gate.caller(context)
        reply = self._coordinator.status(job)
        hidden = [found for found in reply.jobs if not caller.may_see(found.job)]
        for found in hidden:
            reply.jobs.remove(found)
        if job and not reply.jobs:
            raise RefusedError(Code.NOT_FOUND, f"no job {job[:128]!r}: an empty name shows all")
        return reply

    def Watch(self, request: pb.WatchRequest, context: grpc.ServicerContext) -> Iterator[pb.StatusReply]:
        """See the protocol. A job that ends while it is watched is no longer in the answers."""
        interval = request.interval_seconds or DEFAULT_INTERVAL
        with ExitStack() as stack:
            with _refusals(context):
                self._gate.caller(context)
                if not MIN_INTERVAL <= interval <= MAX_INTERVAL:
                    raise RefusedError(
                        Code.INVALID_ARGUMENT,
                        f"interval_seconds {interval:g} makes no sense: {MIN_INTERVAL:g} to {MAX_INTERVAL:.0f}",
                    )
                stack.callback(self._gate.watch(context))
                reply = self._status(request.job, context)
            number, mailbox = stack.enter_context(self._coordinator.mailbox())
            if not context.add_callback(lambda: self._coordinator.close(number)):
                return
            while True:
                yield reply
                try:
                    mail = mailbox.get(timeout=interval)
                except queue.Empty:
                    reply = self._seen(request.job, context)
                    continue
                if mail is not None:
                    _abort(context, mail)
                return

    def _seen(self, job: str, context: grpc.ServicerContext) -> pb.StatusReply:
        try:
            return self._status(job, context)
        except RefusedError:
            reply = self._coordinator.status("")
            del reply.jobs[:]
            return reply

    def Pools(self, _request: pb.PoolsRequest, context: grpc.ServicerContext) -> pb.PoolsReply:
        """See the protocol. With a job's token, the names and epochs of other jobs are left out."""
        with _refusals(context):
            caller = self._gate.caller(context)
        pools = [messages.pool(view) for view in self._coordinator.pools()]
        for pool in pools:
            if pool.job and not caller.may_see(pool.job):
                pool.job, pool.epoch = "(another's)", 0
        return pb.PoolsReply(pools=pools, slots=constants.SLOTS)

    # ---- operators ------------------------------------------------------------------------------------------------

    def SetMode(self, request: pb.SetModeRequest, context: grpc.ServicerContext) -> pb.SetModeReply:
        """See the protocol."""
        with _refusals(context):
            self._gate.check_operator(context)
            mode, before = self._coordinator.set_mode(request.job, request.mode)
        return pb.SetModeReply(mode=mode, before=before)

    def SetPolicy(self, request: pb.SetPolicyRequest, context: grpc.ServicerContext) -> pb.SetPolicyReply:
        """See the protocol."""
        with _refusals(context):
            self._gate.check_operator(context)
            changes = messages.policy_changes(request.policy, request.zero)
            policy = self._coordinator.set_policy(request.job, changes)
        return pb.SetPolicyReply(policy=messages.policy(policy))

    def Drain(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> pb.DrainReply:
        """See the protocol."""
        with _refusals(context):
            self._gate.check_operator(context)
            moving, staying = self._coordinator.drain(request.switch, request.undrain)
        return pb.DrainReply(moving=moving, staying=staying)

    def Evict(self, request: pb.EvictRequest, context: grpc.ServicerContext) -> pb.EvictReply:
        """See the protocol."""
        with _refusals(context):
            self._gate.check_operator(context)
            epoch = self._coordinator.evict(request.job)
        return pb.EvictReply(epoch=epoch)

    @staticmethod
    def _receive(mailbox: Mailbox, timeout: float) -> pb.JoinReply | pb.LeaveReply | Refusal | None:
        try:
            mail = mailbox.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(mail, pb.Directive):
            raise TypeError("a directive is no answer to this call")
        return mail


class _Opening:
    """What came first on a progress stream: a report, or the end of the time for it.

    A report that makes no sense counts: the coordinator answers it with a refusal, which ends the stream.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._decided = threading.Event()
        self._late = False

    def begin(self) -> bool:
        """A report is there, or none will come. Whether it is in time."""
        with self._lock:
            self._decided.set()
            return not self._late

    def wait(self, seconds: float) -> bool:
        """Wait for `begin`. Whether it came in time; it is too late afterwards."""
        self._decided.wait(seconds)
        with self._lock:
            self._late = not self._decided.is_set()
            return not self._late


@contextmanager
def _refusals(context: grpc.ServicerContext) -> Iterator[None]:
    """Answer the call with a refusal that is raised within."""
    refusal = None
    try:
        yield
    except RefusedError as error:
        refusal = error.refusal
    if refusal is not None:
        _abort(context, refusal)


def _abort(context: grpc.ServicerContext, mail: object) -> NoReturn:
    """End the call with a refusal, which says whether somebody has decided: gRPC's own UNAVAILABLE looks the same."""
    refusal = mail if isinstance(mail, Refusal) else Refusal(Code.INTERNAL, f"unexpected answer {type(mail).__name__}")
    if not refusal.away:
        context.set_trailing_metadata(((DECIDED, "1"),))
    context.abort(grpc.StatusCode[refusal.code.value], refusal.message)
    raise RuntimeError("gRPC's abort does not return")
