# SPDX-License-Identifier: Apache-2.0
"""What p4runtime-shell would trip over, played by a P4Runtime server that follows a script."""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import code_pb2, status_pb2
from p4.v1 import p4runtime_pb2, p4runtime_pb2_grpc

from p4reduce import pipeline
from p4reduce.errors import SwitchError
from p4reduce_controller.entries import CounterCell, Group, TableEntry, Update, Verb, inserts
from p4reduce_controller.link import SwitchGoneError
from p4reduce_controller.p4rt import BATCH, SwitchClient, write_errors

DEADLINE = 20.0
W5 = pipeline.find("w5")
ENTRY = TableEntry("epochs", (("epoch", 7),), "known_epoch", (("stats", 3),))
Reply = p4runtime_pb2.StreamMessageResponse


def arbitration(code: int = code_pb2.OK) -> Any:
    reply = Reply()
    reply.arbitration.status.code = code
    return reply


def batch_status(*codes: int) -> bytes:
    """The status of a Write: one p4.v1.Error for every update."""
    status = status_pb2.Status(code=code_pb2.UNKNOWN)
    for code in codes:
        detail = any_pb2.Any()
        detail.Pack(p4runtime_pb2.Error(canonical_code=code, message=f"says {code_pb2.Code.Name(code)}"))
        status.details.append(detail)
    return status.SerializeToString()


class ScriptedServer(p4runtime_pb2_grpc.P4RuntimeServicer):
    """Answers as its fields say, and keeps what it was asked."""

    def __init__(self) -> None:
        self.stream: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Sent one by one; None ends the stream, an Exception class aborts it."""
        self.taken = 0
        """How many handshakes find the election id taken."""
        self.cookie: int | None = None
        self.groups: list[int] = []
        self.write: Callable[[Any, Any], None] = lambda *_: None
        self.capabilities: Callable[[Any], None] = lambda _: None
        self.config: Callable[[Any], None] = lambda _: None
        """Called first when the switch is asked which pipeline it runs."""
        self.calls: list[str] = []
        self.requests: list[Any] = []
        self.hang = threading.Event()
        self.stream_ended = threading.Event()
        self._executor = ThreadPoolExecutor(8)
        self._server = grpc.server(self._executor)
        p4runtime_pb2_grpc.add_P4RuntimeServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self.address = f"127.0.0.1:{self.port}"
        self._server.start()

    def close(self) -> None:
        self.hang.set()
        self.stream.put(None)
        self._server.stop(None).wait()
        self._executor.shutdown()

    def StreamChannel(self, request_iterator: Any, context: Any) -> Iterator[Any]:
        self.requests.append(next(request_iterator))
        if self.taken:
            self.taken -= 1
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "Election id already exists")
        script = self.stream
        context.add_callback(lambda: self._end(script))
        while (item := script.get()) is not None:
            if item is grpc.RpcError:
                context.abort(grpc.StatusCode.INTERNAL, "the switch has a headache")
            yield item

    def _end(self, script: queue.SimpleQueue[Any]) -> None:
        """What is put from now on is for the next session."""
        self.stream = queue.SimpleQueue()
        script.put(None)
        self.stream_ended.set()

    def GetForwardingPipelineConfig(self, request: Any, context: Any) -> Any:
        self.calls.append("get")
        self.config(context)
        if self.cookie is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "No forwarding pipeline config set for this device")
        response = p4runtime_pb2.GetForwardingPipelineConfigResponse()
        response.config.cookie.cookie = self.cookie
        return response

    def SetForwardingPipelineConfig(self, request: Any, context: Any) -> Any:
        self.calls.append("push")
        self.cookie = request.config.cookie.cookie
        self.requests.append(request)
        return p4runtime_pb2.SetForwardingPipelineConfigResponse()

    def Read(self, request: Any, context: Any) -> Iterator[Any]:
        self.calls.append("read")
        response = p4runtime_pb2.ReadResponse()
        for number in self.groups:
            entity = response.entities.add()
            entity.packet_replication_engine_entry.multicast_group_entry.multicast_group_id = number
        yield response

    def Write(self, request: Any, context: Any) -> Any:
        self.calls.append("write")
        self.requests.append(request)
        self.write(request, context)
        return p4runtime_pb2.WriteResponse()

    def Capabilities(self, request: Any, context: Any) -> Any:
        self.capabilities(context)
        return p4runtime_pb2.CapabilitiesResponse(p4runtime_api_version="1.3.0")

    def fail_writes(self, *codes: int) -> None:
        """Answer every Write with these codes, update by update."""

        def fail(_: Any, context: Any) -> None:
            context.set_trailing_metadata([("grpc-status-details-bin", batch_status(*codes))])
            context.abort(grpc.StatusCode.UNKNOWN, "")

        self.write = fail


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    made = ScriptedServer()
    yield made
    made.close()


@pytest.fixture
def connect(server: ScriptedServer) -> Iterator[Callable[..., SwitchClient]]:
    clients: list[SwitchClient] = []

    def make(**options: Any) -> SwitchClient:
        server.stream.put(arbitration())
        clients.append(SwitchClient(server.address, W5, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def refused(address: str, **options: Any) -> str:
    """The error of a session that cannot come about, which must come in time."""
    begin = time.monotonic()
    with pytest.raises(SwitchError) as caught:
        SwitchClient(address, W5, **({"deadline": 0.5} | options))
    assert time.monotonic() - begin < DEADLINE / 2
    return str(caught.value)


def test_a_server_that_never_answers_the_handshake(server: ScriptedServer) -> None:
    assert "connected, but no P4Runtime session within 0.5 s" in refused(server.address)
    assert server.stream_ended.wait(DEADLINE), "the stream must not stay open"


def test_a_listener_that_speaks_no_grpc() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert f"switch {address}: not reachable within 0.5 s: start it" in refused(address)


def test_a_grpc_server_of_something_else() -> None:
    with ThreadPoolExecutor(2) as executor:
        other = grpc.server(executor)
        port = other.add_insecure_port("127.0.0.1:0")
        other.start()
        assert "no P4Runtime session: UNIMPLEMENTED" in refused(f"127.0.0.1:{port}", deadline=5.0)
        other.stop(None).wait()


def test_not_being_primary_is_an_error_and_not_a_print(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.stream.put(arbitration(code_pb2.ALREADY_EXISTS))
    assert "another controller is primary (our election id is 9)" in refused(server.address, election_id=9)
    assert capsys.readouterr() == ("", "")
    sent = server.requests[0].arbitration
    assert (sent.device_id, sent.election_id.high, sent.election_id.low) == (0, 0, 9)


def test_an_election_id_of_128_bits(server: ScriptedServer, connect: Callable[..., SwitchClient]) -> None:
    connect(election_id=(5 << 64) + 6, device_id=3)
    sent = server.requests[0].arbitration
    assert (sent.device_id, sent.election_id.high, sent.election_id.low) == (3, 5, 6)
    pushed = server.requests[1]
    assert (pushed.device_id, pushed.election_id.high, pushed.election_id.low) == (3, 5, 6)


def test_an_election_id_that_comes_free_within_the_deadline(server: ScriptedServer) -> None:
    server.taken = 3
    server.stream.put(arbitration())
    client = SwitchClient(server.address, W5, deadline=DEADLINE)
    client.close()
    assert server.taken == 0
    server.taken = 1000
    assert "Election id already exists (another controller is connected" in refused(server.address)


def test_a_stream_that_ends_at_once(server: ScriptedServer) -> None:
    server.stream.put(None)
    told: list[str] = []
    assert "no P4Runtime session: the switch ended the session" in refused(server.address, on_lost=told.append)
    assert told == [], "there was no session to lose"


class Losses:
    """Collects what on_lost is told."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def next(self) -> str:
        return self.told.get(timeout=DEADLINE)


