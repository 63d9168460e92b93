# SPDX-License-Identifier: Apache-2.0
"""What the controller tells all ranks of a job to do, and what a rank answers. Plain data: no protobuf here.

The same orders as in proto/controller.proto, whose comments say what each means for the job as a whole;
`p4reduce.path` says what a rank makes of each. `number` rises with every order that the controller gives.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSwitch:
    """Buckets from `first_bucket` on take the switch path of `epoch`, those before it the ring path."""

    number: int
    epoch: int
    or_slots: int
    add_slots: int
    first_bucket: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRing:
    """Every bucket from `first_bucket` on takes the ring path, also those that are complete here already."""

    number: int
    epoch: int
    first_bucket: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Send and accept nothing of `epoch` any more. Answer: the first bucket of it that is not complete here."""

    number: int
    epoch: int
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Reduce a full frame of zeros through `epoch` beside the ring path. Answer: whether that came back."""

    number: int
    epoch: int
    or_slots: int
    add_slots: int
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Start no bucket that has not been handed in. Answer: how many have been."""

    number: int
    why: str = ""


Order = RunSwitch | RunRing | Stop | Trial | Hold


@dataclass(frozen=True, slots=True)
class Answer:
    """To the order with the number `order`."""

    order: int
    bucket: int = 0
    failed: bool = False
    message: str = ""


def reason(order: Order) -> str:
    """The reason in one word, for counting: what stands before the first colon of `why`."""
    return order.why.partition(":")[0].strip() or "unknown"
