/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t { }
#include "include/one.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    action forward(bit<9> port) { s.egress_spec = port; }
    table t {
        key = {
            h.x.a: ternary;
            h.x.c: ternary;
            h.x.d: lpm;
        }
        actions = { forward; }
        default_action = forward(9);
    }
    apply { t.apply(); }
}

V1Switch(ParseOne(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
