// SPDX-License-Identifier: Apache-2.0
// Passes over one long row by all threads. The results are the same as those of one thread: neither the largest logit
// nor the first of the best ids depends on how a row is divided.
#pragma once

#include "cpu_ops/sampling_kernels.h"

namespace fd {

// Does the same as SamplingKernels::block_maxima.
float parallel_block_maxima(const float* logits, int32_t num_ids, float* block_max);

// Returns argmax(scaled logit + noise) over the allowed set, the lowest id among equals; -1 if the set is empty.
int32_t parallel_gumbel_argmax(const Row& row, Cutoff cutoff, uint64_t seed, uint64_t position);

}  // namespace fd
