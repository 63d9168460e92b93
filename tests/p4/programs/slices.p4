/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t { }
#include "include/one.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        bit<16> c = h.x.c;
        h.x.a[7:4] = c[3:0];
        h.x.b = c[15:12] ++ c[7:4];
        h.x.d[23:8] = c;
        h.x.c = c[7:0] ++ c[15:8];
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
