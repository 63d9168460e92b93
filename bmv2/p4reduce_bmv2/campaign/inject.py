# SPDX-License-Identifier: Apache-2.0
"""Carries out a plan's fault: each is a generator that yields what it waits for, so that the run goes on meanwhile."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc

from p4reduce.proto import controller_pb2 as pb
from p4reduce_bmv2.campaign.arena import Arena
from p4reduce_bmv2.campaign.crew import Crew
from p4reduce_bmv2.campaign.faulty import CUT
from p4reduce_bmv2.campaign.messages import Disturb
from p4reduce_bmv2.campaign.plan import Stroke
from p4reduce_bmv2.campaign.relay import Relay

Condition = Callable[[], bool]
_PATH_SECONDS = 15.0
_AWAY_SECONDS = 30.0


@dataclass
class Wait:
    """Go on once `condition` holds; after `seconds` the fault goes on regardless, and `what` is noted as missing."""

    condition: Condition
    seconds: float
    what: str


@dataclass
class Injection:
    """One fault on its way. Call `advance` again and again until `finished`."""

    arena: Arena
    crew: Crew
    stroke: Stroke
    job: str
    watch: Callable[[], pb.JobStatus | None]
    """The job's latest status."""
    relay: Relay | None = None
    started: float | None = None
    ended: float | None = None
    """When the cause was gone again: the switch was back, the link was mended."""
    evidence: str = ""
    """What shows that the fault really happened; empty: it did not."""
    missing: list[str] = field(default_factory=list)
    finished: bool = False
    _steps: Iterator[Wait] | None = None
    _waiting: Wait | None = None
    _until: float = 0.0

    def advance(self, now: float) -> bool:
        """Take the next steps that can be taken; says whether that was the last one."""
        if self._steps is None:
            self.started = now
            self._steps = getattr(self, f"_{self.stroke.fault.name}")()
        while not self.finished:
            if self._waiting is not None:
                if not self._waiting.condition():
                    if time.monotonic() < self._until:
                        return False
                    if self._waiting.what:
                        self.missing.append(self._waiting.what)
                self._waiting = None
            try:
                self._waiting = next(self._steps)
                self._until = time.monotonic() + self._waiting.seconds
            except StopIteration:
                self.finished = True
                if self.ended is None:
                    self.ended = time.monotonic()
        return True

    @property
    def hungry(self) -> bool:
        """It is under way and needs frames."""
        return self.started is not None and not self.finished and self.stroke.fault.frames

    # The faults, by their names in the plan.

    def _switch_kill(self) -> Iterator[Wait]:
        yield from self._end_switch(signal.SIGKILL)
        yield _pause(self.stroke.duration)
        yield from self._switch_back()

    def _switch_restart(self) -> Iterator[Wait]:
        yield from self._end_switch(signal.SIGTERM)
        yield from self._switch_back()

    def _controller_kill(self) -> Iterator[Wait]:
        yield from self._end_controller()
        yield _pause(self.stroke.duration)
        yield from self._controller_back()

    def _both_kill(self) -> Iterator[Wait]:
        self.arena.switch.send(signal.SIGKILL)
        yield from self._end_controller()
        of_controller = self.evidence
        self.evidence = ""
        yield from self._end_switch(signal.SIGKILL)
        self.evidence = f"{self.evidence}, {of_controller}" if self.evidence and of_controller else ""
        yield _pause(self.stroke.duration)
        yield from self._switch_back()
        yield from self._controller_back()

    def _worker_kill(self) -> Iterator[Wait]:
        victim = self.crew[self.stroke.victim]
        self.crew.signal(victim.rank, signal.SIGKILL)
        yield Wait(lambda: victim.process.exitcode is not None, 5.0, "the worker did not die")
        if victim.process.exitcode == -signal.SIGKILL:
            self.evidence = f"pid {victim.pid} was killed"

    def _worker_stop_short(self) -> Iterator[Wait]:
        victim = self.crew[self.stroke.victim]
        self.crew.signal(victim.rank, signal.SIGSTOP)
        yield Wait(lambda: victim.state() == "T", 5.0, "the worker did not stop")
        if victim.state() == "T":
            self.evidence = f"pid {victim.pid} was stopped"
        yield _pause(self.stroke.duration)
        self.crew.signal(victim.rank, signal.SIGCONT)

    _worker_stop_long = _worker_stop_short

    def _link_cut_short(self) -> Iterator[Wait]:
        yield from self._disturb(Disturb(CUT, self.stroke.duration), self.stroke.victim)

    _link_cut_long = _link_cut_short

    def _loss_burst(self) -> Iterator[Wait]:
        yield from self._disturb(
            Disturb(self.stroke.rates, self.stroke.duration), *(member.rank for member in self.crew)
        )

    def _cut_off_short(self) -> Iterator[Wait]:
        assert self.relay is not None, "the run must give the victim a relay"
        self.relay.silence()
        yield from self._disturb(Disturb(CUT, self.stroke.duration), self.stroke.victim)
        if not self.relay.held:
            self.evidence = ""
            self.missing.append("nothing was held back on the way to the controller")
        self.relay.resume()

    _cut_off_long = _cut_off_short

    def _drain(self) -> Iterator[Wait]:
        observer = self.arena.observer
        yield from self._call(lambda: observer.drain())
        yield Wait(lambda: self._path() == pb.PATH_RING, _PATH_SECONDS, "the job did not leave the switch")
        left = self._path() == pb.PATH_RING
        yield from self._call(lambda: self._note_drained(left))
        yield _pause(self.stroke.duration)
        yield from self._call(lambda: observer.drain(undrain=True))

    def _note_drained(self, left: bool) -> None:
        if self.arena.observer.status().switch.drained and left:
            self.evidence = "the switch is drained and the job has left it"

    def _mode_ring(self) -> Iterator[Wait]:
        observer = self.arena.observer
        yield from self._call(lambda: observer.set_mode(self.job, "off"))
        yield Wait(lambda: self._path() == pb.PATH_RING, _PATH_SECONDS, "the job did not go to the ring path")
        if self._path() == pb.PATH_RING:
            self.evidence = "the job is on the ring path"
        yield _pause(self.stroke.duration)
        yield from self._call(self._leave_ring)

    def _leave_ring(self) -> None:
        try:
            self.arena.observer.set_mode(self.job, "auto")
        except grpc.RpcError as error:
            # A job that has ended in the meantime, well or not, has no mode any more.
            over = error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND)
            if not (over and any(member.settled for member in self.crew)):
                raise

    # What they share.

    def _end_switch(self, number: signal.Signals) -> Iterator[Wait]:
        switch = self.arena.switch
        switch.send(number)
        yield Wait(lambda: not switch.alive, 10.0, "the switch did not end")
        if not switch.alive and (number != signal.SIGKILL or switch.ended_by == -number):
            self.evidence = f"pid {switch.pid} ended with {switch.ended_by}"

    def _end_controller(self) -> Iterator[Wait]:
        controller = self.arena.controller
        controller.send(signal.SIGKILL)
        yield Wait(lambda: not controller.alive, 5.0, "the controller did not die")
        if controller.ended_by == -signal.SIGKILL:
            self.evidence = f"pid {controller.pid} was killed"

    def _controller_back(self) -> Iterator[Wait]:
        if self.arena.controller.alive:
            return
        self.arena.start_controller()
        yield Wait(self.arena.controller_ready, 30.0, "the controller did not come back")
        self.ended = time.monotonic()

    def _switch_back(self) -> Iterator[Wait]:
        switch, before = self.arena.switch, self.arena.switch.pid
        if switch.alive:
            return
        self.arena.start_switch()
        yield Wait(self.arena.switch_ready, 30.0, "the switch did not come back")
        self.ended = time.monotonic()
        if switch.pid == before:
            self.evidence = ""

    def _disturb(self, order: Disturb, *ranks: int) -> Iterator[Wait]:
        members = [self.crew[rank] for rank in ranks]
        self.crew.tell(order, *ranks)
        limit = order.seconds + 10.0
        yield Wait(lambda: all(one.mended or one.gone for one in members), limit, "the disturbance did not end")
        # A worker that another fault has killed cannot say.
        lost = [one.mended.lost for one in members if one.mended is not None]
        if lost and all(lost):
            self.evidence = f"{sum(lost)} frames lost"

    def _call(self, action: Callable[[], object]) -> Iterator[Wait]:
        """Ask the controller for something; it may be away for a while."""
        answers: list[object] = []

        def done() -> bool:
            try:
                answers.append(action())
            except grpc.RpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    self.missing.append(f"refused: {error.code()}: {error.details()}")
                    answers.append(None)
            return bool(answers)

        yield Wait(done, _AWAY_SECONDS, "the controller did not answer")

    def _path(self) -> int:
        status = self.watch()
        return status.path if status is not None else pb.PATH_UNSPECIFIED


def _pause(seconds: float) -> Wait:
    return Wait(lambda: False, seconds, "")
