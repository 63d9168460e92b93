# SPDX-License-Identifier: Apache-2.0
"""Generated code for actions: one method per primitive, and if/else out of p4c's jumps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from p4reduce_bmv2.embedded.checksums import HASH_BITS, HASHES
from p4reduce_bmv2.embedded.emit import Slot, Value, number
from p4reduce_bmv2.embedded.errors import UnsupportedProgram
from p4reduce_bmv2.embedded.gen_writer import Writer
from p4reduce_bmv2.embedded.program import (
    Action,
    Argument,
    Calculation,
    Const,
    Counter,
    Expr,
    Field,
    Header,
    Primitive,
    Ref,
    Register,
    Stack,
    want,
)

CLONE_VALID = 0x8000
"""Set in the clone variable beside the session number, so that session 0 counts."""
MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Branch:
    """An if/else made of jumps."""

    condition: Expr
    then: list[Primitive | Branch]
    other: list[Primitive | Branch]


Statement = Primitive | Branch


def structure(action: Action) -> list[Statement]:
    """An action's primitives with jumps turned into branches. UnsupportedProgram for a jump backwards or across."""
    return _region(action, 0, len(action.body))


def _region(action: Action, start: int, end: int) -> list[Statement]:
    body = action.body
    result: list[Statement] = []
    position = start
    while position < end:
        call = body[position]
        if call.op == "_jump":
            position = _target(action, call.args[0], position, end)
        elif call.op == "_jump_if_zero":
            middle = _target(action, call.args[1], position, end)
            stop, after = middle, middle
            if middle - 1 > position and body[middle - 1].op == "_jump":
                after = _target(action, body[middle - 1].args[0], middle - 1, end)
                stop = middle - 1
            condition = _expr(call.args[0])
            result.append(Branch(condition, _region(action, position + 1, stop), _region(action, middle, after)))
            position = after
        else:
            result.append(call)
            position += 1
    return result


def _target(action: Action, argument: Argument, position: int, end: int) -> int:
    target = want(Const, argument).value
    if not position < target <= end:
        raise UnsupportedProgram([f"primitive _jump out of its block in action {action.name}"])
    return target


def _expr(argument: Argument) -> Expr:
    """An argument that the loader made an expression."""
    return argument  # type: ignore[return-value]


