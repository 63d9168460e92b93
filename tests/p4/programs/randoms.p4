/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t { }
#include "include/one.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        random(h.x.b, 8w5, 8w5);
        random(h.x.c, 16w9, 16w3);
        random(h.x.d, 32w100, 32w103);
        h.x.d = (h.x.d >= 100 && h.x.d <= 103) ? 32w1 : 32w0;
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
