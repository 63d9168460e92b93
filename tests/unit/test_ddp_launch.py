# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a process group agree on before they join: the job's name and its incarnation."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("torch")

from p4reduce.ddp import launch
from p4reduce.errors import MismatchError

Said = tuple[bool, str, int]


class Group:
    """Stands in for torch.distributed: one rank of a group, and what the others say."""

    def __init__(self, ranks: list[int], world: int, others: list[Said]) -> None:
        self.ranks = ranks
        self.world = world
        self.others = others

    def get_world_size(self, group: Any = None) -> int:
        return self.world if group is None else len(self.ranks)

    def get_rank(self, group: Any = None) -> int:
        return 0

    def get_global_rank(self, group: Any, rank: int) -> int:
        return self.ranks[rank]

    def get_process_group_ranks(self, group: Any) -> list[int]:
        return self.ranks

    def all_gather_object(self, found: list[Any], mine: Any, group: Any) -> None:
        found[:] = [mine, *self.others]

    def broadcast_object_list(self, objects: list[Any], src: int, group: Any) -> None:
        """Rank 0 keeps what it has."""


def agreed(monkeypatch: pytest.MonkeyPatch, others: list[Said], **arguments: Any) -> Any:
    ranks = list(range(len(others) + 1))
    monkeypatch.setattr(launch, "dist", Group(ranks, len(ranks), others))
    arguments |= {"rank": 0, "world_size": len(ranks)}
    launch._agree_on_incarnation(object(), arguments)  # type: ignore[arg-type]
    return arguments.get("incarnation")


@pytest.fixture(autouse=True)
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("P4REDUCE_INCARNATION", raising=False)
    monkeypatch.delenv("P4REDUCE_JOB", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "myrun")
    monkeypatch.setenv("GROUP_RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "2")


def test_hosts_that_restarted_differently_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agreed(monkeypatch, [(True, "0", 3), (True, "1", 1), (True, "1", 1)]) == 4


def test_a_group_without_the_first_rank_of_a_host_counts_its_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agreed(monkeypatch, [(True, "0", 3)]) == 3


def test_a_number_that_all_have_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agreed(monkeypatch, [(False, "1", 7)], incarnation=7) == 7


@pytest.mark.parametrize("other", [(False, "1", 8), (True, "1", 7)])
def test_numbers_that_only_some_have_chosen_are_told(monkeypatch: pytest.MonkeyPatch, other: Said) -> None:
    with pytest.raises(MismatchError, match=r"rank 0: 7, rank 1: (8|7 .counted by torchrun.)$") as told:
        agreed(monkeypatch, [other], incarnation=7)
    assert told.value.ranks == (0, 1)


def test_groups_of_other_ranks_are_other_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    def name(ranks: list[int]) -> str:
        monkeypatch.setattr(launch, "dist", Group(ranks, 4, []))
        # A restarted worker counts from the start again.
        monkeypatch.setattr(launch, "_names_given", itertools.count())
        return launch._shared_job_name(object())  # type: ignore[arg-type]

    names = [name(ranks) for ranks in ([0, 1, 2, 3], [0, 2], [1, 3], [0, 2])]
    assert names[0] == "myrun"
    assert names[1] == names[3], "the same after a restart"
    assert len(set(names)) == 3
    assert all(each.startswith("myrun") for each in names)
