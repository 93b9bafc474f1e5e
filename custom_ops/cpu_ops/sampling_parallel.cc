// SPDX-License-Identifier: Apache-2.0
#include "cpu_ops/sampling_parallel.h"

#include <algorithm>

#include "common/threads.h"
#include "cpu_ops/tuning.h"

namespace fd {
namespace {

constexpr int32_t kMaxParts = 64;

// Divides a row into parts of nearly equal size and calls body(part, blocks) for each, on all free threads. Returns the
// number of parts.
template <class Body>
int32_t for_each_part(int32_t num_ids, const Body& body) {
  const int64_t blocks = num_blocks(num_ids);
  const int threads = num_ids >= kMinParallelIds ? num_free_threads() : 1;
  const int64_t parts = threads > 1 ? std::min(2 * threads, kMaxParts) : 1;
  parallel_for(parts, true, [&](int64_t part) {
    const auto at = [&](int64_t i) { return static_cast<int32_t>(i * blocks / parts); };
    body(part, BlockRange{at(part), at(part + 1)});
  });
  return static_cast<int32_t>(parts);
}

}  // namespace

float parallel_block_maxima(const float* logits, int32_t num_ids, float* block_max) {
  float maxima[kMaxParts];
  const int32_t parts = for_each_part(num_ids, [&](int64_t part, BlockRange blocks) {
    const int32_t first = blocks.begin * kBlock, end = std::min(blocks.end * kBlock, num_ids);
    maxima[part] = sampling_kernels().block_maxima(logits + first, end - first, block_max + blocks.begin);
  });
  float largest = maxima[0];
  for (int32_t part = 1; part < parts; ++part)
    if (largest == largest && !(maxima[part] <= largest)) largest = maxima[part];  // keeps NaN
  return largest;
}

int32_t parallel_gumbel_argmax(const Row& row, Cutoff cutoff, uint64_t seed, uint64_t position) {
  BestId best_of_part[kMaxParts];
  const int32_t parts = for_each_part(row.num_ids, [&](int64_t part, BlockRange blocks) {
    best_of_part[part] = sampling_kernels().gumbel_argmax(row, cutoff, blocks, seed, position);
  });
  BestId best = best_of_part[0];
  for (int32_t part = 1; part < parts; ++part)
    if (best_of_part[part].value > best.value) best = best_of_part[part];
  return best.id;
}

}  // namespace fd
