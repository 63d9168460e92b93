# SPDX-License-Identifier: Apache-2.0
"""What a worker knows of every slot of its pool, as arrays, so that a batch of frames is handled at once.

The header of the contribution last sent in a slot is kept as it stands on the wire. A result or nack is this header
with few bytes changed, so a batch is checked with comparisons of whole 64-bit groups, byte order aside.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from p4reduce import constants
from p4reduce.core.config import CoreConfig
from p4reduce.wire import HEADER, HeaderArray, Kind, Op

Index = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Groups = npt.NDArray[np.uint64]

GROUPS = constants.HEADER_BYTES // 8


def header_groups(headers: HeaderArray) -> Groups:
    """View of headers as 64-bit groups in the order of their bytes, shape (n, 4)."""
    groups: Groups = headers.view(np.uint64).reshape(-1, GROUPS)
    return groups


def change(**fields: int) -> Groups:
    """What turns one header into another by exclusive or: groups of shape (4,)."""
    header = np.zeros(1, dtype=HEADER)
    for name, value in fields.items():
        header[name] = value
    groups: Groups = header_groups(header)[0].copy()
    return groups


class SlotTable:
    """One row per slot of the pool, and a last one that is never busy: what a frame with a wrong slot is held against.

    A row describes the chunk that is outstanding in the slot, or the last one that was.
    """

    def __init__(self, config: CoreConfig) -> None:
        self.slots = config.or_slots + config.add_slots
        rows = self.slots + 1
        self.headers: HeaderArray = np.zeros(rows, dtype=HEADER)
        self.groups = header_groups(self.headers)
        self.headers["version"] = constants.VERSION
        self.headers["kind"] = Kind.CONTRIBUTE
        self.headers["op"] = Op.ADD
        self.headers["op"][: config.or_slots] = Op.OR
        self.headers["epoch"] = config.epoch
        self.headers["slot"] = np.arange(rows)
        self.headers["rank"] = config.rank
        # Views of the fields that change with every chunk.
        self.words = self.headers["words"]
        self.round = self.headers["round"]
        self.check = self.headers["check"]
        self.tag = self.headers["tag"]
        self.total: Groups = np.zeros(rows, dtype=np.uint64)
        """Sum of all ranks' signatures: what a result's check holds besides the linear check of its payload."""
        self.size: Index = np.zeros(rows, dtype=np.int64)
        """Bytes of the frame, header included."""
        self.used: Mask = np.zeros(rows, dtype=np.bool_)
        """A chunk was sent in it, ever."""
        self.busy: Mask = np.zeros(rows, dtype=np.bool_)
        """A chunk is outstanding."""
        self.part: Index = np.zeros(rows, dtype=np.int64)
        """Key of the chunk's part."""
        self.index: Index = np.zeros(rows, dtype=np.int64)
        """The chunk's number within its bucket."""
        self.first_row: Index = np.zeros(rows, dtype=np.int64)
        """Scratch for finding copies within a batch."""
        self.failures: npt.NDArray[np.uint8] = np.zeros(rows, dtype=np.uint8)
        """How often a result of this chunk failed its check, copies of one answer counted once."""
        self.answered: Mask = np.zeros(rows, dtype=np.bool_)
        """A result failed its check since the chunk was last sent."""
        self._result = change(kind=Kind.CONTRIBUTE ^ Kind.RESULT, count_or_reason=config.world_size)

    def expected(self, groups: Groups, slots: Index, sizes: Index) -> Mask:
        """Which received frames are the results of the chunks outstanding in `slots`.

        Everything counts but the check: version, kind, op, words, epoch, slot, rank, count, round, tag, size, and
        that a chunk is outstanding.
        """
        difference = groups ^ self.groups.take(slots, axis=0)
        difference ^= self._result
        same: Mask = (difference[:, 0] | difference[:, 1] | difference[:, 3]) == 0
        same &= self.busy.take(slots)
        same &= self.size.take(slots) == sizes
        return same

    def refuses(self, header: HeaderArray, slot: int) -> bool:
        """Whether a nack (one header) refuses the chunk outstanding in `slot`.

        The switch sends the header back as it saw it, so a frame whose header was damaged on its way up is told
        from one that was refused as we sent it.
        """
        reason = int(header["count_or_reason"][0])
        difference = header_groups(header)[0] ^ self.groups[slot]
        nack = change(kind=Kind.CONTRIBUTE ^ Kind.NACK, count_or_reason=reason)
        return bool(self.busy[slot]) and bool((difference == nack).all())
