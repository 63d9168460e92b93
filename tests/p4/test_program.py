# SPDX-License-Identifier: Apache-2.0
"""Every branch of the P4 program (docs/design.md, section 3) by crafted frames, on the switch that `switch` gives."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers.frames import SWITCH_IP, SWITCH_MAC, Answer, Contribution, Worker, arp_request, words_of
from helpers.switches import SwitchUnderTest
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import ARP, LLC, SNAP, Dot1AD, Dot1Q, Dot3, Ether
from scapy.packet import Packet, Raw

from p4reduce import constants, wire
from p4reduce.wire import Kind, Op, Reason

EPOCH = 7
ROW = 3
GROUP = 9
POOL_BASE = 100
POOL_SIZE = 4
A, B = Worker.at(0), Worker.at(1)
STRANGER = Worker.at(5, port=3)
TAG = wire.pack_tag(1, 0, 0xABCD)


def admitted(worker: Worker, epoch: int = EPOCH) -> dict[str, int]:
    """Key of a worker's entry in `admit`."""
    place = {"ingress_port": worker.port, "ipv4_src": worker.ip_number, "udp_src": worker.udp_port}
    return {**place, "epoch": epoch, "rank": worker.rank}


def admit(
    switch: SwitchUnderTest, workers: list[Worker], epoch: int = EPOCH, row: int = ROW, group: int = GROUP
) -> None:
    """Install what the controller installs for one epoch."""
    for worker in workers:
        switch.insert(
            "admit",
            admitted(worker, epoch),
            "admit_worker",
            {
                "worker": 1 << worker.rank,
                "full": (1 << len(workers)) - 1,
                "pool_base": POOL_BASE,
                "pool_size": POOL_SIZE,
                "group": group,
                "workers": len(workers),
                "stats": row,
            },
        )
        switch.insert(
            "replica",
            {"egress_rid": group * 64 + worker.rank},
            "to_worker",
            {"mac": worker.mac_number, "ip": worker.ip_number, "udp_port": worker.udp_port, "rank": worker.rank},
        )
    switch.insert("epochs", {"epoch": epoch}, "known_epoch", {"stats": row})
    switch.set_group(group, [(worker.port, group * 64 + worker.rank) for worker in workers])


@pytest.fixture
def pair(switch: SwitchUnderTest) -> SwitchUnderTest:
    """A switch with one job of two workers, and the ports where they sit."""
    admit(switch, [A, B])
    for worker in (A, B):
        switch.insert("worker_ports", {"ingress_port": worker.port, "ipv4_src": worker.ip_number}, "nack", {})
    return switch


def send(switch: SwitchUnderTest, contribution: Contribution) -> list[Answer]:
    return [Answer.parse(port, frame) for port, frame in switch.send(contribution.worker.port, contribution.frame())]


def contribution(worker: Worker, value: int | list[int], size: int, **fields: object) -> Contribution:
    return Contribution(worker, words_of(value, size), **{"epoch": EPOCH, "tag": TAG, **fields})  # type: ignore[arg-type]


@pytest.fixture(params=["short", "full"])
def words(request: pytest.FixtureRequest, profile: wire.Profile) -> int:
    return 1 if request.param == "short" else profile.words


def test_sum_reaches_every_worker_with_its_own_addresses(pair: SwitchUnderTest, words: int) -> None:
    lanes = list(range(1, 64 * words + 1))
    assert send(pair, contribution(A, lanes, words, check=2**64 - 5)) == []
    answers = send(pair, contribution(B, [1000] * len(lanes), words, check=12))

    assert sorted(answer.port for answer in answers) == [A.port, B.port]
    for answer in answers:
        worker = {A.port: A, B.port: B}[answer.port]
        assert answer.payload == words_of([lane + 1000 for lane in lanes], words)
        assert answer.header == {
            "version": constants.VERSION,
            "kind": Kind.RESULT,
            "op": Op.ADD,
            "words": words,
            "epoch": EPOCH,
            "slot": 0,
            "rank": worker.rank,
            "count_or_reason": 2,
            "round": 0,
            "check": 7,
            "tag": TAG,
        }
        assert (answer.ether.src, answer.ether.dst) == (SWITCH_MAC, worker.mac)
        assert (answer.ip.src, answer.ip.dst) == (SWITCH_IP, worker.ip)
        assert (answer.udp.sport, answer.udp.dport) == (constants.UDP_PORT, worker.udp_port)
        assert answer.udp.chksum == 0
        assert answer.ip.len == 28 + 32 + 256 * words
        assert answer.checksum_is_right()
    assert pair.counters(ROW) == counts(contributions=2, results=1)


