/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t {
    bit<8> note;
}
#include "include/one.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 7;
        m.note = h.x.b;
        s.mcast_grp = (bit<16>)h.x.a;
        if (h.x.b == 0xdd) { mark_to_drop(s); }
        if (h.x.b == 0xde) {
            mark_to_drop(s);
            s.mcast_grp = 1;
        }
    }
}

control Out(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        h.x.a = (bit<8>)s.egress_port;
        h.x.c = s.egress_rid;
        h.x.b = h.x.b + m.note;
        m.note = 0;
        h.x.d[15:0] = s.mcast_grp;
        h.x.d[31:24] = (bit<8>)s.instance_type;
        if (s.egress_rid == 66) { mark_to_drop(s); }
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), Out(), NoUpdate(), EmitAll()) main;
