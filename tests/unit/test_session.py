# SPDX-License-Identifier: Apache-2.0
"""Communicators against a plain controller and switch: arrays in and out, arguments, life cycle."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from helpers import control
from helpers.control import World

import p4reduce
from p4reduce import wire
from p4reduce.errors import ControllerError, JobError, TransportError, UsageError
from p4reduce.proto import controller_pb2 as pb

W5 = wire.profile("w5")
world = control.new_world


@pytest.fixture
def single(world: World) -> p4reduce.Communicator:
    return world.connect(1)[0]


def reduce_all(world: World, comms: list[p4reduce.Communicator], arrays: list[Any], **kwargs: Any) -> list[Any]:
    return world.each(lambda pair: pair[0].allreduce(pair[1], **kwargs), list(zip(comms, arrays, strict=True)))


def whole_numbers(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Values whose sum is exact, so that tests can compare with ==."""
    return np.random.default_rng(seed).integers(-1000, 1000, shape).astype(np.float32)


# Arrays ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (5,), (64, 5), (7, 11, 13), (3000,)])
def test_shapes(world: World, shape: tuple[int, ...]) -> None:
    comms = world.connect(2)
    arrays = [whole_numbers(seed, shape) for seed in (1, 2)]
    kept = [array.copy() for array in arrays]
    for op, expected in (("sum", kept[0] + kept[1]), ("mean", (kept[0] + kept[1]) / np.float32(2))):
        for result, array, before in zip(reduce_all(world, comms, arrays, op=op), arrays, kept, strict=True):
            assert result.shape == shape
            assert result.dtype == np.float32
            np.testing.assert_array_equal(result, expected)
            np.testing.assert_array_equal(array, before)
            assert not np.may_share_memory(result, array) or not array.size


def test_a_numpy_scalar_counts_as_an_array_without_dimensions(world: World) -> None:
    comms = world.connect(2)
    for result in reduce_all(world, comms, [np.float32(2), np.ones(3, np.float32).sum()]):
        assert isinstance(result, np.ndarray)
        assert (result.shape, float(result)) == ((), 5.0)


def test_out_may_be_the_input(world: World) -> None:
    comms = world.connect(2)
    arrays = [whole_numbers(seed, (40, 50)) for seed in (1, 2)]
    expected = arrays[0] + arrays[1]
    results = world.each(lambda pair: pair[0].allreduce(pair[1], out=pair[1]), list(zip(comms, arrays, strict=True)))
    for result, array in zip(results, arrays, strict=True):
        assert result is array
        np.testing.assert_array_equal(array, expected)


def test_layouts(single: p4reduce.Communicator) -> None:
    base = whole_numbers(3, (60, 40))
    for view in (base[::2], base[:, ::3], base.T, base[::-1], np.asfortranarray(base)):
        np.testing.assert_array_equal(single.allreduce(view), view)
        out = np.full((80, 120), -1, dtype=np.float32)
        target = out[: view.shape[0], : 2 * view.shape[1] : 2]
        assert single.allreduce(view, out=target) is target
        np.testing.assert_array_equal(target, view)
        # Nothing beside the view was touched.
        assert (out == -1).sum() >= out.size - view.size


def test_unaligned_and_read_only_and_subclass_inputs(single: p4reduce.Communicator, tmp_path: Path) -> None:
    values = whole_numbers(4, (100,))
    raw = np.frombuffer(b"x" + values.tobytes(), dtype=np.uint8)
    unaligned = np.ndarray((100,), np.float32, raw.data, 1)
    assert not unaligned.flags.aligned
    assert not unaligned.flags.writeable
    np.testing.assert_array_equal(single.allreduce(unaligned), values)
    values.tofile(tmp_path / "values")
    mapped = np.memmap(tmp_path / "values", dtype=np.float32, mode="r+")
    assert single.allreduce(mapped, out=mapped) is mapped
    np.testing.assert_array_equal(mapped, values)


def test_partial_overlap_of_input_and_output(single: p4reduce.Communicator) -> None:
    base = whole_numbers(5, (5000,))
    before = base.copy()
    single.allreduce(base[:-100], out=base[100:])
    np.testing.assert_array_equal(base[100:], before[:-100])
    np.testing.assert_array_equal(base[:100], before[:100])


