/* SPDX-License-Identifier: Apache-2.0
 *
 * The parts of a v1model program that do nothing. Needs headers_t and meta_t.
 */
#ifndef TEST_REST_P4
#define TEST_REST_P4

control NoVerify(inout headers_t h, inout meta_t m) { apply { } }
control NoEgress(inout headers_t h, inout meta_t m, inout standard_metadata_t s) { apply { } }
control NoUpdate(inout headers_t h, inout meta_t m) { apply { } }
control EmitAll(packet_out p, in headers_t h) { apply { p.emit(h); } }

#endif
