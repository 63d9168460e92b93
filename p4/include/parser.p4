/* SPDX-License-Identifier: Apache-2.0 */
#ifndef P4REDUCE_PARSER_P4
#define P4REDUCE_PARSER_P4

#include "headers.p4"

parser FrameParser(packet_in packet,
                   out headers_t hdr,
                   inout metadata_t meta,
                   inout standard_metadata_t standard_metadata) {
    state start {
        packet.extract(hdr.ethernet);
        transition select(hdr.ethernet.ethertype) {
            ETHERTYPE_IPV4: ipv4;
            ETHERTYPE_ARP: arp;
            default: accept;
        }
    }

    state arp {
        packet.extract(hdr.arp);
        transition accept;
    }

    state ipv4 {
        packet.extract(hdr.ipv4);
        /* Options and fragments are forwarded, never aggregated: version 4, five words of header, offset 0 and
         * the more-fragments flag clear. */
        transition select(hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.flags, hdr.ipv4.fragment_offset,
                          hdr.ipv4.protocol) {
            (4, 5, 0 &&& 1, 0, PROTOCOL_UDP): udp;
            default: accept;
        }
    }

    state udp {
        packet.extract(hdr.udp);
        transition select(hdr.udp.dst_port) {
            P4REDUCE_UDP_PORT: reduce;
            default: accept;
        }
    }

    state reduce {
        packet.extract(hdr.reduce);
        transition select(hdr.reduce.words) {
            1: short_frame;
            P4REDUCE_WORDS: full_frame;
            default: accept;
        }
    }

    state short_frame {
        packet.extract(hdr.short);
        transition accept;
    }

    state full_frame {
        packet.extract(hdr.full);
        transition accept;
    }
}

control FrameDeparser(packet_out packet, in headers_t hdr) {
    apply {
        packet.emit(hdr.ethernet);
        packet.emit(hdr.arp);
        packet.emit(hdr.ipv4);
        packet.emit(hdr.udp);
        packet.emit(hdr.reduce);
        packet.emit(hdr.short);
        packet.emit(hdr.full);
    }
}

#endif
