# SPDX-License-Identifier: Apache-2.0
"""Which lab the demo takes, and what it writes for the controller and for torchrun."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from p4reduce.demo import labs
from p4reduce.demo.processes import ChildFailed, Children
from p4reduce.demo.report import DemoOptions
from p4reduce.errors import ConfigError, SwitchError
from p4reduce_controller import hosts


def test_auto_says_why_it_is_not_bmv2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    notes: list[str] = []
    assert labs.choose(DemoOptions(), tmp_path, notes.append).kind == "embedded"
    assert notes == ["Using the embedded switch, because simple_switch_grpc is not on PATH."]
    with pytest.raises(ConfigError, match="simple_switch_grpc is not on PATH; --switch embedded works anywhere"):
        labs.choose(DemoOptions("bmv2"), tmp_path, notes.append)
    assert labs.choose(DemoOptions("embedded"), tmp_path, notes.append).kind == "embedded"
    assert len(notes) == 1


def test_auto_takes_bmv2_where_it_can(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in labs.bmv2_obstacle(DemoOptions())
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "loss" in labs.bmv2_obstacle(DemoOptions(loss=0.1))
    assert labs.bmv2_obstacle(DemoOptions()) == ""
    lab = labs.choose(DemoOptions(workers=4), tmp_path, pytest.fail)
    assert lab.kind == "bmv2"
    places = lab.places()
    assert [place.namespace for place in places] == [f"pd{os.getpid()}w{number}" for number in (1, 2, 3, 4)]
    assert [place.torchrun[-1] for place in places] == [f"--node-rank={rank}" for rank in range(4)]
    assert all("--master-addr=10.0.0.1" in place.torchrun for place in places)


def test_the_controller_accepts_the_hosts_file() -> None:
    switch = {"grpc": "127.0.0.1:9559", "udp_ports": {"1": "127.0.0.1:4001", "2": "127.0.0.1:4002"}}
    parsed = hosts.parse(labs.embedded_hosts(switch, "w5"))
    same = hosts.Hosts.embedded("127.0.0.1:9559", {1: ("127.0.0.1", 4001), 2: ("127.0.0.1", 4002)}, profile="w5")
    assert (parsed.switch, parsed.hosts) == (same.switch, same.hosts)
    assert parsed.loopback


def test_announcements_are_read_when_they_are_whole(tmp_path: Path) -> None:
    ready, log = tmp_path / "ready.json", tmp_path / "controller.log"
    assert labs.read_json(ready) is None
    ready.write_text('{"grpc": ')
    assert labs.read_json(ready) is None
    ready.write_text('{"grpc": "a"}')
    assert labs.read_json(ready) == {"grpc": "a"}
    log.write_text('INFO {not it}\n{"ready": tru')
    assert labs.announced_address(log) == ""
    log.write_text("INFO starting\n" + json.dumps({"ready": True, "address": "127.0.0.1:7"}) + "\nINFO more\n")
    assert labs.announced_address(log) == "127.0.0.1:7"


def test_waiting_ends_with_what_was_waited_for_or_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Children(tmp_path) as children:
        assert labs.wait_for(lambda: "here", children, time.monotonic() + 10, "it") == "here"
        children.start(
            "talker", [sys.executable, "-c", "import time; print('still busy', flush=True); time.sleep(100)"]
        )
        log = tmp_path / "talker.log"
        assert labs.wait_for(lambda: "still busy" in log.read_text(), children, time.monotonic() + 20, "it")
        with pytest.raises(SwitchError, match=r"(?s)the switch did not come up in time.*talker:.*still busy"):
            labs.wait_for(lambda: None, children, time.monotonic(), "the switch")
        children.start("dier", ["false"])
        with pytest.raises(ChildFailed, match="dier ended with status 1"):
            labs.wait_for(lambda: None, children, time.monotonic() + 20, "the switch")


def test_leftovers_are_those_of_demos_that_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labs, "alive", lambda pid: pid == 10)
    for name in ("pd10w1", "pd11w1", "pd11w12", "pd11s1", "pdw1", "p4r11w1", "pd11w", "xpd11w1"):
        (tmp_path / name).touch()
    assert sorted(labs._leftovers(tmp_path, "w")) == ["pd11w1", "pd11w12"]
    assert labs._leftovers(tmp_path, "s") == ["pd11s1"]
    assert labs._leftovers(tmp_path / "none", "w") == []
