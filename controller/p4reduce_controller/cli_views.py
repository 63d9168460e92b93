# SPDX-License-Identifier: Apache-2.0
"""The commands of `p4reducectl` that only look: status, jobs, pools, counters, switches."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.text import Text

from p4reduce.proto import controller_pb2 as pb
from p4reduce_controller import cli_documents as documents
from p4reduce_controller.cli_client import EXIT_REFUSED, Client
from p4reduce_controller.cli_output import (
    ago,
    counts,
    grid,
    job_name,
    make_console,
    milliseconds,
    note,
    print_json,
    safe,
    slots_text,
    state,
)

Document = dict[str, Any]


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add these commands to the parser."""
    for name, run, text in (
        ("status", run_status, "controller, switch, and one line for every job"),
        ("jobs", run_jobs, "every rank of every job"),
        ("counters", run_counters, "what the switch and the workers have counted, for every job"),
        ("pools", run_pools, "which job leases which slots"),
        ("switches", run_switches, "the switches and how they are"),
    ):
        command = commands.add_parser(name, parents=[common], help=text, description=text)
        command.set_defaults(run=run)
        if name in ("jobs", "counters"):
            command.add_argument("job", nargs="?", help="only this job")


def run_status(client: Client, options: argparse.Namespace) -> int:
    """`status`. 1 when the controller is not connected to its switch."""
    document = _status(client)
    _show(options, document, show_status)
    return 0 if document["switch"]["connected"] else EXIT_REFUSED


def run_jobs(client: Client, options: argparse.Namespace) -> int:
    """`jobs`. 1 when the job asked for has failed."""
    document = _status(client, options.job)
    _show(options, document, show_jobs)
    return EXIT_REFUSED if options.job is not None and _failed(document) else 0


def run_counters(client: Client, options: argparse.Namespace) -> int:
    """`counters`. 1 when the job asked for has failed."""
    document = _status(client, options.job)
    _show(options, _counters(document) if options.json else document, show_counters)
    return EXIT_REFUSED if options.job is not None and _failed(document) else 0


def run_pools(client: Client, options: argparse.Namespace) -> int:
    """`pools`."""
    _show(options, documents.pools(client.call("Pools", pb.PoolsRequest())), show_pools)
    return 0


def run_switches(client: Client, options: argparse.Namespace) -> int:
    """`switches`. 1 when one is not connected or in trouble."""
    document = _status(client)
    _show(options, {"switches": [document["switch"]]}, show_switches)
    switch = document["switch"]
    return 0 if switch["connected"] and not switch["trouble"] else EXIT_REFUSED


def _status(client: Client, job: str | None = None) -> Document:
    name = "" if job is None else job_name(job)
    return documents.status(client.call("Status", pb.StatusRequest(job=name)))


def _failed(document: Document) -> bool:
    return any(job["state"] == "failed" for job in document["jobs"])


def _show(options: argparse.Namespace, document: Document, show: Callable[[Console, Document], None]) -> None:
    if options.json:
        print_json(document)
    else:
        show(make_console(), document)


def switch_line(switch: Document) -> Text:
    """The switch in one line."""
    connected = Text("connected", "green") if switch["connected"] else Text("not connected", "bold red")
    parts = [Text(f"switch {safe(switch['name'] or switch['address'])}: "), connected]
    if switch["connected"] and not switch["primary"]:
        parts.append(Text(", standby", "yellow"))
    if switch["drained"]:
        parts.append(Text(", drained", "yellow"))
    parts.append(Text(f", profile {safe(switch['profile'])}, {switch['slots']} slots"))
    return Text.assemble(*parts)


def show_status(console: Console, document: Document) -> None:
    """Controller, switch, and one line for every job."""
    switch = document["switch"]
    console.print(f"controller {safe(document['server_version'])}, up {document['uptime_seconds']:.0f} s")
    console.print(switch_line(switch))
    if switch["trouble"]:
        note(console, "trouble", switch["trouble"], "red")
    _strays(console, switch)
    if not document["jobs"]:
        console.print("no jobs")
        return
    table = grid("job", "state", "path", ">epoch", ">ranks", ">slots", ">buckets", folds="job")
    for job in _running_first(document):
        table.add_row(
            Text(safe(job["job"])),
            state(job["state"]),
            state(job["path"]),
            str(job["present"] or job["epoch"] or ""),
            f"{documents.present(job)}/{job['world_size']}",
            slots_text(job["pool_base"], job["pool_size"]),
            str(completed(job)),
        )
    console.print(table)
    for job in _running_first(document):
        _why(console, job["job"], job)


def _strays(console: Console, switch: Document) -> None:
    """Frames of no epoch, if there were any: somebody sends what he should not."""
    for name, text in (
        ("guarded", "frames dropped: not from the host behind the port, or made to look like the switch's"),
        ("refused", "contributions to an epoch that the switch does not know"),
    ):
        if switch[name]:
            note(console, name, f"{switch[name]} ({text})")


def completed(job: Document) -> int:
    """Buckets that every rank has."""
    return min((worker["completed"] for worker in job["workers"]), default=0)


def _running_first(document: Document) -> list[Document]:
    return sorted(document["jobs"], key=documents.is_over)


