# SPDX-License-Identifier: Apache-2.0
"""From what the ranks measured to rows and ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from p4reduce.bench.options import ELEMENT_BYTES

PATHS = ("switch", "gloo", "forward", "scalar")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One thing to measure: part of the plan that all workers carry out in the same order."""

    path: str
    size: int
    """Bytes that each worker hands in; for `forward` the Ethernet frame."""
    iterations: int
    warmup: int
    deadline: float
    lane_bits: int = 32

    @property
    def count(self) -> int:
        """Elements that each worker hands in."""
        return self.size // ELEMENT_BYTES

    def name(self, workers: int) -> str:
        """For messages."""
        what = (
            "frames of" if self.path == "forward" else f"{self.lane_bits}-bit lanes," if self.path == "switch" else ""
        )
        return " ".join(f"{self.path}, {workers} workers, {what} {self.size} bytes".split())

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; `Measurement(**...)` is the way back."""
        return asdict(self)


@dataclass(slots=True)
class RankResult:
    """What one rank found. Sums are over all measured iterations; None: cannot be known here."""

    starts: list[int]
    """Nanoseconds on the machine's monotonic clock, one for every iteration; the same on all ranks."""
    ends: list[int]
    wrong: int = 0
    """Elements that were not the exact sum, warm-up included."""
    frames: int | None = None
    """Frames sent."""
    retransmissions: int | None = None
    sent_bytes: int | None = None
    """Ethernet bytes on this rank's link, headers included."""
    received_bytes: int | None = None
    rates: list[float] = field(default_factory=list)
    """`forward` alone: frames a second, interval by interval; the receiver's."""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; `RankResult(**...)` is the way back."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. Times in seconds, rates for each worker unless it says otherwise."""

    workers: int
    size: int
    lane_bits: int
    path: str
    loss: float
    time: float
    """Median over the iterations: from the common start to the moment the last rank has its result."""
    time_p99: float
    frames: float | None
    """Sent by all workers in one iteration, mean; None where nobody counts them."""
    wire_bytes: float | None
    line_share: float | None
    retransmissions: int | None
    """By all workers in all iterations."""
    wrong: int
    iterations: int

    @property
    def count(self) -> int:
        """Elements."""
        return self.size // ELEMENT_BYTES

    @property
    def algbw(self) -> float:
        """Bytes reduced a second."""
        return self.size / self.time

    @property
    def busbw(self) -> float:
        """algbw times 2(n-1)/n: what each link carries where the sum is made in a ring; comparable over n."""
        return self.algbw * 2 * (self.workers - 1) / self.workers

    @property
    def lane_sums(self) -> float:
        """Sums that each worker gets a second."""
        return 0.0 if self.path == "forward" else self.count / self.time

    @property
    def frame_rate(self) -> float | None:
        """Frames a second into the switch, of all workers."""
        return None if self.frames is None else self.frames / self.time

    def as_json(self) -> dict[str, Any]:
        """The row of the JSON document."""
        return {
            "workers": self.workers,
            "size_bytes": self.size,
            "lane_bits": self.lane_bits,
            "path": self.path,
            "time_us": round(self.time * 1e6, 3),
            "time_us_p99": round(self.time_p99 * 1e6, 3),
            "algbw_MBps": round(self.algbw / 1e6, 3),
            "lane_sums_per_s": round(self.lane_sums),
            "frames_per_s": None if self.frame_rate is None else round(self.frame_rate, 1),
            "wire_bytes": None if self.wire_bytes is None else round(self.wire_bytes),
            "line_share": None if self.line_share is None else round(self.line_share, 4),
            "retransmissions": self.retransmissions,
            "wrong": self.wrong,
        }


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile: the smallest value that at least `share` of all do not exceed."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1]


def build_row(wanted: Measurement, ranks: Sequence[RankResult], *, workers: int, loss: float, rate: float) -> Row:
    """One row from what all ranks found. `rate` of a link in bit/s, 0 where it has none."""
    if wanted.path == "forward":
        return _forward_row(wanted, ranks, workers, loss, rate)
    times = [
        (max(ends) - start) / 1e9 for start, *ends in zip(ranks[0].starts, *(rank.ends for rank in ranks), strict=True)
    ]
    median = statistics.median(times)
    carried = [max(rank.sent_bytes, rank.received_bytes or 0) for rank in ranks if rank.sent_bytes is not None]
    wire = max(carried) / len(times) if len(carried) == len(ranks) else None
    again = [rank.retransmissions for rank in ranks if rank.retransmissions is not None]
    frames = [rank.frames for rank in ranks if rank.frames is not None]
    return _row(
        wanted,
        workers,
        loss,
        times,
        frames=sum(frames) / len(times) if len(frames) == len(ranks) else None,
        wire_bytes=wire,
        line_share=wire * 8 / median / rate if rate and wire is not None else None,
        retransmissions=sum(again) if len(again) == len(ranks) else None,
        wrong=sum(rank.wrong for rank in ranks),
        iterations=len(times),
    )


