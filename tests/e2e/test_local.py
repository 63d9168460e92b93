# SPDX-License-Identifier: Apache-2.0
"""Whole jobs in one process: real controller, embedded switch running the compiled P4 program, real sockets.

`expected` computes what every rank must get, bit for bit, from the rules of docs/design.md, section 5, in another way
than the library: whole arrays in float64 and int64, no wire, no lanes.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import grpc
import numpy as np
import numpy.typing as npt
import pytest

import p4reduce
from p4reduce import wire
from p4reduce.core.batch import ReceiveBatch
from p4reduce.core.config import RetransmissionPolicy
from p4reduce.errors import ConfigError, JobError, MismatchError, StalledError, UsageError, WorkerLostError
from p4reduce.local_job import LocalJob
from p4reduce.proto import controller_pb2 as pb
from p4reduce.proto import controller_pb2_grpc
from p4reduce.transport.base import Transport
from p4reduce.transport.faults import FaultRates
from p4reduce_bmv2.embedded.switch import EmbeddedSwitch
from p4reduce_controller.hosts import Hosts
from p4reduce_controller.server import ControllerServer

F32 = npt.NDArray[np.float32]
Members = Sequence[p4reduce.Communicator]
T = TypeVar("T")
BLOCK = 256
WAIT = 60


def each(members: Members, call: Callable[[p4reduce.Communicator], T]) -> list[T]:
    """Call for every member at once; the first exception comes through."""
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(call, members, timeout=WAIT))


def errors_of(members: Members, call: Callable[[p4reduce.Communicator], object]) -> list[BaseException | None]:
    with ThreadPoolExecutor(len(members)) as pool:
        return [future.exception(WAIT) for future in [pool.submit(call, member) for member in members]]


def reduce(members: Members, arrays: Sequence[F32], op: Any = "sum") -> list[F32]:
    return each(members, lambda member: member.allreduce(arrays[member.rank], op))


def expected(arrays: Sequence[F32], op: str = "sum") -> F32:
    """The sum or mean as the numerics define it."""
    workers = len(arrays)
    shape, size = arrays[0].shape, arrays[0].size
    padded = np.zeros((workers, -(-size // BLOCK) * BLOCK), np.float32)
    for row, array in zip(padded, arrays, strict=True):
        row[:size] = array.reshape(-1)
    blocks = padded.reshape(workers, -1, BLOCK)
    exponent = (blocks.view(np.uint32) >> 23 & 0xFF).max(axis=(0, 2)).astype(np.int64)
    bias = (2**32 - 1) // workers // 2
    precision = max(p for p in range(32) if 2**p - 2 ** max(p - 24, 0) <= bias)
    scale = precision - (np.maximum(exponent, 1) - 126)
    finite = np.where(np.isfinite(blocks), blocks, np.float32(0)).astype(np.float64)
    integers = np.rint(np.ldexp(finite, scale[None, :, None])).astype(np.int64)
    sums = np.ldexp(integers.sum(axis=0).astype(np.float32), -scale[:, None]).astype(np.float32)
    if op == "mean":
        sums = sums / np.float32(workers)
    sums[exponent == 255] = np.nan
    return np.asarray(sums.reshape(-1)[:size].reshape(shape), np.float32)


def mixed(seed: int, rank: int, count: int) -> F32:
    """Values of all magnitudes, denormal to nearly the largest, alike within a stretch of elements, many zeros."""
    rng = np.random.default_rng([seed, rank])
    values = rng.standard_normal(count)
    stretches = np.repeat(rng.integers(-148, 122, -(-count // 100)), 100)[:count]
    values = np.ldexp(values, stretches)
    values[rng.random(count) < 0.1] = 0.0
    return values.astype(np.float32)


def gradients(seed: int, rank: int, count: int) -> F32:
    rng = np.random.default_rng([seed, rank, 1])
    return (rng.standard_normal(count) * 0.01).astype(np.float32)


def assert_same_bits(found: Sequence[F32], wanted: F32) -> None:
    for array in found:
        assert array.shape == wanted.shape
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array.reshape(-1).view(np.uint32), wanted.reshape(-1).view(np.uint32))


# Sums --------------------------------------------------------------------------------------------------------------


def test_sums_are_exactly_what_the_numerics_define() -> None:
    with p4reduce.local(world_size=4) as members:
        for count, op in ((1, "sum"), (255, "mean"), (2176, "sum"), (69_633, "mean"), (250_000, "sum")):
            arrays = [mixed(count, rank, count) for rank in range(4)]
            assert_same_bits(reduce(members, arrays, op), expected(arrays, op))


def test_three_million_elements() -> None:
    count = 3_000_000
    with p4reduce.local(world_size=4) as members:
        arrays = [gradients(3, rank, count) for rank in range(4)]
        results = reduce(members, arrays, "mean")
    assert_same_bits(results, expected(arrays, "mean"))
    exact = np.sum([array.astype(np.float64) for array in arrays], axis=0) / 4
    assert np.abs(results[0] - exact).max() <= 2.0**-24 * np.abs(exact).max()


@pytest.mark.parametrize("profile", ["w5", "w34"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_profiles_and_sizes_of_jobs(profile: str, world_size: int) -> None:
    with p4reduce.local(world_size, profile=profile) as members:
        assert [member.rank for member in members] == list(range(world_size))
        assert {member.profile for member in members} == {profile}
        for count in (5, 20_001):
            arrays = [mixed(count, rank, count) for rank in range(world_size)]
            assert_same_bits(reduce(members, arrays), expected(arrays))
        each(members, lambda member: member.barrier())


def test_whole_numbers_and_short_mantissas_are_summed_exactly() -> None:
    rng = np.random.default_rng(5)
    whole = [rng.integers(-(2**20), 2**20, 30_000).astype(np.float32) for _ in range(4)]
    short = [(rng.integers(-128, 128, 30_000) / 1024).astype(np.float32) for _ in range(4)]
    with p4reduce.local(world_size=4) as members:
        for arrays in (whole, short):
            exact = np.sum([array.astype(np.float64) for array in arrays], axis=0)
            assert_same_bits(reduce(members, arrays), exact.astype(np.float32))


def test_not_finite_is_nan_on_every_rank() -> None:
    count = 10_000
    arrays = [gradients(6, rank, count) for rank in range(3)]
    arrays[0][70] = np.inf
    arrays[1][3000] = -np.inf
    arrays[2][9999] = np.nan
    with p4reduce.local(world_size=3) as members:
        for op in ("sum", "mean"):
            results = reduce(members, arrays, op)
            wanted = expected(arrays, op)
            for result in results:
                np.testing.assert_array_equal(np.isnan(result), np.isnan(wanted))
                np.testing.assert_array_equal(result, wanted)
            assert np.isnan(wanted[:256]).all()
            assert np.isnan(wanted[3000])
            assert np.isnan(wanted[9999])
            assert np.isfinite(wanted[256:2800]).all()


def test_odd_arrays() -> None:
    base = mixed(7, 0, 60_000).reshape(200, 300)
    views: list[F32] = [
        np.empty(0, np.float32),
        np.empty((3, 0, 2), np.float32),
        np.array(2.5, np.float32),
        np.array([-1.5], np.float32),
        base[::3, ::-2],
        base.T,
        np.asfortranarray(base),
    ]
    with p4reduce.local(world_size=2) as members:
        for view in views:
            assert_same_bits(reduce(members, [view, view]), expected([view, view]))
            targets = [np.full(view.shape, 9, np.float32) for _ in members]
            copies = [view.copy(order="K") for _ in members]
            each(members, lambda m: m.allreduce(copies[m.rank], out=targets[m.rank]))  # noqa: B023
            assert_same_bits(targets, expected([view, view]))
            each(members, lambda m: m.allreduce(copies[m.rank], out=copies[m.rank]))  # noqa: B023
            assert_same_bits(copies, expected([view, view]))


def test_many_buckets_in_flight() -> None:
    counts = [1 + 7919 * i % 30_000 for i in range(40)]
    with p4reduce.local(world_size=3) as members:

        def run(member: p4reduce.Communicator) -> list[F32]:
            arrays = [gradients(count, member.rank, count) for count in counts]
            return [future.result(WAIT) for future in [member.allreduce_async(a, "mean", a) for a in arrays]]

        for results in zip(*each(members, run), strict=True):
            count = results[0].size
            assert_same_bits(results, expected([gradients(count, rank, count) for rank in range(3)], "mean"))


# Faults ------------------------------------------------------------------------------------------------------------


def run_with_faults(seed: int, **faults: float) -> tuple[list[F32], list[dict[str, Any]]]:
    switch_loss = faults.pop("switch_loss", 0.0)
    policy = RetransmissionPolicy(initial=0.02, maximum=0.1, deadline=30.0)
    with LocalJob(4, rates=FaultRates(**faults), seed=seed, switch_loss=switch_loss, policy=policy) as job:
        results = []
        for count in (40_000, 3, 170_000):
            arrays = [mixed(count, rank, count) for rank in range(4)]
            results.append(reduce(job.members, arrays, "mean"))
        each(job.members, lambda member: member.barrier())
        stats = [member.stats() for member in job.members]
        ports = job.switch.stats()["ports"].values()
        lost = sum(port["drops"].get(f"loss_{way}", 0) for port in ports for way in ("rx", "tx"))
        assert (lost > 0) == (switch_loss > 0)
    for found in results:
        assert_same_bits(found, found[0])
    return [found[0] for found in results], stats


def test_the_same_bits_whatever_is_lost_duplicated_or_reordered() -> None:
    wanted = [expected([mixed(count, rank, count) for rank in range(4)], "mean") for count in (40_000, 3, 170_000)]
    plain, stats = run_with_faults(0)
    assert all(one["faults"] is None for one in stats)
    for found, array in zip(plain, wanted, strict=True):
        assert_same_bits([found], array)
    for seed in (1, 2):
        faulty, stats = run_with_faults(seed, loss=0.02, duplicate=0.02, reorder=0.02, switch_loss=0.01)
        for one in stats:
            assert all(one["faults"][kind] > 0 for kind in ("lost", "duplicated", "reordered"))
        assert sum(one["core"]["retransmissions"] for one in stats) > 0
        assert sum(one["core"]["duplicates"] + one["core"]["stale"] for one in stats) > 0
        assert sum(one["core"]["integrity"] for one in stats) == 0
        for found, array in zip(faulty, wanted, strict=True):
            assert_same_bits([found], array)


def test_foreign_and_damaged_datagrams_are_counted_and_ignored() -> None:
    count = 50_000
    full = wire.profile("w34").datagram_bytes
    with LocalJob(2) as job:
        members = job.members
        # The switch's own port 1 for what seems to come from the endpoint, a stranger for the rest.
        switch_socket = job.switch._data_plane.ports[1]._socket  # type: ignore[union-attr]
        target = members[0]._session.transport.local
        epoch = members[0].epoch
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            foreign = [b"", b"hello", bytes(32), bytes(full), wire.make_header(kind=2, epoch=epoch) + bytes(256)]
            for datagram in foreign:
                stranger.sendto(datagram, target)
            ours = wire.make_header(kind=2, op=0, words=34, epoch=epoch, rank=0, count_or_reason=2)
            damaged = [b"", ours[:31], ours, ours + bytes(100), ours + bytes(full - 32 + 1), bytes(full)]
            other_epoch = wire.make_header(kind=2, op=0, words=1, epoch=epoch + 1, count_or_reason=2) + bytes(256)
            for datagram in [*damaged, other_epoch]:
                switch_socket.sendto(datagram, target)
            # To the switch: strangers and nonsense from a worker's own address.
            endpoint = job.switch.endpoints[1]
            for datagram in foreign:
                stranger.sendto(datagram, endpoint)
            raw = members[0]._session.transport
            own = socket.socket(fileno=socket.dup(raw.fileno()))
            own.sendto(b"nonsense", endpoint)
            own.close()
        arrays = [gradients(8, rank, count) for rank in range(2)]
        assert_same_bits(reduce(members, arrays), expected(arrays))
        stats = members[0].stats()
    assert stats["transport"]["foreign"] == len(foreign)
    assert stats["transport"]["oversized"] == 1
    assert stats["core"]["malformed"] == len(damaged)
    assert stats["core"]["foreign"] == 1
    assert members[1].stats()["transport"]["foreign"] == 0


# Two paths ---------------------------------------------------------------------------------------------------------


def path_of_all(members: Members) -> set[str]:
    return {member.path for member in members}


class Reducer:
    """Reduces the same arrays again and again, and holds every result against what it must be."""

    def __init__(self, job: LocalJob, counts: Sequence[int]) -> None:
        self.members = job.members
        size = len(job.members)
        self.arrays = [[mixed(count, rank, count) for rank in range(size)] for count in counts]
        self.wanted = [expected(arrays, "mean") for arrays in self.arrays]

    def once(self) -> None:
        futures = [
            [member.allreduce_async(arrays[member.rank], "mean") for arrays in self.arrays] for member in self.members
        ]
        for member in futures:
            for future, wanted in zip(member, self.wanted, strict=True):
                assert_same_bits([future.result(WAIT)], wanted)

    def until(self, path: str) -> None:
        """Go on until all members are on `path`."""
        end = time.monotonic() + WAIT
        while path_of_all(self.members) != {path}:
            assert time.monotonic() < end, f"not on the {path} path: {[m.stats() for m in self.members]}"
            self.once()
        self.once()


@contextmanager
def operator(job: LocalJob) -> Iterator[Any]:
    with grpc.insecure_channel(job.controller.address) as channel:
        yield controller_pb2_grpc.ControllerStub(channel)  # type: ignore[no-untyped-call]


def test_mode_off_gives_the_same_bits_without_the_switch() -> None:
    with p4reduce.local(world_size=3, mode="off") as members:
        assert path_of_all(members) == {"ring"}
        for count, op in ((1, "sum"), (2176, "sum"), (69_633, "mean")):
            arrays = [mixed(count, rank, count) for rank in range(3)]
            assert_same_bits(reduce(members, arrays, op), expected(arrays, op))
        each(members, lambda member: member.barrier())
        stats = members[0].stats()
    assert (stats["mode"], stats["core"]["frames_sent"], stats["ring"]["buckets"]) == ("off", 0, 4)


def test_an_operator_moves_a_job_to_the_ring_and_back(caplog: pytest.LogCaptureFixture) -> None:
    with LocalJob(3) as job, operator(job) as stub, caplog.at_level("WARNING", logger="p4reduce.path"):
        reducer = Reducer(job, (5000, 1, 300))
        reducer.once()
        stub.SetMode(pb.SetModeRequest(job="local", mode="off"))
        reducer.until("ring")
        stub.SetMode(pb.SetModeRequest(job="local", mode="auto"))
        reducer.until("switch")
        stub.Drain(pb.DrainRequest())
        reducer.until("ring")
        stub.Drain(pb.DrainRequest(undrain=True))
        reducer.until("switch")
        stats = [member.stats() for member in job.members]
    for one in stats:
        assert one["fallbacks"] == {"operator": 1, "drained": 1}
        assert one["promotions"] == 2
    lines = [record.getMessage() for record in caplog.records if record.name == "p4reduce.path"]
    assert len(lines) == 3 * 4
    assert sum("ring path from bucket" in line for line in lines) == 6


@pytest.mark.parametrize("seed", [1, 2])
def test_a_switch_that_dies_in_the_middle_of_buckets_costs_no_bit(seed: int) -> None:
    counts = (40_000, 3, 250_000, 700, 90_000)
    policy = RetransmissionPolicy(silent=0.2, fallback=0.3)
    with LocalJob(4, policy=policy) as job:
        reducer = Reducer(job, counts)
        reducer.once()
        futures = [[m.allreduce_async(a[m.rank], "mean") for a in reducer.arrays * 2] for m in job.members]
        futures[seed][0].result(WAIT)
        job.switch.stop()
        for member in futures:
            for future, wanted in zip(member, reducer.wanted * 2, strict=True):
                assert_same_bits([future.result(WAIT)], wanted)
        assert path_of_all(job.members) == {"ring"}
        reducer.once()
        stats = [member.stats() for member in job.members]
    assert all(one["fallbacks"] == {"switch_lost": 1} for one in stats)


class Deaf:
    """A transport that loses every sum on its way in."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.lost = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def receive(self, batch: ReceiveBatch) -> int:
        taken = self._transport.receive(batch)
        if (batch.headers["op"][: batch.count] == wire.Op.ADD).any():
            self.lost += batch.count
            batch.clear()
        return taken


