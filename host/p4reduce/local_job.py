# SPDX-License-Identifier: Apache-2.0
"""A whole job inside this process, for tests and notebooks: embedded switch, controller and all members.

Everything is real but the cables: the switch executes the compiled P4 program behind UDP ports on loopback, the
controller programs it by P4Runtime, and the members talk to both as they would from other hosts. No privileges.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from p4reduce import constants, wire
from p4reduce.communicator import Communicator
from p4reduce.config import Settings
from p4reduce.core.config import RetransmissionPolicy
from p4reduce.errors import ConfigError, UsageError
from p4reduce.ring import Ring, local_rings
from p4reduce.session import join
from p4reduce.transport.faults import FaultRates, FaultyTransport, Wrap

if TYPE_CHECKING:
    from p4reduce_bmv2.embedded.switch import EmbeddedSwitch
    from p4reduce_controller.server import ControllerServer

_SWITCH_ADDRESS = "127.0.0.1"


@contextmanager
def local(
    world_size: int = 2,
    *,
    profile: str = "w34",
    loss: float = 0.0,
    duplicate: float = 0.0,
    reorder: float = 0.0,
    seed: int = 0,
    mode: str = "auto",
    **options: Any,
) -> Iterator[tuple[Communicator, ...]]:
    """Run a job of `world_size` ranks in this process; gives its communicators, rank 0 first.

        with p4reduce.local(world_size=2) as (a, b):
            future = a.allreduce_async(x)
            total = b.allreduce(y)

    Every rank must take part in every call, so all but the last must be asynchronous or in threads of their own.
    `loss`, `duplicate`, `reorder`: probability of each fault for every frame between worker and switch, both ways;
    `stats()["faults"]` counts what happened. `seed` makes the faults of a run repeatable, up to the timing of frames.
    `mode`: see `p4reduce.config.Settings`; the members have a ring path too. `options`: see `LocalJob`. Needs the
    extras: pip install 'p4reduce[controller,bmv2]'.
    """
    rates = FaultRates(loss, duplicate, reorder)
    with LocalJob(world_size, profile=profile, rates=rates, seed=seed, mode=mode, **options) as job:
        yield job.members


class LocalJob:
    """What `local` runs, with its parts in reach. A context manager, for one use."""

    switch: EmbeddedSwitch
    controller: ControllerServer
    members: tuple[Communicator, ...]

    def __init__(
        self,
        world_size: int,
        *,
        profile: str = "w34",
        rates: FaultRates | None = None,
        seed: int = 0,
        switch_loss: float = 0.0,
        job: str = "local",
        policy: RetransmissionPolicy | None = None,
        lease_seconds: float = 10.0,
        mode: str = "auto",
        ring: bool = True,
        lane_bits: int = 32,
    ) -> None:
        """`rates`: faults at the workers' sockets. `switch_loss`: probability that the switch itself loses a frame,
        per port and direction. `policy`, `lease_seconds`: what the controller prescribes. `mode`,
        `lane_bits`: as in `p4reduce.config.Settings`. `ring`: whether the members have a ring path.
        """
        if isinstance(world_size, bool) or not 1 <= world_size <= constants.MAX_WORKERS:
            raise UsageError(f"world_size must be from 1 to {constants.MAX_WORKERS}, not {world_size!r}")
        self._world_size = world_size
        self._profile = wire.profile(profile).name
        self._rates = rates or FaultRates()
        self._seed = seed
        self._switch_loss = switch_loss
        self._job = job
        self._policy = policy
        self._lease_seconds = lease_seconds
        self._mode = mode
        self._ring = ring
        self._lane_bits = lane_bits
        self._stack = ExitStack()

    def __enter__(self) -> LocalJob:
        with ExitStack() as stack:
            self._start_infrastructure(stack)
            self.members = self._join(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an exception nobody will submit what others wait for.
        timeout = 0.0 if kind is not None else None
        self._in_parallel([partial(member.close, timeout) for member in self.members])
        self._stack.close()

    def _start_infrastructure(self, stack: ExitStack) -> None:
        try:
            from p4reduce_bmv2.embedded.switch import EmbeddedSwitch
            from p4reduce_controller.hosts import Hosts
            from p4reduce_controller.server import ControllerServer
        except ImportError as error:
            raise ConfigError(
                f"local() runs a switch and a controller in this process and {error.name} is missing: "
                f"pip install 'p4reduce[controller,bmv2]'"
            ) from error
        ports = dict.fromkeys(range(1, self._world_size + 1), _SWITCH_ADDRESS)
        self.switch = stack.enter_context(
            EmbeddedSwitch(udp_ports=ports, loss=self._switch_loss, seed=self._seed)  # any free UDP ports
        )
        hosts = Hosts.embedded(self.switch.grpc_address, self.switch.endpoints, profile=self._profile)
        self.controller = stack.enter_context(
            ControllerServer(hosts, policy=self._policy, lease_seconds=self._lease_seconds)
        )

    def _join(self, stack: ExitStack) -> tuple[Communicator, ...]:
        calls = []
        rings: list[Ring | None] = [*local_rings(self._world_size)] if self._ring else [None] * self._world_size
        for rank in range(self._world_size):
            settings = Settings(
                controller=self.controller.address,
                job=self._job,
                rank=rank,
                world_size=self._world_size,
                mode=self._mode,
                lane_bits=self._lane_bits,
            )
            calls.append(partial(join, settings, self._wrap(rank), rings[rank]))
        members = self._in_parallel(calls, on_result=lambda member: stack.callback(member.close, 0.0))
        return tuple(members)

    def _wrap(self, rank: int) -> Wrap | None:
        if not self._rates:
            return None
        # Ranks draw from streams of their own: what one does must not decide what another one meets.
        return lambda transport: FaultyTransport(transport, self._rates, self._seed * constants.MAX_WORKERS + rank)

    def _in_parallel(self, calls: list[Any], on_result: Any = lambda _: None) -> list[Any]:
        """Run all calls at once; the first exception comes through after all have ended."""
        with ThreadPoolExecutor(len(calls)) as pool:
            futures = [pool.submit(call) for call in calls]
        results, errors = [], []
        for future in futures:
            error = future.exception()
            if error is not None:
                errors.append(error)
            else:
                on_result(future.result())
                results.append(future.result())
        if errors:
            raise errors[0]
        return results
