/* SPDX-License-Identifier: Apache-2.0 */
#ifndef P4REDUCE_HEADERS_P4
#define P4REDUCE_HEADERS_P4

#include <core.p4>
#include <v1model.p4>
#include "config.p4"
#include "words.p4"

typedef bit<48> mac_t;
typedef bit<32> ipv4_t;
typedef bit<9>  port_t;
typedef bit<2048> word_t;
typedef bit<64> worker_bitmap_t;
/* What makes a slot's use unique: epoch, round, op, words and tag, as they stand in the header. */
typedef bit<144> identity_t;
/* Identity in the high bits, bitmap of the workers seen in the low 64. One register cell per (slot, version). */
typedef bit<208> slot_state_t;

const bit<16> ETHERTYPE_IPV4 = 0x0800;
const bit<16> ETHERTYPE_ARP = 0x0806;
const bit<8>  PROTOCOL_UDP = 17;

header ethernet_t {
    mac_t   dst;
    mac_t   src;
    bit<16> ethertype;
}

header arp_t {
    bit<16> hardware;
    bit<16> protocol;
    bit<8>  hardware_bytes;
    bit<8>  protocol_bytes;
    bit<16> operation;
    mac_t   sender_mac;
    ipv4_t  sender_ip;
    mac_t   target_mac;
    ipv4_t  target_ip;
}

header ipv4_header_t {
    bit<4>  version;
    bit<4>  ihl;
    bit<8>  tos;
    bit<16> total_length;
    bit<16> identification;
    bit<3>  flags;
    bit<13> fragment_offset;
    bit<8>  ttl;
    bit<8>  protocol;
    bit<16> checksum;
    ipv4_t  src;
    ipv4_t  dst;
}

header udp_t {
    bit<16> src_port;
    bit<16> dst_port;
    bit<16> length_;
    bit<16> checksum;
}

/* docs/design.md, section 3: the frame. */
header reduce_t {
    bit<8>  version;
    bit<8>  kind;
    bit<8>  op;
    bit<8>  words;
    bit<32> epoch;
    bit<16> slot;
    bit<8>  rank;
    bit<8>  count_or_reason;
    bit<32> round;
    bit<64> check;
    bit<64> tag;
}

/* The payload is one number: one word in a short frame, all words of the profile in a full one. */
header short_payload_t {
    word_t w0;
}

#define WORD_FIELD(i) word_t w##i;
header full_payload_t {
    WORDS(WORD_FIELD)
}

struct headers_t {
    ethernet_t   ethernet;
    arp_t        arp;
    ipv4_header_t ipv4;
    udp_t        udp;
    reduce_t     reduce;
    short_payload_t short;
    full_payload_t full;
}

struct metadata_t {
    /* From the admit table: who sent this frame and which part of the switch is his job's. */
    worker_bitmap_t worker;
    worker_bitmap_t full;
    bit<16>         pool_base;
    bit<16>         pool_size;
    bit<16>         group;
    bit<8>          workers;
    bit<16>         stats;
}

#endif