def test_not_finite_comes_back_as_nan_on_every_rank(world: World) -> None:
    comms = world.connect(2)
    arrays = [np.ones(1000, np.float32), np.ones(1000, np.float32)]
    arrays[1][300] = np.inf
    for result in reduce_all(world, comms, arrays):
        assert np.isnan(result[256:512]).all()
        assert (result[:256] == 2).all()
        assert (result[512:] == 2).all()


def test_many_async_reductions_keep_their_order(world: World) -> None:
    comms = world.connect(3)
    count = 60
    inputs = [[whole_numbers(100 * rank + i, (i * 37 % 900,)) for i in range(count)] for rank in range(3)]

    def run(rank: int) -> list[np.ndarray]:
        futures = [comms[rank].allreduce_async(array, "mean") for array in inputs[rank]]
        assert not any(future.cancel() for future in futures)
        return [future.result(30) for future in futures]

    for results in world.each(run, range(3)):
        for i, result in enumerate(results):
            expected = (inputs[0][i] + inputs[1][i] + inputs[2][i]) / np.float32(3)
            np.testing.assert_array_equal(result, expected)
    stats = comms[0].stats()
    assert (stats["submitted"], stats["completed"]) == (count, count)


def test_threads_may_submit_at_the_same_time(single: p4reduce.Communicator) -> None:
    def run(seed: int) -> bool:
        array = whole_numbers(seed, (700,))
        return bool((single.allreduce(array) == array).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(64)))


# Arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(3), r"array must be float32, float16 or int32, not float64: array.astype\(np.float32\)"),
        (np.zeros(3, np.int64), "must be float32, float16 or int32, not int64"),
        (np.zeros(3, ">f4"), "must be float32, float16 or int32, not >f4"),
        ([1.0, 2.0], "must be a numpy array, not list"),
        (1.0, "must be a numpy array, not float"),
        (None, "must be a numpy array, not NoneType"),
    ],
)
def test_wrong_arrays_are_refused(single: p4reduce.Communicator, array: Any, message: str) -> None:
    for call in (single.allreduce, single.allreduce_async):
        with pytest.raises(UsageError, match=message):
            call(array)
    assert single.stats()["submitted"] == 0


def test_wrong_outputs_and_operations_are_refused(single: p4reduce.Communicator) -> None:
    array = np.zeros((2, 3), np.float32)
    frozen = np.zeros((2, 3), np.float32)
    frozen.flags.writeable = False
    for out, message in (
        (np.zeros((3, 2), np.float32), r"out has the shape \(3, 2\), array \(2, 3\)"),
        (np.zeros(6, np.float32), "out has the shape"),
        (np.zeros((2, 3)), "out must be float32, not float64"),
        ([0.0], "out must be a numpy array"),
        (frozen, "out is read-only"),
    ):
        with pytest.raises(UsageError, match=message):
            single.allreduce(array, out=out)  # type: ignore[arg-type]
    for op in ("max", "SUM", "", None):
        with pytest.raises(UsageError, match=r"op .* is not known: use one of sum, mean"):
            single.allreduce(array, op=op)  # type: ignore[arg-type]
    assert single.stats()["submitted"] == 0
    np.testing.assert_array_equal(single.allreduce(array), array)


def test_a_callback_may_not_wait_in_the_io_thread(single: p4reduce.Communicator) -> None:
    found: list[BaseException | None] = []
    done = threading.Event()
    array = np.ones(5, np.float32)

    def callback(_: Any) -> None:
        try:
            single.allreduce(array)
        except UsageError as error:
            found.append(error)
        done.set()

    single.allreduce_async(array).add_done_callback(callback)
    assert done.wait(10)
    assert "I/O thread" in str(found[0])
    assert (single.allreduce(array) == 1).all()


def test_a_callback_may_close(single: p4reduce.Communicator) -> None:
    done = threading.Event()

    def callback(_: Any) -> None:
        single.close()
        done.set()

    single.allreduce_async(np.ones(5, np.float32)).add_done_callback(callback)
    assert done.wait(10)
    with pytest.raises(UsageError, match="closed"):
        single.barrier()


# Barrier -----------------------------------------------------------------------------------------------------------


def test_barrier_waits_for_the_last(world: World) -> None:
    comms = world.connect(3)
    order: list[str] = []

    def wait(rank: int) -> None:
        comms[rank].barrier()
        order.append(str(rank))

    first, second = world.pool.submit(wait, 0), world.pool.submit(wait, 1)
    world.controller.wait_for(
        lambda: sum(r.submitted for r in world.controller.jobs["job"].reports.values()) >= 2, timeout=20
    )
    assert order == []
    order.append("2")
    comms[2].barrier()
    first.result(10)
    second.result(10)
    assert order[0] == "2"


