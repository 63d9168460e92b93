/* SPDX-License-Identifier: Apache-2.0 */
#include "include/data.p4"

header wide_t {
    bit<8>    op;
    bit<2048> w;
    bit<2048> v;
    bit<100>  odd;
    bit<4>    tail;
}
struct headers_t {
    wide_t x;
}
struct meta_t {
    bit<2048> keep;
}

parser Parse(packet_in p, out headers_t h, inout meta_t m, inout standard_metadata_t s) {
    state start {
        p.extract(h.x);
        transition accept;
    }
}
#include "include/rest.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    register<bit<2048>>(2) cells;
    apply {
        s.egress_spec = 1;
        if (h.x.op == 0) {
            cells.write(1, h.x.w);
        } else if (h.x.op == 1) {
            cells.read(m.keep, 1);
            h.x.w = h.x.w + m.keep;
            h.x.odd = h.x.odd + 1;
        } else if (h.x.op == 2) {
            h.x.w = h.x.w | h.x.v;
        } else {
            h.x.v = h.x.v << 4;
        }
    }
}

V1Switch(Parse(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