def _row(wanted: Measurement, workers: int, loss: float, times: Sequence[float], **found: Any) -> Row:
    """What every row has, and what was `found` of the path's own."""
    return Row(
        workers=workers,
        size=wanted.size,
        lane_bits=wanted.lane_bits,
        path=wanted.path,
        loss=loss,
        time=statistics.median(times),
        time_p99=percentile(times, 0.99),
        **found,
    )


def _forward_row(wanted: Measurement, ranks: Sequence[RankResult], workers: int, loss: float, rate: float) -> Row:
    """The time is that of one frame; what was lost on the way counts nowhere."""
    times = [1.0 / rate for found in ranks for rate in found.rates if rate]
    if not times:
        raise ValueError(f"{wanted.name(workers)}: no frame arrived")
    median = statistics.median(times)
    return _row(
        wanted,
        workers,
        loss,
        times,
        frames=1.0,
        wire_bytes=float(wanted.size),
        line_share=wanted.size * 8 / median / rate if rate else None,
        retransmissions=0,
        wrong=sum(rank.wrong for rank in ranks),
        iterations=len(times),
    )


@dataclass(frozen=True, slots=True)
class Ratio:
    """One figure against another of the same run."""

    workers: int
    size: int
    lane_bits: int
    loss: float
    name: str
    value: float

    def as_json(self) -> dict[str, Any]:
        """For the JSON document."""
        content = asdict(self)
        content["size_bytes"] = content.pop("size")
        return {**content, "value": round(self.value, 4)}


FRAMES_TO_FORWARD = "frames/s to forward"
SUMS_TO_SCALAR = "lane-sums/s to scalar"
SPEED_TO_GLOO = "speed to gloo"
SPEED_TO_32 = "speed to 32-bit lanes"
TIME_TO_NO_LOSS = "time to no loss"


def ratios(rows: Sequence[Row]) -> list[Ratio]:
    """What the rows of one run say about each other."""
    by_key: Mapping[tuple[Any, ...], Row] = {(row.workers, row.loss, row.path, row.size): row for row in rows}
    single = {(row.workers, row.loss, row.path): row for row in rows if row.path in ("forward", "scalar")}
    clean = {(row.workers, row.path, row.size, row.lane_bits): row for row in rows if row.loss == 0.0}
    widest = {(row.workers, row.loss, row.size): row for row in rows if row.path == "switch" and row.lane_bits == 32}
    found: list[Ratio] = []

    def note(row: Row, name: str, value: float) -> None:
        found.append(Ratio(row.workers, row.size, row.lane_bits, row.loss, name, value))

    for row in rows:
        before = clean.get((row.workers, row.path, row.size, row.lane_bits))
        if row.loss and before is not None and row.path in ("switch", "gloo"):
            note(row, f"{row.path}: {TIME_TO_NO_LOSS}", row.time / before.time)
        if row.path != "switch":
            continue
        forward = single.get((row.workers, row.loss, "forward"))
        if forward is not None and row.frame_rate and forward.frame_rate:
            note(row, FRAMES_TO_FORWARD, row.frame_rate / forward.frame_rate)
        if scalar := single.get((row.workers, row.loss, "scalar")):
            note(row, SUMS_TO_SCALAR, row.lane_sums / scalar.lane_sums)
        if gloo := by_key.get((row.workers, row.loss, "gloo", row.size)):
            note(row, SPEED_TO_GLOO, gloo.time / row.time)
        wide = widest.get((row.workers, row.loss, row.size))
        if wide is not None and row.lane_bits != 32:
            note(row, SPEED_TO_32, wide.time / row.time)
    return found


def total_wrong(rows: Iterable[Row]) -> int:
    """Wrong elements in all rows."""
    return sum(row.wrong for row in rows)
