// SPDX-License-Identifier: Apache-2.0
// Passes over one row of logits, with a table of kernels per instruction-set path. All paths return the same bits.
#pragma once

#include <cstdint>

#include "common/sampling_rules.h"

namespace fd {

constexpr int kBlock = 64;  // ids of a block, which has one entry in Row::block_max

constexpr int32_t num_blocks(int64_t num_ids) { return static_cast<int32_t>((num_ids + kBlock - 1) / kBlock); }

// A row after biases, penalties and masks. Scaled logits are logits / temperature; they are computed when they are
// needed.
struct Row {
  const float* logits;     // [num_ids]
  int32_t num_ids;         // ids from this one on are never allowed
  const float* block_max;  // [ceil(num_ids / kBlock)] largest scaled logit of each block
  float largest;           // of the scaled logits
  float temperature;
};

// Scaled logits up to which masses are summed, in any order.
constexpr int kNumPivots = 2;
struct Pivots {
  float logits[kNumPivots];
};

// The mass of the allowed set, and of those of its ids whose scaled logit is at least each pivot.
struct Masses {
  uint64_t total;
  uint64_t reached[kNumPivots];
};

// Sums of probabilities relative to the largest, for logits above, within and below a range. Each is at least the exact
// sum and at most kMaxOverestimate times that.
constexpr double kMaxOverestimate = 1.07;
constexpr float kMaxApproxLogit = 1024.0f;  // rounding is too coarse for larger scaled logits of either sign
struct ApproxMasses {
  double above, within, below;
};

// Blocks [begin, end) of a row.
struct BlockRange {
  int32_t begin, end;
};

// The best of some ids, the lowest among equals; -inf and -1 if none of them is allowed.
struct BestId {
  float value;
  int32_t id;
};

struct SamplingKernels {
  // Fills block_max with unscaled maxima and returns the largest logit; NaN for a block or row that contains NaN.
  float (*block_maxima)(const float* logits, int32_t num_ids, float* block_max);
  Masses (*masses)(const Row& row, Cutoff cutoff, Pivots pivots);
  // Returns the masses of ids above, within and below [lowest, highest], by logits that are not divided by the
  // temperature.
  ApproxMasses (*approx_masses)(const Row& row, float lowest, float highest);
  // Writes the masses of the ids of these order keys.
  void (*masses_of_keys)(const uint64_t* keys, int64_t count, float largest, uint64_t* masses);
  // Writes the order keys of allowed ids with lowest <= scaled logit < end from every `every`-th block, ids ascending.
  // Returns the number of keys.
  int32_t (*gather_keys)(const Row& row, Cutoff cutoff, float lowest, float end, int32_t every, uint64_t* keys);
  // Returns the best scaled logit + noise of the allowed ids in these blocks.
  BestId (*gumbel_argmax)(const Row& row, Cutoff cutoff, BlockRange blocks, uint64_t seed, uint64_t position);
  // Writes scaled logits to out, -inf for ids that are not allowed; out may be row.logits.
  void (*write_processed)(const Row& row, Cutoff cutoff, float* out);
  // Writes logits to out, -inf for ids whose bit in the mask is 0; out may be logits.
  void (*apply_mask)(const float* logits, const int32_t* mask, int32_t num_ids, float* out);
  // Returns the number of ids before (logit, id) in the order of ids.
  int64_t (*count_before)(const float* logits, int32_t num_ids, float logit, int32_t id);
};

namespace portable {
extern const SamplingKernels kSamplingKernels;
}
namespace avx2 {
extern const SamplingKernels kSamplingKernels;
}
namespace avx512 {
extern const SamplingKernels kSamplingKernels;
}
namespace avx512_bf16 {
extern const SamplingKernels kSamplingKernels;
}

// Returns the table of the path that this process runs.
const SamplingKernels& sampling_kernels();

}  // namespace fd
