/* SPDX-License-Identifier: Apache-2.0 */
#ifndef P4REDUCE_SLOT_P4
#define P4REDUCE_SLOT_P4

#include "../headers.p4"

/*
 * One slot's life. A cell belongs to (slot, version), version = round & 1, and stores which epoch, round, op,
 * words and tag it holds and which workers were counted. A worker sends round r + 1 of a slot only when it has
 * the result of round r, so nobody can still need round r - 1 when r + 1 overwrites it.
 *
 * The stored round is what makes late copies harmless: a copy of an older round is recognised as such in the
 * cell that has moved on, and in a cell that has not, its worker's bit is set. No bit is ever cleared on behalf of
 * another version, which is where the published scheme can count a stale retransmission.
 *
 * Within an epoch a cell's next round is its round + 2 and no other: nobody sends r + 3 before r + 2 is complete, which
 * only this cell can have made it. So a round that was damaged on its way does not start the cell afresh, which would
 * make the ranks' own frames stale. A cell of another epoch takes any round.
 *
 * The payload is one number, added modulo its width. p4c takes no field wider than 2048 bits, so a full frame has
 * several, and `carry` goes from word to word. tools/fuse.py makes one field and one register of them, where that is
 * a single addition; it knows the actions *_full by their names and form, so a change here is a change there.
 *
 * Registers are touched in ingress only: simple_switch runs ingress in one thread, so read-modify-write over
 * several actions is atomic. Nothing ever resets them; a new epoch or a newer round overwrites. Every leaf of the
 * decision is one action: on BMv2 each action that is called costs a table lookup.
 */