class ActionWriter(Writer):
    """Writes actions into the code."""

    def action(self, action: Action, params: Sequence[Value]) -> None:
        """One action, inlined. Its parameters are named or known values."""
        self.params = params
        body = structure(action)
        shared = _common_index(body)
        check = "" if shared is None else self.in_range(self.value(shared[1]), shared[0].size)
        if shared is None or not check:
            self._finish(body)
        else:
            register, index = shared
            before = set(self.known)
            with self.code.block(f"if {check}:"):
                self._in_bounds = (index, register.size)
                self._finish(body)
                self._in_bounds = None
            inside, self.known = self.known, set(before)
            with self.code.block("else:"):
                self._finish(body)
            self.known &= inside
        self.params = ()

    def _finish(self, body: list[Statement]) -> None:
        """A body, and the end of the pipeline where it asked for that."""
        conditional = any(isinstance(s, Branch) and _mentions(s, "exit") for s in body)
        if conditional:
            self.line("leave = False")
        self.statements(body)
        if any(isinstance(s, Primitive) and s.op == "exit" for s in body):
            self.line("break")
        elif conditional:
            self.line("if leave: break")

    def statements(self, body: list[Statement], nested: bool = False) -> None:
        for statement in body:
            if isinstance(statement, Branch):
                self._branch(statement)
            elif statement.op == "exit":
                if nested:
                    self.line("leave = True")
            else:
                self.primitive(statement)

    def _branch(self, branch: Branch) -> None:
        self.prepare(branch.condition)
        before = set(self.known)
        with self.code.block(f"if {self.value(branch.condition).text}:"):
            self.statements(branch.then, nested=True)
        after, self.known = self.known, set(before)
        if branch.other:
            with self.code.block("else:"):
                self.statements(branch.other, nested=True)
        self.known &= after

    def primitive(self, call: Primitive) -> None:
        """One primitive call."""
        self._writers[call.op](self, call.args)

    # --- fields and headers ------------------------------------------------------------------------------------------

    def _assign(self, args: Sequence[Argument]) -> None:
        target, source = want(Field, args[0]), _expr(args[1])
        if target in self.layout.fields:
            self.prepare(source)
            self.store(target, self.value(source))

    def _assign_varbit(self, args: Sequence[Argument]) -> None:
        target, source = want(Field, args[0]), want(Field, args[1])
        self.line(f"{self.layout.fields[target]} = {self.layout.fields[source]}")
        self.changed(target.header)

    def _assign_header(self, args: Sequence[Argument]) -> None:
        target, source = want(Header, args[0]), want(Header, args[1])
        if target is source:
            return
        if target.metadata:
            for a, b in zip(target.fields, source.fields, strict=True):
                self._assign((a, Ref(b)))
            return
        v = self.layout.headers[target]
        with self.code.block(f"if {self.layout.headers[source].valid}:"):
            self.copy_header(target, source)
        self.line(f"else: {v.valid} = 0")
        self.forget(target)

    def _assign_stack(self, args: Sequence[Argument]) -> None:
        target, source = want(Stack, args[0]), want(Stack, args[1])
        self.line(f"{self.layout.next[target]} = {self.layout.next[source]}")
        for a, b in zip(target.headers, source.headers, strict=True):
            self._assign_header((a, b))

    def copy_header(self, target: Header, source: Header) -> None:
        """Make the target an image of the source, with everything that is known of its bytes."""
        a, b = self.layout.headers[target], self.layout.headers[source]
        changed = b.dirty if b.mutable else "False"
        pairs = [(a.valid, b.valid), (a.dirty, changed), (str(a.offset), str(b.offset))]
        fields = self.layout.fields
        pairs += [(fields[x], fields[y]) for x, y in zip(target.fields, source.fields, strict=True)]
        self.line(f"{', '.join(x for x, _ in pairs)} = {', '.join(y for _, y in pairs)}")

    def _add_header(self, args: Sequence[Argument]) -> None:
        header = want(Header, args[0])
        if header.metadata:
            return
        v = self.layout.headers[header]
        with self.code.block(f"if not {v.valid}:"):
            self.line(f"{v.valid} = 1")
            if header.varbit is not None:
                self.line(f"{v.varbit} = bytes(len({v.varbit}))")
            zero = [self.layout.fields[f] for f in header.fields if not f.varbit]
            if zero:
                self.line(f"{' = '.join(zero)} = 0")
            self.line(f"{v.dirty} = True")
            self._resize(header, "+")

    def _remove_header(self, args: Sequence[Argument]) -> None:
        header = want(Header, args[0])
        if header.metadata:
            return
        v = self.layout.headers[header]
        if not self.counts_length:
            self.line(f"{v.valid} = 0")
            return
        with self.code.block(f"if {v.valid}:"):
            self.line(f"{v.valid} = 0")
            self._resize(header, "-")

    counts_length: bool = False
    """Egress reads packet_length, and headers come and go."""

    def _resize(self, header: Header, sign: str) -> None:
        if self.counts_length:
            extra = "" if header.varbit is None else f" + len({self.layout.headers[header].varbit})"
            self.line(f"size {sign}= {header.fixed_bytes}{extra}")

    def _push(self, args: Sequence[Argument]) -> None:
        stack, count = want(Stack, args[0]), want(Const, args[1]).value
        if count <= 0:
            return
        size, name = len(stack.headers), self.layout.next[stack]
        self.line(f"{name} = min({size}, {name} + {count})")
        for position in range(size - 1, count - 1, -1):
            self.copy_header(stack.headers[position], stack.headers[position - count])
        self._invalidate(stack.headers[: min(count, size)], stack)

    def _pop(self, args: Sequence[Argument]) -> None:
        stack, count = want(Stack, args[0]), want(Const, args[1]).value
        if count <= 0:
            return
        size, name = len(stack.headers), self.layout.next[stack]
        self.line(f"{name} = max(0, {name} - {count})")
        for position in range(size - count):
            self.copy_header(stack.headers[position], stack.headers[position + count])
        self._invalidate(stack.headers[max(size - count, 0) :], stack)

    def _invalidate(self, headers: Sequence[Header], stack: Stack) -> None:
        self.line(f"{' = '.join(self.layout.headers[h].valid for h in headers)} = 0")
        for header in stack.headers:
            self.forget(header)

    def _mark_to_drop(self, args: Sequence[Argument]) -> None:
        header = want(Header, args[0])
        for name, value in (("egress_spec", 511), ("mcast_grp", 0)):
            f = header.by_name.get(name)
            if f is not None:
                self.store(f, number(value))

    # --- registers, counters, hashes ---------------------------------------------------------------------------------

    def _checked(self, expression: Expr, size: int) -> tuple[str, str]:
        """Text of an index and the prefix of a statement that must only run when it lies in the array."""
        self.prepare(expression)
        index = self.value(expression)
        if self.in_bounds(expression, size):
            return index.text, ""
        if index.constant is None and not index.text.isidentifier():
            self.line(f"index = {index.text}")
            index = index._replace(text="index")
        check = self.in_range(index, size)
        return index.text, f"if {check}: " if check else ""

    def _register_read(self, args: Sequence[Argument]) -> None:
        target, register = want(Field, args[0]), want(Register, args[1])
        name = self.layout.fields.get(target)
        if name is None:
            return
        index, check = self._checked(_expr(args[2]), register.size)
        cells = self.names.bind(Slot("register", register.name))
        value = self.fit(target, Value(f"{cells}[{index}]", 0, (1 << register.width) - 1))
        if not check:
            self.line(f"{name} = {value}")
            if self.layout.lazy(target):
                self.known.add(name)
            self.changed(target.header)
            return
        before = set(self.known)
        with self.code.block(check.strip()):
            self.line(f"{name} = {value}")
            self.changed(target.header)
        self.known = before

    def _register_write(self, args: Sequence[Argument]) -> None:
        register, source = want(Register, args[0]), _expr(args[2])
        self.prepare(source)
        index, check = self._checked(_expr(args[1]), register.size)
        cells = self.names.bind(Slot("register", register.name))
        value = self.value(source)
        mask = (1 << register.width) - 1
        text = value.text if value.within(0, mask) and not value.boolean else f"{value.text} & {hex(mask)}"
        self.line(f"{check}{cells}[{index}] = {text}")

    def _count(self, args: Sequence[Argument]) -> None:
        counter = want(Counter, args[0])
        index, check = self._checked(_expr(args[1]), counter.size)
        packets = self.names.bind(Slot("packets", counter.name))
        octets = self.names.bind(Slot("bytes", counter.name))
        self.line(f"{check}{packets}[{index}] += 1; {octets}[{index}] += length")

    def _hash(self, args: Sequence[Argument]) -> None:
        target, base, size = want(Field, args[0]), _expr(args[1]), _expr(args[3])
        self.prepare(base, size)
        digest = self.digest(want(Calculation, args[2]), "")
        modulus = self.value(size)
        by = modulus.text if modulus.low and modulus.low > 0 else f"({modulus.text} & {hex(MASK64)} or 1)"
        start = self.value(base)
        text = f"{digest.text} % {by}"
        if start.constant != 0:
            text = f"({text} + {start.text}) & {hex(MASK64)}"
        self.store(target, Value(f"({text})", 0, MASK64))

    def _random(self, args: Sequence[Argument]) -> None:
        target, low, high = want(Field, args[0]), _expr(args[1]), _expr(args[2])
        if target not in self.layout.fields:
            return
        self.prepare(low, high)
        draw = self.names.bind(Slot("call", "draw"))
        before = set(self.known)
        with self.code.block(f"if {self.value(low).text} <= {self.value(high).text}:"):
            self.store(target, Value(f"{draw}({self.value(low).text}, {self.value(high).text})", 0, MASK64))
        self.known = before

    def digest(self, calculation: Calculation, rest: str) -> Value:
        """Lines that collect a calculation's input; returns its result.

        `rest` is the text of the payload; it is used where the calculation wants it.
        """
        self.prepare(*(Ref(f) for f in _inputs(calculation) if not f.varbit))
        self.line("bits = data = 0")
        for header, texts, width, varbit in self._runs(calculation):
            prefix = f"if {self.layout.headers[header].valid}: " if header else ""
            if varbit:
                self.line(
                    f"{prefix}data = data << 8 * len({varbit}) | {self.from_bytes}({varbit}, 'big'); "
                    f"bits += 8 * len({varbit})"
                )
            else:
                self.line(f"{prefix}data = data << {width} | {' | '.join(texts)}; bits += {width}")
        if calculation.payload:
            self.line(f"data = data << (-bits % 8 + 8 * len({rest})) | {self.from_bytes}({rest}, 'big')")
            self.line(f"bits += -bits % 8 + 8 * len({rest})")
        function = self.names.bind(HASHES[calculation.algorithm])
        return Value(f"{function}(data, bits)", 0, (1 << HASH_BITS.get(calculation.algorithm, 64)) - 1)

    def _runs(self, calculation: Calculation) -> list[tuple[Header | None, list[str], int, str | None]]:
        """A calculation's input in pieces: header that must be valid, shifted values, bits, varbit variable."""
        runs: list[tuple[Header | None, list[tuple[str, int]], str | None]] = []
        for part in calculation.parts:
            if isinstance(part, tuple):
                header, item = None, (number(part[0]).text, part[1])
            else:
                header = None if part.header.metadata else part.header
                if part.varbit:
                    runs.append((header, [], self.layout.fields[part]))
                    continue
                item = (self.unsigned(part).text, part.width)
            if not runs or runs[-1][0] is not header or runs[-1][2]:
                runs.append((header, [], None))
            runs[-1][1].append(item)
        result = []
        for header, items, varbit in runs:
            width = right = sum(w for _, w in items)
            texts = []
            for text, bits in items:
                right -= bits
                texts.append(f"{text} << {right}" if right else text)
            result.append((header, texts, width, varbit))
        return result

    # --- the packet's fate -------------------------------------------------------------------------------------------

    def _clone(self, args: Sequence[Argument]) -> None:
        session = _expr(args[0])
        self.prepare(session)
        self.line(f"clone = {self.value(session).text} & 0x7fff | {CLONE_VALID}")
        self.line(f"clone_list = {want(Const, args[1]).value}")

    def _resubmit(self, args: Sequence[Argument]) -> None:
        self.line(f"resubmit = {want(Const, args[0]).value}")

    def _recirculate(self, args: Sequence[Argument]) -> None:
        self.line(f"recirculate = {want(Const, args[0]).value}")

    def _truncate(self, args: Sequence[Argument]) -> None:
        length = _expr(args[0])
        self.prepare(length)
        self.line(f"limit = min(limit, {self.value(length).text})")

    def _assert(self, args: Sequence[Argument]) -> None:
        condition = _expr(args[0])
        self.prepare(condition)
        failed = self.names.bind(Slot("call", "assertion_failed"))
        with self.code.block(f"if not {self.value(condition).text}:"):
            self.line(f"{failed}()")
            self.line("return out")

    def _log(self, args: Sequence[Argument]) -> None:
        values = [_expr(v) for v in want(tuple, args[1])]
        self.prepare(*values)
        log = self.names.bind(Slot("call", "log_message"))
        texts = "".join(f"{self.value(v).text}, " for v in values)
        self.line(f"{log}({want(str, args[0])!r}, ({texts}))")

    _writers: ClassVar[dict[str, Callable[[ActionWriter, Sequence[Argument]], None]]] = {
        "assign": _assign,
        "assign_VL": _assign_varbit,
        "assign_header": _assign_header,
        "assign_header_stack": _assign_stack,
        "add_header": _add_header,
        "remove_header": _remove_header,
        "push": _push,
        "pop": _pop,
        "mark_to_drop": _mark_to_drop,
        "register_read": _register_read,
        "register_write": _register_write,
        "count": _count,
        "modify_field_with_hash_based_offset": _hash,
        "modify_field_rng_uniform": _random,
        "clone_ingress_pkt_to_egress": _clone,
        "clone_egress_pkt_to_egress": _clone,
        "resubmit": _resubmit,
        "recirculate": _recirculate,
        "truncate": _truncate,
        "assert": _assert,
        "assume": _assert,
        "log_msg": _log,
    }


