# SPDX-License-Identifier: Apache-2.0
"""A switch that only remembers what was written to it: for tests of the controller and of what is built on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from p4reduce.errors import SwitchError
from p4reduce_controller.election import DemotedError
from p4reduce_controller.entries import CounterCell, Entity, Group, TableEntry, Update, Verb

GATE_SECONDS = 30.0
"""A closed gate fails a write after so long, instead of blocking a test for ever."""


class FakeSwitch:
    """State of a switch over several sessions, with faults on demand. Thread-safe.

    `written` lists all updates in the order they came. Close `gate` to hold every write back; `refuse` may name
    an error for an update; `unreachable` fails new sessions with its text, `taken` because another controller has
    become primary.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.entities: dict[tuple[object, ...], Entity] = {}
        self.counters: dict[tuple[str, int], int] = {}
        self.written: list[Update] = []
        self.sessions: list[FakeSession] = []
        self.gate = threading.Event()
        self.gate.set()
        self.refuse: Callable[[Update], str | None] = lambda _: None
        self.unreachable: str | None = None
        self.taken: str | None = None
        self.refused = 0
        """How many updates `refuse` has failed."""

    def connect(self, on_lost: Callable[[str], None]) -> FakeSession:
        """Open a session: the `connect` argument of `ControllerServer`."""
        if self.taken is not None:
            raise DemotedError(self.taken)
        if self.unreachable is not None:
            raise SwitchError(self.unreachable)
        session = FakeSession(self, on_lost)
        self.sessions.append(session)
        return session

    def restart(self) -> None:
        """Forget everything and drop the session."""
        with self.lock:
            self.entities.clear()
            self.counters.clear()
        self.sessions[-1].lose("the switch was restarted")

    def holds(self, table: str) -> list[TableEntry]:
        """Entries of one table."""
        with self.lock:
            return [e for e in self.entities.values() if isinstance(e, TableEntry) and e.table == table]

    def groups(self) -> list[Group]:
        """All multicast groups."""
        with self.lock:
            return [e for e in self.entities.values() if isinstance(e, Group)]

    def apply(self, update: Update, *, missing_ok: bool) -> None:
        """One update, as a P4Runtime server does it."""
        reason = self.refuse(update)
        if reason is not None:
            self.refused += 1
            raise SwitchError(f"{update}: {reason}")
        with self.lock:
            self.written.append(update)
            entity, key = update.entity, update.entity.identity
            if isinstance(entity, CounterCell):
                self.counters[entity.counter, entity.index] = entity.packets
                return
            present = key in self.entities
            if present and update.verb is Verb.INSERT:
                raise SwitchError(f"{update}: ALREADY_EXISTS")
            if not present and update.verb is not Verb.INSERT:
                if missing_ok and update.verb is Verb.DELETE:
                    return
                raise SwitchError(f"{update}: NOT_FOUND")
            if update.verb is Verb.DELETE:
                del self.entities[key]
            else:
                self.entities[key] = entity


class FakeSession:
    """One session with a FakeSwitch; implements `link.Switch`."""

    def __init__(self, switch: FakeSwitch, on_lost: Callable[[str], None]) -> None:
        self._switch = switch
        self._on_lost = on_lost
        self.lost: str | None = None
        self.probes = 0

    def lose(self, why: str) -> None:
        """End the session from the switch's side."""
        if self.lost is None:
            self.lost = why
            self._on_lost(why)

    def write(self, updates: Sequence[Update], *, missing_ok: bool = False) -> None:
        """See `link.Switch`."""
        if not self._switch.gate.wait(GATE_SECONDS):
            raise SwitchError(f"the gate was closed for {GATE_SECONDS:g} s")
        self._alive()
        for update in updates:
            self._switch.apply(update, missing_ok=missing_ok)

    def read_tables(self, tables: Iterable[str]) -> list[TableEntry]:
        """See `link.Switch`."""
        self._alive()
        return [entry for table in tables for entry in self._switch.holds(table)]

    def read_groups(self) -> list[Group]:
        """See `link.Switch`."""
        self._alive()
        return self._switch.groups()

    def read_counters(self, counter: str, indices: Sequence[int]) -> list[int]:
        """See `link.Switch`."""
        self._alive()
        return [self._switch.counters.get((counter, index), 0) for index in indices]

    def probe(self) -> None:
        """See `link.Switch`."""
        self._alive()
        self.probes += 1

    def close(self) -> None:
        """See `link.Switch`."""
        self.lost = self.lost or "closed"

    def _alive(self) -> None:
        if self.lost is not None:
            raise SwitchError(self.lost)
