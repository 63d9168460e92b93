# SPDX-License-Identifier: Apache-2.0
"""Network namespaces by name: make and remove them, run a command or a function inside one.

Named namespaces are files under /run/netns. `ip netns` makes and removes them here, because pyroute2 forks for it,
which a process with gRPC threads must not do.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from p4reduce.errors import SwitchError

RUN_DIR = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_T = TypeVar("_T")


def require_root(what: str) -> None:
    """SwitchError unless this process is root, naming what needs it."""
    if os.geteuid() != 0:
        raise SwitchError(f"{what} needs root (network namespaces and interfaces); run it with sudo")


def require(name: str) -> None:
    """SwitchError when there is no namespace of this name."""
    if not (RUN_DIR / name).exists():
        raise SwitchError(f"there is no network namespace {name!r}")


def create(name: str) -> None:
    """Make a namespace. SwitchError when the name is taken."""
    _ip_netns("add", name)


def remove(name: str) -> None:
    """Remove a namespace; nothing happens when there is none of this name."""
    if (RUN_DIR / name).exists():
        _ip_netns("delete", name)


def command_prefix(name: str) -> list[str]:
    """What to put in front of a command so that it runs in the namespace, under its own pid (`ip` execs it)."""
    return ["ip", "netns", "exec", name]


def call(name: str, function: Callable[[], _T]) -> _T:
    """Run a function in a namespace and return its result or raise its exception.

    It runs in a thread that is made for it and ends after it, because a namespace belongs to a thread.
    """
    require(name)
    results: list[_T] = []
    errors: list[BaseException] = []

    def inside() -> None:
        try:
            enter(name)
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=inside, name=f"netns-{name}")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def enter(name: str) -> None:
    """Move the calling thread, and it alone, into a namespace for good."""
    descriptor = os.open(RUN_DIR / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot enter network namespace {name}: {os.strerror(code)}")
    finally:
        os.close(descriptor)


def _ip_netns(verb: str, name: str) -> None:
    try:
        done = subprocess.run(["ip", "netns", verb, name], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SwitchError(f"cannot {verb} network namespace {name}: {error}") from error
    if done.returncode != 0:
        raise SwitchError(f"cannot {verb} network namespace {name}: {done.stderr.strip()}")
