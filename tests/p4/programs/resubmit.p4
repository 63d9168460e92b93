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
        h.x.d[31:24] = (bit<8>)s.packet_length;
        m.lost = 0x40;
        if (m.round < h.x.a) {
            m.round = m.round + 1;
            resubmit_preserving_field_list(1);
        }
    }
}

control Out(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        h.x.d[15:8] = (bit<8>)s.instance_type;
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), Out(), NoUpdate(), EmitAll()) main;
