# SPDX-License-Identifier: Apache-2.0
"""docs/hook.md says what the code does: its tables are compared with the code and with the tests."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import torch

from p4reduce.ddp.numbers import HookSettings, Numbers
from p4reduce.ddp.rules import RULES, rule_for

ROOT = Path(__file__).resolve().parents[2]
HOOK_TESTS = "tests/e2e/test_ddp_hook.py"


def rows(header: str) -> list[list[str]]:
    """The table under the line that begins with this header cell."""
    lines = (ROOT / "docs" / "hook.md").read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {header} |"))
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def test_the_rules_cover_everything_and_the_page_repeats_them() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert rule_for(torch.ones(1, dtype=dtype)).way == "job"
    for dtype in (torch.float64, torch.complex64):
        assert rule_for(torch.ones(1, dtype=dtype)).way == "plain"
    assert rule_for(torch.ones(2, 2).to_sparse()).way == "plain"
    assert rule_for(torch.ones(1, dtype=torch.int8)).way == "refused"
    assert rule_for(torch.ones(1, device="meta")).way == "refused"
    assert rows("bucket") == [[rule.name, rule.way, rule.how] for rule in RULES]


def test_the_page_names_every_setting() -> None:
    named = {row[0].strip("`"): row[1].strip("`") for row in rows("argument of `from_env` and `P4ReduceState`")}
    wanted = {item.name for item in (*fields(Numbers), *fields(HookSettings))} - {"numbers"} | {"mode"}
    assert set(named) == wanted
    assert all(variable == f"P4REDUCE_{name.upper()}" for name, variable in named.items())


def test_everything_listed_is_tested() -> None:
    listed = set()
    for _, cell in rows("behaviour"):
        name, file = re.fullmatch(r"`(\w+)`(?: in (\S+))?", cell).groups()  # type: ignore[union-attr]
        file = file or HOOK_TESTS
        assert f"def {name}(" in (ROOT / file).read_text(), f"{file} has no {name}"
        listed.add((file, name))
    tests = set(re.findall(r"^def (test_\w+)", (ROOT / HOOK_TESTS).read_text(), re.MULTILINE))
    assert tests == {name for file, name in listed if file == HOOK_TESTS}, "the page lists all tests of that file"
