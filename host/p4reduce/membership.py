# SPDX-License-Identifier: Apache-2.0
"""One worker's dealings with the controller while it reduces: reports out, directives in, and both put into errors."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from p4reduce import orders
from p4reduce.controller_client import ControllerClient
from p4reduce.core.config import CoreConfig, RetransmissionPolicy
from p4reduce.core.events import Stalled
from p4reduce.driver import Driver
from p4reduce.errors import (
    ConfigError,
    ControllerError,
    IntegrityError,
    JobError,
    MismatchError,
    P4ReduceError,
    StalledError,
    TransportError,
    WorkerLostError,
)
from p4reduce.progress import ProgressStream
from p4reduce.proto import controller_pb2 as pb
from p4reduce.reports import RingFailed, Trouble, Verdict

_LOG = logging.getLogger(__name__)

_VERDICT_SECONDS = 2.0
"""How long an error of our own waits for the controller's reason. A refusal by the switch is mostly the echo of a
fence that is still on its way, and the fence knows who was lost."""
_ORDER_SECONDS = 5.0
"""How long trouble that the ring path can mend waits for the controller's order while the controller hears us."""
_FENCE_SECONDS = 1.0
"""How long a rank that gives up waits for the controller's fence before it goes."""
_STATUS_SECONDS = 2.0
_LONGEST_INTERVAL_SECONDS = 1.0

_FENCE_ERRORS: Final[dict[int, type[JobError]]] = {
    pb.Fence.WORKER_LOST: WorkerLostError,
    pb.Fence.MISMATCH: MismatchError,
    pb.Fence.STALLED: StalledError,
    pb.Fence.INTEGRITY: IntegrityError,
}
_TROUBLE_CODES: Final[dict[type[P4ReduceError], pb.Trouble.Code]] = {
    MismatchError: pb.Trouble.MISMATCH,
    StalledError: pb.Trouble.STALLED,
    IntegrityError: pb.Trouble.INTEGRITY,
    JobError: pb.Trouble.REFUSED,
}


@dataclass(frozen=True, slots=True)
class Seat:
    """What a Join has given this rank."""

    config: CoreConfig
    """`epoch` is the one that names the membership."""
    lease_seconds: float
    credential: bytes = b""
    ring: bool = False
    """Whether the controller can let the job take the ring path when the switch path fails."""


def order_of(message: pb.Order) -> orders.Order | None:
    """An order as the driver takes it; None for a kind that this version does not know."""
    kind, number, why = message.WhichOneof("kind"), message.number, message.why
    if kind == "run_switch":
        run = message.run_switch
        return orders.RunSwitch(
            number=number,
            epoch=run.epoch,
            or_slots=run.or_slots,
            add_slots=run.add_slots,
            first_bucket=run.first_bucket,
            why=why,
        )
    if kind == "run_ring":
        return orders.RunRing(
            number=number, epoch=message.run_ring.epoch, first_bucket=message.run_ring.first_bucket, why=why
        )
    if kind == "stop":
        return orders.Stop(number=number, epoch=message.stop.epoch, why=why)
    if kind == "trial":
        trial = message.trial
        return orders.Trial(
            number=number, epoch=trial.epoch, or_slots=trial.or_slots, add_slots=trial.add_slots, why=why
        )
    return orders.Hold(number=number, why=why) if kind == "hold" else None


