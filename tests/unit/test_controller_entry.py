# SPDX-License-Identifier: Apache-2.0
"""The commands without the extra that they need."""

from __future__ import annotations

import sys

import pytest

from p4reduce_controller import entry


@pytest.mark.parametrize(
    ("run", "module", "missing", "command"),
    [
        (entry.serve, "p4reduce_controller.serve", "google.rpc", "p4reduce-controller"),
        (entry.ctl, "p4reduce_controller.cli", "rich", "p4reducectl"),
    ],
)
def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    run: object,
    module: str,
    missing: str,
    command: str,
) -> None:
    def absent(name: str) -> object:
        assert name == module
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr("importlib.import_module", absent)
    assert run() == 2  # type: ignore[operator]
    text = capsys.readouterr().err
    assert text.startswith(f"{command}: the module {missing} is missing: pip install 'p4reduce[controller]'")
    assert text.count("\n") == 1


def test_our_own_faults_are_not_called_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> object:
        raise ModuleNotFoundError("No module named 'p4reduce_controller.gone'", name="p4reduce_controller.gone")

    monkeypatch.setattr("importlib.import_module", broken)
    with pytest.raises(ModuleNotFoundError):
        entry.serve()


def test_the_command_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["p4reducectl", "--version"])
    with pytest.raises(SystemExit) as caught:
        entry.ctl()
    assert caught.value.code == 0
    assert "p4reduce" in capsys.readouterr().out