def counts(**events: int) -> dict[str, int]:
    """All counters of a row, zero where not named."""
    names = ("contributions", "results", "repeats", "duplicates", "stale", "mismatch", "refused", "guarded")
    return {name: events.get(name, 0) for name in names}


def test_lanes_do_not_touch_their_neighbours(pair: SwitchUnderTest, profile: wire.Profile) -> None:
    rng = np.random.default_rng(1)
    first = rng.integers(0, 2**31, profile.lanes(32), dtype=np.uint32)
    second = rng.integers(0, 2**31, profile.lanes(32), dtype=np.uint32)
    send(pair, contribution(A, first.tolist(), profile.words))
    answers = send(pair, contribution(B, second.tolist(), profile.words))
    assert {answer.payload for answer in answers} == {words_of((first + second).tolist(), profile.words)}
    assert len(answers) == 2


def test_or_takes_the_union(pair: SwitchUnderTest, words: int) -> None:
    assert send(pair, contribution(A, 0b0111, words, op=Op.OR)) == []
    answers = send(pair, contribution(B, 0b1001, words, op=Op.OR))
    assert [answer.payload for answer in answers] == [words_of(0b1111, words)] * 2
    assert {answer.header["op"] for answer in answers} == {Op.OR}


def test_one_worker_alone_is_answered_at_once(switch: SwitchUnderTest, words: int) -> None:
    admit(switch, [A])
    (answer,) = send(switch, contribution(A, 5, words, check=9))
    assert (answer.port, answer.payload, answer.header["check"]) == (A.port, words_of(5, words), 9)
    assert answer.header["count_or_reason"] == 1


def test_eight_workers(switch: SwitchUnderTest, profile: wire.Profile) -> None:
    """More workers than the test bench has ports: several sit behind one port, each with an address of its own."""
    workers = [dataclasses.replace(Worker.at(rank, port=1 + rank % 2), ip=f"10.0.1.{rank}") for rank in range(8)]
    admit(switch, workers)
    for worker in workers[:-1]:
        assert send(switch, contribution(worker, worker.rank + 1, profile.words, check=1)) == []
    answers = send(switch, contribution(workers[-1], 8, profile.words, check=1))
    assert sorted(answer.header["rank"] for answer in answers) == list(range(8))
    assert {answer.payload for answer in answers} == {words_of(36, profile.words)}
    assert {answer.header["check"] for answer in answers} == {8}
    assert {(answer.header["rank"], answer.ip.dst) for answer in answers} == {(w.rank, w.ip) for w in workers}


def test_duplicate_while_collecting_is_dropped(pair: SwitchUnderTest, words: int) -> None:
    first = contribution(A, 5, words)
    assert send(pair, first) == []
    assert send(pair, first) == []
    answers = send(pair, contribution(B, 6, words))
    assert {answer.payload for answer in answers} == {words_of(11, words)}
    assert pair.counters(ROW) == counts(contributions=2, results=1, duplicates=1)


def test_duplicate_after_completion_gets_the_result_alone(pair: SwitchUnderTest, words: int) -> None:
    first = contribution(A, 5, words, check=3)
    send(pair, first)
    results = send(pair, contribution(B, 6, words, check=4))
    (repeat,) = send(pair, first)
    original = next(answer for answer in results if answer.port == A.port)
    assert (repeat.port, repeat.header, repeat.payload) == (A.port, original.header, original.payload)
    assert (repeat.ether.src, repeat.ether.dst) == (SWITCH_MAC, A.mac)
    assert (repeat.ip.src, repeat.ip.dst, repeat.udp.dport) == (SWITCH_IP, A.ip, A.udp_port)
    assert repeat.checksum_is_right()
    assert pair.counters(ROW) == counts(contributions=2, results=1, repeats=1)


