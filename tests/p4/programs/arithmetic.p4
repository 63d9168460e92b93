/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t { }
#include "include/one.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        bit<8> a = h.x.a;
        bit<8> b = h.x.b;
        h.x.a = a + b;
        h.x.b = a - b;
        h.x.c = (bit<16>)a * (bit<16>)b + 7;
        h.x.d = 16w0 ++ (-a) ++ 8w0;
        h.x.d = h.x.d + ((bit<32>)(a * b) << 24);
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
