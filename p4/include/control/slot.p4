/* SPDX-License-Identifier: Apache-2.0 */
#ifndef P4REDUCE_SLOT_P4
#define P4REDUCE_SLOT_P4

#include "../headers.p4"

/* What became of a contribution that was admitted. */
enum bit<8> outcome_t {
    COLLECTING = 0, /* counted; others are missing */
    COMPLETE = 1,   /* counted, and it was the last: the headers hold the result */
    REPEAT = 2,     /* already counted in a complete round: the headers hold the result */
    DUPLICATE = 3,  /* already counted, others are missing */
    STALE = 4,      /* of a round that is over */
    MISMATCH = 5    /* same round, but the ranks disagree about what they reduce */
}

/*
 * One slot's life. A cell belongs to (slot, version), version = round & 1, and stores which epoch, round, op,
 * words and tag it holds and which workers were counted. A worker sends round r + 1 of a slot only when it has
 * the result of round r, so nobody can still need round r - 1 when r + 1 overwrites it.
 *
 * The stored round is what makes late copies harmless: a copy of an older round is recognised as such in the
 * cell that has moved on, and in a cell that has not, its worker's bit is set. No bit is ever cleared on behalf of
 * another version, which is where the published scheme can count a stale retransmission.
 *
 * Registers are touched in ingress only: simple_switch runs ingress in one thread, so read-modify-write over
 * several actions is atomic. Nothing ever resets them; a new epoch or a newer round overwrites.
 */
control Slot(inout headers_t hdr, in metadata_t meta, out outcome_t outcome) {
    register<slot_state_t>(P4REDUCE_SLOT_VERSIONS) slot_state;
    register<bit<64>>(P4REDUCE_SLOT_VERSIONS) slot_check;
    register<word_t>(P4REDUCE_SLOT_VERSIONS) sum0;
#define SUM_REGISTER(i) register<word_t>(P4REDUCE_SLOT_VERSIONS) sum##i;
    TAIL_WORDS(SUM_REGISTER)

    bit<32> cell;
    slot_state_t state;
    identity_t identity;
    bit<64> stored_check;
    /* Shared by all actions: every local of this width costs BMv2 a zeroing per packet. */
    word_t stored;

#define WORD_START(i) sum##i.write(cell, hdr.tail.w##i);
#define WORD_ADD(i) sum##i.read(stored, cell); hdr.tail.w##i = hdr.tail.w##i + stored; sum##i.write(cell, hdr.tail.w##i);
#define WORD_OR(i) sum##i.read(stored, cell); hdr.tail.w##i = hdr.tail.w##i | stored; sum##i.write(cell, hdr.tail.w##i);
#define WORD_LOAD(i) sum##i.read(hdr.tail.w##i, cell);

    action locate() {
        cell = ((bit<32>)(meta.pool_base + hdr.reduce.slot) << 1) | (hdr.reduce.round & 1);
        identity = hdr.reduce.epoch ++ hdr.reduce.round ++ hdr.reduce.op ++ hdr.reduce.words ++ hdr.reduce.tag;
        slot_state.read(state, cell);
    }

    action start_first() {
        state = identity ++ meta.worker;
        slot_state.write(cell, state);
        slot_check.write(cell, hdr.reduce.check);
        sum0.write(cell, hdr.first.w0);
    }
    action start_tail() { TAIL_WORDS(WORD_START) }

    action combine_check() {
        state = state | (bit<208>)meta.worker;
        slot_state.write(cell, state);
        slot_check.read(stored_check, cell);
        hdr.reduce.check = hdr.reduce.check + stored_check;
        slot_check.write(cell, hdr.reduce.check);
        sum0.read(stored, cell);
    }
    action add_first() {
        combine_check();
        hdr.first.w0 = hdr.first.w0 + stored;
        sum0.write(cell, hdr.first.w0);
    }
    action add_tail() { TAIL_WORDS(WORD_ADD) }

    action or_first() {
        combine_check();
        hdr.first.w0 = hdr.first.w0 | stored;
        sum0.write(cell, hdr.first.w0);
    }
    action or_tail() { TAIL_WORDS(WORD_OR) }

    action load_first() {
        slot_check.read(hdr.reduce.check, cell);
        sum0.read(hdr.first.w0, cell);
    }
    action load_tail() { TAIL_WORDS(WORD_LOAD) }

    apply {
        locate();
        if (state[207:64] == identity) {
            if (state[63:0] & meta.worker == 0) {
                if (hdr.reduce.op == P4REDUCE_OP_ADD) {
                    add_first();
                    if (hdr.tail.isValid()) { add_tail(); }
                } else {
                    or_first();
                    if (hdr.tail.isValid()) { or_tail(); }
                }
                outcome = outcome_t.COLLECTING;
                if (state[63:0] == meta.full) { outcome = outcome_t.COMPLETE; }
            } else if (state[63:0] == meta.full) {
                load_first();
                if (hdr.tail.isValid()) { load_tail(); }
                outcome = outcome_t.REPEAT;
            } else {
                outcome = outcome_t.DUPLICATE;
            }
        } else {
            /* Identity is epoch, round, op, words, tag from the top, so these slices are epoch and round. */
            bool same_epoch = state[207:176] == hdr.reduce.epoch;
            bit<32> ahead = hdr.reduce.round - state[175:144];
            if (same_epoch && ahead == 0) {
                outcome = outcome_t.MISMATCH;
            } else if (same_epoch && ahead >= 0x80000000) {
                /* Serial arithmetic, RFC 1982; the undefined distance of 2^31 counts as behind. */
                outcome = outcome_t.STALE;
            } else {
                start_first();
                if (hdr.tail.isValid()) { start_tail(); }
                outcome = outcome_t.COLLECTING;
                if (meta.worker == meta.full) { outcome = outcome_t.COMPLETE; }
            }
        }
    }
} // control Slot

#endif