def run_round(
    switch: SwitchUnderTest, number: int, values: tuple[int, int], words: int, **fields: object
) -> set[bytes]:
    """Both workers contribute to one round of slot 0; return the distinct sums that came out."""
    tag = wire.pack_tag(1, number % 2**24, 0)
    got: set[bytes] = set()
    for worker, value in zip((A, B), values, strict=True):
        sent = contribution(worker, value, words, round=number % 2**32, tag=tag, **fields)
        got |= {answer.payload for answer in send(switch, sent)}
    return got


def test_rounds_follow_each_other_in_two_versions(pair: SwitchUnderTest, words: int) -> None:
    for number in range(5):
        assert run_round(pair, number, (number, 10), words) == {words_of(number + 10, words)}


def test_late_duplicate_of_the_previous_round_is_harmless(pair: SwitchUnderTest, words: int) -> None:
    old = contribution(A, 1, words, round=0, tag=wire.pack_tag(1, 0, 0))
    run_round(pair, 0, (1, 2), words)
    assert send(pair, contribution(A, 10, words, round=1, tag=TAG)) == []
    (repeat,) = send(pair, old)
    assert (repeat.payload, repeat.header["round"]) == (words_of(3, words), 0)
    answers = send(pair, contribution(B, 20, words, round=1, tag=TAG))
    assert {answer.payload for answer in answers} == {words_of(30, words)}


@pytest.mark.parametrize("open_round", ["collecting", "complete"])
def test_late_duplicate_two_rounds_old_is_stale(pair: SwitchUnderTest, words: int, open_round: str) -> None:
    """The published seen-bit scheme counts this frame as a contribution of the round in progress."""
    old = contribution(A, 1, words, round=0, tag=wire.pack_tag(1, 0, 0))
    run_round(pair, 0, (1, 2), words)
    run_round(pair, 1, (3, 4), words)
    assert send(pair, contribution(B, 20, words, round=2, tag=TAG)) == []
    if open_round == "complete":
        assert len(send(pair, contribution(A, 10, words, round=2, tag=TAG))) == 2
        assert send(pair, old) == []
        (repeat,) = send(pair, contribution(A, 10, words, round=2, tag=TAG))
        assert repeat.payload == words_of(30, words)
    else:
        assert send(pair, old) == []
        answers = send(pair, contribution(A, 10, words, round=2, tag=TAG))
        assert {answer.payload for answer in answers} == {words_of(30, words)}
    assert pair.counters(ROW)["stale"] == 1


def test_rounds_wrap_around(pair: SwitchUnderTest) -> None:
    """Round 0 follows 2^32 - 1 and makes 2^32 - 2 old."""
    start = 2**32 - 3
    for number in range(start, start + 6):
        assert run_round(pair, number, (number % 100, 1), 1) == {words_of(number % 100 + 1, 1)}
    old = contribution(A, 1, 1, round=2**32 - 2, tag=wire.pack_tag(1, 2**32 - 2, 0))
    assert send(pair, old) == []
    assert pair.counters(ROW)["stale"] == 1


@pytest.mark.parametrize("distance", [2, 4, 2**20, 2**31 - 2, 2**31, 2**32 - 2])
def test_only_the_next_round_of_a_cell_starts_it_afresh(pair: SwitchUnderTest, distance: int) -> None:
    """Nobody can be further ahead: a round damaged on its way must not make the true ones stale."""
    run_round(pair, 4, (1, 2), 1)
    assert send(pair, contribution(A, 5, 1, round=(4 + distance) % 2**32)) == []
    assert pair.counters(ROW)["stale"] == (0 if distance == 2 else 1)
    assert pair.counters(ROW)["contributions"] == (3 if distance == 2 else 2)
    tag = wire.pack_tag(1, 6, 0)
    if distance != 2:
        assert run_round(pair, 6, (7, 8), 1) == {words_of(15, 1)}
    else:
        sent = contribution(A, 7, 1, round=6, tag=tag)
        assert_nack(send(pair, sent), A, Reason.TAG_MISMATCH, sent)


