# SPDX-License-Identifier: Apache-2.0
"""The retransmission timeout of a worker: RFC 6298 with Karn's rule. One for both streams, which share the path.

Who calls sample() keeps Karn's rule: a chunk that was sent again, or whose timer ran out, gives no sample. A timeout
that was doubled holds for new chunks, too, until there is a sample: Karn's rule alone would never learn a longer
round trip (RFC 6298, section 5).

The time a worker measures is not only the network's: a result waits for the slowest rank. Two rules keep that out.

- The first chunks that are sent from an idle stream measure when the others got there. Such a sample says nothing
  above the present estimate and something below it: it may lower it and never raise it. Until another kind of
  sample has come, the smallest of them stands in. A job that never does anything but small reductions from idle
  streams thus still gets a timeout near its round trip.
- A chunk whose frame another rank lost measures that rank's timeout. Taken at its word, every rank's timeout would
  grow with every other's. So no sample counts for more than twice the estimate, or the least timeout. A round trip
  that really got longer shows in all samples, and the estimate still doubles every six; until then back-off holds
  the resends down.
"""

from __future__ import annotations

from p4reduce.core.config import RetransmissionPolicy

_ALPHA = 1 / 8
_BETA = 1 / 4
_K = 4.0
_OUTLIER = 2.0


class RttEstimator:
    """SRTT, RTTVAR and RTO of RFC 6298, section 2, in seconds.

    The clock's granularity G counts as zero, because policy.minimum is far above it.
    """

    def __init__(self, policy: RetransmissionPolicy) -> None:
        self._policy = policy
        self._provisional = True
        self._variation = 0.0
        self._backed_off = 0.0
        self.smoothed: float | None = None
        self.estimate = policy.initial
        """Timeout without back-off."""

    def set_policy(self, policy: RetransmissionPolicy) -> None:
        """Go on with other bounds; what was measured stays."""
        self._policy = policy
        self._backed_off = min(self._backed_off, policy.maximum)
        if self.smoothed is None:
            self.estimate = policy.initial
        else:
            self.estimate = min(max(self.estimate, policy.minimum), policy.maximum)

    @property
    def timeout(self) -> float:
        """Timeout of a chunk that is sent now."""
        return max(self.estimate, self._backed_off)

    def back_off(self, seconds: float) -> None:
        """A timer ran out and is now set to `seconds`."""
        self._backed_off = max(self._backed_off, seconds)

    def sample(self, seconds: float, waited: bool) -> None:
        """Take one measurement. `waited`: the chunk was sent from an idle stream, before it had a result."""
        seconds = max(seconds, 0.0)
        self._backed_off = 0.0
        if self.smoothed is None or (self._provisional and seconds < self.smoothed):
            self.smoothed = seconds
            self._variation = seconds / 2
        else:
            # What is below the least timeout can do no harm, and an estimate of 0 must be able to grow.
            most = self.smoothed if waited else max(self.smoothed * _OUTLIER, self._policy.minimum)
            seconds = min(seconds, most)
            self._variation += _BETA * (abs(self.smoothed - seconds) - self._variation)
            self.smoothed += _ALPHA * (seconds - self.smoothed)
        self._provisional = self._provisional and waited
        timeout = self.smoothed + _K * self._variation
        self.estimate = min(max(timeout, self._policy.minimum), self._policy.maximum)
