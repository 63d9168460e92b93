# SPDX-License-Identifier: Apache-2.0
"""The commands of `p4reducectl` that change something: drain, undrain, mode, policy, evict."""

from __future__ import annotations

import argparse
import threading
import time
from typing import Any

import grpc
from rich.console import Console

from p4reduce.errors import ConfigError
from p4reduce.proto import controller_pb2 as pb
from p4reduce_controller import cli_documents as documents
from p4reduce_controller.cli_client import EXIT_REFUSED, MAX_TIMEOUT, Client
from p4reduce_controller.cli_output import aside, grid, job_name, make_console, names, note, print_json, safe

MODES = ("auto", "require", "off", "ring")
POLL_SECONDS = 0.2
_MAX_COUNT = 1 << 16
_SECONDS = {
    "initial": "the timeout before the first round-trip sample",
    "min": "the shortest timeout",
    "max": "the longest timeout, back-off included",
    "deadline": "a bucket without any result for so long is given up",
    "silent": "workers report that results stay away after so long",
    "fallback": "such a silence of a bucket that all ranks handed in ends the switch path",
}
_COUNTS = {
    "early-resend": "send again at once after so many later results; 0 turns it off",
    "window": "slots that a worker uses at once at most, in new epochs; 0: all it leased",
}
_STAYING_ADVICE = {
    "without a ring path": "wait for their end, or end them with `p4reducectl evict JOB`",
    "mode require": "`p4reducectl mode JOB auto` lets one move",
    "reason unknown": "`p4reducectl jobs` shows their modes, and which have no ring path",
    "ending": "ranks have left already: wait for their end, or end them with `p4reducectl evict JOB`",
}


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add these commands to the parser."""
    drain = _add(commands, common, "drain", run_drain, "move all jobs to the ring path, for maintenance of a switch")
    drain.add_argument("switch", help="its name: see `p4reducectl switches`")
    drain.add_argument(
        "--wait", type=float, metavar="SECONDS", help="until nothing of any job is on the switch, at most so long"
    )
    undrain = _add(commands, common, "undrain", run_undrain, "let jobs use the switch again")
    undrain.add_argument("switch", help="its name")
    mode = _add(commands, common, "mode", run_mode, "choose the path of a job")
    mode.add_argument("job")
    mode.add_argument(
        "mode",
        choices=MODES,
        help="auto: the switch while it works, else the ring; require: the switch or an error; off, ring: the ring",
    )
    policy = _add(commands, common, "policy", run_policy, "show or change when workers send again and give up")
    policy.add_argument("job", nargs="?", help="without it: the default of jobs to come")
    for name, text in _SECONDS.items():
        policy.add_argument(f"--{name}", type=float, metavar="SECONDS", help=text)
    for name, text in _COUNTS.items():
        policy.add_argument(f"--{name}", type=int, metavar="N", help=text)
    evict = _add(commands, common, "evict", run_evict, "end a job; its workers get an error that says so")
    evict.add_argument("job")


def _add(commands: Any, common: argparse.ArgumentParser, name: str, run: Any, text: str) -> Any:
    command = commands.add_parser(name, parents=[common], help=text, description=text)
    command.set_defaults(run=run)
    return command


def _switch_name(text: str) -> str:
    if not text.strip() or not text.isprintable() or len(text) > 256:
        raise ConfigError(f"'{safe(text)}' is no switch's name: `p4reducectl switches` lists them")
    return text


def run_drain(client: Client, options: argparse.Namespace) -> int:
    """`drain`. 1 when a job stays on the switch; with `--wait`, when something is left on it at the end."""
    name, wait = _switch_name(options.switch), options.wait
    if wait is not None and not 0 < wait <= MAX_TIMEOUT:
        raise ConfigError(f"--wait {wait} makes no sense: write seconds above 0, up to {MAX_TIMEOUT:.0f}")
    reply = client.call("Drain", pb.DrainRequest(switch=name))
    document: dict[str, Any] = {
        "switch": name,
        "drained": True,
        "moving": list(reply.moving),
        "staying": list(reply.staying),
    }
    if not options.json:
        _show_drain(make_console(), document, _why_staying(client, document["staying"]))
    if wait is not None:
        document["left"], document["waited_seconds"] = _wait_until_empty(client, wait)
        if not options.json:
            _show_left(make_console(), document)
    if options.json:
        print_json(document)
    return EXIT_REFUSED if document.get("left", document["staying"]) else 0


def _why_staying(client: Client, staying: list[str]) -> dict[str, list[str]]:
    """The jobs that a drain leaves on the switch, by why."""
    found: dict[str, list[str]] = {}
    if not staying:
        return found
    try:
        jobs = {job.job: job for job in client.call("Status", pb.StatusRequest()).jobs}
    except grpc.RpcError:  # the drain itself has been done, and that is what has to be said
        return {"reason unknown": staying}
    for name in staying:
        job = jobs.get(name, pb.JobStatus())
        why = "without a ring path" if not job.ring else "mode require" if job.mode == "require" else "ending"
        found.setdefault(why, []).append(name)
    return found


def _show_drain(console: Console, document: dict[str, Any], staying: dict[str, list[str]]) -> None:
    console.print(f"switch {safe(document['switch'])} is drained: no epoch begins on it")
    if document["moving"]:
        note(console, "moving to the ring path", names(document["moving"]))
    for why, jobs in staying.items():
        note(console, f"staying on the switch ({why})", f"{names(jobs)}: {_STAYING_ADVICE[why]}", "yellow")
    if not document["moving"] and not document["staying"]:
        aside(console, "no job was on it")


def _wait_until_empty(client: Client, seconds: float) -> tuple[list[str], float]:
    """Which jobs still hold slots of the switch after at most so long, and how long it took.

    An epoch keeps its slots until its last entry is gone, so free slots mean an empty switch.
    """
    begin = time.monotonic()
    pause = threading.Event()
    while True:
        reply = client.call("Pools", pb.PoolsRequest())
        left = sorted({pool.job for pool in reply.pools if pool.job})
        passed = time.monotonic() - begin
        if not left or passed >= seconds:
            return left, passed
        pause.wait(min(POLL_SECONDS, seconds - passed))


def _show_left(console: Console, document: dict[str, Any]) -> None:
    if document["left"]:
        note(console, f"still on it after {document['waited_seconds']:.1f} s", names(document["left"]), "red")
    else:
        aside(console, f"empty after {document['waited_seconds']:.1f} s: it can be stopped")


def run_undrain(client: Client, options: argparse.Namespace) -> int:
    """`undrain`."""
    name = _switch_name(options.switch)
    reply = client.call("Drain", pb.DrainRequest(switch=name, undrain=True))
    moving, staying = list(reply.moving), list(reply.staying)
    if options.json:
        print_json({"switch": name, "drained": False, "moving": moving, "staying": staying})
        return 0
    console = make_console()
    console.print(f"switch {safe(name)} takes jobs again")
    if moving:
        note(console, "moving back to it, as soon as it has proved itself", names(moving))
    return 0


def run_mode(client: Client, options: argparse.Namespace) -> int:
    """`mode`."""
    job = job_name(options.job)
    reply = client.call("SetMode", pb.SetModeRequest(job=job, mode=options.mode))
    if options.json:
        print_json({"job": job, "mode": reply.mode, "before": reply.before})
    else:
        before = f", was {safe(reply.before)}" if reply.before != reply.mode else " already"
        make_console().print(f"{safe(job)}: mode {safe(reply.mode)}{before}")
    return 0


def run_policy(client: Client, options: argparse.Namespace) -> int:
    """`policy`: change what is given, and show all of it."""
    job = "" if options.job is None else job_name(options.job)
    request = pb.SetPolicyRequest(job=job)
    _fill(request, options)
    changed = bool(request.zero) or request.HasField("policy")
    if job and not changed:
        # Looking at a job needs no operator's token.
        (found,) = client.call("Status", pb.StatusRequest(job=job)).jobs
        policy = documents.policy(found.policy)
    else:
        policy = documents.policy(client.call("SetPolicy", request).policy)
    if options.json:
        print_json({"job": job, "policy": policy})
        return 0
    console = make_console()
    console.print(f"{'changed: ' if changed else ''}policy of {safe(job) if job else 'jobs to come'}")
    table = grid("field", ">value", "meaning", folds="meaning")
    texts = {f"{name}_seconds": text for name, text in _SECONDS.items()}
    texts |= {name.replace("-", "_"): text for name, text in _COUNTS.items()}
    for name, value in policy.items():
        table.add_row(name, f"{value:g}", texts[name])
    console.print(table)
    return 0


def _fill(request: pb.SetPolicyRequest, options: argparse.Namespace) -> None:
    """Put the options into the request. ConfigError for numbers that make no sense."""
    for name in _SECONDS:
        seconds = getattr(options, name)
        if seconds is None:
            continue
        if not 0 < seconds <= MAX_TIMEOUT:
            raise ConfigError(f"--{name} {seconds} makes no sense: write seconds above 0, up to {MAX_TIMEOUT:.0f}")
        setattr(request.policy, f"{name}_seconds", seconds)
    for name in _COUNTS:
        field = name.replace("-", "_")
        count = getattr(options, field)
        if count is None:
            continue
        if not 0 <= count <= _MAX_COUNT:
            raise ConfigError(f"--{name} {count} makes no sense: write a number from 0 to {_MAX_COUNT}")
        if count:
            setattr(request.policy, field, count)
        else:
            request.zero.append(field)


def run_evict(client: Client, options: argparse.Namespace) -> int:
    """`evict`."""
    job = job_name(options.job)
    reply = client.call("Evict", pb.EvictRequest(job=job))
    if options.json:
        print_json({"job": job, "epoch": reply.epoch})
    else:
        make_console().print(f"{safe(job)}: ended (epoch {reply.epoch}); its workers are told")
    return 0
