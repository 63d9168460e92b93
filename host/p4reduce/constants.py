# SPDX-License-Identifier: Apache-2.0
"""Numbers shared with the P4 program. Generated from p4/include/config.p4 by tools/gen_constants.py."""

from typing import Final

VERSION: Final = 1
UDP_PORT: Final = 20532
KIND_CONTRIBUTE: Final = 1
KIND_RESULT: Final = 2
KIND_NACK: Final = 3
OP_ADD: Final = 0
OP_OR: Final = 1
REASON_UNKNOWN_EPOCH: Final = 1
REASON_NOT_ADMITTED: Final = 2
REASON_BAD_SLOT: Final = 3
REASON_TAG_MISMATCH: Final = 4
REASON_MALFORMED: Final = 5
SLOTS: Final = 1024
SLOT_VERSIONS: Final = 2048
MAX_WORKERS: Final = 64
STATS_ROWS: Final = 512
STATS_CELLS: Final = 4096
COUNT_CONTRIBUTIONS: Final = 0
COUNT_RESULTS: Final = 1
COUNT_REPEATS: Final = 2
COUNT_DUPLICATES: Final = 3
COUNT_STALE: Final = 4
COUNT_MISMATCH: Final = 5
COUNT_REFUSED: Final = 6
COUNT_GUARDED: Final = 7
HEADER_BYTES: Final = 32
WORD_BYTES: Final = 256
WORD_BITS: Final = 2048
FLOOD_GROUP: Final = 1