def test_barrier_timeout_names_who_is_missing_and_the_job_goes_on(world: World) -> None:
    comms = world.connect(3)
    waiting = world.pool.submit(comms[1].barrier)
    world.controller.wait_for(lambda: world.controller.jobs["job"].reports[1].submitted == 1)
    with pytest.raises(
        TimeoutError, match=r"job 'job': barrier \(bucket 0\) not complete after 0.05 s: rank 2 did not"
    ):
        comms[0].barrier(timeout=0.05)
    assert comms[0].stats()["submitted"] == 1
    comms[2].barrier()
    waiting.result(10)
    assert reduce_all(world, comms, [np.ones(2, np.float32)] * 3)[0][0] == 3


def test_barrier_timeout_is_not_raised_when_all_is_well(world: World) -> None:
    comms = world.connect(2)
    world.each(lambda comm: comm.barrier(timeout=30), comms)


# Joining -----------------------------------------------------------------------------------------------------------


def test_properties_and_repr(world: World) -> None:
    a, b = world.connect(2, job="train")
    assert (a.rank, a.world_size, a.job, a.epoch, a.profile) == (0, 2, "train", b.epoch, "w5")
    assert b.rank == 1
    assert repr(a) == f"<p4reduce.Communicator job='train' rank=0 world_size=2 epoch={a.epoch} profile=w5 open>"
    a.close()
    assert repr(a).endswith(" closed>")


def test_the_environment_is_enough(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P4REDUCE_CONTROLLER", world.controller.address)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "elastic")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    with p4reduce.connect() as comm:
        assert comm.job == "elastic"
        assert world.controller.jobs["elastic"].requests[0].incarnation == 2


def test_what_a_join_tells_the_controller(world: World) -> None:
    comms = world.connect(2)
    for rank, request in world.controller.jobs["job"].requests.items():
        assert request.ip == f"127.0.1.{rank + 1}"
        assert request.udp_port == comms[rank]._session.transport.local[1]
        assert request.mtu >= W5.mtu
        assert request.receive_frames >= 8
        assert request.client_version == p4reduce.__version__
        assert request.wait_seconds == 60


def test_an_explicit_address_is_used(world: World) -> None:
    (comm,) = world.connect(1, address="127.0.0.5")
    assert comm._session.transport.local[0] == "127.0.0.5"
    assert (comm.allreduce(np.ones(4, np.float32)) == 1).all()


def test_a_switch_that_is_not_on_loopback_is_reached_by_routing(world: World) -> None:
    world.controller.describe["loopback"] = False
    (comm,) = world.connect(1)
    assert comm._session.transport.local[0] == "127.0.0.1"


def test_no_controller_says_what_to_do() -> None:
    with pytest.raises(
        ControllerError, match=r"127.0.0.1:1 not reachable within 0.3 s: start it with .*serve"
    ) as found:
        p4reduce.connect("127.0.0.1:1", "job", 0, 1, connect_timeout=0.3)
    assert "P4REDUCE_CONTROLLER" in str(found.value)
    assert found.value.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED")


def test_missing_ranks_are_named(world: World) -> None:
    with pytest.raises(ControllerError, match=r"join: .*ranks \[1, 2\] have not joined") as found:
        p4reduce.connect(world.controller.address, "job", 0, 3, join_timeout=0.2)
    assert found.value.code == "DEADLINE_EXCEEDED"


def test_a_controller_without_a_switch_speaks_for_itself(world: World) -> None:
    world.controller.refuse_join = (grpc.StatusCode.UNAVAILABLE, "no session with the switch, join again later")
    with pytest.raises(ControllerError, match=r"join: controller .*: no session with the switch") as found:
        world.connect(1, connect_timeout=0.3)
    assert found.value.code == "UNAVAILABLE"
    assert "p4reduce-controller serve" not in str(found.value)


def test_mtu_is_checked_before_anybody_waits(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p4reduce.session.path_mtu", lambda _: 1300)
    with pytest.raises(TransportError, match="profile w5 needs an MTU of 1340"):
        world.connect(1)
    assert "job" not in world.controller.jobs


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("epoch", 0, "epoch 0"),
        ("order.run_switch.or_slots", 0, "no slots for OR"),
        ("order.run_switch.add_slots", 0, "no slots for ADD"),
        ("order.run_switch.add_slots", 1024, "more slots than a switch has"),
        ("order.run_switch.epoch", 0, "an order for epoch 0"),
        ("order.run_switch.first_bucket", 3, "an order for buckets from 3 on"),
        ("order.run_ring.epoch", 7, "an order to take the ring path, which this rank does not have"),
        ("order.stop.epoch", 7, "no order to begin with"),
        ("endpoint_port", 0, "UDP port 0"),
        ("endpoint_port", 70000, "UDP port 70000"),
        ("endpoint_ip", "switch.example", "endpoint address 'switch.example'"),
        ("endpoint_ip", "", "endpoint address ''"),
        ("lease_seconds", 0.0, "a lease of 0.0 s"),
        ("lease_seconds", float("nan"), "a lease of nan s"),
        ("lease_seconds", float("inf"), "a lease of inf s"),
    ],
)
def test_nonsense_from_the_controller_is_refused(world: World, field: str, value: Any, message: str) -> None:
    def change(reply: pb.JoinReply) -> None:
        message: Any = reply
        *outer, last = field.split(".")
        for name in outer:
            message = getattr(message, name)
        setattr(message, last, value)

    world.controller.change_reply = change
    with pytest.raises(ControllerError, match=message) as found:
        world.connect(1)
    assert found.value.code == "INTERNAL"
    if field != "epoch":  # 0 is no epoch that could be left
        assert world.controller.jobs["job"].left == {0}, "the others would wait for this rank"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"profile": "w99"}, "profile 'w99', which p4reduce .* lacks"),
        ({"udp_port": 0}, "UDP port 0"),
        ({"loopback": False, "switch_ip": "switch.example"}, "switch address 'switch.example'"),
    ],
)
def test_a_description_that_makes_no_sense_is_refused(world: World, change: dict[str, Any], message: str) -> None:
    world.controller.describe.update(change)
    with pytest.raises(ControllerError, match=message) as found:
        world.connect(1)
    assert found.value.code == "INTERNAL"


