/* SPDX-License-Identifier: Apache-2.0 */
#ifndef P4REDUCE_ADMIT_P4
#define P4REDUCE_ADMIT_P4

#include "../headers.p4"

/* Decides whether a contribution may touch a slot. `reason` stays 0 when it may. */
control Admit(inout headers_t hdr,
              inout metadata_t meta,
              in standard_metadata_t standard_metadata,
              out bit<8> reason) {
    action admit_worker(worker_bitmap_t worker, worker_bitmap_t full, bit<16> pool_base, bit<16> pool_size,
                        bit<16> group, bit<8> workers, bit<16> stats) {
        meta.worker = worker;
        meta.full = full;
        meta.pool_base = pool_base;
        meta.pool_size = pool_size;
        meta.group = group;
        meta.workers = workers;
        meta.stats = stats;
    }

    /* A frame counts only from the switch port, the address and the UDP port its rank joined from. */
    @name("admit")
    table admit {
        key = {
            standard_metadata.ingress_port: exact @name("ingress_port");
            hdr.ipv4.src: exact @name("ipv4_src");
            hdr.udp.src_port: exact @name("udp_src");
            hdr.reduce.epoch: exact @name("epoch");
            hdr.reduce.rank: exact @name("rank");
        }
        actions = { admit_worker; @defaultonly NoAction; }
        const default_action = NoAction;
        size = 4096;
    }

    action known_epoch(bit<16> stats) {
        meta.stats = stats;
    }

    /* Looked up after a miss of `admit` only: tells an epoch that is over from a worker that is not of it. */
    @name("epochs")
    table epochs {
        key = { hdr.reduce.epoch: exact @name("epoch"); }
        actions = { known_epoch; @defaultonly NoAction; }
        const default_action = NoAction;
        size = 1024;
    }

    apply {
        reason = 0;
        /* The parser fails on a frame shorter than its header says; the UDP length catches one that is longer,
         * whose rest would otherwise travel on behind the result. */
        bool sized =
            (hdr.short.isValid() &&
             hdr.udp.length_ == 8 + P4REDUCE_HEADER_BYTES + P4REDUCE_WORD_BYTES) ||
            (hdr.full.isValid() &&
             hdr.udp.length_ == 8 + P4REDUCE_HEADER_BYTES + P4REDUCE_WORDS * P4REDUCE_WORD_BYTES);
        if (!sized || hdr.reduce.version != P4REDUCE_VERSION || hdr.reduce.kind != P4REDUCE_KIND_CONTRIBUTE ||
            hdr.reduce.op > P4REDUCE_OP_OR) {
            reason = P4REDUCE_REASON_MALFORMED;
        } else if (admit.apply().miss) {
            if (epochs.apply().hit) {
                reason = P4REDUCE_REASON_NOT_ADMITTED;
            } else {
                reason = P4REDUCE_REASON_UNKNOWN_EPOCH;
            }
        } else if (hdr.reduce.slot >= meta.pool_size) {
            reason = P4REDUCE_REASON_BAD_SLOT;
        }
    }
} // control Admit

#endif
