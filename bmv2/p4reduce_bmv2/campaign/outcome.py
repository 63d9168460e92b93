# SPDX-License-Identifier: Apache-2.0
"""How a run ended, judged from what its workers said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from p4reduce_bmv2.campaign.crew import Member
from p4reduce_bmv2.campaign.plan import Plan

EXACT = "exact"
NAMED = "named_error"
WRONG = "wrong"
HUNG = "hung"
FAILED = "failed"
"""None of the others: an error where none was due, or one that does not name the victim."""
VERDICTS = (EXACT, NAMED, WRONG, HUNG, FAILED)


@dataclass
class Outcome:
    """One run's record."""

    run: int
    fault: str
    verdict: str
    fired: bool
    moment: str = ""
    evidence: str = ""
    leaks: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    resumed: float | None = None
    """Seconds from the fault to the end of the first step that was whole after it."""
    named: float | None = None
    """Seconds from the fault until the last survivor had its error."""
    returned: float | None = None
    """Seconds from the end of the cause until the job was on the switch path again, where it had left it."""
    path: str = ""
    """Where the job was at its end."""
    fallbacks: int = 0
    seconds: float = 0.0
    timeline: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether it ended as it must."""
        return self.fired and not self.leaks and not self.problems and self.verdict in (EXACT, NAMED)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"good": self.good}


def judge(
    plan: Plan | None, members: Sequence[Member], reference: Sequence[str] | None, steps: int
) -> tuple[str, list[str]]:
    """The verdict, and what is wrong. Without a reference the ranks are compared with each other."""
    expected = list(reference) if reference is not None else members[0].digests
    for member in members:
        for step, (seen, right) in enumerate(zip(member.digests, expected, strict=False)):
            if seen != right:
                return WRONG, [f"rank {member.rank} has other bits after step {step}"]
    hung = [member.rank for member in members if not member.settled]
    if hung:
        return HUNG, [f"ranks {hung} had no outcome at the run's limit: {_where(members)}"]
    victim = members[plan.lost] if plan is not None and plan.lost is not None else None
    survivors = [member for member in members if member is not victim]
    finished = all(member.done is not None and len(member.digests) == steps for member in survivors)
    if victim is None:
        return (EXACT, []) if finished else (FAILED, [_what(member) for member in members if member.done is None])
    if finished:
        # Its death was no loss to anybody only if it had done all its work.
        harmless = len(victim.digests) >= steps - 1
        return EXACT, [] if harmless else [f"rank {victim.rank} was lost and nobody was told"]
    wrong = [_what(member) for member in survivors if not _names(member, victim.rank)]
    if victim.done is not None:
        wrong.append(f"rank {victim.rank} believes that all is well")
    if victim.broken is not None and not victim.broken.ours:
        wrong.append(_what(victim))
    return (FAILED, wrong) if wrong else (NAMED, [])


def _names(member: Member, victim: int) -> bool:
    """Whether it has an error of ours that names this rank alone."""
    return member.broken is not None and member.broken.ours and member.broken.ranks == (victim,)


def _what(member: Member) -> str:
    if member.broken is not None:
        named = f" naming {list(member.broken.ranks)}" if member.broken.ranks else ""
        return f"rank {member.rank}: {member.broken.kind}{named}: {member.broken.message}"
    if member.done is not None:
        return f"rank {member.rank} ended well"
    return f"rank {member.rank} ended with code {member.process.exitcode} after {len(member.digests)} steps"


def _where(members: Sequence[Member]) -> str:
    return ", ".join(f"rank {member.rank} after {len(member.digests)} steps" for member in members)
