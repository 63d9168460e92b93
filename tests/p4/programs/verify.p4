/* SPDX-License-Identifier: Apache-2.0 */
#include "include/data.p4"

error { TooSmall, TooBig }

struct headers_t {
    data_t x;
    data_t y;
}
struct meta_t { }

parser Parse(packet_in p, out headers_t h, inout meta_t m, inout standard_metadata_t s) {
    state start {
        p.extract(h.x);
        verify(h.x.a >= 10, error.TooSmall);
        verify(h.x.a < 20, error.TooBig);
        p.extract(h.y);
        transition accept;
    }
}
#include "include/rest.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        if (s.parser_error == error.TooSmall) { h.x.b = 1; }
        else if (s.parser_error == error.TooBig) { h.x.b = 2; }
        else if (s.parser_error == error.PacketTooShort) { h.x.b = 3; }
        else { h.x.b = 4; }
        if (h.y.isValid()) { h.y.b = 0xff; }
    }
}

V1Switch(Parse(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
