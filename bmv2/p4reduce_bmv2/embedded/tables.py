# SPDX-License-Identifier: Apache-2.0
"""Match-action tables of the embedded switch: the control plane's view and the lookup that generated code calls.

Keys are tuples with one element per key field, in the program's order:

| match type | element |
|---|---|
| exact | int |
| lpm | (value, prefix length) |
| ternary | (value, mask), or int for all bits, or None for any value |
| range | (low, high), both included |

p4c compiles optional keys to ternary: give them an int or None. Values are unsigned integers of the field's width.
Bits outside a mask or prefix must be 0 (BadEntry otherwise), so that one entry has one spelling.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from p4reduce_bmv2.embedded.errors import BadEntry, EntryExists, EntryMissing, TableFull
from p4reduce_bmv2.embedded.program import TableNode

KeyElement = int | tuple[int, int] | None
Key = tuple[KeyElement, ...]
Running = tuple[int, tuple[int, ...], "Entry | None"]
"""What generated code sees of an entry: number of the action in the table, parameters, the entry itself."""

_CACHE_SIZE = 4096
"""Results that a table which has to search remembers."""
_NO_ACTION = -1
_MAX_BMV2_PRIORITY = 0x7FFFFFFF
"""Priorities in the JSON count downwards; BMv2's P4Runtime server turns them round at this number."""


@dataclass(frozen=True, slots=True)
class KeyField:
    """One field of a table's key."""

    name: str
    match_type: str
    """exact, lpm, ternary or range."""
    bitwidth: int
    mask: int | None = None
    """Bits that the program looks at, where it masks the key. As in BMv2, entries are masked when they come in."""


@dataclass(frozen=True, slots=True)
class ActionInfo:
    """An action that a table may run, with the widths of its parameters in bits."""

    name: str
    params: tuple[tuple[str, int], ...]


@dataclass(slots=True)
class Entry:
    """One entry. `packets` and `bytes` are its direct counter; they may be assigned."""

    handle: int
    key: Key
    action: str
    params: tuple[int, ...]
    priority: int
    """Larger wins, as in P4Runtime; 0 where the table has no priorities."""
    const: bool = False
    packets: int = 0
    bytes: int = 0


