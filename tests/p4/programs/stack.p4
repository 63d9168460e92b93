/* SPDX-License-Identifier: Apache-2.0 */
#include "include/data.p4"

header label_t {
    bit<7>  value;
    bit<1>  last;
}
struct headers_t {
    data_t     x;
    label_t[3] labels;
}
struct meta_t { }

parser Parse(packet_in p, out headers_t h, inout meta_t m, inout standard_metadata_t s) {
    state start {
        p.extract(h.x);
        transition labels;
    }
    state labels {
        p.extract(h.labels.next);
        transition select(h.labels.last.last) {
            0: labels;
            default: accept;
        }
    }
}
#include "include/rest.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        if (h.x.a == 1) {
            h.labels.push_front(1);
            h.labels[0].setValid();
            h.labels[0].value = 0x55;
        } else if (h.x.a == 2) {
            h.labels.pop_front(1);
        } else if (h.x.a == 3) {
            h.labels.push_front(2);
        } else if (h.x.a == 4) {
            h.labels.pop_front(3);
        } else if (h.x.a == 5) {
            h.labels[2] = h.labels[0];
            h.labels[0].setInvalid();
        } else if (h.x.a == 6) {
            /* Made by hand, beyond what was extracted. */
            h.labels[2].setValid();
            h.labels[2].value = 0x7f;
            h.labels.push_front(1);
        }
        if (s.parser_error == error.StackOutOfBounds) {
            h.x.b = 0xee;
        }
    }
}

V1Switch(Parse(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
