/* SPDX-License-Identifier: Apache-2.0
 *
 * One of everything that a P4Runtime client can name, for the tests of the embedded switch's server. A frame is
 * Ethernet with type 0x1234 and four key fields. Compile with `tests/p4/programs/compile.sh`.
 */
#include <core.p4>
#include <v1model.p4>

const bit<9> CPU_PORT = 510;

@controller_header("packet_out")
header packet_out_t {
    bit<9> egress_port;
    bit<7> pad;
}

@controller_header("packet_in")
header packet_in_t {
    bit<9> ingress_port;
    bit<7> reason;
}

header ethernet_t {
    bit<48> dst;
    bit<48> src;
    bit<16> ethertype;
}

header key_t {
    bit<32> a;
    bit<16> b;
    bit<8>  c;
    bit<8>  d;
}

struct headers_t {
    packet_out_t packet_out;
    packet_in_t  packet_in;
    ethernet_t   ethernet;
    key_t        key;
}

struct metadata_t { }

parser FrameParser(packet_in packet, out headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard_metadata) {
    state start {
        transition select(standard_metadata.ingress_port) {
            CPU_PORT: from_controller;
            default: ethernet;
        }
    }
    state from_controller {
        packet.extract(hdr.packet_out);
        transition ethernet;
    }
    state ethernet {
        packet.extract(hdr.ethernet);
        transition select(hdr.ethernet.ethertype) {
            0x1234: key;
            default: accept;
        }
    }
    state key {
        packet.extract(hdr.key);
        transition accept;
    }
}

control Nothing(inout headers_t hdr, inout metadata_t meta) {
    apply { }
}

control EntitiesIngress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard_metadata) {
    direct_counter(CounterType.packets_and_bytes) wide_counter;
    counter(16, CounterType.packets_and_bytes) hits;
    counter(8, CounterType.bytes) volume;
    register<bit<32>>(4) last;

    action send(bit<9> port) {
        standard_metadata.egress_spec = port;
    }
    action spread(bit<16> group) {
        standard_metadata.mcast_grp = group;
    }
    action mirror(bit<9> port) {
        standard_metadata.egress_spec = port;
        clone(CloneType.I2E, 7);
    }
    action refuse() {
        mark_to_drop(standard_metadata);
    }
    action send_counted(bit<9> port) {
        wide_counter.count();
        standard_metadata.egress_spec = port;
    }
    action refuse_counted() {
        wide_counter.count();
        mark_to_drop(standard_metadata);
    }

    table wide {
        key = {
            hdr.key.a: ternary @name("a");
            hdr.key.b: range @name("b");
            hdr.key.c: optional @name("c");
            hdr.key.d: exact @name("d");
        }
        actions = { send_counted; refuse_counted; @defaultonly NoAction; }
        default_action = NoAction;
        counters = wide_counter;
        size = 64;
    }

    table routes {
        key = { hdr.key.a: lpm @name("a"); }
        actions = { send; spread; mirror; refuse; }
        default_action = refuse;
        size = 64;
    }

    table small {
        key = { hdr.key.d: exact @name("d"); }
        actions = { send; @tableonly spread; @defaultonly refuse; }
        const default_action = refuse;
        size = 2;
    }

    table fixed {
        key = { hdr.key.d: exact @name("d"); }
        actions = { send; NoAction; }
        default_action = NoAction;
        const entries = {
            200: send(2);
            201: send(3);
        }
    }

    apply {
        if (hdr.packet_out.isValid()) {
            standard_metadata.egress_spec = hdr.packet_out.egress_port;
            hdr.packet_out.setInvalid();
        } else if (hdr.key.isValid()) {
            hits.count((bit<32>)hdr.key.d);
            volume.count((bit<32>)hdr.key.d);
            last.write((bit<32>)hdr.key.d, hdr.key.a);
            if (!fixed.apply().hit) {
                if (hdr.key.c == 255) {
                    small.apply();
                } else if (!wide.apply().hit) {
                    routes.apply();
                }
            }
        } else {
            refuse();
        }
    }
}

control EntitiesEgress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard_metadata) {
    apply {
        if (standard_metadata.egress_port == CPU_PORT) {
            hdr.packet_in.setValid();
            hdr.packet_in.ingress_port = standard_metadata.ingress_port;
            hdr.packet_in.reason = 5;
        }
    }
}

control FrameDeparser(packet_out packet, in headers_t hdr) {
    apply {
        packet.emit(hdr.packet_in);
        packet.emit(hdr.ethernet);
        packet.emit(hdr.key);
    }
}

V1Switch(FrameParser(), Nothing(), EntitiesIngress(), EntitiesEgress(), Nothing(), FrameDeparser()) main;
