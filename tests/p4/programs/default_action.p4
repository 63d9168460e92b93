/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t { }
#include "include/one.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    action forward(bit<9> port) { s.egress_spec = port; }
    action mark(bit<8> b) { h.x.b = b; }
    table t {
        key = { h.x.a: exact; }
        actions = { forward; mark; NoAction; }
        default_action = forward(5);
    }
    table keyless {
        actions = { mark; NoAction; }
        default_action = NoAction;
    }
    apply {
        t.apply();
        keyless.apply();
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