def test_who_has_everything_stays_until_the_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank hears no sum. The others have theirs and close; their integers save it nevertheless."""
    policy = RetransmissionPolicy(silent=0.1, fallback=0.2)
    arrays = [mixed(9, rank, 50_000) for rank in range(3)]
    wanted = expected(arrays)
    with LocalJob(3, policy=policy) as job:
        members = job.members
        deaf = Deaf(members[1]._session.transport)
        monkeypatch.setattr(members[1]._session.driver, "_transport", deaf)
        futures = [member.allreduce_async(arrays[member.rank]) for member in members]
        assert_same_bits([futures[rank].result(WAIT) for rank in (0, 2)], wanted)
        with ThreadPoolExecutor(2) as pool:
            closing = [pool.submit(members[rank].close, 30.0) for rank in (0, 2)]
            assert_same_bits([futures[1].result(WAIT)], wanted)
            for one in closing:
                one.result(WAIT)
        assert deaf.lost > 0
        assert members[1].stats()["fallbacks"] == {"silent": 1}
        assert members[0].stats()["ring"]["compared"] == 1


def test_mode_require_ends_with_the_switch() -> None:
    policy = RetransmissionPolicy(deadline=1.0)
    with LocalJob(2, policy=policy, mode="require", lease_seconds=1.0) as job:
        assert_same_bits(reduce(job.members, [np.ones(9, np.float32)] * 2), np.full(9, 2, np.float32))
        job.switch.stop()
        for error in errors_of(job.members, lambda member: member.allreduce(np.ones(9, np.float32))):
            assert isinstance(error, JobError)


def test_without_a_ring_a_job_has_one_path() -> None:
    with LocalJob(2, ring=False) as job, operator(job) as stub:
        with pytest.raises(grpc.RpcError):
            stub.SetMode(pb.SetModeRequest(job="local", mode="off"))
        assert_same_bits(reduce(job.members, [np.ones(9, np.float32)] * 2), np.full(9, 2, np.float32))
        assert job.members[0].stats()["ring"] is None
    with pytest.raises(ConfigError, match="mode off is the ring path"), LocalJob(1, mode="off", ring=False):
        pass


# How jobs end ------------------------------------------------------------------------------------------------------


def test_different_shapes_are_a_mismatch_on_all_ranks() -> None:
    with p4reduce.local(world_size=3) as members:
        each(members, lambda member: member.allreduce(np.ones(10, np.float32)))
        sizes = (1000, 1000, 1001)
        for error in errors_of(members, lambda member: member.allreduce(np.ones(sizes[member.rank], np.float32))):
            assert type(error) is MismatchError
            assert (error.job, error.bucket) == ("local", 1)
        for error in errors_of(members, lambda member: member.barrier()):
            assert type(error) is MismatchError


def test_a_member_that_closes_early_is_named() -> None:
    with p4reduce.local(world_size=3) as members:
        for _ in range(3):
            each(members, lambda member: member.allreduce(np.ones(1000, np.float32)))
        members[1].close()
        others = (members[0], members[2])
        for error in errors_of(others, lambda member: member.allreduce(np.ones(1000, np.float32))):
            assert type(error) is WorkerLostError
            assert error.ranks == (1,)
            assert "rank 1 left after 3 buckets" in str(error)


def test_a_member_that_closes_with_buckets_pending_ends_the_job() -> None:
    with p4reduce.local(world_size=2) as members:
        pending = members[0].allreduce_async(np.ones(5, np.float32))
        members[0].close(timeout=0.0)
        assert isinstance(pending.exception(WAIT), JobError | UsageError)
        (error,) = errors_of(members[1:], lambda member: member.allreduce(np.ones(5, np.float32)))
        assert isinstance(error, JobError)
        assert "rank 0 was closed" in str(error)


def test_a_rank_that_does_not_take_part_is_named() -> None:
    policy = RetransmissionPolicy(deadline=0.5)
    with LocalJob(3, policy=policy) as job:
        late = job.members[2]
        errors = errors_of(job.members[:2], lambda member: member.allreduce(np.ones(5, np.float32)))
        for error in errors:
            assert type(error) is StalledError
            assert error.bucket == 0
            assert error.ranks == (2,)
        (error,) = errors_of([late], lambda member: member.barrier())
        assert type(error) is StalledError


ANOTHER_PROCESS = """
import sys
import numpy as np
import p4reduce