def test_new_epoch_starts_fresh_in_the_same_slot(pair: SwitchUnderTest, words: int) -> None:
    run_round(pair, 6, (1, 2), words)
    assert send(pair, contribution(A, 99, words, round=0)) == []
    admit(pair, [A, B], epoch=EPOCH + 1, row=ROW + 1, group=GROUP + 1)
    assert run_round(pair, 0, (4, 5), words, epoch=EPOCH + 1) == {words_of(9, words)}
    assert pair.counters(ROW + 1) == counts(contributions=2, results=1)


def test_slots_are_apart(pair: SwitchUnderTest) -> None:
    for slot in range(POOL_SIZE):
        assert send(pair, contribution(A, slot, 1, slot=slot)) == []
    for slot in range(POOL_SIZE):
        answers = send(pair, contribution(B, 10 * slot, 1, slot=slot))
        assert {answer.payload for answer in answers} == {words_of(11 * slot, 1)}


def assert_nack(answers: list[Answer], worker: Worker, reason: Reason, sent: Contribution) -> None:
    (answer,) = answers
    assert answer.port == worker.port
    assert answer.header["kind"] == Kind.NACK
    assert answer.header["count_or_reason"] == reason
    assert answer.payload == b""
    assert answer.ip.len == 28 + 32
    assert answer.udp.len == 8 + 32
    assert len(bytes(answer.ether)) == 14 + 20 + 8 + 32
    assert answer.checksum_is_right()
    assert (answer.ether.dst, answer.ip.dst, answer.udp.dport) == (worker.mac, sent.ip or worker.ip, worker.udp_port)
    assert (answer.udp.sport, answer.udp.chksum) == (constants.UDP_PORT, 0)
    for name in ("slot", "round", "epoch", "tag"):
        assert answer.header[name] == getattr(sent, name)
    assert answer.header["rank"] == (sent.worker.rank if sent.rank is None else sent.rank)


@pytest.mark.parametrize(
    "change",
    [{"tag": wire.pack_tag(2, 0, 0xABCD)}, {"tag": wire.pack_tag(1, 1, 0xABCD)}, {"tag": TAG ^ 1}, {"op": Op.OR}],
    ids=["bucket", "chunk", "digest", "op"],
)
def test_disagreement_is_told(pair: SwitchUnderTest, change: dict[str, int], words: int) -> None:
    send(pair, contribution(A, 5, words))
    wrong = contribution(B, 6, words, **change)
    assert_nack(send(pair, wrong), B, Reason.TAG_MISMATCH, wrong)
    assert pair.counters(ROW) == counts(contributions=1, mismatch=1)
    answers = send(pair, contribution(B, 6, words))
    assert {answer.payload for answer in answers} == {words_of(11, words)}


def test_disagreement_about_words_is_told(pair: SwitchUnderTest, profile: wire.Profile) -> None:
    send(pair, contribution(A, 5, profile.words))
    wrong = contribution(B, 6, 1)
    assert_nack(send(pair, wrong), B, Reason.TAG_MISMATCH, wrong)
    assert pair.counters(ROW) == counts(contributions=1, mismatch=1)


def test_disagreement_after_completion_is_told(pair: SwitchUnderTest) -> None:
    run_round(pair, 0, (1, 2), 1)
    wrong = contribution(A, 1, 1, tag=TAG ^ 1)
    assert_nack(send(pair, wrong), A, Reason.TAG_MISMATCH, wrong)


def test_unknown_epoch_is_told(pair: SwitchUnderTest, words: int) -> None:
    sent = contribution(A, 5, words, epoch=EPOCH + 1)
    assert_nack(send(pair, sent), A, Reason.UNKNOWN_EPOCH, sent)
    assert pair.counters(0) == counts(refused=1)


