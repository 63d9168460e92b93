# SPDX-License-Identifier: Apache-2.0
"""Make one number of a full frame's words in the compiled program: one field and one register of any width.

p4c stops at 2048 bits, so the program has W words, and adds them with a carry from word to word. BMv2 and the embedded
switch take fields and registers of any width, and pay for each access, hardly for its width. For every action that
touches the words this step proves, by giving equal numbers to equal values, that it does one of six things to the
whole number, and replaces it by that. Whatever it cannot prove it refuses (RefusedProgram): it never guesses.

What it relies on: the words stand in one header from the most significant one on and nothing else does; each word's
register is used by these actions only; all cells of the registers in one action are the same cell.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from p4json import Const, Expr, Field, Json, Op, RefusedProgram, Register, Step, Widths, field_references, ones, read

HEADER = "full"
SLOT = "ReduceIngress.slot."
SUM = SLOT + "sum"
CELL = Field("scalars", "slot_cell")
WORD = 2048


class Numbers:
    """Value numbering: structurally equal values get equal numbers, so that comparing takes no time."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], int] = {}

    def of(self, *node: Any) -> int:
        """Number of a node whose operands are numbers already."""
        return self._known.setdefault(node, len(self._known))

    def const(self, value: int) -> int:
        return self.of("const", value)

    def op(self, name: str, left: int, right: int) -> int:
        """An operation, with what p4c has folded folded here too."""
        zero, false = self.const(0), self.of("bool", False)
        if name in ("+", "|") and right == zero:
            return left
        if name == "and" and right == false:
            return false
        if name == "or" and right == false:
            return left
        return self.of(name, left, right)


