/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t { }
#include "include/one.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        h.x.d = (bit<32>)s.ingress_global_timestamp;
    }
}

control Out(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        h.x.c = (bit<16>)s.egress_global_timestamp;
        h.x.b = (bit<8>)s.enq_qdepth + (bit<8>)s.deq_qdepth + (bit<8>)s.deq_timedelta;
        h.x.a = (bit<8>)s.enq_timestamp;
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), Out(), NoUpdate(), EmitAll()) main;
