# SPDX-License-Identifier: Apache-2.0
"""Generated code for expressions and for reading and writing fields.

Every method either returns a Value or writes lines. Values are bounded, so that masks which change nothing are left
out: p4c puts one behind almost every operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from p4reduce_bmv2.embedded.analysis import Usage
from p4reduce_bmv2.embedded.emit import Code, Names, Slot, Value, nesting, number
from p4reduce_bmv2.embedded.errors import ProgramError
from p4reduce_bmv2.embedded.layout import Layout
from p4reduce_bmv2.embedded.program import (
    Bool,
    Cell,
    Const,
    Expr,
    Field,
    Header,
    Lookahead,
    Op,
    Param,
    Program,
    Ref,
    SameHeader,
    StackIndex,
    StackLast,
    Valid,
)

MAX_SHIFT = 1 << 14
"""No field is wider, so a shift by more has shifted everything out (or into what the next mask cuts off)."""

MAX_NESTING = 60
"""Parentheses in one expression; Python refuses two hundred."""

_COMPARE = {"==", "!=", "<", ">", "<=", ">="}


def truth(text: str) -> Value:
    """A Python expression that yields True or False."""
    return Value(text, 0, 1, boolean=True)


class Writer:
    """State that all parts of the generator share."""

    def __init__(self, program: Program, usage: Usage, names: Names, layout: Layout) -> None:
        self.program = program
        self.usage = usage
        self.names = names
        self.layout = layout
        self.code = Code()
        self.known: set[str] = set()
        """Variables known here to be decoded, or to be set (flags of changed headers)."""
        self.params: Sequence[Value] = ()
        """Parameters of the action being written."""
        self.from_bytes = names.bind(Slot("call", "from_bytes"))

    def line(self, text: str) -> None:
        self.code.line(text)

    # --- reading -----------------------------------------------------------------------------------------------------

    def value(self, e: Expr) -> Value:
        """Text of an expression; `prepare` must have been called for it."""
        if isinstance(e, Const):
            return number(e.value)
        if isinstance(e, Bool):
            return Value(str(e.value), int(e.value), int(e.value), boolean=True)
        if isinstance(e, Param):
            return self.params[e.index]
        if isinstance(e, Ref):
            return self.read(e.field)
        if isinstance(e, Cell):
            return self._cell(e)
        if isinstance(e, Valid):
            if e.header.metadata:
                return number(1)
            return Value(self.layout.headers[e.header].valid, 0, 1)
        if isinstance(e, StackLast):
            return self._stack_last(e)
        if isinstance(e, StackIndex):
            return Value(f"({self.layout.next[e.stack]} - 1)", -1, len(e.stack.headers) - 1)
        if isinstance(e, SameHeader):
            return self._same_header(e)
        if isinstance(e, Lookahead):
            raise ProgramError("a lookahead can only be read in the parser")
        result = self._operation(e)
        return self._spilled(result) if nesting(result.text) > MAX_NESTING else result

    def _spilled(self, value: Value) -> Value:
        """A deep expression, computed into a variable of its own. Nothing in an expression has an effect."""
        self._spills += 1
        self.line(f"deep{self._spills} = {value.text}")
        return value._replace(text=f"deep{self._spills}")

    _spills = 0

    def writes_nothing(self, e: Expr) -> bool:
        """Whether an expression can be read without a line before it."""
        if self.undecoded(e):
            return False
        before = len(self.code.lines)
        self.value(e)
        written = len(self.code.lines) > before
        del self.code.lines[before:]
        return not written

    def read(self, f: Field) -> Value:
        """A field's variable with the field's bounds. A field that nobody writes to has none: it is 0."""
        name = self.layout.fields.get(f)
        if name is None:
            return number(0)
        if f.signed:
            return Value(name, -(1 << f.width - 1), f.mask)
        return Value(name, 0, f.mask)

    def unsigned(self, f: Field) -> Value:
        """A field's bits as an unsigned number, as they travel and as keys see them."""
        v = self.read(f)
        return Value(f"({v.text} & {hex(f.mask)})", 0, f.mask) if f.signed else v

    def prepare(self, *expressions: Expr) -> None:
        """Decode what the expressions read and what is still only in the frame."""
        for f in self.undecoded(*expressions):
            self.decode(f)

    def undecoded(self, *expressions: Expr) -> list[Field]:
        """Lazy fields that the expressions read and that may not have been decoded."""
        found: list[Field] = []
        for e in expressions:
            for f in self._fields(e):
                if self.layout.lazy(f) and self.layout.fields[f] not in self.known and f not in found:
                    found.append(f)
        return found

    def _fields(self, e: Expr) -> list[Field]:
        if isinstance(e, Ref):
            return [e.field]
        if isinstance(e, StackLast):
            return [h.fields[e.index] for h in e.stack.headers]
        if isinstance(e, SameHeader):
            return e.left.fields + e.right.fields
        if isinstance(e, Cell):
            return self._fields(e.index)
        if isinstance(e, Op):
            return [f for arg in e.args for f in self._fields(arg)]
        return []

    def decode(self, f: Field) -> None:
        """Decode one lazy field, unless it is."""
        lazy = self.layout.lazy(f)
        name = self.layout.fields[f]
        if lazy is None or name in self.known:
            return
        self.line(f"if {name} is None: {name} = {self.raw_int(f)}")
        self.known.add(name)

    def raw_int(self, f: Field) -> str:
        """A lazy field's value, from the frame."""
        lazy = self.layout.lazy(f)
        if lazy is None:
            raise TypeError(f"{f} is not decoded lazily")
        vars_, group = lazy
        raw = f"{self.from_bytes}(frame[{vars_.at(group.offset)}:{vars_.at(group.offset + group.size)}], 'big')"
        if f.signed:
            raw = f"(({raw} ^ {hex(1 << f.width - 1)}) - {hex(1 << f.width - 1)})"
        return raw

    def _cell(self, e: Cell) -> Value:
        cells, index = self.names.bind(Slot("register", e.register.name)), self.value(e.index)
        high = (1 << e.register.width) - 1
        check = "" if self.in_bounds(e.index, e.register.size) else self.in_range(index, e.register.size)
        text = f"{cells}[{index.text}]"
        return Value(f"({text} if {check} else 0)" if check else text, 0, high)

    _in_bounds: tuple[Expr, int] | None = None
    """An index that is known to be below a size."""

    def in_bounds(self, index: Expr, size: int) -> bool:
        """Whether an index was found to lie in an array of this size."""
        return self._in_bounds is not None and self._in_bounds[0] == index and self._in_bounds[1] <= size

    @staticmethod
    def in_range(index: Value, size: int) -> str:
        """Condition under which an index lies in an array; empty when it always does."""
        if index.within(0, size - 1):
            return ""
        return f"{index.text} < {size}" if index.low is not None and index.low >= 0 else f"0 <= {index.text} < {size}"

    def _stack_last(self, e: StackLast) -> Value:
        values = [self.read(h.fields[e.index]) for h in e.stack.headers]
        if len(values) == 1:
            return values[0]
        name = self.layout.next[e.stack]
        text = values[-1].text
        for position in range(len(values) - 1, 0, -1):
            text = f"{values[position - 1].text} if {name} <= {position} else {text}"
        return Value(f"({text})", values[0].low, values[0].high)

    def _same_header(self, e: SameHeader) -> Value:
        left, right = self.layout.headers[e.left], self.layout.headers[e.right]
        tests = [left.valid, right.valid]
        tests += [
            f"{self.layout.fields[a]} == {self.layout.fields[b]}"
            for a, b in zip(e.left.fields, e.right.fields, strict=True)
        ]
        text = f"({' and '.join(tests)})"
        return truth(f"(not {text})" if e.negate else f"(not not {text})")

    # --- operators ---------------------------------------------------------------------------------------------------

    def _operation(self, e: Op) -> Value:
        args = [self.value(a) for a in e.args]
        op = e.op
        if op in _COMPARE:
            return truth(f"({args[0].text} {op} {args[1].text})")
        if op in ("and", "or"):
            flag = args[0].boolean and args[1].boolean
            return Value(f"({args[0].text} {op} {args[1].text})", 0, 1, boolean=flag)
        if op == "not":
            return truth(f"(not {args[0].text})")
        if op == "d2b":
            return args[0] if args[0].within(0, 1) else truth(f"({args[0].text} != 0)")
        if op == "b2d":
            return Value(f"(1 if {args[0].text} else 0)", 0, 1) if args[0].boolean else args[0]
        if op == "?":
            low = _both(min, args[1].low, args[2].low)
            high = _both(max, args[1].high, args[2].high)
            text = f"({args[1].text} if {args[0].text} else {args[2].text})"
            return Value(text, low, high, boolean=args[1].boolean and args[2].boolean)
        return self._arithmetic(op, args)

    def _arithmetic(self, op: str, args: list[Value]) -> Value:
        result = _OPERATORS[op](*args)
        return result if result.constant is None else number(result.constant)

    # --- writing -----------------------------------------------------------------------------------------------------

    def store(self, f: Field, value: Value) -> None:
        """Write a value to a field, truncated as the field does it."""
        name = self.layout.fields.get(f)
        if name is None:
            return
        if value.text != name:
            self.line(f"{name} = {self.fit(f, value)}")
        if self.layout.lazy(f):
            self.known.add(name)
        self.changed(f.header)

    def fit(self, f: Field, value: Value) -> str:
        """Text of a value as the field keeps it."""
        if not f.signed:
            if value.within(0, f.mask):
                return f"(1 if {value.text} else 0)" if value.boolean else value.text
            return f"{value.text} & {hex(f.mask)}"
        low = -(1 << f.width - 1)
        if value.within(low, f.mask):
            return value.text
        keep = self.names.bind(signed_write)
        return f"{keep}({value.text}, {f.width})"

    def changed(self, header: Header) -> None:
        """Note that a header no longer equals its bytes in the frame."""
        if header.metadata:
            return
        flag = self.layout.headers[header].dirty
        if flag not in self.known:
            self.line(f"{flag} = True")
            self.known.add(flag)

    def forget(self, header: Header) -> None:
        """Nothing is known of a header any more."""
        self.known.difference_update(self.layout.variables(header))


