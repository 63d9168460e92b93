# SPDX-License-Identifier: Apache-2.0
"""A job's workers, seen from the campaign: processes of a fork server, and what they have said so far."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType

from p4reduce_bmv2.campaign.messages import (
    Broken,
    Closed,
    Disturbed,
    Done,
    Mended,
    Place,
    Reached,
    Ready,
    Step,
    Training,
    Trigger,
)

PRELOAD = ["torch", "torch._dynamo", "p4reduce.ddp", "p4reduce.session", "p4reduce_bmv2.campaign.worker"]
"""torch._dynamo: torch's optimizers import it when the first is made, which takes longer than a whole run."""
_STACKS_SECONDS = 1.0
_KILL_SECONDS = 10.0


def fork_server() -> ForkServerContext:
    """A context whose processes have torch and p4reduce loaded already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


@dataclass
class Member:
    """One rank."""

    rank: int
    process: BaseProcess
    channel: Connection
    digests: list[str] = field(default_factory=list)
    """After each step that it has completed."""
    step_times: list[float] = field(default_factory=list)
    ready: bool = False
    reached: float | None = None
    disturbed: float | None = None
    mended: Mended | None = None
    done: Done | None = None
    broken: Broken | None = None
    closed: Closed | None = None
    open: bool = True
    """The pipe may still bring something."""

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid or 0

    @property
    def gone(self) -> bool:
        """The process has ended and has no more to say."""
        return not self.open and self.process.exitcode is not None

    @property
    def settled(self) -> bool:
        """It has come to an end, good or bad."""
        return self.done is not None or self.broken is not None or self.process.exitcode is not None

    def take(self, message: object) -> None:
        """Note a message."""
        if isinstance(message, Step):
            self.digests.append(message.digest)
            self.step_times.append(message.time)
        elif isinstance(message, Ready):
            self.ready = True
        elif isinstance(message, Reached):
            self.reached = message.time
        elif isinstance(message, Disturbed):
            self.disturbed = message.time
        elif isinstance(message, Mended):
            self.mended = message
        elif isinstance(message, Done):
            self.done = message
        elif isinstance(message, Broken):
            self.broken = self.broken or message
        elif isinstance(message, Closed):
            self.closed = message

    def state(self) -> str:
        """The kernel's letter for it (proc(5)): T is stopped, "" is gone."""
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return ""
        return text[text.rindex(")") + 2]


class Crew:
    """All ranks of one job. A context manager that leaves no process."""

    def __init__(
        self, context: ForkServerContext, training: Training, places: Sequence[Place], trigger: Trigger | None
    ) -> None:
        from p4reduce_bmv2.campaign import worker

        self.members: list[Member] = []
        for place in places:
            here, there = context.Pipe()
            process = context.Process(
                target=worker.main, args=(there, training, place, trigger), name=f"rank{place.rank}", daemon=True
            )
            process.start()
            there.close()
            self.members.append(Member(place.rank, process, here))

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members)

    def __getitem__(self, rank: int) -> Member:
        return self.members[rank]

    def poll(self, seconds: float) -> None:
        """Take in what the workers have said; wait for it at most so long."""
        channels = {member.channel: member for member in self.members if member.open}
        if not channels:
            sentinels = [member.process.sentinel for member in self.members if member.process.exitcode is None]
            wait(sentinels, seconds) if sentinels else time.sleep(seconds)
            return
        for channel in wait(list(channels), seconds):
            member = channels[channel]  # type: ignore[index]
            try:
                while member.channel.poll():
                    member.take(member.channel.recv())
            except (EOFError, OSError):
                member.open = False

    def tell(self, message: object, *ranks: int) -> None:
        """Tell these ranks, or all; those that are gone hear nothing."""
        for rank in ranks or range(len(self.members)):
            with contextlib.suppress(OSError):
                self.members[rank].channel.send(message)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank that has not ended."""
        member = self.members[rank]
        if member.process.exitcode is None:
            os.kill(member.pid, number)

    def dump_stacks(self) -> None:
        """Have all that still run write the stacks of their threads to their logs."""
        for member in self.members:
            self.signal(member.rank, signal.SIGCONT)
            self.signal(member.rank, signal.SIGUSR1)
        self.poll(_STACKS_SECONDS)
        time.sleep(_STACKS_SECONDS)

    def kill(self) -> list[int]:
        """Kill what still runs; returns the ranks that did."""
        left = [member.rank for member in self.members if member.process.exitcode is None]
        for rank in left:
            self.signal(rank, signal.SIGKILL)
        for member in self.members:
            member.process.join(_KILL_SECONDS)
        if any(member.open for member in self.members):
            self.poll(0.0)  # their last words, and that these were the last
        return left

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        for member in self.members:
            member.channel.close()
            if member.process.exitcode is not None:
                member.process.close()
