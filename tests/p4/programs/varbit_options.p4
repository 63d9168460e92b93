/* SPDX-License-Identifier: Apache-2.0 */
#include "include/data.p4"

header options_t {
    bit<8>      size;
    varbit<64>  bytes;
    bit<16>     after;
}
struct headers_t {
    data_t    x;
    options_t o;
    options_t copy;
}
struct meta_t { }

parser Parse(packet_in p, out headers_t h, inout meta_t m, inout standard_metadata_t s) {
    state start {
        p.extract(h.x);
        p.extract(h.o, (bit<32>)h.x.b);
        transition accept;
    }
}
#include "include/rest.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        if (s.parser_error == error.HeaderTooShort) { h.x.c = 1; }
        if (s.parser_error == error.ParserInvalidArgument) { h.x.c = 2; }
        if (s.parser_error == error.PacketTooShort) { h.x.c = 3; }
        if (h.x.a == 1) {
            h.copy = h.o;
            h.copy.size = 0xcc;
            h.o.after = 0xaaaa;
        } else if (h.x.a == 2) {
            h.copy.setValid();
            h.copy.bytes = h.o.bytes;
        }
    }
}

control Update(inout headers_t h, inout meta_t m) {
    apply {
        update_checksum(h.x.a == 3, { h.x.d, h.o.bytes, h.o.size }, h.x.c, HashAlgorithm.csum16);
    }
}

V1Switch(Parse(), NoVerify(), Run(), NoEgress(), Update(), EmitAll()) main;
