# SPDX-License-Identifier: Apache-2.0
"""A controller that dies at any of its writes, and the next one on the same file and switch: the job comes through.

A job of two ranks goes from the switch path to the ring path and back, and leaves. At the n-th write to the state file
the controller stops dead, just before or just after it; or at the n-th update of the switch. Ranks do what the protocol
says: they repeat their Join, open their streams again, answer orders.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from helpers.controller import DEADLINE, Rig, Stream

from p4reduce.proto import controller_pb2 as pb
from p4reduce_controller import entries
from p4reduce_controller.auth import CREDENTIAL
from p4reduce_controller.entries import Update
from p4reduce_controller.marks import is_mark
from p4reduce_controller.store import SqliteStore, StoreError

RANKS = 2


class World:
    """A switch, a state file, and the controller of the moment."""

    def __init__(self, state: Path, die_at: int, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        self._state = state
        self._die_at = die_at
        self._after = after
        self.writes = 0
        self.deaths = 0
        self.over = False
        for name in ("save", "forget"):
            monkeypatch.setattr(SqliteStore, name, self._wrap(getattr(SqliteStore, name)))
        self.rig = Rig(state=state, lease_seconds=1000.0)
        self.members: list[Member] = []

    def begin(self) -> None:
        """The ranks start."""
        self.members = [Member(self, rank) for rank in range(RANKS)]

    def _wrap(self, write: Callable[..., None]) -> Callable[..., None]:
        def wrapped(store: SqliteStore, *arguments: Any) -> None:
            dies = self.writes == self._die_at and not self.deaths
            self.writes += 1
            if dies and not self._after:
                raise StoreError("killed before a write")
            write(store, *arguments)
            if dies:
                raise StoreError("killed after a write")

        return wrapped

    def die_at_update(self, number: int) -> None:
        """Stop dead at the n-th update of the switch from now on."""
        switch, first = self.rig.switch, len(self.rig.switch.written)

        def refuse(_: Update) -> str | None:
            if len(switch.written) - first < number or self.deaths:
                return None
            self.rig.server.coordinator._end("killed", demoted=False)
            return "killed"

        switch.refuse = refuse

    def look(self) -> None:
        """Start the next controller if this one is dead."""
        if self.rig.server.ended.is_set():
            self.deaths += 1
            self.rig.crash()
            self.rig = Rig(state=self._state, switch=self.rig.switch, lease_seconds=1000.0)

    def bring(self, mode: str, state: str) -> None:
        """An operator sets the mode, again if need be, until the job is in that state."""
        end, pause = time.monotonic() + DEADLINE, threading.Event()
        while True:
            self.look()
            try:
                self.rig.stub.SetMode(pb.SetModeRequest(job="train", mode=mode), timeout=DEADLINE)
                job = self.rig.job()
                if job.state == state and all(worker.state == "reporting" for worker in job.workers):
                    return
                self.rig.advance(0.5)
            except grpc.RpcError:
                assert time.monotonic() < end, f"no job in mode {mode}"
            assert time.monotonic() < end, f"not {state} in mode {mode}: {self.rig.status()}"
            pause.wait(0.01)

    def end(self) -> None:
        """All ranks leave, and say so again until they are answered."""
        end, pause = time.monotonic() + DEADLINE, threading.Event()
        staying = list(self.members)
        while staying:
            assert time.monotonic() < end, "a rank did not come out"
            self.look()
            calls = [member.leave(self.rig) for member in staying]
            staying = [member for member, call in zip(staying, calls, strict=True) if call.exception() is not None]
            pause.wait(0.01)
        self.look()
        self.over = True
        for member in self.members:
            member.part()


class Member(threading.Thread):
    """One rank."""

    def __init__(self, world: World, rank: int) -> None:
        super().__init__(daemon=True)
        self._world = world
        self._rank = rank
        self._reply: pb.JoinReply | None = None
        self._stream: Stream | None = None
        self.fences: list[str] = []
        self.start()

    def run(self) -> None:
        pause = threading.Event()
        while not self._world.over:
            rig = self._world.rig
            try:
                if self._reply is None:
                    nonce = bytes([self._rank]) * 16
                    self._reply = rig.join(self._rank, ring=True, nonce=nonce).result()
                self._follow(rig, self._reply)
            except (grpc.RpcError, ValueError):  # the latter from a channel that has just been closed
                pause.wait(0.01)

    def leave(self, rig: Rig) -> Any:
        """The call that leaves."""
        assert self._reply is not None
        request = pb.LeaveRequest(job="train", epoch=self._reply.epoch, rank=self._rank)
        metadata = ((CREDENTIAL, self._reply.credential),)
        return rig.stub.Leave.future(request, timeout=DEADLINE, metadata=metadata)

    def part(self) -> None:
        """End the stream and the thread."""
        end = time.monotonic() + DEADLINE
        while self.is_alive():
            assert time.monotonic() < end
            if self._stream is not None:
                self._stream.call.cancel()
            self.join(0.01)

    def _follow(self, rig: Rig, reply: pb.JoinReply) -> None:
        self._stream = stream = Stream(rig.stub, reply.epoch, self._rank, credential=reply.credential)
        for directive in stream.call:
            if directive.HasField("fence"):
                self.fences.append(directive.fence.message)
                return
            if directive.HasField("order") and directive.order.WhichOneof("kind") in ("stop", "trial", "hold"):
                stream.report(answer=pb.Answer(order=directive.order.number))


def story(world: World) -> None:
    world.begin()
    world.bring("auto", "switch")
    world.bring("ring", "ring")
    world.bring("auto", "switch")
    assert world.rig.job().fallbacks["operator"] == 1
    assert [member.fences for member in world.members] == [[], []]
    world.end()
    assert not world.rig.status().jobs
    assert not any(world.rig.pools())
    switch = world.rig.switch
    assert switch.holds(entries.ADMIT) == switch.holds(entries.REPLICA) == switch.groups() == []
    assert all(is_mark(entry) for entry in switch.holds(entries.EPOCHS))


UPDATES = 43
"""So many the story has, from the first install on."""


@pytest.mark.parametrize("die_at", range(0, UPDATES, 3))
def test_the_story_with_a_death_while_the_switch_is_written(
    tmp_path: Path, die_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path / "state.db", -1, False, monkeypatch)
    world.die_at_update(die_at)
    try:
        story(world)
        assert world.deaths == 1, f"the story has {len(world.rig.switch.written)} updates"
        assert world.rig.switch.refused >= 1
    finally:
        world.over = True
        for member in world.members:
            member.part()
        world.rig.crash()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("die_at", [-1, *range(11)])
def test_the_story(tmp_path: Path, die_at: int, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path / "state.db", die_at, after, monkeypatch)
    try:
        story(world)
        assert world.deaths == (die_at >= 0), f"the story has {world.writes} writes"
    finally:
        world.over = True
        for member in world.members:
            member.part()
        world.rig.crash()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("die_at", range(3))
def test_every_rank_hears_why_its_job_ended(
    tmp_path: Path, die_at: int, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator ends the job, again if need be; the controller dies at a write before, at, or after that."""
    world = World(tmp_path / "state.db", die_at, after, monkeypatch)
    world.begin()
    pause, end = threading.Event(), time.monotonic() + DEADLINE
    try:
        world.bring("auto", "switch")
        while not all(member.fences for member in world.members):
            assert time.monotonic() < end, [member.fences for member in world.members]
            world.look()
            with contextlib.suppress(grpc.RpcError):  # it has failed already, or the controller has just died
                world.rig.stub.Evict(pb.EvictRequest(job="train"), timeout=DEADLINE)
            pause.wait(0.01)
        world.look()
        assert {text for member in world.members for text in member.fences} == {"job 'train': an operator has ended it"}
        assert world.rig.job().state == "failed"
        assert world.deaths == (die_at < world.writes)
        assert world.writes >= 2
    finally:
        world.over = True
        for member in world.members:
            member.part()
        world.rig.crash()
