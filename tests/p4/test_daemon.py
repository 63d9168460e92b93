# SPDX-License-Identifier: Apache-2.0
"""p4reduce-switch as a process: readiness, stop, every refusal to start; and SwitchProcess, which manages one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from helpers.runtime import COMPILED, PROGRAMS, Client, Get, Program, group, refused
from helpers.runtime import Code as GrpcCode
from p4.v1 import p4runtime_pb2

from p4reduce.errors import SwitchError
from p4reduce_bmv2 import switch as switch_module
from p4reduce_bmv2.embedded import daemon
from p4reduce_bmv2.switch import SwitchOptions, SwitchProcess, bmv2_command, embedded_command, find_bmv2

DEADLINE = 20.0
COMMAND = [sys.executable, "-m", "p4reduce_bmv2.embedded.daemon"]


@contextlib.contextmanager
def daemon_process(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A switch process; killed if the test leaves it running."""
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
    watchdog = threading.Timer(DEADLINE, process.kill)
    watchdog.start()
    try:
        yield process
    finally:
        watchdog.cancel()
        if process.poll() is None:
            process.kill()
        process.communicate()


def ready_line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    return json.loads(line)


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture
def handlers() -> Iterator[None]:
    """Puts the signal handlers back that a daemon inside this process replaces."""
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=DEADLINE)


class TestRunning:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_ready_line_and_clean_stop(self, number: signal.Signals) -> None:
        with daemon_process(
            "--json-ready", "--grpc-server-addr", "127.0.0.1:0", "--udp-port", "1@127.0.0.1", "--device-id", "4"
        ) as process:
            ready = ready_line(process)
            assert ready["pid"] == process.pid
            assert ready["device_id"] == 4
            assert list(ready["udp_ports"]) == ["1"]
            with Client(ready["grpc"], 1, device_id=4) as client:
                client.push(Program.entities())
                begin = time.monotonic()
                process.send_signal(number)
                assert process.wait(DEADLINE) == 0
                # A primary that is connected does not hold it up.
                assert time.monotonic() - begin < 5.0
                assert client.end() in (GrpcCode.OK, GrpcCode.UNAVAILABLE, GrpcCode.CANCELLED)
            assert "Traceback" not in process.communicate()[1]

    def test_ready_file_and_descriptor(self, tmp_path: Path) -> None:
        path = tmp_path / "ready"
        with daemon_process("--json-ready", str(path), "--grpc-server-addr", "127.0.0.1:0") as process:
            end = time.monotonic() + DEADLINE
            while not path.exists():
                assert process.poll() is None
                assert time.monotonic() < end
                time.sleep(0.01)
            assert json.loads(path.read_text())["pid"] == process.pid
            assert [entry.name for entry in tmp_path.iterdir()] == ["ready"]
        reading, writing = os.pipe()
        with (
            os.fdopen(reading) as stream,
            daemon_process(
                "--json-ready", str(writing), "--grpc-server-addr", "127.0.0.1:0", pass_fds=[writing]
            ) as process,
        ):
            os.close(writing)
            assert json.loads(stream.readline())["pid"] == process.pid

    def test_preloaded_program(self) -> None:
        with (
            daemon_process(
                "--json-ready",
                "--grpc-server-addr",
                "127.0.0.1:0",
                "--p4info",
                str(COMPILED / "w5.p4info.txtpb"),
                str(COMPILED / "w5.json"),
            ) as process,
            Client(ready_line(process)["grpc"], 1) as client,
        ):
            assert client.get_pipeline(Get.P4INFO_AND_COOKIE).p4info.pkg_info.name == "p4reduce"

    def test_bare_dashes_and_flags_of_bmv2(self) -> None:
        with daemon_process(
            "--no-p4", "--device-id", "1", "-L", "off", "--json-ready", "--",
            "--grpc-server-addr", "127.0.0.1:0", "--cpu-port", "510",
        ) as process:  # fmt: skip
            ready_line(process)
            process.terminate()
            assert process.wait(DEADLINE) == 0
            assert process.communicate()[1] == ""

    def test_counters_are_logged_on_demand_and_at_the_end(self) -> None:
        with daemon_process(
            "--json-ready", "--grpc-server-addr", "127.0.0.1:0", "--udp-port", "1@127.0.0.1", "--loss", "0.5"
        ) as process:
            host, udp_port = ready_line(process)["udp_ports"]["1"].split(":")
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.sendto(b"x", (host, int(udp_port)))
            process.send_signal(signal.SIGUSR1)
            assert process.stderr is not None
            for line in process.stderr:
                if "drops outside" in line:
                    break
            process.terminate()
            assert process.wait(DEADLINE) == 0
            assert '"rx_frames": 1' in process.stderr.read()

    def test_stop_while_a_huge_request_is_decoded(self) -> None:
        """Decoding takes many seconds (protobuf here is pure Python) and cannot be interrupted."""
        request = p4runtime_pb2.WriteRequest(device_id=0)
        request.election_id.low = 1
        request.updates.extend([p4runtime_pb2.Update(type=3, entity=group(5, [(1, 1)]))] * 1000)
        data = request.SerializeToString()
        with (
            daemon_process("--json-ready", "--grpc-server-addr", "127.0.0.1:0") as process,
            grpc.insecure_channel(ready_line(process)["grpc"]) as channel,
        ):
            # Messages of this protocol can be joined byte by byte: 200 000 updates.
            call = channel.unary_unary("/p4.v1.P4Runtime/Write").future(data * 200, timeout=60)
            before = cpu_seconds(process.pid)
            end = time.monotonic() + DEADLINE
            while cpu_seconds(process.pid) < before + 0.5:
                assert not call.done()
                assert time.monotonic() < end
                time.sleep(0.01)
            begin = time.monotonic()
            process.terminate()
            assert process.wait(DEADLINE) == 0
            assert time.monotonic() - begin < 4.0  # two, and room for a busy machine
            assert call.code() == GrpcCode.UNAVAILABLE
            assert "Traceback" not in process.communicate()[1]

    def test_two_switches_side_by_side(self) -> None:
        with (
            daemon_process("--json-ready", "--grpc-server-addr", "127.0.0.1:0") as first,
            daemon_process("--json-ready", "--grpc-server-addr", "127.0.0.1:0") as second,
        ):
            assert ready_line(first)["grpc"] != ready_line(second)["grpc"]


