# SPDX-License-Identifier: Apache-2.0
"""What a join must fulfil by itself, before it meets the other ranks of its job."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from p4reduce import __version__, constants
from p4reduce.wire import Profile
from p4reduce_controller.hosts import Host, Hosts
from p4reduce_controller.pools import MIN_WINDOW

MAX_JOB_NAME = 128
DEFAULT_WAIT_SECONDS = 60.0
MAX_WAIT_SECONDS = 86400.0
MODES = ("auto", "require", "off")
NONCE_BYTES = 16


class Code(Enum):
    """gRPC status codes in use; the names are gRPC's."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    ABORTED = "ABORTED"
    CANCELLED = "CANCELLED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    UNAVAILABLE = "UNAVAILABLE"
    INTERNAL = "INTERNAL"


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer no: a status code and a sentence that says what to do."""

    code: Code
    message: str
    away: bool = False
    """There is no controller here (any more) that could decide: ask again, it may be another one."""


class RefusedError(Exception):
    """Carries a Refusal to the RPC that caused it. Never leaves the controller."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.refusal = Refusal(code, message)


@dataclass(frozen=True, slots=True)
class Applicant:
    """A rank that asks to join; all fields checked by `check`."""

    job: str
    world_size: int
    rank: int
    incarnation: int
    host: Host
    udp_port: int
    receive_frames: int
    wait_seconds: float
    mode: str = "auto"
    ring: bool = False
    nonce: bytes = b""
    """Tells a Join that is repeated from another process's; empty: nothing does."""
    slots_min: int = MIN_WINDOW
    slots_want: int = 0
    """0: as many as a fair share gives."""

    @property
    def needs_switch(self) -> bool:
        """Whether nothing but the switch path will do."""
        return self.mode == "require" or not self.ring

    @property
    def name(self) -> str:
        """How messages call this rank: number, host and address."""
        return f"rank {self.rank} on host {self.host.name} ({self.host.ip})"


@dataclass(frozen=True, slots=True)
class Claim:
    """A join as it came in; names and units as in `JoinRequest` of the protocol."""

    job: str
    world_size: int
    rank: int
    incarnation: int
    ip: str
    udp_port: int
    mtu: int
    receive_frames: int
    wait_seconds: float
    client_version: str
    mode: str = ""
    ring: bool = False
    nonce: bytes = b""
    slots_min: int = 0
    slots_want: int = 0


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as readers like them: "rank 3", "ranks 0, 2 and 5"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(str(rank) for rank in ranks[:-1])} and {ranks[-1]}"


def check_version(version: str) -> None:
    """Refuse a client of a newer major version than ours; a client that tells none is let through."""
    if not version:
        return
    match = re.match(r"(\d{1,9})(\.|$)", version, re.ASCII)
    if match is None:
        raise RefusedError(Code.INVALID_ARGUMENT, f"client_version {version[:40]!r} is no version number like 1.2.0")
    if int(match[1]) > int(__version__.split(".")[0]):
        raise RefusedError(
            Code.FAILED_PRECONDITION,
            f"this controller is p4reduce {__version__}, the client {version}: upgrade the controller first",
        )


def check_job_name(job: str) -> None:
    """Refuse names that are empty, too long, or would garble a terminal."""
    if not job.strip():
        raise RefusedError(Code.INVALID_ARGUMENT, "the job name is empty: give every job a name of its own")
    if len(job) > MAX_JOB_NAME:
        raise RefusedError(
            Code.INVALID_ARGUMENT, f"the job name has {len(job)} characters: shorten it to {MAX_JOB_NAME}"
        )
    if not job.isprintable():
        raise RefusedError(Code.INVALID_ARGUMENT, f"the job name {job!r} has control characters: use printable ones")


def mode_of(said: str, empty: str = "auto") -> str:
    """A mode as users write it: "ring" is another word for "off", `empty` is what no word means."""
    mode = {"": empty, "ring": "off"}.get(said, said)
    if mode not in MODES:
        raise RefusedError(
            Code.INVALID_ARGUMENT, f"mode {said[:40]!r} is none of {', '.join(MODES)} (ring is the same as off)"
        )
    return mode


