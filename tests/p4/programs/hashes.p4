/* SPDX-License-Identifier: Apache-2.0 */
#include "include/data.p4"

header digest_t {
    bit<32> crc32_;
    bit<16> crc16_;
    bit<16> csum_;
    bit<16> xor_;
    bit<64> identity_;
    bit<16> ranged;
    bit<16> custom16;
    bit<32> custom32;
    bit<16> odd;
}
struct headers_t {
    data_t   x;
    digest_t y;
    data_t   missing;
}
struct meta_t { }

parser Parse(packet_in p, out headers_t h, inout meta_t m, inout standard_metadata_t s) {
    state start {
        p.extract(h.x);
        transition accept;
    }
}
#include "include/rest.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        h.y.setValid();
        hash(h.y.crc32_, HashAlgorithm.crc32, 32w0, { h.x.a, h.x.b, h.x.c }, 64w0x100000000);
        hash(h.y.crc16_, HashAlgorithm.crc16, 16w0, { h.x.a, h.x.b, h.x.c }, 32w0x10000);
        hash(h.y.csum_, HashAlgorithm.csum16, 16w0, { h.x.a, h.x.b, h.x.c }, 32w0x10000);
        hash(h.y.xor_, HashAlgorithm.xor16, 16w0, { h.x.a, h.x.b, h.x.c }, 32w0x10000);
        hash(h.y.identity_, HashAlgorithm.identity, 64w0, { h.x.a, h.x.b, h.x.c }, 64w0xffffffffffffffff);
        hash(h.y.ranged, HashAlgorithm.crc16, 16w1000, { h.x.a, 8w7, h.x.d }, 16w10);
        hash(h.y.custom16, HashAlgorithm.crc16_custom, 16w0, { h.x.a }, 32w0x10000);
        hash(h.y.custom32, HashAlgorithm.crc32_custom, 32w0, { h.x.a }, 64w0x100000000);
        hash(h.y.odd, HashAlgorithm.crc16, 16w5, { h.x.a[4:0], h.x.d[6:0] }, 16w0);
    }
}

V1Switch(Parse(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
