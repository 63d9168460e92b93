/* SPDX-License-Identifier: Apache-2.0 */
#include "include/data.p4"

/* Fields that cross byte boundaries, and groups of 3, 5, 6, 7 and more bytes. */
header odd_t {
    bit<3>  a;
    bit<18> b;
    bit<3>  c;
    bit<40> d;
    bit<48> e;
    bit<56> f;
    bit<5>  g;
    bit<67> i;
    int<12> j;
    bit<4>  k;
}
struct headers_t {
    odd_t x;
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
        if (h.x.k == 1) {
            h.x.b = h.x.b + 1;
        } else if (h.x.k == 2) {
            h.x.d = h.x.d + 1;
            h.x.e = h.x.e + 1;
            h.x.f = h.x.f + 1;
        } else if (h.x.k == 3) {
            h.x.i = h.x.i + 1;
            h.x.j = h.x.j - 1;
        } else if (h.x.k == 4) {
            h.x.g = h.x.g + (bit<5>)h.x.a + (bit<5>)h.x.c;
        }
    }
}

V1Switch(Parse(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
