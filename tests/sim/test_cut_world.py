# SPDX-License-Identifier: Apache-2.0
"""The whole system in storms: controllers crash, switches restart, paths change, and every sum is exact.

helpers/cut_world.py says what is real and what is modelled, helpers/cut_storm.py what may happen. In no run that
nobody died in may an order be refused, a bucket be lost, or a job not come back to the switch. tools/cut_world.py runs
as many seeds as you like, and one again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from helpers.cut_storm import DEADLY, MILD, Storm, hurried

from p4reduce import pipeline
from p4reduce.core.ledger import Ledger
from p4reduce.core.stream import Stream
from p4reduce.orders import Answer, Hold
from p4reduce.path import Path
from p4reduce.sim.adapter import EngineSwitch
from p4reduce.sim.switch import SwitchModel
from p4reduce_controller import cuts
from p4reduce_controller.jobs import Jobs
from p4reduce_controller.model import Persist

SEEDS = 40
CAUGHT_WITHIN = 40
STATES = {"cutting", "ring", "preparing", "trying", "holding", "switch", "leaving"}
ORDERS = {"run_switch", "run_ring", "stop", "trial", "hold"}


@pytest.fixture(autouse=True)
def impatient() -> Any:
    """Back to the switch within moments: more cuts and promotions in less time."""
    with hurried():
        yield


def run(seeds: range, make: Callable[[], SwitchModel] | None = None) -> tuple[Counter[str], list[str]]:
    """All that was seen, and all that was wrong."""
    seen: Counter[str] = Counter()
    wrong = []
    for seed in seeds:
        world = Storm(seed, make=make).run()
        seen += world.seen
        wrong += [f"seed {seed}: {text}" for text in world.wrong]
    return seen, wrong


def test_storms_change_no_sum_and_lose_no_bucket() -> None:
    seen, wrong = run(range(SEEDS))
    assert not wrong
    assert not {name for name in (*MILD, *DEADLY) if not seen[f"storm {name}"]}
    assert not {name for name in STATES if not seen[f"state {name}"]}
    assert not {name for name in ORDERS if not seen[name]}
    for name in ("compared", "from the ring", "promotions", "fallbacks", "retransmissions"):
        assert seen[name] > 10, name
    for name in ("swallowed", "damaged", "unheard", "crashes between actions", "trouble REFUSED", "trouble INTEGRITY"):
        assert seen[name] > 0, name


def test_storms_over_the_compiled_program() -> None:
    from p4reduce_bmv2.embedded.engine import Engine

    program = json.loads(pipeline.find("w5").json.read_text())
    seen, wrong = run(range(1000, 1003), lambda: EngineSwitch(Engine(program)))
    assert not wrong
    assert seen["promotions"] > 0
    assert seen["from the ring"] > 0


def test_a_seed_repeats() -> None:
    first, second = (Storm(7).run() for _ in range(2))
    assert (first.seen, first.events, first.now) == (second.seen, second.events, second.now)


# What a storm must bring down -------------------------------------------------------------------------------------


def caught(*faults: str) -> str:
    """The first thing that storms of these faults find wrong; without the defect they find nothing."""
    for seed in range(CAUGHT_WITHIN):
        wrong: list[str] = Storm(seed, only=faults).run().wrong
        if wrong:
            return wrong[0]
    return ""


def test_without_a_defect_these_storms_find_nothing() -> None:
    for faults in (("deaf", "mode"), ("mode", "ring"), ("crash", "mode")):
        assert [Storm(seed, only=faults).run().wrong for seed in range(3)] == [[]] * 3


def test_the_largest_answer_to_a_stop_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "min", max, raising=False)
    assert "not all jobs return" in caught("deaf", "mode")


def test_a_bucket_dropped_one_chunk_early_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "committed", property(lambda self: self.first_missing - self.window + 1))
    assert caught("deaf", "mode")


def test_a_hold_answered_with_what_is_complete_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    hold = Path._hold

    def answer(path: Path, order: Hold) -> None:
        hold(path, order)
        assert path.runner is not None
        path.answer = Answer(order.number, path._on_ring() - path.runner.pending)

    monkeypatch.setattr(Path, "_hold", answer)
    assert "not all jobs return" in caught("mode", "ring")


def test_an_order_told_before_it_is_on_disk_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    issue = Jobs._issue

    def tell_first(jobs: Jobs, *arguments: Any) -> Any:
        state = issue(jobs, *arguments)
        jobs._actions.sort(key=lambda action: isinstance(action, Persist))
        return state

    monkeypatch.setattr(Jobs, "_issue", tell_first)
    assert "two orders have the number" in caught("crash", "mode")


def test_a_core_that_keeps_everything_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "drop_committed", lambda _: None)
    assert "keeps" in caught("policy")
