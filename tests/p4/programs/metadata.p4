/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t {
    bit<8>  count;
    bit<16> never;
    bool    flag;
}
#include "include/one.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        h.x.b = m.count;
        m.count = m.count + 1;
        if (m.flag) { h.x.b = 0xff; }
        m.flag = h.x.a == 1;
        h.x.c = (bit<16>)s.ingress_port;
        h.x.d = s.packet_length;
        h.x.d[31:24] = (bit<8>)s.instance_type;
        h.x.d[23:16] = (bit<8>)s.egress_port;
        s.egress_spec = s.ingress_port + 1;
    }
}

control Out(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        h.x.a = (bit<8>)s.egress_port;
        h.x.b = h.x.b + m.count;
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), Out(), NoUpdate(), EmitAll()) main;
