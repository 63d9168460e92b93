/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t { }
#include "include/one.p4"

/* One expression of eighty nested operations and as many masks, in an assignment and in a condition. */
#define STEP(e) (((e) + 1) ^ 32w0x80000000)
#define STEP5(e) STEP(STEP(STEP(STEP(STEP(e)))))
#define STEP20(e) STEP5(STEP5(STEP5(STEP5(e))))
#define STEP40(e) STEP20(STEP20(e))

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    apply {
        s.egress_spec = 1;
        if (h.x.a == 0) {
            h.x.b = 1;
        } else if (STEP40(h.x.d) == 40) {
            h.x.b = 2;
        } else {
            h.x.b = 3;
        }
        h.x.d = STEP40(h.x.d);
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
