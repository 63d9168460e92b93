# SPDX-License-Identifier: Apache-2.0
"""What a check found wrong."""

from __future__ import annotations


class Violation(Exception):
    """A property does not hold. `kind` is one of the constants of this module; the text says what happened."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


SENT = "wrong result sent"
"""The switch sent a result that is not the sum of every rank's contribution once, or sent it to the wrong place."""
ACCEPTED = "wrong result accepted"
"""A worker took a result that is not that sum, or not for what it had outstanding."""
FAILED = "spurious failure"
"""A worker gave up though its epoch was alive and the ranks agreed."""
CRASHED = "core crashed"
"""A core raised for what the network brought."""
STUCK = "stuck"
"""No further loss, and yet the job does not complete."""
UNSOUND = "reduction unsound"
"""What the search leaves out does matter after all: its states would not be all there are."""
