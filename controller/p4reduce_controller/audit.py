# SPDX-License-Identifier: Apache-2.0
"""The switch's content: what must stand there, how it gets there, and what an audit finds there instead.

The ledger follows what was written, in the thread that writes, so that it is never ahead of the switch or behind it.
`difference` mends the base; an epoch that has lost entries is not mended: while they were missing, ranks were refused,
and only the ranks together can say where to go on. It is reported, and gets no entries again.

simple_switch_grpc has a trap here: a pipeline pushed by somebody else makes P4Runtime forget the multicast groups, but
the replication engine keeps them, and a group that is inserted again replicates everything twice
(p4lang/behavioral-model issue 891). `fresh_groups` inserts, deletes, and inserts: the deletion reaches the old nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from p4reduce_controller.entries import (
    COUNTER,
    COUNTER_NAMES,
    EPOCHS,
    TABLES,
    Entity,
    Epoch,
    Group,
    TableEntry,
    Update,
    Verb,
    difference,
)
from p4reduce_controller.link import Switch
from p4reduce_controller.marks import Mark, epoch_of, is_mark


class Standing(Enum):
    """What is known of an epoch's entries on the switch."""

    WHOLE = "all of them stand there"
    REVOKED = "all but the admit entries stand there"
    UNSURE = "a write failed, or an audit found some gone: any of them may stand there"


@dataclass(frozen=True, slots=True)
class Finding:
    """What an audit found: updates that mend it, epochs that have lost entries, and a sentence for the log."""

    updates: tuple[Update, ...] = ()
    lost: tuple[int, ...] = ()
    text: str = ""


class Ledger:
    """What was written to one switch. One thread at a time."""

    def __init__(self, base: Sequence[Entity]) -> None:
        self._base = tuple(base)
        self._epochs: dict[int, tuple[Epoch, Standing]] = {}

    def reset(self, whole: Iterable[Epoch]) -> None:
        """A new session has begun: the base and these epochs stand there, and nothing else."""
        self._epochs = {plan.number: (plan, Standing.WHOLE) for plan in whole}

    def note(self, plan: Epoch, standing: Standing) -> None:
        """An epoch's entries were written."""
        self._epochs[plan.number] = (plan, standing)

    def gone(self, plan: Epoch) -> None:
        """An epoch's entries were removed."""
        self._epochs.pop(plan.number, None)

    def standing(self, number: int) -> Standing | None:
        """What is known of an epoch; None when it has no entries."""
        found = self._epochs.get(number)
        return found[1] if found is not None else None

    def wanted(self) -> list[Entity]:
        """Everything that must stand there."""
        wanted = list(self._base)
        for plan, standing in self._epochs.values():
            if standing is not Standing.UNSURE:
                wanted += plan.rest()
            if standing is Standing.WHOLE:
                wanted += plan.admit()
        return wanted

    def compare(self, present: Iterable[Entity]) -> Finding:
        """Compare with what was read from the switch, marks left out. Epochs that have lost entries become UNSURE."""
        present = list(present)
        found = {entity.identity: entity for entity in present}
        lost = []
        for number, (plan, standing) in list(self._epochs.items()):
            owed = [*plan.rest(), *plan.admit()] if standing is Standing.WHOLE else plan.rest()
            if standing is not Standing.UNSURE and any(found.get(e.identity) != e for e in owed):
                # One that is on its way out is ended by its removal.
                if standing is Standing.WHOLE:
                    lost.append(number)
                self._epochs[number] = (plan, Standing.UNSURE)
        tolerated = {
            entity.identity
            for plan, standing in self._epochs.values()
            if standing is Standing.UNSURE
            for entity in (*plan.rest(), *plan.admit())
        }
        updates = difference(self.wanted(), [e for e in present if e.identity not in tolerated])
        return Finding(tuple(fresh_groups(updates)), tuple(sorted(lost)), _text(updates, lost))


