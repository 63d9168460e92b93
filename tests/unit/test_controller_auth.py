# SPDX-License-Identifier: Apache-2.0
"""Tokens, TLS, bounds, and where a controller may listen."""

from __future__ import annotations

import logging
import queue
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from helpers.controller import DEADLINE, HOSTS, Rig, Stream, refused, until

from p4reduce.errors import ConfigError
from p4reduce.proto import controller_pb2 as pb
from p4reduce.proto import controller_pb2_grpc
from p4reduce_controller import service
from p4reduce_controller.admission import RefusedError
from p4reduce_controller.auth import (
    CALL_BURST,
    CREDENTIAL,
    MAX_WATCHES,
    WATCHES_EACH,
    Caller,
    Gate,
    Rates,
    Tls,
    Tokens,
    bearer,
    check_listen,
    credential,
    is_loopback,
)
from p4reduce_controller.fake import FakeSwitch
from p4reduce_controller.server import ControllerServer

OPERATOR, TEAM_A, TEAM_B = "operator-0123456789", "team-a-0123456789ab", "team-b-0123456789ab"
GOOD = f"""
operator = "{OPERATOR}"
[[join]]
jobs = "a/*"
token = "{TEAM_A}"
[[join]]
jobs = "b/one"
token = "{TEAM_B}"
[[join]]
jobs = "c/*"
token = "{TEAM_A}"
"""


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return write(tmp_path / "tokens.toml", GOOD)


def secret(token: str, scheme: str = "Bearer") -> tuple[tuple[str, str], ...]:
    return (("authorization", f"{scheme} {token}"),)


