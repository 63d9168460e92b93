# SPDX-License-Identifier: Apache-2.0
"""Generated code for the ingress and egress control: nested branches up to the point where all ways join again.

A graph whose nested form would be too deep or too long is written as a list instead: node after node in topological
order, each behind a test of the variable `node`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from p4reduce_bmv2.embedded import graph
from p4reduce_bmv2.embedded.emit import Code, Slot, Value, number
from p4reduce_bmv2.embedded.errors import ProgramError
from p4reduce_bmv2.embedded.gen_parser import MAX_COPIES, MAX_DEPTH, ParserWriter, TooNested
from p4reduce_bmv2.embedded.loader import successors
from p4reduce_bmv2.embedded.program import (
    Action,
    Conditional,
    Node,
    Ref,
    TableKey,
    TableNode,
    want,
)

NO_ACTION = -1
"""Number of the action in a table that has no default: nothing runs."""


def key_text(parts: Sequence[str]) -> str:
    """A table's lookup key: the value itself, or a tuple of several."""
    return parts[0] if len(parts) == 1 else f"({', '.join(parts)})"


class ControlWriter(ParserWriter):
    """Writes pipelines into the code."""

    _nodes: Mapping[str, Node]
    _node_joins: Mapping[str, str | None]
    _node_numbers: Mapping[str, int] | None = None

    def pipeline(self, name: str) -> None:
        """A whole pipeline. `exit` leaves it by a break out of a loop that runs once."""
        pipeline = self.program.pipelines[name]
        self._nodes = pipeline.nodes
        order = graph.topological(pipeline.first, self._after)
        if order is None:
            raise ProgramError(f"pipeline {name} goes round in circles")
        if not order:
            return
        effects = self.usage.ingress if name == "ingress" else self.usage.egress
        self.known.clear()
        nested = self._try_nested(order, "exit" in effects.primitives)
        if nested is None:
            self._write_list(order)
        else:
            self.code.lines += nested
        self.known.clear()

    def _after(self, name: str) -> list[str | None]:
        return successors(self._nodes[name])

    def _try_nested(self, order: Sequence[str], exits: bool) -> list[str] | None:
        self._node_joins = graph.joins(order, self._after)
        outer, self.code = self.code, Code()
        self.code.depth = outer.depth
        self._budget = MAX_COPIES * len(order) + 64
        try:
            if exits:
                with self.code.block("while True:"):
                    self._walk(order[0], None)
                    self.line("break")
            else:
                self._walk(order[0], None)
            return self.code.lines
        except TooNested:
            return None
        finally:
            self.code = outer

    def _walk(self, name: str | None, stop: str | None) -> None:
        """The nodes from one up to a join, which is left for the caller."""
        while name != stop:
            node = self._nodes[want(str, name)]
            self._budget -= 1
            if self._budget < 0 or self.code.depth > MAX_DEPTH:
                raise TooNested
            join = self._node_joins[node.name]
            self._node(node, join)
            name = join

    def _write_list(self, order: Sequence[str]) -> None:
        """The form without nesting."""
        self._node_numbers = {name: index for index, name in enumerate(order)}
        with self.code.block("while True:"):
            self.line("node = 0")
            for index, name in enumerate(order):
                self.known.clear()
                with self.code.block(f"if node == {index}:"):
                    self._node(self._nodes[name], None)
            self.line("break")
        self._node_numbers = None

    def _go(self, target: str | None, join: str | None) -> None:
        """On to the next node: in the nested form everything up to the join."""
        if self._node_numbers is None:
            self._walk(target, join)
        else:
            self.line(f"node = {NO_ACTION if target is None else self._node_numbers[target]}")

    # --- nodes -------------------------------------------------------------------------------------------------------

    def _node(self, node: Node, join: str | None) -> None:
        if isinstance(node, Conditional):
            self._conditional(node, join)
        else:
            self._table(node, join)

    def _conditional(self, node: Conditional, join: str | None, opener: str = "if") -> None:
        self.prepare(node.condition)
        condition = self.value(node.condition).text
        before = set(self.known)
        with self.code.block(f"{opener} {condition}:"):
            self._go(node.true_next, join)
        after, self.known = self.known, set(before)
        chained = self._nodes.get(node.false_next or "")
        if (
            self._node_numbers is None
            and isinstance(chained, Conditional)
            and chained.name != join
            and self._node_joins[chained.name] == join
            and self.writes_nothing(chained.condition)
        ):
            self._budget -= 1
            self._conditional(chained, join, "elif")
        elif self._node_numbers is not None or node.false_next != join:
            with self.code.block("else:"):
                self._go(node.false_next, join)
        self.known &= after

    def _table(self, table: TableNode, join: str | None) -> None:
        if not table.keys:
            self._miss(table, join)
            return
        self.prepare(*(k.value for k in table.keys))
        key = key_text([self._key_part(k) for k in table.keys])
        lookup = self.names.bind(Slot("lookup", table.name))
        self.line(f"entry = {lookup}({key})")
        before = set(self.known)
        with self.code.block("if entry is None:"):
            self._miss(table, join)
        after, self.known = self.known, before
        with self.code.block("else:"):
            self._hit(table, join)
        self.known &= after

    def _key_part(self, key: TableKey) -> str:
        text = self.value(key.value).text
        if isinstance(key.value, Ref):
            text = self.unsigned(key.value.field).text
            header = self.layout.headers.get(key.value.field.header)
            if header is not None:
                # Here alone BMv2 looks at validity when it reads a field.
                text = f"({text} if {header.valid} else 0)"
        return text if key.mask is None else f"{text} & {hex(key.mask)}"

    def _hit(self, table: TableNode, join: str | None) -> None:
        if table.counters:
            self.line("counted = entry[2]")
            self.line("counted.packets += 1; counted.bytes += length")
        self._dispatch(table, join, table.next_hit)

    def _miss(self, table: TableNode, join: str | None) -> None:
        if table.default_const and table.default is not None:
            action, data = table.default
            self.action(action, [number(v) for v in data])
            self._go(table.next_by_action[action.id] if table.next_by_action else table.next_miss, join)
            return
        self.line(f"entry = {self.names.bind(Slot('default', table.name))}[0]")
        self._dispatch(table, join, table.next_miss, may_be_none=table.default is None)

    def _dispatch(
        self, table: TableNode, join: str | None, hit_or_miss: str | None, *, may_be_none: bool = False
    ) -> None:
        """Run the action of `entry`, then go on."""
        shared = self._shared_next(table, hit_or_miss, may_be_none)
        cases: list[tuple[int, Action | None]] = list(enumerate(table.actions))
        if may_be_none:
            cases.append((NO_ACTION, None))
        if len(cases) > 1:
            self.line("choice = entry[0]")
        before, ends = set(self.known), []
        for position, (index, action) in enumerate(cases):
            self.known = set(before)
            if len(cases) == 1:
                self._case(table, action, shared, hit_or_miss, join)
            else:
                last = position == len(cases) - 1
                opener = "else:" if last else f"{'elif' if position else 'if'} choice == {index}:"
                with self.code.block(opener):
                    self._case(table, action, shared, hit_or_miss, join)
            ends.append(self.known)
        self.known = set.intersection(*ends)
        if shared is not None:
            self._go(shared[0], join)

    def _case(
        self,
        table: TableNode,
        action: Action | None,
        shared: tuple[str | None] | None,
        hit_or_miss: str | None,
        join: str | None,
    ) -> None:
        if action is not None and action.body:
            self.action(action, self._parameters(action))
        if shared is None:
            if not table.next_by_action:
                self._go(hit_or_miss, join)
            else:
                self._go(table.base_next if action is None else table.next_by_action[action.id], join)

    def _shared_next(self, table: TableNode, hit_or_miss: str | None, may_be_none: bool) -> tuple[str | None] | None:
        """The node after every action, as a tuple of one; None when it depends on the action."""
        if not table.next_by_action:
            return (hit_or_miss,)
        nexts = set(table.next_by_action.values())
        if may_be_none:
            nexts.add(table.base_next)
        return (nexts.pop(),) if len(nexts) == 1 else None

    def _parameters(self, action: Action) -> list[Value]:
        """Unpack the entry's parameters."""
        if not action.params:
            return []
        names = [f"param{index}" for index in range(len(action.params))]
        self.line(f"{', '.join(names)}{',' if len(names) == 1 else ''} = entry[1]")
        return [Value(n, 0, (1 << width) - 1) for n, (_, width) in zip(names, action.params, strict=True)]
