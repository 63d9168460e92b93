/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t { }
#include "include/one.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    action set_b(bit<8> b) { h.x.b = b; }
    table first {
        key = { h.x.a: exact; }
        actions = { set_b; NoAction; }
        default_action = NoAction;
    }
    table second {
        key = { h.x.c: exact; }
        actions = { set_b; NoAction; }
        const default_action = set_b(0xdd);
    }
    apply {
        s.egress_spec = 1;
        if (first.apply().hit) {
            h.x.d = 1;
        } else {
            if (!second.apply().miss) {
                h.x.d = 2;
            } else {
                h.x.d = 3;
            }
        }
        h.x.c = h.x.c + 1;
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
