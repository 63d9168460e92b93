/* SPDX-License-Identifier: Apache-2.0 */
#include "include/data.p4"

struct headers_t {
    data_t x;
    data_t y;
    data_t z;
}
struct meta_t {
    bit<16> sum;
    bit<8>  copy;
}

parser Parse(packet_in p, out headers_t h, inout meta_t m, inout standard_metadata_t s) {
    state start {
        p.extract(h.x);
        m.copy = h.x.a;
        m.sum = h.x.c + 5;
        h.y.setValid();
        h.y.a = 0x5a;
        h.z = h.x;
        h.z.b = m.copy;
        transition select(m.sum) {
            5: empty;
            default: accept;
        }
    }
    state empty {
        h.y.setInvalid();
        transition accept;
    }
}
#include "include/rest.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        h.x.d = (bit<32>)m.sum;
    }
}

V1Switch(Parse(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
