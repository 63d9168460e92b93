# SPDX-License-Identifier: Apache-2.0
"""The buckets that some rank may still need from this one, in order: what is kept and when it goes.

A bucket is committed when this rank knows that every rank has all its results. Two observations prove it:

- The result of chunk g + window of a stream. A rank sends that chunk only once it has the result of chunk g, and a
  result needs all ranks. So all chunks below the stream's first missing one, less a window, are done everywhere.
- A result of an OR chunk of bucket k. A rank lets bucket k into its OR stream only once all buckets up to k - lag are
  complete there (worker.py). So these are complete everywhere. This bounds the number of buckets that are kept where
  the first proof does not come: a reduction with nothing but barriers behind it.

A bucket goes only when it and every earlier one is committed: whatever bucket is the first that is incomplete at some
rank, all ranks have it and all later ones. docs/protocol.md, "What is kept, and how long", has the argument.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from p4reduce.core.bucket import Bucket
from p4reduce.core.part import BarrierPart, Part, SumPart
from p4reduce.core.stream import Stream
from p4reduce.quantize import Exponents


@dataclass(eq=False, slots=True)
class Entry:
    """A bucket and what there is of it."""

    bucket: Bucket
    part: Part | None = None
    """Its share of the stream that it is in, or was in last; None while it is queued."""
    local: Exponents | None = None
    """This rank's own block exponents; None while they are not agreed upon."""


class Ledger:
    """Entries by bucket number, without gaps, the oldest first."""

    def __init__(self, first: int, streams: tuple[Stream, Stream]) -> None:
        self.proved = first
        """Every bucket below this number is complete at all ranks."""
        self._streams = streams
        self._entries: dict[int, Entry] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, number: int) -> Entry:
        return self._entries[number]

    @property
    def kept_bytes(self) -> int:
        """Memory for contributions and sums."""
        return sum(entry.part.memory_bytes for entry in self if isinstance(entry.part, SumPart))

    def add(self, bucket: Bucket) -> None:
        """Take in a bucket that has just been numbered."""
        self._entries[bucket.number] = Entry(bucket)

    def drop_committed(self) -> None:
        """Let go of what no rank can need any more."""
        while self._entries:
            number, entry = next(iter(self._entries.items()))
            if number >= self.proved and not self._committed(entry.part):
                return
            del self._entries[number]
            _release(entry)

    def restart(self, first: int) -> None:
        """Drop everything; the next bucket has the number `first`."""
        for entry in self:
            _release(entry)
        self._entries.clear()
        self.proved = first

    def take_all(self) -> list[Entry]:
        """Give everything away."""
        entries = list(self)
        self._entries.clear()
        return entries

    def _committed(self, part: Part | None) -> bool:
        """Whether a bucket's last chunks are done everywhere; its exponents are, when its integers are."""
        if not isinstance(part, SumPart | BarrierPart) or part.missing:
            return False
        return part.end <= self._streams[0 if isinstance(part, BarrierPart) else 1].committed


def _release(entry: Entry) -> None:
    if isinstance(entry.part, SumPart):
        entry.part.release()
