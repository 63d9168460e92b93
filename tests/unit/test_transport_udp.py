# SPDX-License-Identifier: Apache-2.0
"""The UDP transport on loopback, with batched system calls and with the plain fallback."""

from __future__ import annotations

import errno
import os
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from p4reduce import constants, wire
from p4reduce.core.batch import PayloadRows, ReceiveBatch, SendBatch
from p4reduce.errors import TransportError
from p4reduce.transport import limits, mmsg, udp
from p4reduce.transport.base import BATCH_FRAMES, Transport
from p4reduce.transport.udp import UdpTransport

W34 = wire.profile("w34")
W5 = wire.profile("w5")
LOOPBACK = "127.0.0.1"

Pair = tuple[UdpTransport, UdpTransport]


def test_batched_calls_are_available() -> None:
    assert mmsg.available(), "the tests below would pass without ever using them"


@pytest.fixture(params=[True, False], ids=["batched", "plain"])
def batched(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def pair(batched: bool) -> Iterator[Pair]:
    a = UdpTransport(LOOPBACK, None, W34, batched=batched)
    b = UdpTransport(LOOPBACK, a.local, W34, batched=batched)
    a.set_endpoint(b.local)
    yield a, b
    a.close()
    b.close()


def wait_readable(transport: Transport) -> None:
    poller = select.poll()
    poller.register(transport.fileno(), select.POLLIN)
    assert poller.poll(5000), "nothing arrived within 5 s"


def make_batch(seed: int, sizes: list[int], profile: wire.Profile = W34) -> tuple[SendBatch, np.ndarray]:
    """A batch of frames whose payload rows are neither in order nor adjacent."""
    rng = np.random.default_rng(seed)
    batch = SendBatch(BATCH_FRAMES)
    count = len(sizes)
    rows = rng.integers(0, 256, (3 * count + 1, profile.payload_bytes), dtype=np.uint8)
    index = rng.permutation(3 * count + 1)[:count].astype(np.int64)
    raw = rng.integers(0, 256, count * constants.HEADER_BYTES, dtype=np.uint8)
    batch.headers[:count] = raw.view(wire.HEADER)
    batch.count = count
    # Two groups, so that their borders are crossed.
    half = count // 2
    lengths = np.array(sizes, dtype=np.int64)
    if half:
        batch.groups.append(PayloadRows(0, half, rows, index[:half], lengths[:half]))
    batch.groups.append(PayloadRows(half, count, rows, index[half:], lengths[half:]))
    return batch, rows


def datagrams(batch: ReceiveBatch) -> list[bytes]:
    whole = [batch.headers[i].tobytes() + batch.payload[i].tobytes() for i in range(batch.count)]
    return [data[: int(size)] for data, size in zip(whole, batch.sizes, strict=False)]


def receive_all(transport: UdpTransport, count: int) -> list[bytes]:
    found: list[bytes] = []
    batch = ReceiveBatch(transport.profile, BATCH_FRAMES)
    while len(found) < count:
        wait_readable(transport)
        assert transport.receive(batch) > 0
        found += datagrams(batch)
    return found


def test_frames_arrive_bit_for_bit(pair: Pair) -> None:
    a, b = pair
    full, short = W34.payload_bytes, constants.WORD_BYTES
    for seed in range(3):
        sizes = [full] * 20 + [short] * 5 + [full] * 7
        batch, _ = make_batch(seed, sizes)
        assert a.send(batch) == len(sizes)
        assert receive_all(b, len(sizes)) == list(batch.frames())
    assert a.counters.sent == 96
    assert a.counters.unsent == 0
    assert b.counters.received == 96
    assert b.counters.foreign == 0
    assert b.counters.oversized == 0


def test_new_batches_get_structures_of_their_own(pair: Pair) -> None:
    a, b = pair
    first, _ = make_batch(1, [256] * 3)
    second, _ = make_batch(2, [512] * 2)
    for batch in (first, second, first):
        a.send(batch)
        assert receive_all(b, batch.count) == list(batch.frames())


def test_an_empty_queue_is_no_datagrams(pair: Pair) -> None:
    a, _ = pair
    batch = ReceiveBatch(W34, 4)
    batch.count = 3
    assert a.receive(batch) == 0
    assert batch.count == 0


def test_a_batch_never_takes_more_than_it_holds(pair: Pair) -> None:
    a, b = pair
    sent, _ = make_batch(5, [256] * 10)
    a.send(sent)
    wait_readable(b)
    batch = ReceiveBatch(W34, 4)
    found: list[bytes] = []
    for expected in (4, 4, 2, 0):
        assert b.receive(batch) == expected
        found += datagrams(batch)
    assert found == list(sent.frames())


def test_foreign_datagrams_are_dropped_and_counted(pair: Pair) -> None:
    a, b = pair
    ours, _ = make_batch(7, [256] * 6)
    frames = list(ours.frames())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.bind(("127.0.0.9", 0))
        mixed = SendBatch(1)
        mixed.count = 1
        for position, frame in enumerate(frames):
            stranger.sendto(b"x" * (32 + position), b.local)
            mixed.headers[0] = ours.headers[position]
            payload = np.frombuffer(frame[32:], dtype=np.uint8).reshape(1, -1)
            rows = np.zeros((1, W34.payload_bytes), dtype=np.uint8)
            rows[0, : payload.shape[1]] = payload
            mixed.groups[:] = [PayloadRows(0, 1, rows, np.zeros(1, np.int64), np.array([payload.shape[1]]))]
            assert a.send(mixed) == 1
    batch = ReceiveBatch(W34, BATCH_FRAMES)
    wait_readable(b)
    assert b.receive(batch) == 12
    assert datagrams(batch) == frames
    assert b.counters.foreign == 6
    assert b.counters.received == 12


def test_everything_is_foreign_before_the_endpoint_is_known(batched: bool) -> None:
    a = UdpTransport(LOOPBACK, None, W34, batched=batched)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(b"hello", a.local)
    wait_readable(a)
    batch = ReceiveBatch(W34, 4)
    assert a.receive(batch) == 1
    assert batch.count == 0
    assert a.counters.foreign == 1
    a.close()


def test_odd_sizes_are_passed_with_their_true_size(pair: Pair) -> None:
    a, b = pair
    batch = ReceiveBatch(W34, BATCH_FRAMES)
    sizes = [0, 1, 31, 32, 33, W34.datagram_bytes, W34.datagram_bytes + 1, 20000]
    raw = socket.socket(fileno=os.dup(a.fileno()))
    for size in sizes:
        raw.sendto(bytes(size), b.local)
    raw.close()
    wait_readable(b)
    assert b.receive(batch) == len(sizes)
    assert batch.sizes[: batch.count].tolist() == sizes
    assert b.counters.oversized == 2


def test_udp_checksum_is_off_and_nothing_may_be_fragmented(pair: Pair) -> None:
    a, _ = pair
    raw = socket.socket(fileno=os.dup(a.fileno()))
    assert raw.getsockopt(socket.SOL_SOCKET, udp._SO_NO_CHECK) == 1
    assert raw.getsockopt(socket.IPPROTO_IP, udp._IP_MTU_DISCOVER) == udp._IP_PMTUDISC_DO
    raw.close()


@pytest.mark.parametrize("profile", [W5, W34], ids=lambda p: p.name)
@pytest.mark.parametrize("receive_bytes", [16384, 106496, 1 << 20])
def test_the_receive_buffer_holds_what_receive_frames_says(profile: wire.Profile, receive_bytes: int) -> None:
    """Measured: as many full frames as promised really wait in the kernel, after the buffer has been in use too."""
    a = UdpTransport(LOOPBACK, None, profile)
    b = UdpTransport(LOOPBACK, a.local, profile)
    a.set_endpoint(b.local)
    raw = socket.socket(fileno=os.dup(b.fileno()))
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    real = raw.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    raw.close()
    promised = limits.buffered_frames(real, profile)
    batch = ReceiveBatch(profile, BATCH_FRAMES)
    for _ in range(2):
        sent = 0
        while sent < promised:
            count = min(BATCH_FRAMES, promised - sent)
            frames, _ = make_batch(sent, [profile.payload_bytes] * count, profile)
            assert a.send(frames) == count
            sent += count
        found = 0
        while taken := b.receive(batch):
            found += taken
        assert found == promised
    a.close()
    b.close()


def test_truesize_covers_what_was_measured() -> None:
    for datagram, measured in ((32, 832), (288, 1280), (1312, 2304), (8736, 16640)):
        assert measured <= limits.frame_truesize(datagram) <= 2 * measured


def test_the_default_buffer_holds_a_usable_window() -> None:
    """Without privileges and with Linux' default net.core.rmem_max (212992, doubled by the kernel)."""
    assert limits.buffered_frames(2 * 212992, W34) >= 16
    assert limits.buffered_frames(2 * 212992, W5) >= 64
    assert limits.buffered_frames(1, W34) == 1


def test_buffers_without_privileges_are_as_large_as_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_SO_RCVBUFFORCE", 9999)  # no such option: as for a user who may not force
    monkeypatch.setattr(limits, "_SO_SNDBUFFORCE", 9999)
    allowed = int(Path("/proc/sys/net/core/rmem_max").read_text())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        assert limits.set_buffers(sock, 1 << 30) == min(2 * allowed, 1 << 30)
        assert limits.set_buffers(sock, 65536) == 65536


IN_A_NAMESPACE = """
import subprocess, sys
import numpy as np
from p4reduce import errors, wire
from p4reduce.core.batch import PayloadRows, SendBatch
from p4reduce.transport.udp import UdpTransport

def mtu(value):
    subprocess.run(["ip", "link", "set", "dev", "lo", "up", "mtu", str(value)], check=True)

profile = wire.profile("w34")
mtu(1500)
a = UdpTransport("127.0.0.1", None, profile)
try:
    a.set_endpoint(("127.0.0.2", 9))
except errors.TransportError as error:
    print("endpoint:", error)
mtu(9000)
a.set_endpoint(("127.0.0.2", 9))
print("mtu:", a.mtu)
mtu(1500)
batch = SendBatch(1)
batch.count = 1
rows = np.zeros((1, profile.payload_bytes), np.uint8)
batch.groups.append(PayloadRows(0, 1, rows, np.zeros(1, np.int64), np.array([profile.payload_bytes])))
try:
    a.send(batch)
except errors.TransportError as error:
    print("send:", error)
"""


def may_make_namespaces() -> bool:
    """Root in a container may still lack the capabilities."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    tried = subprocess.run(
        ["unshare", "--net", "ip", "link", "set", "dev", "lo", "up"], capture_output=True, check=False
    )
    return tried.returncode == 0


@pytest.mark.netns
@pytest.mark.skipif(not may_make_namespaces(), reason="needs root, unshare and ip")
def test_a_real_interface_with_a_small_mtu() -> None:
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", IN_A_NAMESPACE],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    endpoint, found, send = done.stdout.splitlines()
    assert endpoint.startswith("endpoint: profile w34 needs an MTU of 8764 bytes, the path to the switch has 1500")
    assert found == "mtu: 9000"
    assert send.startswith("send: profile w34 needs an MTU of 8764 bytes, the path to the switch has 1500")


def test_an_address_of_another_host_is_refused_with_advice() -> None:
    with pytest.raises(TransportError, match=r"192\.0\.2\.77.*P4REDUCE_ADDRESS"):
        UdpTransport("192.0.2.77", None, W34)


def test_mtu_errors_name_need_and_finding_and_remedy() -> None:
    limits.check_mtu(W34, 9000)
    limits.check_mtu(W5, 1500)
    with pytest.raises(TransportError, match=r"w34 needs an MTU of 8764 bytes.* has 1500: .*profile w5.*mtu 9000"):
        limits.check_mtu(W34, 1500)
    with pytest.raises(TransportError, match=r"w5 needs an MTU of 1340 bytes.* has 1280: raise it"):
        limits.check_mtu(W5, 1280)


def test_sending_before_the_endpoint_is_known_is_refused(batched: bool) -> None:
    a = UdpTransport(LOOPBACK, None, W34, batched=batched)
    batch, _ = make_batch(0, [256])
    with pytest.raises(TransportError, match="endpoint"):
        a.send(batch)
    with pytest.raises(TransportError, match="endpoint"):
        _ = a.mtu
    a.close()


def test_path_to_loopback() -> None:
    assert limits.path_mtu((LOOPBACK, 20532)) >= 65535
    assert limits.source_address((LOOPBACK, 20532)) == LOOPBACK


class ScriptedCalls:
    """Stands in for the system calls: `script` holds counts to report and errors to raise."""

    def __init__(self, script: list[int | OSError]) -> None:
        self.script = script
        self.firsts: list[int] = []

    def receive(self, sock: socket.socket, batch: ReceiveBatch, endpoint: object) -> int:
        return self.send(sock, 0)

    def prepare(self, batch: SendBatch, endpoint: object) -> None:
        pass

    def send(self, sock: socket.socket, first: int) -> int:
        self.firsts.append(first)
        step = self.script.pop(0)
        if isinstance(step, OSError):
            raise step
        return step


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[UdpTransport, ScriptedCalls]]:
    transport = UdpTransport(LOOPBACK, (LOOPBACK, 9), W34)
    calls = ScriptedCalls([])
    monkeypatch.setattr(transport, "_calls", calls)
    yield transport, calls
    assert not calls.script, "not every scripted step was reached"
    transport.close()


Scripted = tuple[UdpTransport, ScriptedCalls]


def test_a_full_send_buffer_is_waited_for_once_then_counts_as_loss(scripted: Scripted) -> None:
    transport, calls = scripted
    full = OSError(errno.EAGAIN, "full")
    batch, _ = make_batch(0, [256] * 10)
    calls.script += [4, full, 3, full, full]
    assert transport.send(batch) == 7
    assert calls.firsts == [0, 4, 4, 7, 7]
    assert (transport.counters.sent, transport.counters.unsent, transport.counters.waits) == (7, 3, 2)


@pytest.mark.parametrize("code", [errno.ENOBUFS, errno.ENETDOWN, errno.EHOSTUNREACH, errno.EPERM])
def test_what_the_kernel_drops_counts_as_loss(scripted: Scripted, code: int) -> None:
    transport, calls = scripted
    batch, _ = make_batch(0, [256] * 10)
    calls.script += [2, OSError(code, os.strerror(code))]
    assert transport.send(batch) == 2
    assert (transport.counters.unsent, transport.counters.waits) == (8, 0)


def test_a_socket_that_cannot_work_is_an_error(scripted: Scripted) -> None:
    transport, calls = scripted
    batch, _ = make_batch(0, [256])
    calls.script += [OSError(errno.ENOTSOCK, "no socket"), OSError(errno.ENOTSOCK, "no socket")]
    with pytest.raises(TransportError, match="no socket"):
        transport.send(batch)
    with pytest.raises(TransportError, match="no socket"):
        transport.receive(ReceiveBatch(W34, 2))


def test_a_frame_too_long_for_the_path_says_what_to_do(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    transport, calls = scripted
    monkeypatch.setattr(udp, "path_mtu", lambda _: 1500)
    batch, _ = make_batch(0, [W34.payload_bytes])
    calls.script += [OSError(errno.EMSGSIZE, "too long")]
    with pytest.raises(TransportError, match=r"8764.*1500.*w5.*mtu 9000"):
        transport.send(batch)


def test_transient_receive_errors_are_no_datagrams(scripted: Scripted) -> None:
    transport, calls = scripted
    calls.script += [OSError(errno.ECONNREFUSED, "refused")]
    assert transport.receive(ReceiveBatch(W34, 2)) == 0
