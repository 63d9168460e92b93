# SPDX-License-Identifier: Apache-2.0
"""Frames that go wrong: into the compiled program, and into the worker's core.

A step is one seed: a job or two reduce something while frames that nobody should send arrive in between. Whatever
arrives, nothing raises and no rank ever gets a sum other than the exact one. A job may end with an error that says
so when the frames come from its own member's port; frames from any other port must change nothing at all.
"""

from __future__ import annotations

import functools
import json
import random
from collections import Counter
from typing import Any

import numpy as np

from p4reduce import pipeline
from p4reduce.constants import HEADER_BYTES, UDP_PORT
from p4reduce.core.bucket import Barrier, Bucket, Reduction
from p4reduce.core.events import Completed, Silent
from p4reduce.core.states import Phase
from p4reduce.core.worker import WorkerCore
from p4reduce.packetize import FIELD_BYTES, BucketCodec, from_thermometers, from_wire, thermometers, to_wire
from p4reduce.quantize import LaneFormat
from p4reduce.sim.adapter import SWITCH_MAC, EngineSwitch, from_frame, mac_of, to_frame
from p4reduce.sim.byhand import ByHand, direct, edit, field
from p4reduce.sim.network import Datagram
from p4reduce.sim.runner import SWITCH_IP, Scenario
from p4reduce.wire import HEADER, Kind, Op, Reason, make_header, unpack_tag

NAMES = HEADER.names or ()
HOSTILE_PORTS = (9, 10, 300)
SIZES = (0, 1, 64, 65, 320, 321, 900)


class Finding(AssertionError):
    """What fuzzing looks for."""


def demand(condition: bool, text: str) -> None:
    """A Finding unless the condition holds."""
    if not condition:
        raise Finding(text)


def mangled(draw: random.Random, data: bytes) -> bytes:
    """Bytes with bits flipped, cut, doubled, or replaced."""
    made = bytearray(data)
    kind = draw.randrange(6)
    if kind == 0 and made:
        for _ in range(draw.choice((1, 1, 2, 8))):
            made[draw.randrange(len(made))] ^= 1 << draw.randrange(8)
    elif kind == 1 and made:
        del made[draw.randrange(len(made)) :]
    elif kind == 2:
        made += draw.randbytes(draw.choice((1, 8, 256, 1024)))
    elif kind == 3 and made:
        start = draw.randrange(len(made))
        made[start : start + draw.choice((1, 4, 32))] = draw.randbytes(draw.choice((1, 4, 32)))
    elif kind == 4 and len(made) > HEADER_BYTES:
        # A header before another payload.
        made[HEADER_BYTES:] = draw.randbytes(len(made) - HEADER_BYTES)
    else:
        made = bytearray(draw.randbytes(draw.choice((0, 1, 31, 32, 33, 100, 288, 1312, 2000))))
    return bytes(made)


def forged(draw: random.Random, data: bytes) -> bytes:
    """A well-formed frame with some fields of its header set to what an attacker would try."""
    if len(data) < HEADER_BYTES:
        return data
    changes: dict[str, int] = {}
    for name in draw.sample(NAMES, draw.choice((1, 1, 2, 3))):
        width = 8 * HEADER[name].itemsize
        near = field(data, name) + draw.choice((-2, -1, 1, 2, 1 << (width - 1)))
        changes[name] = draw.choice((near, draw.getrandbits(width), 0, (1 << width) - 1)) % (1 << width)
    return edit(data, **changes)


def raised(draw: random.Random, data: bytes) -> bytes:
    """An OR frame with one level one higher: the one damage to a payload that its form does not show."""
    if len(data) <= HEADER_BYTES or field(data, "op") != Op.OR:
        return data
    fields = from_wire(np.frombuffer(data, dtype=np.uint8)[HEADER_BYTES:].reshape(-1, FIELD_BYTES))
    levels, valid = from_thermometers(fields)
    candidates = np.flatnonzero(valid & (levels > 0) & (levels < 254))
    if len(candidates) == 0:
        return data
    levels[draw.choice(candidates.tolist())] += 1
    rows = np.empty((len(levels), FIELD_BYTES), dtype=np.uint8)
    to_wire(thermometers(levels), rows)
    return data[:HEADER_BYTES] + rows.tobytes()


