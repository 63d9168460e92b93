/* SPDX-License-Identifier: Apache-2.0 */
#include "include/data.p4"

header bytes_t {
    varbit<64> rest;
}
struct headers_t {
    data_t  x;
    data_t  y;
    data_t  z;
    bytes_t v;
}
struct meta_t { }

parser Parse(packet_in p, out headers_t h, inout meta_t m, inout standard_metadata_t s) {
    state start {
        p.extract(h.x);
        p.extract(h.y);
        p.extract(h.v, 24);
        transition accept;
    }
}
#include "include/rest.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        if (h.x.a == 1) { h.z.setValid(); }
        if (h.x.a == 2) { h.y.setInvalid(); }
        if (h.x.a == 3) { h.v.setInvalid(); }
        if (h.x.a == 4) { h.z = h.y; }
        h.x.b = (bit<8>)s.packet_length;
    }
}

control Out(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        h.x.c = (bit<16>)s.packet_length;
        h.y.setInvalid();
        h.x.d = s.packet_length;
    }
}

V1Switch(Parse(), NoVerify(), Run(), Out(), NoUpdate(), EmitAll()) main;
