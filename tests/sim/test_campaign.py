# SPDX-License-Identifier: Apache-2.0
"""The campaign of random jobs: a short one on all switches, and what it says when a switch goes wrong."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers import engine_bmv2
from helpers.bmv2_engine import Bmv2Engine

from p4reduce import constants, pipeline
from p4reduce.decode import decode_pcap
from p4reduce.errors import ConfigError
from p4reduce.packetize import weights
from p4reduce.sim.adapter import EngineSwitch
from p4reduce.sim.campaign import Campaign, draw_scenario, run_seed
from p4reduce.sim.network import Datagram, Faults
from p4reduce.sim.switch import Count, Membership, ReferenceSwitch, SwitchModel
from p4reduce.wire import HEADER, Kind, Op, Profile, headers_from_bytes
from p4reduce.wire import profile as lookup_profile

TOOL = Path(__file__).resolve().parents[2] / "tools" / "campaign_sim.py"


@functools.cache
def program(profile: str) -> Any:
    return json.loads(pipeline.find(profile).json.read_text())


def engine(profile: Profile) -> SwitchModel:
    module = pytest.importorskip("p4reduce_bmv2.embedded.engine", reason="the embedded engine is not installed")
    return EngineSwitch(module.Engine(program(profile.name)))


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("campaign_sim", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Broken:
    """The reference switch, but something is done to the answers to every `every`-th contribution that has any."""

    def __init__(self, profile: Profile, every: int, spoil: Callable[[Datagram], Datagram | None]) -> None:
        self._inner = ReferenceSwitch(profile)
        self._every = every
        self._spoil = spoil
        self._seen = 0

    def admit(self, job: Membership) -> None:
        self._inner.admit(job)

    def revoke(self, epoch: int) -> None:
        self._inner.revoke(epoch)

    def count(self, stats: int, event: Count) -> int:
        return self._inner.count(stats, event)

    def process(self, port: int, datagram: Datagram) -> list[tuple[int, Datagram]]:
        answers = self._inner.process(port, datagram)
        if not answers:
            return answers
        self._seen += 1
        if self._seen < self._every:
            return answers
        spoiled = ((to, self._spoil(answer)) for to, answer in answers)
        return [(to, answer) for to, answer in spoiled if answer is not None]


def one_more(answer: Datagram) -> Datagram:
    """Adds one to the first lane of a sum, and to its check what makes it look right."""
    record = headers_from_bytes(answer.data).copy()
    if record["kind"][0] != Kind.RESULT or record["op"][0] != Op.ADD:
        return answer
    payload = bytearray(answer.data[constants.HEADER_BYTES :])
    first = (int.from_bytes(payload[:8], "big") + 1) % (1 << 64)
    payload[:8] = first.to_bytes(8, "big")
    with np.errstate(over="ignore"):
        record["check"] = record["check"].astype(np.uint64) + weights(len(payload) // 8)[:1]
    return answer._replace(data=record.tobytes() + bytes(payload))


def test_the_spoiler_changes_what_it_says() -> None:
    record = np.zeros(1, dtype=HEADER)
    record["kind"], record["op"] = Kind.RESULT, Op.ADD
    changed = one_more(Datagram(1, 2, 3, 4, record.tobytes() + bytes(256))).data
    assert changed[32:40] == (1).to_bytes(8, "big")
    assert int.from_bytes(changed[16:24], "big") == int(weights(32)[0])


@pytest.mark.parametrize("make_switch", [ReferenceSwitch, engine])
def test_every_sum_is_exact(make_switch: Callable[[Profile], SwitchModel]) -> None:
    """A short run of the campaign: 5 % loss, 5 % copies, 20 % reordering, both ways."""
    reports = [run_seed(seed, Campaign(rounds=150), make_switch) for seed in range(8)]
    assert [report.failure for report in reports] == [None] * 8
    assert all(report.rounds >= 150 for report in reports)
    for report in reports:
        network = report.network
        assert min(network.lost, network.duplicated, network.delayed, network.overtaken, report.resent) > 0
    assert sum(report.stale for report in reports) > 20
    assert sum(report.repeats for report in reports) > 100
    assert len({report.world_size for report in reports}) >= 3


def test_both_switches_give_the_same_run() -> None:
    campaign = Campaign(rounds=100)
    reference, compiled = run_seed(11, campaign), run_seed(11, campaign, engine)
    assert reference.as_dict() == compiled.as_dict()


@pytest.mark.bmv2
def test_bmv2_gives_the_same_run() -> None:
    """The real switch behind the virtual network, every frame waited for (helpers/bmv2_engine.py)."""
    if not engine_bmv2.available():
        pytest.skip("simple_switch_grpc is not installed")
    campaign = Campaign(rounds=100)
    switch = Bmv2Engine()
    try:
        for seed in (2, 11):
            switch.restart()
            found = run_seed(seed, campaign, lambda _: EngineSwitch(switch))
            assert found.failure is None
            assert found.as_dict() == run_seed(seed, campaign).as_dict()
            assert found.stale
            assert found.repeats
    finally:
        switch.close()


def test_links_that_go_down_and_damage_change_no_bit() -> None:
    bad = {"loss": 0.05, "duplicate": 0.05, "reorder": 0.2, "outages": 100.0, "outage": 0.01}
    campaign = Campaign(rounds=200, up=Faults(**bad), down=Faults(**bad, corrupt=0.02))
    reports = [run_seed(seed, campaign) for seed in range(3)]
    assert [report.failure for report in reports] == [None] * 3
    assert sum(report.network.outages for report in reports) > 10
    assert sum(report.network.cut for report in reports) > 20
    assert sum(report.network.corrupted for report in reports) > 20


def test_a_wrong_sum_is_found_and_its_seed_replays_exactly(tmp_path: Path) -> None:
    campaign = Campaign(rounds=400)
    make_switch: Callable[[Profile], SwitchModel] = lambda profile: Broken(profile, 60, one_more)  # noqa: E731
    assert run_seed(2, campaign).failure is None
    first = run_seed(2, campaign, make_switch)
    assert first.failure is not None
    assert first.failure.kind == "wrong"
    found = re.search(r"^bucket \d+ \((sum|mean) of \d+ float32\), rank 0, element (\d+): ", first.failure.message)
    assert found is not None
    assert int(found[2]) % lookup_profile("w5").lanes(32) == 0, "the first lane of a frame"
    path = tmp_path / "seed.pcap"
    again = run_seed(2, campaign, make_switch, path)
    assert again.as_dict() == first.as_dict()
    frames = list(decode_pcap(path))
    assert len(frames) == first.frames
    # The lie cannot be seen in the frame, whose check is right: that is why sums are compared with the exact ones.
    assert all(frame["check_ok"] for frame in frames)


def test_a_switch_that_stops_answering_is_found() -> None:
    report = run_seed(2, Campaign(rounds=400, limit=1.0), lambda profile: Broken(profile, 60, lambda _: None))
    assert report.failure is not None
    assert report.failure.kind == "hung"
    assert "not done" in report.failure.message


def test_a_switch_that_damages_every_sum_is_found() -> None:
    def damage(answer: Datagram) -> Datagram:
        return answer._replace(data=answer.data[:-1] + bytes([answer.data[-1] ^ 1]))

    report = run_seed(2, Campaign(rounds=400), lambda profile: Broken(profile, 60, damage))
    assert report.failure is not None
    assert report.failure.kind == "failed"
    assert "IntegrityError" in report.failure.message


def test_seeds_differ_and_repeat() -> None:
    campaign = Campaign(rounds=30)
    prints = [run_seed(seed, campaign).fingerprint for seed in (1, 2, 1)]
    assert prints[0] == prints[2] != prints[1]
    assert len({draw_scenario(seed, campaign) for seed in range(50)}) == 50


def test_a_campaign_needs_rounds() -> None:
    with pytest.raises(ConfigError):
        Campaign(rounds=0)


def test_the_tool_prints_one_line_of_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.pcap"
    assert tool().main(["--seeds", "4", "--rounds", "40", "--switch", "engine", "--pcap", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    found = json.loads(out)
    assert (found["seeds"], found["wrong"], found["hung"], found["failed"]) == (1, 0, 0, 0)
    assert found["rounds"] >= 40
    assert found["switch"] == "engine"
    assert found["frames"] == len(list(decode_pcap(path)))


def test_the_tool_names_a_seed_that_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    module = tool()
    monkeypatch.setitem(module.SWITCHES, "reference", lambda profile: Broken(profile, 20, one_more))
    assert module.main(["--seeds", "1-2", "--rounds", "80", "--jobs", "1"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["failing_seeds"] == [1, 2]
    assert "seed 2: wrong: bucket" in printed.err
    assert "python tools/campaign_sim.py --seeds 2 --rounds 80 --switch reference" in printed.err


@pytest.mark.parametrize(
    "arguments", [["--seeds", "x"], ["--seeds", "5-3"], ["--rounds", "0"], ["--loss", "1.5"], ["--pcap", "x.pcap"]]
)
def test_the_tool_refuses(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        tool().main(arguments)
    assert caught.value.code == 2
