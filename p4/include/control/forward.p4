/* SPDX-License-Identifier: Apache-2.0 */
#ifndef P4REDUCE_FORWARD_P4
#define P4REDUCE_FORWARD_P4

#include "../headers.p4"

/*
 * Everything that is not ours crosses the same switch: the controller's gRPC, the ring path, ARP. But only from where
 * it says it comes from: a port carries the MAC and IPv4 address of the host behind it, in IPv4 packets of every form
 * (options and fragments too) and in ARP. So no host can speak as another one or as the switch. All other ethertypes,
 * VLAN tags and IPv6 among them, would carry addresses that nobody has looked at: they are dropped.
 */
control Forward(inout headers_t hdr, inout standard_metadata_t standard_metadata)(counter reduce_counter) {
    ipv4_t source;

    action discard() {
        mark_to_drop(standard_metadata);
    }

    action permit() { }

    action guard() {
        reduce_counter.count(P4REDUCE_COUNT_GUARDED);
        mark_to_drop(standard_metadata);
    }

    /* The hosts behind the ports. No host has the address 0.0.0.0, which stands for a frame without a sender. */
    @name("sources")
    table sources {
        key = {
            standard_metadata.ingress_port: exact @name("ingress_port");
            hdr.ethernet.src: exact @name("src_mac");
            source: exact @name("src_ip");
        }
        actions = { permit; @defaultonly guard; }
        const default_action = guard;
        size = 1024;
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
        source = 0;
        if (hdr.ipv4.isValid()) {
            if (hdr.ipv4.version == 4) {
                source = hdr.ipv4.src;
            }
        } else if (hdr.arp.isValid() && hdr.arp.hardware == 1 && hdr.arp.protocol == ETHERTYPE_IPV4 &&
                   hdr.arp.hardware_bytes == 6 && hdr.arp.protocol_bytes == 4 &&
                   hdr.arp.sender_mac == hdr.ethernet.src) {
            source = hdr.arp.sender_ip;
        }
        if (sources.apply().hit) {
            if (hdr.arp.isValid() && hdr.arp.operation == 1) {
                if (arp.apply().miss) {
                    forward.apply();
                }
            } else {
                forward.apply();
            }
        }
    }
} // control Forward

#endif
