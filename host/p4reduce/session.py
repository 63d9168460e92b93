# SPDX-License-Identifier: Apache-2.0
"""`connect`: from settings to an open communicator.

Describe tells which switch program runs and where; then the socket is opened and the MTU checked, so that a host
that cannot take part says so before anybody waits for it; Join blocks until all ranks are there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from p4reduce import __version__, wire
from p4reduce.communicator import Communicator, Session
from p4reduce.config import Settings
from p4reduce.controller_client import ControllerClient
from p4reduce.core.config import CoreConfig, RetransmissionPolicy
from p4reduce.core.worker import WorkerCore
from p4reduce.driver import Driver
from p4reduce.errors import ConfigError, ControllerError
from p4reduce.membership import Membership
from p4reduce.proto import controller_pb2 as pb
from p4reduce.transport.base import Address, Transport
from p4reduce.transport.limits import check_mtu, path_mtu, source_address
from p4reduce.transport.udp import UdpTransport

__all__ = ["Communicator", "connect", "join"]

_LOG = logging.getLogger(__name__)


def connect(
    controller: str | None = None,
    job: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    **overrides: Any,
) -> Communicator:
    """Join a job and return this worker's end of it. Blocks until all ranks have joined.

    What is not given comes from the environment, a TOML file or the defaults: see `p4reduce.config.Settings`, whose
    other fields may be given as `overrides`. Raises ConfigError (a setting), ControllerError (the controller cannot
    be reached, or refuses, or not all ranks joined in time) and TransportError (address or MTU).
    """
    arguments = {"controller": controller, "job": job, "rank": rank, "world_size": world_size, **overrides}
    return join(Settings.resolve(arguments))


def join(settings: Settings, wrap: Callable[[Transport], Transport] | None = None) -> Communicator:
    """`connect` with settings that are resolved already. `wrap` may put something between core and socket."""
    if settings.log_level is not None:
        logging.getLogger("p4reduce").setLevel(settings.log_level)
    settings.log(_LOG)
    client = ControllerClient(settings.controller, timeout=settings.connect_timeout)
    transport: Transport | None = None
    try:
        description = client.describe()
        transport, mtu = _open_transport(settings, description)
        if wrap is not None:
            transport = wrap(transport)
        reply = client.join(_join_request(settings, transport, mtu))
        try:
            return _assemble(settings, client, transport, reply)
        except BaseException:
            _leave_quietly(client, settings, reply.epoch)
            raise
    except BaseException:
        if transport is not None:
            transport.close()
        client.close()
        raise


def _open_transport(settings: Settings, description: pb.DescribeReply) -> tuple[Transport, int]:
    """A socket on the right address, and the MTU towards the switch, checked before anybody waits for this rank."""
    profile = wire.profile(description.profile)
    if description.loopback:
        towards: Address = ("127.0.0.1", description.udp_port)
        address = settings.address or f"127.0.1.{settings.rank + 1}"
    else:
        towards = (description.switch_ip, description.udp_port)
        address = settings.address or source_address(towards)
    mtu = path_mtu(towards)
    check_mtu(profile, mtu)
    return UdpTransport(address, None, profile), mtu


def _join_request(settings: Settings, transport: Transport, mtu: int) -> pb.JoinRequest:
    ip, port = transport.local
    return pb.JoinRequest(
        job=settings.job,
        world_size=settings.world_size,
        rank=settings.rank,
        incarnation=settings.incarnation,
        ip=ip,
        udp_port=port,
        mtu=mtu,
        receive_frames=transport.receive_frames,
        wait_seconds=settings.join_timeout,
        client_version=__version__,
    )


def _core_config(settings: Settings, profile: wire.Profile, reply: pb.JoinReply) -> CoreConfig:
    policy = reply.policy
    try:
        return CoreConfig(
            job=settings.job,
            epoch=reply.epoch,
            rank=settings.rank,
            world_size=settings.world_size,
            profile=profile,
            or_slots=reply.or_slots,
            add_slots=reply.add_slots,
            policy=RetransmissionPolicy(
                initial=policy.initial_seconds,
                minimum=policy.min_seconds,
                maximum=policy.max_seconds,
                deadline=policy.deadline_seconds,
                early_resend=policy.early_resend,
            ),
        )
    except ConfigError as error:
        raise ControllerError(
            f"controller {settings.controller} answered the join with: {error}", "INTERNAL"
        ) from error


def _assemble(settings: Settings, client: ControllerClient, transport: Transport, reply: pb.JoinReply) -> Communicator:
    client.check(reply, settings.world_size)
    transport.set_endpoint((reply.endpoint_ip, reply.endpoint_port))
    config = _core_config(settings, transport.profile, reply)
    core = WorkerCore(config, time.monotonic())
    membership = Membership(client, config, reply.lease_seconds)
    driver = Driver(core, transport, membership.on_trouble, name=f"p4reduce-{config.rank}")
    session = Session(settings, config, client, transport, core, driver, membership)
    driver.start()
    membership.start(driver, settings.connect_timeout)
    _LOG.info(
        "rank %d of %d joined job %r: epoch %d, profile %s, window %d OR + %d ADD frames, %s:%d to %s:%d",
        config.rank, config.world_size, config.job, config.epoch, config.profile.name, config.or_slots,
        config.add_slots, *transport.local, reply.endpoint_ip, reply.endpoint_port,
    )  # fmt: skip
    return Communicator(session)


def _leave_quietly(client: ControllerClient, settings: Settings, epoch: int) -> None:
    try:
        client.leave(settings.job, epoch, settings.rank)
    except ControllerError as error:
        _LOG.info("leaving after a failed start: %s", error)
