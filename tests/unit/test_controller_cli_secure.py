# SPDX-License-Identifier: Apache-2.0
"""`p4reducectl` with tokens and TLS. The certificates are made by the commands of docs/security.md."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest
from helpers import cli_servicer
from helpers.cli_servicer import Fake, run, switch

from p4reduce.proto import controller_pb2 as pb
from p4reduce_controller import cli
from p4reduce_controller.cli_client import Connection

no_settings = cli_servicer.no_settings
fake = cli_servicer.fake


PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"
SECRET = "s3cret-Token"


# ---- tokens ----------------------------------------------------------------------------------------------------------


def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> list[str]:
    """Give the token in one of the possible ways; the arguments that this takes."""
    path = tmp_path / "token"
    path.write_text(f"{SECRET}\nthe rest is a note\n")
    if how == "environment":
        monkeypatch.setenv("P4REDUCE_TOKEN", SECRET)
    elif how == "environment's file":
        monkeypatch.setenv("P4REDUCE_TOKEN_FILE", str(path))
    return {"option": ["--token", SECRET], "file": ["--token-file", str(path)]}.get(how, [])


@pytest.mark.parametrize("how", ["option", "file", "environment", "environment's file"])
def test_every_call_carries_the_token(
    fake: Fake, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = given(tmp_path, monkeypatch, how)
    fake.servicer.replies = {"SetMode": pb.SetModeReply(mode="off"), "Drain": pb.DrainReply(staying=["a"])}
    fake.servicer.pools = [pb.PoolsReply()]
    fake.servicer.watch = lambda _: iter([pb.StatusReply(switch=switch())] * 2)
    for command in (
        ["status"],
        ["pools"],
        ["top", "--once"],
        ["mode", "a", "off"],
        ["policy"],
        ["drain", "s1", "--wait", "5"],
        ["evict", "a"],
    ):
        assert run(fake, *command, *arguments) == 0
    names = [name for name, _ in fake.servicer.asked]
    assert names == ["Status", "Pools", "Watch", "SetMode", "SetPolicy", "Drain", "Status", "Pools", "Evict"]
    assert fake.servicer.tokens == [f"Bearer {SECRET}"] * len(names)
    captured = capsys.readouterr()
    assert SECRET not in captured.out + captured.err


def test_options_win_over_the_environment(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P4REDUCE_TOKEN", "other")
    monkeypatch.setenv("P4REDUCE_TOKEN_FILE", "/nowhere")
    assert run(fake, "status", "--token", SECRET) == 0
    assert run(fake, "status") == 0
    assert fake.servicer.tokens == [f"Bearer {SECRET}", "Bearer other"]


def test_no_token_no_header(fake: Fake) -> None:
    assert run(fake, "status") == 0
    assert fake.servicer.tokens == [""]


def test_a_wrong_token(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.servicer.refuse["Evict"] = (grpc.StatusCode.PERMISSION_DENIED, "this token is not an operator's")
    assert run(fake, "evict", "a", "--token", SECRET) == 1
    assert capsys.readouterr().err == "p4reducectl: PERMISSION_DENIED: this token is not an operator's\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--token", "a", "--token-file", "b"], "--token and --token-file exclude each other"),
        (["--token", ""], "the token (--token) must be printable ASCII characters, and at least one"),
        (["--token", "a\nb"], "the token (--token) must be printable ASCII"),
        (["--token", "größer"], "the token (--token) must be printable ASCII"),
        (["--token-file", "/nowhere/at/all"], "cannot read /nowhere/at/all (--token-file): No such file or directory"),
        (["--token-file", "{empty}"], "the token (--token-file) must be printable ASCII"),
        (["--token-file", "{binary}"], "the token (--token-file) must be printable ASCII"),
        (["--tls-ca", "/nowhere/at/all"], "cannot read /nowhere/at/all (--tls-ca): No such file"),
        (["--tls-ca", "{empty}"], "--tls-ca holds no certificates in PEM form"),
        (["--tls-ca", "{binary}"], "--tls-ca holds no certificates in PEM form"),
        (["--tls-cert", "{empty}"], "--tls-cert and --tls-key belong together: give both or none"),
        (["--tls-key", "{empty}"], "--tls-cert and --tls-key belong together: give both or none"),
        (["--tls-cert", "{empty}", "--tls-key", "{empty}"], "--tls-cert needs --tls-ca"),
    ],
)
def test_arguments_that_make_no_sense(
    fake: Fake, arguments: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\x00\x80")
    filled = [one.format(empty=tmp_path / "empty", binary=tmp_path / "binary") for one in arguments]
    assert run(fake, "status", *filled) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"p4reducectl: {text}")
    assert captured.err.count("\n") == 1
    assert fake.servicer.asked == []


@pytest.mark.parametrize(
    ("address", "exposed"),
    [
        ("127.0.0.1:1", False),
        ("127.8.9.1:1", False),
        ("localhost:1", False),
        ("[::1]:1", False),
        ("unix:/run/x", False),
        ("10.0.0.1:1", True),
        ("controller.example:1", True),
        ("ipv4:127.0.0.1:1,127.0.0.1:2", False),
        ("ipv4:127.0.0.1:1,10.0.0.1:1", True),
        ("ipv6:[::1]:1", False),
        ("dns:///localhost:1", False),
    ],
)
def test_a_token_in_the_clear_is_warned_about(address: str, exposed: bool) -> None:
    assert Connection(address, 1.0, token=SECRET).exposed is exposed
    assert not Connection(address, 1.0).exposed
    assert not Connection(address, 1.0, token=SECRET, ca=b"x").exposed
    assert SECRET not in repr(Connection(address, 1.0, token=SECRET))


def test_the_warning(fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("p4reduce_controller.cli_client._is_loopback", lambda address: address != fake.address)
    assert run(fake, "pools", "--token", SECRET, "--timeout", "0") == 2
    capsys.readouterr()
    assert run(fake, "status", "--token", SECRET) == 0
    assert capsys.readouterr().err == f"p4reducectl: the token goes to {fake.address} in the clear: use --tls-ca\n"


# ---- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the page's commands make, and in `other` the same from another authority."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    (commands,) = re.findall(r"^```sh\n(# An authority.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    folder = tmp_path_factory.mktemp("certificates")
    for place in (folder, folder / "other"):
        place.mkdir(exist_ok=True)
        subprocess.run(["bash", "-euc", commands], cwd=place, check=True, capture_output=True, timeout=60)
    return folder


def serving(folder: Path, *, mutual: bool) -> Fake:
    pair = ((folder / "controller.key").read_bytes(), (folder / "controller.pem").read_bytes())
    authority = (folder / "ca.pem").read_bytes() if mutual else None
    return Fake(grpc.ssl_server_credentials([pair], authority, mutual))


def tls(folder: Path, *, own: str = "") -> list[str]:
    arguments = ["--tls-ca", str(folder / "ca.pem")]
    if own:
        arguments += ["--tls-cert", str(folder / f"{own}.pem"), "--tls-key", str(folder / f"{own}.key")]
    return arguments


def test_tls(certificates: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(certificates, mutual=False) as server:
        assert run(server, "status", "--token", SECRET, *tls(certificates)) == 0
        assert server.servicer.tokens == [f"Bearer {SECRET}"]
        name = f"localhost:{server.port}"
        assert cli.main(["status", "--controller", name, *tls(certificates)]) == 0
    assert capsys.readouterr().err == ""


def test_mutual_tls(certificates: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(certificates, mutual=True) as server:
        assert run(server, "status", *tls(certificates, own="h1")) == 0
        for variable, name in (("CA", "ca.pem"), ("CERT", "h1.pem"), ("KEY", "h1.key")):
            monkeypatch.setenv(f"P4REDUCE_TLS_{variable}", str(certificates / name))
        assert run(server, "status") == 0
        assert len(server.servicer.asked) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("own", ["", "other/h1"])
def test_mutual_tls_without_a_certificate_that_counts(
    certificates: Path, own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(certificates, mutual=True) as server:
        assert run(server, "status", "--timeout", "2", *tls(certificates, own=own)) == 3
        assert server.servicer.asked == []
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert ("if it asks for a client certificate, give --tls-cert and --tls-key too" in err) == (not own)


def test_a_controller_that_another_authority_vouches_for(
    certificates: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(certificates, mutual=False) as server:
        assert run(server, "status", "--timeout", "2", "--token", SECRET, *tls(certificates / "other")) == 3
        assert server.servicer.tokens == []
    err = capsys.readouterr().err
    assert f"no TLS with {server.address}: the controller must use TLS, and its certificate must be signed by" in err


@pytest.mark.parametrize("secure", ["server", "client"])
def test_one_side_without_tls(certificates: Path, secure: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither side takes the other's word."""
    server: Any = serving(certificates, mutual=False) if secure == "server" else Fake()
    arguments = tls(certificates) if secure == "client" else []
    with server:
        assert run(server, "status", "--timeout", "2", *arguments) == 3
        assert server.servicer.asked == []
    err = capsys.readouterr().err
    assert ("if it uses TLS, give --tls-ca" if secure == "server" else "the controller must use TLS") in err


