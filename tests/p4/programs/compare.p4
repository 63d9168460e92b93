/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t { }
#include "include/one.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        bit<8> r = 0;
        if (h.x.a == h.x.b) { r = r | 1; }
        if (h.x.a != h.x.b) { r = r | 2; }
        if (h.x.a < h.x.b) { r = r | 4; }
        if (h.x.a > h.x.b) { r = r | 8; }
        if (h.x.a <= h.x.b) { r = r | 16; }
        if (h.x.a >= h.x.b) { r = r | 32; }
        if (h.x.a == 1 && h.x.b == 2 || !(h.x.c == 3)) { r = r | 64; }
        bool both = h.x.a == 1;
        bool other = h.x.c == 3;
        if (both == other) { r = r | 128; }
        h.x.d = (bit<32>)r;
        h.x.c = (both != other) ? 16w0xaaaa : 16w0x5555;
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
