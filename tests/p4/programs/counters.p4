/* SPDX-License-Identifier: Apache-2.0 */
struct meta_t { }
#include "include/one.p4"

control Run(inout headers_t h, inout meta_t m, inout standard_metadata_t s) {
    counter(4, CounterType.packets_and_bytes) events;
    direct_counter(CounterType.packets_and_bytes) hits;
    action forward(bit<9> port) {
        s.egress_spec = port;
        hits.count();
    }
    table t {
        key = { h.x.b: exact; }
        actions = { forward; NoAction; }
        default_action = NoAction;
        counters = hits;
    }
    apply {
        events.count((bit<32>)h.x.a);
        t.apply();
    }
}

V1Switch(ParseOne(), NoVerify(), Run(), NoEgress(), NoUpdate(), EmitAll()) main;
