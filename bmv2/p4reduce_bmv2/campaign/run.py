# SPDX-License-Identifier: Apache-2.0
"""One run: a job of the arena's size, and at most one fault."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path

import grpc

from p4reduce.proto import controller_pb2 as pb
from p4reduce_bmv2.campaign.arena import Arena
from p4reduce_bmv2.campaign.crew import Crew
from p4reduce_bmv2.campaign.inject import Injection
from p4reduce_bmv2.campaign.messages import Pace, Release, Training, Trigger
from p4reduce_bmv2.campaign.outcome import HUNG, NAMED, Outcome, judge
from p4reduce_bmv2.campaign.plan import Expect, Plan
from p4reduce_bmv2.campaign.relay import Relay

_TICK = 0.02
_STATUS_SECONDS = 0.1
"""Between two looks at the job's status."""
_STATUS_TIMEOUT = 0.5
_LEAK_SECONDS = 10.0
"""Pools and entries of a job that has ended must be gone within this time."""
_REST_SECONDS = 60.0
_PATHS = {pb.PATH_SWITCH: "switch", pb.PATH_RING: "ring", pb.PATH_UNSPECIFIED: ""}


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds."""

    run: float = 60.0
    """From the start of the workers to the end of the last; then it counts as hung."""
    named: float = 5.0
    """From a worker's death to the last survivor's error; a lease more where nothing but silence tells of it."""
    settle: float = 12.0
    """How long the held job waits for its return to the switch path once the cause is gone."""
    pace: float = 0.03
    """Sleep after every step once the fault has struck, so that the job is still busy when it changes paths."""


class Run:
    """Call `execute` once."""

    def __init__(
        self, arena: Arena, context: ForkServerContext, training: Training, plan: Plan | None,
        reference: Sequence[str] | None, folder: Path, limits: Limits | None = None, number: int = 0,
    ) -> None:  # fmt: skip
        """`folder`: for the workers' logs and what belongs to this run alone."""
        self._arena = arena
        self._context = context
        self._training = training
        self._plan = plan
        self._reference = reference
        self._folder = folder
        self._limits = limits or Limits()
        self._job = f"campaign-{number}-{time.monotonic_ns() // 1_000_000}"
        self._began = 0.0
        self._status: pb.JobStatus | None = None
        self._looked = 0.0
        self._timeline: list[str] = []
        self._left_switch = False
        self._returned: float | None = None
        self._joined = False
        self._released = False
        self._paced = False
        self._held = 0.0
        self._stuck = False
        self._injections: list[Injection] = []
        self.digests: list[str] = []
        self.held: list[str] = []
        """What the job was seen to hold at controller and switch while it ran, in an undisturbed run."""

    def execute(self) -> Outcome:
        """Run it, end everything that is left of it, and judge."""
        plan = self._plan
        self._folder.mkdir(parents=True, exist_ok=True)
        self._began = time.monotonic()
        with ExitStack() as undo:
            relays = self._relays(undo)
            places = [
                self._arena.place(
                    rank, self._job, self._folder / "rendezvous", self._folder / f"rank{rank}.log", relays.get(rank)
                )
                for rank in range(self._arena.workers)
            ]
            trigger = Trigger(plan.witness, plan.step, plan.bucket) if plan is not None else None
            crew = undo.enter_context(Crew(self._context, self._training, places, trigger))
            self._note("workers started")
            self._injections = [
                Injection(self._arena, crew, stroke, self._job, lambda: self._status, relays.get(stroke.victim))
                for stroke in (plan.strokes if plan is not None else ())
            ]
            self._drive(crew)
            return self._conclude(crew)

    def _relays(self, undo: ExitStack) -> dict[int, Relay]:
        """Ways to the controller for the ranks that will lose it."""
        relays = {}
        for stroke in self._plan.strokes if self._plan is not None else ():
            if stroke.fault.name.startswith("cut_off"):
                relays[stroke.victim] = self._arena.relay()
                undo.callback(relays[stroke.victim].close)
        return relays

    # While it runs.

    def _drive(self, crew: Crew) -> None:
        limit = self._began + self._limits.run
        while not all(member.gone for member in crew) and time.monotonic() < limit:
            crew.poll(_TICK)
            now = time.monotonic()
            if not self._joined and all(member.ready for member in crew):
                self._joined = True
                self._note("training begins")
                if self._plan is None:
                    self.held = self._arena.observer.leaks()
            if self._plan is not None:
                self._inject(crew, self._plan, now)
            self._look(crew, now)
            self._guide(crew)

    def _inject(self, crew: Crew, plan: Plan, now: float) -> None:
        reached = crew[plan.witness].reached
        if reached is None:
            return
        for injection in self._injections:
            due = reached + plan.delay + injection.stroke.after
            if injection.finished or now < due - _TICK:
                continue
            if injection.started is None:
                time.sleep(max(0.0, due - time.monotonic()))
                self._note(f"fault: {injection.stroke.describe()}")
            if injection.advance(time.monotonic()):
                self._note(f"{injection.stroke.fault.name} is over: {injection.evidence or 'it left no trace'}")

    def _guide(self, crew: Crew) -> None:
        """Pace the job and release the held step when there is nothing more to see."""
        struck = any(one.started is not None for one in self._injections)
        busy = len(self._injections) == 1 and self._injections[0].hungry
        if struck and not busy and not self._paced:
            # A fault that needs frames is not slowed down before it had some.
            self._paced = True
            crew.tell(Pace(self._limits.pace))
        if self._released or not self._may_end(crew, time.monotonic()):
            return
        self._released = True
        if not any(one.hungry for one in self._injections):
            crew.tell(Pace(0.0))
        crew.tell(Release())

    def _may_end(self, crew: Crew, now: float) -> bool:
        plan = self._plan
        if plan is None or plan.step >= self._training.hold:
            return True
        if plan.lost is not None:
            return all(one.started is not None for one in self._injections)
        held = all(len(member.digests) >= self._training.hold for member in crew)
        if not all(one.finished for one in self._injections):
            # A fault that waits for frames waits for steps.
            return held and any(one.hungry for one in self._injections)
        if any(member.broken is not None for member in crew):
            return True
        if not held:
            return False
        self._held = self._held or now
        ended = self._ended()
        on_switch = self._status is not None and self._status.path == pb.PATH_SWITCH and self._status.state == "switch"
        # What went wrong in the fault's last moment may take a while to show.
        settled = on_switch and self._looked > ended + _STATUS_SECONDS and now > ended + 1.0
        self._stuck = not settled and now > max(self._held, ended) + self._limits.settle
        return settled or self._stuck

    def _ended(self) -> float:
        """When the last cause was gone."""
        return max((one.ended or 0.0 for one in self._injections), default=0.0)

    def _look(self, crew: Crew, now: float) -> None:
        """Follow the job's status, as far as the controller is there to tell."""
        if now < self._looked + _STATUS_SECONDS or not self._arena.controller.alive:
            return
        if not self._arena.controller_ready() or not any(member.ready for member in crew):
            return
        try:
            status = self._arena.observer.job(self._job, _STATUS_TIMEOUT)
        except grpc.RpcError as error:
            self._note(f"no status: {error.code()}")
            self._looked = time.monotonic()
            return
        self._looked = time.monotonic()
        if status is None:
            return
        before = self._status
        self._status = status
        if before is None or (before.state, before.path) != (status.state, status.path):
            reason = status.path_reason or status.reason
            self._note(f"state {status.state}, path {_PATHS.get(status.path, '?')}, {reason}")
        if status.path == pb.PATH_RING:
            self._left_switch, self._returned = True, None
        elif status.path == pb.PATH_SWITCH and status.state == "switch" and self._left_switch:
            self._returned = self._returned or self._looked

    def _note(self, text: str) -> None:
        self._timeline.append(f"{time.monotonic() - self._began:7.3f} s  {text}")

    # Afterwards.

    def _conclude(self, crew: Crew) -> Outcome:
        plan = self._plan
        running = [member for member in crew if not member.gone]
        verdict, problems = judge(plan, crew.members, self._reference, self._training.steps)
        if running:
            crew.dump_stacks()
            late = [member.rank for member in running if member.settled]
            if late:
                verdict = HUNG
                problems.append(f"ranks {late} had their outcome but did not end")
        crew.kill()
        self.digests = list(crew[0].digests)
        for injection in self._injections:
            problems += self._finish_fault(injection) + injection.missing
        outcome = Outcome(
            run=plan.run if plan is not None else -1,
            fault=plan.fault.name if plan is not None else "none",
            verdict=verdict,
            fired=all(one.evidence for one in self._injections),
            moment=plan.describe() if plan is not None else "",
            evidence="; ".join(one.evidence for one in self._injections),
            problems=problems,
            path=_PATHS.get(self._status.path, "?") if self._status is not None else "",
            fallbacks=sum(self._status.fallbacks.values()) if self._status is not None else 0,
        )
        if self._injections and self._injections[-1].started is not None:
            self._times(outcome, crew)
        if self._stuck:
            problems.append(f"not on the switch path {self._limits.settle:g} s after the cause was gone")
        outcome.leaks = self._leaks()
        outcome.seconds = round(time.monotonic() - self._began, 3)
        outcome.timeline = self._timeline
        return outcome

    def _times(self, outcome: Outcome, crew: Crew) -> None:
        if outcome.verdict == NAMED:
            fatal = next(one for one in self._injections if one.stroke.fault.expect is Expect.NAMED)
            survivors = [member for member in crew if member.rank != fatal.stroke.victim]
            told = max(member.broken.time for member in survivors if member.broken)
            outcome.named = round(told - (fatal.started or 0.0), 3)
            # A broken connection tells at once, silence after a lease; while the controller is away nobody can be told.
            allowed = max(0.0, self._ended() - (fatal.started or 0.0)) + self._limits.named + self._arena.lease
            if self._injections == [fatal] and fatal.stroke.fault.name == "worker_kill":
                allowed = self._limits.named
            if outcome.named > allowed:
                outcome.problems.append(f"the last survivor was told after {outcome.named:.1f} s, not {allowed:g} s")
            return
        # The first step that every rank began after the fault.
        started = self._injections[-1].started or 0.0
        first = max(sum(time <= started for time in member.step_times) for member in crew) + 1
        if all(len(member.step_times) > first for member in crew):
            outcome.resumed = round(max(member.step_times[first] for member in crew) - started, 3)
        if self._returned is not None and outcome.path == "switch":
            outcome.returned = round(max(0.0, self._returned - self._ended()), 3)

    def _finish_fault(self, injection: Injection) -> list[str]:
        """Bring the arena back to rest where the run ended before the fault did."""
        limit = time.monotonic() + injection.stroke.duration + _REST_SECONDS
        while injection.started is not None and not injection.finished and time.monotonic() < limit:
            injection.advance(time.monotonic())
            time.sleep(_TICK)
        return [] if injection.started is None or injection.finished else ["the fault could not be ended"]

    def _leaks(self) -> list[str]:
        """What the job left behind at controller and switch once everything had time to go."""
        limit = time.monotonic() + _LEAK_SECONDS
        while left := self._arena.observer.leaks():
            if time.monotonic() > limit:
                return left
            time.sleep(_TICK)
        return []

    def forget(self) -> None:
        """Remove the run's logs."""
        shutil.rmtree(self._folder, ignore_errors=True)