def test_a_policy_without_sense_is_refused_and_the_epoch_left(world: World) -> None:
    world.controller.change_reply = lambda reply: setattr(reply.policy, "initial_seconds", 1e-9)
    with pytest.raises(ControllerError, match="retransmission"):
        world.connect(1)
    assert world.controller.jobs["job"].left == {0}


# Life cycle --------------------------------------------------------------------------------------------------------


def test_closed_is_closed(world: World) -> None:
    (comm,) = world.connect(1)
    with comm as same:
        assert same is comm
    comm.close()
    comm.close()
    for call in (comm.barrier, lambda: comm.allreduce(np.ones(1, np.float32))):
        with pytest.raises(UsageError, match=r"rank 0 of job 'job' is closed: connect\(\) again"):
            call()
    assert comm.stats()["submitted"] == 0
    assert world.controller.jobs["job"].left == {0}


def test_close_waits_for_what_is_pending(world: World) -> None:
    comms = world.connect(2)
    arrays = [whole_numbers(seed, (2000,)) for seed in (1, 2)]
    future = comms[0].allreduce_async(arrays[0])
    closing = world.pool.submit(comms[0].close)
    result = comms[1].allreduce(arrays[1])
    closing.result(10)
    np.testing.assert_array_equal(future.result(0), result)


def test_closing_with_pending_buckets_fails_them_here_and_ends_the_job_there(world: World) -> None:
    comms = world.connect(3)
    pending = comms[0].allreduce_async(np.ones(10, np.float32))
    other = comms[1].allreduce_async(np.ones(10, np.float32))
    comms[0].close(timeout=0.0)
    with pytest.raises((UsageError, JobError), match=r"closed"):
        pending.result(10)
    with pytest.raises(JobError, match=r"ABORTED.*rank 0 was closed while 1 of its buckets were pending"):
        other.result(10)
    with pytest.raises(JobError, match="rank 0 was closed"):
        comms[2].barrier()
    rank, trouble = world.controller.trouble[0]
    assert (rank, trouble.code) == (0, pb.Trouble.ABORTED)


