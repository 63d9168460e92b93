/* SPDX-License-Identifier: Apache-2.0 */
#ifndef P4REDUCE_REPLY_P4
#define P4REDUCE_REPLY_P4

#include "../headers.p4"

/* Counts a frame that may not touch a slot, and tells its worker why. */
control Reply(inout headers_t hdr,
              in metadata_t meta,
              inout standard_metadata_t standard_metadata,
              in bit<8> reason)(counter reduce_counter) {
#include "answer_actions.p4"

    action discard() {
        mark_to_drop(standard_metadata);
    }

    action nack() {
        hdr.reduce.count_or_reason = reason;
        to_sender();
        from_switch(P4REDUCE_KIND_NACK);
        hdr.short.setInvalid();
        hdr.full.setInvalid();
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
    }
} // control Reply

#endif
