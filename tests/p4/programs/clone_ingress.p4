/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t {
    @field_list(1) bit<8>  kept;
    @field_list(2) bit<16> other;
    bit<8> lost;
}
#include "include/one.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        m.kept = h.x.b;
        m.other = h.x.c;
        m.lost = 0x77;
        if (h.x.a == 1) {
            clone_preserving_field_list(CloneType.I2E, 5, 1);
        } else if (h.x.a == 2) {
            clone_preserving_field_list(CloneType.I2E, 5, 2);
        } else if (h.x.a == 3) {
            clone(CloneType.I2E, 9);
        } else if (h.x.a == 4) {
            clone(CloneType.I2E, 5);
            mark_to_drop(s);
        }
        /* The clone is made of the packet as it came; metadata is read at the end of ingress. */
        h.x.d = 0xffffffff;
        m.kept = m.kept + 1;
    }
}

control Out(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        if (s.instance_type == 1) {
            h.x.a = 0xc1;
            h.x.b = m.kept + m.lost;
            h.x.c = m.other + s.egress_rid + (bit<16>)s.ingress_port + (bit<16>)s.packet_length;
        }
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), Out(), NoUpdate(), EmitAll()) main;
