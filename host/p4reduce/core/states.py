# SPDX-License-Identifier: Apache-2.0
"""The life of a bucket, as one table, and why the protocol around it is safe and alive.

**Buckets.** A bucket is agreed upon before it is summed. Its OR chunks carry what the ranks must know first: the
largest exponent of every block; nothing for integers, which have no exponents; and nothing for a barrier and for a
reduction of no elements, which are over when the one OR chunk has its result. Its ADD chunks carry the integers.
Within a stream all ranks send the same chunks under the same numbers whatever their timing, because a bucket enters
both streams in the order of submission; between the streams nothing is ordered, so that the exponents of bucket k + 1
overtake the data of bucket k. A bucket whose exponents are agreed early waits in AGREED until all earlier ones have
entered the ADD stream.

**Slots.** Chunk g of a stream lives in slot g mod window, round g div window. A rank sends chunk g only when it has
the result of chunk g - window, the same slot's last one. Hence, for the slot's version that round r uses:

1. Whoever sends round r + 1 has the result of round r, and a result exists only when every rank has contributed.
   So when the switch starts round r + 2 in the cell of round r, every rank has the result of r: nothing that
   somebody can still need is overwritten.
2. Copies of old frames do nothing. In the cell of its own round a copy finds its worker's bit set; in a cell that
   has moved on the stored round is newer. A copy never starts a round, for the cell would have to hold an older one,
   and it has held the copy's own since the original came.
3. A result is accepted only for the chunk that is outstanding in its slot: same epoch, slot, rank, round, op, words
   and tag, counting all ranks, and with the check that linear arithmetic demands. Everything else is counted and
   dropped. The core frees a slot in no other way, so no loss, copy, delay or damage can make it take a wrong sum.

**Liveness.** Let m be the lowest chunk number that any rank still waits for in a stream. Every rank that has not
its result has it outstanding or has not been given the bucket yet, and for each of them it is the oldest chunk. A
stream always sends its oldest chunk again when its timer runs out, even when it holds the others back. So every
contribution to m reaches the switch, and after that every repetition is answered with the stored result, provided
that frames get through now and then. Where they do not, the deadline reports it.

**Commitment.** A rank that receives (slot, round r + 1) knows that every rank has the result of (slot, round r).
Until it knows that of a whole bucket and all earlier ones it keeps what it sent and what it got: another rank may have
to sum the bucket again on the ring path (ledger.py). When an epoch ends without an error for the caller, its buckets
are handed over to that path.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final


class Phase(Enum):
    """Where a bucket stands."""

    NEW = auto()
    """The caller's; no core knows it."""
    QUEUED = auto()
    """Submitted; nothing of it has been sent."""
    AGREEING = auto()
    """Its OR chunks are under way."""
    AGREED = auto()
    """All ranks know its exponents; its turn in the ADD stream has not come."""
    SUMMING = auto()
    """Its ADD chunks are under way."""
    COMPLETED = auto()
    """The caller's again, with the result."""
    HANDED_OVER = auto()
    """The ring path's."""
    ABANDONED = auto()
    """The epoch ended first; the caller's again, without a result."""


class Step(Enum):
    """What happens to a bucket."""

    SUBMIT = auto()
    ENTER_OR = auto()
    AGREE = auto()
    ENTER_ADD = auto()
    FINISH = auto()
    HAND_OVER = auto()
    ABANDON = auto()


TABLE: Final[dict[tuple[Phase, Step], Phase]] = {
    (Phase.NEW, Step.SUBMIT): Phase.QUEUED,
    (Phase.QUEUED, Step.ENTER_OR): Phase.AGREEING,
    # A barrier and a reduction of no elements have nothing to sum.
    (Phase.AGREEING, Step.FINISH): Phase.COMPLETED,
    (Phase.AGREEING, Step.AGREE): Phase.AGREED,
    (Phase.AGREED, Step.ENTER_ADD): Phase.SUMMING,
    (Phase.SUMMING, Step.FINISH): Phase.COMPLETED,
    # At the end of an epoch; a bucket that no core has seen goes there at once.
    (Phase.NEW, Step.HAND_OVER): Phase.HANDED_OVER,
    (Phase.QUEUED, Step.HAND_OVER): Phase.HANDED_OVER,
    (Phase.AGREEING, Step.HAND_OVER): Phase.HANDED_OVER,
    (Phase.AGREED, Step.HAND_OVER): Phase.HANDED_OVER,
    (Phase.SUMMING, Step.HAND_OVER): Phase.HANDED_OVER,
    (Phase.HANDED_OVER, Step.FINISH): Phase.COMPLETED,
    (Phase.HANDED_OVER, Step.ABANDON): Phase.ABANDONED,
    (Phase.QUEUED, Step.ABANDON): Phase.ABANDONED,
    (Phase.AGREEING, Step.ABANDON): Phase.ABANDONED,
    (Phase.AGREED, Step.ABANDON): Phase.ABANDONED,
    (Phase.SUMMING, Step.ABANDON): Phase.ABANDONED,
}
"""Every transition there is. A pair that is not here is a fault of the core."""


def after(phase: Phase, step: Step) -> Phase:
    """Phase that follows; KeyError for a transition that cannot be."""
    return TABLE[phase, step]