def is_nack(frame: bytes) -> bool:
    """Whether a frame has the size and the kind of a nack."""
    return len(frame) == HEADER_BYTES and field(frame, "kind") == Kind.NACK


class Reducing:
    """One job in a step: its cores, its buckets, and what of its frames is known."""

    def __init__(self, draw: random.Random, hand: ByHand) -> None:
        self.hand = hand
        self.sent: list[tuple[int, bytes]] = []
        self.answers: list[tuple[int, bytes]] = []
        self._exponents: dict[tuple[int, int], bytes] = {}
        self._rng = np.random.default_rng(draw.getrandbits(32))
        self.buckets: list[list[Bucket]] = []
        for _ in range(draw.randrange(1, 4)):
            self._submit(draw)

    def _submit(self, draw: random.Random) -> None:
        size = draw.choice((None, *SIZES))
        ranks: list[Bucket] = []
        for _ in self.hand.cores:
            data = self._rng.standard_normal(size or 0, dtype=np.float32)
            ranks.append(Barrier() if size is None else Reduction(data, np.full_like(data, np.nan)))
        self.hand.submit(*ranks)
        self.buckets.append(ranks)

    def done(self) -> bool:
        """Whether every rank has finished or failed."""
        return all(core.error is not None or core.completed == len(self.buckets) for core in self.hand.cores)

    def deliver(self, rank: int, *frames: bytes) -> None:
        """Frames reach a rank; results of OR chunks are remembered."""
        for frame in frames:
            what = [field(frame, name) for name in ("kind", "op", "epoch")] if len(frame) > HEADER_BYTES else []
            if what == [Kind.RESULT, Op.OR, self.hand.scenario.epoch]:
                bucket, chunk, _ = unpack_tag(field(frame, "tag"))
                self._exponents.setdefault((bucket, chunk), frame[HEADER_BYTES:])
            self.answers.append((rank, frame))
        self.hand.to_worker(rank, *frames)

    def judge(self, found: Counter[str], *, must: bool) -> None:
        """Compare every sum that a rank has got. `must`: and there must be one, at every rank."""
        for core in self.hand.cores:
            judge_core(core, len(self.buckets))
        for number, ranks in enumerate(self.buckets):
            for core, bucket in zip(self.hand.cores, ranks, strict=True):
                demand(not must or core.error is None, f"a job was stopped: {core.error}")
                complete = bucket.phase is Phase.COMPLETED
                demand(not must or complete, f"{bucket.describe()} did not complete")
                if complete and isinstance(bucket, Reduction):
                    found["sums"] += 1
                    self._compare(number, [one for one in ranks if isinstance(one, Reduction)], bucket, found)
        found["failed jobs"] += any(core.error is not None for core in self.hand.cores)

    def _compare(self, number: int, ranks: list[Reduction], bucket: Reduction, found: Counter[str]) -> None:
        data = [one.data for one in ranks]
        if bucket.out.tobytes() == direct(data).tobytes():
            return
        # Damage to an OR frame on its way up can raise an exponent for all ranks alike: coarser, but a sum.
        codec = BucketCodec(self.hand.profile, LaneFormat(32, len(ranks), 256), bucket.data.size)
        rows = np.zeros((codec.or_chunks, codec.payload_bytes), dtype=np.uint8)
        for chunk in range(codec.or_chunks):
            payload = self._exponents.get((number, chunk), b"")
            rows[chunk, : len(payload)] = np.frombuffer(payload, dtype=np.uint8)[: codec.payload_bytes]
        agreed = codec.decode_exponents(rows)
        found["raised exponents"] += 1
        coarse = direct(data, exponents=agreed).tobytes()
        demand(bucket.out.tobytes() == coarse, f"wrong sum: {bucket.describe()}")


