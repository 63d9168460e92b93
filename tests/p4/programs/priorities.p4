/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t { }
#include "include/one.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        s.priority = (bit<3>)h.x.a;
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
