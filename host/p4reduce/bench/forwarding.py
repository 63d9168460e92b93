# SPDX-License-Identifier: Apache-2.0
"""The baseline `forward`: how many full frames a second the switch forwards from one worker to another.

The sender keeps a window of frames under way, and learns from shared memory, not through the switch, how far the
receiver is: so the switch is never idle and never flooded, and only frames that arrive are counted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from p4reduce import constants
from p4reduce.bench.scalar import KIND_FORWARD
from p4reduce.bench.shared import Shared
from p4reduce.core.batch import PayloadRows, ReceiveBatch, SendBatch
from p4reduce.transport.udp import UdpTransport
from p4reduce.wire import Profile

SENDER, RECEIVER = 0, 1
WINDOWS = (32, 56)
"""Frames under way, one measurement each, the better one counts; BMv2's egress queue holds 64."""
SECONDS = 1.0
WARMUP_SECONDS = 0.2
_INTERVALS = 10
_BATCH = 32
_ARRIVED, _STOP = 2, 3
"""Cells of the shared page: number of the last frame that arrived, and of the window that is over."""
_STUCK_SECONDS = 0.02
_STAND_BY_SECONDS = 0.02
_NAP_SECONDS = 0.00015
"""Both ends rest so long when there is nothing to do: waking for every frame would cost more than the frame."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What the receiver saw with one window."""

    window: int
    rates: list[float]
    """Frames a second, one for each interval."""
    wrong: int
    """Frames that were not as they were sent."""


def pattern(profile: Profile) -> np.ndarray:
    """The payload of every frame, shape (1, payload bytes)."""
    return np.random.default_rng(20532).integers(0, 256, (1, profile.payload_bytes), dtype=np.uint8)


def send(
    transport: UdpTransport, profile: Profile, shared: Shared, number: int, window: int, sent: int, seconds: float
) -> int:
    """Send until the receiver says stop for window `number` (from 1), `seconds` at the longest.

    `sent`: frames sent before, which number on. Returns that number after it.
    """
    out = SendBatch(_BATCH)
    out.headers["version"], out.headers["kind"], out.headers["words"] = constants.VERSION, KIND_FORWARD, profile.words
    # Of use to p4/scalar.p4 alone, where ports are UDP sockets and there is nothing else to forward by.
    out.headers["slot"] = RECEIVER
    row, index, sizes = pattern(profile), np.zeros(_BATCH, np.int64), np.full(_BATCH, profile.payload_bytes)
    settled, seen = sent, shared.get(_ARRIVED)
    moved = time.monotonic()
    limit = moved + seconds
    while shared.get(_STOP) < number and (now := time.monotonic()) < limit:
        arrived = shared.get(_ARRIVED)
        if arrived != seen:
            seen, moved = arrived, now
        elif now - moved > _STUCK_SECONDS:
            settled, moved = sent, now  # all that was under way is lost
        count = min(_BATCH, window - (sent - max(arrived, settled)))
        if count <= 0:
            time.sleep(_NAP_SECONDS)
            continue
        out.clear()
        out.headers["tag"][:count] = np.arange(sent + 1, sent + count + 1)
        out.groups.append(PayloadRows(0, count, row, index[:count], sizes[:count]))
        out.count = count
        sent += transport.send(out)
    return sent


def stand_by(shared: Shared, number: int, deadline: float) -> None:
    """What the other ranks do during window `number`: nothing that takes the processor from the switch."""
    shared.wait(_STOP, deadline, "the end of the forwarding measurement", least=number, poll=_STAND_BY_SECONDS)


def receive(transport: UdpTransport, profile: Profile, shared: Shared, number: int, window: int) -> Arrivals:
    """Take frames for as long as the measurement lasts, then tell the sender to stop."""
    batch, expected = ReceiveBatch(profile, _BATCH), pattern(profile)[0]
    begin = time.monotonic() + WARMUP_SECONDS
    end = begin + SECONDS
    counts, wrong = np.zeros(_INTERVALS, np.int64), 0
    while (now := time.monotonic()) < end:
        time.sleep(_NAP_SECONDS)
        while transport.receive(batch) and (now := time.monotonic()) < end:
            if not batch.count:
                continue
            headers = batch.headers[: batch.count]
            whole = (batch.sizes[: batch.count] == profile.datagram_bytes) & (headers["kind"] == KIND_FORWARD)
            shared.put(_ARRIVED, int(headers["tag"].max()))
            # One payload of a batch is looked at: comparing all would measure that.
            wrong += int((~whole).sum()) + int(not np.array_equal(batch.payload[0], expected))
            if now >= begin:
                counts[int((now - begin) / SECONDS * _INTERVALS)] += int(whole.sum())
    shared.put(_STOP, number)
    return Arrivals(window, [float(count) * _INTERVALS / SECONDS for count in counts], wrong)
