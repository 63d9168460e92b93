/* SPDX-License-Identifier: Apache-2.0 */
#include "include/data.p4"

header bytes_t {
    bit<8>     size;
    varbit<32> rest;
}
struct headers_t {
    data_t  x;
    data_t  y;
    bytes_t u;
    bytes_t v;
}
struct meta_t { }

parser Parse(packet_in p, out headers_t h, inout meta_t m, inout standard_metadata_t s) {
    state start {
        p.extract(h.x);
        transition select(h.x.a) {
            1: second;
            default: third;
        }
    }
    state second {
        p.extract(h.y);
        transition third;
    }
    state third {
        p.extract(h.u, 16);
        p.extract(h.v, 16);
        transition accept;
    }
}
#include "include/rest.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        if (h.x == h.y) { s.egress_spec = 1; } else { s.egress_spec = 2; }
        if (h.u == h.v) { h.x.b = 0x11; }
        if (h.u != h.v) { h.x.b = 0x22; }
    }
}

V1Switch(Parse(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
