/* SPDX-License-Identifier: Apache-2.0
 *
 * The header that most test programs use.
 */
#ifndef TEST_DATA_P4
#define TEST_DATA_P4

#include <core.p4>
#include <v1model.p4>

header data_t {
    bit<8>  a;
    bit<8>  b;
    bit<16> c;
    bit<32> d;
}

#endif
