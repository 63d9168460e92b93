/* SPDX-License-Identifier: Apache-2.0 */
#include "include/data.p4"

header ipv4_t {
    bit<4>  version;
    bit<4>  ihl;
    bit<8>  tos;
    bit<16> size;
    bit<16> number;
    bit<3>  flags;
    bit<13> offset;
    bit<8>  ttl;
    bit<8>  protocol;
    bit<16> checksum;
    bit<32> src;
    bit<32> dst;
}
struct headers_t {
    data_t x;
    ipv4_t ip;
}
struct meta_t { }

parser Parse(packet_in p, out headers_t h, inout meta_t m, inout standard_metadata_t s) {
    state start {
        p.extract(h.x);
        transition select(h.x.a) {
            1: ip;
            default: accept;
        }
    }
    state ip {
        p.extract(h.ip);
        transition accept;
    }
}
#include "include/rest.p4"

control Verify(inout headers_t h, inout meta_t m) {
    apply {
        verify_checksum(h.x.b != 9,
            { h.ip.version, h.ip.ihl, h.ip.tos, h.ip.size, h.ip.number, h.ip.flags, h.ip.offset, h.ip.ttl,
              h.ip.protocol, h.ip.src, h.ip.dst }, h.ip.checksum, HashAlgorithm.csum16);
    }
}

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        h.x.c = 15w0 ++ s.checksum_error;
        if (h.ip.isValid()) { h.ip.ttl = h.ip.ttl - 1; }
    }
}

control Update(inout headers_t h, inout meta_t m) {
    apply {
        update_checksum(h.ip.isValid() && h.x.b != 8,
            { h.ip.version, h.ip.ihl, h.ip.tos, h.ip.size, h.ip.number, h.ip.flags, h.ip.offset, h.ip.ttl,
              h.ip.protocol, h.ip.src, h.ip.dst }, h.ip.checksum, HashAlgorithm.csum16);
    }
}

V1Switch(Parse(), Verify(), Run(), NoEgress(), Update(), EmitAll()) main;
