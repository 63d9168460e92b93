# SPDX-License-Identifier: Apache-2.0
"""The mark: the switch's own memory of which epochs were granted on it.

A switch answers a repeated epoch with the stored sums of the old one, so no epoch may ever be granted twice on it,
whatever becomes of the controller's file and clock. The only memory that lives exactly as long as the switch's
registers is the switch itself: one entry of the table `epochs` that belongs to nobody (statistics row 0) stands above
every epoch granted so far. It is raised before an epoch beyond it is installed, RESERVE epochs at a time, the higher
mark written before the lower one is deleted; a new controller reads it and goes on above it. A frame with the mark's
own number is refused like any other: `admit` has no entry for it.

A pipeline that is pushed anew has no mark. Whoever finds none puts one above every epoch he knows of, at once.
"""

from __future__ import annotations

from collections.abc import Iterable

from p4reduce.errors import SwitchError
from p4reduce_controller.entries import EPOCHS, NOBODY, Entity, TableEntry, deletes, inserts
from p4reduce_controller.link import Switch
from p4reduce_controller.store import MAX_EPOCH

RESERVE = 256
"""Epochs that one write of the mark is good for."""


def mark(number: int) -> TableEntry:
    """The entry that says: no epoch from `number` on was ever granted."""
    return TableEntry(EPOCHS, (("epoch", number),), "known_epoch", (("stats", NOBODY),))


def epoch_of(entry: TableEntry) -> int:
    """The number in an entry of `epochs`."""
    return dict(entry.key)["epoch"]


def is_mark(entity: Entity) -> bool:
    """Whether this is a mark, and not an epoch's entry."""
    return isinstance(entity, TableEntry) and entity.table == EPOCHS and dict(entity.params).get("stats") == NOBODY


class Mark:
    """The mark of one switch over all sessions with it. One thread at a time."""

    def __init__(self) -> None:
        self._present: set[int] = set()
        self._floor = 0

    def adopt(self, switch: Switch, present: Iterable[TableEntry], known: int = 0) -> int:
        """Take over what a new session found on the switch. SwitchError.

        `known`: the highest epoch that this controller knows of. Returns the mark, 0 when no epoch was ever granted.
        Epochs handed out before are void below it: another controller may have granted them meanwhile. A switch that
        lost its mark, or was left by a controller that knew none, gets one before anything else is written.
        """
        self.renew(switch, present, known)
        self._floor = self.highest
        return self.highest

    def renew(self, switch: Switch, present: Iterable[TableEntry], known: int = 0) -> bool:
        """Look whether the mark still stands where it must, and put it there. Returns whether one has gone.

        None has where there was none: epochs of the ring path alone are granted without the switch.
        """
        had = bool(self._present)
        numbers = [entry for entry in present if entry.table == EPOCHS]
        self._present = {epoch_of(entry) for entry in numbers if is_mark(entry)}
        granted = max((epoch_of(entry) for entry in numbers if not is_mark(entry)), default=0)
        granted = max(granted, known if not self._present else 0)
        if granted >= self.highest and granted:
            self._raise(switch, granted)
            return had
        return False

    @property
    def highest(self) -> int:
        """The mark; 0 without one."""
        return max(self._present, default=0)

    def reserve(self, switch: Switch, epoch: int) -> None:
        """Make sure that the mark is above `epoch`, which is about to be granted. SwitchError: it must not be."""
        if epoch <= self._floor:
            raise SwitchError(f"epoch {epoch} was handed out before the session with the switch was lost")
        if epoch >= self.highest:
            self._raise(switch, epoch)
            self.clear(switch)

    def holds(self, entity: Entity) -> bool:
        """Whether an entry's place is a mark's: no epoch of that number was installed, so none is to be removed."""
        return isinstance(entity, TableEntry) and entity.table == EPOCHS and epoch_of(entity) in self._present

    def clear(self, switch: Switch) -> None:
        """Delete marks below the highest: what a raise leaves, or a controller that ended in the middle of one."""
        lower = sorted(self._present - {self.highest})
        if lower:
            switch.write(deletes(mark(number) for number in lower), missing_ok=True)
            self._present.difference_update(lower)

    def _raise(self, switch: Switch, epoch: int) -> None:
        number = min(epoch + RESERVE, MAX_EPOCH + 1)
        if number <= epoch:
            raise SwitchError(f"no epoch is left after {epoch}: epochs have 32 bits; restart the switch")
        # A write of its own: a batch goes on after an update that failed.
        switch.write(inserts([mark(number)]))
        self._present.add(number)
