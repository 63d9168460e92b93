# SPDX-License-Identifier: Apache-2.0
"""What a core has seen and done since its epoch began."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from p4reduce.wire import Reason


@dataclass(slots=True)
class CoreCounters:
    """Every frame received is counted under exactly one of results, duplicates, stale, foreign, malformed, integrity,
    nacks, and late (what came after the end of the epoch)."""

    frames_sent: int = 0
    """Frames handed to the driver, resends included."""
    bytes_sent: int = 0
    """UDP payload of these frames."""
    resent_timeout: int = 0
    """Chunks sent again because their timer ran out."""
    resent_early: int = 0
    """Chunks sent again because chunks sent later had their results."""
    resent_integrity: int = 0
    """Chunks sent again because their result failed its check."""
    frames_received: int = 0
    results: int = 0
    """Results accepted: one for every chunk."""
    duplicates: int = 0
    """Results of the chunk last finished in their slot."""
    stale: int = 0
    """Results and nacks of chunks finished longer ago."""
    foreign: int = 0
    """Frames for another epoch or another rank."""
    malformed: int = 0
    """Frames that make no sense: wrong version, size, slot, or a header that contradicts what was sent."""
    integrity: int = 0
    """Results whose payload failed its check."""
    late: int = 0
    """Frames that came after the core had failed."""
    nacks: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    """Refusals of chunks that were outstanding, by reason."""
    silences: int = 0
    """Silent events."""
    stalls: int = 0
    """Stalled events."""
    srtt: float = 0.0
    """Smoothed time from sending a chunk to its result in seconds; 0 before the first sample."""
    rto: float = 0.0
    """Present retransmission timeout in seconds."""

    @property
    def retransmissions(self) -> int:
        """Frames sent again, for whatever cause."""
        return self.resent_timeout + self.resent_early + self.resent_integrity

    def as_dict(self) -> dict[str, int | float]:
        """Flat copy for statistics and JSON; nacks as nacks_<reason>."""
        flat = asdict(self)
        nacks = flat.pop("nacks")
        flat.update({f"nacks_{reason.name.lower()}": count for reason, count in nacks.items()})
        flat["retransmissions"] = self.retransmissions
        return flat
