/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t { }
#include "include/one.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    action forward(bit<9> port) { s.egress_spec = port; }
    table t {
        key = {
            h.x.d & 0x00ff00f0: exact @name("masked");
            h.x.a[5:2]: exact @name("slice");
        }
        actions = { forward; }
        default_action = forward(9);
    }
    apply { t.apply(); }
}

V1Switch(ParseOne(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
