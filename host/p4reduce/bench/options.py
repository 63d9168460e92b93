# SPDX-License-Identifier: Apache-2.0
"""What a bench is asked to do, checked before anything is started."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from p4reduce.errors import UsageError

BASELINES = ("gloo", "forward", "scalar")
LANE_BITS = (32, 16, 8)
MAX_WORKERS = 64
MAX_BYTES = 1 << 30
ELEMENT_BYTES = 4
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Settings of one run. UsageError when they make no sense."""

    workers: tuple[int, ...] = (2,)
    sizes: tuple[int, ...] = (1 << 20,)
    """Bytes of float32 that each worker hands in."""
    switch: str = "embedded"
    profile: str = "w34"
    rate: float = 0.0
    """Bit/s of Ethernet frames on every link, each way; 0: not limited."""
    delay: float = 0.0
    """Seconds, on every link, each way."""
    losses: tuple[float, ...] = (0.0,)
    """Shares of frames that every link loses, each way: one lab for each."""
    lane_bits: tuple[int, ...] = (32,)
    baselines: tuple[str, ...] = ()
    iterations: int = 20
    warmup: int = 5
    seed: int = 0
    deadline: float = 120.0
    """Seconds that one measurement may take."""

    def __post_init__(self) -> None:
        _each("workers", self.workers, lambda n: 1 <= n <= MAX_WORKERS, f"from 1 to {MAX_WORKERS}")
        _each("sizes", self.sizes, lambda n: 4 <= n <= MAX_BYTES and n % 4 == 0, "multiples of 4 bytes up to 1G")
        _each("losses", self.losses, lambda share: 0.0 <= share < 1.0, "shares below 1")
        _each("lanes", self.lane_bits, lambda bits: bits in LANE_BITS, "of 32, 16, 8 bits")
        unknown = [name for name in self.baselines if name not in BASELINES]
        if unknown:
            raise UsageError(f"baseline {unknown[0]!r} is none of {', '.join(BASELINES)}")
        if self.switch not in ("bmv2", "embedded"):
            raise UsageError(f"switch {self.switch!r} is neither bmv2 nor embedded")
        if self.iterations < 1 or self.warmup < 0:
            raise UsageError("a measurement needs at least one iteration, and a warm-up of 0 or more")
        if not 0 <= self.seed < 1 << 63:
            raise UsageError(f"seed {self.seed}: a whole number from 0 on is needed")
        if not 0.0 < self.deadline < math.inf:
            raise UsageError(f"a deadline of {self.deadline:g} s is no number of seconds above 0")
        if "forward" in self.baselines and 1 in self.workers:
            raise UsageError("the baseline forward has a sender and a receiver: it needs two workers")

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def _each(what: str, values: Sequence[_T], good: Callable[[_T], bool], rule: str) -> None:
    if not values:
        raise UsageError(f"{what}: at least one is needed")
    for value in values:
        if not good(value):
            raise UsageError(f"{what}: {value} is not allowed, only {rule}")


def parse_list(text: str, one: Callable[[str], _T], what: str) -> tuple[_T, ...]:
    """What is between commas, each once, in the order given. UsageError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise UsageError(f"{text!r} is no list of {what}")
    return tuple(dict.fromkeys(one(part) for part in parts))


def parse_whole(text: str) -> int:
    """A number without sign. UsageError."""
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{text!r} is no whole number")
    return int(text)


def parse_size(text: str) -> int:
    """Bytes from 64K, 16M, 1G (powers of 1024) or plain bytes. UsageError."""
    found = re.fullmatch(r"([0-9]+)([kmg]?)(?:i?b)?", text.lower())
    if found is None:
        raise UsageError(f"{text!r} is no size such as 64K or 16M")
    return int(found[1]) * _UNITS[found[2]]


def parse_sizes(text: str, factor: int = 2) -> tuple[int, ...]:
    """Sizes from a list of sizes and ranges: 64K:16M is 64K, 128K ... 16M with a factor of 2. UsageError.

    A range ends with its last size, also when the factor would step over it.
    """
    if factor < 2:
        raise UsageError(f"a factor of {factor}: sizes grow by 2 or more")
    sizes: dict[int, None] = {}
    for part in parse_list(text, str, "sizes"):
        first, colon, last = part.partition(":")
        low = parse_size(first)
        high = parse_size(last) if colon else low
        if high < low or low == 0:
            raise UsageError(f"sizes {part!r}: a range goes up, and from more than 0")
        while low < high:
            sizes[low] = None
            low *= factor
        sizes[high] = None
    return tuple(sizes)


def show_size(size: int) -> str:
    """The shortest exact form: 16M, 1500."""
    for unit, value in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if size >= value and size % value == 0:
            return f"{size // value}{unit}"
    return str(size)
