# SPDX-License-Identifier: Apache-2.0
"""Cases for the embedded switch's engine: small P4 programs, frames, and what must come out."""

from __future__ import annotations

from helpers.engine_cases import packets, parsers, tables, values
from helpers.engine_cases.model import Case, Step

CASES: list[Case] = tables.CASES + values.CASES + parsers.CASES + packets.CASES

__all__ = ["CASES", "Case", "Step"]