def test_a_dropped_communicator_leaves(world: World) -> None:
    comm = p4reduce.connect(world.controller.address, "job", 0, 1)
    assert (comm.allreduce(np.ones(1, np.float32)) == 1).all()
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("p4reduce-")]
    assert len(threads) == 2
    del comm
    gc.collect()
    world.controller.wait_for(lambda: world.controller.jobs["job"].left == {0})
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_a_pending_future_keeps_the_communicator_alive(world: World) -> None:
    first = p4reduce.connect
    pool = ThreadPoolExecutor(2)
    a, b = pool.map(lambda rank: first(world.controller.address, "job", rank, 2), range(2))
    future = a.allreduce_async(np.full(3, 1, np.float32))
    del a
    gc.collect()
    assert (b.allreduce(np.full(3, 2, np.float32)) == 3).all()
    assert (future.result(10) == 3).all()
    b.close()
    pool.shutdown()


def test_an_interrupt_while_waiting_leaves_the_communicator_closable(world: World) -> None:
    comms = world.connect(2)
    array = np.ones(10, np.float32)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            comms[0].allreduce(array)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    # The bucket is still in the sequence and completes once rank 1 comes.
    assert (comms[1].allreduce(array) == 2).all()
    comms[0].close()
    assert comms[0].stats()["completed"] == 1


def test_an_interrupt_while_closing_closes_nevertheless(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    comms = world.connect(2)
    pending = comms[0].allreduce_async(np.ones(3, np.float32))
    transport = comms[0]._session.transport

    def interrupt(timeout: float) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(comms[0]._session.driver, "drain", interrupt)
    with pytest.raises(KeyboardInterrupt):
        comms[0].close()
    assert isinstance(pending.exception(10), UsageError | JobError)
    assert transport.fileno() == -1
    with pytest.raises(JobError, match="rank 0 was closed while some of its buckets were pending"):
        comms[1].barrier()


IN_A_SCRIPT = """
import os, sys, warnings
import numpy as np
import p4reduce

comm = p4reduce.connect({address!r}, "forked", 0, 1)
assert comm.allreduce(np.ones(5, np.float32)).sum() == 5
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork with threads
child = os.fork()
if child == 0:
    code = 1
    try:
        comm.allreduce(np.ones(5, np.float32))
    except p4reduce.UsageError as error:
        assert "forked child" in str(error), error
        try:
            comm.barrier()
        except p4reduce.UsageError:
            comm.close()
            code = 0
    sys.exit(code)  # runs the exit handlers, which must leave the parent's job alone
_, status = os.waitpid(child, 0)
assert status == 0, status
assert comm.allreduce(np.full(5, 2, np.float32)).sum() == 10
print("parent is well")
# No close: the exit handler leaves.
"""


def test_a_forked_child_is_refused_and_the_parent_goes_on_and_exit_leaves(world: World) -> None:
    script = IN_A_SCRIPT.format(address=world.controller.address)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "parent is well\n"), done.stderr
    world.controller.wait_for(lambda: world.controller.jobs["forked"].left == {0})
    assert world.controller.jobs["forked"].fence is None


def test_stats_are_ready_for_json(single: p4reduce.Communicator) -> None:
    single.allreduce(np.ones(5000, np.float32))
    single.barrier()
    stats = json.loads(json.dumps(single.stats()))
    assert (stats["elements"], stats["bytes"], stats["submitted"], stats["completed"]) == (5000, 20000, 2, 2)
    assert stats["core"]["results"] == stats["core"]["frames_sent"] >= 17
    assert stats["transport"]["received"] == stats["core"]["frames_received"]
    assert set(stats["seconds"]) == {"encode", "wire", "wait", "decode"}
    # Waiting is the one thing that need not happen: on a busy machine the answer may be there before the thread asks.
    assert all(stats["seconds"][name] > 0 for name in ("encode", "wire", "decode"))
    assert stats["seconds"]["wait"] >= 0
    assert stats["controller_connected"] is True
    assert stats["faults"] is None


def test_an_idle_communicator_uses_no_processor(world: World) -> None:
    comms = world.connect(2)
    pending = comms[0].allreduce_async(np.ones(3, np.float32))  # waiting for a rank is idling too
    started = time.process_time()
    done = threading.Event()
    assert not done.wait(0.5)
    assert time.process_time() - started < 0.25
    comms[1].allreduce(np.ones(3, np.float32))
    pending.result(10)


def test_settings_are_logged_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="p4reduce"):
        world.connect(1)
    lines = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("settings: ") for line in lines) == 1
    assert any("rank 0 of 1 joined job 'job'" in line for line in lines)


def test_no_warning_is_left_behind(world: World) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for comm in world.connect(2):
            comm.close()
        gc.collect()


def test_pid_is_checked_not_guessed(single: p4reduce.Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(UsageError, match="forked child"):
        single.allreduce(np.ones(1, np.float32))
