# SPDX-License-Identifier: Apache-2.0
"""One worker of a campaign's job, as a process that a fork server makes: torch DDP with p4reduce's hook.

The annotations of the hook are compared with the real types by DDP: this module must not postpone their evaluation.
"""

import contextlib
import faulthandler
import hashlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from p4reduce.config import Settings
from p4reduce.ddp import P4ReduceState, allreduce_hook
from p4reduce.ddp.ring import TorchRing
from p4reduce.demo.processes import die_with_parent
from p4reduce.errors import P4ReduceError
from p4reduce.session import join
from p4reduce.transport.base import Transport
from p4reduce_bmv2 import netns
from p4reduce_bmv2.campaign.faulty import CLEAR, SwitchableTransport
from p4reduce_bmv2.campaign.messages import (
    Broken,
    Closed,
    Disturb,
    Disturbed,
    Done,
    Mended,
    Pace,
    Place,
    Reached,
    Ready,
    Release,
    Step,
    Training,
    Trigger,
)

_LOG = logging.getLogger("p4reduce.campaign")
STACKS_SIGNAL = signal.SIGUSR1
"""Makes a worker write the stacks of all its threads into its log."""
_INPUTS = 64
_POLL = 0.005
_CALM_SECONDS = 5.0


class Control:
    """The worker's end of the pipe: what it is told, and what it says."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self.pace = 0.0
        self.released = threading.Event()
        self.over = threading.Event()
        self._calm = threading.Event()
        self._calm.set()
        self.transport: SwitchableTransport | None = None
        threading.Thread(target=self._listen, name="campaign-control", daemon=True).start()

    def say(self, message: object) -> None:
        """Tell the campaign, unless it is gone: then this process is about to be killed."""
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._channel.send(message)

    def end(self) -> None:
        """The job is over, and with it whatever disturbs it: say what that has done."""
        self.over.set()
        self._calm.wait(_CALM_SECONDS)

    def _listen(self) -> None:
        while True:
            try:
                message = self._channel.recv()
            except (EOFError, OSError):
                return
            if isinstance(message, Pace):
                self.pace = message.seconds
            elif isinstance(message, Release):
                self.released.set()
            elif isinstance(message, Disturb):
                self._calm.clear()
                threading.Thread(target=self._disturb, args=(message,), name="campaign-disturb", daemon=True).start()

    def _disturb(self, order: Disturb) -> None:
        transport = self.transport
        if transport is None:
            self._calm.set()
            return
        before = transport.faults.lost
        started = time.monotonic()
        transport.set_rates(order.rates)
        self.say(Disturbed(started))
        while not self.over.wait(_POLL):
            if transport.faults.lost > before and time.monotonic() >= started + order.seconds:
                break
        transport.set_rates(CLEAR)
        self.say(Mended(time.monotonic(), transport.faults.lost - before))
        self._calm.set()


def main(channel: Connection, training: Training, place: Place, trigger: Trigger | None) -> None:
    """Entry point of the process."""
    settle_in(place)
    control = Control(channel)
    closing = contextlib.ExitStack()
    try:
        control.say(_train(control, closing, training, place, trigger))
    except BaseException as error:
        traceback.print_exc()
        ranks = tuple(getattr(error, "ranks", ()))
        ours = isinstance(error, P4ReduceError)
        control.say(Broken(time.monotonic(), type(error).__name__, str(error), ours, ranks))
    control.end()
    started = time.monotonic()
    try:
        closing.close()
    except BaseException as error:
        traceback.print_exc()
        control.say(Broken(time.monotonic(), type(error).__name__, f"while closing: {error}", False))
    control.say(Closed(time.monotonic(), time.monotonic() - started))
    logging.shutdown()
    sys.stderr.flush()
    # Not through the interpreter's end: taking a process group apart in order waits for ranks that may be dead.
    os._exit(0)


def settle_in(place: Place) -> None:
    """Set up a new process: end with the fork server, log to the place's file, move to its namespace."""
    die_with_parent(os.getppid())
    log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    faulthandler.enable(sys.stderr)
    faulthandler.register(STACKS_SIGNAL, sys.stderr, all_threads=True)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S", force=True,
    )  # fmt: skip
    if place.namespace:
        netns.enter(place.namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = place.interface
    torch.set_num_threads(1)


def _train(
    control: Control, closing: contextlib.ExitStack, training: Training, place: Place, trigger: Trigger | None
) -> Done:
    limit = timedelta(seconds=place.timeout)
    _LOG.info("rank %d of %d starts", place.rank, place.world_size)
    dist.init_process_group(
        "gloo", init_method=f"file://{place.rendezvous}", rank=place.rank, world_size=place.world_size, timeout=limit
    )
    _LOG.info("the process group is there")
    state = closing.enter_context(_state(control, place))
    ddp = DistributedDataParallel(_model(training), bucket_cap_mb=training.bucket_mib, gradient_as_bucket_view=True)
    present = _register(ddp, state, control, trigger if trigger and trigger.rank == place.rank else None)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    _LOG.info("training begins")
    control.say(Ready(time.monotonic()))
    for step in range(training.steps):
        if step == training.hold:
            control.released.wait()
        present[0] = step
        inputs = _inputs(training, step, place.rank)
        optimizer.zero_grad()
        (ddp(inputs) - inputs.flip(1)).square().mean().backward()
        optimizer.step()
        control.say(Step(step, time.monotonic(), _digest(ddp.module)))
        if control.pace:
            time.sleep(control.pace)
    state.check()
    return Done(time.monotonic(), state.stats())


def _state(control: Control, place: Place) -> P4ReduceState:
    settings = Settings(
        controller=place.controller,
        job=place.job,
        rank=place.rank,
        world_size=place.world_size,
        address=place.address,
        join_timeout=place.timeout,
    )

    def wrap(transport: Transport) -> Transport:
        control.transport = SwitchableTransport(transport, place.rank)
        return control.transport

    ring = TorchRing.from_group(timeout=place.timeout)
    return P4ReduceState(join(settings, wrap, ring), timeout=place.timeout, own_comm=True)


def _register(
    ddp: DistributedDataParallel, state: P4ReduceState, control: Control, trigger: Trigger | None
) -> list[int]:
    """Register the hook. The caller keeps the number of the step in the returned list."""
    present = [0]
    waiting = trigger is not None

    def hook(state: P4ReduceState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        nonlocal waiting
        due = waiting and trigger is not None and present[0] == trigger.step
        if due and trigger is not None and (bucket.index() >= trigger.bucket or bucket.is_last()):
            waiting = False
            control.say(Reached(time.monotonic()))
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(state, hook)
    return present


def _model(training: Training) -> torch.nn.Module:
    torch.manual_seed(training.seed)
    width = training.width
    return torch.nn.Sequential(
        torch.nn.Linear(_INPUTS, width), torch.nn.Tanh(), torch.nn.Linear(width, width), torch.nn.Tanh(),
        torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, _INPUTS),
    )  # fmt: skip


def _inputs(training: Training, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed((training.seed * 1_000_003 + step) * 64 + rank)
    return torch.randn(training.batch, _INPUTS, generator=generator)


def _digest(module: Any) -> str:
    state = hashlib.blake2b(digest_size=16)
    for parameter in module.parameters():
        state.update(parameter.detach().numpy())
    return state.hexdigest()
