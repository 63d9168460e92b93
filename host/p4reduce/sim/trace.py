# SPDX-License-Identifier: Apache-2.0
"""Traces of a simulation: all its frames as a capture file, and a fingerprint that tells two runs apart.

The file is a plain pcap (draft-ietf-opsawg-pcap: a header of 24 bytes, then 16 bytes before every packet) with
nanosecond times, which tcpdump, Wireshark and `p4reduce decode` read. Times are seconds of virtual time since the run
began. Frames are seen at the workers: what a worker sends before its link may lose it, and what reaches it.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from types import TracebackType

from p4reduce.sim.adapter import SWITCH_MAC, mac_of, to_frame
from p4reduce.sim.network import Datagram
from p4reduce.sim.runner import Simulation

_MAGIC_NANOSECONDS = 0xA1B23C4D
_LINK_ETHERNET = 1
_SNAP_BYTES = 65535
_NANOSECONDS = 1_000_000_000


class PcapWriter:
    """Writes Ethernet frames to a capture file. A context manager; OSError when the file cannot be written."""

    def __init__(self, path: str | Path) -> None:
        self.frames = 0
        """Frames written."""
        self._file = open(path, "wb")  # noqa: SIM115  (closed by close())
        self._file.write(struct.pack("<IHHiIII", _MAGIC_NANOSECONDS, 2, 4, 0, 0, _SNAP_BYTES, _LINK_ETHERNET))

    def write(self, time: float, frame: bytes) -> None:
        """Append a frame; `time` in seconds, not negative."""
        seconds, rest = divmod(round(time * _NANOSECONDS), _NANOSECONDS)
        kept = frame[:_SNAP_BYTES]
        self._file.write(struct.pack("<IIII", seconds, rest, len(kept), len(frame)) + kept)
        self.frames += 1

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        self._file.close()

    def __enter__(self) -> PcapWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Trace:
    """Records a simulation from now on: counts and fingerprints its datagrams and writes them to `pcap`, if given.

    It takes the simulation's tap and passes on to the one that was there.
    """

    def __init__(self, simulation: Simulation, pcap: PcapWriter | None = None) -> None:
        self.frames = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._pcap = pcap
        self._next = simulation.tap
        simulation.tap = self._seen

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits. Equal for runs whose datagrams, times and directions are equal."""
        return self._hash.hexdigest()

    def _seen(self, time: float, rank: int, upwards: bool, datagram: Datagram) -> None:
        self.frames += 1
        self._hash.update(struct.pack("<dI?I", time, rank, upwards, len(datagram.data)))
        self._hash.update(datagram.data)
        if self._pcap is not None:
            self._pcap.write(time, _frame(datagram, upwards))
        if self._next is not None:
            self._next(time, rank, upwards, datagram)


def _frame(datagram: Datagram, upwards: bool) -> bytes:
    if upwards:
        return to_frame(datagram, mac_of(datagram.src), SWITCH_MAC)
    return to_frame(datagram, SWITCH_MAC, mac_of(datagram.dst))