def _text(updates: Sequence[Update], lost: Sequence[int]) -> str:
    parts = []
    for verb, what in ((Verb.INSERT, "missing"), (Verb.MODIFY, "changed"), (Verb.DELETE, "not ours")):
        named = [str(update.entity) for update in updates if update.verb is verb]
        if named:
            more = f" and {len(named) - 3} more" if len(named) > 3 else ""
            parts.append(f"{what}: {', '.join(named[:3])}{more}")
    if lost:
        parts.append(f"entries gone of epoch {', '.join(map(str, lost))}")
    return "; ".join(parts)


def fresh_groups(updates: Iterable[Update]) -> list[Update]:
    """The same updates, with every new multicast group made twice: see above."""
    made: list[Update] = []
    for update in updates:
        if update.verb is Verb.INSERT and isinstance(update.entity, Group):
            empty = Group(update.entity.number, frozenset())
            made += [Update(Verb.INSERT, empty), Update(Verb.DELETE, empty)]
        made.append(update)
    return made


class Keeper:
    """Writes to one switch, and knows what stands there, over all sessions with it. In the link's thread alone.

    SwitchError from all methods that take a switch.
    """

    def __init__(self, base: Sequence[Entity]) -> None:
        self._base = tuple(base)
        self.ledger = Ledger(base)
        self.mark = Mark()

    def install(self, plan: Epoch, switch: Switch) -> None:
        """Start an epoch. The switch must remember it before it can be granted."""
        self.mark.reserve(switch, plan.number)
        self.ledger.note(plan, Standing.UNSURE)
        switch.write(fresh_groups(plan.install()))
        self.ledger.note(plan, Standing.WHOLE)

    def revoke(self, plan: Epoch, switch: Switch) -> None:
        """Let no contribution of this epoch count any more."""
        known = self.ledger.standing(plan.number)
        self.ledger.note(plan, Standing.UNSURE)
        switch.write(plan.revoke(), missing_ok=True)
        if known is Standing.WHOLE:
            self.ledger.note(plan, Standing.REVOKED)

    def remove(self, plan: Epoch, switch: Switch) -> dict[str, int]:
        """Read an epoch's counters, then take away what stands beside its admit entries."""
        self.ledger.note(plan, Standing.UNSURE)
        indices = [cell.index for cell in plan.counters()]
        counters = dict(zip(COUNTER_NAMES, switch.read_counters(COUNTER, indices), strict=True))
        switch.write([update for update in plan.remove() if not self.mark.holds(update.entity)], missing_ok=True)
        self.ledger.gone(plan)
        return counters

    def take_over(self, switch: Switch, live: Iterable[Epoch], known: int) -> tuple[set[int], int, int]:
        """Give a switch with a new session what it must hold, and take away everything else.

        What stands there already is not touched, so that the jobs of a controller that was restarted never notice.
        `live`: the epochs that it should hold; `known`: the highest epoch that was ever handed out, as far as known.
        Returns the numbers of all epochs that were found, the mark, and how many updates there were.
        """
        entries, present = _read(switch)
        epochs = {epoch_of(entry) for entry in entries if entry.table == EPOCHS and not is_mark(entry)}
        mark = self.mark.adopt(switch, entries, known)
        self.mark.clear(switch)
        kept = [plan for plan in live if plan.number in epochs]
        wanted = [*self._base, *(entity for plan in kept for entity in plan.rest() + plan.admit())]
        updates = difference(wanted, present)
        if updates:
            switch.write(fresh_groups(updates))
        self.ledger.reset(kept)
        return epochs, mark, len(updates)

    def audit(self, switch: Switch, known: int) -> Finding:
        """Compare the switch with the ledger, and mend what may be mended."""
        entries, present = _read(switch)
        renewed = self.mark.renew(switch, entries, known)
        finding = self.ledger.compare(present)
        if finding.updates:
            switch.write(finding.updates, missing_ok=True)
        if renewed:
            text = "; ".join(filter(None, ("the mark of granted epochs was gone", finding.text)))
            finding = Finding(finding.updates, finding.lost, text)
        return finding


def _read(switch: Switch) -> tuple[list[TableEntry], list[Entity]]:
    """All table entries, and everything but the marks."""
    entries = switch.read_tables(TABLES)
    return entries, [*(entry for entry in entries if not is_mark(entry)), *switch.read_groups()]
