/* SPDX-License-Identifier: Apache-2.0
 *
 * p4reduce: allreduce inside a v1model switch. The switch adds or ORs wide words and knows nothing of lanes,
 * numbers or models; docs/design.md, section 3, is the specification of what stands here.
 */
#include <core.p4>
#include <v1model.p4>

#include "include/config.p4"
#include "include/headers.p4"
#include "include/parser.p4"
#include "include/control/admit.p4"
#include "include/control/slot.p4"
#include "include/control/reply.p4"
#include "include/control/forward.p4"
#include "include/control/replicate.p4"

control VerifyNothing(inout headers_t hdr, inout metadata_t meta) {
    apply { }
}

control ReduceIngress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard_metadata) {
    @name("reply.reduce_counter")
    counter(P4REDUCE_STATS_CELLS, CounterType.packets) reduce_counter;
    Admit() admit;
    Slot(reduce_counter) slot;
    Reply(reduce_counter) reply;
    Forward(reduce_counter) forward;
    bit<8> reason;

    apply {
        if (hdr.reduce.isValid()) {
            admit.apply(hdr, meta, standard_metadata, reason);
            if (reason == 0) {
                slot.apply(hdr, meta, standard_metadata, reason);
            }
            if (reason != 0) {
                reply.apply(hdr, meta, standard_metadata, reason);
            }
        } else if (hdr.udp.isValid() &&
                   (hdr.udp.dst_port == P4REDUCE_UDP_PORT || hdr.udp.src_port == P4REDUCE_UDP_PORT)) {
            /* Too short to hold the header, so nobody can be answered; or made to look like an answer of the switch. */
            reduce_counter.count(P4REDUCE_COUNT_GUARDED);
            mark_to_drop(standard_metadata);
        } else {
            forward.apply(hdr, standard_metadata);
        }
    }
}

control ReduceEgress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard_metadata) {
    Replicate() replicate;

    apply {
        replicate.apply(hdr, standard_metadata);
    }
}

control UpdateIpv4Checksum(inout headers_t hdr, inout metadata_t meta) {
    apply {
        /* Only our own answers change an address or a length. */
        update_checksum(hdr.reduce.isValid(),
            { hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.tos, hdr.ipv4.total_length, hdr.ipv4.identification,
              hdr.ipv4.flags, hdr.ipv4.fragment_offset, hdr.ipv4.ttl, hdr.ipv4.protocol, hdr.ipv4.src, hdr.ipv4.dst },
            hdr.ipv4.checksum, HashAlgorithm.csum16);
    }
}

@pkginfo(name="p4reduce", version="1")
V1Switch(FrameParser(), VerifyNothing(), ReduceIngress(), ReduceEgress(), UpdateIpv4Checksum(), FrameDeparser()) main;
