# SPDX-License-Identifier: Apache-2.0
"""What the demo is asked to do, and what it found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from p4reduce.errors import ConfigError

SwitchKind = Literal["auto", "embedded", "bmv2"]
SWITCH_KINDS: tuple[SwitchKind, ...] = ("auto", "embedded", "bmv2")
_CAUSES = ("timeout", "early", "integrity")
MAX_WORKERS = 32
"""The demo's batch has 32 windows of text, at least one for every worker."""

MAX_SEED = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The demo's settings. ConfigError when they make no sense."""

    switch: SwitchKind = "auto"
    workers: int = 2
    steps: int = 200
    loss: float = 0.0
    """Chance that the switch loses a frame, in each direction."""
    seed: int = 0
    profile: str = ""
    """Frame size; empty: w34."""
    timeout: float = 600.0
    """Seconds the whole demo may take."""

    def __post_init__(self) -> None:
        if self.switch not in SWITCH_KINDS:
            raise ConfigError(f"switch {self.switch!r}: choose one of {', '.join(SWITCH_KINDS)}")
        if not (1 <= self.workers <= MAX_WORKERS and MAX_WORKERS % self.workers == 0):
            raise ConfigError(
                f"{self.workers} workers cannot share a batch of {MAX_WORKERS}: choose 1, 2, 4, 8, 16 or 32"
            )
        if self.steps < 1:
            raise ConfigError(f"{self.steps} steps: at least one is needed")
        if not 0.0 <= self.loss < 1.0:
            raise ConfigError(f"loss {self.loss}: a probability from 0 to below 1 is needed")
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"seed {self.seed}: a number from 0 to {MAX_SEED} is needed")
        if not 0.0 < self.timeout < math.inf:
            raise ConfigError(f"timeout {self.timeout}: a finite number of seconds above 0 is needed")


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The demo's findings. Losses in nats per character of held-out text; frames and bytes summed over all workers."""

    switch: str
    workers: int
    steps: int
    seed: int
    profile: str
    frame_loss: float
    parameters: int
    loss_first: float
    loss_reference: float
    loss_reference_other_seed: float
    loss_p4reduce: float
    loss_p4reduce_hex: str
    """The exact bits, to compare runs with."""
    closer_than_seeds: bool
    """The switch changed the loss by less than another seed does."""
    ranks_bit_identical: bool
    parameters_sha256: str
    """Of rank 0's parameters after the run through the switch."""
    buckets_switch: int
    buckets_ring: int
    gradient_bytes: int
    frames_sent: int
    retransmissions: int
    retransmission_causes: Mapping[str, int]
    """The same by cause: timeout, early (later chunks had their results), integrity (a result failed its check)."""
    seconds_reference: float
    seconds_p4reduce: float
    step_milliseconds: Mapping[str, float]
    """Where a step's time goes in the run through the switch, mean over ranks: forward, backward (computing), waiting
    (for the reduction, after the last gradient), optimizer, other."""
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def build_report(
    options: DemoOptions, switch: str, profile: str, runs: Mapping[str, Sequence[Mapping[str, Any]]], seconds: float
) -> DemoReport:
    """Compare the runs. `runs` maps the names in `train.RUNS` to what each rank reported, by rank."""
    reference, other, ours = runs["reference"], runs["reference_other_seed"], runs["p4reduce"]
    first, stats = ours[0], [rank["stats"] for rank in ours]
    spread = abs(reference[0]["loss_last"] - other[0]["loss_last"])
    return DemoReport(
        switch=switch,
        workers=options.workers,
        steps=options.steps,
        seed=options.seed,
        profile=profile,
        frame_loss=options.loss,
        parameters=first["parameters"],
        loss_first=first["loss_first"],
        loss_reference=reference[0]["loss_last"],
        loss_reference_other_seed=other[0]["loss_last"],
        loss_p4reduce=first["loss_last"],
        loss_p4reduce_hex=float(first["loss_last"]).hex(),
        closer_than_seeds=abs(first["loss_last"] - reference[0]["loss_last"]) < spread,
        ranks_bit_identical=len({rank["digest"] for rank in ours}) == 1,
        parameters_sha256=first["digest"],
        buckets_switch=stats[0]["buckets_switch"],
        buckets_ring=stats[0]["buckets_ring"],
        gradient_bytes=sum(rank["bytes_switch"] + rank["bytes_ring"] + rank["bytes_plain"] for rank in stats),
        frames_sent=sum(rank["comm"]["core"]["frames_sent"] for rank in stats),
        retransmissions=sum(rank["comm"]["core"]["retransmissions"] for rank in stats),
        retransmission_causes={
            cause: sum(rank["comm"]["core"][f"resent_{cause}"] for rank in stats) for cause in _CAUSES
        },
        seconds_reference=reference[0]["seconds"],
        seconds_p4reduce=first["seconds"],
        step_milliseconds=_step_times(ours, options.steps),
        seconds=seconds,
    )


def _step_times(ranks: Sequence[Mapping[str, Any]], steps: int) -> dict[str, float]:
    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values) * 1000.0 / steps

    waiting = mean([rank["stats"]["wait_seconds"] for rank in ranks])
    parts = {
        "forward": mean([rank["forward_seconds"] for rank in ranks]),
        "backward": mean([rank["backward_seconds"] for rank in ranks]) - waiting,
        "waiting": waiting,
        "optimizer": mean([rank["optimizer_seconds"] for rank in ranks]),
    }
    parts["other"] = mean([rank["seconds"] for rank in ranks]) - sum(parts.values())
    return parts
