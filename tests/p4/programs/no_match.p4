/* SPDX-License-Identifier: Apache-2.0 */
#include "include/data.p4"

struct headers_t {
    data_t x;
    data_t y;
}
struct meta_t { }

parser Parse(packet_in p, out headers_t h, inout meta_t m, inout standard_metadata_t s) {
    state start {
        p.extract(h.x);
        transition select(h.x.a) {
            1: more;
            2: accept;
        }
    }
    state more {
        p.extract(h.y);
        transition accept;
    }
}
#include "include/rest.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        h.x.b = 0;
        if (s.parser_error == error.NoError) { h.x.b = 1; }
        if (s.parser_error == error.NoMatch) { h.x.b = 2; }
        if (s.parser_error == error.PacketTooShort) { h.x.b = 3; }
    }
}

V1Switch(Parse(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
