# SPDX-License-Identifier: Apache-2.0
"""Generated code around the pipelines: start of a packet, end of ingress, copies, clones, deparser.

The function has the shape below; what a program does not use is left out.

    def run(frame, port, kind, kept_list, kept, copies, later):
        zero all variables; parse
        if kind is a clone of ingress: only its field list remains
        else: verify checksums; ingress; clone / resubmit / multicast / drop / unicast
        bytes of the headers that egress cannot change, made once
        for every copy: egress; clone; drop; checksums; deparse; recirculate or send
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from p4reduce_bmv2.embedded.emit import Slot, Value, number
from p4reduce_bmv2.embedded.gen_control import ControlWriter
from p4reduce_bmv2.embedded.gen_parser import Position
from p4reduce_bmv2.embedded.layout import Group, HeaderVars
from p4reduce_bmv2.embedded.program import Field, Header
from p4reduce_bmv2.embedded.state import MAX_PORT

NORMAL, INGRESS_CLONE, EGRESS_CLONE, RECIRCULATED, REPLICATED, RESUBMITTED = 0, 1, 2, 4, 5, 6
"""Values of standard_metadata.instance_type."""
DROP_PORT = 511
UNLIMITED = 1 << 62


class PacketWriter(ControlWriter):
    """Writes the function that runs a packet."""

    def function(self, positions: Mapping[str, Position]) -> None:
        """The whole function."""
        self._features()
        signature = "frame, port, kind, kept_list, kept, copies, later" if self.passes else "frame, port"
        with self.code.block(f"def run({signature}):"):
            self.line("length = len(frame)")
            self.line("out = []")
            self._start()
            self.parser(positions)
            if self.clones_ingress:
                with self.code.block(f"if kind == {INGRESS_CLONE}:"):
                    self._start_clone()
                with self.code.block("else:"):
                    self._ingress()
            else:
                self._ingress()
            self._egress()
            self.line("return out")

    def _features(self) -> None:
        """What the program uses of what costs something."""
        total, ingress, egress = self.usage.total, self.usage.ingress, self.usage.egress
        clone = {"clone_ingress_pkt_to_egress", "clone_egress_pkt_to_egress"}
        self.clones_ingress = bool(clone & (ingress.primitives | self.usage.parser.primitives))
        self.clones_egress = bool(clone & egress.primitives)
        self.resubmits = "resubmit" in ingress.primitives
        self.recirculates = "recirculate" in total.primitives
        self.truncates = "truncate" in total.primitives
        self.passes = self.clones_ingress or self.resubmits or self.recirculates
        length = self.program.standard("packet_length")
        self.counts_length = bool(
            length is not None and length in total.reads and {"add_header", "remove_header"} & total.primitives
        )
        self.metadata = [name for f, name in self.layout.fields.items() if f.header.metadata]

    # --- start -------------------------------------------------------------------------------------------------------

    def standard(self, name: str) -> str | None:
        """Variable of a standard metadata field; None when nobody looks at it."""
        f = self.program.standard(name)
        return None if f is None else self.layout.fields.get(f)

    def put(self, name: str, value: str | int, high: int | None = None) -> None:
        """Set a standard metadata field, if somebody looks at it, to a number or to a text of at most `high`."""
        f = self.program.standard(name)
        if f is not None and f in self.layout.fields:
            self.store(f, number(value) if isinstance(value, int) else Value(value, 0, high))

    def zero(self, names: Sequence[str], value: str = "0") -> None:
        """Set many variables to one value."""
        if names:
            self.line(f"{' = '.join(names)} = {value}")

    def stamp(self, name: str) -> None:
        """Set a time stamp, if somebody looks at it; else the clock is not asked."""
        if self.standard(name) is not None:
            self.put(name, f"{self.names.bind(Slot('call', 'clock'))}()")

    def _start(self) -> None:
        names = list(self.metadata)
        flags: list[str] = []
        varbits: list[str] = []
        for v in self.layout.headers.values():
            names.append(v.valid)
            if v.mutable:
                flags.append(v.dirty)
            if isinstance(v.offset, str):
                names.append(v.offset)
            for f in v.header.fields:
                if f in self.layout.fields:
                    (varbits if f.varbit else names).append(self.layout.fields[f])
        names += self.layout.next.values()
        for wanted, name in (
            (self.clones_ingress or self.clones_egress, "clone"),
            (self.clones_ingress or self.clones_egress, "clone_list"),
            (self.resubmits, "resubmit"),
            (self.recirculates, "recirculate"),
        ):
            if wanted:
                names.append(name)
        if self.clones_ingress or self.clones_egress:
            names.append("cut")
        self.zero(names)
        self.zero(flags, "True")
        self.zero(varbits, "b''")
        if self.truncates:
            self.line(f"limit = {UNLIMITED}")
        if self.counts_length:
            self.line("size = length")
        self._arrive()

    def _arrive(self) -> None:
        """Standard metadata of a packet that enters ingress."""
        if not self.passes:
            self.put("ingress_port", "port", MAX_PORT)
            self.stamp("ingress_global_timestamp")
        else:
            with self.code.block(f"if kind <= {INGRESS_CLONE}:"):
                self.put("ingress_port", "port", MAX_PORT)
                self.stamp("ingress_global_timestamp")
            self._restore_kept(f"kind > {INGRESS_CLONE} and ")
            self.put("instance_type", "kind", RESUBMITTED)
        self.put("packet_length", "length")

    def _start_clone(self) -> None:
        """A clone of ingress was parsed again; now it forgets all metadata but its field list."""
        self.line("copies, cut = copies")
        self.zero(self.metadata)
        self._restore_kept("")
        self.put("instance_type", INGRESS_CLONE)

    def _restore_kept(self, condition: str) -> None:
        for number_, fields in self._lists():
            with self.code.block(f"if {condition}kept_list == {number_}:"):
                variables = [self.layout.fields[f] for f in fields]
                self.line(f"{', '.join(variables)}{',' if len(variables) == 1 else ''} = kept")
                for f in fields:
                    self.changed(f.header)
        self.known.clear()

    def _lists(self) -> list[tuple[int, list[Field]]]:
        """Field lists that somebody uses and that have fields."""
        used = sorted(self.usage.total.field_lists)
        return [(n, self.program.field_lists[n]) for n in used if self.program.field_lists[n]]

    def _keep(self, which: str) -> None:
        """Collect the fields of a list into `kept`."""
        self.line("keep = ()")
        for number_, fields in self._lists():
            with self.code.block(f"if {which} == {number_}:"):
                for f in fields:
                    self.decode(f)
                self.line(f"keep = ({', '.join(self.layout.fields[f] for f in fields)},)")
            self.known.clear()

    # --- ingress -----------------------------------------------------------------------------------------------------

    def _ingress(self) -> None:
        self._verify_checksums()
        self.put("parser_error", "trouble")
        self.pipeline("ingress")
        self._end_of_ingress()

    def _verify_checksums(self) -> None:
        if self.standard("checksum_error") is None:
            return
        for checksum in self.program.checksums:
            if not checksum.verify:
                continue
            self.prepare(checksum.condition)
            header = self.layout.headers.get(checksum.target.header)
            tests = [header.valid] if header else []
            condition = self.value(checksum.condition)
            if condition.constant != 1:
                tests.append(condition.text)
            with self.code.block(f"if {' and '.join(tests) or 'True'}:"):
                digest = self.digest(checksum.calculation, "frame[end:]")
                self.line(f"found = {digest.text}")
                self.decode(checksum.target)
                with self.code.block(f"if found != {self.unsigned(checksum.target).text}:"):
                    self.put("checksum_error", 1)
            self.known.clear()

    def _end_of_ingress(self) -> None:
        spec, group = self.standard("egress_spec"), self.standard("mcast_grp")
        if self.clones_ingress:
            with self.code.block("if clone:"):
                session = self.names.bind(Slot("call", "session"))
                self.line(f"copies = {session}(clone & 0x7fff)")
                with self.code.block("if copies is not None:"):
                    self._keep("clone_list")
                    self.line(f"out += run(frame, port, {INGRESS_CLONE}, clone_list, keep, copies, later)")
                self.line("clone = 0")
        if self.resubmits:
            with self.code.block("if resubmit:"):
                self._keep("resubmit")
                self.line(f"later.append((frame, port, {RESUBMITTED}, resubmit, keep, None))")
                self.line("return out")
        multicast = group is not None and self.program.standard("mcast_grp") in self.usage.total.writes
        if multicast:
            with self.code.block(f"if {group}:"):
                self.line(f"copies = {self.names.bind(Slot('call', 'group'))}({group})")
                self.line("if not copies: return out")
                self.put("instance_type", REPLICATED)
                if self.truncates:
                    self.line(f"limit = {UNLIMITED}")
                if self.recirculates:
                    self.line("recirculate = 0")
        with self.code.block(f"{'elif' if multicast else 'if'} {spec} == {DROP_PORT}:"):
            self.line("return out")
        with self.code.block("else:"):
            self.line(f"copies = (({spec}, {self.standard('egress_rid') or 0}),)")
            self.put("instance_type", NORMAL)
        priority = self.standard("priority")
        if priority is not None and self.program.standard("priority") in self.usage.total.writes:
            self.line(f"if {priority}: return out")

    # --- egress ------------------------------------------------------------------------------------------------------

    def _egress(self) -> None:
        changed = self.usage.egress.touched | self.usage.update.touched
        runs = [
            (shared, list(headers)) for shared, headers in groupby(self.program.deparse, key=lambda h: h not in changed)
        ]
        whole_rest = not runs or not runs[-1][0]
        for index, (shared, headers) in enumerate(runs):
            if shared:
                pieces = [self._bytes(h) for h in headers]
                if index == len(runs) - 1:
                    pieces.append("frame[end:]")
                self.line(f"fixed{index} = {_joined(pieces)}")
        saved = self._egress_state()
        if saved:
            self.line(f"saved = {_tuple(saved)}")
        if self.clones_egress:
            self.line("pending = []")
            self.line("rounds = 0")
            with self.code.block("while True:"):
                self._copies(runs, saved, whole_rest)
                self._next_clone(saved)
        else:
            self._copies(runs, saved, whole_rest)

    def _egress_state(self) -> list[str]:
        """Variables that one copy's egress may change and the next copy must find as they were."""
        effects = [self.usage.egress, self.usage.update]
        names: list[str] = []
        for f, name in self.layout.fields.items():
            if f.header.metadata and any(f in e.writes for e in effects):
                names.append(name)
        for header, v in self.layout.headers.items():
            if any(header in e.touched for e in effects):
                names += self.layout.variables(v.header)
        names += [name for stack, name in self.layout.next.items() if stack in self.usage.egress.stacks]
        names += ["limit"] if "truncate" in self.usage.egress.primitives else []
        names += ["recirculate"] if "recirculate" in self.usage.egress.primitives else []
        names += ["size"] if self.counts_length else []
        return list(dict.fromkeys(names))

    def _copies(self, runs: Sequence[tuple[bool, list[Header]]], saved: Sequence[str], whole_rest: bool) -> None:
        with self.code.block("for egress, rid in copies:"):
            if saved:
                self.line(f"{_tuple(saved)} = saved")
            self.put("egress_port", "egress", MAX_PORT)
            self.put("egress_rid", "rid", 0xFFFF)
            self.put("egress_spec", 0)
            self.put("packet_length", "size" if self.counts_length else "length")
            self.stamp("egress_global_timestamp")
            self.stamp("enq_timestamp")
            for name in ("enq_qdepth", "deq_qdepth", "deq_timedelta"):
                self.put(name, 0)
            self.known.clear()
            self.pipeline("egress")
            self._clone_egress()
            self.line(f"if {self.standard('egress_spec')} == {DROP_PORT}: continue")
            self._update_checksums()
            pieces = [
                piece
                for index, (shared, headers) in enumerate(runs)
                for piece in ([f"fixed{index}"] if shared else [self._bytes(h) for h in headers])
            ]
            if whole_rest:
                pieces.append("frame[end:]")
            self.line(f"packet = {_joined(pieces)}")
            if self.recirculates:
                with self.code.block("if recirculate:"):
                    self._keep("recirculate")
                    self.line(f"later.append((packet, port, {RECIRCULATED}, recirculate, keep, None))")
                    self.line("continue")
            if self.truncates:
                self.line("if limit < len(packet): packet = packet[:limit]")
            if self.clones_ingress or self.clones_egress:
                self.line("if cut: packet = packet[:cut]")
            self.line("out.append((egress, packet))")
        self.known.clear()

    def _update_checksums(self) -> None:
        for checksum in self.program.checksums:
            if not checksum.update or checksum.target not in self.layout.fields:
                continue
            self.prepare(checksum.condition)
            condition = self.value(checksum.condition)
            before = set(self.known)
            with self.code.block(f"if {condition.text}:"):
                rest = "frame[end:][:limit]" if self.truncates else "frame[end:]"
                digest = self.digest(checksum.calculation, rest)
                self.store(checksum.target, digest)
            self.known = before

    # --- clones of egress --------------------------------------------------------------------------------------------

    def _clone_egress(self) -> None:
        if not self.clones_egress:
            return
        with self.code.block("if clone:"):
            session = self.names.bind(Slot("call", "session"))
            self.line(f"others = {session}(clone & 0x7fff)")
            self.line(f"if others is not None: pending.append((others, {_tuple(self._clone_state())}))")
            self.line("clone = 0")

    def _clone_names(self) -> list[str]:
        """Everything that a clone of egress carries."""
        names = list(self.metadata)
        for header in self.layout.headers:
            names += self.layout.variables(header)
        names += self.layout.next.values()
        names += ["size"] if self.counts_length else []
        return names

    def _clone_state(self) -> list[str]:
        """Values of those variables in the clone: metadata is zero but for the field list."""
        lists = {f: [n for n, fields in self._lists() if f in fields] for f in self.layout.fields}
        instance = self.program.standard("instance_type")
        values = []
        for f, name in self.layout.fields.items():
            if not f.header.metadata:
                continue
            if f is instance:
                values.append(str(EGRESS_CLONE))
            elif lists[f]:
                test = " or ".join(f"clone_list == {n}" for n in lists[f])
                values.append(f"{name} if {test} else 0")
            else:
                values.append("0")
        return values + self._clone_names()[len(self.metadata) :]

    def _next_clone(self, saved: Sequence[str]) -> None:
        self.line("if not pending: break")
        self.line("rounds += 1")
        lost = self.names.bind(Slot("call", "too_many_passes"))
        limit = self.names.bind(Slot("number", "passes"))
        self.line(f"if rounds > {limit}: {lost}(); break")
        self.line("(copies, cut), state = pending.pop(0)")
        self.line(f"{_tuple(self._clone_names())} = state")
        if self.truncates:
            self.line(f"limit = {UNLIMITED}")
        if self.recirculates:
            self.line("recirculate = 0")
        if saved:
            self.line(f"saved = {_tuple(saved)}")

    # --- deparser ----------------------------------------------------------------------------------------------------

    def _bytes(self, header: Header) -> str:
        """Text of a header's bytes; empty bytes when it is not valid."""
        v = self.layout.headers[header]
        if not v.mutable:
            if v.varbit:
                raw = f"frame[{v.at(0)}:{v.at(header.fixed_bytes)} + len({v.varbit})]"
            else:
                raw = f"frame[{v.at(0)}:{v.at(header.fixed_bytes)}]"
            return f"({raw} if {v.valid} else b'')"
        built = self._built(v)
        if v.varbit:
            return f"({built} if {v.valid} else b'')"
        raw = f"frame[{v.at(0)}:{v.at(header.fixed_bytes)}]"
        return f"(({built} if {v.dirty} else {raw}) if {v.valid} else b'')"

    def _built(self, v: HeaderVars) -> str:
        """Text of a header's bytes, made from its fields."""
        if v.varbit is None:
            return self._packed(v, v.front)
        parts = [self._packed(v, groups) for groups in (v.front, v.back) if groups]
        parts.insert(1 if v.front else 0, v.varbit)
        return " + ".join(parts)

    def _packed(self, v: HeaderVars, groups: Sequence[Group]) -> str:
        layout, values = ">", []
        pending: Group | None = None
        for group in groups:
            if not group.kept and group.fixed:
                # Untouched neighbours are copied in one piece.
                pending = Group(pending.offset, pending.size + group.size) if pending else group
                continue
            if pending is not None:
                layout += f"{pending.size}s"
                values.append(f"frame[{v.at(pending.offset)}:{v.at(pending.offset + pending.size)}]")
                pending = None
            codes, texts = self._group(v, group)
            layout += codes
            values += texts
        if pending is not None:
            layout += f"{pending.size}s"
            values.append(f"frame[{v.at(pending.offset)}:{v.at(pending.offset + pending.size)}]")
        return f"{self.names.bind(Slot('pack', layout))}({', '.join(values)})"

    def _group(self, v: HeaderVars, group: Group) -> tuple[str, list[str]]:
        """struct codes and values of one group of fields."""
        texts = []
        for f, right in group.members:
            text = self.unsigned(f).text
            texts.append(f"{text} << {right}" if right else text)
        whole = " | ".join(texts)
        if not group.codes:
            made = f"({whole}).to_bytes({group.size}, 'big')"
            if group.lazy:
                raw = f"frame[{v.at(group.offset)}:{v.at(group.offset + group.size)}]"
                made = f"({raw} if {self.layout.fields[group.members[0][0]]} is None else {made})"
            return f"{group.size}s", [made]
        if len(group.codes) == 1:
            return group.codes, [whole]
        parts = [f"({whole}) >> {right}" if right else f"({whole})" for right, _ in group.shifts()]
        masks = ["", *(f" & {hex(mask)}" for _, mask in group.shifts()[1:])]
        return group.codes, [part + mask for part, mask in zip(parts, masks, strict=True)]


def _tuple(names: Sequence[str]) -> str:
    return f"({', '.join(names)},)" if len(names) == 1 else f"({', '.join(names)})"


def _joined(pieces: Sequence[str]) -> str:
    """Text that concatenates bytes."""
    if not pieces:
        return "b''"
    return pieces[0] if len(pieces) == 1 else f"b''.join(({', '.join(pieces)}))"
