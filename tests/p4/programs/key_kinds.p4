/* SPDX-License-Identifier: Apache-2.0 */
#include "include/data.p4"

header key_t {
    int<8>  s;
    bit<4>  n;
    bit<4>  o;
}
struct headers_t {
    key_t x;
}
struct meta_t {
    bit<8> sum;
}

parser Parse(packet_in p, out headers_t h, inout meta_t m, inout standard_metadata_t s) {
    state start {
        p.extract(h.x);
        transition accept;
    }
}
#include "include/rest.p4"

/* Keys that are signed, computed, metadata; parameters of many widths; an action shared by two tables. */
control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    action go(bit<9> port, bit<4> n, int<8> t) {
        s.egress_spec = port;
        h.x.n = n;
        h.x.s = t + 1;
    }
    table one {
        key = {
            h.x.s: exact;
            h.x.n + h.x.o: exact @name("sum");
        }
        actions = { go; NoAction; }
        default_action = NoAction;
    }
    table two {
        key = { m.sum: ternary; }
        actions = { go; NoAction; }
        default_action = NoAction;
    }
    apply {
        s.egress_spec = 9;
        m.sum = (bit<8>)h.x.n + (bit<8>)h.x.o;
        one.apply();
        two.apply();
    }
}

V1Switch(Parse(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
