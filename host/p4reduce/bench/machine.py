# SPDX-License-Identifier: Apache-2.0
"""What a bench ran on: figures mean little without it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from p4reduce import __version__

_PACKAGES = ("numpy", "torch", "grpcio", "protobuf")
_VERSION_SECONDS = 20.0


def machine() -> dict[str, Any]:
    """Processor, memory, kernel and versions, ready for JSON."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "p4reduce": __version__,
        **{name: version for name in _PACKAGES if (version := _version(name))},
        "load": round(os.getloadavg()[0], 2),
    }


def switch(kind: str, profile: str) -> dict[str, Any]:
    """The switch and its program."""
    return {"kind": kind, "version": _bmv2_version() if kind == "bmv2" else __version__, "profile": profile}


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _bmv2_version() -> str:
    binary = shutil.which("simple_switch_grpc")
    if binary is None:
        return ""
    try:
        done = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (done.stdout + done.stderr).strip().split("\n")[-1] or "unknown"