def _check_path(claim: Claim) -> str:
    """What the rank says about its paths; its mode."""
    mode = mode_of(claim.mode)
    if mode == "off" and not claim.ring:
        raise RefusedError(
            Code.INVALID_ARGUMENT, f"rank {claim.rank}: mode off means the ring path, and it has none: give it a ring"
        )
    if claim.nonce and len(claim.nonce) != NONCE_BYTES:
        raise RefusedError(Code.INVALID_ARGUMENT, f"the nonce has {len(claim.nonce)} bytes, not {NONCE_BYTES}")
    for name, slots in (("slots_min", claim.slots_min), ("slots_want", claim.slots_want)):
        if slots > constants.SLOTS:
            raise RefusedError(
                Code.INVALID_ARGUMENT,
                f"{name} {slots} is more than the switch has: {constants.SLOTS} slots, shared by all jobs",
            )
    if claim.slots_want and claim.slots_want < max(claim.slots_min, MIN_WINDOW):
        raise RefusedError(
            Code.INVALID_ARGUMENT,
            f"slots_want {claim.slots_want} is below the least that is of use "
            f"(slots_min {claim.slots_min}, and never less than {MIN_WINDOW})",
        )
    return mode


def check(claim: Claim, hosts: Hosts, profile: Profile) -> Applicant:
    """Check one join; RefusedError when it breaks a rule that no other rank has a say in."""
    check_version(claim.client_version)
    check_job_name(claim.job)
    if not 1 <= claim.world_size <= constants.MAX_WORKERS:
        raise RefusedError(
            Code.INVALID_ARGUMENT,
            f"world_size {claim.world_size} is out of range: one switch serves 1 to {constants.MAX_WORKERS} ranks",
        )
    if claim.rank >= claim.world_size:
        raise RefusedError(
            Code.INVALID_ARGUMENT,
            f"rank {claim.rank} is out of range: with world_size {claim.world_size}, "
            f"ranks go from 0 to {claim.world_size - 1}",
        )
    if not 1 <= claim.udp_port <= 65535:
        raise RefusedError(Code.INVALID_ARGUMENT, f"udp_port {claim.udp_port} is out of range: 1 to 65535")
    host = hosts.by_ip(claim.ip)
    if host is None:
        known = ", ".join(entry.ip for entry in hosts.hosts)
        raise RefusedError(
            Code.NOT_FOUND,
            f"no host has the address {claim.ip!r}: {hosts.source} knows {known}; "
            f"bind the worker to one of these or add the host there",
        )
    if claim.mtu < profile.mtu:
        raise RefusedError(
            Code.FAILED_PRECONDITION,
            f"rank {claim.rank} on host {host.name}: MTU {claim.mtu} is too small, profile {profile.name} needs "
            f"{profile.mtu}: raise the interface's MTU or run the switch with a smaller profile",
        )
    if claim.receive_frames < MIN_WINDOW:
        raise RefusedError(
            Code.FAILED_PRECONDITION,
            f"rank {claim.rank} on host {host.name}: the receive buffer holds {claim.receive_frames} full frames, "
            f"at least {MIN_WINDOW} are needed: raise net.core.rmem_max",
        )
    wait = claim.wait_seconds or DEFAULT_WAIT_SECONDS
    if not (math.isfinite(wait) and 0 < wait <= MAX_WAIT_SECONDS):
        raise RefusedError(
            Code.INVALID_ARGUMENT,
            f"wait_seconds {claim.wait_seconds} makes no sense: up to {MAX_WAIT_SECONDS:.0f}; "
            f"0 means {DEFAULT_WAIT_SECONDS:.0f}",
        )
    return Applicant(
        claim.job,
        claim.world_size,
        claim.rank,
        claim.incarnation,
        host,
        claim.udp_port,
        claim.receive_frames,
        wait,
        _check_path(claim),
        claim.ring,
        claim.nonce,
        max(claim.slots_min, MIN_WINDOW),
        claim.slots_want,
    )
