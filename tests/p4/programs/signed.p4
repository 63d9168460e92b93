/* SPDX-License-Identifier: Apache-2.0 */
#include "include/data.p4"

header signed_t {
    int<8>  p;
    int<8>  q;
    int<16> r;
    bit<8>  flags;
}
struct headers_t {
    signed_t x;
}
struct meta_t { }

parser Parse(packet_in p, out headers_t h, inout meta_t m, inout standard_metadata_t s) {
    state start {
        p.extract(h.x);
        transition accept;
    }
}
#include "include/rest.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        int<8> p = h.x.p;
        int<8> q = h.x.q;
        bit<8> f = 0;
        if (p < q) { f = f | 1; }
        if (p > -3) { f = f | 2; }
        if (p == q) { f = f | 4; }
        h.x.flags = f;
        h.x.r = (int<16>)p * (int<16>)q;
        h.x.p = p + q;
        h.x.q = (p >> 1) - 1;
    }
}

V1Switch(Parse(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
