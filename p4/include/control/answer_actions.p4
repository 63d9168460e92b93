/* SPDX-License-Identifier: Apache-2.0
 *
 * Actions that turn the frame in hand into an answer, for the controls that include this inside their bodies. They
 * work on the control's own hdr, meta, standard_metadata and reduce_counter: an action that took headers as parameters
 * would copy them in and out.
 */
    action count_event(bit<32> event) {
        reduce_counter.count(((bit<32>)meta.stats << 3) | event);
    }

    action from_switch(bit<8> kind) {
        hdr.reduce.kind = kind;
        hdr.udp.src_port = P4REDUCE_UDP_PORT;
        hdr.udp.checksum = 0;
    }

    /* The answer's source is the address that the contribution was sent to, so the program needs none of its own. */
    action to_sender() {
        mac_t mac = hdr.ethernet.src;
        ipv4_t ip = hdr.ipv4.src;
        hdr.ethernet.src = hdr.ethernet.dst;
        hdr.ethernet.dst = mac;
        hdr.ipv4.src = hdr.ipv4.dst;
        hdr.ipv4.dst = ip;
        hdr.udp.dst_port = hdr.udp.src_port;
        standard_metadata.egress_spec = standard_metadata.ingress_port;
    }
