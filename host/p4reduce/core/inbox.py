# SPDX-License-Identifier: Apache-2.0
"""Sorts what the network brings: expected results, nacks that matter, and everything else, which is counted."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from p4reduce import constants
from p4reduce.core.batch import ReceiveBatch
from p4reduce.core.config import CoreConfig
from p4reduce.core.counters import CoreCounters
from p4reduce.core.slots import Index, SlotTable, header_groups
from p4reduce.wire import Kind, Reason

_REASONS = frozenset(int(reason) for reason in Reason)
_HALF = 1 << 31


class Sorted(NamedTuple):
    """What of a batch the core acts on."""

    rows: Index
    """Rows that hold the result of an outstanding chunk, headers checked, payloads not; copies among them."""
    slots: Index
    """The slots of these rows."""
    refused: tuple[Reason, int] | None
    """Reason and slot of the first nack that refuses an outstanding chunk."""


class Inbox:
    """Header checks of one worker. All state is the slot table's."""

    def __init__(self, config: CoreConfig, table: SlotTable, counters: CoreCounters) -> None:
        self._config = config
        self._table = table
        self._counters = counters

    def sort(self, batch: ReceiveBatch) -> Sorted:
        """Check all headers of a batch at once. Only frames that are not plain results cost time each."""
        table, count = self._table, batch.count
        # Rows shorter than a header hold old bytes; their size fits no chunk.
        slots = batch.headers["slot"][:count].astype(np.int64)
        np.minimum(slots, table.slots, out=slots)
        good = table.expected(header_groups(batch.headers[:count]), slots, batch.sizes[:count])
        rows = good.nonzero()[0]
        refused = None
        if len(rows) < count:
            slots = slots.take(rows)
            for row in (~good).nonzero()[0].tolist():
                found = self._other(batch, row)
                refused = refused or found
        return Sorted(rows, slots, refused)

    def _other(self, batch: ReceiveBatch, row: int) -> tuple[Reason, int] | None:
        """Count a frame that is not the result of an outstanding chunk; returns a refusal that matters."""
        table, counters = self._table, self._counters
        size = int(batch.sizes[row])
        header = batch.headers[row : row + 1]
        if size < constants.HEADER_BYTES or header["version"][0] != constants.VERSION:
            counters.malformed += 1
            return None
        if int(header["epoch"][0]) != self._config.epoch or int(header["rank"][0]) != self._config.rank:
            counters.foreign += 1
            return None
        kind, slot = int(header["kind"][0]), int(header["slot"][0])
        if slot >= table.slots or not table.used[slot] or not self._sized(kind, int(header["words"][0]), size):
            counters.malformed += 1
            return None
        if kind == Kind.NACK and int(header["count_or_reason"][0]) in _REASONS and table.refuses(header, slot):
            reason = Reason(int(header["count_or_reason"][0]))
            counters.nacks[reason] += 1
            return reason, slot
        # How many rounds ago its slot finished it: 0 for the last finished chunk.
        age = (int(table.round[slot]) - int(header["round"][0]) - int(table.busy[slot])) & 0xFFFFFFFF
        if age == 0 and kind == Kind.RESULT:
            counters.duplicates += 1
        elif age < _HALF:
            counters.stale += 1
        else:
            # For the outstanding chunk, or one to come, but not as sent.
            counters.malformed += 1
        return None

    def _sized(self, kind: int, words: int, size: int) -> bool:
        if kind == Kind.NACK:
            return size == constants.HEADER_BYTES
        if kind != Kind.RESULT or words not in (1, self._config.profile.words):
            return False
        return size == constants.HEADER_BYTES + words * constants.WORD_BYTES
