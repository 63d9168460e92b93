/* SPDX-License-Identifier: Apache-2.0 */
#include "include/data.p4"

struct headers_t {
    data_t x;
    data_t y;
}
struct meta_t { }

/* Headers that are only carried, headers that never leave, and an order of emission that is not that of extraction. */
parser Parse(packet_in p, out headers_t h, inout meta_t m, inout standard_metadata_t s) {
    state start {
        p.extract(h.x);
        transition select(h.x.a) {
            1: second;
            default: accept;
        }
    }
    state second {
        p.extract(h.y);
        transition accept;
    }
}
#include "include/rest.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply { s.egress_spec = s.ingress_port; }
}

control Reverse(packet_out p, in headers_t h) {
    apply {
        p.emit(h.y);
        p.emit(h.x);
    }
}

V1Switch(Parse(), NoVerify(), Run(), NoEgress(), NoUpdate(), Reverse()) main;
