/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t { }
#include "include/one.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply { s.egress_spec = 1; }
}

control Update(inout headers_t h, inout meta_t m) {
    apply {
        update_checksum(true, { h.x.a, h.x.d }, h.x.c, HashAlgorithm.csum16);
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), NoEgress(), Update(), EmitAll()) main;