@pytest.mark.parametrize(
    ("item", "why"),
    [
        (None, "the switch ended the session"),
        (grpc.RpcError, "INTERNAL: the switch has a headache"),
        (arbitration(code_pb2.ALREADY_EXISTS), "another controller has become primary"),
    ],
)
def test_a_session_that_is_lost_later_says_so_once(
    server: ScriptedServer, connect: Callable[..., SwitchClient], item: Any, why: str
) -> None:
    losses = Losses()
    client = connect(on_lost=losses.told.put)
    assert client.lost is None
    server.stream.put(item)
    assert losses.next() == why
    assert client.lost == why
    client.close()
    assert losses.told.empty()


def test_closing_is_no_loss(server: ScriptedServer, connect: Callable[..., SwitchClient]) -> None:
    losses = Losses()
    client = connect(on_lost=losses.told.put)
    client.close()
    client.close()
    assert server.stream_ended.wait(DEADLINE)
    assert client.lost == "closed"
    assert losses.told.empty()


def test_packets_and_digests_are_drained(server: ScriptedServer, connect: Callable[..., SwitchClient]) -> None:
    losses = Losses()
    connect(on_lost=losses.told.put)
    packet = Reply()
    packet.packet.payload = bytes(9000)
    digest = Reply()
    digest.digest.digest_id = 1
    for _ in range(500):
        server.stream.put(packet)
        server.stream.put(digest)
    server.stream.put(arbitration(code_pb2.OK))
    server.stream.put(arbitration(code_pb2.ALREADY_EXISTS))
    assert losses.next() == "another controller has become primary", "the last message has been read"