@pytest.mark.parametrize("change", [{"rank": 1}, {"rank": 63}, {"rank": 255}], ids=["other", "none", "beyond"])
def test_wrong_rank_is_told(pair: SwitchUnderTest, change: dict[str, int]) -> None:
    sent = contribution(A, 5, 1, **change)
    assert_nack(send(pair, sent), A, Reason.NOT_ADMITTED, sent)
    assert pair.counters(ROW) == counts(refused=1)


def test_wrong_address_learns_nothing(pair: SwitchUnderTest) -> None:
    """From a worker's port but not its address: not a worker that the switch knows."""
    assert send(pair, contribution(A, 5, 1, ip="10.0.0.77")) == []
    assert pair.counters(ROW) == counts(refused=1)


def test_right_address_on_the_wrong_port_learns_nothing(pair: SwitchUnderTest) -> None:
    sent = contribution(A, 5, 1)
    assert pair.send(B.port, sent.frame()) == []
    assert pair.counters(ROW) == counts(refused=1)


@pytest.mark.parametrize("udp_port", [A.udp_port + 1, B.udp_port, 1])
def test_another_process_of_the_workers_host_is_not_admitted(pair: SwitchUnderTest, words: int, udp_port: int) -> None:
    """Right port, address, epoch and rank, wrong UDP port: told so, as it sits where workers sit, and not counted."""
    other = dataclasses.replace(A, udp_port=udp_port)
    sent = contribution(other, 1000, words)
    assert_nack(send(pair, sent), other, Reason.NOT_ADMITTED, sent)
    assert pair.counters(ROW) == counts(refused=1)
    send(pair, contribution(A, 5, words))
    answers = send(pair, contribution(B, 6, words))
    assert {answer.payload for answer in answers} == {words_of(11, words)}


def test_stranger_learns_nothing_and_changes_nothing(pair: SwitchUnderTest, words: int) -> None:
    send(pair, contribution(A, 5, words))
    forged = contribution(STRANGER, 1000, words, rank=1)
    assert send(pair, forged) == []
    answers = send(pair, contribution(B, 6, words))
    assert {answer.payload for answer in answers} == {words_of(11, words)}
    assert pair.counters(ROW) == counts(contributions=2, results=1, refused=1)


def test_slot_outside_the_pool_is_told(pair: SwitchUnderTest) -> None:
    for slot in (POOL_SIZE, 0xFFFF):
        sent = contribution(A, 5, 1, slot=slot)
        assert_nack(send(pair, sent), A, Reason.BAD_SLOT, sent)
    assert pair.counters(ROW) == counts(refused=2)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 0},
        {"version": 2},
        {"op": 2},
        {"words": 0},
        {"words": 2},
        {"words": 255},
        {"trailer": b"x"},
        {"trailer": bytes(256)},
    ],
    ids=lambda change: "-".join(f"{k}={v if isinstance(v, int) else len(v)}" for k, v in change.items()),
)
def test_malformed_is_told(pair: SwitchUnderTest, change: dict[str, object], words: int) -> None:
    sent = contribution(A, 5, words, **change)
    assert_nack(send(pair, sent), A, Reason.MALFORMED, sent)
    assert pair.counters(0) == counts(refused=1)
    assert pair.counters(ROW) == counts()


@pytest.mark.parametrize("missing", [1, 255, 256])
def test_payload_cut_short_is_told(pair: SwitchUnderTest, missing: int, words: int) -> None:
    payload = words_of(5, words)
    sent = Contribution(A, payload[:-missing], epoch=EPOCH, tag=TAG, words=words)
    assert_nack(send(pair, sent), A, Reason.MALFORMED, sent)
    assert pair.counters(0) == counts(refused=1)


@pytest.mark.parametrize("kind", [0, Kind.RESULT, Kind.NACK, 4])
def test_answers_are_never_answered(pair: SwitchUnderTest, kind: int) -> None:
    assert send(pair, contribution(A, 5, 1, kind=kind)) == []
    assert pair.counters(0) == counts(refused=1)


