/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t { }
#include "include/one.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    action stop(bit<8> b) {
        h.x.b = b;
        exit;
    }
    action go() { }
    table t {
        key = { h.x.a: exact; }
        actions = { stop; go; }
        const default_action = go;
    }
    apply {
        s.egress_spec = 1;
        t.apply();
        h.x.c = 0x1111;
        if (h.x.a == 9) { exit; }
        h.x.c = 0x2222;
    }
}

control Out(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    action leave() {
        exit;
    }
    apply {
        h.x.d[7:0] = 0xe1;
        if (h.x.b == 0x44) { leave(); }
        h.x.d[15:8] = 0xe2;
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), Out(), NoUpdate(), EmitAll()) main;
