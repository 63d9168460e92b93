/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t { }
#include "include/one.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    action forward(bit<9> port) { s.egress_spec = port; }
    action mark(bit<8> b) { h.x.b = b; }
    // To the JSON this looks like a table that the compiler made; the P4Info says that it is the author's.
    table keyless {
        actions = { forward; }
        const default_action = forward(3);
    }
    table keyed {
        key = { h.x.a: exact; }
        actions = { mark; NoAction; }
        const default_action = NoAction;
    }
    apply {
        keyless.apply();
        keyed.apply();
        h.x.a = h.x.a + 1;
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
