# SPDX-License-Identifier: Apache-2.0
"""What a controller exports for Prometheus, made from one status reply and one list of pools for each scrape.

Names and labels are bounded: the label `job_name` has at most MAX_JOBS values at a time, jobs that run before those
that failed; epochs are values, never labels. docs/metrics.md lists every metric.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, Literal, Protocol

from p4reduce.metrics import Family, MetricsServer, counter_families, fallbacks_family
from p4reduce.proto import controller_pb2 as pb
from p4reduce_controller.model import PoolView

MAX_JOBS: Final = 64
MAX_WORKERS: Final = 1024
"""Workers of all jobs together that have series of their own."""
RUNNING: Final = ("joining", "switch", "cutting", "ring", "preparing", "trying", "holding", "leaving")
STATES: Final = (*RUNNING, "failed", "ended")
MODES: Final = ("auto", "require", "off")
EVENTS: Final = ("contributions", "results", "repeats", "duplicates", "stale", "mismatch", "refused")
_PATHS: Final = {pb.PATH_SWITCH: "switch", pb.PATH_RING: "ring", pb.PATH_UNSPECIFIED: "none"}
_JOB: Final = ("job_name",)
_WORKER: Final = ("job_name", "rank")
_SWITCH: Final = ("switch",)


class Source(Protocol):
    """What is asked for at each scrape; a Coordinator has it."""

    def status(self, only: str) -> pb.StatusReply:
        """State of the switch and of all jobs."""
        ...

    def pools(self) -> Sequence[PoolView]:
        """All pools, with who leases them."""
        ...


def start_metrics(address: str, coordinator: Source) -> MetricsServer:
    """Export the controller's metrics at ADDRESS:PORT (port 0: any) until the server's `stop`.

    ConfigError: the address makes no sense or is taken, or the package prometheus_client is missing.
    """
    exporter = Exporter(coordinator)
    return MetricsServer(address, exporter.families)


class Exporter:
    """Turns snapshots into metrics. It remembers nothing but the highest epoch and how many it has seen."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._epoch = 0
        self._epochs = 0

    def families(self) -> Iterator[Family]:
        """One snapshot."""
        status, pools = self._source.status(""), list(self._source.pools())
        jobs = sorted(status.jobs, key=lambda job: (job.state not in RUNNING, job.job))
        shown = jobs[:MAX_JOBS]
        self._note_epochs({epoch for job in jobs for epoch in (job.epoch, job.present)} | {p.epoch for p in pools})
        yield _one(
            "p4reduce_controller_uptime_seconds", "Seconds since the controller was started.", status.uptime_seconds
        )
        info = Family("p4reduce_controller_info", "gauge", "Always 1.", ("version", "profile"))
        info.add(1, status.server_version, status.switch.profile)
        yield info
        yield from _switch(status.switch)
        yield from _slots(status, pools)
        yield _one("p4reduce_epoch", "Highest epoch seen.", self._epoch)
        granted = Family("p4reduce_epochs", "counter", "Epochs granted, as far as scrapes have seen them.")
        granted.add(self._epochs)
        yield granted
        yield from _all_jobs(jobs, len(jobs) - len(shown))
        yield from _each_job(shown)
        yield from _workers(shown)

    def _note_epochs(self, epochs: set[int]) -> None:
        """Numbers only rise, but not one by one: see `store`."""
        self._epochs += sum(epoch > self._epoch for epoch in epochs)
        self._epoch = max(self._epoch, *epochs, 0)


def _one(name: str, text: str, value: float) -> Family:
    family = Family(name, "gauge", text)
    family.add(value)
    return family


def _switch(switch: pb.SwitchStatus) -> Iterator[Family]:
    name = switch.name or switch.address
    for metric, text, value in (
        ("connected", "1 while the P4Runtime session is up and answers.", switch.connected),
        ("primary", "1 while this controller is the one that acts, 0 on a standby.", switch.primary),
        ("drained", "1 between drain and undrain.", switch.drained),
        ("trouble", "1 while something is wrong with it.", bool(switch.trouble)),
        ("connected_seconds", "Seconds since the session was opened.", switch.connected_seconds),
    ):
        family = Family(f"p4reduce_switch_{metric}", "gauge", text, _SWITCH)
        family.add(value, name)
        yield family
    strays = Family(
        "p4reduce_switch_strays", "counter", "Frames that belong to no epoch, by what they were.", (*_SWITCH, "kind")
    )
    strays.add(switch.guarded, name, "guarded")
    strays.add(switch.refused, name, "refused")
    yield strays


