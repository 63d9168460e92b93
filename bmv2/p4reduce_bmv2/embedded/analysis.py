# SPDX-License-Identifier: Apache-2.0
"""What a program reads and writes, so that generated code keeps only what somebody looks at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from p4reduce_bmv2.embedded.program import (
    Argument,
    Calculation,
    Cell,
    Conditional,
    Const,
    Field,
    Header,
    Op,
    Primitive,
    Program,
    Ref,
    SameHeader,
    Stack,
    StackLast,
    TableNode,
    want,
)

ENGINE_FIELDS = ("egress_spec", "mcast_grp", "priority")
"""Standard metadata that the engine itself reads between ingress and egress."""


@dataclass(slots=True)
class Effects:
    """Reads and writes of a part of the program."""

    reads: set[Field] = field(default_factory=set)
    writes: set[Field] = field(default_factory=set)
    touched: set[Header] = field(default_factory=set)
    """Headers whose validity, content or place may change."""
    whole: set[Header] = field(default_factory=set)
    """Headers that are made, copied or compared as a whole: all their fields must be known."""
    moved: set[Header] = field(default_factory=set)
    """Headers that may get the bytes of another header."""
    made: set[Header] = field(default_factory=set)
    """Headers that add_header may make valid."""
    stacks: set[Stack] = field(default_factory=set)
    primitives: set[str] = field(default_factory=set)
    field_lists: set[int] = field(default_factory=set)

    def expr(self, value: Argument) -> None:
        """Note what evaluating an argument reads."""
        if isinstance(value, Ref):
            self.reads.add(value.field)
        elif isinstance(value, Cell):
            self.expr(value.index)
        elif isinstance(value, Op):
            for arg in value.args:
                self.expr(arg)
        elif isinstance(value, StackLast):
            self.reads.update(h.fields[value.index] for h in value.stack.headers)
        elif isinstance(value, SameHeader):
            self.whole.update((value.left, value.right))
        elif isinstance(value, tuple):
            for item in value:
                self.expr(item)
        elif isinstance(value, Calculation):
            self.calculation(value)

    def calculation(self, value: Calculation) -> None:
        for part in value.parts:
            if isinstance(part, Field):
                self.reads.add(part)

    def write(self, target: Field) -> None:
        self.writes.add(target)
        if not target.header.metadata:
            self.touched.add(target.header)

    def primitive(self, call: Primitive) -> None:
        """Note what one primitive does."""
        op, args = call.op, call.args
        self.primitives.add(op)
        if op in ("assign", "register_read", "modify_field_with_hash_based_offset", "modify_field_rng_uniform"):
            self.write(want(Field, args[0]))
            self.rest(args[1:])
        elif op == "assign_VL":
            self.write(want(Field, args[0]))
            self.reads.add(want(Field, args[1]))
        elif op == "assign_header":
            target, source = want(Header, args[0]), want(Header, args[1])
            if target.metadata:
                self.writes.update(target.fields)
                self.reads.update(source.fields)
                return
            self.touched.add(target)
            self.moved.add(target)
            self.whole.update((target, source))
        elif op == "assign_header_stack":
            one, other = want(Stack, args[0]), want(Stack, args[1])
            self.stacks.add(one)
            self.touched.update(one.headers)
            self.moved.update(one.headers)
            self.whole.update(one.headers + other.headers)
        elif op in ("add_header", "remove_header"):
            target = want(Header, args[0])
            self.touched.add(target)
            if op == "add_header":
                self.made.add(target)
                self.whole.add(target)
        elif op == "mark_to_drop":
            header = want(Header, args[0])
            self.writes.update(header.by_name[n] for n in ("egress_spec", "mcast_grp") if n in header.by_name)
        elif op in ("push", "pop"):
            stack = want(Stack, args[0])
            self.stacks.add(stack)
            for group in (self.touched, self.moved, self.whole):
                group.update(stack.headers)
        else:
            if op in ("resubmit", "recirculate", "clone_ingress_pkt_to_egress", "clone_egress_pkt_to_egress"):
                self.field_lists.add(want(Const, args[-1]).value)
            self.rest(args)

    def rest(self, args: Iterable[Argument]) -> None:
        for arg in args:
            self.expr(arg)

    def merge(self, other: Effects) -> None:
        for name in ("reads", "writes", "touched", "whole", "moved", "made", "stacks", "primitives", "field_lists"):
            getattr(self, name).update(getattr(other, name))


@dataclass(slots=True)
class Usage:
    """Effects of the parts of one program and of the whole."""

    parser: Effects
    verify: Effects
    ingress: Effects
    egress: Effects
    update: Effects
    total: Effects

    def live(self, f: Field, program: Program) -> bool:
        """Whether a metadata field is ever looked at."""
        if f in self.total.reads:
            return True
        return any(program.standard(name) is f for name in ENGINE_FIELDS)


def analyse(program: Program) -> Usage:
    """Effects of every part of a program."""
    parser = Effects()
    for state in program.states.values():
        for op in state.ops:
            _parser_op(parser, op.op, op.args)
        for value, _ in state.key:
            parser.expr(value)
    verify, update = Effects(), Effects()
    for checksum in program.checksums:
        for wanted, effects in ((checksum.verify, verify), (checksum.update, update)):
            if wanted:
                effects.expr(checksum.condition)
                effects.calculation(checksum.calculation)
        if checksum.verify:
            verify.reads.add(checksum.target)
        if checksum.update:
            update.write(checksum.target)
    ingress = _pipeline(program, "ingress")
    egress = _pipeline(program, "egress")
    total = Effects()
    for part in (parser, verify, ingress, egress, update):
        total.merge(part)
    for number in total.field_lists:
        fields = program.field_lists[number]
        total.reads.update(fields)
        total.writes.update(fields)
    return Usage(parser, verify, ingress, egress, update, total)


def _parser_op(effects: Effects, op: str, args: tuple[Argument, ...]) -> None:
    if op == "primitive":
        effects.primitive(Primitive(want(str, args[0]), want(tuple, args[1])))
    elif op == "set":
        effects.write(want(Field, args[0]))
        effects.expr(args[1])
    elif op in ("extract", "extract_VL"):
        target = args[0]
        if isinstance(target, Stack):
            effects.stacks.add(target)
            effects.touched.update(target.headers)
        elif isinstance(target, Header):
            effects.touched.add(target)
        effects.rest(args[1:])
    elif not isinstance(args[0], Const):
        effects.rest(args)


def _pipeline(program: Program, name: str) -> Effects:
    effects = Effects()
    for node in program.pipelines[name].nodes.values():
        if isinstance(node, Conditional):
            effects.expr(node.condition)
        elif isinstance(node, TableNode):
            for key in node.keys:
                effects.expr(key.value)
            for action in node.actions:
                for call in action.body:
                    effects.primitive(call)
    return effects
