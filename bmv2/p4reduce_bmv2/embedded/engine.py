# SPDX-License-Identifier: Apache-2.0
"""The engine of the embedded switch: executes compiled BMv2 JSON (v1model, simple_switch) on single frames."""

from __future__ import annotations

import logging
import random
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from p4reduce_bmv2.embedded.codegen import generate
from p4reduce_bmv2.embedded.emit import Slot
from p4reduce_bmv2.embedded.errors import BadEntry, EntryMissing, ProgramError, UnsupportedProgram
from p4reduce_bmv2.embedded.loader import load
from p4reduce_bmv2.embedded.program import MAX_PASSES, TableNode
from p4reduce_bmv2.embedded.state import (
    MAX_GROUP,
    MAX_PORT,
    MAX_SESSION,
    CloneSession,
    CounterArray,
    EngineStats,
    Replicas,
    check_replicas,
)
from p4reduce_bmv2.embedded.tables import Table

_log = logging.getLogger(__name__)

Output = list[tuple[int, bytes]]


class Engine:
    """One running program. Not thread-safe: the caller serialises all calls and all access to its objects."""

    def __init__(
        self,
        program: Mapping[str, Any] | str | bytes,
        *,
        seed: int = 0,
        cpu_port: int | None = None,
        clock: Callable[[], int] | None = None,
    ) -> None:
        """Load a program: the JSON text or the decoded object.

        `seed` seeds random(); `clock` returns microseconds since the switch started (default: a monotonic clock).
        ProgramError when the JSON is broken; UnsupportedProgram names every node outside the supported subset.
        """
        try:
            loaded = load(program)
            generated = generate(loaded)
            code = compile(generated.source, "<p4 program>", "exec")
        except (RecursionError, MemoryError):  # what the compiler raises for brackets too deep
            raise UnsupportedProgram(["expressions or states nested deeper than Python's stack"]) from None
        self.cpu_port = cpu_port
        """The port of packet-in and packet-out; frames for it come out of process() like any other port's."""
        self.stats = EngineStats()
        nodes = [n for p in loaded.pipelines.values() for n in p.nodes.values() if isinstance(n, TableNode)]
        self.all_tables = {n.name: _make_table(n) for n in nodes}
        """Every table by its name in the JSON, which is its name in P4Info if the author declared it.

        The JSON does not tell the author's tables from those that the compiler made; P4Info lists the former only.
        """
        self.tables = {n.name: self.all_tables[n.name] for n in nodes if n.keys or not n.default_const}
        """Of these the tables in which there is something to change: for use without a P4Info."""
        self.counters = {c.name: CounterArray(c.name, c.size) for c in loaded.counters.values() if not c.direct}
        """Indirect counters by name. Direct counters are in the entries of their tables."""
        self.registers = {r.name: [0] * r.size for r in loaded.registers.values()}
        """Register arrays by name; cells may be read and assigned, values unsigned within the array's width."""
        self.multicast_groups: dict[int, Replicas] = {}
        """Group number: ((egress port, replica id), ...). Change it through the methods below."""
        self.clone_sessions: dict[int, CloneSession] = {}
        """Session number: session. Change it through the methods below."""
        self._random = random.Random(seed)
        start = time.monotonic_ns()
        self._clock = clock if clock is not None else lambda: (time.monotonic_ns() - start) // 1000
        self.source = generated.source
        """The Python text that runs packets, for debugging."""
        self._passes = generated.passes
        scope: dict[str, Any] = {}
        exec(code, scope)  # our own text, made above
        bound = {name: self._resolve(wanted) for name, wanted in generated.bound.items()}
        self._run: Callable[..., Output] = scope["make"](**bound)

    def _resolve(self, wanted: Slot | Callable[..., Any]) -> Any:
        """The object behind a name in generated code."""
        if not isinstance(wanted, Slot):
            return wanted
        kind, name = wanted
        if kind == "register":
            return self.registers[name]
        if kind in ("packets", "bytes"):
            return getattr(self.counters[name], kind)
        if kind == "lookup":
            return self.all_tables[name].lookup
        if kind == "default":
            return self.all_tables[name].default_cell
        if kind in ("pack", "unpack"):
            layout = struct.Struct(name)
            return layout.pack if kind == "pack" else layout.unpack_from
        if kind == "number":
            return MAX_PASSES
        return {
            "from_bytes": int.from_bytes,
            "clock": self._clock,
            "draw": self._random.randint,
            "group": self.multicast_groups.get,
            "session": self.clone_sessions.get,
            "assertion_failed": self._assertion_failed,
            "too_many_passes": self._too_many_passes,
            "log_message": _log_message,
        }[name]

    # --- packets -----------------------------------------------------------------------------------------------------

    def process(self, port: int, frame: bytes) -> Output:
        """Run one frame that arrived on `port` through the program.

        Returns (egress port, frame) for every copy that leaves, in the order they leave. Never raises for what a
        frame holds. A frame of 0 bytes or a port outside 0..510 is a ValueError.
        """
        if not frame or not 0 <= port <= MAX_PORT:
            raise ValueError(f"a frame of {len(frame)} bytes on port {port}")
        frame = bytes(frame)
        if not self._passes:
            return self._run(frame, port)
        return self._rounds(port, frame)

    def _rounds(self, port: int, frame: bytes) -> Output:
        """A packet that may be resubmitted, recirculated or cloned."""
        later: list[tuple[bytes, int, int, int, tuple[int, ...], None]] = []
        out = self._run(frame, port, 0, 0, (), None, later)
        done = 0
        while later:
            done += 1
            if done > MAX_PASSES:
                self._too_many_passes()
                break
            out += self._run(*later.pop(0), later)
        return out

    def _assertion_failed(self) -> None:
        self.stats.failed_assertions += 1
        if self.stats.failed_assertions == 1:
            _log.warning("a packet failed an assert or assume of the program and was dropped; later ones are counted")

    def _too_many_passes(self) -> None:
        self.stats.too_many_passes += 1
        if self.stats.too_many_passes == 1:
            _log.warning("a packet went round %d times and was dropped; later ones are counted", MAX_PASSES)

    # --- replication -------------------------------------------------------------------------------------------------

    def set_multicast_group(self, group: int, replicas: Sequence[tuple[int, int]]) -> None:
        """Create or replace a group (1..65535); a (port, replica id) pair may occur once. BadEntry."""
        if not 1 <= group <= MAX_GROUP:
            raise BadEntry(f"multicast group {group} is not in 1..{MAX_GROUP}")
        self.multicast_groups[group] = check_replicas(f"multicast group {group}", replicas)

    def delete_multicast_group(self, group: int) -> None:
        """EntryMissing when there is no such group."""
        if self.multicast_groups.pop(group, None) is None:
            raise EntryMissing(f"there is no multicast group {group}")

    def set_clone_session(self, session: int, replicas: Sequence[tuple[int, int]], packet_length: int = 0) -> None:
        """Create or replace a clone session (0..32767). BadEntry.

        Clones are cut to `packet_length` bytes unless it is 0 (P4Runtime has this, simple_switch refuses it).
        """
        if not 0 <= session <= MAX_SESSION or packet_length < 0:
            raise BadEntry(f"clone session {session} is not in 0..{MAX_SESSION}, or length {packet_length} negative")
        self.clone_sessions[session] = CloneSession(check_replicas(f"clone session {session}", replicas), packet_length)

    def delete_clone_session(self, session: int) -> None:
        """EntryMissing when there is no such session."""
        if self.clone_sessions.pop(session, None) is None:
            raise EntryMissing(f"there is no clone session {session}")


def _make_table(node: TableNode) -> Table:
    try:
        return Table(node)
    except BadEntry as error:
        raise ProgramError(str(error)) from None


def _log_message(text: str, values: tuple[int, ...]) -> None:
    """log_msg: braces are filled in turn."""
    parts = text.split("{}")
    filled = "".join(part + (str(int(values[i])) if i < len(values) else "") for i, part in enumerate(parts))
    _log.info("%s", filled)