class TestFile:
    def test_a_good_one(self, tokens: Path, caplog: pytest.LogCaptureFixture) -> None:
        found = Tokens.load(tokens)
        assert found.patterns(OPERATOR) == (True, [])
        assert found.patterns(TEAM_A) == (False, ["a/*", "c/*"])
        assert found.patterns(TEAM_B) == (False, ["b/one"])
        assert found.patterns("nobody") == (False, [])
        assert not caplog.records
        for token in (OPERATOR, TEAM_A, TEAM_B):
            assert token not in repr(found)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", "operator: a token must be a text"),
            ('operator = "short"', "at least 16 printable ASCII"),
            ("operator = 17", "operator: a token must be"),
            (f'operator = "{OPERATOR} "', "must not begin or end with a blank"),
            (f'operator = "{OPERATOR}ä"', "printable ASCII"),
            (GOOD + "[[jion]]\n", "unknown key jion"),
            (f'operator = "{OPERATOR}"\njoin = 1', "two brackets"),
            (f'operator = "{OPERATOR}"\n[[join]]\njobs = "a"', "join 1: it must have the keys jobs and token"),
            (f'operator = "{OPERATOR}"\n[[join]]\njobs = ""\ntoken = "{TEAM_A}"', "join 1: jobs must be a pattern"),
            (f'operator = "{OPERATOR}"\n[[join]]\njobs = "a"\ntoken = "{OPERATOR}"', "it has the operator's token"),
            (f'operator = "{OPERATOR}', "not valid TOML"),
        ],
    )
    def test_mistakes_name_the_place_and_show_no_token(self, tmp_path: Path, text: str, expected: str) -> None:
        path = write(tmp_path / "tokens.toml", text)
        with pytest.raises(ConfigError) as caught:
            Tokens.load(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert expected in str(caught.value)
        assert OPERATOR not in str(caught.value)

    def test_one_that_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot read the tokens file: No such file"):
            Tokens.load(tmp_path / "none.toml")

    @pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
    def test_others_may_not_read_it(self, tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture) -> None:
        Tokens.load(write(tmp_path / "tokens.toml", GOOD, mode))
        assert "chmod 600" in caplog.text


@pytest.fixture
def rig(tokens: Path) -> Iterator[Rig]:
    made = Rig(tokens=tokens)
    yield made
    made.close()


def attempt(rig: Rig, name: str, request: Any, metadata: Any = ()) -> tuple[str, str]:
    """How a call ends: OK, or its code and text."""
    try:
        getattr(rig.stub, name)(request, timeout=DEADLINE, metadata=metadata)
    except grpc.RpcError as error:
        return error.code().name, error.details()  # type: ignore[attr-defined]
    return "OK", ""


class TestCalls:
    @pytest.mark.parametrize(
        "name", ["Describe", "Join", "Leave", "Status", "Pools", "SetMode", "SetPolicy", "Drain", "Evict"]
    )
    def test_without_a_token_or_with_a_wrong_one(self, rig: Rig, name: str, caplog: pytest.LogCaptureFixture) -> None:
        request = rig.request(0, job="a/x") if name == "Join" else getattr(pb, f"{name}Request")()
        code, text = attempt(rig, name, request)
        assert (code, "wants a token" in text) == ("UNAUTHENTICATED", True)
        for metadata in (secret(OPERATOR, "Basic"), (("authorization", OPERATOR),), secret("")):
            assert attempt(rig, name, request, metadata)[0] == "UNAUTHENTICATED"
        code, text = attempt(rig, name, request, secret(OPERATOR[:-1] + "X"))
        assert (code, "none of this controller's" in text) == ("PERMISSION_DENIED", True)
        assert "without a valid token from 127.0.0.1" in caplog.text
        assert OPERATOR[:-1] not in caplog.text

    def test_streams_too(self, rig: Rig) -> None:
        stream = Stream(rig.stub, 5, 0)
        assert refused(stream.next)[0] == "UNAUTHENTICATED"
        watch = rig.stub.Watch(pb.WatchRequest(), timeout=DEADLINE)
        assert refused(lambda: next(watch))[0] == "UNAUTHENTICATED"

    @pytest.mark.parametrize(
        ("token", "job", "code"),
        [
            (TEAM_A, "a/x", "OK"),
            (TEAM_A, "c/y/z", "OK"),
            (TEAM_A, "b/one", "PERMISSION_DENIED"),
            (TEAM_A, "A/x", "PERMISSION_DENIED"),
            (TEAM_B, "b/one", "OK"),
            (TEAM_B, "b/onemore", "PERMISSION_DENIED"),
            (OPERATOR, "whatever", "OK"),
        ],
    )
    def test_a_token_opens_its_jobs(self, rig: Rig, token: str, job: str, code: str) -> None:
        request = rig.request(0, job=job, world_size=1)
        assert attempt(rig, "Join", request, secret(token))[0] == code

    @pytest.mark.parametrize("name", ["SetMode", "SetPolicy", "Drain", "Evict"])
    def test_operators_calls_take_the_operators_token(self, rig: Rig, name: str) -> None:
        request = getattr(pb, f"{name}Request")()
        code, text = attempt(rig, name, request, secret(TEAM_A))
        assert (code, "takes the operator's token" in text) == ("PERMISSION_DENIED", True)
        assert attempt(rig, name, request, secret(OPERATOR))[0] in ("OK", "NOT_FOUND")

    def test_who_sees_what(self, rig: Rig) -> None:
        for job, token in (("a/x", TEAM_A), ("b/one", TEAM_B)):
            assert attempt(rig, "Join", rig.request(0, job=job, world_size=1), secret(token))[0] == "OK"

        def seen(token: str) -> tuple[list[str], list[str]]:
            status = rig.stub.Status(pb.StatusRequest(), timeout=DEADLINE, metadata=secret(token))
            pools = rig.stub.Pools(pb.PoolsRequest(), timeout=DEADLINE, metadata=secret(token)).pools
            return [job.job for job in status.jobs], [pool.job for pool in pools if pool.job]

        assert seen(OPERATOR) == (["a/x", "b/one"], ["a/x", "b/one"])
        assert seen(TEAM_A) == (["a/x"], ["a/x", "(another's)"])
        pools = rig.stub.Pools(pb.PoolsRequest(), metadata=secret(TEAM_A)).pools
        assert [bool(pool.epoch) for pool in pools if pool.job] == [True, False]
        assert attempt(rig, "Status", pb.StatusRequest(job="b/one"), secret(TEAM_A))[0] == "NOT_FOUND"

    def test_a_rank_proves_itself_by_its_credential(self, rig: Rig) -> None:
        reply = rig.stub.Join(rig.request(0, job="a/x", world_size=1), timeout=DEADLINE, metadata=secret(TEAM_A))
        request = pb.LeaveRequest(job="a/x", epoch=reply.epoch)
        for wrong in (b"", b"\0" * 16, reply.credential[:-1]):
            metadata = (*secret(TEAM_A), ("p4reduce-credential-bin", wrong))
            assert attempt(rig, "Leave", request, metadata)[0] == "PERMISSION_DENIED"
        metadata = (*secret(TEAM_A), ("p4reduce-credential-bin", reply.credential))
        assert attempt(rig, "Leave", request, metadata)[0] == "OK"

    def test_no_secret_in_the_log(self, rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG)
        reply = rig.stub.Join(rig.request(0, job="a/x", world_size=1), timeout=DEADLINE, metadata=secret(TEAM_A))
        attempt(rig, "Evict", pb.EvictRequest(job="a/x"), secret(OPERATOR))
        assert len(caplog.records) > 2
        for hidden in (TEAM_A, OPERATOR, reply.credential.hex(), repr(reply.credential)):
            assert hidden not in caplog.text


class Context:
    """Of a call, as far as the gate looks."""

    def __init__(self, peer: str, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self._peer = peer
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def peer(self) -> str:
        return self._peer


class TestShares:
    """Nobody takes what others need."""

    def test_joins_of_one_token(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(service, "JOINS_EACH", 2)
        waiting = [
            rig.stub.Join.future(rig.request(0, job=f"a/{n}"), timeout=DEADLINE, metadata=secret(TEAM_A))
            for n in range(2)
        ]
        until(lambda: len(rig.stub.Status(pb.StatusRequest(), metadata=secret(OPERATOR)).jobs) == 2)
        code, text = attempt(rig, "Join", rig.request(0, job="c/x"), secret(TEAM_A))
        assert (code, text) == (
            "RESOURCE_EXHAUSTED",
            "2 joins of this token are open, which is the limit for one: try again later",
        )
        assert TEAM_A not in text
        assert attempt(rig, "Join", rig.request(0, job="b/one", world_size=1), secret(TEAM_B))[0] == "OK"
        for call in waiting:
            call.cancel()
        until(lambda: attempt(rig, "Join", rig.request(0, job="c/x", world_size=1), secret(TEAM_A))[0] == "OK")

    def test_watches_of_one_token(self, rig: Rig) -> None:
        """Whatever all other tokens do, each has its share."""
        request = pb.WatchRequest(interval_seconds=60.0)
        kept: list[Any] = []

        def watch(token: str) -> Any:
            call = rig.stub.Watch(request, timeout=DEADLINE, metadata=secret(token))
            next(call)
            return call

        for token in (TEAM_A, TEAM_B, OPERATOR):
            watches = [watch(token) for _ in range(WATCHES_EACH)]
            kept += watches
            code, text = refused(lambda token=token: watch(token))  # type: ignore[misc]
            assert (code, text) == (
                "RESOURCE_EXHAUSTED",
                f"{WATCHES_EACH} watches of this token are open, which is the limit for one: try again later",
            )
        watches[0].cancel()

        def room() -> bool:
            try:
                watch(OPERATOR).cancel()
            except grpc.RpcError:
                return False
            return True

        until(room)

    def test_a_rank_speaks_with_its_jobs_token(self, rig: Rig) -> None:
        """Another job's token hears nothing of it, not even why it ended."""
        request = rig.request(0, job="b/one", world_size=1)
        reply = rig.stub.Join(request, timeout=DEADLINE, metadata=secret(TEAM_B))
        own = ((CREDENTIAL, reply.credential),)

        def opened(token: str) -> Any:
            report = pb.ProgressReport(job="b/one", epoch=reply.epoch)
            call = rig.stub.Progress(iter([report]), timeout=DEADLINE, metadata=(*secret(token), *own))
            return next(call)

        leave = pb.LeaveRequest(job="b/one", epoch=reply.epoch)
        for live in (True, False):
            code, text = refused(lambda: opened(TEAM_A))
            assert (code, text) == (
                "PERMISSION_DENIED",
                "the token is not for job 'b/one': use the token of this job",
            )
            assert attempt(rig, "Leave", leave, (*secret(TEAM_A), *own))[0] == "PERMISSION_DENIED"
            if live:
                rig.stub.Evict(pb.EvictRequest(job="b/one"), timeout=DEADLINE, metadata=secret(OPERATOR))
        for token in (TEAM_B, OPERATOR):
            assert opened(token).fence.reason == pb.Fence.EVICTED
            assert attempt(rig, "Leave", leave, (*secret(token), *own))[0] == "OK"

    def test_what_is_over_the_rate_is_not_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        now = [0.0]
        gate = Gate(Tokens(b"", ()), clock=lambda: now[0])
        context = cast(grpc.ServicerContext, Context("ipv4:10.0.0.1:1", secret("wrong-wrong-wrong-wrong")))
        for _ in range(1000):
            with pytest.raises(RefusedError):
                gate.caller(context)
        assert len(caplog.records) == CALL_BURST

    def test_many_tokens_have_smaller_shares(self, tmp_path: Path) -> None:
        for number, share in ((3, WATCHES_EACH), (MAX_WATCHES // 2, 2), (2 * MAX_WATCHES, 1)):
            joins = "".join(f'[[join]]\njobs = "j{n}"\ntoken = "token-{n:020}"\n' for n in range(number - 1))
            tokens = Tokens.load(write(tmp_path / "tokens.toml", f'operator = "{OPERATOR}"\n{joins}'))
            assert tokens.number == number
            gate = Gate(tokens)
            for token in (OPERATOR, "token-00000000000000000001"):
                context = cast(grpc.ServicerContext, Context("ipv4:10.0.0.1:1", secret(token)))
                for _ in range(share):
                    gate.watch(context)
                with pytest.raises(RefusedError, match=f"{share} watches of this token"):
                    gate.watch(context)

    def test_streams_of_one_address(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(service, "STREAMS_EACH", 1)
        rig = Rig()
        try:
            replies = rig.join_all()
            first = Stream(rig.stub, replies[0].epoch, 0, credential=replies[0].credential)
            assert first.next().HasField("registered")
            second = Stream(rig.stub, replies[1].epoch, 1, credential=replies[1].credential)
            code, text = refused(second.next)
            assert (code, "1 progress streams of this address" in text) == ("RESOURCE_EXHAUSTED", True)
        finally:
            rig.close()

    def test_a_stream_without_a_report_is_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(service, "FIRST_REPORT_SECONDS", 0.1)
        monkeypatch.setattr(service, "STREAMS_EACH", 1)
        rig = Rig()
        try:
            for _ in range(2):
                silent: queue.SimpleQueue[None] = queue.SimpleQueue()
                call = rig.stub.Progress(iter(silent.get, None), timeout=DEADLINE)
                code, text = refused(lambda call=call: next(call))  # type: ignore[misc]
                silent.put(None)
                assert (code, "no report within 0.1 s" in text) == ("DEADLINE_EXCEEDED", True)
        finally:
            rig.close()

    def test_a_report_that_is_too_late_registers_nobody(self) -> None:
        late, early = service._Opening(), service._Opening()
        assert [late.wait(0.0), late.begin(), late.begin()] == [False, False, False]
        assert [early.begin(), early.wait(0.0), early.begin()] == [True, True, True]

    def test_leaves_wait_no_longer_than_a_minute(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        said: list[float] = []

        def leave(request: pb.LeaveRequest, number: int, _: bytes) -> None:
            said.append(request.wait_seconds)
            rig.server.coordinator.close(number)

        monkeypatch.setattr(rig.server.coordinator, "leave", leave)
        for wait in (59.0, 61.0, 86400.0):
            assert attempt(rig, "Leave", pb.LeaveRequest(job="a/x", wait_seconds=wait), secret(TEAM_A))[0] == "OK"
        assert said == [59.0, 60.0, 60.0]
        assert (
            attempt(rig, "Leave", pb.LeaveRequest(job="a/x", wait_seconds=86401.0), secret(TEAM_A))[0]
            == "INVALID_ARGUMENT"
        )

    def test_what_ends_is_forgotten(self) -> None:
        gate = Gate()
        first, second, third = (cast(grpc.ServicerContext, Context(f"ipv4:10.0.0.{n}:1")) for n in (1, 2, 3))
        ends = [gate.enter("x", 3, 2, first) for _ in range(2)]
        with pytest.raises(RefusedError, match="2 x of this address"):
            gate.enter("x", 3, 2, first)
        gate.enter("x", 3, 2, second)
        with pytest.raises(RefusedError, match="3 x are open"):
            gate.enter("x", 3, 2, third)
        for end in ends:
            end()
        assert list(gate._shares) == [("x", "10.0.0.2")]


def test_metadata() -> None:
    assert bearer([("x", "y"), ("authorization", "bearer  abc ")]) == "abc"
    assert bearer([("authorization", b"Bearer abc")]) == "abc"
    assert bearer([("authorization", "Bearer"), ("authorization", "Token abc")]) is None
    assert credential([("p4reduce-credential-bin", b"\1\2"), ("other", "x")]) == b"\1\2"
    assert credential([("p4reduce-credential-bin", "text")]) == b""


def test_callers() -> None:
    assert Caller(False, ("a*", "b")).may_see("abc")
    assert not Caller(False, ("a*", "b")).may_see("bc")
    assert Caller(True, ()).may_see("anything")


def test_rates() -> None:
    now = 0.0
    rates = Rates(10.0, 3.0, lambda: now)
    assert [rates.take("x") for _ in range(4)] == [True, True, True, False]
    assert rates.take("y")
    assert rates.wait("x") == pytest.approx(0.1)
    now = 0.1
    assert [rates.take("x") for _ in range(2)] == [True, False]
    now = 100.0
    assert [rates.take("x") for _ in range(4)] == [True, True, True, False]


class TestListen:
    @pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "[::1]", "localhost"])
    def test_this_machine_needs_nothing(self, host: str) -> None:
        assert is_loopback(host)
        check_listen(host, None, False, False)

    @pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.0.0.1", "controller.example"])
    def test_other_machines_need_tls_and_tokens(self, host: str, caplog: pytest.LogCaptureFixture) -> None:
        tls, mutual = Tls(Path("c"), Path("k")), Tls(Path("c"), Path("k"), Path("ca"))
        for given, tokens, lacks in (
            (None, False, ("--tls-cert", "--tokens")),
            (None, True, ("--tls-cert",)),
            (tls, False, ("--tokens",)),
        ):
            with pytest.raises(ConfigError, match="say --insecure") as caught:
                check_listen(host, given, tokens, False)
            assert all(name in str(caught.value) for name in lacks)
            check_listen(host, given, tokens, True)
            assert caplog.records.pop().levelno == logging.WARNING
        check_listen(host, tls, True, False)
        check_listen(host, mutual, False, False)
        assert not caplog.records

    def test_the_server_asks(self) -> None:
        with pytest.raises(ConfigError, match=r"listening on 0\.0\.0\.0.*say --insecure"):
            ControllerServer(HOSTS, "0.0.0.0:0", connect=FakeSwitch().connect)


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=DEADLINE)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities; the first one's server and client, the second one's client."""
    folder = tmp_path_factory.mktemp("pki")
    new = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    for ca in ("ca", "other"):
        openssl(folder, *new, "-subj", f"/CN={ca}", "-keyout", f"{ca}.key", "-out", f"{ca}.pem")
    for name, ca in (("server", "ca"), ("client", "ca"), ("stranger", "other")):
        signed = ("-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-addext", "subjectAltName=IP:127.0.0.1")
        extras = ("-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem")
        openssl(folder, *new, *signed, "-addext", "basicConstraints=critical,CA:FALSE", *extras)
    return folder


def describe(address: str, pki: Path, name: str | None = None, ca: str = "ca") -> str:
    """Connect with TLS, and the certificate of `name`; how the call ends."""
    own = [(pki / f"{name}.{end}").read_bytes() for end in ("key", "pem")] if name else [None, None]
    secrets = grpc.ssl_channel_credentials((pki / f"{ca}.pem").read_bytes(), *own)
    with grpc.secure_channel(address, secrets, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            controller_pb2_grpc.ControllerStub(channel).Describe(pb.DescribeRequest(), timeout=DEADLINE)
        except grpc.RpcError as error:
            return str(error.code().name)  # type: ignore[attr-defined]
    return "OK"


class TestTls:
    def test_clients_need_the_right_authority(self, pki: Path) -> None:
        tls = Tls.of(pki / "server.pem", pki / "server.key", None)
        with ControllerServer(HOSTS, connect=FakeSwitch().connect, tls=tls) as server:
            assert describe(server.address, pki) == "OK"
            assert describe(server.address, pki, ca="other") == "UNAVAILABLE"
            with grpc.insecure_channel(server.address) as channel:
                stub = controller_pb2_grpc.ControllerStub(channel)
                assert refused(lambda: stub.Describe(pb.DescribeRequest(), timeout=DEADLINE))[0] == "UNAVAILABLE"

    def test_mutual(self, pki: Path) -> None:
        tls = Tls.of(pki / "server.pem", pki / "server.key", pki / "ca.pem")
        with ControllerServer(HOSTS, connect=FakeSwitch().connect, tls=tls) as server:
            assert describe(server.address, pki, "client") == "OK"
            assert describe(server.address, pki) == "UNAVAILABLE"
            assert describe(server.address, pki, "stranger") == "UNAVAILABLE"

    def test_files_that_do_not_go_together(self, pki: Path, tmp_path: Path) -> None:
        assert Tls.of(None, None, None) is None
        for given in (("a", None, None), (None, "a", None), (None, None, "a")):
            with pytest.raises(ConfigError, match="give both --tls-cert and --tls-key"):
                Tls.of(*given)
        server = (pki / "server.pem", pki / "server.key")
        text = write(tmp_path / "text.pem", "no certificate")
        for files, message in (
            ((server[0], pki / "client.key", None), "cannot be used together"),
            ((text, server[1], None), "cannot be used together"),
            ((pki / "none.pem", server[1], None), r"none\.pem: cannot read the certificate: No such file"),
            ((*server, pki / "none.pem"), r"none\.pem: cannot read the client authority"),
            ((*server, text), r"--tls-client-ca .*text\.pem"),
        ):
            tls = Tls.of(*files)
            assert tls is not None
            with pytest.raises(ConfigError, match=message):
                tls.credentials()
