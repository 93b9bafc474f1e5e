// SPDX-License-Identifier: Apache-2.0
// Passes over one long row that all threads share. Their results are those of one thread: neither the largest logit nor
// the first of the best ids depends on where a row is cut.
#pragma once

#include "cpu_ops/sampling_kernels.h"

namespace fd {

// In ids read by a greedy row, about 20 us; below it, a second thread does not pay even where it looks on for work.
constexpr int64_t kParallelCost = 1 << 17;

// As SamplingKernels::block_maxima.
float shared_block_maxima(const float* logits, int32_t num_ids, float* block_max);

// Returns argmax(scaled logit + noise) over the survivors, the lowest id of equals; -1 if none survives.
int32_t shared_draw(const Row& row, Cut cut, uint64_t seed, uint64_t position);

}  // namespace fd
