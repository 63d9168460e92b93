# SPDX-License-Identifier: Apache-2.0
"""Finds the compiled P4 program, in a source tree or in an installed package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from p4reduce.errors import ConfigError
from p4reduce.wire import Profile
from p4reduce.wire import profile as lookup_profile

_HERE = Path(__file__).resolve().parent
_PLACES = (_HERE / "_p4", _HERE.parent.parent / "p4")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Paths of one profile's compiled program."""

    profile: Profile
    json: Path
    """BMv2 JSON, what both switches execute."""
    p4info: Path
    """P4Info in protobuf text form, what P4Runtime clients need."""


def find(profile_name: str) -> Pipeline:
    """Compiled program of a profile. ConfigError when the package or tree does not hold it."""
    wanted = lookup_profile(profile_name)
    for place in _PLACES:
        json = place / "compiled" / f"{wanted.name}.json"
        p4info = place / "compiled" / f"{wanted.name}.p4info.txtpb"
        if json.is_file() and p4info.is_file():
            return Pipeline(wanted, json, p4info)
    raise ConfigError(
        f"compiled P4 program {wanted.name}.json not found: reinstall p4reduce, or run `make p4` in a source tree"
    )
