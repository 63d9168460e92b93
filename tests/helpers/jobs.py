# SPDX-License-Identifier: Apache-2.0
"""The admission logic under test: a clock, and a switch whose work is done when the test says so."""

from __future__ import annotations

import itertools
from collections import deque

from p4reduce_controller.admission import Applicant, Code
from p4reduce_controller.hosts import Host, synthetic_mac
from p4reduce_controller.jobs import Jobs
from p4reduce_controller.model import (
    Action,
    Close,
    Fence,
    Grant,
    Install,
    LeaveDone,
    Refuse,
    Register,
    Remove,
    Report,
    Revoke,
    TellFence,
    TellLeft,
)
from p4reduce_controller.pools import Pools

HOSTS = [Host(f"h{n}", f"10.0.0.{n}", synthetic_mac(f"10.0.0.{n}"), n) for n in range(1, 9)]
LEASE = 10.0


class JobsRig:
    """Jobs, a clock, and a switch whose work is done when `switch` is called."""

    def __init__(self, pool_slots: int = 64) -> None:
        self.jobs = Jobs(Pools(pool_slots), iter(range(100, 100000)).__next__, LEASE)
        self.now = 0.0
        self.numbers = itertools.count(1)
        self.work: deque[Install | Revoke | Remove] = deque()
        self.log: list[Action] = []

    def note(self, actions: list[Action]) -> list[Action]:
        self.log += actions
        self.work += [action for action in actions if isinstance(action, Install | Revoke | Remove)]
        return actions

    def join(
        self, rank: int, world: int = 2, job: str = "train", incarnation: int = 0, wait: float = 30.0, port: int = 0
    ) -> int:
        number = next(self.numbers)
        applicant = Applicant(job, world, rank, incarnation, HOSTS[rank % 8], port or 4000 + rank, 1000, wait)
        self.note(self.jobs.join(applicant, number, self.now))
        return number

    def switch(self, error: str | None = None) -> None:
        """Let the switch do all it was asked to; `error`: fail at everything."""
        while self.work:
            work = self.work.popleft()
            number = work.plan.number
            if isinstance(work, Install):
                self.note(self.jobs.installed(number, error, self.now))
            elif isinstance(work, Revoke):
                self.note(self.jobs.revoked(number, error, self.now))
            else:
                self.note(self.jobs.removed(number, error, {"results": 1}, self.now))

    def start(self, world: int = 2, job: str = "train", incarnation: int = 0) -> tuple[int, list[int]]:
        """Bring a job to run; its epoch and its streams."""
        for rank in range(world):
            self.join(rank, world, job, incarnation)
        self.switch()
        epoch = self.record(job).run.plan.number  # type: ignore[union-attr]
        return epoch, [self.open(epoch, rank, job) for rank in range(world)]

    def open(self, epoch: int, rank: int, job: str = "train") -> int:
        number = next(self.numbers)
        self.note(self.jobs.report(number, Report(job, epoch, rank), self.now))
        return number

    def leave(self, epoch: int, rank: int, job: str = "train") -> int:
        number = next(self.numbers)
        self.note(self.jobs.leave(job, epoch, rank, number, self.now))
        return number

    def tick(self, now: float) -> None:
        self.now = now
        self.note(self.jobs.tick(now))

    def record(self, job: str = "train"):  # type: ignore[no-untyped-def]
        return next(record for record in self.jobs.jobs() if record.name == job)

    def answer(self, number: int) -> Action | None:
        answers = [a for a in self.log if isinstance(a, Grant | Refuse | LeaveDone) and a.ticket == number]
        assert len(answers) <= 1, answers
        return answers[0] if answers else None

    def refusal(self, number: int) -> tuple[Code, str]:
        answer = self.answer(number)
        assert isinstance(answer, Refuse), answer
        return answer.refusal.code, answer.refusal.message

    def told(self, stream: int) -> list[Action]:
        kinds = Register | TellFence | TellLeft | Close
        found = [a for a in self.log if isinstance(a, kinds) and a.stream == stream]
        return found + [a for a in self.log if isinstance(a, Refuse) and a.ticket == stream]

    def fences(self, stream: int) -> list[Fence]:
        return [action.fence for action in self.told(stream) if isinstance(action, TellFence)]

    def all_free(self) -> bool:
        return not any(pool.job for pool in self.jobs.pools())
