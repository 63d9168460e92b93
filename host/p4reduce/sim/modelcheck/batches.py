# SPDX-License-Identifier: Apache-2.0
"""What both searches show of cores afterwards: frames of a dead epoch change nothing, nor do two frames in one batch.

A search lets every frame arrive by itself; a driver may give a core several at once.
"""

from __future__ import annotations

from p4reduce.sim.modelcheck.frames import Frames
from p4reduce.sim.modelcheck.violation import UNSOUND, Violation
from p4reduce.sim.modelcheck.workers import Workers


def check_forgotten(workers: Workers, frames: Frames) -> int:
    """Answers of the first epoch change nothing in the second one; returns how many were tried. Violation."""
    tried = 0
    for number, answer in enumerate(list(frames.down)):
        if frames.epoch_of(answer) == 0:
            for place, state in enumerate(workers.states[answer.rank]):
                tried += state.epoch
                if state.epoch == 1 and workers.step(answer.rank, place, number) != place:
                    raise Violation(UNSOUND, f"{frames.name(answer)} is not ignored")
    return tried


def check_batches(workers: Workers, frames: Frames) -> int:
    """Two frames in one batch do what they do one after the other, in every state that either of them changes.

    Returns how many pairs were tried; Violation when one does something else. A nack may take its turn after a result
    that came behind it: a core takes the results of a batch first. When it gives up then, it has not sent what it would
    have sent in between.
    """
    tried = 0
    for rank, states in enumerate(list(workers.states)):
        answers = [number for number, frame in enumerate(frames.down) if frame.rank == rank]
        for place in range(len(states)):
            moving = [frame for frame in answers if workers.step(rank, place, frame) != place]
            for first in moving:
                for second in moving:
                    _check_pair(workers, frames, rank, place, (first, second))
                    tried += 1
    return tried


def _check_pair(workers: Workers, frames: Frames, rank: int, place: int, pair: tuple[int, int]) -> None:
    known = workers.states[rank][place]
    live = workers.branch(rank, place)
    try:
        out = {frames.sent(rank, data) for data in live.receive(frames.down[frame].data for frame in pair)}
    except Violation as violation:
        names = " and ".join(frames.name(frames.down[frame]) for frame in pair)
        raise Violation(violation.kind, f"{names} in one batch: {violation}") from None
    sent = {*known.sent, *out}
    apart = {workers.step(rank, workers.step(rank, place, one), other) for one, other in (pair, pair[::-1])}
    if live.core.error is not None:
        ends = [workers.states[rank][end] for end in apart]
        same = any(end.error == type(live.core.error).__name__ and sent <= {*end.sent} for end in ends)
    else:
        same = workers.number(rank, known.epoch, live, sent) in apart
    if not same:
        raise Violation(UNSOUND, "two frames in one batch do something else than one after the other")
