# SPDX-License-Identifier: Apache-2.0
"""One worker's dealings with the controller while it reduces: reports out, directives in, and both put into errors."""

from __future__ import annotations

import logging
import time
from typing import Final

from p4reduce.controller_client import ControllerClient
from p4reduce.core.config import CoreConfig
from p4reduce.core.events import Stalled
from p4reduce.driver import Driver, Verdict
from p4reduce.errors import (
    ControllerError,
    IntegrityError,
    JobError,
    MismatchError,
    P4ReduceError,
    StalledError,
    WorkerLostError,
)
from p4reduce.progress import ProgressStream
from p4reduce.proto import controller_pb2 as pb

_LOG = logging.getLogger(__name__)

_VERDICT_SECONDS = 2.0
"""How long an error of our own waits for the controller's reason. A refusal by the switch is mostly the echo of a
fence that is still on its way, and the fence knows who was lost."""
_STATUS_SECONDS = 2.0
_CONFIRM_SECONDS = 1.0
_CONFIRM_PAUSE_SECONDS = 0.01
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


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Ranks for a message: "rank 3", "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class Membership:
    """Speaks for one rank in one epoch, from `start` to `leave`."""

    def __init__(self, client: ControllerClient, config: CoreConfig, lease_seconds: float) -> None:
        """`lease_seconds`: the controller counts a rank that is silent for so long as lost."""
        self._client = client
        self._config = config
        # Well within the lease, and often enough that a stall finds current numbers of the other ranks.
        interval = min(_LONGEST_INTERVAL_SECONDS, lease_seconds / 4, config.policy.deadline / 4)
        self._progress = ProgressStream(
            client, (config.job, config.epoch, config.rank), self._snapshot, self._on_directive, interval
        )
        self._driver: Driver | None = None
        self._fenced = False

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

    def _snapshot(self) -> tuple[int, int]:
        driver = self._driver
        return (driver.submitted, driver.completed) if driver is not None else (0, 0)

    # What the core reports: called in the I/O thread.

    def on_trouble(self, report: P4ReduceError | Stalled) -> Verdict:
        """Turn what the core or the driver reports into an error for the callers, and tell the controller."""
        error = self._stalled(report) if isinstance(report, Stalled) else report
        code = _TROUBLE_CODES.get(type(error), pb.Trouble.ABORTED)
        bucket = error.bucket if isinstance(error, JobError) else None
        self._progress.report(pb.Trouble(code=code, message=str(error), bucket=bucket or 0))
        # A refusal is worth the wait even now: the stream may be on its way back, and the fence with it.
        worth = self._progress.registered or code == pb.Trouble.REFUSED
        return Verdict(error, _VERDICT_SECONDS if worth else 0.0)

    def _stalled(self, event: Stalled) -> StalledError:
        job, bucket = self._config.job, event.bucket
        text = f"job {job!r}: bucket {bucket} has had no result for {event.seconds:.3g} s"
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
            self._fenced = True
            driver.fence(self._fence_error(directive.fence))
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

    # The end: called by whoever closes.

    def abort(self, message: str) -> None:
        """Tell the controller that this rank gives up, so that it ends the epoch for all."""
        self._progress.report(pb.Trouble(code=pb.Trouble.ABORTED, message=message))

    def leave(self) -> None:
        """Leave the epoch and end the progress stream. Never raises: a controller that is away finds out by itself."""
        try:
            if self._progress.registered and not self._fenced:
                self._confirm()
            self._progress.expect_end()
            self._client.leave(self._config.job, self._config.epoch, self._config.rank)
        except ControllerError as error:
            _LOG.info("leave: %s", error)
        finally:
            self._progress.stop()

    def _confirm(self) -> None:
        """Wait until the controller knows how many buckets this rank took part in.

        It passes that number to the others, whose buckets beyond it then fail. Reports and Leave travel separately,
        so the last report might come too late.
        """
        config = self._config
        if config.world_size == 1:
            return
        self._progress.report()
        submitted = self._snapshot()[0]
        deadline = time.monotonic() + _CONFIRM_SECONDS
        while time.monotonic() < deadline and self._progress.registered:
            reply = self._client.status(config.job, timeout=_CONFIRM_SECONDS)
            for job in reply.jobs:
                if job.epoch != config.epoch:
                    return
                if any(w.member.rank == config.rank and w.submitted >= submitted for w in job.workers):
                    return
            time.sleep(_CONFIRM_PAUSE_SECONDS)