class Words:
    """The symbolic run of one action over the words of a frame."""

    def __init__(self, count: int, widths: Widths) -> None:
        self.numbers = Numbers()
        self.count = count
        self._widths = widths
        self._fields: dict[Field, int] = {}
        self.sums: dict[int, int] = {}
        """What each register gets."""
        self.frame: dict[int, int] = {}
        """What each word of the frame gets."""

    def word(self, i: int) -> int:
        return self.numbers.of("word", i)

    def sum(self, i: int) -> int:
        return self.numbers.of("sum", i)

    def mask(self, value: int) -> int:
        return self.numbers.op("&", value, self.numbers.const(ones(WORD)))

    def value(self, e: Expr | None) -> int:
        """Number of an expression over words and temporaries."""
        if isinstance(e, Const):
            return self.numbers.const(e.value)
        if isinstance(e, Field):
            if e in self._fields:
                return self._fields[e]
            if e.header == HEADER:
                return self.frame.get(int(e.name[1:]), self.word(int(e.name[1:])))
            raise RefusedProgram(f"a word depends on {e.header}.{e.name}")
        if isinstance(e, Op) and e.op == "?":
            return self.numbers.of("?", *(self.value(a) for a in e.args))
        if isinstance(e, Op) and e.op == "d2b" and e.args[0] is None:
            return self.value(e.args[1])
        if isinstance(e, Op) and None not in e.args:
            return self.numbers.op(e.op, self.value(e.args[0]), self.value(e.args[1]))
        if e is not None and getattr(e, "text", "") == '{"type": "bool", "value": false}':
            return self.numbers.of("bool", False)
        raise RefusedProgram(f"a word depends on {e}")

    def run(self, step: Step) -> None:
        """One primitive that works on words."""
        target = step.target
        if step.op == "register_read" and target is not None:
            self._put(target, self._sum_of(step.raw[1]["value"], step.values[2]))
        elif step.op == "assign" and target is not None:
            self._put(target, self.value(step.values[1]))
        elif step.op == "register_write":
            i = _index(step.raw[0]["value"])
            if step.values[1] != CELL or i in self.sums:
                raise RefusedProgram("a register is written twice, or in another cell")
            self.sums[i] = self.value(step.values[2])
        else:
            raise RefusedProgram(f"{step.op} works on words")

    def _sum_of(self, array: str, cell: Expr) -> int:
        i = _index(array)
        if cell != CELL or i in self.sums:
            raise RefusedProgram(f"{array} is read after it was written, or in another cell")
        return self.sum(i)

    def _put(self, target: Field, value: int) -> None:
        if self._widths.fields.get(target) != WORD:
            raise RefusedProgram(f"{target.header}.{target.name} has not the width of a word")
        if target.header == HEADER:
            self.frame[int(target.name[1:])] = value
        else:
            self._fields[target] = value

    def additions(self) -> list[int]:
        """What the words of (frame + sums) mod 2^(W * 2048) are: a chain of carries from the last word on."""
        n, result, carry = self.numbers, [0] * self.count, self.numbers.const(0)
        for i in reversed(range(self.count)):
            word = self.word(i)
            total = self.mask(n.op("+", word, self.sum(i)))
            if carry != n.const(0):
                total = self.mask(n.op("+", total, carry))
            carried = n.of("bool", False) if carry == n.const(0) else n.of("==", carry, n.const(1))
            over = n.op("or", n.of("<", total, word), n.op("and", n.of("==", total, word), carried))
            carry = self.mask(n.of("?", over, n.const(1), n.const(0)))
            result[i] = total
        return result

    def unions(self) -> list[int]:
        """What the words of (frame | sums) are."""
        return [self.numbers.op("|", self.word(i), self.sum(i)) for i in range(self.count)]

    def meaning(self) -> list[tuple[str, Expr]]:
        """The same as writes of ("sums" or "frame", value), in order."""
        words = [self.word(i) for i in range(self.count)]
        sums = [self.sum(i) for i in range(self.count)]
        whole, stored = Field(HEADER, "w0"), Register(SUM + "0", CELL)
        added, united = self.additions(), self.unions()
        plus, union = Op("+", (whole, stored)), Op("|", (whole, stored))
        to_sums, to_frame = (
            [got[i] for i in range(self.count)] if set(got) == set(range(self.count)) else None
            for got in (self.sums, self.frame)
        )
        known: list[tuple[Any, Any, list[tuple[str, Expr]]]] = [
            (words, None, [("sums", whole)]),
            (added, None, [("sums", plus)]),
            (united, None, [("sums", union)]),
            (added, added, [("frame", plus), ("sums", whole)]),
            (united, united, [("frame", union), ("sums", whole)]),
            (None, sums, [("frame", stored)]),
        ]
        for wanted_sums, wanted_frame, writes in known:
            if to_sums == wanted_sums and to_frame == wanted_frame and self._complete(to_sums, to_frame):
                return writes
        raise RefusedProgram("the words are neither kept, added, united nor loaded as one number")

    def _complete(self, to_sums: list[int] | None, to_frame: list[int] | None) -> bool:
        """Nothing was written to some words only."""
        return bool(self.sums) == (to_sums is not None) and bool(self.frame) == (to_frame is not None)


def _index(array: str) -> int:
    found = re.fullmatch(re.escape(SUM) + r"(\d+)", array)
    if found is None:
        raise RefusedProgram(f"{array} is no register of a word")
    return int(found.group(1))


def fuse(program: Json) -> int:
    """Rewrite the program in place; returns the number of words. RefusedProgram."""
    count = _count_words(program)
    widths = Widths(program)
    touched = 0
    for action in program["actions"]:
        steps = [Step.of(p) for p in action["primitives"]]
        if any(_wide(step, widths) for step in steps):
            action["primitives"] = [s.json() for s in _fused(action["name"], steps, count, widths)]
            touched += 1
    if not touched:
        raise RefusedProgram("no action works on words")
    header = next(t for t in program["header_types"] if t["name"] == _header_type(program))
    header["fields"] = [["w0", WORD * count, False]]
    kept = [r for r in program["register_arrays"] if r["name"] == SUM + "0" or not r["name"].startswith(SUM)]
    next(r for r in kept if r["name"] == SUM + "0")["bitwidth"] = WORD * count
    for number, array in enumerate(kept):
        array["id"] = number
    program["register_arrays"] = kept
    _check_rest(program)
    return count