def judge_core(core: WorkerCore, submitted: int) -> None:
    """Every frame counted once, no more state than there are unfinished buckets."""
    counters = core.counters
    named = (counters.results, counters.duplicates, counters.stale, counters.foreign, counters.malformed)
    total = sum(named) + counters.integrity + sum(counters.nacks.values()) + counters.late
    # A failure in the middle of a batch leaves the rest of that batch uncounted.
    if core.error is None:
        demand(total == counters.frames_received, f"{counters.frames_received} frames, {total} counted")
        unfinished = core.submitted - core.completed
        demand(len(core._parts) <= 2 * unfinished, f"{len(core._parts)} parts for {unfinished} buckets")
        demand(len(core._parts) == len(core._keys), "parts and keys differ")
    # A core that is kept waiting says so every half second.
    events = [event for event in core.events() if not isinstance(event, Silent)]
    demand(len(events) <= submitted + 1, f"{len(events)} events")
    demand(sum(isinstance(event, Completed) for event in events) <= submitted, "a bucket completed twice")


@functools.cache
def program(profile: str) -> Any:
    """The compiled program."""
    return json.loads(pipeline.find(profile).json.read_text())


class EngineTarget:
    """Frames into the engine that runs the compiled program, two jobs beside each other."""

    def __init__(self, engine: Any = None) -> None:
        """`engine`: another one of this kind."""
        if engine is None:
            from p4reduce_bmv2.embedded.engine import Engine

            engine = Engine(program("w5"))
        self.found: Counter[str] = Counter()
        self._engine = engine
        self._switch = EngineSwitch(engine)
        self._epoch = 1

    def close(self) -> None:
        """Nothing to release."""

    def step(self, seed: int) -> None:
        """Two jobs reduce while frames come from ports of their members (even seeds) or of nobody (odd seeds)."""
        draw = random.Random(f"engine {seed}")
        jobs = [self._job(draw, 16 + n, 20 * n) for n in range(2)]
        inside = seed % 2 == 0
        for turn in range(3000):
            if all(job.done() for job in jobs):
                break
            frames = [(job, rank, frame) for job in jobs for rank in range(3) for frame in self._sent(job, rank)]
            draw.shuffle(frames)
            for job, rank, frame in frames:
                job.sent.append((rank, frame))
                self._attack(draw, jobs, inside)
                if draw.random() > 0.1:
                    self._arrive(jobs, rank + 1, self._wrap(job, rank, frame))
            for job in jobs:
                job.hand.now += 0.02
            demand(turn < 2999 or inside, "a job did not end though nobody disturbed it")
        for job in jobs:
            job.judge(self.found, must=not inside)
            self._switch.revoke(job.hand.scenario.epoch)
        self._look_after()
        for name in ("ReduceIngress.admit.admit", "ReduceIngress.admit.epochs", "ReduceEgress.replicate.replica"):
            demand(not list(self._engine.tables[name].entries()), f"entries are left in {name}")

    def _look_after(self) -> None:
        demand(self._engine.stats.failed_assertions == 0, "an assertion of the program failed")

    def _job(self, draw: random.Random, group: int, base: int) -> Reducing:
        scenario = Scenario(
            draw.randrange(1, 4), or_slots=2, add_slots=4, epoch=self._epoch, pool_base=base, group=group, stats=group
        )
        self._epoch += 1
        return Reducing(draw, ByHand(scenario, self._switch))

    @staticmethod
    def _sent(job: Reducing, rank: int) -> list[bytes]:
        return job.hand.sent(rank) if rank < len(job.hand.cores) else []

    @staticmethod
    def _wrap(job: Reducing, rank: int, data: bytes) -> bytes:
        member = job.hand.membership.members[rank]
        datagram = Datagram(member.ip, member.udp_port, SWITCH_IP, UDP_PORT, data)
        return to_frame(datagram, mac_of(member.ip), SWITCH_MAC)

    def _attack(self, draw: random.Random, jobs: list[Reducing], inside: bool) -> None:
        for _ in range(draw.randrange(3)):
            job = draw.choice(jobs)
            rank = draw.randrange(len(job.hand.cores))
            history = draw.choice((job.sent, job.answers))
            data = draw.choice(history)[1] if history else make_header(kind=Kind.CONTRIBUTE, words=1) + bytes(256)
            how = draw.randrange(5)
            if how == 4:
                frame = self._wrap(job, rank, raised(draw, data))
            elif how == 0:
                frame = self._wrap(job, rank, forged(draw, data))
            elif how == 1:
                frame = self._wrap(job, rank, mangled(draw, data))
            elif how == 2:
                frame = mangled(draw, self._wrap(job, rank, data))
            else:
                # From a port that is not the member's, the very frame that the switch waits for counts for nothing.
                frame = self._wrap(job, rank, data)
            port = draw.choice((rank + 1, draw.randrange(1, 4))) if inside else draw.choice(HOSTILE_PORTS)
            self.found[("forged", "mangled", "mangled below", "replayed", "raised")[how]] += 1
            if frame:
                self._arrive(jobs, port, frame)

    def _arrive(self, jobs: list[Reducing], port: int, frame: bytes) -> None:
        for to, answer in self._engine.process(port, frame):
            demand(0 <= to <= 510, f"a frame for port {to}")
            self.found["answers"] += 1
            try:
                datagram = from_frame(answer, mac_of(0x0A000000 + to))
            except ValueError:
                self.found["answers to others"] += 1
                continue
            for job in jobs:
                if 1 <= to <= len(job.hand.cores) and datagram.dst_port == 40000 + to - 1:
                    job.deliver(to - 1, datagram.data)


