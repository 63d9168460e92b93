# SPDX-License-Identifier: Apache-2.0
"""The admission logic under test: a clock, and a switch whose work is done when the test says so."""

from __future__ import annotations

import itertools
import json
from collections import deque
from typing import Any

from p4reduce_controller.admission import Applicant, Code
from p4reduce_controller.hosts import Host, synthetic_mac
from p4reduce_controller.jobs import Jobs
from p4reduce_controller.model import (
    Action,
    Answer,
    Close,
    Fence,
    Forget,
    Grant,
    Install,
    LeaveDone,
    Order,
    Persist,
    Refuse,
    Register,
    Remove,
    Report,
    Revoke,
    TellFence,
    TellLeft,
    TellOrder,
    TellPolicy,
    TellReport,
)
from p4reduce_controller.pools import Pools
from p4reduce_controller.store import End

HOSTS = [Host(f"h{n}", f"10.0.0.{n}", synthetic_mac(f"10.0.0.{n}"), n) for n in range(1, 9)]
LEASE = 10.0


class JobsRig:
    """Jobs, a clock, and a switch whose work is done when `switch` is called."""

    def __init__(self, pool_slots: int = 64, *, secret: bool = False, slots: int = 1024) -> None:
        """With `secret`, workers get credentials: their number, 16 times."""
        self.epochs = iter(range(100, 1000000)).__next__
        self.secrets = itertools.count(1)
        self.credential = (lambda: bytes([next(self.secrets) % 256]) * 16) if secret else bytes
        self.sizes = (pool_slots, slots)
        self.jobs = self.controller()
        self.now = 0.0
        self.numbers = itertools.count(1)
        self.work: deque[Install | Revoke | Remove] = deque()
        self.log: list[Action] = []
        self.disk: dict[str, dict[str, Any]] = {}
        self.ends: list[dict[str, Any]] = []
        """How jobs ended, on disk, oldest first."""

    def controller(self) -> Jobs:
        return Jobs(Pools(*self.sizes), self.epochs, LEASE, credential=self.credential)

    def note(self, actions: list[Action]) -> list[Action]:
        self.log += actions
        for action in actions:
            if isinstance(action, Persist):
                self.disk[action.name] = action.record
            elif isinstance(action, Forget):
                self.disk.pop(action.name, None)
                if action.end is not None:
                    self.ends.append(action.end)
        self.work += [action for action in actions if isinstance(action, Install | Revoke | Remove)]
        return actions

    def join(
        self,
        rank: int,
        world: int = 2,
        job: str = "train",
        incarnation: int = 0,
        wait: float = 30.0,
        port: int = 0,
        **more: Any,
    ) -> int:
        """`more`: fields of Applicant beyond those that every join has."""
        number = next(self.numbers)
        host = HOSTS[rank % 8]
        applicant = Applicant(job, world, rank, incarnation, host, port or 4000 + rank, 1000, wait, **more)
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

    def start(self, world: int = 2, job: str = "train", incarnation: int = 0, **more: Any) -> tuple[int, list[int]]:
        """Bring a job to run; its membership and its streams."""
        for rank in range(world):
            self.join(rank, world, job, incarnation, **more)
        self.switch()
        epoch = self.record(job).run.epoch
        return epoch, [self.open(epoch, rank, job) for rank in range(world)]

    def open(self, epoch: int, rank: int, job: str = "train", credential: bytes = b"") -> int:
        number = next(self.numbers)
        self.note(self.jobs.report(number, Report(job, epoch, rank, credential=credential), self.now))
        return number

    def report(self, stream: int, submitted: int = 0, completed: int = 0, **more: Any) -> list[Action]:
        """A report of the stream's rank, which carries out the job's present epoch."""
        job, epoch, rank = self.jobs._streams[stream]
        present = next((r.run.present for r in self.jobs.jobs() if r.name == job and r.run is not None), 0)
        report = Report(job, epoch, rank, submitted, completed, **({"present": present} | more))
        return self.note(self.jobs.report(stream, report, self.now))

    def answer_all(self, streams: list[int], *buckets: int, **more: Any) -> list[Action]:
        """Every rank answers its job's current order."""
        done: list[Action] = []
        name = self.jobs._streams[streams[0]][0]
        number = self.record(name).run.order.number
        for stream, bucket in zip(streams, buckets or (0,) * len(streams), strict=True):
            worker = self.record(name).run.workers[self.jobs._streams[stream][2]]
            done += self.report(stream, worker.submitted, worker.completed, answer=Answer(number, bucket, **more))
        return done

    def orders(self, stream: int) -> list[Order]:
        return [action.order for action in self.log if isinstance(action, TellOrder) and action.stream == stream]

    def saved(self, job: str = "train") -> dict[str, Any] | None:
        """The job's record on disk."""
        return self.disk.get(job)

    def restart(self, drained: bool = False) -> None:
        """A new controller on what the old one has on disk; no stream, call or order to the switch survives."""
        self.work.clear()
        self.jobs = self.controller()
        if drained:
            self.note(self.jobs.drain(self.now))
        ends = [End(end, 0.0, end["job"] not in self.disk) for end in json.loads(json.dumps(self.ends))]
        self.note(self.jobs.restore(json.loads(json.dumps(list(self.disk.values()))), None, self.now, ends))

    def leave(self, epoch: int, rank: int, job: str = "train", **more: Any) -> int:
        number = next(self.numbers)
        self.note(self.jobs.leave(job, epoch, rank, number, self.now, **more))
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
        kinds = Register | TellFence | TellLeft | TellOrder | TellReport | TellPolicy | Close
        found = [a for a in self.log if isinstance(a, kinds) and a.stream == stream]
        return found + [a for a in self.log if isinstance(a, Refuse) and a.ticket == stream]

    def fences(self, stream: int) -> list[Fence]:
        return [action.fence for action in self.told(stream) if isinstance(action, TellFence)]

    def all_free(self) -> bool:
        return not any(pool.job for pool in self.jobs.pools())
