# SPDX-License-Identifier: Apache-2.0
"""Numbers as users write them."""

from __future__ import annotations

MAX_DEVICE_ID = (1 << 64) - 1
"""P4Runtime's device_id is a uint64."""
_MAX_DIGITS = 20
"""Enough for 64 bits; int() itself refuses texts of thousands of digits."""


def decimal(text: str) -> int | None:
    """The number that plain ASCII digits spell; None for any other text.

    str.isdigit alone is also true of digits that int() refuses, as the superscript two.
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else None