def test_no_pipeline_and_another_pipeline_are_replaced_the_same_one_is_kept(server: ScriptedServer) -> None:
    def calls_of_a_session() -> list[str]:
        server.calls.clear()
        server.stream_ended.clear()
        server.stream.put(arbitration())
        client = SwitchClient(server.address, W5)
        client.close()
        assert server.stream_ended.wait(DEADLINE)
        assert client.pushed == ("push" in server.calls)
        return server.calls

    assert calls_of_a_session() == ["get", "push"]
    cookie = server.cookie
    assert cookie
    server.groups = [1, 5]
    assert calls_of_a_session() == ["get"]
    server.cookie = cookie ^ 2
    assert calls_of_a_session() == ["get", "read", "write", "push"], "groups first: BMv2 keeps those a push forgets"
    deleted = [
        (update.type, update.entity.packet_replication_engine_entry.multicast_group_entry.multicast_group_id)
        for update in server.requests[-2].updates
    ]
    assert deleted == [(p4runtime_pb2.Update.DELETE, 1), (p4runtime_pb2.Update.DELETE, 5)]
    assert server.cookie == cookie
    server.cookie = 0
    assert calls_of_a_session()[-1] == "push", "a pipeline that somebody pushed without a cookie"


@pytest.mark.parametrize("position", range(4))
def test_a_failed_batch_is_taken_apart_wherever_the_error_is(
    server: ScriptedServer, connect: Callable[..., SwitchClient], position: int
) -> None:
    client = connect(deadline=DEADLINE)
    codes = [code_pb2.OK] * 4
    codes[position] = code_pb2.ALREADY_EXISTS
    server.fail_writes(*codes)
    begin = time.monotonic()
    with pytest.raises(SwitchError) as caught:
        client.write(inserts(Group(number, frozenset()) for number in range(10, 14)))
    assert time.monotonic() - begin < DEADLINE / 2
    assert str(caught.value) == (
        f"switch {server.address} refused insert multicast group {10 + position}: ALREADY_EXISTS says ALREADY_EXISTS"
    )


def test_many_errors_are_counted_and_few_are_shown(
    server: ScriptedServer, connect: Callable[..., SwitchClient]
) -> None:
    client = connect()
    server.fail_writes(*[code_pb2.RESOURCE_EXHAUSTED] * BATCH)
    with pytest.raises(SwitchError, match=r"group 2: .*group 3: .*group 4: .*\(and 61 more\)"):
        client.write(inserts(Group(number, frozenset()) for number in range(2, 2 + 2 * BATCH)))
    assert server.calls.count("write") == 2, "all updates are tried"


def test_deleting_what_is_gone_may_be_fine(server: ScriptedServer, connect: Callable[..., SwitchClient]) -> None:
    client = connect()
    server.fail_writes(code_pb2.NOT_FOUND, code_pb2.OK)
    updates = [Update(Verb.DELETE, ENTRY), Update(Verb.DELETE, Group(5, frozenset()))]
    client.write(updates, missing_ok=True)
    with pytest.raises(SwitchError, match=r"delete entry epochs\(epoch=7\): NOT_FOUND"):
        client.write(updates)
    server.fail_writes(code_pb2.PERMISSION_DENIED, code_pb2.OK)
    with pytest.raises(SwitchError, match="PERMISSION_DENIED"):
        client.write(updates, missing_ok=True)
    server.fail_writes(code_pb2.NOT_FOUND)
    with pytest.raises(SwitchError, match="NOT_FOUND"):
        client.write([Update(Verb.MODIFY, ENTRY)], missing_ok=True)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNKNOWN, grpc.StatusCode.PERMISSION_DENIED])
def test_a_failed_write_without_details(
    server: ScriptedServer, connect: Callable[..., SwitchClient], code: grpc.StatusCode
) -> None:
    client = connect()
    server.write = lambda _, context: context.abort(code, "no idea")
    for missing_ok in (False, True):
        with pytest.raises(SwitchError, match=f"write: {code.name}: no idea"):
            client.write([Update(Verb.DELETE, ENTRY)], missing_ok=missing_ok)


def test_more_errors_than_updates(server: ScriptedServer, connect: Callable[..., SwitchClient]) -> None:
    client = connect()
    server.fail_writes(code_pb2.OK, code_pb2.OK, code_pb2.INTERNAL)
    with pytest.raises(SwitchError, match="write: UNKNOWN"):
        client.write([Update(Verb.INSERT, ENTRY)])


