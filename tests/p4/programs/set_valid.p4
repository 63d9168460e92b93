/* SPDX-License-Identifier: Apache-2.0 */
#include "include/data.p4"

struct headers_t {
    data_t x;
    data_t y;
    data_t z;
}
struct meta_t { }

parser Parse(packet_in p, out headers_t h, inout meta_t m, inout standard_metadata_t s) {
    state start {
        p.extract(h.x);
        transition select(h.x.a) {
            0 &&& 1: accept;
            default: second;
        }
    }
    state second {
        p.extract(h.y);
        transition accept;
    }
}
#include "include/rest.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        if (h.x.b == 1) {
            h.y.setValid();
        } else if (h.x.b == 2) {
            h.y.setInvalid();
            h.y.setValid();
        } else if (h.x.b == 3) {
            h.y.setInvalid();
        } else if (h.x.b == 4) {
            h.z = h.y;
        } else if (h.x.b == 5) {
            h.y = h.x;
            h.x.setInvalid();
            h.y.c = 0x5555;
        }
    }
}

V1Switch(Parse(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
