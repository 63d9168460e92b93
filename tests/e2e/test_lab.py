# SPDX-License-Identifier: Apache-2.0
"""`p4reduce lab` as users meet it: its commands, and that nothing stays behind, whatever is killed when."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import lab as labs

from p4reduce import cli_lab
from p4reduce.cli import main
from p4reduce.errors import SwitchError, UsageError
from p4reduce_bmv2 import lab as lab_module
from p4reduce_bmv2 import lab_run, lab_shape, lab_state, lab_wire, netns
from p4reduce_bmv2.lab import Lab, LabOptions, differences
from p4reduce_bmv2.lab_shape import Shape
from p4reduce_bmv2.lab_state import Folder, LabState, Process
from p4reduce_bmv2.topology import Topology

PYTHON = sys.executable
SLEEP = [PYTHON, "-c", "import time; print('up', flush=True); time.sleep(45)"]


@pytest.fixture(autouse=True, scope="module")
def run_folder() -> Iterator[Path]:
    with labs.run_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def shared(run_folder: Path) -> Iterator[Lab]:
    """One lab for the tests that leave it as it was."""
    labs.require("embedded")
    with labs.lab(LabOptions()) as made:
        yield made


def processes_of(made: Lab) -> dict[str, Process]:
    return made.state().processes


def lives(process: subprocess.Popen[Any]) -> bool:
    return process.poll() is None


@pytest.mark.netns
class TestCommands:
    @pytest.mark.parametrize("kind", [labs.KINDS[0], labs.KINDS[1]])
    def test_up_run_status_down(self, kind: str) -> None:
        labs.require(kind)
        name = labs.new_name()
        up = [
            "up",
            "--name",
            name,
            "--workers",
            "2",
            "--switch",
            kind,
            "--rate",
            "200mbit",
            "--profile",
            "w5",
            "--json",
        ]
        try:
            first = labs.cli(*up)
            assert first.returncode == 0, first.stderr
            there = json.loads(first.stdout)
            again = labs.cli(*up)
            assert again.returncode == 0
            assert json.loads(again.stdout)["processes"] == there["processes"]
            other = labs.cli("up", "--name", name, "--workers", "3", "--switch", kind)
            assert other.returncode == 1
            text = "is up with other options: workers 2, not 3, profile w5, not w34, rate 200mbit, not unlimited; "
            assert text in other.stderr
            assert there["problems"] == []
            assert [worker["answers"] for worker in there["workers"]] == [True, True]
            assert there["options"]["shape"]["rate"] == 200e6
            done = labs.cli("run", "--name", name, "--", PYTHON, str(labs.WORKER), "reduce", "--elements", "1000")
            assert done.returncode == 0, done.stderr
            assert sorted(line[:4] for line in done.stdout.splitlines()) == ["[0] ", "[1] "]
            shown = labs.cli("status", "--name", name)
            assert shown.returncode == 0
            assert f"rank 1: 10.0.0.2 in namespace {Folder(name).prefix}w2, port 2 answers" in shown.stdout
            assert "links: rate 200mbit (each way; faults by none)" in shown.stdout
            assert shown.stdout.count("  frames lost up: 0, down: 0") == 2
        finally:
            down = labs.cli("down", "--name", name)
        assert (down.returncode, down.stdout) == (0, f"lab {name} is removed\n")
        assert labs.traces(Lab(name)) == []
        assert labs.cli("down", "--name", name, "--json").stdout == json.dumps({"name": name, "removed": False}) + "\n"

    def test_exec(self, shared: Lab) -> None:
        show = [PYTHON, "-c", "import os; print(os.environ['RANK'], os.listdir('/proc/self/task') != [])"]
        assert labs.cli("exec", "--name", shared.name, "1", "--", *show).stdout == "1 True\n"
        done = labs.cli("exec", "--name", shared.name, "0", "--", "ip", "-o", "-4", "addr", "show", "eth0")
        assert "10.0.0.1/24" in done.stdout
        links = labs.cli("exec", "--name", shared.name, "switch", "ip", "-o", "link").stdout
        assert f"{shared.folder.prefix}s1" in links
        # The exit code is the command's, and so are its signals.
        assert labs.cli("exec", "--name", shared.name, "0", "--", PYTHON, "-c", "raise SystemExit(7)").returncode == 7
        for place in ("2", "-1", "x"):
            failed = labs.cli("exec", f"--name={shared.name}", "--", place, "true")
            assert failed.returncode != 0
        assert "is no rank of lab" in labs.cli("exec", "--name", shared.name, "2", "--", "true").stderr

    def test_the_controller_is_reached_past_the_switch(self, shared: Lab) -> None:
        done = labs.cli("exec", "--name", shared.name, "0", "--", "ip", "route", "get", "10.255.0.254")
        assert "dev mgmt0" in done.stdout
        code = "import os; from p4reduce.controller_client import ControllerClient as C; "
        code += "c = C(os.environ['P4REDUCE_CONTROLLER']); print(c.status().switch.connected); c.close()"
        assert labs.cli("exec", "--name", shared.name, "1", "--", PYTHON, "-c", code).stdout == "True\n"

    def test_environment_of_a_run(self, shared: Lab) -> None:
        names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"]
        names += ["P4REDUCE_CONTROLLER", "P4REDUCE_ADDRESS"]
        code = f"import os; print(*(os.environ[name] for name in {names}))"
        _, lines, _ = labs.run(shared, PYTHON, "-c", code)
        for rank in (0, 1):
            expected = f"{rank} 2 0 10.0.0.1 29500 eth0 10.255.0.254:50051 10.0.0.{rank + 1}"
            assert lines[rank] == [expected]

    def test_first_failure_ends_the_others(self, shared: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lab_run, "_TERM_SECONDS", 0.5)
        code = "import os, sys, time, subprocess\n"
        # A grandchild in a session of its own, which ignores SIGTERM.
        code += "child = 'import signal, time; signal.signal(15, 1); print(1, flush=True); time.sleep(45)'\n"
        code += "p = subprocess.Popen([sys.executable, '-c', child], start_new_session=True, stdout=subprocess.PIPE)\n"
        code += "p.stdout.readline(); print(p.pid, flush=True)\n"
        code += "sys.stderr.write('no newline at the end')\n"
        code += "sys.exit(9) if os.environ['RANK'] == '1' else time.sleep(45)\n"
        status, lines, errors = labs.run(shared, PYTHON, "-c", code)
        assert status == 9
        assert errors.count("no newline at the end\n") >= 1
        assert "[1] no newline" in errors
        for rank in (0, 1):
            if rank in lines:
                assert Process.of(int(lines[rank][0])) is None
        assert 1 in lines

    def test_killed_by_a_signal(self, shared: Lab) -> None:
        code = "import os; os.kill(os.getpid(), 9) if os.environ['RANK'] == '0' else None"
        assert labs.run(shared, PYTHON, "-c", code)[0] == 128 + 9

    def test_timeout_names_the_ranks(self, shared: Lab) -> None:
        code = "import os, time; time.sleep(45 if os.environ['RANK'] == '1' else 0)"
        with pytest.raises(SwitchError, match=r"ranks \[1\] were not done after 1 s"):
            labs.run(shared, PYTHON, "-c", code, timeout=1.0)

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
    def test_run_is_ended(self, shared: Lab, number: int) -> None:
        command = [*labs.CLI, "run", "--name", shared.name, "--", *SLEEP]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            assert {process.stdout.readline() for _ in range(2)} == {"[0] up\n", "[1] up\n"}
            mine = {one.pid for one in lab_state.inside(shared.state())}
            mine -= {one.pid for one in processes_of(shared).values()}
            assert len(mine) == 2
            process.send_signal(number)
            code = process.wait(30)
        assert code == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[signal.Signals(number)]
        assert labs.wait_until(lambda: not any(Process.of(pid) for pid in mine))

    def test_commands_that_cannot_be(self, shared: Lab) -> None:
        with pytest.raises(UsageError, match="no command to run"):
            labs.run(shared)
        with pytest.raises(UsageError, match="'p4reduce-no-such' is no command on PATH"):
            labs.run(shared, "p4reduce-no-such")
        with pytest.raises(SwitchError, match="there is no lab 'nowhere'"):
            labs.run(Lab("nowhere"), "true")
        with pytest.raises(SwitchError, match="p4reduce lab up --name nowhere"):
            Lab("nowhere").status()


@pytest.mark.netns
class TestKilled:
    def test_everything_killed_and_taken_down(self) -> None:
        labs.require("embedded")
        foreign = f"p4f{os.getpid()}"[:9] + "w1"
        netns.create(foreign)
        try:
            # On exit `lab` takes it down and looks for traces.
            with (
                labs.lab(LabOptions(shape=Shape(delay=0.001), impairer="wire")) as made,
                subprocess.Popen([*netns.command_prefix(foreign), *SLEEP], stdout=subprocess.PIPE) as bystander,
                subprocess.Popen(
                    [*labs.CLI, "exec", "--name", made.name, "0", "--", *SLEEP], stdout=subprocess.PIPE
                ) as inmate,
            ):
                assert bystander.stdout is not None
                assert inmate.stdout is not None
                assert bystander.stdout.readline() == inmate.stdout.readline() == b"up\n"
                assert sorted(processes_of(made)) == ["controller", "switch", "wire"]
                for process in processes_of(made).values():
                    process.signal(signal.SIGKILL)
                assert labs.wait_until(lambda: not any(one.alive for one in processes_of(made).values()))
                problems = made.status()["problems"]
                assert len(problems) == 4, problems
                with pytest.raises(SwitchError, match=r"has ended.*`p4reduce lab down"):
                    made.up(LabOptions(shape=Shape(delay=0.001), impairer="wire"))
                with pytest.raises(SwitchError, match="has ended"):
                    labs.run(made, "true")
                assert made.down()
                assert labs.wait_until(lambda: not lives(inmate))
                assert lives(bystander)
                assert (netns.RUN_DIR / foreign).exists()
                bystander.kill()
        finally:
            netns.remove(foreign)

    @pytest.mark.parametrize("step", ["namespaces", "switch", "controller"])
    def test_up_killed_half_way(self, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
        labs.require("embedded")
        name = labs.new_name()
        # The process that makes the lab is killed right after this step, before it can note what it did.
        code = "import os, sys; from p4reduce_bmv2 import lab, topology\n"
        code += "die = lambda *a, **k: os.kill(os.getpid(), 9)\n"
        code += {
            "namespaces": "topology.Topology.leave = die\n",
            "switch": "lab.Lab._note = die\n",
            "controller": "original = lab.Lab._note\n"
            "lab.Lab._note = lambda s, state, what, pid: die() if what == 'controller' else "
            "original(s, state, what, pid)\n",
        }[step]
        code += f"lab.Lab({name!r}).up(lab.LabOptions())"
        died = subprocess.run([PYTHON, "-c", code], capture_output=True, timeout=60, check=False)
        assert died.returncode == -signal.SIGKILL, died.stderr
        made = Lab(name)
        state = made.state()
        assert state.phase == "starting"
        assert labs.traces(made) != []
        with pytest.raises(SwitchError, match="it was never finished"):
            made.up(LabOptions())
        running = lab_state.inside(state)
        assert bool(running) == (step != "namespaces")
        assert made.down()
        assert labs.traces(made) == []
        assert not any(process.alive for process in running)

    def test_up_that_fails_leaves_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        labs.require("embedded")
        made = Lab(labs.new_name())
        fired = []

        def no_answer(host: Any, *_: Any) -> bool:
            fired.append(host.port)
            return host.port != 2

        monkeypatch.setattr(lab_module.lab_probe, "answers", no_answer)
        with pytest.raises(SwitchError, match="the switch does not answer on port 2:"):
            made.up(LabOptions())
        assert sorted(fired) == [1, 2]
        assert labs.traces(made) == []

    def test_a_name_that_somebody_else_uses(self) -> None:
        labs.require("embedded")
        made = Lab(labs.new_name())
        foreign = f"{made.folder.prefix}w2"
        netns.create(foreign)
        try:
            with pytest.raises(SwitchError, match=f"{foreign} exists and is not known to be a lab's"):
                made.up(LabOptions())
            assert (netns.RUN_DIR / foreign).exists()
        finally:
            netns.remove(foreign)
        assert labs.traces(made) == []

    def test_pids_and_names_that_came_to_mean_others(self) -> None:
        """A state file from before: neither the process nor the namespace that bears the old number is touched."""
        labs.require("embedded")
        folder = Folder(labs.new_name())
        foreign = f"{folder.prefix}w1"
        netns.create(foreign)
        try:
            with subprocess.Popen([*netns.command_prefix(foreign), *SLEEP], stdout=subprocess.PIPE) as bystander:
                assert bystander.stdout is not None
                bystander.stdout.readline()
                found = Process.of(bystander.pid)
                assert found is not None
                state = LabState(folder.name, folder.prefix, LabOptions(workers=1).as_dict(), phase="up")
                state.processes["switch"] = Process(found.pid, found.start - 1)
                state.namespaces[foreign] = lab_state.inode(foreign) + 1
                folder.write(state)
                assert Lab(folder.name).down()
                assert lives(bystander)
                assert (netns.RUN_DIR / foreign).exists()
                bystander.kill()
        finally:
            netns.remove(foreign)
        assert not folder.path.exists()


@pytest.mark.netns
def test_two_labs_side_by_side() -> None:
    with labs.lab(LabOptions()) as one, labs.lab(LabOptions(profile="w5")) as two:
        assert one.folder.prefix != two.folder.prefix
        assert {one.name, two.name} <= set(lab_state.names())
        command = [*labs.CLI, "run", "--name", one.name, "--", PYTHON, str(labs.WORKER), "reduce"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            labs.check(labs.work(two, "reduce"))
            output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        labs.check([json.loads(line[4:]) for line in output.splitlines()])
        assert two.down()
        assert one.status()["problems"] == []


@pytest.mark.netns
class TestWire:
    """The wire alone, between two raw sockets."""

    COUNT = 2000

    def carry(self, shape: Shape, seed: int = 1) -> tuple[list[int], lab_wire.Counters, float]:
        """Send numbered frames up a link; what arrives in its order, the counters, and the first frame's delay."""
        labs.require("embedded")
        with Topology(1, switch_netns=True, wire_netns=True) as topology, tempfile.TemporaryDirectory() as folder:
            counters = Path(folder, "counters")
            host = topology.hosts[0]
            assert topology.wire_netns is not None
            command = netns.command_prefix(topology.wire_netns) + lab_wire.command([1], shape, seed, counters)
            with subprocess.Popen(command) as wire, self.link(host.netns, "eth0") as near:
                with self.link(str(topology.switch_netns), host.interface) as far:
                    delay = self.first(near, far, counters)
                    for number in range(1, self.COUNT + 1):
                        near.send(self.frame(number))
                        if number % 50 == 0:  # no more than its sockets' buffers hold
                            self.settle(counters, number)
                    found = self.numbers(far)
                wire.terminate()
                assert wire.wait(20) == 0
            up, down = lab_wire.read_counters(counters)
            assert down == lab_wire.Counters()
        return found, up, delay

    @staticmethod
    def link(namespace: str, interface: str) -> socket.socket:
        def make() -> socket.socket:
            found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x88B5))
            found.setsockopt(socket.SOL_SOCKET, 33, 8 << 20)
            found.bind((interface, 0x88B5))
            return found

        return netns.call(namespace, make)

    @staticmethod
    def frame(number: int) -> bytes:
        return bytes(12) + b"\x88\xb5" + number.to_bytes(4, "big") + bytes(46)

    def first(self, near: socket.socket, far: socket.socket, counters: Path) -> float:
        """Frame number 0, again until it comes through: the wire takes a moment to start, and may lose it."""
        far.settimeout(0.5)
        for _ in range(60):
            began = time.monotonic()
            near.send(self.frame(0))
            with contextlib.suppress(TimeoutError):
                far.recv(2048)
                return time.monotonic() - began
        raise AssertionError("nothing came through")

    @staticmethod
    def settle(counters: Path, sent: int) -> None:
        assert labs.wait_until(lambda: lab_wire.read_counters(counters)[0].frames > sent)

    @staticmethod
    def numbers(far: socket.socket) -> list[int]:
        found = []
        with contextlib.suppress(TimeoutError):
            while True:
                if number := int.from_bytes(far.recv(2048)[14:18], "big"):
                    found.append(number)
        return found

    def test_nothing_asked_for(self) -> None:
        found, counters, _ = self.carry(Shape())
        assert found == list(range(1, self.COUNT + 1))
        assert (counters.lost, counters.duplicated, counters.reordered, counters.overflow) == (0, 0, 0, 0)

    def test_loss_and_duplicates_are_as_counted(self) -> None:
        found, counters, _ = self.carry(Shape(loss=0.1, duplicate=0.05))
        assert 0.07 < counters.lost / counters.frames < 0.13
        assert 0.03 < counters.duplicated / counters.frames < 0.07
        assert abs(len(found) - (counters.frames - counters.lost + counters.duplicated)) <= 3  # frames number 0
        assert len(found) - len(set(found)) <= counters.duplicated
        assert found == sorted(found)
        again, _, _ = self.carry(Shape(loss=0.1, duplicate=0.05), seed=2)
        assert again != found

    def test_delay_and_reordering(self) -> None:
        found, counters, delay = self.carry(Shape(delay=0.02))
        assert found == list(range(1, self.COUNT + 1))
        assert counters.reordered == 0
        assert delay >= 0.02
        found, counters, _ = self.carry(Shape(delay=0.02, reorder=0.1))
        assert 0.02 < counters.reordered / counters.frames < 0.15
        assert sorted(found) == list(range(1, self.COUNT + 1))
        # Whoever overtook left a smaller number behind it; frames number 0 are not among those found.
        smallest_after = itertools.accumulate(reversed(found), min)
        overtook = sum(number > after for number, after in zip(reversed(found[:-1]), smallest_after, strict=False))
        assert overtook > 0
        assert abs(overtook - counters.reordered) <= 3

    def test_ends_that_are_missing(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        labs.require("embedded")
        handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        assert lab_wire.main(["--counters", str(tmp_path / "c"), "77"]) == 2
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers, "handed back"
        assert "cannot open a77" in capsys.readouterr().err


class TestRefusals:
    def test_without_root(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        assert main(["lab", "up", "--switch", "embedded"]) == 1
        assert "needs root" in (text := capsys.readouterr().err)
        assert "p4reduce demo --switch embedded" in text
        for command in (["down"], ["restart"], ["run", "--", "true"], ["exec", "0", "--", "true"]):
            assert main(["lab", *command]) == 1
            assert "needs root" in capsys.readouterr().err

    def test_without_bmv2(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(lab_module, "find_bmv2", lambda: None)
        assert main(["lab", "up", "--switch", "bmv2"]) == 1
        assert "install the package p4lang-bmv2" in (text := capsys.readouterr().err)
        assert "--switch embedded" in text

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (["--workers", "0"], "a lab has 1 to 64"),
            (["--workers", "65"], "a lab has 1 to 64"),
            (["--rate", "fast"], "'fast' is not a rate such as 100mbit"),
            (["--rate", "10bit"], "below 1 kbit/s"),
            (["--delay", "1"], "'1' is not a time such as 1ms"),
            (["--delay", "11s"], "not within 10 s"),
            (["--loss", "100%"], "a probability below 1"),
            (["--loss", "x"], "'x' is not a share"),
            (["--loss", "nan"], "is not a share"),
            (["--reorder", "1%"], "needs a delay"),
            (["--deadline", "0"], "is not above 0"),
            (["--deadline", "nan"], "is not above 0"),
            (["--name", "A b"], "lab name 'A b'"),
            (["--name", "../x"], "lab name '../x'"),
        ],
    )
    def test_options(self, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["lab", "up", "--switch", "embedded", *arguments]) == 1
        assert text in capsys.readouterr().err

    def test_a_state_file_that_makes_no_sense(self, capsys: pytest.CaptureFixture[str], run_folder: Path) -> None:
        folder = Folder("odd")
        folder.path.mkdir()
        for content, text in (("{", "is damaged"), ('{"version": 99}', "another version")):
            (folder.path / "state.json").write_text(content)
            assert main(["lab", "status", "--name", "odd"]) == 1
            assert text in capsys.readouterr().err
        folder.forget()

    def test_losses(self) -> None:
        rows = {"tbf": {"packets": 9, "bytes": 900, "drops": 0}, "netem": {"packets": 9, "bytes": 900, "drops": 4}}
        assert cli_lab._lost({"tc": rows}) == "4 (netem)"
        assert cli_lab._lost({"tc": {}, "wire": {"lost": 3, "overflow": 2}}) == "3 (wire) + 2 (full queues)"
        assert cli_lab._lost({"tc": {}}) == "0"

    def test_differences(self) -> None:
        there, asked = LabOptions(shape=Shape(rate=1e8, delay=0.001)), LabOptions(3, shape=Shape(1e8, loss=0.001))
        found = differences(there.as_dict(), asked.as_dict())
        assert found == ["workers 2, not 3", "delay 1ms, not 0", "loss 0%, not 0.1%"]
        assert differences(there.as_dict(), there.as_dict()) == []


class TestShape:
    def test_units(self) -> None:
        assert lab_shape.parse_rate("1.5gbit") == 1.5e9
        assert lab_shape.parse_rate("100Mbit") == 100e6
        assert lab_shape.parse_time("250us") == pytest.approx(250e-6)
        assert lab_shape.parse_probability("0.1%") == pytest.approx(0.001)
        assert lab_shape.parse_probability("0.001") == 0.001

    def test_what_tc_is_told(self) -> None:
        shape = Shape(rate=100e6, delay=0.001, loss=0.001, reorder=0.05)
        netem, tbf = (" ".join(words) for words in lab_shape.qdiscs(shape, "eth0", 1500, True))
        assert netem.startswith("qdisc add dev eth0 root handle 1: netem limit 100000 delay 1000us")
        assert netem.endswith("loss 0.100000% reorder 5.000000%")
        assert tbf == ("qdisc add dev eth0 parent 1:1 handle 10: tbf rate 100000000bit burst 12500b limit 1048576b")
        assert "root" in lab_shape.qdiscs(Shape(rate=1e6), "eth0", 9000, False)[0]
        assert lab_shape.qdiscs(Shape(), "eth0", 9000, False) == []

    def test_names_that_share_a_prefix_with_none(self) -> None:
        names = ["lab", "a", "abw1", "test-1", "test-2", "a.b", "a_b", "lab2", "labsw"]
        prefixes = [lab_state.prefix_of(name) for name in names]
        assert len(set(prefixes)) == len(names)
        assert all(len(prefix) <= 9 and prefix.isalnum() for prefix in prefixes)


def test_run_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(lab_state.RUN_DIR_VARIABLE)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert lab_state.run_dir() == Path("/run/p4reduce")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert lab_state.run_dir() == tmp_path / "p4reduce"


def test_only_one_process_changes_a_lab(run_folder: Path) -> None:
    folder = Folder("one")
    with folder.locked(), pytest.raises(SwitchError, match="another process is changing lab 'one'"), folder.locked(0.1):
        pass
    with folder.locked(0.1):
        pass


def test_mark_finds_only_its_own() -> None:
    environment = {**os.environ, lab_run.MARK: "mine"}
    with (
        subprocess.Popen(SLEEP, stdout=subprocess.PIPE, env=environment) as mine,
        subprocess.Popen(SLEEP, stdout=subprocess.PIPE, env={**environment, lab_run.MARK: "mine2"}) as other,
    ):
        assert mine.stdout is not None
        mine.stdout.readline()
        assert [process.pid for process in lab_run._marked("mine")] == [mine.pid]
        assert lives(other)
        mine.kill()
        other.kill()
