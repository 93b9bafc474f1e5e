// SPDX-License-Identifier: Apache-2.0
// Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
// 1, 2, 3" (SC 2011): ten rounds of two 32 x 32 -> 64 bit multiplications map (counter, key) to four random words.
#pragma once

#include "common/scalar_lanes.h"

namespace fd {

constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u;
constexpr uint32_t kPhiloxMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxKeyStep0 = 0x9E3779B9u;  // golden ratio
constexpr uint32_t kPhiloxKeyStep1 = 0xBB67AE85u;  // sqrt(3) - 1
constexpr int kPhiloxRounds = 10;

// Replaces the counter words c[0..3] with random words; the key is the same in every lane.
template <class L>
FD_RULE void philox4x32(typename L::U c[4], uint32_t key0, uint32_t key1) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    typename L::U high0, low0, high1, low1;
    L::multiply_wide(c[0], kPhiloxMultiplier0, &high0, &low0);
    L::multiply_wide(c[2], kPhiloxMultiplier1, &high1, &low1);
    c[0] = L::bit_xor(L::bit_xor(high1, c[1]), L::set(key0));
    c[2] = L::bit_xor(L::bit_xor(high0, c[3]), L::set(key1));
    c[1] = low1;
    c[3] = low0;
    key0 += kPhiloxKeyStep0;
    key1 += kPhiloxKeyStep1;
  }
}

// Writes the random words of token ids 4 * group .. 4 * group + 3 at position t of a request with this seed.
template <class L>
FD_RULE void noise_words(typename L::U group, uint64_t seed, uint64_t t, typename L::U words[4]) {
  words[0] = group;
  words[1] = L::set(0u);
  words[2] = L::set(static_cast<uint32_t>(t));
  words[3] = L::set(static_cast<uint32_t>(t >> 32));
  philox4x32<L>(words, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

}  // namespace fd
