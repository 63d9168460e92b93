/* SPDX-License-Identifier: Apache-2.0 */
#include "include/data.p4"

header pair_t {
    bit<8> u;
    bit<8> v;
    int<8> p;
    int<8> q;
}
struct headers_t {
    pair_t x;
    pair_t y;
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
        h.y.setValid();
        h.y.u = h.x.u |+| h.x.v;
        h.y.v = h.x.u |-| h.x.v;
        h.y.p = h.x.p |+| h.x.q;
        h.y.q = h.x.p |-| h.x.q;
    }
}

V1Switch(Parse(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