def fuse_p4info(text: str, count: int) -> str:
    """The same in the P4Info, text form: one register of the full width."""
    blocks = re.split(r"^(?=registers \{$)", text, flags=re.MULTILINE)
    last, _, rest = blocks[-1].partition("\n}\n")
    blocks[-1:] = [last + "\n}\n", rest]
    kept = []
    for block in blocks:
        number = re.search(r'name: "' + re.escape(SUM) + r'(\d+)"', block)
        if number is None or not block.startswith("registers {"):
            kept.append(block)
        elif number.group(1) == "0":
            if block.count(f"bitwidth: {WORD}\n") != 1:
                raise RefusedProgram("the P4Info's register has not the width of a word")
            kept.append(block.replace(f"bitwidth: {WORD}\n", f"bitwidth: {WORD * count}\n"))
    if len(blocks) - len(kept) != count - 1:
        raise RefusedProgram("the P4Info has not one register for each word")
    return "".join(kept)


def _header_type(program: Json) -> str:
    (header,) = [h for h in program["headers"] if h["name"] == HEADER]
    if sum(h["header_type"] == header["header_type"] for h in program["headers"]) != 1:
        raise RefusedProgram(f"other headers are of the type of {HEADER}")
    return str(header["header_type"])


def _count_words(program: Json) -> int:
    header = next(t for t in program["header_types"] if t["name"] == _header_type(program))
    count = len(header["fields"])
    if header["fields"] != [[f"w{i}", WORD, False] for i in range(count)]:
        raise RefusedProgram(f"{HEADER} does not consist of words")
    arrays = {r["name"]: r for r in program["register_arrays"] if r["name"].startswith(SUM)}
    if set(arrays) != {f"{SUM}{i}" for i in range(count)}:
        raise RefusedProgram("there is not one register for each word")
    if {(r["bitwidth"], r["size"]) for r in arrays.values()} != {(WORD, arrays[SUM + "0"]["size"])}:
        raise RefusedProgram("the words' registers differ")
    return count


def _wide(step: Step, widths: Widths) -> bool:
    """Whether a primitive works on words: by what it writes."""
    target = step.target
    if (target is not None and target.header == HEADER) or (step.written or "").startswith(SUM):
        return True
    return any(_of_words(part) for part in step.reads()) or (
        target is not None and target.header == "scalars" and widths.fields.get(target) == WORD and _constant(step)
    )


def _constant(step: Step) -> bool:
    return step.op == "assign" and isinstance(step.values[1], Const)


def _of_words(part: Expr) -> bool:
    if isinstance(part, Register):
        return part.array.startswith(SUM)
    return isinstance(part, Field) and part.header == HEADER


def _fused(name: str, steps: Sequence[Step], count: int, widths: Widths) -> list[Step]:
    """An action with its work on words replaced; all other primitives stay, in their order."""
    words, place = Words(count, widths), None
    rest: list[Step] = []
    temporaries: set[Field] = set()
    for step in steps:
        target = step.target
        from_temporary = any(part in temporaries for part in step.reads())
        if _wide(step, widths) or from_temporary:
            place = len(rest) if place is None else place
            if target is not None and target.header != HEADER:
                temporaries.add(target)
            words.run(step)
        else:
            if target == CELL or target in temporaries:
                raise RefusedProgram(f"{name} changes what its words depend on")
            rest.append(step)
    cell, array = {"type": "field", "value": [CELL.header, CELL.name]}, {"type": "register_array", "value": SUM + "0"}
    made = []
    for to, value in words.meaning():
        if to == "sums":
            made.append(Step("register_write", [array, cell, {}], {1: CELL, 2: value}))
        else:
            made.append(Step("assign", [{"type": "field", "value": [HEADER, "w0"]}, {}], {1: value}))
    return rest[:place] + made + rest[place:]


def _check_rest(program: Json) -> None:
    """No reference to a word or register that is gone, and no cell outside the registers."""
    for field in field_references(program):
        if field.header == HEADER and field.name not in ("w0", "$valid$"):
            raise RefusedProgram(f"{field.header}.{field.name} is used elsewhere")
    size = next(r["size"] for r in program["register_arrays"] if r["name"] == SUM + "0")
    widths = Widths(program)
    for action in program["actions"]:
        for step in (Step.of(p) for p in action["primitives"]):
            bits = widths.bits(read(step.raw[1])) if step.target == CELL else None
            if step.target == CELL and (step.op != "assign" or bits is None or size < 1 << bits):
                raise RefusedProgram("the cell may lie outside the registers")
