/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t { }
#include "include/one.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    action forward(bit<9> port) { s.egress_spec = port; }
    action note(bit<8> b) { h.x.b = b; }
    table first {
        key = {
            h.x.a: ternary;
            h.x.c: range;
        }
        actions = { forward; }
        const default_action = forward(9);
        const entries = {
            (0x12, 5..7): forward(1);
            (0x10 &&& 0xf0, 6..100): forward(2);
            (0x10 &&& 0xf0, _): forward(3);
        }
    }
    table second {
        key = { h.x.d: lpm; }
        actions = { note; }
        const default_action = note(0xee);
        const entries = {
            0x0a000000 &&& 0xff000000: note(8);
            0x0a0b0000 &&& 0xffff0000: note(16);
        }
    }
    table third {
        key = { h.x.c: exact; }
        actions = { note; NoAction; }
        const default_action = NoAction;
        const entries = {
            0x7777: note(0x77);
        }
    }
    apply {
        first.apply();
        second.apply();
        third.apply();
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
