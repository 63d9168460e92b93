/* SPDX-License-Identifier: Apache-2.0 */
#include "include/data.p4"

struct headers_t {
    data_t x;
    data_t y;
}
struct meta_t { }

parser Parse(packet_in p, out headers_t h, inout meta_t m, inout standard_metadata_t s) {
    state start {
        p.extract(h.x);
        transition select(h.x.a) {
            1: second;
            default: accept;
        }
    }
    state second {
        p.extract(h.y);
        transition accept;
    }
}
#include "include/rest.p4"

control Verify(inout headers_t h, inout meta_t m) {
    apply {
        verify_checksum_with_payload(h.x.a == 7, { h.x.d, h.y.d }, h.x.c, HashAlgorithm.csum16);
    }
}

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        if (s.checksum_error == 1) { h.x.b = 0xce; }
        if (h.x.a == 3) { truncate(11); }
    }
}

control Update(inout headers_t h, inout meta_t m) {
    apply {
        update_checksum_with_payload(h.x.a < 4, { h.x.d, h.y.d, 8w1, h.x.b }, h.x.c, HashAlgorithm.csum16);
        update_checksum_with_payload(h.x.a == 4, { h.x.c }, h.x.d, HashAlgorithm.crc32);
    }
}

V1Switch(Parse(), Verify(), Run(), NoEgress(), Update(), EmitAll()) main;
