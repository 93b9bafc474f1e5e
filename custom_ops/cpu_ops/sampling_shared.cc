// SPDX-License-Identifier: Apache-2.0
#include "cpu_ops/sampling_shared.h"

#include <algorithm>

#include "common/threads.h"

namespace fd {
namespace {

constexpr int32_t kMostParts = 64;

// Calls body(part, blocks) for parts of a row of nearly equal size, on all threads that are free; returns how many
// parts there are.
template <class Body>
int32_t for_each_part(int32_t num_ids, const Body& body) {
  const int64_t blocks = num_blocks(num_ids);
  const int threads = num_ids >= kParallelCost ? num_free_threads() : 1;
  const int64_t parts = threads > 1 ? std::min(2 * threads, kMostParts) : 1;
  parallel_for(parts, true, [&](int64_t part) {
    const auto at = [&](int64_t i) { return static_cast<int32_t>(i * blocks / parts); };
    body(part, BlockRange{at(part), at(part + 1)});
  });
  return static_cast<int32_t>(parts);
}

}  // namespace

float shared_block_maxima(const float* logits, int32_t num_ids, float* block_max) {
  float maxima[kMostParts];
  const int32_t parts = for_each_part(num_ids, [&](int64_t part, BlockRange blocks) {
    const int32_t first = blocks.begin * kBlock, end = std::min(blocks.end * kBlock, num_ids);
    maxima[part] = sampling_kernels().block_maxima(logits + first, end - first, block_max + blocks.begin);
  });
  float largest = maxima[0];
  for (int32_t part = 1; part < parts; ++part)
    if (largest == largest && !(maxima[part] <= largest)) largest = maxima[part];  // NaN stays
  return largest;
}

int32_t shared_draw(const Row& row, Cut cut, uint64_t seed, uint64_t position) {
  Drawn drawn[kMostParts];
  const int32_t parts = for_each_part(row.num_ids, [&](int64_t part, BlockRange blocks) {
    drawn[part] = sampling_kernels().draw(row, cut, blocks, seed, position);
  });
  Drawn best = drawn[0];
  for (int32_t part = 1; part < parts; ++part)
    if (drawn[part].value > best.value) best = drawn[part];
  return best.id;
}

}  // namespace fd
