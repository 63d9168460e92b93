/* SPDX-License-Identifier: Apache-2.0
 *
 * One header, x, always extracted. Needs meta_t; brings everything else but ingress.
 */
#ifndef TEST_ONE_P4
#define TEST_ONE_P4

#include "data.p4"

struct headers_t {
    data_t x;
}

parser ParseOne(packet_in p, out headers_t h, inout meta_t m, inout standard_metadata_t s) {
    state start {
        p.extract(h.x);
        transition accept;
    }
}

#include "rest.p4"

#endif