def test_a_key_that_is_not_the_certificates(certificates: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mixed = [*tls(certificates), "--tls-cert", str(certificates / "h1.pem")]
    key = str(certificates / "other" / "h1.key")
    assert cli.main(["status", *mixed, "--tls-key", key]) == 2
    assert "are no certificate and its key" in capsys.readouterr().err


def test_a_key_with_a_password(certificates: Path, capsys: pytest.CaptureFixture[str]) -> None:
    locked = certificates / "locked.key"
    subprocess.run(
        ["openssl", "ec", "-aes256", "-passout", "pass:abcd", "-in", str(certificates / "h1.key"), "-out", str(locked)],
        check=True,
        capture_output=True,
        timeout=60,
    )
    arguments = [*tls(certificates), "--tls-cert", str(certificates / "h1.pem"), "--tls-key", str(locked)]
    assert cli.main(["status", *arguments]) == 2
    assert "without a password: the key has a password" in capsys.readouterr().err


# ---- several controllers ---------------------------------------------------------------------------------------------


def test_a_standby_is_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    with Fake() as standby, Fake() as active:
        for server in (standby, active):
            server.servicer.watch = lambda _: iter([pb.StatusReply(switch=switch())] * 2)
        refusal = (grpc.StatusCode.UNAVAILABLE, "this controller stands by for 127.0.0.1:1")
        standby.servicer.refuse = dict.fromkeys(("Status", "Evict", "Watch"), refusal)
        both = f"ipv4:{standby.address},{active.address}"
        for command in (["status"], ["evict", "a"], ["top", "--once"]) * 4:
            assert cli.main([*command, "--controller", both]) == 0
        assert len([name for name, _ in active.servicer.asked if name == "Evict"]) == 4
        assert standby.servicer.asked, "the standby was never asked: nothing was passed over"
        # Alone it is what it is.
        assert cli.main(["status", "--controller", standby.address]) == 3
    assert capsys.readouterr().err == "p4reducectl: UNAVAILABLE: this controller stands by for 127.0.0.1:1\n"


def test_only_standbys(capsys: pytest.CaptureFixture[str]) -> None:
    with Fake() as first, Fake() as second:
        for server in (first, second):
            server.servicer.refuse = dict.fromkeys(("Status", "Watch"), (grpc.StatusCode.UNAVAILABLE, "stands by"))
        both = f"ipv4:{first.address},{second.address}"
        assert cli.main(["status", "--controller", both, "--timeout", "0.5"]) == 3
        assert cli.main(["top", "--once", "--controller", both, "--timeout", "0.5"]) == 3
        assert len(first.servicer.asked) + len(second.servicer.asked) > 4
    assert capsys.readouterr().err == "p4reducectl: UNAVAILABLE: stands by\n" * 2
