# SPDX-License-Identifier: Apache-2.0
"""The hook behind other front doors: the examples for Lightning and Accelerate, through the embedded switch."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from p4reduce_bmv2.embedded.switch import EmbeddedSwitch
from p4reduce_controller.hosts import Hosts
from p4reduce_controller.server import ControllerServer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def controller() -> Iterator[str]:
    ports = {n + 1: f"127.0.1.{n + 1}" for n in range(2)}
    with EmbeddedSwitch(udp_ports=ports) as switch:
        hosts = Hosts.embedded(switch.grpc_address, switch.endpoints, profile="w34")
        with ControllerServer(hosts) as server:
            yield str(server.address)


def check_example(controller: str, name: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(EXAMPLES / name)],
        env={**os.environ, "P4REDUCE_CONTROLLER": controller, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", done.stdout)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 2
    for rank in range(2):
        found = re.search(rf"rank {rank}: (\d+) buckets through the switch, (\d+) through the ring", done.stdout)
        assert found, done.stdout
        assert int(found[1]) + int(found[2]) == 50


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
def test_example_lightning(controller: str) -> None:
    check_example(controller, "lightning_ddp.py")


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_example_accelerate(controller: str) -> None:
    check_example(controller, "accelerate_ddp.py")
