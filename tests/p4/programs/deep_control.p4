/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t {
    bit<8> steps;
}
#include "include/one.p4"

/* Nested deeper than generated code may nest. */
#define IF1(n) if (h.x.a > n) { m.steps = m.steps + 1; tally.count(n);
#define IF10(n) IF1(n) IF1(n + 1) IF1(n + 2) IF1(n + 3) IF1(n + 4) IF1(n + 5) IF1(n + 6) IF1(n + 7) IF1(n + 8) IF1(n + 9)
#define END10 } } } } } } } } } }

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    counter(128, CounterType.packets_and_bytes) tally;
    action set_c(bit<16> c) { h.x.c = c; }
    action leave() { exit; }
    table t {
        key = { h.x.b: exact; }
        actions = { set_c; leave; NoAction; }
        default_action = NoAction;
    }
    apply {
        s.egress_spec = 1;
        IF10(0) IF10(10) IF10(20) IF10(30) IF10(40) IF10(50) IF10(60)
        switch (t.apply().action_run) {
            set_c: { h.x.d = 1; }
            default: { h.x.d = 2; }
        }
        END10 END10 END10 END10 END10 END10 END10
        h.x.b = m.steps;
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
