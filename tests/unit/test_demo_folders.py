# SPDX-License-Identifier: Apache-2.0
"""Scratch folders of the demo: removed at the end, or by the next demo when their owner was killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from p4reduce import cli, cli_demo, wire
from p4reduce.demo import run
from p4reduce.demo.folders import remove_stale_folders, scratch_folder
from p4reduce.demo.report import MAX_SEED, DemoOptions


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def killed_demo(temporary: Path) -> Path:
    """The folder of a demo whose supervisor was killed by SIGKILL."""
    script = (
        "from p4reduce.demo.folders import scratch_folder\n"
        "with scratch_folder() as folder:\n"
        "    (folder / 'switch.log').write_text('x')\n"
        "    print(folder, flush=True)\n"
        "    input()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    remove_stale_folders()
    assert (folder / "switch.log").exists()  # its owner runs
    process.kill()
    process.communicate()
    assert folder.parent == temporary
    assert folder.is_dir()
    return folder


def test_the_folder_goes_with_its_owner(temporary: Path) -> None:
    with scratch_folder() as folder:
        remove_stale_folders()
        assert folder.is_dir()
        assert json.loads((folder / "owner.json").read_text())["pid"] == os.getpid()
    assert list(temporary.iterdir()) == []


def test_the_next_demo_removes_what_a_killed_one_left(temporary: Path) -> None:
    left = killed_demo(temporary)
    with scratch_folder() as folder:
        assert not left.exists()
        assert folder.is_dir()


def change_owner(folder: Path, **changes: Any) -> None:
    path = folder / "owner.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_pid_that_is_used_again_is_not_the_owner(temporary: Path) -> None:
    left = killed_demo(temporary)
    change_owner(left, pid=os.getpid())
    remove_stale_folders()
    assert not left.exists()


def test_what_is_not_surely_a_dead_demos_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = killed_demo(temporary)
    change_owner(elsewhere, host="another boot or container")
    for name, owner in (("p4reduce-demo-none", None), ("p4reduce-demo-odd", "[]"), ("p4reduce-demo-text", "no JSON")):
        (temporary / name).mkdir()
        if owner is not None:
            (temporary / name / "owner.json").write_text(owner)
    (temporary / "p4reduce-demo-file").write_text("")
    before = set(temporary.iterdir())
    remove_stale_folders()
    assert set(temporary.iterdir()) == before
    dead = killed_demo(temporary)
    (temporary / "p4reduce-demo-link").symlink_to(dead)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    remove_stale_folders()
    assert dead.is_dir()
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    remove_stale_folders()
    assert not dead.exists()
    assert (temporary / "p4reduce-demo-link").is_symlink()


@pytest.mark.parametrize("where", ["no/demo.json", "", "/dev/null/x", "."])
def test_an_unwritable_json_file_is_known_before_the_training(
    where: str, temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[DemoOptions] = []
    monkeypatch.setattr(run, "run_demo", lambda options, _: calls.append(options))
    monkeypatch.chdir(temporary)
    assert cli.main(["demo", "--json", where]) == cli.EXIT_FAILURE
    assert "cannot write" in capsys.readouterr().err
    assert calls == []


def test_the_check_changes_nothing(temporary: Path) -> None:
    cli_demo.check_writable(str(temporary / "new"))
    assert list(temporary.iterdir()) == []
    old = temporary / "old"
    old.write_text("old")
    cli_demo.check_writable(str(old))
    assert old.read_text() == "old"
    pipe = temporary / "pipe"
    os.mkfifo(pipe)
    cli_demo.check_writable(str(pipe))
    cli_demo.check_writable("-")
    cli_demo.check_writable("/dev/null")
    assert Path("/dev/null").exists()


def test_options_at_their_limits() -> None:
    assert DemoOptions(seed=MAX_SEED, timeout=0.5).seed == 2**31 - 1
    assert list(cli_demo._PROFILES) == sorted(wire.PROFILES)


def test_the_demo_command_loads_no_numpy() -> None:
    script = "import sys; from p4reduce import cli_demo; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
