/* SPDX-License-Identifier: Apache-2.0
 *
 * What `p4reduce bench` calls `scalar`: allreduce as it is mostly written for a switch, one register of 32 bits for
 * every element of a frame, 64 elements a frame. It is there to be compared with p4reduce.p4 on the same switch, and
 * for nothing else: it trusts its senders and has no checks, epochs or answers to mistakes.
 *
 * Its frame is a short frame of the protocol (docs/design.md, section 3) whose payload is 64 big-endian integers. A
 * cell holds one chunk at a time; its round goes up with every use. Senders use 2W cells for a window of W, so that a
 * finished sum stays until all of them have it, and a contribution that is sent again is answered from the cell.
 */
#include <core.p4>
#include <v1model.p4>

#include "include/config.p4"

#define SCALAR_CELLS 256
/* Not summed but sent on to the worker whose rank the slot field names. */
#define SCALAR_KIND_FORWARD 4

#define ELEMENTS(M) \
    M(0)  M(1)  M(2)  M(3)  M(4)  M(5)  M(6)  M(7)  M(8)  M(9)  M(10) M(11) M(12) M(13) M(14) M(15) \
    M(16) M(17) M(18) M(19) M(20) M(21) M(22) M(23) M(24) M(25) M(26) M(27) M(28) M(29) M(30) M(31) \
    M(32) M(33) M(34) M(35) M(36) M(37) M(38) M(39) M(40) M(41) M(42) M(43) M(44) M(45) M(46) M(47) \
    M(48) M(49) M(50) M(51) M(52) M(53) M(54) M(55) M(56) M(57) M(58) M(59) M(60) M(61) M(62) M(63)

header ethernet_t {
    bit<48> dst;
    bit<48> src;
    bit<16> ethertype;
}

header ipv4_header_t {
    bit<4>  version;
    bit<4>  ihl;
    bit<8>  tos;
    bit<16> total_length;
    bit<16> identification;
    bit<3>  flags;
    bit<13> fragment_offset;
    bit<8>  ttl;
    bit<8>  protocol;
    bit<16> checksum;
    bit<32> src;
    bit<32> dst;
}

header udp_t {
    bit<16> src_port;
    bit<16> dst_port;
    bit<16> length_;
    bit<16> checksum;
}

header chunk_t {
    bit<8>  version;
    bit<8>  kind;
    bit<8>  op;
    bit<8>  words;
    bit<32> epoch;
    bit<16> slot;
    bit<8>  rank;
    bit<8>  count;
    bit<32> round;
    bit<64> check;
    bit<64> tag;
}

#define ELEMENT_FIELD(i) bit<32> e##i;
header elements_t {
    ELEMENTS(ELEMENT_FIELD)
}

struct headers_t {
    ethernet_t    ethernet;
    ipv4_header_t ipv4;
    udp_t         udp;
    chunk_t       chunk;
    elements_t    elements;
}

struct metadata_t {
    bit<64> worker;
    bit<64> full;
    bit<16> group;
}

parser ScalarParser(packet_in packet, out headers_t hdr, inout metadata_t meta,
                    inout standard_metadata_t standard_metadata) {
    state start {
        packet.extract(hdr.ethernet);
        transition select(hdr.ethernet.ethertype) {
            0x0800: ipv4;
            default: accept;
        }
    }

    state ipv4 {
        packet.extract(hdr.ipv4);
        transition select(hdr.ipv4.ihl, hdr.ipv4.protocol) {
            (5, 17): udp;
            default: accept;
        }
    }

    state udp {
        packet.extract(hdr.udp);
        transition select(hdr.udp.dst_port) {
            P4REDUCE_UDP_PORT: chunk;
            default: accept;
        }
    }

    state chunk {
        packet.extract(hdr.chunk);
        transition select(hdr.chunk.kind) {
            P4REDUCE_KIND_CONTRIBUTE: elements;
            default: accept;
        }
    }

    state elements {
        packet.extract(hdr.elements);
        transition accept;
    }
}

control VerifyNothing(inout headers_t hdr, inout metadata_t meta) {
    apply { }
}

