# SPDX-License-Identifier: Apache-2.0
"""The line to the switch: order, loss, return, and defects that must not end it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from p4reduce.errors import SwitchError
from p4reduce_controller.fake import FakeSwitch
from p4reduce_controller.link import Switch, SwitchGoneError, SwitchLink

DEADLINE = 20.0


class Rig:
    def __init__(self, **options: Any) -> None:
        self.switch = FakeSwitch()
        self.events: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.on_up: Callable[[Switch], None] = lambda _: None
        self.link = SwitchLink(self.switch.connect, self._up, self._down, **({"first_pause": 0.01} | options))

    def _up(self, session: Switch) -> None:
        self.on_up(session)
        self.events.put("up")

    def _down(self, why: str) -> None:
        self.events.put(f"down: {why}")

    def event(self) -> str:
        return self.events.get(timeout=DEADLINE)

    def ask(self, run: Callable[[Switch], Any]) -> Any:
        return self.link.ask(run, DEADLINE)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    made.link.start()
    assert made.event() == "up"
    yield made
    made.link.stop()


def test_work_is_done_in_order_in_one_thread(rig: Rig) -> None:
    done: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    for number in range(50):
        rig.link.submit(lambda _, number=number: (number, threading.current_thread().name), lambda r, _: done.put(r))
    results = [done.get(timeout=DEADLINE) for _ in range(50)]
    assert [number for number, _ in results] == list(range(50))
    assert {name for _, name in results} == {"p4reduce-switch-link"}


def test_the_switchs_refusal_is_passed_on_and_the_session_stays(rig: Rig) -> None:
    def fail(_: Switch) -> None:
        raise SwitchError("table full")

    with pytest.raises(SwitchError, match="table full"):
        rig.ask(fail)
    assert rig.link.connected
    assert rig.ask(lambda _: 7) == 7
    assert len(rig.switch.sessions) == 1


@pytest.mark.parametrize("where", ["work", "callback"])
def test_a_defect_does_not_end_the_thread(rig: Rig, where: str, caplog: pytest.LogCaptureFixture) -> None:
    failed: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def work(_: Switch) -> int:
        return 1 // (where != "work")

    def done(_: int | None, error: str | None) -> None:
        failed.put(error)
        if where == "callback":
            raise KeyError("defect")

    with caplog.at_level(logging.ERROR):
        rig.link.submit(work, done)
        assert failed.get(timeout=DEADLINE) == (
            "ZeroDivisionError: integer division or modulo by zero" if where == "work" else None
        )
        assert rig.ask(lambda _: "still here") == "still here"
    assert "unexpected error" in caplog.text


def test_the_first_connection_must_succeed() -> None:
    rig = Rig()
    rig.switch.unreachable = "nobody answers"
    with pytest.raises(SwitchError, match="nobody answers"):
        rig.link.start()
    rig.link.stop()


def test_a_session_that_cannot_be_brought_up_is_closed() -> None:
    rig = Rig()

    def refuse(_: Switch) -> None:
        raise SwitchError("no room")

    rig.on_up = refuse
    with pytest.raises(SwitchError, match="no room"):
        rig.link.start()
    assert rig.switch.sessions[0].lost == "closed"
    assert not rig.link.connected


def test_loss_is_told_and_work_fails_until_the_session_is_back(rig: Rig) -> None:
    rig.switch.unreachable = "nobody answers"
    rig.switch.sessions[0].lose("connection reset")
    assert rig.event() == "down: connection reset"
    with pytest.raises(SwitchError, match="no session with the switch: "):
        rig.ask(lambda _: 1)
    assert not rig.link.connected
    rig.switch.unreachable = None
    assert rig.event() == "up"
    assert rig.ask(lambda _: 1) == 1


def test_loss_during_work_is_told_before_the_work_fails(rig: Rig) -> None:
    order: queue.SimpleQueue[str] = queue.SimpleQueue()
    rig.link._on_down = lambda _: order.put("down")

    def work(session: Switch) -> None:
        rig.switch.sessions[0].lose("reset")
        session.write([])

    rig.link.submit(work, lambda _, error: order.put(f"failed: {error}"))
    assert order.get(timeout=DEADLINE) == "down"
    assert order.get(timeout=DEADLINE) == "failed: reset"


def test_a_switch_that_does_not_answer_is_given_up_at_once(rig: Rig) -> None:
    def hang(_: Switch) -> None:
        raise SwitchGoneError("write: DEADLINE_EXCEEDED")

    with pytest.raises(SwitchError, match="DEADLINE_EXCEEDED"):
        rig.ask(hang)
    assert rig.event() == "down: write: DEADLINE_EXCEEDED"
    assert rig.event() == "up"
    assert rig.switch.sessions[0].lost == "closed"


def test_work_fails_at_once_while_an_attempt_to_connect_hangs(rig: Rig) -> None:
    gate, begun = threading.Event(), threading.Event()
    connect = rig.switch.connect

    def slow(on_lost: Callable[[str], None]) -> Any:
        begun.set()
        gate.wait(DEADLINE)
        return connect(on_lost)

    rig.link._connect = slow
    rig.switch.sessions[0].lose("reset")
    assert rig.event() == "down: reset"
    assert begun.wait(DEADLINE)
    for _ in range(3):
        with pytest.raises(SwitchError, match="no session with the switch: reset"):
            rig.ask(lambda _: 1)
    gate.set()
    assert rig.event() == "up"
    assert rig.ask(lambda _: 1) == 1


def test_a_session_that_comes_after_the_end_is_closed(rig: Rig) -> None:
    gate, begun = threading.Event(), threading.Event()
    connect = rig.switch.connect

    def slow(on_lost: Callable[[str], None]) -> Any:
        begun.set()
        gate.wait(DEADLINE)
        return connect(on_lost)

    rig.link._connect = slow
    rig.switch.sessions[0].lose("reset")
    assert begun.wait(DEADLINE)
    attempt = next(thread for thread in threading.enumerate() if thread.name == "p4reduce-switch-connect")
    rig.link.stop()
    gate.set()
    attempt.join(DEADLINE)
    assert [session.lost for session in rig.switch.sessions] == ["reset", "closed"]


def test_a_defect_while_connecting_does_not_end_the_attempts(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    connect = rig.switch.connect
    failures = iter([KeyError("defect")])

    def shaky(on_lost: Callable[[str], None]) -> Any:
        for failure in failures:
            raise failure
        return connect(on_lost)

    rig.link._connect = shaky
    rig.switch.sessions[0].lose("reset")
    assert rig.event() == "down: reset"
    assert rig.event() == "up"
    assert "unexpected error while connecting" in caplog.text


def test_attempts_go_on_when_the_new_session_fails_at_once(rig: Rig) -> None:
    failures = 3

    def shaky(_: Switch) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise SwitchError("not yet")

    rig.on_up = shaky
    rig.switch.sessions[0].lose("reset")
    assert rig.event() == "down: reset"
    assert rig.event() == "up"
    assert failures == 0
    assert len(rig.switch.sessions) == 5


def test_an_idle_session_is_probed_and_a_dead_one_replaced() -> None:
    rig = Rig(probe_seconds=0.01)
    rig.link.start()
    try:
        rig.event()
        first = rig.switch.sessions[0]

        def dead() -> None:
            raise SwitchError("no sign of life")

        probed = threading.Event()
        first.probe = probed.set  # type: ignore[method-assign]
        assert probed.wait(DEADLINE)
        first.probe = dead  # type: ignore[method-assign]
        assert rig.event() == "down: no sign of life"
        assert rig.event() == "up"
        assert first.lost == "closed"
    finally:
        rig.link.stop()


def test_a_session_is_looked_after_however_busy_it_is() -> None:
    looked = threading.Event()
    rig = Rig(probe_seconds=0.01, look_after=lambda _: looked.set())
    rig.link.start()
    try:
        rig.event()
        over = time.monotonic() + DEADLINE
        while not looked.is_set():
            assert time.monotonic() < over
            rig.ask(lambda _: None)
        assert rig.switch.sessions[0].probes >= 1
        assert rig.link.trouble == ""
        assert 0.0 < rig.link.connected_seconds < DEADLINE
    finally:
        rig.link.stop()


def test_what_is_found_when_looking_after_it_may_end_a_session() -> None:
    faults = iter([SwitchGoneError("it does not answer any more")])

    def look(_: Switch) -> None:
        for fault in faults:
            raise fault

    rig = Rig(probe_seconds=0.01, look_after=look)
    rig.link.start()
    try:
        assert [rig.event() for _ in range(3)] == ["up", "down: it does not answer any more", "up"]
    finally:
        rig.link.stop()


def test_attempts_are_never_more_than_a_second_apart(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rig = Rig(first_pause=0.001, longest_pause=0.004)
    rig.link.start()
    assert rig.event() == "up"
    attempts: queue.SimpleQueue[int] = queue.SimpleQueue()
    connect = rig.switch.connect

    def refuse(on_lost: Callable[[str], None]) -> Any:
        attempts.put(1)
        return connect(on_lost)

    rig.link._connect = refuse
    rig.switch.unreachable = "nobody answers"
    rig.switch.sessions[0].lose("reset")
    try:
        assert rig.event() == "down: reset"
        for _ in range(8):
            attempts.get(timeout=DEADLINE)
        assert rig.link.connected_seconds == 0.0
        rig.switch.unreachable = None
        assert rig.event() == "up"
    finally:
        rig.link.stop()
    pauses = [r.args[0] for r in caplog.records if "next attempt in" in r.msg]  # type: ignore[index]
    assert pauses[:5] == [0.001, 0.002, 0.004, 0.004, 0.004]
    assert SwitchLink(connect, rig._up, rig._down)._longest_pause == 1.0


def test_a_controller_whose_place_is_taken_stops_trying() -> None:
    demoted: queue.SimpleQueue[str] = queue.SimpleQueue()
    rig = Rig(on_demoted=demoted.put)
    rig.link.start()
    try:
        assert rig.event() == "up"
        rig.switch.taken = "another controller has become primary"
        rig.switch.sessions[0].lose("another controller has become primary")
        assert demoted.get(timeout=DEADLINE) == "another controller has become primary"
        rig.switch.taken = None
        with pytest.raises(SwitchError, match="no session with the switch: another controller has become primary"):
            rig.ask(lambda _: 1)
        assert len(rig.switch.sessions) == 1
    finally:
        rig.link.stop()


def test_an_answer_that_takes_too_long(rig: Rig) -> None:
    gate = threading.Event()
    try:
        with pytest.raises(SwitchError, match=r"did not answer within 0\.01 s"):
            rig.link.ask(lambda _: gate.wait(DEADLINE), 0.01)
    finally:
        gate.set()


def test_stopping_fails_what_was_not_begun() -> None:
    rig = Rig()
    rig.link.start()
    gate, begun = threading.Event(), threading.Event()
    failed: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def block(_: Switch) -> None:
        begun.set()
        gate.wait(DEADLINE)

    rig.link.submit(block, lambda *_: None)
    assert begun.wait(DEADLINE)
    rig.link.submit(lambda _: None, lambda _, error: failed.put(error))
    stopper = threading.Thread(target=rig.link.stop)
    rig.link._stopping = True
    stopper.start()
    gate.set()
    stopper.join(DEADLINE)
    assert failed.get(timeout=DEADLINE) == "the controller is stopping"
    assert rig.switch.sessions[0].lost == "closed"
    rig.link.stop()
