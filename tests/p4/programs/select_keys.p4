/* SPDX-License-Identifier: Apache-2.0 */
#include "include/data.p4"

struct headers_t {
    data_t x;
    data_t y;
}
struct meta_t {
    bit<8> path;
}

parser Parse(packet_in p, out headers_t h, inout meta_t m, inout standard_metadata_t s) {
    state start {
        p.extract(h.x);
        transition select(h.x.a, h.x.c[11:0], s.ingress_port) {
            (1, 0x123, 3): first;
            (2 &&& 0xf2, _, _): second;
            (5..7, 0x0f0 &&& 0x0f0, _): third;
            (_, _, 4): accept;
            default: fourth;
        }
    }
    state first {
        m.path = 1;
        transition tail;
    }
    state second {
        m.path = 2;
        transition accept;
    }
    state third {
        m.path = 3;
        transition tail;
    }
    state fourth {
        m.path = 4;
        transition reject;
    }
    state tail {
        p.extract(h.y);
        transition accept;
    }
}
#include "include/rest.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        h.x.b = m.path;
        if (h.y.isValid()) {
            h.y.b = 0xff;
        }
    }
}

V1Switch(Parse(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