control Slot(inout headers_t hdr,
             in metadata_t meta,
             inout standard_metadata_t standard_metadata,
             inout bit<8> reason)(counter reduce_counter) {
    register<slot_state_t>(P4REDUCE_SLOT_VERSIONS) slot_state;
    register<bit<64>>(P4REDUCE_SLOT_VERSIONS) slot_check;
    register<word_t>(P4REDUCE_SLOT_VERSIONS) short_sum;
#define SUM_REGISTER(i) register<word_t>(P4REDUCE_SLOT_VERSIONS) sum##i;
    WORDS(SUM_REGISTER)

    bit<32> cell;
    slot_state_t state;
    identity_t identity;
    bit<64> stored_check;
    word_t stored;
    word_t total;
    word_t carry;

#include "answer_actions.p4"

    /* What became of a contribution that was admitted. */
    /* outcome */ action collecting() { /* counted; others are missing */
        count_event(P4REDUCE_COUNT_CONTRIBUTIONS);
        mark_to_drop(standard_metadata);
    }
    /* outcome */ action complete() { /* counted, and it was the last: the headers hold the result */
        count_event(P4REDUCE_COUNT_CONTRIBUTIONS);
        count_event(P4REDUCE_COUNT_RESULTS);
        hdr.reduce.count_or_reason = meta.workers;
        hdr.ethernet.src = hdr.ethernet.dst;
        hdr.ipv4.src = hdr.ipv4.dst;
        from_switch(P4REDUCE_KIND_RESULT);
        standard_metadata.mcast_grp = meta.group;
    }
    /* outcome */ action repeat() { /* already counted in a complete round: the headers hold the result */
        count_event(P4REDUCE_COUNT_REPEATS);
        hdr.reduce.count_or_reason = meta.workers;
        to_sender();
        from_switch(P4REDUCE_KIND_RESULT);
    }
    /* outcome */ action duplicate() { /* already counted, others are missing */
        count_event(P4REDUCE_COUNT_DUPLICATES);
        mark_to_drop(standard_metadata);
    }
    /* outcome */ action stale() { /* of a round that is over, or that cannot have begun */
        count_event(P4REDUCE_COUNT_STALE);
        mark_to_drop(standard_metadata);
    }
    /* outcome */ action mismatch() { /* same round, but the ranks disagree about what they reduce */
        reason = P4REDUCE_REASON_TAG_MISMATCH;
    }

    /* The mask keeps the index inside the registers whatever the entries of `admit` say. */
    action locate() {
        cell = (((bit<32>)(meta.pool_base + hdr.reduce.slot) << 1) | (hdr.reduce.round & 1)) &
               (P4REDUCE_SLOT_VERSIONS - 1);
        identity = hdr.reduce.epoch ++ hdr.reduce.round ++ hdr.reduce.op ++ hdr.reduce.words ++ hdr.reduce.tag;
        slot_state.read(state, cell);
    }

    action begin() {
        slot_state.write(cell, identity ++ meta.worker);
        slot_check.write(cell, hdr.reduce.check);
    }
    action join() {
        slot_state.write(cell, state | (bit<208>)meta.worker);
        slot_check.read(stored_check, cell);
        slot_check.write(cell, hdr.reduce.check + stored_check);
    }
    /* As join, and the sum of checks goes into the result. */
    action finish() {
        slot_state.write(cell, state | (bit<208>)meta.worker);
        slot_check.read(stored_check, cell);
        hdr.reduce.check = hdr.reduce.check + stored_check;
        slot_check.write(cell, hdr.reduce.check);
    }

    action begin_short() { begin(); short_sum.write(cell, hdr.short.w0); collecting(); }
    action alone_short() { begin(); short_sum.write(cell, hdr.short.w0); complete(); }
    action add_short() {
        join();
        short_sum.read(stored, cell);
        short_sum.write(cell, hdr.short.w0 + stored);
        collecting();
    }
    action or_short() {
        join();
        short_sum.read(stored, cell);
        short_sum.write(cell, hdr.short.w0 | stored);
        collecting();
    }
    action last_add_short() {
        finish();
        short_sum.read(stored, cell);
        hdr.short.w0 = hdr.short.w0 + stored;
        short_sum.write(cell, hdr.short.w0);
        complete();
    }
    action last_or_short() {
        finish();
        short_sum.read(stored, cell);
        hdr.short.w0 = hdr.short.w0 | stored;
        short_sum.write(cell, hdr.short.w0);
        complete();
    }
    action repeat_short() {
        slot_check.read(hdr.reduce.check, cell);
        short_sum.read(hdr.short.w0, cell);
        repeat();
    }

#define WORD_BEGIN(i) sum##i.write(cell, hdr.full.w##i);
/* t = a + b + carry wrapped when t < a, or t = a and there was a carry. */
#define WORD_TOTAL(i) \
        sum##i.read(stored, cell); \
        total = hdr.full.w##i + stored + carry; \
        carry = (word_t)(bit<1>)(total < hdr.full.w##i || (total == hdr.full.w##i && carry == 1));
#define WORD_ADD(i) WORD_TOTAL(i) sum##i.write(cell, total);
#define WORD_OR(i) sum##i.read(stored, cell); sum##i.write(cell, hdr.full.w##i | stored);
#define WORD_LAST_ADD(i) WORD_TOTAL(i) hdr.full.w##i = total; sum##i.write(cell, total);
#define WORD_LAST_OR(i) \
        sum##i.read(stored, cell); \
        hdr.full.w##i = hdr.full.w##i | stored; \
        sum##i.write(cell, hdr.full.w##i);
#define WORD_LOAD(i) sum##i.read(hdr.full.w##i, cell);

    action begin_full() { begin(); WORDS(WORD_BEGIN) collecting(); }
    action alone_full() { begin(); WORDS(WORD_BEGIN) complete(); }
    action add_full() { join(); carry = 0; WORDS_FROM_LOW(WORD_ADD) collecting(); }
    action or_full() { join(); WORDS(WORD_OR) collecting(); }
    action last_add_full() { finish(); carry = 0; WORDS_FROM_LOW(WORD_LAST_ADD) complete(); }
    action last_or_full() { finish(); WORDS(WORD_LAST_OR) complete(); }
    action repeat_full() {
        slot_check.read(hdr.reduce.check, cell);
        WORDS(WORD_LOAD)
        repeat();
    }

    apply {
        locate();
        if (state[207:64] == identity) {
            if (state[63:0] & meta.worker != 0) {
                if (state[63:0] != meta.full) {
                    duplicate();
                } else if (hdr.full.isValid()) {
                    repeat_full();
                } else {
                    repeat_short();
                }
            } else if (state[63:0] | meta.worker == meta.full) {
                if (hdr.full.isValid()) {
                    if (hdr.reduce.op == P4REDUCE_OP_ADD) { last_add_full(); } else { last_or_full(); }
                } else {
                    if (hdr.reduce.op == P4REDUCE_OP_ADD) { last_add_short(); } else { last_or_short(); }
                }
            } else if (hdr.full.isValid()) {
                if (hdr.reduce.op == P4REDUCE_OP_ADD) { add_full(); } else { or_full(); }
            } else {
                if (hdr.reduce.op == P4REDUCE_OP_ADD) { add_short(); } else { or_short(); }
            }
        } else {
            /* Identity is epoch, round, op, words, tag from the top, so these slices are epoch and round. */
            bool same_epoch = state[207:176] == hdr.reduce.epoch;
            bit<32> ahead = hdr.reduce.round - state[175:144];
            if (same_epoch && ahead == 0) {
                mismatch();
            } else if (same_epoch && ahead != 2) {
                stale();
            } else if (meta.worker == meta.full) {
                if (hdr.full.isValid()) { alone_full(); } else { alone_short(); }
            } else {
                if (hdr.full.isValid()) { begin_full(); } else { begin_short(); }
            }
        }
    }
} // control Slot

#endif
