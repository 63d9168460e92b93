# SPDX-License-Identifier: Apache-2.0
"""The in-memory network and the transport that injects faults."""

from __future__ import annotations

import select
from collections.abc import Iterable

import numpy as np
import pytest

from p4reduce import wire
from p4reduce.core.batch import PayloadRows, ReceiveBatch, SendBatch
from p4reduce.errors import ConfigError
from p4reduce.transport.base import Address, Waker
from p4reduce.transport.faults import FaultRates, FaultyTransport
from p4reduce.transport.memory import MemoryNetwork

W5 = wire.profile("w5")
A: Address = ("10.0.0.1", 1)
B: Address = ("10.0.0.2", 2)


def to_everybody(source: Address, frame: bytes) -> Iterable[tuple[Address, bytes]]:
    return [(A, frame), (B, frame)]


def numbered(first: int, count: int, capacity: int = 64) -> SendBatch:
    """Frames whose epoch field is a running number and whose payload repeats it."""
    batch = SendBatch(capacity)
    batch.headers["epoch"][:count] = np.arange(first, first + count)
    rows = np.zeros((count, W5.payload_bytes), dtype=np.uint8)
    rows[:] = (np.arange(first, first + count) % 251)[:, None]
    batch.count = count
    batch.groups.append(PayloadRows(0, count, rows, np.arange(count), np.full(count, 256)))
    return batch


def numbers(batch: ReceiveBatch) -> list[int]:
    found = batch.headers["epoch"][: batch.count].tolist()
    for row, number in enumerate(found):
        assert batch.sizes[row] == 288
        assert (batch.payload[row, :256] == number % 251).all()
    return [int(number) for number in found]


def is_readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def test_waker_wakes_once_and_any_number_of_times() -> None:
    waker = Waker()
    assert not is_readable(waker.fileno())
    waker.wake()
    waker.wake()
    assert is_readable(waker.fileno())
    waker.drain()
    assert not is_readable(waker.fileno())
    waker.drain()
    waker.close()
    waker.close()
    waker.wake()


def test_memory_network_delivers_and_signals() -> None:
    network = MemoryNetwork(to_everybody, W5)
    a, b = network.attach(A), network.attach(B)
    batch = ReceiveBatch(W5, 4)
    assert a.send(numbered(0, 6)) == 6
    for transport in (a, b):
        assert is_readable(transport.fileno())
        found = []
        for expected in (4, 2):
            assert transport.receive(batch) == expected
            found += numbers(batch)
        assert found == list(range(6))
        assert not is_readable(transport.fileno())
        assert transport.receive(batch) == 0
    a.close()
    b.close()


def test_memory_network_loses_what_does_not_fit_or_has_no_member() -> None:
    network = MemoryNetwork(to_everybody, W5, capacity=3)
    a, b = network.attach(A), network.attach(B)
    with pytest.raises(ValueError, match="taken"):
        network.attach(A)
    a.send(numbered(0, 5))
    assert network.lost == 4
    b.close()
    batch = ReceiveBatch(W5, 8)
    assert a.receive(batch) == 3
    a.send(numbered(0, 1))
    assert network.lost == 5
    a.close()
    a.close()


@pytest.mark.parametrize("name", ["loss", "duplicate", "reorder"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_rates_are_probabilities(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        FaultRates(**{name: value})


def run_faults(rates: FaultRates, seed: int, batches: int = 40) -> tuple[list[int], FaultyTransport]:
    """Numbers that come back to the sender when every frame is sent to it, through faults both ways."""
    network = MemoryNetwork(lambda source, frame: [(source, frame)], W5, capacity=10000)
    transport = FaultyTransport(network.attach(A), rates, seed)
    batch = ReceiveBatch(W5, 32)
    found: list[int] = []
    for number in range(batches):
        assert transport.send(numbered(32 * number, 32)) == 32
        while transport.receive(batch):
            found += numbers(batch)
    transport.close()
    return found, transport


def test_no_faults_change_nothing() -> None:
    found, transport = run_faults(FaultRates(), 1)
    assert found == list(range(40 * 32))
    assert not FaultRates()
    assert (transport.faults.lost, transport.faults.duplicated, transport.faults.reordered) == (0, 0, 0)


def test_loss_duplication_and_reordering_happen_as_often_as_asked() -> None:
    found, transport = run_faults(FaultRates(loss=0.1), 1)
    # Every frame passes twice, out and in, unless the first passage lost it.
    assert len(found) == 1280 - transport.faults.lost
    assert 1280 * 0.1 < transport.faults.lost < 1280 * 0.3
    assert found == sorted(found)

    found, transport = run_faults(FaultRates(duplicate=0.1), 1)
    assert len(found) == 1280 + transport.faults.duplicated
    assert set(found) == set(range(1280))
    assert 1280 * 0.1 < transport.faults.duplicated < 1280 * 0.3

    found, transport = run_faults(FaultRates(reorder=0.1), 1)
    assert transport.faults.reordered > 1280 * 0.1
    assert found != sorted(found)
    # Only what was held back at the very end may be missing.
    assert set(range(1280 - 64)) <= set(found)
    assert len(set(found)) == len(found)


def test_the_seed_decides() -> None:
    rates = FaultRates(loss=0.05, duplicate=0.05, reorder=0.05)
    first, one = run_faults(rates, 7)
    again, two = run_faults(rates, 7)
    other, _ = run_faults(rates, 8)
    assert first == again
    assert one.faults == two.faults
    assert first != other


def test_a_held_frame_waits_until_something_has_overtaken_it() -> None:
    network = MemoryNetwork(lambda source, frame: [(source, frame)], W5)
    transport = FaultyTransport(network.attach(A), FaultRates(reorder=1.0), 3)
    plain = ReceiveBatch(W5, 32)
    transport.send(numbered(0, 1))
    assert transport.inner.receive(plain) == 0
    transport.send(numbered(1, 1))
    assert transport.inner.receive(plain) == 0, "both are held: nothing has overtaken them"
    transport.close()


def test_oversized_datagrams_stay_oversized() -> None:
    def oversize(source: Address, frame: bytes) -> Iterable[tuple[Address, bytes]]:
        return [(source, frame + bytes(5000))]

    network = MemoryNetwork(oversize, W5)
    transport = FaultyTransport(network.attach(A), FaultRates(duplicate=0.5), 3)
    transport.send(numbered(0, 8))
    batch = ReceiveBatch(W5, 32)
    assert transport.receive(batch) >= 8
    assert (batch.sizes[: batch.count] > W5.datagram_bytes).all()
    transport.close()
