# SPDX-License-Identifier: Apache-2.0
"""Which election id a controller claims, and when. No I/O.

P4Runtime lets the client with the highest election id be primary; only its writes count, so two controllers can never
both act. Three rules make of that a pair of controllers that users expect:

- A controller first asks without an id who is primary, and claims one only when nobody is: whoever comes later, or
  comes back, never takes the switch from a controller that works.
- A standby claims an id below the primary's. It becomes primary when the switch says so, because the primary's session
  has ended. When its own session has ended as well, the switch was restarted, and it leaves GRACE_SECONDS to the
  former primary to come back first.
- A controller that was primary and finds another one in its place is demoted, and must stop.

An id that was given explicitly is claimed at once: that is how an operator takes a switch over.

Source: P4Runtime specification 1.3, section 5; simple_switch_grpc hands a primary's place to the highest live id, the
specification leaves it free until somebody claims an id not below the highest ever seen. Both are served here.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from p4reduce.errors import SwitchError

FIRST_ID = 1_000_000_000
"""The first controller's id is somewhat above this; there is room for a million successors, each below the last."""
SPREAD = 1000
"""Ids are drawn from so many: two standbys seldom choose the same, and then one of them tries again."""
GRACE_SECONDS = 3.0
PRIMARY = 0
"""Codes of an answer (google.rpc.Code): OK, and NOT_FOUND; any other says that another client is primary."""
NOBODY = 5


class DemotedError(SwitchError):
    """We were primary, and another controller is now: we must not act any more."""


_draw = random.SystemRandom().randrange


class Candidacy:
    """One controller's way to be primary of one switch, over all its sessions. One thread at a time."""

    def __init__(
        self,
        election_id: int | None = None,
        *,
        standby: bool = False,
        patience: float = 5.0,
        on_backup: Callable[[int], None] | None = None,
        draw: Callable[[int], int] = _draw,
    ) -> None:
        """`election_id`: claimed at once; None: chosen. `standby`: wait while another controller is primary, for ever;
        else for `patience` seconds, because our own last session may be on its way out. `on_backup` is told the
        primary's id when a standby begins to wait. `draw(n)`: 0 to n - 1.
        """
        self.standby = standby
        self.held: int | None = None
        """The id that we are, or were last, primary with."""
        self._fixed = election_id
        self._patience = patience
        self._on_backup = on_backup
        self._draw = draw
        self._was_backup = False
        self._begin(0.0)

    def _begin(self, now: float) -> None:
        self.won = False
        self._since = now
        self._claimed: int | None = None
        self._other: int | None = None

    def begin(self, now: float) -> int | None:
        """A session begins: the election id of its first message, None for none."""
        self._begin(now)
        if self.held is None:
            self._claimed = self._fixed
        return self._claimed

    @property
    def pause(self) -> float:
        """How many seconds to leave a switch alone that can be reached again, before a session is begun."""
        return GRACE_SECONDS if self.waiting else 0.0

    @property
    def waiting(self) -> bool:
        """Whether this is a standby that another controller was primary before, and that never was itself."""
        return self._was_backup and self.held is None

    def hear(self, code: int, election_id: int | None, now: float) -> int | None:
        """The switch's answer, with the primary's id or the highest ever seen. Returns an id to claim, or None.

        An answer without an id is about the id claimed last. `won` says whether we are primary. DemotedError, and
        SwitchError when another controller is primary and we do not wait.
        """
        if election_id is None:
            election_id = self._claimed or 0
        if code == PRIMARY and self._claimed is not None and election_id == self._claimed:
            self.won, self.held, self._other = True, election_id, None
            return None
        if code in (PRIMARY, NOBODY) or election_id == 0:
            # simple_switch_grpc makes a lone client primary even without an id; it is not to stay so.
            self._other = None
            wanted = self.held or self._claimed or self._fixed or FIRST_ID + self._draw(SPREAD)
            if wanted < election_id:
                wanted = election_id + 1
            if wanted != self._claimed:
                return self._claim(wanted)
            self.idle(now)
            return None
        news = self._other is None
        self._other = election_id
        if self.held is not None:
            if election_id != self.held:
                raise DemotedError("another controller has become primary: this one stops acting")
            # A session of our own that the switch still believes in.
            return self._claim(self.held + 1)
        if self.standby:
            self._was_backup = True
            if news and self._on_backup is not None:
                self._on_backup(election_id)
            if self._claimed is None and election_id > 1:
                return self._claim(election_id - 1 - self._draw(min(SPREAD, election_id - 1)))
            return None
        self.idle(now)
        return None

    def idle(self, now: float) -> None:
        """Time has passed. SwitchError as from `hear`."""
        if self.standby or self.won:
            return
        if self._other is None:
            if now >= self._since + self._patience:
                raise SwitchError("it does not say who is primary")
            return
        if self._fixed is not None or now >= self._since + self._patience:
            mine = f" (our election id is {self._fixed})" if self._fixed is not None else ""
            raise SwitchError(
                f"another controller is primary{mine}: stop it, wait for its end with --standby, "
                f"or take over with an --election-id above {self._other}"
            )

    def _claim(self, election_id: int) -> int:
        self._claimed = election_id
        return election_id
