/* SPDX-License-Identifier: Apache-2.0 */
#include "include/data.p4"

header wide_t {
    bit<128> address;
    bit<1>   flag;
    bit<7>   rest;
}
struct headers_t {
    data_t x;
    wide_t w;
}
struct meta_t { }

parser Parse(packet_in p, out headers_t h, inout meta_t m, inout standard_metadata_t s) {
    state start {
        p.extract(h.x);
        transition select(h.x.a) {
            1: wide;
            default: accept;
        }
    }
    state wide {
        p.extract(h.w);
        transition accept;
    }
}
#include "include/rest.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    action forward(bit<9> port) { s.egress_spec = port; }
    table t {
        key = {
            s.ingress_port: exact;
            h.w.isValid(): exact;
            h.w.address: exact;
            h.w.flag: exact;
        }
        actions = { forward; }
    }
    apply {
        s.egress_spec = 9;
        t.apply();
    }
}

V1Switch(Parse(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
