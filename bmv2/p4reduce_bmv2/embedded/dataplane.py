# SPDX-License-Identifier: Apache-2.0
"""The packet thread: waits on all ports, runs frames through the engine, sends what comes out.

The engine is one thread's, like BMv2's ingress. The control plane gets at it between bursts, through TurnLock.
"""

from __future__ import annotations

import logging
import os
import random
import select
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any

from p4reduce_bmv2.embedded.engine import Engine
from p4reduce_bmv2.embedded.ports import Port

log = logging.getLogger(__name__)

BURST = 32
"""Frames taken from one port before the next has its turn, and the longest the engine is held: a few milliseconds."""
MAX_QUEUED_PACKET_OUTS = 1024


class TurnLock:
    """A mutual exclusion lock that goes to whoever waits.

    threading.Lock may be taken again at once by the thread that released it, so a busy packet thread could keep the
    control plane out for seconds. Here the one who waits already holds the queue, and the other must line up.
    """

    def __init__(self) -> None:
        self._queue = threading.Lock()
        self._mutex = threading.Lock()

    def __enter__(self) -> TurnLock:
        with self._queue:
            self._mutex.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._mutex.release()


class Loss:
    """Drops frames at random, the same ones for the same seed: one generator for each port and direction."""

    def __init__(self, probability: float, seed: int) -> None:
        if not 0.0 <= probability < 1.0:
            raise ValueError(f"loss probability {probability} is not in [0, 1)")
        self.probability = probability
        self._seed = seed
        self._generators: dict[tuple[int, str], random.Random] = {}

    def hits(self, port: int, direction: str) -> bool:
        """True when the next frame of this port and direction ("rx" or "tx") is to be lost."""
        generator = self._generators.get((port, direction))
        if generator is None:
            generator = self._generators[port, direction] = random.Random(f"{self._seed}/{port}/{direction}")
        return generator.random() < self.probability


class DataPlane:
    """Ports, engine and the thread between them."""

    def __init__(
        self,
        ports: Mapping[int, Port],
        *,
        loss: float = 0.0,
        seed: int = 0,
        cpu_port: int | None = None,
        packet_in: Callable[[bytes], None] | None = None,
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`packet_in` takes frames for the CPU port; `failed` is told when the thread ends with an error."""
        self.ports = dict(ports)
        self.lock = TurnLock()
        self.drops: Counter[str] = Counter()
        """Frames dropped outside of any port, by reason."""
        self._loss = Loss(loss, seed)
        self._lossy = loss > 0.0
        self._cpu_port = cpu_port
        self._packet_in = packet_in
        self._failed = failed
        self._engine: Engine | None = None
        self._packet_outs: deque[bytes] = deque()
        self._stopping = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        self._thread = threading.Thread(target=self._run, name="p4reduce-switch", daemon=True)

    def go_live(self, engine: Engine) -> None:
        """Run frames through this engine from now on. The caller holds `lock`."""
        self._engine = engine

    def inject(self, frame: bytes) -> None:
        """Queue a packet-out: a frame that enters on the CPU port."""
        if len(self._packet_outs) >= MAX_QUEUED_PACKET_OUTS:
            self.drops["packet_out_full"] += 1
            return
        self._packet_outs.append(frame)
        self._signal()

    def start(self) -> None:
        """Start the thread."""
        self._poll.register(self._wake, select.EPOLLIN)
        for port in self.ports.values():
            self._poll.register(port.fileno(), select.EPOLLIN)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close the ports. May be called before start()."""
        self._stopping = True
        if self._thread.is_alive():
            self._signal()
            self._thread.join()
        self._poll.close()
        for port in self.ports.values():
            port.close()
        os.close(self._wake)

    def stats(self) -> dict[str, Any]:
        """Counters as plain values: `ports` by number, and `drops` outside of any port."""
        ports = {}
        for number, port in sorted(self.ports.items()):
            counters = port.counters
            ports[number] = {
                "link": port.describe(),
                "rx_frames": counters.rx_frames,
                "rx_bytes": counters.rx_bytes,
                "tx_frames": counters.tx_frames,
                "tx_bytes": counters.tx_bytes,
                "drops": dict(counters.drops),
                "receive_buffer": port.receive_buffer,
            }
        drops = dict(self.drops)
        if self._engine is not None:
            drops |= {name: count for name, count in asdict(self._engine.stats).items() if count}
        return {"ports": ports, "drops": drops}

    def _signal(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            log.exception("the packet thread failed")
            if self._failed is not None:
                self._failed(error)

    def _loop(self) -> None:
        by_descriptor = {port.fileno(): port for port in self.ports.values()}
        while not self._stopping:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
                    self._serve_packet_outs()
                    continue
                port = by_descriptor[descriptor]
                try:
                    frames = port.receive(BURST)
                except OSError as error:
                    log.error("port %d (%s) is lost: %s", port.number, port.describe(), error)
                    self._poll.unregister(descriptor)
                    continue
                if self._lossy:
                    frames = self._thin(port, frames)
                self._serve(port.number, frames)

    def _thin(self, port: Port, frames: list[bytes]) -> list[bytes]:
        kept = [frame for frame in frames if not self._loss.hits(port.number, "rx")]
        if len(kept) < len(frames):
            port.counters.drops["loss_rx"] += len(frames) - len(kept)
        return kept

    def _serve_packet_outs(self) -> None:
        frames = []
        while self._packet_outs:
            frames.append(self._packet_outs.popleft())
        if frames and self._cpu_port is not None:
            self._serve(self._cpu_port, frames)

    def _serve(self, port: int, frames: list[bytes]) -> None:
        if not frames:
            return
        outgoing: list[tuple[int, bytes]] = []
        with self.lock:
            engine = self._engine
            if engine is None:
                self.drops["no_pipeline"] += len(frames)
                return
            for frame in frames:
                outgoing += self._process(engine, port, frame)
        for number, frame in outgoing:
            self._send(number, frame)

    def _process(self, engine: Engine, port: int, frame: bytes) -> list[tuple[int, bytes]]:
        try:
            return engine.process(port, frame)
        except Exception:
            # A frame must not end the switch, whatever it holds; that it came to this is a defect.
            if not self.drops["engine_error"]:
                log.exception("the engine failed on a frame of %d bytes from port %d", len(frame), port)
            self.drops["engine_error"] += 1
            return []

    def _send(self, number: int, frame: bytes) -> None:
        port = self.ports.get(number)
        if port is None:
            if number == self._cpu_port and self._packet_in is not None:
                self._packet_in(frame)
            else:
                self.drops["no_such_port"] += 1
            return
        if self._lossy and self._loss.hits(number, "tx"):
            port.counters.drops["loss_tx"] += 1
            return
        port.send(frame)
