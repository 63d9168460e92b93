# SPDX-License-Identifier: Apache-2.0
"""Requests that go wrong: hostile messages to the controller's service over real gRPC, with a switch that remembers.

A step is one seed: some calls with hostile field values beside a job of well-behaved ranks. Every call ends, with a
status that says what to do; the controller never says that it has a fault of its own; nothing is left behind.
"""

from __future__ import annotations

import queue
import random
import threading
from collections import Counter
from typing import Any

import grpc
from helpers.controller import DEADLINE, Rig, Stream, until

from fuzz.frames import demand
from p4reduce.proto import controller_pb2 as pb

ALLOWED = {
    *("OK", "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"),
    *("DEADLINE_EXCEEDED", "ABORTED", "CANCELLED", "PERMISSION_DENIED"),
}
TEXTS = (
    *(
        "",
        " ",
        "train",
        "good",
        "x" * 128,
        "x" * 129,
        "x" * 100_000,
        "\0",
        "a\x1b[2J",
        "\u202e",
        "\U0001f600",
        "é",
        "%s{}",
    ),
    *("127.0.1.1", "127.0.1.2", "127.0.1.5", "0.0.0.0", "255.255.255.255", "::1", "127.1", "999.1.1.1", "10.0.0.1\n"),
    *("0.1.0", "99999999999999", "1", "-1", "1.2.3.4.5", "'; DROP TABLE epoch; --", "../../etc/passwd"),
)
NUMBERS = (0, 1, 2, 3, 63, 64, 65, 1023, 1024, 4000, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
SECONDS = (0.0, -0.0, 1e-300, 0.5, 30.0, 86400.0, 86401.0, 1e308, -1.0, float("inf"), float("-inf"), float("nan"))
CALLS: dict[str, Any] = {
    "Describe": pb.DescribeRequest,
    "Join": pb.JoinRequest,
    "Leave": pb.LeaveRequest,
    "Status": pb.StatusRequest,
    "Pools": pb.PoolsRequest,
    "SetMode": pb.SetModeRequest,
    "SetPolicy": pb.SetPolicyRequest,
    "Evict": pb.EvictRequest,
}


def _likely(rig: Rig, rank: int) -> dict[str, Any]:
    """A join that would be taken, to be spoilt in a field or two."""
    request = rig.request(rank)
    return {name.name: value for name, value in request.ListFields()}


def fill(draw: random.Random, message: Any, epochs: list[int]) -> None:
    """Set fields of a message to values that somebody might not have thought of."""
    for descriptor in message.DESCRIPTOR.fields:
        if draw.random() < 0.3:
            continue
        name = descriptor.name
        if descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry:
            for text in draw.sample(TEXTS, draw.choice((0, 1, 5))):
                getattr(message, name)[text] = draw.choice(NUMBERS)
        elif descriptor.label == descriptor.LABEL_REPEATED:
            getattr(message, name).extend(draw.sample(TEXTS, draw.choice((0, 1, 5))))
        elif descriptor.message_type is not None:
            fill(draw, getattr(message, name), epochs)
            getattr(message, name).SetInParent()
        elif descriptor.type == descriptor.TYPE_BYTES:
            setattr(message, name, draw.choice((b"", bytes(16), draw.randbytes(16), bytes(100_000))))
        elif descriptor.cpp_type == descriptor.CPPTYPE_BOOL:
            setattr(message, name, draw.random() < 0.5)
        elif descriptor.cpp_type == descriptor.CPPTYPE_STRING:
            setattr(message, name, draw.choice(TEXTS))
        elif descriptor.cpp_type == descriptor.CPPTYPE_DOUBLE:
            setattr(message, name, draw.choice(SECONDS))
        elif descriptor.cpp_type == descriptor.CPPTYPE_ENUM:
            setattr(message, name, draw.choice((0, 1, 3, 5, 6, 77, (1 << 31) - 1)))
        elif name == "epoch" and epochs and draw.random() < 0.7:
            setattr(message, name, draw.choice(epochs))
        else:
            wide = descriptor.cpp_type == descriptor.CPPTYPE_UINT64
            setattr(message, name, draw.choice((*NUMBERS, (1 << 64) - 1) if wide else NUMBERS))


class ControllerTarget:
    """One controller for all steps; a clock that only the target moves.

    `cancelling`: joins that wait may be cancelled by their client.
    """

    def __init__(self, cancelling: bool = False) -> None:
        self.found: Counter[str] = Counter()
        self._cancelling = cancelling
        self._rig = Rig()
        self._baseline: tuple[int, int] | None = None
        for stream in self._rig.start(2, "first"):
            self._rig.leave(stream)
            stream.half_close()
            stream.rest()
        self._settle()
        self._baseline = self._state()

    def close(self) -> None:
        """Stop the controller."""
        self._rig.close()

    def step(self, seed: int) -> None:
        """A dozen hostile calls while a job runs, then the job leaves and the controller must be as before."""
        draw = random.Random(f"controller {seed}")
        rig = self._rig
        streams = rig.start(2, "good")
        epochs: list[int] = [int(str(streams[0].identity["epoch"]))]
        opened: list[Stream] = []
        calls: list[Any] = []
        for _ in range(draw.randrange(4, 14)):
            kind = draw.choice(("Join", "Join", "Join", *CALLS, "Progress", "raw"))
            self.found[kind] += 1
            if kind == "Progress":
                opened.append(self._progress(draw, epochs))
            elif kind == "raw":
                self._raw(draw)
            else:
                calls.append(self._call(draw, kind, epochs))
        for call in calls:
            if self._cancelling and draw.random() < 0.3 and call.cancel():
                self.found["cancelled"] += 1
        running = [job for job in rig.status().jobs if (job.job, job.epoch, job.state) == ("good", epochs[0], "switch")]
        self.found["jobs that went on"] += len(running)
        self._leave(streams)
        self._end(draw, calls, opened)
        for stream in streams:
            stream.call.cancel()
        self._settle()

    def _leave(self, streams: list[Stream]) -> None:
        """The well-behaved ranks go. Somebody may have fenced their job, or left in their name."""
        for stream in streams:
            try:
                self._rig.leave(stream)
            except grpc.RpcError as error:
                failed: Any = error
                self._judge(failed.code().name, failed.details())
            stream.half_close()

    def _call(self, draw: random.Random, kind: str, epochs: list[int]) -> Any:
        message = CALLS[kind]()
        if kind == "Join" and draw.random() < 0.7:
            message = pb.JoinRequest(
                **{**_likely(self._rig, draw.randrange(3)), "job": draw.choice(("bad", "good", "b"))}
            )
            other = pb.JoinRequest()
            fill(draw, other, epochs)
            for name in draw.sample([field.name for field in message.DESCRIPTOR.fields], draw.randrange(3)):
                setattr(message, name, getattr(other, name))
        else:
            fill(draw, message, epochs)
        return getattr(self._rig.stub, kind).future(message, timeout=DEADLINE)

    def _progress(self, draw: random.Random, epochs: list[int]) -> Stream:
        message = pb.ProgressReport()
        fill(draw, message, epochs)
        # Anybody may say that it is a rank of the running job; the others' streams are what this must not break.
        if draw.random() < 0.5:
            message.job, message.epoch = "bad", draw.choice((0, epochs[0], 12345))
        stream = Stream.__new__(Stream)
        stream.identity = {}
        stream.requests = queue.SimpleQueue()
        stream.call = self._rig.stub.Progress(iter(stream.requests.get, None), timeout=DEADLINE)
        for _ in range(draw.randrange(3)):
            stream.requests.put(message)
        return stream

    def _raw(self, draw: random.Random) -> None:
        """Bytes that are no message: gRPC itself refuses them, as INTERNAL, before the service sees them."""
        method = draw.choice([*CALLS, "Nothing"])
        call = self._rig.channel.unary_unary(f"/p4reduce.v1.Controller/{method}")
        try:
            call(draw.randbytes(draw.choice((1, 2, 20, 300))), timeout=DEADLINE)
        except grpc.RpcError as error:
            failed: Any = error
            code = failed.code().name
            own = code == "INTERNAL" and "deserializing" in failed.details()
            demand(own or code in ALLOWED or code == "UNIMPLEMENTED", f"{method}: {code} {failed.details()}")

    def _end(self, draw: random.Random, calls: list[Any], opened: list[Stream]) -> None:
        """Let every call end, and look at how."""
        for stream in opened:
            if draw.random() < 0.3:
                stream.call.cancel()
            else:
                stream.requests.put(None)
        # Joins that wait for ranks that never come end with their time; the clock is ours.
        until(lambda: self._let_a_day_pass() and all(call.done() for call in calls))
        for call in calls:
            self._judge(call.code().name, "" if call.cancelled() else call.details())
        for stream in opened:
            try:
                list(stream.call)
                code, details = "OK", ""
            except grpc.RpcError as error:
                failed: Any = error
                code, details = failed.code().name, failed.details()
            self._judge(code, details)
            stream.requests.put(None)

    def _judge(self, code: str, details: str) -> None:
        self.found[code] += 1
        demand(code in ALLOWED, f"{code}: {details}")
        demand(len(details) < 4000, f"an answer of {len(details)} characters")

    def _settle(self) -> None:
        """All leases end; then nothing may be left."""
        # Jobs whose ranks never left are lost, then removed.
        until(lambda: self._let_a_day_pass() and not any(self._rig.pools()))
        until(lambda: self._baseline is None or self._state() == self._baseline)

    def _let_a_day_pass(self) -> bool:
        self._rig.clock.now += 100_000.0
        self._rig.server.tick()
        return True

    def _state(self) -> tuple[int, int]:
        """Entities in the switch, mailboxes of calls."""
        coordinator = self._rig.server._coordinator
        with self._rig.switch.lock:
            entities = len(self._rig.switch.entities)
        return entities, len(coordinator._mailboxes)

    def threads(self) -> int:
        """Threads that live now."""
        return threading.active_count()
