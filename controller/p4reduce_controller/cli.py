# SPDX-License-Identifier: Apache-2.0
"""`p4reducectl`: look at a controller. Exit codes: 0 well, 1 refused, 2 wrong usage, 3 controller unreachable."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from rich.console import Console
from rich.table import Table
from rich.text import Text

from p4reduce import __version__
from p4reduce.proto import controller_pb2 as pb
from p4reduce.proto import controller_pb2_grpc

DEFAULT_CONTROLLER = "127.0.0.1:50051"
ENVIRONMENT = "P4REDUCE_CONTROLLER"
EXIT_REFUSED = 1
EXIT_USAGE = 2
MAX_TIMEOUT = 86400.0
EXIT_UNREACHABLE = 3
_UNREACHABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_STYLES = {
    "running": "green",
    "reporting": "green",
    "joining": "yellow",
    "joined": "yellow",
    "leaving": "cyan",
    "left": "cyan",
    "failed": "bold red",
    "lost": "bold red",
}
Output = Callable[[Any], None]


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--controller",
        metavar="ADDR:PORT",
        default=os.environ.get(ENVIRONMENT) or DEFAULT_CONTROLLER,
        help=f"the controller's address (default: ${ENVIRONMENT}, or {DEFAULT_CONTROLLER})",
    )
    common.add_argument("--json", action="store_true", help="for programs instead of people")
    common.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="default: %(default)s")
    parser = argparse.ArgumentParser(prog="p4reducectl", description="Look at a p4reduce controller.")
    parser.add_argument("--version", action="version", version=f"p4reduce {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("status", parents=[common], help="controller, switch, and one line for every job")
    jobs = commands.add_parser("jobs", parents=[common], help="every rank of every job, and the switch's counters")
    jobs.add_argument("job", nargs="?", default="", help="only this job")
    commands.add_parser("pools", parents=[common], help="which job leases which slots")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code."""
    options = _parser().parse_args(argv)
    problem = _problem(options)
    if problem is not None:
        print(f"p4reducectl: {problem}", file=sys.stderr)
        return EXIT_USAGE
    with grpc.insecure_channel(options.controller, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = controller_pb2_grpc.ControllerStub(channel)  # type: ignore[no-untyped-call]
        try:
            if options.command == "pools":
                document = _pools(stub.Pools(pb.PoolsRequest(), timeout=options.timeout))
            else:
                job = getattr(options, "job", "")
                document = _status(stub.Status(pb.StatusRequest(job=job), timeout=options.timeout))
        except grpc.RpcError as error:
            if error.code() in _UNREACHABLE:
                print(
                    f"p4reducectl: no controller at {options.controller} within {options.timeout:g} s: start one with "
                    f"`p4reduce-controller serve`, or name it with --controller or {ENVIRONMENT}",
                    file=sys.stderr,
                )
                return EXIT_UNREACHABLE
            print(f"p4reducectl: {error.code().name}: {error.details()}", file=sys.stderr)
            return EXIT_REFUSED
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        shows: dict[str, Callable[[Console, dict[str, Any]], None]] = {
            "status": show_status,
            "jobs": show_jobs,
            "pools": show_pools,
        }
        shows[options.command](Console(), document)
    return 0


def _problem(options: argparse.Namespace) -> str | None:
    """What is wrong with options that argparse lets through."""
    if not options.controller.strip():
        return f"--controller is empty: write ADDRESS:PORT, for example {DEFAULT_CONTROLLER}"
    if not 0 < options.timeout <= MAX_TIMEOUT:
        return f"--timeout {options.timeout} makes no sense: write seconds above 0, up to {MAX_TIMEOUT:.0f}"
    return None


def _status(reply: pb.StatusReply) -> dict[str, Any]:
    """The reply as plain data; the names are the protocol's."""
    switch = reply.switch
    return {
        "server_version": reply.server_version,
        "uptime_seconds": reply.uptime_seconds,
        "switch": {
            "address": switch.address,
            "device_id": switch.device_id,
            "connected": switch.connected,
            "primary": switch.primary,
            "profile": switch.profile,
            "slots": switch.slots,
        },
        "jobs": [_job(job) for job in reply.jobs],
    }


def _job(job: pb.JobStatus) -> dict[str, Any]:
    return {
        "job": job.job,
        "state": job.state,
        "epoch": job.epoch,
        "world_size": job.world_size,
        "incarnation": job.incarnation,
        "pool_base": job.pool_base,
        "pool_size": job.pool_size,
        "reason": job.reason,
        "counters": dict(sorted(job.counters.items())),
        "workers": [
            {
                "rank": worker.member.rank,
                "host": worker.member.host,
                "ip": worker.member.ip,
                "udp_port": worker.member.udp_port,
                "switch_port": worker.member.switch_port,
                "state": worker.state,
                "submitted": worker.submitted,
                "completed": worker.completed,
                "silent_seconds": worker.silent_seconds,
            }
            for worker in job.workers
        ],
    }


def _pools(reply: pb.PoolsReply) -> dict[str, Any]:
    pools = [{"base": pool.base, "size": pool.size, "job": pool.job, "epoch": pool.epoch} for pool in reply.pools]
    return {"slots": reply.slots, "pools": pools}


def _state(name: str) -> Text:
    return Text(name, style=_STYLES.get(name, ""))


def show_status(console: Console, document: dict[str, Any]) -> None:
    """Controller, switch, and one line for every job."""
    switch = document["switch"]
    connected = Text("connected", "green") if switch["connected"] else Text("not connected", "bold red")
    line = Text.assemble(
        f"controller {document['server_version']}, up {document['uptime_seconds']:.0f} s; switch {switch['address']} ",
        connected,
        f", profile {switch['profile']}, {switch['slots']} slots",
    )
    console.print(line)
    if not document["jobs"]:
        console.print("no jobs")
        return
    table = Table("job", "state", "epoch", "ranks", "incarnation", "slots", "buckets", "reason")
    for job in document["jobs"]:
        ends = [worker["completed"] for worker in job["workers"]] or [0]
        slots = f"{job['pool_base']}..{job['pool_base'] + job['pool_size'] - 1}" if job["pool_size"] else ""
        table.add_row(
            Text(job["job"]),
            _state(job["state"]),
            str(job["epoch"] or ""),
            f"{len(job['workers'])}/{job['world_size']}",
            str(job["incarnation"]),
            slots,
            str(min(ends)),
            Text(job["reason"]),
        )
    console.print(table)


def show_jobs(console: Console, document: dict[str, Any]) -> None:
    """Every rank of every job."""
    if not document["jobs"]:
        console.print("no jobs")
    for job in document["jobs"]:
        head = Text.assemble(f"{job['job']}: ", _state(job["state"]), f", epoch {job['epoch']}" if job["epoch"] else "")
        console.print(head)
        if job["reason"]:
            console.print(Text(job["reason"]))
        table = Table("rank", "host", "address", "port", "state", "submitted", "completed", "silent")
        for worker in job["workers"]:
            table.add_row(
                str(worker["rank"]),
                Text(worker["host"]),
                f"{worker['ip']}:{worker['udp_port']}",
                str(worker["switch_port"]),
                _state(worker["state"]),
                str(worker["submitted"]),
                str(worker["completed"]),
                f"{worker['silent_seconds']:.1f} s",
            )
        console.print(table)
        if job["counters"]:
            console.print("switch: " + ", ".join(f"{name} {value}" for name, value in job["counters"].items()))


def show_pools(console: Console, document: dict[str, Any]) -> None:
    """Which job leases which slots."""
    table = Table("slots", "job", "epoch")
    for pool in document["pools"]:
        held = Text(pool["job"]) if pool["job"] else Text("free", "dim")
        table.add_row(f"{pool['base']}..{pool['base'] + pool['size'] - 1}", held, str(pool["epoch"] or ""))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