def policy_of(message: pb.RetransmissionPolicy) -> RetransmissionPolicy:
    """A policy as the core takes it. ConfigError when it makes no sense; what is not told is as in the default."""
    default = RetransmissionPolicy()
    return RetransmissionPolicy(
        initial=message.initial_seconds,
        minimum=message.min_seconds,
        maximum=message.max_seconds,
        deadline=message.deadline_seconds,
        early_resend=message.early_resend,
        silent=message.silent_seconds or default.silent,
        fallback=message.fallback_seconds or max(default.fallback, message.silent_seconds),
        window=message.window,
    )


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Ranks for a message: "rank 3", "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class Membership:
    """Speaks for one rank of a job, from `start` to `stop`, whatever epochs follow the one it began with."""

    def __init__(self, client: ControllerClient, seat: Seat) -> None:
        self._client = client
        self._seat = seat
        config = self._config = seat.config
        # Well within the lease, and often enough that a stall finds current numbers of the other ranks.
        interval = min(_LONGEST_INTERVAL_SECONDS, seat.lease_seconds / 4, config.policy.deadline / 4)
        self._progress = ProgressStream(
            client, config.rank, seat.credential, self._report, self._on_directive, interval
        )
        self._driver: Driver | None = None

    def start(self, driver: Driver, timeout: float) -> None:
        """Open the progress stream; waits for the controller to register it, at most `timeout` seconds."""
        self._driver = driver
        self._progress.start()
        if not self._progress.wait_registered(timeout):
            _LOG.warning("the controller has not registered the progress stream within %g s", timeout)

    @property
    def connected(self) -> bool:
        """Whether the controller hears this rank right now."""
        return self._progress.registered

    def on_news(self) -> None:
        """The driver has something to tell at once."""
        self._progress.report()

    def _report(self) -> pb.ProgressReport:
        config, driver = self._config, self._driver
        report = pb.ProgressReport(job=config.job, epoch=config.epoch, rank=config.rank)
        if driver is None:
            return report
        now = driver.snapshot()
        report.submitted, report.completed, report.present = now.submitted, now.completed, now.present
        report.silent_seconds, report.rtt_seconds = now.silent, now.rtt
        for name, count in now.counters.items():
            if isinstance(count, int):
                report.counters[name] = count
        answer = now.answer
        if answer is not None:
            report.answer.order, report.answer.bucket = answer.order, answer.bucket
            report.answer.failed, report.answer.message = answer.failed, answer.message
        return report

    # What the driver cannot go on with: called in the I/O thread.

    def on_trouble(self, trouble: Trouble) -> Verdict:
        """Tell the controller, and say how long its reason or its order is to be waited for."""
        if self._seat.ring and (
            isinstance(trouble, Stalled | IntegrityError | TransportError) or type(trouble) is JobError
        ):
            return self._recoverable(trouble)
        if isinstance(trouble, RingFailed):
            return self._ring_failed(trouble.error)
        error = self._stalled(trouble) if isinstance(trouble, Stalled) else trouble
        code = _TROUBLE_CODES.get(type(error), pb.Trouble.ABORTED)
        self._tell(code, error)
        # A refusal is worth the wait even now: the stream may be on its way back, and the fence with it. A fault of our
        # own has no better reason.
        worth = (self._progress.registered and code != pb.Trouble.ABORTED) or code == pb.Trouble.REFUSED
        return Verdict(error, _VERDICT_SECONDS if worth else 0.0)

    def _ring_failed(self, error: P4ReduceError) -> Verdict:
        """What all ranks find alike is told at once. Anything else is mostly the echo of a rank that died, which the
        controller can name: our own words must not come before its."""
        wait = _VERDICT_SECONDS if self._progress.registered else 0.0
        if isinstance(error, MismatchError | IntegrityError):
            self._tell(_TROUBLE_CODES[type(error)], error)
            return Verdict(error, wait)

        def give_up() -> P4ReduceError:
            self._tell(pb.Trouble.ABORTED, error)
            return error

        return Verdict(give_up, wait)

    def _recoverable(self, trouble: P4ReduceError | Stalled) -> Verdict:
        """The ring path can mend it: all hangs on the controller's order, and looking for who is missing can wait."""
        withdraw = self._progress.withdraw
        _LOG.info("job %r, rank %d waits for an order: %s", self._config.job, self._config.rank, trouble)
        if isinstance(trouble, Stalled):
            stalled, text = trouble, self._stall_text(trouble)
            self._progress.report(pb.Trouble(code=pb.Trouble.STALLED, message=text, bucket=trouble.bucket))
            return Verdict(
                lambda: self._stalled(stalled),
                # A stall has waited for a deadline already.
                patience=lambda seconds: self._patience(seconds, stalled.seconds),
                withdraw=withdraw,
                bucket=trouble.bucket,
            )
        # Frames that cannot be sent are as good as refused.
        self._tell(pb.Trouble.INTEGRITY if isinstance(trouble, IntegrityError) else pb.Trouble.REFUSED, trouble)
        return Verdict(trouble, patience=self._patience, withdraw=withdraw)

    def _tell(self, code: pb.Trouble.Code, error: P4ReduceError) -> None:
        bucket = error.bucket if isinstance(error, JobError) else None
        self._progress.report(pb.Trouble(code=code, message=str(error), bucket=bucket or 0))

    def _patience(self, seconds: float, waited: float = 0.0) -> float:
        """Seconds that the controller may take for its order still, `seconds` after the trouble was noticed and
        `waited` more after it began.
        """
        registered = self._progress.registered_seconds
        if registered is not None:
            return _ORDER_SECONDS - min(seconds, registered)
        driver = self._driver
        policy = driver.path.policy if driver is not None else self._config.policy
        return policy.deadline - waited - seconds

    def _stall_text(self, event: Stalled) -> str:
        return f"job {self._config.job!r}: bucket {event.bucket} has had no result for {event.seconds:.3g} s"

    def _stalled(self, event: Stalled) -> StalledError:
        job, bucket = self._config.job, event.bucket
        text = self._stall_text(event)
        try:
            reply = self._status()
            missing = self._missing(reply, bucket)
        except ControllerError as error:
            return StalledError(f"{text}, and who is missing is not known: {error}", job=job, bucket=bucket)
        if missing:
            text = f"{text}: {ranks_text(missing)} of {self._config.world_size} did not submit it"
        elif not reply.switch.connected:
            text = f"{text}: the controller has lost the switch ({reply.switch.address}), start it again"
        else:
            text = (
                f"{text}, though all ranks submitted it: frames do not get through, look at the switch, its links and "
                f"their MTU on both sides ({self._config.profile.mtu} bytes needed)"
            )
        return StalledError(text, job=job, bucket=bucket, ranks=missing)

    def missing(self, bucket: int) -> tuple[int, ...]:
        """Ranks that have not submitted `bucket`, as far as the controller knows. ControllerError."""
        return self._missing(self._status(), bucket)

    def _status(self) -> pb.StatusReply:
        return self._client.status(self._config.job, timeout=_STATUS_SECONDS)

    def _missing(self, reply: pb.StatusReply, bucket: int) -> tuple[int, ...]:
        config = self._config
        for job in reply.jobs:
            if job.job == config.job and job.epoch == config.epoch:
                others = [worker for worker in job.workers if worker.member.rank != config.rank]
                return tuple(sorted(worker.member.rank for worker in others if worker.submitted <= bucket))
        raise ControllerError(f"the controller has no epoch {config.epoch} of job {config.job!r}", "NOT_FOUND")

    # What the controller says: called in the progress stream's thread.

    def _on_directive(self, directive: pb.Directive) -> None:
        driver = self._driver
        if driver is None:
            return
        if directive.HasField("fence"):
            driver.fence(self._fence_error(directive.fence))
        elif directive.HasField("order"):
            order = order_of(directive.order)
            if order is not None:
                driver.order(order)
            else:
                _LOG.error("order %d of the controller is of no known kind", directive.order.number)
                self.abort(f"rank {self._config.rank} does not know what order {directive.order.number} means")
        elif directive.HasField("report_now"):
            if directive.report_now.completed:
                driver.watch(directive.report_now.completed)
            self._progress.report()
        elif directive.HasField("policy"):
            self._take_policy(driver, directive.policy)
        elif directive.HasField("peer_left"):
            left = directive.peer_left
            message = (
                f"job {self._config.job!r}: rank {left.rank} left after {left.submitted} buckets: later ones can never "
                f"complete, every rank must submit the same number"
            )
            driver.limit(
                left.submitted,
                WorkerLostError(message, job=self._config.job, bucket=left.submitted, ranks=(left.rank,)),
            )

    def _fence_error(self, fence: pb.Fence) -> JobError:
        kind = _FENCE_ERRORS.get(fence.reason, JobError)
        reason = pb.Fence.Reason.Name(fence.reason) if fence.reason in pb.Fence.Reason.values() else str(fence.reason)
        ranks = tuple(fence.ranks)
        has_bucket = kind in (MismatchError, StalledError, IntegrityError)
        where = f", bucket {fence.bucket}" if has_bucket else ""
        who = f", {ranks_text(ranks)}" if ranks else ""
        message = f"job {self._config.job!r}, epoch {self._config.epoch}{where}{who}: {reason}: {fence.message}"
        return kind(message, job=self._config.job, bucket=fence.bucket if has_bucket else None, ranks=ranks)

    def _take_policy(self, driver: Driver, message: pb.RetransmissionPolicy) -> None:
        try:
            policy = policy_of(message)
        except ConfigError as error:
            _LOG.error("the controller's policy is not taken: %s", error)
            return
        driver.set_policy(policy)
        _LOG.info("job %r, rank %d: the controller's policy is now %s", self._config.job, self._config.rank, policy)

    # The end: called by whoever closes.

    def abort(self, message: str) -> None:
        """Tell the controller that this rank gives up, so that it ends the job for all."""
        self._progress.withdraw(pb.Trouble(code=pb.Trouble.ABORTED, message=message))

    def wait_fenced(self) -> None:
        """After `abort`: the report must have arrived before the stream ends, or the others would wait in vain."""
        self._progress.wait_over(_FENCE_SECONDS)

    def leave(self, submitted: int, patience: float = 0.0) -> None:
        """Leave the job after `submitted` buckets. With a ring path, waits at most `patience` seconds for the others to
        complete these, because they may need this rank for it: the driver must run meanwhile. For so long a controller
        that is away is asked again, too.

        Never raises: a controller that stays away finds out by itself.
        """
        config = self._config
        wait_seconds = patience if self._seat.ring and config.world_size > 1 else 0.0
        try:
            self._progress.expect_end()
            # Should the controller miss the rest: it knows at least that all is complete here.
            self._progress.report()
            self._client.leave(
                config.job,
                config.epoch,
                config.rank,
                submitted=submitted,
                wait_seconds=wait_seconds,
                credential=self._seat.credential,
                patience=patience,
            )
        except ControllerError as error:
            _LOG.info("leave: %s", error)

    def stop(self) -> None:
        """End the progress stream."""
        self._progress.stop()
