/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t { }
#include "include/one.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        log_msg("a is {}, d is {}", { h.x.a, h.x.d });
        assert(h.x.a != 9);
        assume(h.x.b < 0x80);
        h.x.c = 1;
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
