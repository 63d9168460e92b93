# SPDX-License-Identifier: Apache-2.0
"""The command `p4reduce-controller serve`: what it says, and how it ends."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from helpers.controller_process import DEADLINE, ControllerProcess, write_hosts

from p4reduce.proto import controller_pb2 as pb
from p4reduce.proto import controller_pb2_grpc
from p4reduce_bmv2.switch import SwitchProcess
from p4reduce_controller import cli, serve

REQUEST = pb.JoinRequest(job="train", world_size=1, ip="127.0.1.1", udp_port=4000, mtu=1500, receive_frames=9)


class Lab:
    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self.folder = folder
        self.switch = stack.enter_context(SwitchProcess.start("embedded", udp_ports={1: "127.0.0.1"}))
        self.hosts = write_hosts(folder, self.switch.grpc_address, self.switch.endpoints)

    def serve(self, *options: str, listen: str = "127.0.0.1:0") -> ControllerProcess:
        process = ControllerProcess("--hosts", str(self.hosts), "--listen", listen, *options)
        self._stack.callback(process.end)
        return process


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with ExitStack() as stack:
        yield Lab(stack, tmp_path)


def join(address: str, job: str = "train") -> pb.JoinReply:
    request = pb.JoinRequest()
    request.CopyFrom(REQUEST)
    request.job = job
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = controller_pb2_grpc.ControllerStub(channel)
        reply: pb.JoinReply = stub.Join(request, timeout=DEADLINE)
        return reply


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_log_lines_as_json_carry_what_they_are_about(lab: Lab) -> None:
    process = lab.serve("--log-format", "json").ready()
    epoch = join(process.address).epoch
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    lines = [json.loads(line) for line in process.log.splitlines()]
    about = [line for line in lines if line.get("epoch") == epoch]
    assert [line["job"] for line in about][:2] == ["train", "train"]
    assert "begins on the switch path" in about[1]["message"]


def test_the_policy_comes_from_options(lab: Lab) -> None:
    options = (
        "--deadline",
        "9",
        "--policy",
        "silent_seconds=0.25",
        "--policy",
        "early_resend=0",
        "--policy",
        "window=8",
    )
    policy = join(lab.serve(*options).ready().address).policy
    assert (policy.deadline_seconds, policy.silent_seconds, policy.early_resend, policy.window) == (9.0, 0.25, 0, 8)


def test_metrics(lab: Lab) -> None:
    address = f"127.0.0.1:{free_port()}"
    process = lab.serve("--metrics", address).ready()
    join(process.address)
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=DEADLINE) as answer:
        text = answer.read().decode()
    assert 'p4reduce_switch_connected{switch="s1"} 1' in text
    process.popen.terminate()
    assert process.wait() == 0


def test_frames_that_the_switch_guards_against_are_counted_for_operators(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"127.0.0.1:{free_port()}"
    process = lab.serve("--metrics", address).ready()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.1.1", 0))
        for _ in range(3):
            sock.sendto(b"too short for a frame", lab.switch.endpoints[1])
    end, pause = time.monotonic() + DEADLINE, threading.Event()
    shown = ""
    while "guarded: 3 (frames dropped" not in shown:
        assert time.monotonic() < end, shown
        pause.wait(0.1)
        assert cli.main(["counters", "--controller", process.address]) == 0
        shown = capsys.readouterr().out
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=DEADLINE) as reply:
        assert b'p4reduce_switch_strays_total{kind="guarded",switch="s1"} 3.0' in reply.read()


def test_a_signal_that_comes_twice_at_once_is_one(lab: Lab) -> None:
    """As from `timeout`, which sends it to the process and to its group."""
    process = lab.serve().ready()
    for _ in range(2):
        process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == 0


def test_who_is_pushed_out_ends_and_says_why(lab: Lab) -> None:
    first = lab.serve().ready()
    second = lab.serve("--election-id", str(1 << 100)).ready()
    assert first.wait() == serve.EXIT_ENDED
    last = first.log.splitlines()[-1]
    assert last.startswith("p4reduce-controller: switch ")
    assert last.endswith("another controller has become primary: this one stops acting")
    assert join(second.address).epoch


def test_a_standby_that_is_pushed_out_stands_by_again(lab: Lab) -> None:
    first = lab.serve("--standby", "--state", str(lab.folder / "first.db")).ready()
    second = lab.serve("--standby", "--election-id", str(1 << 100), "--state", str(lab.folder / "second.db")).ready()
    assert first.line() == {"ready": False, "standby": True, "pid": first.popen.pid}
    assert join(second.address, "one").epoch
    second.kill()
    first.ready()
    assert join(first.address, "two").epoch
    first.popen.terminate()
    assert first.wait() == 0
    assert "standing by again" in first.log


def test_a_second_controller_without_standby_is_told_what_to_do(lab: Lab) -> None:
    lab.serve().ready()
    second = lab.serve("--switch-deadline", "0.5")
    assert second.wait() == serve.EXIT_BAD_INPUT
    assert "another controller is primary: stop it, wait for its end with --standby" in second.log


def test_a_standby_ends_with_a_signal(lab: Lab) -> None:
    lab.serve("--standby").ready()
    second = lab.serve("--standby")
    assert second.line()["standby"]
    second.popen.send_signal(signal.SIGINT)
    assert second.wait() == 0
    assert "Traceback" not in second.log


def test_two_standbys_share_file_and_address(lab: Lab) -> None:
    listen, state = f"127.0.0.1:{free_port()}", str(lab.folder / "state.db")
    first = lab.serve("--standby", "--state", state, listen=listen).ready()
    second = lab.serve("--standby", "--state", state, listen=listen)
    assert second.line()["standby"]
    used = join(listen, "one").epoch
    first.kill()
    assert second.ready().address == listen
    assert join(listen, "two").epoch > used


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--listen", "0.0.0.0:0"), "which other machines can reach, without TLS"),
        (("--tls-cert", "x.pem"), "give both --tls-cert and --tls-key"),
        (("--tokens", "/nowhere/tokens.toml"), "/nowhere/tokens.toml: cannot read the tokens file"),
        (("--policy", "deadline=3"), "write NAME=VALUE, names are initial_seconds, "),
        (("--policy", "window=1"), "window must be 0"),
        (("--policy", "silent_seconds=5"), "0 < silent <= fallback, not 5.0 <= 1.0"),
        (("--state", "/nowhere/state.db"), "/nowhere/state.db: cannot use the state file"),
        (("--state", ""), "cannot use '.' as the state file: it names a folder"),
        (("--state", "/"), "cannot use '/' as the state file: it names a folder"),
        (("--state", "/dev/null"), "/dev/null: cannot use the state file: not a regular file"),
    ],
)
def test_bad_options_are_one_line(
    lab: Lab, options: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main(["serve", "--hosts", str(lab.hosts), "--listen", "127.0.0.1:0", *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("p4reduce-controller: ")
    assert text in lines[-1]


def test_a_damaged_state_file_is_named(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    state = lab.folder / "state.db"
    state.write_bytes(b"SQLite format 3\0" + bytes(4000))
    arguments = ["serve", "--hosts", str(lab.hosts), "--listen", "127.0.0.1:0", "--state", str(state)]
    assert serve.main(arguments) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"p4reduce-controller: {state}: ")
    assert "name another file" in line


def test_the_help_tells_of_standby_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.main(["serve", "--help"])
    text = capsys.readouterr().out
    for word in ("two controllers for one switch", "exit codes", "--insecure", "--tokens", "--metrics"):
        assert word in text
