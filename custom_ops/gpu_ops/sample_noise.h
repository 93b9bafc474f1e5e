// SPDX-License-Identifier: Apache-2.0
// The best id of a slice with noise.
#pragma once

#include "gpu_ops/sample_block.h"

namespace fd::gpu {

// The noise words of a group.
struct GroupWords {
  uint32_t of_id[kGroupIds];
};

FD_DEVICE GroupWords group_words(int32_t first_id, uint64_t seed, uint64_t position) {
  GroupWords words;
  noise_words<ScalarLanes>(static_cast<uint32_t>(first_id) / kGroupIds, seed, position, words.of_id);
  return words;
}

// Returns the key of an id by its scaled logit with noise; the best id has the first key.
FD_DEVICE uint64_t noisy_key(float scaled, uint32_t word, int32_t id) {
  return order_key(ScalarLanes::add(scaled, gumbel_from_word<ScalarLanes>(word)), static_cast<uint32_t>(id));
}

// Calls f(scaled, word, id) for the finite logits of a thread, which it has written to shared memory, if their group
// may exceed `least` with noise.
template <class Function>
FD_DEVICE void for_each_noise(const SliceMemory& memory, int32_t first, const RowParams& row, float least,
                              const Function& f) {
  for (int g = 0; g < kGroups; ++g) {
    float x[kGroupIds];
    read_group(memory, g, x);
    const float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3], largest = a > b ? a : b;
    if (largest == kMinusInfinity || !(ScalarLanes::add(largest, kLargestGumbel) >= least)) continue;
    const int32_t id = first + group_offset(g);
    const GroupWords words = group_words(id, row.seed(), row.position());
    FD_UNROLL
    for (int j = 0; j < kGroupIds; ++j)
      if (x[j] > kMinusInfinity) f(x[j], words.of_id[j], id + j);
  }
}

// Returns the key of the best id of a slice, kNoKey if no logit is finite. `least` is a value that the row's best id
// reaches. Noise is bounded from above by its word; it is computed for the best bound of each thread, and then where
// a bound reaches the best of these.
FD_DEVICE uint64_t best_of_slice(SliceMemory& slice, BlockMemory& memory, const SliceValues& v, int32_t first,
                                 const RowParams& row, float least) {
  write_groups(slice, v);
  float upper = kMinusInfinity, second = kMinusInfinity, scaled = 0.0f;
  uint32_t best_word = 0;
  int32_t best_id = -1;
  for_each_noise(slice, first, row, least, [&](float x, uint32_t word, int32_t id) {
    const float bound = ScalarLanes::add(x, noise_bound<ScalarLanes>(word));
    if (bound > upper) {
      second = upper;
      upper = bound;
      scaled = x;
      best_word = word;
      best_id = id;
    } else if (bound > second) {
      second = bound;
    }
  });
  const uint64_t own = best_id < 0 ? kNoKey : noisy_key(scaled, best_word, best_id);
  uint64_t best = block_first(memory, own);
  if (best == kNoKey) return best;
  const float reached = key_logit(best);
  best = own;
  if (second >= reached) {
    for_each_noise(slice, first, row, reached, [&](float x, uint32_t word, int32_t id) {
      if (ScalarLanes::add(x, noise_bound<ScalarLanes>(word)) < reached) return;
      const uint64_t key = noisy_key(x, word, id);
      if (key < best) best = key;
    });
  }
  return block_first(memory, best);
}

}  // namespace fd::gpu
