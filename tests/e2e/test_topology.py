# SPDX-License-Identifier: Apache-2.0
"""The lab of namespaces and veth pairs: what it makes, that it works as a network, and that nothing stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from p4reduce.errors import SwitchError
from p4reduce_bmv2 import netns
from p4reduce_bmv2.offloads import read_offloads
from p4reduce_bmv2.topology import Topology

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
lab = [pytest.mark.netns, needs_root]


def interfaces(namespace: str | None = None) -> set[str]:
    def names() -> set[str]:
        # A thread's own view, where /sys would show the namespace it was mounted in.
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
        return {line.split(":")[0].strip() for line in lines}

    return netns.call(namespace, names) if namespace else names()


def left_behind(prefix: str) -> list[str]:
    names = [path.name for path in netns.RUN_DIR.iterdir()] if netns.RUN_DIR.exists() else []
    return [name for name in [*names, *interfaces()] if name.startswith(prefix)]


@pytest.mark.netns
@needs_root
class TestLab:
    @pytest.mark.parametrize("switch_netns", [False, True])
    def test_links(self, switch_netns: bool) -> None:
        with Topology(2, mtu=9000, switch_netns=switch_netns) as topology:
            place = topology.switch_netns
            assert (place is not None) == switch_netns
            assert set(topology.interfaces.values()) <= interfaces(place)
            assert list(topology.interfaces) == [1, 2]
            for host in topology.hosts:
                assert interfaces(host.netns) == {"lo", "eth0"}
                self.check_host(topology, host)
        assert left_behind(topology.prefix) == []

    def check_host(self, topology: Topology, host: Any) -> None:
        def run(*command: str) -> str:
            done = topology.run(host, command, capture_output=True, text=True, check=True, timeout=10)
            return str(done.stdout)

        link = run("ip", "-o", "link", "show", "eth0")
        assert "mtu 9000" in link
        assert "state UP" in link
        assert host.mac in link
        assert f"inet {host.ip}/24" in run("ip", "-o", "-4", "addr", "show", "eth0")
        assert run("ip", "-6", "addr", "show", "eth0") == ""
        neighbours = {line.split()[0]: line for line in run("ip", "neigh").splitlines()}
        others = {other.ip: other.mac for other in topology.hosts if other is not host}
        others[topology.switch_ip] = topology.switch_mac
        assert set(neighbours) == set(others)
        for address, mac in others.items():
            assert mac in neighbours[address]
            assert "PERMANENT" in neighbours[address]

    def test_offloads_are_off_on_both_sides(self) -> None:
        with Topology(1) as topology:
            host = topology.hosts[0]
            for offloads in (
                read_offloads(host.interface),
                netns.call(host.netns, lambda: read_offloads("eth0")),
            ):
                assert offloads.keys() >= {"tx", "sg", "tso", "gso", "gro"}
                assert not any(offloads.values())

    def test_switch_side_is_silent(self) -> None:
        with Topology(1) as topology:
            shown = subprocess.run(
                ["ip", "-o", "addr", "show", topology.hosts[0].interface], capture_output=True, text=True, check=True
            )
            assert shown.stdout == ""
            link = subprocess.run(
                ["ip", "-o", "link", "show", topology.hosts[0].interface], capture_output=True, text=True, check=True
            )
            assert "NOARP" in link.stdout

    @pytest.mark.parametrize("step", ["first namespace", "second link", "inside"])
    def test_nothing_stays_after_an_exception(self, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
        topology = Topology(2)
        fired = []
        if step != "inside":
            monkeypatch.setattr(topology, "_make_link", self.failing(topology, step, fired))
        with pytest.raises(ZeroDivisionError), topology:
            self.fail("inside", fired)
        assert fired == [step]
        assert left_behind(topology.prefix) == []

    @staticmethod
    def failing(topology: Topology, step: str, fired: list[str]) -> Any:
        original = topology._make_link

        def make(pyroute2: Any, undo: Any, host: Any) -> None:
            if step == "second link":
                original(pyroute2, undo, host)
            if step == "first namespace" or host.port == 2:
                TestLab.fail(step, fired)

        return make

    @staticmethod
    def fail(step: str, fired: list[str]) -> None:
        fired.append(step)
        raise ZeroDivisionError

    def test_two_labs_at_once(self) -> None:
        with Topology(1) as first, Topology(1) as second:
            assert first.prefix != second.prefix
            assert first.hosts[0].ip == second.hosts[0].ip

    def test_a_name_that_is_taken(self) -> None:
        with Topology(1) as topology:
            twin = Topology(1, prefix=topology.prefix)
            with pytest.raises(SwitchError, match="cannot add network namespace"), twin:
                pass
            assert interfaces(topology.hosts[0].netns) == {"lo", "eth0"}

    def test_process_ends_with_the_lab(self) -> None:
        with Topology(1) as topology:
            process = topology.popen(
                topology.hosts[0],
                [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"],
                stdout=subprocess.PIPE,
            )
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            assert process.poll() is None
        assert process.returncode is not None

    def test_loopback_works_inside(self) -> None:
        with Topology(1) as topology:
            code = "import socket; s=socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); " + (
                "socket.create_connection(s.getsockname(), 5).close()"
            )
            topology.run(topology.hosts[0], [sys.executable, "-c", code], check=True, timeout=20)


@pytest.mark.netns
@needs_root
class TestAdditions:
    def test_management_links_lead_past_the_switch(self) -> None:
        code = "import socket; s = socket.socket(); s.bind(('{ip}', 5000)); s.listen(); print('up', flush=True); "
        code += "print(s.accept()[1][0])"
        with Topology(2, switch_netns=True, management=True) as topology:
            assert topology.switch_netns is not None
            for host in topology.hosts:
                assert interfaces(host.netns) == {"lo", "eth0", "mgmt0"}
            with subprocess.Popen(
                [
                    *netns.command_prefix(topology.switch_netns),
                    sys.executable,
                    "-c",
                    code.format(ip=topology.management_ip),
                ],
                stdout=subprocess.PIPE,
                text=True,
            ) as server:
                assert server.stdout is not None
                assert server.stdout.readline() == "up\n"
                connect = f"import socket; socket.create_connection(('{topology.management_ip}', 5000), 5).close()"
                topology.run(topology.hosts[1], [sys.executable, "-c", connect], check=True, timeout=20)
                assert server.communicate(timeout=20)[0].strip() == topology.hosts[1].management_ip
        assert left_behind(topology.prefix) == []

    def test_management_needs_a_namespace_for_the_switch(self) -> None:
        with pytest.raises(SwitchError, match="it needs one of its own"):
            Topology(1, management=True)

    def test_wire_ends_are_silent_and_without_offloads(self) -> None:
        with Topology(2, switch_netns=True, wire_netns=True) as topology:
            assert topology.wire_netns is not None
            assert interfaces(topology.wire_netns) == {"lo", "a1", "b1", "a2", "b2"}
            for end in ("a1", "b2"):
                offloads = netns.call(topology.wire_netns, lambda name=end: read_offloads(name))
                assert offloads
                assert not any(offloads.values())
            for host in topology.hosts:
                assert interfaces(host.netns) == {"lo", "eth0"}
        assert left_behind(topology.prefix) == []

    def test_stays_when_told_and_is_removed_by_another(self) -> None:
        arguments: dict[str, Any] = {"switch_netns": True, "management": True, "wire_netns": True}
        with Topology(2, **arguments) as topology:
            topology.leave()
        assert set(left_behind(topology.prefix)) == set(topology.namespaces)
        same = Topology(2, prefix=topology.prefix, **arguments)
        spared = topology.hosts[1].netns
        same.remove(lambda name: name != spared)
        assert left_behind(topology.prefix) == [spared]
        same.remove()
        assert left_behind(topology.prefix) == []
        same.remove()


@pytest.mark.netns
@needs_root
def test_call_in_a_namespace_brings_errors_back() -> None:
    with Topology(1) as topology, pytest.raises(ZeroDivisionError):
        netns.call(topology.hosts[0].netns, lambda: 1 // 0)


def test_unknown_namespace() -> None:
    with pytest.raises(SwitchError, match="no network namespace 'p4rnowhere'"):
        netns.call("p4rnowhere", lambda: None)


def test_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SwitchError, match="needs root"), Topology(1):
        pass


@pytest.mark.parametrize(
    ("workers", "options"), [(0, {}), (201, {}), (1, {"prefix": "much too long"}), (1, {"prefix": ""})]
)
def test_numbers_that_make_no_sense(workers: int, options: dict[str, Any]) -> None:
    with pytest.raises(SwitchError):
        Topology(workers, **options)


@pytest.mark.parametrize(("profile", "mtu"), [("w5", 1500), ("w34", 9000)])
def test_mtu_follows_the_profile(profile: str, mtu: int) -> None:
    assert Topology(1, profile=profile).mtu == mtu


def test_hosts_file() -> None:
    tomllib = pytest.importorskip("tomllib")
    topology = Topology(2, profile="w5")
    parsed = tomllib.loads(topology.hosts_toml("127.0.0.1:9559"))
    assert parsed["switch"]["ip"] == topology.switch_ip
    assert parsed["switch"]["profile"] == "w5"
    assert [(host["ip"], host["port"]) for host in parsed["host"]] == [("10.0.0.1", 1), ("10.0.0.2", 2)]
    assert parsed["host"][0]["mac"] == topology.hosts[0].mac
