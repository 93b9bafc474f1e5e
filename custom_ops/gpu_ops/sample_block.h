// SPDX-License-Identifier: Apache-2.0
// What the threads of a block find together: the first of their keys, sums, and the bin where a sum reaches a limit.
#pragma once

#include "gpu_ops/sample_slice.h"
#include "gpu_ops/warp.h"

namespace fd::gpu {

constexpr int kBinsPerThread = kBins / kSliceThreads;
constexpr int kSliceWarps = kSliceThreads / static_cast<int>(kWarpSize);
constexpr uint64_t kNoKey = ~uint64_t{0};  // after the key of every id

struct BlockMemory {
  uint64_t of_warp[kSliceWarps];
  uint64_t before;  // the bin that was found
  int32_t bin;
};

// Joins the values of all threads by a commutative operation.
template <class Join>
FD_DEVICE uint64_t join_block(BlockMemory& memory, uint64_t value, const Join& join) {
  for (unsigned mask = kWarpSize / 2; mask > 0; mask /= 2) value = join(value, shuffle_xor64(value, mask));
  sync_block();
  if (lane_index() == 0) memory.of_warp[warp_index()] = value;
  sync_block();
  value = memory.of_warp[0];
  for (int warp = 1; warp < kSliceWarps; ++warp) value = join(value, memory.of_warp[warp]);
  return value;
}

FD_DEVICE uint64_t block_first(BlockMemory& memory, uint64_t key) {
  return join_block(memory, key, [](uint64_t a, uint64_t b) { return a < b ? a : b; });
}

FD_DEVICE uint64_t block_sum(BlockMemory& memory, uint64_t value) {
  return join_block(memory, value, [](uint64_t a, uint64_t b) { return a + b; });
}

// Returns the sum of the values of the threads before this one.
FD_DEVICE uint64_t sum_before(BlockMemory& memory, uint64_t value) {
  uint64_t sum = sum_to_lane(value);
  sync_block();
  if (lane_index() == kWarpSize - 1) memory.of_warp[warp_index()] = sum;
  sync_block();
  for (unsigned warp = 0; warp < warp_index(); ++warp) sum += memory.of_warp[warp];
  return sum - value;
}

// Returns the first bin that is not empty and at which holds(before + sum of the bins up to it), which remains true
// from there on; -1 if there is none. Adds the sum of the bins before it to `before`. Begins and ends with barriers.
template <class Bin, class Holds>
FD_DEVICE int find_bin(BlockMemory& memory, const Bin* bins, const Holds& holds, uint64_t& before) {
  const int first = static_cast<int>(thread_index()) * kBinsPerThread;
  sync_block();
  uint64_t of_thread = 0;
  for (int i = 0; i < kBinsPerThread; ++i) of_thread += static_cast<uint64_t>(bins[first + i]);
  const uint64_t base = sum_before(memory, of_thread);
  if (thread_index() == 0) memory.bin = -1;
  sync_block();
  const auto is_reached = [&](uint64_t sum) { return sum > 0 && holds(before + sum); };
  if (!is_reached(base) && is_reached(base + of_thread)) {
    uint64_t sum = base;
    for (int i = 0; i < kBinsPerThread; ++i) {
      const uint64_t next = sum + static_cast<uint64_t>(bins[first + i]);
      if (is_reached(next)) {
        memory.bin = first + i;
        memory.before = before + sum;
        break;
      }
      sum = next;
    }
  }
  sync_block();
  const int bin = memory.bin;
  if (bin >= 0) before = memory.before;
  sync_block();
  return bin;
}

}  // namespace fd::gpu
