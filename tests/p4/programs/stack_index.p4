/* SPDX-License-Identifier: Apache-2.0 */
#include "include/data.p4"

header item_t {
    bit<8> kind;
    bit<8> value;
}
struct headers_t {
    data_t    x;
    item_t[4] items;
    item_t[4] copy;
}
struct meta_t {
    bit<32> index;
    bit<8>  sum;
}

parser Parse(packet_in p, out headers_t h, inout meta_t m, inout standard_metadata_t s) {
    state start {
        p.extract(h.x);
        transition item;
    }
    state item {
        p.extract(h.items.next);
        m.index = h.items.lastIndex;
        m.sum = m.sum + h.items.last.value;
        transition select(h.items.last.kind) {
            1: item;
            2: done;
            default: accept;
        }
    }
    state done {
        h.x.b = 0xdd;
        h.copy = h.items;
        transition accept;
    }
}
#include "include/rest.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        h.x.c = (bit<16>)m.index;
        h.x.d = (bit<32>)m.sum;
        if (h.x.a == 1) {
            h.copy = h.items;
            h.copy[0].value = 0x99;
        }
    }
}

V1Switch(Parse(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
