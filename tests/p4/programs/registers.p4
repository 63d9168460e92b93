/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t { }
#include "include/one.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    register<bit<32>>(4) words;
    register<bit<5>>(2) narrow;
    register<int<8>>(1) signed;
    apply {
        s.egress_spec = 1;
        if (h.x.a == 0) {
            bit<32> given = h.x.d;
            words.read(h.x.d, (bit<32>)h.x.b);
            words.write((bit<32>)h.x.b, given);
        } else if (h.x.a == 1) {
            bit<5> five;
            narrow.write(1, h.x.b[4:0]);
            narrow.read(five, 1);
            h.x.c = (bit<16>)five;
        } else {
            int<8> one = (int<8>)h.x.b;
            signed.write(0, one);
            int<8> back;
            signed.read(back, 0);
            h.x.a = (bit<8>)back;
        }
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