def _inputs(calculation: Calculation) -> list[Field]:
    """Fields that a calculation reads."""
    return [part for part in calculation.parts if isinstance(part, Field)]


def _mentions(branch: Branch, op: str) -> bool:
    """Whether a primitive occurs in a branch."""
    return any(_mentions(s, op) if isinstance(s, Branch) else s.op == op for s in branch.then + branch.other)


def _common_index(body: list[Statement]) -> tuple[Register, Expr] | None:
    """The one index that a long run of register accesses shares, when nothing in the body changes it.

    Its range is then checked once, not per access: a frame of 34 words would pay for 67 checks.
    """
    found: tuple[Register, Expr] | None = None
    accesses = 0
    written: set[Field] = set()
    for statement in body:
        if isinstance(statement, Branch):
            return None
        for arg in statement.args[:1]:
            if isinstance(arg, Field):
                written.add(arg)
        if statement.op not in ("register_read", "register_write"):
            continue
        position = 1 if statement.op == "register_read" else 0
        register, index = want(Register, statement.args[position]), _expr(statement.args[position + 1])
        if found is not None and (found[0].size != register.size or found[1] != index):
            return None
        found = (register, index)
        accesses += 1
    if found is None or accesses < 4 or not isinstance(found[1], Ref):
        return None
    index_field = found[1].field
    return found if index_field.header.metadata and index_field not in written else None
