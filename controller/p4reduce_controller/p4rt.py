# SPDX-License-Identifier: Apache-2.0
"""The switch over P4Runtime. The only module that imports p4runtime-shell.

The shell is written for a person at a prompt. What it would do to a long-running service is undone here:

- it calls sys.exit when the handshake fails, and only prints that it is not primary: both are SwitchError here;
- its stream thread is no daemon, so a process could not end, and it notices neither a stream that the switch closes
  nor one that loses its primacy: the thread here is a daemon and says so;
- none of its calls has a deadline: an interceptor gives every call one;
- the iterator over a failed batch never gets past an update that went well: the status is taken apart here;
- its way to push a pipeline sets no cookie, which is what tells whether a push is needed at all.

Its module-global shell (one switch a process, IPython) is not used; several `SwitchClient`s can live side by side.
"""

from __future__ import annotations

import collections
import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import grpc
from google.protobuf import text_format
from google.rpc import code_pb2, status_pb2
from p4.config.v1 import p4info_pb2
from p4.v1 import p4runtime_pb2, p4runtime_pb2_grpc
from p4runtime_sh.context import Context  # noqa: TID251
from p4runtime_sh.p4runtime import P4RuntimeClient  # noqa: TID251

from p4reduce.errors import SwitchError
from p4reduce.pipeline import Pipeline
from p4reduce_controller.codec import Codec
from p4reduce_controller.election import Candidacy
from p4reduce_controller.entries import CounterCell, Group, TableEntry, Update, Verb, deletes
from p4reduce_controller.link import SwitchGoneError

_LOG = logging.getLogger(__name__)

BATCH = 32
"""Updates in one Write. Its status has a message for each, and gRPC drops a status of more than 8 KiB (some 60
messages of BMv2). A write of many is not atomic in P4Runtime anyway, so nothing is lost by cutting it."""
RETRY_SECONDS = 0.1
"""Between attempts with an election id that is taken."""
PUSH_SECONDS = 30.0
"""A switch may take its time to load a pipeline."""
AWAY_SECONDS = 1.0
"""Between a standby's attempts with a switch that has gone."""
POLL_SECONDS = 0.25
"""How often a standby looks whether it shall end, and whether a grace is over."""
REACH_SECONDS = 5.0
"""How often a standby asks the switch for a sign of life: a stream alone does not show that the other end is gone."""
_CHANNEL_OPTIONS = (
    # A proxy for the internet has no business between a controller and its switch.
    ("grpc.enable_http_proxy", 0),
    # A new session makes a connection of its own, whatever became of the last one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_metadata_size", 1 << 16),
    ("grpc.absolute_max_metadata_size", 1 << 17),
)
_VERBS = {
    Verb.INSERT: p4runtime_pb2.Update.INSERT,
    Verb.MODIFY: p4runtime_pb2.Update.MODIFY,
    Verb.DELETE: p4runtime_pb2.Update.DELETE,
}


class _ElectionIdTaken(SwitchError):
    """Another session uses our election id: another controller, or our own last session on its way out."""


class _CallDetails(
    collections.namedtuple("_CallDetails", "method timeout metadata credentials wait_for_ready compression"),
    grpc.ClientCallDetails,  # type: ignore[misc]
):
    """What gRPC wants back from an interceptor."""


