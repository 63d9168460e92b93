# SPDX-License-Identifier: Apache-2.0
"""p4reduce: allreduce inside a P4 switch.

    comm = p4reduce.connect(controller="127.0.0.1:50051", job="train", rank=r, world_size=n)
    comm.allreduce(array, op="mean", out=array)

Importing this package imports numpy and nothing else of weight; what needs more is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from p4reduce.errors import (
    ConfigError,
    ControllerError,
    IntegrityError,
    JobError,
    MismatchError,
    P4ReduceError,
    StalledError,
    SwitchError,
    TransportError,
    UsageError,
    WorkerLostError,
)

if TYPE_CHECKING:
    from p4reduce.communicator import Communicator
    from p4reduce.config import Settings
    from p4reduce.local_job import local
    from p4reduce.session import connect

__version__ = "0.1.0"

__all__ = [
    "Communicator",
    "ConfigError",
    "ControllerError",
    "IntegrityError",
    "JobError",
    "MismatchError",
    "P4ReduceError",
    "Settings",
    "StalledError",
    "SwitchError",
    "TransportError",
    "UsageError",
    "WorkerLostError",
    "__version__",
    "connect",
    "local",
]

# The module behind `local` has another name: importing p4reduce.local would hide the function.
_LAZY = {"Communicator": "communicator", "Settings": "config", "connect": "session", "local": "local_job"}


def __getattr__(name: str) -> Any:
    """Load the public names that need gRPC or more, on first use (PEP 562)."""
    if name in _LAZY:
        value = getattr(importlib.import_module(f"p4reduce.{_LAZY[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