with p4reduce.connect(sys.argv[1], "job", 1, 2, incarnation=int(sys.argv[2])) as comm:
    for number in range(int(sys.argv[3])):
        assert (comm.allreduce(np.full(3000, number, np.float32)) == 2 * number).all()
    print("done", flush=True)
    sys.stdin.readline()
"""


def test_a_process_that_dies_is_named_and_the_next_incarnation_works() -> None:
    def start(incarnation: int, buckets: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", ANOTHER_PROCESS, controller.address, str(incarnation), str(buckets)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def reduce_with_peer(comm: p4reduce.Communicator, peer: subprocess.Popen[str], buckets: int) -> None:
        for number in range(buckets):
            assert (comm.allreduce(np.full(3000, number, np.float32)) == 2 * number).all()
        assert peer.stdout is not None
        assert peer.stdout.readline() == "done\n"

    with ExitStack() as stack:
        switch = stack.enter_context(EmbeddedSwitch(udp_ports={1: "127.0.0.1", 2: "127.0.0.1"}))
        hosts = Hosts.embedded(switch.grpc_address, switch.endpoints, profile="w34")
        controller = stack.enter_context(ControllerServer(hosts))
        with start(0, 5) as peer:
            comm = p4reduce.connect(controller.address, "job", 0, 2)
            reduce_with_peer(comm, peer, 5)
            pending = comm.allreduce_async(np.ones(10, np.float32))
            peer.kill()
            error = pending.exception(WAIT)
            assert type(error) is WorkerLostError
            assert error.ranks == (1,)
            assert "rank 1" in str(error)
            comm.close()
        with start(1, 3) as peer, p4reduce.connect(controller.address, "job", 0, 2, incarnation=1) as comm:
            reduce_with_peer(comm, peer, 3)
            assert peer.communicate("go\n", timeout=WAIT)[0] == ""
            assert peer.returncode == 0


def test_wrong_arguments_send_nothing() -> None:
    with p4reduce.local(world_size=2) as members:
        for dtype in (np.float64, np.int64, np.uint32, np.bool_):
            with pytest.raises(UsageError, match="must be float32"):
                members[0].allreduce(np.zeros(3, dtype))
        with pytest.raises(UsageError, match="out has the shape"):
            members[0].allreduce(np.zeros(3, np.float32), out=np.zeros(4, np.float32))
        assert_same_bits(reduce(members, [np.ones(3, np.float32)] * 2), np.full(3, 2, np.float32))
    with pytest.raises(UsageError, match="closed"):
        members[0].barrier()
    for world_size in (0, 65, True, -1):
        with pytest.raises(UsageError, match="world_size must be from 1 to 64"), p4reduce.local(world_size):
            pass
    with pytest.raises(ConfigError, match="unknown profile"), p4reduce.local(2, profile="w6"):
        pass
    with pytest.raises(ConfigError, match="loss is a probability"), p4reduce.local(2, loss=1.5):
        pass


def test_an_exception_inside_does_not_hang() -> None:
    def fail() -> None:
        with p4reduce.local(world_size=2) as members:
            members[0].allreduce_async(np.ones(5, np.float32))
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()


def test_missing_extras_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "p4reduce_bmv2.embedded.switch", None)
    with pytest.raises(ConfigError, match=r"pip install 'p4reduce\[controller,bmv2\]'"), p4reduce.local(2):
        pass
