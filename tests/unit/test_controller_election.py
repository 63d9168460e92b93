# SPDX-License-Identifier: Apache-2.0
"""Which election id is claimed, and when: against a model of a switch that hands over, and of one that does not."""

from __future__ import annotations

import pytest

from p4reduce.errors import SwitchError
from p4reduce_controller.election import FIRST_ID, GRACE_SECONDS, NOBODY, PRIMARY, SPREAD, Candidacy, DemotedError

TAKEN = 6


class Switch:
    """Arbitration between candidacies. `hands_over` as simple_switch_grpc: the highest live id is primary."""

    def __init__(self, hands_over: bool) -> None:
        self.hands_over = hands_over
        self.ids: dict[Candidacy, int] = {}
        self.primary: Candidacy | None = None
        self.highest = 0
        self.now = 0.0

    def open(self, who: Candidacy) -> None:
        self.claim(who, who.begin(self.now))

    def claim(self, who: Candidacy, number: int | None) -> None:
        if number is not None and number in [n for c, n in self.ids.items() if c is not who]:
            raise AssertionError("an id that is taken ends the session")
        self.ids[who] = number or 0
        self.highest = max(self.highest, number or 0)
        self._elect(who)

    def leave(self, who: Candidacy) -> None:
        del self.ids[who]
        if self.primary is who:
            self.primary = None
        self._elect()

    def _elect(self, asker: Candidacy | None = None) -> None:
        before = self.primary
        if self.ids:
            best = max(self.ids, key=lambda who: self.ids[who])
            if self.hands_over or (self.ids[best] and self.ids[best] >= self.highest):
                self.primary = best
        changed = self.primary is not before or self.primary is None
        for who in list(self.ids) if changed else [asker]:
            if who is not None and who in self.ids:
                self._tell(who)

    def _tell(self, who: Candidacy) -> None:
        if self.primary is None:
            answer = who.hear(NOBODY, self.highest, self.now)
        else:
            answer = who.hear(PRIMARY if self.primary is who else TAKEN, self.ids[self.primary], self.now)
        if answer is not None:
            self.claim(who, answer)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for who in list(self.ids):
            who.idle(self.now)


@pytest.fixture(params=[True, False], ids=["hands over", "leaves it free"])
def switch(request: pytest.FixtureRequest) -> Switch:
    return Switch(request.param)


def test_a_lone_controller_is_primary_at_once(switch: Switch) -> None:
    one = Candidacy()
    switch.open(one)
    assert one.won
    assert one.held is not None
    assert FIRST_ID <= one.held < FIRST_ID + SPREAD


def test_who_comes_later_is_refused_after_its_patience(switch: Switch) -> None:
    one, two = Candidacy(), Candidacy(patience=5.0)
    switch.open(one)
    switch.open(two)
    switch.wait(4.9)
    assert not two.won
    with pytest.raises(SwitchError, match="another controller is primary: stop it, wait for its end with --standby"):
        switch.wait(0.2)
    assert switch.primary is one


def test_who_comes_later_may_wait_for_our_own_last_session_to_end(switch: Switch) -> None:
    one, two = Candidacy(), Candidacy()
    switch.open(one)
    switch.open(two)
    switch.wait(1.0)
    switch.leave(one)
    assert two.won


def test_standbys_take_over_one_after_the_other_and_nobody_is_pushed_out(switch: Switch) -> None:
    told: list[int] = []
    controllers = [Candidacy(standby=True, on_backup=told.append) for _ in range(4)]
    for controller in controllers:
        switch.open(controller)
    assert [c.won for c in controllers] == [True, False, False, False]
    assert told == [controllers[0].held] * 3
    for _ in range(12):
        primary = switch.primary
        assert primary is not None
        switch.wait(1000.0)
        assert switch.primary is primary
        switch.leave(primary)
        again = Candidacy(standby=True)
        assert sum(c.won for c in switch.ids) == 1
        successor = switch.primary
        switch.open(again)
        assert switch.primary is successor, "who comes back waits"
        assert not again.won


def test_an_explicit_id_takes_over(switch: Switch) -> None:
    one, two = Candidacy(), Candidacy(FIRST_ID + SPREAD)
    switch.open(one)
    with pytest.raises(DemotedError):
        switch.open(two)
    assert switch.primary is two


def test_an_explicit_id_that_is_too_low_is_refused_at_once_or_waits(switch: Switch) -> None:
    one, low, waits = Candidacy(9), Candidacy(7), Candidacy(8, standby=True)
    switch.open(one)
    with pytest.raises(SwitchError, match=r"our election id is 7.*take over with an --election-id above 9"):
        switch.open(low)
    del switch.ids[low]
    switch.open(waits)
    switch.wait(100.0)
    assert not waits.won
    switch.leave(one)
    assert waits.won


def test_a_primary_whose_session_ended_comes_back(switch: Switch) -> None:
    one = Candidacy()
    switch.open(one)
    switch.leave(one)
    one.begin(switch.now)
    assert not one.won
    switch.open(one)
    assert one.won


def test_a_primary_that_finds_another_one_in_its_place_is_demoted(switch: Switch) -> None:
    one, two = Candidacy(standby=True), Candidacy(standby=True)
    switch.open(one)
    switch.open(two)
    switch.leave(one)
    assert two.won
    with pytest.raises(DemotedError, match="another controller has become primary: this one stops acting"):
        switch.open(one)
    assert switch.primary is two


def test_a_session_of_our_own_that_the_switch_still_believes_in(switch: Switch) -> None:
    one = Candidacy()
    switch.open(one)
    ghost = Candidacy()
    switch.ids[ghost] = switch.ids.pop(one)
    switch.primary = ghost
    held = one.held or 0
    assert one.begin(0.0) is None
    assert one.hear(TAKEN, held, 0.0) == held + 1
    assert one.hear(PRIMARY, held + 1, 0.0) is None
    assert one.won


def test_after_a_restart_of_the_switch_the_former_primary_comes_first(switch: Switch) -> None:
    one, two = Candidacy(standby=True), Candidacy(standby=True)
    assert (one.pause, two.pause) == (0.0, 0.0)
    switch.open(one)
    switch.open(two)
    assert (one.pause, two.pause) == (0.0, GRACE_SECONDS)
    assert (one.waiting, two.waiting) == (False, True)
    fresh = Switch(switch.hands_over)
    fresh.open(one)
    fresh.open(two)
    assert (one.won, two.won) == (True, False)
    fresh.leave(one)
    assert two.won
    assert two.pause == 0.0


def test_a_standby_alone_on_a_restarted_switch_is_primary(switch: Switch) -> None:
    one, two = Candidacy(standby=True), Candidacy(standby=True)
    switch.open(one)
    switch.open(two)
    fresh = Switch(switch.hands_over)
    fresh.open(two)
    assert two.won


def test_a_switch_that_never_says_who_is_primary() -> None:
    one = Candidacy(patience=5.0)
    one.begin(10.0)
    assert one.hear(PRIMARY, 0, 10.0) is not None
    assert one.hear(PRIMARY, 0, 10.0) is None
    with pytest.raises(SwitchError, match="does not say who is primary"):
        one.idle(15.0)
