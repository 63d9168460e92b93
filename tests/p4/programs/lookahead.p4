/* SPDX-License-Identifier: Apache-2.0 */
#include "include/data.p4"

struct headers_t {
    data_t x;
    data_t y;
}
struct meta_t {
    bit<16> seen;
    bit<4>  nibble;
}
header peek_t {
    bit<4>  skip;
    bit<4>  wanted;
    bit<8>  more;
}

parser Parse(packet_in p, out headers_t h, inout meta_t m, inout standard_metadata_t s) {
    state start {
        p.extract(h.x);
        m.seen = p.lookahead<bit<16>>();
        m.nibble = p.lookahead<peek_t>().wanted;
        transition select(p.lookahead<bit<8>>()) {
            0x10 &&& 0xf0: next;
            default: accept;
        }
    }
    state next {
        p.extract(h.y);
        transition accept;
    }
}
#include "include/rest.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        h.x.c = m.seen;
        h.x.b = (bit<8>)m.nibble;
        if (h.y.isValid()) { h.x.a = 0xaa; }
        if (s.parser_error != error.NoError) { h.x.a = 0xee; }
    }
}

V1Switch(Parse(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
