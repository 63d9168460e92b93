/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t { }
#include "include/one.p4"

/* Many accesses at one index in one action: the range is checked once for all of them. */
control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    register<bit<8>>(4) first;
    register<bit<8>>(4) second;
    register<bit<16>>(4) third;
    bit<32> cell;
    action exchange() {
        bit<8> a = h.x.a;
        bit<8> b = h.x.b;
        bit<16> c = h.x.c;
        first.read(h.x.a, cell);
        first.write(cell, a);
        second.read(h.x.b, cell);
        second.write(cell, b);
        third.read(h.x.c, cell);
        third.write(cell, c);
    }
    apply {
        s.egress_spec = 1;
        cell = h.x.d;
        exchange();
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
