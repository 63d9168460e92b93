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
        p.extract(h.y);
        transition accept;
    }
}
#include "include/rest.p4"

/* Copies that differ in which headers they have, and that must not see each other's changes. */
control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.mcast_grp = 1;
        h.y.c = 0x0101;
    }
}

control Out(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        if (s.egress_port == 2) {
            h.x.setInvalid();
        } else if (s.egress_port == 3) {
            h.z = h.x;
            h.z.d = 0x33;
        } else if (s.egress_port == 4) {
            h.x.d = h.x.d + 1;
        }
    }
}

V1Switch(Parse(), NoVerify(), Run(), Out(), NoUpdate(), EmitAll()) main;
