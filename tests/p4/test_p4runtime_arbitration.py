# SPDX-License-Identifier: Apache-2.0
"""Primary and backup clients, over gRPC and in the table of rules itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers.runtime import KINDS, Client, Code, Program, Set, number, refused, running

from p4reduce_bmv2.embedded.p4runtime import status
from p4reduce_bmv2.embedded.p4runtime.arbitration import MAX_CLIENTS, Arbitration, Notice

PRIMARY, BACKUP = 0, number(Code.ALREADY_EXISTS)


@pytest.fixture(params=KINDS)
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    with running(request.param) as address:
        yield address


@pytest.fixture
def embedded() -> Iterator[str]:
    with running("embedded") as address:
        yield address


def claim(client: Client, election_id: int | None) -> Any:
    client.arbitrate(election_id)
    return client.next("arbitration")


def test_first_client_is_primary(address: str) -> None:
    with Client(address) as client:
        answer = claim(client, 7 << 64 | 9)
        assert (answer.status.code, answer.device_id) == (PRIMARY, 0)
        assert (answer.election_id.high, answer.election_id.low) == (7, 9)


def test_higher_election_id_takes_over_and_both_are_told(address: str) -> None:
    with Client(address) as first, Client(address) as second:
        assert claim(first, 5).status.code == PRIMARY
        assert claim(second, 6).status.code == PRIMARY
        told = first.next("arbitration")
        assert (told.status.code, told.election_id.low) == (BACKUP, 6)


def test_high_word_of_an_election_id_counts_more(address: str) -> None:
    with Client(address) as first, Client(address) as second:
        assert claim(first, (1 << 64) - 1).status.code == PRIMARY
        assert claim(second, 1 << 64).status.code == PRIMARY


def test_lower_election_id_is_backup_and_only_it_is_told(address: str) -> None:
    with Client(address) as first, Client(address) as second:
        claim(first, 5)
        answer = claim(second, 4)
        assert (answer.status.code, answer.election_id.low) == (BACKUP, 5)
        assert first.incoming.empty()


def test_lost_primary_hands_over_to_the_next(address: str) -> None:
    with Client(address) as low, Client(address) as middle:
        with Client(address) as high:
            claim(high, 9)
            assert claim(low, 1).status.code == BACKUP
            assert claim(middle, 5).status.code == BACKUP
        assert middle.next("arbitration").status.code == PRIMARY
        told = low.next("arbitration")
        assert (told.status.code, told.election_id.low) == (BACKUP, 5)


def test_lost_backup_changes_nothing(address: str) -> None:
    with Client(address) as primary:
        claim(primary, 5)
        with Client(address) as backup:
            claim(backup, 4)
        # Its id is free again once the server has seen it go; until then a claim is refused and tried again.
        assert claim_again(address, 4) == BACKUP
        assert primary.incoming.empty()


def claim_again(address: str, election_id: int) -> int:
    while True:
        with Client(address) as client:
            client.arbitrate(election_id)
            answer = client.incoming.get(timeout=10)
            if not isinstance(answer, Code):
                return int(answer.arbitration.status.code)
            assert answer == Code.INVALID_ARGUMENT


def test_election_id_of_a_live_client_is_refused(address: str) -> None:
    with Client(address) as first, Client(address) as second:
        claim(first, 5)
        second.arbitrate(5)
        assert second.end() == Code.INVALID_ARGUMENT
        assert first.incoming.empty()


def test_client_may_lower_its_own_id(address: str) -> None:
    with Client(address) as first, Client(address) as second:
        claim(first, 5)
        claim(second, 3)
        assert claim(first, 2).status.code == BACKUP
        told = second.next("arbitration")
        assert (told.status.code, told.election_id.low) == (PRIMARY, 3)


def test_stream_ends_when_the_client_stops_sending(address: str) -> None:
    with Client(address) as client:
        claim(client, 5)
        client.finish()
        assert client.end() == Code.OK


def test_wrong_device(embedded: str) -> None:
    """simple_switch_grpc answers any device id on the stream, and fails when a pipeline is pushed to it."""
    with Client(embedded) as client:
        client.arbitrate(5, device_id=3)
        assert client.end() == Code.NOT_FOUND
    with Client(embedded, 5) as client:
        client.arbitrate(5, device_id=3)
        assert client.end() == Code.FAILED_PRECONDITION


def test_unset_election_id_is_never_primary(embedded: str) -> None:
    """simple_switch_grpc takes it for 0 and makes it primary."""
    with Client(embedded) as standby, Client(embedded) as other:
        answer = claim(standby, None)
        assert answer.status.code == number(Code.NOT_FOUND)
        assert not answer.HasField("election_id")
        assert claim(other, None).status.code == number(Code.NOT_FOUND)
        assert claim(other, 1).status.code == PRIMARY
        assert standby.next("arbitration").status.code == BACKUP


def test_primary_that_repeats_itself_is_told_again(embedded: str) -> None:
    with Client(embedded) as client:
        claim(client, 5)
        assert claim(client, 5).status.code == PRIMARY


def test_roles_are_refused(embedded: str) -> None:
    with Client(embedded) as client:
        client.arbitrate(5, role="operator")
        assert client.end() == Code.NOT_FOUND
    with Client(embedded, 5) as client, refused(Code.NOT_FOUND):
        client.set_pipeline(Set.VERIFY, Program.entities().config(), role="operator")


def test_too_many_streams(embedded: str) -> None:
    clients = [Client(embedded, number) for number in range(1, MAX_CLIENTS + 1)]
    try:
        with Client(embedded) as late:
            assert late.end() == Code.RESOURCE_EXHAUSTED
    finally:
        for client in clients:
            client.close()


def test_only_the_primary_may_change_anything(address: str) -> None:
    program = Program.entities()
    with Client(address, 5) as primary, Client(address, 4) as backup:
        primary.push(program)
        with refused(Code.PERMISSION_DENIED):
            backup.push(program)
        with refused(Code.PERMISSION_DENIED):
            backup.write()
        stranger = Client(address)
        with stranger, refused(Code.PERMISSION_DENIED):
            stranger.write()
        # Reading is for everybody.
        assert len(backup.read(program.counter("hits"))) == 16


def test_writes_of_a_former_primary_are_refused(address: str) -> None:
    program = Program.entities()
    with Client(address, 5) as first:
        first.push(program)
        with Client(address, 6) as second:
            with refused(Code.PERMISSION_DENIED):
                first.write()
            assert second.write() == []


class TestRules:
    """The rules without any stream, where every order of events is easy to make."""

    def test_notices(self) -> None:
        rules = Arbitration()
        assert rules.update("a", 5) == [Notice("a", 5, status.Code.OK)]
        assert rules.update("b", 3) == [Notice("b", 5, status.Code.ALREADY_EXISTS)]
        assert rules.update("b", 7) == [Notice("a", 7, status.Code.ALREADY_EXISTS), Notice("b", 7, status.Code.OK)]
        assert rules.remove("b") == [Notice("a", 5, status.Code.OK)]
        assert rules.update("a", None) == [Notice("a", 7, status.Code.NOT_FOUND)]
        assert rules.primary is None

    def test_unknown_client_may_leave(self) -> None:
        assert Arbitration().remove("nobody") == []

    def test_refused_update_leaves_the_id(self) -> None:
        rules = Arbitration()
        rules.update("a", 5)
        rules.update("b", 3)
        with pytest.raises(status.Refused) as caught:
            rules.update("b", 5)
        assert caught.value.code == status.Code.INVALID_ARGUMENT
        assert rules.is_primary(5)
        assert not rules.is_primary(3)
        assert rules.update("c", 4) == [Notice("c", 5, status.Code.ALREADY_EXISTS)]

    def test_limit(self) -> None:
        rules = Arbitration()
        for client in range(MAX_CLIENTS):
            rules.update(client, None)
        with pytest.raises(status.Refused) as caught:
            rules.update("one more", 1)
        assert caught.value.code == status.Code.RESOURCE_EXHAUSTED
        rules.remove(0)
        assert rules.update("one more", 1)
