# SPDX-License-Identifier: Apache-2.0
"""What the ring path needs of a collective library."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

RingLevels = npt.NDArray[np.uint8] | npt.NDArray[np.int64]
RingIntegers = npt.NDArray[np.int32] | npt.NDArray[np.int64]


class Ring(Protocol):
    """One rank's way to all others. For one thread at a time, except for close().

    All ranks make the same calls, with arrays of one length and dtype, in the same order: that is the caller's to see
    to, because a collective library need not notice, and some end the process when they do. Arrays are contiguous,
    writable vectors in CPU memory; they get the result in place and are undefined after an error.

    Every call has the ring's own deadline. RingError says what is known of the failure; the ring is of no use after it.
    """

    rank: int
    size: int
    device: str
    """Where the library wants the data: "cpu", or a device that arrays are staged to ("cuda:0")."""

    def max(self, values: RingLevels) -> None:
        """Largest value over all ranks, element by element."""

    def sum(self, values: RingIntegers) -> None:
        """Sum over all ranks, element by element. The caller sees to it that nothing overflows."""

    def close(self) -> None:
        """Leave. A call that waits here or on another rank ends with RingError, at the latest at its deadline.

        Does not wait for anybody. May be called again, and from any thread.
        """
