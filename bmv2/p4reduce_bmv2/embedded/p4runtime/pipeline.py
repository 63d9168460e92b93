# SPDX-License-Identifier: Apache-2.0
"""A pipeline: one loaded program, its P4Info, and what the control plane wrote beside the engine's own state."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import Event

from p4reduce_bmv2.embedded.engine import Engine
from p4reduce_bmv2.embedded.errors import ProgramError
from p4reduce_bmv2.embedded.p4runtime.p4info import P4InfoIndex, build_index
from p4reduce_bmv2.embedded.p4runtime.status import Code, Refused
from p4reduce_bmv2.embedded.p4runtime.stubs import Message


@dataclass(frozen=True, slots=True)
class Note:
    """What a client stored with an entry and wants back; the data plane has no use for it."""

    controller_metadata: int = 0
    metadata: bytes = b""


NO_NOTE = Note()


@dataclass(slots=True)
class Pipeline:
    """State of one ForwardingPipelineConfig.

    A new config makes a new Pipeline, so tables, counters, registers, multicast groups and clone sessions all start
    empty. (simple_switch_grpc keeps the replication engine's old nodes across a push, behavioral-model #891.)
    """

    config: Message
    engine: Engine
    index: P4InfoIndex
    lock: AbstractContextManager[object]
    """Held for every access to the engine; shared with the packet thread."""
    stopping: Event = field(default_factory=Event)
    """Set when the switch stops; requests in progress then end early."""
    notes: dict[tuple[int, int], Note] = field(default_factory=dict)
    """By (table id, entry handle)."""
    defaults: dict[int, Note] = field(default_factory=dict)
    """By table id: the default entries that a client changed."""
    groups: dict[int, Message] = field(default_factory=dict)
    sessions: dict[int, Message] = field(default_factory=dict)

    def check_running(self) -> None:
        """UNAVAILABLE when the switch is stopping. Long requests call this again and again."""
        if self.stopping.is_set():
            raise Refused(Code.UNAVAILABLE, "the switch is stopping")


def load(
    config: Message,
    lock: AbstractContextManager[object],
    *,
    seed: int = 0,
    cpu_port: int | None = None,
    stopping: Event | None = None,
) -> Pipeline:
    """Load a ForwardingPipelineConfig. INVALID_ARGUMENT names what is broken or not supported."""
    if not config.p4_device_config:
        raise Refused(Code.INVALID_ARGUMENT, "the config has no p4_device_config (BMv2 JSON)")
    try:
        engine = Engine(config.p4_device_config, seed=seed, cpu_port=cpu_port)
    except ProgramError as error:
        raise Refused(Code.INVALID_ARGUMENT, str(error)) from error
    return Pipeline(config, engine, build_index(config.p4info, engine), lock, stopping or Event())
