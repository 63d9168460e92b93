/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t {
    @field_list(1) bit<8> round;
    bit<8> lost;
}
#include "include/one.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        h.x.b = h.x.b + m.round + m.lost;
        h.x.c = (bit<16>)s.ingress_port;
        h.x.d[7:0] = (bit<8>)s.instance_type;
        m.lost = 0x40;
    }
}

control Out(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        if (h.x.a > 0) {
            h.x.a = h.x.a - 1;
            m.round = m.round + 1;
            recirculate_preserving_field_list(1);
            truncate(9);
        }
        h.x.d[15:8] = (bit<8>)s.instance_type;
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), Out(), NoUpdate(), EmitAll()) main;