@pytest.mark.parametrize("length", [0, 1, 16, 31])
def test_datagram_shorter_than_the_header_is_dropped(pair: SwitchUnderTest, length: int) -> None:
    frame = bytes(
        Ether(src=A.mac, dst=SWITCH_MAC)
        / IP(src=A.ip, dst=SWITCH_IP)
        / UDP(sport=A.udp_port, dport=constants.UDP_PORT)
        / Raw(bytes(range(1, length + 1)))
    )
    assert pair.send(A.port, frame) == []
    assert pair.counters(0) == counts(guarded=1)


def test_refused_frames_leave_the_slot_alone(pair: SwitchUnderTest, words: int) -> None:
    send(pair, contribution(A, 5, words))
    for change in ({"version": 9}, {"epoch": EPOCH + 1}, {"slot": POOL_SIZE}, {"rank": 0}, {"tag": 0}):
        assert all(a.header["kind"] == Kind.NACK for a in send(pair, contribution(B, 1000, words, **change)))
    answers = send(pair, contribution(B, 6, words))
    assert {answer.payload for answer in answers} == {words_of(11, words)}


def test_revoked_epoch_is_fenced(pair: SwitchUnderTest) -> None:
    send(pair, contribution(A, 5, 1))
    for worker in (A, B):
        pair.delete("admit", admitted(worker))
    sent = contribution(B, 6, 1)
    assert_nack(send(pair, sent), B, Reason.NOT_ADMITTED, sent)
    pair.delete("epochs", {"epoch": EPOCH})
    assert_nack(send(pair, sent), B, Reason.UNKNOWN_EPOCH, sent)


def test_two_jobs_do_not_mix(pair: SwitchUnderTest) -> None:
    """The same workers in a second job, whose pool overlaps: epochs keep them apart, even in one slot."""
    admit(pair, [A, B], epoch=EPOCH + 1, row=ROW + 1, group=GROUP + 1)
    send(pair, contribution(A, 5, 1))
    send(pair, contribution(A, 50, 1, epoch=EPOCH + 1, slot=1))
    first = send(pair, contribution(B, 6, 1))
    second = send(pair, contribution(B, 60, 1, epoch=EPOCH + 1, slot=1))
    assert {answer.payload for answer in first} == {words_of(11, 1)}
    assert {answer.payload for answer in second} == {words_of(110, 1)}


def test_foreign_traffic_is_forwarded_unchanged(pair: SwitchUnderTest) -> None:
    pair.insert("forward", {"dst_mac": B.mac_number}, "to_port", {"port": B.port})
    addressed = Ether(src=A.mac, dst=B.mac)
    frames = [
        addressed / IP(src=A.ip, dst=B.ip) / TCP(sport=1, dport=2) / Raw(b"ring"),
        addressed / IP(src=A.ip, dst=B.ip) / UDP(sport=1, dport=2) / Raw(b"other port"),
        addressed / IP(src=A.ip, dst=B.ip, flags="MF") / UDP(sport=1, dport=constants.UDP_PORT) / Raw(bytes(40)),
        addressed
        / IP(src=A.ip, dst=B.ip, options=b"\x01\x01\x01\x00")
        / UDP(dport=constants.UDP_PORT)
        / Raw(bytes(40)),
        addressed / IP(src=A.ip, dst=B.ip, flags="MF") / UDP(sport=constants.UDP_PORT, dport=7) / Raw(bytes(40)),
        addressed / IP(src=A.ip, dst=B.ip, frag=100, proto=17) / Raw(bytes(600)),
        addressed / IP(src=A.ip, dst=B.ip, frag=1, flags="MF", proto=6) / Raw(bytes(16)),
        addressed / IP(src=A.ip, dst=B.ip) / ICMP() / Raw(bytes(56)),
        addressed / IP(src=A.ip, dst="10.9.9.9") / TCP(flags="S"),
        addressed / ARP(op=2, hwsrc=A.mac, psrc=A.ip, hwdst=B.mac, pdst=B.ip),
    ]
    for frame in frames:
        data = bytes(frame).ljust(60, b"\0")
        assert pair.send(A.port, data) == [(B.port, data)]
    assert pair.counters(0) == counts()


