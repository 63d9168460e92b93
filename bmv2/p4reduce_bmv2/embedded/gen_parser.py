# SPDX-License-Identifier: Apache-2.0
"""Generated code for the parser.

An acyclic parser becomes nested branches, one with loops (header stacks) a loop over state numbers. The position in
the frame is a constant wherever all ways to a state agree on it, else the variable `at`. The code leaves `end`, where
the unparsed rest begins, and `trouble`, the parser error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from p4reduce_bmv2.embedded import graph
from p4reduce_bmv2.embedded.emit import Code, Slot, Value
from p4reduce_bmv2.embedded.gen_actions import ActionWriter
from p4reduce_bmv2.embedded.layout import Group
from p4reduce_bmv2.embedded.program import (
    MAX_PARSER_STEPS,
    Const,
    Expr,
    Field,
    Header,
    Lookahead,
    ParserOp,
    Primitive,
    Program,
    Ref,
    Stack,
    State,
    want,
)

MAX_COPIES = 4
"""Nested code may be this many times longer than the graph before the linear form is used."""
MAX_DEPTH = 60
"""Python refuses to nest deeper than a hundred levels."""

Position = int | None
"""A constant offset in the frame; None: the variable `at`."""


class TooNested(Exception):
    """The nested form of a graph is too deep or too long."""


def targets(state: State) -> list[str | None]:
    """Where the parser may go after a state."""
    return [*(t.target for t in state.transitions), state.default]


def places(program: Program) -> tuple[dict[str, Position], dict[Header, int | None]]:
    """Constant positions: of every reachable state, and of every header that is always found at one place."""
    positions: dict[str, Position] = {}
    found: dict[Header, int | None] = {}
    pending: list[tuple[str, Position]] = []
    if program.first_state is not None:
        pending.append((program.first_state, 0))
    while pending:
        name, position = pending.pop()
        if name in positions:
            position = position if positions[name] == position else None
            if positions[name] == position:
                continue
        positions[name] = position
        state = program.states[name]
        for op in state.ops:
            if op.op in ("extract", "extract_VL") and isinstance(op.args[0], Header):
                header = op.args[0]
                found[header] = position if found.get(header, position) == position else None
            position = after(op, position)
        pending += [(t, position) for t in targets(state) if t is not None]
    return positions, found


def after(op: ParserOp, position: Position) -> Position:
    """Position behind a parser operation that succeeds."""
    if position is None:
        return None
    if op.op == "extract":
        target = op.args[0]
        header = target.headers[0] if isinstance(target, Stack) else want(Header, target)
        return position + header.fixed_bytes
    if op.op == "advance":
        bits = op.args[0]
        return position + bits.value // 8 if isinstance(bits, Const) and bits.value % 8 == 0 else None
    return None if op.op == "extract_VL" else position


class ParserWriter(ActionWriter):
    """Writes the parser into the code."""

    positions: Mapping[str, Position]
    position: Position
    _joins: Mapping[str, str | None]
    _numbers: Mapping[str, int] | None = None
    """State numbers in the form with a loop; None in the nested form."""

    def parser(self, positions: Mapping[str, Position]) -> None:
        """The whole parser."""
        self.positions = positions
        self.line("trouble = end = 0")
        first = self.program.first_state
        if first is None:
            return
        states = self.program.states
        order = graph.topological(first, lambda name: targets(states[name]))
        nested = None if order is None else self._nested(first, order)
        if nested is None:
            self._loop(first, list(positions))
        else:
            self.code.lines += nested
        self.known.clear()

    def _nested(self, first: str, order: Sequence[str]) -> list[str] | None:
        """Lines of the nested form; None when it would be too deep or too long."""
        states = self.program.states
        self._joins = graph.joins(order, lambda name: targets(states[name]))
        outer, self.code = self.code, Code()
        self.code.depth = outer.depth
        self._budget = MAX_COPIES * len(order) + 64
        try:
            with self.code.block("while True:"):
                self.position = 0
                self._region(first, None)
                self.line("break")
            return self.code.lines
        except TooNested:
            return None
        finally:
            self.code = outer

    def _region(self, name: str | None, stop: str | None) -> None:
        """The states from one up to a join, which is left for the caller."""
        if name == stop:
            if stop is None:
                self.line(f"end = {self.here()}")
            elif self.positions[stop] is None and self.position is not None:
                self.line(f"at = {self.position}")
        while name != stop:
            state = self.program.states[want(str, name)]
            self._budget -= 1
            if self._budget < 0 or self.code.depth > MAX_DEPTH:
                raise TooNested
            self._operations(state)
            join = self._joins[state.name]
            self._select(state, join)
            name = join
            if name is not None:
                self.position = self.positions[name]

    def _loop(self, first: str, names: Sequence[str]) -> None:
        """The form with state numbers, for parsers with loops."""
        self._numbers = {name: index for index, name in enumerate(names)}
        self.line(f"state, at, steps = {self._numbers[first]}, 0, 0")
        with self.code.block("while True:"):
            self.line("steps += 1")
            self._stop_if(f"steps > {MAX_PARSER_STEPS}", "ParserTimeout", "at")
            for name in names:
                self.known.clear()
                state = self.program.states[name]
                with self.code.block(f"{'if' if name == names[0] else 'elif'} state == {self._numbers[name]}:"):
                    self.position = self.positions[name]
                    self._operations(state)
                    self._select(state, None)
        self._numbers = None

    def here(self, add: int = 0) -> str:
        """Text of the current position plus a number of bytes."""
        if self.position is not None:
            return str(self.position + add)
        return f"at + {add}" if add else "at"

    def _stop_if(self, condition: str, error: str, end: str) -> None:
        """Stop parsing with a parser error."""
        code = self.program.errors.get(error, 0)
        self.line(f"if {condition}: trouble, end = {code}, {end}; break")

    def _move(self, size: int) -> None:
        if self.position is not None:
            self.position += size
        elif size:
            self.line(f"at += {size}")

    def _loosen(self) -> None:
        """From here on the position is a variable."""
        if self.position is not None:
            self.line(f"at = {self.position}")
            self.position = None

    # --- select ------------------------------------------------------------------------------------------------------

    def _select(self, state: State, join: str | None) -> None:
        start, known = self.position, set(self.known)
        if not state.key or not state.transitions:
            self._goto(state.default, join)
            return
        keys = [self._key(value, index) for index, (value, _) in enumerate(state.key)]
        known |= self.known
        after_all: set[str] | None = None
        opened = False
        for transition in state.transitions:
            tests = [
                f"{key} == {v}" if mask == (1 << width) - 1 else f"{key} & {hex(mask)} == {hex(v)}"
                for key, (v, mask), (_, width) in zip(keys, transition.parts, state.key, strict=True)
                if mask
            ]
            with self.code.block(f"{'elif' if opened else 'if'} {' and '.join(tests) or 'True'}:"):
                self.position, self.known = start, set(known)
                self._goto(transition.target, join)
            opened = True
            after_all = self.known if after_all is None else after_all & self.known
        with self.code.block("else:"):
            self.position, self.known = start, set(known)
            self._goto(state.default, join)
        self.known = (after_all or set()) & self.known

    def _key(self, value: Expr, index: int) -> str:
        """Text of a part of a select key; a variable."""
        self.prepare(value)
        v = self.unsigned(value.field) if isinstance(value, Ref) else self.value(value)
        if v.text.isidentifier() or v.constant is not None:
            return v.text
        self.line(f"key{index} = {v.text}")
        return f"key{index}"

    def _goto(self, target: str | None, join: str | None) -> None:
        if self._numbers is None:
            self._region(target, join)
        elif target is None:
            self.line(f"end = {self.here()}")
            self.line("break")
        else:
            if self.positions[target] is None and self.position is not None:
                self.line(f"at = {self.position}")
            self.line(f"state = {self._numbers[target]}")

    # --- operations --------------------------------------------------------------------------------------------------

    def _operations(self, state: State) -> None:
        for op in state.ops:
            if op.op in ("extract", "extract_VL"):
                self._extract(op)
            elif op.op == "set":
                self._set(want(Field, op.args[0]), op.args[1])  # type: ignore[arg-type]
            elif op.op == "verify":
                condition, error = op.args
                self.prepare(condition, error)  # type: ignore[arg-type]
                test, code = self.value(condition), self.value(error)  # type: ignore[arg-type]
                self.line(f"if not {test.text}: trouble, end = {code.text}, {self.here()}; break")
            elif op.op == "primitive":
                self.primitive(Primitive(want(str, op.args[0]), want(tuple, op.args[1])))
            else:
                self._advance(op.args[0])  # type: ignore[arg-type]

    def _set(self, target: Field, source: Expr) -> None:
        if isinstance(source, Lookahead):
            value = self._lookahead(source)
        else:
            self.prepare(source)
            value = self.value(source)
        self.store(target, value)

    def _lookahead(self, ahead: Lookahead) -> Value:
        first, last = ahead.offset // 8, (ahead.offset + ahead.width + 7) // 8
        self._stop_if(f"length < {self.here(last)}", "PacketTooShort", self.here())
        text = f"{self.from_bytes}(frame[{self.here(first)}:{self.here(last)}], 'big')"
        right = 8 * last - ahead.offset - ahead.width
        text = f"({text} >> {right})" if right else text
        mask = (1 << ahead.width) - 1
        if ahead.offset % 8:
            text = f"({text} & {hex(mask)})"
        return Value(text, 0, mask)

    def _advance(self, amount: Expr) -> None:
        if isinstance(amount, Const) and amount.value % 8 == 0:
            size = amount.value // 8
            self._stop_if(f"length < {self.here(size)}", "PacketTooShort", self.here())
            self._move(size)
            return
        self.prepare(amount)
        self.line(f"skip = {self.value(amount).text}")
        self._loosen()
        self._stop_if("skip % 8", "ParserInvalidArgument", "at")
        self.line("skip //= 8")
        self._stop_if("length - at < skip", "PacketTooShort", "at")
        self.line("at += skip")

    # --- extract -----------------------------------------------------------------------------------------------------

    def _extract(self, op: ParserOp) -> None:
        target = op.args[0]
        if op.op == "extract_VL":
            self._extract_varbit(want(Header, target), op.args[1])  # type: ignore[arg-type]
            return
        if isinstance(target, Stack):
            self._extract_next(target)
            return
        header = want(Header, target)
        self._stop_if(f"length < {self.here(header.fixed_bytes)}", "PacketTooShort", self.here())
        self._take(header)
        self._move(header.fixed_bytes)

    def _extract_next(self, stack: Stack) -> None:
        name, size = self.layout.next[stack], stack.headers[0].fixed_bytes
        self._stop_if(f"{name} >= {len(stack.headers)}", "StackOutOfBounds", self.here())
        self._stop_if(f"length < {self.here(size)}", "PacketTooShort", self.here())
        for index, header in enumerate(stack.headers):
            with self.code.block(f"{'elif' if index else 'if'} {name} == {index}:"):
                self._take(header)
        for header in stack.headers:
            self.forget(header)
        self.line(f"{name} += 1")
        self._move(size)

    def _take(self, header: Header) -> None:
        """Make a header valid whose bytes are known to be there."""
        v = self.layout.headers[header]
        self.forget(header)
        self.line(f"{v.valid} = 1")
        if v.mutable:
            self.line(f"{v.dirty} = False")
        if isinstance(v.offset, str):
            self.line(f"{v.offset} = {self.here()}")
        lazy = [self.layout.fields[g.members[0][0]] for g in v.front if g.lazy]
        if lazy:
            self.line(f"{' = '.join(lazy)} = None")
        self._decode_groups(v.front)

    def _extract_varbit(self, header: Header, bits: Expr) -> None:
        v = self.layout.headers[header]
        self.prepare(bits)
        self.line(f"skip = {self.value(bits).text}")
        self._loosen()
        fixed = header.fixed_bytes
        self._stop_if("skip % 8", "ParserInvalidArgument", "at")
        self.line("skip //= 8")
        self._stop_if(f"length - at < {fixed} + skip", "PacketTooShort", "at")
        if header.max_bytes:
            self._stop_if(f"{fixed} + skip > {header.max_bytes}", "HeaderTooShort", "at")
        self._take(header)
        self.line(f"at += {v.front_bytes}")
        self.line(f"{v.varbit} = frame[at:at + skip]")
        self.line("at += skip")
        self._decode_groups(v.back)
        self.line(f"at += {fixed - v.front_bytes}")

    def _decode_groups(self, groups: Sequence[Group]) -> None:
        """Decode the fields of groups that start at the current position, with as few calls as possible."""
        run: list[Group] = []
        for group in groups:
            if not group.kept or group.lazy:
                continue
            if not group.codes:
                start, end = self.here(group.offset), self.here(group.offset + group.size)
                self._split(group, f"{self.from_bytes}(frame[{start}:{end}], 'big')")
            else:
                run.append(group)
        if len(run) == 1 and run[0].size == 1:
            self._split(run[0], f"frame[{self.here(run[0].offset)}]")
        elif run:
            self._unpack(run)

    def _unpack(self, run: Sequence[Group]) -> None:
        """One struct call for several groups."""
        layout, names, later = ">", [], []
        end = run[0].offset
        for group in run:
            gap = group.offset - end
            layout += f"{gap}x" if gap else ""
            layout += group.codes
            end = group.offset + group.size
            if len(group.codes) == 1 and len(group.members) == 1 and not group.members[0][0].signed:
                names.append(self.layout.fields[group.members[0][0]])
                continue
            parts = []
            for right, _ in group.shifts():
                names.append(f"part{len(names)}")
                parts.append(f"{names[-1]} << {right}" if right else names[-1])
            later.append((group, " | ".join(parts)))
        unpack = self.names.bind(Slot("unpack", layout))
        where = self.here(run[0].offset)
        self.line(f"{', '.join(names)}{',' if len(names) == 1 else ''} = {unpack}(frame, {where})")
        for group, text in later:
            self._split(group, text)

    def _split(self, group: Group, text: str) -> None:
        """Assign a group's fields from its value."""
        if len(group.members) > 1 and not text.isidentifier():
            self.line(f"whole = {text}")
            text = "whole"
        for position, (f, right) in enumerate(group.members):
            part = f"{text} >> {right}" if right else text
            if position or f.width + right < 8 * group.size:
                part = f"({part}) & {hex(f.mask)}" if right else f"{part} & {hex(f.mask)}"
            if f.signed:
                half = hex(1 << f.width - 1)
                part = f"(({part}) ^ {half}) - {half}"
            self.line(f"{self.layout.fields[f]} = {part}")