def signed_write(value: int, width: int) -> int:
    """What a signed field keeps of a value: BMv2 wraps only what is below the minimum or above the mask."""
    mask = (1 << width) - 1
    low = -(1 << width - 1)
    if value < low or value > mask:
        value &= mask
        if value > mask >> 1:
            value -= mask + 1
    return value


# --- bounds ----------------------------------------------------------------------------------------------------------


def _both(function: Callable[[int, int], int], a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else function(a, b)


def _natural(*values: Value) -> bool:
    return all(v.low is not None and v.low >= 0 for v in values)


def _ones(high: int | None) -> int | None:
    """The largest number with as many bits."""
    return None if high is None else (1 << high.bit_length()) - 1


def _add(a: Value, b: Value) -> Value:
    if b.constant == 0:
        return a
    return Value(f"({a.text} + {b.text})", _both(int.__add__, a.low, b.low), _both(int.__add__, a.high, b.high))


def _sub(a: Value, b: Value) -> Value:
    text = f"(-{b.text})" if a.constant == 0 else f"({a.text} - {b.text})"
    return Value(text, _both(int.__sub__, a.low, b.high), _both(int.__sub__, a.high, b.low))


def _mul(a: Value, b: Value) -> Value:
    bounded = _natural(a, b)
    low, high = (_both(int.__mul__, a.low, b.low), _both(int.__mul__, a.high, b.high)) if bounded else (None, None)
    return Value(f"({a.text} * {b.text})", low, high)


def _shift_left(a: Value, b: Value) -> Value:
    if b.constant is not None and 0 <= b.constant <= MAX_SHIFT:
        by = b.constant
        low = None if a.low is None else a.low << by
        return Value(f"({a.text} << {by})" if by else a.text, low, None if a.high is None else a.high << by)
    by_text = b.text if b.within(0, MAX_SHIFT) else f"min(max({b.text}, 0), {MAX_SHIFT})"
    return Value(f"({a.text} << {by_text})", 0 if _natural(a) else None, None)


def _shift_right(a: Value, b: Value) -> Value:
    if b.constant is not None and 0 <= b.constant <= MAX_SHIFT:
        by = b.constant
        low = None if a.low is None else a.low >> by
        return Value(f"({a.text} >> {by})" if by else a.text, low, None if a.high is None else a.high >> by)
    by_text = b.text if b.within(0, MAX_SHIFT) else f"min(max({b.text}, 0), {MAX_SHIFT})"
    natural = _natural(a)
    return Value(f"({a.text} >> {by_text})", 0 if natural else None, a.high if natural else None)


def _and(a: Value, b: Value) -> Value:
    if a.constant is not None and b.constant is None:
        a, b = b, a
    mask = b.constant
    if mask is not None and mask >= 0 and _natural(a) and a.high is not None:
        ones = (1 << a.high.bit_length()) - 1
        if mask & ones == ones:
            return a
    if a.constant is not None and b.constant is not None:
        return number(a.constant & b.constant)
    tops = [v.high for v in (a, b) if _natural(v) and v.high is not None]
    natural = _natural(a) or _natural(b)
    return Value(f"({a.text} & {b.text})", 0 if natural else None, min(tops) if tops else None)


def _bits(operator: str) -> Callable[[Value, Value], Value]:
    def make(a: Value, b: Value) -> Value:
        for one, other in ((a, b), (b, a)):
            if one.constant == 0:
                return other
        natural = _natural(a, b)
        high = _ones(_both(max, a.high, b.high)) if natural else None
        return Value(f"({a.text} {operator} {b.text})", 0 if natural else None, high)

    return make


def _invert(a: Value) -> Value:
    return Value(f"(~{a.text})", None if a.high is None else ~a.high, None if a.low is None else ~a.low)


def _width(b: Value) -> int:
    if b.constant is None or b.constant < 1:
        raise ProgramError("a cast to a width that is no positive constant")
    return b.constant


def _two_comp_mod(a: Value, b: Value) -> Value:
    half = 1 << _width(b) - 1
    if a.within(-half, half - 1):
        return a
    return Value(f"((({a.text} + {hex(half)}) & {hex(2 * half - 1)}) - {hex(half)})", -half, half - 1)


def _clamp(low: int, high: int, a: Value) -> Value:
    if a.within(low, high):
        return a
    return Value(f"min(max({a.text}, {low}), {hex(high)})", low, high)


_OPERATORS: dict[str, Callable[..., Value]] = {
    "+": _add,
    "-": _sub,
    "*": _mul,
    "<<": _shift_left,
    ">>": _shift_right,
    "&": _and,
    "|": _bits("|"),
    "^": _bits("^"),
    "~": _invert,
    "two_comp_mod": _two_comp_mod,
    "usat_cast": lambda a, b: _clamp(0, (1 << _width(b)) - 1, a),
    "sat_cast": lambda a, b: _clamp(-(1 << _width(b) - 1), (1 << _width(b) - 1) - 1, a),
}