def _slots(status: pb.StatusReply, pools: Sequence[PoolView]) -> Iterator[Family]:
    """A lease whose epoch is not the job's present one waits for its entries to be gone, or is being prepared."""
    present = {(job.job, job.present or job.epoch) for job in status.jobs if job.state in RUNNING}
    slots: Counter[str] = Counter(free=0, leased=0, changing=0)
    leases: Counter[str] = Counter(leased=0, changing=0)
    for pool in pools:
        state = "free" if not pool.job else "leased" if (pool.job, pool.epoch) in present else "changing"
        slots[state] += pool.size
        if pool.job:
            leases[state] += 1
    for name, text, counted in (
        ("p4reduce_slots", "Slots of the switch by state; changing: of an epoch that comes or goes.", slots),
        ("p4reduce_leases", "Ranges of slots that are leased, by state.", leases),
    ):
        family = Family(name, "gauge", text, ("state",))
        for state, value in counted.items():
            family.add(value, state)
        yield family


def _all_jobs(jobs: Sequence[pb.JobStatus], omitted: int) -> Iterator[Family]:
    for label, names, values in (
        ("state", STATES, Counter(job.state for job in jobs)),
        ("mode", MODES, Counter(job.mode for job in jobs if job.mode)),
        ("path", ("switch", "ring", "none"), Counter(_PATHS.get(job.path, "none") for job in jobs)),
    ):
        name = "p4reduce_jobs" if label == "state" else f"p4reduce_jobs_by_{label}"
        family = Family(name, "gauge", f"Jobs by {label}.", (label,))
        for value in dict.fromkeys((*names, *values)):
            family.add(values[value], value)
        yield family
    yield _one(
        "p4reduce_jobs_omitted", f"Jobs without series of their own, because there are over {MAX_JOBS}.", omitted
    )


def _each_job(jobs: Sequence[pb.JobStatus]) -> Iterator[Family]:
    kinds: tuple[tuple[str, Literal["gauge", "counter"], str, list[float]], ...] = (
        ("epoch", "gauge", "The present epoch.", [job.present or job.epoch for job in jobs]),
        ("incarnation", "gauge", "How often the job was restarted.", [job.incarnation for job in jobs]),
        ("world_size", "gauge", "Ranks that the job has.", [job.world_size for job in jobs]),
        ("workers", "gauge", "Ranks that have joined and are neither lost nor gone.", [_present(job) for job in jobs]),
        ("slots", "gauge", "Slots that the present epoch leases.", [job.pool_size for job in jobs]),
        ("on_switch", "gauge", "1 while the job is on the switch path.", [job.path == pb.PATH_SWITCH for job in jobs]),
        ("failed", "gauge", "1 once the job has failed.", [job.state == "failed" for job in jobs]),
        ("buckets", "counter", "Buckets that all ranks have completed.", [_completed(job) for job in jobs]),
        ("promotions", "counter", "Times that the job went back to the switch path.", [job.promotions for job in jobs]),
    )
    for name, kind, text, values in kinds:
        family = Family(f"p4reduce_job_{name}", kind, text, _JOB)
        for job, value in zip(jobs, values, strict=True):
            family.add(value, job.job)
        yield family
    yield fallbacks_family("p4reduce_job_fallbacks", [((job.job,), job.fallbacks) for job in jobs], _JOB)
    events = Family(
        "p4reduce_switch_events", "counter", "What the switch did with frames of the job's epoch.", (*_JOB, "event")
    )
    for job in jobs:
        for event in EVENTS:
            if event in job.counters:
                events.add(job.counters[event], job.job, event)
    yield events


def _present(job: pb.JobStatus) -> int:
    return sum(worker.state in ("joined", "reporting") for worker in job.workers)


def _completed(job: pb.JobStatus) -> int:
    return min((worker.completed for worker in job.workers), default=0)


def _workers(jobs: Sequence[pb.JobStatus]) -> Iterator[Family]:
    found = [(job.job, worker) for job in jobs for worker in job.workers][:MAX_WORKERS]
    labels = [(job, str(worker.member.rank)) for job, worker in found]
    workers = [worker for _, worker in found]
    kinds: tuple[tuple[str, Literal["gauge", "counter"], str, list[float]], ...] = (
        (
            "silent_seconds",
            "gauge",
            "Age of the lease: seconds since the last report.",
            [w.silent_seconds for w in workers],
        ),
        ("rtt_seconds", "gauge", "Smoothed round-trip time of a frame; 0: none yet.", [w.rtt_seconds for w in workers]),
        ("buckets_submitted", "counter", "Buckets handed in.", [w.submitted for w in workers]),
        (
            "buckets_completed",
            "counter",
            "Buckets complete up to the first that is not.",
            [w.completed for w in workers],
        ),
    )
    for name, kind, text, values in kinds:
        family = Family(f"p4reduce_worker_{name}", kind, text, _WORKER)
        for who, value in zip(labels, values, strict=True):
            family.add(value, *who)
        yield family
    yield from counter_families([(who, worker.counters) for who, worker in zip(labels, workers, strict=True)], _WORKER)
