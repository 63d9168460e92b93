/* SPDX-License-Identifier: Apache-2.0
 *
 * The profile's word list as macros: WORDS(M) expands M(i) for every word of a full frame from the most significant
 * one on, WORDS_FROM_LOW(M) from the least significant one on, which is the way a carry goes.
 */
#ifndef P4REDUCE_WORDS_P4
#define P4REDUCE_WORDS_P4

#include "config.p4"

#if P4REDUCE_WORDS == 5
#define WORDS(M) M(0) M(1) M(2) M(3) M(4)
#define WORDS_FROM_LOW(M) M(4) M(3) M(2) M(1) M(0)
#elif P4REDUCE_WORDS == 34
#define WORDS(M) \
    M(0)  M(1)  M(2)  M(3)  M(4)  M(5)  M(6)  M(7)  M(8)  M(9)  M(10) M(11) \
    M(12) M(13) M(14) M(15) M(16) M(17) M(18) M(19) M(20) M(21) M(22) M(23) \
    M(24) M(25) M(26) M(27) M(28) M(29) M(30) M(31) M(32) M(33)
#define WORDS_FROM_LOW(M) \
    M(33) M(32) M(31) M(30) M(29) M(28) M(27) M(26) M(25) M(24) M(23) M(22) \
    M(21) M(20) M(19) M(18) M(17) M(16) M(15) M(14) M(13) M(12) M(11) M(10) \
    M(9)  M(8)  M(7)  M(6)  M(5)  M(4)  M(3)  M(2)  M(1)  M(0)
#else
#error "no word list for this P4REDUCE_WORDS: add one to include/words.p4"
#endif

#endif
