# SPDX-License-Identifier: Apache-2.0
"""The switches that the P4 program's tests run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.switches import EngineSwitch, SwitchUnderTest
from p4reduce import wire


@pytest.fixture(params=sorted(wire.PROFILES))
def profile(request: pytest.FixtureRequest) -> wire.Profile:
    return wire.profile(request.param)


@pytest.fixture(params=["embedded"])
def switch(request: pytest.FixtureRequest, profile: wire.Profile) -> Iterator[SwitchUnderTest]:
    made = EngineSwitch(profile.name)
    yield made
    made.close()
