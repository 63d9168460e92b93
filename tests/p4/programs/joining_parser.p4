/* SPDX-License-Identifier: Apache-2.0 */
#include "include/data.p4"

header byte_t {
    bit<8> v;
}
struct headers_t {
    data_t x;
    byte_t b0;
    byte_t b1;
    byte_t b2;
    byte_t b3;
    byte_t b4;
    byte_t b5;
    byte_t b6;
    byte_t b7;
    byte_t b8;
    byte_t b9;
}
struct meta_t { }

/* Every state can skip the next one: the number of paths grows like Fibonacci's numbers, the states do not. */
#define STEP(here, header, next, after) \
    state here { p.extract(h.header); transition select(h.header.v) { 0: next; 1: after; default: accept; } }

parser Parse(packet_in p, out headers_t h, inout meta_t m, inout standard_metadata_t s) {
    state start {
        p.extract(h.x);
        transition s0;
    }
    STEP(s0, b0, s1, s2)
    STEP(s1, b1, s2, s3)
    STEP(s2, b2, s3, s4)
    STEP(s3, b3, s4, s5)
    STEP(s4, b4, s5, s6)
    STEP(s5, b5, s6, s7)
    STEP(s6, b6, s7, s8)
    STEP(s7, b7, s8, s9)
    state s8 {
        p.extract(h.b8);
        transition s9;
    }
    state s9 {
        p.extract(h.b9);
        h.x.b = 0x66;
        transition accept;
    }
}
#include "include/rest.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        if (h.b1.isValid()) { h.x.c[1:1] = 1; }
        if (h.b2.isValid()) { h.x.c[2:2] = 1; }
        if (h.b3.isValid()) { h.x.c[3:3] = 1; }
        if (h.b4.isValid()) { h.x.c[4:4] = 1; h.b4.v = 0x44; }
        if (h.b5.isValid()) { h.x.c[5:5] = 1; h.b5.v = 0x55; }
        if (h.b6.isValid()) { h.x.c[6:6] = 1; }
        if (h.b7.isValid()) { h.x.c[7:7] = 1; }
        if (h.b8.isValid()) { h.x.c[8:8] = 1; }
        if (h.b9.isValid()) { h.x.c[9:9] = 1; h.b9.v = 0x99; }
    }
}

V1Switch(Parse(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