def lies() -> dict[str, bytes]:
    """Frames that come in by A's port and claim to be from somebody else, or hide who they are from."""
    link, own = Ether(src=A.mac, dst=B.mac), IP(src=A.ip, dst=B.ip)
    answer = UDP(sport=constants.UDP_PORT, dport=B.udp_port) / Raw(
        wire.make_header(kind=Kind.RESULT, words=1, epoch=EPOCH, rank=1, count_or_reason=2, tag=TAG) + bytes(256)
    )
    whole = bytes(IP(src=SWITCH_IP, dst=B.ip) / answer)[20:]
    reply = {"op": 2, "hwdst": B.mac, "pdst": B.ip}
    frames: dict[str, Packet] = {
        "answer of the switch": Ether(src=SWITCH_MAC, dst=B.mac) / IP(src=SWITCH_IP, dst=B.ip) / answer,
        "answer under the own MAC": link / IP(src=SWITCH_IP, dst=B.ip) / answer,
        "answer under the own address": link / own / answer,
        "answer, first fragment": link / IP(src=SWITCH_IP, dst=B.ip, flags="MF", proto=17) / Raw(whole[:160]),
        "answer, last fragment": link / IP(src=SWITCH_IP, dst=B.ip, frag=20, proto=17) / Raw(whole[160:]),
        "answer with options": link / IP(src=SWITCH_IP, dst=B.ip, options=b"\x01\x01\x01\x00") / answer,
        "answer, VLAN tagged": link / Dot1Q(vlan=0) / IP(src=SWITCH_IP, dst=B.ip) / answer,
        "TCP of another host": link / IP(src="10.0.0.3", dst=B.ip) / TCP(),
        "TCP of the receiver": link / IP(src=B.ip, dst=B.ip) / TCP(),
        "TCP of nobody": link / IP(src="0.0.0.0", dst=B.ip) / TCP(),
        "another MAC": Ether(src=B.mac, dst=B.mac) / own / TCP(),
        "another host's MAC and address": Ether(src=STRANGER.mac, dst=B.mac) / IP(src=STRANGER.ip, dst=B.ip) / TCP(),
        "own packet, VLAN tagged": link / Dot1Q(vlan=5) / own / TCP(),
        "own packet, tagged twice": link / Dot1AD(vlan=5) / Dot1Q(vlan=5) / own / TCP(),
        "IPv6": link / IPv6(src="fe80::1", dst="fe80::2") / UDP(sport=1, dport=2),
        "IPv4 that says version 6": link / IP(src=A.ip, dst=B.ip, version=6) / TCP(),
        "IEEE 802.3": Dot3(src=A.mac, dst=B.mac) / LLC() / SNAP() / own / TCP(),
        "experimental": Ether(src=A.mac, dst=B.mac, type=0x88B5) / Raw(bytes(range(60))),
        "ARP for the switch": link / ARP(hwsrc=A.mac, psrc=SWITCH_IP, **reply),
        "ARP for another host": link / ARP(hwsrc=A.mac, psrc=STRANGER.ip, **reply),
        "ARP for another host, all of it": Ether(src=STRANGER.mac, dst=B.mac)
        / ARP(hwsrc=STRANGER.mac, psrc=STRANGER.ip, **reply),
        "ARP with another MAC": link / ARP(hwsrc=STRANGER.mac, psrc=A.ip, **reply),
        "ARP probe": link / ARP(op=1, hwsrc=A.mac, psrc="0.0.0.0", pdst=B.ip),
        "ARP of other hardware": link / ARP(hwtype=6, hwsrc=A.mac, psrc=A.ip, **reply),
        "ARP of another protocol": link / ARP(ptype=0x86DD, hwsrc=A.mac, psrc=A.ip, **reply),
    }
    made = {name: bytes(frame).ljust(60, b"\0") for name, frame in frames.items()}
    arp = bytes(link / ARP(hwsrc=A.mac, psrc=A.ip, **reply))
    made["ARP with long addresses"] = arp[:18] + b"\x08\x04" + arp[20:]
    made["ARP with long protocol addresses"] = arp[:18] + b"\x06\x10" + arp[20:]
    made["IPv4, cut short"] = bytes(link / own / TCP())[:30]
    made["ARP, cut short"] = arp[:40]
    return made


