# SPDX-License-Identifier: Apache-2.0
"""Breadth-first search through all that can happen, so that the first fault found has the shortest history.

A state is: the phase, the switch's registers, every worker's state, and which answers have ever been sent to whom.

- The network is the strongest there is. A contribution, once sent, may arrive at any time, any number of times, in any
  order, or never; so may every answer. Nothing is ever taken out of the network, so a state needs no counts of copies
  in flight, and the search is complete for every number of copies. Loss is a frame that is not delivered any more,
  reordering any order of deliveries. Sending again adds nothing: the frame is there already (workers.py checks that).
- A core sends as soon as it may. A driver that lets it send later does what a slow network does.
- The epoch may end at any moment (the controller revokes its entries); the switch may be restarted then, which
  zeroes its registers; the new epoch is admitted at any later moment, and every worker enters it when it likes.

What is left out, and why it cannot matter:

- The nack of an epoch that is over is delivered with the contribution that provokes it, or not at all. It is never
  kept in the network: epochs do not come back, so the same contribution provokes it again at any later time. (A
  restarted switch that has not been told its ports drops the contribution, which is a loss.)
- Frames of the first epoch that were sent by or to a worker which has entered the second one are forgotten. At the end
  all of them are run against all registers and all states of that worker that were reached: they change nothing.

**Safety** is judged twice: no result leaves the switch that is not the exact sum of every rank's contribution once,
and no core accepts another one. **Liveness under fairness**: from every state, when frames are lost no more, the
workers' own resends and the answers to them complete the run; no frame that was in flight before is used for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from p4reduce.sim.modelcheck.batches import check_batches, check_forgotten
from p4reduce.sim.modelcheck.bounds import Bounds
from p4reduce.sim.modelcheck.frames import NAMES, Frames
from p4reduce.sim.modelcheck.switches import Switches, SwitchState
from p4reduce.sim.modelcheck.violation import STUCK, UNSOUND, Violation
from p4reduce.sim.modelcheck.workers import TIMERS, Workers

Node = tuple[int, int, tuple[int, ...], int]
"""Phase, number of the registers, number of every worker's state, bit mask of the answers sent."""
Action = tuple[str, int, int]
"""What happens, to which rank, with which frame."""

RUNNING, REVOKED, RENEWED = range(3)
_REPORT_EVERY = 20_000


@dataclass(slots=True)
class Report:
    """What a search has covered, and what it has found."""

    bounds: Bounds
    states: int = 0
    unfolded: int = 0
    """States that these stand for when ranks are exchanged, in a search through classes of states."""
    transitions: int = 0
    """Steps that lead to another state."""
    depth: int = 0
    """Steps to the state that is farthest away."""
    registers: int = 0
    """Different contents of the switch's registers."""
    switch_steps: int = 0
    """Frames that the switch itself has run."""
    worker_states: int = 0
    """States of all ranks' cores."""
    worker_steps: int = 0
    """Frames that real cores have been given."""
    drained: int = 0
    """States from which the run was shown to complete."""
    forgotten: int = 0
    """Frames of a dead epoch that were run to show that they change nothing."""
    batches: int = 0
    """Pairs of frames given to a core at once, with the same outcome as one after the other."""
    complete: bool = False
    """The search has come to its end."""
    violation: str = ""
    kind: str = ""
    trace: list[str] = field(default_factory=list)
    """What happened, shortest first; for a run that cannot complete also what was tried to complete it."""
    steps: int = 0
    """Steps of the trace until nothing could save the run."""
    seconds: float = 0.0
    """Processor time."""


