# SPDX-License-Identifier: Apache-2.0
"""All targets by name. A target has step(seed), which raises on a finding, found (what has occurred), and close()."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from helpers import engine_bmv2

from fuzz.bmv2 import Bmv2Target
from fuzz.controller import ControllerTarget
from fuzz.files import HostsTarget, ProgramTarget, SettingsTarget, StateTarget
from fuzz.frames import CoreTarget, EngineTarget


class Target(Protocol):
    """What the tests and tools/fuzz.py use."""

    found: Counter[str]

    def step(self, seed: int) -> None:
        """Try what the seed stands for; any exception is a finding."""

    def close(self) -> None:
        """Release what it holds."""


TARGETS: dict[str, Callable[[], Target]] = {
    "engine": EngineTarget,
    "core": CoreTarget,
    "core-mixed": lambda: CoreTarget(mixed=True),
    "controller": ControllerTarget,
    "controller-cancelling": lambda: ControllerTarget(cancelling=True),
    "hosts": HostsTarget,
    "settings": SettingsTarget,
    "state": StateTarget,
    "program": ProgramTarget,
}
if engine_bmv2.available():
    TARGETS["bmv2"] = Bmv2Target
