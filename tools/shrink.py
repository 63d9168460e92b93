# SPDX-License-Identifier: Apache-2.0
"""Small rewritings of the compiled program that leave its meaning as it is and spare BMv2 work on every packet.

BMv2 zeroes every metadata field and every local variable for each packet, copies them for each copy of it, and exports
the bytes of each field that is written. So: masks that take nothing away go; a value that is computed once and used
once, with nothing in between that could change it, is computed where it is used; what is computed twice is computed
once; variables and standard metadata that nobody looks at any more are not declared.

Only actions made of the primitives in p4json.VALUES and mark_to_drop are reordered; others keep what they have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from p4json import (
    Const,
    Expr,
    Field,
    Json,
    Op,
    Other,
    Register,
    Step,
    Widths,
    field_references,
    ones,
    parts,
    read,
    rebuild,
    write,
)

LOCALS = "scalars"
REQUIRED = {
    "standard_metadata": ("ingress_port", "packet_length", "instance_type", "egress_spec", "egress_port"),
}
"""Fields that simple_switch asks for at start."""
KEPT = ("mcast_grp", "egress_rid")
"""Fields of standard metadata that simple_switch itself reads or sets for multicast."""
PADDING = "_padding"


def shrink(program: Json) -> None:
    """Rewrite the program in place."""
    widths = Widths(program)
    for pipeline in program["pipelines"]:
        for conditional in pipeline["conditionals"]:
            conditional["expression"] = _condition(conditional["expression"], widths)
    for action in program["actions"]:
        steps = [Step.of(p) for p in action["primitives"]]
        for step in steps:
            _unmask(step, widths)
        _share(steps, widths)
        action["primitives"] = [s.json() for s in steps]
    while _inline_once(program, widths) or _drop_dead(program):
        pass
    _drop_locals(program)
    _drop_standard(program)


def _condition(expression: Json, widths: Widths) -> Json:
    return write(widths.without_masks(read(expression)))


def _unmask(step: Step, widths: Widths) -> None:
    """Drop masks that take nothing away, also from what the target cuts off anyhow."""
    for position, value in step.values.items():
        e = widths.without_masks(value)
        width = _room(step, position, widths)
        step.values[position] = e if width is None else widths.cut(e, width)


def _room(step: Step, position: int, widths: Widths) -> int | None:
    """Bits to which a value is cut where it is written."""
    if step.op == "assign" and step.target is not None:
        return widths.fields.get(step.target)
    if step.op == "register_write" and position == 2 and step.written is not None:
        return widths.registers.get(step.written)
    return None


def _known(step: Step) -> bool:
    return step.op == "mark_to_drop" or bool(step.values)


def _fits(value: Expr, field: Field, widths: Widths) -> bool:
    """Whether a variable holds every value of the expression."""
    bits, width = widths.bits(value), widths.fields.get(field)
    return bits is not None and width is not None and bits <= width


def _local(field: Field | None) -> bool:
    return field is not None and field.header == LOCALS


def _share(steps: list[Step], widths: Widths) -> None:
    """Use a variable that holds the value already instead of computing it again."""
    for position, step in enumerate(steps):
        target = step.target
        if step.op != "assign" or target is None or not _local(target) or not isinstance(step.values[1], Op):
            continue
        value = step.values[1]
        if target in parts(value) or not _fits(value, target, widths):
            continue
        for later in steps[position + 1 :]:
            if later.op == "assign" and later.values[1] == value:
                later.values[1] = target
            if not _known(later) or later.disturbs(value) or later.target == target:
                break


def _inline_once(program: Json, widths: Widths) -> bool:
    """Compute one variable's value where it is used; whether there was one to be moved."""
    private = _private(program)
    for action in program["actions"]:
        steps = [Step.of(p) for p in action["primitives"]]
        written = Counter(s.target for s in steps)
        reads = Counter(part for s in steps for v in s.values.values() for part in parts(v))
        for position, step in enumerate(steps):
            target = step.target
            if target not in private or written[target] != 1 or reads[target] != 1:
                continue
            value = _value_of(step)
            if value is None or target in parts(value):
                continue
            user = _user(steps[position + 1 :], target, value)
            if user is None:
                continue
            fitting = value if _fits(value, target, widths) else Op("&", (value, Const(ones(widths.fields[target]))))
            for place, old in user.values.items():
                user.values[place] = rebuild(old, _replace(target, fitting))
            _unmask(user, widths)
            del steps[position]
            action["primitives"] = [s.json() for s in steps]
            return True
    return False


def _private(program: Json) -> set[Field]:
    """Variables that carry nothing from one action to another: each action that reads one has written it before."""
    private = {Field(LOCALS, f[0]) for fields in _fields_of(program, LOCALS) for f in fields}
    everywhere = Counter(field_references(program))
    for action in program["actions"]:
        everywhere.subtract(field_references({"actions": [action]}))
        written: set[Field | None] = set()
        for step in (Step.of(p) for p in action["primitives"]):
            if not _known(step):
                private.difference_update(field_references({"": step.raw}))
            private.difference_update(part for part in step.reads() if isinstance(part, Field) and part not in written)
            written.add(step.target)
    return {f for f in private if not everywhere[f]}


def _replace(target: Field, value: Expr) -> Callable[[Expr], Expr]:
    return lambda part: value if part == target else part


def _value_of(step: Step) -> Expr | None:
    """What an assign or register_read puts into its target, where an expression can say it."""
    if step.op == "register_read":
        return Register(step.raw[1]["value"], step.values[2])
    value = step.values[1]
    return None if any(isinstance(part, Other) for part in parts(value)) else value


def _user(later: list[Step], target: Field, value: Expr) -> Step | None:
    """The one later step that reads the target, if nothing before it can change the value."""
    for step in later:
        if any(target in parts(v) for v in step.values.values()):
            return step
        if not _known(step) or step.disturbs(value) or step.target == target:
            return None
    return None


def _drop_dead(program: Json) -> bool:
    """Remove one computation that nobody looks at; whether there was one."""
    uses = Counter(field_references(program))
    for action in program["actions"]:
        for position, primitive in enumerate(action["primitives"]):
            target = Step.of(primitive).target
            if target is not None and _local(target) and uses[target] == 1:
                del action["primitives"][position]
                return True
    return False


def _drop_locals(program: Json) -> None:
    used = set(field_references(program))
    for fields in _fields_of(program, LOCALS):
        fields[:] = _padded([f for f in fields if Field(LOCALS, f[0]) in used and f[0] != PADDING])


def _drop_standard(program: Json) -> None:
    """Standard metadata that neither the program nor simple_switch needs, and its other names."""
    (header, required), *_ = REQUIRED.items()
    used = {f.name for f in field_references(program) if f.header == header} | set(required) | set(KEPT)
    for fields in _fields_of(program, header):
        fields[:] = _padded([f for f in fields if f[0] in used and f[0] != PADDING])
    program["field_aliases"] = [a for a in program["field_aliases"] if a[1][0] != header or a[1][1] in used]


def _fields_of(program: Json, header: str) -> list[list[Any]]:
    (found,) = [h for h in program["headers"] if h["name"] == header]
    return [t["fields"] for t in program["header_types"] if t["name"] == found["header_type"]]


def _padded(fields: list[Any]) -> list[Any]:
    """A header is a whole number of bytes."""
    over = sum(width for _, width, *_ in fields) % 8
    return [*fields, [PADDING, 8 - over, False]] if over else fields
