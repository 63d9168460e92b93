# SPDX-License-Identifier: Apache-2.0
"""Traces: simulations as capture files, read back by scapy and by `p4reduce decode`; links that go down."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p4reduce import cli, constants
from p4reduce.core.bucket import Barrier, Reduction
from p4reduce.errors import ConfigError
from p4reduce.sim.adapter import SWITCH_MAC, from_frame, mac_of, to_frame
from p4reduce.sim.byhand import direct, finish
from p4reduce.sim.clock import VirtualClock
from p4reduce.sim.network import Datagram, Faults, Link, LinkCounters
from p4reduce.sim.runner import Scenario, Simulation
from p4reduce.sim.trace import PcapWriter, Trace

BAD = Faults(loss=0.1, duplicate=0.1, reorder=0.2)


def run(path: Path | None, seed: int = 1, up: Faults = BAD) -> tuple[Simulation, Trace]:
    """A job of two ranks, one bucket and a barrier, recorded."""
    simulation = Simulation(Scenario(2, up=up, down=BAD, seed=seed))
    writer = PcapWriter(path) if path is not None else None
    trace = Trace(simulation, writer)
    data = [np.random.default_rng(rank).standard_normal(3000, dtype=np.float32) for rank in range(2)]
    outs = [np.empty_like(vector) for vector in data]
    for rank in range(2):
        simulation.submit(rank, Reduction(data[rank], outs[rank]))
        simulation.submit(rank, Barrier())
    finish(simulation)
    if writer is not None:
        writer.close()
    assert [out.tobytes() for out in outs] == [direct(data).tobytes()] * 2
    return simulation, trace


def test_a_trace_is_read_by_decode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("scapy", reason="needs the extra scapy")
    path = tmp_path / "run.pcap"
    simulation, trace = run(path)
    assert cli.main(["decode", "--json", str(path)]) == 0
    frames = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    up, down = simulation.counters(simulation.up), simulation.counters(simulation.down)
    kinds = [frame["kind"] for frame in frames]
    assert kinds.count("contribute") == up.sent == sum(core.counters.frames_sent for core in simulation.cores)
    assert kinds.count("result") == down.delivered
    assert len(frames) == trace.frames == up.sent + down.delivered
    assert all(frame["check_ok"] and not frame["problems"] for frame in frames)
    assert [frame["time"] for frame in frames] == sorted(frame["time"] for frame in frames)
    assert frames[-1]["time"] == pytest.approx(simulation.clock.now, abs=1e-3)
    assert {frame["source"] for frame in frames} == {"10.0.0.1:40000", "10.0.0.2:40001", "10.0.0.254:20532"}


def test_a_trace_shows_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("scapy", reason="needs the extra scapy")
    path = tmp_path / "damaged.pcap"
    simulation = Simulation(Scenario(1, down=Faults(corrupt=0.1), seed=3))
    data = np.ones(20_000, np.float32)
    simulation.submit(0, Reduction(data, np.empty_like(data)))
    with PcapWriter(path) as writer:
        Trace(simulation, writer)
        finish(simulation)
    assert cli.main(["decode", str(path)]) == 0
    # The payload of OR frames has no check of its own.
    shown = capsys.readouterr().out.count("PROBLEM: check failed")
    assert 0 < shown <= simulation.cores[0].counters.integrity <= simulation.counters(simulation.down).corrupted


def test_recording_changes_nothing_and_runs_repeat(tmp_path: Path) -> None:
    (simulation, trace), (other, recorded) = run(None), run(tmp_path / "a.pcap")
    assert trace.fingerprint == recorded.fingerprint
    assert simulation.clock.now == other.clock.now
    run(tmp_path / "b.pcap")
    assert (tmp_path / "a.pcap").read_bytes() == (tmp_path / "b.pcap").read_bytes()
    assert run(None, seed=2)[1].fingerprint != trace.fingerprint


def test_a_trace_passes_on_to_the_tap_before_it() -> None:
    simulation = Simulation(Scenario(1))
    seen: list[Datagram] = []

    def tap(_time: float, _rank: int, _upwards: bool, datagram: Datagram) -> None:
        seen.append(datagram)

    simulation.tap = tap
    trace = Trace(simulation)
    simulation.submit(0, Barrier())
    finish(simulation)
    assert len(seen) == trace.frames == 2


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(0, 10**15), st.integers(0, 2**32 - 1), st.integers(0, 65535), st.binary(max_size=100)),
        max_size=8,
    )
)
def test_a_capture_holds_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, int, bytes]]
) -> None:
    utils = pytest.importorskip("scapy.utils", reason="needs the extra scapy")
    path = tmp_path_factory.mktemp("pcap") / "some.pcap"
    frames = [
        to_frame(Datagram(ip, port, 7, constants.UDP_PORT, data), mac_of(ip), SWITCH_MAC) for _, ip, port, data in rows
    ]
    with PcapWriter(path) as writer:
        for (microseconds, *_), frame in zip(rows, frames, strict=True):
            writer.write(microseconds / 1e6 % 2**31, frame)
        assert writer.frames == len(rows)
    with utils.RawPcapReader(str(path)) as reader:
        found = [data for data, _ in reader]
    assert found == frames
    for (_, ip, port, data), frame in zip(rows, found, strict=True):
        assert from_frame(frame, SWITCH_MAC) == Datagram(ip, port, 7, constants.UDP_PORT, data)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        PcapWriter(tmp_path / "nowhere" / "x.pcap")


# Links that go down


def pass_through(faults: Faults, seed: str = "1", count: int = 4000) -> tuple[list[int], LinkCounters]:
    """Numbers of the datagrams, one every 100 microseconds, that arrive."""
    clock = VirtualClock()
    arrived: list[int] = []
    link = Link(clock, lambda d: arrived.append(int.from_bytes(d.data, "big")), seed=seed, faults=faults)
    for number in range(count):
        datagram = Datagram(1, 2, 3, 4, number.to_bytes(4, "big"))
        clock.at(number * 1e-4, lambda datagram=datagram: link.send(datagram))  # type: ignore[misc]
    while clock.step():
        pass
    return arrived, link.counters


def test_a_link_that_goes_down_loses_all_that_is_sent_meanwhile() -> None:
    arrived, counters = pass_through(Faults(outages=50.0, outage=0.005))
    missing = sorted(set(range(4000)) - set(arrived))
    runs = 1 + sum(later - sooner > 1 for sooner, later in itertools.pairwise(missing))
    assert counters.cut == len(missing) == 4000 - counters.delivered
    assert counters.outages >= runs > 5
    assert counters.lost == 0
    # 0.4 s at 50 outages a second, less those that begin while another lasts.
    assert 8 <= runs <= 30
    assert 0.05 < len(missing) / 4000 < 0.5


def test_outages_repeat_with_their_seed_and_leave_other_faults_alone() -> None:
    assert pass_through(Faults(outages=50.0)) == pass_through(Faults(outages=50.0))
    assert pass_through(Faults(outages=50.0)) != pass_through(Faults(outages=50.0), seed="2")
    # Rare outages far beyond the run change nothing that the seed draws besides.
    lossy = pass_through(Faults(loss=0.2, duplicate=0.1, reorder=0.1))
    assert pass_through(Faults(loss=0.2, duplicate=0.1, reorder=0.1, outages=1e-9)) == lossy


def test_a_job_survives_links_that_go_down() -> None:
    simulation, _ = run(None, up=Faults(outages=300.0, outage=0.02))
    up = simulation.counters(simulation.up)
    assert min(up.outages, up.cut) > 0


@pytest.mark.parametrize("wrong", [{"outages": -1.0}, {"outages": float("nan")}, {"outages": 1.0, "outage": 0.0}])
def test_outages_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Faults(**wrong)
