# SPDX-License-Identifier: Apache-2.0
"""The fault campaign: plans, verdicts, a short campaign on both switches, and that a bad run is seen for what it is."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p4reduce.errors import UsageError
from p4reduce.proto import controller_pb2 as pb
from p4reduce_bmv2 import netns
from p4reduce_bmv2.campaign import arena as arenas
from p4reduce_bmv2.campaign.messages import Broken, Done
from p4reduce_bmv2.campaign.observer import Observer
from p4reduce_bmv2.campaign.outcome import EXACT, FAILED, HUNG, NAMED, WRONG, judge
from p4reduce_bmv2.campaign.plan import BY_NAME, FAULTS, Expect, Moments, Plan, draw
from p4reduce_bmv2.campaign.relay import Relay

TOOL = Path(__file__).resolve().parents[2] / "tools" / "campaign_faults.py"
SHORT = ("--steps", "60", "--hold", "40")
MARK = "P4REDUCE_CAMPAIGN_TEST"
MOMENTS = Moments(steps=100, hold=80, world_size=4, lease=2.0)


# -- plans --


def test_a_plan_depends_on_seed_and_number_alone() -> None:
    assert draw(7, 12, MOMENTS) == draw(7, 12, MOMENTS)
    plans = {draw(seed, run, MOMENTS) for seed in range(3) for run in range(20)}
    assert len(plans) == 60


def test_every_deck_holds_every_fault_once() -> None:
    size = len(FAULTS)
    names = [draw(1, run, MOMENTS).fault.name for run in range(5 * size)]
    decks = [names[first : first + size] for first in range(0, 5 * size, size)]
    assert all(sorted(deck) == sorted(BY_NAME) for deck in decks)
    assert len({tuple(deck) for deck in decks}) == 5


def test_moments_and_durations_are_within_their_bounds() -> None:
    seen: Counter[str] = Counter()
    for run in range(2000):
        plan = draw(2, run, MOMENTS)
        (stroke,) = plan.strokes
        fault, scale = stroke.fault, MOMENTS.lease if stroke.fault.leases else 1.0
        assert scale * fault.shortest + fault.beyond <= stroke.duration <= scale * fault.longest + fault.beyond
        assert 0 <= plan.step < MOMENTS.latest
        assert 0 <= stroke.victim < MOMENTS.world_size
        assert plan.lost == (stroke.victim if fault.expect is Expect.NAMED else None)
        late = plan.step >= MOMENTS.hold
        seen["late"] += late
        # A worker that dies near the end is no loss to the others, and some may know while others do not.
        assert not (late and fault.expect is Expect.NAMED)
        assert plan.step >= (2 if fault.expect is Expect.NAMED else 0)
        if fault.expect is Expect.NAMED and fault.leases:
            assert stroke.duration > MOMENTS.lease
        seen[f"victim {stroke.victim}"] += 1
        seen[f"bucket {plan.bucket}"] += 1
    assert seen["late"] > 50
    assert min(seen[f"victim {rank}"] for rank in range(4)) > 300
    assert min(seen[f"bucket {number}"] for number in range(4)) > 300


def test_a_second_fault_follows_where_the_first_is_survived() -> None:
    seen = set()
    for run in range(2000):
        first, *others = draw(3, run, MOMENTS, double=True).strokes
        single = draw(3, run, MOMENTS)
        assert first == single.strokes[0]
        assert len(others) == (first.fault.expect is Expect.EXACT)
        for second in others:
            assert 0.0 < second.after < 3.0
            seen.add((first.fault.name, second.fault.name))
    switch = {"switch_kill", "switch_restart", "both_kill"}
    assert not [pair for pair in seen if switch.issuperset(pair)]
    assert {("switch_kill", "controller_kill"), ("controller_kill", "switch_kill"), ("drain", "worker_kill")} <= seen
    assert len(seen) > 30


@pytest.mark.parametrize(("steps", "hold"), [(10, 10), (10, 3), (3, 5)])
def test_a_hold_that_makes_no_sense_is_refused(steps: int, hold: int) -> None:
    with pytest.raises(UsageError, match="cannot be held"):
        Moments(steps, hold, 4, 2.0)


# -- verdicts --

BITS = ["a", "b", "c"]


def member(rank: int, digests: list[str], ending: Any = None, exitcode: int | None = 0) -> Any:
    """What `judge` looks at: `ending` is a Done, a Broken or None."""
    return SimpleNamespace(
        rank=rank,
        digests=digests,
        done=ending if isinstance(ending, Done) else None,
        broken=ending if isinstance(ending, Broken) else None,
        process=SimpleNamespace(exitcode=exitcode),
        settled=ending is not None or exitcode is not None,
    )


def plan_of(name: str, victim: int = 2) -> Plan:
    found = draw(0, 0, MOMENTS, [BY_NAME[name]])
    return replace(found, strokes=(replace(found.strokes[0], victim=victim),))


DONE = Done(0.0, {})


def broken(*ranks: int, ours: bool = True) -> Broken:
    return Broken(0.0, "WorkerLostError", "lost", ours, ranks)


def verdict(name: str, *members: Any) -> tuple[str, list[str]]:
    return judge(plan_of(name), members, BITS, 3)


def all_done() -> list[Any]:
    return [member(rank, BITS, DONE) for rank in range(3)]


def test_the_same_bits_on_all_ranks_are_exact() -> None:
    assert verdict("switch_kill", *all_done()) == (EXACT, [])


@pytest.mark.parametrize("digests", [["a", "b", "x"], ["a", "x"], ["x", "b", "c"]])
def test_other_bits_are_wrong_whatever_comes_after_them(digests: list[str]) -> None:
    for ending in (DONE, broken(2), None):
        found, why = verdict("worker_kill", *all_done()[:2], member(2, digests, ending, -9))
        assert found == WRONG
        assert "rank 2 has other bits after step" in why[0]


def test_without_an_outcome_it_hangs() -> None:
    found, why = verdict("drain", *all_done()[:2], member(2, ["a"], None, None))
    assert found == HUNG
    assert "rank 2 after 1 steps" in why[0]


def test_an_error_where_none_was_due_is_a_failure() -> None:
    found, why = verdict("switch_kill", *all_done()[:2], member(2, ["a"], broken()))
    assert found == FAILED
    assert len(why) == 1


def test_too_few_steps_are_no_success() -> None:
    assert verdict("switch_kill", *all_done()[:2], member(2, ["a", "b"], DONE))[0] == FAILED


def test_survivors_must_name_the_victim_and_nobody_else() -> None:
    dead = member(2, ["a"], None, -9)
    good = [member(0, ["a", "b"], broken(2)), member(1, ["a"], broken(2))]
    assert verdict("worker_kill", *good, dead) == (NAMED, [])
    for wrong in (broken(), broken(0), broken(1, 2), broken(2, ours=False), DONE):
        found, why = verdict("worker_kill", good[0], member(1, ["a"], wrong), dead)
        assert found == FAILED
        assert len(why) == 1
        assert why[0].startswith("rank 1")


def test_a_death_that_nobody_is_told_of_is_seen() -> None:
    assert verdict("worker_kill", *all_done()[:2], member(2, BITS, None, -9)) == (EXACT, [])
    found, why = verdict("worker_kill", *all_done()[:2], member(2, ["a"], None, -9))
    assert (found, why) == (EXACT, ["rank 2 was lost and nobody was told"])


def test_a_victim_that_comes_back_must_not_believe_that_all_is_well() -> None:
    survivors = [member(0, ["a"], broken(2)), member(1, ["a"], broken(2))]
    assert verdict("worker_stop_long", *survivors, member(2, ["a"], broken()))[0] == NAMED
    assert verdict("worker_stop_long", *survivors, member(2, BITS, DONE))[0] == FAILED
    assert verdict("worker_stop_long", *survivors, member(2, ["a"], broken(ours=False)))[0] == FAILED


# -- leaks --


@pytest.mark.parametrize(
    ("pools", "found"),
    [
        ([(0, 8, "a"), (8, 56, "")], ["8 slots are leased to a"]),
        ([(0, 64, "")], []),
        ([(0, 8, ""), (9, 55, "")], ["the pool at slot 9 should begin at 8"]),
        ([(0, 8, ""), (7, 57, "")], ["the pool at slot 7 should begin at 8"]),
        ([(0, 8, ""), (8, 55, "")], ["the pools end at slot 63, the switch has 64"]),
        ([], ["the pools end at slot 0, the switch has 64"]),
    ],
)
def test_pools_that_overlap_or_leave_a_gap_are_leaks(pools: list[tuple[int, int, str]], found: list[str]) -> None:
    reply = pb.PoolsReply(slots=64, pools=[pb.Pool(base=base, size=size, job=job) for base, size, job in pools])
    with Observer("127.0.0.1:1", "127.0.0.1:1", "w5") as observer:
        status = pb.StatusReply(switch=pb.SwitchStatus(connected=True))
        observer._controller = SimpleNamespace(Pools=lambda *_, **__: reply, Status=lambda *_, **__: status)
        observer.surplus = lambda: []
        assert observer.leaks() == found
        status.switch.connected = False
        assert observer.leaks() == ["the controller has no session with the switch"]


# -- the relay --


def test_a_relay_falls_silent_and_goes_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as undo:
        relay = Relay(("127.0.0.1", 0), server.getsockname()[:2])
        undo.callback(relay.close)
        host, _, port = relay.address.rpartition(":")
        near = undo.enter_context(socket.create_connection((host, int(port)), 10.0))
        far = undo.enter_context(server.accept()[0])
        for end in (near, far):
            end.settimeout(10.0)
        near.sendall(b"one")
        assert far.recv(10) == b"one"
        relay.silence()
        near.sendall(b"two")
        deadline = time.monotonic() + 10.0
        while not relay.held:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        far.setblocking(False)
        with pytest.raises(BlockingIOError):
            far.recv(10)
        far.settimeout(10.0)
        relay.resume()
        assert far.recv(10) == b"two"
        far.sendall(b"three")
        assert near.recv(10) == b"three"
        far.close()
        assert near.recv(10) == b""
        # Nobody listens any more: a connection is accepted and closed, as by a host whose program is gone.
        server.close()
        with socket.create_connection((host, int(port)), 10.0) as late:
            late.settimeout(10.0)
            assert late.recv(10) == b""
    assert not [thread for thread in threading.enumerate() if thread.name == "relay-back"]


# -- campaigns --


@contextlib.contextmanager
def nothing_stays() -> Iterator[dict[str, str]]:
    """An environment for a command after which no process of it may be left. Its temporary folder goes with it."""
    mark = uuid.uuid4().hex
    # Not pytest's own: the path of a socket has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="p4t-") as folder:
        yield {**os.environ, MARK: mark, "TMPDIR": folder}
    deadline = time.monotonic() + 10.0
    while left := marked(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def marked(mark: str) -> dict[str, str]:
    """Command lines of the processes that have the mark in their environment, by pid."""
    entry = f"{MARK}={mark}".encode()
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if entry in (folder / "environ").read_bytes().split(b"\0"):
                    found[folder.name] = (folder / "cmdline").read_text().replace("\0", " ")
    return found


def campaign(*arguments: str, status: int = 0, timeout: float = 300.0) -> tuple[dict[str, Any], str]:
    """Run the tool; its JSON and what it wrote to standard error."""
    with nothing_stays() as environment:
        done = subprocess.run(
            [sys.executable, str(TOOL), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    assert done.returncode == status, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
    return report, done.stderr


def check(report: dict[str, Any], names: list[str], errors: str) -> None:
    """A campaign of each of these faults once has gone well."""
    named = sum(BY_NAME[name].expect is Expect.NAMED for name in names)
    bad = {name: report[name] for name in ("hung", "wrong", "leaked", "bad_runs")}
    assert bad == {"hung": 0, "wrong": 0, "leaked": 0, "bad_runs": []}, errors
    assert (report["runs"], report["faults_fired"]) == (len(names), len(names))
    assert (report["exact"], report["named_error"]) == (len(names) - named, named)
    for name in names:
        assert re.search(rf"run [0-9]+: {name} .*step", errors), name


@pytest.mark.slow
def test_every_fault_once_on_the_embedded_switch() -> None:
    # Two campaigns at once: mostly they wait.
    halves = [list(BY_NAME)[::2], list(BY_NAME)[1::2]]

    def run(names: list[str]) -> None:
        words = [word for name in names for word in ("--fault", name)]
        report, errors = campaign("--runs", str(len(names)), "--seed", "1", *SHORT, *words)
        check(report, names, errors)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, halves))


@pytest.mark.slow
@pytest.mark.bmv2
@pytest.mark.netns
@pytest.mark.skipif(shutil.which("simple_switch_grpc") is None, reason="simple_switch_grpc is not on PATH")
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
class TestBmv2:
    def test_some_faults(self) -> None:
        names = ["switch_kill", "controller_kill", "worker_kill", "cut_off_long", "loss_burst"]
        before = spaces()
        words = [word for name in names for word in ("--fault", name)]
        report, errors = campaign("--switch", "bmv2", "--runs", str(len(names)), *SHORT, *words)
        check(report, names, errors)
        assert report["switch"] == "bmv2"
        assert spaces() <= before

    def test_namespaces_of_a_killed_campaign_go_with_the_next(self) -> None:
        with nothing_stays() as environment:
            command = [sys.executable, str(TOOL), "--switch", "bmv2", "--runs", "1"]
            process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
            assert process.stderr is not None
            assert "undisturbed" in process.stderr.readline()
            prefix = f"pc{process.pid}"
            assert f"{prefix}sw" in spaces()
            process.kill()
            process.communicate()
        assert f"{prefix}w4" in spaces()
        assert prefix in arenas.remove_leftovers(4)
        assert not any(name.startswith(prefix) for name in spaces())


def spaces() -> set[str]:
    """Namespaces of campaigns."""
    return {path.name for path in netns.RUN_DIR.glob("pc*")}


def test_a_run_over_its_limit_is_hung_and_leaves_stacks(tmp_path: Path) -> None:
    report, errors = campaign(
        "--runs", "1", "--fault", "link_cut_long", "--limit", "0.8", "--logs", str(tmp_path), status=1
    )
    assert (report["runs"], report["hung"], report["exact"], report["bad_runs"]) == (1, 1, 0, [0])
    assert "had no outcome at the run's limit" in errors
    again = re.search(r"again: python tools/campaign_faults.py (.*)", errors)
    assert again is not None
    assert "--seed 0 --only 0" in again[1]
    assert "--fault link_cut_long" in again[1]
    for rank in range(4):
        assert "most recent call first" in (tmp_path / "run0" / f"rank{rank}.log").read_text()
    # Switch and controller were ended with their stacks as well.
    assert "Fatal Python error: Aborted" in (tmp_path / "controller-0.log").read_text()
    assert json.loads((tmp_path / "run0" / "outcome.json").read_text())["verdict"] == "hung"


WRONG_REFERENCE = """
import json
from p4reduce_bmv2.campaign.campaign import Campaign, Options
from p4reduce_bmv2.campaign.observer import Observer
from p4reduce_bmv2.campaign.plan import BY_NAME
campaign = Campaign(Options(runs=1, faults=[BY_NAME["worker_stop_short"]], logs={logs!r}))
campaign.reference = ["0" * 32] * 100
print(json.dumps(campaign.execute()))
"""


def test_bits_that_differ_from_the_undisturbed_run_are_wrong(tmp_path: Path) -> None:
    script = f"from pathlib import Path{WRONG_REFERENCE.format(logs=tmp_path)}".replace("PosixPath", "Path")
    with nothing_stays() as environment:
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["runs"], report["wrong"], report["bad_runs"]) == (1, 1, [0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_campaign_leaves_nothing(number: signal.Signals) -> None:
    with nothing_stays() as environment:
        process = subprocess.Popen(
            [sys.executable, str(TOOL), "--runs", "1000"], env=environment, stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        assert "undisturbed" in process.stderr.readline()
        assert len(marked(environment[MARK])) > 2
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)


@pytest.mark.parametrize(
    "arguments",
    [("--runs", "0"), ("--lease", "0"), ("--fault", "flood"), ("--ring", "data"), ("--hold", "100"), ("--limit", "-1")],
)
def test_bad_options_are_refused(arguments: tuple[str, ...]) -> None:
    _, errors = campaign(*arguments, status=2, timeout=60.0)
    assert errors.strip()


# -- churn --


def test_three_jobs_share_the_switch_while_a_fourth_comes_and_goes() -> None:
    report, errors = campaign("--churn", "--seconds", "4", "--seed", "3")
    assert (report["wrong"], report["hung"], report["leaked"], report["problems"]) == (0, 0, 0, []), errors
    assert report["cycles"] >= 1
    assert report["buckets"] > 10
