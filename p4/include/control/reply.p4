/* SPDX-License-Identifier: Apache-2.0 */
#ifndef P4REDUCE_REPLY_P4
#define P4REDUCE_REPLY_P4

#include "slot.p4"

/* Turns the frame in hand into the answer that its outcome asks for, or drops it, and counts it. */
control Reply(inout headers_t hdr,
              in metadata_t meta,
              inout standard_metadata_t standard_metadata,
              in outcome_t outcome,
              in bit<8> reason) {
    counter(P4REDUCE_STATS_CELLS, CounterType.packets) reduce_counter;

    action count_event(bit<8> event) {
        reduce_counter.count(((bit<32>)meta.stats << 3) | (bit<32>)event);
    }

    action discard() {
        mark_to_drop(standard_metadata);
    }

    action from_switch(bit<8> kind) {
        hdr.reduce.kind = kind;
        hdr.udp.src_port = P4REDUCE_UDP_PORT;
        hdr.udp.checksum = 0;
    }

    /* The answer's source is the address that the contribution was sent to, so the program needs none of its own. */
    action to_all() {
        hdr.reduce.count_or_reason = meta.workers;
        hdr.ethernet.src = hdr.ethernet.dst;
        hdr.ipv4.src = hdr.ipv4.dst;
        from_switch(P4REDUCE_KIND_RESULT);
        standard_metadata.mcast_grp = meta.group;
    }

    action to_sender() {
        mac_t mac = hdr.ethernet.src;
        ipv4_t ip = hdr.ipv4.src;
        hdr.ethernet.src = hdr.ethernet.dst;
        hdr.ethernet.dst = mac;
        hdr.ipv4.src = hdr.ipv4.dst;
        hdr.ipv4.dst = ip;
        hdr.udp.dst_port = hdr.udp.src_port;
        standard_metadata.egress_spec = standard_metadata.ingress_port;
    }

    action repeat() {
        hdr.reduce.count_or_reason = meta.workers;
        to_sender();
        from_switch(P4REDUCE_KIND_RESULT);
    }

    action nack() {
        hdr.reduce.count_or_reason = reason;
        to_sender();
        from_switch(P4REDUCE_KIND_NACK);
        hdr.first.setInvalid();
        hdr.tail.setInvalid();
        hdr.udp.length_ = 8 + P4REDUCE_HEADER_BYTES;
        hdr.ipv4.total_length = 20 + 8 + P4REDUCE_HEADER_BYTES;
        /* What the parser did not take of a malformed frame would follow the headers. */
        truncate(14 + 20 + 8 + P4REDUCE_HEADER_BYTES);
    }

    /* Where workers sit. Only they are told why a frame was refused; a stranger learns nothing. */
    @name("worker_ports")
    table worker_ports {
        key = {
            standard_metadata.ingress_port: exact @name("ingress_port");
            hdr.ipv4.src: exact @name("ipv4_src");
        }
        actions = { nack; @defaultonly discard; }
        const default_action = discard;
        size = 1024;
    }

    apply {
        if (reason != 0) {
            if (reason == P4REDUCE_REASON_TAG_MISMATCH) {
                count_event(P4REDUCE_COUNT_MISMATCH);
            } else {
                count_event(P4REDUCE_COUNT_REFUSED);
            }
            /* Never answer an answer: two switches would nack each other for ever. */
            if (hdr.reduce.kind == P4REDUCE_KIND_CONTRIBUTE) {
                worker_ports.apply();
            } else {
                discard();
            }
        } else if (outcome == outcome_t.COMPLETE) {
            count_event(P4REDUCE_COUNT_CONTRIBUTIONS);
            count_event(P4REDUCE_COUNT_RESULTS);
            to_all();
        } else if (outcome == outcome_t.COLLECTING) {
            count_event(P4REDUCE_COUNT_CONTRIBUTIONS);
            discard();
        } else if (outcome == outcome_t.REPEAT) {
            count_event(P4REDUCE_COUNT_REPEATS);
            repeat();
        } else if (outcome == outcome_t.DUPLICATE) {
            count_event(P4REDUCE_COUNT_DUPLICATES);
            discard();
        } else {
            count_event(P4REDUCE_COUNT_STALE);
            discard();
        }
    }
} // control Reply

#endif
