/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t { }
#include "include/one.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    action one() { h.x.b = 1; }
    action two(bit<8> b) { h.x.b = b; }
    action three() { }
    table t {
        key = { h.x.a: exact; }
        actions = { one; two; three; NoAction; }
        default_action = NoAction;
    }
    apply {
        s.egress_spec = 1;
        switch (t.apply().action_run) {
            one: { h.x.c = 0x1111; }
            two:
            three: { h.x.c = 0x2323; }
            default: { h.x.c = 0xdddd; }
        }
        h.x.d = h.x.d ^ 0xff;
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
