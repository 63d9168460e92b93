# SPDX-License-Identifier: Apache-2.0
"""What signals do to a daemon: the first asks it to stop, the next ends it, and two at once are one."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading

import pytest

from p4reduce.errors import UsageError
from p4reduce.signals import asked_to_stop

DEADLINE = 30.0
STUBBORN = """
import sys, threading
from p4reduce.signals import asked_to_stop
asked = threading.Event()
with asked_to_stop(asked.set):
    print("ready", flush=True)
    while not asked.wait(0.1):
        pass
    print("asked", flush=True)
    while sys.argv[1] == "hangs":
        threading.Event().wait(0.1)
print("ended", flush=True)
"""


def stubborn(how: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", STUBBORN, how], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_asks(number: signal.Signals) -> None:
    with stubborn("ends") as process:
        process.send_signal(number)
        assert process.communicate(timeout=DEADLINE)[0] == "asked\nended\n"
        assert process.returncode == 0


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_the_second_ends_one_that_hangs(first: signal.Signals, second: signal.Signals) -> None:
    with stubborn("hangs") as process:
        process.send_signal(first)
        assert process.stdout is not None
        assert process.stdout.readline() == "asked\n"
        while process.poll() is None:  # the first moments count as one signal
            process.send_signal(second)
            threading.Event().wait(0.05)
        assert process.returncode == -second


def test_two_at_once_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("p4reduce.signals._ONE_SECONDS", 1000.0)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with asked_to_stop(lambda: asked.append(1)):
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
    assert asked == [1]
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_main_thread_in_select_is_woken_at_once() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(-1)
    try:
        with asked_to_stop(wakeup=writer):
            os.kill(os.getpid(), signal.SIGTERM)
            assert select.select([reader], [], [], 0)[0] == [reader]
        assert signal.set_wakeup_fd(before) == -1
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


def test_what_a_script_runs_in_the_background_does_not_hear_the_terminals_interrupt() -> None:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    asked: list[int] = []
    try:
        with asked_to_stop(lambda: asked.append(1)):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGINT)
            assert asked == []
            os.kill(os.getpid(), signal.SIGTERM)
            assert asked == [1]
    finally:
        signal.signal(signal.SIGINT, previous)


def test_in_another_thread_it_says_where_it_belongs() -> None:
    told: list[str] = []

    def run() -> None:
        try:
            with asked_to_stop():
                told.append("ran")
        except UsageError as error:
            told.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(DEADLINE)
    (text,) = told
    assert "main thread" in text
