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
            1: fixed;
            2: variable;
            default: accept;
        }
    }
    state fixed {
        p.advance(16);
        transition second;
    }
    state variable {
        p.advance((bit<32>)h.x.b);
        transition second;
    }
    state second {
        p.extract(h.y);
        transition accept;
    }
}
#include "include/rest.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        if (h.y.isValid()) { h.y.b = 0xbb; }
        if (s.parser_error == error.PacketTooShort) { h.x.c = 1; }
        if (s.parser_error == error.ParserInvalidArgument) { h.x.c = 2; }
    }
}

V1Switch(Parse(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
