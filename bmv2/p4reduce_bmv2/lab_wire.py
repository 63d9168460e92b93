# SPDX-License-Identifier: Apache-2.0
"""A lab's links as a program: carries frames between two interfaces a link, with seeded delay, loss and duplicates.

Stands in for netem where the kernel has none. It runs in a namespace that holds both inner ends of every link
(p4reduce_bmv2.topology, `wire_netns`): what arrives at one end leaves at the other, later or not at all. Its counters
are a file of numbers that it maps into its memory, so that anybody may read them at any moment:
for each link, worker to switch first, the fields of `Counters`.

    python -m p4reduce_bmv2.lab_wire --counters FILE --delay 0.001 --loss 0.01 --seed 1 1 2 3
"""

from __future__ import annotations

import argparse
import errno
import heapq
import mmap
import os
import random
import select
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from p4reduce.errors import P4ReduceError, SwitchError
from p4reduce.signals import asked_to_stop
from p4reduce_bmv2.lab_shape import Shape

_ETH_P_ALL = 3
_SO_RCVBUFFORCE = 33
_SOL_PACKET = 263
_PACKET_IGNORE_OUTGOING = 23
_BUFFER = 32 << 20
_LARGEST = 65535
_BATCH = 32
"""Frames taken from one end before the others get their turn."""
_QUEUE = 100_000
"""Frames under way at most, as netem's limit in the lab."""
_IDLE_SECONDS = 60.0


@dataclass(slots=True)
class Counters:
    """One direction of one link, in frames."""

    frames: int = 0
    """Arrived at the wire."""
    lost: int = 0
    duplicated: int = 0
    reordered: int = 0
    """Not delayed, so that they overtook what was under way; counted only if something was."""
    overflow: int = 0
    """Lost because a queue was full, the wire's or an interface's: nobody asked for these."""


_FIELDS = [field.name for field in fields(Counters)]
_ROW = 8 * len(_FIELDS)


def read_counters(path: Path) -> list[Counters]:
    """Counters of all directions: link by link, from the worker, then to it. Empty when there is no file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    numbers = memoryview(data[: len(data) // _ROW * _ROW]).cast("Q")
    return [Counters(*numbers[at : at + len(_FIELDS)]) for at in range(0, len(numbers), len(_FIELDS))]


class Direction:
    """From one interface to another."""

    def __init__(self, source: socket.socket, sink: socket.socket, shape: Shape, seed: str, row: memoryview) -> None:
        self.source = source
        self._sink = sink
        self._shape = shape
        self._random = random.Random(seed)
        self._row = row
        self.under_way = 0

    def take(self, heap: list[tuple[float, int, Direction, bytes]], sequence: int) -> int:
        """Receive what has come, up to a batch, and send or queue it. Returns the next sequence number."""
        shape, draw = self._shape, self._random.random
        for _ in range(_BATCH):
            try:
                frame = self.source.recv(_LARGEST, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            self._count(0)
            if shape.loss and draw() < shape.loss:
                self._count(1)
                continue
            copies = 1
            if shape.duplicate and draw() < shape.duplicate:
                self._count(2)
                copies = 2
            for _ in range(copies):
                if not shape.delay:
                    self.send(frame)
                elif shape.reorder and draw() < shape.reorder:
                    if self.under_way:
                        self._count(3)
                    self.send(frame)
                elif len(heap) >= _QUEUE:
                    self._count(4)
                else:
                    sequence += 1
                    self.under_way += 1
                    heapq.heappush(heap, (time.monotonic() + shape.delay, sequence, self, frame))
        return sequence

    def send(self, frame: bytes) -> None:
        """Hand a frame to the far end, or count it as lost there."""
        try:
            self._sink.send(frame, socket.MSG_DONTWAIT)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ENOBUFS, errno.ENETDOWN):
                raise
            self._count(4)

    def _count(self, field: int) -> None:
        self._row[field] += 1


class Wire:
    """All links of a lab, carried by one thread."""

    def __init__(self, links: Sequence[int], shape: Shape, seed: int, counters: Path) -> None:
        """Opens the ends `aN` and `bN` of every link N in the namespace of the caller. SwitchError."""
        self._map = _map_counters(counters, 2 * len(links))
        numbers = memoryview(self._map).cast("Q")
        self._directions: dict[socket.socket, Direction] = {}
        row = 0
        for link in links:
            worker, switch = _open(f"a{link}"), _open(f"b{link}")
            for source, sink, way in ((worker, switch, "up"), (switch, worker, "down")):
                # How many faults n frames meet depends on the seed alone; which ones, on their order.
                part = numbers[row * len(_FIELDS) : (row + 1) * len(_FIELDS)]
                self._directions[source] = Direction(source, sink, shape, f"{seed}/{link}/{way}", part)
                row += 1

    def run(self, stop: int) -> None:
        """Carry frames until descriptor `stop` becomes readable."""
        heap: list[tuple[float, int, Direction, bytes]] = []
        sequence = 0
        sockets: list[Any] = [*self._directions]
        while True:
            # select, not epoll: its timeout is finer than a millisecond.
            wait = max(0.0, heap[0][0] - time.monotonic()) if heap else _IDLE_SECONDS
            ready = select.select([*sockets, stop], [], [], wait)[0]
            self._deliver(heap)
            for source in ready:
                if source == stop:
                    return
                sequence = self._directions[source].take(heap, sequence)

    @staticmethod
    def _deliver(heap: list[tuple[float, int, Direction, bytes]]) -> None:
        now = time.monotonic()
        while heap and heap[0][0] <= now:
            _, _, direction, frame = heapq.heappop(heap)
            direction.under_way -= 1
            direction.send(frame)


def _map_counters(path: Path, rows: int) -> mmap.mmap:
    path.write_bytes(bytes(rows * _ROW))
    with path.open("r+b") as stream:
        return mmap.mmap(stream.fileno(), rows * _ROW)


def _open(interface: str) -> socket.socket:
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    try:
        for option in (_SO_RCVBUFFORCE, 32):  # and SO_SNDBUFFORCE
            link.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
        link.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        link.bind((interface, _ETH_P_ALL))
    except OSError as error:
        link.close()
        raise SwitchError(f"cannot open {interface}: {error}") from error
    return link


def command(links: Sequence[int], shape: Shape, seed: int, counters: Path) -> list[str]:
    """The command line of a wire under this very interpreter."""
    words = [sys.executable, "-m", "p4reduce_bmv2.lab_wire", "--counters", str(counters), "--seed", str(seed)]
    for name in ("delay", "loss", "duplicate", "reorder"):
        words += [f"--{name}", repr(getattr(shape, name))]
    return words + [str(link) for link in links]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT. 0 then, 2 when it cannot start."""
    parser = argparse.ArgumentParser(prog="lab_wire", description="Carries frames between the ends of a lab's links.")
    parser.add_argument("--counters", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    for name in ("delay", "loss", "duplicate", "reorder"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    parser.add_argument("links", type=int, nargs="+")
    options = parser.parse_args(arguments)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        with asked_to_stop(wakeup=writer):
            shape = Shape(delay=options.delay, loss=options.loss, duplicate=options.duplicate, reorder=options.reorder)
            Wire(options.links, shape, options.seed, options.counters).run(reader)
    except (P4ReduceError, OSError) as error:
        sys.stderr.write(f"lab_wire: {error}\n")
        return 2
    finally:
        os.close(reader)
        os.close(writer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
