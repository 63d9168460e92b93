# SPDX-License-Identifier: Apache-2.0
"""`connect`: from settings to an open communicator.

Describe tells which switch program runs and where; then the socket is opened and the MTU checked, so that a host
that cannot take part says so before anybody waits for it; Join blocks until all ranks are there.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from p4reduce import __version__, wire
from p4reduce.communicator import Communicator, Session
from p4reduce.config import Settings
from p4reduce.controller_client import ControllerClient
from p4reduce.core.config import CoreConfig
from p4reduce.driver import Driver
from p4reduce.errors import ConfigError, ControllerError, UsageError
from p4reduce.membership import Membership, Seat, order_of, policy_of
from p4reduce.orders import RunRing, RunSwitch, reason
from p4reduce.path import Path
from p4reduce.proto import controller_pb2 as pb
from p4reduce.transport.base import Address, Transport
from p4reduce.transport.limits import check_mtu, path_mtu, source_address
from p4reduce.transport.udp import UdpTransport

if TYPE_CHECKING:
    from p4reduce.metrics import MetricsServer
    from p4reduce.ring import Ring

__all__ = ["Communicator", "connect", "join"]

_LOG = logging.getLogger(__name__)


def connect(
    controller: str | None = None,
    job: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    ring: Ring | None = None,
    **overrides: Any,
) -> Communicator:
    """Join a job and return this worker's end of it. Blocks until all ranks have joined.

    What is not given comes from the environment, a TOML file or the defaults: see `p4reduce.config.Settings`, whose
    other fields may be given as `overrides`. `ring`: a collective library (`p4reduce.ring.Ring`) for the ring path,
    which gives the same bits as the switch; the job has that path when all its ranks have. The communicator owns it
    from here on and closes it at its end.

    Raises ConfigError (a setting), ControllerError (the controller cannot be reached, or refuses, or not all ranks
    joined in time) and TransportError (address or MTU).
    """
    arguments = {"controller": controller, "job": job, "rank": rank, "world_size": world_size, **overrides}
    return join(Settings.resolve(arguments), ring=ring)


def join(
    settings: Settings, wrap: Callable[[Transport], Transport] | None = None, ring: Ring | None = None
) -> Communicator:
    """`connect` with settings that are resolved already. `wrap` may put something between core and socket."""
    _check_ring(settings, ring)
    if settings.log_level is not None:
        logging.getLogger("p4reduce").setLevel(settings.log_level)
    settings.log(_LOG)
    client = ControllerClient.of(settings)
    transport: Transport | None = None
    try:
        description = client.describe()
        transport, mtu = _open_transport(settings, description)
        if wrap is not None:
            transport = wrap(transport)
        reply = client.join(_join_request(settings, transport, mtu, ring is not None))
        try:
            return _assemble(settings, client, transport, ring, reply)
        except BaseException:
            _leave_quietly(client, settings, reply)
            raise
    except BaseException:
        if transport is not None:
            transport.close()
        client.close()
        raise


def _check_ring(settings: Settings, ring: Ring | None) -> None:
    if ring is None:
        if settings.mode == "off":
            raise ConfigError("mode off is the ring path, and this rank has none: pass ring= to connect()")
    elif (ring.rank, ring.size) != (settings.rank, settings.world_size):
        raise UsageError(
            f"the ring has this process as rank {ring.rank} of {ring.size}, the job as rank {settings.rank} of "
            f"{settings.world_size}: they must be the same"
        )


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


def _join_request(settings: Settings, transport: Transport, mtu: int, ring: bool) -> pb.JoinRequest:
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
        mode=settings.mode,
        ring=ring,
        nonce=os.urandom(16),
        slots_min=settings.slots_min,
        slots_want=settings.slots_want,
    )


def _seat(settings: Settings, profile: wire.Profile, reply: pb.JoinReply, ring: bool) -> Seat:
    order = reply.order.run_switch
    try:
        config = CoreConfig(
            job=settings.job,
            epoch=reply.epoch,
            rank=settings.rank,
            world_size=settings.world_size,
            profile=profile,
            # A job that begins on the ring path has no slots yet; they come with the order to try some.
            or_slots=order.or_slots or 1,
            add_slots=order.add_slots or 1,
            policy=policy_of(reply.policy),
            lane_bits=settings.lane_bits,
        )
    except ConfigError as error:
        raise ControllerError(
            f"controller {settings.controller} answered the join with: {error}", "INTERNAL"
        ) from error
    return Seat(config, reply.lease_seconds, reply.credential, ring=ring and settings.mode != "require")


def _assemble(
    settings: Settings, client: ControllerClient, transport: Transport, ring: Ring | None, reply: pb.JoinReply
) -> Communicator:
    client.check(reply, settings.world_size, ring=ring is not None)
    transport.set_endpoint((reply.endpoint_ip, reply.endpoint_port))
    seat = _seat(settings, transport.profile, reply, ring is not None)
    config = seat.config
    start = order_of(reply.order)
    if not isinstance(start, RunSwitch | RunRing):
        raise ControllerError(f"controller {settings.controller} answered join with no order to begin with", "INTERNAL")
    path = Path(config, start, time.monotonic())
    membership = Membership(client, seat)
    driver = Driver(
        path,
        transport,
        membership.on_trouble,
        ring=ring,
        on_news=membership.on_news,
        name=f"p4reduce-{config.rank}",
    )
    session = Session(settings, config, client, transport, ring, driver, membership)
    driver.start()
    membership.start(driver, settings.connect_timeout)
    _LOG.info(
        "rank %d of %d joined job %r: epoch %d, profile %s, %s, %s:%d to %s:%d",
        config.rank, config.world_size, config.job, config.epoch, config.profile.name, _window(start),
        *transport.local, reply.endpoint_ip, reply.endpoint_port,
    )  # fmt: skip
    if isinstance(start, RunRing) and settings.mode != "off":
        path.fallbacks[reason(start)] += 1
        _LOG.warning(
            "job %r, epoch %d, rank %d: ring path from bucket 0 on: %s",
            config.job, start.epoch, config.rank, start.why or "no reason was given",
        )  # fmt: skip
    session.metrics = _serve_metrics(session)
    return Communicator(session)


def _serve_metrics(session: Session) -> MetricsServer | None:
    """As P4REDUCE_METRICS says. A job is not ended for want of metrics."""
    if not os.environ.get("P4REDUCE_METRICS"):
        return None
    from p4reduce.metrics import serve_from_environment

    try:
        return serve_from_environment(session.stats)
    except ConfigError as error:
        _LOG.warning("job %r, rank %d goes on without metrics: %s", session.config.job, session.config.rank, error)
        return None


def _window(start: RunSwitch | RunRing) -> str:
    if isinstance(start, RunRing):
        return "ring path"
    return f"window {start.or_slots} OR + {start.add_slots} ADD frames"


def _leave_quietly(client: ControllerClient, settings: Settings, reply: pb.JoinReply) -> None:
    try:
        client.leave(settings.job, reply.epoch, settings.rank, credential=reply.credential)
    except ControllerError as error:
        _LOG.info("leaving after a failed start: %s", error)