class CoreTarget:
    """Frames into the worker's core, in batches with the right ones.

    `mixed`: a nack may share a batch with the result of the chunk that it refuses.
    """

    def __init__(self, mixed: bool = False) -> None:
        self.found: Counter[str] = Counter()
        self._mixed = mixed

    def close(self) -> None:
        """Nothing to release."""

    def step(self, seed: int) -> None:
        """One job on the reference switch; what reaches its ranks is what the switch sent, and anything else."""
        draw = random.Random(f"core {seed}")
        scenario = Scenario(draw.randrange(1, 4), or_slots=draw.randrange(1, 3), add_slots=draw.randrange(1, 6))
        job = Reducing(draw, ByHand(scenario))
        gentle = seed % 2 == 1
        for turn in range(2000):
            if job.done():
                break
            batches: list[list[bytes]] = [[] for _ in job.hand.cores]
            for rank in range(len(job.hand.cores)):
                for frame in job.hand.sent(rank):
                    job.sent.append((rank, frame))
                    for to, answer in job.hand.to_switch(rank, frame):
                        batches[to].append(answer)
            for rank, batch in enumerate(batches):
                job.answers += [(rank, frame) for frame in batch]
                rest = [frame for frame in batch if draw.random() > 0.1]
                self._add(draw, job, rest, gentle)
                draw.shuffle(rest)
                nacks = [] if self._mixed else [frame for frame in rest if is_nack(frame)]
                job.deliver(rank, *(frame for frame in rest if frame not in nacks))
                job.deliver(rank, *nacks)
            job.hand.now += 0.02
            demand(turn < 1999 or not gentle, "a job did not end though nothing of it was touched")
        job.judge(self.found, must=gentle)

    def _add(self, draw: random.Random, job: Reducing, batch: list[bytes], gentle: bool) -> None:
        """Add frames to a batch. `gentle`: none that could refuse the job's own chunks or look like their results."""
        history = [frame for _, frame in job.sent + job.answers] or [make_header(kind=Kind.RESULT, words=1)]
        for _ in range(draw.randrange(5)):
            frame = draw.choice(history)
            how = draw.randrange(4)
            if how == 0:
                frame = forged(draw, frame)
            elif how == 1:
                frame = mangled(draw, frame)
            elif how == 2 and len(frame) >= HEADER_BYTES:
                reason = draw.choice((*Reason, 0, 6, 255))
                frame = edit(frame, kind=Kind.NACK, count_or_reason=reason)[:HEADER_BYTES]
            if gentle and how == 2:
                frame = edit(frame, check=draw.getrandbits(64)) if len(frame) >= HEADER_BYTES else frame
            if gentle and how < 2 and len(frame) >= HEADER_BYTES:
                # Another epoch: whatever else it says, it is for somebody else.
                frame = edit(frame, epoch=draw.choice((0, 6, 8, 1 << 31)))
            self.found[("forged", "mangled", "nacks", "replayed")[how]] += 1
            batch.append(frame)