class Table:
    """A table of the running program. Not thread-safe: the caller serialises with Engine.process."""

    def __init__(self, node: TableNode) -> None:
        self.name = node.name
        self.keys = tuple(KeyField(k.name, k.match_type, k.width, k.mask) for k in node.keys)
        self.size = node.size
        self.actions = {a.name: ActionInfo(a.name, tuple(a.params)) for a in node.actions}
        self.has_counters = node.counters
        """True when entries carry direct counters."""
        self.const_entries = False
        """True when the program fixes the entries: insert, modify and delete raise BadEntry."""
        self.const_default = node.default_const
        """True when the program fixes the default action: set_default and reset_default raise BadEntry."""
        kinds = {k.match_type for k in self.keys}
        self.needs_priority = bool(kinds & {"ternary", "range"})
        """True when a key field is ternary or range: then every entry needs a priority of 1 or more."""
        self._searches = bool(kinds - {"exact"})
        self._numbers = {a.name: index for index, a in enumerate(node.actions)}
        self._entries: dict[int, Entry] = {}
        self._handles: dict[tuple[Key, int], int] = {}
        self._next_handle = 1
        self._exact: dict[Hashable, Running] = {}
        self._cache: dict[Hashable, Running | None] = {}
        self._ordered: list[tuple[Callable[[tuple[int, ...]], bool], Running]] | None = None
        self._program_default = None if node.default is None else (node.default[0].name, node.default[1])
        self.default_cell: list[Running] = [(_NO_ACTION, (), None)]
        """One element: what a miss runs. Generated code holds this list."""
        if self._program_default is not None:
            self._set_default(*self._program_default)
        for entry in node.entries or ():
            self._add_const(entry.key, entry.action.name, entry.params, entry.priority)
        self.const_entries = node.entries is not None

    def __len__(self) -> int:
        """Entries in the table, the default not counted."""
        return len(self._entries)

    # --- control plane -----------------------------------------------------------------------------------------------

    def insert(self, key: Sequence[KeyElement], action: str, params: Sequence[int], priority: int = 0) -> int:
        """Add an entry and return its handle (never reused in this table). TableFull, EntryExists, BadEntry."""
        self._refuse_const()
        checked, values = self._check_key(key, priority), self._check_action(action, params)
        if (checked, priority) in self._handles:
            raise EntryExists(f"table {self.name}: there is an entry with this key already")
        if len(self._entries) >= self.size:
            raise TableFull(f"table {self.name} holds {self.size} entries and is full")
        return self._add(checked, action, values, priority)

    def find(self, key: Sequence[KeyElement], priority: int = 0) -> int:
        """Handle of the entry with this key and priority. EntryMissing, BadEntry."""
        checked = self._check_key(key, priority)
        try:
            return self._handles[checked, priority]
        except KeyError:
            raise EntryMissing(f"table {self.name}: there is no entry with this key") from None

    def get(self, handle: int) -> Entry:
        """The entry itself; assign only its counters. EntryMissing."""
        try:
            return self._entries[handle]
        except KeyError:
            raise EntryMissing(f"table {self.name}: there is no entry {handle}") from None

    def modify(self, handle: int, action: str, params: Sequence[int]) -> None:
        """Give an entry another action; its counters stay. EntryMissing, BadEntry."""
        self._refuse_const()
        entry, values = self.get(handle), self._check_action(action, params)
        entry.action, entry.params = action, values
        self._index(entry)

    def delete(self, handle: int) -> None:
        """Remove an entry. EntryMissing, BadEntry."""
        self._refuse_const()
        entry = self.get(handle)
        del self._entries[handle], self._handles[entry.key, entry.priority]
        if not self._searches:
            del self._exact[self._exact_key(entry.key)]
        self._changed()

    def entries(self) -> Iterator[Entry]:
        """All entries in order of insertion (a snapshot)."""
        return iter(list(self._entries.values()))

    @property
    def default(self) -> tuple[str, tuple[int, ...]] | None:
        """Action and parameters that a miss runs; None when the program set none."""
        number, params, _ = self.default_cell[0]
        return None if number == _NO_ACTION else (list(self.actions)[number], params)

    def set_default(self, action: str, params: Sequence[int]) -> None:
        """Replace the default action. BadEntry."""
        if self.const_default:
            raise BadEntry(f"table {self.name}: the program fixes the default action")
        self._set_default(action, self._check_action(action, params))

    def reset_default(self) -> None:
        """Back to the program's default action. BadEntry."""
        if self.const_default:
            raise BadEntry(f"table {self.name}: the program fixes the default action")
        if self._program_default is None:
            self.default_cell[0] = (_NO_ACTION, (), None)
        else:
            self._set_default(*self._program_default)

    # --- checks ------------------------------------------------------------------------------------------------------

    def _refuse_const(self) -> None:
        if self.const_entries:
            raise BadEntry(f"table {self.name}: the program fixes the entries")

    def _check_action(self, action: str, params: Sequence[int]) -> tuple[int, ...]:
        info = self.actions.get(action)
        if info is None:
            raise BadEntry(f"table {self.name} has no action {action!r}")
        if len(params) != len(info.params):
            raise BadEntry(f"table {self.name}: action {action} takes {len(info.params)} parameters, not {len(params)}")
        for value, (name, width) in zip(params, info.params, strict=True):
            if not isinstance(value, int) or not 0 <= value < 1 << width:
                raise BadEntry(
                    f"table {self.name}: parameter {name} of {action} has {width} bits, {value!r} does not fit"
                )
        return tuple(params)

    def _check_key(self, key: Sequence[KeyElement], priority: int) -> Key:
        if len(key) != len(self.keys) or not self.keys:
            raise BadEntry(f"table {self.name} has {len(self.keys)} key fields, not {len(key)}")
        if self.needs_priority and not 1 <= priority <= _MAX_BMV2_PRIORITY:
            raise BadEntry(f"table {self.name}: an entry needs a priority of 1 or more, not {priority}")
        if not self.needs_priority and priority:
            raise BadEntry(f"table {self.name} has no priorities")
        return tuple(_masked(self._check_element(e, f), f) for e, f in zip(key, self.keys, strict=True))

    def _check_element(self, element: KeyElement, field: KeyField) -> KeyElement:
        """The canonical form of one key element."""
        where, top = f"table {self.name}: key field {field.name}", (1 << field.bitwidth) - 1
        if field.match_type == "ternary" and not isinstance(element, tuple):
            element = (0, 0) if element is None else (element, top)
        if field.match_type == "exact":
            if not isinstance(element, int) or not 0 <= element <= top:
                raise BadEntry(f"{where} has {field.bitwidth} bits, {element!r} does not fit")
            return element
        if not isinstance(element, tuple) or len(element) != 2 or not all(isinstance(e, int) for e in element):
            raise BadEntry(f"{where} ({field.match_type}) cannot be {element!r}")
        first, second = element
        highest = field.bitwidth if field.match_type == "lpm" else top
        if not 0 <= first <= top or not 0 <= second <= highest:
            raise BadEntry(f"{where} has {field.bitwidth} bits, {element!r} does not fit")
        if field.match_type == "range":
            if first > second:
                raise BadEntry(f"{where}: the range {first}..{second} is empty")
            return element
        if first & ~_mask(field, second):
            raise BadEntry(f"{where}: the value has bits outside its mask or prefix")
        return element

    # --- entries -----------------------------------------------------------------------------------------------------

    def _add(self, key: Key, action: str, params: tuple[int, ...], priority: int, const: bool = False) -> int:
        entry = Entry(self._next_handle, key, action, params, priority, const)
        self._next_handle += 1
        self._entries[entry.handle] = entry
        self._handles[key, priority] = entry.handle
        self._index(entry)
        return entry.handle

    def _add_const(
        self, key: Sequence[int | tuple[int, int]], action: str, params: tuple[int, ...], bmv2_priority: int
    ) -> None:
        priority = _MAX_BMV2_PRIORITY - bmv2_priority if self.needs_priority else 0
        masked: list[KeyElement] = []
        for element, field in zip(key, self.keys, strict=True):
            # The compiler leaves bits in a value that its mask or prefix takes away.
            if field.match_type in ("ternary", "lpm") and isinstance(element, tuple):
                element = (element[0] & _mask(field, element[1]), element[1])
            masked.append(element)
        checked = self._check_key(masked, priority)
        if (checked, priority) in self._handles:
            raise EntryExists(f"table {self.name}: two const entries have the same key")
        self._add(checked, action, self._check_action(action, params), priority, const=True)

    def _running(self, entry: Entry) -> Running:
        return (self._numbers[entry.action], entry.params, entry)

    def _set_default(self, action: str, params: tuple[int, ...]) -> None:
        self.default_cell[0] = (self._numbers[action], params, None)

    @staticmethod
    def _exact_key(key: Key) -> Hashable:
        return key[0] if len(key) == 1 else key

    def _index(self, entry: Entry) -> None:
        if not self._searches:
            self._exact[self._exact_key(entry.key)] = self._running(entry)
        self._changed()

    def _changed(self) -> None:
        self._ordered = None
        self._cache.clear()

    # --- lookup ------------------------------------------------------------------------------------------------------

    @property
    def lookup(self) -> Callable[[Any], Running | None]:
        """Function from a key (a value, or a tuple of several) to the entry that matches; None is a miss."""
        return self._search if self._searches else self._exact.get

    def _search(self, key: Any) -> Running | None:
        try:
            return self._cache[key]
        except KeyError:
            pass
        if self._ordered is None:
            self._ordered = self._sort()
        values = key if len(self.keys) > 1 else (key,)
        found = next((running for matches, running in self._ordered if matches(values)), None)
        if len(self._cache) >= _CACHE_SIZE:
            self._cache.clear()
        self._cache[key] = found
        return found

    def _sort(self) -> list[tuple[Callable[[tuple[int, ...]], bool], Running]]:
        """Entries with their tests, the one that wins first: by priority or prefix length, then by age."""
        lengths = [i for i, k in enumerate(self.keys) if k.match_type == "lpm"]

        def rank(entry: Entry) -> tuple[int, int]:
            if self.needs_priority or not lengths:
                return (-entry.priority, entry.handle)
            element = entry.key[lengths[0]]
            return (-element[1] if isinstance(element, tuple) else 0, entry.handle)

        return [(self._matcher(e.key), self._running(e)) for e in sorted(self._entries.values(), key=rank)]

    def _matcher(self, key: Key) -> Callable[[tuple[int, ...]], bool]:
        """A test of one entry. Every element is turned into low <= value & mask <= high."""
        tests: list[tuple[int, int, int, int]] = []
        for position, (element, field) in enumerate(zip(key, self.keys, strict=True)):
            top = (1 << field.bitwidth) - 1
            if isinstance(element, int):
                tests.append((position, top, element, element))
            elif isinstance(element, tuple):
                first, second = element
                if field.match_type == "range":
                    tests.append((position, top, first, second))
                    continue
                mask = _mask(field, second)
                if mask:
                    tests.append((position, mask, first, first))

        def matches(values: tuple[int, ...]) -> bool:
            return all(low <= values[p] & mask <= high for p, mask, low, high in tests)

        return matches


def _mask(field: KeyField, second: int) -> int:
    """Mask of a ternary element, or of a prefix of this length."""
    if field.match_type != "lpm":
        return second
    return (1 << field.bitwidth) - (1 << field.bitwidth - second)


def _masked(element: KeyElement, field: KeyField) -> KeyElement:
    if field.mask is None or element is None:
        return element
    return element & field.mask if isinstance(element, int) else (element[0] & field.mask, element[1])
