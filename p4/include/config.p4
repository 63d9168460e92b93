/* SPDX-License-Identifier: Apache-2.0
 *
 * Sizes and numbers that the switch and the hosts must agree on. This file is the only place where they are
 * written: `make gen` derives host/p4reduce/constants.py from the #define lines below and a test compares the two.
 */
#ifndef P4REDUCE_CONFIG_P4
#define P4REDUCE_CONFIG_P4

/* Words of 2048 bits in a full frame; the profile sets it (w5 for MTU 1500, w34 for MTU 9000). */
#ifndef P4REDUCE_WORDS
#define P4REDUCE_WORDS 34
#endif

#define P4REDUCE_VERSION 1
#define P4REDUCE_UDP_PORT 20532

#define P4REDUCE_KIND_CONTRIBUTE 1
#define P4REDUCE_KIND_RESULT 2
#define P4REDUCE_KIND_NACK 3

#define P4REDUCE_OP_ADD 0
#define P4REDUCE_OP_OR 1

#define P4REDUCE_REASON_UNKNOWN_EPOCH 1
#define P4REDUCE_REASON_NOT_ADMITTED 2
#define P4REDUCE_REASON_BAD_SLOT 3
#define P4REDUCE_REASON_TAG_MISMATCH 4
#define P4REDUCE_REASON_MALFORMED 5

/* Slots of the whole switch. Every slot is kept in two versions, so the registers hold twice as many cells. */
#define P4REDUCE_SLOTS 1024
#define P4REDUCE_SLOT_VERSIONS 2048

#define P4REDUCE_MAX_WORKERS 64

/* Counter cells: one row of eight per statistics index. Row 0 counts frames that belong to no known epoch. */
#define P4REDUCE_STATS_ROWS 512
#define P4REDUCE_STATS_CELLS 4096
#define P4REDUCE_COUNT_CONTRIBUTIONS 0
#define P4REDUCE_COUNT_RESULTS 1
#define P4REDUCE_COUNT_REPEATS 2
#define P4REDUCE_COUNT_DUPLICATES 3
#define P4REDUCE_COUNT_STALE 4
#define P4REDUCE_COUNT_MISMATCH 5
#define P4REDUCE_COUNT_REFUSED 6
/* Of row 0 only: frames that did not come from the host whose port they came in by. */
#define P4REDUCE_COUNT_GUARDED 7

/* Bytes: protocol header, one word, and UDP's own header. */
#define P4REDUCE_HEADER_BYTES 32
#define P4REDUCE_WORD_BYTES 256
#define P4REDUCE_WORD_BITS 2048

/* Multicast group 1 floods broadcasts; groups of jobs start above it. */
#define P4REDUCE_FLOOD_GROUP 1

#endif
