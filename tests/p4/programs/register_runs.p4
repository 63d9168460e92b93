/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t { }
#include "include/one.p4"

/* Many accesses at one index in one action: the range is checked once for all of them. */
control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    register<bit<8>>(4) first;
    register<bit<8>>(4) second;
    register<bit<16>>(4) third;
    bit<32> cell;
    bit<8> a;
    bit<8> b;
    bit<16> c;
    action exchange() {
        first.read(a, cell);
        first.write(cell, h.x.a);
        second.read(b, cell);
        second.write(cell, h.x.b);
        third.read(c, cell);
        third.write(cell, h.x.c);
        h.x.a = a;
        h.x.b = b;
        h.x.c = c;
    }
    apply {
        s.egress_spec = 1;
        cell = h.x.d;
        a = 0xa0;
        b = 0xb0;
        c = 0xc0c0;
        exchange();
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
