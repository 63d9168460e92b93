/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t { }
#include "include/one.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    action forward(bit<9> port, bit<16> c) {
        s.egress_spec = port;
        h.x.c = c;
    }
    action drop() { mark_to_drop(s); }
    table t {
        key = { h.x.a: exact; }
        actions = { forward; drop; NoAction; }
        const default_action = drop;
        size = 4;
    }
    apply { t.apply(); }
}

V1Switch(ParseOne(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
