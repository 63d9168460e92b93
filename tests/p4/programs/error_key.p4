/* SPDX-License-Identifier: Apache-2.0 */
#include "include/data.p4"

struct headers_t {
    data_t x;
    data_t y;
}
struct meta_t {
    error problem;
}

parser Parse(packet_in p, out headers_t h, inout meta_t m, inout standard_metadata_t s) {
    state start {
        p.extract(h.x);
        p.extract(h.y);
        transition accept;
    }
}
#include "include/rest.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    action forward(bit<9> port) { s.egress_spec = port; }
    table by_error {
        key = { m.problem: exact; }
        actions = { forward; }
        default_action = forward(1);
    }
    apply {
        m.problem = s.parser_error;
        by_error.apply();
    }
}

V1Switch(Parse(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
