/* SPDX-License-Identifier: Apache-2.0 */
#ifndef P4REDUCE_FORWARD_P4
#define P4REDUCE_FORWARD_P4

#include "../headers.p4"

/* Everything that is not ours crosses the same switch: the controller's gRPC, the ring path, ARP. */
control Forward(inout headers_t hdr, inout standard_metadata_t standard_metadata) {
    action discard() {
        mark_to_drop(standard_metadata);
    }

    action to_port(port_t port) {
        standard_metadata.egress_spec = port;
    }

    action flood(bit<16> group) {
        standard_metadata.mcast_grp = group;
    }

    @name("forward")
    table forward {
        key = { hdr.ethernet.dst: exact @name("dst_mac"); }
        actions = { to_port; flood; @defaultonly discard; }
        const default_action = discard;
        size = 1024;
    }

    action answer_arp(mac_t mac) {
        ipv4_t asked = hdr.arp.target_ip;
        hdr.arp.operation = 2;
        hdr.arp.target_mac = hdr.arp.sender_mac;
        hdr.arp.target_ip = hdr.arp.sender_ip;
        hdr.arp.sender_mac = mac;
        hdr.arp.sender_ip = asked;
        hdr.ethernet.dst = hdr.ethernet.src;
        hdr.ethernet.src = mac;
        standard_metadata.egress_spec = standard_metadata.ingress_port;
    }

    /* Requests for the switch's own address and for every host of the hosts file: nobody has to flood. */
    @name("arp")
    table arp {
        key = { hdr.arp.target_ip: exact @name("target_ip"); }
        actions = { answer_arp; @defaultonly NoAction; }
        const default_action = NoAction;
        size = 1024;
    }

    apply {
        if (hdr.arp.isValid() && hdr.arp.operation == 1) {
            if (arp.apply().miss) {
                forward.apply();
            }
        } else {
            forward.apply();
        }
    }
} // control Forward

#endif
