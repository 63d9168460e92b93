# SPDX-License-Identifier: Apache-2.0
"""Virtual clock and faulty links."""

from __future__ import annotations

import itertools

import pytest

from p4reduce.errors import ConfigError
from p4reduce.sim.clock import VirtualClock
from p4reduce.sim.network import Datagram, Faults, Link, LinkCounters


def run(
    faults: Faults, count: int = 2000, seed: str = "1", rate: float = 0.0
) -> tuple[list[tuple[float, bytes]], LinkCounters]:
    clock = VirtualClock()
    arrived: list[tuple[float, bytes]] = []
    link = Link(clock, lambda d: arrived.append((clock.now, d.data)), seed=seed, faults=faults, delay=1e-4, rate=rate)
    for number in range(count):
        data = number.to_bytes(4, "big") + bytes(96)
        clock.at(number * 1e-5, lambda data=data: link.send(Datagram(1, 2, 3, 4, data)))  # type: ignore[misc]
    while clock.step():
        pass
    return arrived, link.counters


def test_calls_happen_in_order_of_time_then_of_booking() -> None:
    clock = VirtualClock()
    calls: list[str] = []
    clock.at(2.0, lambda: calls.append("c"))
    clock.at(1.0, lambda: calls.append("a"))
    clock.at(1.0, lambda: calls.append("b"))
    clock.at(1.0, lambda: clock.at(0.5, lambda: calls.append("late counts as now")))
    assert clock.next_time == 1.0
    while clock.step():
        assert clock.now in (1.0, 2.0)
    assert calls == ["a", "b", "late counts as now", "c"]
    assert clock.next_time is None


def test_a_link_without_faults_is_a_queue() -> None:
    arrived, counters = run(Faults())
    assert [int.from_bytes(data[:4], "big") for _, data in arrived] == list(range(2000))
    assert all(time == pytest.approx(number * 1e-5 + 1e-4) for number, (time, _) in enumerate(arrived))
    assert counters == LinkCounters(sent=2000, delivered=2000)


def test_every_fault_happens_as_often_as_asked_and_is_counted() -> None:
    arrived, counters = run(Faults(loss=0.1, duplicate=0.2, reorder=0.3, corrupt=0.05))
    assert counters.sent == 2000
    assert 150 < counters.lost < 250
    assert 300 < counters.duplicated < 420
    assert counters.delivered == len(arrived) == 2000 - counters.lost + counters.duplicated
    assert 500 < counters.delayed < 800
    assert 200 < counters.overtaken <= counters.delayed
    whole = [data for _, data in arrived if data[4:] == bytes(96) and int.from_bytes(data[:4], "big") < 2000]
    assert 60 < counters.corrupted < 160
    assert len(arrived) - counters.corrupted <= len(whole) <= len(arrived) - counters.corrupted + 20
    assert all(len(data) == 100 for _, data in arrived)


def test_runs_with_one_seed_are_equal_and_with_another_differ() -> None:
    faults = Faults(loss=0.1, duplicate=0.1, reorder=0.1, corrupt=0.1)
    assert run(faults) == run(faults)
    assert run(faults) != run(faults, seed="2")


def test_a_rate_spaces_frames() -> None:
    arrived, _ = run(Faults(), count=100, rate=8e6)
    gaps = {round(later - sooner, 9) for (sooner, _), (later, _) in itertools.pairwise(arrived)}
    assert gaps == {1e-4}


@pytest.mark.parametrize("name", ["loss", "duplicate", "reorder", "corrupt"])
def test_certain_faults_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        Faults(**{name: 1.0})
