// SPDX-License-Identifier: Apache-2.0
// The best ids of a slice of logits in order, as order keys (common/sampling.h).
#pragma once

#include "common/sampling.h"
#include "gpu_ops/logits_slice.h"
#include "gpu_ops/warp.h"

namespace fd::gpu {

constexpr int kSortThreads = 1024;
constexpr int kThreadChunks = kSliceIds / kSliceChunk / kSliceThreads, kThreadIds = kThreadChunks * kSliceChunk;
constexpr int kMaxSelected = 64;  // keys of a slice that are found without sorting it

// Shared memory of `select_keys`.
struct SelectedKeys {
  uint64_t best[kSliceThreads];
  uint64_t bound;
  int32_t warp_counts[kSliceThreads / kWarpSize];
  uint64_t selected[kMaxSelected * kThreadIds];
};

// Returns the order key of the id at a place; keys of places that are not of the row are distinct and come last.
FD_DEVICE uint64_t key_at(const LogitsSlice& slice, int place, float logit) {
  const int id = slice.first_id + place;
  if (slice.contains(id)) return fd::order_key(logit, static_cast<uint32_t>(id));
  return ~uint64_t{0} - static_cast<uint64_t>(kSliceIds - 1 - place);
}

FD_DEVICE int place_of(int chunk) { return (static_cast<int>(thread_index()) + chunk * kSliceThreads) * kSliceChunk; }

// Writes the num_kept best keys of a slice in order. The num_kept-th of the best keys of the threads is a bound that at
// least as many keys reach, all of them in num_kept threads.
FD_DEVICE void select_keys(SelectedKeys& shared, const LogitsSlice& slice, const float (&x)[kThreadChunks][kSliceChunk],
                           int num_kept, uint64_t* kept) {
  const unsigned thread = thread_index(), warp = warp_index();
  uint64_t best = ~uint64_t{0};
#pragma unroll
  for (int j = 0; j < kThreadChunks; ++j)
    for (int i = 0; i < kSliceChunk; ++i) {
      const uint64_t key = key_at(slice, place_of(j) + i, x[j][i]);
      best = key < best ? key : best;
    }
  shared.best[thread] = best;
  sync_block();
  int better = 0;
  for (const uint64_t other : shared.best) better += other < best ? 1 : 0;
  if (better == num_kept - 1) shared.bound = best;
  sync_block();
  const uint64_t bound = shared.bound;
  int count = 0;
#pragma unroll
  for (int j = 0; j < kThreadChunks; ++j)
    for (int i = 0; i < kSliceChunk; ++i) count += key_at(slice, place_of(j) + i, x[j][i]) <= bound ? 1 : 0;
  const int end = sum_to_lane(count);
  if (lane_index() == kWarpSize - 1) shared.warp_counts[warp] = end;
  sync_block();
  int next = end - count, num_selected = 0;
  for (unsigned w = 0; w < kSliceThreads / kWarpSize; ++w) {
    next += w < warp ? shared.warp_counts[w] : 0;
    num_selected += shared.warp_counts[w];
  }
  if (count > 0) {
#pragma unroll
    for (int j = 0; j < kThreadChunks; ++j)
      for (int i = 0; i < kSliceChunk; ++i) {
        const uint64_t key = key_at(slice, place_of(j) + i, x[j][i]);
        if (key <= bound) shared.selected[next++] = key;
      }
  }
  sync_block();
  for (int s = static_cast<int>(thread); s < num_selected; s += kSliceThreads) {
    const uint64_t key = shared.selected[s];
    int place = 0;
    for (int other = 0; other < num_selected; ++other) place += shared.selected[other] < key ? 1 : 0;
    if (place < num_kept) kept[place] = key;
  }
}

// Sorts the first keys of a slice, a power of two of them: a bitonic network, whose comparisons of a stage are
// independent of each other.
FD_DEVICE void sort_keys(uint64_t (&keys)[kSliceIds], int num_keys) {
  for (int size = 2; size <= num_keys; size *= 2) {
    for (int distance = size / 2; distance > 0; distance /= 2) {
      sync_block();
      for (int i = static_cast<int>(thread_index()); i < num_keys / 2; i += kSortThreads) {
        const int low = 2 * i - (i & (distance - 1)), high = low + distance;
        const uint64_t a = keys[low], b = keys[high];
        const bool is_ascending = (low & size) == 0;
        if ((b < a) == is_ascending) {
          keys[low] = b;
          keys[high] = a;
        }
      }
    }
  }
  sync_block();
}

// Returns how many keys of a slice must be sorted: those at places after the last id of the row are in order.
FD_DEVICE int num_unsorted_keys(const LogitsSlice& slice) {
  int size = 1;
  while (size < kSliceIds && slice.first_id + size < slice.vocab_size) size *= 2;
  return size;
}

}  // namespace fd::gpu
