# SPDX-License-Identifier: Apache-2.0
"""Who is the primary client (P4Runtime specification, "Client Arbitration and Controller Replication"). No I/O.

| message or event | then |
|---|---|
| first update, new election id above all live ones | client is primary; everybody is told |
| first update, lower or no election id | client is backup; only it is told |
| first update, election id of a live client | INVALID_ARGUMENT, stream ends |
| later update, another election id | as above; everybody is told when the primary changes, else only the client |
| later update of the primary, nothing new | it is told again that it is primary |
| primary's stream ends | the live client with the highest election id takes over; everybody is told |

The hand-over in the last row is what simple_switch_grpc does. The specification since 1.1 leaves the device without
a primary until some client claims an id at least as high as every id seen; clients written for that work here too.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from p4reduce_bmv2.embedded.p4runtime.status import Code, Refused

MAX_CLIENTS = 16
"""Streams at a time, as in simple_switch_grpc."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One advisory message: to whom, the primary's election id (or the highest ever seen), and the status code."""

    client: Hashable
    election_id: int | None
    code: Code


class Arbitration:
    """Election ids of the live clients of one device. Election ids are 128-bit integers, None when unset."""

    def __init__(self) -> None:
        self._ids: dict[Hashable, int | None] = {}
        self._highest: int | None = None

    @property
    def primary(self) -> Hashable | None:
        """The client that may write, if there is one."""
        elected = [(number, client) for client, number in self._ids.items() if number is not None]
        return max(elected, key=lambda pair: pair[0])[1] if elected else None

    def update(self, client: Hashable, election_id: int | None) -> list[Notice]:
        """A client's arbitration message. Refused: the client's stream must end, and its id is as before."""
        if client not in self._ids and len(self._ids) >= MAX_CLIENTS:
            raise Refused(Code.RESOURCE_EXHAUSTED, f"{MAX_CLIENTS} clients are connected, which is the limit")
        taken = election_id is not None and any(
            number == election_id for other, number in self._ids.items() if other != client
        )
        if taken:
            raise Refused(Code.INVALID_ARGUMENT, f"election id {election_id} belongs to another client")
        before = self.primary
        self._ids[client] = election_id
        if election_id is not None:
            self._highest = max(election_id, self._highest or 0)
        return self._notices() if self.primary != before else [self._notice(client)]

    def remove(self, client: Hashable) -> list[Notice]:
        """A client's stream ended."""
        before = self.primary
        self._ids.pop(client, None)
        return self._notices() if self.primary != before else []

    def everyone(self) -> list[Hashable]:
        """The live clients."""
        return list(self._ids)

    def is_primary(self, election_id: int | None) -> bool:
        """True when a request with this election id comes from the primary."""
        primary = self.primary
        return primary is not None and election_id is not None and self._ids[primary] == election_id

    def _notices(self) -> list[Notice]:
        return [self._notice(client) for client in self._ids]

    def _notice(self, client: Hashable) -> Notice:
        primary = self.primary
        if primary is None:
            return Notice(client, self._highest, Code.NOT_FOUND)
        code = Code.OK if client == primary else Code.ALREADY_EXISTS
        return Notice(client, self._ids[primary], code)