control ScalarIngress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard_metadata) {
    register<bit<32>>(SCALAR_CELLS) cell_round;
    register<bit<64>>(SCALAR_CELLS) cell_seen;
#define SUM_REGISTER(i) register<bit<32>>(SCALAR_CELLS) sum##i;
    ELEMENTS(SUM_REGISTER)

    bit<32> cell;
    bit<32> current;
    bit<32> stored;
    bit<64> seen;

#define START(i) sum##i.write(cell, hdr.elements.e##i);
#define ADD(i) sum##i.read(stored, cell); hdr.elements.e##i = hdr.elements.e##i + stored; sum##i.write(cell, hdr.elements.e##i);
#define LOAD(i) sum##i.read(hdr.elements.e##i, cell);
    action start() { ELEMENTS(START) }
    action add() { ELEMENTS(ADD) }
    action load() { ELEMENTS(LOAD) }

    action discard() {
        mark_to_drop(standard_metadata);
    }

    action member(bit<64> worker, bit<64> full, bit<16> group) {
        meta.worker = worker;
        meta.full = full;
        meta.group = group;
    }

    @name("members")
    table members {
        key = {
            standard_metadata.ingress_port: exact @name("ingress_port");
            hdr.chunk.rank: exact @name("rank");
        }
        actions = { member; @defaultonly discard; }
        const default_action = discard;
        size = 64;
    }

    action to_worker(bit<9> port, bit<48> mac, bit<32> ip, bit<16> udp_port) {
        hdr.ethernet.src = hdr.ethernet.dst;
        hdr.ethernet.dst = mac;
        hdr.ipv4.src = hdr.ipv4.dst;
        hdr.ipv4.dst = ip;
        hdr.udp.src_port = P4REDUCE_UDP_PORT;
        hdr.udp.dst_port = udp_port;
        hdr.udp.checksum = 0;
        standard_metadata.egress_spec = port;
    }

    @name("targets")
    table targets {
        key = { hdr.chunk.slot: exact @name("rank"); }
        actions = { to_worker; @defaultonly discard; }
        const default_action = discard;
        size = 64;
    }

    action answer() {
        hdr.chunk.kind = P4REDUCE_KIND_RESULT;
        hdr.udp.checksum = 0;
    }

    action to_all() {
        answer();
        hdr.ethernet.src = hdr.ethernet.dst;
        hdr.ipv4.src = hdr.ipv4.dst;
        hdr.udp.src_port = P4REDUCE_UDP_PORT;
        standard_metadata.mcast_grp = meta.group;
    }

    action to_sender() {
        answer();
        bit<48> mac = hdr.ethernet.src;
        bit<32> ip = hdr.ipv4.src;
        bit<16> udp_port = hdr.udp.src_port;
        to_worker(standard_metadata.ingress_port, mac, ip, udp_port);
    }

    apply {
        if (hdr.chunk.isValid() && hdr.chunk.kind == SCALAR_KIND_FORWARD) {
            targets.apply();
        } else if (hdr.elements.isValid() && hdr.chunk.slot < SCALAR_CELLS && members.apply().hit) {
            cell = (bit<32>)hdr.chunk.slot;
            cell_round.read(current, cell);
            cell_seen.read(seen, cell);
            bit<32> ahead = hdr.chunk.round - current;
            if (ahead != 0) {
                seen = 0;
            }
            if (ahead >= 0x80000000) {
                discard();
            } else if (seen & meta.worker != 0) {
                if (seen == meta.full) {
                    load();
                    to_sender();
                } else {
                    discard();
                }
            } else {
                if (seen == 0) {
                    start();
                    cell_round.write(cell, hdr.chunk.round);
                } else {
                    add();
                }
                seen = seen | meta.worker;
                cell_seen.write(cell, seen);
                if (seen == meta.full) {
                    to_all();
                } else {
                    discard();
                }
            }
        } else {
            discard();
        }
    }
}

control ScalarEgress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard_metadata) {
    action discard() {
        mark_to_drop(standard_metadata);
    }

    action to_replica(bit<48> mac, bit<32> ip, bit<16> udp_port) {
        hdr.ethernet.dst = mac;
        hdr.ipv4.dst = ip;
        hdr.udp.dst_port = udp_port;
    }

    @name("replicas")
    table replicas {
        key = { standard_metadata.egress_rid: exact @name("egress_rid"); }
        actions = { to_replica; @defaultonly discard; }
        const default_action = discard;
        size = 64;
    }

    apply {
        if (standard_metadata.mcast_grp != 0) {
            replicas.apply();
        }
    }
}

control UpdateIpv4Checksum(inout headers_t hdr, inout metadata_t meta) {
    apply {
        update_checksum(hdr.chunk.isValid(),
            { hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.tos, hdr.ipv4.total_length, hdr.ipv4.identification,
              hdr.ipv4.flags, hdr.ipv4.fragment_offset, hdr.ipv4.ttl, hdr.ipv4.protocol, hdr.ipv4.src, hdr.ipv4.dst },
            hdr.ipv4.checksum, HashAlgorithm.csum16);
    }
}

control ScalarDeparser(packet_out packet, in headers_t hdr) {
    apply {
        packet.emit(hdr.ethernet);
        packet.emit(hdr.ipv4);
        packet.emit(hdr.udp);
        packet.emit(hdr.chunk);
        packet.emit(hdr.elements);
    }
}

@pkginfo(name="p4reduce-bench-scalar", version="1")
V1Switch(ScalarParser(), VerifyNothing(), ScalarIngress(), ScalarEgress(), UpdateIpv4Checksum(), ScalarDeparser()) main;