@pytest.mark.parametrize("name", lies())
def test_nobody_speaks_as_somebody_else(pair: SwitchUnderTest, name: str) -> None:
    pair.insert("forward", {"dst_mac": B.mac_number}, "to_port", {"port": B.port})
    assert pair.send(A.port, lies()[name]) == []
    assert pair.counters(0) == counts(guarded=1)
    honest = bytes(Ether(src=A.mac, dst=B.mac) / IP(src=A.ip, dst=B.ip) / TCP()).ljust(60, b"\0")
    assert pair.send(A.port, honest) == [(B.port, honest)], "or nothing would have come out anyhow"
    assert pair.send(B.port, honest) == [], "nor from another port"
    assert pair.counters(0) == counts(guarded=2)


def test_nobody_but_the_switch_sends_answers(pair: SwitchUnderTest, words: int) -> None:
    """Checks and signatures are public, so a result that another port could send would be believed."""
    pair.insert("forward", {"dst_mac": B.mac_number}, "to_port", {"port": B.port})
    header = wire.make_header(kind=Kind.RESULT, words=words, epoch=EPOCH, rank=1, count_or_reason=2, tag=TAG)
    link = Ether(src=SWITCH_MAC, dst=B.mac) / IP(src=SWITCH_IP, dst=B.ip)
    forged = link / UDP(sport=constants.UDP_PORT, dport=B.udp_port) / Raw(header + words_of(5, words))
    assert pair.send(STRANGER.port, bytes(forged)) == []
    assert pair.send(A.port, bytes(forged)) == []


def test_unknown_destination_is_dropped(pair: SwitchUnderTest) -> None:
    frame = bytes(Ether(src=A.mac, dst="02:00:00:00:00:99") / IP(src=A.ip, dst="10.0.0.9") / TCP() / Raw(b"x"))
    assert pair.send(A.port, frame) == []


def test_broadcast_floods_all_ports_but_its_own(pair: SwitchUnderTest) -> None:
    pair.set_group(constants.FLOOD_GROUP, [(1, 0), (2, 0), (3, 0)])
    pair.insert("forward", {"dst_mac": 2**48 - 1}, "flood", {"group": constants.FLOOD_GROUP})
    frame = bytes(Ether(src=A.mac, dst="ff:ff:ff:ff:ff:ff") / IP(src=A.ip, dst="10.0.0.255") / UDP() / Raw(bytes(46)))
    assert sorted(pair.send(A.port, frame)) == [(2, frame), (3, frame)]


def test_switch_answers_arp(pair: SwitchUnderTest) -> None:
    number = int(SWITCH_MAC.replace(":", ""), 16)
    pair.insert("arp", {"target_ip": Worker(0, 0, SWITCH_IP).ip_number}, "answer_arp", {"mac": number})
    ((port, frame),) = pair.send(A.port, arp_request(A, SWITCH_IP))
    reply = Ether(frame)
    assert port == A.port
    assert (reply.src, reply.dst) == (SWITCH_MAC, A.mac)
    assert (reply[ARP].op, reply[ARP].hwsrc, reply[ARP].psrc) == (2, SWITCH_MAC, SWITCH_IP)
    assert (reply[ARP].hwdst, reply[ARP].pdst) == (A.mac, A.ip)


def test_arp_for_somebody_else_is_flooded(pair: SwitchUnderTest) -> None:
    pair.set_group(constants.FLOOD_GROUP, [(1, 0), (2, 0), (3, 0)])
    pair.insert("forward", {"dst_mac": 2**48 - 1}, "flood", {"group": constants.FLOOD_GROUP})
    request = arp_request(A, "10.0.0.200")
    assert sorted(pair.send(A.port, request)) == [(2, request), (3, request)]
