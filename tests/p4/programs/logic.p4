/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t { }
#include "include/one.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        bit<8> a = h.x.a;
        bit<8> b = h.x.b;
        h.x.a = a & b;
        h.x.b = a | ~b;
        h.x.c = ((bit<16>)a << 4) ^ ((bit<16>)b >> 2);
        h.x.d = (h.x.d << a[3:0]) | (h.x.d >> b);
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