def test_write_errors_ignores_details_of_another_kind() -> None:
    class Foreign(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.UNKNOWN

        def details(self) -> str:
            return "odd"

        def trailing_metadata(self) -> list[tuple[str, bytes]]:
            detail = any_pb2.Any()
            detail.Pack(status_pb2.Status())
            return [("grpc-status-details-bin", status_pb2.Status(details=[detail]).SerializeToString())]

    assert write_errors(Foreign()) == [(-1, code_pb2.UNKNOWN, "odd")]


def test_every_call_has_a_deadline(server: ScriptedServer, connect: Callable[..., SwitchClient]) -> None:
    client = connect(deadline=0.3)
    server.write = lambda *_: server.hang.wait(DEADLINE) and None
    server.config = lambda _: server.hang.wait(DEADLINE) and None
    begin = time.monotonic()
    with pytest.raises(SwitchGoneError, match="write: DEADLINE_EXCEEDED"):
        client.write([Update(Verb.INSERT, ENTRY)])
    with pytest.raises(SwitchGoneError, match="no sign of life: DEADLINE_EXCEEDED"):
        client.probe()
    assert time.monotonic() - begin < DEADLINE / 2


def test_probe(server: ScriptedServer, connect: Callable[..., SwitchClient]) -> None:
    client = connect()
    client.probe()
    server.config = lambda context: context.abort(grpc.StatusCode.UNAVAILABLE, "going down")
    with pytest.raises(SwitchGoneError, match="no sign of life: UNAVAILABLE: going down"):
        client.probe()


@pytest.mark.parametrize(("cookie", "found"), [(None, "no program"), (0, "another program"), (77, "another program")])
def test_probe_finds_out_that_the_program_is_not_ours_any_more(
    server: ScriptedServer, connect: Callable[..., SwitchClient], cookie: int | None, found: str
) -> None:
    client = connect()
    assert client.pushed
    server.cookie = cookie
    with pytest.raises(SwitchGoneError, match=f"it runs {found}.*in the place of p4reduce's"):
        client.probe()
    client.close()
    assert server.stream_ended.wait(DEADLINE)
    again = connect()
    assert again.pushed
    again.probe()


@pytest.mark.parametrize(
    ("entity", "text"),
    [
        (TableEntry("nowhere", (), "nack"), "has no table nowhere"),
        (TableEntry("epochs", (("epok", 1),), "known_epoch"), "has no key epok of table epochs"),
        (TableEntry("epochs", (("epoch", 1),), "unknown"), "has no action unknown"),
        (TableEntry("epochs", (("epoch", 1),), "known_epoch", (("stat", 1),)), "has no parameter stat of known_epoch"),
        (TableEntry("epochs", (("epoch", 1 << 32),), "known_epoch"), "epoch 4294967296 does not fit in 32 bits"),
        (CounterCell("nothing", 1), "has no counter nothing"),
    ],
)
def test_names_that_the_program_does_not_have(
    server: ScriptedServer, connect: Callable[..., SwitchClient], entity: Any, text: str
) -> None:
    client = connect()
    with pytest.raises(SwitchError, match=text):
        client.write([Update(Verb.INSERT, entity)])
    assert "write" not in server.calls


def test_values_are_canonical(server: ScriptedServer, connect: Callable[..., SwitchClient]) -> None:
    client = connect()
    entry = TableEntry("forward", (("dst_mac", 0x00_70_34_00_00_01),), "to_port", (("port", 0),))
    client.write([Update(Verb.INSERT, entry), Update(Verb.DELETE, entry)])
    insert, delete = (update.entity.table_entry for update in server.requests[-1].updates)
    assert insert.match[0].exact.value == bytes.fromhex("7034000001")
    assert insert.action.action.params[0].value == b"\0"
    assert delete.match == insert.match
    assert not delete.HasField("action")


def test_two_switches_in_one_process(server: ScriptedServer, connect: Callable[..., SwitchClient]) -> None:
    second = ScriptedServer()
    try:
        second.stream.put(arbitration())
        other = SwitchClient(second.address, W5, device_id=2)
        first = connect(device_id=1)
        first.write([Update(Verb.INSERT, ENTRY)])
        other.write([Update(Verb.INSERT, ENTRY)])
        assert server.requests[-1].device_id == 1
        assert second.requests[-1].device_id == 2
        other.close()
        first.probe()
    finally:
        second.close()


def test_an_open_session_does_not_keep_a_process_alive(server: ScriptedServer) -> None:
    server.stream.put(arbitration())
    program = (
        "import sys\n"
        "from p4reduce import pipeline\n"
        "from p4reduce_controller.p4rt import SwitchClient\n"
        "client = SwitchClient(sys.argv[1], pipeline.find('w5'))\n"
        "print('connected', client.lost, 'IPython' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, server.address], capture_output=True, text=True, timeout=DEADLINE
    )
    assert (done.returncode, done.stdout) == (0, "connected None False\n"), done.stderr
