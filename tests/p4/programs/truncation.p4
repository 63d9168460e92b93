/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t { }
#include "include/one.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        if (h.x.a == 1) {
            truncate(10);
        } else if (h.x.a == 2) {
            truncate(4);
            truncate(6);
        } else if (h.x.a == 3) {
            truncate(10);
            s.mcast_grp = 1;
        }
    }
}

control Out(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        if (h.x.a == 4) { truncate((bit<32>)h.x.b); }
        if (h.x.a == 3 && s.egress_port == 2) { truncate(3); }
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), Out(), NoUpdate(), EmitAll()) main;
