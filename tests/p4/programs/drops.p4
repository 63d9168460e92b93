/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t { }
#include "include/one.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = (bit<9>)h.x.b;
        if (h.x.a == 1) {
            mark_to_drop(s);
        } else if (h.x.a == 2) {
            mark_to_drop(s);
            s.egress_spec = 3;
        } else if (h.x.a == 4) {
            s.egress_spec = 511;
        }
    }
}

control Out(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        /* egress_spec starts egress as 0. */
        h.x.c = (bit<16>)s.egress_spec;
        if (h.x.a == 3) { mark_to_drop(s); }
        if (h.x.a == 5) { s.egress_spec = 2; }
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), Out(), NoUpdate(), EmitAll()) main;
