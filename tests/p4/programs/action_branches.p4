/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t { }
#include "include/one.p4"

/* The compiler turns an if inside an action into choices between values. */
control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    action work(bit<8> limit, bit<16> c) {
        if (h.x.b > limit) {
            h.x.d = 0xd;
            if (h.x.c == 7) {
                h.x.c = c;
            } else {
                h.x.c = h.x.c + 1;
            }
        } else {
            h.x.a = limit;
        }
        h.x.b = 0;
    }
    table t {
        key = { h.x.a: exact; }
        actions = { work; }
        default_action = work(100, 0xcccc);
    }
    apply {
        s.egress_spec = 1;
        t.apply();
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
