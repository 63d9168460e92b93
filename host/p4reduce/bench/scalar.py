# SPDX-License-Identifier: Apache-2.0
"""The baseline `scalar`: host loop for p4/scalar.p4, one 32-bit register for every element, 64 elements a frame.

The frame is a short frame of the protocol, so the transport is that of the workers: what differs is the program on the
switch. Chunk g uses cell g mod 2W and may be sent when chunk g - W has its result.
"""

from __future__ import annotations

import select
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from p4reduce import constants
from p4reduce.core.batch import PayloadRows, ReceiveBatch, SendBatch
from p4reduce.errors import ConfigError, StalledError
from p4reduce.transport.udp import UdpTransport
from p4reduce.wire import Kind, Profile

FRAME = Profile("scalar", 1)
LANES = FRAME.lanes(32)
WINDOW = 32
"""Frames of one worker under way. Two windows of cells, and half of BMv2's egress queue of 64 frames."""
KIND_FORWARD = 4
"""The program sends such a frame on to the worker whose rank stands in its slot field, unread."""
_CELLS = 2 * WINDOW
_RESEND_SECONDS = 0.05
_PLACES = (Path(__file__).resolve().parents[1] / "_p4", Path(__file__).resolve().parents[3] / "p4")


def program() -> tuple[Path, Path]:
    """The compiled program: BMv2 JSON and P4Info. ConfigError when the package or tree does not hold it."""
    for place in _PLACES:
        json, p4info = place / "compiled" / "scalar.json", place / "compiled" / "scalar.p4info.txtpb"
        if json.is_file() and p4info.is_file():
            return json, p4info
    raise ConfigError(
        "the compiled P4 program scalar.json is not there: reinstall p4reduce, run `make p4` in a source tree, or "
        "leave the baseline scalar out"
    )


class ScalarWorker:
    """One rank. Its chunks are numbered from 0 for as long as it lives, the same on all ranks."""

    def __init__(self, transport: UdpTransport, rank: int) -> None:
        """`transport` is made with FRAME and has its endpoint."""
        self._transport = transport
        self._in = ReceiveBatch(FRAME, _CELLS)
        self._out = SendBatch(WINDOW)
        self._out.headers["version"] = constants.VERSION
        self._out.headers["kind"] = Kind.CONTRIBUTE
        self._out.headers["words"] = FRAME.words
        self._out.headers["rank"] = rank
        self._poll = select.poll()
        self._poll.register(transport.fileno(), select.POLLIN)
        self._first = 0
        self.retransmissions = 0
        self.frames = 0

    def allreduce(self, values: npt.NDArray[np.int32], out: npt.NDArray[np.int32], deadline: float) -> None:
        """Sum over all ranks, modulo 2^32. Sizes are multiples of LANES. StalledError after `deadline` seconds."""
        rows = values.astype(">i4").view(np.uint8).reshape(-1, FRAME.payload_bytes)
        sums = out.reshape(-1, LANES)
        chunks = len(rows)
        done = np.zeros(chunks, dtype=bool)
        limit = time.monotonic() + deadline
        self._send(rows, np.arange(min(WINDOW, chunks)))
        finished = 0
        while finished < chunks:
            if not self._poll.poll(_RESEND_SECONDS * 1000):
                if time.monotonic() > limit:
                    raise StalledError(f"{chunks - finished} of {chunks} chunks had no result within {deadline:g} s")
                again = self._outstanding(done)
                self.retransmissions += len(again)
                self._send(rows, again)
            while self._transport.receive(self._in):
                new = self._accept(done, sums)
                finished += len(new)
                following = new + WINDOW
                self._send(rows, following[following < chunks])
        self._first += chunks

    def _outstanding(self, done: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Chunks sent that have no result: those of the first window, and each a window behind a finished one."""
        missing = np.flatnonzero(~done)
        return missing[(missing < WINDOW) | done[np.maximum(missing - WINDOW, 0)]][:WINDOW]

    def _accept(self, done: npt.NDArray[np.bool_], sums: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Store the results of the batch; returns the chunks that were new, by number within this call."""
        batch = self._in
        headers = batch.headers[: batch.count]
        chunk = headers["tag"].astype(np.int64) - self._first
        good = (headers["kind"] == Kind.RESULT) & (batch.sizes[: batch.count] == FRAME.datagram_bytes)
        good &= (chunk >= 0) & (chunk < len(done))
        row = np.flatnonzero(good)
        row = row[~done[chunk[row]]]
        new, at = np.unique(chunk[row], return_index=True)
        sums[new] = batch.payload[row[at]].view(">i4")
        done[new] = True
        return new

    def _send(self, rows: npt.NDArray[np.uint8], chunks: npt.NDArray[np.int64]) -> None:
        for at in range(0, len(chunks), WINDOW):
            part = chunks[at : at + WINDOW]
            count = len(part)
            numbers = part + self._first
            out = self._out
            out.clear()
            headers = out.headers[:count]
            headers["slot"] = numbers % _CELLS
            headers["round"] = numbers // _CELLS + 1
            headers["tag"] = numbers
            out.groups.append(PayloadRows(0, count, rows, part, np.full(count, FRAME.payload_bytes)))
            out.count = count
            self._transport.send(out)
            self.frames += count
