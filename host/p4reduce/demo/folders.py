# SPDX-License-Identifier: Apache-2.0
"""The demo's scratch folder, and those that killed demos left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PREFIX = "p4reduce-demo-"
_OWNER = "owner.json"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder, removed at the end. Before, the folders of this user's demos that died without doing so."""
    remove_stale_folders()
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        folder = Path(name)
        (folder / _OWNER).write_text(json.dumps(_identity(os.getpid())))
        yield folder


def remove_stale_folders() -> None:
    """Remove scratch folders whose owner no longer runs. Others' are left alone, and so is one without an owner."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # Something else may remove it at the same time, or it may be no folder of ours after all.
        with contextlib.suppress(OSError):
            if _is_stale(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_stale(folder: Path) -> bool:
    status = folder.lstat()
    if folder.is_symlink() or not folder.is_dir() or status.st_uid != os.geteuid():
        return False
    try:
        owner = json.loads((folder / _OWNER).read_text())
        pid = int(owner["pid"])
    except (ValueError, KeyError, TypeError):
        return False
    now = _identity(pid)
    if owner.get("host") != now["host"]:
        return False  # a pid of another machine or container, which this one cannot see
    return bool(owner != now)


def _identity(pid: int) -> dict[str, Any]:
    """What names a process for good: pids are used again, but not with the same start time. None: it is gone."""
    started: int | None = None
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text()
        # proc(5): fields 3 (state) and 22 (start time); the name before them may hold spaces and parentheses.
        fields = text[text.rindex(")") + 2 :].split()
        started = None if fields[0] in "ZX" else int(fields[19])
    return {"pid": pid, "started": started, "host": _host()}


def _host() -> str:
    """This boot of this machine and, where processes are numbered, this container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
