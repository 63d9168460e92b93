# SPDX-License-Identifier: Apache-2.0
"""The switches that the P4 program's tests run on: the engine alone, and whole switches on real interfaces."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from helpers.frames import Worker
from helpers.p4rt import TableClient
from helpers.switches import EngineSwitch, SwitchUnderTest
from helpers.wire_switch import WireSwitch

from p4reduce import wire
from p4reduce_bmv2 import netns
from p4reduce_bmv2.switch import Kind, SwitchProcess, find_bmv2
from p4reduce_bmv2.topology import WORKER_INTERFACE, Topology

PORTS = 3
ETH_P_ALL = 3


@pytest.fixture(params=sorted(wire.PROFILES))
def profile(request: pytest.FixtureRequest) -> wire.Profile:
    return wire.profile(request.param)


class Lab:
    """One running switch, its ports and a raw socket at the far end of each."""

    def __init__(self, kind: Kind, undo: ExitStack) -> None:
        topology = undo.enter_context(Topology(PORTS, mtu=9216, switch_netns=True))
        address = f"unix:/run/{topology.prefix}.sock"
        self.process = undo.enter_context(
            SwitchProcess.start(kind, interfaces=topology.interfaces, netns=topology.switch_netns, grpc_addr=address)
        )
        self.client = TableClient(self.process.grpc_address)
        undo.callback(self.client.close)
        self.sockets = {host.port: netns.call(host.netns, self._raw) for host in topology.hosts}
        for link in self.sockets.values():
            undo.callback(link.close)

    @staticmethod
    def _raw() -> socket.socket:
        link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        link.bind((WORKER_INTERFACE, 0))
        return link


@pytest.fixture(scope="session")
def labs() -> Iterator[dict[Kind, Lab]]:
    """Started when first used, by kind, and shared: every test pushes the program afresh."""
    with ExitStack() as undo:

        class Labs(dict[Kind, Lab]):
            def __missing__(self, kind: Kind) -> Lab:
                return self.setdefault(kind, Lab(kind, undo))

        yield Labs()


@pytest.fixture(
    params=[
        "engine",
        pytest.param("embedded", marks=pytest.mark.netns),
        pytest.param("bmv2", marks=[pytest.mark.bmv2, pytest.mark.netns]),
    ]
)
def switch(request: pytest.FixtureRequest, profile: wire.Profile, labs: dict[Kind, Lab]) -> Iterator[SwitchUnderTest]:
    made: SwitchUnderTest
    if request.param == "engine":
        made = EngineSwitch(profile.name)
        for port in range(1, PORTS + 1):
            made.insert("sources", Worker.at(0, port).source, "permit", {})
    else:
        if os.geteuid() != 0:
            pytest.skip("network namespaces need root")
        if request.param == "bmv2" and find_bmv2() is None:
            pytest.skip("simple_switch_grpc is not installed")
        lab = labs[request.param]
        made = WireSwitch(lab.client, lab.sockets, profile.name)
    yield made
    made.close()