class _Deadline(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[misc]
    """Gives every call a deadline that has none of its own. The stream of the session is not touched."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def _with_deadline(self, details: Any) -> Any:
        timeout = self._seconds if details.timeout is None else details.timeout
        return _CallDetails(
            details.method,
            timeout,
            details.metadata,
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_deadline(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_deadline(client_call_details), request)


class _Session(P4RuntimeClient):  # type: ignore[misc]
    """The shell's client with a stream that can be trusted. SwitchError when it does not become primary in time."""

    channel: Any
    stub: Any

    def __init__(
        self,
        address: str,
        device_id: int,
        candidacy: Candidacy,
        deadline: float,
        on_lost: Callable[[str], None],
        stop: threading.Event,
    ) -> None:
        self.address = address
        self._candidacy = candidacy
        self._stop = stop
        self._deadline = deadline
        self._on_lost = on_lost
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._established = False
        self._id_taken = False
        self._lock = threading.Lock()
        self.lost: str | None = None
        try:
            super().__init__(device_id, address, (0, 0))
        except SystemExit:
            raise SwitchError(f"switch {address}: no gRPC channel can be made to this address") from None

    def set_up_stream(self) -> None:
        """Called by the shell's constructor, and the reason for this class: see the module's docstring."""
        self.channel.close()
        self.channel = grpc.insecure_channel(self.address, options=_CHANNEL_OPTIONS)
        self.stub = p4runtime_pb2_grpc.P4RuntimeStub(grpc.intercept_channel(self.channel, _Deadline(self._deadline)))
        self._reach()
        if self._candidacy.pause:
            self._stop.wait(self._candidacy.pause)
        self.stream_out_q: queue.Queue[Any] = queue.Queue()
        self.stream = self.stub.StreamChannel(iter(self.stream_out_q.get, None))
        self.stream_recv_thread = threading.Thread(target=self._receive, name="p4runtime-stream", daemon=True)
        self.stream_recv_thread.start()
        try:
            self._become_primary()
        except SwitchError:
            self.tear_down()
            raise

    def _reach(self) -> None:
        """Wait for the switch to answer anything. (gRPC's own channel_ready_future costs 0.2 s at every close.)"""
        try:
            self.stub.Capabilities(p4runtime_pb2.CapabilitiesRequest(), wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                return
            self.channel.close()
            why = "" if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED else f" ({self._explain(error)})"
            raise SwitchError(
                f"switch {self.address}: not reachable within {self._deadline:g} s{why}: "
                f"start it, or correct its address"
            ) from None

    def _become_primary(self) -> None:
        candidacy, begun = self._candidacy, time.monotonic()
        heard, reached = False, begun
        self._claim(candidacy.begin(begun))
        while not candidacy.won:
            try:
                answer = self._answers.get(timeout=min(POLL_SECONDS, self._deadline))
            except queue.Empty:
                answer = None
            now = time.monotonic()
            if self._stop.is_set():
                raise SwitchError(f"switch {self.address}: stopped before this controller became primary")
            if isinstance(answer, str):
                kind = _ElectionIdTaken if self._id_taken else SwitchError
                raise kind(f"switch {self.address}: no P4Runtime session: {answer}")
            if answer is None and not heard and now >= begun + self._deadline:
                raise SwitchError(
                    f"switch {self.address}: connected, but no P4Runtime session within {self._deadline:g} s: "
                    f"is this the address of a P4Runtime server?"
                )
            if now >= reached + REACH_SECONDS:
                reached = now
                self._reach()
            heard = heard or answer is not None
            self._claim_next(answer, now)
        with self._lock:
            self._established = self.lost is None
        if not self._established:
            raise SwitchError(f"switch {self.address}: the session was lost at once: {self.lost}")

    def _claim_next(self, answer: Any, now: float) -> None:
        candidacy = self._candidacy
        wanted = None
        try:
            if answer is None:
                candidacy.idle(now)
            else:
                number = (
                    answer.election_id.high << 64 | answer.election_id.low if answer.HasField("election_id") else None
                )
                wanted = candidacy.hear(answer.status.code, number, now)
        except SwitchError as error:
            raise type(error)(f"switch {self.address}: {error}") from None
        if wanted is not None:
            self._claim(wanted)

    def _claim(self, election_id: int | None) -> None:
        request = p4runtime_pb2.StreamMessageRequest()
        request.arbitration.device_id = self.device_id
        if election_id is not None:
            self.election_id = (election_id >> 64, election_id & (1 << 64) - 1)
            request.arbitration.election_id.high, request.arbitration.election_id.low = self.election_id
        self.stream_out_q.put(request)

    def _receive(self) -> None:
        why = "the switch ended the session"
        try:
            for message in self.stream:
                # Packets and digests must be drained (a full stream stops all ports of BMv2); nobody here wants them.
                if message.WhichOneof("update") == "arbitration":
                    if not self._established:
                        self._answers.put(message.arbitration)
                    elif message.arbitration.status.code != code_pb2.OK:
                        self._lose("another controller has become primary")
        except grpc.RpcError as error:
            why = self._explain(error)
        self._lose(why)

    def _explain(self, error: grpc.RpcError) -> str:
        text = f"{error.code().name}: {error.details()}"
        if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
            self._id_taken = True
            text += (
                " (another controller is connected: stop it, or take over with a higher --election-id, "
                "or wait for its end with --standby)"
            )
        if error.code() == grpc.StatusCode.NOT_FOUND:
            text += f" (is device_id {self.device_id} right?)"
        return text

    def _lose(self, why: str) -> None:
        with self._lock:
            if self.lost is not None:
                return
            self.lost = why
            established = self._established
        self._answers.put(why)
        if established:
            self._on_lost(why)

    def tear_down(self) -> None:
        """End the session. Never waits for the switch."""
        with self._lock:
            self._established = False
            self.lost = self.lost or "closed"
        self.stream_out_q.put(None)
        self.stream.cancel()
        if threading.current_thread() is not self.stream_recv_thread:
            self.stream_recv_thread.join(timeout=1.0)
        self.channel.close()


class SwitchClient:
    """A switch with the p4reduce program in place, and we are its primary controller.

    SwitchError from every method, SwitchGoneError when the switch does not answer. Calls may come from any thread;
    each has a deadline.
    """

    def __init__(
        self,
        address: str,
        pipeline: Pipeline,
        *,
        device_id: int = 0,
        election_id: int = 1,
        candidacy: Candidacy | None = None,
        deadline: float = 5.0,
        on_lost: Callable[[str], None] | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        """Connect, become primary, push the pipeline unless it is there already.

        `deadline` in seconds is for connecting and for every later call. `candidacy` says how to become primary, in
        the place of `election_id`; with one that stands by, this may take for ever: `stop` ends it (SwitchError).
        `on_lost` is called once, from a thread of its own, when the session ends or another controller takes over;
        not after `close`.
        """
        self.address = address
        try:
            p4info_text = pipeline.p4info.read_text(encoding="utf-8")
            self._program = pipeline.json.read_bytes()
        except OSError as error:
            raise SwitchError(f"cannot read the compiled P4 program: {error}") from None
        self._p4info = text_format.Parse(p4info_text, p4info_pb2.P4Info())
        digest = hashlib.sha256(p4info_text.encode() + self._program).digest()
        self._cookie = int.from_bytes(digest[:8], "big") | 1
        context = Context()
        context.set_p4info(self._p4info)
        self._codec = Codec(context)
        self._session = _open_session(
            address, device_id, candidacy or Candidacy(election_id), deadline, on_lost or _ignore, stop
        )
        try:
            self.pushed = self._ensure_pipeline()
        except BaseException:
            self._session.tear_down()
            raise

    @property
    def lost(self) -> str | None:
        """Why the session is over; None while it lasts."""
        return self._session.lost

    def close(self) -> None:
        """End the session; what stands in the switch stays."""
        self._session.tear_down()

    def probe(self) -> None:
        """Ask the switch for a sign of life, and whether it still runs our program."""
        present = self._present_cookie("no sign of life")
        if present != self._cookie:
            found = "no program" if present is None else f"another program (cookie {present:#x})"
            raise SwitchGoneError(f"switch {self.address}: it runs {found} in the place of p4reduce's")

    # ---- writing --------------------------------------------------------------------------------------------------

    def write(self, updates: Sequence[Update], *, missing_ok: bool = False) -> None:
        """Apply updates in order; all are tried. With `missing_ok`, deleting what is not there is no error."""
        problems: list[str] = []
        for first in range(0, len(updates), BATCH):
            if self.lost is not None:
                # Closed, or taken over, in the middle of it: nothing more is to be written.
                raise SwitchGoneError(f"switch {self.address}: write: {self.lost}")
            batch = updates[first : first + BATCH]
            request = self._request(p4runtime_pb2.WriteRequest())
            for update in batch:
                message = request.updates.add(type=_VERBS[update.verb])
                self._codec.encode(update.entity, message.entity, key_only=update.verb is Verb.DELETE)
            try:
                self._session.stub.Write(request)
            except grpc.RpcError as error:
                for index, code, text in write_errors(error):
                    if not 0 <= index < len(batch):
                        raise self._failure("write", error) from None
                    gone = missing_ok and batch[index].verb is Verb.DELETE and code == code_pb2.NOT_FOUND
                    if not gone:
                        problems.append(f"{batch[index]}: {code_pb2.Code.Name(code)} {text}".rstrip())
        if problems:
            more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
            raise SwitchError(f"switch {self.address} refused {'; '.join(problems[:3])}{more}")

    def _request(self, request: Any) -> Any:
        request.device_id = self._session.device_id
        request.election_id.high, request.election_id.low = self._session.election_id
        return request

    # ---- reading --------------------------------------------------------------------------------------------------

    def read_tables(self, tables: Iterable[str]) -> list[TableEntry]:
        """All entries of these tables."""
        wanted = [self._codec.table_wildcard(name) for name in tables]
        return [self._codec.decode_table(entity.table_entry) for entity in self._read(wanted)]

    def read_groups(self) -> list[Group]:
        """All multicast groups."""
        entity = p4runtime_pb2.Entity()
        entity.packet_replication_engine_entry.multicast_group_entry.multicast_group_id = 0
        return [self._codec.decode_group(found) for found in self._read([entity])]

    def read_counters(self, counter: str, indices: Sequence[int]) -> list[int]:
        """Packets counted in these cells of a counter array, in the order of `indices`."""
        wanted = []
        for index in indices:
            entity = p4runtime_pb2.Entity()
            self._codec.encode(CounterCell(counter, index), entity)
            wanted.append(entity)
        found = {
            entity.counter_entry.index.index: entity.counter_entry.data.packet_count for entity in self._read(wanted)
        }
        return [found.get(index, 0) for index in indices]

    def _read(self, entities: Sequence[Any]) -> Iterator[Any]:
        request = p4runtime_pb2.ReadRequest(device_id=self._session.device_id)
        request.entities.extend(entities)
        try:
            for response in self._session.stub.Read(request):
                yield from response.entities
        except grpc.RpcError as error:
            raise self._failure("read", error) from None

    # ---- the pipeline ---------------------------------------------------------------------------------------------

    def _ensure_pipeline(self) -> bool:
        present = self._present_cookie()
        if present == self._cookie:
            return False
        if present is not None:
            # A push makes PI forget the groups, but they stay in BMv2: the next group of the same number would
            # replicate everything twice (p4lang/behavioral-model issue 891).
            self.write(deletes(self.read_groups()), missing_ok=True)
        request = self._request(p4runtime_pb2.SetForwardingPipelineConfigRequest())
        request.action = p4runtime_pb2.SetForwardingPipelineConfigRequest.VERIFY_AND_COMMIT
        request.config.p4info.CopyFrom(self._p4info)
        request.config.p4_device_config = self._program
        request.config.cookie.cookie = self._cookie
        try:
            self._session.stub.SetForwardingPipelineConfig(request, timeout=PUSH_SECONDS)
        except grpc.RpcError as error:
            what = f"push the pipeline to device {self._session.device_id}"
            raise self._failure(what, error) from None
        _LOG.info("switch %s: pipeline pushed (cookie %#x)", self.address, self._cookie)
        return True

    def _present_cookie(self, what: str = "ask for the pipeline") -> int | None:
        """The cookie of the pipeline that the switch runs, 0 if it has one without cookie, None if it runs none."""
        request = p4runtime_pb2.GetForwardingPipelineConfigRequest(device_id=self._session.device_id)
        request.response_type = p4runtime_pb2.GetForwardingPipelineConfigRequest.COOKIE_ONLY
        try:
            response = self._session.stub.GetForwardingPipelineConfig(request)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                return None
            raise self._failure(what, error) from None
        cookie: int = response.config.cookie.cookie
        return cookie

    def _failure(self, what: str, error: grpc.RpcError) -> SwitchError:
        gone = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        kind = SwitchGoneError if gone else SwitchError
        return kind(f"switch {self.address}: {what}: {error.code().name}: {error.details()}")


def _open_session(
    address: str,
    device_id: int,
    candidacy: Candidacy,
    deadline: float,
    on_lost: Callable[[str], None],
    stop: threading.Event | None,
) -> _Session:
    stop = stop or threading.Event()
    end = time.monotonic() + deadline - RETRY_SECONDS
    while True:
        try:
            return _Session(address, device_id, candidacy, deadline, on_lost, stop)
        except SwitchError as error:
            # A controller that was just restarted may be faster than the switch's notice of its last session's end;
            # and two that ask at the same moment who is primary disturb each other on simple_switch_grpc.
            again = isinstance(error, _ElectionIdTaken) and (time.monotonic() < end or candidacy.standby)
            if stop.is_set() or not (again or candidacy.waiting):
                raise
            _LOG.info("%s", error)
        stop.wait(RETRY_SECONDS if again else AWAY_SECONDS)


def _ignore(_: str) -> None:
    pass


def write_errors(error: grpc.RpcError) -> list[tuple[int, int, str]]:
    """Updates of a failed Write that failed: (position, google.rpc code, message).

    Position -1 when the switch did not say which (P4Runtime specification 1.3, section 12.3: a batch's status has
    one p4.v1.Error for every update, OK ones included).
    """
    details = []
    if error.code() == grpc.StatusCode.UNKNOWN:
        for key, value in error.trailing_metadata() or ():
            if key == "grpc-status-details-bin":
                status = status_pb2.Status()
                status.ParseFromString(value)
                details = list(status.details)
    failed = []
    for index, detail in enumerate(details):
        one = p4runtime_pb2.Error()
        if detail.Unpack(one) and one.canonical_code != code_pb2.OK:
            failed.append((index, one.canonical_code, one.message))
    return failed or [(-1, code_pb2.UNKNOWN, error.details() or "")]