class Checker:
    """One search. `make` returns a fresh switch each time it is called.

    With `judge` a wrong result is found as it leaves the switch. Without, the switch may do what it likes, and all
    that is asked is that no core accepts a wrong result. `batches`: also give cores two frames at once. Raises nothing
    for what it finds: run() reports it.
    """

    def __init__(
        self,
        bounds: Bounds,
        make: Callable[[], SwitchState],
        *,
        judge: bool = True,
        batches: bool = True,
        limit: int = 20_000_000,
        progress: Callable[[Report], None] | None = None,
    ) -> None:
        self.bounds = bounds
        self.report = Report(bounds)
        self._judge = judge
        self._batches = batches
        self._limit = limit
        self._progress = progress
        self.frames = Frames(bounds)
        self._switches = Switches(bounds, make, self.frames, judge)
        self._workers = Workers(bounds, self.frames, judge)
        self._nodes: list[Node] = []
        self._found: dict[Node, int] = {}
        self._parents: list[tuple[int, Action]] = []
        self._good: set[Node] = set()
        self._ups: dict[tuple[int, int, int, int], list[tuple[Action, int, int, int]]] = {}
        self._downs: dict[tuple[int, int, int], list[tuple[Action, int]]] = {}
        self._addressed = [0] * bounds.workers
        self._first_epoch = 0
        self._sorted = 0

    def run(self) -> Report:
        """Search until everything has been seen, a fault is found, or the limit of states is reached."""
        begin = time.process_time()
        report = self.report
        here: int = -1
        action: Action = ("start", 0, 0)
        try:
            workers = tuple(self._workers.start(rank, 0) for rank in range(self.bounds.workers))
            self._add((RUNNING, 0, workers, 0), -1, action)
            here = 0
            while here < len(self._nodes) < self._limit:
                self._visit(here, begin)
                here += 1
            report.complete = here == len(self._nodes)
            if report.complete and self._judge:
                self._drain_all()
                self._check_forgotten()
                if self._batches:
                    report.batches = check_batches(self._workers, self.frames)
                self._switches.check_stray()
        except _Fault as fault:
            self._explain(fault.violation, fault.node, fault.action, fault.after)
        except Violation as violation:
            self._explain(violation, None, None, [])
        self._count()
        report.seconds = time.process_time() - begin
        return report

    # Exploration -----------------------------------------------------------------------------------------------

    def _visit(self, here: int, begin: float) -> None:
        for action, node in self._successors(self._nodes[here]):
            self.report.transitions += 1
            if node not in self._found:
                self._add(node, here, action)
        if here % _REPORT_EVERY == 0 and self._progress is not None:
            self._count()
            self.report.seconds = time.process_time() - begin
            self._progress(self.report)

    def _add(self, node: Node, parent: int, action: Action) -> None:
        self._found[node] = len(self._nodes)
        self._nodes.append(node)
        self._parents.append((parent, action))

    def _successors(self, node: Node) -> Iterator[tuple[Action, Node]]:
        phase, registers, workers, sent = node
        for rank, state in enumerate(workers):
            for action, after, answers, worker in self._up(node, phase, registers, rank, state):
                if after != registers or worker != state or answers & ~sent:
                    yield action, (phase, after, _put(workers, rank, worker), sent | answers)
            for action, worker in self._down(node, rank, state, sent & self._mask(rank)):
                yield action, (phase, registers, _put(workers, rank, worker), sent)
        if self.bounds.amnesia and registers:
            yield ("forget", 0, 0), (phase, 0, workers, sent)
        if self.bounds.change:
            yield from self._changes(node)

    def _up(self, node: Node, phase: int, registers: int, rank: int, state: int) -> list[tuple[Action, int, int, int]]:
        """What the contributions of a rank do: (action, registers after, answers, the rank's state after)."""
        key = (phase, registers, rank, state)
        found = self._ups.get(key)
        if found is not None:
            return found
        found = []
        known = self._workers.states[rank][state]
        for frame in known.sent:
            action: Action = ("up", rank, frame)
            with _Watch(node, action):
                step = self._switches.step(phase, registers, frame)
                if step.refused:
                    worker = self._workers.step(rank, state, step.answers[0])
                    if worker != state:
                        found.append((("refused", rank, frame), registers, 0, worker))
                elif step.after != registers or step.answers:
                    found.append((action, step.after, _bits(step.answers), state))
        if known.waits:
            with _Watch(node, ("timers", rank, 0)):
                worker = self._workers.step(rank, state, TIMERS)
            if worker != state:
                found.append((("timers", rank, 0), registers, 0, worker))
        self._ups[key] = found
        return found

    def _down(self, node: Node, rank: int, state: int, sent: int) -> list[tuple[Action, int]]:
        """What the answers ever sent to a rank do: (action, the rank's state after); those without effect left out."""
        key = (rank, state, sent)
        found = self._downs.get(key)
        if found is not None:
            return found
        found = []
        for frame in _places(sent):
            action: Action = ("down", rank, frame)
            with _Watch(node, action):
                worker = self._workers.step(rank, state, frame)
            if worker != state:
                found.append((action, worker))
        self._downs[key] = found
        return found

    def _changes(self, node: Node) -> Iterator[tuple[Action, Node]]:
        phase, registers, workers, sent = node
        if phase == RUNNING:
            yield ("revoke", 0, 0), (REVOKED, registers, workers, sent)
        elif phase == REVOKED:
            if registers:
                yield ("restart", 0, 0), (REVOKED, 0, workers, sent)
            yield ("renew", 0, 0), (RENEWED, registers, workers, sent)
        else:
            for rank, state in enumerate(workers):
                if self._workers.states[rank][state].epoch == 0:
                    yield ("enter", rank, 0), self._enter(node, rank)

    def _enter(self, node: Node, rank: int) -> Node:
        phase, registers, workers, sent = node
        with _Watch(node, ("enter", rank, 0)):
            worker = self._workers.start(rank, 1)
        old = self._mask(rank) & self._first_epoch
        return phase, registers, _put(workers, rank, worker), sent & ~old

    def _mask(self, rank: int) -> int:
        """The bits of all answers addressed to a rank."""
        while self._sorted < len(self.frames.down):
            frame, bit = self.frames.down[self._sorted], 1 << self._sorted
            self._addressed[frame.rank] |= bit
            if self.frames.epoch_of(frame) == 0:
                self._first_epoch |= bit
            self._sorted += 1
        return self._addressed[rank]

    # Liveness --------------------------------------------------------------------------------------------------

    def _drain_all(self) -> None:
        if self.bounds.amnesia:
            return
        for node in self._nodes:
            self._drain(node)
            self.report.drained += 1

    def _drain(self, begin: Node) -> None:
        """Follow the run from a state to its end, frames being lost no more, or to a state known to lead there.

        The first state of the search from which that fails has the shortest history of all such states.
        """
        path: dict[Node, str] = {}
        node = begin
        while node not in self._good:
            said, following = self._onward(node)
            path[node] = said
            if following is None and not said:
                break
            if following is None or following in path:
                raise _Fault(Violation(STUCK, self._waiting(node)), begin, None, list(path.values()))
            if following not in self._found:
                raise Violation(UNSOUND, "the way to completion leaves the states that were found")
            node = following
        self._good.update(path)

    def _onward(self, node: Node) -> tuple[str, Node | None]:
        """What happens next when nothing is lost, and the state after: none when the run is over or cannot go on.

        The text is empty when it is over.
        """
        phase, registers, workers, sent = node
        states = [self._workers.states[rank][state] for rank, state in enumerate(workers)]
        if phase == REVOKED:
            return self._say(("renew", 0, 0)), (RENEWED, registers, workers, sent)
        if phase == RENEWED:
            for state in states:
                if state.epoch == 0:
                    return self._say(("enter", state.rank, 0)), self._enter(node, state.rank)
        if all(state.done for state in states):
            return "", None
        if self.bounds.disagree and any(state.error for state in states):
            return "", None
        for state in states:
            for frame in state.resent:
                following = self._answer(node, frame)
                if following[1:3] != node[1:3]:
                    return f"{self.frames.name(self.frames.up[frame])} is sent again; what it brings arrives", following
        return "all resends change nothing", None

    def _waiting(self, node: Node) -> str:
        waiting = [rank for rank, state in enumerate(node[2]) if not self._workers.states[rank][state].done]
        return f"nothing is lost any more, and {' and '.join(NAMES[rank] for rank in waiting)} never complete"

    def _answer(self, node: Node, frame: int) -> Node:
        """A resend arrives, and the answers to it."""
        phase, registers, workers, sent = node
        with _Watch(node, ("up", self.frames.up[frame].rank, frame)):
            step = self._switches.step(phase, registers, frame)
        for answer in step.answers:
            rank = self.frames.down[answer].rank
            with _Watch(node, ("down", rank, answer)):
                workers = _put(workers, rank, self._workers.step(rank, workers[rank], answer))
        return phase, step.after, workers, sent | _bits(step.answers)

    # What was left out -----------------------------------------------------------------------------------------

    def _check_forgotten(self) -> None:
        """Frames of the first epoch change nothing in the second one, whoever they come from or go to."""
        if not self.bounds.change:
            return
        old = [number for number, frame in enumerate(self.frames.up) if self.frames.epoch_of(frame) == 0]
        for phase, registers in {(node[0], node[1]) for node in self._nodes if node[0] != RUNNING}:
            for frame in old:
                self.report.forgotten += 1
                if not self._switches.step(phase, registers, frame).refused:
                    raise Violation(UNSOUND, f"{self.frames.name(self.frames.up[frame])} is not refused")
        self.report.forgotten += check_forgotten(self._workers, self.frames)

    # Reporting -------------------------------------------------------------------------------------------------

    def _count(self) -> None:
        report = self.report
        report.states = len(self._nodes)
        report.registers = len(self._switches.saved)
        report.switch_steps = self._switches.executed
        report.worker_states = sum(map(len, self._workers.states))
        report.worker_steps = self._workers.executed
        depth, place = 0, len(self._nodes) - 1
        while place > 0:
            place, depth = self._parents[place][0], depth + 1
        report.depth = depth

    def _explain(self, violation: Violation, node: Node | None, action: Action | None, after: list[str]) -> None:
        self.report.violation = str(violation)
        self.report.kind = violation.kind
        actions = [] if action is None else [action]
        place = 0 if node is None else self._found[node]
        while place > 0:
            place, taken = self._parents[place]
            actions.insert(0, taken)
        came: set[Action] = set()
        lines = []
        for one in actions:
            lines.append(self._say(one) + (" once more" if one in came else ""))
            came.add(one)
        lines += after
        self.report.trace = [f"{number}. {line}" for number, line in enumerate(lines, 1)]
        self.report.steps = len(actions)
        self.report.trace.append(f"=> {violation.kind}: {violation}")

    def _say(self, action: Action) -> str:
        what, rank, frame = action
        if what == "up":
            return f"{self.frames.name(self.frames.up[frame])} arrives at the switch"
        if what == "refused":
            return f"{self.frames.name(self.frames.up[frame])} is refused, and {NAMES[rank]} is told"
        if what == "down":
            return f"{self.frames.name(self.frames.down[frame])} arrives"
        return {
            "forget": "the switch forgets everything and goes on",
            "revoke": "the epoch is revoked",
            "restart": "the switch is restarted: all registers are 0",
            "renew": "the new epoch is admitted",
            "enter": f"{NAMES[rank]} enters the new epoch and sends",
            "timers": f"{NAMES[rank]}'s timers run out",
        }[what]


class _Fault(Exception):
    """A violation, where the search met it, and what was tried from there."""

    def __init__(self, violation: Violation, node: Node, action: Action | None, after: list[str] | None = None) -> None:
        super().__init__(str(violation))
        self.after = after or []
        self.violation = violation
        self.node = node
        self.action = action


class _Watch:
    """Adds to a violation in which state and step it happened."""

    def __init__(self, node: Node, action: Action) -> None:
        self._node = node
        self._action = action

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Violation):
            raise _Fault(error, self._node, self._action) from None


def _put(workers: tuple[int, ...], rank: int, state: int) -> tuple[int, ...]:
    return (*workers[:rank], state, *workers[rank + 1 :])


def _bits(numbers: tuple[int, ...]) -> int:
    mask = 0
    for number in numbers:
        mask |= 1 << number
    return mask


def _places(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
