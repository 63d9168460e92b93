# SPDX-License-Identifier: Apache-2.0
"""`p4reducectl drain, undrain, mode, policy, evict`: what is asked of the controller, what is said, exit codes."""

from __future__ import annotations

import json

import grpc
import pytest
from helpers import cli_servicer
from helpers.cli_servicer import EPOCH, Fake, job, policy, run

from p4reduce.proto import controller_pb2 as pb
from p4reduce_controller import cli_operate

no_settings = cli_servicer.no_settings
fake = cli_servicer.fake


def leased(*jobs: str) -> pb.PoolsReply:
    pools = [pb.Pool(base=64 * index, size=64, job=name, epoch=EPOCH) for index, name in enumerate(jobs)]
    return pb.PoolsReply(slots=1024, pools=[*pools, pb.Pool(base=64 * len(jobs), size=1024 - 64 * len(jobs))])


def test_drain_says_who_moves(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.servicer.replies["Drain"] = pb.DrainReply(moving=["a", "[b]"])
    assert run(fake, "drain", "s1") == 0
    ((name, request),) = fake.servicer.asked
    assert (name, request.switch, request.undrain) == ("Drain", "s1", False)
    assert capsys.readouterr().out.splitlines() == [
        "switch s1 is drained: no epoch begins on it",
        "moving to the ring path: a, [b]",
    ]


def test_drain_with_jobs_that_stay(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.servicer.replies["Drain"] = pb.DrainReply(moving=["a"], staying=["b", "c", "d"])
    fake.servicer.jobs = [job("b", mode="require", ring=True), job("c", ring=False), job("d", mode="auto", ring=True)]
    assert run(fake, "drain", "s1") == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "staying on the switch (without a ring path): c: wait for their end, or end them with" in shown
    assert "staying on the switch (ending): d: ranks have left already" in shown
    assert "staying on the switch (mode require): b: `p4reducectl mode JOB auto` lets one move" in shown
    assert run(fake, "drain", "s1", "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert document == {"switch": "s1", "drained": True, "moving": ["a"], "staying": ["b", "c", "d"]}


def test_drain_says_so_even_where_nobody_says_why_jobs_stay(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.servicer.replies["Drain"] = pb.DrainReply(staying=["b"])
    fake.servicer.refuse["Status"] = (grpc.StatusCode.INTERNAL, "no")
    assert run(fake, "drain", "s1") == 1
    assert "staying on the switch (reason unknown): b: `p4reducectl jobs` shows" in capsys.readouterr().out


def test_drain_of_an_idle_switch(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.servicer.replies["Drain"] = pb.DrainReply()
    assert run(fake, "drain", "s1") == 0
    assert "no job was on it" in capsys.readouterr().out


def test_drain_waits_until_the_switch_is_empty(
    fake: Fake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch that ends keeps its slots until its entries are gone: also then it is on the switch."""
    monkeypatch.setattr(cli_operate, "POLL_SECONDS", 0.001)
    fake.servicer.replies["Drain"] = pb.DrainReply(moving=["a"], staying=["b"])
    fake.servicer.pools = [leased("a", "b"), leased("b"), leased("b"), leased()]
    assert run(fake, "drain", "s1", "--wait", "60") == 0
    assert [name for name, _ in fake.servicer.asked] == ["Drain", "Status", "Pools", "Pools", "Pools", "Pools"]
    assert "it can be stopped" in capsys.readouterr().out


def test_drain_that_waits_in_vain(
    fake: Fake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_operate, "POLL_SECONDS", 0.001)
    fake.servicer.replies["Drain"] = pb.DrainReply(moving=["a"], staying=["b"])
    fake.servicer.pools = [leased("a", "b"), leased("b")]
    assert run(fake, "drain", "s1", "--wait", "0.05") == 1
    assert "still on it after 0." in capsys.readouterr().out
    assert run(fake, "drain", "s1", "--wait", "0.05", "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["switch", "drained", "moving", "staying", "left", "waited_seconds"]
    assert document["left"] == ["b"]
    assert 0.05 <= document["waited_seconds"] < 60.0


def test_undrain(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.servicer.replies["Drain"] = pb.DrainReply(moving=["a"])
    assert run(fake, "undrain", "s1") == 0
    ((_, request),) = fake.servicer.asked
    assert request.undrain
    assert capsys.readouterr().out.splitlines() == [
        "switch s1 takes jobs again",
        "moving back to it, as soon as it has proved itself: a",
    ]
    assert run(fake, "undrain", "s1", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"switch": "s1", "drained": False, "moving": ["a"], "staying": []}


@pytest.mark.parametrize("command", ["drain", "undrain"])
def test_a_switch_that_is_not_there(fake: Fake, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    fake.servicer.refuse["Drain"] = (grpc.StatusCode.NOT_FOUND, "no switch 's2': there is s1")
    assert run(fake, command, "s2") == 1
    assert capsys.readouterr().err == "p4reducectl: NOT_FOUND: no switch 's2': there is s1\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["drain", ""], "'' is no switch's name: `p4reducectl switches` lists them"),
        (["undrain", "a\x07"], "'a\\x07' is no switch's name"),
        (["drain", "s1", "--wait", "0"], "--wait 0.0 makes no sense"),
        (["drain", "s1", "--wait", "nan"], "--wait nan makes no sense"),
        (["policy", "--deadline", "-1"], "--deadline -1.0 makes no sense: write seconds above 0"),
        (["policy", "--min", "0"], "--min 0.0 makes no sense: write seconds above 0"),
        (["policy", "--silent", "inf"], "--silent inf makes no sense: write seconds above 0"),
        (["policy", "--early-resend", "-1"], "--early-resend -1 makes no sense: write a number from 0 to 65536"),
        (["policy", "--window", "65537"], "--window 65537 makes no sense: write a number from 0 to 65536"),
    ],
)
def test_arguments_that_make_no_sense(
    fake: Fake, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(fake, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"p4reducectl: {text}")
    assert fake.servicer.asked == []


@pytest.mark.parametrize("mode", ["auto", "require", "off", "ring"])
def test_mode(fake: Fake, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    effective = "off" if mode == "ring" else mode
    fake.servicer.replies["SetMode"] = pb.SetModeReply(mode=effective, before="auto")
    assert run(fake, "mode", "[train]", mode) == 0
    ((_, request),) = fake.servicer.asked
    assert (request.job, request.mode) == ("[train]", mode)
    said = " already" if mode == "auto" else ", was auto"
    assert capsys.readouterr().out == f"[train]: mode {effective}{said}\n"
    assert run(fake, "mode", "[train]", mode, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"job": "[train]", "mode": effective, "before": "auto"}


def test_mode_of_a_job_without_a_ring(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.servicer.refuse["SetMode"] = (grpc.StatusCode.FAILED_PRECONDITION, "job 'a' has no ring path")
    assert run(fake, "mode", "a", "off") == 1
    assert capsys.readouterr().err == "p4reducectl: FAILED_PRECONDITION: job 'a' has no ring path\n"


def test_the_policy_of_a_job_is_read_without_changing_it(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.servicer.jobs = [job("a", policy=policy(deadline_seconds=7.5, window=9))]
    assert run(fake, "policy", "a", "--json") == 0
    assert [name for name, _ in fake.servicer.asked] == ["Status"]
    document = json.loads(capsys.readouterr().out)
    assert document["job"] == "a"
    assert (document["policy"]["deadline_seconds"], document["policy"]["window"]) == (7.5, 9)
    assert run(fake, "policy", "nobody") == 1
    assert "no job 'nobody'" in capsys.readouterr().err


def test_the_policy_of_jobs_to_come(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(fake, "policy") == 0
    ((name, request),) = fake.servicer.asked
    assert name == "SetPolicy"
    assert request == pb.SetPolicyRequest()
    shown = capsys.readouterr().out
    assert shown.startswith("policy of jobs to come\n")
    rows = {line.split()[0]: line.split()[1] for line in shown.splitlines()[2:]}
    assert rows == {
        "initial_seconds": "0.05",
        "min_seconds": "0.01",
        "max_seconds": "0.5",
        "deadline_seconds": "60",
        "early_resend": "3",
        "silent_seconds": "0.5",
        "fallback_seconds": "1",
        "window": "0",
    }


def test_every_field_of_the_policy_can_be_set(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {"initial": 0.125, "min": 0.0625, "max": 0.75, "deadline": 30.0, "silent": 0.25, "fallback": 2.0}
    arguments = [text for name, value in seconds.items() for text in (f"--{name}", str(value))]
    assert run(fake, "policy", "a", *arguments, "--early-resend", "5", "--window", "16") == 0
    ((_, request),) = fake.servicer.asked
    expected = {f"{name}_seconds": value for name, value in seconds.items()} | {"early_resend": 5, "window": 16}
    assert {field.name: value for field, value in request.policy.ListFields()} == expected
    assert {field.name for field in request.policy.DESCRIPTOR.fields} == set(expected)
    assert list(request.zero) == []
    assert capsys.readouterr().out.startswith("changed: policy of a\n")


def test_zero_is_not_the_same_as_not_given(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(fake, "policy", "a", "--early-resend", "0", "--window", "0", "--json") == 0
    ((_, request),) = fake.servicer.asked
    assert sorted(request.zero) == ["early_resend", "window"]
    assert request.policy == pb.RetransmissionPolicy()
    assert json.loads(capsys.readouterr().out)["policy"]["early_resend"] == 0


def test_a_policy_that_is_refused(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.servicer.refuse["SetPolicy"] = (grpc.StatusCode.INVALID_ARGUMENT, "minimum <= initial <= maximum")
    assert run(fake, "policy", "a", "--min", "9") == 1
    assert capsys.readouterr().err == "p4reducectl: INVALID_ARGUMENT: minimum <= initial <= maximum\n"


def test_evict(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(fake, "evict", "a") == 0
    assert capsys.readouterr().out == f"a: ended (epoch {EPOCH}); its workers are told\n"
    assert run(fake, "evict", "a", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"job": "a", "epoch": EPOCH}
    assert [request.job for _, request in fake.servicer.asked] == ["a", "a"]