class TestRefusals:
    def check(self, done: subprocess.CompletedProcess[str], *words: str) -> None:
        """One line that says what is wrong, exit code 2."""
        assert done.returncode == daemon.EXIT_NOT_STARTED == 2
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("p4reduce-switch: ")
        for word in words:
            assert word in last
        assert "Traceback" not in done.stderr

    def test_taken_grpc_port(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            done = run("--grpc-server-addr", address)
        self.check(done, address, "in use")
        assert len(done.stderr.strip().splitlines()) == 1

    def test_grpc_port_of_another_switch(self) -> None:
        with daemon_process("--json-ready", "--grpc-server-addr", "127.0.0.1:0") as process:
            self.check(run("--grpc-server-addr", ready_line(process)["grpc"]), "in use")

    def test_taken_udp_port(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
            taken.bind(("127.0.0.1", 0))
            endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
            self.check(
                run("--grpc-server-addr", "127.0.0.1:0", "--udp-port", f"1@{endpoint}"), "port 1", endpoint, "in use"
            )

    def test_missing_interface(self) -> None:
        self.check(run("--grpc-server-addr", "127.0.0.1:0", "-i", "1@p4rnone"), "port 1", "'p4rnone'")

    @pytest.mark.skipif(os.geteuid() != 0, reason="gives root up")
    def test_interface_without_root(self) -> None:
        code = (
            # Imported first: what comes after may read none of root's files.
            "import os, sys; from p4reduce_bmv2.embedded import daemon, switch; daemon.build_parser(); "
            "os.setgid(65534); os.setuid(65534); "
            "sys.exit(daemon.main(['--grpc-server-addr', '127.0.0.1:0', '-i', '1@lo']))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE)
        self.check(done, "interface lo", "root")

    @pytest.mark.usefixtures("handlers")
    @pytest.mark.parametrize("port", ["\u00b2", "\u0663", "1" * 5000, "-1", ""])
    def test_grpc_port_that_is_no_number(self, port: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert daemon.main(["--log-level", "off", "--grpc-server-addr", f"127.0.0.1:{port}"]) == 2
        assert "is not HOST:PORT" in capsys.readouterr().err

    @pytest.mark.usefixtures("handlers")
    @pytest.mark.parametrize("port", ["\u00b2", "\u0663", "65536", "+5"])
    def test_udp_endpoint_port_that_is_no_number(self, port: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert daemon.main(["--log-level", "off", "--udp-port", f"1@127.0.0.1:{port}"]) == 2
        assert "UDP endpoint" in capsys.readouterr().err

    def test_strange_host_name(self) -> None:
        self.check(run("--grpc-server-addr", "a" * 80 + ".\u00b2:1"), "cannot listen on")

    def test_udp_endpoint_off_loopback(self) -> None:
        self.check(run("--grpc-server-addr", "127.0.0.1:0", "--udp-port", "1@10.0.0.1:5"), "loopback")

    def test_broken_program(self, tmp_path: Path) -> None:
        info = str(PROGRAMS / "entities.p4info.txtpb")
        missing = run("--grpc-server-addr", "127.0.0.1:0", "--p4info", info, str(tmp_path / "none.json"))
        self.check(missing, "none.json", "No such file")
        broken = tmp_path / "broken.json"
        broken.write_text("{}")
        self.check(run("--grpc-server-addr", "127.0.0.1:0", "--p4info", info, str(broken)), "broken.json")
        self.check(
            run("--grpc-server-addr", "127.0.0.1:0", "--p4info", str(broken), str(PROGRAMS / "entities.json")),
            "P4Info",
        )

    def test_unwritable_ready_file(self, tmp_path: Path) -> None:
        done = run("--grpc-server-addr", "127.0.0.1:0", "--json-ready", str(tmp_path / "no" / "where"))
        self.check(done, "--json-ready")
        for target in ("999999", "9" * 20):  # descriptors that nobody has
            self.check(run("--grpc-server-addr", "127.0.0.1:0", "--json-ready", target), "--json-ready")

    def test_missing_extra(self, tmp_path: Path) -> None:
        """As if the package p4runtime were not installed, and as if protobuf were too new for it."""
        for content, word in (
            ("raise ImportError(name='p4')", "p4reduce[bmv2]"),
            ("raise TypeError", "too new"),
        ):
            package = tmp_path / word.split()[0] / "p4"
            package.mkdir(parents=True)
            (package / "__init__.py").write_text(content + "\n")
            done = subprocess.run(
                [*COMMAND, "--grpc-server-addr", "127.0.0.1:0"],
                capture_output=True,
                text=True,
                timeout=DEADLINE,
                env={**os.environ, "PYTHONPATH": str(package.parent)},
            )
            self.check(done, word)

    @pytest.mark.parametrize(
        ("arguments", "word"),
        [
            (["--udp-port", "1@127.0.0.1", "--udp-port", "1@127.0.0.2"], "port 1 is given twice"),
            (["--udp-port", "1@127.0.0.1", "-i", "1@lo"], "port 1 is given twice"),
            (["-i", "lo"], "must be PORT@IFACE"),
            (["-i", "x@lo"], "must be PORT@IFACE"),
            (["--udp-port", "1@"], "must be PORT@ADDR"),
            (["--udp-port", "\u00b2@127.0.0.1"], "must be PORT@ADDR"),
            (["-i", f"{'1' * 5000}@lo"], "must be PORT@IFACE"),
            (["--device-id", "-1"], "is not 0..18446744073709551615"),
            (["--device-id", "1" + "0" * 23], "is not 0..18446744073709551615"),
            (["--device-id", "18446744073709551616"], "is not 0..18446744073709551615"),
            (["--device-id", "\u00b2"], "is not 0..18446744073709551615"),
            (["--loss", "1"], "not in [0, 1)"),
            (["--loss", "much"], "invalid"),
            (["--no-p4", "x.json"], "exclude"),
            (["x.json"], "belong together"),
            (["--p4info", "x.txt"], "belong together"),
            (["--log-level", "loud"], "invalid choice"),
        ],
    )
    def test_usage(self, arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            daemon.main(arguments)
        assert caught.value.code == 2
        assert word in capsys.readouterr().err


class TestInProcess:
    def test_failure_of_the_packet_thread_ends_the_daemon(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from p4reduce_bmv2.embedded.dataplane import DataPlane

        def fail(self: DataPlane) -> None:
            raise RuntimeError("defect")

        monkeypatch.setattr(DataPlane, "_loop", fail)
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
        code = daemon.main(["--grpc-server-addr", "127.0.0.1:0", "--log-level", "off"])
        assert {number: signal.getsignal(number) for number in handlers} == handlers, "handed back"
        assert code == daemon.EXIT_FAILED == 1
        assert "defect" in capsys.readouterr().err


class TestSwitchProcess:
    def test_embedded(self) -> None:
        with SwitchProcess.start(udp_ports={1: "127.0.0.1", 2: "127.0.0.1"}, device_id=3) as process:
            assert process.poll() is None
            assert set(process.endpoints) == {1, 2}
            with Client(process.grpc_address, 1, device_id=3) as client:
                client.push(Program.entities())
            log = process.log_path
            assert "P4Runtime on" in process.log_tail()
        assert process.stop() == 0
        assert not log.exists()

    def test_log_that_is_asked_for_stays(self, tmp_path: Path) -> None:
        with SwitchProcess.start(log_path=tmp_path / "log"):
            pass
        assert "P4Runtime on" in (tmp_path / "log").read_text()

    def test_early_exit_shows_the_log(self) -> None:
        with pytest.raises(SwitchError, match=r"ended with code 2 at start.*'p4rnone'"):
            SwitchProcess.start(interfaces={1: "p4rnone"})

    def test_deadline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sleeper = [sys.executable, "-c", "import time; print('asleep', flush=True); time.sleep(60)"]
        monkeypatch.setattr(switch_module, "embedded_command", lambda *_: sleeper)
        with pytest.raises(SwitchError, match="did not announce itself in time"):
            SwitchProcess.start(deadline=0.3)

    def test_process_that_ignores_sigterm_is_killed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stubborn = [
            sys.executable,
            "-c",
            "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()",
        ]
        process = subprocess.Popen(stubborn, stdout=subprocess.PIPE)
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"deaf\n"
            managed = SwitchProcess(process, "embedded", SwitchOptions(), Path(os.devnull))
            assert managed.stop(deadline=0.1) == -signal.SIGKILL

    def test_loss_is_passed_on(self, tmp_path: Path) -> None:
        command = embedded_command(SwitchOptions(loss=0.25, seed=7, cpu_port=9), tmp_path / "ready")
        arguments = daemon.build_parser().parse_args(command[3:])
        assert (arguments.loss, arguments.seed, arguments.cpu_port) == (0.25, 7, 9)

    def test_bmv2_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/nonexistent")
        assert find_bmv2() is None
        with pytest.raises(SwitchError, match=r"p4lang-bmv2.*embedded switch"):
            SwitchProcess.start("bmv2")

    def test_bmv2_command(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(switch_module, "find_bmv2", lambda: "/usr/bin/simple_switch_grpc")
        command = bmv2_command(
            SwitchOptions(interfaces={1: "veth1", 2: "veth2"}, device_id=4, grpc_addr="127.0.0.1:9559", cpu_port=510)
        )
        dashes = command.index("--")
        assert command[:2] == ["/usr/bin/simple_switch_grpc", "--no-p4"]
        assert command[dashes:] == ["--", "--grpc-server-addr", "127.0.0.1:9559", "--cpu-port", "510"]
        assert [command[place + 1] for place, word in enumerate(command) if word == "-i"] == ["1@veth1", "2@veth2"]

    def test_bmv2_has_no_udp_ports(self) -> None:
        with pytest.raises(SwitchError, match="embedded"):
            SwitchProcess.start("bmv2", udp_ports={1: "127.0.0.1"})

    @pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:x", "127.0.0.1:99999"])
    def test_malformed_addresses(self, address: str) -> None:
        for kind in ("embedded", "bmv2"):
            with pytest.raises(SwitchError):
                SwitchProcess.start(kind, grpc_addr=address)  # type: ignore[arg-type]

    def test_unknown_namespace(self) -> None:
        with pytest.raises(SwitchError, match="no network namespace"):
            SwitchProcess.start(netns="p4rnowhere")


@pytest.mark.bmv2
@pytest.mark.skipif(find_bmv2() is None, reason="simple_switch_grpc is not installed")
class TestBmv2Process:
    def test_start_and_stop(self) -> None:
        with (
            SwitchProcess.start("bmv2", device_id=2) as process,
            Client(process.grpc_address, 1, device_id=2) as client,
        ):
            with refused(GrpcCode.FAILED_PRECONDITION):
                client.get_pipeline()
            client.push(Program.w34())
        assert process.poll() is not None

    def test_taken_port_is_an_error_and_not_a_shared_port(self) -> None:
        with SwitchProcess.start("bmv2") as process:
            with pytest.raises(SwitchError, match="in use"):
                SwitchProcess.start("bmv2", grpc_addr=process.grpc_address)
            assert process.poll() is None

    def test_two_at_once(self) -> None:
        with SwitchProcess.start("bmv2") as first, SwitchProcess.start("bmv2") as second:
            assert first.grpc_address != second.grpc_address
