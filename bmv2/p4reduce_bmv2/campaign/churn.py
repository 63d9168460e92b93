# SPDX-License-Identifier: Apache-2.0
"""Three jobs of different sizes share a switch while a fourth joins and leaves, again and again."""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from p4reduce_bmv2.campaign import arena as arenas
from p4reduce_bmv2.campaign import churn_worker
from p4reduce_bmv2.campaign.arena import Arena
from p4reduce_bmv2.campaign.churn_worker import Count, Stop, Work
from p4reduce_bmv2.campaign.crew import fork_server
from p4reduce_bmv2.switch import Kind

SIZES = (2, 3, 4)
"""Ranks of the jobs that stay."""
HOSTS = 4
_CYCLE_SECONDS = 60.0
"""For the fourth job, from its first process to its last one's end."""
_SILENT_SECONDS = 30.0
"""A job that has not completed a bucket for so long hangs."""
_REST_SECONDS = 10.0
_TICK = 0.05


@dataclass(frozen=True, slots=True)
class ChurnOptions:
    """What a churn is told."""

    seconds: float = 600.0
    seed: int = 0
    switch: Kind = "embedded"
    profile: str = "w34"
    lease: float = 5.0
    largest: int = 50_000
    logs: Path | None = None


class Party:
    """The processes of one job."""

    def __init__(self, context: ForkServerContext, arena: Arena, job: str, size: int, work: Work, folder: Path) -> None:
        self.job = job
        self.size = size
        self._processes: list[BaseProcess] = []
        self._channels: list[Connection] = []
        self.counts: list[Count | None] = [None] * size
        for rank in range(size):
            here, there = context.Pipe()
            place = arena.place(rank, job, folder / "unused", folder / f"{job}-rank{rank}.log")
            process = context.Process(
                target=churn_worker.main, args=(there, replace(place, world_size=size), work), daemon=True
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._channels.append(here)

    def poll(self) -> None:
        """Take in what the workers have said."""
        for rank, channel in enumerate(self._channels):
            with contextlib.suppress(EOFError, OSError):
                while channel.poll():
                    self.counts[rank] = channel.recv()

    def stop(self) -> None:
        """Tell all ranks to come to an end."""
        for channel in self._channels:
            with contextlib.suppress(OSError):
                channel.send(Stop())

    @property
    def channels(self) -> list[Connection]:
        """For waiting."""
        return list(self._channels)

    @property
    def over(self) -> bool:
        """All processes have ended."""
        return all(process.exitcode is not None for process in self._processes)

    @property
    def buckets(self) -> int:
        """Completed at all ranks."""
        return min(count.buckets if count is not None else 0 for count in self.counts)

    def problems(self) -> list[str]:
        """What went wrong at its ranks."""
        found = []
        for rank, count in enumerate(self.counts):
            code = self._processes[rank].exitcode
            if count is not None and count.error:
                found.append(f"{self.job}, rank {rank}: {count.error}")
            elif code is not None and (code != 0 or count is None or not count.ended):
                found.append(f"{self.job}, rank {rank} ended with code {code}")
        return found

    def kill(self) -> bool:
        """Kill what still runs; says whether something did."""
        running = [process for process in self._processes if process.exitcode is None]
        for process in running:
            process.kill()
        for process in self._processes:
            process.join(10.0)
            process.close()
        for channel in self._channels:
            channel.close()
        self._processes, self._channels = [], []
        return bool(running)


class Churn:
    """Call `execute` once, from the main thread."""

    def __init__(self, options: ChurnOptions, say: Callable[[str], None] = lambda _: None) -> None:
        self._options = options
        self._say = say
        self._context = fork_server()
        self._dice = random.Random(f"{options.seed}/churn")
        self.problems: list[str] = []
        self._hung = self._leaked = self._cycles = self._wrong = self._buckets = self._elements = 0

    def execute(self) -> dict[str, Any]:
        """Run it; returns the summary."""
        options = self._options
        logs = options.logs or Path(tempfile.mkdtemp(prefix="p4c-"))
        logs.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="p4c-") as scratch:
            arena = arenas.make(
                options.switch, Path(scratch), workers=HOSTS, profile=options.profile, lease=options.lease
            )
            with arena:
                try:
                    self._run(arena, logs, started + options.seconds)
                finally:
                    if self.problems:
                        for log in arena.logs:
                            shutil.copy(log, logs)
        if self.problems:
            self._say(f"logs: {logs}")
        elif options.logs is None:
            shutil.rmtree(logs)
        return self._summary(time.monotonic() - started)

    def _run(self, arena: Arena, logs: Path, end: float) -> None:
        with ExitStack() as undo:
            parties = [self._party(undo, arena, f"stays-{size}", size, None, logs) for size in SIZES]
            while not self.problems and (self._cycles == 0 or time.monotonic() < end):
                self._cycle(arena, parties, logs)
            for party in parties:
                party.stop()
            limit = time.monotonic() + _CYCLE_SECONDS
            while not all(party.over for party in parties) and time.monotonic() < limit:
                self._wait(parties)
            for party in parties:
                self._settle(party)
            self._check_rest(arena, set())

    def _cycle(self, arena: Arena, parties: list[Party], logs: Path) -> None:
        """The fourth job comes, works and goes; the others must not even notice."""
        before = [party.buckets for party in parties]
        number, size = self._cycles, self._dice.randrange(1, HOSTS + 1)
        rounds = self._dice.choice((0, 1, 5, 20, 60))
        with ExitStack() as undo:
            guest = self._party(undo, arena, f"guest-{number}", size, rounds, logs)
            limit = time.monotonic() + _CYCLE_SECONDS
            while not guest.over and time.monotonic() < limit:
                self._wait([*parties, guest])
                if any(party.problems() for party in parties):
                    break
            self._settle(guest)
        self._check_rest(arena, {party.job for party in parties})
        if not self.problems:
            for log in logs.glob(f"{guest.job}-*.log"):
                log.unlink()
        self._check_progress(parties, before)
        self._cycles += 1
        done = sum(party.buckets for party in parties)
        self._say(f"cycle {number}: a job of {size} with {rounds} rounds came and went; {done} buckets of the others")

    def _check_progress(self, parties: list[Party], before: list[int]) -> None:
        limit = time.monotonic() + _SILENT_SECONDS
        while time.monotonic() < limit:
            self._wait(parties)
            if any(party.problems() for party in parties):
                break
            if all(party.buckets > count for party, count in zip(parties, before, strict=True)):
                return
        for party, count in zip(parties, before, strict=True):
            found = party.problems()
            self.problems += found
            if not found and party.buckets <= count:
                self._hung += 1
                self.problems.append(f"{party.job} has stood still at bucket {count} for {_SILENT_SECONDS:g} s")

    def _check_rest(self, arena: Arena, allowed: set[str]) -> None:
        """No slots but those of the jobs that stay; in the end, no entries either."""
        limit = time.monotonic() + _REST_SECONDS
        while left := arena.observer.leaks(allowed):
            if time.monotonic() > limit:
                self._leaked += 1
                self.problems += left
                return
            time.sleep(_TICK)

    def _party(self, undo: ExitStack, arena: Arena, job: str, size: int, rounds: int | None, logs: Path) -> Party:
        work = Work(f"{self._options.seed}/{job}", rounds, self._options.largest)
        party = Party(self._context, arena, job, size, work, logs)
        undo.callback(party.kill)
        return party

    @staticmethod
    def _wait(parties: list[Party]) -> None:
        wait([channel for party in parties for channel in party.channels], _TICK)
        for party in parties:
            party.poll()
        # A channel of a process that has ended is always ready.
        time.sleep(_TICK)

    def _settle(self, party: Party) -> None:
        """Add up what a job has done, once it is over."""
        party.poll()
        if not party.over:
            self._hung += 1
            self.problems.append(f"{party.job} did not come to an end")
        self.problems += [text for text in party.problems() if text not in self.problems]
        for count in party.counts:
            if count is not None and count.wrong:
                self._wrong += count.wrong
                self.problems.append(f"{party.job}: {count.wrong} sums are wrong")
        self._buckets += party.buckets
        self._elements += max((count.elements for count in party.counts if count is not None), default=0)

    def _summary(self, seconds: float) -> dict[str, Any]:
        return {
            "cycles": self._cycles,
            "buckets": self._buckets,
            "elements": self._elements,
            "wrong": self._wrong,
            "hung": self._hung,
            "leaked": self._leaked,
            "problems": self.problems[:20],
            "switch": self._options.switch,
            "seed": self._options.seed,
            "seconds": round(seconds, 1),
        }