def _why(console: Console, head: str, job: Document) -> None:
    if job["reason"]:
        # After its name, the state: whoever looks for trouble reads these lines alone.
        over = f"{job['state']} {ago(job['over_seconds'])}: " if head != "why" and documents.is_over(job) else ""
        reason = job["reason"].removeprefix(f"job {job['job']!r}: ")  # whose name stands there already
        note(console, head, f"{over}{reason}", "red" if job["state"] == "failed" else "yellow")
    elif job["path_reason"] and job["path"] == "ring":
        note(console, head, f"on the ring path: {job['path_reason']}")


def show_jobs(console: Console, document: Document) -> None:
    """Every rank of every job; of those that are over, who was there and how far each had come."""
    if not document["jobs"]:
        console.print("no jobs")
    for job in _running_first(document):
        console.print(_headline(job))
        if job["path"] or job["pool_size"]:
            console.print(Text(f"  {_place(job)}"))
        _why(console, "why", job)
        live = () if documents.is_over(job) else (">silent", ">rtt")
        table = grid("rank", "host", "address", "port", "state", ">buckets done/in", *live, folds="host", gap=1)
        for worker in job["workers"]:
            signs = (f"{worker['silent_seconds']:.1f} s", milliseconds(worker["rtt_seconds"])) if live else ()
            table.add_row(
                str(worker["rank"]),
                Text(safe(worker["host"])),
                f"{worker['ip']}:{worker['udp_port']}",
                str(worker["switch_port"]),
                state(worker["state"]),
                f"{worker['completed']}/{worker['submitted']}",
                *signs,
            )
        if job["workers"]:
            console.print(table)


def _headline(job: Document) -> Text:
    epoch = job["present"] or job["epoch"]
    return Text.assemble(
        (safe(job["job"]), "bold"),
        ": ",
        state(job["state"]),
        f" {ago(job['over_seconds'])}" if documents.is_over(job) else "",
        f", epoch {epoch}" if epoch else "",
        f", incarnation {job['incarnation']}" if job["incarnation"] else "",
        f", mode {safe(job['mode'])}" if job["mode"] else "",
        "" if job["ring"] else ", no ring path",
    )


def _place(job: Document) -> str:
    parts = [f"{job['path']} path"] if job["path"] else []
    if job["pool_size"]:
        streams = f" ({job['or_slots']} OR + {job['add_slots']} ADD)" if job["or_slots"] else ""
        parts.append(f"slots {slots_text(job['pool_base'], job['pool_size'])}{streams}")
    if job["fallbacks"]:
        parts.append(f"fallbacks: {counts(job['fallbacks'])}")
    if job["promotions"]:
        parts.append(f"promotions: {job['promotions']}")
    return "; ".join(parts)


def show_pools(console: Console, document: Document) -> None:
    """Which job leases which slots."""
    table = grid("slots", ">size", "job", ">epoch", folds="job")
    for pool in document["pools"]:
        held = Text(safe(pool["job"])) if pool["job"] else Text("free", "dim")
        table.add_row(slots_text(pool["base"], pool["size"]), str(pool["size"]), held, str(pool["epoch"] or ""))
    console.print(table)
    free = sum(pool["size"] for pool in document["pools"] if not pool["job"])
    console.print(f"{free} of {document['slots']} slots are free")


def _counters(document: Document) -> Document:
    """Only what was counted."""
    switch = document["switch"]
    return {
        "strays": {"guarded": switch["guarded"], "refused": switch["refused"]},
        "jobs": [
            {
                "job": job["job"],
                "present": job["present"],
                "switch": job["counters"],
                "workers": [{"rank": worker["rank"], "counters": worker["counters"]} for worker in job["workers"]],
                "fallbacks": job["fallbacks"],
                "promotions": job["promotions"],
            }
            for job in document["jobs"]
        ],
    }


def show_counters(console: Console, document: Document) -> None:
    """Frames of no epoch. Of each job: the switch's counters of the present epoch, and the workers' with the ranks that
    stand out."""
    _strays(console, document["switch"])
    if not document["jobs"]:
        console.print("no jobs")
    for job in document["jobs"]:
        console.print(_headline(job))
        for head, values in (("switch", job["counters"]), ("fallbacks", job["fallbacks"])):
            if values:
                note(console, head, counts(values))
        by_name: dict[str, list[tuple[int, int]]] = {}
        for worker in job["workers"]:
            for name, value in worker["counters"].items():
                by_name.setdefault(name, []).append((value, worker["rank"]))
        if not by_name:
            console.print("  the workers have reported no counters yet")
            continue
        table = grid("counter", ">all ranks", ">least", ">of rank", ">most", ">of rank", folds="counter")
        for name, values in sorted(by_name.items()):
            least, most = min(values), max(values, key=lambda pair: (pair[0], -pair[1]))
            numbers = [sum(value for value, _ in values), *least, *most]
            table.add_row(Text(safe(name)), *(str(number) for number in numbers))
        console.print(table)


def show_switches(console: Console, document: Document) -> None:
    """The switches and how they are."""
    for switch in document["switches"]:
        console.print(switch_line(switch))
        since = f" for {switch['connected_seconds']:.0f} s" if switch["connected"] else ""
        console.print(f"  P4Runtime at {safe(switch['address'])}, device {switch['device_id']}{since}")
        if switch["trouble"]:
            note(console, "trouble", switch["trouble"], "red")
        _strays(console, switch)
        if switch["drained"]:
            note(console, "drained", f"jobs run on the ring path: `p4reducectl undrain {safe(switch['name'])}` ends it")
