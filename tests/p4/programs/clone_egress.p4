/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t {
    @field_list(1) bit<8> kept;
    bit<8> lost;
}
#include "include/one.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        if (h.x.a == 3) { s.mcast_grp = 1; }
        h.x.d = 0x12345678;
    }
}

control Out(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        if (s.instance_type == 2) {
            h.x.a = 0xe2;
            h.x.b = m.kept + m.lost;
            h.x.c = (bit<16>)s.egress_port;
        } else {
            m.kept = h.x.b;
            m.lost = 0x40;
            if (h.x.a == 1) {
                clone_preserving_field_list(CloneType.E2E, 6, 1);
            } else if (h.x.a == 2) {
                clone(CloneType.E2E, 6);
                mark_to_drop(s);
            } else if (h.x.a == 3) {
                clone_preserving_field_list(CloneType.E2E, 6, 1);
            }
            h.x.b = h.x.b + 1;
        }
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), Out(), NoUpdate(), EmitAll()) main;
