/* SPDX-License-Identifier: Apache-2.0 */
#ifndef P4REDUCE_REPLICATE_P4
#define P4REDUCE_REPLICATE_P4

#include "../headers.p4"

/* Gives each copy of a result the address of its worker, and keeps a flooded frame from going back. */
control Replicate(inout headers_t hdr, inout standard_metadata_t standard_metadata) {
    action to_worker(mac_t mac, ipv4_t ip, bit<16> udp_port, bit<8> rank) {
        hdr.ethernet.dst = mac;
        hdr.ipv4.dst = ip;
        hdr.udp.dst_port = udp_port;
        hdr.reduce.rank = rank;
    }

    action discard() {
        mark_to_drop(standard_metadata);
    }

    @name("replica")
    table replica {
        key = { standard_metadata.egress_rid: exact @name("egress_rid"); }
        actions = { to_worker; @defaultonly discard; }
        const default_action = discard;
        size = 8192;
    }

    apply {
        if (standard_metadata.mcast_grp != 0) {
            if (hdr.reduce.isValid()) {
                replica.apply();
            } else if (standard_metadata.egress_port == standard_metadata.ingress_port) {
                discard();
            }
        }
    }
} // control Replicate

#endif
