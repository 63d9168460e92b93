# SPDX-License-Identifier: Apache-2.0
"""The controller's line to its switch: one thread that does the work in order, and connects again when it is lost."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from p4reduce.errors import P4ReduceError, SwitchError
from p4reduce_controller.election import DemotedError
from p4reduce_controller.entries import Group, TableEntry, Update

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


class SwitchGoneError(SwitchError):
    """The switch did not answer: the session is of no more use."""


class Switch(Protocol):
    """A session with a switch that runs our program; `p4rt.SwitchClient` is the real one. SwitchError throughout,
    SwitchGoneError when the switch does not answer."""

    @property
    def lost(self) -> str | None:
        """Why the session is over; None while it lasts."""
        ...

    def write(self, updates: Sequence[Update], *, missing_ok: bool = False) -> None:
        """Apply updates in order."""
        ...

    def read_tables(self, tables: Iterable[str]) -> list[TableEntry]:
        """All entries of these tables."""
        ...

    def read_groups(self) -> list[Group]:
        """All multicast groups."""
        ...

    def read_counters(self, counter: str, indices: Sequence[int]) -> list[int]:
        """Packets counted in these cells."""
        ...

    def probe(self) -> None:
        """Ask for a sign of life."""
        ...

    def close(self) -> None:
        """End the session."""
        ...


Connector = Callable[[Callable[[str], None]], Switch]
"""Opens a session. The argument is to be called when the session is lost, from any thread."""


@dataclass(frozen=True, slots=True)
class _Work(Generic[T]):
    run: Callable[[Switch], T]
    done: Callable[[T | None, str | None], None]


@dataclass(frozen=True, slots=True)
class _Attempt:
    """How an attempt to connect ended: a session, or why there is none."""

    switch: Switch | None
    error: str = ""
    demoted: bool = False


class SwitchLink:
    """Keeps a session with the switch and does work on it, one thing after the other.

    Attempts to connect again have a thread of their own: they may take long, and meanwhile work must fail at once, so
    that nobody waits for a switch that is away.
    """

    def __init__(
        self,
        connect: Connector,
        on_up: Callable[[Switch], None],
        on_down: Callable[[str], None],
        *,
        on_demoted: Callable[[str], None] | None = None,
        look_after: Callable[[Switch], None] | None = None,
        probe_seconds: float = 2.0,
        first_pause: float = 0.1,
        longest_pause: float = 1.0,
    ) -> None:
        """`on_up` is called with every new session before any other work and may raise SwitchError; `on_down` when a
        session is lost; `on_demoted` when another controller is found in our place, after which nothing is tried any
        more. A session is probed every `probe_seconds`, whatever else is done; then `look_after` is called with it.
        Pauses between attempts grow up to `longest_pause`.
        """
        self._connect = connect
        self._on_up = on_up
        self._on_down = on_down
        self._on_demoted = on_demoted
        self._look_after = look_after
        self._next_probe = 0.0
        self._since = 0.0
        self._demoted = False
        self._probe_seconds = probe_seconds
        self._first_pause = first_pause
        self._longest_pause = longest_pause
        self._pause = first_pause
        self._next_attempt = 0.0
        self._attempting = False
        self._queue: queue.SimpleQueue[_Work[object] | _Attempt | str | None] = queue.SimpleQueue()
        self._switch: Switch | None = None
        self._why = "not connected yet"
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="p4reduce-switch-link", daemon=True)

    @property
    def connected(self) -> bool:
        """Whether there is a session right now."""
        switch = self._switch
        return switch is not None and switch.lost is None

    @property
    def trouble(self) -> str:
        """Why there is no session right now; empty when there is one."""
        switch = self._switch
        if switch is None:
            return self._why
        return switch.lost or ""

    @property
    def connected_seconds(self) -> float:
        """How long the session has lasted; 0 without one."""
        return time.monotonic() - self._since if self.connected else 0.0

    def start(self) -> None:
        """Connect for the first time. P4ReduceError when that fails: nothing is running then."""
        self._adopt(self._connect(self._queue.put))
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """End the thread and the session. Safe to call twice, and without `start`.

        Work not yet begun fails, and work in progress writes nothing more.
        """
        self._stopping = True
        switch = self._switch
        if switch is not None:
            switch.close()
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)
        switch, self._switch = self._switch, None
        if switch is not None:
            switch.close()

    def submit(self, run: Callable[[Switch], T], done: Callable[[T | None, str | None], None]) -> None:
        """Do `run` in its turn, then call `done` with its result or with what went wrong. Returns at once."""
        work: _Work[T] = _Work(run, done)
        self._queue.put(work)  # type: ignore[arg-type]

    def ask(self, run: Callable[[Switch], T], timeout: float) -> T:
        """Do `run` in its turn and wait for its result, at most `timeout` seconds. SwitchError."""
        answer: queue.SimpleQueue[tuple[T | None, str | None]] = queue.SimpleQueue()
        self.submit(run, lambda result, error: answer.put((result, error)))
        try:
            result, error = answer.get(timeout=timeout)
        except queue.Empty:
            raise SwitchError(f"the switch did not answer within {timeout:g} s") from None
        if error is not None:
            raise SwitchError(error)
        return result  # type: ignore[return-value]

    def _run(self) -> None:
        while True:
            item = self._next()
            if self._stopping:
                self._queue.put(item)
                break
            self._notice_loss()
            if isinstance(item, _Work):
                self._do(item)
            elif isinstance(item, _Attempt):
                self._attempted(item)
            if self._switch is not None and time.monotonic() >= self._next_probe:
                self._do(_Work(self._probe, self._probed))
                self._next_probe = time.monotonic() + self._probe_seconds
            idle = self._switch is None and not self._attempting and not self._demoted
            if idle and time.monotonic() >= self._next_attempt:
                self._attempting = True
                threading.Thread(target=self._attempt, name="p4reduce-switch-connect", daemon=True).start()
        while not self._queue.empty():
            item = self._queue.get()
            if isinstance(item, _Work):
                _finish(item, None, "the controller is stopping")
            elif isinstance(item, _Attempt) and item.switch is not None:
                item.switch.close()

    def _next(self) -> _Work[object] | _Attempt | str | None:
        if self._switch is not None:
            wait: float | None = max(self._next_probe - time.monotonic(), 0.0)
        elif self._attempting or self._demoted:
            wait = None
        else:
            wait = max(self._next_attempt - time.monotonic(), 0.0)
        try:
            return self._queue.get(timeout=wait)
        except queue.Empty:
            return None

    def _attempt(self) -> None:
        try:
            switch = self._connect(self._queue.put)
        except P4ReduceError as error:
            self._queue.put(_Attempt(None, str(error), isinstance(error, DemotedError)))
        except Exception as error:
            _LOG.exception("unexpected error while connecting to the switch")
            self._queue.put(_Attempt(None, f"{type(error).__name__}: {error}"))
        else:
            self._queue.put(_Attempt(switch))
            if self._stopping:
                switch.close()

    def _attempted(self, attempt: _Attempt) -> None:
        self._attempting = False
        error = attempt.error
        if attempt.switch is not None:
            try:
                self._adopt(attempt.switch)
            except P4ReduceError as failed:
                error = str(failed)
            else:
                _LOG.warning("session with the switch is back")
                return
        self._why = error
        if attempt.demoted:
            self._demoted = True
            if self._on_demoted is not None:
                self._on_demoted(error)
            return
        _LOG.info("no session with the switch yet, next attempt in %g s: %s", self._pause, error)
        self._next_attempt = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, self._longest_pause)

    def _adopt(self, switch: Switch) -> None:
        try:
            self._on_up(switch)
        except BaseException:
            switch.close()
            raise
        self._switch = switch
        self._since = time.monotonic()
        self._next_probe = self._since + self._probe_seconds
        self._pause = self._first_pause
        if self._stopping:
            switch.close()

    def _do(self, work: _Work[T]) -> None:
        switch = self._switch
        if switch is None:
            _finish(work, None, f"no session with the switch: {self._why}")
            return
        try:
            result = work.run(switch)
        except SwitchError as error:
            # Tell of the loss first, so that nobody takes the failure for the switch's opinion.
            if isinstance(error, SwitchGoneError):
                self._down(str(error))
            self._notice_loss()
            _finish(work, None, str(error))
        except Exception as error:
            # A defect must not end the thread: everybody waiting for the switch would wait for ever.
            _LOG.exception("unexpected error in work for the switch")
            _finish(work, None, f"{type(error).__name__}: {error}")
        else:
            _finish(work, result, None)

    def _probe(self, switch: Switch) -> None:
        switch.probe()
        if self._look_after is not None:
            self._look_after(switch)

    def _probed(self, _: object, error: str | None) -> None:
        if error is not None and self._switch is not None:
            self._down(error)

    def _notice_loss(self) -> None:
        if self._switch is not None and self._switch.lost is not None:
            self._down(self._switch.lost)

    def _down(self, why: str) -> None:
        switch, self._switch = self._switch, None
        if switch is None:
            return
        self._why = why
        self._pause = self._first_pause
        self._next_attempt = time.monotonic()
        switch.close()
        if self._stopping:
            return
        _LOG.warning("session with the switch lost: %s; running jobs go on, connecting again", why)
        self._on_down(why)


def _finish(work: _Work[T], result: T | None, error: str | None) -> None:
    try:
        work.done(result, error)
    except Exception:
        # As above: a defect, and the thread must go on.
        _LOG.exception("unexpected error in what follows work for the switch")
